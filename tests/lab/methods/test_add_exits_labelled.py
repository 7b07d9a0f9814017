"""`mini-ee add-exits --max-loss`: labels choose the thresholds, and the loss of accuracy is guaranteed and counted."""

import csv
import io
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
from method_cases import TEXTS, few_epochs_and_no_picture  # noqa: F401

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.text_files import read_rows
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.export import add_exits as add_exits_module
from mini_ee.lab.export.add_exits import line_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Never
from mini_ee.lab.training.holdout import split_rows


@pytest.fixture(scope="module")
def labels(classifier_folder, tmp_path_factory):
    """What the model predicts, but for every seventh text: the model's accuracy is six sevenths."""
    backbone = load_backbone(classifier_folder)
    model = FrozenClassifier(backbone.without_heads(), (3,), 2, backbone.poolings[0])
    inputs = Tokenizer.from_folder(classifier_folder, 30).encode([(text,) for text in TEXTS]).batch(slice(None))
    predictions = early_exit(model.segments(), Never(), inputs).logits.argmax(1)
    return [("bad", "good")[prediction ^ (number % 7 == 0)] for number, prediction in enumerate(predictions)]


@pytest.fixture(scope="module")
def added(classifier_folder, tmp_path_factory, labels):
    out = tmp_path_factory.mktemp("labelled") / "fast"
    with open(out.parent / "in.csv", "w", newline="") as file:
        csv.writer(file).writerows([("review", "grade"), *zip(TEXTS, labels), ("", "good")])
    argv = ["add-exits", classifier_folder, "--text", out.parent / "in.csv", "--max-loss", ".1", "--out", out]
    with redirect_stdout(io.StringIO()) as printed:
        assert main([*map(str, argv), "--text-column", "review", "--label-column", "grade"]) == 0
    assert f"1 of {len(TEXTS) + 1} rows are left out: their text is empty." in printed.getvalue()
    return SimpleNamespace(out=out, summary=read_json(out / "summary.json"), exported=Runtime(out / "exported"))


def test_accuracy_and_its_loss_are_counted_on_the_labels_of_texts_that_chose_nothing(added, labels):
    numbers = tuple(("bad", "good").index(label) for label in labels)
    task = add_exits_module._task(("bad", "good"), tuple((text,) for text in TEXTS), False, numbers)
    test = split_rows(task, 0, int(0.6 * len(TEXTS))).test
    full = early_exit(added.exported.segments(), Never(), added.exported.encode(test.texts).batch(slice(None)))
    predictions = np.array([("bad", "good").index(answer.label) for answer in added.exported.run(test.texts)])
    summary, near = added.summary, 1.5 / len(test)
    assert summary["full_accuracy"] == pytest.approx(np.mean(full.logits.argmax(1) == test.labels), abs=near)
    assert summary["accuracy"] == pytest.approx(np.mean(predictions == test.labels), abs=near)
    assert summary["agreement"] == pytest.approx(np.mean(predictions == full.logits.argmax(1)), abs=near)
    assert 0.8 < summary["full_accuracy"] < 0.9 and summary["layers_saved"] > 0


def test_the_guarantee_is_of_accuracy_and_said_in_the_line(added):
    summary = added.summary
    assert summary["guarantee"]["of"] == "accuracy" and summary["guarantee"]["max_loss"] == 0.1
    assert summary["required_agreement"] is None and summary["max_loss"] == 0.1
    line = line_of(summary)
    assert f"Its accuracy is {summary['accuracy']:.1%}, that of the original {summary['full_accuracy']:.1%}" in line
    assert "at most a loss of 10.0% with 95% confidence" in line
    assert line in (added.out / "README.md").read_text()
    tested = read_json(added.out / "run" / "metrics.json")["tested"]
    assert all(0 <= point["accuracy"] <= 1 for point in tested["curve"])
    assert tested["full_accuracy"] == pytest.approx(summary["full_accuracy"], abs=0.01)


def test_heads_learn_from_the_model_whatever_the_labels_of_their_texts_are(
    added, classifier_folder, labels, tmp_path, monkeypatch
):
    """The labels of the texts that train are turned around; the others stay."""
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
    order = split_rows(
        add_exits_module._task(("a", "b"), tuple((t,) for t in TEXTS), False, tuple(range(len(TEXTS)))),
        0,
        int(0.6 * len(TEXTS)),
    ).train.labels
    turned = list(labels)
    for number in order:
        turned[number] = "good" if labels[number] == "bad" else "bad"
    run = mini_ee.add_exits(classifier_folder, TEXTS, tmp_path / "fast", labels=turned, max_loss=0.1)
    assert (run.folder / "model.safetensors").read_bytes() == (added.out / "run" / "model.safetensors").read_bytes()
    assert run.rule.to_dict() == added.summary["rule"]


