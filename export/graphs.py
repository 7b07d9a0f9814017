"""The ONNX graphs of a classifier with exits, node by node: one a segment, and the whole model in one.

A second definition of what a backbone, exits.py and lora_exits.py compute, in the standard's own operators (opset 23:
Attention, Gelu, LayerNormalization); tests/test_export.py and every export hold it to the first. Initialisers carry the
names that the parameters have in the run, in the layout of torch: a graph is readable, and two graphs share a weight by
its name.

    segment  input_ids, an encoder's token_type_ids (before the first exit) or hidden, rows; attention_mask; read
             -> hidden_out (but for the last exit), logits, max_probability where there are classes,
                exit_logit where the model says itself when to leave
    full     input_ids (token_type_ids), attention_mask -> logits, max_probability of the last exit
    encoder  input_ids (token_type_ids), attention_mask -> embedding, the query of a retrieval
    prompts  as segment, read at the token read_at of each row, the mask of its prompt: the logits of label words
    streams  as segment, for LoRA exits: hidden and hidden_out (n, B, T, D) hold n streams, the next exit's first

`rows` (B,) are the rows of `hidden` that go on: compaction is a Gather inside the graph, so that hidden states stay on
the device. attention_mask has those rows already. A head is in the graph of its segment, because a graph of its own
costs more to call than to compute; it runs where `read` () is true, and its outputs have no rows elsewhere. Of the
backbone, a graph knows its embeddings and its layers: EncoderGraph here, a decoder's in causal_graphs.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mini_ee.backbones.bert import BertConfig
from mini_ee.backbones.llama import DecoderConfig
from mini_ee.backbones.lora import TARGETS

OPSET, IR_VERSION = 23, 11

CONSTANT = "constant_"  # how the names of constants that are no weights begin

Adapt = Callable[[int, str, str, str], str]
"""(stored layer, name of a linear map in it, its input, its output) -> the output with what adapters add."""


class Graph:
    """Nodes in the order in which they run, on a model's parameters: torch's name -> array, all of one dtype.

    prefix: where in the model the backbone and the heads are that the graph speaks of. A subclass knows the backbone.
    """

    def __init__(self, config: BertConfig | DecoderConfig, parameters: dict[str, np.ndarray], prefix: str = ""):
        self.config, self.parameters, self.prefix = config, parameters, prefix
        self.dtype = next(iter(parameters.values())).dtype
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
            self.nodes.append(helper.make_node("Cast", last.output[:1], [name], to=_onnx_type(dtype)))
        self.outputs.append(_value(name, dtype, axes))
        return name

    def parameter(self, name: str) -> str:
        """Take a parameter up as an initialiser."""
        name = self.prefix + name
        self.initializers[name] = self.parameters[name]
        return name

    def only_if(self, condition: str, nodes: int, outputs: int) -> None:
        """The nodes and outputs after the first so many run, and are said, only where the condition () is true."""
        names = [output.name for output in self.outputs[outputs:]]
        said, nothing, none_said = [], [], []
        for output in self.outputs[outputs:]:
            dtype = helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
            axes = [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim]
            said.append(_value(f"{output.name}_said", dtype, axes))
            empty = numpy_helper.from_array(np.empty((0, *axes[1:]), dtype))
            nothing.append(helper.make_node("Constant", [], [f"{output.name}_not_said"], value=empty))
            none_said.append(_value(f"{output.name}_not_said", dtype, empty.dims))
        inner = self.nodes[nodes:]
        for node in inner:  # a name stands for one value in a graph and its branches
            for wires in (node.input, node.output):
                wires[:] = [f"{name}_said" if name in names else name for name in wires]
        branches = {
            "then_branch": helper.make_graph(inner, "said", [], said),
            "else_branch": helper.make_graph(nothing, "not_said", [], none_said),
        }
        self.nodes[nodes:] = [helper.make_node("If", [condition], names, **branches)]

    def integers(self, *values: int) -> str:
        """A constant (len(values),) int64, named by what it holds."""
        name = CONSTANT + "_".join(map(str, values))
        self.initializers[name] = np.array(values, np.int64)
        return name

    def number(self, value: float) -> str:
        """A constant () of the graph's dtype, named by what it holds."""
        name = f"{CONSTANT}{value}"
        self.initializers[name] = np.array(value, self.dtype)
        return name

    def linear(self, hidden: str, name: str) -> str:
        """(N, I) -> (N, O), as nn.Linear."""
        parameters = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self.op("Gemm", hidden, *parameters, transB=1, name=f"{name}_{len(self.nodes)}")

    def norm(self, hidden: str, name: str) -> str:
        """The backbone's norm over the last axis; its statistics are float32 by the standard."""
        raise NotImplementedError

    def embeddings(self) -> str:
        """hidden[0], (B, T, D), from the inputs of the whole model."""
        raise NotImplementedError

    def layers(self, hidden: str, mask: str, start: int, stop: int, adapt: Adapt | None = None) -> str:
        """hidden[start] -> hidden[stop], (B, T, D); mask (B, T) is true where there is a token."""
        raise NotImplementedError

    def label_words(self, vector: str) -> None:
        """The head to words at one token of each row, (B, D), for the label words alone; its last node gives them."""
        raise NotImplementedError

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


