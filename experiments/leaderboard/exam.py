"""The exam of known hardness: does a method exit early on what is easy, or on what is short?

The built-in reviews are of seven kinds, from plain to doubly negated (lab/data/reviews.py). Hard sentences are
also longer, so two partial correlations are compared: of depth and hardness at equal length, and of depth and length at
equal hardness. Correlations are Spearman's; length is the number of words. All of it is at the rule of EXAM_SHARE.
"""

from typing import NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.figures import BUDGETS, CONTROL, HEADLINE, TaskFigures
from mini_ee.experiments.leaderboard.ranking import (
    DIGITS,
    Drawn,
    Interval,
    drawn_mean,
    example_counts,
    has_interval,
    holm,
    interval,
)
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.data.tasks import Split, toy_task

EXAM_SHARE = BUDGETS[HEADLINE]
CORRELATIONS = ("hardness", "length", "hardness at equal length", "length at equal hardness")
ONE_LAYER = "all examples exit at the same layer"
EASY, SHORT, OPEN = "what is easy", "what is short", "not decided"


class Exam(NamedTuple):
    """The result of one method."""

    depth: list[float]  # by kind, mean over seeds
    accuracy: list[float]  # by kind
    full: list[float]  # by kind, of the full model
    correlations: dict[str, Interval] | str  # by name of CORRELATIONS, or why there are none
    verdict: str  # EASY, SHORT or OPEN; empty without correlations


def exam(task: TaskFigures, rows: Split | None = None) -> dict[str, Exam]:
    """Method -> its result, of all methods with a rule at EXAM_SHARE. rows: the reported examples; None: built-in."""
    rows = rows or _built_in()
    assert rows.hardness is not None
    kind = np.array([HARDNESS.index(name) for name in rows.hardness])
    words = np.array([sum(len(text.split()) for text in texts) for texts in rows.texts])
    seeds = {method: [run for _, run in sorted(runs.items())] for method, runs in task.runs.items()}
    whole = {method: runs for method, runs in seeds.items() if all(EXAM_SHARE in run.at for run in runs)}
    for method, runs in whole.items():
        if len(runs[0].full) != len(rows):
            raise ValueError(f"{method}: expected the {len(rows)} test reviews, found {len(runs[0].full)} examples")
    depths = {method: np.array([run.depth[EXAM_SHARE] for run in runs]) for method, runs in whole.items()}
    one_layer = {  # seeds
        method: int((seed_depths == seed_depths[:, :1]).all(axis=1).sum()) for method, seed_depths in depths.items()
    }
    several = {method: seed_depths for method, seed_depths in depths.items() if not one_layer[method]}
    drawn = drawn_correlations(task, several, kind, words)
    exams = {}
    for method, runs in whole.items():
        right, full = np.array([run.at[EXAM_SHARE] for run in runs]), np.array([run.full for run in runs])
        each_kind = [kind == k for k in range(len(HARDNESS))]
        by_kind = [[float(values[:, k].mean()) for k in each_kind] for values in (depths[method], right, full)]
        if method in drawn:
            exams[method] = Exam(
                *by_kind, {name: interval(correlation) for name, correlation in drawn[method].items()}, OPEN
            )
        else:
            which = "" if one_layer[method] == len(runs) else f"with {one_layer[method]} of {len(runs)} seeds, "
            exams[method] = Exam(*by_kind, which + ONE_LAYER, "")
    names = [method for method in several if method != CONTROL and has_interval(drawn[method]["gap"])]
    gaps = {method: exams[method].correlations for method in names}
    passed = holm([gap["gap"].p_value for gap in gaps.values()])  # type: ignore[index]  # these have correlations
    for method, decided in zip(names, passed):
        easy, short, gap = (gaps[method][name] for name in (*CORRELATIONS[2:], "gap"))  # type: ignore[index]
        if decided and (easy if gap.mean > 0 else short).low > 0:
            exams[method] = exams[method]._replace(verdict=EASY if gap.mean > 0 else SHORT)
    return exams


def sentences_by_kind() -> list[int]:
    """How many of the reported reviews are of each kind."""
    hardness = _built_in().hardness
    assert hardness is not None
    return [list(hardness).count(name) for name in HARDNESS]


def _built_in() -> Split:
    task, _ = toy_task().without_seen_rows()
    return task.split(task.default_split)


def double_ranks(values: np.ndarray) -> np.ndarray:
    """(N,) -> twice the rank of each value, a whole number; ties share their average rank.

    >>> double_ranks(np.array([5, 1, 5]))
    array([5, 2, 5])
    """
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (2 * last - sizes + 1)[place]


def drawn_correlations(
    task: TaskFigures, depths: dict[str, np.ndarray], kind: np.ndarray, words: np.ndarray
) -> dict[str, dict[str, Drawn]]:
    """Method -> each correlation, and the gap of the two partial ones, in every draw. depths: (S, N) by method.

    Ranks are those of all examples, also in the draws. So a draw is known from sums over its examples.
    """
    if not depths:
        return {}
    h, w = (double_ranks(column).astype(np.float64) for column in (kind, words))
    d = np.array([double_ranks(seed) for seeds in depths.values() for seed in seeds], np.float64)
    columns = np.concatenate((np.stack((h, w, h * h, w * w, h * w)), d, d * d, d * h, d * w)).T
    every_example = np.ones((1, len(h)))
    weights = np.concatenate((every_example, example_counts(task.task, len(h))))
    sums = weights @ columns  # of whole numbers
    every = dict(zip((*CORRELATIONS, "gap"), _correlations(sums, len(h), len(d))))
    correlations, at = {}, 0
    for method, seeds in depths.items():
        some = {name: values[:, at : at + len(seeds)] for name, values in every.items()}
        at += len(seeds)
        numbers = tuple(sorted(task.runs[method]))
        correlations[method] = {
            name: drawn_mean(values[1:], values[0], task.task, numbers) for name, values in some.items()
        }
    return correlations


def _correlations(sums: np.ndarray, rows: int, count: int) -> list[np.ndarray]:
    """The correlations and their gap, (draws, count) each, from the sums of h, w, hh, ww, hw, d, dd, dh and dw."""
    h, w, hh, ww, hw = sums[:, :5, None].swapaxes(0, 1)
    d, dd, dh, dw = np.split(sums[:, 5:], 4, axis=1)
    assert d.shape[1] == count

    def r(xy: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            correlation = (rows * xy - x * y) / np.sqrt((rows * xx - x * x) * (rows * yy - y * y))
        return np.nan_to_num(correlation)  # 0 if one of the two is constant

    hardness, length, both = r(dh, d, h, dd, hh), r(dw, d, w, dd, ww), r(hw, h, w, hh, ww)
    easy, short = _partial(hardness, length, both), _partial(length, hardness, both)
    return [np.round(values, DIGITS) for values in (hardness, length, easy, short, easy - short)]


def _partial(xy: np.ndarray, xz: np.ndarray, yz: np.ndarray) -> np.ndarray:
    """The partial correlation of x and y at equal z, from the three correlations."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))
