"""Accuracy against layers and against measured time, for any segments and any rule.

What a model says at each exit is recorded once; rules are then replayed on the record, through the same loop. Time is
always measured on the model itself, the compared things in turns of some rows, in one process.
"""

import json
import time
from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

from mini_ee.confidence import entropy, log_softmax, max_probability
from mini_ee.data.progress import tqdm
from mini_ee.data.tasks import Split, Task, subset
from mini_ee.data.tokenizer import Encoded, batches
from mini_ee.early_exit import early_exit
from mini_ee.recording import Record, exit_scores, plan_rows, predictions, record, summary
from mini_ee.rules import NeverExit, Rule, rule_from_dict

TIMED_ROWS = 256  # time is measured on this many rows at most, drawn with a seed

TIMED_REPEATS = 3  # of each batch; the median counts

TURN = 16  # rows that a run is timed on before the next one's turn

REST = 0.005  # seconds

OVERTHOUGHT = 10  # rows that are shown

LOSSES = {"no_loss": 0.0, "one_point": 0.01}  # of the full model's score, as ConsistentEE's Table 3 has them

SEED_GROUP_KEYS = ("method", "base", "exits", "pool", "head", "task", "max_length", "prompt")
"""Keys of config.json that are equal in runs that differ by their seed alone."""

RANGES = {"low_range": 1 / 3, "high_range": 2 / 3}  # of the full model's operations; LoRAExit, Table 7, has two


def by_exit(recorded: Record, exit_index: np.ndarray, labels: np.ndarray) -> list[dict]:
    """Of every exit: mean cross-entropy in nats and accuracy of all rows, and of those that exited there, or None.

    exit_index, labels: (N,) whole numbers. ConsistentEE, Fig. 2.
    """
    rows = np.arange(len(labels))
    lines = []
    for k, layer in enumerate(recorded.segments.exits):
        loss, right = -log_softmax(recorded.logits[:, k])[rows, labels], recorded.logits[:, k].argmax(axis=1) == labels
        here = exit_index == k
        some = (float(loss[here].mean()), float(right[here].mean())) if here.any() else (None, None)
        about = {"layer": layer, "left": int(here.sum()), "loss": float(loss.mean()), "accuracy": float(right.mean())}
        lines.append(about | dict(zip(("left_loss", "left_accuracy"), some)))
    return lines


def curve(recorded: Record, rules: list[Rule], task: Task, labels: np.ndarray) -> list[dict]:
    """Score, depth and operations under each rule, from many layers to few."""
    points = [{"rule": rule.to_dict(), **summary(recorded.replay(rule), recorded, task, labels)} for rule in rules]
    return sorted(points, key=lambda point: -point["mean_layers"])


def is_full(point: dict) -> bool:
    """Whether nobody leaves: then the model without exits runs, and no stream of an earlier exit."""
    return point["rule"]["name"] == "never" and not point["layers_saved"]


def replayed(point: dict, recorded: Record, task: Task, labels: np.ndarray) -> dict:
    """What the rule of a curve's point makes of other rows."""
    result = recorded.replay(rule_from_dict(point["rule"]))
    found = {"rule": point["rule"]} | summary(result, recorded, task, labels)
    return found | ({"flops_ratio": 1.0} if is_full(found) else {})


def fewest_flops(point: dict) -> float:
    """The score by which `choose` takes the point that costs the fewest FLOPs."""
    return -point["flops_ratio"]