class EncoderGraph(Graph):
    """A graph on the parameters of bert.py, which the model calls `backbone`."""

    def norm(self, hidden: str, name: str) -> str:
        parameters = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self.op("LayerNormalization", hidden, *parameters, epsilon=self.config.layer_norm_eps)

    def embeddings(self) -> str:
        """Embeddings.forward: word + position + token type, normalised; ALBERT maps E to D."""
        config, table = self.config, lambda name: self.parameter(f"backbone.embeddings.{name}.weight")
        ids = self.input("input_ids", "batch", "tokens")
        words = self.op("Gather", table("word"), ids)
        types = self.op("Gather", table("token_type"), self.input("token_type_ids", "batch", "tokens"))
        if config.model_type == "roberta":
            padding = self.integers(config.pad_token_id)
            real = self.op("Cast", self.op("Not", self.op("Equal", ids, padding)), to=TensorProto.INT64)
            counted = self.op("Mul", self.op("CumSum", real, self.integers(1)), real)
            positions = self.op("Gather", table("position"), self.op("Add", counted, padding))
        else:
            tokens = self.op("Shape", ids, start=1, end=2)
            positions = self.op("Slice", table("position"), self.integers(0), tokens)
        summed = self.op("Add", self.op("Add", words, types), positions)
        hidden = self.norm(summed, "backbone.embeddings.norm")
        if config.model_type != "albert":
            return hidden
        flat = self.op("Reshape", hidden, self.integers(-1, config.embedding_size or config.hidden_size))
        return self._unflatten(self.linear(flat, "backbone.embeddings.to_hidden"), self.op("Shape", ids))

    def layers(self, hidden: str, mask: str, start: int, stop: int, adapt: Adapt | None = None) -> str:
        """Layer.forward, on (B T, D) but for the attention itself."""

        def linear(name: str, x: str) -> str:
            y = self.linear(x, f"backbone.layers.{stored}.{name}")
            return y if adapt is None else adapt(stored, name, x, y)

        config = self.config
        shape = self.op("Shape", hidden, start=0, end=2)
        rows, tokens = (self.op("Shape", hidden, start=axis, end=axis + 1) for axis in (0, 1))
        every_query = self.op("Concat", rows, self.integers(1), tokens, tokens, axis=0)
        readable = self.op("Expand", self.op("Unsqueeze", mask, self.integers(1, 2)), every_query)  # (B, 1, T, T)
        hidden = self.op("Reshape", hidden, self.integers(-1, config.hidden_size))
        for depth in range(start, stop):
            stored = 0 if config.model_type == "albert" else depth
            name = f"backbone.layers.{stored}"
            qkv = self._unflatten(linear("qkv", hidden), shape)
            query, key, value = self.several(3, "Split", qkv, axis=2, num_outputs=3)
            heads = {"q_num_heads": config.num_attention_heads, "kv_num_heads": config.num_attention_heads}
            attended = self.op("Attention", query, key, value, readable, softmax_precision=TensorProto.FLOAT, **heads)
            attended = self.op("Reshape", attended, self.integers(-1, config.hidden_size))
            added = self.op("Add", hidden, linear("attention_output", attended))
            hidden = self.norm(added, f"{name}.attention_norm")
            inner = self._activation(linear("up", hidden), config.hidden_act)
            hidden = self.norm(self.op("Add", hidden, linear("down", inner)), f"{name}.output_norm")
        return self._unflatten(hidden, shape)

    def label_words(self, vector: str) -> None:
        """PromptModel.label_logits through the masked-LM head."""
        kind = "gelu" if self.config.model_type == "roberta" else self.config.hidden_act
        inner = self._activation(self.linear(vector, "backbone.lm_head.dense"), kind)
        self.linear(self.norm(inner, "backbone.lm_head.norm"), "label_words")

    def _activation(self, hidden: str, kind: str) -> str:
        if kind == "relu":
            return self.op("Relu", hidden)
        return self.op("Gelu", hidden, approximate="none" if kind == "gelu" else "tanh")

    def _unflatten(self, flat: str, shape: str) -> str:
        """(B T, D) -> (B, T, D)."""
        return self.op("Reshape", flat, self.op("Concat", shape, self.integers(-1), axis=0))


