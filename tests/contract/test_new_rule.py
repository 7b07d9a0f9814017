"""What a rule costs: one class, and a line in each table that it wants. This one has an option, a memory, and a setting
with a name of its own.

The class stands in a module of its own; nothing else in the package knows it. With a line in RULES it is named on the
command line, evaluated, compared, exported, run and shown on the web page; with one in KNOBS it is swept, with one in
INPUTS a graph takes other settings.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from http_server import ask, serving

from mini_ee import load_run, train
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.settings import option
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.row_evaluation import read_rows
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import verification, writer
from mini_ee.lab.export.row_segments import OrtModel
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import Record, Recorded, read_every_exit
from mini_ee.lab.rule_inputs import INPUTS
from mini_ee.lab.rules import RULES, Rule, confidence, rule_from_dict
from mini_ee.lab.sweep import KNOBS, Knob, from_loose_to_strict
from mini_ee.lab.training.default_rule import curves
from mini_ee.lab.training.run_folder import Run, write_rule
from mini_ee.serve import engine_of
from mini_ee.serve.monitoring import stricter

LINES = [f"the {thing} was {word}" for thing in ("film", "meal", "song") for word in ("good", "awful", "very dull")]


@dataclass(frozen=True)
class MeanConfidence(Rule):
    """Exit if the mean of the confidences so far is at least `level`; each exit back counts `decay` times as much."""

    level: float = option(help="exit if the mean confidence so far is at least", least=0, most=1)
    decay: float = option(0.5, "weight of a confidence one exit later", least=0, most=1)
    name = "mean-confidence"

    def stop(self, k, read, memory):
        memory["total"] = self.decay * memory.get("total", 0) + confidence(read, "max_probability")
        return memory["total"] / sum(self.decay**back for back in range(k + 1)) >= self.level

    def flops(self, classes):
        return 5.0 * classes + 3.0


def means(rule, recorded):
    """What the rule compares with its level, at every exit but the last: (N, K - 1)."""
    confidences, totals = recorded.confidence("max_probability"), []
    for k in range(confidences.shape[1]):
        weights = rule.decay ** np.arange(k, -1, -1)
        totals.append(confidences[:, : k + 1] @ weights / weights.sum())
    return np.stack(totals, axis=1)


RULE = MeanConfidence(0.6, 0.25)
NAMED = ("--rule", RULE.name, "--level", RULE.level, "--decay", RULE.decay)


def exits_by_hand(logits, rule):
    """Exit index (N,) of rows whose exits say logits (N, K, C), row by row in float64."""
    exit_index = []
    for row in logits.astype(np.float64):
        raised = [np.exp(exit_logits - exit_logits.max()) for exit_logits in row]
        sure = [max(powers) / powers.sum() for powers in raised]
        for k in range(len(row)):
            weights = [rule.decay ** (k - j) for j in range(k + 1)]
            mean = sum(weight * sureness for weight, sureness in zip(weights, sure)) / sum(weights)
            if k == len(row) - 1 or mean >= rule.level:
                exit_index.append(k)
                break
    return exit_index


@pytest.fixture(scope="module")
def registered():
    """A line in each of the three tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, MeanConfidence.name, MeanConfidence)
        patch.setitem(KNOBS, MeanConfidence, Knob("level", means))
        patch.setitem(INPUTS, MeanConfidence, {"threshold": ("level", "level")})
        yield


@pytest.fixture(scope="module")
def trained(registered, checkpoint_folder, task_folder, tmp_path_factory):
    """A run on rows, whose own rule this is, at a level that some rows reach at each exit."""
    out = tmp_path_factory.mktemp("rule") / "run"
    run = train("joint", checkpoint_folder, task_folder, out, epochs=1, exits=(1, 2, 3))
    level = float(np.median(means(RULE, recorded(run, task_folder))))
    write_rule(out, replace(RULE, level=level), None, [])
    return load_run(out)


def recorded(run, task_folder):
    rows = load_task(task_folder).split("dev")
    return read_rows(run, run.encode(rows.texts), rows.labels, 8)


def answer(capsys, *argv):
    """The JSON answer of a command that ends well."""
    capsys.readouterr()
    status = main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize("command", ["evaluate", "export", "classify", "generate"])
