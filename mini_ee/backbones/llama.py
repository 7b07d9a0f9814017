"""Llama, Gemma and Phi, from scratch, with the key/value cache.

Sources: Touvron et al. 2023 (Llama 1, 2), Llama team 2024 (Llama 3), Gemma team 2024 (Gemma 1), Javaheripi et al. 2023
(Phi-2). All are one stack of pre-norm layers with rotary positions (Su et al. 2021). They differ here:

    Llama    SwiGLU; Llama 3 stretches the slow rotary frequencies (`rope_scaling`)
    Gemma    embeddings times sqrt(D), norms that scale by 1 + w, GeGLU, heads wider than D/H, the head tied
    Phi      attention and MLP side by side on one LayerNorm, biases everywhere, only a part of each head rotates

Depth is counted in layers run: hidden[0] is the embedding output, hidden[k] the output of the k-th layer, k = 1..L; the
final norm belongs to the head. Agreement with transformers is pinned in tests/test_decoder.py.

The cache is addressed by position, not by column: the key of a row's token at position p stands in slot p, however the
batch was padded. So one comparison, slot <= position, is the causal mask, and hides padding and whatever a rejected
draft has left behind. Rows are named by index: who leaves the batch leaves the cache alone.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.bert import ACTIVATIONS as BERT_ACTIVATIONS
from mini_ee.backbones.bert import Adapt, StackedLinear, graph_activation
from mini_ee.backbones.shapes import check

ACTIVATIONS = BERT_ACTIVATIONS | {"silu": F.silu}

GATED = ("llama", "gemma")  # act(gate) * up; phi has up alone

# What Hugging Face takes for a key that config.json leaves out.
TYPE_DEFAULTS = {
    "llama": {"hidden_act": "silu", "norm_eps": 1e-6, "tie_word_embeddings": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256},
    "phi": {"hidden_act": "gelu_new", "norm_eps": 1e-5, "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
}

NORM_EPS = {"llama": "rms_norm_eps", "gemma": "rms_norm_eps", "phi": "layer_norm_eps"}

# Keys that would change what is computed, and the only values that this file computes.
FIXED_KEYS = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qk_layernorm": (False, None),
    "use_bidirectional_attention": (False, None),
    "sliding_window": (None,),
}

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The keys of a Hugging Face config.json that this file reads, under their own names.

    `norm_eps` is rms_norm_eps, in Phi layer_norm_eps. `rope_scaling` holds the four numbers of Llama 3, None elsewhere.
    num_key_value_heads is num_attention_heads where it is None, head_dim hidden_size / num_attention_heads.
    Dropout is not applied. Raises ValueError on a value that no model can have.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        if self.model_type not in TYPE_DEFAULTS:
            raise ValueError(f"model_type must be one of {', '.join(TYPE_DEFAULTS)}, got {self.model_type!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and value is not None:
                least = 0 if field.name == "bos_token_id" else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ValueError(f"{field.name} must be an integer of at least {least}, got {value!r}")
            if field.type is float and field.name != "rope_theta" and not (_is_number(value) and 0 <= value <= 1):
                raise ValueError(f"{field.name} must be a number from 0 to 1, got {value!r}")
        if not _is_number(self.rope_theta) or not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be a number above 0, got {self.rope_theta!r}")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(f"tie_word_embeddings must be true or false, got {self.tie_word_embeddings!r}")
        if self.tie_word_embeddings and self.model_type == "phi":
            raise ValueError("tie_word_embeddings must be false in phi, whose head has a bias, got True: not supported")
        stops = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        if self.eos_token_id is not None and not all(type(stop) is int and stop >= 0 for stop in stops):
            raise ValueError(f"eos_token_id must be an integer of at least 0 or a list of them, got {stops!r}")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, "
                f"got {self.hidden_size} and {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.rotary_width < 2 or self.rotary_width % 2:
            raise ValueError(
                f"head_dim * partial_rotary_factor must be an even number of at least 2, got "
                f"{self.head_width} * {self.partial_rotary_factor}"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {self.hidden_act!r}")
        if self.rope_scaling is not None:
            numbers = {key: self.rope_scaling.get(key) for key in LLAMA3_SCALING}
            wrong = [key for key, value in numbers.items() if not (_is_number(value) and 0 < value < math.inf)]
            if wrong:
                raise ValueError(f"rope_scaling must hold a number above 0 for {', '.join(wrong)}, got {numbers}")
            if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
                raise ValueError(f"rope_scaling: high_freq_factor must be above low_freq_factor, got {numbers}")

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens with which a text ends, as eos_token_id names them."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, tuple) else [ends]

    @classmethod
    def from_dict(cls, config: dict) -> "DecoderConfig":
        """From the content of a config.json, of transformers 4 or 5. Keys that change nothing here are passed over."""
        for key, allowed in FIXED_KEYS.items():
            if config.get(key) not in allowed:
                raise ValueError(f"{key} must be {allowed[0]!r}, got {config[key]!r}: not supported")
        model_type = config.get("model_type")
        given = {key: value for key, value in config.items() if value is not None} | _rope_keys(config)
        given["norm_eps"] = given.get(NORM_EPS.get(model_type))
        if model_type == "gemma":  # its oldest files say gelu and mean the tanh form
            act = given.get("hidden_activation", given.get("hidden_act"))
            given["hidden_act"] = "gelu_pytorch_tanh" if act == "gelu" else act
        if isinstance(given.get("eos_token_id"), list):
            given["eos_token_id"] = tuple(given["eos_token_id"])
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in given.items() if key in known and value is not None}
        given = TYPE_DEFAULTS.get(model_type, {}) | given
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in given]
        if missing:
            raise ValueError(f"missing key {', '.join(missing)}")
        return cls(**given)

    def to_dict(self) -> dict:
        """As Hugging Face writes it; `from_dict` reads it back."""
        config = {key: value for key, value in asdict(self).items() if value is not None}
        config[NORM_EPS[self.model_type]] = config.pop("norm_eps")
        if self.rope_scaling is not None:
            config["rope_scaling"] = {"rope_type": "llama3"} | self.rope_scaling
        return config

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """How many of a head's numbers rotate."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def max_tokens(self) -> int:
        """The longest text, prompt and continuation together."""
        return self.max_position_embeddings


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rope_keys(config: dict) -> dict:
    """rope_theta, partial_rotary_factor and rope_scaling, which transformers 5 writes as one entry, rope_parameters."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{name} must be an object, got {entry!r}")
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"{name}: rope_type must be 'default' or 'llama3', got {kind!r}: not supported")
        found |= {key: entry[key] for key in ("rope_theta", "partial_rotary_factor") if entry.get(key) is not None}
        found["rope_scaling"] = {key: entry.get(key) for key in LLAMA3_SCALING} if kind == "llama3" else None
    return found


# ---- Positions ----
def rope_frequencies(config: DecoderConfig) -> Tensor:
    """theta_i = rope_theta^(-2i/R), in radians a token, (R/2,) float32, where R numbers of a head rotate.

    Llama 3 divides the slow ones by `factor`: those whose wavelength 2 pi / theta_i is above
    original_max_position_embeddings / low_freq_factor; the quick ones, below original / high_freq_factor, stay; between
    the two it goes over linearly in original / wavelength.
    """
    width = config.rotary_width
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original = (config.rope_scaling[key] for key in LLAMA3_SCALING)
    turns = original * frequency / (2 * math.pi)  # how often it goes round within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, Eq. 34): the pairs (x_i, x_{i+R/2}) turn, what is beyond R stays.

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d).
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), sin)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), dim=-1)


def token_positions(attention_mask: Tensor) -> Tensor:
    """(B, T) of 1 and 0 -> position of each token in its row, from 0, and -1 for padding, on either side."""
    real = attention_mask.bool()
    return (real.cumsum(1) - 1).masked_fill(~real, -1)


class Cache:
    """Keys and values of up to `rows` texts of up to `capacity` tokens, preallocated, written in place.

    keys[layer], values[layer]: (rows, KV heads, capacity + 1, d). Slot p holds position p; the last takes padding.
    """

    def __init__(self, decoder: "Decoder", rows: int, capacity: int):
        config, weight = decoder.config, decoder.embeddings.weight
        if capacity > config.max_tokens:
            raise ValueError(
                f"expected at most {config.max_tokens} tokens, prompt and continuation together, got {capacity}: "
                f"shorten the prompt or ask for fewer tokens"
            )
        self.capacity = capacity
        shape = (config.num_hidden_layers, rows, config.key_value_heads, capacity + 1, config.head_width)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)


class Block(NamedTuple):
    """Tokens that run together: (B, T) of them, and what every layer needs to know of where they stand."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None  # (B, 1, T, S), true where a token may be read; None: all of them, or causal
    causal: bool
    rows: list[int] | None  # whose cache they read, None: all rows in order
    write: tuple | None  # where in a layer's cache, (rows, slots, ...), their keys and values go
    end: int  # slots below it are read


