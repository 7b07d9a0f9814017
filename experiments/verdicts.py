"""Verdicts: what the comparisons of a claim show, given the spread over seeds.

A comparison is paired: for each seed, the difference of its two figures; over the seeds, the mean difference and
Student's t interval at CONFIDENCE_LEVEL. It holds if the whole interval lies above the required difference, and does
not hold if the whole interval lies below. Otherwise it cannot be decided, for one of three reasons (UNDECIDED).
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

HOLDS, FAILS = "holds", "does not hold"
WIDE, ELSEWHERE, CONSTANT = "interval too wide", "other hardware or data needed", "data do not vary"
UNDECIDED = (WIDE, ELSEWHERE, CONSTANT)  # why a comparison or a claim cannot be decided
FEW, MISSING = "too few seeds", "runs are missing"
UNTRIED = "does not hold so far; other settings have to be run"
CONFIDENCE_LEVEL = 0.95
LEAST_SEEDS, MOST_SEEDS = 3, 100  # of a comparison; of an estimate of how many would decide
CHANCE = 0.8  # that the estimated number of seeds decides
T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the two-sided quantile of Student's t at CONFIDENCE_LEVEL."""


class Compared(NamedTuple):
    """One comparison: means of both sides, mean difference, its interval (empty for few seeds), seeds, verdict."""

    more: float
    than: float
    difference: float
    low: float
    high: float
    seeds: int
    verdict: str
    required: float = 0.0  # what the difference must exceed


def compared(more: list[float], than: list[float], by: float = 0.0, exact: bool = False) -> Compared:
    """Compare two sides, paired by seed: is the first larger than the second by more than `by`?

    exact: the figures are counts, such as bytes, so equal values on all seeds are evidence.
    """
    differences = np.subtract(more, than)
    mean, seeds = float(differences.mean()), len(differences)
    if seeds < LEAST_SEEDS:
        return Compared(float(np.mean(more)), float(np.mean(than)), mean, mean, mean, seeds, FEW, by)
    half = _quantile(seeds - 1) * float(differences.std(ddof=1)) / seeds**0.5
    low, high = mean - half, mean + half
    verdict = HOLDS if low > by else FAILS if high < by else WIDE
    if len(set(zip(more, than))) == 1 and not exact:
        verdict = CONSTANT
    return Compared(float(np.mean(more)), float(np.mean(than)), mean, low, high, seeds, verdict, by)


def _quantile(freedom: int) -> float:
    return T[min(freedom, max(T))]


def verdict_of(comparisons: list[Compared | None], need: int | str = "all") -> str:
    """The verdict of a claim: all of its comparisons must hold, or `need` of them.

    None is a comparison that has not been run; it delays the verdict if it could change it. If several reasons leave a
    claim undecided, a too wide interval comes first, because more seeds can change it.
    """
    verdicts = [each.verdict if each else MISSING for each in comparisons]
    least = len(verdicts) if need == "all" else need
    if verdicts.count(HOLDS) >= least:
        return HOLDS
    if len(verdicts) - verdicts.count(FAILS) < least:
        return FAILS
    return next(verdict for verdict in (MISSING, FEW, *UNDECIDED) if verdict in verdicts)


def seeds_to_decide(comparison: Compared) -> int | None:
    """Number of seeds at which the interval excludes the required difference with probability CHANCE, if the measured
    mean difference and spread are the true ones; None if it is above MOST_SEEDS.
    """
    spread = (comparison.high - comparison.low) / 2 / _quantile(comparison.seeds - 1) * comparison.seeds**0.5
    distance = abs(comparison.difference - comparison.required)
    for seeds in range(comparison.seeds + 1, MOST_SEEDS + 1):
        if distance * seeds**0.5 >= (_quantile(seeds - 1) + NormalDist().inv_cdf(CHANCE)) * spread:
            return seeds
    return None


def probable_verdict(comparison: Compared) -> str:
    """What a comparison shows if its measured mean difference is the true one."""
    return HOLDS if comparison.difference > comparison.required else FAILS


class Forecast(NamedTuple):
    """The smallest number of seeds that decides a claim, its probable verdict, and how many comparisons then fail."""

    seeds: int
    verdict: str
    failing: int


def forecast(comparisons: list[Compared | None], need: int | str = "all") -> Forecast | None:
    """How a claim is probably decided, if every interval shrinks about its mean difference; None if that takes more
    than MOST_SEEDS, or if an undecided comparison needs something else.
    """
    needed = {each: seeds_to_decide(each) for each in comparisons if each and each.verdict == WIDE}
    for seeds in sorted(filter(None, needed.values())):
        then = [
            each._replace(verdict=probable_verdict(each))
            if each and (needed.get(each) or MOST_SEEDS + 1) <= seeds
            else each
            for each in comparisons
        ]
        if (verdict := verdict_of(then, need)) in (HOLDS, FAILS):
            return Forecast(seeds, verdict, sum(bool(each) and each.verdict == FAILS for each in then))
    return None
