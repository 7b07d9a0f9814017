"""What people type first: no command at all, a mistyped name, a percentage, a name on Hugging Face, a run to serve."""

import json
import os
import shutil
from importlib.util import find_spec

import pytest
from conftest import answer, refused

import mini_ee
from mini_ee.lab.cli.main import COMMANDS, main
from mini_ee.lab.data.tasks import load_task


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("first") / "run"
    return mini_ee.train("joint", checkpoint_folder, task_folder, out, epochs=1, batch_size=16).folder


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith(
        "Early-exit transformers from scratch. First step: mini-ee demo."
    )


@pytest.mark.parametrize(
    "argv, meant",
    [
        (["trian"], "train"),
        (["TRAIN"], "train"),
        (["train", "jiont"], "joint"),
        (["train", "PABEE"], "pabee"),
        (["train", "loraexit"], "lora-exits"),
        (["train", "consistentee"], "consistent"),
        (["reproduce", "lora"], "lora-exits"),
        (["reproduce", "loraexit"], "lora-exits"),
        (["reproduce", "consistentee"], "consistent"),
        (["evaluate", "run", "--rule", "patient"], "patience"),
        (["train", "joint", "--out", "run", "--epoch", "4"], "--epochs"),
        (["train", "joint", "--out", "run", "--max-tain=4"], "--max-train"),
    ],
)
def test_a_mistyped_name_shows_the_one_that_is_close(capsys, argv, meant):
    assert f"; did you mean {meant}?; see mini-ee " in refused(capsys, *argv, status=2)


@pytest.mark.parametrize("argv", [["dance"], ["train", "xyz"]])
def test_a_name_that_is_close_to_none_lists_all(capsys, argv):
    line = refused(capsys, *argv, status=2)
    assert "did you mean" not in line and ("joint" if "train" in argv else COMMANDS[-1]) in line


@pytest.mark.parametrize(
    "argv, meant",
    [
        (["calibrate", "run", "--epsilon", "95"], ".95"),
        (["calibrate", "run", "--epsilon", ".95", "--delta", "5"], ".05"),
        (["serve", "exported", "--shadow", "10"], ".1"),
        (["serve", "exported", "--canary", "new", "--share", "5"], ".05"),
        (["serve", "exported", "--epsilon", "99.5"], ".995"),
        (["generate", "run", "--prompt", "a", "--top-p", "90"], ".9"),
        (["add-exits", "RUN", "--text", "TEXTS", "--agreement", "99"], ".99"),
        (["add-exits", "RUN", "--text", "TEXTS", "--confidence", "95"], ".95"),
        (["train", "joint", "--out", "run", "--max-loss", "1.5"], ".015"),
    ],
)
def test_a_percentage_in_place_of_a_share_asks_for_the_share(capsys, tmp_path, run_folder, argv, meant):
    (tmp_path / "texts.txt").write_text("a\n")
    names = {"TEXTS": tmp_path / "texts.txt", "RUN": run_folder}
    assert f"; did you mean {meant}?" in refused(capsys, *(names.get(word, word) for word in argv), status=2)


@pytest.mark.parametrize("value", ["0", "101", "-5", "nan"])
def test_another_wrong_share_is_no_percentage(capsys, value):
    assert "did you mean" not in refused(capsys, "calibrate", "run", "--epsilon", value, status=2)


OPEN_A_MODEL = [
    ["train", "joint", "--out", "out", "--model", "NAME"],
    ["train", "self-supervised", "--out", "out", "--model", "NAME"],
    ["train", "embedding-maps", "--out", "out", "--model", "NAME"],
    ["train", "raee", "--out", "out", "--encoder", "NAME"],
    ["demo", "--out", "out", "--model", "NAME"],
    *[["bench", "onnx", "--model", "NAME"]] * bool(find_spec("transformers")),  # which it needs first
    ["estimate", "NAME"],
    ["add-exits", "NAME", "--text", "texts.txt"],
    ["embed", "NAME", "texts.txt", "--out", "out.npy"],
    ["classify", "NAME", "--text", "a"],
    ["evaluate", "NAME"],
    ["generate", "NAME", "--prompt", "a"],
    ["run", "NAME"],
    ["batch", "NAME", "--in", "texts.txt", "--out", "out"],
]


