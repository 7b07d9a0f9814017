"""Shared by methods whose exits return embeddings: the losses of an exit, and the stage that trains maps.

Two kinds of examples have labels of two shapes:

    a text     (B, d), the embedding that the encoder returned for it before the training: its own teacher
    a pair     (B,), how similar its two texts are. The embeddings are those of all first texts, then of all second ones
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.exits.embedding_exits import EmbeddingExits, EmbeddingStates
from mini_ee.lab.training.stages import Batch, Stage

COSENT_SCALE = 20.0
KL_TEMPERATURE = 0.3


# ---- Losses of one exit ----
def map_loss(embeddings: Tensor, full: Tensor) -> Tensor:
    """1 - cosine, the mean over texts: (N, d), (N, d) -> scalar."""
    return (1 - F.cosine_similarity(embeddings, full, dim=1)).mean()


def cosent_loss(embeddings: Tensor, scores: Tensor) -> Tensor:
    """CoSENT (Su 2022): ln(1 + sum of exp(20 (cos_j - cos_i)) over pairs i, j of the batch with score_i > score_j).

    embeddings (2 B, d), scores (B,). 0 if all scores are equal.
    """
    cosines = COSENT_SCALE * F.cosine_similarity(*embeddings.chunk(2), dim=1)
    differences = (cosines[None, :] - cosines[:, None])[scores[:, None] > scores[None, :]]
    return torch.logsumexp(torch.cat((differences.new_zeros(1), differences)), dim=0)


def exit_loss(embeddings: Tensor, labels: Tensor, size: int | None = None) -> Tensor:
    """The loss of an exit for pairs (CoSENT) or texts (1 - cosine to their teacher). size: numbers that count."""
    embeddings = embeddings[:, :size]
    return cosent_loss(embeddings, labels) if labels.dim() == 1 else map_loss(embeddings, labels[:, :size])


def alignment(embeddings: Tensor, last: Tensor, temperature: float) -> Tensor:
    """KL(softmax(last / T) || softmax(embeddings / T)), the mean over texts. `last` is a teacher without gradient."""
    target = F.softmax(last.detach() / temperature, dim=1)
    return F.kl_div(F.log_softmax(embeddings / temperature, dim=1), target, reduction="batchmean")


# ---- Maps of a frozen encoder ----
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


def maps_stage() -> Stage:
    """All maps at once. The best epoch has the highest mean cosine on held-out texts."""
    return Stage(
        name="maps",
        trainable=lambda name: name.startswith("heads."),
        loss=maps_loss,
        on_states=True,
        validate=held_out_cosine,
        make_targets=full_embeddings,
        settings={"weight_decay": 0.0},
    )


# ---- The encoder itself ----
def encoder_stage(
    loss: Callable[[nn.Module, Batch], Tensor],
    score: Callable[[np.ndarray], float] = lambda scores: float(np.mean(scores)),
) -> Stage:
    """Train the whole encoder. The best epoch has the highest score, by default the mean over exits."""
    return Stage("encoder", lambda name: True, loss, score)


def exits_embeddings(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The embeddings (N, d) of every exit, of the texts of a batch."""
    return [embeddings.float() for embeddings in model(*batch.inputs)]
