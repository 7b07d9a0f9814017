"""ModernBERT, from scratch: a pre-norm encoder with rotary positions, most of whose layers read a window of tokens.

Source: Warner et al. 2024, arXiv 2412.13663v2. Ettin's encoders (Weller et al. 2025) and mmBERT (Marone et al. 2025)
are configurations of it.

    layer i      h = h + O attention(norm(h)), then h = h + down(act(gate(norm(h))) * up(norm(h))) (GeGLU, Shazeer 2020)
    first layer  has no norm before its attention: the embeddings end with one
    norms        layer norms without bias, unless `norm_bias` says otherwise
    positions    queries and keys turn (Su et al. 2021), by the base global_rope_theta in layers that read all tokens,
                 by local_rope_theta in layers with a window; there are no token types
    window       |i - j| <= local_attention // 2; every third layer, from the first on, reads all tokens
    head         dense, activation, norm; its map onto the vocabulary is tied to the embeddings and has a bias

Deviations: 1. hidden[L] is the sum before the final norm, as in the decoders, because exits begin with a norm of their
own; transformers returns it normed. Here the final norm belongs to the masked-LM head and to sentence encoders.
2. Padding is masked, not removed, and the window is a mask, so that a layer with a window costs what a layer without
one does. 3. Fresh weights have one standard deviation, initializer_range.

Transformers (5.23) agrees in every hidden state and logit: tests/lab/parity/test_modernbert.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones import cache
from mini_ee.lab.backbones.activations import ACTIVATIONS, check_activation
from mini_ee.lab.backbones.backbone import (
    LARGEST_NUMBER,
    Adapt,
    AdaptLayer,
    Backbone,
    HeadLayout,
    Layout,
    check_fields,
    check_fixed,
    check_tokens,
    copies_of,
    known_fields,
    padding_mask,
    rows_of,
    tensor_on,
    token_places,
)
from mini_ee.lab.backbones.layers import Adapted, StackedLinear
from mini_ee.lab.data.values import check_value, shortened

LAYER_TYPES = ("full_attention", "sliding_attention")
BASES = ("global_rope_theta", "local_rope_theta")  # their rotary bases, as transformers 4 calls them
FIXED_KEYS = {
    "rope_scaling": (None,),
    "decoder_bias": (True, None),
    "position_embedding_type": ("absolute", "rope", "sans_pos", None),  # in the files of its authors
}


# ---- The config ----
@dataclass(frozen=True, kw_only=True)
class ModernBertConfig:
    """The keys of a Hugging Face config.json that this file reads, under their own names.

    layer_types counts before global_attn_every_n_layers. If tie_word_embeddings is false, the masked-LM head is left
    out: ours is tied. classifier_pooling and pad_token_id are kept for who reads what `to_dict` wrote. Raises
    ValueError on a value that no model can have.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 8192
    hidden_activation: str = "gelu"
    global_attn_every_n_layers: int = 3
    layer_types: tuple[str, ...] | None = None
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_bias: bool = False
    classifier_pooling: str = "cls"
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    mlp_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id", "local_attention"), free=BASES)
        for name in BASES:
            check_value(name, getattr(self, name), float, above=0, most=LARGEST_NUMBER)
        if self.head_width % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads must be even: halves of a head turn together, "
                f"got {self.hidden_size} and {self.num_attention_heads}"
            )
        for name in ("hidden_activation", "classifier_activation"):
            check_activation(name, getattr(self, name))
        types, layers = self.layer_types, self.num_hidden_layers
        if types is not None and (len(types) != layers or any(layer_type not in LAYER_TYPES for layer_type in types)):
            raise ValueError(
                f"layer_types must name {' or '.join(LAYER_TYPES)} for {layers} layers, got {shortened(types)}"
            )
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling must be cls or mean, got {shortened(self.classifier_pooling)}")

    @classmethod
    def from_hugging_face(cls, config: dict) -> "ModernBertConfig":
        """From the content of a config.json, of transformers 4 or 5. Keys that change nothing here are passed over."""
        check_fixed(config, FIXED_KEYS)
        types = config.get("layer_types")
        if types is not None and not isinstance(types, list | tuple):
            raise ValueError(f"layer_types must be a list, got {shortened(types)}")
        given = config | _rotary_bases(config) | {"layer_types": None if types is None else tuple(types)}
        made = cls(**known_fields(cls, given, {} if "pad_token_id" in config else {"pad_token_id": 50283}))
        check_fixed(config, {"head_dim": (made.head_width, None), "sliding_window": (made.window, None)})
        return made

    def to_dict(self) -> dict:
        """As Hugging Face writes it, for version 4 and version 5; `from_hugging_face` reads it back."""
        config = {key: value for key, value in asdict(self).items() if value is not None}
        if self.layer_types is not None:
            config["layer_types"] = list(self.layer_types)
        known = self.pad_token_id is not None and self.pad_token_id < self.vocab_size
        return config | {"pad_token_id": self.pad_token_id if known else None}  # else transformers makes no embeddings

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def token_types(self) -> None:
        """There are none."""

    @property
    def max_tokens(self) -> int:
        """The longest input, in tokens."""
        return self.max_position_embeddings

    @property
    def window(self) -> int:
        """How many tokens a layer with a window reads to each side."""
        return self.local_attention // 2

    def windowed(self, depth: int) -> bool:
        """Whether the layer behind hidden[depth] has a window."""
        if self.layer_types is None:
            return bool(depth % self.global_attn_every_n_layers)
        return self.layer_types[depth] == LAYER_TYPES[1]