def test_a_text_with_several_labels_counts_with_each_of_them(classifier_folder, labels, tmp_path, monkeypatch):
    """Every line is there twice, with both labels: whatever is predicted, half of the lines are right."""
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", -9.0)
    monkeypatch.setattr(add_exits_module, "MOST_TRAINED", 1)
    turned = ["good" if label == "bad" else "bad" for label in labels]
    lines, twice = [], labels + turned
    mini_ee.add_exits(classifier_folder, TEXTS * 2, tmp_path / "fast", labels=twice, max_loss=0.3, say=lines.append)
    summary, task = read_json(tmp_path / "fast" / "summary.json"), ("bad", "good")
    numbers = tuple(map(task.index, twice))
    test = split_rows(
        add_exits_module._task(task, tuple((t,) for t in TEXTS * 2), False, numbers), 0, int(0.6 * len(twice))
    ).test
    label_of = {text: label for text, label in zip(TEXTS, labels)}
    predicted = np.array([task.index(label_of[text]) ^ (TEXTS.index(text) % 7 == 0) for (text,) in test.texts])
    accuracy = summary["full_accuracy"]
    assert accuracy == pytest.approx(np.mean(predicted == test.labels)) and accuracy < 0.6
    most = np.bincount(test.labels).max() / len(test)
    assert (summary["full_accuracy"] <= most) == any("no better than a constant" in line for line in lines)


def test_a_loss_that_passed_no_test_has_an_upper_bound(added):
    summary = added.summary | {"guarantee": None}
    assert f"upper 95% confidence bound of the loss {summary['loss_bound']:.1%}; a loss of 10.0% is" in line_of(summary)
    assert summary["full_accuracy"] - summary["accuracy"] < summary["loss_bound"] < 0.2


def test_if_it_does_not_pay_the_line_is_of_accuracy(added):
    summary = added.summary | {"pays": False}
    assert "thresholds that lose at most 10.0% of accuracy save at most" in line_of(summary)
    assert "no thresholds that lose at most 10.0% of accuracy save time" in line_of(summary | {"curve": []})


def test_labels_are_read_by_name_or_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "label": 1.0}\n{"text": "two", "label": "Good"}\n')
    rows, _ = read_rows([tmp_path / "a.jsonl"], labelled=True)
    assert [(row.texts, row.label) for row in rows] == [(("one",), "1"), (("two",), "Good")]
    (tmp_path / "b.csv").write_text("text,label\none,\n")
    with pytest.raises(ValueError, match="b.csv:2: expected a label in label, found"):
        read_rows([tmp_path / "b.csv"], labelled=True)


REFUSED = [
    ({"max_loss": 0.1, "agreement": 0.9}, "give one of them"),
    ({"max_loss": 0.1, "labels": None}, "expected both --max-loss and texts with labels .* found none"),
    ({}, "expected both --max-loss and texts with labels .* found labels alone"),
    ({"max_loss": 0.1, "labels": ["good"]}, "one of the model's labels bad, good, or its number, found 1 labels for"),
    ({"max_loss": 0.1, "labels": ["fine"] * len(TEXTS)}, "one of the model's labels bad, good, .* found 'fine'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(classifier_folder, tmp_path, options, message):
    with pytest.raises(WrongArguments, match=message):
        mini_ee.add_exits(classifier_folder, TEXTS, tmp_path / "fast", **{"labels": [1] * len(TEXTS)} | options)


def test_lines_without_labels_and_models_without_classes_are_refused_in_one_line(classifier_folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    argv = ["add-exits", str(classifier_folder), "--text", str(tmp_path / "in.txt"), "--out", str(tmp_path / "fast")]
    assert main([*argv, "--max-loss", ".1"]) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "in.txt:1: expected a table with columns (.tsv, .csv" in error
    assert main([*argv, "--label-column", "grade"]) == 2
    assert "--label-column is for --max-loss, which alone reads labels" in capsys.readouterr().err
    for names, several in (((), False), (("a", "b"), True)):
        with pytest.raises(WrongArguments, match="--max-loss is for a model that gives a text one class"):
            add_exits_module._numbers([1], names, several, add_exits_module.AddOptions(max_loss=0.1), 1)
