"""Accuracy, depth and measured time of examples, for any segments and any rule.

The outputs of every exit are recorded once; rules are then replayed on the record, through the same loop. Time is
always measured on the model itself: all that is compared runs in one process and takes turns.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import Split, Task, subset
from mini_ee.lab.data.tokenizer import Encoded, batches
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.recording import Record, exit_scores, plan_rows, predictions, record, summary
from mini_ee.lab.rules import Never, Rule, rule_from_dict
from mini_ee.lab.segments import Segments
from mini_ee.rules import entropy, log_softmax, max_probability

TIMED_ROWS = 256  # rows at most on which time is measured, drawn with a fixed seed

TIMED_REPEATS = 3  # of each batch; the median counts

TURN = 16  # rows on which a run is timed before it is the next one's turn

REST = 0.005  # seconds before a turn, if several engines are timed

OVERTHOUGHT = 10  # rows in the answer of `overthinking`

LOSSES = {"no_loss": 0.0, "one_point": 0.01}  # losses of score against the full model, as in ConsistentEE's Table 3

SEED_GROUP_KEYS = ("method", "base", "exits", "pool", "head", "task", "max_length", "prompt")
"""Keys of config.json that are equal in runs that differ by their seed alone."""

RANGES = {"low_range": 1 / 3, "high_range": 2 / 3}  # of the full model's FLOPs, the two ranges of LoRAExit's Table 7


class Trained(Protocol):
    """A Run, or the Runtime of an exported folder."""

    @property
    def config(self) -> dict: ...
    @property
    def exits(self) -> tuple[int, ...]: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def weight_bytes(self) -> int: ...
    def encode(self, texts: Sequence[tuple[str, ...]]) -> Encoded: ...
    def segments(self) -> Segments: ...
    def whole_model(self) -> Segments: ...


def by_exit(recorded: Record, exit_index: np.ndarray, labels: np.ndarray) -> list[dict]:
    """For every exit: mean cross-entropy in nats and accuracy of all rows, and of the rows that exit there, or None.

    exit_index, labels: (N,) whole numbers. Source: ConsistentEE, Fig. 2.
    """
    rows = np.arange(len(labels))
    exits = []
    for k, layer in enumerate(recorded.segments.exits):
        loss, right = -log_softmax(recorded.logits[:, k])[rows, labels], recorded.logits[:, k].argmax(axis=1) == labels
        here = exit_index == k
        of_all = {"layer": layer, "left": int(here.sum()), "loss": float(loss.mean()), "accuracy": float(right.mean())}
        of_exited = {
            "left_loss": float(loss[here].mean()) if here.any() else None,
            "left_accuracy": float(right[here].mean()) if here.any() else None,
        }
        exits.append({**of_all, **of_exited})
    return exits


def curve(recorded: Record, rules: list[Rule], task: Task, labels: np.ndarray) -> list[dict]:
    """Score, depth and FLOPs under each rule, ordered by decreasing depth."""
    points = [{"rule": rule.to_dict(), **summary(recorded.replay(rule), recorded, task, labels)} for rule in rules]
    return sorted(points, key=lambda point: -point["mean_layers"])


def is_full(point: dict) -> bool:
    """Whether no row exits early. Then the model without exits can run, and no stream of an earlier exit."""
    return point["rule"]["name"] == "never" and not point["layers_saved"]


def replayed(point: dict, recorded: Record, task: Task, labels: np.ndarray) -> dict:
    """The point of a curve for the same rule on other rows."""
    result = recorded.replay(rule_from_dict(point["rule"]))
    other = {"rule": point["rule"]} | summary(result, recorded, task, labels)
    return other | ({"flops_ratio": 1.0} if is_full(other) else {})


def fewest_flops(point: dict) -> float:
    """A score for `choose`, which is highest for the point with the fewest FLOPs."""
    return -point["flops_ratio"]


def timed_batches(encoded: Encoded, batch_size: int) -> list[np.ndarray]:
    """Batches of row indices to measure time on, by length of the rows: of all rows, or of TIMED_ROWS at random."""
    order = list(batches(encoded, batch_size))
    most = max(1, TIMED_ROWS // batch_size)
    if len(order) <= most:
        return order
    chosen = np.random.default_rng(0).permutation(len(order))[:most]
    return [order[i] for i in sorted(chosen)]


def measure_seconds(
    runs: list,
    order: list[np.ndarray],
    repeats: int = TIMED_REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Seconds of each run for all batches: (len(runs),), the sum over batches of the median over repeats.

    runs: (segments, rule, encoded) each. The runs take turns, so a drift of the machine's speed affects all alike. A
    turn is one batch, or as many small batches as have TURN rows together: then weights are in the processor's cache,
    as if the model were served alone. If there are several engines, each turn begins with a rest of REST seconds,
    because the threads of the engine before may still be spinning. clock: time.process_time leaves other processes out.
    """
    rest = REST if len({segments.engine for segments, _, _ in runs}) > 1 else 0.0
    for segments, rule, encoded in runs:
        early_exit(segments, rule, encoded.batch(order[0]))  # warm
    seconds = np.zeros((repeats, len(runs), len(order)))
    size = max(1, TURN // len(order[0]))
    for first in tqdm(range(0, len(order), size), desc="timing", unit="turn", delay=2):
        turn = range(len(order))[first : first + size]
        for repeat in range(repeats):
            for number, (segments, rule, encoded) in enumerate(runs):
                inputs = [encoded.batch(order[batch]) for batch in turn]
                time.sleep(rest)
                for batch, rows in zip(turn, inputs):
                    begin = clock()
                    early_exit(segments, rule, rows)
                    seconds[repeat, number, batch] = clock() - begin
    return np.median(seconds, axis=0).sum(axis=1)


def rows_of(task: Task, split: str | None, max_rows: int | None, seed: int) -> tuple[str, Split]:
    """The name of the reported split, and its rows, or max_rows of them drawn with the seed.

    Raises WrongArguments if the split does not exist or has no labels.
    """
    split = split or task.default_split
    rows = task.split(split)
    if rows.labels is None:
        raise WrongArguments(f"{task.name}: the split {split} has no labels; choose another with --split")
    return split, rows if max_rows is None else subset(rows, max_rows, seed)


def read_rows(trained: Trained, encoded: Encoded, labels: np.ndarray, batch_size: int) -> Record:
    """All exits of a Run or a Runtime on rows with labels, and the cost of its model without early exits."""
    return record(trained.segments(), encoded, batch_size, "reading", trained.whole_model())._replace(labels=labels)


def evaluate(
    trained: Trained,
    rule: Rule,
    recorded: Record,
    task: Task,
    encoded: Encoded,
    batch_size: int,
    rules: Sequence[Rule] | None = None,
) -> dict:
    """Accuracy, depth and measured speed-up of one rule on some rows, as JSON.

    The speed-up is measured against trained.whole_model(). recorded: from `read_rows`. If `rules` are given, the key
    `rows` contains the same figures for each of them.
    """
    segments, whole, labels = trained.segments(), trained.whole_model(), recorded.labels
    assert labels is not None
    main = recorded.replay(plan_rows(rule, encoded, batch_size) if rule.plans_from_texts else rule)
    order = timed_batches(encoded, batch_size)
    runs = [(whole, Never(), encoded), *((segments, timed_rule, encoded) for timed_rule in (rule, *(rules or ())))]
    repeats = TIMED_REPEATS if rules is None else 1
    full_seconds, seconds, *sweep_seconds = measure_seconds(runs, order, repeats).tolist()
    answer = {"task": task.name, "engine": segments.engine} | summary(main, recorded, task, labels)
    answer |= {
        "exits": list(segments.exits),
        "per_exit_accuracy": exit_scores(recorded, task, labels, "score" if task.regression else "accuracy"),
        "per_exit_score": (scores := exit_scores(recorded, task, labels)),
        "full_score": scores[-1],
        "seconds": seconds,
        "full_seconds": full_seconds,
        "speedup": full_seconds / seconds,
        "timed_rows": sum(map(len, order)),
        "batch_size": batch_size,
        "rows_truncated": encoded.truncated,
        "rule": rule.to_dict(),
        "always": _constant_label(predictions(main.logits, task), task),
    }
    if segments.tokens_exit and segments.engine == "torch":
        full = segments.full()  # type: ignore[attr-defined]  # of segments in which tokens exit
        answer["all_tokens_score"] = exit_scores(record(full, encoded, batch_size), task, labels)[-1]
    if rules is not None:
        answer["rows"] = [
            {
                "rule": swept.to_dict(),
                **summary(recorded.replay(swept), recorded, task, labels),
                "seconds": rule_seconds,
                "speedup": full_seconds / rule_seconds,
            }
            for swept, rule_seconds in zip(rules, sweep_seconds)
        ]
    return answer


def _constant_label(predicted: np.ndarray, task: Task) -> str | None:
    """The label that is predicted for all rows, if it is the same."""
    named = not task.regression and not task.multi_label and not task.token_kind
    return task.label_names[int(predicted[0])] if named and (predicted == predicted[0]).all() else None


def over_seeds(rows: list[dict], configs: list[dict]) -> list[dict]:
    """Groups of runs that differ by their seed alone: mean, least and most of their figures.

    rows: the rows of `compare`. configs: config.json of each run. Exported folders, which have no seed, and runs whose
    rule was written by `mini-ee calibrate` are in no group.
    """
    groups: dict[str, dict[int, dict]] = {}
    for row, config in zip(rows, configs):
        if "seed" in config and "exit_counts" not in config:
            same = {name: config.get(name) for name in SEED_GROUP_KEYS}
            same["task"] = {name: value for name, value in (same["task"] or {}).items() if name != "folder"}
            # With few-shot fine-tuning every seed has another backbone: then the original one is compared.
            original = config["training"].get("from", config["backbone"])
            same |= {"training": config["training"] | {"seed": None}, "backbone": original["sha256"]}
            same |= {"settings": config.get("settings"), "schedule": row.get("schedule")}
            group = groups.setdefault(json.dumps(same, sort_keys=True), {})
            group.setdefault(config["seed"], row | {"seed": config["seed"]})
    return [_mean_of_group([*group.values()]) for group in groups.values() if len(group) > 1]


def _mean_of_group(rows: list[dict]) -> dict:
    def spread(values: list[float]) -> dict:
        return {"mean": float(np.mean(values)), "least": min(values), "most": max(values)}

    answer: dict[str, Any] = {
        "method": rows[0]["method"],
        "how": rows[0]["how"],
        "runs": [row["run"] for row in rows],
        "seeds": [row["seed"] for row in rows],
    }
    for name in ("score", "full_score", "layers_saved", "speedup"):
        answer[name] = spread([row[name] for row in rows])
    answer["per_exit_score"] = [spread(list(scores)) for scores in zip(*(row["per_exit_score"] for row in rows))]
    for name in (*LOSSES, *RANGES):
        if all(row.get(name) for row in rows):
            figures = "score", "layers_saved", "layer_passes", "flops_ratio", "seconds", "speedup"
            answer[name] = {key: spread([row[name][key] for row in rows]) for key in figures}
    return answer


def overthinking(recorded: Record, task: Task, rows: Split) -> dict:
    """Rows for which an exit is right and a later exit is wrong (LoRAExit, Table 11), as JSON.

    share: of all rows. share_at_the_end: of all rows, those for which the last exit is the wrong one (Kaya et al.
    2019). rows: at most OVERTHOUGHT of them, with label, largest probability and entropy in nats of every exit.
    Raises ValueError for regression.
    """
    if task.regression:
        raise ValueError(f"{task.name} is a regression task: no exit is right or wrong; give a task with classes")
    labels, names = rows.labels, task.label_names
    assert labels is not None
    predicted = recorded.logits.argmax(axis=2)
    largest = np.stack([max_probability(logits) for logits in recorded.logits])
    right = predicted == labels[:, None]
    entropies = np.stack([-entropy(logits) for logits in recorded.logits])
    was_right = np.maximum.accumulate(right, axis=1)
    overthought = np.flatnonzero((was_right & ~right).any(axis=1))
    return {
        "share": len(overthought) / len(labels),
        "share_at_the_end": float((right.any(axis=1) & ~right[:, -1]).mean()),
        "rows": [
            {
                "text": " | ".join(rows.texts[row]),
                "label": names[labels[row]],
                "exits": [
                    {"layer": layer, "label": names[label], "confidence": float(confidence), "entropy": float(nats)}
                    for layer, label, confidence, nats in zip(
                        recorded.segments.exits, predicted[row], largest[row], entropies[row]
                    )
                ],
            }
            for row in overthought[:OVERTHOUGHT]
        ],
    }
