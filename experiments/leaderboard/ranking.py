"""How sure the figures are: bootstrap over seeds and examples together, intervals, ranks, and who is better than whom.

Draws      Seeds and examples are drawn with replacement, all methods of a task with the same draws, so that differences
           are paired. Of S seeds S - 1 are drawn: then the variance is unbiased (Rao and Wu 1988), which counts if
           there are three or five. One seed is always drawn; its interval is over the examples alone. Tasks are
           independent.
Intervals  mean +- t x standard deviation of the draws. Student's t has few degrees of freedom if most of the variance
           is between seeds, and many if it is between examples (Satterthwaite 1946).
Better     if the p-value of the paired difference passes Holm's correction (1979) over all comparisons of the table.
Ranks      1 plus the number of better methods, in every draw.

Sums are of whole numbers, or of float32 in float64: no rounding, so no order of summation changes a byte.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.experiments import student
from mini_ee.experiments.leaderboard.figures import TaskFigures, Values

DRAWS = 5000
LEVEL = 0.95
MOST_SEEDS, LEAST_SEEDS = 16, 3  # drawn in the same way for all methods; below which nothing is called better
DIGITS = 12  # to which sums of rounded numbers are rounded, so that they are equal on every machine


class Drawn(NamedTuple):
    """A figure in every draw, and what its degrees of freedom are computed from."""

    mean: float
    draws: np.ndarray  # (DRAWS,)
    by_seed: tuple[tuple[float, ...], ...]  # the figure of each seed, of each task; divided by the number of tasks
    seeds: tuple[tuple[int, ...], ...]  # of each task


class Interval(NamedTuple):
    """A mean with its confidence interval. p_value: of the hypothesis that it is 0, two-sided."""

    mean: float
    low: float
    high: float
    p_value: float


# ---- Draws ----
def drawn_figures(task: TaskFigures) -> dict[tuple[str, str], Drawn]:
    """(method, figure) -> its draws, of all figures of a task that have values."""
    wanted = {key: values for key, values in task.found.items() if isinstance(values, Values)}
    if not wanted:
        return {}
    rows = next(iter(wanted.values())).values.shape[1]
    seed_draws, example_draws = uniforms_of(task.task, rows)
    counts = example_counts(example_draws)
    sums = counts @ np.concatenate([values.values for values in wanted.values()]).T  # (DRAWS, seeds of all figures)
    found, at = {}, 0
    for key, values in wanted.items():
        by_seed = sums[:, at : at + len(values.seeds)]
        at += len(values.seeds)
        found[key] = drawn_mean(by_seed / rows / values.scale, values.by_seed, seed_draws, values.seeds)
    return found


def drawn_mean(by_seed: np.ndarray, means: np.ndarray, seed_draws: np.ndarray, seeds: tuple[int, ...]) -> Drawn:
    """The mean over seeds of a figure: by_seed (DRAWS, S) with drawn examples, means (S,) with all examples."""
    weights = seed_weights(seed_draws, len(seeds))
    draws = (by_seed * weights).sum(axis=1) / weights.sum(axis=1)
    return Drawn(math.fsum(means) / len(seeds), draws, (tuple(means.tolist()),), (seeds,))


def uniforms_of(task: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniform numbers for the draws of a task: of seeds (DRAWS, MOST_SEEDS) and of examples (DRAWS, rows)."""
    random = np.random.default_rng(zlib.crc32(task.encode()))
    return random.random((DRAWS, MOST_SEEDS)), random.random((DRAWS, rows))


def example_counts(uniforms: np.ndarray) -> np.ndarray:
    """(DRAWS, N): how often each of N examples is drawn, from uniform numbers of the same shape."""
    draws, rows = uniforms.shape
    drawn = np.floor(uniforms * rows).astype(np.int64) + rows * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * rows).reshape(draws, rows).astype(np.float64)


def seed_weights(uniforms: np.ndarray, seeds: int) -> np.ndarray:
    """(DRAWS, seeds): how often each seed is drawn; seeds - 1 are, or the only one."""
    drawn = np.floor(uniforms[:, : max(1, seeds - 1)] * seeds)
    return (drawn[:, :, None] == np.arange(seeds)).sum(axis=1).astype(np.float64)


