"""RAEE, equation by equation: Algorithm 3.1 (collect), Eq. 4 to 6 and Algorithm 3.2 (choose the exit): mini_ee/raee.py.

The lab's datastore, its files, and whole runs: test_retrieval.py and test_raee_run.py in tests/lab/methods.
"""

import math

import numpy as np
import pytest
import torch

from mini_ee import raee
from mini_ee.bert import Bert, Exits
from mini_ee.data import Inputs, Rows

# ---- Algorithm 3.1: what each exit is worth on examples whose class is known ----


def loops_of_algorithm_3_1(logits, labels):
    """The paper's loops over examples and exits, in Python's floats."""
    values = []
    for row, label in zip(logits.tolist(), labels):
        v_i = []
        for scores in row:
            odds = [math.exp(score) for score in scores]
            p = max(odds) / sum(odds)
            v_i.append(p if scores.index(max(scores)) == label else 0.0)
        values.append(v_i)
    return np.array(values)


def test_algorithm_3_1_two_exits_by_hand():
    """The probabilities are 3/4 and 1/4 at the first exit, 1/5 and 4/5 at the second."""
    logits = np.log([[[3.0, 1.0], [1.0, 4.0]]])
    np.testing.assert_allclose(raee.exit_values(logits, [0]), [[0.75, 0.0]])
    np.testing.assert_allclose(raee.exit_values(logits, [1]), [[0.0, 0.8]])


def test_algorithm_3_1_stores_the_probability_of_a_right_prediction_and_0_for_a_wrong_one():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(50, 4, 3)), random.integers(0, 3, 50)
    values = raee.exit_values(logits.astype(np.float32), labels)
    assert values.dtype == np.float32 and (values == 0).any()
    np.testing.assert_allclose(values, loops_of_algorithm_3_1(logits, labels), atol=1e-6)


def test_algorithm_3_1_large_logits_give_probabilities():
    values = raee.exit_values(np.array([[[1e4, -1e4], [0.0, 0.0]]], np.float32), [0])
    np.testing.assert_array_equal(values, [[1.0, 0.5]])


@pytest.mark.parametrize("labels", [[0, 3], [0, -1], [0], [0, 0.5]])
def test_algorithm_3_1_refuses_labels_that_the_exits_do_not_have(labels):
    with pytest.raises(ValueError, match=r"expected 2 labels from 0 to 2, found [12], such as \[.*0"):
        raee.exit_values(np.zeros((2, 4, 3)), np.array(labels))


def test_algorithm_3_1_reads_every_exit_of_the_model():
    torch.manual_seed(0)
    ids, labels = [[5, 6, 7], [8], [9, 10]], torch.tensor([0, 1, 0])
    model, data = Exits(Bert.load(), (6, 12), 2).eval(), Rows(ids, [[0] * len(row) for row in ids], labels, ("a", "b"))
    with torch.no_grad():
        logits = np.concatenate([model(data.batch([row])).numpy() for row in range(3)])
    rule = raee.collect(model, data)
    np.testing.assert_allclose(rule.values, raee.exit_values(logits, labels.numpy()), atol=1e-5)
    rows, distances = rule.neighbours(data.batch(range(3)))
    assert rows[:, 0].tolist() == [0, 1, 2] and abs(distances[:, 0]).max() < 1e-5


# ---- Eq. 4 to 6 together ----

VALUES = np.array([[[0.95, 0.0, 0.9, 0.99], [0.0, 0.92, 0.96, 0.97], [0.5, 0.0, 0.0, 0.91]]])  # (1, k = 3, K = 4)
DISTANCES = np.array([[0.2, 0.4, 0.8]])


def test_eq4_to_6_three_neighbours_by_hand():
    """The neighbours weigh 1, 1/2 and 1/4. The value .5 does not reach tau. The last exit has the largest sum."""
    np.testing.assert_allclose(raee.neighbour_weights(DISTANCES), [[1, 0.5, 0.25]])
    distribution = raee.exit_distribution(VALUES, DISTANCES, tau=0.9)
    np.testing.assert_allclose(distribution, [[0.95, 0.46, 1.38, 1.7025]], atol=1e-12)
    assert raee.chosen_exit(distribution) == [3]
    without_last = VALUES * [1, 1, 1, 0]
    assert raee.chosen_exit(raee.exit_distribution(without_last, DISTANCES, tau=0.9)) == [2]
    assert raee.chosen_exit(raee.exit_distribution(without_last, DISTANCES, tau=0.94)) == [0]


def loops_of_eq_4_to_6(values, distances, tau):
    """One query, neighbour by neighbour and exit by exit: the exit and its P(z | x)."""
    best, best_p = len(values[0]) - 1, 0.0
    for exit in range(len(values[0])):
        p = math.fsum(
            (1.0 if d == min(distances) else min(distances) / d) * v[exit]
            for v, d in zip(values, distances)
            if v[exit] >= tau
        )
        if p > best_p:
            best, best_p = exit, p
    return best, best_p


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.9, 1.0])
def test_eq4_to_6_equal_loops_over_neighbours_and_exits(tau):
    random = np.random.default_rng(1)
    values = random.uniform(0, 1, (40, 5, 6)) * random.integers(0, 2, (40, 5, 6))
    distances = random.uniform(0.01, 2, (40, 5))
    distribution = raee.exit_distribution(values, distances, tau)
    expected = [loops_of_eq_4_to_6(v, d, tau) for v, d in zip(values.tolist(), distances.tolist())]
    np.testing.assert_array_equal(raee.chosen_exit(distribution), [exit for exit, _ in expected])
    np.testing.assert_allclose(distribution.max(axis=1), [p for _, p in expected], atol=1e-12)


