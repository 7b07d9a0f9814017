"""The ONNX graphs of a decoder with exits, node by node. A second definition of what decoder.py computes.

    segment  input_ids or hidden, positions, rows, caches -> hidden_out, caches_out: the layers between two exits
    fill     hidden, positions, rows, caches -> caches_out: the keys and values alone, from a state that stands in for
             the layers' own input (propagate); recompute needs no graph of its own, it is `segment` on those tokens
    head     hidden -> logits, and below the last layer `largest`, its two largest probabilities
    policy   hidden -> exit_logit, where the model says itself when to leave

One segment serves the prompt (T tokens), the step (T = 1) and the block that catches up. `keys_3`, `values_3` are the
whole cache of layer 3 (from 0), (prompts, slots, KV d), in which slot p holds position p and the last slot takes
padding; they come out as `keys_3_out`, `values_3_out`, which the caller lays over the inputs: then nothing is copied
but the new tokens. `rows` (B,) says which prompts the rows of `hidden` are. A head is a graph of its own, because it
costs as much as a layer or more, and neither the prompt, nor a block that catches up, nor a planned exit reads it.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper

from mini_ee.backbones.llama import DecoderConfig, rope_frequencies
from mini_ee.export.graphs import CONSTANT, Adapt, Graph

GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class DecoderGraph(Graph):
    """A graph on the parameters of decoder.py, of the decoder that the model calls `root`."""

    root = "decoder"

    def constant(self, name: str, values: np.ndarray) -> str:
        """A constant by name, held in the graph itself."""
        self.initializers[CONSTANT + name] = values
        return CONSTANT + name

    def linear(self, hidden: str, name: str) -> str:
        """(N, I) -> (N, O), as nn.Linear, with or without a bias."""
        return self._gemm(hidden, *map(self.parameter, self._names(name)), name=f"{name}_{len(self.nodes)}")

    def norm(self, hidden: str, name: str) -> str:
        """The model's norm over the last axis."""
        weight, *bias = map(self.parameter, self._names(name))
        if bias:
            return self.op("LayerNormalization", hidden, weight, *bias, epsilon=self.config.norm_eps)
        if self.config.model_type == "gemma":
            weight = self.op("Add", weight, self.number(1.0))
        return self.op("RMSNormalization", hidden, weight, epsilon=self.config.norm_eps)

    def activation(self, hidden: str) -> str:
        """hidden_act of the config."""
        kind = self.config.hidden_act
        if kind == "relu":
            return self.op("Relu", hidden)
        if kind == "silu":
            return self.op("Mul", hidden, self.op("Sigmoid", hidden))
        return self.op("Gelu", hidden, approximate=GELUS[kind])

    def embeddings(self) -> str:
        """Decoder.embed."""
        ids = self.input("input_ids", "batch", "tokens")
        hidden = self.op("Gather", self.parameter(f"{self.root}.embeddings.weight"), ids)
        if self.config.model_type == "gemma":
            hidden = self.op("Mul", hidden, self.number(self.config.hidden_size**0.5))
        return hidden

    def layers_at(self, hidden: str, where: "Where", start: int, stop: int, adapt: Adapt | None = None) -> str:
        """From hidden[start] to hidden[stop], (B, T, D), of tokens that stand there."""
        flat = self.op("Reshape", hidden, self.integers(-1, self.config.hidden_size))
        for layer in range(start, stop):
            flat = self._layer(flat, where, layer, adapt)
        return self.op("Reshape", flat, where.shape(self.config.hidden_size))

    def _layer(self, flat: str, where: "Where", layer: int, adapt: Adapt | None) -> str:
        """Layer.forward on (B T, D)."""

        def linear(name: str, x: str) -> str:
            y = self.linear(x, f"{root}.{name}")
            return y if adapt is None else adapt(layer, name, x, y)

        def mlp(normed: str) -> str:
            inner = linear("up", normed)
            if config.model_type == "phi":
                return linear("down", self.activation(inner))
            return linear("down", self.op("Mul", self.activation(linear("gate", normed)), inner))

        config, root = self.config, f"{self.root}.layers.{layer}"
        normed = self.norm(flat, f"{root}.attention_norm")
        query = config.num_attention_heads * config.head_width
        stacked = self.op("Reshape", linear("qkv", normed), where.shape(query + 2 * where.width))
        turning, value = self.several(2, "Split", stacked, self.integers(query + where.width, where.width), axis=2)
        turned = where.rotate(turning, config.num_attention_heads + config.key_value_heads)
        query, key = self.several(2, "Split", turned, self.integers(query, where.width), axis=2)
        attended = where.attend(layer, query, key, value)
        attended = self.op("Reshape", attended, self.integers(-1, config.num_attention_heads * config.head_width))
        attended = linear("attention_output", attended)
        if config.model_type == "phi":
            return self.op("Add", self.op("Add", flat, attended), mlp(normed))
        flat = self.op("Add", flat, attended)
        return self.op("Add", flat, mlp(self.norm(flat, f"{root}.mlp_norm")))

    def key_value(self, hidden: str, name: str) -> str:
        """(N, D) -> (N, 2 KV d): the stacked projection without its queries; the cut is made once, at loading."""
        query = self.config.num_attention_heads * self.config.head_width
        cut = [
            self.op("Slice", each, *map(self.integers, (query, len(self.parameters[each]), 0)))
            for each in map(self.parameter, self._names(name))
        ]
        return self._gemm(hidden, *cut)

    def _gemm(self, hidden: str, *weight_and_bias: str, **named: str) -> str:
        return self.op("Gemm", hidden, *weight_and_bias, transB=1, **named)

    def _names(self, name: str) -> list[str]:
        return [each for each in (f"{name}.weight", f"{name}.bias") if self.prefix + each in self.parameters]


