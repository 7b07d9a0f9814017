"""Verdicts: what the comparisons of a claim show, given the spread over seeds.

A comparison is paired: for each seed, the difference of its two figures; over the seeds, the mean difference and
Student's t interval at CONFIDENCE_LEVEL. It holds if the whole interval lies above the required difference, and does
not hold if the whole interval lies below.
"""

from typing import NamedTuple

import numpy as np

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "cannot be decided here"
FEW, MISSING = "too few seeds", "runs are missing"
UNTRIED = "does not hold so far; other settings have to be run"
CONFIDENCE_LEVEL = 0.95
LEAST_SEEDS = 3
T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the two-sided quantile of Student's t at CONFIDENCE_LEVEL."""

RULES = f"""## How a verdict is computed

- A comparison is paired over at least {LEAST_SEEDS} seeds. For each seed we take the difference of the two figures,
  then the mean difference over the seeds and Student's t interval at {CONFIDENCE_LEVEL:.0%}.
- A comparison *{HOLDS}* if the whole interval lies above the required difference, which is 0 unless the page gives
  another. It *{FAILS}* if the whole interval lies below. Otherwise it *{UNDECIDED}*.
- A claim needs all of its comparisons, unless it gives a number, so it fails as soon as one of them fails. If the two
  sides of a comparison are in truth equal, it fails by chance in 2.5 % of the cases.
- If runs are missing, the verdict is given only if they cannot change it; otherwise it is *{MISSING}*. Some claims name
  other settings to be tried. Such a claim fails only after these have been run.
- A claim that needs other hardware *{UNDECIDED}*.
- The intervals cover the choice of the seed, not that of the test examples. If every seed gives the same two figures,
  nothing is known about their spread, and the comparison *{UNDECIDED}*. Exact counts, such as bytes, are an exception.
- A control is a claim of ours that the paper does not make."""


class Compared(NamedTuple):
    """One comparison: means of both sides, mean difference, its interval (empty for few seeds), seeds, verdict."""

    more: float
    than: float
    difference: float
    low: float
    high: float
    seeds: int
    verdict: str


def compared(more: list[float], than: list[float], by: float = 0.0, exact: bool = False) -> Compared:
    """Compare two sides, paired by seed: is the first larger than the second by more than `by`?

    exact: the figures are counts, such as bytes, so equal values on all seeds are evidence.
    """
    differences = np.subtract(more, than)
    mean, seeds = float(differences.mean()), len(differences)
    if seeds < LEAST_SEEDS:
        return Compared(float(np.mean(more)), float(np.mean(than)), mean, mean, mean, seeds, FEW)
    half = T[min(seeds - 1, max(T))] * float(differences.std(ddof=1)) / seeds**0.5
    low, high = mean - half, mean + half
    verdict = HOLDS if low > by else FAILS if high < by else UNDECIDED
    if len(set(zip(more, than))) == 1 and not exact:
        verdict = UNDECIDED
    return Compared(float(np.mean(more)), float(np.mean(than)), mean, low, high, seeds, verdict)


def verdict_of(comparisons: list[Compared | None], need: int | str = "all") -> str:
    """The verdict of a claim: all of its comparisons must hold, or `need` of them.

    None is a comparison that has not been run; it delays the verdict if it could change it.
    """
    verdicts = [each.verdict if each else MISSING for each in comparisons]
    least = len(verdicts) if need == "all" else need
    if verdicts.count(HOLDS) >= least:
        return HOLDS
    if len(verdicts) - verdicts.count(FAILS) < least:
        return FAILS
    return next((verdict for verdict in (MISSING, FEW) if verdict in verdicts), UNDECIDED)
