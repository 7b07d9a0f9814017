"""OpenVINO as the engine of exports. ONNX Runtime is the oracle: in f32 labels and exits are equal on every row."""

import json
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import ENCODED, answer, refused
from http_server import SENTENCES

from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.export import writer
from mini_ee.lab.export.card import card
from mini_ee.lab.export.engine import Engine, calibrated_engine
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Patience, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.serve import engine_of
from mini_ee.serve.worker import Worker

needs_openvino = pytest.mark.skipif(not find_spec("openvino"), reason="needs pip install 'mini-ee[openvino]'")
ENGINES = 1e-5
"""Logits and embeddings in f32 against ONNX Runtime; measured maximum 5e-7."""

TEXTS = [*SENTENCES, *ENCODED]
F32, BF16 = Engine("openvino", "f32"), Engine("openvino", "bf16")
GUARANTEE = {"epsilon": 0.9, "delta": 0.1, "measure": "max_probability"}


def assert_equal_answers(answers, expected, key="logits"):
    assert [(one.exit, one.layers) for one in answers] == [(one.exit, one.layers) for one in expected]
    np.testing.assert_allclose(
        np.stack([getattr(one, key) for one in answers]),
        np.stack([getattr(one, key) for one in expected]),
        atol=ENGINES,
    )


@pytest.fixture(scope="module")
def served(runtime):
    if not find_spec("openvino"):
        pytest.skip("needs pip install 'mini-ee[openvino]'")
    return F32.open(runtime.folder, threads=1)


@pytest.fixture
def export(runtime, tmp_path):
    """A copy, whose guarantee comes from its run."""
    shutil.copytree(runtime.folder, folder := tmp_path / "exported")
    write_json(folder / "manifest.json", read_json(folder / "manifest.json", signed="rule") | {"guarantee": GUARANTEE})
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 4) + "\n")
    return folder


# ---- The same answers ----
RULES = {
    "own": None,
    "other thresholds": Threshold((0.7, 0.5, 0.8, 0.0)),
    "never": Never(),
    "fixed": Fixed(1),
    "by segment": Patience(1),
}


@needs_openvino
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_labels_and_exits_equal_those_of_onnx_runtime(runtime, served, rule):
    """The weights are beside these graphs, in onnx/model.onnx_data."""
    answers, expected = served.run(TEXTS, 4, rule=rule), runtime.run(TEXTS, 4, rule=rule)
    assert_equal_answers(answers, expected)
    assert [one.label for one in answers] == [one.label for one in expected]


@needs_openvino
def test_rows_of_a_batch_have_thresholds_of_their_own(runtime, served):
    thresholds = np.random.default_rng(0).uniform(0.3, 1, (len(TEXTS), 3))
    thresholds[0] = np.nan  # that of the rule
    answers = served.run(TEXTS, thresholds=thresholds)
    assert_equal_answers(answers, runtime.run(TEXTS, thresholds=thresholds))
    assert len({one.exit for one in answers}) > 2


@needs_openvino
def test_every_exit_and_the_whole_model_equal_those_of_onnx_runtime(runtime, served):
    """In model.onnx and in the graphs by segment."""
    inputs = runtime.encode(TEXTS).batch(slice(None))
    expected = read_every_exit(runtime.segments(), inputs)[0]
    for segments in (served.segments(), served.segments().by_segment(Never())):
        np.testing.assert_allclose(read_every_exit(segments, inputs)[0], expected, atol=ENGINES)
    logits = served.whole_model().run_batch(Never(), inputs).logits
    np.testing.assert_allclose(logits, expected[:, -1], atol=ENGINES)


@needs_openvino
def test_embeddings_and_numbers_equal_those_of_onnx_runtime(encoder, reranker):
    opened = F32.open(encoder.folder, threads=1)
    assert_equal_answers(opened.run(ENCODED, 3), encoder.run(ENCODED, 3), "embedding")
    pairs = [(text, other) for text, other in zip(TEXTS, TEXTS[1:])]
    assert_equal_answers(F32.open(reranker.folder, threads=1).run(pairs, 3), reranker.run(pairs, 3))


@needs_openvino
def test_the_server_forms_new_batches_after_each_exit(runtime, served):
    with Worker(engine_of(served)) as worker:
        futures = [worker.submit(text) for text in TEXTS]
        assert_equal_answers([future.result() for future in futures], runtime.run(TEXTS, 1))
    assert worker.engine.queues == ("1", "2", "4", "6")


