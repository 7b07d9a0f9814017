"""The pictures of result pages: curves, stacked bars or dots, in one panel or several with the same axes.

A series that has a colour of its own (COLOURS, or `colour` in the recipe) has a band, the mean ± standard deviation
over seeds. The others are thin and without a band, so that bands do not hide each other.
"""

import textwrap
from pathlib import Path

import numpy as np

from mini_ee.experiments.page_data import PageData, is_share
from mini_ee.experiments.recipe import panels_of
from mini_ee.experiments.verdicts import EXCLUDED, FAILS, HOLDS, VERDICTS
from mini_ee.lab.evaluation.plots import new_figure, new_panels, save_figure

SEED_GRID = 40  # points at which the curves of several seeds are averaged
GREY = "#9a9a9a"
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#555555", "#D55E00", "#b5a900")  # Okabe and Ito
COLOURS = {  # of methods, the same in all pictures
    "ConsistentEE": "#D55E00",
    "LoRAExit": "#0072B2",
    "RAEE": "#009E73",
    "joint training": "#7b3fa0",
    "full model": "#444444",
}
VERDICT_COLOURS = dict(zip(VERDICTS, ("#2a8c55", "#c8502d", "#b07f1b", "#b3bcc6", "#e3e7eb", "#f4f5f6")))
SQUARES = 6  # in a row of the picture of all verdicts


def draw(path: Path, picture: dict, data: PageData) -> None:
    """Draw one picture of a recipe, unless none of its series was measured."""
    panels = panels_of(picture)
    columns = picture.get("columns", min(len(panels), 3))
    width, height = (7, 4.2) if len(panels) == 1 else (9.6 / columns, picture.get("height", 3))
    figure, grid = new_panels(len(panels), columns, width=width, height=height)
    kinds = {"dots": _draw_dots, "stacked": _draw_stacked}
    drawn = [kinds.get(panel.get("kind"), _draw_curves)(axes, panel, data) for axes, panel in zip(grid, panels)]
    if not any(drawn):
        return
    for axes, panel in zip(grid, panels):
        _finish(axes, panel, data)
    if not picture.get("no_legend"):
        _legend(figure, [axes for axes, panel in zip(grid, panels) if not panel.get("labels")])
    save_figure(figure, path)


def _finish(axes, panel: dict, data: PageData) -> None:
    """Axis labels, limits, the line of equal values, and the line of a level."""
    axes.set(xlabel=panel["x"], ylabel=panel["y"], title=panel.get("panel", ""))
    if panel.get("scale") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    if "xlim" in panel:
        axes.set_xlim(*panel["xlim"])
    if "ylim" in panel:
        axes.set_ylim(*panel["ylim"])
    if panel.get("diagonal"):
        x, y = axes.get_xlim(), axes.get_ylim()
        both = min(*x, *y), max(*x, *y)
        axes.plot(both, both, ":", color=GREY, zorder=0)
        axes.set(xlim=both if panel.get("points") else x, ylim=both if panel.get("points") else y)
    if level := panel.get("level"):
        _draw_level(axes, level, panel, data)
    if panel.get("labels"):
        _label_lines(axes, panel["labels"])


def _draw_level(axes, level: dict, panel: dict, data: PageData) -> None:
    """A dotted line at a number, or at the mean of a figure; a horizontal one with its name."""
    at = level.get("at")
    if at is None:
        at = data.mean(*(level[key].format(**panel.get("with", {})) for key in ("case", "figure")))
    if at is None:
        return
    look = {"fontsize": 8, "color": COLOURS["full model"], "textcoords": "offset points"}
    line = {"color": COLOURS["full model"], "linestyle": ":", "linewidth": 1.2, "zorder": 0}
    if panel.get("kind") == "dots":
        axes.axvline(at, **line)
    else:
        axes.axhline(at, **line)
        axes.annotate(level["name"], (1, at), (0, 3), xycoords=axes.get_yaxis_transform(), ha="right", **look)


