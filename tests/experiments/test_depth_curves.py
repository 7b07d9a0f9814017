"""The picture of tutorial.md that gains a curve in each section."""

import json
from types import SimpleNamespace

import numpy as np

from mini_ee.lab.evaluation.depth_curves import add_curve


def result(passes, classes):
    """What `add_curve` reads of an ExitResult."""
    cost = SimpleNamespace(layer_passes=np.array(passes, float))
    return SimpleNamespace(cost=cost, logits=np.eye(2)[classes])


def test_a_picture_gains_curves_and_replaces_one_of_the_same_name(tmp_path):
    labels = np.array([0, 1])
    add_curve(tmp_path / "first.png", "joint", [result([4, 2], [0, 1]), result([1, 1], [0, 0])], labels)
    add_curve(tmp_path / "second.png", "LoRA $x", [result([9, 3], [1, 1])], labels)
    add_curve(tmp_path / "second.png", "joint", [result([1, 2], [0, 1])], labels)
    assert json.loads((tmp_path / "curves.json").read_text()) == {"joint": [[1.5, 1.0]], "LoRA $x": [[6.0, 0.5]]}
    assert (tmp_path / "first.png").stat().st_size and (tmp_path / "second.png").stat().st_size
