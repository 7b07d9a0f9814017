"""What a claim's comparisons say, from the spread over seeds.

A comparison is paired: of each seed, how much more one side has than the other. Over the seeds, the mean and Student's
t interval at LEVEL. It holds where the whole interval lies above what was claimed, and does not hold where the whole
interval lies below.
"""

from typing import NamedTuple

import numpy as np

HOLDS, FAILS, UNSEEN = "holds", "does not hold", "cannot be seen here"
FEW, MISSING = "too few seeds", "runs are missing"
UNTRIED = "does not hold so far; other settings are to be run"
LEVEL = 0.95
LEAST_SEEDS = 3
T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the two-sided quantile of Student's t at LEVEL."""

RULE = (
    f"A verdict is computed. Each comparison is paired over seeds, three at least: the mean of the differences, and "
    f"Student's t interval at {LEVEL:.0%}. The claim **holds** where the whole interval lies above what is claimed, "
    f"**does not hold** where it lies below. Otherwise it **cannot be seen here**; nor can one that needs other "
    f"hardware. A claim needs all of its comparisons, unless it says how many, so that it fails as soon as one lies "
    f"below. Where two sides are equal, that happens by chance in 2.5 % of the comparisons. A claim is judged early "
    f"where missing runs could not change the verdict; else **runs are missing**. Where other settings are to be "
    f"tried, it fails only once they have been run. Intervals cover the seeds; they do not cover the choice of test "
    f"rows: where every seed gives the same two figures, nothing but these rows was drawn, and what is compared "
    f"cannot be seen, unless it is counted, as bytes are. A control is a claim of ours that the paper does not make."
)


class Compared(NamedTuple):
    """One comparison: the means of both sides, the mean difference, its interval (of few seeds none), what it says."""

    more: float
    than: float
    difference: float
    low: float
    high: float
    seeds: int
    verdict: str


def compared(more: list[float], than: list[float], by: float = 0.0, exact: bool = False) -> Compared:
    """Both sides by seed, paired: does the first have more than the second by `by`? exact: of counts, as of bytes."""
    differences = np.subtract(more, than)
    mean, seeds = float(differences.mean()), len(differences)
    if seeds < LEAST_SEEDS:
        return Compared(float(np.mean(more)), float(np.mean(than)), mean, mean, mean, seeds, FEW)
    half = T[min(seeds - 1, max(T))] * float(differences.std(ddof=1)) / seeds**0.5
    low, high = mean - half, mean + half
    verdict = HOLDS if low > by else FAILS if high < by else UNSEEN
    if len(set(zip(more, than))) == 1 and not exact:
        verdict = UNSEEN
    return Compared(float(np.mean(more)), float(np.mean(than)), mean, low, high, seeds, verdict)


def verdict_of(comparisons: list[Compared | None], need: int | str = "all") -> str:
    """Of a claim: all of its comparisons must hold, or so many. None is one that has not been run: it delays the
    verdict where it could change it.
    """
    said = [each.verdict if each else MISSING for each in comparisons]
    least = len(said) if need == "all" else need
    if said.count(HOLDS) >= least:
        return HOLDS
    if len(said) - said.count(FAILS) < least:
        return FAILS
    return next((open for open in (MISSING, FEW) if open in said), UNSEEN)
