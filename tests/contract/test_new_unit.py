"""What a kind of thing that exits costs: one file and one line. This one is an example that is read backwards.

The file is written into a temporary package and registered by one line; then it is trained on by the command line,
loaded, and evaluated. (An export needs its own form of the manifest besides.)
"""

import json
import sys
from dataclasses import replace

import pytest

import mini_ee.lab.baselines.joint as joint
from mini_ee import load_run
from mini_ee.lab import registry
from mini_ee.lab.cli.main import main

UNIT = '''\
"""Examples exit whose words are read from the last to the first."""

from dataclasses import replace

from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.training.row_unit import RowUnit


class BackwardExits(RowExits):
    """The model of a row, under another name."""

    unit = "backward"


class BackwardUnit(RowUnit):
    """An example of a task, backwards."""

    name = "backward"
    task_help = "a task whose texts are read backwards"

    def data(self, request, backbone, tokenizer, about, say):
        task = request.task
        train = task.split("train")
        texts = tuple(tuple(" ".join(text.split()[::-1]) for text in row) for row in train.texts)
        splits = task.splits | {"train": replace(train, texts=texts)}
        say("The texts are turned round.")
        return super().data(replace(request, task=replace(task, splits=splits)), backbone, tokenizer, about, say)

    def build(self, method, backbone, exits, config):
        return BackwardExits(backbone, exits, *self.shape(config), method.policy)


UNIT = BackwardUnit()
'''


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The file, the line, and a method that is for it."""
    (tmp_path / "my_backward_unit.py").write_text(UNIT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.UNITS, "backward", "my_backward_unit")
    monkeypatch.setattr(joint, "METHOD", replace(joint.METHOD, units=("backward",)))
    yield
    sys.modules.pop("my_backward_unit", None)


def test_it_is_trained_loaded_and_evaluated(registered, checkpoint_folder, task_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "joint", "--help"])
    shown = capsys.readouterr().out
    assert "a task whose texts are read backwards" in shown and "--max-train" in shown and "--new-tokens" not in shown
    out = tmp_path / "run"
    argv = ["train", "joint", "--model", str(checkpoint_folder), "--task", str(task_folder), "--out", str(out)]
    assert main([*argv, "--epochs", "1", "--exits", "1,3"]) == 0
    assert "The texts are turned round." in capsys.readouterr().out
    run = load_run(out)
    assert run.unit == run.model.unit == run.config["unit"] == "backward" and not run.generates
    assert run.classify(["good was film the"])[0].label in run.label_names
    assert main(["evaluate", str(out), "--task", str(task_folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["exit_counts"]) == 2