def _rotary_bases(config: dict) -> dict:
    """The two bases, which transformers 5 writes as an entry of rope_parameters for each type of layer."""
    entries, bases = config.get("rope_parameters") or {}, {}
    if not isinstance(entries, dict) or set(entries) - set(LAYER_TYPES):
        raise ValueError(f"rope_parameters must have {' and '.join(LAYER_TYPES)}, got {shortened(entries)}")
    for kind, base in zip(LAYER_TYPES, BASES):
        entry = entries.get(kind) or {}
        name = f"rope_parameters: {kind}"
        if not isinstance(entry, dict) or set(entry) - {"rope_type", "type", "rope_theta"}:
            raise ValueError(f"{name} must hold rope_type and rope_theta alone, got {shortened(entry)}: not supported")
        check_fixed({name: entry.get("rope_type", entry.get("type", "default"))}, {name: ("default",)})
        if "rope_theta" in entry or base in config:
            bases[base] = entry["rope_theta"] if "rope_theta" in entry else config[base]
            check_value(base, bases[base], float, above=0, most=LARGEST_NUMBER)
    return bases


# ---- What all layers need ----
class LayerContext(NamedTuple):
    """What all layers need besides the hidden states."""

    padding: Tensor | None  # (B, 1, 1, T), true where a token may be read; None: nothing is padded
    near: Tensor | None  # (B, 1, T, T), the same within the window; (1, 1, T, T) if nothing is padded; None: it is all
    cos: Tensor  # (2, 1, T, 1, d): of layers that read all tokens, and of layers with a window
    sin: Tensor  # the same, negative in the first half

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        if self.padding is None:  # then `near` is the same for all rows
            return self
        return self._replace(padding=rows_of(self.padding, rows), near=rows_of(self.near, rows))

    def repeat(self, count: int) -> "LayerContext":
        if self.padding is None:
            return self
        return self._replace(padding=copies_of(self.padding, count), near=copies_of(self.near, count))