def segment(
    config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int
) -> onnx.ModelProto:
    """The layers between two exits, (B, T, D) -> (B, T, D); before the first one from input_ids (B, T)."""
    graph = DecoderGraph(config, parameters)
    hidden = _hidden(graph) if number else graph.embeddings()
    start = exits[number - 1] if number else 0
    graph.layers_at(hidden, _InCache(graph, start), start, exits[number])
    graph.output("hidden_out", "batch", "tokens", config.hidden_size, dtype=graph.dtype)
    return graph.model(f"segment_{exits[number]}")


def fill(
    config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int
) -> onnx.ModelProto:
    """Layer.write_keys of the layers of a segment, all from one state: hidden (B, T, D)."""
    graph = DecoderGraph(config, parameters)
    flat = graph.op("Reshape", _hidden(graph), graph.integers(-1, config.hidden_size))
    where = _InCache(graph, exits[number - 1])
    for layer in range(exits[number - 1], exits[number]):
        name = f"{graph.root}.layers.{layer}"
        both = graph.key_value(graph.norm(flat, f"{name}.attention_norm"), f"{name}.qkv")
        both = graph.op("Reshape", both, where.shape(2 * where.width))
        key, value = graph.several(2, "Split", both, axis=2, num_outputs=2)
        where.write(layer, where.rotate(key, config.key_value_heads), value)
    return graph.model(f"fill_{exits[number]}")


def head(config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int):
    """An exit's vocabulary head, (B, D) -> (B, V) float32; the last is the model's own, with the final norm."""
    graph, last = DecoderGraph(config, parameters), number == len(exits) - 1
    root = graph.root if last else f"heads.{number}"
    norm, linear = f"{root}.norm", f"{root}.{'lm_head' if last else 'linear'}"
    if last and config.tie_word_embeddings:
        linear = f"{root}.embeddings"
    hidden = graph.input("hidden", "batch", config.hidden_size, dtype=graph.dtype)
    graph.linear(graph.norm(hidden, norm), linear)
    logits = graph.output("logits", "batch", config.vocab_size, dtype=np.float32)
    if not last:
        graph.several(2, "TopK", graph.op("Softmax", logits, axis=1), graph.integers(2), axis=1)
        graph.output("largest", "batch", 2, dtype=np.float32)
    return graph.model(f"head_{exits[number]}")


def policy(config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int):
    """What decides at an exit, behind the norm of its head, (B, D) -> (B,): ConsistentEE's networks, or CALM's."""
    graph = DecoderGraph(config, parameters)
    hidden = graph.input("hidden", "batch", config.hidden_size, dtype=graph.dtype)
    normed = graph.norm(hidden, f"heads.{number}.norm")
    if "classifier.weight" in parameters:
        said = graph.linear(normed, "classifier")
    else:
        inner = graph.op("Gelu", graph.linear(normed, f"networks.{number}.0"))
        said = graph.linear(inner, f"networks.{number}.2")
    graph.op("Squeeze", said, graph.integers(1))
    graph.output("exit_logit", "batch", dtype=np.float32)
    return graph.model(f"policy_{exits[number]}")


def _hidden(graph: DecoderGraph) -> str:
    return graph.input("hidden", "batch", "tokens", graph.config.hidden_size, dtype=graph.dtype)


