"""A model repository for NVIDIA Triton Inference Server: `mini-ee export RUN --triton DIR`.

DIR/classify/config.pbtxt          text in, answer out, with Triton's Python backend; for a decoder DIR/generate/
DIR/classify/configs/graph.pbtxt   token ids in, logits out, with its onnxruntime backend, which batches requests of the
                                   same length: `tritonserver --model-config-name graph`. Only if model.onnx contains
                                   the rule: not for decoders, nor for rules that retrieve texts
DIR/classify/configs/thresholds.pbtxt   the same with one more input, `threshold`, K - 1 numbers of each row: for the
                                   same graph with this input declared by row, 1/model_thresholds.onnx
DIR/classify/1/                    the exported folder, see writer.py, with graphs by segment for rows
DIR/classify/1/model.py            serving/triton_model.py, which the Python backend runs

The configuration contains no name of a model: Triton takes the name of the folder, which may be changed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, ValueInfoProto

from mini_ee import serve
from mini_ee.lab.data.files import atomic_folder, write_bytes
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export import writer
from mini_ee.lab.row_thresholds import THRESHOLD
from mini_ee.lab.training.run_folder import Run
from mini_ee.serve.request_thresholds import FIELDS
from mini_ee.serve.worker import BATCH

TEXTS = {1: ("text",), 2: ("text", "text_b")}
"""Number of texts in a row -> names of the inputs, as in requests to `mini-ee serve`."""

BY_ROW = "model_thresholds.onnx"

TYPES = {TensorProto.INT64: "TYPE_INT64", TensorProto.FLOAT: "TYPE_FP32"}


def write_repository(run: Run, out: str | Path, segments: bool = False, **options) -> dict:
    """Write the repository; returns the manifest of the exported folder. Options and errors as of writer.export."""
    if run.embeds:
        raise WrongArguments(f"--triton: expected a classifier or a decoder, {run.folder} gives embeddings")
    if run.multi_label:
        raise WrongArguments(f"--triton: expected a model that gives a text one label, {run.folder} gives it several")
    rows = run.unit != "tokens"
    with atomic_folder(out) as repository:
        model = repository / ("classify" if rows else "generate")
        version = model / "1"
        manifest = writer.export(run, version, segments=segments or rows, **options)
        shutil.copyfile(Path(serve.__file__).parent / "triton_model.py", version / "model.py")
        write_bytes(model / "config.pbtxt", _texts_config(run).encode())
        if rows and not run.rule.plans_from_texts and manifest.get("rule_in_graph", True):
            (model / "configs").mkdir()
            graph = onnx.load(version / "model.onnx", load_external_data=False)
            write_bytes(model / "configs" / "graph.pbtxt", _graph_config(graph.graph).encode())
            if THRESHOLD in manifest["graphs"]["model"]["inputs"]:
                _declare_thresholds(graph, len(run.exits) - 1)
                onnx.save(graph, version / BY_ROW)
                onnx.checker.check_model(version / BY_ROW, full_check=True)
                more = f'default_model_filename: "{BY_ROW}"'
                write_bytes(model / "configs" / "thresholds.pbtxt", _graph_config(graph.graph, more).encode())
    return manifest


def _declare_thresholds(model: onnx.ModelProto, count: int) -> None:
    """Make the threshold a required input (batch, count): Triton takes no input whose number of axes is open."""
    graph = model.graph
    given = next(value for value in graph.input if value.name == THRESHOLD)
    given.CopyFrom(onnx.helper.make_tensor_value_info(THRESHOLD, TensorProto.FLOAT, ("batch", count)))
    others = [each for each in graph.initializer if each.name != THRESHOLD]
    del graph.initializer[:]
    graph.initializer.extend(others)


def _texts_config(run: Run) -> str:
    """The configuration for the Python backend: one text per request, so no batch axis."""
    if run.unit == "tokens":
        inputs = [_tensor("text", "TYPE_STRING", [1]), _tensor("max_new_tokens", "TYPE_UINT32", [1], "optional: true")]
        fields = {"text": ("TYPE_STRING", 1), "tokens": ("TYPE_INT64", -1), "layers": ("TYPE_INT64", -1)}
    else:
        inputs = [_tensor(name, "TYPE_STRING", [1]) for name in TEXTS[run.config["task"]["texts"]]]
        if THRESHOLD in run.rule.runtime_inputs:  # the other two in float64: .99 is not to become another number
            kinds = zip(FIELDS, ("TYPE_FP32", "TYPE_FP64", "TYPE_FP64"), (-1, 1, 1), strict=True)
            inputs += [_tensor(name, kind, [size], "optional: true") for name, kind, size in kinds]
        label = {"label": ("TYPE_STRING", 1), "confidence": ("TYPE_FP32", 1)}
        fields = label if run.label_names else {"label": ("TYPE_FP32", 1)}
        fields |= {"exit": ("TYPE_INT64", 1), "layers": ("TYPE_FP32", 1)}
    outputs = [_tensor(name, kind, [size]) for name, (kind, size) in fields.items()]
    begin = "# one text in, an answer out: 1/model.py", 'backend: "python"', "max_batch_size: 0"
    worker = "# one worker for all requests; its graphs run on a GPU if there is one"
    return _config(begin, inputs, outputs, (worker, "instance_group [ { kind: KIND_CPU, count: 1 } ]"))


def _graph_config(graph: onnx.GraphProto, *more: str) -> str:
    """The configuration for the onnxruntime backend. more: further lines.

    Inputs with defaults (in model.onnx the rule's thresholds) are left out, so the run's own rule applies.
    """
    own = {each.name for each in graph.initializer}
    inputs = [_batched(each) for each in graph.input if each.name not in own]
    outputs = [_batched(each) for each in graph.output]
    begin = "# rows of token ids in, logits out", 'backend: "onnxruntime"', f"max_batch_size: {BATCH}", *more
    batching = "# requests of one length that wait at the same time", "dynamic_batching { }"
    return _config(begin, inputs, outputs, (*batching, "instance_group [ { count: 1 } ]"))


def _batched(value: ValueInfoProto) -> str:
    """A tensor of the graph for Triton, without the batch axis. Raises ValueError if that axis has a fixed size."""
    batch, *dims = [axis.dim_value or -1 for axis in value.type.tensor_type.shape.dim]
    if batch != -1:
        raise ValueError(f"model.onnx: expected a batch axis as the first of {value.name}, found the size {batch}")
    kind = TYPES[value.type.tensor_type.elem_type]
    return _tensor(value.name, kind, dims) if dims else _tensor(value.name, kind, [1], "reshape: { shape: [ ] }")


def _tensor(name: str, kind: str, dims: list[int], *more: str) -> str:
    return "  { " + ", ".join((f'name: "{name}"', f"data_type: {kind}", f"dims: {dims}", *more)) + " }"


def _config(begin: Sequence[str], inputs: Sequence[str], outputs: Sequence[str], end: Sequence[str]) -> str:
    tensors = ["input [", ",\n".join(inputs), "]", "output [", ",\n".join(outputs), "]"]
    return "\n".join([*begin, *tensors, *end, ""])
