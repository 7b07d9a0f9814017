"""The pictures of result pages. A method has the same colour in all of them; a band shows the range over seeds."""

from pathlib import Path

import numpy as np

from mini_ee.evaluation.plots import new_figure, save_figure
from mini_ee.experiments.recipe import filled
from mini_ee.experiments.result_page import PageData
from mini_ee.registry import METHODS

SEED_GRID = 40  # points at which the curves of several seeds are averaged


def draw(path: Path, picture: dict, data: PageData) -> None:
    """Draw one picture of a recipe, unless none of its series was measured."""
    figure, axes = new_figure()
    drawn = 0
    for number, (name, series) in enumerate(picture["series"].items()):
        points = (_over if "over" in series else _lists)(series, data)
        if points is None:
            continue
        x, mean, low, high = points
        colour = colour_of(name, number)
        style = "o" if picture.get("points") else "o-" if len(x) <= 12 else "-"
        of_a_paper = METHODS.get(name, "").startswith("mini_ee.methods.")
        look = {"linewidth": 2.6, "zorder": 3} if of_a_paper else {"linewidth": 1.6}
        axes.plot(x, mean, style, markersize=4, color=colour, label=name, **look)
        if style != "o":
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        drawn += 1
    if not drawn:
        return
    axes.set(xlabel=picture["x"], ylabel=picture["y"])
    if picture.get("scale") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    if all("over" in series and "x" not in series for series in picture["series"].values()):
        ticks = sorted({float(value) for series in picture["series"].values() for value in series["over"]})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
    _legend(figure)
    save_figure(figure, path)


def _legend(figure) -> None:
    """Put the legend below the axes, in as many columns as fit."""
    for columns in (3, 2, 1):
        legend = figure.legend(frameon=False, fontsize=10, ncols=columns, loc="outside lower center")
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def colour_of(name: str, number: int):
    """The colour of a method, the same on all pages; the colour of any other series depends on its number."""
    from matplotlib import colormaps

    names = list(METHODS)
    if name in names:
        tens, place = divmod(names.index(name), 10)  # tab20 alternates strong and pale: strong ones first
        return colormaps["tab20"].colors[2 * place + tens % 2]
    return colormaps["Dark2"].colors[number % 8]


def _over(series: dict, data: PageData):
    """x and mean, smallest and largest y over seeds, for each value of a setting; None if nothing was measured."""
    points = []
    for value in series["over"]:
        case = filled(series["case"], value)
        y = list(data.values(case, filled(series["y"], value)).values())
        x = list(data.values(case, filled(series["x"], value)).values()) if "x" in series else [float(value)]
        if y:
            points.append((float(np.mean(x)), float(np.mean(y)), min(y), max(y)))
    return list(zip(*sorted(points))) if points else None


def _lists(series: dict, data: PageData):
    """The mean and range over seeds of a curve, on a grid that the curves of all seeds span; None if there is none."""
    curves = []
    for made in data.found[series["case"]]["seeds"].values():
        if series["x"] in made["lists"]:
            x, y = (np.array(made["lists"][series[key]]) for key in "xy")
            order = np.argsort(x, kind="stable")
            curves.append((x[order], y[order]))
    if not curves:
        return None
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), SEED_GRID)
    found = np.array([np.interp(grid, x, y) for x, y in curves])
    return grid, found.mean(axis=0), found.min(axis=0), found.max(axis=0)
