"""Thresholds and rules with a guarantee: the guarantees hold on new rows."""

import math
from itertools import product

import numpy as np
import pytest

from mini_ee.calibrate import binomial_cdf, default_rule, fixed_sequence, tau, tau_with_confidence
from mini_ee.loop import Table, early_exit
from mini_ee.rules import Never


def draw(rows, seed, ties=False):
    """Confidences, and agreement that is more likely where they are high."""
    random = np.random.default_rng(seed)
    confidence = random.random(rows)
    return np.round(confidence, 2) if ties else confidence, random.random(rows) < 0.7 + 0.3 * confidence


def test_of_a_text_one_token_counts():
    """Tokens of a text that all agree or all disagree: 400 tokens are the evidence of 40 texts."""
    confidence, agrees = np.repeat(draw(40, 0)[0], 10), np.ones(400, bool)
    texts = np.repeat(np.arange(40), 10)
    assert tau_with_confidence(confidence, agrees, np.arange(400), 0.95, 0.05) == confidence.min()
    with pytest.raises(ValueError, match="at least 59 rows or texts, got 40"):
        tau_with_confidence(confidence, agrees, texts, 0.95, 0.05)
    assert tau_with_confidence(confidence, agrees, texts, 0.9, 0.05) == confidence.min()


@pytest.mark.parametrize("epsilon, delta", [(1.0, 0.05), (0.0, 0.05), (0.9, 0.0), (0.9, 1.0)])
def test_a_guarantee_that_cannot_be_given_is_refused(epsilon, delta):
    with pytest.raises(ValueError, match="between 0 and 1"):
        tau_with_confidence(*draw(400, 0), np.arange(400), epsilon, delta)


def test_with_confidence_new_rows_break_the_share_in_at_most_delta_of_the_draws():
    """A row agrees with probability .7 + .3 c, so those above tau agree with probability .7 + .3 (1 + tau) / 2."""
    broken, plain = 0, 0
    for seed in range(200):
        confidence, agrees = draw(300, seed)
        for at, level in enumerate(
            (tau_with_confidence(confidence, agrees, np.arange(300), 0.9, 0.1), tau(confidence, agrees, 0.9))
        ):
            bad = level < math.inf and 0.7 + 0.15 * (1 + level) < 0.9
            broken, plain = broken + (bad and not at), plain + (bad and at)
    assert broken <= 0.1 * 200 + 3 * math.sqrt(200 * 0.1 * 0.9)
    assert plain > 0.3 * 200  # the paper's tau holds on the rows that chose it


def logits_of(rows, seed, hard=0.3):
    """Two exits: the first is right on easy rows and unsure on hard ones, on which it guesses; the last is right."""
    random, labels = np.random.default_rng(seed), np.random.default_rng(seed + 1).integers(0, 2, rows)
    is_hard = random.random(rows) < hard
    first = np.where(is_hard, random.normal(0, 0.5, rows), 3 + random.normal(0, 0.5, rows)) * (2 * labels - 1)
    last = 4.0 * (2 * labels - 1)
    return np.stack([np.stack([-z, z], 1) for z in (first, last)], 1), labels


def test_the_default_rule_is_the_loosest_threshold_that_passes():
    default = default_rule((1, 2), logits_of(500, 0), logits_of(2000, 10))
    logits, labels = logits_of(2000, 10)
    result = early_exit(Table((1, 2), logits), default.rule, range(2000))
    worse = int((result.logits.argmax(1) != labels).sum())  # the last exit is always right
    assert (worse, 2000) == (default.worse, default.tested)
    assert default.p_value == binomial_cdf(worse, 2000, 0.02) <= 0.05
    assert result.layers.mean() < 1.4
    fresh, fresh_labels = logits_of(20_000, 20)
    lost = early_exit(Table((1, 2), fresh), default.rule, range(20_000)).logits.argmax(1) != fresh_labels
    assert lost.mean() <= 0.02


def test_without_enough_rows_the_default_rule_is_the_full_model():
    default = default_rule((1, 2), logits_of(500, 0), logits_of(100, 10))
    assert default.rule == Never() and default.p_value == 1


def test_a_default_rule_that_loses_more_is_chosen_in_at_most_delta_of_the_draws():
    broken = 0
    for seed in range(60):
        rule = default_rule((1, 2), logits_of(200, 3 * seed), logits_of(300, 3 * seed + 1000), delta=0.1).rule
        logits, labels = FRESH
        broken += (early_exit(Table((1, 2), logits), rule, range(len(labels))).logits.argmax(1) != labels).mean() > 0.02
    assert broken <= 0.1 * 60 + 3 * math.sqrt(60 * 0.1 * 0.9)


FRESH = logits_of(5_000, 5000)


def test_a_fixed_sequence_ends_at_the_first_failure():
    assert [fixed_sequence(p, 0.05) for p in ([0.01, 0.2, 0.01], [0.01, 0.05], [0.9], [])] == [1, 2, 0, 0]


def test_a_true_hypothesis_is_rejected_with_the_level_at_most_by_enumeration():
    """p-values of three true hypotheses after a false one, each uniform on 20 values: all 8,000 are equally likely."""
    values = np.arange(1, 21) / 20
    rejected = [fixed_sequence(np.array([0.0, *true]), 0.1) > 1 for true in product(values, repeat=3)]
    assert np.mean(rejected) == pytest.approx(0.1)
