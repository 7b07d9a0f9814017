"""The ONNX graphs of a decoder that reads whole rows to classify them: its part of what graphs.py writes.

A second definition of what decoder.py computes under exit heads, LoRA exits or a prompt. A row is read once, whole, so
there is no cache: every token attends to those before it.
"""

import onnx

from mini_ee.export.decoder_graphs import DecoderGraph, Where
from mini_ee.export.graphs import Adapt


class CausalGraph(DecoderGraph):
    """A graph on the parameters of a classifier, which calls its decoder `backbone`."""

    root = "backbone"

    def layers(self, hidden: str, mask: str, start: int, stop: int, adapt: Adapt | None = None) -> str:
        return self.layers_at(hidden, _Alone(self, mask), start, stop, adapt)

    def label_words(self, vector: str) -> None:
        """PromptModel.label_logits through the final norm and the vocabulary head."""
        self.linear(self.norm(vector, f"{self.root}.norm"), "label_words")


class _Alone(Where):
    """The tokens of whole rows, with nothing before them."""

    def __init__(self, graph: CausalGraph, mask: str):
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
