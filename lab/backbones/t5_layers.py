"""T5 v1.0 and v1.1: the config, the biases of relative positions, and the layers of encoder and decoder.

t5.py has the equations.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.activations import ACTIVATIONS
from mini_ee.lab.backbones.backbone import (
    LARGEST,
    AdaptLayer,
    check_fields,
    check_fixed,
    check_integer,
    copies_of,
    in_their_words,
    known_fields,
    rows_of,
)
from mini_ee.lab.backbones.cache import Cache
from mini_ee.lab.backbones.generative import GenerativeConfig
from mini_ee.lab.backbones.layers import Adapted, RMSNorm, StackedLinear
from mini_ee.lab.data.values import shortened

GATED = "gated-"

THEIR_KEYS = {  # ours -> Hugging Face's
    "hidden_size": "d_model",
    "num_hidden_layers": "num_decoder_layers",
    "num_encoder_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "max_tokens": "n_positions",
}

FIXED_KEYS = {"is_encoder_decoder": (True,), "is_decoder": (False,), "is_causal": (True,)}


@dataclass(frozen=True, kw_only=True)
class T5Config(GenerativeConfig):
    """The keys of a Hugging Face config.json that the model reads, under the names that all backbones share.

    num_hidden_layers counts the layers of the decoder, which has the exits. Positions are relative, so the model does
    not limit the length; max_tokens is the length in its training. Raises ValueError for invalid values.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_encoder_layers: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    max_tokens: int = 512
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    feed_forward_proj: str = "relu"
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True
    pad_token_id: int = 0
    decoder_start_token_id: int = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id", "decoder_start_token_id"))
        for stop in self.stop_tokens:
            check_integer("eos_token_id", stop, least=0, most=LARGEST["vocab_size"])
        if self.decoder_start_token_id >= self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id must be below vocab_size, "
                f"got {self.decoder_start_token_id} and {self.vocab_size}"
            )
        if not isinstance(self.feed_forward_proj, str) or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj must be one of {', '.join(ACTIVATIONS)}, each with or without {GATED!r} before it, "
                f"got {shortened(self.feed_forward_proj)}"
            )
        near, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if near < 4 or most <= near // 2:
            raise ValueError(
                f"relative_attention_num_buckets must be at least 4, and relative_attention_max_distance above half of "
                f"it, got {near} and {most}"
            )

    @classmethod
    def from_hugging_face(cls, config: dict) -> "T5Config":
        """From the content of a config.json, of transformers 4 or 5. Keys that have no effect here are ignored.

        Version 5 always writes that the head is tied; `T5.fitted` finds out from the weights.
        """
        check_fixed(config, FIXED_KEYS)
        given = {key: value for key, value in config.items() if key not in THEIR_KEYS}
        given |= {ours: config[theirs] for ours, theirs in THEIR_KEYS.items() if config.get(theirs) is not None}
        if "num_encoder_layers" in given:
            given.setdefault("num_hidden_layers", given["num_encoder_layers"])
        given.setdefault("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        check_fixed(given, {"scale_decoder_outputs": (True, False)})  # not null, which transformers 5 takes as false
        if isinstance(given.get("eos_token_id"), list):
            given["eos_token_id"] = tuple(given["eos_token_id"])
        start = given.get("pad_token_id")
        try:
            made = cls(**known_fields(cls, given, {} if start is None else {"decoder_start_token_id": start}))
        except ValueError as error:
            raise ValueError(in_their_words(str(error), THEIR_KEYS)) from None
        check_fixed(config, {"dense_act_fn": (made.activation,), "is_gated_act": (made.gated,)})
        return made

    def to_dict(self) -> dict:
        """The content of config.json, for `from_hugging_face`."""
        config = {THEIR_KEYS.get(key, key): value for key, value in asdict(self).items()}
        return config | {"is_encoder_decoder": True}

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part multiplies the outputs of two linear maps (v1.1)."""
        return self.feed_forward_proj.startswith(GATED)

    @property
    def activation(self) -> str:
        """A key of ACTIVATIONS; "gated-gelu" means the tanh approximation."""
        name = self.feed_forward_proj.removeprefix(GATED)
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else name

    @property
    def head_width(self) -> int:
        return self.head_dim


# ---- The context of layers ----
class Pairs(NamedTuple):
    """Texts for the encoder and the tokens that the decoder reads, the start token first; padded on the right."""

    input_ids: Tensor  # (B, S)
    attention_mask: Tensor | None
    decoder_input_ids: Tensor  # (B, T)


class Memory:
    """The encoder's output for the prompts of a batch, and keys and values of it for each layer.

    A layer's keys and values of a row are computed when the row first reaches the layer, and then reused by later
    tokens.
    """

    def __init__(self, states: Tensor, readable: Tensor | None):
        """states (rows, S, D); readable (rows, 1, 1, S), true at tokens, or None without padding."""
        self.states, self.readable = states, readable
        self._computed: dict[int, tuple[list[Tensor], set[int]]] = {}  # depth -> keys and values; the rows they have

    def heads(self, depth: int, layer: "Layer", rows: list[int] | None, adapt: AdaptLayer | None) -> list[Tensor]:
        """Keys and values of the layer at this depth, (B, H, S, d) each, for the given rows; None: for all."""
        wanted = list(range(len(self.states))) if rows is None else rows
        both, known = self._computed.setdefault(depth, ([], set()))
        new = [row for row in wanted if row not in known]
        if new:
            computed = layer.memory_heads(self.states[new], adapt)
            # Zeros for all rows, made once per layer; `new` rows are filled in now, others when they arrive.
            both[:] = both or [new_rows.new_zeros(len(self.states), *new_rows.shape[1:]) for new_rows in computed]
            for stored, new_rows in zip(both, computed):
                stored[new] = new_rows
            known.update(new)
        return both if rows is None else [stored[rows] for stored in both]


class LayerContext(NamedTuple):
    """The inputs of the decoder's layers besides the hidden states (B, T, D)."""

    heads: int
    memory: Tensor | None  # (B, S, D), the encoder's output; None: it is in the cache
    readable: Tensor | None  # (B, 1, 1, S), true at tokens of the encoder's input; None: no padding
    bias: Tensor  # (B or 1, H, T, S'), added to the scores of self-attention; -inf where a key must not be read
    padding: None = None  # of the hidden states, which have none
    cache: Cache | None = None  # None: the tokens read each other
    rows: list[int] | None = None  # the cache rows of the tokens; None: all rows in order
    slots: tuple | None = None  # the index of new keys and values in a layer's cache, (rows, slots, ...)

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        """The context of the given rows; not with a cache, for which `T5.block` makes one per token."""
        return self._replace(readable=rows_of(self.readable, rows), memory=rows_of(self.memory, rows))

    def repeat(self, count: int) -> "LayerContext":
        return self._replace(readable=copies_of(self.readable, count), memory=copies_of(self.memory, count))

    # As in the contexts of cache.py:
    def with_exited(self, hidden: Tensor) -> Tensor:
        return hidden

    def without_exited(self, x: Tensor) -> Tensor:
        return x

    def write(self, depth: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values (B, T, H d) to the cache of the layer at this depth (from 0)."""
        assert self.cache is not None and self.slots is not None
        self.cache.write(depth, self.slots, key, value)

    def attend(self, depth: int, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        """Self-attention: queries, keys and values (B, T, H d) -> (B, T, H d)."""
        if self.cache is None:
            return attention(
                query, by_head(key, self.heads), by_head(value, self.heads), self.bias, self.heads, dropout
            )
        self.write(depth, key, value)
        # The slots after those of the bias hold no token of this batch yet.
        read = [cache[depth][:, :, : self.bias.shape[-1]] for cache in (self.cache.keys, self.cache.values)]
        key, value = read if self.rows is None else (cached[self.rows] for cached in read)
        return attention(query, key, value, self.bias, self.heads, dropout)

    def attend_memory(
        self, depth: int, layer: "Layer", query: Tensor, adapt: AdaptLayer | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Cross attention to the encoder's output, (B, T, H d) -> (B, T, H d). layer: makes its keys and values."""
        if self.cache is None:
            key, value = layer.memory_heads(self.memory, adapt)
        else:
            key, value = self.cache.memory.heads(depth, layer, self.rows, adapt)
        return attention(query, key, value, self.readable, self.heads, dropout)


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, H d) -> (B, H, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: int, dropout: float) -> Tensor:
    """Unscaled attention: (B, T, H d), keys and values (B, H, S, d) -> (B, T, H d). mask: bool, or added to scores."""
    query = by_head(query, heads)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0)
    return attended.transpose(1, 2).flatten(2)


