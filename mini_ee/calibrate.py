"""Thresholds and rules with a guarantee. No torch.

    tau                   the threshold of Valade 2024, section 3.3.1: its share holds on the tokens that chose it
    tau_with_confidence   a threshold whose share holds on new rows, except with probability delta
    default_rule          the rule that saves most layers among those that provably lose little accuracy

Both guarantees are one idea, Learn then Test (Angelopoulos et al. 2021, arXiv:2110.01052): test settings in an order
that is fixed beforehand, from the strictest on, and stop at the first that fails. A wrong rejection implies that the
first true hypothesis was rejected, which is a single test: so no correction for their number is needed. Each test is
exact: the tail of a binomial distribution, as in the interval of Clopper and Pearson (1934).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.loop import Table, early_exit
from mini_ee.rules import MEASURES, Never, Rule, Threshold

STRICTEST = 0.05  # share of the rows in the strictest cut that is tested
CANDIDATES = 50  # thresholds that default_rule tests


# ---- Exact tests of a share ----
def binomial_cdf(count: int, trials: int, p: float) -> float:
    """P(X <= count) for X ~ Binomial(trials, p), 0 < p < 1.

    >>> round(binomial_cdf(1, 3, 0.5), 12)
    0.5
    """
    if count < 0:
        return 0.0
    x = np.arange(min(count, trials) + 1)
    log_ways = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in x.tolist()]
    return min(1.0, math.fsum(np.exp(np.array(log_ways) + x * math.log(p) + (trials - x) * math.log1p(-p))))


def fixed_sequence(p_values: Sequence[float] | np.ndarray, level: float) -> int:
    """How many hypotheses come before the first whose p-value is above the level: these are rejected."""
    passes = np.asarray(p_values) <= level
    return len(passes) if passes.all() else int(passes.argmin())


# ---- The threshold of an exit ----
def tau(confidence: np.ndarray, agrees: np.ndarray, epsilon: float) -> float:
    """The lowest confidence such that a share of at least epsilon agrees among the rows at or above it (Valade 2024,
    section 3.3.1). confidence, agrees: (N,). inf if there is none.

    >>> tau(np.array([0.2, 0.5, 0.7, 0.9]), np.array([True, False, True, True]), 0.7)
    0.2
    """
    confidence, count, agreeing = cuts(confidence, agrees)
    enough = np.flatnonzero(agreeing >= epsilon * count - 1e-9)
    return float(confidence[enough[-1]]) if len(enough) else math.inf


def cuts(confidence: np.ndarray, agrees: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each different confidence, descending; of the rows at or above it their number, and how many of them agree."""
    order = np.argsort(-confidence, kind="stable")
    confidence, agreeing = confidence[order], np.cumsum(agrees[order])
    last = np.flatnonzero(confidence != np.append(confidence[1:], -np.inf))  # a threshold takes all equal confidences
    return confidence[last], last + 1, agreeing[last]


def tau_with_confidence(
    confidence: np.ndarray, agrees: np.ndarray, groups: np.ndarray, epsilon: float, delta: float
) -> float:
    """The lowest confidence down to which every cut passes the test; inf if there is none. Arrays are (N,).

    With probability 1 - delta over the draw of the groups, at least epsilon of new rows at or above it agree. A group
    is what was drawn independently: a row, or a text with its tokens. Of a text one token is used, drawn at random: it
    stands for the share of the text's tokens, and the test stays exact.

    A cut's hypothesis is that less than epsilon of such rows agree; its p-value is P(X >= the number that agree) for
    X ~ Binomial(rows, epsilon). Raises ValueError if even full agreement of all rows would not pass.
    """
    if not (0 < epsilon < 1 and 0 < delta < 1):
        raise ValueError(f"epsilon and delta must be between 0 and 1, got {epsilon} and {delta}")
    order = np.random.default_rng(0).permutation(len(groups))
    one = order[np.unique(groups[order], return_index=True)[1]]  # the first of each group in a random order
    confidence, count, agreeing = cuts(confidence[one], agrees[one])
    if len(one) < (needed := math.ceil(math.log(delta) / math.log(epsilon) - 1e-9)):
        raise ValueError(f"epsilon {epsilon}, delta {delta:.3g}: at least {needed} rows or texts, got {len(one)}")
    p_values = [binomial_cdf(rows - right, rows, 1 - epsilon) for rows, right in zip(count, agreeing)]
    return lowest_passing(confidence, count, epsilon**count, np.array(p_values), delta)


def lowest_passing(
    confidence: np.ndarray, count: np.ndarray, best: np.ndarray, p_values: np.ndarray, delta: float
) -> float:
    """The lowest confidence down to which every cut passes; inf if the first cut fails, or none could pass.

    Arrays are of the cuts, from the strictest on: confidence and number of rows as in `cuts`, the p-value if all rows
    agreed, and the p-value. The first cut has at least STRICTEST of the rows, and as many as are needed to pass with a
    p-value of delta squared if all agree, so that some may not; or, if there are too few rows for that, of delta.
    """
    large = count >= math.ceil(STRICTEST * count[-1])
    with_room = large & (best <= delta**2)
    tested = np.flatnonzero(with_room if with_room.any() else large & (best <= delta))
    passed = fixed_sequence(p_values[tested], delta)
    return float(confidence[tested[passed - 1]]) if passed else math.inf


# ---- The default rule ----
class Guaranteed(NamedTuple):
    """A rule, and the test that it passed."""

    rule: Rule
    tested: int  # examples of the test
    worse: int  # of these, how many only the last exit predicts right
    p_value: float  # 1 of the full model, which needs no test


def default_rule(
    exits: Sequence[int],
    selection: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    most_loss: float = 0.02,
    delta: float = 0.05,
    measure: str = "max_probability",
) -> Guaranteed:
    """The loosest threshold that, with confidence 1 - delta, loses at most most_loss of accuracy against the last exit.

    selection, test: logits (N, K, C) and labels (N,) of examples that trained nothing; those of the test have also
    chosen nothing. Thresholds are quantiles of the selection's confidences, so their order is fixed before the test.

    The loss of an example is 1 if only the last exit is right. The accuracy that is lost is at most the mean loss: it
    is less if the rule is right where the last exit is wrong. So the test is exact, and conservative: P(X <= the number
    of worse examples) for X ~ Binomial(N, most_loss). If no threshold passes, the full model.
    """
    confidences = np.concatenate([MEASURES[measure](selection[0][:, k]) for k in range(len(exits) - 1)])
    levels = np.unique(np.quantile(confidences, np.linspace(0, 1, CANDIDATES)))[::-1]
    logits, labels = test
    right, candidates, p_values = logits[:, -1].argmax(1) == labels, [], []
    for level in levels:  # from the strictest to the loosest
        result = early_exit(Table(exits, logits), Threshold(float(level), measure), range(len(labels)))
        worse = int((right & (result.logits.argmax(1) != labels)).sum())
        p_values.append(binomial_cdf(worse, len(labels), most_loss))
        candidates.append(Guaranteed(Threshold(float(level), measure), len(labels), worse, p_values[-1]))
    passed = fixed_sequence(p_values, delta)
    return candidates[passed - 1] if passed else Guaranteed(Never(), len(labels), 0, 1.0)