def test_help_shows_its_options(registered, command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(
        words in shown for words in ("--level", "--decay", "mean-confidence", "weight of a confidence", "(default 0.5)")
    )


def test_it_is_named_by_a_command_and_by_its_first_setting_alone(trained, task_folder, capsys):
    named = answer(capsys, "evaluate", trained.folder, "--task", task_folder, *NAMED)
    assert named["rule"] == RULE.to_dict() == {"name": "mean-confidence", "level": 0.6, "decay": 0.25}
    alone = answer(capsys, "evaluate", trained.folder, "--task", task_folder, "--level", 0.6)
    assert alone["rule"] == {"name": "mean-confidence", "level": 0.6, "decay": 0.5}
    assert main(["evaluate", str(trained.folder), "--rule", "mean-confidence"]) == 2
    assert "the rule mean-confidence needs --level" in capsys.readouterr().err


def test_a_run_whose_own_rule_it_is_is_evaluated_as_by_hand(trained, task_folder, capsys):
    assert rule_from_dict(trained.rule.to_dict()) == trained.rule and isinstance(trained.rule, MeanConfidence)
    record = recorded(trained, task_folder)
    expected = np.bincount(exits_by_hand(record.logits, trained.rule), minlength=3).tolist()
    evaluation = answer(capsys, "evaluate", trained.folder, "--task", task_folder)
    assert evaluation["exit_counts"] == expected and sum(count > 0 for count in expected) >= 2
    assert record.replay(trained.rule).exit_index.tolist() == exits_by_hand(record.logits, trained.rule)


def test_its_curve_goes_from_loose_to_strict(trained, task_folder):
    record = recorded(trained, task_folder)
    rules = from_loose_to_strict(trained.rule, record, 12)
    assert {(type(rule), rule.decay) for rule in rules} == {(MeanConfidence, 0.25)} and trained.rule in rules
    layers = [record.replay(rule).layers_run.mean() for rule in rules]
    assert layers == sorted(layers) and layers[0] == 1 and layers[-1] == 3 and len(set(layers)) > 4


def test_it_is_swept_compared_and_calibrated(trained, task_folder, tmp_path, capsys):
    swept = answer(capsys, "evaluate", trained.folder, "--task", task_folder, *NAMED, "--sweep")
    assert {point["rule"]["name"] for point in swept["rows"]} == {"mean-confidence"} and len(swept["rows"]) > 4
    assert main([*map(str, ("evaluate", trained.folder, "--task", task_folder, *NAMED, "--sweep"))]) == 0
    assert "level" in capsys.readouterr().out
    (compared,) = answer(capsys, "compare", trained.folder, "--task", task_folder, "--sweep")["rows"]
    assert compared["rule"] == trained.rule.to_dict()
    assert {point["rule"]["name"] for point in compared["curve"]} == {"never", "threshold", "mean-confidence"}
    copy = shutil.copytree(trained.folder, tmp_path / "copy")
    assert answer(capsys, "calibrate", copy, "--task", task_folder, "--epsilon", 0.5)["epsilon"] == 0.5
    assert load_run(copy).rule.name == "threshold"  # what `calibrate` gives a run is thresholds on one measure


def test_a_training_measures_its_curve(trained, task_folder):
    task, record = load_task(task_folder), recorded(trained, task_folder)
    learned, usual = curves(record, task, record.labels, trained.rule)
    assert (learned["rule"], usual["rule"]["name"]) == (trained.rule.to_dict(), "threshold")
    values = [float(value) for value, *_ in learned["points"]]
    assert values == sorted(values) and values[-1] == math.inf and trained.rule.level in values


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("rule") / "exported"
    writer.export(trained, out, [(line,) for line in LINES], web=True)
    return out


def expected_of(run, rule=None):
    return [(classified.label, classified.layers) for classified in run._replace(rule=rule or run.rule).classify(LINES)]


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_it_is_exported_and_run_on_both_engines(trained, task_folder, tmp_path, capsys, engine):
    out, lines, answers = tmp_path / "exported", tmp_path / "in.txt", tmp_path / "out.jsonl"
    summary = answer(capsys, "export", trained.folder, "--out", out, *NAMED, "--task", task_folder)
    assert summary["rule"] == RULE.to_dict() and summary["verified"]["exit_agreement"] == 1.0
    lines.write_text("".join(f"{line}\n" for line in LINES))
    assert answer(capsys, "run", out, lines, "--out", answers, "--engine", engine)["failed"] == 0
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(line["label"], line["layers"]) for line in written] == expected_of(trained, RULE)


