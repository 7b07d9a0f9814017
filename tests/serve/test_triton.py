"""A repository for NVIDIA Triton: what its files say, and what a server says that loads them.

The server runs where MINI_EE_TRITON names an environment with it, as serve/README.md makes one. The oracle is
`Runtime.run` at batch 1. The onnxruntime backend, which the server's build lacks, is played by a few lines below.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

import mini_ee.lab.export
from mini_ee.lab.cli.main import main, parser
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.export.calibrated import write_calibrated
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import FixedExit, Rule, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.serve import Refused, triton

TEXTS = [f"the {thing} was {'very ' * (at % 7)}{word}" for at, thing in enumerate(("film", "meal", "book", "song"))
         for word in ("good", "great", "bad", "awful", "dull")]  # fmt: skip
PROMPTS = ["the film was", "a meal", "book and song and room", "the"]


def run_of(model, tokenizer, rule, label_names=("bad", "fair", "good")):
    task = {"name": "words", "metrics": ["accuracy"], "texts": 1, "label_names": list(label_names)}
    config = {"method": "joint", "unit": "rows", "num_labels": len(label_names) or 1, "settings": {}, "task": task}
    return Run(Path("run"), config, model, Tokenizer.from_folder(tokenizer, 30), rule)


@pytest.fixture(scope="module")
def repository(tmp_path_factory, random_model, checkpoint_folder):
    """Of rows that exit at different exits, some before the first layer."""
    folder = tmp_path_factory.mktemp("triton") / "repository"
    run = run_of(random_model((0, 2, 4, 6)), checkpoint_folder, Threshold(0.6))
    triton.write_repository(run, folder, texts=[(text,) for text in TEXTS])
    return folder


@pytest.fixture(scope="module")
def writer_repository(tmp_path_factory, decoder_checkpoint):
    """Of a decoder, by the command line."""
    folder = tmp_path_factory.mktemp("triton") / "repository"
    assert main(["export", str(decoder_checkpoint), "--triton", str(folder)]) == 0
    return folder


# ---- The files ----
ENUMS = {
    "DataType": {"TYPE_UINT32": 4, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_FP64": 12, "TYPE_STRING": 13},
    "Kind": {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2},
}
TENSOR = {"name": "string", "data_type": "DataType", "dims": "*int64", "reshape": "Reshape"}
MESSAGES = {
    "ModelConfig": {
        "backend": "string",
        "max_batch_size": "int32",
        "default_model_filename": "string",
        "input": "*Input",
        "output": "*Output",
        "instance_group": "*InstanceGroup",
        "dynamic_batching": "DynamicBatching",
    },
    "Input": TENSOR | {"optional": "bool"},
    "Output": TENSOR,
    "Reshape": {"shape": "*int64"},
    "InstanceGroup": {"kind": "Kind", "count": "int32"},
    "DynamicBatching": {},
}
"""What of Triton's model_config.proto is used here; whatever else a file says is refused."""

NUMPY = {"TYPE_INT64": "tensor(int64)", "TYPE_FP32": "tensor(float)"}


def read_config(path):
    """As Triton reads it: text format of protobuf. Its numbers of fields do not matter for that."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="triton")
    for name, values in ENUMS.items():
        file.enum_type.add(name=name, value=[{"name": key, "number": at} for key, at in values.items()])
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            label, kind = 3 if kind.startswith("*") else 1, kind.lstrip("*")
            made = message.field.add(name=field, number=number, label=label)
            if kind in ENUMS or kind in MESSAGES:
                made.type_name = f".triton.{kind}"
            else:
                made.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("triton.ModelConfig"))()
    return text_format.Parse(path.read_text(), config)


def tensors(values):
    """name -> (type, axes) of a configuration's tensors, as the model has them without the axis of batches."""
    kinds = {number: name for name, number in ENUMS["DataType"].items()}
    return {
        each.name: (kinds[each.data_type], list(each.reshape.shape if each.HasField("reshape") else each.dims))
        for each in values
    }


def served(values):
    """The same of an ONNX Runtime session, which is what Triton's backend asks: -1 for axes that have names."""
    found = {}
    for each in values:
        batch, *axes = [axis if isinstance(axis, int) else -1 for axis in each.shape]
        assert batch == -1, f"{each.name} has no axis of batches"
        found[each.name] = (each.type, axes)
    return found


