"""How sure the figures are: bootstrap over seeds and examples together, intervals, ranks, and who is better than whom.

Draws      Seeds and examples are drawn with replacement, all methods of a task with the same draws, so that differences
           are paired. Of S seeds S - 1 are drawn: then the variance is unbiased (Rao and Wu 1988), which counts if
           there are three or five. Methods with other seeds have other draws of seeds. Tasks are independent.
Difference on each task on the seeds that both methods have, because a seed also chooses the training and held-out
           examples; on their own seeds if they share none.
Intervals  mean +- t x standard deviation of the draws. Student's t has few degrees of freedom if most of the variance
           is between seeds, and many if it is between examples (Satterthwaite 1946). With fewer than LEAST_SEEDS seeds
           on one task there is no interval: one seed does not show its variance, and two give half widths above 100
           points. Two on each of several tasks suffice: in simulations their intervals cover as they should.
Better     if the p-value of the paired difference passes Holm's correction (1979) over all comparisons of the table.
Ranks      of the means. The interval of a rank is what these comparisons leave open, so it holds for all methods
           together (Mogstad et al. 2024). Intervals of the ranks in the draws are too narrow if many methods
           are about equal: simulations with few seeds show it.

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
LEAST_SEEDS = 3  # with fewer on one task nothing has an interval, and nothing is called better
DIGITS = 12  # to which sums of rounded numbers are rounded, so that they are equal on every machine


class Drawn(NamedTuple):
    """A figure in every draw, and what its degrees of freedom are computed from."""

    mean: float
    draws: np.ndarray  # (DRAWS,)
    by_seed: tuple[tuple[float, ...], ...]  # the figure of each seed, of each task; divided by the number of tasks
    seeds: tuple[tuple[int, ...], ...]  # of each task
    columns: tuple[tuple[str, np.ndarray], ...] = ()  # of each task: its name, and (DRAWS, S) the figure of each seed


class Interval(NamedTuple):
    """A mean with its confidence interval; low and high are NaN if there is none."""

    mean: float
    low: float
    high: float
    p_value: float  # of the hypothesis that the mean is 0, two-sided; 1 without an interval


# ---- Draws ----
def drawn_figures(task: TaskFigures) -> dict[tuple[str, str], Drawn]:
    """(method, figure) -> its draws, of all figures of a task that have values."""
    wanted = {key: values for key, values in task.figures.items() if isinstance(values, Values)}
    if not wanted:
        return {}
    rows = next(iter(wanted.values())).values.shape[1]
    counts = example_counts(task.task, rows)
    sums = counts @ np.concatenate([values.values for values in wanted.values()]).T  # (DRAWS, seeds of all figures)
    drawn, at = {}, 0
    for key, values in wanted.items():
        by_seed = sums[:, at : at + len(values.seeds)]
        at += len(values.seeds)
        drawn[key] = drawn_mean(by_seed / rows / values.scale, values.by_seed, task.task, values.seeds)
    return drawn


def drawn_mean(by_seed: np.ndarray, means: np.ndarray, task: str, seeds: tuple[int, ...]) -> Drawn:
    """The mean over seeds of a figure: by_seed (DRAWS, S) with drawn examples, means (S,) with all examples."""
    weights = seed_weights(task, seeds)
    draws = (by_seed * weights).sum(axis=1) / weights.sum(axis=1)
    return Drawn(math.fsum(means) / len(seeds), draws, (tuple(means.tolist()),), (seeds,), ((task, by_seed),))


def drawn_numbers(key: str, draws: int, count: int) -> np.ndarray:
    """(DRAWS, draws): whole numbers below `count`, drawn with replacement; the same for the same key."""
    return np.floor(np.random.default_rng(zlib.crc32(key.encode())).random((DRAWS, draws)) * count).astype(np.int64)


def example_counts(task: str, rows: int) -> np.ndarray:
    """(DRAWS, N): how often each of N examples is drawn."""
    drawn = drawn_numbers(task, rows, rows) + rows * np.arange(DRAWS)[:, None]
    return np.bincount(drawn.ravel(), minlength=DRAWS * rows).reshape(DRAWS, rows).astype(np.float64)


def seed_weights(task: str, seeds: tuple[int, ...]) -> np.ndarray:
    """(DRAWS, S): how often each of S seeds is drawn; S - 1 are, or the only one."""
    drawn = drawn_numbers(f"{task}, seeds {seeds}", max(1, len(seeds) - 1), len(seeds))
    return (drawn[:, :, None] == np.arange(len(seeds))).sum(axis=1).astype(np.float64)


def mean_of(tasks: Sequence[Drawn]) -> Drawn:
    """The mean over tasks, whose draws are independent."""
    count = len(tasks)
    by_seed = tuple(tuple(value / count for value in seed_means) for task in tasks for seed_means in task.by_seed)
    mean, draws = (sum(summands) / count for summands in ([t.mean for t in tasks], [t.draws for t in tasks]))
    seeds = tuple(seeds for task in tasks for seeds in task.seeds)
    columns = tuple(column for task in tasks for column in task.columns)
    return Drawn(float(mean), np.asarray(draws), by_seed, seeds, columns)


def difference(one: Drawn, other: Drawn) -> Drawn:
    """One minus the other, paired: the same draws, and on each task seed by seed on those that both have, if any."""
    one, other = _on_seeds_of(one, other), _on_seeds_of(other, one)
    by_seed: list[tuple[float, ...]] = []
    seeds: list[tuple[int, ...]] = []
    for ours, foreign, own_seeds, foreign_seeds in zip(one.by_seed, other.by_seed, one.seeds, other.seeds):
        if own_seeds == foreign_seeds:
            by_seed.append(tuple(a - b for a, b in zip(ours, foreign)))
            seeds.append(own_seeds)
        else:
            by_seed += [ours, foreign]
            seeds += [own_seeds, foreign_seeds]
    return Drawn(one.mean - other.mean, one.draws - other.draws, tuple(by_seed), tuple(seeds))


def _on_seeds_of(one: Drawn, other: Drawn) -> Drawn:
    """A figure on the seeds that the other has, too; on a task where they share none, on its own."""
    if one.seeds == other.seeds or not one.columns:
        return one
    tasks = []
    for (task, drawn), means, seeds, foreign in zip(one.columns, one.by_seed, one.seeds, other.seeds):
        at = [k for k, seed in enumerate(seeds) if seed in foreign] or [*range(len(seeds))]
        all_means = np.array(means)[at] * len(one.seeds)  # by_seed is divided by the number of tasks
        tasks.append(drawn_mean(drawn[:, at], all_means, task, tuple(seeds[k] for k in at)))
    return mean_of(tasks)


# ---- Intervals ----
def interval(drawn: Drawn) -> Interval:
    """The mean with its confidence interval and p-value; without them if there are too few seeds."""
    if not has_interval(drawn):
        return Interval(drawn.mean, math.nan, math.nan, 1.0)
    spread = round(float(drawn.draws.std()), DIGITS)
    freedom = degrees_of_freedom(drawn, spread)
    half = student.quantile(1 - LEVEL, freedom) * spread
    p_value = student.p_value(abs(drawn.mean) / spread, freedom) if spread else float(abs(drawn.mean) < 10**-DIGITS)
    return Interval(drawn.mean, drawn.mean - half, drawn.mean + half, p_value)


def has_interval(drawn: Drawn) -> bool:
    """Whether seeds give as many degrees of freedom as LEAST_SEEDS on one task, and each task gives some."""
    freedom = [len(seeds) - 1 for seeds in drawn.seeds]
    return min(freedom) > 0 and sum(freedom) >= LEAST_SEEDS - 1


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
def compare(one: Drawn, other: Drawn) -> Interval:
    """One minus the other; it has an interval if each of the two has enough seeds for one."""
    gap = interval(difference(one, other))
    return gap if has_interval(one) and has_interval(other) else Interval(gap.mean, math.nan, math.nan, 1.0)


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
    names = [name for name, method_drawn in drawn.items() if has_interval(method_drawn)]
    pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
    gaps = [interval(difference(drawn[one], drawn[other])) for one, other in pairs]
    passed = holm([gap.p_value for gap in gaps])
    return {pair if gap.mean > 0 else pair[::-1] for pair, gap, rejected in zip(pairs, gaps, passed) if rejected}


def ranks(drawn: dict[str, Drawn], better: set[tuple[str, str]]) -> dict[str, tuple[int, int, int]]:
    """Rank of each method's mean, and the interval of ranks that the pairs (better, worse) leave open.

    1 is the best; equal means share the better rank.
    """
    means = {name: round(method_drawn.mean, DIGITS) for name, method_drawn in drawn.items()}
    ranked = {}
    for name in drawn:
        beaten, beaten_by = (sum(pair[at] == name for pair in better) for at in (0, 1))
        ranked[name] = (1 + sum(mean > means[name] for mean in means.values()), 1 + beaten_by, len(drawn) - beaten)
    return ranked