class GraphCache(NamedTuple):
    """Where the caches of an ONNX graph are written and read."""

    index: str  # (B, T, 2): row and slot of each token
    rows: str  # (B,): whose caches they are
    everyone: str  # (1,): whether these are all rows


class GraphBlock:
    """Block as ONNX nodes: whole rows, whose tokens read each other, or tokens whose past stands in caches.

    The cache of layer 3 (from 0) is `keys_3` and `values_3`, (prompts, slots, KV d), whole: slot p holds position p,
    the last takes padding. They come out as `keys_3_out`, `values_3_out`, which the caller lays over the inputs: then
    nothing is copied but the new tokens.
    """

    def __init__(self, g, config: DecoderConfig, at: str, readable: str, cache: "GraphCache | None" = None):
        """at (B, T): positions, from 0. readable (B, 1, T, S). cache: None where tokens read each other alone."""
        self.config, self.readable, self._cache = config, readable, cache
        self.shape = g.shape(at, 0, 2)
        self.width = config.key_value_heads * config.head_width
        frequencies = g.constant("rope_frequencies", rope_frequencies(config).numpy())
        angle = g.op("Mul", g.op("Unsqueeze", g.cast(at, "float32"), g.integers(2)), frequencies)
        self._turn = [g.cast(g.op(each, angle), g.dtype) for each in ("Cos", "Sin")]

    def rotate(self, g, heads: str, count: int) -> str:
        """rotate: (B, T, count d) -> the same."""
        config = self.config
        part = {"rotary_embedding_dim": config.rotary_width} if config.rotary_width < config.head_width else {}
        return g.op("RotaryEmbedding", heads, *self._turn, num_heads=count, **part)

    def write(self, g, layer: int, key: str, value: str) -> list[str]:
        """Put keys and values (B, T, KV d) into the layer's caches; returns the names of both as they are then."""
        written = []
        for kind, new in (("keys", key), ("values", value)):
            axes = "prompts", "slots", self.width
            cache = g.input(f"{kind}_{layer}", *axes, dtype=g.dtype)
            written.append(g.op("ScatterND", cache, self._cache.index, new))
            g.output(f"{cache}_out", written[-1], *axes)
        return written

    def attend(self, g, layer: int, query: str, key: str, value: str) -> str:
        """(B, T, H d), and keys and values (B, T, KV d) -> (B, T, H d)."""
        heads = self.config.num_attention_heads, self.config.key_value_heads
        if self._cache is None:
            return g.attention(query, key, value, self.readable, *heads)
        caches = self.write(g, layer, key, value)

        def of_all() -> list:  # read in place
            return [g.value(g.attention(query, *caches, self.readable, *heads), "batch", "tokens", width)]

        def of_some() -> list:
            gathered = [g.op("Gather", cache, self._cache.rows) for cache in caches]
            return [g.value(g.attention(query, *gathered, self.readable, *heads), "batch", "tokens", width)]

        width = self.config.num_attention_heads * self.config.head_width
        return g.either(self._cache.everyone, of_all, of_some)[0].name


