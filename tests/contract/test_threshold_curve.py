"""The curve by which a request's agreement or loss becomes a threshold, counted again by hand."""

import numpy as np
import pytest

from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Fixed, Patience, Policy, Threshold
from mini_ee.lab.threshold_curve import POINTS, threshold_curve, threshold_for
from mini_ee.rules import max_probability

N, EXITS = 200, (1, 2, 4)
DRAWN = np.random.default_rng(0)
LABELS = DRAWN.integers(0, 3, N)
BETTER = np.array([1.0, 2.0, 4.0])[:, None]  # the higher the exit
LOGITS = (DRAWN.normal(size=(N, 3, 3)) + np.eye(3)[LABELS][:, None] * BETTER).astype(np.float32)
TASK = Task("words", ("a", "b", "c"), ("accuracy",), {"train": Split((("x",),) * N, LABELS)})


@pytest.fixture(scope="module")
def recorded():
    measures = {"exit_logit": DRAWN.normal(size=(N, 2)).astype(np.float32)}
    return Record(Recorded(EXITS, LOGITS, np.ones((N, 3, 2)), [1, 1, 2], measures), LOGITS, 4.0)


def by_hand(threshold):
    """Agreement with the last exit, loss of accuracy and mean layers, if rows exit at this confidence."""
    predicted, layers = LOGITS[:, 2].argmax(1), np.full(N, 4)
    for k in (1, 0):
        exits = max_probability(LOGITS[:, k]) >= np.float32(threshold)
        predicted[exits], layers[exits] = LOGITS[exits, k].argmax(1), EXITS[k]
    last = LOGITS[:, 2].argmax(1)
    return (predicted == last).mean(), (last == LABELS).mean() - (predicted == LABELS).mean(), layers.mean()


def test_each_point_is_what_its_threshold_gives(recorded):
    curve = threshold_curve(recorded, Threshold((0.6, 0.7, 0.0)), TASK, LABELS)
    thresholds = [float(threshold) for threshold, *_ in curve["points"]]
    assert curve["rows"] == N and POINTS <= len(thresholds) <= POINTS + 4
    assert thresholds == sorted(thresholds) and curve["points"][-1] == ["inf", 1.0, 0.0, 4.0]
    for threshold, *point in curve["points"]:
        assert point == pytest.approx(by_hand(float(threshold)))


def test_a_policy_s_threshold_is_its_logit_and_rows_without_labels_have_no_loss(recorded):
    curve = threshold_curve(recorded, Policy(0.5), TASK, None)
    (logit,) = [point for point in curve["points"] if point[0] == 0.0]  # that of the cut .5
    exits = recorded.segments.exit_logits > 0
    assert logit[3] == np.where(exits[:, 0], 1, np.where(exits[:, 1], 2, 4)).mean() and logit[2] is None


def test_a_rule_without_a_threshold_and_a_regression_have_no_curve(recorded):
    number = Task("number", (), ("pearson",), {"train": Split((("x",),) * N, LABELS.astype(np.float32))})
    assert threshold_curve(recorded, Fixed(0), TASK, LABELS) is None
    assert threshold_curve(recorded, Patience(1), TASK, LABELS) is None
    assert threshold_curve(recorded, Policy(0.5), number, LABELS) is None


def test_a_loss_that_is_larger_only_by_rounding_is_allowed():
    assert 0.92 - 0.9 > 0.02
    assert threshold_for({"points": [[0.6, 0.9, 0.92 - 0.9, 1.0], ["inf", 1.0, 0.0, 4.0]]}, max_loss=0.02) == 0.6


@pytest.mark.parametrize("agreement", [0.5, 0.8, 0.9, 0.99, 1.0])
def test_the_loosest_threshold_that_agrees_so_often_is_chosen(recorded, agreement):
    curve = threshold_curve(recorded, Threshold(0.6), TASK, LABELS)
    chosen = threshold_for(curve, agreement=agreement)
    assert by_hand(chosen)[0] >= agreement
    looser = [threshold for threshold, *_ in curve["points"] if float(threshold) < chosen]
    assert not looser or by_hand(looser[-1])[0] < agreement