@needs_openvino
def test_threads_and_copies_of_other_processes_run_at_the_same_time(runtime, served):
    copies = (served, pickle.loads(pickle.dumps(served)))
    assert copies[1].segments() is not served.segments() and copies[1].engine == "openvino"
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda at: copies[at % 2].run(TEXTS[at % 3 :]), range(12)))
    for at, answers_from in enumerate(answers):
        assert_equal_answers(answers_from, runtime.run(TEXTS[at % 3 :]))


# ---- Options ----
@needs_openvino
@pytest.mark.parametrize(("engine", "threads"), [(F32, 1), (BF16, 2)], ids=str)
def test_threads_and_precision_reach_openvino(monkeypatch, runtime, engine, threads):
    from mini_ee.lab.export import openvino_engine

    given, core = [], openvino_engine._core()

    class Core:
        def __getattr__(self, name):
            return getattr(core, name)

        def compile_model(self, model, device, settings):
            given.append((device, settings["INFERENCE_NUM_THREADS"], settings["INFERENCE_PRECISION_HINT"]))
            return core.compile_model(model, device, settings)

    monkeypatch.setattr(openvino_engine, "_core", Core)
    engine.open(runtime.folder, threads=threads).segments().by_segment(Never())
    assert given == [("CPU", threads, engine.precision)] * 5


@needs_openvino
@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_command_answers_as_in_onnx_runtime(capsys, tmp_path, export, command):
    """Labels and exits; and it says that the guarantee is not for this engine."""
    lines = {}
    for name in ("onnxruntime", "openvino"):
        options = ["--engine", name, "--threads", 1]
        out, texts = tmp_path / name, export.parent / "texts.txt"
        words = [export, texts] if command == "run" else [export, "--in", texts, "--no-projection"]
        assert main([command, *map(str, [*words, "--out", out, *options]), "--json"]) == 0
        printed = capsys.readouterr()
        summary = json.loads(printed.out)
        assert (summary["engine"], summary["precision"]) == (name, "f32" if name == "openvino" else None)
        assert printed.err.count("guarantee was calibrated with --engine onnxruntime") == (name == "openvino")
        rows = (out if command == "run" else out / "texts.txt.part-00000.jsonl").read_text().splitlines()
        lines[name] = [(row["label"], row["exit"]) for row in map(json.loads, rows)]
    assert lines["openvino"] == lines["onnxruntime"] and len(set(lines["openvino"])) > 3


@needs_openvino
def test_a_job_goes_on_in_its_own_engine_alone(capsys, tmp_path, export):
    words = ("batch", export, "--in", export.parent / "texts.txt", "--out", tmp_path / "out", "--no-projection")
    assert main([*map(str, words), "--processes", "1", "--engine", "openvino"]) == 0
    capsys.readouterr()
    for options, line in (
        (("--engine", "openvino", "--precision", "bf16"), "expected precision f32 as in job.json, found bf16"),
        ((), "expected engine openvino as in job.json, found None"),
    ):
        assert main([*map(str, words), *options]) == 2
        assert line in capsys.readouterr().err


@needs_openvino
def test_evaluate_measures_the_engine(capsys, classifier, task_folder):
    """Recorded exits, and the full model that the time is compared with, are of OpenVINO too."""
    words = ("evaluate", classifier.folder, "--task", task_folder, "--max-rows", 40)
    measured, expected = answer(capsys, *words, "--engine", "openvino"), answer(capsys, *words)
    assert (measured["engine"], measured["precision"], expected["precision"]) == ("openvino", "f32", None)
    assert measured["versions"].keys() - expected["versions"].keys() <= {"openvino"}
    for key in ("accuracy", "mean_layers", "per_exit_accuracy", "exit_counts"):
        assert measured[key] == expected[key]


# ---- The guarantee ----
@needs_openvino
def test_calibration_is_of_the_engine_and_the_precision_that_serve(capsys, export):
    options = ("--engine", "openvino", "--precision", "bf16")
    words = ("calibrate", export, "--text", export.parent / "texts.txt", "--epsilon", ".5", "--delta", ".3")
    calibrated = answer(capsys, *words, *options)
    assert (calibrated["engine"], calibrated["precision"]) == ("openvino", "bf16")
    config = Runtime(export).config
    assert calibrated_engine(config) == BF16 and config["guarantee"]["epsilon"] == 0.5
    page = (export / "README.md").read_text()
    assert page == card(config) and "mini-ee serve DIR --engine openvino --precision bf16" in page
    assert "that gave it with `--engine openvino --precision bf16`" in page
    capsys.readouterr()
    texts, out = str(export.parent / "texts.txt"), str(export.parent / "answers")
    for more, says in (((), True), (options[:2], True), (options, False)):
        assert main(["run", str(export), texts, "--out", out, *more]) == 0
        assert ("calibrated with --engine openvino --precision bf16" in capsys.readouterr().err) == says
    inputs = Runtime(export).encode(TEXTS).batch(slice(None))
    logits = [read_every_exit(engine.open(export, threads=1).segments(), inputs)[0] for engine in (F32, BF16)]
    assert 1e-6 < np.abs(logits[0] - logits[1]).max() < 0.1  # it computes in bf16


