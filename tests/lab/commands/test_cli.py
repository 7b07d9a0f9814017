"""The command line: the answers as one JSON object, and wrong input as one line."""

import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import answer, refused

import mini_ee.lab.cli.guarantee_options as calibrating
import mini_ee.lab.cli.main as command_line
import mini_ee.lab.cli.task_options as tasks
import mini_ee.lab.data.files as files
import mini_ee.lab.evaluation.plots as plots
import mini_ee.lab.evaluation.row_evaluation as evaluation
import mini_ee.lab.methods.consistent_hardness as consistent_hardness
import mini_ee.lab.methods.lora_exits as lora_exits
import mini_ee.lab.methods.lora_exits_streams as streams_module
import mini_ee.lab.recording as recording
import mini_ee.lab.training.holdout as holdout_module
import mini_ee.lab.training.train_run as train_run
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.main import COMMANDS, main, parser
from mini_ee.lab.cli.rule_options import rule_settings
from mini_ee.lab.data.files import file_sha256, read_json, sole_writer, write_json
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.settings import flag_of
from mini_ee.lab.data.tasks import holdout, load_task, toy_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.row_evaluation import RANGES, curve, over_seeds, rows_of
from mini_ee.lab.evaluation.tables import ranges_table
from mini_ee.lab.recording import read_every_exit, record, summary
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Never, Policy, Threshold, rule_from_dict
from mini_ee.lab.training.default_rule import CURVE_POINTS, sweep
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.run_folder import load_run, training_folder, write_rule
from mini_ee.lab.training.state import STATE
from mini_ee.lab.training.train_run import make_request, trained_on

LOOSE = ("--max-loss", "0.9")  # which five test rows show, so that the default rule exits early
FAST = ("--epochs", "1", "--batch-size", "8", "--lr", "3e-3", "--head-lr", "1e-2")
KILLS = int(os.environ.get("MINI_EE_KILLS", "1"))  # moments; 20 by hand


@pytest.fixture(scope="module")
def small(checkpoint_folder, task_folder):
    """Options of a training that takes a moment."""
    return ("--model", checkpoint_folder, "--task", task_folder, *FAST)


def train(method, *argv):
    assert main(["train", method, *map(str, argv)]) == 0


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, small):
    out = tmp_path_factory.mktemp("cli") / "run"
    train("joint", *small, "--out", out)
    return out


@pytest.mark.parametrize(
    "argv, name",
    [
        (("consistent", "--alpha", "0"), "alpha"),
        (("consistent", "--epsilon", "0"), "epsilon"),
        (("lora-exits", "--lambda", "0"), "weight"),
        (("lora-exits", "--weight-decay", "0"), "weight_decay"),
    ],
)
def test_a_setting_of_0_is_a_setting(argv, name):
    argv = ["train", *argv, "--out", "run"]
    given = {name: getattr(parser(argv).parse_args(argv), name)}
    request = make_request(argv[1], None, None, Path("run"), False, given)
    assert getattr(request.train if name == "weight_decay" else request.config, name) == 0


STARTS = """
import sys
sys.modules["torch"] = None
from mini_ee.lab.cli.main import main
for command in {commands}:
    try:
        main([*command, "--help"])
    except SystemExit as stop:
        assert not stop.code
"""


def test_the_parser_starts_without_torch():
    commands = [[], *([command] for command in COMMANDS), ["run", "joint"]]  # of a folder that is called as a method
    code = STARTS.format(commands=commands)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.returncode == 0 and process.stdout.count("usage: mini-ee") == len(commands), process.stderr


def test_max_rows_of_a_classifiers_task_are_drawn_with_the_seed(capsys, run_folder, task_folder):
    given = ("--task", task_folder, "--max-rows", 7)
    one, same, other = (answer(capsys, "evaluate", run_folder, *given, "--seed", seed) for seed in (0, 0, 1))
    assert sum(one["exit_counts"]) == 7 and one["timed_rows"] == 7
    assert one["per_exit_accuracy"] == same["per_exit_accuracy"]
    (row,) = answer(capsys, "compare", run_folder, *given)["rows"]
    assert row["accuracy"] == one["accuracy"] and sum(row["exit_counts"]) == 7
    everyone = answer(capsys, "evaluate", run_folder, "--task", task_folder, "--max-rows", 1000)
    assert sum(everyone["exit_counts"]) == 20
    task, names = load_task(task_folder), []
    for seed in (0, 1):
        _, rows = rows_of(task, None, 7, seed)
        names.append(rows.texts)
    assert names[0] != names[1] and set(names[0]) < set(task.split("dev").texts) and other["split"] == "dev"


def test_the_accuracy_of_the_most_frequent_label_is_printed(capsys, run_folder, task_folder, tmp_path):
    folder, rows = tmp_path / "words", (task_folder / "dev.jsonl").read_text().splitlines(keepends=True)
    folder.mkdir()
    shutil.copy(task_folder / "train.jsonl", folder)
    good = [row for row in rows if '"good"' in row]
    (folder / "dev.jsonl").write_text("".join([*good, *(row for row in rows if row not in good)][:-3]))
    result = answer(capsys, "evaluate", run_folder, "--task", folder)
    assert result["majority"] == len(good) / (len(rows) - 3)
    assert main(["evaluate", str(run_folder), "--task", str(folder)]) == 0
    printed = f"accuracy {result['majority']:.3f}, and the full model is no better."
    assert f"If good is predicted for every example: {printed}" in capsys.readouterr().out


def with_heads(folder, copy, change):
    """A copy of a run whose heads' biases, (2,) each, were changed."""
    state = {name: value.clone() for name, value in load_run(folder).model.own_state().items()}
    for name in state:
        if name.startswith("heads.") and state[name].shape == (2,):
            state[name] += torch.tensor(change)
    shutil.copytree(folder, copy)
    config = read_json(copy / "config.json")
    config["files"]["model.safetensors"] = write_tensors(copy / "model.safetensors", state)
    write_json(copy / "config.json", config)
    return copy


def test_a_model_that_predicts_one_label_only_is_reported(capsys, run_folder, task_folder, tmp_path):
    run, dev = load_run(run_folder), load_task(task_folder).split("dev")
    logits = record(run.segments(), run.encode(dev.texts), 32).logits[:, -1]
    both = with_heads(run_folder, tmp_path / "both", [float(np.median(logits[:, 1] - logits[:, 0])), 0.0])
    bad = with_heads(run_folder, tmp_path / "bad", [100.0, 0.0])
    for folder, expected in ((both, None), (bad, "bad")):
        given = ("evaluate", str(folder), "--task", str(task_folder), "--rule", "never")
        assert answer(capsys, *given)["always"] == expected
        assert main([*given]) == 0
        assert ("The prediction is always bad.\n" in capsys.readouterr().out) == (expected == "bad")


