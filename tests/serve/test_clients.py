"""The clients in lab/export/clients have the labels and layers of the runtime, also with another threshold."""

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from mini_ee import load_run, train
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import toy_task
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.rules import PatienceConfidence, Threshold
from mini_ee.lab.training import holdout

pytestmark = pytest.mark.slow
CLIENTS = Path(__file__).parents[2] / "lab" / "export" / "clients"
LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
HEADERS = "/usr/include/onnxruntime"  # where they are elsewhere, CPLUS_INCLUDE_PATH says so
SENTENCES = 25
ATOL = 1e-5  # of a confidence, printed with six digits


def has_headers():
    """Whether g++ finds ONNX Runtime's headers."""
    command = ["g++", "-E", "-x", "c++", "-", "-I", HEADERS]
    source = "#include <onnxruntime_cxx_api.h>"
    return shutil.which("g++") and not subprocess.run(command, input=source, capture_output=True, text=True).returncode


in_node = pytest.mark.skipif(
    not shutil.which("node") or not (CLIENTS / "node_modules").is_dir(),
    reason="needs node, and lab/export/clients/node_modules, which `npm ci --ignore-scripts` makes there",
)
in_cpp = pytest.mark.skipif(
    LIBRARY is None or not has_headers(),
    reason="needs g++, the library in onnxruntime's wheel, and headers of Debian's libonnxruntime-dev",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder under a rule that lets rows leave at many exits, and a threshold that lets others leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdout, "TEST_ROWS", 30)
        run = train("joint", out=tmp_path_factory.mktemp("clients") / "run", epochs=1, max_train=60)
    (curve,) = read_json(run.folder / "metrics.json")["curves"]
    values, _, layers = zip(*curve["points"])
    threshold, other = (float(np.float32(values[np.searchsorted(layers, mean)])) for mean in (6, 9))
    folder = run.folder.parent / "exported"
    export(run._replace(rule=Threshold(threshold)), folder, web=True)
    return folder, other


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The client in C++, as its README builds it."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "libonnxruntime.so.1").symlink_to(LIBRARY)
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", CLIENTS / "classify.cpp", "-I", HEADERS]
    command += [folder / "libonnxruntime.so.1", f"-Wl,-rpath,{folder}", "-o", folder / "classify"]
    subprocess.run(command, check=True)
    return folder / "classify"


