"""The ONNX graphs of a decoder that is read through a prompt: what graphs.py has for encoders, by the same names.

A second definition of what prompting.py computes with decoder.py. A row is read once, whole, at its last token, so
there is no cache: every token attends to those before it.
"""

import numpy as np
import onnx

from mini_ee.decoder import DecoderConfig
from mini_ee.export.decoder_graphs import DecoderGraph, Where, embeddings, layers
from mini_ee.export.graphs import attention_mask, label_logits, mean, rows_that_go_on


class PromptGraph(DecoderGraph):
    """A graph on the parameters of a PromptModel. prefix: where in the model the decoder is."""

    def __init__(self, config: DecoderConfig, parameters: dict[str, np.ndarray], prefix: str = ""):
        super().__init__(config, parameters)
        self.root = f"{prefix}backbone"


class _Alone(Where):
    """The tokens of whole rows, with nothing before them."""

    def __init__(self, graph: PromptGraph, mask: str):
        """mask: (B, T) of true and false; padding stands at position 0, and no token reads it."""
        counted = graph.op("CumSum", graph.op("Cast", mask, to=onnx.TensorProto.INT64), graph.integers(1))
        at = graph.op("Max", graph.op("Sub", counted, graph.integers(1)), graph.integers(0))
        before = graph.op(
            "LessOrEqual", *(graph.op("Unsqueeze", at, graph.integers(*axes)) for axes in ((1, 2), (1, 3)))
        )
        self.readable = graph.op("And", before, graph.op("Unsqueeze", mask, graph.integers(1, 2)))  # (B, 1, T, T)
        super().__init__(graph, graph.op("Shape", mask), at)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        config = self.graph.config
        heads = {"q_num_heads": config.num_attention_heads, "kv_num_heads": config.key_value_heads}
        precise = {"softmax_precision": onnx.TensorProto.FLOAT}
        return self.graph.op("Attention", query, key, value, self.readable, **heads, **precise)


def segment(
    config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], number: int, pool: str
) -> onnx.ModelProto:
    """The layers between two exits, and the label words after the second; from the embeddings for the first one."""
    graph = PromptGraph(config, parameters)
    start, stop = exits[number - 1] if number else 0, exits[number]
    hidden, mask = rows_that_go_on(graph) if number else embeddings(graph), attention_mask(graph)
    hidden = layers(graph, hidden, _Alone(graph, mask), start, stop)
    if number < len(exits) - 1:
        hidden = graph.output("hidden_out", "batch", "tokens", config.hidden_size, dtype=graph.dtype)
    _label_words(graph, hidden)
    return graph.model(f"segment_{stop}")


def full(config: DecoderConfig, parameters: dict[str, np.ndarray], last: int, pool: str) -> onnx.ModelProto:
    """All layers and the label words: the model without early exits."""
    graph = PromptGraph(config, parameters)
    hidden, mask = embeddings(graph), attention_mask(graph)
    _label_words(graph, layers(graph, hidden, _Alone(graph, mask), 0, config.num_hidden_layers))
    return graph.model("full")


def encoder(config: DecoderConfig, parameters: dict[str, np.ndarray], layer: int, prefix: str = "") -> onnx.ModelProto:
    """The mean over tokens of the state after a layer, (B, D): queries for retrieval, as encoders.py makes them."""
    graph = PromptGraph(config, parameters, prefix)
    hidden, mask = embeddings(graph), attention_mask(graph)
    if layer:
        hidden = layers(graph, hidden, _Alone(graph, mask), 0, layer)
    mean(graph, hidden, mask)
    graph.output("embedding", "batch", config.hidden_size, dtype=np.float32)
    return graph.model("encoder")


def _label_words(graph: PromptGraph, hidden: str) -> None:
    """PromptModel.label_logits: the final norm and the vocabulary head at one token, for the label words alone."""
    vector = graph.op("GatherND", hidden, graph.input("read_at", "batch", 1), batch_dims=1)
    graph.linear(graph.norm(vector, f"{graph.root}.norm"), "label_words")
    label_logits(graph)
