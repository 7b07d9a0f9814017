"""The key/value cache of decoders, and the context of their layers: positions, masks and cache of a batch.

The cache is addressed by position, not by column: the key of a row's token at position p is in slot p, however the
batch is padded. So one comparison, slot <= position, is the causal mask. It also hides padding and the keys of rejected
drafts. A context lists the cache rows of its tokens, so the cache does not change if rows exit.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.lab.backbones.backbone import copies_of, rows_of


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
            cache, depth = copy(self), len(self.keys) - 1
            cache.keys, cache.values = (
                {depth: torch.zeros_like(entries[depth])} for entries in (self.keys, self.values)
            )
            self.exits[k] = cache
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

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d).
    """
    width = cos.shape[-1]
    pairs = heads[..., :width]
    # roll by R/2 puts the partner of each value in its place: x_i cos - x_{i+R/2} sin and x_{i+R/2} cos + x_i sin.
    rotated = torch.addcmul(pairs * cos, pairs.roll(width // 2, -1), sin)
    return rotated if width == heads.shape[-1] else torch.cat((rotated, heads[..., width:]), dim=-1)


class LayerContext(NamedTuple):
    """The context of B x T tokens that run together: their positions, their masks and their cache.

    A layer calls with_exited, without_exited, rotate, write and attend.
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
            key, value = (projected.unflatten(-1, (heads, -1)).transpose(1, 2) for projected in (key, value))
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
        return self._changed(lambda tensor: rows_of(tensor, rows))

    def repeat(self, count: int) -> "LayerContext":
        return self._changed(lambda tensor: copies_of(tensor, count))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "LayerContext":
        names = ("cos", "sin", "mask", "padding", "window_mask")
        parts = {name: getattr(self, name) for name in names}
        # A tensor of length 1 is broadcast over all rows, so it stays as it is.
        return self._replace(**{name: change(t) for name, t in parts.items() if t is not None and len(t) > 1})
