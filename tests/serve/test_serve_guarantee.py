"""The guarantee in service, by simulation: an interval that holds the true agreement, and thresholds that rise if the
guarantee is broken and stay where it is kept. What a server counts, as Prometheus reads it."""

import logging
import math
import re
from collections import Counter

import numpy as np
import pytest

from mini_ee.lab.rules import Patience, PatienceConfidence, Policy, QExit, Threshold
from mini_ee.lab.statistics import share_interval
from mini_ee.serve.monitoring import ERROR_LEVEL, RECENT, Guarantee, Metrics, stricter

# ---- The interval ----


def test_the_interval_contains_the_true_agreement_in_93_percent_of_200_hours():
    """In each of them, 50 to 1,000 rows are in the shadow."""
    random, covered = np.random.default_rng(1), 0
    for _ in range(200):
        agreement, guarantee, rule = random.uniform(0.85, 0.995), Guarantee(1.0), Threshold(0.8)
        for agrees in random.random(random.integers(50, 1000)) < agreement:
            guarantee.observe(bool(agrees), rule)
        low, high = share_interval(sum(guarantee.agreements), len(guarantee.agreements))
        covered += low <= agreement <= high
    assert covered >= 0.93 * 200


# ---- Tightening ----
class World:
    """Rows whose confidence at the exit says how likely they agree: from .75 at .5 to 1 at 1."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def agrees(self, threshold):
        confidence = self.random.uniform(0.5, 1)
        return confidence < threshold or self.random.random() < 0.5 + confidence / 2

    @staticmethod
    def agreement(threshold):
        confidence = np.linspace(0.5, 1, 10_001)
        return float(np.where(confidence < threshold, 1, 0.5 + confidence / 2).mean())


def served(world, guarantee, threshold, requests):
    """The threshold after so many requests."""
    rule = Threshold(threshold)
    for _ in range(requests):
        if world.random.random() < guarantee.share:
            rule = guarantee.observe(bool(world.agrees(rule.threshold)), rule)
    return rule.threshold


def test_a_broken_guarantee_holds_again_within_2000_requests():
    """Calibrated where rows are easier: of these .87 agree, guaranteed are .95."""
    assert World.agreement(0.5) == pytest.approx(0.875, abs=0.01)
    ends = [served(World(seed), Guarantee(0.25, 0.95, tighten=True), 0.5, 2000) for seed in range(40)]
    assert np.mean([World.agreement(end) >= 0.95 for end in ends]) >= 0.95


def test_a_guarantee_that_holds_is_not_tightened():
    guarantees = [Guarantee(0.25, 0.95, tighten=True) for _ in range(20)]
    for seed, guarantee in enumerate(guarantees):
        served(World(seed), guarantee, 0.93, 4000)
    assert World.agreement(0.93) > 0.99
    assert not any(guarantee.tightened for guarantee in guarantees)


def test_over_many_looks_a_guarantee_that_just_holds_is_found_broken_in_one_of_ten_services_at_most():
    """The count of looks is spent from LEVEL: 100 looks at LEVEL each would tighten in four of ten services."""
    random, tightened = np.random.default_rng(0), 0
    for _ in range(40):
        guarantee = Guarantee(1.0, 0.95, tighten=True)
        for agrees in random.random(2000) < 0.95:
            guarantee.observe(bool(agrees), Threshold(0.5))
        tightened += guarantee.tightened > 0
    assert tightened / 40 <= ERROR_LEVEL + 2 * (ERROR_LEVEL * (1 - ERROR_LEVEL) / 40) ** 0.5


def test_a_raised_threshold_is_logged_and_counted_anew(caplog):
    guarantee, rule = Guarantee(1.0, 0.95, tighten=True), Threshold((0.6, 0.8, 0.0))
    with caplog.at_level(logging.WARNING, "mini_ee.serve"):
        for at in range(20):
            rule = guarantee.observe(at % 2 == 0, rule)
    assert rule == Threshold((0.8, 0.9, 0.5)) and guarantee.tightened == 1 and not guarantee.agreements
    (line,) = caplog.messages
    assert line.startswith(
        "10 of 20 shadow rows agree with the full model, below the guaranteed agreement of 0.95; "
        "the new rule is {'name': "
    )


@pytest.mark.parametrize(
    "rule, tighter",
    [
        (Threshold(0.8), Threshold(0.9)),
        (Threshold(0.9995), Threshold(math.inf)),
        (Threshold((math.inf, 0.5, 0.0)), Threshold((math.inf, 0.75, 0.5))),  # closed by `calibrate`: stays closed
        (Threshold((math.inf, -0.4), "entropy"), Threshold((math.inf, -0.2), "entropy")),
        (Threshold((-math.inf, 0.5, 0.0)), Threshold((0.5, 0.75, 0.5))),
        (Threshold(-0.4, "entropy"), Threshold(-0.2, "entropy")),
        (Threshold(-math.inf, "entropy"), Threshold(-1.0, "entropy")),
        (Threshold(3.0, "breaking_ties_logits"), Threshold(4.0, "breaking_ties_logits")),
        (Policy(0.5), Policy(0.75)),
        (QExit(0.0), QExit(0.5)),
        (Patience(2), Patience(3)),
        (PatienceConfidence(2, 0.8), PatienceConfidence(2, 0.9)),
    ],
)
def test_half_of_what_is_missing_to_certainty_is_added(rule, tighter):
    assert stricter(rule) == tighter


# ---- What is shown ----
def values(page):
    """name{label} -> value, as Prometheus reads a page."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}


