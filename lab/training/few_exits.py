"""Exits that save time: the heads that a frozen model keeps, and what a rule saves when its heads count too.

Time at batch size 1 is mostly the time to load weights, so a head counts as the share of a layer's weights that it has.

Symbols:   L layers, of which a row runs d; r: heads that it reads; h: weights of a head over those of a layer.
           net savings = 1 - mean(d + h r) / (L + h); the full model reads one head.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np

from mini_ee.lab.data.tasks import Task
from mini_ee.lab.early_exit import ExitResult
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.recording import Record, predictions
from mini_ee.lab.rules import Rule
from mini_ee.lab.sweep import from_loose_to_strict
from mini_ee.lab.training.default_rule import CURVE_POINTS, usual_rules

MIN_GAIN = 0.005  # share of the time that one more exit must save


def head_layers(model: RowExits) -> float:
    """h: FLOPs of a head over those of a layer for one token, which are twice the numbers of their weights."""
    return model.heads[0].flops(1) / model.backbone.layer_flops(1)


def net_savings(result: ExitResult, num_layers: int, head: float) -> float:
    """Share of the time that a result saves, heads included; below 0 if they cost more than the layers saved.

    head: from `head_layers`.
    """
    cost = result.cost.depth + head * (result.exit_index + 1)
    return float(1 - cost.mean() / (num_layers + head))


def candidates(recorded: Record, task: Task) -> list[Rule]:
    """The usual rules with other values of their knobs, without those that never exit early."""
    rules = usual_rules(task)
    return [variant for rule in rules for variant in from_loose_to_strict(rule, recorded, CURVE_POINTS)[:-1]]


def few_exits(recorded: Record, task: Task, most: int, least: float, head: float) -> list[int]:
    """The columns of at most `most` early exits, then the last, whose best rule saves most at this score.

    recorded: rows that test nothing later. One more exit must save MIN_GAIN more. Only the last if no rule saves time.
    """
    layers, last = recorded.segments.exits[-1], len(recorded.segments.exits) - 1
    chosen, best = [last], 0.0
    for count in range(1, min(most, last) + 1):
        savings = {}
        for some in combinations(range(last), count):
            fewer = recorded.at([*some, last])
            savings[some] = _best(fewer, task, least, lambda result: net_savings(result, layers, head))
        some = max(savings, key=savings.__getitem__)
        if savings[some] >= best + MIN_GAIN:  # patience needs at least two, so one that saves nothing is not the end
            chosen, best = [*some, last], savings[some]
    return chosen


def _best(recorded: Record, task: Task, least: float, saved: Callable[[ExitResult], float]) -> float:
    """The most that a candidate saves with at least this score; 0 if none has it."""
    best = 0.0
    for rule in candidates(recorded, task):
        result = recorded.replay(rule)
        if task.score(predictions(result.logits, task), recorded.labels)["score"] >= least:
            best = max(best, saved(result))
    return best


def savings_curve(recorded: Record, task: Task, rule: Rule, head: float, labels: np.ndarray | None = None) -> dict:
    """Agreement and savings of a rule and of others of its kind, on rows that have chosen nothing, as JSON.

    labels: of a labelled task; then also the accuracy.
    """
    layers = recorded.segments.exits[-1]

    def point(variant: Rule) -> dict:
        result = recorded.replay(variant)
        net = net_savings(result, layers, head) if variant.needs is not None else 0.0  # the full model reads one head
        predicted = predictions(result.logits, task)
        return {
            "rule": variant.to_dict(),
            "agreement": task.score(predicted, recorded.labels)["score"],
            **({} if labels is None else {"accuracy": task.score(predicted, labels)["score"]}),
            "layers_saved": float(1 - result.cost.depth.mean() / layers),
            "net_saved": net,
        }

    last = {} if labels is None else {"full_accuracy": task.score(recorded.labels, labels)["score"]}
    curve = [point(variant) for variant in candidates(recorded, task)]
    counts = np.bincount(recorded.replay(rule).exit_index, minlength=len(recorded.segments.exits)).tolist()
    costs = {"exit_counts": counts, "head_layers": head}
    return point(rule) | last | costs | {"curve": sorted(curve, key=lambda entry: entry["layers_saved"])}
