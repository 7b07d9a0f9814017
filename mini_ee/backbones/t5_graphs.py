"""The ONNX graphs of a T5 that writes token by token: its encoder's, run once, and a block of tokens over caches."""

import numpy as np

from mini_ee.backbones.cache import GraphBlock, graph_cache

MEMORY = "memory"  # what names of inputs begin with that hold what was made of the prompts


class T5Block(GraphBlock):
    """Tokens whose past stands in caches, as GraphBlock has them, and whose prompts an encoder has read.

    What it made of them is fixed: `memory_keys_3` and `memory_values_3` of the decoder's layer 3 (from 0), (prompts,
    memory, H d), and memory_mask (prompts, memory), 1 at tokens.
    """

    def __init__(self, g, backbone, first: int):
        """Declares the inputs positions (B, T), -1 for padding, rows (B,), and the cache of the first layer."""
        self.config, heads = backbone.config, backbone.config.num_attention_heads
        self.width, self.written, self._turn = heads * self.config.head_width, {}, []
        self._gone = self.near = None
        at, slots, self._cache = graph_cache(g, first, self.width)
        self.shape = self.every_shape = g.shape(at, 0, 2)
        at = g.op("Unsqueeze", at, g.integers(2))
        biases = backbone.biases.graph_of(g, g.op("Sub", slots, at))
        read = g.op("Unsqueeze", g.op("LessOrEqual", slots, at), g.integers(1))
        self.readable = g.op("Where", read, biases, g.number(-np.inf))  # (B, H, T, slots)

    def query(self, g, query: str) -> str:
        """(N, H d) of the rows that are here -> (B, T, H d), times what attention divides by."""
        return g.op("Mul", g.unflatten(query, self.shape, self.width), g.number(self.config.head_width**0.5))

    def attend_memory(self, g, layer: int, query: str) -> str:
        """(B, T, H d) -> (B, T, H d): what the tokens read of their prompts."""
        kept = [
            g.input(f"{MEMORY}_{kind}_{layer}", "prompts", "memory", self.width, dtype=g.dtype)
            for kind in ("keys", "values")
        ]
        mask, heads = g.input(f"{MEMORY}_mask", "prompts", "memory"), self.config.num_attention_heads

        def attended(keys: str, values: str, mask: str) -> list:
            read = g.attention(query, keys, values, g.readable(g.cast(mask, bool), query), heads, heads)
            return [g.value(read, "some", "tokens", self.width)]

        everyone = g.op("Equal", g.shape(query, 0, 1), self._cache.prompts)
        of_some = lambda: attended(*(g.op("Gather", each, self._cache.rows) for each in (*kept, mask)))  # noqa: E731
        return g.either(everyone, lambda: attended(*kept, mask), of_some)[0].name


def write_memory(backbone, g) -> None:
    """The graph memory.onnx: input_ids and attention_mask (prompts, memory) -> what a T5Block takes of them."""
    ids, mask = (g.input(name, "prompts", "memory") for name in ("input_ids", "attention_mask"))
    words, width = g.parameter(backbone.embeddings.weight), backbone.config.hidden_size
    states = backbone.graph_encode(g, g.op("Gather", words, ids), g.cast(mask, bool), backbone.text_layers)
    flat, shape = g.flatten(g.apply(backbone.encoder_norm, states), width), g.shape(ids, 0, 2)
    inner = backbone.config.num_attention_heads * backbone.config.head_width
    for depth, layer in enumerate(backbone.layers):
        stacked = g.unflatten(g.linear(flat, layer.cross_key_value, int8=True), shape)
        for kind, heads in zip(("keys", "values"), g.several(2, "Split", stacked, axis=2, num_outputs=2)):
            g.output(f"{MEMORY}_{kind}_{depth}", heads, "prompts", "memory", inner)
    g.output(f"{MEMORY}_mask", g.op("Identity", mask), "prompts", "memory", dtype=np.int64)
