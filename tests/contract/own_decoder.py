"""A small decoder of one's own, which no file of mini_ee knows: the text that test_new_decoder.py registers by a line.

Positions are known in two ways at once, so that a test sees both: learned embeddings, and scores that fall off with
distance (ALiBi, Press et al. 2022). Attention and MLP read the same norm and are added together, as in GPT-J, and all
query heads share one key head (Shazeer 2019).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Layout
from mini_ee.lab.backbones.generative import CausalDecoder, GenerativeConfig
from mini_ee.lab.backbones.layers import Adapted, StackedLinear


@dataclass(frozen=True, kw_only=True)
class SlopedConfig(GenerativeConfig):
    """The keys of its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = None
    key_value_heads = 1


class Layer(Adapted):
    """x + attention(norm(x)) + MLP(norm(x))."""

    def __init__(self, config: SlopedConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.LayerNorm(width)
        self.qkv = StackedLinear(width, (width, config.head_width, config.head_width), bias=False)
        self.attention_output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden: Tensor, context, depth: int, adapt=None) -> Tensor:
        normed = self.norm(context.with_exited(hidden))
        query, key, value = self.linear("qkv", normed, adapt).split(self.qkv.sizes, dim=-1)
        attended = self.linear(
            "attention_output", context.attend(depth, context.without_exited(query), key, value), adapt
        )
        inner = F.relu(self.linear("up", context.without_exited(normed), adapt))
        return hidden + attended + self.linear("down", inner, adapt)

    def write_keys(self, hidden: Tensor, context, depth: int) -> None:
        _, key, value = self.linear("qkv", self.norm(context.with_exited(hidden)), None).split(self.qkv.sizes, dim=-1)
        context.write(depth, key, value)


class Sloped(CausalDecoder):
    Config = SlopedConfig

    def __init__(self, config: SlopedConfig, lm_head: bool = True):
        super().__init__(config, lm_head)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.positions.apply(self.initialise)

    def make_layer(self, depth: int) -> Layer:
        return Layer(self.config)

    def exit_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden_size)

    def embed_tokens(self, ids: Tensor, at: Tensor) -> Tensor:
        return self.embeddings(ids) + self.positions(at)

    def position_bias(self, at: Tensor, reads: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1.0, self.config.num_attention_heads + 1, device=self.device)
        return (reads[:, None, None, :] - at[:, None, :, None]) * slopes[:, None, None]


NAMES = {
    "embeddings": "wte",
    "positions": "wpe",
    "layers.{i}.norm": "h.{i}.ln",
    "layers.{i}.qkv": "h.{i}.attn.{q|k|v}",
    "layers.{i}.attention_output": "h.{i}.attn.out",
    "layers.{i}.up": "h.{i}.mlp.fc_in",
    "layers.{i}.down": "h.{i}.mlp.fc_out",
    "norm": "ln_f",
    "lm_head": "lm_head",
}

BACKBONE = Sloped
LAYOUTS = {"sloped": Layout(names=NAMES, prefix="transformer.", architecture="Sloped")}