def test_the_page_counts_requests_exits_seconds_and_agreements():
    metrics = Metrics((2, 4), Guarantee(0.5, 0.9), None, "id")
    before = values(metrics.page({}))
    assert not any(name.startswith(("mini_ee_agreement", "mini_ee_exit_drift")) for name in before)
    for layers, seconds in ((2, 0.004), (2, 0.0005), (4.0000005, 99.0), ([2, 4, 4], 0.02)):
        metrics.count_answer(layers, seconds)
    for at in range(100):
        metrics.guarantee.observe(at < 95, None)
    metrics.count_batch("4", 3)
    metrics.requests["refused"] += 2
    page = metrics.page({"2": 0, "4": 7})
    counts = values(page)
    assert counts['mini_ee_requests_total{outcome="answered"}'] == 4
    assert counts['mini_ee_requests_total{outcome="refused"}'] == 2
    assert counts['mini_ee_exits_total{layers="2"}'] == 3 and counts['mini_ee_exits_total{layers="4"}'] == 3
    assert counts['mini_ee_queue_rows{queue="4"}'] == 7 and counts['mini_ee_batch_rows_total{queue="4"}'] == 3
    bounds = (0.001, 0.005, 0.025, 10.0, "+Inf")
    assert [counts[f'mini_ee_request_seconds_bucket{{le="{bound}"}}'] for bound in bounds] == [1, 2, 3, 3, 4]
    assert counts["mini_ee_request_seconds_sum"] == pytest.approx(99.0245)
    ends = [counts[f'mini_ee_agreement{{end="{end}"}}'] for end in ("low", "mean", "high")]
    low, high = share_interval(95, 100)
    assert ends == pytest.approx([low, 0.95, high], abs=1e-5)
    assert counts["mini_ee_guaranteed_agreement"] == 0.9 and counts["mini_ee_shadow_total"] == 100
    named = Counter(line.split()[2] for line in page.splitlines() if line[0] == "#")  # HELP and TYPE of each
    names = {re.sub("_(bucket|sum|count)$", "", name.partition("{")[0]) for name in counts}
    assert set(named) >= names and set(named.values()) == {2}


@pytest.mark.parametrize("expected", [(75, 25), None], ids=["calibrated", "the first answers"])
def test_drift_is_how_far_exits_are_from_the_expected(expected):
    metrics = Metrics((2, 4), None, expected, "id")
    for at in range(RECENT):
        metrics.count_answer(4 if at % 4 == 0 else 2, 0.01)
    assert metrics.drift() == pytest.approx(0, abs=1e-9)
    for _ in range(RECENT):
        metrics.count_answer(4, 0.01)
    assert metrics.drift() == pytest.approx(0.75)