def lines_of(command, lines):
    environment = os.environ | {"NO_COLOR": "1"}
    given = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(list(map(str, command)), input=given, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def sentences():
    return [text for (text,) in toy_task().split("test").texts[:SENTENCES]]


def expected(folder, threshold):
    rule = None if threshold is None else Threshold(threshold)
    answers = Runtime(folder).run(sentences(), batch_size=1, rule=rule)
    assert len({answer.layers for answer in answers}) > 2, "the rows should leave at several exits"
    return answers


@pytest.mark.parametrize("threshold", [False, True], ids=["default", "threshold"])
def test_the_client_in_python_has_the_runtimes_labels_and_layers(exported, threshold):
    folder, other = exported
    answers = expected(folder, other if threshold else None)
    command = [sys.executable, CLIENTS / "classify.py", folder, *(["--threshold", other] if threshold else [])]
    lines = [json.loads(line) for line in lines_of(command, [*sentences(), ""])]
    assert [(line["label"], line["layers"]) for line in lines] == [(answer.label, answer.layers) for answer in answers]
    confidences = [answer.confidence for answer in answers]
    np.testing.assert_allclose([line["confidence"] for line in lines], confidences, rtol=0, atol=ATOL)


def test_the_client_in_python_needs_numpy_onnxruntime_and_tokenizers_only():
    tree = ast.parse((CLIENTS / "classify.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported - sys.stdlib_module_names == {"numpy", "onnxruntime", "tokenizers"}


@pytest.mark.parametrize(
    "options", [["none such"], ["{folder}", "--threshold", "nan"], ["{folder}", "--threshold", ".9x"]]
)
def test_the_client_in_python_refuses_a_missing_folder_and_a_threshold_that_is_no_number(
    exported, options, monkeypatch, capsys
):
    options = [option.format(folder=exported[0]) for option in options]
    monkeypatch.setattr(sys, "argv", ["classify.py", *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(CLIENTS / "classify.py", run_name="__main__")
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "") and options[-1] in printed.err.splitlines()[-1]


@in_node
@pytest.mark.parametrize("given_inputs", [False, True], ids=["default", "fed"])
def test_node_predicts_what_python_predicts(exported, given_inputs):
    folder, other = exported
    answers = expected(folder, other if given_inputs else None)
    options = ["--threshold", other] if given_inputs else []
    lines = [json.loads(line) for line in lines_of(["node", CLIENTS / "classify.mjs", folder, *options], sentences())]
    assert [(line["label"], line["layers"]) for line in lines] == [(answer.label, answer.layers) for answer in answers]
    confidences = [answer.confidence for answer in answers]
    np.testing.assert_allclose([line["confidence"] for line in lines], confidences, rtol=0, atol=ATOL)


@in_node
def test_node_counts_exits_in_a_row_as_the_run_does(exported, tmp_path):
    run = load_run(exported[0].parent / "run")
    export(run._replace(rule=PatienceConfidence(2, 0.6)), tmp_path / "exported", web=True)
    answers = Runtime(tmp_path / "exported").run(sentences(), batch_size=1, rule=PatienceConfidence(2, 0.55))
    command = ["node", CLIENTS / "classify.mjs", tmp_path / "exported", "--threshold", 0.55]
    lines = [json.loads(line) for line in lines_of(command, sentences())]
    assert [(line["label"], line["layers"]) for line in lines] == [(answer.label, answer.layers) for answer in answers]


@in_cpp
@pytest.mark.parametrize("given_inputs", [False, True], ids=["default", "fed"])
def test_cpp_predicts_what_python_predicts(exported, built, given_inputs):
    folder, other = exported
    answers, runtime = expected(folder, other if given_inputs else None), Runtime(folder)
    rows = [" ".join(map(str, ids)) for ids in runtime.encode(sentences()).ids]
    fields = [line.split() for line in lines_of([built, folder, *([repr(other)] if given_inputs else [])], rows)]
    printed = [(runtime.label_names[int(label)], int(layers)) for label, layers, _ in fields]
    assert printed == [(answer.label, answer.layers) for answer in answers]
    confidences = [answer.confidence for answer in answers]
    np.testing.assert_allclose([float(confidence) for *_, confidence in fields], confidences, rtol=0, atol=ATOL)


@in_node
def test_node_refuses_what_it_cannot_answer(exported, tmp_path):
    folder, _ = exported
    shutil.copytree(folder, tmp_path / "copy")
    manifest = read_json(folder / "manifest.json")
    del manifest["files"]["onnx/model_web.onnx"]
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest))
    command = ["node", str(CLIENTS / "classify.mjs"), str(tmp_path / "copy"), "--threshold", ".9"]
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert done.returncode == 2 and "export the run again with --web" in done.stderr
    command[2] = str(tmp_path / "none such")
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert done.returncode == 2 and "no such file" in done.stderr and done.stderr.count("\n") == 1


@in_cpp
def test_cpp_refuses_what_is_no_row_of_tokens(exported, built):
    for line in ("2 word 3", "2 45 -", "2 45 99999999999999999999", "2 -4", ""):
        done = subprocess.run([built, exported[0]], input=f"{line}\n", capture_output=True, text=True)
        assert done.returncode == 1 and "expected token ids" in done.stderr
    done = subprocess.run([built, exported[0]], input="2 99999999 3\n", capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout


@in_cpp
@pytest.mark.parametrize("threshold", ["abc", "", "NaN", ".9x"])
def test_cpp_refuses_a_threshold_that_is_no_number(exported, built, threshold):
    done = subprocess.run([built, exported[0], threshold], input="2 3\n", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"expected a threshold, found: {threshold}\n")


@in_node
@pytest.mark.parametrize("threshold", ["abc", "", "NaN"])
def test_a_threshold_that_is_no_number_is_one_line(exported, threshold):
    command = ["node", "classify.mjs", str(exported[0]), f"--threshold={threshold}"]
    process = subprocess.run(command, cwd=CLIENTS, input="fine", capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (2, "--threshold: expected a number\n")


@pytest.mark.parametrize("name", ["classify.py", "classify.mjs", "classify.cpp"])
def test_a_client_is_read_in_a_minute(name):
    assert len((CLIENTS / name).read_text().splitlines()) < 60
