"""The guarantee of the default rule: its exact test, the choice of the rule, and the number of rows it needs."""

import json
import math
from math import comb, factorial
from pathlib import Path

import numpy as np
import pytest

import mini_ee.lab.statistics as statistics
import mini_ee.lab.training.default_rule as default_rules
from mini_ee.calibrate import fixed_sequence
from mini_ee.experiments.measured import frequent_lines
from mini_ee.experiments.measured import guarantees_page as guarantees
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import Task
from mini_ee.lab.recording import Record, Recorded, predictions
from mini_ee.lab.rules import Never, Patience, Threshold
from mini_ee.lab.statistics import p_values_of_counts, paired_p_values, rows_needed
from mini_ee.lab.training.default_rule import default_rule, paired_losses, sweep

RESULTS = Path(__file__).parents[2] / "results"
ALPHA = 0.05
MAX_LOSS = 0.01
CLASSES = Task("t", ("a", "b"), ("accuracy",), {})
NUMBERS = Task("t", (), ("pearson",), {})
THRESHOLDS = sweep(Threshold(math.inf))


@pytest.fixture
def as_many_candidates_as_usual(few_candidates, monkeypatch):
    monkeypatch.setattr(default_rules, "CANDIDATES", few_candidates)


# ---- The exact test ----


def score_by_hand(worse, better, rows, max_loss):
    """(observed - allowed) / standard error at the nuisance of largest likelihood, which is searched for."""
    x = np.linspace(1e-9, (1 - max_loss) / 2 - 1e-9, 5001)
    likelihood = (
        worse * np.log(x + max_loss) + better * np.log(x) + (rows - worse - better) * np.log1p(-2 * x - max_loss)
    )
    x = x[likelihood.argmax()]
    return (worse - better - rows * max_loss) / np.sqrt(rows * (2 * x + max_loss - max_loss**2))


def counts_scored_as_low(worse, better, rows, max_loss):
    """All counts (worse, better) whose score is at most the one observed, by enumeration."""
    observed = score_by_hand(worse, better, rows, max_loss) + 1e-6
    every = [(w, b) for w in range(rows + 1) for b in range(rows + 1 - w)]
    return [counts for counts in every if score_by_hand(*counts, rows, max_loss) <= observed]


def chance_by_hand(counts, rows, max_loss, x):
    """The probability of these counts if the share of better rows is x."""
    total = 0.0
    for w, b in counts:
        ways = factorial(rows) // (factorial(w) * factorial(b) * factorial(rows - w - b))
        total += ways * (x + max_loss) ** w * x**b * (1 - 2 * x - max_loss) ** (rows - w - b)
    return total


@pytest.mark.parametrize(
    "worse, better, rows, max_loss", [(0, 0, 12, 0.2), (1, 2, 12, 0.2), (3, 2, 14, 0.3), (0, 2, 14, 0.1)]
)
def test_a_p_value_is_the_worst_chance_over_what_the_better_rows_may_be(worse, better, rows, max_loss):
    p = p_values_of_counts(np.array([worse]), np.array([better]), rows, max_loss)[0]
    plausible = []  # of the nuisance, by enumeration too
    for x in np.linspace(0, (1 - max_loss) / 2, 60):
        below, above = (
            sum(comb(rows, b) * x**b * (1 - x) ** (rows - b) for b in counts)
            for counts in (range(better + 1), range(better, rows + 1))
        )
        if min(below, above) >= statistics.GAMMA / 2:
            plausible.append(x)
    counts = counts_scored_as_low(worse, better, rows, max_loss)
    worst = max(chance_by_hand(counts, rows, max_loss, x) for x in plausible)
    assert worst <= p <= worst + statistics.GAMMA + 0.02  # cells are a bound: a little above


def test_rows_that_never_differ_are_tested_as_the_plain_binomial():
    for rows in (100, 298, 299, 302, 1000):
        p = p_values_of_counts(np.array([0]), np.array([0]), rows, MAX_LOSS)[0]
        assert p == pytest.approx((1 - MAX_LOSS) ** rows + statistics.GAMMA, abs=statistics.GAMMA / 2)


def test_p_values_rise_with_worse_rows_and_fall_with_better_ones():
    counts = np.arange(25)
    for better in (0, 5, 20):
        assert (np.diff(p_values_of_counts(counts, np.full(25, better), 900, MAX_LOSS)) >= 0).all()
    for worse in (0, 5, 20):
        assert (np.diff(p_values_of_counts(np.full(25, worse), counts, 900, MAX_LOSS)) <= 1e-9).all()


