"""The leaderboard from its records: what is compared, and rows of figures for pages and CSV files. No sentences."""

import math
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.exam import EXAM_SHARE
from mini_ee.experiments.leaderboard.figures import (
    CONTROL,
    FIGURES,
    HEADLINE,
    REFERENCE,
    TaskFigures,
    Values,
    about_figure,
    confidence_figures,
    read_task,
)
from mini_ee.experiments.leaderboard.plan import EXAM, Plan
from mini_ee.experiments.leaderboard.ranking import (
    DIGITS,
    Drawn,
    better_pairs,
    compare,
    difference,
    drawn_figures,
    has_interval,
    holm,
    interval,
    mean_of,
    ranks,
)
from mini_ee.experiments.pages import plus_minus, signed
from mini_ee.lab.data.metrics import spearman

BETTER, WORSE = "▲", "▼"  # than the reference, after Holm's correction over the table
NOTHING = "–"  # a cell that does not apply
LEAST_CORRELATED = 6  # trainings whose properties are correlated with what they save
MEASURED = ("half speedup", "speedup", "seconds", "megabytes")
SHOWN = ("full", "at 1.5x", "at 2x", "at 3x", "saved", "saved own")  # columns of the page; the CSV file has all


class Leaderboard(NamedTuple):
    """Everything that the pages show, by task."""

    plan: Plan
    tasks: dict[str, TaskFigures]
    drawn: dict[str, dict[tuple[str, str], Drawn]]  # task -> (method, figure) -> draws
    compared: tuple[str, ...]  # the tasks of the headline
    headline: dict[str, Drawn]  # method -> mean over these tasks; only methods that have all of them
    better: set[tuple[str, str]]  # (better, worse) by the headline
    ranks: dict[str, tuple[int, int, int]]

    @property
    def order(self) -> list[str]:
        """All methods: by the headline, then the others in the order of the plan. The control is not a method."""
        ranked = sorted(self.ranks, key=lambda name: (-round(self.headline[name].mean, DIGITS), name))
        return [*ranked, *(name for name in self.plan.methods if name not in self.ranks)]

    def mean(self, method: str, figure: str) -> Drawn | None:
        """A figure, the mean over the compared tasks; None if a task lacks it."""
        by_task = [self.drawn[name].get((method, figure)) for name in self.compared]
        return mean_of(complete) if len(complete := [values for values in by_task if values]) == len(by_task) else None


def read_leaderboard(plan: Plan) -> Leaderboard:
    """The leaderboard of all records of a plan."""
    tasks = {name: read_task(plan.records / name, plan.missing(name)) for name in plan.tasks}
    drawn = {name: drawn_figures(task) for name, task in tasks.items()}
    compared = compared_tasks(plan, tasks)
    headline = {
        method: mean_of([drawn[name][method, HEADLINE] for name in compared])
        for method in (*plan.methods, CONTROL)
        if compared and all((method, HEADLINE) in drawn[name] for name in compared)
    }
    methods = {name: values for name, values in headline.items() if name != CONTROL}
    better = better_pairs(methods)
    return Leaderboard(plan, tasks, drawn, compared, headline, better, ranks(methods, better))


def compared_tasks(plan: Plan, tasks: dict[str, TaskFigures]) -> tuple[str, ...]:
    """The tasks of the headline: those with at least half as many methods as the one with most, so that a task that has
    just begun does not hide the others. The exam counts if no other task has been run.
    """
    counts = {name: sum(method in tasks[name].runs for method in plan.methods) for name in plan.tasks}
    begun = [name for name in plan.tasks if counts[name]]
    begun = [name for name in begun if name != EXAM] or begun
    return tuple(name for name in begun if 2 * counts[name] >= max(counts[other] for other in begun))


# ---- The first page ----
def tiers(board: Leaderboard) -> dict[str, list[list[str]]]:
    """Rows of the methods by how they compare with joint training at half of the FLOPs, in the order of their scores.

    `without`: methods with records on all compared tasks that have no rule with so few FLOPs.
    """
    by_tier: dict[str, list[list[str]]] = {name: [] for name in ("better", "open", "control", "worse", "without")}
    for method in (*board.order, CONTROL):
        if method not in board.headline:
            tier = "without"
        elif method == CONTROL:
            tier = "control"
        else:
            pairs = {"better": (method, REFERENCE), "worse": (REFERENCE, method)}
            tier = next((name for name, pair in pairs.items() if pair in board.better), "open")
        if board.mean(method, "full"):
            by_tier[tier].append(_row(board, method))
    return by_tier


def _row(board: Leaderboard, method: str) -> list[str]:
    """Name, accuracy at half of the FLOPs, difference from joint training, layers saved at one point, in two ways."""
    gap = NOTHING
    if method in board.headline and method != REFERENCE:
        gap = signed(compare(board.headline[method], board.headline[REFERENCE]))
    cells = [board.headline.get(method), *(board.mean(method, name) for name in ("saved", "saved own"))]
    accuracy, *saved = (plus_minus(interval(cell)) if cell else NOTHING for cell in cells)
    return [method, accuracy, gap, *saved]