def test_the_graph_remembers_and_takes_other_levels_but_no_other_decay(random_model, padded_inputs, tmp_path):
    model = random_model((1, 2, 4, 6))
    graph = OrtModel(tmp_path, writer.write_graphs(model, model.segments(), RULE, tmp_path), threads=1)
    logits, flops, _ = read_every_exit(model.segments(), padded_inputs)
    levels = np.unique(means(RULE, Record(Recorded(model.exits, logits, flops, [1] * 4), logits, 1.0)))
    seen = set()
    for level in [0.0, *((levels[1:] + levels[:-1]) / 2).tolist(), math.inf]:
        rule = replace(RULE, level=level)
        exit_index = early_exit(graph, rule, padded_inputs).exit_index.tolist()
        assert exit_index == exits_by_hand(logits, rule)
        seen |= set(exit_index)
    assert seen == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="expected the rule of model.onnx, mean-confidence"):
        early_exit(graph, replace(RULE, decay=0.75), padded_inputs)


def test_it_is_served_and_made_stricter(trained, exported):
    expected = expected_of(trained)
    with serving(engine_of(Runtime(exported, threads=1)), max_open=32) as (_, port):
        output = [ask(port, {"text": line}) for line in LINES]
    assert [(status, reply["label"], reply["layers"]) for status, reply, _ in output] == [(200, *e) for e in expected]
    assert stricter(RULE) == MeanConfidence(0.8, 0.25) and stricter(stricter(replace(RULE, level=0.99999))).level > 1


def test_the_web_page_shows_it(trained, exported):
    page = read_json(exported / "web.json")
    assert page["rule"] == trained.rule.to_dict()
    values = page["settings"]["threshold"]["values"]
    np.testing.assert_allclose(values, [trained.rule.level] * 2, rtol=1e-6)
    web = onnxruntime.InferenceSession(exported / "onnx/model_web.onnx", providers=["CPUExecutionProvider"])
    runtime = Runtime(exported, threads=1)
    encoded = trained.encode([(line,) for line in LINES]).batch(range(len(LINES)))
    feeds = {name: getattr(encoded, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feeds |= {"threshold": np.array(values, np.float32), "exit_at": np.array([-1])}
    layers = web.run(["layers"], feeds)[0]
    assert layers.tolist() == [classified.layers for classified in runtime.run(LINES)]
    assert page["about"]["words"] == " ".join(MeanConfidence.__doc__.split())
    assert page["about"]["compares"] == {"threshold": "level"} and page["about"]["fixed"] == {"decay": 0.25}
    assert page["about"]["knob"] == "exit if the mean confidence so far is at least"


def test_the_page_is_told_what_it_compares_at_each_exit(trained, exported, task_folder):
    """The page runs a text once for each exit that it shows, told to exit there."""
    encoded, segments = trained.encode([(line,) for line in LINES]), trained.segments()
    web = onnxruntime.InferenceSession(exported / "onnx/model_web.onnx", providers=["CPUExecutionProvider"])
    for row in range(len(LINES)):
        inputs = encoded.batch([row] * 3)
        logits, flops, _ = read_every_exit(segments, encoded.batch([row]))
        record = Record(Recorded(trained.exits, logits, flops, [1] * 3), logits, 1.0)
        for level in (0.0, 0.6, np.inf):
            feeds = {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
            feeds |= {"threshold": np.full(2, level, np.float32), "exit_at": np.arange(3)}
            (compared,) = web.run(["compared_threshold"], feeds)
            np.testing.assert_allclose(compared[:2], means(trained.rule, record)[0], atol=1e-5)


def test_tokens_exit_by_it_and_the_page_of_a_decoder_has_its_curve(registered, decoder_checkpoint, tmp_path):
    model = TokenExits(load_backbone(decoder_checkpoint), (1, 2, 3), "copy").eval()
    config = {"method": "self-supervised", "unit": "tokens", "settings": {}}
    run = Run(Path("run"), config, model, Tokenizer.from_folder(decoder_checkpoint, 30), MeanConfidence(0.2, 0.25))
    prompts = ["the film was", "a meal", "the"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 4)
        writer.export(run, tmp_path / "exported", prompts, web=True)
    curve = read_json(tmp_path / "exported" / "web.json")["curve"]
    assert curve["setting"] == "threshold" and len(curve["points"]) > 4 and curve["points"][-1][2] == 3
    runtime = Runtime(tmp_path / "exported", threads=1, max_new_tokens=8)
    written = run.generate(prompts, max_new_tokens=8)
    assert [output.text for output in runtime.run(prompts)] == written