# ---- Eq. 4: which exits of a neighbour vote ----


def test_eq4_a_probability_equal_to_tau_votes():
    values = np.full((1, 1, 2), 0.9, np.float32)
    np.testing.assert_array_equal(raee.passing_values(values, tau=0.9), values)
    np.testing.assert_array_equal(raee.passing_values(values, tau=0.9001), 0 * values)


def test_eq4_if_no_exit_of_a_neighbour_reaches_tau_its_best_correct_exits_vote():
    """Deviation 2: fallback_top of them, the earlier one of two equals."""
    values = np.array([[[0.6, 0.7, 0.0, 0.7], [0.95, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0]]])
    np.testing.assert_array_equal(
        raee.passing_values(values, 0.9, fallback_top=1), [[[0, 0.7, 0, 0], [0.95, 0, 0, 0], [0, 0, 0.3, 0]]]
    )
    np.testing.assert_array_equal(
        raee.passing_values(values, 0.9, fallback_top=3), [[[0.6, 0.7, 0, 0.7], [0.95, 0, 0, 0], [0, 0, 0.3, 0]]]
    )
    np.testing.assert_array_equal(raee.passing_values(values, 0.9), [[[0] * 4, [0.95, 0, 0, 0], [0] * 4]])


def test_eq4_the_order_of_the_neighbours_does_not_matter_not_even_in_the_last_bit():
    random = np.random.default_rng(2)
    values, distances = random.uniform(0, 1, (20, 12, 6)), random.uniform(0.01, 2, (20, 12))
    distances[:5, 3] = 0
    order = random.permutation(12)
    for tau in (0.2, 0.9):
        np.testing.assert_array_equal(
            raee.exit_distribution(values, distances, tau),
            raee.exit_distribution(values[:, order], distances[:, order], tau),
        )


# ---- Eq. 5: the weight of a neighbour ----


def test_eq5_in_the_limit_of_distance_zero_only_the_zero_distances_count():
    distances = np.array([[0.0, 0.3, 0.0], [0.1, 0.2, 0.4]])
    np.testing.assert_allclose(raee.neighbour_weights(distances), [[1, 0, 1], [1, 0.5, 0.25]])
    small = np.where(distances[:1] == 0, 1e-12, distances[:1])
    np.testing.assert_allclose(raee.neighbour_weights(small), raee.neighbour_weights(distances[:1]), atol=1e-11)


# ---- Eq. 6: the exit ----


def test_eq6_takes_the_earliest_of_equal_exits():
    values = np.array([[[0.0, 0.95, 0.0, 0.95], [0.0, 0.93, 0.0, 0.93]]])
    assert raee.chosen_exit(raee.exit_distribution(values, np.array([[0.3, 0.7]]))) == [1]


def test_eq6_if_no_neighbour_votes_the_example_runs_through_all_layers():
    values = np.array([[[0.8, 0.0, 0.7]], [[0.0, 0.0, 0.0]], [[0.95, 0.0, 0.0]]])
    np.testing.assert_array_equal(raee.chosen_exit(raee.exit_distribution(values, np.ones((3, 1)))), [2, 2, 0])
    np.testing.assert_array_equal(raee.chosen_exit(raee.exit_distribution(values, np.ones((3, 1)), tau=0.0)), [0, 2, 0])


# ---- Algorithm 3.2: embed, retrieve, choose ----


@pytest.mark.parametrize("settings", [{}, {"k": 3, "tau": 0.6}, {"k": 5, "tau": 0.99, "fallback_top": 3}])
def test_algorithm_3_2_is_eq_4_to_6_on_the_k_nearest(settings):
    """The rule searches an index of 60 examples; the oracle measures every distance."""
    random, settings = np.random.default_rng(60), {"k": 12, "tau": 0.9, "fallback_top": 0} | settings
    values = (random.uniform(0, 1, (60, 4)) * random.integers(0, 2, (60, 4))).astype(np.float32)
    vectors, queries = random.normal(size=(60, 8)), random.normal(size=(20, 8))
    rule = raee.Retrieval(lambda inputs: queries, vectors, values, **settings)
    vectors, queries = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (vectors, queries))
    expected = []
    for query in queries:
        distances = [math.dist(query, vector) ** 2 for vector in vectors]
        nearest = np.argsort(distances)[: settings["k"]]
        votes = raee.passing_values(values[None, nearest], settings["tau"], settings["fallback_top"])[0]
        expected.append(loops_of_eq_4_to_6(votes.tolist(), [distances[row] for row in nearest], 1e-9)[0])
    assert rule.plan(Inputs(*3 * [torch.zeros(20, 1)])).tolist() == expected
    assert len(set(expected)) > 1