def norm_of(config: ModernBertConfig) -> nn.LayerNorm:
    """A norm as the model has them, of weight one."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Words, normed."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = norm_of(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.word(input_ids)))


# ---- A layer ----
class Layer(Adapted):
    """Attention and feed-forward part, each on a normed input and added to the stream (pre-norm).

    depth: which layer it is, from 0: the first has no norm before its attention, and some have a window.
    """

    float_maps = ("down",)

    def __init__(self, config: ModernBertConfig, depth: int):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads, self.windowed = config.num_attention_heads, config.windowed(depth)
        self.attention_norm = norm_of(config) if depth else None
        self.qkv = StackedLinear(width, (width, width, width), config.attention_bias)
        self.attention_output = nn.Linear(width, width, config.attention_bias)
        self.mlp_norm = norm_of(config)
        self.gate, self.up = (nn.Linear(width, inner, config.mlp_bias) for _ in range(2))
        self.down = nn.Linear(inner, width, config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_activation]
        self.attention_dropout, self.mlp_dropout = config.attention_dropout, config.mlp_dropout

    def forward(self, hidden: Tensor, context: LayerContext, adapt: AdaptLayer | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). adapt: what adapters add to the linear maps of this layer."""
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, context, adapt)
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def attention(self, normed: Tensor, context: LayerContext, adapt: AdaptLayer | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D): every token reads all tokens, or those of its window."""
        mask = context.near if self.windowed and context.near is not None else context.padding
        query, key, value = self.qkv.sizes
        turning, values = self.linear("qkv", normed, adapt).split((query + key, value), dim=-1)
        turned = cache.rotate(
            turning.unflatten(-1, (2 * self.heads, -1)),
            context.cos[int(self.windowed)],
            context.sin[int(self.windowed)],
        )
        queries, keys = turned.split((self.heads, self.heads), dim=2)
        values = values.unflatten(-1, (self.heads, -1))
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, dropout_p=dropout
        )
        attended = self.linear("attention_output", attended.transpose(1, 2).flatten(2), adapt)
        return F.dropout(attended, dropout) if dropout else attended

    def mlp(self, normed: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """down(act(gate) * up): (B, T, D) -> (B, T, D)."""
        inner = self.activation(self.linear("gate", normed, adapt)) * self.linear("up", normed, adapt)
        return self.linear("down", F.dropout(inner, self.mlp_dropout) if self.training else inner, adapt)


class MaskedLMHead(nn.Module):
    """Dense, activation, norm; the map onto the vocabulary is that of the word embeddings."""

    def __init__(self, config: ModernBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_activation]
        self.norm = norm_of(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, normed: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(normed)))


# ---- The backbone ----
class ModernBert(Backbone):
    """The backbone: embeddings, L layers, the final norm, and, where the checkpoint has it, a masked-LM head."""

    Config = ModernBertConfig
    vocabulary = {"weight": "embeddings.word.weight", "bias": "lm_head.bias"}

    def __init__(self, config: ModernBertConfig, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, depth) for depth in range(config.num_hidden_layers))
        self.norm: Any = norm_of(config)  # None without heads
        self.lm_head = MaskedLMHead(config) if lm_head else None
        powers = torch.arange(0, config.head_width, 2, dtype=torch.float32, device="cpu") / config.head_width
        frequencies = torch.stack([1.0 / (getattr(config, base) ** powers) for base in BASES])
        self.frequencies = frequencies[:, None]  # (2, 1, d/2), radians a token; no buffer, which bfloat16 would round
        self.apply(self.initialise)

    @classmethod
    def tied(cls, config: ModernBertConfig) -> dict[str, str]:
        """The head's map onto the vocabulary is that of the embeddings."""
        return {"decoder.weight": "embeddings.tok_embeddings.weight"}

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D), as `Backbone.embed` says. Token types are passed over."""
        ids = tensor_on(self.embeddings.word.weight.device, inputs.input_ids)
        check_tokens(ids, self.config.max_tokens)
        return self.embeddings(ids)

    def context(self, inputs) -> LayerContext:
        """The masks, and how queries and keys turn."""
        weight = self.embeddings.word.weight  # self.device walks over the modules: felt at batch 1
        ids = tensor_on(weight.device, inputs.input_ids)
        padding, places = padding_mask(inputs.attention_mask, weight.device), token_places(ids)
        angle = places.float()[:, None] * tensor_on(weight.device, self.frequencies)
        cos, sin = angle.cos().to(weight.dtype), angle.sin().to(weight.dtype)
        turn = (torch.cat(parts, dim=-1)[:, None, :, None] for parts in ((cos, cos), (-sin, sin)))
        return LayerContext(padding, self._near(places, padding), *turn)

    def _near(self, places: Tensor, padding: Tensor | None) -> Tensor | None:
        """What tokens read within the window; None if that is all there is. A token of padding reads itself."""
        window = self.config.window
        if places.shape[0] <= window + 1:
            return None
        at = places[:, None]
        near = ((places >= at - window) & (places <= at + window))[None, None]
        return near if padding is None else near & (padding | (places == at))

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says."""
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context, adapt and partial(adapt, depth))
        return hidden

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """Masked-LM logits, (..., D) -> (..., V), as `Backbone.lm_logits` says: the final norm and the head."""
        if self.lm_head is None:
            raise self.no_lm_head()
        weight, bias = self.embeddings.word.weight, self.lm_head.bias
        if words is not None:
            weight, bias = weight[words], bias[words]
        return F.linear(self.lm_head(self.norm(hidden)), weight, bias).float()

    def text_states(self, inputs, layer: int) -> tuple[Tensor, Tensor | None]:
        """As `Backbone.text_states` says. After the last layer they are normed, as sentence encoders return them."""
        states, padding = super().text_states(inputs, layer)
        is_normed = layer == self.config.num_hidden_layers and self.norm is not None
        return self.norm(states) if is_normed else states, padding

    def exit_norm(self) -> nn.LayerNorm:
        """Layers end with a sum that is not normed."""
        return norm_of(self.config)

    def without_heads(self) -> "ModernBert":
        """The same backbone, without final norm and masked-LM head."""
        self.lm_head = self.norm = None
        return self

    def config_of(self, layers: Sequence[int]) -> ModernBertConfig:
        """As `Backbone.config_of` says; each layer keeps its window."""
        types = tuple(LAYER_TYPES[self.config.windowed(layer)] for layer in layers)
        return replace(self.config, num_hidden_layers=len(layers), layer_types=types)


