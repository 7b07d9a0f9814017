"""The pictures of the leaderboard: the front, each method alone, depth by hardness, and the speed of decoders."""

import math
from pathlib import Path

import numpy as np

from mini_ee.experiments.leaderboard.decoder_tables import fastest
from mini_ee.experiments.leaderboard.exam import Exam
from mini_ee.experiments.leaderboard.figures import AREA, CONTROL, REFERENCE, SeedFigures, Values, shares_of
from mini_ee.experiments.leaderboard.ranking import Interval, drawn_figures, interval, mean_of
from mini_ee.experiments.leaderboard.tables import Leaderboard
from mini_ee.experiments.leaderboard.token_figures import Decoders
from mini_ee.experiments.leaderboard.token_rules import LEVEL
from mini_ee.experiments.pictures import COLOURS, CYCLE, GREY
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.evaluation.plots import new_panels, save_figure

Curve = tuple[list[float], list[float]]  # shares of the FLOPs and accuracies, both in percent
DARK, PALE = "#444444", "#c8c8c8"
PAPERS = {"lora-exits": COLOURS["LoRAExit"], "consistent": COLOURS["ConsistentEE"]}  # of the project's own papers
OTHERS = {"two-stage": "#009E73", "pabee": "#E69F00"}  # what readers know
BEST = "#CC79A7"
FRONT = (25, 80)  # percent of the FLOPs that the front shows: with fewer, nothing works, and with more, all are equal


def draw_all(board: Leaderboard, passed: dict[str, Exam], out: Path) -> None:
    """Write the pictures that the records of classifiers suffice for."""
    out.mkdir(parents=True, exist_ok=True)
    curves = task_curves(board, list(board.compared))
    ordered = {name: curves[name] for name in [*board.order, CONTROL] if name in curves}
    draw_front(out / "leaderboard-front.png", ordered, reference_band(board), ", ".join(board.compared))
    draw_methods(out / "leaderboard-methods.png", ordered, ", ".join(board.compared))
    if order := [name for name in board.order if name in passed]:
        draw_hardness(out / "leaderboard-hardness.png", {name: passed[name].depth for name in order})


def reference_band(board: Leaderboard) -> dict[float, Interval]:
    """Share of the FLOPs -> the accuracy of joint training there with its interval, over the compared tasks.

    Empty if there are too few seeds for an interval.
    """
    every = [sorted(board.tasks[name].runs[REFERENCE].items()) for name in board.compared]
    shares = shares_of([run for runs in every for _, run in runs])
    drawn = []
    for name, runs in zip(board.compared, every):
        seeds = tuple(seed for seed, _ in runs)
        figures = {("", str(share)): Values(seeds, np.array([run.at[share] for _, run in runs])) for share in shares}
        drawn.append(drawn_figures(board.tasks[name]._replace(figures=figures)))
    bands = {share: interval(mean_of([task_drawn["", str(share)] for task_drawn in drawn])) for share in shares}
    return {share: band for share, band in bands.items() if not math.isnan(band.high)}


def task_curves(board: Leaderboard, tasks: list[str]) -> dict[str, Curve]:
    """Method -> its curve, the mean over the tasks and their seeds; of methods that have all of the tasks."""
    curves = {}
    for method in (*board.plan.methods, CONTROL):
        runs = [run for name in tasks for _, run in sorted(board.tasks[name].runs.get(method, {}).items())]
        if tasks and all(board.tasks[name].runs.get(method) for name in tasks) and (shares := shares_of(runs)):
            weights = [
                1 / len(board.tasks[name].runs[method]) / len(tasks)
                for name in tasks
                for _ in board.tasks[name].runs[method]
            ]
            curves[method] = (
                [100 * share for share in shares],
                [100 * math.fsum(w * _score(run, share) for w, run in zip(weights, runs)) for share in shares],
            )
    return curves


def _score(run: SeedFigures, share: float) -> float:
    return float(run.at[share].mean())