def wrongly_guaranteed(test, rows, better, draws=800):
    """The share of hold-outs that guarantee a rule whose loss is just more than MAX_LOSS."""
    random = np.random.default_rng(rows + round(1e4 * better))
    counts = random.multinomial(rows, [better + MAX_LOSS, better, 1 - 2 * better - MAX_LOSS], size=draws)
    return (test(counts[:, 0], counts[:, 1], rows, MAX_LOSS) <= ALPHA).mean()


SIZES = [(rows, better) for rows in (100, 350, 600, 3000) for better in (0.0, 0.003, 0.02, 0.1)]
TWO_STANDARD_ERRORS = 2 * (ALPHA * (1 - ALPHA) / 800) ** 0.5


@pytest.mark.parametrize("rows, better", SIZES)
def test_at_the_boundary_a_guarantee_is_made_for_a_share_of_alpha_at_most(rows, better):
    assert wrongly_guaranteed(p_values_of_counts, rows, better) <= ALPHA + TWO_STANDARD_ERRORS


def test_a_level_saves_time_and_changes_no_decision():
    for worse, better, rows in ((0, 0, 200), (0, 0, 400), (2, 4, 900), (9, 3, 900), (5, 5, 1500)):
        counts = np.array([worse]), np.array([better]), rows, MAX_LOSS
        exact, p = p_values_of_counts(*counts)[0], p_values_of_counts(*counts, level=ALPHA)[0]
        assert p == exact if exact <= ALPHA else ALPHA < p <= exact


def normal_from_the_sample(worse, better, rows, max_loss):
    """Wald's test: the standard error of the sample, which is too small where little was seen."""
    loss = (worse - better) / rows
    error = np.sqrt(np.maximum((worse + better) / rows - loss**2, 1e-12) / rows)
    return np.where(loss + 1.645 * error <= max_loss, 0.0, 1.0)


@pytest.mark.parametrize("rows, differing", [(3000, 0.04), (1500, 0.02)])
def test_the_test_is_nearly_as_sharp_as_the_normal_one_where_that_is_right(rows, differing):
    counts = np.random.default_rng(0).multinomial(rows, [differing / 2, differing / 2, 1 - differing], size=400)
    power = [
        (test(counts[:, 0], counts[:, 1], rows, MAX_LOSS) <= ALPHA).mean()
        for test in (p_values_of_counts, normal_from_the_sample)
    ]
    assert power[0] > power[1] - 0.08 and power[0] > 0.75


def test_losses_are_counted_and_other_numbers_refused():
    losses = np.array([[0, 1, -1, 0], [0, 0, 0, 0]])
    expected = p_values_of_counts(np.array([1, 0]), np.array([1, 0]), 4, 0.5)
    np.testing.assert_array_equal(paired_p_values(losses, 0.5), expected)
    with pytest.raises(ValueError, match="expected losses .* of -1, 0 and 1"):
        paired_p_values(np.array([[0.5]]), 0.5)
    with pytest.raises(ValueError, match="max_loss must be above 0 and below 1"):
        paired_p_values(losses, 0.0)


# ---- Rows needed ----


