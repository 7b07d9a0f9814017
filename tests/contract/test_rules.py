"""Rules: their limits, and their settings as JSON.

Each rule against its paper's definition: tests/spec/test_0_loop.py.
"""

import json
import math

import numpy as np
import pytest

from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.recording import Recorded
from mini_ee.lab.rule_inputs import served_by
from mini_ee.lab.rules import (
    RULES,
    Fixed,
    Never,
    Patience,
    PatienceConfidence,
    Policy,
    QExit,
    Rule,
    Threshold,
    rule_from_dict,
)

EXITS = 8


def replay(rule, logits):
    """Exit index (B,) of each row under the loop, for logits (B, K, C)."""
    rows, exits, _ = logits.shape
    segments = Recorded(tuple(range(1, exits + 1)), logits, np.zeros((rows, exits, 2)), [1] * exits)
    return early_exit(segments, rule, range(rows)).exit_index


def random_logits(rows=200, classes=3, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, EXITS, classes)).astype(np.float32)


def predicting(*sequences, classes=2):
    """Logits (B, K, C) that predict these classes, exit by exit."""
    return np.eye(classes, dtype=np.float32)[np.array(sequences)]


# Thresholds


@pytest.mark.parametrize("measure", MEASURES)
def test_minus_infinity_and_the_smallest_threshold_always_exit_and_infinity_never(measure):
    logits = np.concatenate([random_logits(), np.zeros((1, EXITS, 3), np.float32)])
    assert (replay(Threshold(-math.inf, measure), logits) == 0).all()
    assert (replay(Threshold(MEASURES[measure][1], measure), logits) == 0).all()
    assert (replay(Threshold(math.inf, measure), logits) == EXITS - 1).all()


def test_infinity_closes_one_exit_and_leaves_the_others_open():
    levels = [math.inf, 0.6, math.inf, *[0.6] * (EXITS - 3)]
    exit_index = replay(Threshold(levels), random_logits())
    assert set(exit_index) >= {1, 3} and not set(exit_index) & {0, 2}


@pytest.mark.parametrize(
    "threshold, measure, message",
    [
        (1.5, "max_probability", "max_probability must be from 0.0 to 1.0, got 1.5"),
        (-0.1, "max_probability", "must be from 0.0 to 1.0, got -0.1"),
        (0.1, "entropy", "entropy must be from -inf to 0.0, got 0.1"),
        (-1.1, "normalised_entropy", "must be from -1.0 to 0.0"),
        (2.0, "breaking_ties", "must be from 0.0 to 1.0"),
        (-1.0, "breaking_ties_logits", "must be from 0.0 to inf"),
        (math.nan, "max_probability", "got nan"),
        ((0.5, 1.5), "max_probability", "got 1.5"),
        (0.5, "margin", "measure must be one of max_probability, .*, got 'margin'"),
        ("high", "max_probability", "could not convert string to float: 'high'"),
    ],
)
def test_a_threshold_outside_the_range_of_its_measure_is_refused(threshold, measure, message):
    with pytest.raises(ValueError, match=message):
        Threshold(threshold, measure)


def test_a_number_of_thresholds_other_than_of_exits_is_refused():
    Threshold((0.5, 0.6)).check(2)
    Threshold(0.5).check(7)
    for levels in ((), (0.5,), (0.5, 0.6, 0.7)):
        with pytest.raises(ValueError, match=f"expected one threshold or 2, one for each exit, got {len(levels)}"):
            Threshold(levels).check(2)


# Patience


@pytest.mark.parametrize("patience", [0, -1, 1.5, "2", None, True])
def test_patience_has_to_be_a_whole_number_of_at_least_1(patience):
    for make in (Patience, lambda p: PatienceConfidence(p, 0.5)):
        with pytest.raises(ValueError, match=f"patience must be a whole number of at least 1, got {patience!r}"):
            make(patience)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.inf, math.nan])
def test_the_tolerance_has_to_be_a_number_above_0(tolerance):
    with pytest.raises(ValueError, match="tolerance must be a number above 0, got"):
        Patience(1, tolerance)


# Patience with confidence (PCEE-BERT): consecutive exits are confident

LEVELS = {
    "max_probability": 0.8,
    "entropy": -0.5,
    "normalised_entropy": -0.45,
    "breaking_ties": 0.6,
    "breaking_ties_logits": 2.0,
}


