"""Llama and its family, from scratch: the layer, and the backbone that it makes with what all causal decoders share.

    llama_config.py   what each model_type is: Llama, Gemma, Phi, Mistral, Qwen2, Qwen3, Phi-3; its config
    generative.py     where tokens are, what they read, the final norm and the head to words
    cache.py          the key/value cache, and the contexts of layers

All are pre-norm with rotary positions (Su et al. 2021). Agreement with transformers:
tests/parity/test_decoder.py.

LongRoPE (Phi-3) has factors for short and for long texts. Here the length of each row chooses them; in transformers the
longest row of a batch chooses for all. So in a batch of long and short rows each row equals what transformers computes
for that row alone, and a short row differs from what transformers computes in that batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.activations import ACTIVATIONS
from mini_ee.backbones.backbone import AdaptLayer
from mini_ee.backbones.cache import LayerContext
from mini_ee.backbones.generative import CausalDecoder
from mini_ee.backbones.layers import Adapted, RMSNorm, StackedLinear
from mini_ee.backbones.llama_config import LAYER_TYPES, MEMBERS, DecoderConfig


# ---- The layers ----
def norm_of(config: DecoderConfig, width: int | None = None) -> nn.Module:
    """A norm as the model has them, of weight one; width: of a head, None: of a hidden state."""
    width, kind = width or config.hidden_size, config.member.norm
    if kind == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, offset=kind == "rms, 1 + w")


class Layer(Adapted):
    """Attention and MLP, each on a normed input and added to the stream; some add both at once, on one norm.

    depth: which layer it is, from 0: it may have a window.
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
        if self.gated:  # gate and up stay two products: as one, batch 8 takes 9 % longer
            self.gate = nn.Linear(width, inner, bias)
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor, context: LayerContext, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """hidden (B, T, D) -> (B, T, D), of the layer at this depth, from 0: whose cache is read and written.

        adapt: what adapters add to the linear maps of this layer.
        """
        normed = self.attention_norm(context.with_exited(hidden))
        attended = self.attention(normed, context, depth, adapt)
        if self.parallel:
            return hidden + attended + self.mlp(context.without_exited(normed), adapt)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def attention(self, normed: Tensor, context: LayerContext, depth: int, adapt: AdaptLayer | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D): every token reads the tokens up to itself (grouped queries: Ainslie et al. 2023)."""
        query, key, value = self.qkv.sizes
        turning, values = self.linear("qkv", normed, adapt).split((query + key, value), dim=-1)
        if self.head_norms:
            of_query, of_key = turning.split((query, key), dim=-1)
            of_query, of_key = self.of_heads(self.query_norm, of_query), self.of_heads(self.key_norm, of_key)
            turning = torch.cat((of_query, of_key), dim=-1)
        queries, keys = context.rotate(turning, self.heads + self.key_value_heads).split((query, key), dim=-1)
        attended = context.attend(depth, context.without_exited(queries), keys, values)
        return self.linear("attention_output", attended, adapt)

    def of_heads(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The norm of each head: (B, T, n d) -> the same."""
        return norm(x.unflatten(-1, (-1, self.head_width))).flatten(-2)

    def write_keys(self, hidden: Tensor, context: LayerContext, depth: int) -> None:
        """The keys and values of hidden (B, T, D), as this layer's own input, into its cache; nothing is attended."""
        query, *sizes = self.qkv.sizes
        bias = None if self.qkv.bias is None else self.qkv.bias[query:]
        normed = self.attention_norm(context.with_exited(hidden))
        key, value = F.linear(normed, self.qkv.weight[query:], bias).split(sizes, dim=-1)
        key = self.of_heads(self.key_norm, key) if self.head_norms else key
        context.write(depth, context.rotate(key, self.key_value_heads), value)

    def mlp(self, normed: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """down(act(gate) * up), without a gate down(act(up)): (B, T, D) -> (B, T, D)."""
        inner = self.linear("up", normed, adapt)
        inner = self.activation(self.linear("gate", normed, adapt)) * inner if self.gated else self.activation(inner)
        return self.linear("down", inner, adapt)


# ---- The backbone ----
class Decoder(CausalDecoder):
    """The backbone: embeddings, L layers, the final norm and the head to words."""

    Config = DecoderConfig

    def make_layer(self, depth: int) -> Layer:
        return Layer(self.config, depth)

    def exit_norm(self) -> nn.Module:
        """Layers leave the sums that they add to unnormed."""
        return norm_of(self.config)

    def embed_tokens(self, ids: Tensor, at: Tensor) -> Tensor:
        hidden = self.embeddings(ids)
        if self.config.member.scaled_embeddings:
            hidden = hidden * hidden.new_tensor(self.config.hidden_size**0.5)  # rounded to the model's dtype, as theirs
        return hidden

    def config_of(self, layers: Sequence[int]) -> DecoderConfig:
        """As `Backbone.config_of` says; each layer keeps its window."""
        config, windows = super().config_of(layers), list(map(self.config.window, range(self.config.num_hidden_layers)))
        if len(set(windows)) == 1:
            return config
        return replace(config, layer_types=tuple(LAYER_TYPES[windows[layer] is not None] for layer in layers))


BACKBONE = Decoder
LAYOUTS = {model_type: member.layout for model_type, member in MEMBERS.items()}
