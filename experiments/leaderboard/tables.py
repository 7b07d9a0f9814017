"""The tables of the leaderboard. A cell has a figure, or a number that leads to the reason why it has none."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from mini_ee.experiments.leaderboard.figures import (
    CONTROL,
    FIGURES,
    HEADLINE,
    REFERENCE,
    TaskFigures,
    about_figure,
    confidence_figures,
    read_task,
)
from mini_ee.experiments.leaderboard.plan import NOT_RUN, Plan
from mini_ee.experiments.leaderboard.protocol import FEWER_SEEDS, LONG_SECONDS
from mini_ee.experiments.leaderboard.ranking import (
    DIGITS,
    LEAST_SEEDS,
    Drawn,
    Interval,
    better_pairs,
    difference,
    drawn_figures,
    holm,
    interval,
    mean_of,
    ranks,
)
from mini_ee.experiments.markdown import markdown_table

BETTER, WORSE = "▲", "▼"  # than the reference, after Holm's correction over the table
TITLES = {
    "full": "full model",
    "at 1.5x": "at 1.5x",
    "at 2x": "at 2x",
    "at 3x": "at 3x",
    "saved": "saved at 1 point",
    "area": "area",
    "half speedup": "speed-up at 2x",
    "speedup": "speed-up at 1 point",
    "seconds": "training s",
    "megabytes": "MB added",
}
MEASURED = ("half speedup", "seconds", "megabytes")  # when the record was made; means over tasks
MEASURED_ON_TASK = ("half speedup", "speedup", "seconds", "megabytes")


class Leaderboard(NamedTuple):
    """Everything that the page prints, by task."""

    plan: Plan
    tasks: dict[str, TaskFigures]
    drawn: dict[str, dict[tuple[str, str], Drawn]]  # task -> (method, figure) -> draws
    headline: dict[str, Drawn]  # method -> mean over the tasks of the headline; only methods that have all of them
    better: set[tuple[str, str]]  # (better, worse) by the headline
    ranks: dict[str, tuple[int, int, int]]

    @property
    def order(self) -> list[str]:
        """All methods: by the headline, then the others in the order of the plan. The control is not a method."""
        ranked = sorted(self.ranks, key=lambda name: (-round(self.headline[name].mean, DIGITS), name))
        return [*ranked, *(name for name in self.plan.methods if name not in self.ranks)]


def read_leaderboard(plan: Plan) -> Leaderboard:
    """The leaderboard of all records of a plan."""
    tasks = {name: read_task(plan.records / name, plan.missing(name)) for name in plan.tasks}
    drawn = {name: drawn_figures(task) for name, task in tasks.items()}
    begun = [name for name in plan.ranked_tasks if tasks[name].runs]
    headline = {
        method: mean_of([drawn[name][method, HEADLINE] for name in begun])
        for method in (*plan.methods, CONTROL)
        if begun and all((method, HEADLINE) in drawn[name] for name in begun)
    }
    methods = {name: each for name, each in headline.items() if name != CONTROL}
    return Leaderboard(plan, tasks, drawn, headline, better_pairs(methods), ranks(methods))


# ---- Cells ----
class Notes:
    """The reasons of empty cells, each with a number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> str:
        """What the cell contains: the number of the reason, or NOT_RUN for a run that is missing."""
        if reason == NOT_RUN:
            return NOT_RUN
        return f"[{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        """The reasons below the table."""
        return [f"{number}. {reason}" for reason, number in self.numbers.items()] + [""] * bool(self.numbers)


def percent(value: float) -> str:
    """A share in percent with one decimal; no minus before 0.0."""
    text = f"{100 * value:.1f}"
    return "0.0" if text == "-0.0" else text


def plus_minus(found: Interval, mark: str = "") -> str:
    """The mean and half the width of its interval, both in percent."""
    return f"{percent(found.mean)} ±{percent(found.high - found.mean)}{mark}"


def signed(found: Interval) -> str:
    """A difference in points."""
    text = plus_minus(found)
    return text if text.startswith(("-", "0.0 ")) else f"+{text}"


def number(values: Sequence[float]) -> str:
    """A mean with three significant digits."""
    mean = math.fsum(values) / len(values)
    return f"{mean:,.{0 if abs(mean) >= 100 else 1 if abs(mean) >= 10 else 2}f}"


# ---- Main table ----
def main_table(board: Leaderboard) -> list[str]:
    """A line for each method, by the headline; the control stands where its score is."""
    notes, tasks = Notes(), [name for name in board.plan.ranked_tasks if board.tasks[name].runs]
    rows = []
    for method in board.order:
        rows.append([*_ranked_cells(board, method, tasks, notes), *_mean_cells(board, method, tasks, notes)])
    if CONTROL in board.headline:
        control = board.headline[CONTROL].mean
        at = sum(board.headline[name].mean > control for name in board.ranks)
        cells = [*_ranked_cells(board, CONTROL, tasks, notes), *_mean_cells(board, CONTROL, tasks, notes)]
        rows.insert(at, ["", *cells[1:]])
    columns = ["rank", "method", "accuracy at 2x", "minus joint", "better than", "worse than"]
    columns += ["full model", "layers saved", *(TITLES[name] for name in MEASURED), "seeds"]
    return [*markdown_table(columns, rows), "", *notes.lines()]


def _ranked_cells(board: Leaderboard, method: str, tasks: list[str], notes: Notes) -> list[str]:
    """Rank, name, score, difference from joint training, and numbers of worse and better methods."""
    name = f"*{method}*" if method == CONTROL else method
    if method not in board.headline:
        why = _why_no_mean(board, method, HEADLINE, tasks, notes)
        return [why, name, *[why] * 4]
    rank = "{} ({} to {})".format(*board.ranks[method]) if method in board.ranks else ""
    gap, reference = NOT_RUN, board.headline.get(REFERENCE)
    if method == REFERENCE:
        gap = ""
    elif reference:
        gap = signed(interval(difference(board.headline[method], reference)))
    counts = [sum(pair[at] == method for pair in board.better) for at in (0, 1)] if rank else ["", ""]
    return [rank, name, plus_minus(interval(board.headline[method])), gap, *map(str, counts)]


def _mean_cells(board: Leaderboard, method: str, tasks: list[str], notes: Notes) -> list[str]:
    """Means over the tasks of the headline, and the number of seeds."""
    cells = []
    for figure in ("full", "saved"):
        found = [each for name in tasks if (each := board.drawn[name].get((method, figure)))]
        complete = found and len(found) == len(tasks)
        cells.append(percent(mean_of(found).mean) if complete else _why_no_mean(board, method, figure, tasks, notes))
    for figure in MEASURED if method != CONTROL else ():
        by_task = [about_figure(board.tasks[name], method, figure) for name in tasks]
        if tasks and all(by_task):
            cells.append(number([math.fsum(each) / len(each) for each in by_task]))
        else:
            cells.append(_why_no_mean(board, method, HEADLINE, tasks, notes))
    if method == CONTROL:  # it is not measured, and nothing is trained for it
        cells += [""] * len(MEASURED)
    counts = sorted({len(board.tasks[name].runs.get(method, {})) for name in tasks})
    return [*cells, " to ".join(map(str, [counts[0], counts[-1]] if len(counts) > 1 else counts)) or NOT_RUN]


def _why_no_mean(board: Leaderboard, method: str, figure: str, tasks: list[str], notes: Notes) -> str:
    """A cell of a mean over tasks: the number of the first reason, or NOT_RUN."""
    for name in tasks:
        reason = board.tasks[name].found.get((method, figure), NOT_RUN)
        if isinstance(reason, str):
            return notes.number(reason if reason == NOT_RUN else f"{name}: {reason}")
    return notes.number("not measured when the record was made") if tasks else NOT_RUN


# ---- Tables of a task ----
def task_table(board: Leaderboard, name: str) -> list[str]:
    """All figures on a task, and below the table the reasons of its empty cells."""
    task, drawn, notes = board.tasks[name], board.drawn[name], Notes()
    marks = _marks(drawn)
    rows = []
    for method in [*board.order, CONTROL]:
        if method == CONTROL and method not in task.runs:
            continue
        cells = [f"*{method}*" if method == CONTROL else method]
        for figure in FIGURES:
            if (method, figure) in drawn:
                cell = plus_minus(interval(drawn[method, figure]), marks.get((method, figure), ""))
                cells.append(cell + (_zeros(task, method, notes) if figure == "saved" else ""))
            else:
                cells.append(notes.number(str(task.found.get((method, figure), NOT_RUN))))
        for figure in MEASURED_ON_TASK:
            values = about_figure(task, method, figure)
            cells.append(
                number(values) if values else "" if method == CONTROL else _why_empty(task, method, figure, notes)
            )
        cells.insert(len(FIGURES) + 1, _failure(task, method, notes))
        rows.append([*cells, _seeds(board.plan, task, method, notes)])
    titles = [TITLES[figure] for figure in FIGURES], [TITLES[figure] for figure in MEASURED_ON_TASK]
    columns = ["method", *titles[0], "EEFP", *titles[1], "seeds"]
    return [*markdown_table(columns, rows), "", *notes.lines()]


def _failure(task: TaskFigures, method: str, notes: Notes) -> str:
    if (found := confidence_figures(task, method)) is not None:
        return f"{found[0]:.2f}"
    return notes.number("it has one exit" if method in task.runs else str(task.found[method, "full"]))


def _zeros(task: TaskFigures, method: str, notes: Notes) -> str:
    """The number of a note if some seeds count as 0 layers saved."""
    runs = task.runs[method].values()
    lost = sum(run.one_point is None for run in runs)
    return f" {notes.number(f'{lost} of {len(runs)} seeds lose more with every rule, and count as 0')}" if lost else ""


def _seeds(plan: Plan, task: TaskFigures, method: str, notes: Notes) -> str:
    """The number of seeds, and why there are fewer than planned."""
    count = len(task.runs.get(method, {}))
    if count in (0, plan.seeds) or method == CONTROL:
        return str(count)
    about = next(iter(task.runs[method].values())).about
    why = "the other seeds have not been run yet"
    if diverged := plan.diverged(task.task, about.get("trained_as", method)):
        why = f"the training diverged with seed {', '.join(diverged)}"
    elif max(about_figure(task, method, "seconds"), default=0.0) > LONG_SECONDS and count >= FEWER_SEEDS:
        why = f"a training takes more than {LONG_SECONDS // 60} minutes"
    return f"{count} {notes.number(why)}"


def _why_empty(task: TaskFigures, method: str, figure: str, notes: Notes) -> str:
    """A cell of a figure that the records contain."""
    if method in task.runs:
        at_half = task.found[method, HEADLINE] if figure == "half speedup" else None
        return notes.number(at_half if isinstance(at_half, str) else "not measured when the record was made")
    return notes.number(str(task.found[method, "full"]))


def _marks(drawn: dict[tuple[str, str], Drawn]) -> dict[tuple[str, str], str]:
    """(method, figure) -> BETTER or WORSE than the reference, after Holm's correction over all cells of the table."""
    compared = {}
    for (method, figure), each in drawn.items():
        reference = drawn.get((REFERENCE, figure))
        if method in (REFERENCE, CONTROL) or reference is None or min(map(len, each.seeds)) < LEAST_SEEDS:
            continue
        compared[method, figure] = interval(each if figure == "area" else difference(each, reference))
    passed = holm([each.p_value for each in compared.values()])
    return {key: BETTER if each.mean > 0 else WORSE for (key, each), is_so in zip(compared.items(), passed) if is_so}