def test_a_tasks_own_metric_is_printed_by_its_name(capsys, checkpoint_folder, task_folder, tmp_path):
    folder, given = tmp_path / "CoLA", ("--task", tmp_path / "CoLA")
    folder.mkdir()
    for split in ("train", "dev"):
        rows = [json.loads(line) for line in (task_folder / f"{split}.jsonl").read_text().splitlines()]
        lines = (f"x\t{int(row['label'] == 'good')}\t\t{row['sentence']}\n" for row in rows)
        (folder / f"{split}.tsv").write_text("".join(lines))
    run = tmp_path / "run"
    train("joint", "--model", checkpoint_folder, *given, *FAST, "--out", run)
    shown, result = capsys.readouterr().out, read_json(run / "metrics.json")["hold_out"]
    assert result["score"] == result["matthews"]
    assert f"held-out examples: matthews {result['matthews']:.3f}," in shown
    for command in ("evaluate", "compare"):
        assert main([command, str(run), *map(str, given)]) == 0
        shown = capsys.readouterr().out
        assert "matthews" in shown and not re.search(r"\bscore\b", shown)


def test_tensors_of_another_head_are_reported_if_they_are_not_used(capsys, checkpoint_folder, task_folder, tmp_path):
    folder = shutil.copytree(checkpoint_folder, tmp_path / "classifier")
    tensors = read_tensors(folder / "model.safetensors")
    tensors |= {"classifier.weight": torch.zeros(2, 16), "classifier.bias": torch.zeros(2)}
    write_tensors(folder / "model.safetensors", tensors)
    options = ("--model", folder, "--task", task_folder, *FAST, "--max-train", 16)
    message = f"{folder}: 2 tensors of another head were left out (classifier.bias, classifier.weight).\n"
    assert main([*map(str, ("train", "lora-exits", *options, "--out", tmp_path / "lora"))]) == 0
    assert message in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "lora"), "--task", str(task_folder)]) == 0
    assert "2 tensors of another head were left out" in capsys.readouterr().out
    answer(capsys, "train", "joint", *options, "--out", tmp_path / "joint")  # what is said goes to standard error
    assert main(["evaluate", str(tmp_path / "joint"), "--task", str(task_folder)]) == 0
    assert "left out" not in capsys.readouterr().out  # the run holds a backbone of its own


def test_a_task_with_train_alone_is_trained_on_and_evaluated_if_a_split_is_named(
    capsys, checkpoint_folder, task_folder, tmp_path
):
    folder = tmp_path / "words"
    folder.mkdir()
    shutil.copy(task_folder / "train.jsonl", folder)
    given = ("--model", checkpoint_folder, "--task", folder, *FAST, "--out", tmp_path / "run")
    assert answer(capsys, "train", "joint", *given)["split"] == "hold-out"
    line = refused(capsys, "evaluate", tmp_path / "run", "--task", folder)
    assert "expected a dev or a test file, whose rows are reported, found train alone" in line
    assert "or give --split train" in line
    assert answer(capsys, "evaluate", tmp_path / "run", "--task", folder, "--split", "train")["split"] == "train"


@pytest.mark.parametrize("method", ["deebert", "fastbert", "right-tool", "pcee-bert"])
def test_methods_that_need_confidence_refuse_a_regression(capsys, tmp_path, method):
    folder = tmp_path / "STS-B"
    folder.mkdir()
    lines = "sentence1\tsentence2\tscore\n" + "".join(f"a film\ta film {row}\t{row / 5:.1f}\n" for row in range(20))
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text(lines)
    line = refused(capsys, "train", method, "--task", folder, "--out", tmp_path / "run")
    assert (
        f"{method} needs the confidence or the accuracy of an exit, and STS-B is a regression; train joint or pabee"
        in line
    )


def test_a_picture_that_cannot_be_written_is_told_before_the_work(capsys, run_folder, tmp_path):
    for picture in (tmp_path, tmp_path / "nowhere" / "a.png", tmp_path / "dev.tsv"):
        line = refused(capsys, "compare", run_folder, "--sweep", "--picture", picture)
        assert "--picture: expected a file NAME.png in a folder that exists" in line


def test_train_answers(capsys, tmp_path, small):
    options = ("--exits", "1,3", "--pool", "first", "--seed", 3, "--out", tmp_path / "run")
    result = answer(capsys, "train", "two-stage", *small, *options)
    assert result["method"] == "two-stage" and result["exits"] == [1, 3] and result["seed"] == 3
    assert {"task", "split", "accuracy", "mean_layers", "layers_saved", "rule", "versions", "threads"} <= result.keys()
    assert load_run(tmp_path / "run").model.pool == "first"


def test_retrieval_over_a_cascade_is_exported_with_the_deepest_models_states(
    capsys, tmp_path, checkpoint_folder, task_folder
):
    cascade, raee, exported, task = *(tmp_path / name for name in "abc"), ("--task", task_folder)
    answer(capsys, "train", "multi-model", "--model", checkpoint_folder, *task, *FAST, "--out", cascade)
    answer(capsys, "train", "raee", "--model", cascade, *task, "--layer", 2, "--k", 2, "--out", raee)
    answer(capsys, "export", raee, *task, "--out", exported)
    of_export, expected = (answer(capsys, "evaluate", folder, *task) for folder in (exported, raee))
    assert of_export["exit_counts"] == expected["exit_counts"] and of_export["score"] == expected["score"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["joint", "multi-model", "lora-exits"])
def test_a_decoder_is_trained_read_and_served_as_an_encoder_is(
    capsys, tmp_path, decoder_checkpoint, task_folder, method
):
    out, exported, task = tmp_path / "run", tmp_path / "exported", ("--task", task_folder)
    rate = 3e-2 if method == "lora-exits" else 1e-2
    options = ("--exits", "1,3", "--epochs", 8, "--batch-size", 16, "--lr", rate, "--head-lr", rate, "--out", out)
    options += ("--max-train", 45, "--seed", 1)  # so that more than one example chooses the epoch
    answer(capsys, "train", method, "--model", decoder_checkpoint, *task, *options)
    layer = ["--rule", "fixed", "--layer", "3"]
    result = answer(capsys, "evaluate", str(out), *task, *layer)
    assert result["score"] > 0.7 and len(result["per_exit_accuracy"]) == 2
    answer(capsys, "export", str(out), *task, "--out", str(exported))
    assert answer(capsys, "evaluate", str(exported), *task, *layer)["score"] == result["score"]
    if method == "lora-exits":
        moved = shutil.copytree(decoder_checkpoint, tmp_path / "moved")
        assert answer(capsys, "evaluate", str(out), *task, *layer, "--model", str(moved))["score"] == result["score"]


