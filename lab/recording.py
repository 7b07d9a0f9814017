"""Record all exits of a data set once; then any number of rules can be evaluated without the model. No torch here.

read_every_exit, read_and_measure   run one batch through all exits
Recorded                            segments that return the recorded outputs
record -> Record                    all exits of a data set, batch by batch, and the cost of the full model
exited_rows                         what a rule returns, without a record
exit_scores, summary                the score of every exit; score, layers and FLOPs under a rule
"""

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mini_ee.lab.confidence import OF_LOGITS
from mini_ee.lab.data.tokenizer import Encoded, batches
from mini_ee.lab.early_exit import ExitResult, early_exit, run_segments
from mini_ee.lab.rules import Measured, Planned, Rule
from mini_ee.lab.segments import BatchResult, Segments, check_finite
from mini_ee.lab.token_tasks import LABELS, WEAKEST, numbered

if TYPE_CHECKING:
    from mini_ee.lab.data.tasks import Task


def read_every_exit(segments: Segments, inputs: Sized) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All exits of N rows: logits (N, K, C); FLOPs (N, K, 2); the policy's exit_logits (N, K - 1), or None.

    FLOPs of exit k: of the segment that ends there, and of its head.
    """
    logits, flops, measures = read_and_measure(segments, inputs)
    return logits, flops, measures.get("exit_logit")


def read_and_measure(segments: Segments, inputs: Sized) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Logits and FLOPs as above, and the `measures` of Recorded: name -> values (N, K - 1 or K).

    Of a token_task, the logits are the numbers of its decisions, (N, K, 1) int64.
    """
    logits, flops = [], np.zeros((len(inputs), len(segments.exits), 2))
    measures: dict[str, list[np.ndarray]] = {}
    with segments.running():
        state = segments.start(inputs)
        for k in range(len(segments.exits)):
            state = segments.advance(k, state)
            read = segments.read(k, state)
            if segments.token_task is not None:
                counted = segments.counted(state)
                if k < len(segments.exits) - 1:
                    measures.setdefault(WEAKEST, []).append(segments.token_task.weakest(check_finite(read), counted))
                read = segments.token_task.numbers(read, counted)[:, None]
            logits.append(read)
            if segments.has_policy and k < len(segments.exits) - 1:
                measures.setdefault("exit_logit", []).append(segments.exit_logit(k, state))
            if segments.tokens_exit:
                measures.setdefault("token_cost", []).append(segments.token_cost(k, state))
            flops[:, k, 0], flops[:, k, 1] = segments.flops(k, inputs)
    return np.stack(logits, axis=1), flops, {name: np.stack(values, axis=1) for name, values in measures.items()}


def _flops(segments: Segments, inputs: Sized) -> np.ndarray:
    """(N, K, 2) FLOPs, as in `read_every_exit`."""
    figures = [
        np.broadcast_arrays(*segments.flops(k, inputs), np.zeros(len(inputs)))[:2] for k in range(len(segments.exits))
    ]
    return np.moveaxis(np.array(figures), 2, 0)


