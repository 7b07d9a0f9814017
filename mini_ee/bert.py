"""BERT from scratch (Devlin et al. 2019), and exits after some of its layers.

Shapes: B rows, T tokens, D width, H heads, C classes (1 for a regression), K exits. Linear maps have their names in
`Layer`; Hugging Face's names are in NAMES.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.data import Inputs
from mini_ee.load import check_exits, folder_of, load_weights, read_config

Adapt = Callable[[str, Tensor, Tensor], Tensor]
"""Changes the output of a linear map of a layer: (its name, its input, its output) -> the new output."""

SIZES = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings vocab_size".split()
FIXED: dict[str, tuple] = {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "type_vocab_size": (2,)}
FIXED |= {"is_decoder": (False,), "add_cross_attention": (False,), "tie_word_embeddings": ()}
FIXED |= {"hidden_dropout_prob": (), "attention_probs_dropout_prob": (), "layer_norm_eps": ()}
NAMES = {"query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value"}
NAMES |= {"attention_output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
NAMES |= {"up": "intermediate.dense", "down": "output.dense", "output_norm": "output.LayerNorm", "norm": "LayerNorm"}
NAMES |= {"word": "word_embeddings", "position": "position_embeddings", "kind": "token_type_embeddings"}
UNUSED = ("cls.", "pooler.", "classifier.", "position_ids")


def theirs(ours: str) -> str:
    """`layers.3.up.weight` -> `bert.encoder.layer.3.intermediate.dense.weight`; of "" the prefix."""
    if not ours:
        return "bert."
    *place, part, leaf = ours.split(".")
    return f"bert.{f'encoder.layer.{place[1]}' if place else 'embeddings'}.{NAMES[part]}.{leaf}"


class Layer(nn.Module):
    """Self-attention, then the feed-forward part; each is added to its input, and the sum is normalised."""

    def __init__(self, config: dict):
        super().__init__()
        D, inner, eps = config["hidden_size"], config["intermediate_size"], config.get("layer_norm_eps", 1e-12)
        self.heads = config["num_attention_heads"]
        self.query, self.key, self.value, self.attention_output = (nn.Linear(D, D) for _ in range(4))
        self.attention_norm, self.output_norm = nn.LayerNorm(D, eps), nn.LayerNorm(D, eps)
        self.up, self.down = nn.Linear(D, inner), nn.Linear(inner, D)
        self.dropout = nn.Dropout(config.get("hidden_dropout_prob", 0.1))
        self.attention_dropout = config.get("attention_probs_dropout_prob", 0.1)

    def forward(self, x: Tensor, mask: Tensor, adapt: Adapt | None = None) -> Tensor:
        """x (B, T, D), mask (B, 1, 1, T), true at tokens -> (B, T, D)."""
        q, k, v = (
            self.linear(name, x, adapt).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D / H)
            for name in ("query", "key", "value")
        )
        dropout = self.attention_dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dropout(self.linear("attention_output", a, adapt)))
        inner = F.gelu(self.linear("up", x, adapt))
        return self.output_norm(x + self.dropout(self.linear("down", inner, adapt)))

    def linear(self, name: str, x: Tensor, adapt: Adapt | None) -> Tensor:
        """One of the six linear maps, (B, T, I) -> (B, T, O), changed by `adapt` if there is one."""
        y = getattr(self, name)(x)
        return y if adapt is None else adapt(name, x, y)


class Bert(nn.Module):
    """Embeddings and L layers."""

    def __init__(self, config: dict):
        super().__init__()
        D = config["hidden_size"]
        self.config = config
        self.word = nn.Embedding(config["vocab_size"], D)
        self.position = nn.Embedding(config["max_position_embeddings"], D)
        self.kind = nn.Embedding(2, D)
        self.norm = nn.LayerNorm(D, config.get("layer_norm_eps", 1e-12))
        self.dropout = nn.Dropout(config.get("hidden_dropout_prob", 0.1))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    @classmethod
    def load(cls, name: str = "bert") -> Self:
        """From a folder in Hugging Face's layout, or the built-in one. Raises FileNotFoundError, or ValueError."""
        folder = folder_of(name)
        model = cls(read_config(folder, "bert", SIZES, FIXED))
        load_weights(model, folder, theirs, UNUSED)
        return model.eval()

    def embed(self, inputs: Inputs) -> Tensor:
        """(B, T, D): word + position + kind (0 for the first text, 1 for the second of a pair)."""
        if (tokens := inputs.ids.shape[1]) > len(self.position.weight):
            raise ValueError(f"expected at most {len(self.position.weight)} tokens, got {tokens}")
        return self.dropout(self.norm(self.word(inputs.ids) + self.position.weight[:tokens] + self.kind(inputs.kinds)))

    def run(self, x: Tensor, mask: Tensor, start: int, stop: int, adapters: Sequence[Adapt] | None = None) -> Tensor:
        """The layers start + 1 .. stop: x (B, T, D), mask (B, T) -> (B, T, D). adapters: one for each layer from 1."""
        readable = mask[:, None, None].bool()
        for depth in range(start, stop):
            x = self.layers[depth](x, readable, adapters and adapters[depth])
        return x

    def flops(self, tokens: int) -> float:
        """Of one layer on one row, a multiply-add counted as two: products with weights, and of tokens with tokens."""
        D, inner = self.config["hidden_size"], self.config["intermediate_size"]
        return 2.0 * tokens * (4 * D * D + 2 * D * inner) + 4.0 * tokens * tokens * D