class Where:
    """Where the tokens of a graph stand, made once for all its layers."""

    def __init__(self, graph: DecoderGraph, batch_and_tokens: str, at: str):
        """batch_and_tokens: (2,), how many there are; at: (B, T), their positions, which begin at 0."""
        self.graph, self.batch_and_tokens, config = graph, batch_and_tokens, graph.config
        self.width = config.key_value_heads * config.head_width
        frequencies = graph.constant("rope_frequencies", rope_frequencies(config).numpy())
        turned = graph.op("Unsqueeze", graph.op("Cast", at, to=TensorProto.FLOAT), graph.integers(2))
        angle = graph.op("Mul", turned, frequencies)
        kind = helper.np_dtype_to_tensor_dtype(graph.dtype)
        self.cos, self.sin = (graph.op("Cast", graph.op(each, angle), to=kind) for each in ("Cos", "Sin"))

    def shape(self, width: int) -> str:
        """(B, T, width)."""
        return self.graph.op("Concat", self.batch_and_tokens, self.graph.integers(width), axis=0)

    def rotate(self, heads: str, count: int) -> str:
        """decoder.rotate: (B, T, count d) -> the same."""
        config = self.graph.config
        partial = {"rotary_embedding_dim": config.rotary_width} if config.rotary_width < config.head_width else {}
        return self.graph.op("RotaryEmbedding", heads, self.cos, self.sin, num_heads=count, **partial)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """(B, T, H d), and keys and values (B, T, KV d) -> (B, T, H d)."""
        raise NotImplementedError


class _InCache(Where):
    """The tokens of some prompts, whose keys and values stand in caches: what decoder.Block is there."""

    def __init__(self, graph: DecoderGraph, first: int):
        """first: the graph's first layer, whose cache says how many prompts and slots there are."""
        positions = graph.input("positions", "batch", "tokens")  # -1 for padding
        self.rows = graph.input("rows", "batch")
        batch_and_tokens = graph.op("Shape", positions)
        prompts, slots = (graph.op("Shape", f"keys_{first}", start=axis, end=axis + 1) for axis in (0, 1))
        self.everyone = graph.op("Equal", graph.op("Shape", self.rows), prompts)

        row = graph.op("Expand", graph.op("Unsqueeze", self.rows, graph.integers(1)), batch_and_tokens)
        pair = [graph.op("Unsqueeze", each, graph.integers(2)) for each in (row, positions)]
        self.index = graph.op("Concat", *pair, axis=2)  # (B, T, 2); -1 is the last slot

        at = graph.op("Max", positions, graph.integers(0))
        zero, one = (graph.constant(f"scalar_{value}", np.array(value, np.int64)) for value in (0, 1))
        every_slot = graph.op("Range", zero, graph.op("Squeeze", slots), one)
        self.readable = graph.op("LessOrEqual", every_slot, graph.op("Unsqueeze", at, graph.integers(1, 3)))
        super().__init__(graph, batch_and_tokens, at)

    def write(self, layer: int, key: str, value: str) -> list[str]:
        """Put keys and values (B, T, KV d) into the layer's caches; returns the names of both as they are then."""
        written = []
        for kind, new in (("keys", key), ("values", value)):
            axes = "prompts", "slots", self.width
            cache = self.graph.input(f"{kind}_{layer}", *axes, dtype=self.graph.dtype)
            self.graph.op("ScatterND", cache, self.index, new)
            written.append(self.graph.output(f"{cache}_out", *axes, dtype=self.graph.dtype))
        return written

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Through the caches, which the new keys and values join: of some rows gathered, of all read in place."""
        config = self.graph.config
        keys, values = self.write(layer, key, value)
        heads = {"q_num_heads": config.num_attention_heads, "kv_num_heads": config.key_value_heads}
        branches = {}
        for branch in ("then", "else"):
            name, read, nodes = f"{branch}_{len(self.graph.nodes)}", (keys, values), []
            if branch == "else":
                read = f"{name}_keys", f"{name}_values"
                nodes = [helper.make_node("Gather", (each, self.rows), [to]) for each, to in zip((keys, values), read)]
            precise = {"softmax_precision": TensorProto.FLOAT}
            nodes.append(helper.make_node("Attention", (query, *read, self.readable), [name], **heads, **precise))
            kind = helper.np_dtype_to_tensor_dtype(self.graph.dtype)
            output = helper.make_tensor_value_info(
                name, kind, ("batch", "tokens", config.num_attention_heads * config.head_width)
            )
            branches[f"{branch}_branch"] = helper.make_graph(nodes, name, [], [output])
        return self.graph.op("If", self.everyone, **branches)
