"""The key/value cache of decoders, and what their layers need to know of where tokens stand.

The cache is addressed by position, not by column: the key of a row's token at position p stands in slot p, however the
batch was padded. So one comparison, slot <= position, is the causal mask, and hides padding and whatever a rejected
draft has left behind. Rows are named by index: who leaves the batch leaves the cache alone.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from mini_ee.backbones.backbone import Backbone, tensor_on


def token_positions(attention_mask: Tensor) -> Tensor:
    """(B, T) of 1 and 0 -> position of each token in its row, from 0, and -1 for padding, on either side."""
    real = attention_mask.bool()
    return (real.cumsum(1) - 1).masked_fill(~real, -1)


class Cache:
    """Keys and values of up to `rows` texts of up to `capacity` tokens, preallocated, written in place.

    keys[layer], values[layer]: (rows, KV heads, capacity + 1, d). Slot p holds position p; the last takes padding.
    """

    def __init__(self, decoder: Backbone, rows: int, capacity: int):
        config, weight = decoder.config, next(decoder.parameters())
        if capacity > config.max_tokens:
            raise ValueError(
                f"expected at most {config.max_tokens} tokens, prompt and continuation together, got {capacity}: "
                f"shorten the prompt or ask for fewer tokens"
            )
        self.capacity = capacity
        shape = (config.num_hidden_layers, rows, config.key_value_heads, capacity + 1, config.head_width)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)


class Around(NamedTuple):
    """Tokens that run together: (B, T) of them, and what every layer needs to know of where they stand."""

    cos: Tensor  # (B or 1, T, 1, R)
    sin: Tensor
    mask: Tensor | None  # (B or 1, 1, T, S), true where a token may be read; None: all of them, or causal
    causal: bool
    end: int  # slots below it are read
    padding: Tensor | None = None  # (B, 1, 1, T), true at tokens; None: nothing is padded, or a cache is there
    cache: Cache | None = None  # None: the tokens read each other
    rows: list[int] | None = None  # whose cache they read, None: all rows in order
    write: tuple | None = None  # where in a layer's cache, (rows, slots, ...), their keys and values go

    def keep(self, rows: np.ndarray | Tensor) -> "Around":
        """That of these rows of the batch alone. Over a cache it is made anew for each token: `Decoder.block`."""
        index = tensor_on(self.cos.device, rows)
        return self._changed(lambda tensor: tensor[index])

    def repeat(self, count: int) -> "Around":
        """That of the batch, `count` times one after the other."""
        return self._changed(lambda tensor: tensor.repeat(count, 1, 1, 1))

    def _changed(self, change) -> "Around":
        if self.cache is not None:
            raise ValueError("expected tokens that read each other, got some that read a cache: ask for another block")
        names = ("cos", "sin", "mask", "padding")  # those of one row stand for all rows
        parts = {name: getattr(self, name) for name in names}
        return self._replace(**{name: change(t) for name, t in parts.items() if t is not None and len(t) > 1})
