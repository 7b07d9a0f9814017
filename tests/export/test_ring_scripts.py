"""--out of the scripts, and folders that the ring and the lab open of each other."""

import runpy
import sys
import warnings

import pytest

from mini_ee import consistent, lora_exits, raee, self_supervised
from mini_ee.export.manifest import read_manifest
from mini_ee.export.runtime import Runtime
from mini_ee.train import script

TEXTS = ["A warm and funny film.", "It is dull from the first minute to the last.", "Bad."]
RULES = {lora_exits: "threshold", raee: "never", consistent: "policy"}


def run_script(monkeypatch, module, folder, task, tmp_path):
    line = ["script", "--model", str(folder), "--exits", "1,3", "--epochs", "1", "--rows", "60"]
    line += ["--picture", str(tmp_path / "exits.png"), "--out", str(tmp_path / "exported")]
    monkeypatch.setattr(sys, "argv", line + (["--task", str(task)] if task else []))
    with warnings.catch_warnings():  # that the module is imported already: as with python -m, its classes are new ones
        warnings.simplefilter("ignore")
        runpy.run_module(module.__name__, run_name="__main__")


@pytest.mark.parametrize("module", RULES, ids=lambda module: module.__name__.split(".")[-1])
def test_out_exports_what_the_script_trained(module, bert_folder, task_folder, tmp_path, capsys, monkeypatch):
    run_script(monkeypatch, module, bert_folder, task_folder, tmp_path)
    assert f"exported: {tmp_path / 'exported'}" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "exported")
    assert manifest["rule"]["name"] == RULES[module] and manifest["exits"] == [1, 3]
    answers = Runtime(tmp_path / "exported", threads=1).run(TEXTS)
    assert [answer.layers in (1, 3) for answer in answers] == [True] * 3
    with pytest.raises(SystemExit, match="2"):
        run_script(monkeypatch, module, bert_folder, task_folder, tmp_path)
    assert "is there already" in capsys.readouterr().err


def test_out_of_a_decoder_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    """Before the training."""
    with pytest.raises(SystemExit, match="2"):
        run_script(monkeypatch, self_supervised, "llama", None, tmp_path)
    assert capsys.readouterr().err == (
        "error: --out: the graph of a decoder's token is in the lab: mini-ee train, then mini-ee export\n"
    )


def test_the_help_names_it_and_the_core_alone_runs_without_the_ring(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    monkeypatch.setitem(sys.modules, "mini_ee.export.writer", None)
    with pytest.raises(SystemExit, match="0"):
        script(raee.main, raee.RAEEOptions, raee.__doc__)
    assert "--out" in capsys.readouterr().out
