"""The pictures of the leaderboard: a front per task, each method alone, and depth by hardness."""

import math
from pathlib import Path

import numpy as np

from mini_ee.experiments.leaderboard.exam import Exam
from mini_ee.experiments.leaderboard.figures import AREA, BUDGETS, CONTROL, HEADLINE, REFERENCE, SeedFigures, shares_of
from mini_ee.experiments.leaderboard.ranking import interval
from mini_ee.experiments.leaderboard.tables import Leaderboard
from mini_ee.experiments.markdown import listed
from mini_ee.experiments.pictures import CYCLE, GREY
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.evaluation.plots import new_panels, save_figure

Curve = tuple[list[float], list[float]]  # shares of the FLOPs and accuracies, both in percent
DARK = "#444444"
NEUTRAL = "#555555"  # of the cycle, too close to DARK
MOST_COLOURED = len(CYCLE)
FRONT = tuple(share for share in AREA if share <= BUDGETS["at 1.5x"])  # where a third of the FLOPs or more are saved


def draw_all(board: Leaderboard, passed: dict[str, Exam], out: Path, names: list[str]) -> None:
    """Write the pictures, in the order of the names, that the records suffice for."""
    out.mkdir(parents=True, exist_ok=True)
    begun = [name for name in board.plan.tasks if board.tasks[name].runs]
    if begun:
        intervals = {name: _usual_interval(board, name) for name in begun}
        draw_fronts(out / names[0], {name: task_curves(board, [name]) for name in begun}, intervals)
    if curves := task_curves(board, list(board.compared)):
        ordered = {name: curves[name] for name in [*board.order, CONTROL] if name in curves}
        draw_methods(out / names[1], ordered, listed(board.compared))
    if order := [name for name in board.order if name in passed]:
        draw_hardness(out / names[2], {name: passed[name].depth for name in order})


def task_curves(board: Leaderboard, tasks: list[str]) -> dict[str, Curve]:
    """Method -> its curve, the mean over the tasks and their seeds; of methods that have all of the tasks."""
    found = {}
    for method in (*board.plan.methods, CONTROL):
        runs = [run for name in tasks for _, run in sorted(board.tasks[name].runs.get(method, {}).items())]
        if tasks and all(board.tasks[name].runs.get(method) for name in tasks) and (shares := shares_of(runs)):
            weights = [
                1 / len(board.tasks[name].runs[method]) / len(tasks)
                for name in tasks
                for _ in board.tasks[name].runs[method]
            ]
            found[method] = (
                [100 * share for share in shares],
                [100 * math.fsum(w * _score(run, share) for w, run in zip(weights, runs)) for share in shares],
            )
    return found


def _usual_interval(board: Leaderboard, task: str) -> float:
    """Half of the interval of the accuracy at HEADLINE, in percent, the median over methods; NaN if none has one."""
    found = [
        interval(board.drawn[task][name, HEADLINE]) for name in board.order if (name, HEADLINE) in board.drawn[task]
    ]
    halves = [100 * (each.high - each.mean) for each in found if not math.isnan(each.high)]
    return float(np.median(halves)) if halves else math.nan


def _score(run: SeedFigures, share: float) -> float:
    return float(run.at[share].mean())


def front(curves: dict[str, Curve]) -> list[str]:
    """The methods that are best at some share of FRONT, those at most shares first; the control does not count."""
    wins: dict[str, int] = {}
    for share in FRONT:
        at = {
            name: scores[shares.index(100 * share)]
            for name, (shares, scores) in curves.items()
            if 100 * share in shares and name != CONTROL
        }
        if at:
            best = max(at, key=lambda name: (round(at[name], 9), name))
            wins[best] = wins.get(best, 0) + 1
    return sorted(wins, key=lambda name: (-wins[name], name))