class Recorded(Segments):
    """Segments that return the recorded outputs of N rows (examples or tokens): a sweep of rules runs the model once.

    logits (N, K, C), or any C numbers that are wanted of the exit where a row stops. measures: what is not computed
    from the logits, by name, (N, K - 1) or (N, K): exit_logit, saturation, confidence measures, a prediction; and
    token_cost (N, K, 2). flops (N, K, 2): of each segment and its head. layer_passes (K,): as of Segments. state_flops:
    those of measures, by name, (K,) each; without the measures with which a head is computed.
    """

    def __init__(
        self,
        exits: tuple[int, ...],
        logits: np.ndarray,
        flops: np.ndarray,
        layer_passes: list[int],
        measures: dict[str, np.ndarray] | None = None,
        state_flops: dict[str, list[float]] | None = None,
    ):
        self.exits, self.logits, self.measures = exits, logits, measures or {}
        self._flops, self._layer_passes, self._state_flops = flops, layer_passes, state_flops or {}
        self.tokens_exit = "token_cost" in self.measures

    def take(self, rows: np.ndarray) -> "Recorded":
        """Some of the rows: an index or a mask (N,)."""
        measures = {name: values[rows] for name, values in self.measures.items()}
        flops, passes = self._flops[rows], self._layer_passes
        return Recorded(self.exits, self.logits[rows], flops, passes, measures, self._state_flops)

    def at(self, columns: list[int]) -> "Recorded":
        """Some of the exits, the last among them. Raises ValueError if there are measures of more than one exit."""
        if self.measures.keys() - {WEAKEST}:
            raise ValueError("expected exits whose rules read logits alone")
        measures = {name: values[:, columns[:-1]] for name, values in self.measures.items()}
        starts = [0, *(column + 1 for column in columns[:-1])]
        layers = np.add.reduceat(self._flops[:, :, 0], starts, axis=1)
        flops = np.stack((layers, self._flops[:, columns, 1]), axis=2)
        passes = np.add.reduceat(self._layer_passes, starts).tolist()
        state_flops = {name: [of[k] for k in columns] for name, of in self._state_flops.items()}
        return Recorded(
            tuple(self.exits[k] for k in columns), self.logits[:, columns], flops, passes, measures, state_flops
        )

    @property
    def costs(self) -> tuple[np.ndarray, list[int], dict[str, list[float]]]:
        """flops (N, K, 2), layer_passes (K,) and state_flops, as they were given."""
        return self._flops, self._layer_passes, self._state_flops

    @property
    def exit_logits(self) -> np.ndarray | None:
        """(N, K - 1), the outputs of the policy; None if the model has no policy."""
        return self.measures.get("exit_logit")

    def start(self, inputs: Sized) -> "RecordedRows":
        """inputs: any object whose length is the number of recorded rows. Raises ValueError for another length."""
        if len(inputs) != len(self.logits):
            raise ValueError(f"expected {len(self.logits)} rows, as were recorded, got {len(inputs)}")
        return RecordedRows(np.arange(len(inputs)))

    def advance(self, k: int, state: "RecordedRows") -> "RecordedRows":
        return state

    def run_batch(self, rule: Rule, inputs: Sized) -> BatchResult | None:
        """The loop. A rule that reads logits gets a Measured, if there are measures of logits."""
        if self.needed(rule) == rule.needs:
            return None
        batch = run_segments(self, _OfMeasures(rule), inputs)
        return batch._replace(needs=batch.needs and rule.needs)

    def read(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self.logits[state.rows, k]

    def needed(self, rule: Rule) -> str | None:
        """The method here that returns what the rule reads."""
        of_logits = self.measures.keys() & {*OF_LOGITS, "prediction"}
        return "measured" if rule.needs == "logits" and of_logits else rule.needs

    def measured(self, k: int, state: "RecordedRows") -> Measured:
        """What rules read of exit k, before the last, in place of logits."""
        return Measured(self.read(k, state), {name: values[state.rows, k] for name, values in self.measures.items()})

    def exit_logit(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self._measure("exit_logit", k, state)

    def saturation(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self._measure("saturation", k, state)

    def short_list(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self._measure("short_list", k, state)

    def token_cost(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self._measure("token_cost", k, state)

    def weakest_token(self, k: int, state: "RecordedRows") -> np.ndarray:
        return self._measure(WEAKEST, k, state)

    def _measure(self, name: str, k: int, state: "RecordedRows") -> np.ndarray:
        if name not in self.measures:
            return getattr(super(), name)(k, state)
        return self.measures[name][state.rows, k]

    def state_flops(self, k: int, needs: str) -> float | None:
        return self._state_flops[needs][k] if needs in self._state_flops else None

    def layer_passes(self, k: int) -> int:
        return self._layer_passes[k]

    def flops(self, k: int, inputs: Sized) -> tuple[np.ndarray, ...]:
        return tuple(self._flops[:, k].T)


class _OfMeasures(Rule):
    """A rule that reads logits, on a record that has measures of them."""

    needs = "measured"

    def __init__(self, rule: Rule):
        self.rule = rule

    def plan(self, inputs: Sized) -> np.ndarray | None:
        return self.rule.plan(inputs)

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        return self.rule.stop(k, read, memory)


class RecordedRows(NamedTuple):
    """The state of recorded segments: the numbers of the rows that have not stopped."""

    rows: np.ndarray

    def keep(self, rows: np.ndarray) -> "RecordedRows":
        return RecordedRows(self.rows[rows])


class Record(NamedTuple):
    """All exits of N rows (examples or tokens), and the cost of the full model."""

    segments: Recorded
    logits: np.ndarray  # (N, K, C); for recorded texts see exits/token_exits.py, record_texts
    full: np.ndarray | float  # (N,), FLOPs of the full model: all layers, last head only; a number: equal for all rows
    groups: np.ndarray | None = None  # (N,), the text of each token; None: every row is a sample of its own
    labels: np.ndarray | None = None  # (N,), if rules may be fitted to labels

    @property
    def full_flops(self) -> float:
        """FLOPs of the full model, the mean over the rows."""
        return float(np.mean(self.full))

    def take(self, rows: np.ndarray) -> "Record":
        """Some of the rows: an index or a mask (N,)."""
        some = self.segments.take(rows)
        full = self.full[rows] if isinstance(self.full, np.ndarray) else self.full
        groups, labels = (array if array is None else array[rows] for array in (self.groups, self.labels))
        return Record(some, some.logits, full, groups, labels)

    def at(self, columns: list[int]) -> "Record":
        """Some of the exits, the last among them, as if the model had no others."""
        some = self.segments.at(columns)
        return self._replace(segments=some, logits=some.logits)

    @property
    def predictions(self) -> np.ndarray:
        """(N, K), the class or token that each exit predicts; for regression the number."""
        stored = self.segments.measures.get("prediction")
        if stored is not None:
            return stored
        return predictions(self.logits)

    def confidence(self, measure: str) -> np.ndarray:
        """(N, K - 1), a confidence measure at every exit but the last."""
        stored = self.segments.measures.get(measure)
        if stored is not None:
            return stored
        before_last = range(self.logits.shape[1] - 1)
        return np.stack([OF_LOGITS[measure][0](self.logits[:, k]) for k in before_last], axis=1)

    def replay(self, rule: Rule) -> ExitResult:
        """The result of a rule on the record. Its cost has layers and FLOPs; its seconds are meaningless."""
        return early_exit(self.segments, rule, range(len(self.logits)))


def record(
    segments: Segments,
    encoded: Encoded,
    batch_size: int,
    progress: str | None = None,
    whole: Segments | None = None,
    known: np.ndarray | None = None,
) -> Record:
    """Run all rows through all exits and return the logits of each exit. progress: label of a progress bar.

    whole: the model without exits, whose FLOPs are the reference; None: the last of these segments has the same.
    known: the logits (N, K, C), if they are known; then nothing runs.
    """
    from mini_ee.lab.data.progress import tqdm  # imported here because no single text needs it

    whole, order = whole or segments, list(batches(encoded, batch_size))
    parts, full = [], []
    for rows in tqdm(order, desc=progress, unit="batch", delay=2, disable=progress is None):
        inputs = encoded.batch(rows)
        parts.append(
            read_and_measure(segments, inputs) if known is None else (known[rows], _flops(segments, inputs), {})
        )
        costs = [whole.flops(k, inputs) for k in range(len(whole.exits))]
        full.append(np.full(len(rows), sum(advance for advance, _ in costs) + costs[-1][1]))
    # The batches hold the rows by length. Row i of the data set is row back[i] of the concatenated batches: the argsort
    # of a permutation is its inverse.
    back = np.argsort(np.concatenate(order))
    *both, measured = zip(*parts)
    logits, flops = (np.concatenate(part)[back] for part in both)
    measures = {
        name: np.concatenate([batch_measures[name] for batch_measures in measured])[back] for name in measured[0]
    }
    passes = [segments.layer_passes(k) for k in range(len(segments.exits))]
    decides = [of for k in range(len(segments.exits)) if (of := segments.state_flops(k, "exit_logit")) is not None]
    recorded = Recorded(segments.exits, logits, flops, passes, measures, {"exit_logit": decides} if decides else None)
    return Record(recorded, logits, np.concatenate(full)[back])


def exited_rows(
    segments: Segments, rule: Rule, encoded: Encoded, batch_size: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """What N rows get at their exits, finite numbers (N, size) float32, and the layers that each has run, (N,)."""
    logits, layers = np.empty((len(encoded), size), np.float32), np.empty(len(encoded), np.int64)
    for rows in batches(encoded, batch_size):
        result = early_exit(segments, rule, encoded.batch(rows))
        logits[rows], layers[rows] = check_finite(result.logits), result.layers_run
    return logits, layers


def plan_rows(rule: Rule, encoded: Encoded, batch_size: int) -> Planned:
    """The plan of all rows by a rule that plans from texts. A record has no texts; it is replayed under this plan."""
    exit_index, flops = np.empty(len(encoded), np.int64), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        plan = rule.plan(inputs)
        assert plan is not None
        exit_index[rows] = plan
        flops += len(rows) * rule.plan_flops(inputs)
    return Planned(tuple(exit_index), flops / len(encoded))


def predictions(logits: np.ndarray, task: "Task | None" = None) -> np.ndarray:
    """(..., C) logits -> (...): the class index, or for regression (C = 1) the number.

    If the task has several labels at once, the number of the set of those above .5: the sum of 2^i over its labels i.
    Of tokens, the number of all decisions; of logits (..., S, C) those of the S tokens.
    """
    if task is not None and task.token_kind and logits.dtype.kind == "f":
        chosen = logits.argmax(axis=-1 if task.token_kind == LABELS else -2)
        return numbered(chosen.reshape(-1, chosen.shape[-1])).reshape(chosen.shape[:-1])
    if task is not None and task.multi_label:
        return (logits > 0) @ (1 << np.arange(logits.shape[-1]))
    return logits[..., 0] if logits.shape[-1] == 1 else logits.argmax(axis=-1)


def exit_scores(recorded: Record, task: "Task", labels: np.ndarray, metric: str = "score") -> list[float]:
    """A metric of the task at every exit, over all rows."""
    return [task.score(predicted, labels)[metric] for predicted in predictions(recorded.logits, task).T]


def summary(result: ExitResult, recorded: Record, task: "Task", labels: np.ndarray) -> dict:
    """Score, depth and FLOPs of a result, under the keys of the JSON output."""
    num_layers = recorded.segments.exits[-1]
    mean_layers = float(result.cost.depth.mean())
    return task.score(predictions(result.logits, task), labels) | {
        "mean_layers": mean_layers,
        "layers_saved": 1 - mean_layers / num_layers,
        "layer_passes": float(result.cost.layer_passes.mean()),
        "flops_ratio": float(result.cost.flops.mean()) / recorded.full_flops,
        "exit_counts": np.bincount(result.exit_index, minlength=len(recorded.segments.exits)).tolist(),
    }