def timed_batches(encoded: Encoded, batch_size: int) -> list[np.ndarray]:
    """Batches of row indices to measure time on: all rows, or TIMED_ROWS of them, by length."""
    order = list(batches(encoded, batch_size))
    most = max(1, TIMED_ROWS // batch_size)
    if len(order) <= most:
        return order
    chosen = np.random.default_rng(0).permutation(len(order))[:most]
    return [order[i] for i in sorted(chosen)]


def measure_seconds(runs: list, order: list[np.ndarray], repeats: int = TIMED_REPEATS) -> np.ndarray:
    """Seconds that each run takes over all batches: (len(runs),), the sum over batches of the median over repeats.

    runs: (segments, rule, encoded) each. All runs take turns, so that a drift of the machine hits all. A turn is a
    batch, or as many as TURN rows hold: small ones find their weights in the caches, as where a model serves alone.
    Where they are of several engines, each is given a rest first: the threads of the one before may still be spinning.
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
                inputs = [encoded.batch(order[each]) for each in turn]
                time.sleep(rest)
                for each, rows in zip(turn, inputs):
                    begin = time.perf_counter()
                    early_exit(segments, rule, rows)
                    seconds[repeat, number, each] = time.perf_counter() - begin
    return np.median(seconds, axis=0).sum(axis=1)


def rows_of(task: Task, split: str | None, max_rows: int | None, seed: int) -> tuple[str, Split]:
    """The name of the split that is reported, and its rows, or some of them drawn with the seed.

    Raises ValueError where the split has no labels.
    """
    split = split or task.default_split
    rows = task.split(split)
    if rows.labels is None:
        raise ValueError(f"{task.name}: the split {split} has no labels; choose another with --split")
    return split, rows if max_rows is None else subset(rows, max_rows, seed)


def read_rows(one, encoded: Encoded, labels: np.ndarray, batch_size: int) -> Record:
    """What every exit of a Run or a Runtime says of rows with labels, and what its model costs without early exits."""
    return record(one.segments(), encoded, batch_size, "reading", one.whole_model())._replace(labels=labels)


def evaluate(
    one,
    rule: Rule,
    recorded: Record,
    task: Task,
    encoded: Encoded,
    batch_size: int,
    rules: Sequence[Rule] | None = None,
) -> dict:
    """Accuracy, layers and measured speed-up of one rule on some rows.

    one: a Run or a Runtime, which gives `segments` and, for NeverExit, the `whole_model` that the speed-up is measured
    against. recorded: as `read_rows` gives it. With `rules` also `rows`: the same of a curve of these.
    """
    segments, whole, labels = one.segments(), one.whole_model(), recorded.labels
    main = recorded.replay(plan_rows(rule, encoded, batch_size) if rule.plans_from_texts else rule)
    order = timed_batches(encoded, batch_size)
    runs = [(whole, NeverExit(), encoded), *((segments, each, encoded) for each in (rule, *(rules or ())))]
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
        "always": _one_answer(predictions(main.logits), task),
    }
    if segments.tokens_exit and segments.engine == "torch":
        answer["all_tokens_score"] = exit_scores(record(segments.full(), encoded, batch_size), task, labels)[-1]
    if rules is not None:
        answer["rows"] = [
            {
                "rule": each.to_dict(),
                **summary(recorded.replay(each), recorded, task, labels),
                "seconds": each_seconds,
                "speedup": full_seconds / each_seconds,
            }
            for each, each_seconds in zip(rules, sweep_seconds)
        ]
    return answer


def _one_answer(predicted: np.ndarray, task: Task) -> str | None:
    """The label that all rows are given, where it is one."""
    return task.label_names[int(predicted[0])] if not task.regression and (predicted == predicted[0]).all() else None


def over_seeds(rows: list[dict], configs: list[dict]) -> list[dict]:
    """Runs that nothing but their seeds tells apart, taken together: mean, least and most of what `compare` says.

    configs: those of the runs, as training/run_folder.py writes them; exported folders, which know no seed, and runs
    whose rule `mini-ee calibrate` wrote stand alone.
    """
    groups: dict[str, dict[int, dict]] = {}
    for row, config in zip(rows, configs):
        if "seed" in config and "exit_counts" not in config:
            same = {name: config.get(name) for name in SEED_GROUP_KEYS}
            same["task"] = {name: value for name, value in (same["task"] or {}).items() if name != "folder"}
            begun = config["training"].get("from", config["backbone"])  # shots make a backbone of each seed
            same |= {"training": config["training"] | {"seed": None}, "backbone": begun["sha256"]}
            same |= {"settings": config.get("settings"), "schedule": row.get("schedule")}
            group = groups.setdefault(json.dumps(same, sort_keys=True), {})
            group.setdefault(config["seed"], row | {"seed": config["seed"]})
    return [_together([*group.values()]) for group in groups.values() if len(group) > 1]


def _together(rows: list[dict]) -> dict:
    def spread(figure: Callable[[dict], float]) -> dict:
        found = [figure(row) for row in rows]
        return {"mean": float(np.mean(found)), "least": min(found), "most": max(found)}

    answer = {
        "method": rows[0]["method"],
        "how": rows[0]["how"],
        "runs": [row["run"] for row in rows],
        "seeds": [row["seed"] for row in rows],
    }
    for name in ("score", "full_score", "layers_saved", "speedup"):
        answer[name] = spread(itemgetter(name))
    exits = range(len(rows[0]["exits"]))
    answer["per_exit_score"] = [spread(lambda row, k=k: row["per_exit_score"][k]) for k in exits]
    for name in (*LOSSES, *RANGES):
        if all(row.get(name) for row in rows):
            figures = "score", "layers_saved", "layer_passes", "flops_ratio", "seconds", "speedup"
            answer[name] = {key: spread(lambda row, key=key: row[name][key]) for key in figures}
    return answer


def overthinking(recorded: Record, task: Task, rows: Split) -> dict:
    """Rows that an exit gets right and a later one wrong (LoRAExit, Table 11).

    share: of all rows; share_at_the_end: of those that the last one gets wrong (Kaya et al. 2019); rows: up to
    OVERTHOUGHT of them, with what every exit says: label, largest probability, and entropy in nats.
    Raises ValueError for regression.
    """
    if task.regression:
        raise ValueError(f"{task.name} is a regression task: no exit is right or wrong; give a task with classes")
    labels, names = rows.labels, task.label_names
    predicted, largest = recorded.logits.argmax(axis=2), np.stack([max_probability(each) for each in recorded.logits])
    right = predicted == labels[:, None]
    nats = np.stack([-entropy(each) for each in recorded.logits])
    was_right = np.maximum.accumulate(right, axis=1)
    found = np.flatnonzero((was_right & ~right).any(axis=1))
    return {
        "share": len(found) / len(labels),
        "share_at_the_end": float((right.any(axis=1) & ~right[:, -1]).mean()),
        "rows": [
            {
                "text": " | ".join(rows.texts[row]),
                "label": names[labels[row]],
                "exits": [
                    {"layer": layer, "label": names[label], "confidence": float(confidence), "entropy": float(unsure)}
                    for layer, label, confidence, unsure in zip(
                        recorded.segments.exits, predicted[row], largest[row], nats[row]
                    )
                ],
            }
            for row in found[:OVERTHOUGHT]
        ],
    }