def check_graph_config(model, name="graph"):
    """That a configuration says of its graph what ONNX Runtime says of it."""
    config = read_config(model / "configs" / f"{name}.pbtxt")
    graph = model / "1" / (config.default_model_filename or "model.onnx")
    session = onnxruntime.InferenceSession(graph, onnxruntime_options())
    for declared, has in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert {name: (NUMPY[kind], axes) for name, (kind, axes) in tensors(declared).items()} == served(has)
    return config, session


def onnxruntime_options():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a line for each input that has a value of its own
    return options


def test_the_graph_s_configuration_has_the_inputs_and_outputs_of_the_graph(repository):
    config, session = check_graph_config(repository / "classify")
    assert (config.backend, config.max_batch_size) == ("onnxruntime", 16) and config.HasField("dynamic_batching")
    assert [each.name for each in config.input] == ["input_ids", "token_type_ids", "attention_mask"]
    own = {each.name: each.shape for each in session.get_overridable_initializers()}
    assert own == {"threshold": [], "exit_at": ["rows_planned"]}, "which Triton can batch none of"


def test_a_second_configuration_has_a_threshold_of_each_row(repository):
    config, session = check_graph_config(repository / "classify", "thresholds")
    assert [each.name for each in config.input][-1] == "threshold" and config.default_model_filename
    runtime = Runtime(repository / "classify" / "1", threads=1)
    thresholds = np.random.default_rng(0).uniform(0.3, 1, (len(TEXTS), 3)).astype(np.float32)
    thresholds[0] = np.nan  # the run's own
    inputs = runtime.encode(TEXTS).batch(slice(None))
    feeds = {each.name: getattr(inputs, each.name) for each in session.get_inputs() if each.name != "threshold"}
    (layers,) = session.run(["layers"], feeds | {"threshold": thresholds})
    expected = [
        each.layers for text, row in zip(TEXTS, thresholds) for each in runtime.run([text], thresholds=row[None])
    ]
    assert layers.tolist() == expected != [each.layers for each in runtime.run(TEXTS)]


def test_a_calibration_changes_the_run_s_own_thresholds_in_both_graphs(repository, tmp_path):
    runtime, new = Runtime(repository / "classify" / "1", threads=1), tmp_path / "new"
    measured = {"task": "words", "rows_calibration": 1, "rows_fresh": 1, "end_to_end": 1.0, "mean_layers": 1.0}
    write_calibrated(runtime, new, Threshold(0.0), None, [1, 0, 0, 0], measured | {"batch_size": 1})
    session, inputs = onnxruntime.InferenceSession(new / triton.BY_ROW), runtime.encode(TEXTS).batch(slice(None))
    feeds = {each.name: getattr(inputs, each.name) for each in session.get_inputs() if each.name != "threshold"}
    (layers,) = session.run(["layers"], feeds | {"threshold": np.full((len(TEXTS), 3), np.nan, np.float32)})
    own = [each.layers for each in Runtime(new, threads=1).run(TEXTS)]
    assert layers.tolist() == own != [each.layers for each in runtime.run(TEXTS)]


@pytest.mark.parametrize(
    "bug",
    [
        ("TYPE_FP32", "TYPE_INT64"),
        ("dims: [3]", "dims: [2]"),
        ('"layers"', '"depth"'),
        (", reshape: { shape: [ ] }", ""),
        ("output [", 'input [ { name: "threshold", data_type: TYPE_FP32, dims: [3] } ]\noutput ['),
        ("dynamic_batching", "dynamic_batchin"),
    ],
    ids=lambda bug: bug[1][:12],
)
def test_that_test_can_fail(repository, tmp_path, bug):
    model = tmp_path / "model"
    shutil.copytree(repository / "classify", model)
    path = model / "configs" / "graph.pbtxt"
    assert bug[0] in path.read_text()
    path.write_text(path.read_text().replace(*bug))
    with pytest.raises((AssertionError, KeyError, text_format.ParseError)):
        check_graph_config(model)


def test_an_axis_of_batches_that_has_a_size_is_refused():
    value = onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.INT64, [3, "tokens"])
    with pytest.raises(ValueError, match="expected a batch axis as the first of rows, found the size 3"):
        triton._batched(value)


