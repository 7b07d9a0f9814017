"""The pictures of the tutorial, one call each. They go to docs/pictures/, or to the folder in MINI_EE_PICTURES."""

import json
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FOLDER = Path(os.environ.get("MINI_EE_PICTURES") or COMMITTED)
COLOURS = ("tab:blue", "tab:orange", "tab:green")


def axes_of(width=7.0, height=3.6, columns=1):
    """A figure and its axes, or an array of them."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for each in np.atleast_1d(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, name):
    """Write a picture into the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name, dpi=150)


def curve(name, points, picture):
    """The picture that grows: accuracy against layers. `picture` is curve-N.png of chapter N.

    points: (mean layers, accuracy) of one method. Earlier chapters' curves are grey. A file curve-N.json beside the
    picture keeps the points; those of chapters that you have not run come from docs/pictures/.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = FOLDER / picture.replace(".png", ".json")
    curves = json.loads(own.read_text()) if own.exists() else {}
    curves[name] = sorted([float(layers), float(accuracy)] for layers, accuracy in points)
    own.write_text(json.dumps(curves, indent=1) + "\n")
    earlier = {path.name: path for folder in (COMMITTED, FOLDER) for path in folder.glob("curve-*.json")}
    figure, axes = axes_of(height=4)
    for file, marker in zip(sorted(earlier), "osDv^P"):
        if file < own.name:
            for style, (label, known) in zip(("-", "--", ":"), json.loads(earlier[file].read_text()).items()):
                axes.plot(*zip(*known), marker + style, color="0.7", markersize=3, linewidth=1, label=label)
    for colour, (label, known) in zip(COLOURS, curves.items()):
        axes.plot(*zip(*known), "o-", color=colour, markersize=5, linewidth=2, label=label)
    axes.set(xlabel="layers run, mean over the sentences", ylabel="accuracy on the built-in reviews", xlim=(3.5, 12.5))
    axes.grid(color="0.92", linewidth=0.5)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    save(figure, picture)


def adder(numbers, layers, threshold):
    """Chapter 1: the largest probability of each number after every layer, up to its exit."""
    figure, axes = axes_of()
    for number, last in zip(numbers, layers):
        depths = np.arange(1, last + 1)
        axes.plot(depths, 1 / (1 + np.exp(-2 * abs(number) * depths)), "o-", label=f"{number:g}")
    axes.axhline(threshold, color="0.6", linestyle=":", label="threshold")
    axes.set(xlabel="layer", ylabel="largest probability", xticks=range(1, 5))
    axes.legend(title="example", frameon=False)
    save(figure, "adder.png")