@pytest.mark.parametrize("differing", [0.0005, 0.005, 0.02, 0.06])
def test_so_many_rows_guarantee_a_rule_that_loses_nothing_four_times_in_five(differing):
    rows = rows_needed(differing, MAX_LOSS, 1 - ALPHA)

    def guaranteed(rows):
        counts = np.random.default_rng(1).multinomial(rows, [differing / 2, differing / 2, 1 - differing], size=300)
        return (p_values_of_counts(counts[:, 0], counts[:, 1], rows, MAX_LOSS) <= ALPHA).mean()

    assert guaranteed(rows) > statistics.POWER - 0.05
    assert guaranteed(rows // 2) < statistics.POWER - 0.1


# ---- The rule that is chosen ----


def recorded(logits, exits):
    logits = np.asarray(logits, np.float32)
    layers = list(np.diff((0, *exits)))
    return Record(Recorded(exits, logits, np.ones((*logits.shape[:2], 2)), layers), logits, 1.0)


def population(rows, seed, strengths=(0.6, 1.2, 2.0)):
    """Three exits, the later the surer and the oftener right, with noise that they share in part."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    shared = random.normal(0, 0.8, rows)
    margins = [strength + shared + random.normal(0, 0.6, rows) for strength in strengths]
    sign = np.where(labels == 1, 1, -1)
    return recorded(np.stack([np.stack((-sign * m, sign * m), axis=1) for m in margins], axis=1), (1, 2, 3)), labels


def parts(record, labels, share=0.1):
    """The rows that select, the first tenth, and those that test."""
    first = math.ceil(share * len(labels)) if len(labels) else 0
    record = record._replace(labels=labels)
    return record.take(slice(first)), record.take(slice(first, None))


def chosen_from(record, labels, task=CLASSES, *settings, **others):
    return default_rule(*parts(record, labels), task, *settings, **others)


def loss_of(rule, record, labels):
    output = predictions(record.replay(rule).logits)
    return ((predictions(record.logits[:, -1]) == labels).astype(int) - (output == labels)).mean()


def without_bound(record, labels):
    good = [rule for rule in THRESHOLDS(record) if loss_of(rule, record, labels) <= MAX_LOSS]
    return min(good, key=lambda rule: record.replay(rule).layers_run.mean(), default=Never())


def exceeded(choose, draws=20, rows=600):
    """The share of hold-outs whose rule loses more than MAX_LOSS on fresh rows, and the mean of the layers saved."""
    fresh, fresh_labels = population(10_000, seed=10**6)
    losses, saved = [], []
    for seed in range(draws):
        rule = choose(*population(rows, seed))
        losses.append(loss_of(rule, fresh, fresh_labels))
        saved.append(1 - fresh.replay(rule).layers_run.mean() / 3)
    return (np.array(losses) > MAX_LOSS).mean(), np.mean(saved)


def guaranteed_rule(record, labels):
    chosen = chosen_from(record, labels, CLASSES, MAX_LOSS)
    return chosen.rule if chosen.guarantee else Never()


@pytest.mark.usefixtures("as_many_candidates_as_usual")
def test_the_guarantee_is_kept_on_fresh_rows_and_layers_are_saved():
    broken, saved = exceeded(guaranteed_rule)
    assert broken <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / 20) ** 0.5 and saved > 0.1


@pytest.mark.usefixtures("as_many_candidates_as_usual")
def test_without_a_bound_it_is_broken_far_more_often():
    assert exceeded(without_bound, draws=8)[0] > 0.25


def any_that_passes(p_values, level):
    """Planted: not up to the first that fails; the looser rules are tried though stricter ones failed."""
    passes = np.flatnonzero(np.asarray(p_values) <= level)
    return int(passes[-1]) + 1 if len(passes) else 0


def rules_that_lose_too_much(rows, seed):
    """30 rules that lose .012 each, and not together: some pass by chance."""
    random = np.random.default_rng(seed)
    return random.choice([1, -1, 0], p=[0.017, 0.005, 0.978], size=(30, rows)).astype(np.int8)


def test_trying_on_after_a_failure_would_break_it():
    tries = [paired_p_values(rules_that_lose_too_much(600, seed), MAX_LOSS) for seed in range(40)]
    right = np.mean([fixed_sequence(p_values, ALPHA) > 0 for p_values in tries])
    assert right <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / 40) ** 0.5
    assert np.mean([any_that_passes(p_values, ALPHA) > 0 for p_values in tries]) > 0.3
    in_observed_order = [fixed_sequence(np.sort(p_values), ALPHA) > 0 for p_values in tries]
    assert np.mean(in_observed_order) > 0.3


def test_candidates_and_their_order_come_from_the_selection_part_and_the_figures_from_the_test_part():
    record, labels = population(700, seed=3)
    selection, test = parts(record, labels)
    seen = []

    def candidates(some):
        seen.append(some)
        return THRESHOLDS(some)

    chosen = default_rule(selection, test, CLASSES, MAX_LOSS, candidates=candidates)
    assert chosen.guarantee and len(seen) == 1 and seen[0] is selection
    assert chosen.guarantee["rows"] == len(test.labels) == 630
    losses = (predictions(test.logits[:, -1]) == test.labels).astype(int)
    losses -= predictions(test.replay(chosen.rule).logits) == test.labels
    assert chosen.guarantee["loss_on_holdout"] == losses.mean()
    p_value = paired_p_values(losses[None], MAX_LOSS)[0]
    assert chosen.guarantee["p_value"] == pytest.approx(p_value) and p_value <= ALPHA
    assert json.loads(json.dumps(chosen.guarantee)) == chosen.guarantee
    assert chosen.guarantee["of"] == "accuracy" and chosen.rows_needed is None and chosen.metrics["fallback"] is None
    message = chosen.metrics["guaranteed"]
    assert message.startswith("Guaranteed with confidence 95%: the default rule loses at most 0.01 of accuracy")
    assert "the 630 held-out ones that tested it and chose nothing. 70 others chose" in message
    assert "calibrate RUN --task DIR" in message


def test_a_higher_confidence_and_a_smaller_loss_save_no_more():
    record, labels = population(2000, seed=4)

    def saved(max_loss, confidence):
        chosen = chosen_from(record, labels, CLASSES, max_loss, confidence)
        assert chosen.guarantee
        return record.replay(chosen.rule).layers_run.mean()

    assert saved(0.01, 0.99) >= saved(0.01, 0.95) >= saved(0.01, 0.5)
    assert saved(0.01, 0.95) >= saved(0.03, 0.95)


def test_without_a_guarantee_a_rule_is_taken_that_loses_less_than_a_twentieth_and_enough_rows_are_named():
    record, labels = population(200, seed=5)
    chosen = chosen_from(record, labels, CLASSES, MAX_LOSS)
    _, test = parts(record, labels)
    assert chosen.guarantee is None and chosen.rule != Never() and loss_of(chosen.rule, test, test.labels) <= MAX_LOSS
    fallback = chosen.metrics["fallback"]
    assert (fallback["max_loss"], fallback["confidence"], fallback["rows"]) == (0.05, 0.95, 180)
    losses = (predictions(test.logits[:, -1]) == test.labels).astype(int)
    losses -= predictions(test.replay(chosen.rule).logits) == test.labels
    p_value = paired_p_values(losses[None], 0.05)[0]
    assert fallback["p_value"] == pytest.approx(p_value, rel=0.01) and fallback["p_value"] <= 0.05
    assert 300 < chosen.rows_needed < 20_000
    assert chosen.metrics["guaranteed"] == (
        "The default rule loses less than 0.05 of accuracy with confidence 95%, by a test on 180 held-out examples. "
        "A loss of at most 0.01 with confidence 95% is not guaranteed: "
        f"about {chosen.rows_needed} held-out test examples are needed."
    )
    made = [
        default_rule(*parts(*population(chosen.rows_needed + 70, seed), share=70 / (chosen.rows_needed + 70)), CLASSES)
        for seed in range(100, 110)
    ]
    assert sum(choice.guarantee is not None for choice in made) >= 8


def alike(rows, worse=0):
    """Two exits that say the same of all rows, but for so many of the tested ones that the first gets wrong."""
    labels = np.arange(rows + 5) % 2
    last = np.where(labels[:, None] == [0, 1], 3.0, 0.0)
    first = last.copy()
    first[5 : 5 + worse] = first[5 : 5 + worse, ::-1]
    record = recorded(np.stack((first, last), axis=1), (1, 2))._replace(labels=labels)
    return record.take(slice(5)), record.take(slice(5, None))


@pytest.mark.parametrize(
    "rows, worse, exits_early",
    [(0, 0, False), (5, 0, False), (10, 0, False), (58, 0, False), (59, 0, True), (95, 1, True)],
)
def test_a_rule_is_taken_from_59_test_rows_that_lose_nothing_and_not_from_fewer(rows, worse, exits_early):
    """.95^59 + GAMMA is below .05, .95^58 is not."""
    chosen = default_rule(*alike(rows, worse), CLASSES, 0.02, candidates=lambda some: [Threshold(0.0)])
    assert chosen.guarantee is None and (chosen.rule == Threshold(0.0)) == exits_early
    message = chosen.metrics["guaranteed"]
    assert "are needed" in message and "lost nothing" not in message
    if not exits_early:
        assert chosen.rule == Never() and chosen.metrics["fallback"] is None
        first = f"The default rule is the full model: on {rows} held-out test examples no other rule is shown to lose"
        assert message.startswith(f"{first} less than 0.05 of accuracy with confidence 95%; about ")
        assert int(message.split("; about ")[1].split()[0]) >= 59


def test_a_rule_that_lost_more_than_was_allowed_on_the_test_part_is_not_taken():
    """5 of 400 are worse: surely below .05, but .0125 is above the .01 that may be lost."""
    assert default_rule(*alike(400, worse=5), CLASSES, 0.01, candidates=lambda some: [Threshold(0.0)]).rule == Never()
    assert default_rule(*alike(400, worse=5), CLASSES, 0.015, candidates=lambda some: [Threshold(0.0)]).metrics[
        "fallback"
    ]


def test_the_default_rule_never_exits_where_every_early_exit_is_wrong():
    labels = np.array([0, 1] * 200)
    right = np.eye(2)[labels] * 5
    chosen = chosen_from(recorded(np.stack([-right, -right, right], 1), (2, 4, 6)), labels, CLASSES, MAX_LOSS)
    assert chosen.rule == Never() and chosen.guarantee is None
    assert chosen.metrics["guaranteed"].startswith("The default rule is the full model")


def test_a_guarantee_that_fails_by_bad_luck_names_more_rows_than_there_are(monkeypatch):
    record, labels = population(600, seed=6)
    monkeypatch.setattr(default_rules, "paired_p_values", lambda losses, *_, **level: np.ones(len(losses)))
    assert chosen_from(record, labels, CLASSES, MAX_LOSS).rows_needed > 600


@pytest.mark.parametrize("rows", [1, 2, 9, 15])
def test_hardly_any_rows_leave_the_full_model(rows):
    record, labels = population(rows, seed=7)
    chosen = chosen_from(record, labels, CLASSES, MAX_LOSS)
    assert (chosen.rule, chosen.guarantee) == (Never(), None)


def test_a_single_exit_has_no_rule_and_no_number_of_rows_would_do():
    record, labels = population(400, seed=8)
    alone = recorded(record.logits[:, -1:], (3,))
    chosen = chosen_from(alone, labels, CLASSES, MAX_LOSS)
    assert (chosen.rule, chosen.guarantee, chosen.rows_needed) == (Never(), None, None)
    assert chosen.metrics["guaranteed"].endswith("no rule of this method can exit before the last of 1 exits.")


def test_a_rule_under_which_nobody_leaves_is_not_guaranteed():
    record, labels = population(700, seed=3)
    chosen = chosen_from(record, labels, CLASSES, MAX_LOSS, candidates=lambda some: [Threshold(np.inf)])
    assert (chosen.rule, chosen.guarantee) == (Never(), None)


def test_exits_that_all_agree_are_left_at_the_first():
    record, labels = population(400, seed=9)
    same = recorded(np.repeat(record.logits[:, -1:], 3, axis=1), (1, 2, 3))
    chosen = chosen_from(same, labels, CLASSES, MAX_LOSS)
    assert chosen.guarantee and same.replay(chosen.rule).layers_run.mean() < 1.1
    assert chosen.guarantee["loss_on_holdout"] == 0


def test_no_loss_at_all_cannot_be_guaranteed():
    record, labels = population(3000, seed=10)
    chosen = chosen_from(record, labels, CLASSES, 0.0)
    _, test = parts(record, labels)
    assert chosen.guarantee is None and chosen.rows_needed is None and loss_of(chosen.rule, test, test.labels) <= 0
    assert chosen.metrics["guaranteed"].endswith("A loss of at most 0 with confidence 95% is not guaranteed.")


@pytest.mark.parametrize("settings", [(-0.1, 0.95), (1.0, 0.95), (float("nan"), 0.95), (0.01, 1.0), (0.01, 0.0)])
def test_settings_out_of_range_are_refused(settings):
    record, labels = population(50, seed=0)
    with pytest.raises(ValueError, match="expected a max_loss from 0 to below 1"):
        chosen_from(record, labels, CLASSES, *settings)


# ---- Other metrics, and regression ----


def test_a_rule_that_is_guaranteed_in_accuracy_loses_no_more_by_the_tasks_own_score_on_the_hold_out():
    random = np.random.default_rng(0)
    labels = (random.random(3000) < 0.02).astype(int)  # never to say 1 costs .02 of accuracy, and all of Matthews
    sure = np.stack((np.full(3000, 3.0), np.zeros(3000)), axis=1)
    last = np.where(labels[:, None] == [0, 1], 3.0, 0.0)
    record = recorded(np.stack((sure, last), axis=1), (1, 2))
    rules = [Threshold(0.5)]
    by_accuracy, by_matthews = (
        chosen_from(record, labels, Task("t", ("a", "b"), (metric,), {}), 0.05, candidates=lambda *_: rules)
        for metric in ("accuracy", "matthews")
    )
    assert by_accuracy.rule == Threshold(0.5) and by_accuracy.guarantee
    assert by_matthews.rule == Never() and not by_matthews.guarantee


def test_losses_of_a_regression_are_rounded_without_a_change_of_their_mean():
    labels = np.linspace(0, 5, 20_000)
    output, last = labels + 0.5, labels - 0.25  # a twentieth of the range more
    losses = paired_losses(NUMBERS, labels, output, last, 5.0)
    assert set(losses.tolist()) == {0, 1} and losses.mean() == pytest.approx(0.05, abs=0.005)
    assert set(paired_losses(NUMBERS, labels, last, output, 5.0).tolist()) == {0, -1}
    assert (paired_losses(NUMBERS, labels, labels + 1e9, labels, 5.0) == 1).all()
    assert (paired_losses(NUMBERS, np.ones(5), np.ones(5), np.ones(5), 0.0) == 0).all()


def test_losses_of_a_regression_are_scaled_by_a_range_that_the_tested_labels_do_not_change():
    labels = np.linspace(0, 5, 900)
    outlier = np.append(labels, 500.0)  # one tested label that lies far away
    losses, with_outlier = (
        paired_losses(NUMBERS, truth, truth + 0.5, truth, label_range=5.0) for truth in (labels, outlier)
    )
    np.testing.assert_array_equal(losses, with_outlier[:-1])
    assert losses.mean() == pytest.approx(0.1, abs=0.02)


def test_a_regression_is_guaranteed_in_mean_absolute_error():
    values = np.linspace(0, 5, 900, dtype=np.float32)[np.random.default_rng(1).permutation(900)]
    record = recorded(np.stack([values] * 4, axis=1)[:, :, None], (1, 2, 3, 4))
    chosen = chosen_from(record, values, NUMBERS, label_range=5.0)
    assert chosen.rule == Patience(1) and "absolute error" in chosen.guarantee["of"]
    assert chosen.guarantee["label_range"] == 5.0
    noise = np.random.default_rng(0).permutation(values)
    record = recorded(np.stack([noise, noise, noise, values], axis=1)[:, :, None], (1, 2, 3, 4))
    chosen = chosen_from(record, values, NUMBERS, label_range=5.0)
    assert chosen.guarantee is None and chosen.rule == Never()


# ---- What the guarantees keep on real rows ----


def test_the_guarantees_that_were_measured_hold():
    figures = read_json(RESULTS / "guarantees.json")
    assert all(case["guaranteed"] and case["exceeded"] <= 0.05 for case in figures["default"])
    usual, finer, _ = guarantees.by_kind(figures["repeated"])
    assert {measured["method"] for measured in usual} == {"joint", "lora-exits", "consistent", "right-tool"}
    assert [measured["broken"] <= 0.05 * measured["trainings"] for measured in finer] == [True]
    for row in usual:
        assert row["trainings"] >= 100 and row["guaranteed"] > row["trainings"] / 2 and row["interval"][0] <= 0.05
    assert guarantees.together(usual)["broken"] <= 0.05 * guarantees.together(usual)["trainings"]
    (untested,) = (measured for measured in figures["repeated"] if measured["planted"] == "no test")
    assert untested["interval"][0] > 0.05, "what is measured can be broken"
    frequent = figures["frequent"]
    assert {(planted["share"], planted["texts"]) for planted in frequent["cases"]} >= {(0, 0), (0.3, 15), (0.5, 40)}
    for case in frequent["cases"]:
        assert case["planted"] or case["violated"] <= 0.05 * frequent["repetitions"] <= case["guaranteed"]
    assert sum(row["interval"][0] > 0.05 for row in frequent["cases"] if row["planted"]) > 3, "it can be broken"
    for calibrated in figures["calibrate"]:
        assert calibrated["kept"]["sets"] == 1000 and calibrated["kept"]["conformal"] >= calibrated["epsilon"]
        assert calibrated["broken"]["delta"] <= 0.05


def test_frequent_texts_have_their_share_of_the_lines_and_each_line_counts():
    random, wrong = np.random.default_rng(0), np.arange(400) % 8 == 0
    for unlike in (False, True):
        chance = frequent_lines.probabilities(wrong, 0.3, 20, unlike, random)
        often = chance > 1 / 400
        assert chance.sum() == pytest.approx(1) and often.sum() == 20 and chance[often].sum() == pytest.approx(0.3)
    assert wrong[often].sum() == 10
    last = random.normal(size=(400, 2))
    first = np.where(wrong[:, None], -last, last)
    record = recorded(np.stack([first, last], axis=1), (1, 2))._replace(labels=predictions(last))
    for lines, tested in ((np.repeat(np.arange(300), 10), 1000), (np.arange(300), 100)):
        chosen = frequent_lines.chosen_from(record, lines, 0.8, 0)
        assert chosen.guarantee["rows"] == tested
