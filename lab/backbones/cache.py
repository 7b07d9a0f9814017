"""The key/value cache of decoders, and the contexts of their layers: positions, masks and caches of a batch.

LayerContext is the context in torch, GraphBlock the one in ONNX graphs. No other code makes nodes for decoders.

The cache is addressed by position, not by column: the key of a row's token at position p is in slot p, however the
batch is padded. So one comparison, slot <= position, is the causal mask. It also hides padding and the keys of rejected
drafts. A context lists the cache rows of its tokens, so the cache does not change if rows exit.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from mini_ee.lab.backbones.backbone import tensor_on

Builder = Any  # export.builder.Builder, which this folder must not import


def token_positions(attention_mask: Tensor) -> Tensor:
    """(B, T) of 1 and 0 -> the position of each token in its row, from 0, and -1 at padding, on either side."""
    real = attention_mask.bool()
    return (real.cumsum(1) - 1).masked_fill(~real, -1)


def readable(at: Tensor, reads: Tensor, window: int | None = None) -> Tensor:
    """The causal mask of queries at positions `at`, (B or 1, T), over keys at positions `reads`, (B or 1, S).

    A token reads itself and all tokens before it; with a window only the last `window` of these. Returns
    (B or 1, 1, T, S) bool, true where a key may be read.
    """
    at, reads = at[:, None, :, None], reads[:, None, None, :]
    causal = reads <= at
    return causal if window is None else causal & (reads > at - window)


class Cache:
    """Keys and values of up to `rows` texts of up to `capacity` tokens, allocated once and written in place.

    keys[layer], values[layer]: (rows, KV heads, capacity + 1, d). Slot p is for position p, the last slot for padding.
    """

    def __init__(self, decoder: Any, rows: int, capacity: int):
        """decoder: a GenerativeBackbone. Raises ValueError if it cannot generate texts of this length."""
        config, weight = decoder.config, next(decoder.parameters())
        if capacity > decoder.max_written:
            raise ValueError(
                f"expected at most {decoder.max_written} tokens, prompt and continuation together, got {capacity}: "
                f"shorten the prompt or ask for fewer tokens"
            )
        self.capacity = capacity
        shape = (config.num_hidden_layers, rows, config.key_value_heads, capacity + 1, config.head_width)
        self.keys: Any = weight.new_zeros(shape)
        self.values: Any = weight.new_zeros(shape)
        self.exits: dict[int, Cache] = {}  # see `of_exit`
        self.memory: Any = None  # the output of an encoder for the prompts (t5_layers.Memory), if there is an encoder

    def of_exit(self, k: int) -> "Cache":
        """The cache of a layer that exit k has of its own: it is a copy of the last layer, and has its depth."""
        if k not in self.exits:
            own, depth = copy(self), len(self.keys) - 1
            own.keys, own.values = ({depth: torch.zeros_like(each[depth])} for each in (self.keys, self.values))
            self.exits[k] = own
        return self.exits[k]

    def slots_of(self, positions: Tensor, rows: list[int] | None) -> tuple[Tensor, Tensor]:
        """The slots for tokens at positions (B, T), -1 for padding: an index of `write`. rows: see `LayerContext`.

        The indices of rows, (B, 1), and of slots, (B, T), broadcast. Padding goes to the last slot.
        """
        cache_rows = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        return cache_rows.to(positions.device)[:, None], torch.where(positions < 0, self.capacity, positions)

    def write(self, depth: int, slots: tuple, key: Tensor, value: Tensor) -> None:
        """Write keys and values (B, T, KV d) of the layer at this depth (from 0). slots: an index (rows, slots)."""
        for cache, new in ((self.keys[depth], key), (self.values[depth], value)):
            # Seen as (rows, slots, KV, d), a view, so that one index (rows, slots) addresses all heads of a token.
            cache.transpose(1, 2)[slots] = new.unflatten(-1, (cache.shape[1], -1))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, Eq. 34): rotate the pairs (x_i, x_{i+R/2}); values from index R on are kept.

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d). In a graph it
    is one node.
    """
    if has_torch_function_unary(heads):
        return handle_torch_function(rotate, (heads,), heads, cos, sin)
    width = cos.shape[-1]
    pairs = heads[..., :width]
    # roll by R/2 puts the partner of each value in its place: x_i cos - x_{i+R/2} sin and x_{i+R/2} cos + x_i sin.
    rotated = torch.addcmul(pairs * cos, pairs.roll(width // 2, -1), sin)
    return rotated if width == heads.shape[-1] else torch.cat((rotated, heads[..., width:]), dim=-1)


class LayerContext(NamedTuple):
    """The context in torch of B x T tokens that run together: their positions, their masks and their cache.

    GraphBlock has the same methods (with_exited, without_exited, rotate, write, attend), so a layer is written once.
    """

    config: Any  # a GenerativeConfig
    cos: Tensor | None  # (B or 1, T, 1, R); None: the family has no rotary positions
    sin: Tensor | None
    mask: Tensor | None  # (B or 1, 1, T, S) bool, true where a key may be read; or (B or 1, H, T, S) added to scores
    causal: bool  # without a mask: True if a token reads the tokens up to itself, False if it reads all keys
    end: int  # the slots below it are read
    padding: Tensor | None = None  # (B, 1, 1, T), true at tokens; None: no padding, or there is a cache
    cache: Cache | None = None  # None: the tokens read each other
    rows: list[int] | None = None  # the cache rows of the tokens; None: all rows in order
    slots: tuple | None = None  # the index of new keys and values in a layer's cache, (rows, slots, ...)
    window_mask: Tensor | None = None  # the mask of layers with a window; None: the window includes all keys

    def of_exit(self, k: int) -> "LayerContext":
        """The context for the layer that exit k has of its own."""
        return self if self.cache is None else self._replace(cache=self.cache.of_exit(k))

    def with_exited(self, hidden: Tensor) -> Tensor:
        """hidden (B, T, D), followed by the rows that have exited but still write keys: in torch there are none."""
        return hidden

    def without_exited(self, x: Tensor) -> Tensor:
        """The rows of `with_exited` that are still running."""
        return x

    def rotate(self, x: Tensor, count: int) -> Tensor:
        """Rotate `count` heads by the positions of the tokens: (B, T, count d) -> the same shape."""
        return rotate(x.unflatten(-1, (count, -1)), self.cos, self.sin).flatten(-2)

    def write(self, depth: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values (B, T, KV d) to the cache of the layer at this depth (from 0)."""
        assert self.cache is not None and self.slots is not None
        self.cache.write(depth, self.slots, key, value)

    def attend(self, depth: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of tokens to all tokens up to themselves: (B, T, H d), keys, values (B, T, KV d) -> (B, T, H d)."""
        mask, causal = self.mask, self.causal
        if self.window_mask is not None and self.config.window(depth) is not None:
            mask, causal = self.window_mask, False
        query = query.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
        if self.cache is None:
            heads = self.config.key_value_heads
            key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (key, value))
            attended = self._attend(query, key, value, mask, causal)
        else:
            self.write(depth, key, value)
            key, value = self.cache.keys[depth][:, :, : self.end], self.cache.values[depth][:, :, : self.end]
            if self.rows is None:
                attended = self._attend(query, key, value, mask, causal)
            else:  # row by row on views of the cache: to gather a copy of the rows takes longer than attention itself
                assert mask is not None  # `block` makes one whenever it lists rows
                attended = torch.cat(
                    [
                        self._attend(query[i, None], key[row, None], value[row, None], mask[i, None], False)
                        for i, row in enumerate(self.rows)
                    ]
                )
        return attended.transpose(1, 2).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        grouped = self.config.key_value_heads < self.config.num_attention_heads
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        """The context of the given rows; not with a cache, for which `CausalDecoder.block` makes one per token."""
        return self._changed(lambda tensor: tensor[tensor_on(tensor.device, rows)])

    def repeat(self, count: int) -> "LayerContext":
        return self._changed(lambda tensor: tensor.repeat(count, 1, 1, 1))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "LayerContext":
        names = ("cos", "sin", "mask", "padding", "window_mask")
        parts = {name: getattr(self, name) for name in names}
        # A tensor of length 1 is broadcast over all rows, so it stays as it is.
        return self._replace(**{name: change(t) for name, t in parts.items() if t is not None and len(t) > 1})


# ---- ONNX graphs ----


class GraphCache(NamedTuple):
    """The names of graph values that address the caches."""

    places: str  # (B, T, 2): cache row and slot of each token
    rows: str  # (B,): the cache row of each row of the batch
    prompts: str  # (1,): the number of cache rows


def cache_inputs(g: Builder, config: Any, first: int | str) -> tuple[Tensor, Tensor, GraphCache]:
    """The positions of tokens, (B, T) from 0, all slots, (S,), and the cache.

    Declares the graph inputs positions (B, T), -1 at padding, rows (B,), the prompt of each row, and the keys of layer
    `first`, (prompts, slots, KV d).
    """
    positions, rows = g.input("positions", "batch", "tokens"), g.input("rows", "batch")
    width = config.key_value_heads * config.head_width
    keys = g.input(f"keys_{first}", "prompts", "slots", width, dtype=g.dtype)
    # places[b, t] = (rows[b], positions[b, t]). Position -1, padding, addresses the last slot.
    row = g.op("Expand", g.op("Unsqueeze", rows, g.integers(1)), g.shape(positions, 0, 2))
    places = g.op("Concat", *(g.op("Unsqueeze", each, g.integers(2)) for each in (row, positions)), axis=2)
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
    return cos_sin if config.rope_scale == 1 else [each * config.rope_scale for each in cos_sin]


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
        self._cos_sin = [_in_graph(each) for each in cos_sin]
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
    def over_caches(cls, g: Builder, decoder: Any, first: int | str) -> "GraphBlock":
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
        block._cos_sin = [g.op("Gather", each, write) for each in self._cos_sin]
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
        block._cos_sin = [g.op("Gather", each, rows.name) for each in self._cos_sin]
        block.dims = block.written_dims = (rows.shape[0], self.dims[1])
        return block

    def repeat(self, count: int) -> "GraphBlock":
        block, g = copy(self), self.padding.g
        block.padding = self.padding.repeat(count, 1, 1, 1)
        block.readable = g.op("Tile", self.readable, g.integers(count, 1, 1, 1))
        block.window_mask = self.window_mask and g.op("Tile", self.window_mask, g.integers(count, 1, 1, 1))
        block._cos_sin = [g.op("Tile", each, g.integers(count, 1, 1)) for each in self._cos_sin]
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
        queries, caches, cache_rows = query.name, self.write(depth, key, value), self._cache.rows

        def read(keys_values: Sequence[str]) -> list:
            attended = g.attention(queries, *keys_values, mask, *heads, self.scale)
            return [g.value(attended, "some", "tokens", query.shape[-1])]

        def gathered() -> list:
            return read([g.op("Gather", cache, cache_rows) for cache in caches])

        # If all rows run, the caches are read in place; else the caches of the running rows are gathered first.
        all_run = g.op("Equal", g.shape(self.readable, 0, 1), self._cache.prompts)
        return query.like(g.either(all_run, lambda: read(caches), gathered)[0].name)


def _in_graph(x: Tensor) -> str:
    """The name of a graph value, cast to the graph's dtype if it is floating-point."""
    return x.g.cast(x.name, x.g.dtype) if x.is_floating_point() and x.kind != x.g.dtype else x.name