def pcee(logits, t, threshold, measure):
    """PCEE-BERT, section 3: the number of consecutive confident exits, 1 at the first of them."""
    count = 0
    for k in range(EXITS - 1):
        count = count + 1 if MEASURES[measure][0](logits[k : k + 1])[0] >= threshold else 0
        if count == t:
            return k
    return EXITS - 1


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("measure", MEASURES)
def test_patience_confidence_stops_after_t_consecutive_confident_exits(t, measure):
    logits, threshold = random_logits(), LEVELS[measure]
    exit_index = replay(PatienceConfidence(t, threshold, measure), logits)
    assert exit_index.tolist() == [pcee(row, t, threshold, measure) for row in logits]
    assert {t - 1, EXITS - 1} <= set(exit_index)


def test_patience_confidence_of_1_is_the_threshold():
    logits = random_logits()
    np.testing.assert_array_equal(replay(PatienceConfidence(1, 0.8), logits), replay(Threshold(0.8), logits))


def test_patience_confidence_ignores_a_change_of_prediction():
    logits = np.repeat(10 * predicting([0, 1, 0, 1]), 2, axis=1)
    assert replay(PatienceConfidence(2, 0.9), logits) == 1
    assert replay(Patience(3), logits) == 7


def test_patience_confidence_takes_one_threshold_in_the_range_of_its_measure():
    with pytest.raises(ValueError, match="the rule patience-confidence takes one threshold, got 2"):
        PatienceConfidence(1, (0.5, 0.6))
    with pytest.raises(ValueError, match="must be from 0.0 to 1.0, got 2.0"):
        PatienceConfidence(1, 2.0)
    with pytest.raises(ValueError, match="measure must be one of"):
        PatienceConfidence(1, 0.5, "margin")


# Policy


def test_a_cut_of_0_always_leaves_and_1_never_even_where_the_sigmoid_is_0_or_1():
    exit_logit = np.array([-1e30, 0.0, 1e30], np.float32)
    assert Policy(0).stop(0, exit_logit, {}).all() and not Policy(1).stop(0, exit_logit, {}).any()


def test_a_probability_of_one_half_is_not_above_one_half():
    for rule in (Policy(), QExit()):
        assert not rule.stop(0, np.zeros(1), {})[0]


@pytest.mark.parametrize("cut", [-0.1, 1.1, math.nan])
def test_the_cut_has_to_be_a_probability(cut):
    with pytest.raises(ValueError, match=f"must be from 0 to 1, got {cut}"):
        Policy(cut)


def test_the_rule_policy_needs_a_model_that_says_when_to_leave():
    with pytest.raises(ValueError, match="needs a model with a policy, and this one has none; give a run of"):
        replay(Policy(), random_logits())


# Fixed and never


def test_a_fixed_exit_is_planned_for_every_row_and_reads_no_head_before():
    assert Fixed(2).plan(range(5)).tolist() == [2] * 5
    assert Fixed(2).needs is None
    assert (replay(Fixed(2), random_logits()) == 2).all()


@pytest.mark.parametrize("index", [-1, 4, 1.5, "1", True, 1.0, None])
def test_a_fixed_exit_has_to_be_one_of_the_exits(index):
    Fixed(3).check(4)
    with pytest.raises(ValueError, match=f"the fixed exit must be one of the 4 exits, got index {index!r}"):
        Fixed(index).check(4)


def test_never_exit_plans_nothing_and_reads_nothing():
    assert Never().plan(range(5)) is None and Never().needs is None
    assert (replay(Never(), random_logits()) == EXITS - 1).all()


# Settings


ONE_OF_EACH = [
    Never(),
    Fixed(3),
    Threshold(0.5),
    Threshold(-0.25, "entropy"),
    Threshold((0.1, math.inf, -math.inf)),
    Threshold(math.inf),
    Threshold(-math.inf, "breaking_ties_logits"),
    Patience(2),
    Patience(1, 0.25),
    PatienceConfidence(3, 0.75),
    PatienceConfidence(1, math.inf, "breaking_ties"),
    QExit(),
    QExit(1.0),
    Policy(),
    Policy(0.25),
]


def test_one_of_each_has_one_of_each():
    assert {type(rule) for rule in ONE_OF_EACH} == {
        kind for kind in RULES.values() if kind.__module__ == "mini_ee.lab.rules"
    }


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_a_rule_written_as_json_and_read_back_is_the_same_rule(rule):
    written = json.dumps(rule.to_dict(), allow_nan=False)
    assert rule_from_dict(json.loads(written)) == rule
    assert type(rule_from_dict(json.loads(written))) is type(rule)


