"""The ONNX graphs of a MultiExit, node by node: one a segment, and the whole model in one.

A second definition of what bert.py and exits.py compute, in the standard's own operators (opset 23: Attention, Gelu,
LayerNormalization); tests/test_export.py and every export hold it to the first. Initialisers carry the names that the
parameters have in the run, in the layout of torch: a graph is readable, and two graphs share a weight by its name.

    segment  input_ids, token_type_ids (before the first exit) or hidden, rows; attention_mask
             -> hidden_out (but for the last exit), logits, max_probability where there are classes
    full     input_ids, token_type_ids, attention_mask -> logits, max_probability of the last exit

`rows` (B,) are the rows of `hidden` that go on: compaction is a Gather inside the graph, so that hidden states stay on
the device. attention_mask has those rows already. A head is in the graph of its segment, because a graph of its own
costs more to call than to compute.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mini_ee.bert import BertConfig

OPSET, IR_VERSION = 23, 11
INTEGERS = "integers_"  # how the constants that are no weights are called


class Graph:
    """Nodes in the order in which they run, on parameters of a MultiExit: torch's name -> array, all of one dtype."""

    def __init__(self, config: BertConfig, parameters: dict[str, np.ndarray]):
        self.config, self.parameters = config, parameters
        self.dtype = parameters["backbone.embeddings.norm.weight"].dtype
        self.nodes, self.initializers = [], {}
        self.inputs, self.outputs = [], []

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """Append a node with one output; returns its name."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes) -> list[str]:
        """Append a node with several outputs; returns their names."""
        names = [f"{kind.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def input(self, name: str, *axes: str | int, dtype=np.int64) -> str:
        """Declare an input with its axes."""
        self.inputs.append(_value(name, dtype, axes))
        return name

    def output(self, name: str, *axes: str | int, dtype) -> str:
        """Declare what the last node says as an output, in its type; returns the name."""
        last = self.nodes[-1]
        if dtype == self.dtype:
            last.output[0] = name
        else:
            self.nodes.append(helper.make_node("Cast", last.output, [name], to=_onnx_type(dtype)))
        self.outputs.append(_value(name, dtype, axes))
        return name

    def parameter(self, name: str) -> str:
        """Take a parameter up as an initialiser."""
        self.initializers[name] = self.parameters[name]
        return name

    def integers(self, *values: int) -> str:
        """A constant (len(values),) int64, named by what it holds."""
        name = INTEGERS + "_".join(map(str, values))
        self.initializers[name] = np.array(values, np.int64)
        return name

    def linear(self, hidden: str, name: str) -> str:
        """(N, I) -> (N, O), as nn.Linear."""
        parameters = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self.op("Gemm", hidden, *parameters, transB=1, name=f"{name}_{len(self.nodes)}")

    def norm(self, hidden: str, name: str) -> str:
        """LayerNorm over the last axis; its statistics are float32 by the standard."""
        parameters = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self.op("LayerNormalization", hidden, *parameters, epsilon=self.config.layer_norm_eps)

    def activation(self, hidden: str) -> str:
        """hidden_act of the config."""
        kind = self.config.hidden_act
        if kind == "relu":
            return self.op("Relu", hidden)
        return self.op("Gelu", hidden, approximate="none" if kind == "gelu" else "tanh")

    def model(self, name: str) -> onnx.ModelProto:
        """The finished graph, checked."""
        initializers = [numpy_helper.from_array(array, name) for name, array in self.initializers.items()]
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, initializers)
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="mini_ee")


def _value(name: str, dtype, axes: tuple) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _onnx_type(dtype), axes)


def _onnx_type(dtype) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def segment(
    config: BertConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int, pool: str
) -> onnx.ModelProto:
    """The layers between two exits, and the head of the second; the embeddings too where it is the first one."""
    graph = Graph(config, parameters)
    start, stop = exits[number - 1] if number else 0, exits[number]
    hidden, mask = _rows_that_go_on(graph) if number else _embeddings(graph), _mask(graph)
    hidden = _layers(graph, hidden, mask, start, stop)
    if number < len(exits) - 1:
        hidden = graph.output("hidden_out", "batch", "tokens", config.hidden_size, dtype=graph.dtype)
    _exit_head(graph, hidden, mask, number, pool)
    return graph.model(f"segment_{stop}")


def full(config: BertConfig, parameters: dict[str, np.ndarray], last: int, pool: str) -> onnx.ModelProto:
    """All layers and the last head: the model without early exits."""
    graph = Graph(config, parameters)
    hidden, mask = _embeddings(graph), _mask(graph)
    hidden = _layers(graph, hidden, mask, 0, config.num_hidden_layers)
    _exit_head(graph, hidden, mask, last, pool)
    return graph.model("full")


def _rows_that_go_on(graph: Graph) -> str:
    hidden = graph.input("hidden", "rows_before", "tokens", graph.config.hidden_size, dtype=graph.dtype)
    return graph.op("Gather", hidden, graph.input("rows", "batch"))


def _mask(graph: Graph) -> str:
    """(B, T) of 1 and 0 -> (B, T) of true and false."""
    return graph.op("Cast", graph.input("attention_mask", "batch", "tokens"), to=TensorProto.BOOL)


def _embeddings(graph: Graph) -> str:
    """Embeddings.forward: word + position + token type, normalised; ALBERT maps E to D."""
    config, table = graph.config, lambda name: graph.parameter(f"backbone.embeddings.{name}.weight")
    ids = graph.input("input_ids", "batch", "tokens")
    words = graph.op("Gather", table("word"), ids)
    types = graph.op("Gather", table("token_type"), graph.input("token_type_ids", "batch", "tokens"))
    if config.model_type == "roberta":
        padding = graph.integers(config.pad_token_id)
        real = graph.op("Cast", graph.op("Not", graph.op("Equal", ids, padding)), to=TensorProto.INT64)
        counted = graph.op("Mul", graph.op("CumSum", real, graph.integers(1)), real)
        positions = graph.op("Gather", table("position"), graph.op("Add", counted, padding))
    else:
        tokens = graph.op("Shape", ids, start=1, end=2)
        positions = graph.op("Slice", table("position"), graph.integers(0), tokens)
    summed = graph.op("Add", graph.op("Add", words, types), positions)
    hidden = graph.norm(summed, "backbone.embeddings.norm")
    if config.model_type != "albert":
        return hidden
    flat = graph.op("Reshape", hidden, graph.integers(-1, config.embedding_size or config.hidden_size))
    return _unflatten(graph, graph.linear(flat, "backbone.embeddings.to_hidden"), graph.op("Shape", ids))


def _layers(graph: Graph, hidden: str, mask: str, start: int, stop: int) -> str:
    """Layer.forward, from hidden[start] to hidden[stop], on (B T, D) but for the attention itself."""
    config = graph.config
    shape = graph.op("Shape", hidden, start=0, end=2)
    rows, tokens = (graph.op("Shape", hidden, start=axis, end=axis + 1) for axis in (0, 1))
    every_query = graph.op("Concat", rows, graph.integers(1), tokens, tokens, axis=0)
    readable = graph.op("Expand", graph.op("Unsqueeze", mask, graph.integers(1, 2)), every_query)  # (B, 1, T, T)
    stored = 1 if config.model_type == "albert" else config.num_hidden_layers
    hidden = graph.op("Reshape", hidden, graph.integers(-1, config.hidden_size))
    for depth in range(start, stop):
        name = f"backbone.layers.{depth % stored}"
        qkv = _unflatten(graph, graph.linear(hidden, f"{name}.qkv"), shape)
        query, key, value = graph.several(3, "Split", qkv, axis=2, num_outputs=3)
        heads = {"q_num_heads": config.num_attention_heads, "kv_num_heads": config.num_attention_heads}
        attended = graph.op("Attention", query, key, value, readable, softmax_precision=TensorProto.FLOAT, **heads)
        attended = graph.op("Reshape", attended, graph.integers(-1, config.hidden_size))
        added = graph.op("Add", hidden, graph.linear(attended, f"{name}.attention_output"))
        hidden = graph.norm(added, f"{name}.attention_norm")
        inner = graph.activation(graph.linear(hidden, f"{name}.up"))
        hidden = graph.norm(graph.op("Add", hidden, graph.linear(inner, f"{name}.down")), f"{name}.output_norm")
    return _unflatten(graph, hidden, shape)


def _unflatten(graph: Graph, flat: str, shape: str) -> str:
    """(B T, D) -> (B, T, D)."""
    return graph.op("Reshape", flat, graph.op("Concat", shape, graph.integers(-1), axis=0))


def _exit_head(graph: Graph, hidden: str, mask: str, number: int, pool: str) -> None:
    """ExitHead.forward: logits and the largest probability, in float32."""
    if pool == "first":
        vector = graph.op("Squeeze", graph.op("Slice", hidden, *map(graph.integers, (0, 1, 1))), graph.integers(1))
    else:
        weights = graph.op("Unsqueeze", mask, graph.integers(2))
        weights = graph.op("Cast", weights, to=_onnx_type(graph.dtype))
        total = graph.op("ReduceSum", graph.op("Mul", hidden, weights), graph.integers(1), keepdims=0)
        vector = graph.op("Div", total, graph.op("ReduceSum", weights, graph.integers(1), keepdims=0))
    inner = graph.op("Tanh", graph.linear(vector, f"heads.{number}.dense"))
    classes = len(graph.parameters[f"heads.{number}.out.bias"])
    graph.linear(inner, f"heads.{number}.out")
    logits = graph.output("logits", "batch", classes, dtype=np.float32)
    if classes > 1:  # judged in the graph: after a segment, numpy's code is no longer in the processor's caches
        graph.op("ReduceMax", graph.op("Softmax", logits, axis=1), graph.integers(1), keepdims=0)
        graph.output("max_probability", "batch", dtype=np.float32)