# ---- Each task ----
def task_rows(board: Leaderboard, name: str) -> list[list[str]]:
    """A row for each method on a task: SHOWN, measured speed-up at half of the FLOPs, and the number of seeds."""
    task, drawn, marks = board.tasks[name], board.drawn[name], significant(board.drawn[name])
    rows = []
    for method in methods_on(board, name):
        cells = [
            plus_minus(interval(drawn[method, figure])) + marks.get((method, figure), "")
            if (method, figure) in drawn
            else NOTHING
            for figure in SHOWN
        ]
        speed = measured(task, method, "half speedup")
        rows.append([method, *cells, NOTHING if speed is None else f"{speed:.2f}", str(len(task.runs[method]))])
    return rows


def methods_on(board: Leaderboard, name: str) -> list[str]:
    """The methods with records of a task, in the order of the ranks, and the control."""
    return [method for method in (*board.order, CONTROL) if method in board.tasks[name].runs]


def absent_rows(board: Leaderboard, name: str) -> list[list[str]]:
    """Why a method that has records has no figure: rows of method, figure and reason."""
    figures = board.tasks[name].figures
    return [
        [method, figure, why]
        for method in methods_on(board, name)
        for figure in SHOWN
        if isinstance(why := figures[method, figure], str)
    ]


def significant(drawn: dict[tuple[str, str], Drawn]) -> dict[tuple[str, str], str]:
    """(method, figure) -> BETTER or WORSE than the reference, after Holm's correction over all cells of the table."""
    compared = {}
    for (method, figure), values in drawn.items():
        reference = drawn.get((REFERENCE, figure))
        if method in (REFERENCE, CONTROL) or figure in ("lost", "saved own") or reference is None:
            continue
        if has_interval(values) and has_interval(reference):
            compared[method, figure] = interval(values if figure == "area" else difference(values, reference))
    passed = holm([gap.p_value for gap in compared.values()])
    return {key: BETTER if gap.mean > 0 else WORSE for (key, gap), is_so in zip(compared.items(), passed) if is_so}


def measured(task: TaskFigures, method: str, figure: str) -> float | None:
    """The mean over seeds of a figure that the records contain; None if a seed lacks it. Seconds are of the seeds that
    were trained on the CPU.
    """
    values = about_figure(task, method, figure)
    complete = values and (figure == "seconds" or len(values) == len(task.runs[method]))
    return math.fsum(values) / len(values) if complete else None


def figure_rows(board: Leaderboard) -> list[dict[str, str]]:
    """The rows of the CSV file: for each task and method every figure, half of its interval, and whether it differs
    significantly from joint training.
    """
    rows = []
    for name, task in board.tasks.items():
        marks = significant(board.drawn[name])
        for method in methods_on(board, name):
            row = {"task": name, "method": method, "seeds": str(len(task.runs[method]))}
            for figure in FIGURES:
                if values := board.drawn[name].get((method, figure)):
                    at = interval(values)
                    row |= {figure: f"{at.mean:.4f}", f"{figure} ±": f"{at.high - at.mean:.4f}".replace("nan", "")}
                    row[f"{figure} against joint"] = marks.get((method, figure), "")
            none = sum(run.passes_at_one_point is None for run in task.runs[method].values())
            row["seeds without a rule at one point"] = str(none)
            both = confidence_figures(task, method)
            row |= {key: f"{value:.4f}" for key, value in zip(("EEFP", "ECE"), both or ())}
            of_records = {figure: measured(task, method, figure) for figure in MEASURED}
            rows.append(row | {figure: f"{value:.4g}" for figure, value in of_records.items() if value is not None})
    return rows


# ---- Hardness and confidence ----


def prediction_rows(board: Leaderboard) -> list[list[str]]:
    """Spearman's correlations of EEFP and ECE with the layers saved at one point, over the methods of a task."""
    rows = []
    for name, task in board.tasks.items():
        points = []
        for method in task.runs:
            saved, both = task.figures.get((method, "saved")), confidence_figures(task, method)
            if method != CONTROL and both and isinstance(saved, Values):
                points.append((*both, float(saved.by_seed.mean())))
        if len({point[:2] for point in points}) >= LEAST_CORRELATED:  # methods that share a training have equal ones
            failure, calibration, layers = np.round(list(zip(*points)), 9)
            rho = [f"{spearman(scores, layers):.2f}" for scores in (failure, calibration)]
            rows.append([name, *rho, str(len(points))])
    return rows


def without_exam(board: Leaderboard, name: str) -> list[str]:
    """The methods with records of the exam that have no rule with so few FLOPs in some seed."""
    runs = board.tasks[name].runs
    return [method for method in methods_on(board, name) if any(EXAM_SHARE not in r.at for r in runs[method].values())]
