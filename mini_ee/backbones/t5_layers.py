"""The layers of a T5, encoder and decoder, and what they need besides hidden states; t5.py says what they compute."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.activations import graph_activation
from mini_ee.backbones.backbone import AdaptLayer, tensor_on
from mini_ee.backbones.bert import Adapted, StackedLinear
from mini_ee.backbones.cache import Cache
from mini_ee.backbones.llama_layer import RMSNorm
from mini_ee.backbones.t5_config import ACTIVATIONS, T5Config


# ---- What all layers need ----
class Pairs(NamedTuple):
    """Texts and what the decoder has written to them, the start token first; padded on the right."""

    input_ids: Tensor  # (B, S)
    attention_mask: Tensor | None
    decoder_input_ids: Tensor  # (B, T)


class Memory:
    """The encoder's output for the prompts of a batch; its keys and values by layer, made where a row needs them."""

    def __init__(self, states: Tensor, readable: Tensor | None):
        """states (rows, S, D); readable (rows, 1, 1, S), or None where nothing is padded."""
        self.states, self.readable = states, readable
        self._made: dict[int, tuple[list[Tensor], set[int]]] = {}  # layer -> keys and values, and of which rows

    def heads(self, depth: int, layer: "Layer", rows: list[int] | None, adapt: AdaptLayer | None) -> list[Tensor]:
        """Keys and values of the layer at this depth, (B, H, S, d) each, for these rows; None: all."""
        every = list(range(len(self.states))) if rows is None else rows
        made, known = self._made.setdefault(depth, ([], set()))
        new = [row for row in every if row not in known]
        if new:
            found = layer.memory_heads(self.states[new], adapt)
            made[:] = made or [each.new_zeros(len(self.states), *each.shape[1:]) for each in found]
            for each, part in zip(made, found):
                each[new] = part
            known.update(new)
        return made if rows is None else [each[rows] for each in made]


