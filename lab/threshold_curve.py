"""The curve by which a request's `agreement` or `max_loss` becomes a threshold. No torch here.

A training, add-exits and calibrate make it from held-out rows; config.json of the run and manifest.json keep it:

    {"rows": 300, "points": [[threshold, agreement, loss, mean layers], ...]}        the loosest threshold first

threshold: as the input of model.onnx, the same at all exits; "inf": no row exits early. agreement: share of the rows
with the full model's prediction. loss: score of the full model minus the score of the rule, None without labels. Both
are observed on these rows; no guarantee for others follows.
"""

import math

import numpy as np

from mini_ee.lab.data.tasks import Task
from mini_ee.lab.recording import Record, predictions
from mini_ee.lab.row_thresholds import THRESHOLD
from mini_ee.lab.rule_inputs import runtime_inputs, runtime_values
from mini_ee.lab.rules import Rule
from mini_ee.lab.sweep import from_loose_to_strict

POINTS = 50  # thresholds of a curve
ROUNDING = 1e-9  # of a difference of two scores: .92 - .9 is above .02


def threshold_curve(recorded: Record, rule: Rule, task: Task, labels: np.ndarray | None) -> dict | None:
    """The curve of a rule on recorded rows; None for a rule without a threshold, and for a regression.

    labels: (N,), for the loss; None: the rows have none. In a ranking the agreement is the share of queries that keep
    their top k.
    """
    if THRESHOLD not in runtime_inputs(rule) or not len(recorded.logits):
        return None
    if task.regression and task.top_k is None:
        return None
    full, points = predictions(recorded.logits[:, -1], task) if task.top_k is None else recorded.labels, []
    for candidate in from_loose_to_strict(rule, recorded, POINTS):
        result = recorded.replay(candidate)
        predicted = predictions(result.logits, task)
        loss = None
        if labels is not None:
            loss = task.score(full, labels)["score"] - task.score(predicted, labels)["score"]
        threshold = float(runtime_values(candidate, 1)[THRESHOLD][0])
        points.append(
            [str(threshold) if math.isinf(threshold) else threshold, float(task.agrees(predicted, full).mean()), loss]
            + [float(result.layers_run.mean())]
        )
    return {"rows": len(full), "points": points}


def threshold_for(curve: dict, agreement: float | None = None, max_loss: float | None = None) -> float:
    """The loosest threshold down to which every point of the curve has this agreement, or at most this loss.

    agreement: at most 1. max_loss: at least 0. The strictest point, at which no row exits early, always has them.
    """
    *_, chosen = (point[0] for point in curve["points"])
    for threshold, agrees, loss, _ in reversed(curve["points"]):
        if loss > max_loss + ROUNDING if agreement is None else agrees < agreement:
            break
        chosen = threshold
    return float(chosen)