def draw_front(path: Path, curves: dict[str, Curve], band: dict[float, Interval], tasks: str) -> None:
    """One panel: joint training with its interval, fixed depth, and a few others with their names; the rest in grey."""
    best = [name for name in curves if name not in (REFERENCE, CONTROL)][:1]
    looks = dict.fromkeys(best, BEST) | OTHERS | PAPERS | {CONTROL: DARK, REFERENCE: COLOURS["joint training"]}
    figure, (axes,) = new_panels(1, 1, width=7.6, height=4.4)
    for name, curve in curves.items():
        inside = np.array([point for point in zip(*curve) if FRONT[0] <= point[0] <= FRONT[1]]).reshape(-1, 2)
        named = {"color": looks.get(name), "linewidth": 2, "zorder": 3, "linestyle": ":" if name == CONTROL else "-"}
        look = named if name in looks else {"color": PALE, "linewidth": 0.8, "zorder": 1}
        axes.plot(*inside.T, label=name, **look)
    known = [100 * share for share in band if FRONT[0] <= 100 * share <= FRONT[1]]
    edges = [[100 * getattr(band[share / 100], end) for share in known] for end in ("low", "high")]
    axes.fill_between(known, *edges, color=looks[REFERENCE], alpha=0.15, linewidth=0, zorder=0)
    axes.axvline(50, color=PALE, linewidth=0.7, zorder=0)
    axes.set(xlabel="% of the full model's FLOPs", ylabel=f"accuracy in % (mean of {tasks})")
    _zoom(axes, curves)
    axes.set(xlim=FRONT, ylim=(axes.get_ylim()[0], max([axes.get_ylim()[1], *edges[1]]) + 0.2))
    _label_ends(axes, {name: looks[name] for name in curves if name in looks})
    save_figure(figure, path)


def _label_ends(axes, colours: dict[str, str]) -> None:
    """The name of each line at its right end, moved apart so that no two names overlap."""
    drawn = [line for line in axes.lines if line.get_label() in colours and len(line.get_xdata())]
    ends = {line.get_label(): line.get_xydata()[-1] for line in drawn}
    low, high = axes.get_ylim()
    apart = 0.048 * (high - low)
    to_the_left_edge = {"relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
    order = sorted(ends, key=lambda name: ends[name][1])
    heights = np.array([ends[name][1] for name in order])
    for _ in range(200):  # neighbours that are too near each push the other away
        for k in range(len(order) - 1):
            if (lack := apart - (heights[k + 1] - heights[k])) > 0:
                heights[k : k + 2] += (-lack / 2, lack / 2)
    for name, height in zip(order, heights):
        axes.annotate(
            name,
            xy=ends[name],
            xytext=(FRONT[1] + 2, height),
            color=colours[name],
            va="center",
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.6} | to_the_left_edge,
        )


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
    for line, row in enumerate(values):
        for column, value in enumerate(row):
            axes.text(
                column, line, f"{value:.1f}", ha="center", va="center", fontsize=8, color="w" if value < middle else "k"
            )
    figure.colorbar(image, ax=axes, label="mean exit layer", pad=0.02)
    save_figure(figure, path)


def draw_decoders(path: Path, exams: Decoders) -> None:
    """A panel for each decoder, a dot for each method: its speed-up with the better way to get missing keys and values.

    Sorted by it; at the right, the share of the layers that tokens skip.
    """
    speeds = {exam: fastest(exam, by_method) for exam, by_method in exams.items()}
    most = max(map(len, speeds.values()))
    figure, grid = new_panels(len(exams), len(exams), width=4.6, height=1.1 + 0.24 * most)
    for axes, (exam, by_method) in zip(grid, exams.items()):
        order = [*speeds[exam]][::-1]
        for line, name in enumerate(order):
            at = interval(speeds[exam][name])
            colour = CYCLE[2] if at.low > 1 else CYCLE[6] if at.high < 1 else DARK
            axes.plot([at.low, at.high], [line, line], "-", color=colour, linewidth=1.4)
            axes.plot(at.mean, line, "o", color=colour, markersize=5)
            saved = by_method[name].values[f"saved {LEVEL:g}"].mean()
            axes.text(1.02, line, f"{saved:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.axvline(1, color=GREY, linewidth=1, zorder=0)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.set(xlabel="times as fast as without exits", title=exam.name)
        axes.text(1.02, len(order), "layers\nsaved", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    save_figure(figure, path)