def draw_fronts(path: Path, tasks: dict[str, dict[str, Curve]], intervals: dict[str, float]) -> None:
    """A panel for each task. The methods of the front have a colour, the same in all panels; others are grey.

    intervals: task -> half of the usual interval of a curve, which a bar shows; none if NaN.
    """
    fronts = {name: front(curves)[: MOST_COLOURED - 2] for name, curves in tasks.items()}
    coloured = dict.fromkeys(method for each in fronts.values() for method in each if method != REFERENCE)
    hues = [colour for colour in CYCLE if colour != NEUTRAL]
    looks = {
        method: {"color": hues[number % len(hues)], "linestyle": "-" if number < len(hues) else "--"}
        for number, method in enumerate(coloured)
    } | {REFERENCE: {"color": DARK, "linestyle": "-"}}
    figure, grid = new_panels(len(tasks), min(2, len(tasks)), width=5.2, height=3.9)
    for axes, (name, curves) in zip(grid, tasks.items()):
        for method, curve in curves.items():
            own = method in fronts[name] or method == REFERENCE
            plain = {"color": GREY, "linewidth": 0.7, "markersize": 3, "linestyle": "-"}
            if method == CONTROL:
                plain |= {"color": DARK, "linewidth": 1.5, "linestyle": ":"}
            look = looks[method] | {"linewidth": 2, "zorder": 3} if own else plain
            label = method if own or method == CONTROL else "_other"
            axes.plot(*curve, label=label, marker=_marker(curve), **look)
        axes.axvline(50, color=GREY, linewidth=0.7, zorder=0)
        axes.set(title=name, xlabel="% of the full model's FLOPs", ylabel="accuracy in %")
        _zoom(axes, curves)
        if not math.isnan(half := intervals[name]):
            low, high = axes.get_ylim()
            axes.set_ylim(low, max(high, low + 2.5 * half))
            bar = {"color": DARK, "elinewidth": 1, "capsize": 3, "label": "95 % interval (median)"}
            axes.errorbar([50], [low + 1.2 * half], [half], fmt="none", **bar)
    entries = {}
    for axes in grid:
        handles, names = axes.get_legend_handles_labels()
        entries |= dict(zip(names, handles))
    columns = 4 if len(tasks) > 1 else 3
    figure.legend(
        entries.values(), entries.keys(), frameon=False, fontsize=9, ncols=columns, loc="outside lower center"
    )
    save_figure(figure, path)


def draw_methods(path: Path, curves: dict[str, Curve], tasks: str) -> None:
    """A panel for each method: its curve, joint training's, and all others in grey. tasks: their names."""
    columns = min(5, len(curves))
    figure, grid = new_panels(len(curves), columns, width=2.3, height=2)
    for place, (axes, method) in enumerate(zip(grid, curves)):
        for other, curve in curves.items():
            if other != method:
                axes.plot(*curve, color="#c8c8c8", linewidth=0.6, zorder=1)
        if REFERENCE in curves and method != REFERENCE:
            axes.plot(*curves[REFERENCE], color=DARK, linewidth=1, linestyle="--", zorder=2, label=REFERENCE)
        axes.plot(*curves[method], color="#D55E00", linewidth=2, zorder=3, marker=_marker(curves[method]))
        axes.axvline(50, color="#c8c8c8", linewidth=0.6, zorder=0)
        axes.set_title(method, fontsize=9)
        axes.tick_params(labelsize=7)
        _zoom(axes, curves)
        if (best := max(curves[method][1])) < axes.get_ylim()[0]:
            axes.text(0.5, 0.04, f"below: {best:.1f} % at most", transform=axes.transAxes, ha="center", fontsize=7)
        if place % columns:
            axes.set_yticklabels([])
        if place < len(curves) - columns:
            axes.set_xticklabels([])
    figure.supxlabel("% of the full model's FLOPs (dashed: joint training)", fontsize=9)
    figure.supylabel(f"accuracy in % ({tasks})", fontsize=9)
    save_figure(figure, path)


def _marker(curve: Curve) -> str | None:
    """A curve of one point is not a line."""
    return "o" if len(curve[0]) == 1 else None


def _zoom(axes, curves: dict[str, Curve]) -> None:
    """The heights at which most curves are, and the best score of each; one that fails does not flatten the others."""
    scores = np.array([score for _, scores in curves.values() for score in scores])
    low, high = float(np.quantile(scores, 0.08)), float(scores.max())
    low = min(low, *(best for best in (max(scores) for _, scores in curves.values()) if best > 2 * low - high))
    margin = max(0.05 * (high - low), 0.2)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(100 * AREA[0] - 2, 102)


def draw_hardness(path: Path, depth: dict[str, list[float]]) -> None:
    """A line for each method, a column for each kind; the colour is the mean exit layer, which is also printed."""
    figure, (axes,) = new_panels(1, 1, width=8, height=1.2 + 0.28 * len(depth))
    values = np.array([*depth.values()])
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    axes.set_yticks(range(len(depth)), [*depth], fontsize=8)
    axes.set_xticks(range(len(HARDNESS)), HARDNESS, fontsize=8)
    axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    middle = (values.min() + values.max()) / 2
    for line, each in enumerate(values):
        for column, value in enumerate(each):
            axes.text(
                column, line, f"{value:.1f}", ha="center", va="center", fontsize=8, color="w" if value < middle else "k"
            )
    figure.colorbar(image, ax=axes, label="mean exit layer", pad=0.02)
    save_figure(figure, path)