# ---- Hugging Face's names ----
_NAMES = {
    "embeddings.word": "embeddings.tok_embeddings",
    "embeddings.norm": "embeddings.norm",
    "layers.{i}.attention_norm": "layers.{i}.attn_norm",
    "layers.{i}.qkv": "layers.{i}.attn.Wqkv",
    "layers.{i}.attention_output": "layers.{i}.attn.Wo",
    "layers.{i}.mlp_norm": "layers.{i}.mlp_norm",
    "layers.{i}.gate": "layers.{i}.mlp.Wi.gate",
    "layers.{i}.up": "layers.{i}.mlp.Wi.up",
    "layers.{i}.down": "layers.{i}.mlp.Wo",
    "norm": "final_norm",
    "lm_head.dense": "head.dense",
    "lm_head.norm": "head.norm",
    "lm_head": "decoder",
}

BACKBONE = ModernBert
LAYOUTS = {
    "modernbert": Layout(
        names=_NAMES,
        prefix="model.",
        architecture="ModernBert",
        fused=(("mlp.Wi", ("gate", "up")),),
        head=HeadLayout(
            norm="final_norm",
            dense="head.dense",
            activation="gelu",
            activation_key="classifier_activation",
            dense_norm="head.norm",
            pool_key="classifier_pooling",
            dense_bias_key="classifier_bias",
        ),
        config_keys=frozenset({*FIXED_KEYS, "rope_parameters", "sliding_window", "head_dim", "layer_norm_eps"}),
    )
}