def _draw_curves(axes, panel: dict, data: PageData) -> int:
    drawn = 0
    for number, (name, series) in enumerate(panel["series"].items()):
        points = (_over if "over" in series else _lists)(series, data)
        if points is None:
            continue
        x, mean, low, high = points
        given = series.get("colour", COLOURS.get(name))
        colour = given or CYCLE[number % len(CYCLE)]
        style = "o" if panel.get("points") else "o-" if len(x) <= 12 else "-"
        look = {"linewidth": 2.4, "zorder": 3} if given not in (None, GREY) else {"linewidth": 1.3}
        label = f"_{name}" if series.get("silent") else name
        axes.plot(x, mean, style, markersize=4, color=colour, label=label, **look)
        if style != "o" and given != GREY and (given or len(panel["series"]) < 3):
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        drawn += 1
    if all("over" in series and "x" not in series for series in panel["series"].values()):
        ticks = sorted({float(value) for series in panel["series"].values() for value in series["over"]})
        close = {b for a, b in zip(ticks, ticks[1:]) if b - a < 0.07 * (ticks[-1] - ticks[0])}
        axes.set_xticks(ticks, ["" if tick in close else f"{tick:g}" for tick in ticks], fontsize=9)
    return drawn


def _draw_stacked(axes, panel: dict, data: PageData) -> int:
    """A bar for each value of a setting; its parts are the series, from dark (early) to light (late)."""
    from matplotlib import colormaps

    shades, ends, drawn = colormaps["viridis"].resampled(len(panel["series"])), {}, 0
    for number, (name, series) in enumerate(panel["series"].items()):
        if (points := _over(series, data)) is None:
            continue
        bars = [f"{x:g}" for x in points[0]]
        axes.bar(bars, points[1], bottom=[ends.get(bar, 0) for bar in bars], color=shades(number), label=name)
        ends |= {bar: ends.get(bar, 0) + part for bar, part in zip(bars, points[1])}
        drawn += 1
    axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.0, 1), loc="upper left")
    return drawn


def _draw_dots(axes, panel: dict, data: PageData) -> int:
    """A line for each row of the panel; a dot and its standard deviation over seeds for each series."""
    names, drawn = list(panel["rows"]), 0
    for number, (name, series) in enumerate(panel["series"].items()):
        places, means, spreads = [], [], []
        aside = 0.16 * (number - (len(panel["series"]) - 1) / 2)  # so that the series do not cover each other
        for place, row in enumerate(panel["rows"].values()):
            case, figure = (series[key].format(**series | row) for key in ("case", "figure"))
            if values := [*data.values(case, figure).values()]:
                scale = 100 if is_share(figure) else 1
                places.append(place + aside)
                means.append(scale * float(np.mean(values)))
                spreads.append(scale * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)
        if not means:
            continue
        colour = series.get("colour", COLOURS.get(name, CYCLE[number % len(CYCLE)]))
        look = {"color": colour, "markersize": 7, "capsize": 2, "elinewidth": 1.2}
        axes.errorbar(means, places, xerr=spreads, fmt=series.get("marker", "o"), label=name, **look)
        drawn += 1
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", color="0.92")
    for name, text in zip(names, axes.get_yticklabels()):
        if name in COLOURS:
            text.set(color=COLOURS[name], fontweight="bold")
    return drawn


