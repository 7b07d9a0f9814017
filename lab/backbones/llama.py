"""Llama and its family, from scratch: the layer, and the backbone.

mini_ee/llama.py is the reference, equal in tests/core/test_core_models.py. This file has in addition six more families,
stacked projections, adapters, windows and padding on the left.

    llama_config.py    the config
    llama_families.py  the differences between Llama, Gemma, Phi, Mistral, Qwen2, Qwen3 and Phi-3
    generative.py      positions, masks, the final norm and the LM head, as in all causal decoders
    cache.py           the key/value cache, and the context of layers

All are pre-norm with rotary positions (Su et al. 2021). Hidden states and logits agree with those of transformers:
tests/lab/parity/test_decoder.py.

LongRoPE (Phi-3) has factors for short and for long texts. Here the length of each row selects them; in transformers the
longest row of a batch selects them for all rows. So each row has the result that transformers computes for that row
alone; in a batch with a long row, transformers computes another result for short rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.activations import ACTIVATIONS
from mini_ee.lab.backbones.backbone import AdaptLayer
from mini_ee.lab.backbones.cache import LayerContext
from mini_ee.lab.backbones.generative import CausalDecoder
from mini_ee.lab.backbones.layers import Adapted, RMSNorm, StackedLinear
from mini_ee.lab.backbones.llama_config import DecoderConfig
from mini_ee.lab.backbones.llama_families import LAYER_TYPES, MEMBERS


# ---- The layers ----
def norm_of(config: DecoderConfig, width: int | None = None) -> nn.Module:
    """A new norm of the model's kind, initialised with ones. width: that of hidden states if None."""
    width, kind = width or config.hidden_size, config.member.norm
    if kind == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, offset=kind == "rms, 1 + w")


class Layer(Adapted):
    """Attention and MLP, each on a normed input and added to the hidden state; in Phi both read the same norm.

    depth: the layer's number, from 0, which decides if it has a window.
    """

    float_maps = ("down",)

    def __init__(self, config: DecoderConfig, depth: int):
        super().__init__()
        width, inner, has = config.hidden_size, config.intermediate_size, config.member.has
        self.parallel, self.gated, self.head_norms = not has("mlp_norm"), has("gate"), has("query_norm")
        self.windowed = config.window(depth) is not None
        self.heads, self.key_value_heads = config.num_attention_heads, config.key_value_heads
        self.head_width = config.head_width
        query, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        self.attention_norm = norm_of(config)
        self.qkv = StackedLinear(width, (query, key_value, key_value), config.biased("qkv"))
        if self.head_norms:
            self.query_norm, self.key_norm = norm_of(config, self.head_width), norm_of(config, self.head_width)
        self.attention_output = nn.Linear(query, width, config.biased("attention_output"))
        if not self.parallel:
            self.mlp_norm = norm_of(config)
        bias = config.biased("mlp")
        if self.gated:  # gate and up stay two products: as one, batch 8 takes 9% longer
            self.gate = nn.Linear(width, inner, bias)
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor, context: LayerContext, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """hidden (B, T, D) -> (B, T, D). depth: of this layer, from 0; the cache of that depth is read and written.

        adapt: adds adapters to the linear maps of this layer.
        """
        normed = self.attention_norm(context.with_exited(hidden))
        attended = self.attention(normed, context, depth, adapt)
        if self.parallel:
            return hidden + attended + self.mlp(context.without_exited(normed), adapt)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def attention(self, normed: Tensor, context: LayerContext, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """Causal attention (grouped queries: Ainslie et al. 2023), (B, T, D) -> (B, T, D)."""
        query, key, value = self.qkv.sizes
        # Queries and keys stay one tensor, so that they are rotated together.
        query_key, values = self.linear("qkv", normed, adapt).split((query + key, value), dim=-1)
        if self.head_norms:
            of_query, of_key = query_key.split((query, key), dim=-1)
            of_query, of_key = self.of_heads(self.query_norm, of_query), self.of_heads(self.key_norm, of_key)
            query_key = torch.cat((of_query, of_key), dim=-1)
        queries, keys = context.rotate(query_key, self.heads + self.key_value_heads).split((query, key), dim=-1)
        attended = context.attend(depth, context.without_exited(queries), keys, values)
        return self.linear("attention_output", attended, adapt)

    def of_heads(self, norm: nn.Module, x: Tensor) -> Tensor:
        """A norm applied to each head: (B, T, n d) -> the same shape."""
        return norm(x.unflatten(-1, (-1, self.head_width))).flatten(-2)

    def write_keys(self, hidden: Tensor, context: LayerContext, depth: int) -> None:
        """Write keys and values of hidden (B, T, D), as input of this layer, to its cache; nothing else is computed."""
        query, *sizes = self.qkv.sizes
        bias = None if self.qkv.bias is None else self.qkv.bias[query:]
        normed = self.attention_norm(context.with_exited(hidden))
        key, value = F.linear(normed, self.qkv.weight[query:], bias).split(sizes, dim=-1)
        key = self.of_heads(self.key_norm, key) if self.head_norms else key
        context.write(depth, context.rotate(key, self.key_value_heads), value)

    def mlp(self, normed: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """down(act(gate) * up), or down(act(up)) without a gate: (B, T, D) -> (B, T, D)."""
        inner = self.linear("up", normed, adapt)
        inner = self.activation(self.linear("gate", normed, adapt)) * inner if self.gated else self.activation(inner)
        return self.linear("down", inner, adapt)


# ---- The backbone ----
class Decoder(CausalDecoder):
    """The backbone: embeddings, L layers, the final norm and the LM head."""

    Config = DecoderConfig

    def make_layer(self, depth: int) -> Layer:
        return Layer(self.config, depth)

    def exit_norm(self) -> nn.Module:
        """A norm, because layers are pre-norm: their output is not normed."""
        return norm_of(self.config)

    def embed_tokens(self, ids: Tensor, at: Tensor) -> Tensor:
        hidden = self.embeddings(ids)
        if self.config.member.scaled_embeddings:
            # A tensor, so that the factor is rounded to the model's dtype, as in transformers.
            hidden = hidden * hidden.new_tensor(self.config.hidden_size**0.5)
        return hidden

    def config_of(self, layers: Sequence[int]) -> DecoderConfig:
        """As `Backbone.config_of`; each layer keeps its window."""
        config, windows = super().config_of(layers), list(map(self.config.window, range(self.config.num_hidden_layers)))
        if len(set(windows)) == 1:
            return config
        return replace(config, layer_types=tuple(LAYER_TYPES[windows[layer] is not None] for layer in layers))


BACKBONE = Decoder
LAYOUTS = {model_type: member.layout for model_type, member in MEMBERS.items()}
