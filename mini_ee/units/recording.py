"""What every exit says of some rows, recorded once, so that many rules can be replayed on it."""

from typing import NamedTuple

import numpy as np

from mini_ee.confidence import MEASURES
from mini_ee.data.progress import tqdm
from mini_ee.data.tasks import Task
from mini_ee.data.tokens import Encoded, batches
from mini_ee.early_exit import ExitResult, Recorded, Segments, early_exit, read_and_measure
from mini_ee.rules import Planned, Rule


class Record(NamedTuple):
    """What every exit says of N rows, and what the full model costs."""

    segments: Recorded
    logits: np.ndarray  # (N, K, C); of recorded texts see units.tokens.record_texts
    full_flops: float  # mean over units: all layers, last head only
    groups: np.ndarray | None = None  # (N,), which text a token belongs to; None: each row is drawn on its own
    labels: np.ndarray | None = None  # (N,) of rows, where rules may be fitted to them

    def take(self, units: np.ndarray) -> "Record":
        """Some of the units: an index or a mask (N,)."""
        some = self.segments.take(units)
        groups, labels = (each if each is None else each[units] for each in (self.groups, self.labels))
        return Record(some, some.logits, self.full_flops, groups, labels)

    @property
    def predictions(self) -> np.ndarray:
        """(N, K), the class or token that each exit says; of a regression its number."""
        found = self.segments.measures.get("prediction")
        if found is not None:
            return found
        return self.logits[:, :, 0] if self.logits.shape[2] == 1 else self.logits.argmax(axis=2)

    def confidence(self, measure: str) -> np.ndarray:
        """(N, K - 1), a measure at every exit but the last."""
        found = self.segments.measures.get(measure)
        if found is not None:
            return found
        before_last = range(self.logits.shape[1] - 1)
        return np.stack([MEASURES[measure][0](self.logits[:, k]) for k in before_last], axis=1)

    def replay(self, rule: Rule) -> ExitResult:
        """The loop on the record. Its cost holds layers and operations; its seconds mean nothing."""
        return early_exit(self.segments, rule, range(len(self.logits)))


def record(
    segments: Segments,
    encoded: Encoded,
    batch_size: int,
    progress: str | None = None,
    whole: Segments | None = None,
) -> Record:
    """Read every exit for every row. `progress` names the bar that is shown where this takes long.

    whole: what the model costs without early exits, where it is not these segments run to the end.
    """
    whole, order = whole or segments, list(batches(encoded, batch_size))
    parts, full = [], []
    for rows in tqdm(order, desc=progress, unit="batch", delay=2, disable=progress is None):
        inputs = encoded.batch(rows)
        parts.append(read_and_measure(segments, inputs))
        costs = [whole.flops(k, inputs) for k in range(len(whole.exits))]
        full.append(len(rows) * (sum(advance for advance, _ in costs) + costs[-1][1]))
    back = np.argsort(np.concatenate(order))
    *both, measured = zip(*parts)
    logits, flops = (np.concatenate(part)[back] for part in both)
    measures = {name: np.concatenate([each[name] for each in measured])[back] for name in measured[0]}
    passes = [segments.layer_passes(k) for k in range(len(segments.exits))]
    alone = type(segments).read_state is not Segments.read_state
    state_flops = [segments.state_flops(k) for k in range(len(segments.exits))] if alone else None
    recorded = Recorded(segments.exits, logits, flops, passes, measures, state_flops)
    return Record(recorded, logits, sum(full) / len(encoded))


def plan_rows(rule: Rule, encoded: Encoded, batch_size: int) -> Planned:
    """What a rule that looks at the rows plans for all of them: a record, which has no rows, is replayed under that."""
    exit_index, flops = np.empty(len(encoded), np.int64), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        exit_index[rows] = rule.plan(inputs)
        flops += len(rows) * rule.plan_flops(inputs)
    return Planned(exit_index, flops / len(encoded))


def predictions(logits: np.ndarray) -> np.ndarray:
    """(N, C) logits -> (N,): the class index, or the value itself for regression (C = 1)."""
    return logits[:, 0] if logits.shape[1] == 1 else logits.argmax(axis=1)


def exit_scores(recorded: Record, task: Task, labels: np.ndarray, metric: str = "score") -> list[float]:
    """One of the task's metrics at every exit, over all rows."""
    return [task.score(said, labels)[metric] for said in recorded.predictions.T]


def summary(result: ExitResult, recorded: Record, task: Task, labels: np.ndarray) -> dict:
    """Score, depth and operations of one result, under the keys of the JSON answers."""
    num_layers = recorded.segments.exits[-1]
    mean_layers = float(result.cost.depth.mean())
    return task.score(predictions(result.logits), labels) | {
        "mean_layers": mean_layers,
        "layers_saved": 1 - mean_layers / num_layers,
        "layer_passes": float(result.cost.layer_passes.mean()),
        "flops_ratio": float(result.cost.flops.mean()) / recorded.full_flops,
        "exit_counts": np.bincount(result.exit_index, minlength=len(recorded.segments.exits)).tolist(),
    }
