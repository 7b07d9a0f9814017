"""Heads: modules that compute the logits of an exit from its hidden states.

ExitHead            for a row: pooling to one vector, then a classifier
VocabularyHead      for a token: a norm and a linear map to the vocabulary, initialised at random or copied
OwnHead             for a token: the decoder's own norm and LM head, at another layer
"""

from collections.abc import Callable
from copy import deepcopy
from importlib import import_module

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone
from mini_ee.lab.registry import HEADS, VOCABULARY_HEADS

TOKENS = "tokens"  # the pool of a head for each token
HEAD_DROPOUT = 0.1  # as in the published classifiers on BERT


class ExitHead(nn.Module):
    """Dense layer, tanh, dropout and linear map on one vector per row: the first token, or the mean over tokens.

    With the pool "tokens" they map each token, so that states are (B, T, D) and logits (B, T, C).

    dense is None for a linear head, which is faster: at batch size 1 the weights of a dense layer are loaded for every
    row. norm: applied to the tokens before pooling. A decoder needs one: its layers do not normalise their sums.
    """

    replaceable = True  # by a head of another kind, see registry.HEADS

    def __init__(self, width: int, num_labels: int, pool: str, norm: nn.Module | None = None):
        super().__init__()
        self.pool, self.norm = pool, norm
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(HEAD_DROPOUT)
        self.out = nn.Linear(width, num_labels)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    @property
    def only_pools(self) -> bool:
        """Whether `state` has no weights, so that the states of a frozen backbone can be computed once."""
        return self.norm is None and type(self).state is ExitHead.state

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The vector of each row: hidden (B, T, D), mask from `padding_mask`; returns (B, D)."""
        return pooled(hidden if self.norm is None else self.norm(hidden), mask, self.pool)

    def flops(self, tokens: int) -> float:
        """FLOPs for one row of this length."""
        maps = [self.out] if self.dense is None else [self.dense, self.out]
        averaged = tokens * maps[0].in_features if self.pool == "mean" else 0
        return 2.0 * (tokens if self.pool == TOKENS else 1) * sum(layer.weight.numel() for layer in maps) + averaged

    def classify(self, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C)."""
        return self.conclude(self.inner(state))

    def inner(self, state: Tensor) -> Tensor:
        """The input of the last linear map, (B, D)."""
        return state if self.dense is None else torch.tanh(self.dense(state))

    def conclude(self, inner: Tensor) -> Tensor:
        """`inner` (B, D) -> logits (B, C)."""
        return self.out(self.dropout(inner) if self.training else inner)  # a call takes noticeable time at batch size 1

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """`state` and `classify`: (B, T, D) -> logits (B, C)."""
        return self.classify(self.state(hidden, mask))


def dense(head: ExitHead) -> ExitHead:
    """The head unchanged."""
    return head


def linear(head: ExitHead) -> ExitHead:
    """Only the last linear map, without dense layer and tanh."""
    head.dense = None
    return head


def load_head(name: str) -> Callable[[ExitHead], ExitHead]:
    """The function of a kind of head: (an initialised ExitHead) -> its replacement. ValueError for an unknown name."""
    return _kind(name, HEADS)


def load_vocabulary_head(name: str) -> Callable[[Backbone], nn.Module]:
    """The same of a token's head: decoder -> a module with a `norm`, (..., D) -> logits (..., V) float32."""
    return _kind(name, VOCABULARY_HEADS)


def _kind(name: str, heads: dict[str, str]) -> Callable:
    if name not in heads:
        raise ValueError(f"head must be one of {', '.join(heads)}, found {name!r}")
    module, _, kind = heads[name].partition(":")
    return getattr(import_module(module), kind)


def pooled(hidden: Tensor, mask: Tensor | None, pool: str) -> Tensor:
    """(B, T, D) -> (B, D): the first token, the last one, or the mean over tokens; or all of them as they are.

    Padding is on the right.
    """
    if pool == TOKENS:
        return hidden
    if pool == "first":
        return hidden[:, 0]
    if pool == "last":
        return hidden[:, -1] if mask is None else _last(hidden, mask[:, 0, 0])
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask[:, 0, 0, :, None].to(hidden.dtype)  # (B, T, 1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _last(hidden: Tensor, real: Tensor) -> Tensor:
    """The token before the padding: of (B, T) true and false, the last that is true. One product, as a graph has it."""
    weights = real.to(hidden.dtype)
    followed = torch.cat((weights[:, 1:], torch.zeros_like(weights[:, :1])), dim=1)
    return (hidden * (weights - followed)[:, :, None]).sum(dim=1)


def exit_heads(backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str) -> nn.ModuleList:
    """A head for each exit of a backbone, with the norm that its states need.

    Exit 0 reads the embeddings, before the first layer: a fastText (Joulin et al. 2016, arXiv:1607.01759) in the model.
    Its pool is the mean, because the embedding of the first token is the same for every text. Raises ValueError
    if the backbone does not support this pool, or for an exit 0 of a decoder.
    """
    if pool not in (*backbone.poolings, TOKENS):
        allowed = " or ".join(backbone.poolings)
        raise ValueError(f"pool must be {allowed} for a {backbone.config.model_type}, got {pool!r}")
    if exits[0] == 0 and backbone.generates:
        raise ValueError(
            f"exit 0 is for encoders, found a {backbone.config.model_type}: let --exits begin with 1 or more"
        )
    width = backbone.config.hidden_size
    pools = ("mean" if layer == 0 and pool != TOKENS else pool for layer in exits)
    return nn.ModuleList(ExitHead(width, num_labels, exit_pool, backbone.exit_norm()) for exit_pool in pools)


INITS = ("scratch", "copy")  # initialisations of a VocabularyHead


class VocabularyHead(nn.Module):
    """A norm and a linear map to the vocabulary, like those at the end of the model."""

    def __init__(self, decoder: Backbone, init: str):
        """Raises ValueError if the decoder has no LM head, or for an unknown init."""
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
                std = getattr(decoder.config, "initializer_range", width**-0.5)  # a T5 has no such setting
                nn.init.normal_(self.linear.weight, std=std)
                if self.linear.bias is not None:
                    nn.init.zeros_(self.linear.bias)
        self.requires_grad_()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.linear(self.norm(hidden)).float()


class OwnHead(nn.Module):
    """The decoder's own norm and LM head, at another layer. It has no weights of its own.

    Raises ValueError if the decoder has no LM head.
    """

    def __init__(self, decoder: Backbone):
        super().__init__()
        if not decoder.has_lm_head:
            raise decoder.no_lm_head()
        self.__dict__["decoder"] = decoder  # not as a submodule, so that its weights do not get a second name

    @property
    def norm(self) -> nn.Module:
        """The decoder's norm."""
        return self.decoder.norm

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) float32."""
        return self.decoder.lm_logits(hidden)
