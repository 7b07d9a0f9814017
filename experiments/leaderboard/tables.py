"""The tables of the leaderboard. A cell has a figure, or a number that leads to the reason why it has none."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mini_ee.experiments.leaderboard.figures import (
    CONTROL,
    FIGURES,
    HEADLINE,
    REFERENCE,
    TaskFigures,
    about_figure,
    confidence_figures,
    read_task,
    trained_on,
)
from mini_ee.experiments.leaderboard.plan import NOT_RUN, Plan
from mini_ee.experiments.leaderboard.protocol import FEWER_SEEDS, LONG_SECONDS
from mini_ee.experiments.leaderboard.ranking import (
    DIGITS,
    Drawn,
    Interval,
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
from mini_ee.experiments.markdown import listed, markdown_table, wrapped

BETTER, WORSE = "▲", "▼"  # than the reference, after Holm's correction over the table
NOTHING, NO_INTERVAL = "–", "±?"  # a cell that does not apply; half of an interval that is not known
NOT_YET = "the other seeds have not been run yet"
OTHER_RULE = "with some seeds, another rule was timed than the one that the records choose now"
ON_A_GPU = "every seed was trained on a GPU, and times of trainings are given for the CPU"
TITLES = {
    "full": "full model",
    "at 1.5x": "at 1.5x",
    "at 2x": "at 2x",
    "at 3x": "at 3x",
    "saved": "saved at 1 point",
    "saved own": "saved at 1 point of its own",
    "lost": "lost at 1 point",
    "area": "area",
    "half speedup": "speed-up at 2x",
    "speedup": "speed-up at 1 point",
    "seconds": "training, s",
    "megabytes": "MB added",
}
MEASURED = ("half speedup", "seconds", "megabytes")  # when the record was made; means over tasks
MEASURED_ON_TASK = ("half speedup", "speedup", "seconds", "megabytes")


class Leaderboard(NamedTuple):
    """Everything that the page prints, by task."""

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
    methods = {name: each for name, each in headline.items() if name != CONTROL}
    better = better_pairs(methods)
    return Leaderboard(plan, tasks, drawn, compared, headline, better, ranks(methods, better))


def compared_tasks(plan: Plan, tasks: dict[str, TaskFigures]) -> tuple[str, ...]:
    """The tasks of the headline: those with at least half as many methods as the one with most, so that a task that has
    just begun does not hide the others. The exam counts if no other task has been run.
    """
    counts = {name: sum(method in tasks[name].runs for method in plan.methods) for name in plan.tasks}
    begun = [name for name in plan.ranked_tasks if counts[name]] or [name for name in plan.tasks if counts[name]]
    return tuple(name for name in begun if 2 * counts[name] >= max(counts[each] for each in begun))


# ---- Cells ----
class Notes:
    """The reasons of empty cells, each with a number, and the methods that have no row."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.not_run: list[str] = []

    def number(self, reason: str) -> str:
        """What the cell contains: the number of the reason."""
        return f"[{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        """The reasons and the methods without a row, below the table."""
        reasons = [f"{number}. {reason}" for reason, number in self.numbers.items()] + [""] * bool(self.numbers)
        return reasons + [*wrapped(f"Not run yet: {listed(self.not_run)}.").splitlines(), ""] * bool(self.not_run)


def percent(value: float) -> str:
    """A share in percent with one decimal; no minus before 0.0."""
    text = f"{100 * value:.1f}"
    return "0.0" if text == "-0.0" else text


def plus_minus(found: Interval, mark: str = "") -> str:
    """The mean and half the width of its interval, both in percent."""
    half = NO_INTERVAL if math.isnan(found.high) else f"±{percent(found.high - found.mean)}"
    return f"{percent(found.mean)} {half}{mark}"


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
    notes, rows = Notes(), []
    for method in board.order:
        if lacks := [name for name in board.compared if _not_run(board.tasks[name], method, HEADLINE)]:
            notes.not_run.append(f"{method} (on {listed(lacks)})")
        else:
            rows.append([*_ranked_cells(board, method, notes), *_mean_cells(board, method, notes)])
    if CONTROL in board.headline:
        control = board.headline[CONTROL].mean
        at = sum(board.headline[name].mean > control for name in board.ranks)
        rows.insert(at, [*_ranked_cells(board, CONTROL, notes), *_mean_cells(board, CONTROL, notes)])
    columns = ["rank", "method", "accuracy at 2x, %", "minus joint, points", "full model, %"]
    columns += ["layers saved at 1 point, %", "lost at 1 point, points"]
    columns += [*(TITLES[name] for name in MEASURED), "seeds"]
    return [*markdown_table(columns, rows), "", *notes.lines()]


def _not_run(task: TaskFigures, method: str, figure: str) -> bool:
    return task.found.get((method, figure), NOT_RUN) == NOT_RUN


def _ranked_cells(board: Leaderboard, method: str, notes: Notes) -> list[str]:
    """Rank, name, score, and difference from joint training."""
    name = f"*{method}*" if method == CONTROL else method
    if method not in board.headline:
        why = _why_no_mean(board, method, HEADLINE, notes)
        return [NOTHING, name, why, why]
    rank = "{} ({} to {})".format(*board.ranks[method]) if method in board.ranks else NOTHING
    gap, reference = NOTHING, board.headline.get(REFERENCE)
    if method != REFERENCE:
        gap = signed(compare(board.headline[method], reference)) if reference else _no_reference(notes)
        gap += BETTER if (method, REFERENCE) in board.better else WORSE if (REFERENCE, method) in board.better else ""
    return [rank, name, plus_minus(interval(board.headline[method])), gap]


def _no_reference(notes: Notes) -> str:
    return notes.number(f"{REFERENCE} training has no such figure on all tasks")


def _mean_cells(board: Leaderboard, method: str, notes: Notes) -> list[str]:
    """Means over the tasks of the headline, and the number of seeds."""
    cells = []
    for figure in ("full", "saved", "lost"):
        found = [each for name in board.compared if (each := board.drawn[name].get((method, figure)))]
        complete = len(found) == len(board.compared)
        cells.append(percent(mean_of(found).mean) if complete else _why_no_mean(board, method, figure, notes))
    for figure in MEASURED if method != CONTROL else ():
        names = (timed_tasks(board) if figure == "seconds" else ()) or board.compared
        by_task = {name: _measured(board.tasks[name], method, figure) for name in names}
        lists = [each for each in by_task.values() if isinstance(each, list)]
        complete = len(lists) == len(names)
        cells.append(number([math.fsum(each) / len(each) for each in lists]) if complete else _why(by_task, notes))
    if method == CONTROL:  # it is not measured, and nothing is trained for it
        cells += [NOTHING] * len(MEASURED)
    counts = sorted({len(board.tasks[name].runs.get(method, {})) for name in board.compared})
    return [*cells, " to ".join(map(str, [counts[0], counts[-1]] if len(counts) > 1 else counts))]


def timed_tasks(board: Leaderboard) -> tuple[str, ...]:
    """The tasks of the headline on which each method has a training on the CPU."""
    return tuple(
        name
        for name in board.compared
        if not any(_measured(board.tasks[name], method, "seconds") == ON_A_GPU for method in board.order)
    )


def _why_no_mean(board: Leaderboard, method: str, figure: str, notes: Notes) -> str:
    """A cell of a mean over tasks that some task lacks."""
    return _why({name: board.tasks[name].found[method, figure] for name in board.compared}, notes)


def _why(by_task: dict[str, Any], notes: Notes) -> str:
    """The number of the reasons, each with its tasks."""
    tasks: dict[str, list[str]] = {}
    for name, reason in by_task.items():
        if isinstance(reason, str):
            tasks.setdefault(reason, []).append(name)
    return notes.number("; ".join(f"{listed(names)}: {reason}" for reason, names in tasks.items()))


# ---- Tables of a task ----
def task_table(board: Leaderboard, name: str) -> list[str]:
    """All figures on a task, and below the table the reasons of its empty cells."""
    task, drawn, notes = board.tasks[name], board.drawn[name], Notes()
    marks = _marks(drawn)
    rows = []
    for method in [*board.order, *[CONTROL] * (CONTROL in task.runs)]:
        if _not_run(task, method, "full"):
            notes.not_run.append(method)
            continue
        cells = [f"*{method}*" if method == CONTROL else method]
        for figure in FIGURES:
            if (method, figure) == (REFERENCE, "area"):  # it is compared with itself
                cells.append(NOTHING)
            elif (method, figure) in drawn:
                cell = plus_minus(interval(drawn[method, figure]), marks.get((method, figure), ""))
                cells.append(cell + (_zeros(task, method, notes) if figure == "saved" else ""))
            else:
                cells.append(notes.number(str(task.found[method, figure])))
        cells.append(_failure(task, method, notes))
        for figure in MEASURED_ON_TASK:
            values = _measured(task, method, figure) if method != CONTROL else []
            cell = notes.number(values) if isinstance(values, str) else number(values) if values else NOTHING
            speed_ups = values if figure == "speedup" and isinstance(values, list) else []
            cells.append(cell + (_zeros(task, method, notes) if speed_ups else ""))
        rows.append([*cells, _seeds(board.plan, task, method, notes)])
    titles = [TITLES[figure] for figure in FIGURES], [TITLES[figure] for figure in MEASURED_ON_TASK]
    columns = ["method", *titles[0], "EEFP", *titles[1], "seeds"]
    return [*markdown_table(columns, rows), "", *notes.lines()]


def _failure(task: TaskFigures, method: str, notes: Notes) -> str:
    if (found := confidence_figures(task, method)) is not None:
        return f"{found[0]:.2f}"
    return notes.number("it has one exit" if method in task.runs else str(task.found[method, "full"]))


def _zeros(task: TaskFigures, method: str, notes: Notes) -> str:
    """The number of a note if the full model of some seeds counts, which saves no layers."""
    runs = task.runs[method].values()
    lost = sum(run.passes_at_one_point is None for run in runs)
    why = f"{lost} of {len(runs)} seeds lose more with every rule; of them the full model counts, which saves 0 layers"
    return f" {notes.number(why)}" if lost else ""


def _seeds(plan: Plan, task: TaskFigures, method: str, notes: Notes) -> str:
    """The number of seeds, and why there are fewer than planned."""
    count, why = len(task.runs.get(method, {})), why_fewer(plan, task, method)
    return f"{count} {notes.number(why)}" if count and why and method != CONTROL else str(count)


def why_fewer(plan: Plan, task: TaskFigures, method: str) -> str:
    """Why a method has fewer seeds than planned; empty if it has all."""
    runs = task.runs.get(method, {})
    if len(runs) >= plan.seeds:
        return ""
    if diverged := plan.diverged(task.task, method):
        others = f"; {NOT_YET}" if len(runs) + len(diverged) < plan.seeds else ""
        return f"the training diverged with seed {', '.join(diverged)}{others}"
    if max(about_figure(task, method, "seconds"), default=0.0) > LONG_SECONDS and len(runs) >= FEWER_SEEDS:
        return f"a training takes more than {LONG_SECONDS // 60} minutes"
    return NOT_YET


def _measured(task: TaskFigures, method: str, figure: str) -> list[float] | str:
    """A figure that the records contain, of each seed, or why there is none."""
    runs = task.runs.get(method, {})
    reason = task.found[method, HEADLINE if runs and figure == "half speedup" else "full"]
    if isinstance(reason, str):
        return reason
    timed = [run for run in runs.values() if figure != "seconds" or trained_on(run.about) is None]
    if runs and not timed:
        return ON_A_GPU
    values = about_figure(task, method, figure)
    if runs and len(values) == len(timed):
        return values
    return OTHER_RULE if figure == "speedup" else "not measured with every seed when the records were made"


def _marks(drawn: dict[tuple[str, str], Drawn]) -> dict[tuple[str, str], str]:
    """(method, figure) -> BETTER or WORSE than the reference, after Holm's correction over all cells of the table."""
    compared = {}
    for (method, figure), each in drawn.items():
        reference = drawn.get((REFERENCE, figure))
        if method in (REFERENCE, CONTROL) or figure in ("lost", "saved own") or reference is None:
            continue
        if has_interval(each) and has_interval(reference):
            compared[method, figure] = interval(each if figure == "area" else difference(each, reference))
    passed = holm([each.p_value for each in compared.values()])
    return {key: BETTER if each.mean > 0 else WORSE for (key, each), is_so in zip(compared.items(), passed) if is_so}
