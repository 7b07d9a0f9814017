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

A claim says that all of its true differences exceed what is required.

    holds             each interval at LEVEL lies above (an intersection-union test, Berger 1982, Technometrics 24, 295)
    does not hold     one of n intervals lies below, at LEVEL / n; the next at LEVEL / (n - 1), and so on (Holm 1979)

A false claim holds with probability LEVEL / 2 at most, and a true claim does not hold with LEVEL / 2 at most.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from mini_ee.experiments import student

ABOVE, BELOW = "above", "below"  # of a comparison
HOLDS, FAILS = "holds", "does not hold here"  # of a claim
WIDE, ELSEWHERE, CONSTANT = "interval too wide", "other hardware or data needed", "nothing varies"
UNDECIDED = (WIDE, ELSEWHERE, CONSTANT)  # why a comparison or a claim cannot be decided
FEW, MISSING = "too few seeds", "runs are missing"
UNTRIED = "does not hold here so far; other settings have to be run"
LEVEL = 0.05  # of an interval, two-sided
LEAST_SEEDS, MOST_SEEDS = 3, 100  # of a comparison; of an estimate of how many would decide
CHANCE = 0.8  # that the estimated number of seeds decides
ALL_SEEDS = math.inf  # no error from seeds


class Compared(NamedTuple):
    """One comparison: means of both sides, and the difference with its errors."""

    more: float
    than: float
    difference: float
    spread: float = 0.0  # standard deviation over seeds
    row_error: float = 0.0
    seeds: float = LEAST_SEEDS
    required: float = 0.0
    recorded: bool = False  # row_error comes from the values of single examples, and is not a bound
    verdict: str = ""  # ABOVE, BELOW, or why it is neither; a claim sets it (`judged`), unless it cannot be tested

    def half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval; 0 for few seeds."""
        if self.seeds < LEAST_SEEDS:
            return 0.0
        seeds = 0.0 if self.seeds == ALL_SEEDS else student.quantile(level, self.seeds - 1) * self.seed_error
        return math.hypot(seeds, NormalDist().inv_cdf(1 - level / 2) * self.row_error)

    @property
    def seed_error(self) -> float:
        return self.spread / self.seeds**0.5

    @property
    def low(self) -> float:
        return self.difference - self.half_width()

    @property
    def high(self) -> float:
        return self.difference + self.half_width()

    def is_below(self, level: float) -> bool:
        return self.difference + self.half_width(level) < self.required

    def with_seeds(self, seeds: float) -> "Compared":
        """The same with more seeds, if the measured mean difference and spread are the true ones. The difference is
        nearer to the required one, by so much that a sample of seeds is farther from it with probability CHANCE."""
        seeds = max(seeds, self.seeds)
        shift = NormalDist().inv_cdf(CHANCE) * self.spread / seeds**0.5
        distance = self.difference - self.required
        nearer = math.copysign(max(abs(distance) - shift, 0.0), distance)
        return self._replace(difference=self.required + nearer, seeds=seeds)


def compared(
    more: list[float], than: list[float], by: float = 0.0, exact: bool = False, row_error: float = 0.0
) -> Compared:
    """Compare two sides, paired by seed: is the first larger than the second by more than `by`?

    exact: the figures are counts, such as bytes, so equal values on all seeds are evidence.
    """
    differences = np.subtract(more, than)
    seeds, pairs = len(differences), set(zip(more, than))
    spread = float(differences.std(ddof=1)) if seeds > 1 else 0.0
    verdict = FEW if seeds < LEAST_SEEDS else ""
    if not verdict and len(pairs) == 1 and not exact and (not row_error or not differences.any()):
        verdict = CONSTANT
    means = float(np.mean(more)), float(np.mean(than)), float(differences.mean())
    return Compared(*means, spread, row_error, seeds, by, verdict=verdict)


def judged(comparisons: list[Compared | None]) -> list[Compared | None]:
    """The comparisons of a claim with their verdicts. None is a comparison that has not been run."""
    count, below = len(comparisons), set[int]()
    tested = {k: each for k, each in enumerate(comparisons) if each and each.verdict in (ABOVE, BELOW, WIDE, "")}
    while found := {k for k in tested.keys() - below if tested[k].is_below(LEVEL / (count - len(below)))}:
        below.add(min(found))

    def verdict(k: int, each: Compared) -> str:
        return BELOW if k in below else ABOVE if each.low > each.required else WIDE

    return [
        each and (each._replace(verdict=verdict(k, each)) if k in tested else each)
        for k, each in enumerate(comparisons)
    ]


def verdict_of(comparisons: list[Compared | None]) -> str:
    """The verdict of a claim, given those of its comparisons.

    A comparison that has not been run delays the verdict unless another one is below. If several reasons leave a claim
    undecided, a too wide interval comes first, because more seeds can change it.
    """
    verdicts = [each.verdict if each else MISSING for each in comparisons]
    if BELOW in verdicts:
        return FAILS
    return next((verdict for verdict in (MISSING, FEW, *UNDECIDED) if verdict in verdicts), HOLDS)


class Forecast(NamedTuple):
    """The smallest number of seeds that decides a claim, its probable verdict, and how many comparisons are below."""

    seeds: float
    verdict: str
    below: int


def forecast(comparisons: list[Compared | None]) -> Forecast | None:
    """How more seeds probably decide a claim, if the measured mean differences and spreads are the true ones.

    seeds is ALL_SEEDS if more than MOST_SEEDS are needed. None: no number of seeds decides, because the error from the
    test examples is too large, or because an undecided comparison needs something else.
    """
    for seeds in (*range(LEAST_SEEDS + 1, MOST_SEEDS + 1), ALL_SEEDS):
        then = judged([each.with_seeds(seeds) if each and each.verdict == WIDE else each for each in comparisons])
        if (verdict := verdict_of(then)) in (HOLDS, FAILS):
            return Forecast(seeds, verdict, sum(bool(each) and each.verdict == BELOW for each in then))
    return None