class State(NamedTuple):
    """The rows that are still in the model."""

    hidden: Tensor  # (B, T, D)
    mask: Tensor  # (B, T)

    def keep(self, rows: np.ndarray) -> "State":
        return State(*(tensor[rows] for tensor in self))


class Exits(nn.Module):
    """A BERT with a head after each layer in `exits`, the last of which is L. An engine of loop.py.

    A head pools the tokens of a row (their mean, or the first) and classifies: linear, tanh, dropout, linear.
    """

    def __init__(self, bert: Bert, exits: Sequence[int], classes: int, pool: str = "mean"):
        super().__init__()
        check_exits(exits, len(bert.layers))
        if pool not in ("mean", "first"):
            raise ValueError(f"pool must be mean or first, got {pool!r}")
        self.bert, self.exits, self.classes, self.pool = bert, tuple(exits), classes, pool
        self.starts = (0, *self.exits)  # segment k runs from layer starts[k] to layer exits[k]
        D = bert.config["hidden_size"]
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.1), nn.Linear(D, classes)) for _ in exits
        )
        for head in self.heads:
            for linear in (head[0], head[3]):
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)

    def pooled(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (B, D)."""
        if self.pool == "first":
            return x[:, 0]
        weights = mask[..., None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1)

    def states(self, inputs: Inputs) -> Tensor:
        """What the heads read, (B, K, D)."""
        x, states = self.bert.embed(inputs), []
        for start, stop in zip(self.starts, self.exits):
            x = self.bert.run(x, inputs.mask, start, stop)
            states.append(self.pooled(x, inputs.mask))
        return torch.stack(states, 1)

    def classify(self, states: Tensor) -> Tensor:
        """States (B, K, D) -> logits (B, K, C)."""
        return torch.stack([head(state) for head, state in zip(self.heads, states.unbind(1))], 1)

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of every exit, (B, K, C)."""
        return self.classify(self.states(inputs))

    # ---- The engine of loop.py ----
    def start(self, inputs: Inputs) -> State:
        return State(self.bert.embed(inputs), inputs.mask)

    def advance(self, k: int, state: State) -> State:
        return state._replace(hidden=self.bert.run(state.hidden, state.mask, self.starts[k], self.exits[k]))

    def read(self, k: int, state: State) -> np.ndarray:
        return self.heads[k](self.pooled(state.hidden, state.mask)).numpy(force=True)

    # ---- The cost of a row that stops at exit k = 0 .. K - 1 ----
    def passes(self, every_head: bool) -> np.ndarray:
        """(K,): how many layers have run when the heads of all exits up to k were read, or only the head of exit k."""
        return np.array(self.exits)

    def flops(self, tokens: int, every_head: bool) -> np.ndarray:
        """(K,): of these layers, and of the heads that were read. Policies are not counted."""
        D = self.bert.config["hidden_size"]
        head = 2.0 * (D * D + D * self.classes) + (tokens * D if self.pool == "mean" else 0)
        heads = np.arange(1, len(self.exits) + 1) if every_head else 1
        return self.passes(every_head) * self.bert.flops(tokens) + head * heads
