"""The exits that a frozen model keeps: those whose rule saves most time on recorded rows, worked out by hand."""

import numpy as np
import pytest

from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Patience, Threshold
from mini_ee.lab.training.default_rule import default_rule, paired_losses, usual_rules
from mini_ee.lab.training.few_exits import few_exits, net_savings, savings_curve

CLASSES = Task("c", ("a", "b"), ("accuracy",), {"train": Split((("x",),), np.zeros(1, int))})
NUMBERS = Task("n", (), ("pearson",), {"train": Split((("x",),), np.zeros(1))}, tolerance=0.5)


def recorded(logits, labels, exits=(1, 2, 3, 4)):
    """Layers cost 1, heads .1. logits (N, K, C)."""
    logits = np.asarray(logits, float)
    flops = np.tile([1.0, 0.1], (*logits.shape[:2], 1))
    return Record(Recorded(exits, logits, flops, [1] * len(exits)), logits, 4.1, labels=np.asarray(labels))


def of_margins(*rows):
    """Logits (N, K, 2) from the margin of class 1 at every exit; the labels are those of the last."""
    margins = np.array(rows, float)
    return recorded(np.stack((np.zeros_like(margins), margins), 2), (margins[:, -1] > 0).astype(int))


SETTLED_AT_2 = [(0.1, 5, 5, 5), (-0.1, 5, 5, 5), (0.1, -5, -5, -5), (-0.1, -5, -5, -5)] * 5
HALF_AT_1 = [(9, 9, 9, 9), (-9, -9, -9, -9), (0.1, 0.1, -9, -9), (-0.1, -0.1, 9, 9)] * 5
NOWHERE = [(5, 5, 5, -5), (-5, -5, -5, 5), (5, 5, 5, 5), (-5, -5, -5, -5)] * 5


@pytest.mark.parametrize(
    ("rows", "most", "head", "columns"),
    [
        (SETTLED_AT_2, 3, 0.1, [1, 3]),
        (HALF_AT_1, 3, 0.1, [0, 2, 3]),
        (HALF_AT_1, 1, 0.1, [0, 3]),  # half of the rows save three layers; at the third exit all save one
        (HALF_AT_1, 3, 2.5, [2, 3]),  # two heads of two layers and a half would cost more than they save
        (NOWHERE, 3, 0.1, [3]),
    ],
)
def test_the_exits_that_save_most_time_are_kept(rows, most, head, columns):
    assert few_exits(of_margins(*rows), CLASSES, most, 0.99, head) == columns


def test_net_savings_count_the_heads_that_are_read():
    result = of_margins(*HALF_AT_1).replay(Threshold(0.9))
    assert result.exit_index.tolist() == [0, 0, 2, 2] * 5
    assert net_savings(result, 4, 0.5) == pytest.approx(1 - ((1 + 0.5 + 3 + 1.5) / 2) / 4.5)


def test_fewer_exits_of_a_record_are_a_model_without_the_others():
    record = of_margins(*HALF_AT_1)
    some = record.at([0, 2, 3])
    assert some.segments.exits == (1, 3, 4)
    result = some.replay(Threshold(0.9))
    assert result.cost.depth.tolist() == [1, 1, 3, 3] * 5
    np.testing.assert_allclose(
        result.cost.flops - 10 * (1 + result.exit_index), [1.1, 1.1, 3.2, 3.2] * 5
    )  # 10: the rule


def test_the_curve_goes_from_the_strictest_to_the_loosest_threshold():
    savings = savings_curve(of_margins(*HALF_AT_1), CLASSES, Threshold(0.9), 0.5)
    assert savings["agreement"] == 1 and savings["layers_saved"] == 0.5
    assert [point["layers_saved"] for point in savings["curve"]][-1] == 0.75
    assert [point["agreement"] for point in savings["curve"]][-1] == 0.5


def test_numbers_within_the_tolerance_agree_like_classes():
    labels, last = np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0])
    predicted = np.array([0.5, 1.6, 2.0])
    assert paired_losses(NUMBERS, labels, predicted, last).tolist() == [0, 1, 0]
    assert NUMBERS.score(predicted, labels) == {"agreement": pytest.approx(2 / 3), "score": pytest.approx(2 / 3)}
    assert {rule.tolerance for rule in usual_rules(NUMBERS)} == {0.05, 0.125, 0.25, 0.5, 1.0}


@pytest.mark.parametrize(("wrong", "guaranteed"), [(0, True), (5, True), (200, False)])
def test_the_guarantee_on_numbers_is_that_of_classes_on_agreement(wrong, guaranteed):
    """With numbers that are right or wrong, the p-value is the one of the same losses of classes."""
    random = np.random.default_rng(0)
    labels = random.normal(size=1000).astype(np.float32)
    early = labels.copy()
    early[random.permutation(1000)[:wrong]] += 3
    record = recorded(np.stack((early, early, labels), 1)[:, :, None], labels, (1, 2, 3))
    chosen = default_rule(record.take(np.arange(1000) < 300), record.take(np.arange(1000) >= 300), NUMBERS, 0.02)
    assert isinstance(chosen.rule, Patience) == guaranteed
    if guaranteed:
        assert chosen.guarantee["of"] == "agreement within the tolerance" and chosen.guarantee["tolerance"] == 0.5
