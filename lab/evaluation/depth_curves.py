"""The picture that grows through tutorial.md: accuracy against layers, one curve per method.

curves.json, next to the picture, keeps the curves, so that each section adds its own to those of the sections before.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mini_ee.lab.early_exit import ExitResult
from mini_ee.lab.evaluation.plots import new_figure, save_figure
from mini_ee.lab.recording import predictions

CURVES = "curves.json"


def add_curve(picture: Path, name: str, results: Iterable[ExitResult], labels: np.ndarray) -> None:
    """Add a curve, or replace the one of this name, and draw all of them. results: the same examples, by several rules.

    A point is the mean number of layer passes and the accuracy. A method whose exits share no layers can need more
    passes than the model has layers.
    """
    path = picture.parent / CURVES
    curves = json.loads(path.read_text()) if path.exists() else {}
    points = [(result.cost.layer_passes.mean(), (predictions(result.logits) == labels).mean()) for result in results]
    curves[name] = sorted((float(passes), float(accuracy)) for passes, accuracy in points)
    path.write_text(json.dumps(curves))
    figure, axes = new_figure()
    for (label, curve), marker in zip(curves.items(), "osD^vPX*" * len(curves)):
        axes.plot(*zip(*curve), marker + "-", markersize=4, linewidth=1, label=label)
    axes.set(xlabel="layer passes, mean over the sentences", ylabel="accuracy on the built-in reviews, dev split")
    axes.grid(color="0.9", linewidth=0.5)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    save_figure(figure, picture)
