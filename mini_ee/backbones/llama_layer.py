"""A layer of Llama's family: attention and MLP, each with its ONNX twin. llama_family.py says what a member has.

All are pre-norm with rotary positions (Su et al. 2021). Agreement with transformers is pinned in tests/test_decoder.py.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.activations import graph_activation
from mini_ee.backbones.backbone import AdaptLayer
from mini_ee.backbones.bert import Adapted, StackedLinear
from mini_ee.backbones.cache import Around, GraphBlock
from mini_ee.backbones.llama_config import ACTIVATIONS, DecoderConfig


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, Eq. 34): the pairs (x_i, x_{i+R/2}) turn, what is beyond R stays.

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d).
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), sin)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), dim=-1)


# ---- The layers ----
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019), in float32; offset: it stores w - 1."""

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

    def forward(
        self,
        hidden: Tensor,
        around: Around,
        keys: Tensor | None,
        values: Tensor | None,
        adapt: AdaptLayer | None = None,
    ) -> Tensor:
        """hidden (B, T, D) -> (B, T, D). keys, values: this layer's cache, read and written; None: the block alone.

        adapt: what adapters add to the linear maps of this layer.
        """
        normed = self.attention_norm(hidden)
        attended = self.attention(normed, around, keys, values, adapt)
        if self.parallel:
            return hidden + attended + self.mlp(normed, adapt)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def attention(
        self,
        normed: Tensor,
        around: Around,
        keys: Tensor | None,
        values: Tensor | None,
        adapt: AdaptLayer | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D): every token reads the tokens up to itself (grouped queries: Ainslie et al. 2023)."""
        stacked = self.linear("qkv", normed, adapt).view(*normed.shape[:2], -1, self.head_width)  # (B, T, H + 2 KV, d)
        turning, value = stacked.split((self.heads + self.key_value_heads, self.key_value_heads), dim=2)
        if self.head_norms:
            query, key = turning.split((self.heads, self.key_value_heads), dim=2)
            turning = torch.cat((self.query_norm(query), self.key_norm(key)), dim=2)
        turned = rotate(turning, around.cos, around.sin)
        query, key = turned[:, :, : self.heads], turned[:, :, self.heads :]
        mask, causal = around.reads(self.windowed)
        if keys is None:
            attended = self._attend(query, key.transpose(1, 2), value.transpose(1, 2), mask, causal)
        else:
            keys.transpose(1, 2)[around.write], values.transpose(1, 2)[around.write] = key, value
            keys, values = keys[:, :, : around.end], values[:, :, : around.end]
            if around.rows is None:
                attended = self._attend(query, keys, values, mask, causal)
            else:  # row by row: a gathered copy of their keys takes longer than attention itself
                attended = torch.cat(
                    [
                        self._attend(query[i, None], keys[row, None], values[row, None], mask[i, None], False)
                        for i, row in enumerate(around.rows)
                    ]
                )
        return self.linear("attention_output", attended.transpose(1, 2).flatten(2), adapt)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=self.key_value_heads < self.heads,
        )

    def write_keys(self, hidden: Tensor, around: Around, keys: Tensor, values: Tensor) -> None:
        """The keys and values of hidden (B, T, D), as this layer's own input, into its cache; nothing is attended."""
        query, *_ = self.qkv.sizes
        bias = None if self.qkv.bias is None else self.qkv.bias[query:]
        stacked = F.linear(self.attention_norm(hidden), self.qkv.weight[query:], bias)
        key, value = stacked.view(*hidden.shape[:2], 2, -1, self.head_width).unbind(2)
        key = self.key_norm(key) if self.head_norms else key
        keys.transpose(1, 2)[around.write] = rotate(key, around.cos, around.sin)
        values.transpose(1, 2)[around.write] = value

    def graph_write_keys(self, g, hidden: str, block: GraphBlock, depth: int) -> None:
        """write_keys on (B T, D). The projection without its queries is cut once, when the graph is loaded."""
        query, key, value = self.qkv.sizes
        cut = [
            g.op("Slice", g.parameter(each), *map(g.integers, (query, query + key + value, 0)))
            for each in (self.qkv.weight, self.qkv.bias)
            if each is not None
        ]
        stacked = g.unflatten(g.gemm(g.apply(self.attention_norm, block.every(g, hidden)), *cut), block.every_shape)
        key, value = g.several(2, "Split", stacked, axis=2, num_outputs=2)
        if self.head_norms:
            key = self._graph_head_norm(g, self.key_norm, key, self.key_value_heads)
        block.write(g, depth, block.rotate(g, key, self.key_value_heads), value)

    def _graph_head_norm(self, g, norm: nn.Module, heads: str, count: int) -> str:
        """The norm of each head: (B, T, count d) -> the same."""
        apart = g.op("Reshape", heads, g.integers(0, 0, count, self.head_width))
        return g.op("Reshape", g.apply(norm, apart), g.shape(heads, 0, 3))

    def mlp(self, normed: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """down(act(gate) * up), without a gate down(act(up)): (B, T, D) -> (B, T, D)."""
        inner = self.linear("up", normed, adapt)
        inner = self.activation(self.linear("gate", normed, adapt)) * inner if self.gated else self.activation(inner)
        return self.linear("down", inner, adapt)

    def graph(self, g, hidden: str, block: GraphBlock, depth: int, adapt=None) -> str:
        """forward of the layer at this depth, from 0, on (B T, D) but for the attention itself."""
        linear = partial(self.graph_linear, g, adapt=adapt)

        def mlp(normed: str) -> str:
            inner = linear("up", normed)
            if not self.gated:
                return linear("down", graph_activation(g, inner, self.activation))
            return linear("down", g.op("Mul", graph_activation(g, linear("gate", normed), self.activation), inner))

        normed = g.apply(self.attention_norm, block.every(g, hidden))
        query, key, value = self.qkv.sizes
        stacked = g.unflatten(linear("qkv", normed), block.every_shape)
        turning, value = g.several(2, "Split", stacked, g.integers(query + key, value), axis=2)
        if self.head_norms:
            query_part, key_part = g.several(2, "Split", turning, g.integers(query, key), axis=2)
            query_part = self._graph_head_norm(g, self.query_norm, query_part, self.heads)
            key_part = self._graph_head_norm(g, self.key_norm, key_part, self.key_value_heads)
            turning = g.op("Concat", query_part, key_part, axis=2)
        turned = block.rotate(g, turning, self.heads + self.key_value_heads)
        query, key = g.several(2, "Split", turned, g.integers(query, key), axis=2)
        attended = block.attend(g, depth, block.here(g, query, block.readable), key, value)
        attended = linear("attention_output", g.flatten(attended, self.attention_output.in_features))
        if self.parallel:
            return g.op("Add", g.op("Add", hidden, attended), mlp(block.here(g, normed, hidden)))
        hidden = g.op("Add", hidden, attended)
        return g.op("Add", hidden, mlp(g.apply(self.mlp_norm, hidden)))