def segment(graph: Graph, exits: tuple[int, ...], number: int, pool: str) -> onnx.ModelProto:
    """The layers between two exits, and the head of the second; the embeddings too where it is the first one."""
    start, stop = exits[number - 1] if number else 0, exits[number]
    hidden, mask = _rows_that_go_on(graph) if number else graph.embeddings(), _attention_mask(graph)
    hidden = graph.layers(hidden, mask, start, stop)
    if number < len(exits) - 1:
        hidden = graph.output("hidden_out", "batch", "tokens", graph.config.hidden_size, dtype=graph.dtype)
    _exit_head(graph, hidden, mask, number, pool, always=number == len(exits) - 1)
    return graph.model(f"segment_{stop}")


def full(graph: Graph, last: int, pool: str) -> onnx.ModelProto:
    """All layers and the last head: the model without early exits."""
    hidden, mask = graph.embeddings(), _attention_mask(graph)
    hidden = graph.layers(hidden, mask, 0, graph.config.num_hidden_layers)
    _exit_head(graph, hidden, mask, last, pool)
    return graph.model("full")


def encoder(graph: Graph, layer: int) -> onnx.ModelProto:
    """The mean over tokens of the state after a layer, (B, D): queries for retrieval, as encoders.py makes them."""
    hidden, mask = graph.embeddings(), _attention_mask(graph)
    if layer:
        hidden = graph.layers(hidden, mask, 0, layer)
    _mean(graph, hidden, mask)
    graph.output("embedding", "batch", graph.config.hidden_size, dtype=np.float32)
    return graph.model("encoder")


class Streams(NamedTuple):
    """LoRA exits whose streams run side by side: the exits first .. stop - 1, and how their adapters add."""

    first: int
    stop: int
    columns: dict[str, slice]  # target -> where it stands in the linear map that holds it
    scale: float


def streams(graph: Graph, exits: tuple[int, ...], begins: bool, live: Streams, pool: str) -> onnx.ModelProto:
    """The layers up to exit live.first in all live streams, and that exit's head.

    begins: the streams begin here, from the embeddings; else they go on from the exit before.
    """
    count, width = live.stop - live.first, graph.config.hidden_size
    start, stop = 0 if begins else exits[live.first - 1], exits[live.first]
    hidden = graph.embeddings() if begins else _streams_that_go_on(graph, count)
    mask = _attention_mask(graph)
    rows = graph.op("Shape", mask, start=0, end=1)
    if begins and count > 1:
        hidden = graph.op("Concat", *[hidden] * count, axis=0)
    every_mask = graph.op("Concat", *[mask] * count, axis=0) if count > 1 else mask
    hidden = graph.layers(hidden, every_mask, start, stop, _low_rank(graph, live))
    if count > 1:
        axes = graph.op("Shape", mask), graph.integers(width)
        graph.op("Reshape", hidden, graph.op("Concat", graph.integers(count), *axes, axis=0))
        graph.output("hidden_out", count, "batch", "tokens", width, dtype=graph.dtype)
        hidden = graph.op("Slice", hidden, graph.integers(0), rows, graph.integers(0))
    _exit_head(graph, hidden, mask, live.first, pool, always=live.first == len(exits) - 1)
    return graph.model(f"segment_{stop}")


def _streams_that_go_on(graph: Graph, count: int) -> str:
    """All streams but the first, which has been read: (n + 1, B before, T, D) -> (n B, T, D)."""
    width = graph.config.hidden_size
    hidden = graph.input("hidden", count + 1, "rows_before", "tokens", width, dtype=graph.dtype)
    hidden = graph.op("Slice", hidden, graph.integers(1), graph.integers(count + 1), graph.integers(0))
    hidden = graph.op("Gather", hidden, graph.input("rows", "batch"), axis=1)
    tokens = graph.op("Shape", hidden, start=2, end=4)
    return graph.op("Reshape", hidden, graph.op("Concat", graph.integers(-1), tokens, axis=0))


