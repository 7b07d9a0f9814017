"""EEFP and the calibration error, against loops over pairs of examples and over bins."""

import math

import numpy as np
import pytest

from mini_ee.lab.evaluation.failure_prediction import auroc, calibration_error, early_exit_failure_prediction


@pytest.fixture(scope="module")
def drawn():
    """Confidences with many ties, and right predictions that follow them loosely: (60, 4) each."""
    random = np.random.default_rng(0)
    confidences = random.integers(1, 11, (60, 4)) / 10
    return confidences, random.random((60, 4)) < 0.3 + 0.5 * confidences


def share_in_order(scores, positive):
    """Of all pairs of a positive and a negative."""
    pairs = [(a, b) for a, good in zip(scores, positive) for b, other in zip(scores, positive) if good and not other]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def test_auroc_is_the_share_of_pairs_in_order_and_a_tie_counts_half(drawn):
    confidences, right = drawn
    for k in range(4):
        assert auroc(confidences[:, k], right[:, k]) == pytest.approx(share_in_order(confidences[:, k], right[:, k]))
    assert auroc([0.1, 0.2, 0.3], [False, True, True]) == 1.0 and auroc([0.5, 0.5], [True, False]) == 0.5
    assert math.isnan(auroc([0.1, 0.2], [True, True])) and math.isnan(auroc([0.1, 0.2], [False, False]))


def test_an_exit_fails_where_it_is_wrong_and_a_later_exit_is_right(drawn):
    confidences, right = drawn
    areas = early_exit_failure_prediction(confidences, right)
    expected = []
    for k in range(3):
        fine = [row[k] or not any(row[k + 1 :]) for row in right]
        expected.append(share_in_order(confidences[:, k], fine))
    np.testing.assert_allclose(areas, expected)
    assert (areas > 0.5).all() and len(set(areas.round(3))) == 3


def test_an_order_preserving_change_of_confidence_keeps_eefp_and_changes_the_calibration_error(drawn):
    confidences, right = drawn
    sharper = confidences**4
    np.testing.assert_array_equal(
        early_exit_failure_prediction(sharper, right), early_exit_failure_prediction(confidences, right)
    )
    assert calibration_error(sharper[:, 0], right[:, 0]) > calibration_error(confidences[:, 0], right[:, 0]) + 0.05


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_the_calibration_error_is_that_of_a_loop_over_bins(drawn, bins):
    confidences, right = np.random.default_rng(1).random(60), drawn[1][:, 0]
    confidences[:2] = 0.0, 1.0
    total = 0.0
    for m in range(bins):
        inside = [n for n, c in enumerate(confidences) if m / bins < c <= (m + 1) / bins or (m == 0 and c == 0)]
        if inside:
            accuracy, confidence = np.mean(right[inside]), np.mean(confidences[inside])
            total += len(inside) / 60 * abs(accuracy - confidence)
    assert calibration_error(confidences, right, bins) == pytest.approx(total)
