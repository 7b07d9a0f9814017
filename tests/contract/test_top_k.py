"""The top k of a query: what counts, and the guarantee, compared with plain loops over queries, texts and exits."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mini_ee.lab.data.rankings import rankable, ranked, top_k_kept
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Threshold
from mini_ee.lab.sweep import from_loose_to_strict
from mini_ee.lab.threshold_curve import threshold_curve
from mini_ee.lab.top_k import CANDIDATES, broken_top_k, calibrate_top_k, choose_threshold, queries_kept
from mini_ee.lab.training.holdout import split_rows

EXITS = (2, 4, 6)


def pairs(queries, texts, seed=0):
    """Pairs in a mixed order, as a file may have them."""
    rows = [(f"query {query}", f"text {text}") for query in range(queries) for text in range(texts)]
    return [rows[at] for at in np.random.default_rng(seed).permutation(len(rows))]


def recorded(queries, texts=5, noise=0.6, seed=0):
    """A reranker whose early numbers are noisy copies of the last ones."""
    random, rows = np.random.default_rng(seed), pairs(queries, texts, seed)
    full = random.normal(size=(len(rows), 1))
    scores = full + noise * np.array([1.0, 0.5, 0.0]) * random.normal(size=(len(rows), 3))
    logits = scores.astype(np.float32)[:, :, None]
    segments = Recorded(EXITS, logits, np.ones((len(rows), 3, 2)), [2, 2, 2])
    return Record(segments, logits, 3.0, labels=ranked(logits[:, -1, 0], rows)), rows


def top(scores, k):
    return {at for at, _ in sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))[:k]}


def kept_by_loops(record, rows, tau, k):
    """query -> whether its top k is that of the last exit."""
    unchanged = {}
    for query in sorted({query for query, _ in rows}, key=[query for query, _ in rows].index):
        of_query = [row for row, (first, _) in enumerate(rows) if first == query]
        served = []
        for row in of_query:
            early = [number for number in record.logits[row, :-1, 0] if -number >= np.float32(tau)]
            served.append(early[0] if early else record.logits[row, -1, 0])
        unchanged[query] = top(served, k) == top([record.logits[row, -1, 0] for row in of_query], k)
    return unchanged


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_top_k_is_a_set_and_of_equal_numbers_the_earlier_text_is_better(k):
    random, rows = np.random.default_rng(k), pairs(7, 6)
    labels = ranked(random.integers(0, 4, len(rows)), rows)
    scores = random.integers(0, 4, (20, len(rows))).astype(float)
    names = list(dict.fromkeys(query for query, _ in rows))
    places = [[row for row, (first, _) in enumerate(rows) if first == query] for query in names]
    expected = [[top(ranking[at], k) == top(labels["score"][at], k) for at in places] for ranking in scores]
    np.testing.assert_array_equal(top_k_kept(scores, labels, k), expected)
    assert top_k_kept(labels["score"], labels, k).all()


def test_a_query_is_kept_or_not_as_a_loop_over_its_texts_says():
    record, rows = recorded(40)
    for tau in (-1.0, 0.0, 0.7, math.inf):
        expected = list(kept_by_loops(record, rows, tau, 2).values())
        np.testing.assert_array_equal(queries_kept(record, Threshold(tau, "low_score"), 2), expected)
        task = Task("ranking", (), ("pearson",), {}, top_k=2)
        exited = record.replay(Threshold(tau, "low_score")).logits[:, 0]
        assert task.score(exited, record.labels)["score"] == pytest.approx(np.mean(expected))


def binomial_tail(lost, queries, share):
    """P(X <= lost), exactly."""
    share = Fraction(share).limit_denominator(1000)
    chances = (math.comb(queries, x) * share**x * (1 - share) ** (queries - x) for x in range(lost + 1))
    return float(sum(chances))


@pytest.mark.parametrize("epsilon, delta", [(0.8, 0.1), (0.6, 0.2)])
def test_the_threshold_is_the_loosest_down_to_which_every_one_passes_its_test(epsilon, delta):
    record, rows = recorded(120, seed=3)
    rule, tested = choose_threshold(record, 2, epsilon, delta, seed=5)
    names = np.unique(record.labels["query"])
    proposing = set(np.random.default_rng(5).permutation(names)[: math.ceil(0.2 * len(names))].tolist())
    proposes = np.array([number in proposing for number in record.labels["query"].tolist()])
    levels = from_loose_to_strict(Threshold(math.inf, "low_score"), record.take(proposes), CANDIDATES)
    others = [row for row, some in zip(rows, proposes) if not some]
    expected = None
    for level in reversed(levels):
        unchanged = kept_by_loops(record.take(~proposes), others, level.threshold, 2)
        if binomial_tail(sum(not of for of in unchanged.values()), len(unchanged), 1 - epsilon) > delta:
            break
        expected = level
    assert (rule, tested) == (expected, len(unchanged)) and levels[0] != rule != levels[-1]


def test_the_guarantee_is_broken_by_delta_of_the_calibrations_at_most():
    """4,000 queries stand for the new ones. It is broken now and then: tests that are stricter would save less."""
    population, _ = recorded(4_000, seed=1)
    levels = from_loose_to_strict(Threshold(math.inf, "low_score"), population, 60)
    values, shares = zip(*((level.threshold, queries_kept(population, level, 2).mean()) for level in levels))
    epsilon, delta, repetitions = 0.8, 0.2, 100
    chosen = [
        choose_threshold(recorded(60, seed=100 + seed)[0], 2, epsilon, delta, seed)[0] for seed in range(repetitions)
    ]
    true = np.interp([min(rule.threshold, values[-2]) for rule in chosen], values[:-1], shares[:-1])
    error = math.sqrt(delta * (1 - delta) / repetitions)
    assert 0.03 < np.mean(true < epsilon) <= delta + 2 * error


def test_the_answer_reports_other_queries_than_those_that_calibrated():
    record, _ = recorded(400, seed=2)
    rule, answer = calibrate_top_k(record, 2, 0.8, 0.1, sets=20)
    assert answer["queries"] == 160 and answer["queries_fresh"] == 200
    assert answer["rows_calibration"] == answer["rows_fresh"] == 1000 == sum(answer["exit_counts"])
    assert answer["end_to_end"] >= 0.75 and answer["mean_layers"] < 6 and answer["thresholds"] == [rule.threshold] * 2
    assert answer["broken"]["sets"] == 20 and answer["broken"]["queries_tested"] == 80
    assert answer["broken"] == broken_top_k(record, 2, 0.8, 0.1, 20)


def test_if_no_threshold_passes_no_text_exits_early():
    record, rows = recorded(100)
    record.logits[:, :-1] = -5.0  # at one threshold all texts exit, and the order is lost
    rule, _ = choose_threshold(record, 2, 0.95, 0.1)
    assert rule.threshold == math.inf and queries_kept(record, rule, 2).all()
    assert queries_kept(record, Threshold(5.0, "low_score"), 2).mean() < 0.5


@pytest.mark.parametrize(
    "epsilon, delta, queries, words",
    [
        (0.95, 0.05, 70, "expected at least 75 queries to calibrate on for this guarantee, got 70"),
        (1.0, 0.05, 70, "expected epsilon and delta above 0 and below 1"),
        (0.9, 0.0, 70, "expected epsilon and delta above 0 and below 1"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused(epsilon, delta, queries, words):
    with pytest.raises(ValueError, match=words):
        choose_threshold(recorded(queries)[0], 2, epsilon, delta)


def test_all_texts_of_a_query_are_in_one_part():
    rows = tuple(pairs(50, 4))
    task = Task("ranking", (), ("pearson",), {"train": Split(rows, np.arange(len(rows)))}, top_k=1)
    parts = split_rows(task, 0, 30)
    queries = [{query for query, _ in part.texts} for part in parts]
    assert [len(part) for part in parts] == [4 * len(names) for names in queries] and len(queries[0]) == 30
    assert sum(map(len, queries)) == len(set.union(*queries)) == 50


def test_the_curve_counts_queries():
    record, rows = recorded(30)
    task = Task("ranking", (), ("pearson",), {}, top_k=2)
    curve = threshold_curve(record, Threshold(0.0, "low_score"), task, None)
    for tau, agreement, loss, _ in curve["points"][::10]:
        assert agreement == pytest.approx(np.mean(list(kept_by_loops(record, rows, float(tau), 2).values())))
        assert loss is None
    assert threshold_curve(record, Threshold(0.0, "low_score"), Task("n", (), ("pearson",), {}), None) is None


def test_queries_whose_top_k_cannot_change_are_left_out():
    rows, messages = [("a", "1"), ("b", "1"), ("a", "2"), ("a", "3")], []
    assert rankable(rows, 2, messages.append).tolist() == [True, False, True, True]
    assert messages == ["1 of 2 queries are left out: they have at most 2 texts."]
    with pytest.raises(WrongArguments, match="expected at least 2 queries with more than 2 texts, found 1 of 2"):
        rankable(rows, 2, messages.append, 2)
    with pytest.raises(WrongArguments, match="needs pairs of a query and a text, found single texts"):
        rankable([("a",)], 2, messages.append)
