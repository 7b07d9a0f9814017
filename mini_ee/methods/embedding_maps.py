"""Embedding maps (Li et al. 2024, arXiv:2402.14776): exits of a frozen sentence encoder learn its embedding.

After each exit layer e_k but the last, a linear map W_k of the pooled hidden state learns the encoder's full embedding:

    loss = sum over k of mean over texts of 1 - cos(W_k s_k(x) + b_k, E(x))

Symbols:   E(x): the embedding after the last layer; s_k(x): the pooled hidden state after layer e_k.

These are self-supervised exits (methods/self_supervised.py) for vectors. The paper (Xianming Li et al., 2D Matryoshka
Sentence Embeddings) trains the whole encoder for each depth; here the encoder stays as it is, and no label is needed.

Decisions:
1. Maps start as the identity, so before training an exit returns its pooled state.
2. The encoder is frozen: the states of all texts are computed once.
3. The default rule is a fixed depth. With a frozen encoder adaptive depth saved no layers at the same quality.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.data.settings import Settings
from mini_ee.exits.embedding_exits import EmbeddingExits, EmbeddingStates
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The method has no settings of its own."""


def map_loss(embeddings: Tensor, full: Tensor) -> Tensor:
    """1 - cosine, the mean over texts: (N, d), (N, d) -> scalar."""
    return (1 - F.cosine_similarity(embeddings, full, dim=1)).mean()


def maps_loss(model: EmbeddingExits, batch: Batch) -> Tensor:
    """The sum of map_loss over all exits but the last."""
    assert batch.states is not None and batch.targets is not None
    return sum(map_loss(model.classify(k, state), batch.targets) for k, state in enumerate(batch.states[:-1]))


@torch.no_grad()
def full_embeddings(model: EmbeddingExits, states: EmbeddingStates) -> Tensor:
    """(N, d), what the encoder itself returns."""
    last = len(model.exits) - 1
    return model.classify(last, states.states[:, last].to(next(model.parameters()).device)).cpu()


def held_out_cosine(model: EmbeddingExits, held: Any) -> dict[str, float]:
    """Mean cosine to the full embedding over held-out texts and all exits but the last. held: EmbeddingStates."""
    return {"score": float(np.mean(held.scores(model)[0][:-1]))}


def recipe(model: EmbeddingExits, config: Config) -> list[Stage]:
    """One stage for all maps. The best epoch has the highest mean cosine on held-out texts."""
    if len(model.exits) == 1:
        return []
    return [
        Stage(
            name="maps",
            trainable=lambda name: name.startswith("heads."),
            loss=maps_loss,
            on_states=True,
            validate=held_out_cosine,
            make_targets=full_embeddings,
            settings={"weight_decay": 0.0},
        )
    ]


METHOD = Method(
    Config,
    recipe,
    units=("embeddings",),
    exits=None,
    defaults={"embeddings": {"head_lr": 1e-3, "epochs": 20}},
    lacks=("lr", "weight_decay"),
)
