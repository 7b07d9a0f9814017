"""A classifier that gives a text several labels at once: agreement is that of all labels, answers are sets of them."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import BAD, GOOD, THINGS, tensors
from method_cases import few_epochs_and_no_picture  # noqa: F401

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.confidence import LABEL_MEASURES, named, weakest_label
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.add_exits import line_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import predictions
from mini_ee.lab.rules import Never, Threshold
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.kept_model import row_loss
from mini_ee.self_supervised import head_loss
from mini_ee.serve import engine_of
from mini_ee.serve.formats import formats_of

TEXTS = [
    f"{first} {thing} is {'very ' * very}{second}"
    for thing in THINGS
    for first in GOOD + BAD
    for second in GOOD + BAD
    for very in range(2)
]
NAMES = ("bad", "good", "odd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, classifier_folder):
    """The classifier with a third label; each is that of about half of the texts."""
    folder = shutil.copytree(classifier_folder, tmp_path_factory.mktemp("several") / "model")
    weights = read_tensors(folder / "model.safetensors")
    backbone, tokenizer = load_backbone(folder), Tokenizer.from_folder(folder, 30)
    weight = 8 * torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        inputs = tokenizer.encode([(text,) for text in TEXTS]).batch(slice(None))
        states = backbone.pooled(backbone(*tensors(inputs)))
    weights |= {"classifier.weight": weight, "classifier.bias": -(states @ weight.T).median(0).values}
    write_tensors(folder / "model.safetensors", weights)
    names = {str(number): name for number, name in enumerate(NAMES)}
    config = read_json(folder / "config.json") | {"id2label": names, "problem_type": "multi_label_classification"}
    config.pop("sha256", None)
    write_json(folder / "config.json", config)
    return folder


@pytest.fixture(scope="module")
def added(tmp_path_factory, folder):
    out = tmp_path_factory.mktemp("added") / "fast"
    run = mini_ee.add_exits(folder, TEXTS, out, agreement=0.8)
    exported = Runtime(out / "exported", threads=1)
    return SimpleNamespace(run=run, out=out, exported=exported, summary=read_json(out / "summary.json"))


def full_logits(runtime, texts):
    return early_exit(runtime.segments(), Never(), runtime.encode(texts).batch(slice(None))).logits


def test_all_labels_must_agree_and_the_share_is_that_of_the_exported_graph(added):
    rows = Split(tuple((text,) for text in TEXTS), np.zeros(len(TEXTS), np.int64))
    task = Task("texts", NAMES, ("accuracy",), {"train": rows})
    texts = split_rows(task, 0, int(0.6 * len(TEXTS))).test.texts
    full = full_logits(added.exported, texts)
    assert 1 < len(np.unique(full > 0, axis=0)) and (full > 0).any(axis=0).all()
    expected = [{name for name, logit in zip(NAMES, row) if logit > 0} for row in full]
    same = [set(answer.label) == labels for answer, labels in zip(added.exported.run(texts), expected)]
    assert added.summary["pays"] and added.summary["agreement"] == pytest.approx(np.mean(same), abs=1 / len(texts))
    assert added.summary["multi_label"] and "in every label on" in line_of(added.summary)
    assert added.summary["rule"]["measure"] == "weakest_label" and added.summary["guarantee"]["max_loss"] == 0.2


def test_answers_are_sets_of_labels_with_their_sigmoids_in_torch_and_in_the_graph(added):
    some = TEXTS[::17]
    answers, theirs = added.exported.run(some), added.run.classify(some)
    for answer, other in zip(answers, theirs):
        sigmoids = 1 / (1 + np.exp(-answer.logits.astype(np.float64)))
        assert answer.label == pytest.approx({name: p for name, p in zip(NAMES, sigmoids) if p > 0.5})
        assert list(answer.label.values()) == sorted(answer.label.values(), reverse=True)
        assert answer.confidence == pytest.approx(np.maximum(sigmoids, 1 - sigmoids).min())
        assert other.label == pytest.approx(answer.label, abs=1e-5)
        assert json.loads(json.dumps(answer.to_dict()))["label"] == answer.label
    assert len({tuple(sorted(answer.label)) for answer in answers}) > 2


def test_the_graph_returns_the_labels_as_booleans(added):
    session = onnxruntime.InferenceSession(added.out / "exported" / "onnx/model.onnx")
    inputs = added.exported.encode(TEXTS[:30]).batch(slice(None))
    feeds = {node.name: getattr(inputs, node.name) for node in session.get_inputs()}
    logits, labels, confidence = session.run(["logits", "labels", "confidence"], feeds)
    np.testing.assert_array_equal(labels, logits > 0)
    np.testing.assert_allclose(confidence, weakest_label(logits), atol=1e-6)
    assert labels.shape == (30, 3) and "label" not in {node.name for node in session.get_outputs()}


def test_the_client_in_python_prints_the_labels(added):
    client = Path(__file__).parents[3] / "lab" / "export" / "clients" / "classify.py"
    command = [sys.executable, client, added.out / "exported"]
    process = subprocess.run(
        command, input="\n".join(TEXTS[:3]), capture_output=True, text=True, timeout=60, check=True
    )
    labels = [set(json.loads(line)["labels"]) for line in process.stdout.splitlines()]
    assert labels == [set(answer.label) for answer in added.exported.run(TEXTS[:3], batch_size=1)]


def test_the_measure_is_the_probability_of_the_decision_nearest_to_its_boundary():
    logits = np.random.default_rng(0).normal(0, 2, (50, 4))
    p = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(weakest_label(logits), [min(max(x, 1 - x) for x in row) for row in p], rtol=1e-12)
    assert weakest_label(np.array([[-np.inf, np.inf]]))[0] == 1 and weakest_label(np.zeros((1, 2)))[0] == 0.5
    with pytest.raises(ValueError, match="at least 2 classes"):
        weakest_label(np.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"weakest_label must be from 0.5 to 1.0"):
        Threshold(0.4, *LABEL_MEASURES)


def test_a_set_of_labels_has_a_number_of_its_own():
    task = Task("texts", ("a",) * 63, ("accuracy",), {}, multi_label=True)
    decisions = np.random.default_rng(0).random((40, 2, 63)) > 0.5
    decisions[1, 0, :62] = decisions[0, 0, :62]
    numbers = predictions(np.where(decisions, 1.0, -1.0), task)
    assert len(np.unique(numbers)) == len(np.unique(decisions.reshape(80, 63), axis=0)) == 80
    assert named(np.array([[-1.0, -2.0]]), ["a", "b"], True)[0] == [{}]


@pytest.mark.parametrize(("target", "penalty"), [("soft", 0.0), ("hard", 0.0), ("soft", 0.3)])
def test_heads_learn_by_the_binary_cross_entropy_of_each_label(target, penalty):
    logits, full = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    wanted = full.sigmoid() if target == "soft" else (full > 0).float()
    entropy = torch.distributions.Bernoulli(logits=logits).entropy().mean()
    expected = (1 - penalty) * F.binary_cross_entropy_with_logits(logits, wanted) - penalty * entropy
    loss = row_loss(logits, full, partial(head_loss, penalty=penalty, target=target), multi_label=True)
    torch.testing.assert_close(loss, expected)


def test_a_server_gives_the_sigmoid_of_every_label_and_counts_the_same_set_as_agreement(added):
    answer = added.exported.run(TEXTS[:1])[0]
    reply = formats_of(added.exported)["/predict"].reply(added.exported, {"inputs": TEXTS[0]}, [], [answer], 0)
    expected = dict(zip(NAMES, 1 / (1 + np.exp(-answer.logits))))
    assert {scored["label"]: scored["score"] for scored in reply} == pytest.approx(expected)
    assert answer.agrees(answer._replace(label={name: 0.9 for name in reversed(answer.label)}))
    assert not answer.agrees(answer._replace(label={}))
    assert engine_of(added.exported).rule == added.exported.rule


def test_calibrating_its_export_counts_equal_sets_of_labels(added, tmp_path, capsys):
    """With epsilon 1, every row that calibrated agrees: those that do not are among the fresh ones."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = ("--text", tmp_path / "texts.txt", "--epsilon", "1", "--out", tmp_path / "new", "--json")
    assert main(["calibrate", *map(str, (added.out / "exported", *options))]) == 0
    report, exported = json.loads(capsys.readouterr().out), Runtime(tmp_path / "new", threads=1)
    pairs = zip(exported.run(TEXTS), exported.run(TEXTS, rule=Never()), strict=True)
    wrong = sum(not early.agrees(full) for early, full in pairs)
    assert report["exit_counts"][0] and report["end_to_end"] == pytest.approx(1 - wrong / report["rows_fresh"])


