"""The loop and the rules, on a model that is a table: the logits of every example at every exit are given.

So which example stops where is plain arithmetic: each rule is compared with its paper's definition, written as a loop
over the exits of one example. The loop: mini_ee/loop.py; the rules: mini_ee/rules.py.

The same loop on real models, and what a batch costs: tests/contract/test_early_exit.py. Limits and settings of the
rules: tests/contract/test_rules.py. Bugs that these tests catch: tests/mutants.py.
"""

import numpy as np
import pytest

from mini_ee import loop
from mini_ee.rules import MEASURES, Fixed, Never, Patience, Policy, Rule, Threshold

K = 8  # exits, one after each layer


class Table(loop.Table):
    """A model whose logits (N, K, C), and policy logits (N, K), are known. It records what is run and what is read."""

    def __init__(self, logits, exit_logits=None):
        super().__init__(tuple(range(1, logits.shape[1] + 1)), logits, exit_logits)
        self.ran, self.were_read = [], []

    def advance(self, k, state):
        self.ran.append((k, state.rows.tolist()))
        return state

    def read(self, k, state):
        self.were_read.append((k, state.rows.tolist()))
        return super().read(k, state)


def exits_of(rule, logits, exit_logits=None):
    """The exit index of each example under the loop. Its logits must be those of that exit."""
    result = loop.early_exit(Table(logits, exit_logits), rule, range(len(logits)))
    np.testing.assert_array_equal(result.logits, logits[range(len(logits)), result.exit_index])
    return result.exit_index


def random_logits(examples=400, classes=3, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (examples, K, classes)).astype(np.float32)


def predicting(*sequences, classes=2):
    """Logits that predict these classes, exit by exit."""
    return np.eye(classes, dtype=np.float32)[np.array(sequences)]


# ---- The loop ----


def test_never_exit_is_the_full_model_and_a_fixed_exit_is_that_exit():
    logits = random_logits()
    assert (exits_of(Never(), logits) == K - 1).all()
    assert (exits_of(Fixed(2), logits) == 2).all()


@pytest.mark.parametrize(
    "kind, settings",
    [(Threshold, [0.8]), (Threshold, [(0.9, 0.5, 0.8, *[0.7] * 5)]), (Patience, [1]), (Patience, [2])],
    ids=repr,
)
def test_an_example_stops_in_a_batch_where_it_stops_alone(kind, settings):
    logits, rule = random_logits(), kind(*settings)
    together = exits_of(rule, logits)
    assert together.tolist() == [exits_of(rule, logits[[row]])[0] for row in range(len(logits))]
    assert len(set(together)) > 2


def test_an_example_that_stopped_is_neither_run_nor_read_again():
    table = Table(random_logits(7))
    result = loop.early_exit(table, Threshold(0.8), range(7))
    assert len(set(result.exit_index)) >= 3
    for k, ids in (*table.ran, *table.were_read):
        assert ids == np.flatnonzero(result.exit_index >= k).tolist()
    assert [k for k, _ in table.ran] == list(range(result.exit_index.max() + 1))


def test_a_plan_beyond_the_last_exit_ends_there():
    class Beyond(Rule):
        needs = None

        def plan(self, inputs):
            return np.full(len(inputs), K + 5)

    assert (exits_of(Beyond(), random_logits(7)) == K - 1).all()


# ---- Threshold: a confidence measure reaches a number ----


def threshold_by_definition(logits, thresholds, measure):
    """The exit of one example, logits (K, C). The last exit takes whatever is left."""
    for k in range(K - 1):
        if MEASURES[measure](logits[k : k + 1])[0] >= thresholds[k]:
            return k
    return K - 1


THRESHOLDS = {
    "max_probability": 0.8,
    "entropy": -0.5,
    "normalised_entropy": -0.45,
    "breaking_ties": 0.6,
    "breaking_ties_logits": 2.0,
}


@pytest.mark.parametrize("measure", MEASURES)
def test_threshold_stops_at_the_first_exit_that_reaches_it(measure):
    logits, threshold = random_logits(), THRESHOLDS[measure]
    exit_index = exits_of(Threshold(threshold, measure), logits)
    assert exit_index.tolist() == [threshold_by_definition(row, [threshold] * K, measure) for row in logits]
    assert 0 < exit_index.mean() < K - 1


def test_a_threshold_for_each_exit_is_compared_at_that_exit():
    logits, thresholds = random_logits(), np.linspace(0.95, 0.5, K)
    exit_index = exits_of(Threshold(thresholds.tolist()), logits)
    assert exit_index.tolist() == [threshold_by_definition(row, thresholds, "max_probability") for row in logits]
    assert (exit_index != exits_of(Threshold(float(thresholds[0])), logits)).any()


def test_a_confidence_equal_to_the_threshold_stops():
    logits = np.log(np.array([[[0.75, 0.25], [0.5, 0.5]]]))
    confidence = float(MEASURES["max_probability"](logits[:, 0])[0])
    assert exits_of(Threshold(confidence), logits) == 0
    assert exits_of(Threshold(float(np.nextafter(confidence, 1))), logits) == 1


# ---- Patience (PABEE): consecutive exits predict the same ----


def pabee(predictions, t, same=lambda a, b: a == b):
    """PABEE, section 3.2, counted from 1 as in the paper: cnt_i = cnt_{i-1} + 1 if y_i = y_{i-1}, else 0."""
    count = 0
    for i in range(2, len(predictions) + 1):
        count = count + 1 if same(predictions[i - 1], predictions[i - 2]) else 0
        if count == t:
            return i - 1  # as an index from 0
    return len(predictions) - 1


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("classes", [2, 4])
def test_patience_t_stops_where_pabees_counter_reaches_t(t, classes):
    logits = random_logits(classes=classes)
    exit_index = exits_of(Patience(t), logits)
    assert exit_index.tolist() == [pabee(row.argmax(axis=1).tolist(), t) for row in logits]
    assert {t, K - 1} <= set(exit_index)  # never at the first exit, which has none before it


def test_patience_on_sequences_by_hand():
    logits = predicting([0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0])
    assert exits_of(Patience(1), logits).tolist() == [1, 2, 3, 1]
    assert exits_of(Patience(2), logits).tolist() == [2, 3, 3, 3]


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("tolerance", [0.1, 0.5, 2.0])
def test_patience_of_a_regression_counts_predictions_closer_than_the_tolerance(t, tolerance):
    logits = random_logits(classes=1)
    exit_index = exits_of(Patience(t, tolerance), logits)
    assert exit_index.tolist() == [pabee(row[:, 0].tolist(), t, lambda a, b: abs(a - b) < tolerance) for row in logits]


def test_a_difference_of_exactly_the_tolerance_is_a_change():
    logits = np.array([[[1.0], [1.5], [1.75], [1.75]]])
    assert exits_of(Patience(1, tolerance=0.5), logits) == 2
    assert exits_of(Patience(1, tolerance=0.625), logits) == 1


# ---- Policy (ConsistentEE, BERxiT): the model's own probability of exiting ----


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.8])
def test_policy_stops_at_the_first_exit_whose_probability_is_above_the_cut(cut):
    logits, exit_logits = random_logits(), np.random.default_rng(1).normal(-1, 3, (400, K)).astype(np.float32)
    p = 1 / (1 + np.exp(-exit_logits.astype(float)))
    expected = [next((k for k in range(K - 1) if row[k] > cut), K - 1) for row in p]
    assert exits_of(Policy(cut), logits, exit_logits).tolist() == expected
    assert len(set(expected)) > 2
