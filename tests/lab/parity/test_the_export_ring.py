"""The ring export/ and the lab open each other's folders."""

import shutil
import sys

import numpy as np
import pytest
from small_models import model_of, rows_of
from test_ring_folders import DAMAGE, TEXTS, changed, folder  # noqa: F401  # a fixture

from mini_ee.export.manifest import json_sha256, read_manifest
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.lab import rules as lab_rules
from mini_ee.lab.cli.main import main
from mini_ee.lab.export import runtime as lab
from mini_ee.lab.export.manifest import read_manifest as read_in_lab
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.rules import Patience
from mini_ee.rules import Policy as CorePolicy


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_in_the_lab_too(folder, tmp_path, damage):  # noqa: F811
    change, message = DAMAGE[damage]
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        lab.Runtime(tmp_path / "copy")
    assert "\n" not in str(error.value) and str(tmp_path / "copy") in str(error.value)


# ---- The ring's folder in the lab ----
def test_the_lab_opens_what_the_ring_exports(folder):  # noqa: F811
    """With the same answers, in ONNX Runtime and in torch; its checks of the manifest hold."""
    assert read_in_lab(folder) == read_manifest(folder)
    ring, runtime = Runtime(folder, threads=1).run(TEXTS), lab.Runtime(folder, threads=1)
    in_torch = lab.Runtime(folder, segments=torch_segments(folder))
    for engine in (runtime, in_torch):
        for expected, answer in zip(ring, engine.run(TEXTS)):
            assert (expected.label, expected.exit, expected.layers) == (answer.label, answer.exit, answer.layers)
            np.testing.assert_allclose(answer.logits, expected.logits, atol=1e-4)
    exits = [[reply.exit for reply in engine.run(TEXTS, rule=lab_rules.Patience(1))] for engine in (runtime, in_torch)]
    assert exits[0] == exits[1] == [reply.exit for reply in Runtime(folder, threads=1).run(TEXTS, rule=Patience(1))]


def test_its_costs_are_the_labs(folder):  # noqa: F811
    """FLOPs of layers and heads, of model.onnx and of graphs by segment."""
    runtime, segments = lab.Runtime(folder, threads=1), torch_segments(folder)
    inputs = runtime.encode(TEXTS).batch(slice(None))
    for engine in (runtime.segments(), runtime.segments().by_segment(lab_rules.Patience(1))):
        for k in range(3):
            assert engine.layer_passes(k) == segments.layer_passes(k)
            np.testing.assert_allclose(engine.flops(k, inputs), segments.flops(k, inputs), rtol=1e-9)


def test_calibrate_replaces_its_thresholds(folder, tmp_path, capsys):  # noqa: F811
    """The graph then stops by the new rule of the manifest, without being asked to."""
    (tmp_path / "texts.txt").write_text("\n".join(f"{text} {n}" for n in range(40) for text in TEXTS))
    out = tmp_path / "calibrated"
    command = ["calibrate", str(folder), "--text", str(tmp_path / "texts.txt"), "--epsilon", "0.5", "--out", str(out)]
    assert main(command) == 0, capsys.readouterr().err
    before, runtime = Runtime(folder, threads=1), Runtime(out, threads=1)
    assert runtime.rule != before.rule
    exits = [[answer.exit for answer in engine.run(TEXTS, rule=runtime.rule)] for engine in (before, runtime)]
    assert exits[0] == exits[1] == [answer.exit for answer in runtime.run(TEXTS)]
    assert exits[0] != [answer.exit for answer in before.run(TEXTS)]


def test_calibrate_refuses_its_policy_before_it_reads_texts(tmp_path, capsys):
    export(tmp_path / "policy", model_of("policies"), CorePolicy(), rows_of("policies"), "bert")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    command = ["calibrate", str(tmp_path / "policy"), "--text", str(tmp_path / "texts.txt"), "--epsilon", "0.9"]
    assert main(command) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected the rule threshold, found policy; calibrate it with --guarantee conformal" in line


# ---- The lab's folders in the ring ----
@pytest.mark.parametrize("export", ["runtime", "classifier", "reranker"])
def test_the_ring_runs_the_labs_classifiers_and_regressions(request, export):
    """The fixtures of conftest.py: exports of BERTs with joint exits."""
    runtime = request.getfixturevalue(export)
    ring, texts = Runtime(runtime.folder, threads=1), [(text,) * runtime.num_texts for text in TEXTS]
    assert type(ring) is Runtime
    for expected, answer in zip(runtime.run(texts), ring.run(texts)):
        assert (expected.label, expected.exit) == (pytest.approx(answer.label, abs=1e-5), answer.exit)
        assert expected.layers == answer.layers
        np.testing.assert_allclose(answer.logits, expected.logits, atol=1e-6)


@pytest.mark.parametrize("export", ["decoder", "encoder"])
def test_other_kinds_are_the_labs(request, export, monkeypatch):
    """By an entry point; without the lab, in one line."""
    expected = request.getfixturevalue(export)
    runtime = Runtime(expected.folder, threads=1, **({"max_new_tokens": 8} if export == "decoder" else {}))
    assert type(runtime) is type(expected)
    answers = [engine.run(TEXTS[:1])[0]._replace(milliseconds=0).to_dict() for engine in (runtime, expected)]
    assert answers[0] == answers[1]
    monkeypatch.setattr(sys.modules["mini_ee.export.runtime"], "entry_points", lambda **_: ())
    with pytest.raises(ValueError, match="mini_ee.lab runs this kind of export, and it is not installed"):
        Runtime(expected.folder)


@pytest.mark.parametrize(
    "unit, key", [("prompts", "prompt"), ("rows", "prompt"), ("rows", "encoder"), ("rows", "rule_in_graph")]
)
def test_rows_that_the_ring_does_not_know_are_the_labs(folder, tmp_path, monkeypatch, unit, key):  # noqa: F811
    opened = []
    monkeypatch.setattr(lab, "Runtime", lambda *given, **more: opened.append((given, more)) or "the lab's")
    shutil.copytree(folder, tmp_path / "copy")
    changed(tmp_path / "copy", unit=unit, **{key: {}})
    assert Runtime(tmp_path / "copy", threads=1) == "the lab's"
    assert opened == [((tmp_path / "copy",), {"threads": 1})]


def test_the_checksum_of_json_is_the_labs():
    from mini_ee.lab.data.files import json_sha256 as of_lab

    assert json_sha256({"b": 1, "a": [1.5, "x"]}) == of_lab({"a": [1.5, "x"], "b": 1})