def test_evaluate_answers_under_the_keys_of_the_design(capsys, run_folder, task_folder):
    result = answer(capsys, "evaluate", run_folder, "--task", task_folder, "--sweep")
    keys = "method task split accuracy exits exit_counts per_exit_accuracy mean_layers layers_saved "
    keys += "layer_passes speedup seconds flops_ratio rule versions seed threads"
    assert set(keys.split()) <= result.keys()
    assert result["split"] == "dev" and result["exits"] == [1, 2, 3] and sum(result["exit_counts"]) == 20
    assert len(result["per_exit_accuracy"]) == 3 and len(result["rows"]) == CURVE_POINTS + 1
    thresholds = [float(row["rule"]["threshold"]) for row in result["rows"]]
    assert thresholds[0] >= 0.5 and thresholds[-2] <= 1 and thresholds == sorted(thresholds)
    depths = [row["mean_layers"] for row in result["rows"]]
    assert depths == sorted(depths) and (depths[0], depths[-1]) == (1, 3)
    assert result["layers_saved"] == pytest.approx(1 - result["mean_layers"] / 3)
    assert result["full_score"] == result["per_exit_score"][-1]
    for timed in (result, *result["rows"]):
        assert timed["speedup"] == pytest.approx(result["full_seconds"] / timed["seconds"])


@pytest.mark.parametrize(
    "options, depth",
    [
        (["--rule", "never"], 3),
        (["--layer", "2"], 2),
        (["--threshold", "0"], 1),
        (["--threshold", "inf,0,0"], 2),
        (["--patience", "2"], 3),
        (["--rule", "patience-confidence", "--patience", "2", "--threshold", "0"], 2),
        (["--measure", "entropy", "--threshold=-inf"], 1),
    ],
)
def test_a_rule_may_be_given_instead_of_the_runs_own(capsys, run_folder, task_folder, options, depth):
    mean_layers = answer(capsys, "evaluate", run_folder, "--task", task_folder, *options)["mean_layers"]
    assert mean_layers == depth or ("2" in options[:2] and mean_layers < depth)


@pytest.mark.parametrize(("batch", "turn"), [(1, 16), (5, 3), (32, 1)])
def test_runs_take_turns_of_some_rows_and_of_each_batch_the_median_counts(monkeypatch, batch, turn):
    clock, ran = [0.0], []

    def run(name, rule, rows):
        ran.append((name, rows[0]))
        slow = ran.count((name, rows[0])) == (3 if rows[0] else 4)  # one of three, after the warm-up with row 0
        clock[0] += {"a": 1.0, "b": 2.0}[name.text] * len(rows) + 100 * slow

    monkeypatch.setattr(evaluation, "early_exit", run)
    runs = [(Named(name), None, SimpleNamespace(batch=lambda rows: rows)) for name in "ab"]
    order = [np.arange(first, min(first + batch, 40)) for first in range(0, 40, batch)]
    assert evaluation.measure_seconds(runs, order, repeats=3, clock=lambda: clock[0]).tolist() == [40.0, 80.0]
    first = [int(rows[0]) for rows in order[:turn]]
    expected = [(name, row) for _ in range(3) for name in "ab" for row in first]
    assert [(name.text, int(row)) for name, row in ran[2 : 2 + 6 * len(first)]] == expected


class Named(NamedTuple):
    """Segments of which only the name counts."""

    text: str
    engine: str = "numpy"


