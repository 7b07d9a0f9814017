"""Confidence: each measure against loops in float64, its range, its limits, and who is refused."""

import math

import numpy as np
import pytest

from mini_ee import rules
from mini_ee.lab.confidence import MEASURES
from mini_ee.rules import log_softmax

FLOAT64_ATOL = 1e-12  # measured max 1.8e-15
FLOAT32_ATOL = 1e-6  # measured max 1.9e-7
SHIFT_ATOL = 1e-11  # measured max 9.5e-14: 1000 + x keeps three digits less of x
RANGE_ATOL = 5e-6  # float32 rounding at the uniform distribution; measured max 4.8e-7

each_measure = pytest.mark.parametrize("name", MEASURES)


def softmax_by_hand(row):
    largest = max(row)
    weights = [math.exp(x - largest) for x in row]
    return [weight / math.fsum(weights) for weight in weights]


def entropy_by_hand(row):
    return -math.fsum(p * math.log(p) for p in softmax_by_hand(row) if p > 0)


def two_largest(values):
    return sorted(values)[-1], sorted(values)[-2]


BY_HAND = {
    "max_probability": lambda row: max(softmax_by_hand(row)),
    "entropy": lambda row: -entropy_by_hand(row),
    "normalised_entropy": lambda row: -entropy_by_hand(row) / math.log(len(row)),
    "breaking_ties": lambda row: two_largest(softmax_by_hand(row))[0] - two_largest(softmax_by_hand(row))[1],
    "breaking_ties_logits": lambda row: two_largest(row)[0] - two_largest(row)[1],
}


def measure(name, logits):
    return MEASURES[name][0](logits)


def random_logits(classes, dtype=np.float64, rows=40):
    return np.random.default_rng(classes).normal(0, 3, (rows, classes)).astype(dtype)


# Equations


@each_measure
@pytest.mark.parametrize("classes", [2, 3, 7, 50])
def test_each_measure_equals_a_loop_in_float64(name, classes):
    logits = random_logits(classes)
    expected = [BY_HAND[name](row.tolist()) for row in logits]
    np.testing.assert_allclose(measure(name, logits), expected, rtol=0, atol=FLOAT64_ATOL)


def test_worked_example_of_three_quarters_to_one_quarter():
    logits = np.log(np.array([[0.75, 0.25]]))
    h = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    expected = {
        "max_probability": 0.75,
        "entropy": -h,
        "normalised_entropy": -h / math.log(2),
        "breaking_ties": 0.5,
        "breaking_ties_logits": math.log(3),
    }
    for name, value in expected.items():
        assert measure(name, logits)[0] == pytest.approx(value, abs=FLOAT64_ATOL), name


def test_log_softmax_is_the_logarithm_of_probabilities_that_sum_to_one():
    logits = random_logits(5)
    expected = [[math.log(p) for p in softmax_by_hand(row.tolist())] for row in logits]
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=0, atol=FLOAT64_ATOL)
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(axis=1), 1, rtol=0, atol=FLOAT64_ATOL)


# Limits and invariants


@each_measure
def test_larger_means_surer_a_colder_softmax_is_never_less_sure(name):
    logits = random_logits(6)
    sure = np.stack([measure(name, logits / temperature) for temperature in (8, 4, 2, 1, 0.5, 0.25)])
    assert (np.diff(sure, axis=0) >= 0).all()
    assert (sure[-1] > sure[0]).all()


@each_measure
@pytest.mark.parametrize("classes", [2, 3, 6, 50])
def test_the_range_is_the_documented_one_and_both_ends_are_reached(name, classes):
    least, most = {
        "max_probability": (1 / classes, 1),
        "entropy": (-math.log(classes), 0),
        "normalised_entropy": (-1, 0),
        "breaking_ties": (0, 1),
        "breaking_ties_logits": (0, math.inf),
    }[name]
    values = measure(name, random_logits(classes, np.float32))
    assert (values >= least - RANGE_ATOL).all() and (values <= most).all()
    assert measure(name, np.zeros((1, classes), np.float32))[0] == pytest.approx(least, abs=RANGE_ATOL)
    certain = np.full((1, classes), -np.inf, np.float32)
    certain[0, 1] = 0
    assert measure(name, certain)[0] == most


@each_measure
@pytest.mark.parametrize("classes", range(2, 12))
def test_no_row_is_below_the_smallest_threshold_that_a_measure_takes(name, classes):
    """Rounding too: a threshold at the end of the range has to let every row go, the undecided one first of all."""
    for logits in (np.zeros((1, classes), np.float32), random_logits(classes, np.float32)):
        assert (measure(name, logits) >= MEASURES[name][1]).all()


@each_measure
@pytest.mark.parametrize("row", [(1000.0, -1000.0), (1000.0, -1000.0, 0.0), (0.0, -np.inf), (-np.inf, 3.0, -np.inf)])
def test_a_probability_of_zero_gives_full_confidence_and_no_nan(name, row):
    for dtype in (np.float32, np.float64):
        value = measure(name, np.array([row], dtype))[0]
        expected = BY_HAND[name](row)
        assert value == expected


def test_two_classes_that_share_all_the_probability_have_an_entropy_of_ln_2():
    logits = np.array([[0.0, 0.0, -np.inf], [500.0, 500.0, -500.0]])
    np.testing.assert_allclose(rules.entropy(logits), -math.log(2), rtol=0, atol=FLOAT64_ATOL)
    np.testing.assert_array_equal(rules.breaking_ties(logits), 0)


@each_measure
def test_a_constant_added_to_all_logits_changes_nothing(name):
    logits = random_logits(4)
    np.testing.assert_allclose(measure(name, logits + 1000.0), measure(name, logits), rtol=0, atol=SHIFT_ATOL)


@each_measure
def test_the_order_of_classes_and_of_rows_does_not_matter(name):
    logits = random_logits(5)
    values = measure(name, logits)
    np.testing.assert_allclose(measure(name, logits[:, ::-1]), values, rtol=0, atol=FLOAT64_ATOL)
    np.testing.assert_array_equal(measure(name, logits[::-1]), values[::-1])


@each_measure
def test_half_precision_is_computed_in_float32(name):
    half = random_logits(7, np.float16)
    values = measure(name, half)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, measure(name, half.astype(np.float32)))
    np.testing.assert_allclose(values, measure(name, half.astype(np.float64)), rtol=0, atol=FLOAT32_ATOL)


@each_measure
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_stays_and_the_logits_are_not_written_to(name, dtype):
    logits = random_logits(3, dtype)
    before = logits.copy()
    values = measure(name, logits)
    assert values.shape == (len(logits),) and values.dtype == dtype
    np.testing.assert_array_equal(logits, before)


# Errors


@each_measure
@pytest.mark.parametrize("shape", [(4, 1), (4, 0), (4,), (2, 3, 4), ()])
def test_fewer_than_two_classes_or_another_rank_are_refused_and_the_way_out_is_named(name, shape):
    with pytest.raises(ValueError, match=r"only 2 or more classes have a confidence, not logits .*: take Fixed or Pat"):
        measure(name, np.zeros(shape))
