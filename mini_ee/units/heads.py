"""Heads: what reads the hidden states of an exit, and gives logits.

ExitHead            of a row: one vector, then a classifier
VocabularyHead      of a token: a norm and a linear map to the vocabulary, drawn or copied
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from mini_ee.backbones.bert import Bert
from mini_ee.backbones.llama import Decoder, norm_of

POOLS = ("first", "mean")

HEAD_DROPOUT = 0.1  # of the published classifiers on BERT


class ExitHead(nn.Module):
    """Dense, tanh, dropout, linear on one vector a row: the first token, or the mean over tokens.

    norm: of the tokens before that. A decoder's states need one: its layers leave the sums that they add to unnormed.
    """

    def __init__(self, width: int, num_labels: int, pool: str, norm: nn.Module | None = None):
        super().__init__()
        self.pool, self.norm = pool, norm
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(HEAD_DROPOUT)
        self.out = nn.Linear(width, num_labels)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The vector of each row: hidden (B, T, D), mask as `padding_mask` gives it; returns (B, D)."""
        return pooled(hidden if self.norm is None else self.norm(hidden), mask, self.pool)

    def classify(self, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C)."""
        inner = torch.tanh(self.dense(state))
        return self.out(self.dropout(inner) if self.training else inner)  # as in a layer: a call is felt at batch 1

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Both: (B, T, D) -> logits (B, C)."""
        return self.classify(self.state(hidden, mask))

    def graph_state(self, g, hidden: str, mask: str) -> str:
        """state. mask (B, T): true where there is a token."""
        return graph_pooled(g, hidden if self.norm is None else g.apply(self.norm, hidden), mask, self.pool)

    def graph_classify(self, g, state: str) -> str:
        """classify."""
        return g.linear(g.op("Tanh", g.linear(state, self.dense)), self.out)


def pooled(hidden: Tensor, mask: Tensor | None, pool: str) -> Tensor:
    """(B, T, D) -> (B, D): the first token, or the mean over the tokens that are not padding."""
    if pool == "first":
        return hidden[:, 0]
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask[:, 0, 0, :, None].to(hidden.dtype)  # (B, T, 1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def graph_pooled(g, hidden: str, mask: str, pool: str) -> str:
    """pooled. mask (B, T): true where there is a token."""
    if pool == "first":
        return g.op("Squeeze", g.op("Slice", hidden, *map(g.integers, (0, 1, 1))), g.integers(1))
    weights = g.cast(g.op("Unsqueeze", mask, g.integers(2)), g.dtype)
    total, count = (
        g.op("ReduceSum", each, g.integers(1), keepdims=0) for each in (g.op("Mul", hidden, weights), weights)
    )
    return g.op("Div", total, count)


def exit_heads(backbone: Bert | Decoder, count: int, num_labels: int, pool: str) -> nn.ModuleList:
    """So many heads for a backbone; on a decoder each begins with a norm.

    Raises ValueError for a pool that the backbone does not have.
    """
    decoder = isinstance(backbone, Decoder)
    if pool not in POOLS:
        raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    if decoder and pool == "first":
        raise ValueError("pool must be mean for a decoder, got first: no token comes before it, it says nothing")
    shape = backbone.config.hidden_size, num_labels, pool
    return nn.ModuleList(ExitHead(*shape, norm_of(backbone.config) if decoder else None) for _ in range(count))


INITS = ("scratch", "copy")  # of a VocabularyHead


class VocabularyHead(nn.Module):
    """A norm and a linear map to the vocabulary, as the model ends with."""

    def __init__(self, decoder: Decoder, init: str):
        super().__init__()
        if init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
        weight = decoder.embeddings.weight
        self.norm = deepcopy(decoder.norm)
        self.linear = nn.Linear(
            decoder.config.hidden_size,
            decoder.config.vocab_size,
            bias=decoder.lm_head is not None and decoder.lm_head.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        source = decoder.embeddings if decoder.lm_head is None else decoder.lm_head
        with torch.no_grad():
            if init == "copy":
                for mine, theirs in zip(self.linear.parameters(), source.parameters(), strict=True):
                    mine.copy_(theirs)
            else:
                nn.init.constant_(self.norm.weight, float(not getattr(self.norm, "offset", False)))
                if getattr(self.norm, "bias", None) is not None:
                    nn.init.zeros_(self.norm.bias)
                nn.init.normal_(self.linear.weight, std=decoder.config.initializer_range)
                if self.linear.bias is not None:
                    nn.init.zeros_(self.linear.bias)
        self.requires_grad_()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.linear(self.norm(hidden)).float()

    def graph(self, g, hidden: str) -> str:
        """forward on (B, D)."""
        return g.linear(g.apply(self.norm, hidden), self.linear)
