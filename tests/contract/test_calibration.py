"""Calibration: tau of section 3.3.1, the rule with confidence delta, and what both keep of their guarantee."""

import json
import math
from itertools import combinations_with_replacement, product
from math import factorial

import numpy as np
import pytest

import mini_ee.lab.calibration as calibration
from mini_ee.calibrate import tau
from mini_ee.lab.calibration import (
    Observed,
    agreement,
    broken_guarantees,
    calibrate,
    calibrate_record,
    end_to_end,
    intervals,
    observe,
    replay,
    tau_with_confidence,
)
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.statistics import agreement_p_values

EPSILONS = (0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
DELTA = 0.05
SETS = 400  # calibration sets that a guarantee is tried on
TWO_STANDARD_ERRORS = 2 * (DELTA * (1 - DELTA) / SETS) ** 0.5


def tau_by_hand(confidence, agrees, epsilon):
    """Every threshold that a row could set, from the lowest."""
    for threshold in sorted(set(confidence.tolist())):
        rows = [agree for sure, agree in zip(confidence, agrees) if sure >= threshold]
        if sum(rows) / len(rows) >= epsilon:
            return threshold
    return math.inf


def drawn(seed, rows=60, ties=True):
    """Rows that agree the likelier the surer they are."""
    random = np.random.default_rng(seed)
    confidence = random.random(rows)
    agrees = random.random(rows) < 0.4 + 0.6 * confidence
    return (confidence.round(1) if ties else confidence), agrees


# ---- The paper's rule ----


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("ties", [False, True])
def test_tau_is_the_lowest_confidence_whose_rows_agree_in_a_share_of_epsilon(epsilon, ties):
    for seed in range(40):
        confidence, agrees = drawn(seed, ties=ties)
        assert tau(confidence, agrees, epsilon) == tau_by_hand(confidence, agrees, epsilon)


def test_a_share_that_is_exactly_epsilon_qualifies():
    for rows in (*range(1, 25), 49, 59):
        for agreeing in range(rows + 1):
            agrees = np.arange(rows) < agreeing
            assert tau(np.zeros(rows), agrees, agreeing / rows) == 0.0


def test_tau_does_not_fall_as_epsilon_rises():
    for seed in range(10):
        taus = [tau(*drawn(seed), epsilon) for epsilon in np.linspace(0.02, 1, 50)]
        assert taus == sorted(taus)


def test_rows_of_equal_confidence_stay_together():
    confidence, agrees = np.array([0.5, 0.5, 0.5, 0.9]), np.array([False, False, True, True])
    assert tau(confidence, agrees, 0.6) == 0.9  # the last two alone would qualify, but .5 is reached by all four
    for order in ([2, 1, 0, 3], [1, 2, 3, 0]):
        assert tau(confidence[order], agrees[order], 0.6) == 0.9


def test_none_qualifies_and_the_exit_takes_no_row():
    observed = Observed(np.array([[0.1], [0.9]]), np.array([[True], [False]]), np.arange(2))
    rule = calibrate(observed, 0.8)
    assert rule.threshold == (math.inf, -math.inf)
    assert agreement(observed, rule) == [None]
    assert replay(observed, rule).exit_index.tolist() == [1, 1] and end_to_end(observed, rule) == 1.0


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_guarantee_is_kept_exactly_on_the_calibration_set(epsilon):
    for seed in range(20):
        heads = [drawn(100 * seed + k) for k in range(3)]
        observed = Observed(*(np.stack(columns, axis=1) for columns in zip(*heads)), np.arange(60))
        rule = calibrate(observed, epsilon)
        assert all(remaining is None or remaining >= epsilon for remaining in agreement(observed, rule))
        assert end_to_end(observed, rule) >= min(agree.mean() for _, agree in heads)


# ---- The rule with confidence delta ----


def test_cuts_are_tested_from_the_strictest_down_and_the_first_that_fails_ends_it():
    confidence, groups = np.linspace(1, 0, 400), np.arange(400)
    agrees = np.ones(400, bool)
    agrees[150:200] = False  # beyond them all agree again, and the share rises above epsilon once more
    threshold = tau_with_confidence(confidence, agrees, groups, 0.8, DELTA)
    p = agreement_p_values(agrees, groups, 0.8)
    first = np.flatnonzero(p[150:] > DELTA)[0] + 150
    assert p[-1] <= DELTA < p[first] and threshold == confidence[first - 1]


def test_some_may_disagree_in_the_first_cut_if_there_are_rows_enough():
    """20 rows, of which one disagrees, would not pass; the first cut has 27, because .8^27 is at most .05 squared."""
    agrees = np.arange(400) != 10
    assert tau_with_confidence(np.linspace(1, 0, 400), agrees, np.arange(400), 0.8, DELTA) == 0.0


def chance_of_a_bad_tau(find, rows, epsilon, shares, agree):
    """By enumeration: how often `find`, a tau from confidence and agreement, breaks the guarantee on fresh rows.

    The population, from the surest rows down: strips with these shares of all rows, in each of which rows agree with
    one probability and no two are equally sure. Strips are cut where the agreement above crosses epsilon.
    """
    above = np.concatenate(([0.0], np.cumsum(shares * (agree - epsilon))))  # times the rows: below 0 is bad
    ends = [0.0]
    for strip, share in enumerate(shares):
        if above[strip] * above[strip + 1] < -1e-15:
            ends.append(ends[-1] + above[strip] / (epsilon - agree[strip]))
        ends.append(sum(shares[: strip + 1]))
    middles, sizes = (np.array(ends[1:]) + ends[:-1]) / 2, np.diff(ends)
    of = np.minimum(np.searchsorted(np.cumsum(shares), middles), len(shares) - 1)
    bad = np.interp(middles, np.concatenate(([0.0], np.cumsum(shares))), above) < -1e-12
    confidence, total = np.arange(rows, 0, -1.0), 0.0
    cuts = {bits: find(confidence, np.array(bits)) for bits in product((True, False), repeat=rows)}
    for strips in combinations_with_replacement(range(len(sizes)), rows):
        counts = np.bincount(strips, minlength=len(sizes))
        there = factorial(rows) * math.prod(size**n / factorial(n) for size, n in zip(sizes, counts))
        for bits, at in cuts.items():
            if math.isfinite(at) and bad[strips[int(rows - at)]]:
                total += there * math.prod(p if bit else 1 - p for bit, p in zip(bits, agree[of[list(strips)]]))
    return total


TIGHT = [  # rows, epsilon, delta: the first cut has f < rows rows, and passes with probability delta at the edge
    (3, 0.5, 0.25),
    (5, 0.5, 0.125),
    (4, 0.5, 0.3125),
]
POPULATIONS = [  # shares and agreement of strips, from the surest
    ((1.0,), (0.499999,)),  # nearly epsilon at all thresholds: the worst that there is
    ((0.8, 0.2), (0.45, 0.69)),  # the boundary row agrees oftener than the rows above it
    ((0.6, 0.4), (0.2, 0.95)),
    ((0.3, 0.3, 0.4), (0.9, 0.05, 0.5)),  # good, then bad
    ((0.2, 0.2, 0.2, 0.4), (0.3, 0.8, 0.1, 0.6)),  # bad, good, bad
]


@pytest.mark.parametrize("rows, epsilon, delta", TIGHT)
@pytest.mark.parametrize("shares, agree", POPULATIONS)
def test_of_few_rows_a_bad_tau_has_at_most_probability_delta_by_enumeration(rows, epsilon, delta, shares, agree):
    """The first cut is at a row of the sample, which was not drawn as those above it: it costs nothing."""

    def find(confidence, agrees):
        return tau_with_confidence(confidence, agrees, np.arange(rows), epsilon, delta)

    chance = chance_of_a_bad_tau(find, rows, epsilon, np.array(shares), np.array(agree))
    assert chance <= delta + 1e-12
    if len(shares) == 1:
        assert chance > 0.9 * delta


def test_the_enumeration_finds_a_first_cut_that_the_agreement_places():
    """Planted: the lowest cut that passes, whatever failed above it."""

    def find(confidence, agrees):
        passes = np.flatnonzero(agreement_p_values(agrees, np.arange(4), 0.5) <= 0.3125)
        return float(confidence[passes[-1]]) if len(passes) else math.inf

    assert chance_of_a_bad_tau(find, 4, 0.5, np.array([1.0]), np.array([0.499999])) > 0.35


def chance_of_a_bad_tau_with_ties(rows, epsilon, delta, shares, agree):
    """The same of a confidence that takes a few values, with these shares of the rows, from the highest on."""
    values, total = len(shares), 0.0
    bad = np.cumsum(np.multiply(shares, agree)) / np.cumsum(shares) < epsilon - 1e-12
    cells = np.stack((np.multiply(shares, agree), shares - np.multiply(shares, agree)), axis=1).ravel()
    for drawn in combinations_with_replacement(range(2 * values), rows):
        drawn = np.array(drawn)
        threshold = tau_with_confidence(values - drawn // 2.0, drawn % 2 == 0, np.arange(rows), epsilon, delta)
        if math.isfinite(threshold) and bad[int(values - threshold)]:
            counts = np.bincount(drawn, minlength=2 * values)
            total += factorial(rows) * math.prod(p**n / factorial(n) for p, n in zip(cells, counts))
    return total


@pytest.mark.parametrize("rows, epsilon, delta", TIGHT)
@pytest.mark.parametrize("shares, agree", [*POPULATIONS[1:4], ((0.312, 0.688), (0.0044, 0.7247))])
def test_with_ties_a_bad_tau_has_at_most_probability_delta_too(rows, epsilon, delta, shares, agree):
    """The last population is the worst that a search over two values found for 4 rows: .99999 delta."""
    chance = chance_of_a_bad_tau_with_ties(rows, epsilon, delta, np.array(shares), np.array(agree))
    assert 0 < chance <= delta


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.2])
def test_tau_with_confidence_is_at_least_the_papers(delta):
    for seed in range(20):
        confidence, agrees = drawn(seed, rows=400)
        for groups in (np.arange(400), np.arange(400) // 4):
            assert tau_with_confidence(confidence, agrees, groups, 0.7, delta) >= tau(confidence, agrees, 0.7)


def test_delta_is_split_over_the_exits():
    one = drawn(0, rows=400, ties=False)
    observed = Observed(np.stack([one[0]] * 4, axis=1), np.stack([one[1]] * 4, axis=1), np.arange(400))
    expected = tau_with_confidence(*one, np.arange(400), 0.8, DELTA / 4)
    assert calibrate(observed, 0.8, DELTA).threshold == (expected,) * 4 + (-math.inf,)


EPSILON = 0.8
EDGE = 0.2
"""In the populations below rows at least so sure agree in a share of EPSILON, and in less just below."""


def chance(confidence, mean, slope):
    """Of agreeing: at confidences from EDGE on, which are uniform, `mean` on average; below them .3."""
    return np.where(confidence > EDGE, mean + (confidence - 0.6) * slope, 0.3)


def rows_alone(random):
    """500 rows."""
    confidence = random.random(500)
    return confidence, random.random(500) < chance(confidence, 0.8, 0.45), np.arange(500)


def texts_of_a_mood(random):
    """150 texts of 8 rows; in half of the texts rows agree more rarely, by the same amount at every confidence."""
    confidence = random.random((150, 8))
    mood = random.choice([-0.08, 0.08], size=(150, 1))
    agrees = random.random((150, 8)) < chance(confidence, 0.8, 0.3) + mood
    return confidence.ravel(), agrees.ravel(), np.repeat(np.arange(150), 8)


def texts_right_or_wrong(random):
    """150 texts of 20 rows: one text in 10 is wrong throughout, however sure."""
    confidence = random.random((150, 20))
    agrees = (random.random((150, 20)) < chance(confidence, 0.8 / 0.9, 0.27)) & (random.random((150, 1)) > 0.1)
    return confidence.ravel(), agrees.ravel(), np.repeat(np.arange(150), 20)


def share_of_broken(draw, choose, sets=100):
    """Of so many calibration sets: those whose tau is so low that fresh rows agree less; and those whose tau is inf."""
    taus = np.array([choose(*draw(np.random.default_rng(seed))) for seed in range(sets)])
    return (taus < EDGE).mean(), np.isinf(taus).mean()


@pytest.mark.parametrize("draw", [rows_alone, texts_of_a_mood, texts_right_or_wrong])
def test_the_populations_agree_in_a_share_of_epsilon_from_where_they_should(draw):
    parts = [draw(np.random.default_rng(seed)) for seed in range(800)]
    confidence, agrees = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    assert agrees[confidence >= EDGE].mean() == pytest.approx(EPSILON, abs=0.004)
    assert agrees[confidence >= EDGE - 0.05].mean() < EPSILON - 0.02


@pytest.mark.parametrize("draw", [rows_alone, texts_of_a_mood, texts_right_or_wrong])
def test_the_guarantee_on_fresh_rows_is_broken_for_a_share_of_delta_at_most(draw):
    broken, _ = share_of_broken(draw, lambda *rows: tau_with_confidence(*rows, EPSILON, DELTA), SETS)
    assert broken <= DELTA + TWO_STANDARD_ERRORS


@pytest.mark.parametrize("draw", [rows_alone, texts_of_a_mood, texts_right_or_wrong])
def test_the_papers_rule_breaks_it_far_more_often(draw):
    broken, _ = share_of_broken(draw, lambda confidence, agrees, groups: tau(confidence, agrees, EPSILON))
    assert broken > 0.3


@pytest.mark.parametrize("draw", [rows_alone, texts_of_a_mood, texts_right_or_wrong])
def test_the_guarantee_is_not_kept_by_never_leaving(draw):
    _, never = share_of_broken(draw, lambda *rows: tau_with_confidence(*rows, EPSILON - 0.1, DELTA))
    assert never < 0.2


def test_rows_of_one_text_that_are_counted_as_independent_break_the_guarantee():
    def as_rows(confidence, agrees, groups):
        return tau_with_confidence(confidence, agrees, np.arange(len(groups)), EPSILON, DELTA)

    broken, _ = share_of_broken(texts_right_or_wrong, as_rows)
    assert broken > DELTA + TWO_STANDARD_ERRORS


# ---- How often a guarantee breaks ----


def pool(draw, draws):
    """Two exits, the second one surer, on the rows of many draws together; every text is a group of its own."""
    confidence, agrees, groups = zip(*(draw(np.random.default_rng(seed)) for seed in range(draws)))
    groups = np.concatenate([group + 10_000 * at for at, group in enumerate(groups)])
    confidence, agrees = np.concatenate(confidence), np.concatenate(agrees)
    return Observed(np.stack((confidence, confidence**0.5), axis=1), np.stack((agrees, agrees), axis=1), groups)


@pytest.mark.parametrize("draw, draws, delta", [(texts_of_a_mood, 2, None), (rows_alone, 1, 0.9)])
def test_a_guarantee_is_broken_where_the_texts_left_over_agree_too_rarely_at_any_exit(draw, draws, delta):
    observed, broken = pool(draw, draws), 0
    random, names = np.random.default_rng(3), sorted(set(observed.groups.tolist()))
    for _ in range(12):
        chosen = set(random.permutation(names)[: len(names) // 4].tolist())
        inside = np.array([group in chosen for group in observed.groups])
        rule = calibrate(observed.take(inside), 0.8, delta)
        below = False
        for k in (0, 1):
            rows = zip(observed.confidence[~inside, k], observed.agrees[~inside, k])
            left = [agree for sure, agree in rows if sure >= rule.threshold[k]]
            below |= bool(left) and sum(left) < 0.8 * len(left)
        broken += below
    broken_share = broken_guarantees(observed, 0.8, delta, sets=12, seed=3)
    assert broken_share["paper" if delta is None else "delta"] == broken / 12
    assert (broken_share["sets"], broken_share["groups_a_set"]) == (12, len(names) // 4)
    assert 0 < broken < 12


@pytest.mark.parametrize("output", [broken_guarantees, calibration.agreement_by_sets])
def test_quarters_are_drawn_of_four_groups_at_least(output):
    three = Observed(np.full((6, 1), 0.5), np.ones((6, 1), bool), np.array([0, 0, 1, 1, 2, 2]))
    with pytest.raises(ValueError, match="a quarter of the rows or texts: expected at least 4, found 3"):
        output(three, 0.5, sets=2)


def test_of_sets_drawn_by_text_the_papers_rule_breaks_many_and_delta_few():
    broken_share = broken_guarantees(pool(texts_right_or_wrong, 4), EPSILON, DELTA, sets=100)
    assert broken_share["paper"] > 0.3 and broken_share["delta"] <= DELTA + 2 * (DELTA * (1 - DELTA) / 100) ** 0.5
    assert "delta" not in broken_guarantees(pool(rows_alone, 2), EPSILON, sets=2)


def test_a_quarter_that_is_too_few_says_how_many_would_do():
    with pytest.raises(calibration.TooFew, match="a calibration set is a quarter of the rows") as refused:
        broken_guarantees(pool(rows_alone, 1).take(np.arange(80)), 0.9, DELTA, sets=1)
    assert broken_guarantees(pool(rows_alone, 1).take(np.arange(refused.value.needed)), 0.9, DELTA, sets=1)["sets"] == 1


# ---- How many are needed ----


@pytest.mark.parametrize("epsilon, delta, rows", [(0.95, 0.05, 59), (0.99, 0.05, 299), (0.9, 0.01, 44), (0.5, 0.1, 4)])
def test_too_few_rows_say_how_many_are_needed(epsilon, delta, rows):
    def perfect(count):
        return Observed(np.linspace(0, 1, count)[:, None], np.ones((count, 1), bool), np.arange(count))

    with pytest.raises(ValueError, match=f"at least {rows} rows are needed, got {rows - 1}; calibrate on more"):
        calibrate(perfect(rows - 1), epsilon, delta)
    assert calibrate(perfect(rows), epsilon, delta).threshold[0] < math.inf
    assert epsilon**rows <= delta < epsilon ** (rows - 1)


@pytest.mark.parametrize("epsilon", [0.5, 0.9, 0.95])
def test_too_few_texts_say_how_many_are_needed(epsilon):
    def perfect(texts):
        groups = np.repeat(np.arange(texts), 6)
        return Observed(np.linspace(0, 1, 6 * texts)[:, None], np.ones((6 * texts, 1), bool), groups)

    with pytest.raises(ValueError, match="texts like these are needed, got 3; calibrate on more") as error:
        calibrate(perfect(3), epsilon, DELTA)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert calibrate(perfect(needed), epsilon, DELTA).threshold[0] < math.inf
    with pytest.raises(ValueError, match=r"at least [0-9]{9,} texts like these"):  # found without trying each
        calibrate(perfect(3), 1 - 1e-9, DELTA)
    with pytest.raises(ValueError, match=f"at least {needed} texts"):
        calibrate(perfect(needed - 1), epsilon, DELTA)


# ---- Errors ----


@pytest.mark.parametrize("epsilon", [0, -0.1, 1.1, math.nan])
def test_an_epsilon_outside_its_range_is_an_error(epsilon):
    observed = Observed(np.ones((3, 1)), np.ones((3, 1), bool), np.arange(3))
    with pytest.raises(ValueError, match="epsilon must be above 0 and at most 1"):
        calibrate(observed, epsilon)


@pytest.mark.parametrize("delta", [0, 5e-324, 1, -1, math.nan])
def test_a_delta_outside_its_range_is_an_error(delta):
    observed = Observed(np.ones((3, 1)), np.ones((3, 1), bool), np.arange(3))
    with pytest.raises(ValueError, match="delta must be at least 1e-09 and below 1"):
        calibrate(observed, 0.5, delta)


def test_epsilon_one_can_be_kept_on_the_calibration_set_but_not_guaranteed():
    observed = Observed(np.ones((3, 1)), np.ones((3, 1), bool), np.arange(3))
    assert calibrate(observed, 1.0).threshold[0] == 1.0
    assert broken_guarantees(observed.take(np.arange(12) % 3)._replace(groups=np.arange(12)), 1.0, sets=2)["paper"] == 0
    for epsilon in (1.0, 1 - 1e-16):
        with pytest.raises(ValueError, match="cannot be guaranteed for fresh rows"):
            calibrate(observed, epsilon, DELTA)


def test_nothing_to_calibrate_is_an_error():
    with pytest.raises(ValueError, match="finite number, found NaN"):
        calibrate(Observed(np.array([[np.nan]]), np.ones((1, 1), bool), np.arange(1)), 0.5)
    with pytest.raises(ValueError, match="expected rows and exits"):
        calibrate(Observed(np.empty((0, 2)), np.empty((0, 2), bool), np.arange(0)), 0.5)
    with pytest.raises(ValueError, match="the model has one exit"):
        observe(recorded_rows()._replace(logits=recorded_rows().logits[:, -1:]))


# ---- How far chance moves tau ----


def test_intervals_resample_groups(monkeypatch):
    confidence, agrees = drawn(0, rows=90)
    observed = Observed(confidence[:, None], agrees[:, None], np.repeat(np.arange(30), 3))
    bounds = intervals(observed, 0.8, resamples=50, seed=3)
    random, taus = np.random.default_rng(3), []
    for _ in range(50):
        rows = np.concatenate([np.arange(3 * text, 3 * text + 3) for text in random.integers(30, size=30)])
        taus.append(tau_by_hand(confidence[rows], agrees[rows], 0.8))
    taus.sort()
    assert bounds.tolist() == [[taus[1], taus[48]]]  # of 50, the 2nd and the 49th hold the middle 95 %


def test_an_interval_may_end_at_never():
    observed = Observed(np.array([[0.1], [0.9]]), np.array([[False], [True]]), np.arange(2))
    assert intervals(observed, 1.0).tolist() == [[0.9, math.inf]]


def test_intervals_of_correlated_rows_are_wider():
    confidence, agrees, groups = texts_right_or_wrong(np.random.default_rng(0))
    ends = [
        intervals(Observed(confidence[:, None], agrees[:, None], drawn_together), EPSILON, resamples=200)[0]
        for drawn_together in (groups, np.arange(len(groups)))
    ]
    together, alone = np.minimum(ends, 1.0)
    assert together[1] - together[0] > alone[1] - alone[0]


# ---- Classifiers ----


def recorded_rows(rows=600, classes=3):
    """Four exits whose logits come nearer to the last exit's from one to the next."""
    random = np.random.default_rng(1)
    last = 3 * random.normal(size=(rows, classes))
    logits = np.stack([last + noise * random.normal(size=last.shape) for noise in (4, 2, 1, 0)], axis=1)
    segments = Recorded((1, 2, 4, 6), logits, np.ones((rows, 4, 2)), [1, 1, 2, 2])
    return Record(segments, logits, 1.0)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("delta", [None, DELTA])
def test_end_to_end_is_what_the_loop_finds_on_a_record(measure, delta):
    recorded = recorded_rows()
    observed = observe(recorded, measure)
    rule = calibrate(observed, 0.85, delta, measure)
    result = recorded.replay(rule)
    np.testing.assert_array_equal(replay(observed, rule).exit_index, result.exit_index)
    same = result.logits.argmax(axis=1) == recorded.logits[:, -1].argmax(axis=1)
    assert end_to_end(observed, rule) == same.mean()
    assert len(set(result.exit_index)) > 2


@pytest.mark.parametrize("delta", [None, DELTA])
def test_a_classifier_is_calibrated_on_one_half_and_judged_on_the_other(delta):
    recorded = recorded_rows()
    rule, answer = calibrate_record(recorded, 0.85, delta, "breaking_ties", seed=4)
    half = np.isin(np.arange(600), np.random.default_rng(4).permutation(600)[:300])
    observed = observe(recorded, "breaking_ties")
    assert rule == calibrate(observed.take(half), 0.85, delta, "breaking_ties")
    assert answer["agreement"] == agreement(observed.take(~half), rule)
    assert answer["end_to_end"] == end_to_end(observed.take(~half), rule)
    assert answer["exit_counts"] == np.bincount(replay(observed, rule).exit_index[~half], minlength=4).tolist()
    assert sum(answer["exit_counts"]) == answer["rows_fresh"] == answer["rows_calibration"] == 300
    assert (answer["epsilon"], answer["delta"]) == (0.85, delta)
    assert [float(threshold) for threshold in answer["thresholds"]] == list(rule.threshold[:-1])
    assert answer["mean_layers"] == np.dot(answer["exit_counts"], (1, 2, 4, 6)) / 300


def test_the_answer_is_json_where_an_exit_takes_no_row():
    recorded = recorded_rows()
    recorded.logits[:, 0] = 0.0  # says nothing, and so agrees by chance
    _, answer = calibrate_record(recorded, 0.9)
    read = json.loads(json.dumps(answer, allow_nan=False))
    assert read["thresholds"][0] == "inf" and read["agreement"][0] is None
    assert read["tau_intervals"][0] == ["inf", "inf"]


def test_intervals_are_told_of_the_papers_thresholds_alone():
    """With delta they would be another rule's: thresholds outside their own intervals."""
    rule, answer = calibrate_record(recorded_rows(), 0.85)
    assert all(float(low) <= tau <= float(high) for tau, (low, high) in zip(rule.threshold, answer["tau_intervals"]))
    assert calibrate_record(recorded_rows(), 0.85, DELTA)[1]["tau_intervals"] is None