def test_the_worker_s_configuration_names_texts_and_answers(repository, writer_repository):
    config = read_config(repository / "classify" / "config.pbtxt")
    assert (config.backend, config.max_batch_size) == ("python", 0) and config.instance_group[0].count == 1
    assert tensors(config.input) == {
        "text": ("TYPE_STRING", [1]),
        "threshold": ("TYPE_FP32", [-1]),
        "agreement": ("TYPE_FP64", [1]),
        "max_loss": ("TYPE_FP64", [1]),
    }
    assert [each.name for each in config.input if not each.optional] == ["text"]
    assert [*tensors(config.output)] == ["label", "confidence", "exit", "layers"]
    assert (repository / "classify" / "1" / "segment_2.onnx").exists(), "rows are taken together again"
    config = read_config(writer_repository / "generate" / "config.pbtxt")
    assert [(each.name, each.optional) for each in config.input] == [("text", False), ("max_new_tokens", True)]
    assert [*tensors(config.output)] == ["text", "tokens", "layers"]
    assert not (writer_repository / "generate" / "configs").exists()


class Untwinned(Rule):
    """A rule that no graph holds."""

    name = "untwinned"

    def stop(self, k, read, memory):
        return np.ones(len(read), bool)


class Planner(Rule):
    """A rule that looks texts up, as RAEE's does."""

    name, needs, plans_from_texts = "planner", None, True


@pytest.mark.parametrize("rule", [FixedExit(1), Untwinned(), Planner()], ids=lambda rule: rule.name)
def test_only_a_graph_that_stops_as_the_run_does_is_offered(
    rule, tmp_path, monkeypatch, random_model, checkpoint_folder
):
    """A regression, which has no confidence."""
    monkeypatch.setattr(triton.writer, "_verify", lambda *run: {})
    run = run_of(random_model((1, 2, 4, 6), 1), checkpoint_folder, rule, ())
    triton.write_repository(run, tmp_path / "repository", texts=[("the film",)])
    model = tmp_path / "repository" / "classify"
    outputs = tensors(read_config(model / "config.pbtxt").output)
    assert outputs["label"] == ("TYPE_FP32", [1]) and "confidence" not in outputs
    assert (model / "configs").exists() == isinstance(rule, FixedExit)
    if (model / "configs").exists():
        check_graph_config(model)