@pytest.mark.parametrize(
    ("calibration", "engine", "calibrated"),
    [
        (None, Engine(), None),
        (None, F32, "--engine onnxruntime"),
        ({"engine": "openvino", "precision": "f32"}, F32, None),
        ({"engine": "openvino", "precision": "f32"}, BF16, "--engine openvino --precision f32"),
        ({"engine": "openvino", "precision": "bf16"}, Engine(), "--engine openvino --precision bf16"),
        ({"provider": "CPUExecutionProvider"}, Engine(), None),  # of an earlier version
    ],
    ids=["none", "none in f32", "f32", "f32 in bf16", "bf16 in ONNX Runtime", "earlier"],
)
def test_a_guarantee_of_another_engine_is_not_claimed(runtime, calibration, engine, calibrated):
    config = runtime.config | {"guarantee": GUARANTEE} | ({"calibration": calibration} if calibration else {})
    line = engine.without_guarantee(runtime.folder, config)
    assert line is None if calibrated is None else f"was calibrated with {calibrated}, and none holds" in line
    assert engine.without_guarantee(runtime.folder, config | {"guarantee": None}) is None


@needs_openvino
def test_the_server_does_not_count_agreement_against_a_guarantee_of_another_engine(capsys, export):
    assert main(["serve", str(export), "--engine", "openvino", "--shadow", ".5", "--tighten"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "none holds with --engine openvino" in lines[0] and "--tighten needs the agreement to keep" in lines[1]


# ---- Refusals ----
def test_without_the_extra_one_line_names_it(capsys, monkeypatch, runtime):
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "mini_ee.lab.export.openvino_engine", raising=False)
    line = refused(capsys, "run", runtime.folder, "--engine", "openvino", status=2)
    assert line == "mini-ee run: --engine openvino needs its library: pip install 'mini-ee[openvino]'"


REFUSED = [
    ("run {rows} --precision bf16", "--precision is for --engine openvino, found --engine onnxruntime"),
    ("run {rows} --engine torch --precision f32", "--precision is for --engine openvino, found --engine torch"),
    ("run {rows} --engine openvino --device cuda", "--device cuda: expected cpu for --engine openvino"),
    ("batch {rows} --in x.txt --out y --engine jax", "invalid choice: 'jax'"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_what_does_not_fit_is_refused(capsys, monkeypatch, tmp_path, runtime, words, line):
    monkeypatch.chdir(tmp_path)
    assert line in refused(capsys, *words.format(rows=runtime.folder).split(), status=2)


@needs_openvino
def test_kinds_that_it_does_not_run_are_refused_by_name(capsys, decoder, export):
    manifest = read_json(export / "manifest.json", signed="rule")
    manifest["graphs"]["whole"] = manifest["graphs"]["model"]  # as HashEE's, whose tokens exit within a row
    write_json(export / "manifest.json", manifest)
    for folder, kind in ((decoder.folder, "a decoder"), (export, "tokens that exit within a row")):
        line = refused(capsys, "run", folder, "--engine", "openvino", status=2)
        assert f"expected a classifier or a sentence encoder for --engine openvino, found {kind}" in line


@needs_openvino
def test_the_patience_of_an_export_stays_its_own(checkpoint_folder, random_model, runtime, tmp_path):
    """OpenVINO has made a constant of it. Another value is an error, and never ignored."""
    tokenizer = Tokenizer.from_folder(checkpoint_folder, 30)
    run = Run(Path("run"), runtime.config | {"settings": {}}, random_model((1, 2, 4, 6)), tokenizer, Patience(1))
    writer.export(run, folder := tmp_path / "patience", [(text,) for text in TEXTS])
    served = F32.open(folder, threads=1)
    assert_equal_answers(served.run(TEXTS), Runtime(folder, threads=1).run(TEXTS))
    with pytest.raises(ValueError, match="expected patience 1, which OpenVINO keeps, found 2; leave out --engine"):
        served.run(TEXTS, rule=Patience(2))


def test_an_engine_runs_exports_alone(capsys, classifier, task_folder):
    run = classifier.folder.parent / "run"
    line = refused(capsys, "evaluate", run, "--task", task_folder, "--engine", "openvino", status=2)
    assert line.endswith(f"--engine openvino: expected an export, found a run, {run}; export it")
