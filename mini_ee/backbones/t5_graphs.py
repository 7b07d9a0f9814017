"""The ONNX graphs of a T5 that writes token by token: its encoder's, run once, and a block of tokens over caches."""

import numpy as np
import torch
from torch import Tensor

from mini_ee.backbones.backbone import Tensors
from mini_ee.backbones.cache import GraphBlock, graph_cache

MEMORY = "memory"  # what names of inputs begin with that hold what was made of the prompts


class T5Block(GraphBlock):
    """Tokens whose past stands in caches, as GraphBlock has them, and whose prompts an encoder has read.

    What it made of them is fixed: `memory_keys_3` and `memory_values_3` of the decoder's layer 3 (from 0), (prompts,
    memory, H d), and memory_mask (prompts, memory), 1 at tokens.
    """

    def __init__(self, g, backbone, first: int):
        """Declares the inputs positions (B, T), -1 for padding, rows (B,), and the cache of the first layer."""
        self.config = backbone.config
        self.width, self.written, self._turn = self.config.key_value_heads * self.config.head_width, {}, []
        self._gone, self.near, self.scale = None, None, 1.0
        at, slots, self._cache = graph_cache(g, first, self.width)
        at = g.tensor(at, "batch", "tokens", dtype=np.int64)
        self.dims = self.every_dims = at.shape
        with g.tracing():
            distances = g.tensor(slots, "slots", dtype=np.int64) - at[..., None]
            biases = backbone.biases.of_distances(distances)
            self.readable = biases.masked_fill((distances > 0)[:, None], -torch.inf).name  # (B, H, T, slots)

    def attend_memory(self, depth: int, layer, query: Tensor, adapt=None, dropout: float = 0.0) -> Tensor:
        """(B, T, H d) -> (B, T, H d): what the tokens read of their prompts."""
        g, queries = query.g, query.name
        kept = [
            g.input(f"{MEMORY}_{kind}_{depth}", "prompts", "memory", self.width, dtype=g.dtype)
            for kind in ("keys", "values")
        ]
        mask, heads = g.input(f"{MEMORY}_mask", "prompts", "memory"), self.config.num_attention_heads

        def attended(keys: str, values: str, mask: str) -> list:
            seen = g.readable(g.cast(mask, bool), queries)
            read = g.attention(queries, keys, values, seen, heads, heads, self.scale)
            return [g.value(read, "some", "tokens", self.width)]

        everyone = g.op("Equal", g.shape(queries, 0, 1), self._cache.prompts)
        of_some = lambda: attended(*(g.op("Gather", each, self._cache.rows) for each in (*kept, mask)))  # noqa: E731
        return query.like(g.either(everyone, lambda: attended(*kept, mask), of_some)[0].name)


def write_memory(backbone, g) -> None:
    """The graph memory.onnx: input_ids and attention_mask (prompts, memory) -> what a T5Block takes of them."""
    names = ("input_ids", "attention_mask")
    ids, mask = (g.tensor(g.input(name, "prompts", "memory"), "prompts", "memory", dtype=np.int64) for name in names)
    with g.tracing():
        states = backbone.encoder_norm(backbone.encode(Tensors(ids, mask), backbone.text_layers)[0])
        for depth, layer in enumerate(backbone.layers):
            for kind, heads in zip(("keys", "values"), layer.linear("cross_key_value", states, None).chunk(2, dim=-1)):
                g.output(f"{MEMORY}_{kind}_{depth}", heads.name, "prompts", "memory", heads.shape[-1])
    g.output(f"{MEMORY}_mask", g.op("Identity", mask.name), "prompts", "memory", dtype=np.int64)
