"""Folders on disk: damage is one line. What the lab opens of these: tests/lab/parity/test_the_export_ring.py."""

import json
import shutil

import pytest
from small_models import median_threshold, model_of, rows_of

from mini_ee.export.manifest import MODEL, WEIGHTS, write_json
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.rules import Patience

TEXTS = ["A warm and funny film.", "It is dull from the first minute to the last.", "Bad."]


@pytest.fixture(scope="module", params=["joint", "lora"])
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("ring") / "exported"
    rule = median_threshold(request.param, "max_probability")
    export(out, model_of(request.param), rule, rows_of(request.param), "bert", segments=True)
    return out


def changed(folder, **keys):
    """The folder with other values in its manifest, signed anew."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    write_json(folder / "manifest.json", manifest | keys)


def appended(path):
    path.write_bytes(path.read_bytes() + b" ")


DAMAGE = {
    "no manifest": (lambda out: (out / "manifest.json").unlink(), "no manifest.json here"),
    "no folder": (shutil.rmtree, "no manifest.json here"),
    "no JSON": (lambda out: (out / "manifest.json").write_text("{"), "expected the manifest of an export"),
    "no files": (lambda out: changed(out, files=[]), "expected the manifest of an export"),
    "foreign": (lambda out: (out / "manifest.json").write_text('{"name": 1}'), "expected the manifest of an export"),
    "edited": (
        lambda out: (out / "manifest.json").write_text(
            (out / "manifest.json").read_text().replace("joint", "x").replace("lora-exits", "x")
        ),
        "damaged or edited",
    ),
    "newer": (lambda out: changed(out, format_version=6), "found 6; install a newer mini_ee"),
    "older": (lambda out: changed(out, format_version=4), "found 4; export the run again"),
    "no graph": (lambda out: (out / MODEL).unlink(), "model.onnx: no such file"),
    "another graph": (lambda out: appended(out / MODEL), "model.onnx: expected the exported file"),
    "other weights": (lambda out: appended(out / WEIGHTS), "model.onnx_data: expected the exported file"),
    "another tokenizer": (lambda out: appended(out / "tokenizer.json"), "tokenizer.json: expected the exported file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line(folder, tmp_path, damage):
    change, message = DAMAGE[damage]
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        Runtime(tmp_path / "copy")
    assert "\n" not in str(error.value) and str(tmp_path / "copy") in str(error.value)


@pytest.mark.parametrize(
    "texts, message",
    [("film", "expected a list of texts"), ([""], "row 0"), (["a", ("a", "b")], "row 1"), ([3], "row 0")],
)
def test_texts_that_are_none(folder, texts, message):
    with pytest.raises(ValueError, match=message):
        Runtime(folder, threads=1).run(texts)


def test_a_rule_that_the_folder_cannot_run(tmp_path):
    rule = median_threshold("joint", "max_probability")
    export(tmp_path / "out", model_of("joint"), rule, rows_of("joint"), "bert")
    with pytest.raises(ValueError, match="model.onnx has the rule Threshold.*export with segments"):
        Runtime(tmp_path / "out", threads=1).run(TEXTS, rule=Patience(1))
