"""`mini-ee calibrate EXPORTED` changes where the exported graph itself stops, and the model card says so."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from http_server import SENTENCES, THINGS, WORDS

from mini_ee.lab.cli.main import main
from mini_ee.lab.data.lines import row_of_line, row_of_object
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.export import calibrated, verification, writer
from mini_ee.lab.export.card import card, guarantee_line
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.run_folder import Run

TEXTS = [
    f"{SENTENCES[at % len(SENTENCES)]} {word} {thing}"
    for at, (word, thing) in enumerate((word, thing) for word in WORDS for thing in THINGS * 4)
]
OPTIONS = ("--epsilon", ".6", "--delta", ".2")


@pytest.fixture(scope="module")
def run(checkpoint_folder, random_model):
    """An untrained model whose exits have the head of the last one, so that they agree with it now and then."""
    model = copy.deepcopy(random_model((1, 2, 4, 6)))
    with torch.no_grad():
        for head in model.heads[:-1]:
            head.load_state_dict(model.heads[-1].state_dict())
        for name, parameter in model.backbone.named_parameters():
            parameter.mul_(1.0 if ".word." in name else 0.3)
    task = {"name": "words", "metrics": ["accuracy"], "texts": 1, "label_names": ["bad", "fair", "good"]}
    config = {"method": "joint", "unit": "rows", "num_labels": 3, "settings": {}, "task": task}
    return Run(Path("run"), config, model, Tokenizer.from_folder(checkpoint_folder, 30), Threshold(0.875))


@pytest.fixture(scope="module")
def runtime(tmp_path_factory, run):
    writer.export(run, folder := tmp_path_factory.mktemp("export") / "exported", [(text,) for text in TEXTS[:8]])
    return Runtime(folder, threads=1)


@pytest.fixture
def export(runtime, tmp_path):
    shutil.copytree(runtime.folder, tmp_path / "exported")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path / "exported"


def calibrate(folder, *options):
    return main(["calibrate", str(folder), *map(str, options)])


def test_the_graph_stops_by_the_new_thresholds_without_being_fed_any(export, runtime, capsys):
    before = runtime.model_id
    assert calibrate(export, "--text", export.parent / "texts.txt", *OPTIONS, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    now = Runtime(export, threads=1)
    thresholds = [float(tau) for tau in answer["thresholds"]]
    assert answer["model"] == now.model_id != before
    assert now.config["rule"]["threshold"][:3] == answer["thresholds"] != [0.875] * 3
    assert now.config["guarantee"] == {"epsilon": 0.6, "delta": 0.2, "measure": "max_probability"}
    assert now.config["exit_counts"] == answer["exit_counts"] and sum(answer["exit_counts"]) == len(TEXTS) // 2
    inputs = now.encode([(text,) for text in TEXTS[:40]]).batch(slice(None))
    recorded = record(now.segments(), now.encode([(text,) for text in TEXTS[:40]]), 40)
    confident = recorded.confidence("max_probability") >= np.array(thresholds, np.float32)
    first = np.where(confident.any(axis=1), confident.argmax(axis=1), 3)
    session = onnxruntime.InferenceSession(export / "onnx/model.onnx", providers=["CPUExecutionProvider"])
    feeds = {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    (layers,) = session.run(["layers"], feeds)
    assert len(set(layers)) > 1
    np.testing.assert_array_equal(layers, np.array(now.exits)[first])
    page = (export / "README.md").read_text()
    assert page == card(now.config) and "at least 60.0% of the texts" in page and "texts.txt" in page


def test_out_leaves_the_old_export_as_it_is(export, runtime):
    assert calibrate(export, "--text", export.parent / "texts.txt", *OPTIONS, "--out", export.parent / "new") == 0
    assert Runtime(export).model_id == runtime.model_id != Runtime(export.parent / "new").model_id


def test_a_call_that_fails_leaves_the_export_whole(export, runtime, monkeypatch):
    monkeypatch.setattr(calibrated, "card", lambda manifest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(export, "--text", export.parent / "texts.txt", *OPTIONS)
    assert Runtime(export).model_id == runtime.model_id
    assert sorted(path.name for path in export.parent.iterdir()) == ["exported", "texts.txt"]


def test_it_needs_no_torch(export):
    code = (
        "import sys; sys.modules['torch'] = None; from mini_ee.lab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["calibrate", str(export), "--text", str(export.parent / "texts.txt"), *OPTIONS]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and "its model id is" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "guarantee, words",
    [
        (None, "None: `mini-ee calibrate"),
        ({"guarantee": "conformal", "epsilon": 0.97}, "with probability 0.97 or more"),
        ({"epsilon": 0.95, "delta": 0.05}, "At each exit, at least 95.0%"),
        ({"cosine": 0.9, "epsilon": 0.95, "delta": 0.05}, "have a cosine of 0.9 to the full embedding"),
        ({"max_loss": 0.01, "confidence": 0.95, "of": "accuracy", "rows": 900}, "loses at most 0.01 of accuracy"),
    ],
)
def test_the_card_has_each_guarantee_in_words(runtime, guarantee, words):
    assert words in guarantee_line(runtime.config | {"guarantee": guarantee})


def test_the_card_advises_only_a_calibration_that_is_possible(runtime, decoder):
    none = {"guarantee": None}
    graphs = copy.deepcopy(runtime.config["graphs"])
    del graphs["model"]["inputs"]["threshold"]
    reads_prompts = decoder.config | {"begins_with": [0]}
    for config in (reads_prompts, runtime.config | {"graphs": graphs}):
        assert "gives its run one; then export the run again" in guarantee_line(config | none)
    assert "calibrate DIR --text FILE --epsilon .95 --delta .05` gives one" in guarantee_line(decoder.config | none)
    policy = decoder.config | {"rule": {"name": "policy", "least_logit": 0.0}}
    assert "--epsilon .95 --guarantee conformal` gives one" in guarantee_line(policy | none)
    for other in ({"exits": [6]}, {"task": runtime.config["task"] | {"label_names": []}}):
        assert guarantee_line(runtime.config | none | other) == "None."


def test_the_commands_of_a_card_have_as_many_texts_as_its_rows(runtime):
    for count in (1, 2):
        text = card(runtime.config | {"task": runtime.config["task"] | {"texts": count}})
        (body,) = re.findall("--json '(.*)'", text)
        ((printed,),) = [re.findall(r"^(?:echo \"|printf ')(.*?)(?:\\n)?[\"'] \| mini-ee run", text, re.M)]
        assert len(row_of_object(json.loads(body), count)) == len(
            row_of_line(printed.replace(r"\t", "\t").encode(), count)
        )


def test_onnx_is_missed_before_any_text_is_read(export, monkeypatch, capsys):
    monkeypatch.setattr(calibrated, "find_spec", lambda name: None)
    assert calibrate(export, "--text", "none.txt", *OPTIONS) == 2
    assert "needs onnx: pip install onnx" in capsys.readouterr().err


def test_every_export_has_a_card_that_may_be_edited(export, decoder):
    page = (export / "README.md").read_text()
    assert "| exit after layer |" in page and "`threshold`: threshold 0.875" in page and "opset 23" in page
    assert "/generate" in (decoder.folder / "README.md").read_text()
    (export / "README.md").write_text("ours")
    assert Runtime(export)


def test_an_export_in_int8_warns_if_too_few_predictions_are_those_in_float32(run, tmp_path, monkeypatch, caplog):
    agreement = writer.export(run, tmp_path / "one", [("the film",)], "int8")["verified"]["prediction_agreement"]
    assert agreement >= verification.ROUNDED_AGREEMENT["int8"] and not caplog.text
    monkeypatch.setitem(verification.ROUNDED_AGREEMENT, "int8", 1.01)
    writer.export(run, tmp_path / "two", [("the film",)], "int8")
    assert "100.0% of the predictions for 1 texts in int8 are those in float32, fewer than 101%" in caplog.text
