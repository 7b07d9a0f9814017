"""mini_ee/metrics.py: each metric against numbers worked out by hand and against loops over pairs."""

import itertools
import math

import numpy as np
import pytest

from mini_ee.lab.data.metrics import METRICS, accuracy, f1, matthews, pearson, rouge_l, score, spearman

PREDICTIONS, LABELS = [1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1, 0, 0]  # TP 2, FP 2, FN 1, TN 3


@pytest.mark.parametrize(
    ("metric", "by_hand"),
    [
        (accuracy, 5 / 8),
        (f1, 2 * 2 / (2 * 2 + 2 + 1)),
        (matthews, (2 * 3 - 2 * 1) / math.sqrt((2 + 2) * (2 + 1) * (3 + 2) * (3 + 1))),
    ],
)
def test_binary_metrics_equal_their_formula_in_true_and_false_positives(metric, by_hand):
    assert metric(PREDICTIONS, LABELS) == pytest.approx(by_hand, abs=1e-12)


def test_pearson_of_a_worked_example():
    # deviations (-1, 0, 1) and (-2, 1, 1): 3 / sqrt(2 * 6)
    assert pearson([1, 2, 3], [0, 3, 3]) == pytest.approx(3 / math.sqrt(12), abs=1e-12)


def test_spearman_gives_tied_values_their_average_rank():
    # ranks (1.5, 1.5, 3) and (1, 2, 3): deviations (-.5, -.5, 1) and (-1, 0, 1)
    assert spearman([5, 5, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(1.5 * 2), abs=1e-12)


def test_matthews_of_two_classes_is_pearson_of_the_indices():
    assert matthews(PREDICTIONS, LABELS) == pytest.approx(pearson(PREDICTIONS, LABELS), abs=1e-12)


def test_matthews_of_many_classes_equals_the_covariance_over_all_pairs_of_cells():
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 60)
    predictions = np.where(random.random(60) < 0.6, labels, random.integers(0, 4, 60))
    cells = [
        [sum(1 for p, t in zip(predictions, labels, strict=True) if (t, p) == (k, m)) for m in range(4)]
        for k in range(4)
    ]
    above = sum(
        cells[k][k] * cells[m][n] - cells[n][k] * cells[k][m] for k in range(4) for m in range(4) for n in range(4)
    )
    rows, columns = [sum(row) for row in cells], [sum(column) for column in zip(*cells, strict=True)]
    below = [math.sqrt(sum(size * (60 - size) for size in sizes)) for sizes in (rows, columns)]
    assert matthews(predictions, labels) == pytest.approx(above / (below[0] * below[1]), abs=1e-12)


def test_spearman_without_ties_equals_the_sum_of_squared_rank_differences():
    random = np.random.default_rng(1)
    x, y = random.permutation(20), random.permutation(20)
    squares = sum((sum(x < a) - sum(y < b)) ** 2 for a, b in zip(x, y, strict=True))
    assert spearman(x, y) == pytest.approx(1 - 6 * squares / (20 * (20**2 - 1)), abs=1e-12)


def test_spearman_with_ties_equals_pearson_of_ranks_counted_pair_by_pair():
    random = np.random.default_rng(2)
    x, y = random.integers(0, 5, 40), random.integers(0, 5, 40)
    ranks = [[sum((b < a) + (b == a) / 2 for b in values) for a in values] for values in (x, y)]
    assert spearman(x, y) == pytest.approx(pearson(*ranks), abs=1e-12)


def test_correlations_survive_scale_and_shift_and_stay_within_one():
    random = np.random.default_rng(3)
    x, y = random.normal(size=50), random.normal(size=50)
    assert pearson(1000 * x - 7, y) == pytest.approx(pearson(x, y), abs=1e-12)
    assert spearman(np.exp(x), y) == spearman(x, y)
    for same in (x, x.astype(np.float32), np.full(3, 0.1).cumsum()):
        assert pearson(same, same) == pytest.approx(1, abs=1e-12)
        assert abs(pearson(same, -same)) <= 1


@pytest.mark.parametrize(
    ("metric", "predictions", "labels"),
    [
        (f1, [0, 0], [0, 0]),
        (f1, [2, 2], [0, 2]),
        (matthews, [1, 1, 1], [0, 1, 0]),
        (matthews, [0, 1, 0], [1, 1, 1]),
        (pearson, [0.1] * 3, [0.7] * 3),  # the mean of three 0.1 is not 0.1 in floating point
        (pearson, [1e-200, 2e-200], [1, 2]),
        (spearman, [1, 2, 3], [0.1] * 3),
        (pearson, [1], [1]),
    ],
)
def test_a_zero_denominator_gives_zero(metric, predictions, labels):
    assert metric(predictions, labels) == 0.0


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_no_metric_depends_on_the_order_of_rows_or_changes_its_arguments(metric):
    predictions, labels = np.array(PREDICTIONS, np.float32), np.array(LABELS, np.float32)
    value = metric(predictions, labels)
    assert type(value) is float
    assert metric(predictions[::-1], labels[::-1]) == pytest.approx(value, abs=1e-12)
    assert predictions.tolist() == PREDICTIONS
    assert labels.tolist() == LABELS


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        ([], [], r"N >= 1, found shapes \(0,\) and \(0,\)"),
        ([1, 0], [1], r"found shapes \(2,\) and \(1,\)"),
        ([[1], [0]], [1, 0], r"found shapes \(2, 1\) and \(2,\)"),
        ([1, math.nan], [1, 0], "found nan or inf; did training diverge"),
    ],
)
def test_shapes_that_do_not_fit_and_nan_are_errors(metric, predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(predictions, labels)


def test_score_computes_the_named_metrics_and_refuses_others():
    named = score(("f1", "accuracy"), PREDICTIONS, LABELS)
    assert named == {"f1": f1(PREDICTIONS, LABELS), "accuracy": 5 / 8}
    with pytest.raises(ValueError, match=r"expected metrics among accuracy, f1, .*, found \['bleu'\]"):
        score(("f1", "bleu"), PREDICTIONS, LABELS)


# ---- Rouge-L ----


def longest_common(words, others):
    """The longest common subsequence by trying all subsequences of the words, the longest first."""
    for size in range(len(words), 0, -1):
        for some in itertools.combinations(words, size):
            rest = iter(others)
            if all(word in rest for word in some):
                return size
    return 0


def test_rouge_l_equals_f_of_precision_and_recall_of_the_longest_common_subsequence():
    random = np.random.default_rng(0)
    for _ in range(60):
        text, reference = (random.choice(list("abcd"), random.integers(1, 9)).tolist() for _ in range(2))
        common = longest_common(text, reference)
        precision, recall = common / len(text), common / len(reference)
        expected = 2 * precision * recall / (precision + recall) if common else 0.0
        assert rouge_l(" ".join(text), " ".join(reference)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "text, reference, expected",
    [
        ("The cat, sat!", "the CAT sat", 1.0),  # neither case nor punctuation count
        ("police killed the gunman", "police kill the gunman", 0.75),  # no stemming; Lin 2004, section 3.1
        ("the gunman police killed", "police killed the gunman", 0.5),
        ("", "a word", 0.0),
        ("...", "!!!", 0.0),
        ("...", "...", 1.0),  # as is a text in letters that rouge-score does not know
        ("\u0434\u0430", "\u0434\u0430", 1.0),
        ("a b c d", "a", 2 * 0.25 / 1.25),
    ],
)
def test_rouge_l_of_texts_worked_out_by_hand(text, reference, expected):
    assert rouge_l(text, reference) == pytest.approx(expected, abs=1e-12)