def test_an_existing_folder_is_refused_and_not_changed(decoder_checkpoint, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["export", str(decoder_checkpoint), "--triton", str(tmp_path)]) == 2
    assert "is there already; name another folder or remove it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_options_that_exclude_each_other_are_refused(decoder_checkpoint, tmp_path, capsys):
    command = ["export", str(decoder_checkpoint), "--triton", str(tmp_path / "repository")]
    assert main([*command, "--web"]) == 2
    assert "--web: the page has a folder of its own" in capsys.readouterr().err
    for words, line in (
        ([*command, "--out", "there"], "not allowed with argument --triton"),
        (command[:2], "--out --triton"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and line in capsys.readouterr().err


# ---- The model that Triton's Python backend runs, without Triton ----
@pytest.fixture
def backend(monkeypatch):
    """The module that the server brings, as far as model.py uses it."""
    types = {"TYPE_STRING": object, "TYPE_FP32": np.float32, "TYPE_INT64": np.int64, "TYPE_UINT32": np.uint32}
    made = SimpleNamespace(
        triton_string_to_numpy=types.get,
        get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
        Tensor=lambda name, array: (name, array.tolist()),
        InferenceResponse=lambda tensors=(), error=None: (dict(tensors), error),
        TritonError=lambda message, code: (message, code),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    for code in ("UNAVAILABLE", "INVALID_ARG", "INTERNAL"):
        setattr(made.TritonError, code, code)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", made)


class Request:
    """One request, and the response to it."""

    def __init__(self, **tensors):
        self.tensors = {
            name: SimpleNamespace(as_numpy=lambda v=value: np.array(v if isinstance(v, list) else [v], object))
            for name, value in tensors.items()
        }
        self.sent = []

    def get_response_sender(self):
        return self

    def send(self, response, flags):
        self.sent.append((response, flags))


@contextlib.contextmanager
def loaded(model):
    """The model of a folder, as the server makes it."""
    config = read_config(model / "config.pbtxt")
    about = {
        key: [{"name": name, "data_type": kind} for name, (kind, _) in tensors(values).items()]
        for key, values in (("input", config.input), ("output", config.output))
    }
    namespace = {"__name__": "model", "__file__": str(model / "1" / "model.py")}
    exec(compile((model / "1" / "model.py").read_text(), "model.py", "exec"), namespace)
    made = namespace["TritonPythonModel"]()
    made.initialize({"model_config": json.dumps(about)})
    try:
        yield made
    finally:
        made.finalize()


def test_the_model_answers_each_request_once_and_reports_errors(repository, backend):
    model = repository / "classify"
    requests = [Request(text=text.encode()) for text in TEXTS]
    wrong = {"empty": Request(text=b" "), "expected UTF-8": Request(text=b"caf\xe9")}
    with loaded(model) as made:
        assert made.execute([*requests, *wrong.values()]) is None
    for request in (*requests, *wrong.values()):
        ((_, flags),) = request.sent
        assert flags == 1
    alone = Runtime(model / "1", threads=1).run(TEXTS, batch_size=1)
    found = [request.sent[0][0][0] for request in requests]
    assert [(each["label"], each["layers"], each["exit"]) for each in found] == [
        ([each.label], [each.layers], [each.exit]) for each in alone
    ]
    assert 0 in (layers := {each.layers for each in alone}) and len(layers) > 1
    for message, request in wrong.items():
        outputs, (reason, code) = request.sent[0][0]
        assert not outputs and message in reason and code == "INVALID_ARG"


def test_the_model_answers_a_request_by_its_own_thresholds(repository, backend):
    model = repository / "classify"
    thresholds = [0.5, [0.9, 0.4, 0.6], [np.inf, np.inf, np.inf], -np.inf]
    requests = [Request(text=TEXTS[0].encode(), threshold=each) for each in thresholds]
    wrong = Request(text=b"the film", threshold=[0.5, 0.5])
    both = Request(text=b"the film", threshold=0.5, agreement=0.9)
    with loaded(model) as made:
        made.execute([*requests, wrong, both])
    runtime = Runtime(model / "1", threads=1)
    rows = np.array([np.ones(3) * each for each in thresholds])
    expected = [runtime.run(TEXTS[:1], thresholds=row[None])[0].layers for row in rows]
    assert [request.sent[0][0][0]["layers"] for request in requests] == [[layers] for layers in expected]
    assert len(set(expected)) > 1
    for request, message in ((wrong, "a list of 3, one for each exit"), (both, "found threshold and agreement")):
        reason, code = request.sent[0][0][1]
        assert message in reason and code == "INVALID_ARG"


def test_a_request_that_is_refused_or_fails_gets_the_reason(repository, backend):
    with loaded(repository / "classify") as made:
        made.worker.submit = lambda texts: (_ for _ in ()).throw(Refused("256 requests are open"))
        made.execute([refused := Request(text=b"the film")])
        del made.worker.submit
        made.worker.engine.run = lambda at, rows: 1 / 0
        made.execute([failed := Request(text=b"the film")])
    assert refused.sent[0][0][1] == ("256 requests are open", "UNAVAILABLE")
    assert failed.sent[0][0][1] == ("division by zero", "INTERNAL")


def test_a_decoder_s_model_writes_as_many_tokens_as_the_request_asks_for(writer_repository, backend):
    model = writer_repository / "generate"
    requests = [Request(text=prompt.encode(), max_new_tokens=4) for prompt in PROMPTS]
    with loaded(model) as made:
        made.execute(requests)
    alone = [Runtime(model / "1", threads=1).run([prompt], max_new_tokens=4)[0] for prompt in PROMPTS]
    assert [request.sent[0][0][0] for request in requests] == [
        {"text": [each.text], "tokens": each.tokens, "layers": each.layers} for each in alone
    ]


# ---- A server ----
ONNXRUNTIME = """
    import json, time
    from pathlib import Path

    import numpy as np
    import onnxruntime
    import triton_python_backend_utils as triton


    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            self.inputs, self.outputs = ([each["name"] for each in config[kind]] for kind in ("input", "output"))
            version = Path(args["model_repository"], args["model_version"])
            self.session, self.log = onnxruntime.InferenceSession(version / "model.onnx"), version / "batches"

        def execute(self, requests):
            time.sleep(0.02)  # others come meanwhile
            parts = {
                name: [triton.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
                for name in self.inputs
            }
            outputs = self.session.run(self.outputs, {name: np.concatenate(part) for name, part in parts.items()})
            ends = np.cumsum([len(part) for part in parts["input_ids"]])
            with self.log.open("a") as log:
                print(ends[-1], file=log)
            rows = zip(*(np.split(value, ends[:-1]) for value in outputs))
            return [triton.InferenceResponse(list(map(triton.Tensor, self.outputs, row))) for row in rows]
"""
"""backends/onnxruntime/model.py: Triton takes backends in Python too."""

SLOW = """

class TritonPythonModel(TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        run = self.worker.engine.run
        self.worker.engine.run = lambda at, rows: (time.sleep(0.01), run(at, rows))  # others come meanwhile

    def finalize(self):
        super().finalize()
        Path(__file__).with_name("batches").write_text(json.dumps(dict(self.worker.metrics.batches)))
"""


@pytest.fixture(scope="module")
def package():
    """The folder of the package that brings the server; skipped where there is none that starts."""
    home = Path(os.environ.get("MINI_EE_TRITON", "-"))
    found = next(home.glob("lib/python*/site-packages/pytriton"), None)
    if found is None:
        pytest.skip("MINI_EE_TRITON names no environment with Triton; serve/README.md makes one")
    for program in (found / "tritonserver" / "bin" / "tritonserver", stub_of(found)):
        needs = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        missing = [line.split()[0] for line in needs.splitlines() if "not found" in line]
        if missing:
            pytest.skip(f"Triton needs {', '.join(missing)}, which this machine has not")
    return found


def stub_of(package):
    """The program that runs models in the Python of that environment."""
    version = package.parents[1].name.removeprefix("python")
    return package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"


def lay_package(version):
    """mini_ee as it is tested, where model.py finds it: the server's Python passes PYTHONPATH over."""
    (version / "mini_ee").mkdir()
    for each in [*Path(mini_ee.__file__).parent.iterdir(), Path(mini_ee.lab.export.__file__).parent]:
        if not (version / "mini_ee" / each.name).exists():
            (version / "mini_ee" / each.name).symlink_to(each)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def ask(port, path, body=None):
    """(status, JSON) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def infer(port, model, **tensors):
    """(status, outputs by name). tensors: (type, values), each of one row where values are lists."""
    inputs = [
        {"name": name, "datatype": kind, "shape": list(np.shape(values)), "data": values}
        for name, (kind, values) in tensors.items()
    ]
    status, answer = ask(port, f"/v2/models/{model}/infer", {"inputs": inputs})
    return status, {each["name"]: each["data"] for each in answer["outputs"]} if status == 200 else answer["error"]


@pytest.fixture(scope="module")
def server(package, repository, writer_repository, tmp_path_factory):
    """(port, models) of a server: `classify` is the graph, `texts` the same by the worker, `generate` a decoder."""
    work = tmp_path_factory.mktemp("server")
    models, backends, home = work / "models", work / "backends", package.parents[3]
    shutil.copytree(repository, models)
    shutil.copytree(repository / "classify", models / "texts", ignore=shutil.ignore_patterns("configs"))
    shutil.copytree(writer_repository / "generate", models / "generate")
    with (models / "texts" / "1" / "model.py").open("a") as file:
        file.write("\nimport time\n" + SLOW)
    for name in ("texts", "generate"):
        lay_package(models / name / "1")
    shutil.copytree(package / "tritonserver" / "backends", backends)
    shutil.copy(stub_of(package), backends / "python")
    (backends / "onnxruntime").mkdir()
    (backends / "onnxruntime" / "model.py").write_text(textwrap.dedent(ONNXRUNTIME))
    port, log = free_port(), (work / "log").open("w")
    options = {"backend-directory": backends, "model-repository": models, "model-config-name": "graph"}
    options |= {"http-address": "127.0.0.1", "http-port": port, "allow-grpc": "false", "allow-metrics": "false"}
    paths = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(package.parent / "nvidia_pytriton.libs"),
    }
    process = subprocess.Popen(
        [package / "tritonserver" / "bin" / "tritonserver", *(f"--{key}={value}" for key, value in options.items())],
        cwd=work,  # the server's Python looks there first
        env=os.environ | paths,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                if ask(port, "/v2/health/ready")[0] == 200:
                    break
            assert process.poll() is None, (work / "log").read_text()
            time.sleep(0.1)
        yield port, models
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (work / "log").read_text()
        batches = json.loads((models / "texts" / "1" / "batches").read_text())
        assert batches["1"] < len(TEXTS) / 2, "rows of different requests share batches"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def at_once(function, values):
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(function, values))


def test_triton_s_worker_answers_as_the_runtime_does_alone(server, repository):
    port, _ = server
    found = at_once(lambda text: infer(port, "texts", text=("BYTES", [text])), TEXTS)
    alone = Runtime(repository / "classify" / "1", threads=1).run(TEXTS, batch_size=1)
    assert [status for status, _ in found] == [200] * len(TEXTS)
    assert [(each["label"], each["layers"], each["exit"]) for _, each in found] == [
        ([each.label], [each.layers], [each.exit]) for each in alone
    ]
    np.testing.assert_allclose(
        [each["confidence"][0] for _, each in found], [each.confidence for each in alone], atol=1e-5
    )


def test_triton_reports_an_error_and_answers_the_next_request(server):
    port, _ = server
    status, error = infer(port, "texts", text=("BYTES", [" "]))
    assert status == 400 and "found an empty text" in error
    assert infer(port, "texts", text=("BYTES", ["the film", "the meal"]))[0] == 400
    assert ask(port, "/v2/models/texts/generate", {"text": "the film"})[0] == 200


def test_triton_batches_the_graph_and_answers_as_the_runtime_does(server, repository):
    port, models = server
    runtime = Runtime(repository / "classify" / "1", threads=1)

    def of(text):
        inputs = runtime.encode([text]).batch(slice(None))
        names = ("input_ids", "token_type_ids", "attention_mask")
        return infer(port, "classify", **{name: ("INT64", getattr(inputs, name).tolist()) for name in names})

    found, alone = at_once(of, TEXTS * 2), runtime.run(TEXTS * 2, batch_size=1)
    assert [status for status, _ in found] == [200] * len(found)
    assert [(each["label"], each["layers"]) for _, each in found] == [
        ([runtime.label_names.index(each.label)], [each.layers]) for each in alone
    ]
    np.testing.assert_allclose([each["logits"] for _, each in found], [each.logits for each in alone], atol=1e-5)
    sizes = list(map(int, (models / "classify" / "1" / "batches").read_text().split()))
    assert sum(sizes) == len(found) and 1 < max(sizes) <= 16


def test_triton_s_decoder_writes_what_the_runtime_writes_alone(server, writer_repository):
    port, _ = server
    count = ("UINT32", [5])
    found = at_once(lambda text: infer(port, "generate", text=("BYTES", [text]), max_new_tokens=count), PROMPTS)
    runtime = Runtime(writer_repository / "generate" / "1", threads=1)
    alone = [runtime.run([text], max_new_tokens=5)[0] for text in PROMPTS]
    assert [answer for _, answer in found] == [
        {"text": [each.text], "tokens": each.tokens, "layers": each.layers} for each in alone
    ]


@pytest.mark.skipif(not shutil.which("curl"), reason="the page asks by curl")
def test_the_page_from_export_to_triton_runs_as_it_stands(package, repository, tmp_path):
    """With an environment and an export that are there."""
    page = (Path(mini_ee.serve.__file__).parent / "README.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    make, install, write, *rest = block.splitlines()
    assert make.startswith("python -m venv triton ") and install.startswith("triton/bin/pip install ")
    program, *words = shlex.split(write)
    assert program == "mini-ee" and parser(words).parse_args(words).triton == Path("repository")
    (tmp_path / "triton").symlink_to(package.parents[3])
    shutil.copytree(repository, tmp_path / "repository")
    lay_package(tmp_path / "repository" / "classify" / "1")
    script = "\n".join(rest).replace("8000", str(free_port())).replace("3.11", stub_of(package).parent.name)
    process = subprocess.Popen(
        ["bash", "-ec", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, log = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, log
    (expected,) = Runtime(repository / "classify" / "1", threads=1).run(["A warm and funny film."])
    found = json.loads(re.search("{.*}", output)[0])
    assert (found["label"], found["layers"]) == (expected.label, expected.layers)
