"""The statistics behind every guarantee, against sums over all that can happen. The paired test: test_guarantee.py."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from mini_ee.lab.statistics import (
    agreement_p_values,
    binomial_cdf,
    binomial_pmf,
    binomial_tails,
    chernoff,
    groups_needed,
    log_factorials,
    share_interval,
)


def exact(count, trials, p):
    """P(X = count), in fractions."""
    p = Fraction(p).limit_denominator(10**6)
    return math.comb(trials, count) * p**count * (1 - p) ** (trials - count) if count <= trials else Fraction(0)


# ---- Binomial counts ----


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.25, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("trials", [1, 7, 90, 400])
def test_binomial_probabilities_are_those_of_exact_fractions(trials, p):
    counts, known = np.arange(trials + 1), log_factorials(trials + 1)
    probabilities = [exact(count, trials, p) for count in range(trials + 1)]
    np.testing.assert_allclose(binomial_pmf(counts, trials, p, known), np.array(probabilities, float), atol=1e-12)
    assert binomial_pmf(np.array([trials + 1]), trials, p, known).tolist() == [0]
    sums = np.cumsum(probabilities).astype(float)
    np.testing.assert_allclose(binomial_cdf(counts, trials, p), sums, atol=1e-9)
    assert float(binomial_cdf(0, trials, p)) == pytest.approx(sums[0], abs=1e-9)
    assert float(binomial_cdf(-1, trials, p)) == 0


def test_of_a_coin_a_count_has_the_share_of_all_sequences_that_have_it():
    ones = [sum(flips) for flips in product((0, 1), repeat=8)]
    for count in range(9):
        assert float(binomial_cdf(count, 8, 0.5)) == pytest.approx(np.mean([heads <= count for heads in ones]))


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_tails_of_the_first_trials_are_sums_over_the_counts_above(p):
    for seed in range(5):
        successes = np.random.default_rng(seed).random(80) < 0.8
        tails = binomial_tails(successes, p)
        for n in range(1, 81):
            tail = sum(exact(count, n, p) for count in range(int(successes[:n].sum()), n + 1))
            assert tails[n - 1] == pytest.approx(float(tail), abs=1e-12)


@pytest.mark.parametrize("count, level", [(1, 0.95), (12, 0.95), (30, 0.8)])
def test_the_interval_of_a_share_holds_it_with_the_level_at_least_whatever_it_is(count, level):
    """By enumeration of the counts; just below an end it would not."""
    ends = [share_interval(successes, count, level) for successes in range(count + 1)]
    for p in np.linspace(0, 1, 101):
        assert sum(float(exact(x, count, p)) for x, (low, high) in enumerate(ends) if low <= p <= high) >= level - 1e-5
    for successes, (low, high) in enumerate(ends):
        if successes < count:
            so_few = sum(exact(x, count, high) for x in range(successes + 1))
            assert float(so_few) == pytest.approx((1 - level) / 2, rel=1e-3)
        assert ends[count - successes] == pytest.approx((1 - high, 1 - low))


# ---- Means ----


def test_chernoff_bounds_the_chance_of_so_small_a_mean():
    """Bernoulli numbers, the worst there are: P(mean <= m) by the exact binomial sum."""
    for count, limit in ((20, 0.3), (60, 0.1)):
        for ones in range(1, count):
            chance = sum(exact(successes, count, limit) for successes in range(ones + 1))
            assert chernoff(ones / count, limit, count) >= min(float(chance), 1)
    assert chernoff(0.0, 0.3, 20) == pytest.approx(0.7**20)
    assert chernoff(0.3, 0.3, 20) == chernoff(0.9, 0.3, 20) == 1.0


def test_chernoff_is_the_least_of_markovs_bounds():
    """min over s of (E exp(-s (X - mean)))^n, X Bernoulli: what the closed form minimises, by search."""
    s = np.linspace(0, 12, 200_001)
    for mean, limit, count in ((0.1, 0.3, 20), (0.02, 0.05, 200), (0.4, 0.9, 3)):
        searched = ((1 - limit + limit * np.exp(-s)) * np.exp(s * mean)).min() ** count
        assert chernoff(mean, limit, count) == pytest.approx(searched, rel=1e-6)
    both = chernoff(np.array([0.1, 0.5]), 0.3, np.array([20, 20]))
    assert both.tolist() == pytest.approx([float(chernoff(0.1, 0.3, 20)), 1])


def p_by_hand(agrees, groups, epsilon):
    """The sample and one more text that is wrong throughout; variance and all by loops over texts."""
    texts = [agrees[groups == name] for name in np.unique(groups)]
    texts.append(np.zeros(max(map(len, texts))))
    rows = sum(map(len, texts))
    p = sum(text.sum() for text in texts) / rows
    if p <= epsilon:
        return 1.0
    variance = sum((text.sum() - p * len(text)) ** 2 for text in texts) / rows**2
    worth = min(p * (1 - p) / variance, rows)
    return math.exp(-worth * (p * math.log(p / epsilon) + (1 - p) * math.log((1 - p) / (1 - epsilon))))


def test_larger_groups_are_worth_as_many_rows_as_their_spread_says():
    for seed in range(5):
        agrees = np.random.default_rng(seed + 100).random(90) < 0.9
        groups = np.random.default_rng(seed).integers(0, 30, 90)
        for epsilon in (0.3, 0.6, 0.8):
            p_values = agreement_p_values(agrees, groups, epsilon)
            for n in range(1, 91):
                assert p_values[n - 1] == pytest.approx(p_by_hand(agrees[:n], groups[:n], epsilon), rel=1e-9)


def test_texts_whose_rows_all_agree_or_all_disagree_are_worth_one_row_each():
    right = np.arange(200) < 190
    one = agreement_p_values(right, np.arange(200) // 2, 0.8)[-1]
    five = agreement_p_values(np.repeat(right, 5), np.repeat(np.arange(200) // 2, 5), 0.8)[-1]
    assert one == pytest.approx(five, rel=1e-9)


def test_texts_that_are_all_alike_are_worth_no_more_than_their_rows():
    agrees, groups = np.tile([True] * 9 + [False], 100), np.repeat(np.arange(100), 10)
    p = 900 / 1010
    bound = math.exp(-1010 * (p * math.log(p / 0.8) + (1 - p) * math.log((1 - p) / 0.2)))
    assert agreement_p_values(agrees, groups, 0.8)[-1] == pytest.approx(bound, rel=1e-9, abs=0)


@pytest.mark.parametrize("sizes", [[1] * 9, [3] * 9])
def test_so_many_groups_would_pass_and_one_fewer_would_not(sizes):
    needed = groups_needed(np.array(sizes), 0.8, 0.05)
    passes = []
    for count in (needed, needed - 1):
        groups = np.repeat(np.arange(count), np.resize(sizes, count))
        passes.append(agreement_p_values(np.ones(len(groups), bool), groups, 0.8)[-1] <= 0.05)
    assert passes == [True, False]