@pytest.mark.parametrize(
    "requested, there, fits",
    [
        (Threshold(0.5), Threshold((0.1, 0.2, 0.3)), True),
        (Threshold(0.5), Threshold(0.5, "breaking_ties"), False),
        (Patience(2), Patience(3), True),
        (Patience(2, 0.25), Patience(2, 0.5), False),
        (PatienceConfidence(3, 0.75), PatienceConfidence(1, 0.5), True),
        (PatienceConfidence(3, 0.75), PatienceConfidence(3, 0.75, "breaking_ties"), False),
        (Policy(0.25), Policy(0.75), True),
        (QExit(0.25), QExit(0.75), True),
        (Patience(2), Threshold(0.5), False),
    ],
)
def test_a_graph_is_fed_another_threshold_but_not_another_measure(requested, there, fits):
    assert served_by(requested, there) is fits


def test_the_json_of_a_rule_is_its_name_and_settings():
    assert Threshold((0.5, math.inf)).to_dict() == {
        "name": "threshold",
        "threshold": [0.5, "inf"],
        "measure": "max_probability",
    }
    assert PatienceConfidence(2, -math.inf, "entropy").to_dict() == {
        "name": "patience-confidence",
        "patience": 2,
        "threshold": "-inf",
        "measure": "entropy",
    }
    assert Never().to_dict() == {"name": "never"}


def test_reading_a_rule_leaves_the_config_as_it_was():
    config = Threshold(0.5).to_dict()
    rule_from_dict(config)
    assert config == Threshold(0.5).to_dict()


def test_a_rule_that_neither_plans_nor_stops_is_told():
    class Stops(Rule):
        def stops(self, k, read, memory):
            return np.ones(2, bool)

    with pytest.raises(NotImplementedError, match=r"Stops has no stop\(k, read, memory\)"):
        Stops().stop(0, np.zeros((2, 3)), {})


def test_a_list_or_integers_from_json_become_a_tuple_of_floats():
    rule = rule_from_dict({"name": "threshold", "threshold": [0, 1]})
    assert rule.threshold == (0.0, 1.0) and hash(rule) == hash(Threshold((0.0, 1.0)))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"name": "oracle"}, "the rule must be one of never, fixed, threshold, .*, found 'oracle'"),
        ({}, "found None"),
        ({"name": "threshold"}, "the rule threshold does not take these settings: .*threshold"),
        ({"name": "threshold", "threshold": None}, "the rule threshold does not take these settings"),
        (
            {"name": "threshold", "threshold": 0.5, "speed": 1},
            "the rule threshold does not take these settings: .*'speed'",
        ),
        ({"name": "never", "exit": 1}, "the rule never does not take these settings"),
        ({"name": "patience"}, "the rule patience does not take these settings: .*patience"),
        ({"name": "patience", "patience": "2"}, "patience must be a whole number"),
        ({"name": "patience-confidence", "patience": 1, "threshold": [0.5]}, "takes one threshold"),
    ],
)
def test_what_rule_from_dict_does_not_know_is_a_value_error(config, message):
    with pytest.raises(ValueError, match=message):
        rule_from_dict(config)


# No state


def stops(rule, logits, memory, k):
    if rule.needs is None:
        return []
    stop = rule.stop(k, logits[:, k] if rule.needs == "logits" else logits[:, k, 0], memory)
    assert stop.shape == (len(logits),) and stop.dtype == bool
    return stop.tolist()


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_rules_hold_no_state_two_batches_in_turns_get_what_fresh_rules_give(rule):
    first, second = (random_logits(20, seed=seed)[:, :3] for seed in (1, 2))
    one, other, alone = {}, {}, {}
    in_turns = []
    for k in range(3):
        in_turns.append(stops(rule, first, one, k))
        stops(rule, second, other, k)
    fresh = rule_from_dict(rule.to_dict())
    assert in_turns == [stops(fresh, first, alone, k) for k in range(3)]


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_memory_is_arrays_by_row(rule):
    memory = {}
    for k in range(3):
        stops(rule, random_logits(20), memory, k)
    assert all(isinstance(values, np.ndarray) and values.shape == (20,) for values in memory.values())


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_a_rule_cannot_be_changed(rule):
    with pytest.raises(AttributeError):
        rule.threshold = 0.5