# ---- The layers ----
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019), in float32; Gemma stores w - 1."""

    def __init__(self, width: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # added in float32: in bfloat16 1 + w would keep two digits of w
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    def graph(self, g, x: str) -> str:
        """forward; its statistics are float32 by the standard."""
        weight = g.parameter(self.weight)
        weight = g.op("Add", weight, g.number(1.0)) if self.offset else weight
        return g.op("RMSNormalization", x, weight, epsilon=self.eps)


def norm_of(config: DecoderConfig) -> nn.Module:
    """A norm as the model has them, of weight one."""
    if config.model_type == "phi":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, offset=config.model_type == "gemma")


class Layer(nn.Module):
    """Attention and MLP, each on a normed input and added to the stream; Phi adds both at once, on one norm."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        width, bias, inner = config.hidden_size, config.model_type == "phi", config.intermediate_size
        self.parallel, self.gated = config.model_type == "phi", config.model_type in GATED
        self.heads, self.key_value_heads = config.num_attention_heads, config.key_value_heads
        self.head_width = config.head_width
        query, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        self.attention_norm = norm_of(config)
        self.qkv = StackedLinear(width, (query, key_value, key_value), bias)
        self.attention_output = nn.Linear(query, width, bias)
        if not self.parallel:
            self.mlp_norm = norm_of(config)
        if self.gated:  # gate and up stay two products: as one, batch 8 takes 9 % longer
            self.gate = nn.Linear(width, inner, bias)
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(
        self, hidden: Tensor, block: Block, keys: Tensor | None, values: Tensor | None, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden (B, T, D) -> (B, T, D). keys, values: this layer's cache, read and written; None: the block alone.

        adapt: what adapters add to the linear maps of this layer.
        """
        normed = self.attention_norm(hidden)
        attended = self.attention(normed, block, keys, values, adapt)
        if self.parallel:
            return hidden + attended + self.mlp(normed, adapt)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def _linear(self, name: str, x: Tensor, adapt: Adapt | None) -> Tensor:
        y = getattr(self, name)(x)
        return y if adapt is None else adapt(name, x, y)

    def attention(
        self, normed: Tensor, block: Block, keys: Tensor | None, values: Tensor | None, adapt: Adapt | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D): every token reads the tokens up to itself (grouped queries: Ainslie et al. 2023)."""
        stacked = self._linear("qkv", normed, adapt).view(*normed.shape[:2], -1, self.head_width)  # (B, T, H + 2 KV, d)
        turning = self.heads + self.key_value_heads
        turned = rotate(stacked[:, :, :turning], block.cos, block.sin)
        query, key, value = turned[:, :, : self.heads], turned[:, :, self.heads :], stacked[:, :, turning:]
        if keys is None:
            attended = self._attend(query, key.transpose(1, 2), value.transpose(1, 2), block.mask, block.causal)
        else:
            keys.transpose(1, 2)[block.write], values.transpose(1, 2)[block.write] = key, value
            keys, values = keys[:, :, : block.end], values[:, :, : block.end]
            if block.rows is None:
                attended = self._attend(query, keys, values, block.mask, block.causal)
            else:  # row by row: a gathered copy of their keys takes longer than attention itself
                attended = torch.cat(
                    [
                        self._attend(query[i, None], keys[row, None], values[row, None], block.mask[i, None], False)
                        for i, row in enumerate(block.rows)
                    ]
                )
        return self._linear("attention_output", attended.transpose(1, 2).flatten(2), adapt)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=self.key_value_heads < self.heads,
        )

    def write_keys(self, hidden: Tensor, block: Block, keys: Tensor, values: Tensor) -> None:
        """The keys and values of hidden (B, T, D), as this layer's own input, into its cache; nothing is attended."""
        query, *_ = self.qkv.sizes
        bias = None if self.qkv.bias is None else self.qkv.bias[query:]
        stacked = F.linear(self.attention_norm(hidden), self.qkv.weight[query:], bias)
        key, value = stacked.view(*hidden.shape[:2], 2, -1, self.head_width).unbind(2)
        keys.transpose(1, 2)[block.write] = rotate(key, block.cos, block.sin)
        values.transpose(1, 2)[block.write] = value

    def graph_write_keys(self, g, hidden: str, block: GraphBlock, depth: int) -> None:
        """write_keys on (B T, D). The projection without its queries is cut once, when the graph is loaded."""
        query, key, value = self.qkv.sizes
        cut = [
            g.op("Slice", g.parameter(each), *map(g.integers, (query, query + key + value, 0)))
            for each in (self.qkv.weight, self.qkv.bias)
            if each is not None
        ]
        stacked = g.unflatten(g.gemm(g.apply(self.attention_norm, hidden), *cut), block.shape)
        key, value = g.several(2, "Split", stacked, axis=2, num_outputs=2)
        block.write(g, depth, block.rotate(g, key, self.key_value_heads), value)

    def mlp(self, normed: Tensor, adapt: Adapt | None = None) -> Tensor:
        """down(act(gate) * up), in Phi down(act(up)): (B, T, D) -> (B, T, D)."""
        inner = self._linear("up", normed, adapt)
        inner = self.activation(self._linear("gate", normed, adapt)) * inner if self.gated else self.activation(inner)
        return self._linear("down", inner, adapt)

    def graph(self, g, hidden: str, block: GraphBlock, depth: int, adapt=None) -> str:
        """forward of the layer at this depth, from 0, on (B T, D) but for the attention itself."""

        def linear(name: str, x: str) -> str:
            y = g.linear(x, getattr(self, name), int8=name != "down")  # its input has outliers
            return y if adapt is None else adapt(name, x, y)

        def mlp(normed: str) -> str:
            inner = linear("up", normed)
            if not self.gated:
                return linear("down", graph_activation(g, inner, self.activation))
            return linear("down", g.op("Mul", graph_activation(g, linear("gate", normed), self.activation), inner))

        normed = g.apply(self.attention_norm, hidden)
        query, key, value = self.qkv.sizes
        stacked = g.unflatten(linear("qkv", normed), block.shape)
        turning, value = g.several(2, "Split", stacked, g.integers(query + key, value), axis=2)
        turned = block.rotate(g, turning, self.heads + self.key_value_heads)
        query, key = g.several(2, "Split", turned, g.integers(query, key), axis=2)
        attended = block.attend(g, depth, query, key, value)
        attended = linear("attention_output", g.flatten(attended, self.attention_output.in_features))
        if self.parallel:
            return g.op("Add", g.op("Add", hidden, attended), mlp(normed))
        hidden = g.op("Add", hidden, attended)
        return g.op("Add", hidden, mlp(g.apply(self.mlp_norm, hidden)))