class Around(NamedTuple):
    """What the decoder's layers need besides the hidden states (B, T, D)."""

    memory: Tensor | None  # (B, S, D), the encoder's output; None: a cache holds it
    readable: Tensor | None  # (B, 1, 1, S), true where it may be read; None: nothing is padded
    bias: Tensor  # (B or 1, H, T, S'), added to the scores of the tokens among themselves
    padding: None = None  # of the hidden states
    cache: Cache | None = None  # None: the tokens read each other
    rows: list[int] | None = None  # whose cache they read, None: all rows in order
    write: tuple | None = None  # where in a layer's cache, (rows, slots, ...), their keys and values go

    def keep(self, rows: np.ndarray | Tensor) -> "Around":
        """That of these rows of the batch alone. Over a cache it is made anew for each token: `T5.block`."""
        index = tensor_on(self.memory.device, rows)
        readable = None if self.readable is None else self.readable[index]
        return self._replace(memory=self.memory[index], readable=readable)

    def repeat(self, count: int) -> "Around":
        """That of the batch, `count` times one after the other."""
        readable = None if self.readable is None else self.readable.repeat(count, 1, 1, 1)
        return self._replace(memory=self.memory.repeat(count, 1, 1), readable=readable)

    def keep_heads(self, depth: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values (B, H, T, d) of the layer at this depth into its cache."""
        for cache, new in ((self.cache.keys[depth], key), (self.cache.values[depth], value)):
            cache.transpose(1, 2)[self.write] = new.transpose(1, 2)

    def past(self, depth: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """The same; returns all that are read, (B, H, S', d) each."""
        self.keep_heads(depth, key, value)
        read = [cache[depth][:, :, : self.bias.shape[-1]] for cache in (self.cache.keys, self.cache.values)]
        return read if self.rows is None else [each[self.rows] for each in read]


class GraphAround(NamedTuple):
    """What the decoder's layers of an ONNX graph need besides their input, of one token a row."""

    mask: str  # (B, S): true where there is a token of the text
    bias: str  # (1, H, 1, 1)


# ---- The layers ----
class HeadNorm(RMSNorm):
    """The norm before the head to words, with the scale of v1.0 behind it."""

    def __init__(self, config: T5Config):
        super().__init__(config.hidden_size, config.layer_norm_epsilon, offset=False)
        self.scale = config.hidden_size**-0.5 if config.scale_decoder_outputs else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def graph(self, g, x: str) -> str:
        return g.op("Mul", super().graph(g, x), g.number(self.scale))


def norm_of(config: T5Config) -> RMSNorm:
    """A norm as the layers have them, of weight one."""
    return RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=False)


class EncoderLayer(Adapted):
    """Self-attention, then the feed-forward part, each on a normed input and added to the stream."""

    float_maps = ("down",)

    def __init__(self, config: T5Config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads, all_heads = config.num_attention_heads, config.num_attention_heads * config.head_width
        self.attention_norm = norm_of(config)
        self.qkv = StackedLinear(width, (all_heads, all_heads, all_heads), bias=False)
        self.attention_output = nn.Linear(all_heads, width, bias=False)
        self.mlp_norm = norm_of(config)
        for name in ("gate", "gated") if config.gated else ("up",):
            setattr(self, name, nn.Linear(width, inner, bias=False))
        self.down = nn.Linear(inner, width, bias=False)
        self.activation, self.is_gated = ACTIVATIONS[config.activation], config.gated
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D). bias (B or 1, H, T, T): added to the scores, -inf where nothing may be read."""
        return self.feed(self.attend(hidden, bias))

    def attend(
        self, hidden: Tensor, bias: Tensor, adapt: AdaptLayer | None = None, past: Callable | None = None
    ) -> Tensor:
        """The first part: tokens read each other. past: keys and values of these tokens -> those that are read."""
        query, *own = self.by_head(3, self.linear("qkv", self.attention_norm(hidden), adapt))
        return self.read("attention_output", hidden, (query, *(past(*own) if past else own)), bias, adapt)

    def by_head(self, count: int, stacked: Tensor) -> tuple[Tensor, ...]:
        """(B, T, count H d) -> so many of (B, H, T, d)."""
        return stacked.unflatten(-1, (count, self.heads, -1)).transpose(1, 3).unbind(2)

    def read(self, output: str, hidden: Tensor, heads: tuple[Tensor, ...], mask: Tensor | None, adapt) -> Tensor:
        """hidden, and what it reads: query (B, H, T, d), key and value (B, H, S, d), mapped by `output`."""
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout, scale=1.0)
        return hidden + self.dropout(self.linear(output, attended.transpose(1, 2).flatten(2), adapt))

    def feed(self, hidden: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """The last part."""
        normed = self.mlp_norm(hidden)
        if self.is_gated:
            inner = self.activation(self.linear("gate", normed, adapt)) * self.linear("gated", normed, adapt)
        else:
            inner = self.activation(self.linear("up", normed, adapt))
        return hidden + self.dropout(self.linear("down", self.dropout(inner), adapt))

    def graph(self, g, hidden: str, shape: str, bias: str) -> str:
        """forward on (B T, D). shape (2,): B and T."""
        return self.graph_feed(g, self.graph_attend(g, hidden, shape, bias))

    def graph_attend(self, g, hidden: str, shape: str, bias: str, adapt: Callable | None = None) -> str:
        qkv = g.unflatten(self.graph_linear(g, "qkv", g.apply(self.attention_norm, hidden), adapt), shape)
        return self.graph_read(
            g, "attention_output", hidden, g.several(3, "Split", qkv, axis=2, num_outputs=3), bias, adapt
        )

    def graph_read(self, g, output: str, hidden: str, heads: list[str], mask: str, adapt: Callable | None) -> str:
        """read. Attention of a graph divides by the root of a head's width: queries are multiplied by it before."""
        width = getattr(self, output).in_features
        query, key, value = heads
        query = g.op("Mul", query, g.number((width // self.heads) ** 0.5))
        attended = g.flatten(g.attention(query, key, value, mask, self.heads, self.heads), width)
        return g.op("Add", hidden, self.graph_linear(g, output, attended, adapt))

    def graph_feed(self, g, hidden: str, adapt: Callable | None = None) -> str:
        normed = g.apply(self.mlp_norm, hidden)
        inner = graph_activation(
            g, self.graph_linear(g, "gate" if self.is_gated else "up", normed, adapt), self.activation
        )
        if self.is_gated:
            inner = g.op("Mul", inner, self.graph_linear(g, "gated", normed, adapt))
        return g.op("Add", hidden, self.graph_linear(g, "down", inner, adapt))


class Layer(EncoderLayer):
    """A layer of the decoder: between the two parts, attention to the encoder's output."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        width, all_heads = config.hidden_size, self.attention_output.in_features
        self.cross_norm = norm_of(config)
        self.cross_query = nn.Linear(width, all_heads, bias=False)
        self.cross_key_value = StackedLinear(width, (all_heads, all_heads), bias=False)
        self.cross_output = nn.Linear(all_heads, width, bias=False)

    def forward(self, hidden: Tensor, around: Around, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D), of the layer at this depth. adapt: what adapters add to its linear maps."""
        cached = around.cache is not None
        hidden = self.attend(hidden, around.bias, adapt, partial(around.past, depth) if cached else None)
        query = self.by_head(1, self.linear("cross_query", self.cross_norm(hidden), adapt))
        if cached:
            memory = around.cache.memory.heads(depth, self, around.rows, adapt)
        else:
            memory = self.memory_heads(around.memory, adapt)
        hidden = self.read("cross_output", hidden, (*query, *memory), around.readable, adapt)
        return self.feed(hidden, adapt)

    def memory_heads(self, memory: Tensor, adapt: AdaptLayer | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output: (B, S, D) -> (B, H, S, d) each."""
        return self.by_head(2, self.linear("cross_key_value", memory, adapt))

    def write_keys(self, hidden: Tensor, around: Around, depth: int) -> None:
        """The keys and values of hidden (B, T, D), as this layer's own input, into its cache; nothing is attended."""
        query, *_ = self.qkv.sizes
        own = F.linear(self.attention_norm(hidden), self.qkv.weight[query:])
        around.keep_heads(depth, *self.by_head(2, own))

    def graph(self, g, hidden: str, memory: str, around: GraphAround, adapt: Callable | None = None) -> str:
        """forward on (B, D), of the one token of each row; memory (B S, D)."""
        one, both = (
            g.op("Concat", g.shape(around.mask, 0, 1), end, axis=0)
            for end in (g.integers(1), g.shape(around.mask, 1, 2))
        )
        hidden = self.graph_attend(g, hidden, one, around.bias, adapt)
        query = self.graph_linear(g, "cross_query", g.apply(self.cross_norm, hidden), adapt)
        stacked = g.unflatten(self.graph_linear(g, "cross_key_value", memory, adapt), both)
        key, value = g.several(2, "Split", stacked, axis=2, num_outputs=2)
        readable = g.op("Unsqueeze", around.mask, g.integers(1, 2))
        hidden = self.graph_read(g, "cross_output", hidden, [g.unflatten(query, one), key, value], readable, adapt)
        return self.graph_feed(g, hidden, adapt)

    def graph_token(self, g, hidden: str, block, depth: int, adapt: Callable | None = None) -> str:
        """forward on (B T, D) of tokens over caches. block: a T5Block."""
        normed = g.apply(self.attention_norm, block.every(g, hidden))
        stacked = g.unflatten(self.graph_linear(g, "qkv", normed, adapt), block.every_shape)
        query, key, value = g.several(3, "Split", stacked, axis=2, num_outputs=3)
        query = block.query(g, block.here(g, query, block.readable))
        attended = g.flatten(block.attend(g, depth, query, key, value), block.width)
        hidden = g.op("Add", hidden, self.graph_linear(g, "attention_output", attended, adapt))
        query = block.query(g, self.graph_linear(g, "cross_query", g.apply(self.cross_norm, hidden), adapt))
        attended = g.flatten(block.attend_memory(g, depth, query), block.width)
        hidden = g.op("Add", hidden, self.graph_linear(g, "cross_output", attended, adapt))
        return self.graph_feed(g, hidden, adapt)

    def graph_write_keys(self, g, hidden: str, block, depth: int) -> None:
        """write_keys on (B T, D). The projection without its queries is cut once, when the graph is loaded."""
        width = self.qkv.sizes[0]
        cut = g.op("Slice", g.parameter(self.qkv.weight), *map(g.integers, (width, 3 * width, 0)))
        stacked = g.gemm(g.apply(self.attention_norm, block.every(g, hidden)), cut)
        stacked = g.unflatten(stacked, block.every_shape)
        block.write(g, depth, *g.several(2, "Split", stacked, axis=2, num_outputs=2))