def test_classify_prints_the_labels_with_their_probabilities(added, capsys):
    assert main(["classify", str(added.out / "run"), "--text", TEXTS[3]]) == 0
    text = capsys.readouterr().out
    label = added.run.classify(TEXTS[3:4])[0].label
    assert ", ".join(f"{name} {p:.3f}" for name, p in label.items()) in text
    assert main(["classify", str(added.out / "exported"), "--text", TEXTS[3], "--threshold", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rule"]["measure"] == "weakest_label" and answer["layers"] == 3
    assert answer["label"] == pytest.approx(answer["rows"][-1]["label"])


REFUSED = [
    (["classify", "{out}/run", "--text", "x", "--patience", "1"], "compares one prediction of a text"),
    (
        ["classify", "{out}/run", "--text", "x", "--threshold", ".9", "--measure", "entropy"],
        "several labels here, which needs --measure weakest",
    ),
    (
        ["classify", "{one}", "--text", "x", "--threshold", ".9", "--measure", "weakest_label"],
        "one label here, which has no use for --measure weak",
    ),
    (["calibrate", "{out}/run", "--epsilon", ".9", "--task", "{task}"], "gives a text several labels at once"),
    (["evaluate", "{out}/exported", "--task", "{task}"], "gives a text several labels at once"),
    (["export", "{out}/run", "--web", "--out", "{tmp}/w"], "--web: expected a model of one label"),
]


@pytest.fixture(scope="module")
def one_label(checkpoint_folder, task_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    return mini_ee.train("joint", checkpoint_folder, task_folder, folder, epochs=1).folder


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_rules_and_commands_for_other_models_are_refused_in_one_line(
    argv, message, added, one_label, task_folder, tmp_path, capsys
):
    places = {"out": added.out, "one": one_label, "task": task_folder, "tmp": tmp_path}
    assert main([word.format(**places) for word in argv]) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(message, error), error