class Decoder(nn.Module):
    """The backbone: embeddings, L layers, the final norm and the vocabulary head."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = norm_of(config)
        self.lm_head = None  # tied to the embeddings
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.model_type == "phi")
        angle = torch.arange(config.max_tokens, dtype=torch.float32, device="cpu")[:, None] * rope_frequencies(config)
        sin = angle.sin()
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """hidden[0]: (B, T) int64 -> (B, T, D). token_type_ids: an encoder's, which a decoder has no use for."""
        check(input_ids, "B T")
        hidden = self.embeddings(input_ids)
        if self.config.model_type == "gemma":
            hidden = hidden * hidden.new_tensor(self.config.hidden_size**0.5)  # rounded to the model's dtype, as theirs
        return hidden

    def graph_embed(self, g) -> str:
        """embed; declares the input input_ids, (B, T)."""
        hidden = g.op("Gather", g.parameter(self.embeddings.weight), g.input("input_ids", "batch", "tokens"))
        if self.config.model_type == "gemma":
            hidden = g.op("Mul", hidden, g.number(self.config.hidden_size**0.5))
        return hidden

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None) -> Block:
        """What the layers need to run tokens at these positions, made once for all layers.

        positions: (B, T) int64, -1 for padding (`token_positions`). With a cache the tokens read its slots up to their
        own; rows says which of its rows they are, None: all, in order. Without one they read each other.
        Raises ValueError where a position is above the cache's or the model's last.
        """
        tokens = check(positions, "B T")["T"]
        low, high = (int(bound) for bound in positions.aminmax())
        limit = self.config.max_tokens if cache is None else cache.capacity
        if high >= limit:
            raise ValueError(f"expected at most {limit} tokens, got {high + 1}: shorten the prompt")
        at, end = positions.clamp(min=0), high + 1
        # Most often all rows stand at the same places: slices serve where indices would be needed.
        aligned = low >= 0 and high == low + tokens - 1
        aligned = aligned and (tokens == 1 or bool((positions == torch.arange(low, end, device=at.device)).all()))
        if aligned and cache is not None and rows is None:
            return self.aligned_block(low, tokens, cache)
        if aligned:
            cos, sin = self.cos[None, low:end, None], self.sin[None, low:end, None]
        else:
            cos, sin = self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)
        if cache is None:
            reads, padding = positions[:, None, :], positions < 0
            mask = (reads <= positions[:, :, None]) & (~padding[:, None, :] | padding[:, :, None])
            return Block(cos, sin, None if aligned else mask[:, None], aligned, None, None, end)
        index = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        write = (index.to(at.device)[:, None], torch.where(positions < 0, cache.capacity, positions))
        mask = (torch.arange(end, device=at.device) <= at[:, :, None])[:, None]
        return Block(cos, sin, mask, False, rows, write, end)

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> Block:
        """`block` where all rows of the cache stand at low .. low + tokens - 1. Asks no tensor anything."""
        end = low + tokens
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: shorten the prompt")
        cos, sin, write = self.cos[None, low:end, None], self.sin[None, low:end, None], (slice(None), slice(low, end))
        if tokens == 1 or low == 0:
            return Block(cos, sin, None, tokens > 1, None, write, end)
        places = torch.arange(end, device=cos.device)
        return Block(cos, sin, (places <= places[low:, None])[None, None], False, None, write, end)

    def whole_rows(self, tokens: int) -> Block:
        """Whole rows of so many tokens, padded on the right: what is before a token is all that it reads.

        Raises ValueError where there are more tokens than the model has positions.
        """
        if tokens > self.config.max_tokens:
            raise ValueError(f"expected at most {self.config.max_tokens} tokens, got {tokens}: truncate the input")
        return Block(self.cos[None, :tokens, None], self.sin[None, :tokens, None], None, True, None, None, tokens)

    def graph_around(self, g, mask: str) -> GraphBlock:
        """The block of whole rows. mask (B, T): true where there is a token; no token reads padding, on either side."""
        counted = g.op("CumSum", g.cast(mask, int), g.integers(1))
        at = g.op("Max", g.op("Sub", counted, g.integers(1)), g.integers(0))
        before = g.op("LessOrEqual", *(g.op("Unsqueeze", at, g.integers(*axes)) for axes in ((1, 2), (1, 3))))
        return GraphBlock(g, self.config, at, g.op("And", before, g.op("Unsqueeze", mask, g.integers(1, 2))))

    def graph_block(self, g, first: int) -> GraphBlock:
        """block with a cache, for a graph whose first layer is this, from 0. Declares the inputs positions (B, T), -1
        for padding, rows (B,): which prompts the tokens belong to, and that layer's cache."""
        positions, rows = g.input("positions", "batch", "tokens"), g.input("rows", "batch")
        width = self.config.key_value_heads * self.config.head_width
        keys = g.input(f"keys_{first}", "prompts", "slots", width, dtype=g.dtype)
        row = g.op("Expand", g.op("Unsqueeze", rows, g.integers(1)), g.shape(positions, 0, 2))
        index = g.op("Concat", *(g.op("Unsqueeze", each, g.integers(2)) for each in (row, positions)), axis=2)
        at = g.op("Max", positions, g.integers(0))
        zero, one = (g.constant(f"scalar_{value}", np.array(value)) for value in (0, 1))
        every_slot = g.op("Range", zero, g.op("Squeeze", g.shape(keys, 1, 2)), one)
        readable = g.op("LessOrEqual", every_slot, g.op("Unsqueeze", at, g.integers(1, 3)))
        everyone = g.op("Equal", g.shape(rows, 0, 1), g.shape(keys, 0, 1))
        return GraphBlock(g, self.config, at, readable, GraphCache(index, rows, everyone))

    def run_layers(
        self,
        hidden: Tensor,
        block: Block | Tensor | None,
        start: int,
        stop: int,
        cache: Cache | None = None,
        adapters: Callable[[int], Adapt] | None = None,
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D): runs the layers start + 1 .. stop, filling their caches.

        block: where the tokens stand; an encoder's padding mask, or None, for `whole_rows`.
        adapters: index of a layer -> what is added to its linear maps (lora_exits.py).
        """
        if not isinstance(block, Block):
            block = self.whole_rows(hidden.shape[1])
        for depth in range(start, stop):
            keys, values = (None, None) if cache is None else (cache.keys[depth], cache.values[depth])
            hidden = self.layers[depth](hidden, block, keys, values, adapters and adapters(depth))
        return hidden

    def graph_layers(self, g, hidden: str, around: GraphBlock, start: int, stop: int, adapt=None) -> str:
        """run_layers. adapt: (index of a layer, name of a linear map, its input, its output) -> its output."""
        flat = g.flatten(hidden, self.config.hidden_size)
        for depth in range(start, stop):
            flat = self.layers[depth].graph(g, flat, around, depth, adapt and partial(adapt, depth))
        return g.unflatten(flat, around.shape, self.config.hidden_size)

    def propagate(self, hidden: Tensor, block: Block, start: int, stop: int, cache: Cache) -> None:
        """State copying (Elbayad et al. 2020): hidden (B, T, D) stands in for hidden[start] .. hidden[stop - 1].

        The layers start + 1 .. stop each write its keys and values, through their own input norm, and compute no more.
        """
        for depth in range(start, stop):
            self.layers[depth].write_keys(hidden, block, cache.keys[depth], cache.values[depth])

    def graph_propagate(self, g, hidden: str, block: GraphBlock, start: int, stop: int) -> None:
        """propagate."""
        flat = g.flatten(hidden, self.config.hidden_size)
        for depth in range(start, stop):
            self.layers[depth].graph_write_keys(g, flat, block, depth)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden[L] alone, (B, T, D). Arguments as in `hidden_states`."""
        return self.run_layers(self.embed(input_ids), self._whole(input_ids, attention_mask), 0, len(self.layers))

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """All L + 1 hidden states, each (B, T, D); [0] is the embedding output, [L] comes before the final norm.

        input_ids, attention_mask (1 for a token, 0 for padding, on either side) are (B, T) int64.
        """
        block = self._whole(input_ids, attention_mask)
        states = [self.embed(input_ids)]
        for depth in range(len(self.layers)):
            states.append(self.run_layers(states[-1], block, depth, depth + 1))
        return tuple(states)

    def _whole(self, input_ids: Tensor, attention_mask: Tensor | None) -> Block:
        return self.block(token_positions(torch.ones_like(input_ids) if attention_mask is None else attention_mask))

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """LM logits, (..., D) -> (..., V) float32: the final norm and the vocabulary head."""
        normed = self.norm(hidden)
        return (F.linear(normed, self.embeddings.weight) if self.lm_head is None else self.lm_head(normed)).float()

    def graph_lm_logits(self, g, hidden: str, tokens: Tensor | None = None) -> str:
        """lm_logits, (B, D) -> (B, V); of some tokens (C,) alone where they are given."""
        linear = self.embeddings if self.lm_head is None else self.lm_head
        weights = [g.parameter(each) if tokens is None else g.rows_of(each, tokens) for each in linear.parameters()]
        return g.gemm(g.apply(self.norm, hidden), *weights)
