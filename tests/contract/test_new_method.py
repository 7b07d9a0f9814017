"""What a method costs: one file and one line. This one has an option, a module of its own, and a policy.

It is the one of the tutorial, tutorial/doubt.py. It is written into a temporary package, registered by one line, and
then trained, evaluated, calibrated, compared, exported and run like any other, on rows and on tokens.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import random_decoder

from mini_ee.lab import registry
from mini_ee.lab.backbones.hub import save_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.cli.main import main
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import CURVE_POINTS
from mini_ee.lab.training.run_folder import load_run

ROOT = Path(__file__).parents[2]
METHOD = (ROOT / "tutorial" / "doubt.py").read_text(encoding="utf-8")
LINE = {"doubt": "my_methods.doubt"}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The method's file in a package of its own, and its line in the registry."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "my_methods").mkdir()
    (folder / "my_methods" / "__init__.py").write_text("")
    (folder / "my_methods" / "doubt.py").write_text(METHOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(registry, "METHODS", registry.METHODS | LINE)
        for module in ("mini_ee.lab.training.method", "mini_ee.lab.cli.train", "mini_ee.lab.evaluation.comparison"):
            __import__(module)
            patch.setattr(sys.modules[module], "METHODS", registry.METHODS)
        yield folder


def answer(capsys, *argv):
    """The JSON answer of a command that ends well."""
    capsys.readouterr()
    status = main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


@pytest.fixture(scope="module")
def trained(package, checkpoint_folder, task_folder, tmp_path_factory):
    """A run on rows."""
    out = tmp_path_factory.mktemp("doubt") / "run"
    options = ["--model", checkpoint_folder, "--task", task_folder, "--out", out, "--epochs", 2, "--caution", 3]
    assert main([*map(str, ("train", "doubt", *options))]) == 0
    return out


def test_its_help_shows_its_option_and_no_other_methods(package, capsys):
    with pytest.raises(SystemExit):
        main(["train", "doubt", "--help-all"])
    report = capsys.readouterr().out
    assert "--caution" in report and "wrong exit" in report and "--alpha" not in report and "--tau" not in report


def test_a_foreign_option_and_a_wrong_value_are_one_line(package, checkpoint_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "doubt", "--out", str(tmp_path / "x"), "--tau", ".5"])
    assert ended.value.code == 2 and "--tau" in capsys.readouterr().err
    assert main(["train", "doubt", "--out", str(tmp_path / "x"), "--caution", ".5"]) == 2
    assert "caution must be a number of at least 1, got 0.5" in capsys.readouterr().err


def test_it_is_trained_and_loaded_again(trained):
    run = load_run(trained)
    assert run.config["method"] == "doubt" and run.config["settings"] == {"caution": 3.0} and run.unit == "rows"
    assert run.model.policy.linear[0].weight.abs().max() > 0
    assert run.classify(["the film was good"])[0].label in ("bad", "good")


def test_it_is_evaluated_calibrated_and_compared(trained, task_folder, tmp_path, capsys):
    swept = answer(capsys, "evaluate", trained, "--task", task_folder, "--sweep")
    assert len(swept["rows"]) == CURVE_POINTS + 1 and swept["mean_layers"] <= 3
    cut = answer(capsys, "evaluate", trained, "--task", task_folder, "--rule", "policy", "--cut", 0.4)
    assert cut["rule"] == {"name": "policy", "cut": 0.4}
    compared = answer(capsys, "compare", trained, "--task", task_folder, "--sweep")
    assert {point["rule"]["name"] for point in compared["rows"][0]["curve"]} == {"never", "policy"}
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(trained), str(copy)], check=True)
    assert answer(capsys, "calibrate", copy, "--task", task_folder, "--epsilon", 0.5)["epsilon"] == 0.5


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_it_is_exported_and_run_on_both_engines(trained, task_folder, tmp_path, capsys, engine):
    out, lines, answers = tmp_path / "exported", tmp_path / "in.txt", tmp_path / "out.jsonl"
    exported = answer(capsys, "export", trained, "--out", out, "--rule", "policy", "--task", task_folder)
    assert exported["verified"]["exit_agreement"] == 1.0
    lines.write_text("the film was good\nthe book was awful\n")
    result = answer(capsys, "run", out, lines, "--out", answers, "--engine", engine)
    assert (result["rows"], result["failed"]) == (2, 0)
    run = load_run(trained)._replace(rule=Policy(exported["rule"]["cut"]))
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    expected = run.classify(lines.read_text().splitlines())
    assert [(line["label"], line["layers"]) for line in written] == [
        (classified.label, classified.layers) for classified in expected
    ]


def test_it_teaches_tokens_too(package, decoder_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 16)
    out, model = tmp_path / "run", tmp_path / "model"
    config = random_decoder("llama", 2).config
    save_backbone(Decoder(replace(config, max_position_embeddings=64)), model)
    shutil.copy(decoder_checkpoint / "tokenizer.json", model)
    options = ["--model", model, "--exits", "1,2", "--texts", 24, "--new-tokens", 8, "--epochs", 1]
    answer(capsys, "train", "doubt", *options, "--out", out, "--caution", 4)
    run = load_run(out)
    assert run.unit == "tokens" and len(run.generate(["the film"], max_new_tokens=4)) == 1


def test_an_installed_package_names_it_by_an_entry_point(package):
    """As chapter 11 of the tutorial says; here the package's metadata is written by hand."""
    metadata = package / "my_methods-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[mini_ee.methods]\nquestion = my_methods.doubt\n")
    command = [sys.executable, "-m", "mini_ee", "train", "question", "--help-all"]
    environment = os.environ | {"PYTHONPATH": str(package)}
    printed = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--caution" in printed