def mean_of(tasks: Sequence[Drawn]) -> Drawn:
    """The mean over tasks, whose draws are independent."""
    count = len(tasks)
    by_seed = tuple(tuple(value / count for value in each) for task in tasks for each in task.by_seed)
    mean, draws = (sum(each) / count for each in ([t.mean for t in tasks], [t.draws for t in tasks]))
    return Drawn(float(mean), np.asarray(draws), by_seed, tuple(seeds for task in tasks for seeds in task.seeds))


def difference(one: Drawn, other: Drawn) -> Drawn:
    """One minus the other, paired: the same draws, and seed by seed if both have the same seeds."""
    by_seed: list[tuple[float, ...]] = []
    seeds: list[tuple[int, ...]] = []
    for own, foreign, own_seeds, foreign_seeds in zip(one.by_seed, other.by_seed, one.seeds, other.seeds):
        if own_seeds == foreign_seeds:
            by_seed.append(tuple(a - b for a, b in zip(own, foreign)))
            seeds.append(own_seeds)
        else:
            by_seed += [own, foreign]
            seeds += [own_seeds, foreign_seeds]
    return Drawn(one.mean - other.mean, one.draws - other.draws, tuple(by_seed), tuple(seeds))


# ---- Intervals ----
def interval(drawn: Drawn) -> Interval:
    """The mean with its confidence interval, and the p-value of a mean of 0."""
    spread = round(float(drawn.draws.std()), DIGITS)
    freedom = degrees_of_freedom(drawn, spread)
    half = student.quantile(1 - LEVEL, freedom) * spread
    p_value = student.p_value(abs(drawn.mean) / spread, freedom) if spread else float(drawn.mean == 0)
    return Interval(drawn.mean, drawn.mean - half, drawn.mean + half, p_value)


def degrees_of_freedom(drawn: Drawn, spread: float) -> float:
    """Satterthwaite's: V^2 / sum over tasks of v^2 / (S - 1), of the variance V of the draws and v between S seeds."""
    between = [
        (float(np.var(values, ddof=1)) / len(values)) ** 2 / (len(values) - 1)
        for values in drawn.by_seed
        if len(values) > 1
    ]
    total, least = math.fsum(between), min((len(values) - 1 for values in drawn.by_seed if len(values) > 1), default=0)
    return math.inf if not total else max(float(least), round(spread**4 / total, 1))


# ---- Comparisons ----
def holm(p_values: Sequence[float], level: float = 1 - LEVEL) -> list[bool]:
    """Which hypotheses are rejected: the smallest p-values while the i-th of m (from 0) is at most level / (m - i)."""
    rejected = [False] * len(p_values)
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        if p_values[number] > level / (len(p_values) - place):
            break
        rejected[number] = True
    return rejected


def better_pairs(drawn: dict[str, Drawn]) -> set[tuple[str, str]]:
    """(better, worse): pairs of methods whose difference passes Holm's correction over all pairs with enough seeds."""
    names = [name for name, each in drawn.items() if min(map(len, each.seeds)) >= LEAST_SEEDS]
    pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
    found = [interval(difference(drawn[one], drawn[other])) for one, other in pairs]
    passed = holm([each.p_value for each in found])
    return {pair if each.mean > 0 else pair[::-1] for pair, each, rejected in zip(pairs, found, passed) if rejected}


def ranks(drawn: dict[str, Drawn]) -> dict[str, tuple[int, int, int]]:
    """Rank of each method's mean, and the LEVEL interval of its rank in the draws. 1 is the best; equal means share
    the better rank.
    """
    names = list(drawn)
    if not names:
        return {}
    means = np.round([drawn[name].mean for name in names], DIGITS)
    draws = np.round(np.stack([drawn[name].draws for name in names], axis=1), DIGITS)  # (DRAWS, M)
    by_draw = np.sort(np.stack([1 + (draws > draws[:, m, None]).sum(axis=1) for m in range(len(names))]), axis=1)
    tail = math.floor((1 - LEVEL) / 2 * by_draw.shape[1])
    return {
        name: (int(1 + (means > means[m]).sum()), int(by_draw[m, tail]), int(by_draw[m, -1 - tail]))
        for m, name in enumerate(names)
    }
