"""The claims of a recipe: their comparisons on the seeds that both sides have, and their verdicts."""

from typing import NamedTuple

import numpy as np

from mini_ee.experiments.page_data import PageData
from mini_ee.experiments.recipe import comparisons_of, sides
from mini_ee.experiments.verdicts import (
    FAILS,
    LEAST_SEEDS,
    MISSING,
    UNTESTED,
    Compared,
    compared,
    judged,
    verdict_of,
)

NO_SEED_HAS_IT = Compared(0.0, 0.0, 0.0, verdict=UNTESTED)  # all cases were run, and no seed has the figure


class Judged(NamedTuple):
    """A claim with its comparisons and its verdict."""

    claim: dict
    comparisons: list[Compared | None]  # in the claim's order; None: its cases have not been run
    verdict: str


def judge_claim(claim: dict, data: PageData) -> Judged:
    """Compare on the seeds that all cases of a comparison have, and decide the claim.

    A claim with `unseen`, the reason, cannot be tested here. A claim fails once its other settings were run.
    """
    comparisons = judged([compare_cases(comparison, data) for comparison in comparisons_of(claim)])
    verdict = UNTESTED if "unseen" in claim else verdict_of(comparisons)
    if verdict == FAILS and not all(data.records[name]["seeds"] for name in claim.get("tried", {}).get("cases", [])):
        verdict = MISSING
    return Judged(claim, comparisons, verdict)


def compare_cases(compare: dict, data: PageData) -> Compared | None:
    """One comparison, a mean over its settings; None if its cases have not been run.

    If the cases were run with enough seeds and too few of these have the figure, other data are needed. For example,
    there is no loss of the rows that exit at a layer if no row exits there.
    """
    both = [_side(data, compare, side) for side in ("more", "than")]
    seeds = sorted(set.intersection(*(set(values) for values in both if values is not None)))
    names = {name for side in ("more", "than") for name, _ in sides(compare, side)}
    run = len(set.intersection(*(set(data.records[name]["seeds"]) for name in names)))
    if not seeds:
        return NO_SEED_HAS_IT if run >= LEAST_SEEDS else None
    more, than = ([values[seed] if values is not None else compare["than"] for seed in seeds] for values in both)
    more = [value * compare.get("times", 1) for value in more]
    row_error = _row_error(compare, data, seeds)
    result = compared(more, than, compare.get("by", 0.0), compare.get("exact", False), row_error, compare.get("size"))
    return result._replace(verdict=UNTESTED) if result.seeds < LEAST_SEEDS <= run else result


def _row_error(compare: dict, data: PageData, seeds: list[str]) -> float:
    """The standard error of the difference that comes from the test examples, 0 for figures without one. Tasks are
    independent.
    """
    by_task: dict[tuple[str, int], list[tuple[float, tuple[str, str]]]] = {}
    for sign, side in ((1, "more"), (-1, "than")):
        pairs = sides(compare, side)
        for pair in pairs:
            by_task.setdefault(data.rows(*pair), []).append((sign / len(pairs), pair))
    return sum(_row_variance(parts, rows, data, seeds) for (_, rows), parts in by_task.items() if rows) ** 0.5


def _row_variance(parts: list, rows: int, data: PageData, seeds: list[str]) -> float:
    """The variance of a weighted sum of figures of one task, from N examples.

    parts: (weight, (case, figure)), with a positive weight on one side of the comparison and a negative one on the
    other. If all are recorded: the variance over the examples of the sum of their values, the mean over seeds, divided
    by N. Otherwise a bound: a share p has a variance of at most p (1 - p) / N. On the same examples, the variances of
    both sides add up if the sides are independent; models of the same data are right on the same examples more often
    than independent ones. The shares of a side are averaged first.
    """
    examples = [[data.examples(*pair, seed) for seed in seeds] for _, pair in parts]
    if all(outcome is not None for one in examples for outcome in one):
        total = sum(weight * np.mean(one, axis=0) for (weight, _), one in zip(parts, examples))
        return float(np.var(total, ddof=1)) / rows
    variance = 0.0
    for sign in (1, -1):
        subtracted = [(sign * weight, data.values(*pair)) for weight, pair in parts if sign * weight > 0]
        if subtracted:
            share = float(np.mean([values[seed] for _, values in subtracted for seed in seeds]))
            variance += sum(weight for weight, _ in subtracted) ** 2 * share * (1 - share) / rows
    return variance


def _side(data: PageData, compare: dict, side: str) -> dict[str, float] | None:
    """Seed -> the mean over the side's cases; None if the side is a number."""
    pairs = sides(compare, side)
    if not pairs:
        return None
    by_pair = [data.values(*pair) for pair in pairs]
    shared = set.intersection(*(set(values) for values in by_pair))
    return {seed: float(np.mean([values[seed] for values in by_pair])) for seed in shared}