# ---- The layers ----
class HeadNorm(RMSNorm):
    """The norm before the LM head, followed by the scale of v1.0."""

    def __init__(self, config: T5Config):
        super().__init__(config.hidden_size, config.layer_norm_epsilon, offset=False)
        self.scale = config.hidden_size**-0.5 if config.scale_decoder_outputs else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def norm_of(config: T5Config) -> RMSNorm:
    """A new norm of a layer, initialised with ones."""
    return RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=False)


class EncoderLayer(Adapted):
    """Self-attention, then the feed-forward part, each on a normed input and added to the hidden state (pre-norm)."""

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
        """(B, T, D) -> (B, T, D). bias (B or 1, H, T, T): added to the scores, -inf at padding."""
        return self.feed_forward(self.attend(hidden, bias))

    def attend(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """The first part, self-attention."""
        query, key, value = self.linear("qkv", self.attention_norm(hidden), None).chunk(3, dim=-1)
        key, value = (by_head(projected, self.heads) for projected in (key, value))
        attended = attention(query, key, value, bias, self.heads, self.dropped)
        return self.add("attention_output", hidden, attended)

    @property
    def dropped(self) -> float:
        """Dropout probability of attention weights."""
        return self.dropout.p if self.training else 0.0

    def add(self, output: str, hidden: Tensor, attended: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """hidden plus the output of attention, mapped by the linear map `output`."""
        return hidden + self.dropout(self.linear(output, attended, adapt))

    def feed_forward(self, hidden: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """The last part: hidden + FFN(norm(hidden))."""
        normed = self.mlp_norm(hidden)
        if self.is_gated:
            inner = self.activation(self.linear("gate", normed, adapt)) * self.linear("gated", normed, adapt)
        else:
            inner = self.activation(self.linear("up", normed, adapt))
        return hidden + self.dropout(self.linear("down", self.dropout(inner), adapt))


class Layer(EncoderLayer):
    """A layer of the decoder, with cross attention to the encoder's output between the two parts."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        width, all_heads = config.hidden_size, self.attention_output.in_features
        self.cross_norm = norm_of(config)
        self.cross_query = nn.Linear(width, all_heads, bias=False)
        self.cross_key_value = StackedLinear(width, (all_heads, all_heads), bias=False)
        self.cross_output = nn.Linear(all_heads, width, bias=False)

    def forward(self, hidden: Tensor, context: LayerContext, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). depth: of this layer, from 0. adapt: adds adapters to its linear maps."""
        query, key, value = self.linear("qkv", self.attention_norm(context.with_exited(hidden)), adapt).chunk(3, dim=-1)
        attended = context.attend(depth, context.without_exited(query), key, value, self.dropped)
        hidden = self.add("attention_output", hidden, attended, adapt)
        query = self.linear("cross_query", self.cross_norm(hidden), adapt)
        attended = context.attend_memory(depth, self, query, adapt, self.dropped)
        return self.feed_forward(self.add("cross_output", hidden, attended, adapt), adapt)

    def memory_heads(self, memory: Tensor, adapt: AdaptLayer | None = None) -> tuple[Tensor, ...]:
        """Keys and values of the encoder's output: (B, S, D) -> (B, H, S, d) each."""
        stacked = self.linear("cross_key_value", memory, adapt)
        return tuple(by_head(part, self.heads) for part in stacked.chunk(2, dim=-1))

    def write_keys(self, hidden: Tensor, context: LayerContext, depth: int) -> None:
        """Write keys and values of hidden (B, T, D), as input of this layer, to its cache; nothing else is computed."""
        query, *_ = self.qkv.sizes
        keys_and_values = F.linear(self.attention_norm(context.with_exited(hidden)), self.qkv.weight[query:])
        context.write(depth, *keys_and_values.chunk(2, dim=-1))
