"""The key/value cache of decoders, and the contexts of their layers: where tokens are, and what they read.

LayerContext is the context in torch, GraphBlock the same in ONNX graphs: the only code that writes nodes for decoders.

The cache is addressed by position, not by column: the key of a row's token at position p stands in slot p, however the
batch was padded. So one comparison, slot <= position, is the causal mask, and hides padding and whatever a rejected
draft has left behind. Rows are named by index: who leaves the batch leaves the cache alone.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.backbones.backbone import tensor_on


def token_positions(attention_mask: Tensor) -> Tensor:
    """(B, T) of 1 and 0 -> position of each token in its row, from 0, and -1 for padding, on either side."""
    real = attention_mask.bool()
    return (real.cumsum(1) - 1).masked_fill(~real, -1)


def readable(at: Tensor, reads: Tensor, window: int | None = None) -> Tensor:
    """Whether a token at a position of `at`, (B or 1, T), reads one at a position of `reads`, (B or 1, S).

    It reads itself and all before it, with a window the nearest so many of them. Returns (B or 1, 1, T, S).
    """
    at, reads = at[:, None, :, None], reads[:, None, None, :]
    seen = reads <= at
    return seen if window is None else seen & (reads > at - window)


class Cache:
    """Keys and values of up to `rows` texts of up to `capacity` tokens, preallocated, written in place.

    keys[layer], values[layer]: (rows, KV heads, capacity + 1, d). Slot p holds position p; the last takes padding.
    """

    def __init__(self, decoder, rows: int, capacity: int):
        """decoder: a GenerativeBackbone. Raises ValueError if it cannot write texts of this length."""
        config, weight = decoder.config, next(decoder.parameters())
        if capacity > decoder.max_written:
            raise ValueError(
                f"expected at most {decoder.max_written} tokens, prompt and continuation together, got {capacity}: "
                f"shorten the prompt or ask for fewer tokens"
            )
        self.capacity = capacity
        shape = (config.num_hidden_layers, rows, config.key_value_heads, capacity + 1, config.head_width)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.memory = None  # what an encoder made of the prompts, where there is one


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, Eq. 34): the pairs (x_i, x_{i+R/2}) turn, what is beyond R stays.

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d).
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), sin)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), dim=-1)


class LayerContext(NamedTuple):
    """The context in torch of B x T tokens that run together: their positions, their masks and their cache.

    GraphBlock has the same methods (with_exited, without_exited, rotate, write, attend), so a layer is written once.
    """

    config: Any  # a GenerativeConfig
    cos: Tensor | None  # (B or 1, T, 1, R); None: the family does not rotate
    sin: Tensor | None
    mask: Tensor | None  # (B or 1, 1, T, S), true where a token may be read; or (B or 1, H, T, S), added to the scores
    causal: bool  # without a mask: a token reads what is before it; else all
    end: int  # slots below it are read
    padding: Tensor | None = None  # (B, 1, 1, T), true at tokens; None: nothing is padded, or a cache is there
    cache: Cache | None = None  # None: the tokens read each other
    rows: list[int] | None = None  # whose cache they read, None: all rows in order
    slots: tuple | None = None  # where in a layer's cache, (rows, slots, ...), their keys and values go
    window_mask: Tensor | None = None  # mask of layers with a window; None: it reaches back to the first token

    def with_exited(self, hidden: Tensor) -> Tensor:
        """States (B, T, D) of all tokens that leave keys and values: in torch those that run."""
        return hidden

    def without_exited(self, x: Tensor) -> Tensor:
        """Of what was made of `every` token, those that run."""
        return x

    def rotate(self, x: Tensor, count: int) -> Tensor:
        """(B, T, count d), turned by where the tokens stand."""
        return rotate(x.unflatten(-1, (count, -1)), self.cos, self.sin).flatten(-2)

    def write(self, depth: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values (B, T, KV d) into the cache of the layer at this depth."""
        for cache, new in ((self.cache.keys[depth], key), (self.cache.values[depth], value)):
            cache.transpose(1, 2)[self.slots] = new.unflatten(-1, (self.config.key_value_heads, -1))

    def attend(self, depth: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, T, H d), and keys and values (B, T, KV d) -> (B, T, H d): what the tokens read of all before them."""
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
            else:  # row by row: a gathered copy of their keys takes longer than attention itself
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
        """That of these rows of the batch alone. Over a cache it is made anew for each token: `CausalDecoder.block`."""
        return self._changed(lambda tensor: tensor[tensor_on(tensor.device, rows)])

    def repeat(self, count: int) -> "LayerContext":
        """That of the batch, `count` times one after the other."""
        return self._changed(lambda tensor: tensor.repeat(count, 1, 1, 1))

    def _changed(self, change) -> "LayerContext":
        names = ("cos", "sin", "mask", "padding", "window_mask")  # those of one row stand for all rows
        parts = {name: getattr(self, name) for name in names}
        return self._replace(**{name: change(t) for name, t in parts.items() if t is not None and len(t) > 1})


# ---- The same in ONNX graphs ----


class GraphCache(NamedTuple):
    """Where the caches of an ONNX graph are written and read."""

    places: str  # (B, T, 2): row and slot of each token
    rows: str  # (B,): whose caches they are
    prompts: str  # (1,): how many rows the caches have


def cache_inputs(g, config, first: int) -> tuple[Tensor, Tensor, GraphCache]:
    """Where tokens are, (B, T) from 0, all slots (S,), and the cache. Declares the inputs positions (B, T), -1 for
    padding, rows (B,), which prompts the tokens belong to, and the keys of layer `first`, (prompts, slots, KV d)."""
    positions, rows = g.input("positions", "batch", "tokens"), g.input("rows", "batch")
    width = config.key_value_heads * config.head_width
    keys = g.input(f"keys_{first}", "prompts", "slots", width, dtype=g.dtype)
    row = g.op("Expand", g.op("Unsqueeze", rows, g.integers(1)), g.shape(positions, 0, 2))
    places = g.op("Concat", *(g.op("Unsqueeze", each, g.integers(2)) for each in (row, positions)), axis=2)
    zero, one = (g.constant(f"scalar_{value}", np.array(value)) for value in (0, 1))
    slots = g.op("Range", zero, g.op("Squeeze", g.shape(keys, 1, 2)), one)
    at = g.tensor(g.op("Max", positions, g.integers(0)), "batch", "tokens", dtype=np.int64)
    return at, g.tensor(slots, "slots", dtype=np.int64), GraphCache(places, rows, g.shape(keys, 0, 1))


def graph_cos_sin(config, at: Tensor, cached: bool) -> list[Tensor]:
    """cos and sin (B, T, R/2) of positions (B, T); a table of all positions would make the file large."""
    if not config.rotary_width:
        return []
    frequencies = config.rope_frequencies()
    if not cached and config.short_tokens is not None:
        is_long = at.amax(1)[:, None, None] >= config.short_tokens
        frequencies = torch.where(is_long, config.rope_frequencies(long=True), frequencies)
    angle = at.float()[..., None] * frequencies
    cos_sin = [angle.cos(), angle.sin()]
    return cos_sin if config.rope_scale == 1 else [each * config.rope_scale for each in cos_sin]


class GraphBlock:
    """LayerContext in a graph: whole rows, whose tokens read each other, or tokens whose past is in caches.

    The cache of layer 3 (from 0) is `keys_3` and `values_3`, (prompts, slots, KV d), whole: slot p holds position p,
    the last takes padding. A layer leaves them in `written`, as they are then. The caller lays the outputs over the
    inputs: then nothing is copied but the new tokens.
    """

    scale: float | None = None  # of the products of queries and keys; None: one over the root of d

    def __init__(self, config, at: Tensor, masks: Sequence[Tensor | None], cos_sin: Sequence[Tensor] = (), cache=None):
        """at (B, T): positions, from 0. masks: as in LayerContext, for layers without a window and for layers with one.

        cos_sin: cos and sin (B, T, R/2) where the family rotates. cache: None where tokens read each other alone.
        """
        self.config, self.at, self._cache = config, at, cache
        self.readable, self.window_mask = (mask if mask is None else _in_graph(mask) for mask in masks)
        self._cos_sin = [_in_graph(each) for each in cos_sin]
        self.dims = self.written_dims = at.shape
        self.width = config.key_value_heads * config.head_width
        self.padding: Tensor | None = None  # (B, 1, 1, T), true at tokens, where tokens read each other
        self.written: dict[str, str] = {}  # cache -> what it has become
        self._exited = None

    @classmethod
    def of_texts(cls, decoder, mask: Tensor) -> "GraphBlock":
        """Of whole texts, whose tokens read each other and no padding, on either side. mask (B, T): true at tokens."""
        at, padding = token_positions(mask).clamp(min=0), mask[:, None, None, :]
        block = cls(decoder.config, at, decoder.masks(at, at, padding), graph_cos_sin(decoder.config, at, cached=False))
        block.padding = padding
        return block

    @classmethod
    def over_caches(cls, g, decoder, first: int) -> "GraphBlock":
        """Of tokens whose past is in caches, in a graph whose first layer is this, from 0. Declares what it takes."""
        config = decoder.config
        at, slots, cache = cache_inputs(g, config, first)
        return cls(config, at, decoder.masks(at, slots[None]), graph_cos_sin(config, at, cached=True), cache)

    def of_rows(self, running: Tensor, exited: Tensor, states: Tensor) -> "GraphBlock":
        """The block of the rows `running` (B',), whose layers also write keys and values for the rows `exited` (M,).

        states (M, T, D): the hidden states at their exits, which replace the input of all deeper layers. Only running
        rows attend (`readable`, `rows`). Keys of both are rotated and written (`_cos_sin`, `places`), running first.
        """
        block, every, g = copy(self), torch.cat((running, exited)), running.g
        block.dims, block.written_dims = ((rows.shape[0], self.dims[1]) for rows in (running, every))
        read, write = running.name, every.name
        block.readable, block.written = g.op("Gather", self.readable, read), {}
        block.window_mask = self.window_mask and g.op("Gather", self.window_mask, read)
        block._cos_sin = [g.op("Gather", each, write) for each in self._cos_sin]
        places, rows = g.op("Gather", self._cache.places, write), g.op("Gather", self._cache.rows, read)
        block._cache = GraphCache(places, rows, self._cache.prompts)
        block._exited = states.flat
        return block

    def keep(self, rows: Tensor) -> "GraphBlock":
        """That of these rows of a batch whose tokens read each other."""
        block, g = copy(self), rows.g
        block.readable, block.padding = g.op("Gather", self.readable, rows.name), self.padding[rows]
        block.window_mask = self.window_mask and g.op("Gather", self.window_mask, rows.name)
        block._cos_sin = [g.op("Gather", each, rows.name) for each in self._cos_sin]
        block.dims = block.written_dims = (rows.shape[0], self.dims[1])
        return block

    def repeat(self, count: int) -> "GraphBlock":
        """That of the batch, `count` times one after the other."""
        block, g = copy(self), self.padding.g
        block.padding = self.padding.repeat(count, 1, 1, 1)
        block.readable = g.op("Tile", self.readable, g.integers(count, 1, 1, 1))
        block.window_mask = self.window_mask and g.op("Tile", self.window_mask, g.integers(count, 1, 1, 1))
        block._cos_sin = [g.op("Tile", each, g.integers(count, 1, 1)) for each in self._cos_sin]
        block.dims = block.written_dims = (block.padding.shape[0], self.dims[1])
        return block

    def unwritten(self) -> "GraphBlock":
        """The same, to be written anew, in another branch."""
        block = copy(self)
        block.written = {}
        return block

    def with_exited(self, hidden: Tensor) -> Tensor:
        """As in LayerContext: the states of exited tokens follow those of the tokens that run."""
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
        """As in LayerContext; returns the names of both caches as they are then."""
        for kind, new in (("keys", key), ("values", value)):
            cache = new.g.input(f"{kind}_{depth}", "prompts", "slots", self.width, dtype=new.g.dtype)
            self.written[cache] = new.g.op("ScatterND", cache, self._cache.places, new.name)
        return [self.written[f"{kind}_{depth}"] for kind in ("keys", "values")]

    def attend(self, depth: int, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        g, heads = query.g, (self.config.num_attention_heads, self.config.key_value_heads)
        seen = self.readable if self.config.window(depth) is None else self.window_mask
        if self._cache is None:
            return query.like(g.attention(query.name, key.name, value.name, seen, *heads, self.scale))
        queries, caches = query.name, self.write(depth, key, value)

        def of_all() -> list:  # read in place
            return [g.value(g.attention(queries, *caches, seen, *heads, self.scale), "some", "tokens", query.shape[-1])]

        def of_some() -> list:
            gathered = [g.op("Gather", cache, self._cache.rows) for cache in caches]
            return [
                g.value(g.attention(queries, *gathered, seen, *heads, self.scale), "some", "tokens", query.shape[-1])
            ]

        everyone = g.op("Equal", g.shape(self.readable, 0, 1), self._cache.prompts)
        return query.like(g.either(everyone, of_all, of_some)[0].name)


def _in_graph(x: Tensor) -> str:
    """Its name; numbers are of the graph's dtype."""
    return x.g.cast(x.name, x.g.dtype) if x.is_floating_point() and x.kind != x.g.dtype else x.name
