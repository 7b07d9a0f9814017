"""Texts exit with an embedding: a sentence encoder with a linear map to its own full embedding after chosen layers.

The embedding is what a head of exits/heads.py calls logits: segments, rules and graphs treat its numbers in the same
way. The last exit has no map: it is the encoder's own embedding.
"""

from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone
from mini_ee.exits.heads import pooled
from mini_ee.exits.row_exits import RowData, RowExits, RowSegments, States, check_exits

POOLS = ("mean", "first", "last")


class EmbeddingHead(nn.Module):
    """Pooling, and for exits before the last a linear map, which starts as the identity.

    size: d, how many of the first numbers remain (Matryoshka). normalize: to length 1. norm: of the tokens before
    pooling, for backbones whose layers end with a sum.
    """

    def __init__(self, width: int, size: int, pool: str, normalize: bool, mapped: bool, norm: nn.Module | None = None):
        super().__init__()
        self.width, self.size, self.pool, self.normalize, self.norm = width, size, pool, normalize, norm
        self.linear = nn.Linear(width, size) if mapped else None
        if self.linear is not None:
            nn.init.eye_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, D) -> the pooled vector (B, D) of each text."""
        return pooled(hidden if self.norm is None else self.norm(hidden), mask, self.pool)

    def classify(self, state: Tensor) -> Tensor:
        """(B, D) -> embeddings (B, d)."""
        embedding = state[:, : self.size] if self.linear is None else self.linear(state)
        return F.normalize(embedding, dim=1) if self.normalize else embedding

    def flops(self, tokens: int) -> float:
        """FLOPs for one text of this length."""
        averaged = tokens * self.width if self.pool == "mean" else 0
        return float(averaged + (0 if self.linear is None else 2 * self.linear.weight.numel()))


class EmbeddingExits(RowExits):
    """A frozen sentence encoder with an EmbeddingHead after each layer in `exits`. num_labels is d.

    Raises ValueError for an unknown pool, or for a size above the width of the encoder.
    """

    unit = "embeddings"
    head = None
    holds_backbone = False

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], size: int, pool: str, normalize: bool):
        nn.Module.__init__(self)
        self.exits, width = check_exits(exits, backbone.config.num_hidden_layers), backbone.config.hidden_size
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, found {pool!r}")
        if not 1 <= size <= width:
            raise ValueError(f"expected an embedding of 1 to {width} numbers, the width of the encoder, found {size}")
        self.num_labels, self.pool, self.normalize = size, pool, normalize
        norms = [backbone.exit_norm() for _ in exits]
        if norms[-1] is not None and getattr(backbone, "norm", None) is not None:
            norms[-1] = deepcopy(backbone.norm)  # the encoder's own final norm
        self.backbone = backbone.without_heads()
        last = len(exits) - 1
        heads = (EmbeddingHead(width, size, pool, normalize, k < last, norm) for k, norm in enumerate(norms))
        self.heads, self.policy = nn.ModuleList(heads), None

    def use_heads(self, name: str) -> None:
        """There is one kind of head."""

    def is_trainable(self, name: str) -> bool:
        """Whether a training may change the parameter of this name: it is that of a map."""
        return super().is_trainable(name) and not name.startswith(f"heads.{len(self.exits) - 1}.")

    def segments(self) -> RowSegments:
        segments = RowSegments(self)
        segments.metadata = {"normalize": self.normalize}
        return segments


# ---- Training data ----


def full_cosines(embeddings: np.ndarray) -> np.ndarray:
    """(N, K, d) -> (N, K): the cosine of the embedding of each exit and that of the last exit."""
    scaled = embeddings / np.maximum(np.linalg.norm(embeddings, axis=2, keepdims=True), 1e-12)
    return (scaled * scaled[:, -1:]).sum(axis=2)


class EmbeddingData(RowData):
    """Encoded texts. Their score at an exit is the mean cosine to the full embedding."""

    def states(self, model: EmbeddingExits) -> "EmbeddingStates":
        return EmbeddingStates(*super().states(model))


class EmbeddingStates(States):
    """The pooled vector of every exit for each text, computed once."""

    @torch.no_grad()
    def embeddings(self, model: EmbeddingExits) -> list[Tensor]:
        """(N, d) of each exit."""
        device = next(model.parameters()).device
        return [model.classify(k, state.to(device)).cpu() for k, state in enumerate(self.states.unbind(dim=1))]

    @torch.no_grad()
    def scores(self, model: EmbeddingExits) -> tuple[list[float], dict]:
        """Mean cosine to the full embedding at every exit. model: in eval mode."""
        found = torch.stack(self.embeddings(model), dim=1).float().numpy()
        return full_cosines(found).mean(axis=0).tolist(), {}