@pytest.mark.parametrize("argv", OPEN_A_MODEL, ids=lambda argv: "-".join(argv[:2]))
def test_a_name_on_hugging_face_shows_how_to_download_it(capsys, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("a\n")
    for name, folder in (("distilbert-base-uncased", "distilbert-base-uncased"), ("org/Name_1.5-v2", "Name_1.5-v2")):
        line = refused(capsys, *(name if word == "NAME" else word for word in argv), status=2)
        assert line.endswith(f"; if this is a model of Hugging Face, first: hf download {name} --local-dir {folder}")
    for path in ("models/mine/first", tmp_path / "none", "../none"):
        line = refused(capsys, *(path if word == "NAME" else word for word in argv), status=2)
        assert "hf download" not in line and os.path.basename(path) in line
    assert sorted(file.name for file in tmp_path.iterdir()) == ["texts.txt"]


def test_batch_of_a_run_says_export_it_first(capsys, run_folder):
    line = refused(capsys, "batch", run_folder, "--in", "x", "--out", "y", status=2)
    assert line.endswith(f"this is a run, export it first: mini-ee export {run_folder} --out DIR")


@pytest.mark.parametrize("method", ["joint", "lora-exits"])
def test_run_answers_by_a_run_as_by_its_export(capsys, tmp_path, checkpoint_folder, task_folder, method):
    run = mini_ee.train(method, checkpoint_folder, task_folder, tmp_path / "run", epochs=1, max_loss=0.9).folder
    answer(capsys, "export", run, "--out", tmp_path / "exported")
    texts, out = load_task(task_folder).split("dev").texts, tmp_path / "out.jsonl"
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for (text,) in texts))
    answers = []
    for folder in (run, tmp_path / "exported"):
        assert main(["run", str(folder), str(tmp_path / "in.txt"), "--out", str(out), "--threads", "1"]) == 0
        answers.append([json.loads(line) | {"milliseconds": 0} for line in out.read_text().splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == len(texts)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{run} is a run; exporting it to a temporary folder" in error


@pytest.mark.parametrize(
    "argv", [["run", "FOLDER"], ["serve", "FOLDER"], ["batch", "FOLDER", "--in", "x", "--out", "y"]]
)
def test_the_folder_around_an_export_names_the_export(capsys, tmp_path, argv):
    def line(folder):
        return refused(capsys, *(folder if word == "FOLDER" else word for word in argv), status=2)

    (tmp_path / "fast" / "exported").mkdir(parents=True)
    (tmp_path / "fast" / "exported" / "manifest.json").write_text("{}")
    assert line(tmp_path / "fast").endswith(f"did you mean {tmp_path / 'fast' / 'exported'}?")


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_fine_tuned_model_in_place_of_an_export_shows_how_to_add_exits(capsys, checkpoint_folder, command):
    line = refused(capsys, command, checkpoint_folder, status=2)
    assert line.endswith(f"add exits first: mini-ee add-exits {checkpoint_folder} --text FILE")


def test_the_folder_around_a_run_names_the_run(capsys, tmp_path, run_folder):
    shutil.copytree(run_folder, tmp_path / "demo" / "run")
    line = refused(capsys, "classify", tmp_path / "demo", "--text", "a", status=2)
    assert line.endswith(f"did you mean {tmp_path / 'demo' / 'run'}?")


def test_a_model_that_learned_nothing_is_warned_about_before_its_guarantee(
    capsys, tmp_path, checkpoint_folder, task_folder
):
    places = ("--model", checkpoint_folder, "--task", task_folder, "--out", tmp_path / "run")
    assert main([*map(str, ("train", "joint", *places, "--epochs", 1, "--lr", 0, "--head-lr", 0))]) == 0
    printed = capsys.readouterr().out
    warning = "\nThe full model is no better than a constant: its accuracy on "
    assert warning in printed and "uarante" not in printed.partition(warning)[0]