def _label_lines(axes, side: str) -> None:
    """Write the name of each curve next to its first or last point, without overlap. side: start or end."""
    ends = []
    for line in axes.get_lines():
        if not line.get_label().startswith("_"):
            x, y = (float(values[-1 if side == "end" else 0]) for values in line.get_data())
            place = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
            ends.append((min(max(place[1], 0), 1), place[0], line))
    lowest = -1.0
    for height, along, line in sorted(ends, key=lambda end: end[:2]):
        lowest = max(height, lowest + 0.062)
        place, align = (along + 0.015, "left") if side == "end" else (along - 0.015, "right")
        look = {"color": line.get_color(), "fontsize": 9, "va": "center", "ha": align}
        look["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        axes.text(place, lowest, line.get_label(), transform=axes.transAxes, **look)


def _legend(figure, grid) -> None:
    """One legend below the panels, in as many columns as fit; none for one series, or if each panel has one."""
    entries = {}
    for axes in grid:
        if axes.get_legend() is None:
            handles, names = axes.get_legend_handles_labels()
            entries = dict(zip(names, handles)) | entries
    if len(entries) < 2:
        return
    for columns in (5, 4, 3, 2, 1):
        place = {"ncols": columns, "loc": "outside lower center"}
        legend = figure.legend(entries.values(), entries.keys(), frameon=False, fontsize=9, **place)
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def draw_verdicts(path: Path, papers: dict[str, list]) -> None:
    """A square for each claim with its name, coloured by its verdict; a block of rows for each paper."""
    rows = {title: [claim for claim in claims if not claim.entry.get("control")] for title, claims in papers.items()}
    heights = {title: -(-len(claims) // SQUARES) for title, claims in rows.items()}
    figure, axes = new_figure()
    figure.set_size_inches(10, 0.52 * sum(heights.values()) + 0.34 * len(rows) + 0.6)
    top, used = 0.0, {}
    for title, claims in rows.items():
        axes.text(0, top + 0.3, title, fontsize=11, fontweight="bold", va="center")
        top += 0.6
        for at, claim in enumerate(claims):
            x, y, colour = at % SQUARES, top + at // SQUARES, VERDICT_COLOURS[claim.verdict]
            used[claim.verdict] = axes.barh(y + 0.5, 0.97, 0.92, x, color=colour, label=claim.verdict)
            ink = "w" if claim.verdict in (HOLDS, FAILS, EXCLUDED) else "#222222"
            look = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
            axes.text(x + 0.485, y + 0.5, textwrap.fill(claim.name, 17), **look)
        top += heights[title]
    axes.set(xlim=(0, SQUARES), ylim=(top, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    shown = {verdict: used[verdict] for verdict in VERDICTS if verdict in used}
    figure.legend(shown.values(), shown.keys(), frameon=False, ncols=len(VERDICTS), loc="outside lower center")
    save_figure(figure, path)


def draw_sizes(path: Path, papers: dict[str, list]) -> None:
    """For the first such comparison of each claim: the difference that the paper reports, and ours, in points."""
    rows = [(title, *claim.sizes[0]) for title, claims in papers.items() for claim in claims if claim.sizes]
    if not rows:
        return
    figure, axes = new_figure()
    figure.set_size_inches(9, 1 + 0.33 * len(rows))
    at, comparisons = range(len(rows)), [comparison for *_, comparison in rows]
    theirs, ours = ([100 * getattr(comparison, name) for comparison in comparisons] for name in ("size", "difference"))
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.plot(theirs, at, "o", mfc="w", mec="#222222", label="the paper")
    width = [100 * comparison.half_width() for comparison in comparisons]
    axes.errorbar(ours, at, xerr=width, fmt="o", color=CYCLE[0], label="here, with the 95% interval")
    axes.set(yticks=at, ylim=(len(rows) - 0.5, -0.5), xlabel="difference, points of accuracy or of the layers saved")
    axes.set_yticklabels([f"{title}, {name}" for title, name, _ in rows], fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    save_figure(figure, path)


def _over(series: dict, data: PageData):
    """x and the band of y over seeds, for each value of a setting; None if nothing was measured."""
    points = []
    for value in series["over"]:
        case = series["case"].format(value, **series)
        y = list(data.values(case, series["y"].format(value, **series)).values())
        x = list(data.values(case, series["x"].format(value, **series)).values()) if "x" in series else [float(value)]
        if y:
            points.append((float(np.mean(x)), *map(float, _band(y))))
    return list(zip(*sorted(points))) if points else None


def _lists(series: dict, data: PageData):
    """The band over seeds of a curve, on a grid that the curves of all seeds span; None if there is none."""
    curves, case = [], series["case"].format(None, **series)
    for made in data.records[case]["seeds"].values():
        if series["x"] in made["lists"]:
            x, y = (np.array(made["lists"][series[key]]) for key in "xy")
            order = np.argsort(x, kind="stable")
            curves.append((x[order], y[order]))
    if not curves:
        return None
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), SEED_GRID)
    return grid, *_band([np.interp(grid, x, y) for x, y in curves])


def _band(values) -> tuple:
    """Mean over seeds, and one standard deviation below and above it; of one seed its value."""
    mean, spread = np.mean(values, axis=0), np.std(values, axis=0, ddof=1) if len(values) > 1 else 0.0
    return mean, mean - spread, mean + spread
