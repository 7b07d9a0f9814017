"""The contexts of a decoder's layers in ONNX graphs: positions, masks and caches, as graph values.

GraphBlock has the methods of LayerContext (backbones/cache.py), so the torch code of a layer is traced with it. No
other code makes nodes for decoders.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import AdaptLayer, Tensors
from mini_ee.lab.backbones.cache import token_positions
from mini_ee.lab.backbones.generative import CausalDecoder
from mini_ee.lab.export.replaced import replaces
from mini_ee.lab.export.tracing import Value

MEMORY = "memory"  # prefix of graph inputs with keys, values and mask of the encoder's output


class GraphCache(NamedTuple):
    """The names of graph values that address the caches."""

    places: str  # (B, T, 2): cache row and slot of each token
    rows: str  # (B,): the cache row of each row of the batch
    prompts: str  # (1,): the number of cache rows


def cache_inputs(g: Any, config: Any, first: int | str) -> tuple[Tensor, Tensor, GraphCache]:
    """The positions of tokens, (B, T) from 0, all slots, (S,), and the cache.

    Declares the graph inputs positions (B, T), -1 at padding, rows (B,), the prompt of each row, and the keys of layer
    `first`, (prompts, slots, KV d).
    """
    positions, rows = g.input("positions", "batch", "tokens"), g.input("rows", "batch")
    width = config.key_value_heads * config.head_width
    keys = g.input(f"keys_{first}", "prompts", "slots", width, dtype=g.dtype)
    # places[b, t] = (rows[b], positions[b, t]). Position -1, padding, addresses the last slot.
    row = g.op("Expand", g.op("Unsqueeze", rows, g.integers(1)), g.shape(positions, 0, 2))
    places = g.op("Concat", *(g.op("Unsqueeze", indices, g.integers(2)) for indices in (row, positions)), axis=2)
    zero, one = (g.constant(f"scalar_{value}", np.array(value)) for value in (0, 1))
    slots = g.op("Range", zero, g.op("Squeeze", g.shape(keys, 1, 2)), one)
    at = g.tensor(g.op("Max", positions, g.integers(0)), "batch", "tokens", dtype=np.int64)
    return at, g.tensor(slots, "slots", dtype=np.int64), GraphCache(places, rows, g.shape(keys, 0, 1))


def graph_cos_sin(config: Any, at: Tensor, cached: bool) -> list[Tensor]:
    """cos and sin (B, T, R/2) of positions (B, T), computed: a table of all positions would make the file large."""
    if not config.rotary_width:
        return []
    frequencies = config.rope_frequencies()
    if not cached and config.short_tokens is not None:  # LongRoPE: the longest position of a row chooses its factors
        is_long = at.amax(1)[:, None, None] >= config.short_tokens
        frequencies = torch.where(is_long, config.rope_frequencies(long=True), frequencies)
    angle = at.float()[..., None] * frequencies
    cos_sin = [angle.cos(), angle.sin()]
    return cos_sin if config.rope_scale == 1 else [table * config.rope_scale for table in cos_sin]


class GraphBlock:
    """LayerContext in a graph: of whole texts, whose tokens read each other, or of tokens that read a cache.

    The cache of layer 3 (from 0) is the inputs `keys_3` and `values_3`, (prompts, slots, KV d): slot p is for position
    p, the last slot for padding. A layer puts the names of the updated caches into `written`. The caller binds each
    output to the memory of its input, so only the new tokens are copied.
    """

    scale: float | None = None  # factor of the products of queries and keys; None: 1 / sqrt(d)

    def __init__(
        self,
        config: Any,
        at: Tensor,
        masks: Sequence[Tensor | None],
        cos_sin: Sequence[Tensor] = (),
        cache: GraphCache | None = None,
    ):
        """at (B, T): positions, from 0. masks: as in LayerContext, for layers without and with a window.

        cos_sin: cos and sin (B, T, R/2), if the family has rotary positions. cache: None if tokens read each other.
        """
        self.config, self.at, self._cache = config, at, cache
        self.readable, self.window_mask = (mask if mask is None else _in_graph(mask) for mask in masks)
        self._cos_sin = [_in_graph(table) for table in cos_sin]
        self.dims = self.written_dims = at.shape  # of the running tokens; of all tokens that write keys
        self.width = config.key_value_heads * config.head_width
        self.padding: Any = None  # (B, 1, 1, T), true at tokens, if tokens read each other
        self.written: dict[str, str] = {}  # name of a cache input -> name of the updated cache
        self._exited: str | None = None
        self._exit: int | None = None  # see `of_exit`

    @classmethod
    def of_texts(cls, decoder: Any, mask: Tensor) -> "GraphBlock":
        """For whole texts, padded on either side. mask (B, T): true at tokens."""
        at, padding = token_positions(mask).clamp(min=0), mask[:, None, None, :]
        block = cls(decoder.config, at, decoder.masks(at, at, padding), graph_cos_sin(decoder.config, at, cached=False))
        block.padding = padding
        return block

    @classmethod
    def over_caches(cls, g: Any, decoder: Any, first: int | str) -> "GraphBlock":
        """For tokens that read a cache, in a graph that begins with layer `first` (from 0; exit_k: the own layer of
        exit k). Declares its inputs."""
        config = decoder.config
        at, slots, cache = cache_inputs(g, config, first)
        return cls(config, at, decoder.masks(at, slots[None]), graph_cos_sin(config, at, cached=True), cache)

    def of_rows(self, running: Tensor, exited: Tensor, states: Tensor) -> "GraphBlock":
        """The block of the rows `running` (B',), whose layers also write keys and values for the rows `exited` (M,).

        states (M, T, D): the hidden states at their exits, which replace the input of all deeper layers. Only running
        rows attend (`readable`, `rows`). Keys of both are rotated and written (`_cos_sin`, `places`), running first.
        """
        block, both, g = copy(self), torch.cat((running, exited)), running.g
        block.dims, block.written_dims = ((rows.shape[0], self.dims[1]) for rows in (running, both))
        read, write = running.name, both.name
        assert self._cache is not None  # only tokens that read a cache exit on their own
        block.readable, block.written = g.op("Gather", self.readable, read), {}
        block.window_mask = self.window_mask and g.op("Gather", self.window_mask, read)
        block._cos_sin = [g.op("Gather", table, write) for table in self._cos_sin]
        places, rows = g.op("Gather", self._cache.places, write), g.op("Gather", self._cache.rows, read)
        block._cache = GraphCache(places, rows, self._cache.prompts)
        block._exited = states.flat
        return block

    def of_exit(self, k: int) -> "GraphBlock":
        """As in LayerContext; its caches are keys_exit_k and values_exit_k."""
        block = copy(self)
        block._exit = k
        return block

    def keep(self, rows: Tensor) -> "GraphBlock":
        """The context of the given rows of a batch of whole texts."""
        block, g = copy(self), rows.g
        block.readable, block.padding = g.op("Gather", self.readable, rows.name), self.padding[rows]
        block.window_mask = self.window_mask and g.op("Gather", self.window_mask, rows.name)
        block._cos_sin = [g.op("Gather", table, rows.name) for table in self._cos_sin]
        block.dims = block.written_dims = (rows.shape[0], self.dims[1])
        return block

    def repeat(self, count: int) -> "GraphBlock":
        block, g = copy(self), self.padding.g
        block.padding = self.padding.repeat(count, 1, 1, 1)
        block.readable = g.op("Tile", self.readable, g.integers(count, 1, 1, 1))
        block.window_mask = self.window_mask and g.op("Tile", self.window_mask, g.integers(count, 1, 1, 1))
        block._cos_sin = [g.op("Tile", table, g.integers(count, 1, 1)) for table in self._cos_sin]
        block.dims = block.written_dims = (block.padding.shape[0], self.dims[1])
        return block

    def unwritten(self) -> "GraphBlock":
        """A copy whose caches are not updated yet, for another branch of an If."""
        block = copy(self)
        block.written = {}
        return block

    def with_exited(self, hidden: Tensor) -> Tensor:
        if self._exited is None:
            return hidden
        both = hidden.g.op("Concat", hidden.flat, self._exited, axis=0)
        return hidden.flat_like(both, (*self.written_dims, hidden.shape[-1]))

    def without_exited(self, x: Tensor) -> Tensor:
        return x if self._exited is None else x[: self.dims[0]]

    def rotate(self, x: Tensor, count: int) -> Tensor:
        config = self.config
        part = {"rotary_embedding_dim": config.rotary_width} if config.rotary_width < config.head_width else {}
        return x.like(x.g.op("RotaryEmbedding", x.name, *self._cos_sin, num_heads=count, **part))

    def write(self, depth: int, key: Tensor, value: Tensor) -> list[str]:
        """As in LayerContext; returns the names of the updated keys and values."""
        assert self._cache is not None
        layer = depth if self._exit is None else f"exit_{self._exit}"
        for kind, new in (("keys", key), ("values", value)):
            cache = new.g.input(f"{kind}_{layer}", "prompts", "slots", self.width, dtype=new.g.dtype)
            self.written[cache] = new.g.op("ScatterND", cache, self._cache.places, new.name)
        return [self.written[f"{kind}_{layer}"] for kind in ("keys", "values")]

    def attend(self, depth: int, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        g, heads = query.g, (self.config.num_attention_heads, self.config.key_value_heads)
        mask = self.readable if self.config.window(depth) is None else self.window_mask
        if self._cache is None:
            return query.like(g.attention(query.name, key.name, value.name, mask, *heads, self.scale))
        queries, caches = query.name, self.write(depth, key, value)

        def attend(keys: str, values: str) -> str:
            return g.attention(queries, keys, values, mask, *heads, self.scale)

        return self._over(caches, query, self.readable, attend)

    def _over(self, tensors: Sequence[str], query: Tensor, running: str, attend: Callable[..., str]) -> Tensor:
        """attend(*tensors), like `query`. If all rows run, tensors of all prompts are read in place; else those of the
        running rows are gathered first. running: a value whose first axis is the running rows."""
        assert self._cache is not None
        g, cache = query.g, self._cache

        def read(*names: str) -> list:
            return [g.value(attend(*names), "some", "tokens", query.shape[-1])]

        def gathered() -> list:
            return read(*(g.op("Gather", tensor, cache.rows) for tensor in tensors))

        all_run = g.op("Equal", g.shape(running, 0, 1), cache.prompts)
        return query.like(g.either(all_run, lambda: read(*tensors), gathered)[0].name)


@replaces(CausalDecoder, "context")
def _context(context: Callable, decoder: CausalDecoder, inputs: Any):
    """The context of whole texts: `context` itself unless the inputs are values of a graph."""
    if not isinstance(inputs.input_ids, Value):
        return context(decoder, inputs)
    mask: Any = inputs.attention_mask if decoder.text_end is None else decoder.until_last(inputs)
    return GraphBlock.of_texts(decoder, mask.bool())


class MemoryBlock(GraphBlock):
    """The same for T5, whose tokens also read the encoder's output for their prompts.

    The inputs `memory_keys_3` and `memory_values_3`, (prompts, memory, H d), are the keys and values of the encoder's
    output in the decoder's layer 3 (from 0). memory_mask (prompts, memory) is 1 at tokens.
    """

    scale = 1.0

    @classmethod
    def over_caches(cls, g: Any, decoder: Any, first: int) -> "MemoryBlock":
        at, slots, cache = cache_inputs(g, decoder.config, first)
        distances = slots - at[..., None]  # (B, T, S): key slot minus query position
        biases = decoder.biases.of_distances(distances).masked_fill((distances > 0)[:, None], -torch.inf)
        return cls(decoder.config, at, (biases, None), cache=cache)

    def attend_memory(
        self, depth: int, layer: nn.Module, query: Tensor, adapt: AdaptLayer | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Cross attention to the encoder's output, (B, T, H d) -> (B, T, H d)."""
        g, queries, heads = query.g, query.name, self.config.num_attention_heads
        tensors = [
            g.input(f"{MEMORY}_{kind}_{depth}", "prompts", "memory", self.width, dtype=g.dtype)
            for kind in ("keys", "values")
        ]

        def attend(keys: str, values: str, mask: str) -> str:
            allowed = g.readable(g.cast(mask, bool), queries)
            return g.attention(queries, keys, values, allowed, heads, heads, self.scale)

        return self._over([*tensors, g.input(f"{MEMORY}_mask", "prompts", "memory")], query, queries, attend)

    @staticmethod
    def write_memory(decoder: Any, g: Any) -> None:
        """The graph memory.onnx: input_ids and attention_mask (prompts, memory) -> the `memory_` inputs of this."""
        names, axes = ("input_ids", "attention_mask"), ("prompts", "memory")
        ids, mask = (g.tensor(g.input(name, *axes), *axes, dtype=np.int64) for name in names)
        with g.tracing():
            states = decoder.encoder_norm(decoder.encode(Tensors(ids, mask), decoder.text_layers)[0])
            for depth, layer in enumerate(decoder.layers):
                heads = layer.linear("cross_key_value", states, None).chunk(2, dim=-1)
                for kind, tensor in zip(("keys", "values"), heads):
                    g.output(f"{MEMORY}_{kind}_{depth}", tensor.name, *axes, tensor.shape[-1])
        g.output(f"{MEMORY}_mask", g.op("Identity", mask.name), *axes, dtype=np.int64)


def _in_graph(x: Tensor) -> str:
    """The name of a graph value, cast to the graph's dtype if it is floating-point."""
    return x.g.cast(x.name, x.g.dtype) if x.is_floating_point() and x.kind != x.g.dtype else x.name