def _low_rank(graph: Graph, live: Streams) -> Adapt:
    """Eq. 6 of LoRAExit, for streams that carry the same tokens: one batched product, as lora_exits.low_rank.

    The adapters of all streams and projections are put together from constants, once, when the graph is loaded.
    """
    count = live.stop - live.first

    def stacked(stored: int, linear: str, letter: str, outputs: int) -> str:
        streams = []
        for exit in range(live.first, live.stop):
            pieces = []
            for target, columns in live.columns.items():
                if TARGETS[target][0] == linear:
                    piece = graph.parameter(f"adapters.{exit}.{stored}.{target}.{letter}")
                    if letter == "B":  # (r, its own outputs) -> (r, outputs), zero beside its own
                        piece = graph.op("Pad", piece, graph.integers(0, columns.start, 0, outputs - columns.stop))
                    pieces.append(piece)
            joined = graph.op("Concat", *pieces, axis=1 if letter == "A" else 0)
            streams.append(graph.op("Unsqueeze", joined, graph.integers(0)))
        return graph.op("Concat", *streams, axis=0)

    def adapt(stored: int, linear: str, x: str, y: str) -> str:
        if all(TARGETS[target][0] != linear for target in live.columns):
            return y
        outputs, width = graph.parameters[f"backbone.layers.{stored}.{linear}.weight"].shape
        x = graph.op("Reshape", x, graph.integers(count, -1, width))
        name = f"adapters_{len(graph.nodes)}"
        shrunk = graph.op("MatMul", x, stacked(stored, linear, "A", outputs), name=f"{name}_shrink")
        shrunk = graph.op("Mul", shrunk, graph.number(live.scale))
        added = graph.op("MatMul", shrunk, stacked(stored, linear, "B", outputs), name=f"{name}_expand")
        return graph.op("Add", y, graph.op("Reshape", added, graph.op("Shape", y)))

    return adapt


def _rows_that_go_on(graph: Graph) -> str:
    """Hidden states (B', T, D), and of them those `rows` (B,) -> (B, T, D)."""
    hidden = graph.input("hidden", "rows_before", "tokens", graph.config.hidden_size, dtype=graph.dtype)
    return graph.op("Gather", hidden, graph.input("rows", "batch"))


def _attention_mask(graph: Graph) -> str:
    """(B, T) of 1 and 0 -> (B, T) of true and false."""
    return graph.op("Cast", graph.input("attention_mask", "batch", "tokens"), to=TensorProto.BOOL)


def _mean(graph: Graph, hidden: str, mask: str) -> str:
    """exits.pooled: (B, T, D) -> (B, D), the mean over the tokens that are not padding."""
    weights = graph.op("Unsqueeze", mask, graph.integers(2))
    weights = graph.op("Cast", weights, to=_onnx_type(graph.dtype))
    total = graph.op("ReduceSum", graph.op("Mul", hidden, weights), graph.integers(1), keepdims=0)
    return graph.op("Div", total, graph.op("ReduceSum", weights, graph.integers(1), keepdims=0))


def _exit_head(graph: Graph, hidden: str, mask: str, number: int, pool: str, always: bool = True) -> None:
    """The head of an exit, always or where the input `read` is true."""
    before = len(graph.nodes), len(graph.outputs)
    _head(graph, hidden, mask, number, pool)
    if not always:
        graph.only_if(graph.input("read", dtype=np.bool_), *before)


def _head(graph: Graph, hidden: str, mask: str, number: int, pool: str) -> None:
    """ExitHead.forward: logits and the largest probability, and what a policy says of the same state; in float32."""
    if pool in ("mask", "last"):  # through a prompt
        vector = graph.op("GatherND", hidden, graph.input("read_at", "batch", 1), batch_dims=1)
        graph.label_words(vector)
        return _logits(graph, len(graph.parameters["label_words.weight"]))
    if f"{graph.prefix}heads.{number}.norm.weight" in graph.parameters:
        hidden = graph.norm(hidden, f"heads.{number}.norm")
    if pool == "first":
        vector = graph.op("Squeeze", graph.op("Slice", hidden, *map(graph.integers, (0, 1, 1))), graph.integers(1))
    else:
        vector = _mean(graph, hidden, mask)
    inner = graph.op("Tanh", graph.linear(vector, f"heads.{number}.dense"))
    classes = len(graph.parameters[f"{graph.prefix}heads.{number}.out.bias"])
    graph.linear(inner, f"heads.{number}.out")
    _logits(graph, classes)
    if f"policies.{number}.0.weight" in graph.parameters:  # ConsistentEE
        inner = graph.op("Gelu", graph.linear(vector, f"policies.{number}.0"))
        _exit_logit(graph, graph.linear(inner, f"policies.{number}.2"))
    elif "certainty.weight" in graph.parameters and f"heads.{number + 1}.out.bias" in graph.parameters:  # BERxiT
        _exit_logit(graph, graph.linear(vector, "certainty"))


def _logits(graph: Graph, classes: int) -> None:
    """The last node as logits; beside them the largest probability, where there are classes."""
    logits = graph.output("logits", "batch", classes, dtype=np.float32)
    if classes > 1:  # judged in the graph: after a segment, numpy's code is no longer in the processor's caches
        graph.op("ReduceMax", graph.op("Softmax", logits, axis=1), graph.integers(1), keepdims=0)
        graph.output("max_probability", "batch", dtype=np.float32)


def _exit_logit(graph: Graph, said: str) -> None:
    """(B, 1) -> (B,)."""
    graph.op("Squeeze", said, graph.integers(1))
    graph.output("exit_logit", "batch", dtype=np.float32)
