"""What the rules of the core refuse, and what they share. Their definitions: tests/spec/test_0_loop.py."""

import numpy as np
import pytest

from mini_ee.loop import Table, early_exit
from mini_ee.rules import MEASURES, Fixed, Never, Patience, Policy, Threshold

LOGITS = np.random.default_rng(0).normal(0, 2, (50, 4, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "rule, settings, problem",
    [
        (Threshold, (0.5, "surprise"), "measure must be one of"),
        (Patience, (0,), "at least 1"),
        (Patience, (1, 0.0), "above 0"),
        (Policy, (1.1,), "from 0 to 1"),
        (Policy, (-0.1,), "from 0 to 1"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(rule, settings, problem):
    with pytest.raises(ValueError, match=problem):
        rule(*settings)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_regression_has_no_confidence(measure):
    with pytest.raises(ValueError, match="take Fixed or Patience"):
        MEASURES[measure](np.zeros((3, 1)))


@pytest.mark.parametrize("measure", MEASURES)
def test_measures_are_those_of_a_wider_dtype(measure):
    """Also of large logits, and of float16."""
    logits = np.array([[1e4, -1e4, 0.0], [3.0, 1.0, 2.0]])
    for dtype in (np.float16, np.float32):
        confidence = MEASURES[measure](logits.astype(dtype))
        np.testing.assert_allclose(confidence, MEASURES[measure](logits), rtol=1e-5)
        assert confidence.dtype == np.float32 and np.isfinite(confidence).all()


def test_depth_does_not_grow_as_a_rule_loosens():
    for rules in (
        [Threshold(tau) for tau in (np.inf, 0.9, 0.7, 0.5, 0.0)],
        [Threshold(tau, "entropy") for tau in (0.0, -0.3, -0.8, -2.0)],
        [Patience(t) for t in (3, 2, 1)],
    ):
        layers = [early_exit(Table((1, 2, 3, 4), LOGITS), rule, range(50)).layers for rule in rules]
        assert all((strict >= loose).all() for strict, loose in zip(layers, layers[1:]))
        assert layers[0].mean() > layers[-1].mean()


def test_a_threshold_for_each_exit_may_be_a_list_or_a_tuple():
    taus = [0.9, 0.8, 0.7, 0.0]
    results = [early_exit(Table((1, 2, 3, 4), LOGITS), Threshold(of), range(50)) for of in (taus, tuple(taus))]
    assert all((result.exit_index == results[0].exit_index).all() for result in results)
    assert len(set(results[0].exit_index)) == 4


def test_the_loop_reads_no_more_heads_than_a_rule_needs():
    class Counting(Table):
        def __init__(self):
            super().__init__((1, 2, 3, 4), LOGITS, LOGITS[:, :, 0])
            self.heads = []

        def read(self, k, state):
            self.heads.append((k, len(state.rows)))
            return super().read(k, state)

    for rule, expected in ((Never(), [(3, 50)]), (Fixed(1), [(1, 50)])):
        early_exit(engine := Counting(), rule, range(50))
        assert engine.heads == expected
    result = early_exit(engine := Counting(), Policy(), range(50))
    assert engine.heads == [(k, int((result.exit_index == k).sum())) for k in range(4)]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        early_exit(Table((1, 2, 3, 4), LOGITS), Never(), [])