@pytest.fixture(scope="module")
def lora_folder(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "lora"
    train("lora-exits", *small, *LOOSE, "--exits", "1,2,3", "--out", out)
    return out


def test_a_comparison_has_a_row_of_lora_exits_for_each_schedule(capsys, run_folder, lora_folder, task_folder):
    both = ("compare", run_folder, lora_folder, "--task", task_folder, "--sweep", "--schedule", "restart,parallel")
    plain, restart, parallel = answer(capsys, *both)["rows"]
    assert "schedule" not in plain and plain["method"] == plain["how"] == "joint"
    assert restart["schedule"] == [[1], [2], [3]] and parallel["schedule"] == [[1, 2, 3]]
    assert (restart["how"], parallel["how"]) == ("lora-exits 1 2 3", "lora-exits 1+2+3")
    assert restart["score"] == parallel["score"] and restart["layer_passes"] < parallel["layer_passes"]
    assert main([*map(str, both)]) == 0
    assert "lora-exits 1+2+3" in capsys.readouterr().out


def test_the_adaptive_schedule_goes_by_the_calibrated_chance_of_a_refusal(
    capsys, lora_folder, task_folder, tmp_path, monkeypatch
):
    run, calls = shutil.copytree(lora_folder, tmp_path / "run"), []
    cheapest, measure = streams_module.cheapest_schedule, streams_module.measure_costs
    monkeypatch.setattr(
        lora_exits, "cheapest_schedule", lambda costs, reach: calls.append(reach) or cheapest(costs, reach)
    )
    monkeypatch.setattr(lora_exits, "measure_costs", lambda *given: calls.append(given[1:]) or measure(*given))
    evaluate = ("evaluate", run, "--task", task_folder, "--schedule", "adaptive")
    evaluated = answer(capsys, *evaluate)
    assert sorted(sum(evaluated["schedule"], [])) == [1, 2, 3]
    metrics = read_json(run / "metrics.json")
    (batch_size, tokens), reach = calls
    counts = metrics["hold_out"]["exit_counts"]
    np.testing.assert_allclose(reach, [sum(counts[k:]) / sum(counts) for k in range(3)])
    assert (batch_size, tokens) == (32, round(metrics["mean_tokens"])) and 3 < tokens < 12
    counts = answer(capsys, "calibrate", run, "--task", task_folder, "--epsilon", 0.5)["exit_counts"]
    answer(capsys, *evaluate)
    np.testing.assert_allclose(calls[-1], [sum(counts[k:]) / sum(counts) for k in range(3)])
    assert "uses the calibrated rule: leave out --threshold" in refused(capsys, *evaluate, "--threshold", 0.9)


def test_every_setting_of_a_rule_is_refused_with_the_adaptive_schedule(capsys, lora_folder, task_folder):
    settings = ("rule", "never"), ("layer", 2), ("measure", "entropy"), ("patience", 1), ("tolerance", 1), ("q", 0.5)
    for name, value in (*settings, ("cut", 0.5)):
        line = refused(capsys, "classify", lora_folder, "--text", "x", "--schedule", "adaptive", f"--{name}", value)
        assert f"leave out --{name}" in line
    others = {"--exit", "--threshold", "--least-cosine"}
    refused_settings = {flag_of(setting, {}) for setting in rule_settings()} - others
    assert refused_settings == {f"--{name}" for name, _ in settings[2:]} | {"--cut"}, "a setting that is not tried here"


def test_rows_of_another_train_file_are_not_taken_for_held_out_ones(capsys, run_folder, task_folder, tmp_path):
    grown, renamed = (shutil.copytree(task_folder, tmp_path / name) for name in ("grown/words", "renamed"))
    with open(grown / "train.jsonl", "a") as file:
        file.write(json.dumps({"sentence": "a new film was good", "label": "good"}) + "\n")
    run, config = load_run(run_folder), read_json(run_folder / "config.json")
    assert trained_on(run, load_task(renamed)), "whatever its name, the rows are the same"
    for command in (
        ("calibrate", run_folder, "--epsilon", 0.9),
        ("compare", run_folder, run_folder, "--sweep"),
        ("train", "raee", "--model", run_folder, "--out", tmp_path / "raee"),
    ):
        line = refused(capsys, *command, "--task", grown, status=2)
        assert "words has other train examples than in its training" in line
    assert read_json(run_folder / "config.json") == config and not (tmp_path / "raee").exists()
    calibrated = shutil.copytree(run_folder, tmp_path / "run")
    assert (
        answer(capsys, "calibrate", calibrated, "--epsilon", 0.5, "--task", grown, "--split", "dev")["split"] == "dev"
    )


def test_two_processes_do_not_write_one_rule(run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "run")
    config = read_json(run / "config.json")
    with sole_writer(run / "config.json"), pytest.raises(FileExistsError, match="another process is writing it"):
        write_rule(run, Threshold(0.7), None, [1, 2, 3])
    assert read_json(run / "config.json") == config
    write_rule(run, Threshold(0.7), None, [1, 2, 3])
    assert load_run(run).rule == Threshold(0.7) and {path.name for path in run.iterdir()} == {
        path.name for path in run_folder.iterdir()
    }


def test_a_command_that_is_stopped_while_it_starts_is_one_line(capsys, monkeypatch):
    def stopped(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "parser", stopped)
    assert refused(capsys, "train", "joint", status=1) == "mini-ee: stopped"


@pytest.mark.parametrize("module", ["nowhere.doubt", "mini_ee.lab.methods.doubt"])
def test_a_method_whose_file_python_does_not_find_is_one_line_and_hides_no_other(capsys, monkeypatch, module):
    monkeypatch.setitem(METHODS, "doubt", module)
    line = refused(capsys, "train", "doubt", "--out", "run")
    assert f"the method doubt is in {module}, which Python does not find; run python -m mini_ee" in line
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0 and "RAEE (Huang et al. 2024" in capsys.readouterr().out


def test_a_sweep_of_one_exit_is_refused(capsys, tmp_path, small, task_folder):
    answer(capsys, "train", "joint", *small, "--exits", 3, "--out", tmp_path / "run")
    answer(capsys, "export", tmp_path / "run", "--out", tmp_path / "exported")
    for folder in (tmp_path / "run", tmp_path / "exported"):
        line = refused(capsys, "evaluate", folder, "--task", task_folder, "--sweep")
        assert line.endswith(f"--sweep chooses between exits; {folder} has one, after layer 3")


def test_compare_answers_a_row_for_each_run(capsys, run_folder, task_folder):
    result = answer(capsys, "compare", run_folder, run_folder, "--task", task_folder)
    assert len(result["rows"]) == 2 and result["split"] == "dev"
    assert {"method", "accuracy", "mean_layers", "layers_saved", "seconds", "speedup"} <= result["rows"][0].keys()
    assert result["rows"][0]["accuracy"] == result["rows"][1]["accuracy"]
    on_disk = [value for path in run_folder.rglob("*.safetensors") for value in read_tensors(path).values()]
    assert result["rows"][0]["megabytes"] == pytest.approx(sum(value.nbytes for value in on_disk) / 1e6)


def test_a_run_of_consistent_exits_by_its_policy_and_is_swept_over_the_cut(capsys, tmp_path, small, task_folder):
    brief = ("--rounds", 1, "--policy-epochs", 2)
    answer(capsys, "train", "consistent", *small, *LOOSE, *brief, "--out", tmp_path / "run")
    assert isinstance(load_run(tmp_path / "run").rule, Policy)
    half = answer(capsys, "evaluate", tmp_path / "run", "--task", task_folder, "--rule", "policy")
    assert half["rule"] == Policy(0.5).to_dict()
    (row,) = answer(capsys, "compare", tmp_path / "run", "--task", task_folder, "--sweep")["rows"]
    assert len({point["rule"].get("cut") for point in row["curve"]}) > 2
    # an exported folder whose graph holds no policy is swept over thresholds
    answer(
        capsys, "export", tmp_path / "run", "--out", tmp_path / "exported", "--rule", "threshold", "--threshold", 0.6
    )
    (row,) = answer(capsys, "compare", tmp_path / "exported", "--task", task_folder, "--sweep")["rows"]
    assert {point["rule"]["name"] for point in row["curve"]} == {"never", "threshold"}


@pytest.mark.slow
def test_compare_sweeps_every_run_and_draws_their_curves(capsys, run_folder, task_folder, tmp_path):
    picture = tmp_path / "curves.png"
    result = answer(capsys, "compare", run_folder, "--task", task_folder, "--sweep", "--picture", picture)
    (row,) = result["rows"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    layers = [point["mean_layers"] for point in row["curve"]]
    assert row["curve"][0]["rule"]["name"] == "never" and layers == sorted(layers, reverse=True)
    assert row["no_loss"]["speedup"] == pytest.approx(row["full_seconds"] / row["no_loss"]["seconds"])
    assert main(["compare", str(run_folder), "--task", str(task_folder), "--sweep"]) == 0
    shown = capsys.readouterr().out
    assert "rules chosen on" in shown and f"score {row['no_loss']['score']:.3f}" in shown


def test_compare_shows_milliseconds_of_one_row():
    point = {"score": 0.9, "mean_layers": 2.0, "layer_passes": 2.0, "flops_ratio": 0.5, "seconds": 0.25, "speedup": 2.0}
    shown = ranges_table([{"run": "a", "how": "joint"} | dict.fromkeys(RANGES, point)], timed_rows=50)
    assert shown.count(" 5.00 ") == len(RANGES)


@pytest.fixture(scope="module")
def second_folder(small, tmp_path_factory):
    """A run with another seed, and so with other held-out examples and predictions."""
    out = tmp_path_factory.mktemp("cli") / "second"
    train("joint", *small, "--seed", 7, "--out", out)
    return out


def hold_out_curve(folder, task):
    """(score, operations, rule) of every candidate on the rows that the run held out, and the full model's score."""
    run = load_run(folder)
    _, held = holdout(task.split("train"), run.config["seed"])
    recorded = record(run.segments(), run.encode(held.texts), 32, whole=run.whole_model())
    points = curve(recorded, [Never(), *sweep(Threshold(math.inf))(recorded)], task, held.labels)
    return points, points[0]["score"]


@pytest.mark.slow
def test_compare_chooses_rules_on_held_out_examples_against_the_best_full_model(
    capsys, run_folder, second_folder, small, task_folder, tmp_path
):
    other = tmp_path / "other"
    train("joint", *small, "--seed", 7, "--epochs", 6, "--out", other)
    capsys.readouterr()
    folders = run_folder, second_folder, other
    rows = answer(capsys, "compare", *folders, "--task", task_folder, "--sweep")["rows"]
    task = load_task(task_folder)
    curves = [hold_out_curve(folder, task) for folder in folders]
    full = [score for _, score in curves]
    assert len(set(full)) == 3  # or this test would show nothing of the reference
    bests = full[0], max(full[1:]), max(full[1:])  # the second and the third hold out the same rows
    assert any(row["per_exit_score"][0] != row["full_score"] for row in rows)
    for row, (points, _), best in zip(rows, curves, bests):
        assert row["chosen_on"] == "hold-out" and row["full_score"] == row["per_exit_score"][-1]
        run, dev = load_run(row["run"]), task.split("dev")
        recorded = record(run.segments(), run.encode(dev.texts), 32)
        for name, loss in (("no_loss", 0.0), ("one_point", 0.01)):
            good = [point for point in points if point["score"] >= best - loss - 1e-9]
            cheapest = min(good, key=lambda point: point["flops_ratio"], default={})
            assert row[name].get("rule") == cheapest.get("rule")
            if cheapest:  # its figures are those of the reported rows
                replayed = summary(recorded.replay(rule_from_dict(cheapest["rule"])), recorded, task, dev.labels)
                assert all(row[name][key] == replayed[key] for key in ("score", "mean_layers", "exit_counts"))


@pytest.mark.parametrize("folder", ["run_folder", "lora_folder"])
def test_low_and_high_range_are_the_best_scores_for_a_third_and_two_thirds_of_the_flops(
    capsys, task_folder, folder, request
):
    """Of the full model's FLOPs: if no example exits early, a LoRA run computes that model and not its streams."""
    folder = request.getfixturevalue(folder)
    capsys.readouterr()
    (row,) = answer(capsys, "compare", folder, "--task", task_folder, "--sweep")["rows"]
    points, _ = hold_out_curve(folder, load_task(task_folder))
    for name, share in (("low_range", 1 / 3), ("high_range", 2 / 3)):
        within = [point for point in points if point["flops_ratio"] <= share]
        assert row[name].get("rule") == max(within, key=lambda point: point["score"], default={}).get("rule")
    (never,) = (point for point in row["curve"] if point["rule"]["name"] == "never")
    assert never["flops_ratio"] == 1 and len(row["curve"]) == len(points)  # its rules are those of the hold-out


def test_a_training_that_another_process_writes_is_refused(capsys, small, tmp_path):
    with sole_writer(training_folder(tmp_path / "run")):
        line = refused(capsys, "train", "joint", *small, "--out", tmp_path / "run")
        assert "another process is writing it" in line
    assert not list(tmp_path.iterdir())


def test_a_training_that_diverges_in_its_last_step_is_an_error(capsys, small, tmp_path):
    last = ("--batch-size", 32, "--max-train", 16, "--epochs", 1, "--lr", 1e30)
    line = refused(capsys, "train", "joint", *small, *last, "--out", tmp_path / "run")
    assert "the training diverged; train again with a smaller --lr" in line


def test_compare_groups_runs_that_differ_only_in_their_seeds(
    capsys, run_folder, second_folder, small, task_folder, tmp_path
):
    answer(capsys, "train", "joint", *small, "--seed", 8, "--pool", "first", "--out", tmp_path / "pool")
    runs = run_folder, second_folder, tmp_path / "pool", run_folder
    result = answer(capsys, "compare", *runs, "--task", task_folder, "--sweep")
    rows = result["rows"][:2]
    (group,) = result["over_seeds"]
    assert (group["method"], group["seeds"], group["runs"]) == ("joint", [0, 7], [row["run"] for row in rows])
    for spread, alone in (
        (group["full_score"], [row["full_score"] for row in rows]),
        (group["per_exit_score"][0], [row["per_exit_score"][0] for row in rows]),
        (group["speedup"], [row["speedup"] for row in rows]),
    ):
        assert spread["mean"] == pytest.approx(sum(alone) / 2)
        assert (spread["least"], spread["most"]) == (min(alone), max(alone))
    assert main(["compare", *map(str, runs), "--task", str(task_folder)]) == 0
    assert "joint       2  " in capsys.readouterr().out
    assert answer(capsys, "compare", run_folder, run_folder, "--task", task_folder)["over_seeds"] == []


def test_runs_that_shots_made_of_one_backbone_are_taken_together():
    figures = {"score": 0.5, "full_score": 0.5, "layers_saved": 0.0, "speedup": 1.0, "per_exit_score": [0.5]}
    row = {"method": "raee", "how": "raee", "run": "run", "exits": [1], **figures}
    described = {"method": "raee", "exits": [1], "pool": "mask", "task": {"name": "words"}}
    configs = [
        described
        | {"seed": seed, "backbone": {"sha256": f"of seed {seed}"}}
        | {"training": {"seed": seed, "shots": 4, "from": {"sha256": begun}}}
        for seed, begun in ((0, "a"), (1, "a"), (2, "b"))
    ]
    (group,) = over_seeds([row] * 3, configs)
    assert group["seeds"] == [0, 1]
    settings = ({"alpha": 0.02}, {"alpha": 0.1}, {})
    for others in (
        [config | {"settings": given} for config, given in zip(configs, settings)],
        [configs[0], configs[1] | {"max_length": 6}],
        [configs[0], configs[1] | {"exit_counts": [3]}],
        [configs[0], configs[1] | {"base": {"method": "sweet"}}],
    ):
        assert over_seeds([row] * len(others), others) == []


def test_curves_of_one_group_of_seeds_have_one_colour_and_one_name_and_each_run_its_star(monkeypatch, tmp_path):
    def row(run, way, *points):
        curve = [{"flops_ratio": x, "score": y} for x, y in points]
        return {"run": run, "how": way, "flops_ratio": 0.5, "score": 0.8, "curve": curve}

    rows = [
        row("a/one", "joint", (1, 0.9), (0.2, 0.6)),
        row("a/two", "joint", (1, 0.8), (0.4, 0.7)),
        row("b/one", "joint", (1, 0.7)),
        row("b/one", "raee"),
    ]
    drawn, groups = [], [{"how": "joint", "runs": ["a/one", "a/two"]}]
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    answer = {"rows": rows, "over_seeds": groups, "task": "words", "split": "dev"}
    plots.draw_curves(tmp_path / "curves.png", answer)
    ((axes,),) = [figure.axes for figure in drawn]
    curves, stars = axes.lines[::2], axes.lines[1::2]
    assert [list(zip(*line.get_data())) for line in curves] == [
        [(0.2, 0.6), (1, 0.9)],
        [(0.4, 0.7), (1, 0.8)],
        [(1, 0.7)],
        [(0.5, 0.8)],
    ]
    assert [list(zip(*line.get_data())) for line in stars] == [[(0.5, 0.8)]] * 4
    colours = [line.get_color() for line in curves]
    assert colours == [line.get_color() for line in stars] and len(set(colours)) == 3 and colours[0] == colours[1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["joint", "one (joint)", "one (raee)"]


def test_evaluate_measures_the_hardness_of_the_examples(capsys, run_folder, task_folder):
    result = answer(capsys, "evaluate", run_folder, "--task", task_folder, "--hardness")
    trained, task = load_run(run_folder), load_task(task_folder)
    dev = task.split("dev")
    memorized, losses = hardness(trained, dev)
    assert result["hardness"]["memorized_layer"] == memorized
    assert result["hardness"]["mean_memorized_layer"] == pytest.approx(np.mean(memorized))
    assert result["hardness"]["spearman_loss"] == pytest.approx(spearman(memorized, losses))
    kinds = tuple("easy" if layer == 1 else "hard" for layer in memorized)
    recorded = record(trained.segments(), trained.encode(dev.texts), 8)
    known = consistent_hardness.hardness(recorded, replace(dev, hardness=kinds))["known"]
    assert known["easy"] == 1 and known["hard"] == pytest.approx(np.mean([layer for layer in memorized if layer > 1]))


@pytest.mark.parametrize("max_train", [36, 45])  # of which a ninth selects
def test_evaluate_measures_the_hardness_of_held_out_examples_in_training(
    capsys, run_folder, task_folder, tmp_path, max_train
):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    metrics, config = read_json(copy / "metrics.json"), read_json(copy / "config.json")
    held = split_rows(load_task(task_folder), config["seed"], max_train).selection
    metrics["rows_held"], config["training"]["max_train"] = len(held), max_train
    epoch = metrics["epochs"][0]
    wrong = [[0, 1], [2], [1, 3], [0, 1, 3]]  # each of the four is forgotten once
    write_json(copy / "metrics.json", metrics | {"epochs": [epoch | {"wrong": rows} for rows in wrong]})
    config["files"]["metrics.json"] = file_sha256(copy / "metrics.json")
    write_json(copy / "config.json", config)
    held_out = answer(capsys, "evaluate", copy, "--task", task_folder, "--hardness")["hardness"]["held_out"]
    memorized, losses = hardness(load_run(copy), held)
    events = [1, 1, 1, 1] + [0] * (len(held) - 4)
    assert (held_out["rows"], held_out["epochs"], held_out["forgotten"]) == (len(held), 4, 4)
    assert held_out["spearman"]["loss"] == pytest.approx(spearman(memorized, losses))
    assert held_out["spearman"]["forgetting events"] == pytest.approx(spearman(memorized, events))
    never = [epoch | {"wrong": [1]}] * 3
    write_json(copy / "metrics.json", metrics | {"epochs": never})
    config["files"]["metrics.json"] = file_sha256(copy / "metrics.json")
    write_json(copy / "config.json", config)
    assert answer(capsys, "evaluate", copy, "--task", task_folder, "--hardness")["hardness"]["held_out"] is None


def test_a_task_without_train_has_no_hardness_of_held_out_examples(run_folder, task_folder):
    task = load_task(task_folder)
    without = replace(task, splits={"dev": task.split("dev")})
    assert consistent_hardness.hardness_in_training(load_run(run_folder), without, 8) is None


def hardness(trained, rows):
    """Memorized layer and loss under Eq. 1 of each row, one row and one exit after the other."""
    memorized, losses = [], []
    exits = trained.exits
    for text, label in zip(rows.texts, rows.labels):
        logits, *_ = read_every_exit(trained.segments(), trained.encode([text]).batch(np.arange(1)))
        wrong = [layer for layer, row in zip(exits, logits[0]) if row.argmax() != label]
        later = [layer for layer in exits if not wrong or layer > wrong[-1]]
        memorized.append(later[0] if later else exits[-1])
        exit_losses = [np.log(np.exp(row).sum()) - row[label] for row in logits[0].astype(np.float64)]
        losses.append(sum(layer * loss for layer, loss in zip(exits, exit_losses)) / sum(exits))
    return memorized, losses


def test_compare_draws_loss_and_accuracy_by_layer(capsys, run_folder, task_folder, tmp_path):
    result = answer(capsys, "compare", run_folder, "--task", task_folder, "--picture", tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    (row,) = result["rows"]
    evaluated = answer(capsys, "evaluate", run_folder, "--task", task_folder)
    assert [line["accuracy"] for line in row["by_exit"]] == evaluated["per_exit_accuracy"] == row["per_exit_accuracy"]
    assert [line["left"] for line in row["by_exit"]] == row["exit_counts"]
    right = sum(line["left"] * line["left_accuracy"] for line in row["by_exit"] if line["left"])
    assert right / sum(row["exit_counts"]) == pytest.approx(row["accuracy"])


def test_calibrate_answers_and_gives_the_run_its_thresholds(capsys, run_folder, task_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    result = answer(capsys, "calibrate", copy, "--task", task_folder, "--epsilon", ".8", "--measure", "entropy")
    keys = {"epsilon", "delta", "thresholds", "agreement", "end_to_end"}
    assert keys <= result.keys() and len(result["thresholds"]) == 2 and result["delta"] is None
    assert result["exits"] == list(load_run(copy).exits)
    rule = load_run(copy).rule
    assert (rule.name, rule.measure) == ("threshold", "entropy")
    assert list(rule.threshold[:-1]) == [float(threshold) for threshold in result["thresholds"]]
    assert load_run(run_folder).rule != rule
    assert load_run(copy).config["curve"]["points"][-1][:3] == ["inf", 1.0, 0.0]
    everyone = answer(capsys, "evaluate", copy, "--task", task_folder)
    assert everyone["rule"]["threshold"][:-1] == result["thresholds"]
    result = answer(capsys, "calibrate", copy, "--task", task_folder, "--epsilon", ".8", "--sets", 5)
    assert result["broken"]["sets"] == 5 and 0 <= result["broken"]["paper"] <= 1
    assert result["measure"] == "entropy"  # by default the measure of the rule that the run has


def test_calibrate_reads_the_held_out_rows_that_chose_nothing_of_the_model(
    capsys, run_folder, task_folder, tmp_path, monkeypatch
):
    read, original = [], recording.record
    monkeypatch.setattr(
        recording,
        "record",
        lambda segments, encoded, *more, **given: (
            read.append(encoded.texts) or original(segments, encoded, *more, **given)
        ),
    )
    copy = shutil.copytree(run_folder, tmp_path / "run")
    answer(capsys, "calibrate", copy, "--task", task_folder, "--epsilon", ".8")
    parts = split_rows(load_task(task_folder), load_run(run_folder).config["seed"], None)
    assert read == [parts.test.texts] and not set(parts.selection.texts) & set(read[0])


@pytest.mark.parametrize(
    "agreement, end_to_end, more, expected",
    [
        ([0.95, 1.0], 0.96, {}, ""),
        ([0.95, None], 0.95, {}, ""),
        (
            [0.912, 0.96],
            0.93,
            {},
            "This agreement is below --epsilon, 95.0%: 91.20% at the exit after layer 2, 93.00% at the "
            "exits of the rule. --delta .05 gives stricter thresholds.",
        ),
        (
            [0.9, 0.96],
            0.96,
            {"delta": 0.05},
            "This agreement is below --epsilon, 95.0%: 90.00% at the exit after layer 2.",
        ),
        ([0.9, 0.96], 0.96, {"guarantee": "conformal"}, ""),
        (
            [0.9, 0.96],
            0.94949,
            {"guarantee": "conformal"},
            "This agreement is below --epsilon, 95.0%: 94.95% at the exits of the rule.",
        ),
    ],
)
def test_calibrate_reports_an_agreement_below_the_requested_one(agreement, end_to_end, more, expected):
    measured = {"epsilon": 0.95, "delta": None, "agreement": agreement, "end_to_end": end_to_end} | more
    assert calibrating.below_line(measured, (2, 4, 6)) == expected


def test_the_line_about_too_little_agreement_is_printed(capsys, run_folder, task_folder, tmp_path, monkeypatch):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    monkeypatch.setattr(calibrating, "below_line", lambda measured, exits: f"{measured['epsilon']} at {exits}")
    assert main(["calibrate", str(copy), "--task", str(task_folder), "--epsilon", ".8"]) == 0
    assert "\n0.8 at (1, 2, 3)\n" in capsys.readouterr().out


def test_calibrate_prints_intervals_of_the_papers_thresholds_and_whether_there_is_a_guarantee(
    capsys, run_folder, task_folder, tmp_path
):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    argv = ["calibrate", str(copy), "--task", str(task_folder), "--epsilon", ".5"]
    for options, bootstrapped, guaranteed in (
        ([], True, False),
        (["--delta", ".9"], False, True),
        (["--guarantee", "conformal"], False, True),
    ):
        assert main([*argv, *options]) == 0
        shown = capsys.readouterr().out
        assert "exit here" in shown and ("bootstraps" in shown) == bootstrapped
        assert ("Without --delta there is no guarantee." in shown) != guaranteed
        assert ("The guarantee holds for examples like these." in shown) == guaranteed


def test_classify_shows_every_layer_and_the_exit(capsys, run_folder):
    result = answer(capsys, "classify", run_folder, "the film was lovely", "--layer", "2")
    assert result == answer(capsys, "classify", run_folder, "--text", "the film was lovely", "--layer", "2")
    assert result["exit"] == 2
    assert [row["layer"] for row in result["rows"]] == [1, 2, 3] and result["layers"] == 2
    assert [row["left_here"] for row in result["rows"]] == [False, True, False]
    assert result["label"] == result["rows"][1]["label"] in ("bad", "good") and 0 < result["confidence"] <= 1


def test_a_text_of_100000_characters_is_cut_and_counted(capsys, run_folder):
    result = answer(capsys, "classify", run_folder, "--text", "the film was lovely " * 5000)
    assert result["rows_truncated"] == 1


@pytest.mark.slow
def test_the_demo_writes_a_report_that_the_next_one_replaces(capsys, tmp_path, checkpoint_folder, small, monkeypatch):
    """The first is on the built-in reviews, whose hardness is known; the second draws in text, without matplotlib."""
    monkeypatch.setattr(holdout_module, "TEST_ROWS", 40)
    monkeypatch.setattr(evaluation, "TIMED_ROWS", 32)
    out = tmp_path / "demo"
    result = answer(capsys, "demo", "--model", checkpoint_folder, "--max-train", 60, *FAST, "--out", out)
    assert [row["layer"] for row in result["rows"]] == [1, 2, 3]
    assert sum(row["share"] for row in result["rows"]) == pytest.approx(1)
    assert result["report"] == str(out) and (out / "report.md").is_file() and list(out.glob("*.png"))
    assert len(result["curve"]) == 9 and load_run(result["run"]).config["method"] == "joint"
    kinds = toy_task().split("dev").hardness
    assert {group["hardness"]: group["count"] for group in result["hardness"]} == {
        kind: kinds.count(kind) for kind in kinds
    }
    assert np.sum([group["exit_counts"] for group in result["hardness"]], axis=0).tolist() == result["exit_counts"]
    monkeypatch.setattr("mini_ee.lab.evaluation.plots.can_draw", lambda: False)
    assert main([*map(str, ("demo", *small, "--out", out))]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Training 3 exits on bert (3 layers) for words: all exits at once")
    assert "speed-up" in printed and not list(out.glob("*.png")) and "+-----" in (out / "report.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_the_demo_on_a_decoder_wants_a_task_and_shows_a_command_that_fits(
    capsys, tmp_path, decoder_checkpoint, checkpoint_folder
):
    line = refused(capsys, "demo", "--model", decoder_checkpoint, "--out", tmp_path / "demo")
    assert f"{decoder_checkpoint}: is a decoder, and the demo trains a classifier; name the folder of a task" in line
    pairs, rows = tmp_path / "pairs", "".join(f"a good film {k}\tit was\t{k % 2}\n" for k in range(40))
    pairs.mkdir()
    for split in ("train", "dev"):
        (pairs / f"{split}.tsv").write_text(f"sentence1\tsentence2\tlabel\n{rows}")
    argv = ("demo", "--model", checkpoint_folder, "--task", pairs, "--out", tmp_path / "demo", *FAST)
    assert main([*map(str, argv)]) == 0
    (tried,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Try: mini-ee "))
    assert main(shlex.split(tried.removeprefix("Try: mini-ee "))) == 0


def test_the_demo_refuses_a_task_without_a_reported_split_before_it_trains(capsys, tmp_path, task_folder, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.training.train_run.train", lambda *_, **settings: pytest.fail("it trained"))
    only = tmp_path / "only"
    only.mkdir()
    shutil.copy(task_folder / "train.jsonl", only)
    assert main(["demo", "--task", str(only), "--out", str(tmp_path / "demo")]) == 1
    assert "expected a dev or a test file" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_the_demo_replaces_nothing_but_a_demo(capsys, tmp_path, small):
    (tmp_path / "precious.txt").write_text("mine")
    assert "exists and is no report of a demo" in refused(capsys, "demo", *small, "--out", tmp_path, status=2)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_without_matplotlib_a_picture_is_refused(capsys, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.evaluation.plots.can_draw", lambda: False)
    line = refused(capsys, "compare", run_folder, "--picture", tmp_path / "curves.png")
    assert "pip install mini-ee[plots]" in line


# ---- Tasks of other places ----


def test_the_built_in_task_is_no_folder_of_its_name(capsys, run_folder, task_folder, tmp_path, monkeypatch):
    """Nor is a folder of its name the built-in task, where none is named."""
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(task_folder, tmp_path / "mine" / "reviews")
    (tmp_path / "reviews").mkdir()
    runs = [SimpleNamespace(config={"task": task.to_config()}) for task in (toy_task(), load_task(copy))]
    unnamed = SimpleNamespace(task=None)
    assert tasks.open_task_of(runs[:1], unnamed).name == "reviews"
    assert tasks.open_task_of(runs[1:], unnamed).folder == str(copy)
    with pytest.raises(WrongArguments, match="trained on different tasks: give that task's folder with --task"):
        tasks.open_task_of(runs, unnamed)
    assert train_run.open_task(None).split("train").sha256() == toy_task().split("train").sha256()
    assert "found []; name another folder" in refused(capsys, "evaluate", run_folder, "--task", "reviews")


def test_a_task_without_a_train_file_is_evaluated(capsys, tmp_path, checkpoint_folder):
    folder = tmp_path / "SST-2"
    folder.mkdir()
    rows = "".join(f"the film was {word}\t{label}\n" for word, label in (("good", 1), ("bad", 0)) for _ in range(20))
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + rows)
    run = tmp_path / "run"
    given = ("--model", checkpoint_folder, "--task", folder, "--exits", "1,3", *FAST, "--out", run)
    answer(capsys, "train", "joint", *given)
    (folder / "train.tsv").unlink()
    assert answer(capsys, "evaluate", run, "--task", folder)["split"] == "dev"
    (row,) = answer(capsys, "compare", run, "--task", folder, "--sweep")["rows"]
    assert row["chosen_on"] == "reported rows"


def test_a_task_of_pairs_is_refused_by_a_run_on_single_texts(capsys, tmp_path, run_folder):
    folder = tmp_path / "words"
    folder.mkdir()
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\tbad\nb\ta\tgood\n")
    assert "examples of 1 texts" in refused(capsys, "evaluate", run_folder, "--task", folder)


def test_a_tokenizer_of_another_model_is_one_line(capsys, tmp_path, checkpoint_folder, task_folder):
    import shutil

    folder = shutil.copytree(checkpoint_folder, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["film"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    argv = "train", "joint", "--model", folder, "--task", task_folder, "--out", tmp_path / "run"
    assert main([*map(str, argv)]) == 1
    printed = capsys.readouterr()
    assert "its tokenizer has 1 beyond them: 'film' (500)" in printed.out
    assert "500" in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "empty"),
        ("sentence\tlabel\n", "row"),
        ("sentence\nx\n", "label"),
        ("sentence\tlabel\ngood\n", "column"),
        (b"sentence\tlabel\ncaf\xe9\t1\n", "UTF-8"),
        ("sentence\tlabel\na\tgood\nb\tugly\n", "ugly"),
    ],
)
def test_a_broken_task_file_is_one_line_that_names_it(capsys, tmp_path, run_folder, task_folder, content, message):
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes((task_folder / "train.jsonl").read_bytes())
    (folder / "dev.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(capsys, "evaluate", run_folder, "--task", folder)
    assert "dev.tsv" in line and message in line


def test_a_regression_refuses_confidence_and_takes_patience(capsys, tmp_path, checkpoint_folder):
    folder = tmp_path / "sts-b"
    folder.mkdir()
    rows = [
        f"{i}\tx\tx\t{i}\tx\tx\tx\tthe {w} was good\tthe {v} was good\t{(i * 7) % 6:.1f}"
        for i, (w, v) in enumerate([("film", "song"), ("meal", "room"), ("book", "film")] * 10)
    ]
    head = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text(head + "\n".join(rows) + "\n")
    run = tmp_path / "run"
    result = answer(capsys, "train", "joint", "--model", checkpoint_folder, "--task", folder, "--out", run, *FAST)
    assert {"pearson", "spearman", "score"} <= result.keys() and "accuracy" not in result
    assert result["score"] == pytest.approx((result["pearson"] + result["spearman"]) / 2)
    assert result["rule"]["name"] in ("patience", "never")
    evaluate = ("evaluate", run, "--task", folder)
    assert answer(capsys, *evaluate, "--patience", "1")["rule"]["name"] == "patience"
    assert "no confidence" in refused(capsys, *evaluate, "--threshold", ".9")
    assert "second one with --text-b" in refused(capsys, "classify", run, "--text", "the film")
    pair = ("--text", "the film", "--text-b", "the song")
    assert isinstance(answer(capsys, "classify", run, *pair)["label"], float)


def test_an_output_folder_that_cannot_be_written_is_one_line(capsys, tmp_path, small):
    (tmp_path / "file").write_text("")
    assert "file" in refused(capsys, "train", "joint", *small, "--out", tmp_path / "file" / "run")


def test_a_full_disk_is_one_line_and_writes_no_run(capsys, tmp_path, small, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    line = refused(capsys, "train", "joint", *small, "--out", tmp_path / "run")
    assert "No space left" in line and "state.safetensors" in line and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_training_is_resumed_to_the_weights_of_one_that_was_not(tmp_path, small):
    """kill -9 while it trains or writes, once it has a state. One without a state may leave an empty folder."""
    command, whole = [*map(str, ("train", "joint", *small, "--threads", 1, "--epochs", 3))], tmp_path / "whole"
    training_folder(whole).mkdir()
    begin = time.monotonic()
    assert main([*command, "--out", str(whole)]) == 0
    seconds, expected = time.monotonic() - begin, read_tensors(whole / "model.safetensors")
    for number, moment in enumerate(np.linspace(0, seconds, KILLS)):
        out = tmp_path / str(number)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([sys.executable, "-m", "mini_ee", *command, "--out", str(out)], **quiet)
        while not (training_folder(out) / STATE).exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert out.exists() or main([*command, "--out", str(out), "--resume"]) == 0
        tensors = read_tensors(load_run(out).folder / "model.safetensors")
        assert tensors.keys() == expected.keys() and all(tensors[name].equal(expected[name]) for name in expected)
