"""Heads: what reads the hidden states of an exit, and gives logits.

ExitHead            of a row: one vector, then a classifier
VocabularyHead      of a token: a norm and a linear map to the vocabulary, drawn or copied
OwnHead             of a token: the decoder's own norm and map, after another layer
"""

from collections.abc import Callable
from copy import deepcopy
from importlib import import_module

import torch
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone
from mini_ee.registry import HEADS

HEAD_DROPOUT = 0.1  # of the published classifiers on BERT


class ExitHead(nn.Module):
    """Dense, tanh, dropout, linear on one vector a row: the first token, or the mean over tokens.

    dense is None for a linear head: at batch 1 the weights of the dense layer are read for every row.
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

    def flops(self, tokens: int) -> float:
        """Of one row of so many tokens."""
        maps = [self.out] if self.dense is None else [self.dense, self.out]
        averaged = tokens * maps[0].in_features if self.pool == "mean" else 0
        return 2.0 * sum(each.weight.numel() for each in maps) + averaged

    def classify(self, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C)."""
        return self.conclude(self.inner(state))

    def inner(self, state: Tensor) -> Tensor:
        """What the last linear map reads, (B, D)."""
        return state if self.dense is None else torch.tanh(self.dense(state))

    def conclude(self, inner: Tensor) -> Tensor:
        """`inner` (B, D) -> logits (B, C)."""
        return self.out(self.dropout(inner) if self.training else inner)  # as in a layer: a call is felt at batch 1

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Both: (B, T, D) -> logits (B, C)."""
        return self.classify(self.state(hidden, mask))


def dense(head: ExitHead) -> ExitHead:
    """The head as it is drawn."""
    return head


def linear(head: ExitHead) -> ExitHead:
    """The last linear map alone, without dense layer and tanh."""
    head.dense = None
    return head


def load_head(name: str) -> Callable[[ExitHead], ExitHead]:
    """The kind of head of this name: (a drawn ExitHead) -> the head in its place. ValueError if there is none."""
    if name not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, found {name!r}")
    module, _, kind = HEADS[name].partition(":")
    return getattr(import_module(module), kind)


def pooled(hidden: Tensor, mask: Tensor | None, pool: str) -> Tensor:
    """(B, T, D) -> (B, D): the first token, or the mean over the tokens that are not padding."""
    if pool == "first":
        return hidden[:, 0]
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask[:, 0, 0, :, None].to(hidden.dtype)  # (B, T, 1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def exit_heads(backbone: Backbone, count: int, num_labels: int, pool: str) -> nn.ModuleList:
    """So many heads for a backbone, each with the norm that its states need.

    Raises ValueError for a pool that makes no sense for the backbone.
    """
    if pool not in backbone.poolings:
        allowed = " or ".join(backbone.poolings)
        raise ValueError(f"pool must be {allowed} for a {backbone.config.model_type}, got {pool!r}")
    shape = backbone.config.hidden_size, num_labels, pool
    return nn.ModuleList(ExitHead(*shape, backbone.exit_norm()) for _ in range(count))


INITS = ("scratch", "copy")  # of a VocabularyHead


class VocabularyHead(nn.Module):
    """A norm and a linear map to the vocabulary, as the model ends with."""

    def __init__(self, decoder: Backbone, init: str):
        """Raises ValueError for a decoder without head."""
        super().__init__()
        if init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
        theirs = {part: decoder.get_parameter(name) for part, name in decoder.vocabulary.items()}
        weight = theirs["weight"]
        self.norm = deepcopy(decoder.norm) if init == "copy" else decoder.exit_norm().to(weight)
        vocabulary, width = weight.shape
        self.linear = nn.Linear(width, vocabulary, bias="bias" in theirs, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            if init == "copy":
                for part, values in theirs.items():
                    self.linear.get_parameter(part).copy_(values)
            else:
                std = getattr(decoder.config, "initializer_range", width**-0.5)  # a T5 has none
                nn.init.normal_(self.linear.weight, std=std)
                if self.linear.bias is not None:
                    nn.init.zeros_(self.linear.bias)
        self.requires_grad_()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.linear(self.norm(hidden)).float()


class OwnHead(nn.Module):
    """The decoder's own norm and map to the vocabulary, after another layer. It has no weights besides.

    Raises ValueError for a decoder without head.
    """

    def __init__(self, decoder: Backbone):
        super().__init__()
        if not decoder.has_lm_head:
            raise decoder.no_lm_head()
        self.__dict__["decoder"] = decoder  # no part of this module: its weights have one name

    @property
    def norm(self) -> nn.Module:
        """That of the decoder."""
        return self.decoder.norm

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.decoder.lm_logits(hidden)
