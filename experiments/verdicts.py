"""Verdicts: what the comparisons of a claim show, given the errors from seeds and from test examples.

A comparison is the mean over S seeds of a difference d of two figures; `required` is what it must exceed.

    s           the standard deviation over seeds
    r           row_error: the standard error from the test examples, which all seeds share, or a bound on it; 0 if the
                seeds have test examples of their own, or if the figure has another unit
    interval    mean d +- sqrt(t^2 s^2 / S + z^2 r^2) at level a; t and z: two-sided quantiles at a of Student's t with
                S - 1 degrees of freedom and of the normal distribution

The interval contains the true difference with probability 1 - a or more, whatever the ratio of the two errors (Banerjee
1960, Calcutta Statistical Association Bulletin 10, 124). Proof: let w be the seeds' part of the variance, u = s^2 over
its expectation, F the distribution of a squared normal variable. The probability is E F(w t^2 u + (1 - w) z^2). F is
concave, so it is at least w E F(t^2 u) + (1 - w) F(z^2) = 1 - a.

A claim says that all of its true differences exceed what is required. The paper reports a size of some of them.

    holds       each interval at LEVEL lies above (an intersection-union test, Berger 1982, Technometrics 24, 295)
    fails       one of n intervals lies below, at LEVEL / n; the next at LEVEL / (n - 1), and so on (Holm 1979)
    excluded    neither, and one of the n intervals with a size lies below the paper's size, at LEVEL / n (Bonferroni)

A false claim holds with probability LEVEL / 2 at most. With the same probability a true claim fails, and a claim is
excluded if all differences are as large as the paper's.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from mini_ee.experiments import student

ABOVE, BELOW = "above", "below"  # of a comparison
HOLDS, FAILS, EXCLUDED, UNDECIDED = "holds", "fails", "excluded", "undecided"  # of a claim; the last two of both
UNTESTED = "untested"  # other hardware or data are needed
MISSING = "open"  # runs are missing, or there are too few seeds
VERDICTS = (HOLDS, FAILS, EXCLUDED, UNDECIDED, UNTESTED, MISSING)
LEVEL = 0.05  # of an interval, two-sided
LEAST_SEEDS = 3  # of a comparison


class Compared(NamedTuple):
    """One comparison: means of both sides, and the difference with its errors."""

    more: float
    than: float
    difference: float
    spread: float = 0.0  # standard deviation over seeds
    row_error: float = 0.0
    seeds: int = LEAST_SEEDS
    required: float = 0.0
    size: float | None = None  # the difference that the paper reports
    verdict: str = ""  # ABOVE, BELOW, or why it is neither; a claim sets it (`judged`), unless it cannot be tested

    def half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval; 0 for few seeds."""
        if self.seeds < LEAST_SEEDS:
            return 0.0
        seeds = student.quantile(level, self.seeds - 1) * self.spread / self.seeds**0.5
        return math.hypot(seeds, NormalDist().inv_cdf(1 - level / 2) * self.row_error)

    @property
    def low(self) -> float:
        return self.difference - self.half_width()

    @property
    def high(self) -> float:
        return self.difference + self.half_width()

    def is_below(self, least: float, level: float) -> bool:
        return self.difference + self.half_width(level) < least


def compared(
    more: list[float],
    than: list[float],
    by: float = 0.0,
    exact: bool = False,
    row_error: float = 0.0,
    size: float | None = None,
) -> Compared:
    """Compare two sides, paired by seed: is the first larger than the second by more than `by`?

    exact: the figures are counts, such as bytes, so equal values on all seeds are evidence.
    """
    differences = np.subtract(more, than)
    seeds, pairs = len(differences), set(zip(more, than))
    spread = float(differences.std(ddof=1)) if seeds > 1 else 0.0
    verdict = MISSING if seeds < LEAST_SEEDS else ""
    if not verdict and len(pairs) == 1 and not exact and (not row_error or not differences.any()):
        verdict = UNDECIDED  # nothing varies, so nothing is known about the spread
    means = float(np.mean(more)), float(np.mean(than)), float(differences.mean())
    return Compared(*means, spread, row_error, seeds, by, size, verdict)


def judged(comparisons: list[Compared | None]) -> list[Compared | None]:
    """The comparisons of a claim with their verdicts. None is a comparison that has not been run."""
    count, below = len(comparisons), set[int]()
    tested = {k: comparison for k, comparison in enumerate(comparisons) if comparison and not comparison.verdict}
    while passing := {
        k for k in tested.keys() - below if tested[k].is_below(tested[k].required, LEVEL / (count - len(below)))
    }:
        below.add(min(passing))
    sizes = sum(comparison is not None and comparison.size is not None for comparison in comparisons)

    def verdict(k: int, comparison: Compared) -> str:
        if k in below:
            return BELOW
        if comparison.low > comparison.required:
            return ABOVE
        excluded = comparison.size is not None and comparison.is_below(comparison.size, LEVEL / sizes)
        return EXCLUDED if excluded else UNDECIDED

    return [
        comparison and (comparison._replace(verdict=verdict(k, comparison)) if k in tested else comparison)
        for k, comparison in enumerate(comparisons)
    ]


def verdict_of(comparisons: list[Compared | None]) -> str:
    """The verdict of a claim, given those of its comparisons.

    A comparison that has not been run delays the verdict unless another one is below.
    """
    verdicts = [comparison.verdict if comparison else MISSING for comparison in comparisons]
    if BELOW in verdicts:
        return FAILS
    return next((verdict for verdict in (MISSING, EXCLUDED, UNDECIDED, UNTESTED) if verdict in verdicts), HOLDS)
