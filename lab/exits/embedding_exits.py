"""Texts exit with an embedding: a sentence encoder with a linear map to its own full embedding after chosen layers.

The embedding is what a head of exits/heads.py calls logits: segments, rules and graphs treat its numbers in the same
way. The last exit has no map: it is the encoder's own embedding.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.tokenizer import Encoded, batches
from mini_ee.lab.exits.heads import pooled
from mini_ee.lab.exits.row_exits import RowData, RowExits, RowSegments, States, check_exits
from mini_ee.lab.recording import Record, record
from mini_ee.lab.rules import Rule

POOLS = ("mean", "first", "last")


class AfterPooling(nn.Module):
    """The modules of a sentence encoder after its pooling, (B, D) -> (B, d'). See SentenceModules.modules."""

    def __init__(self, modules: Sequence[dict]):
        super().__init__()
        self.steps = modules
        dense = [step for step in modules if step["kind"] == "dense"]
        self.maps = nn.ModuleList(nn.Linear(step["in_features"], step["out_features"], step["bias"]) for step in dense)

    def forward(self, state: Tensor) -> Tensor:
        maps = iter(self.maps)
        for step in self.steps:
            if step["kind"] == "normalize":
                state = F.normalize(state, dim=1)
            else:
                state = next(maps)(state)
                state = torch.tanh(state) if step["activation"] == "tanh" else state
        return state

    def linear_part(self, state: Tensor) -> Tensor:
        """The linear maps alone, (B, D) -> (B, d')."""
        for linear in self.maps:
            state = linear(state)
        return state


class EmbeddingHead(nn.Module):
    """Pooling and the encoder's modules after it; for exits before the last a linear map in place of these modules.

    The map starts as the linear part of the modules. size: d, how many of the first numbers remain (Matryoshka).
    normalize: to length 1. norm: of the tokens before pooling, for backbones whose layers end with a sum.
    """

    def __init__(
        self,
        width: int,
        size: int,
        pool: str,
        normalize: bool,
        after: AfterPooling,
        mapped: bool,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.width, self.size, self.pool, self.normalize, self.norm = width, size, pool, normalize, norm
        self.linear, self.after = (nn.Linear(width, size), None) if mapped else (None, deepcopy(after))
        if self.linear is not None:
            with torch.no_grad():
                at_zero = after.linear_part(torch.zeros(1, width))
                weight = after.linear_part(torch.eye(width)) - at_zero
                self.linear.weight.copy_(weight[:, :size].T)
                self.linear.bias.copy_(at_zero[0, :size])

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, D) -> the pooled vector (B, D) of each text."""
        return pooled(hidden if self.norm is None else self.norm(hidden), mask, self.pool)

    def classify(self, state: Tensor) -> Tensor:
        """(B, D) -> embeddings (B, d)."""
        embedding = self.after(state)[:, : self.size] if self.linear is None else self.linear(state)
        return F.normalize(embedding, dim=1) if self.normalize else embedding

    def flops(self, tokens: int) -> float:
        """FLOPs for one text of this length."""
        averaged = tokens * self.width if self.pool == "mean" else 0
        maps = self.after.maps if self.linear is None else [self.linear]
        return float(averaged + sum(2 * linear.weight.numel() for linear in maps))


class EmbeddingExits(RowExits):
    """A frozen sentence encoder with an EmbeddingHead after each layer in `exits`. num_labels is d.

    policy: as in RowExits. modules: of the encoder after its pooling, see SentenceModules; their weights are those of
    backbone.dense_weights, if it has any. Raises ValueError for an unknown pool, for modules that do not fit, or for a
    size above that of the encoder's embedding.
    """

    unit = "embeddings"
    head = None
    holds_backbone, mapped = False, True

    def __init__(
        self,
        backbone: Backbone,
        exits: tuple[int, ...],
        size: int,
        pool: str,
        normalize: bool,
        policy: Any = None,
        modules: Sequence[dict] = (),
    ):
        nn.Module.__init__(self)
        self.exits, width = check_exits(exits, backbone.config.num_hidden_layers), backbone.config.hidden_size
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, found {pool!r}")
        dim = width
        for step in modules:
            if step.get("in_features", dim) != dim:
                raise ValueError(f"{step['path']}: expected in_features {dim}, found {step['in_features']}")
            dim = step.get("out_features", dim)
        if not 1 <= size <= dim:
            raise ValueError(f"expected an embedding of 1 to {dim} numbers, the width of the encoder, found {size}")
        after = AfterPooling(modules)
        if backbone.dense_weights:
            after.load_state_dict(backbone.dense_weights)
        self.num_labels, self.pool, self.normalize = size, pool, normalize
        norms = [backbone.exit_norm() for _ in exits]
        if norms[-1] is not None and getattr(backbone, "norm", None) is not None:
            norms[-1] = deepcopy(backbone.norm)  # the encoder's own final norm
        self.backbone = backbone.without_heads()
        last = len(exits) - 1
        mapped = (self.mapped and k < last for k in range(len(exits)))
        heads = (
            EmbeddingHead(width, size, pool, normalize, after, has_map, norm) for has_map, norm in zip(mapped, norms)
        )
        self.heads = nn.ModuleList(heads)
        self.policy = policy and policy(width, self.exits)

    def use_heads(self, name: str) -> None:
        """There is one kind of head."""

    def is_trainable(self, name: str) -> bool:
        """Whether a training may change the parameter of this name: it is that of a map."""
        return super().is_trainable(name) and not name.startswith(f"heads.{len(self.exits) - 1}.")

    def own_state(self) -> dict[str, Tensor]:
        """Also the encoder's modules after its pooling, because a run does not name their folders."""
        after = f"heads.{len(self.exits) - 1}.after."
        return super().own_state() | {name: part for name, part in self.state_dict().items() if name.startswith(after)}

    def segments(self) -> RowSegments:
        segments = RowSegments(self)
        segments.metadata = {"normalize": self.normalize}
        return segments


class TrainedEncoder(EmbeddingExits):
    """A sentence encoder that is trained itself: an exit is its pooled hidden state, without a map."""

    holds_backbone, mapped = True, False

    def is_trainable(self, name: str) -> bool:
        return True

    def own_state(self) -> dict[str, Tensor]:
        """All but the encoder, which a run contains as a checkpoint."""
        return {name: value for name, value in super().own_state().items() if not name.startswith("backbone.")}


# ---- Training data ----


def full_cosines(embeddings: np.ndarray) -> np.ndarray:
    """(N, K, d) -> (N, K): the cosine of the embedding of each exit and that of the last exit."""
    scaled = embeddings / np.maximum(np.linalg.norm(embeddings, axis=2, keepdims=True), 1e-12)
    return (scaled * scaled[:, -1:]).sum(axis=2)


def reached_cosines(recorded: Record, rule: Rule) -> np.ndarray:
    """(N,): the cosine of the embedding with which each recorded text exits and that of its last exit."""
    reached = recorded.replay(rule).logits
    return full_cosines(np.stack((reached, recorded.logits[:, -1]), axis=1))[:, 0]


class EmbeddingData(RowData):
    """Encoded texts. Their score at an exit is the mean cosine to the full embedding."""

    def states(self, model: EmbeddingExits) -> "EmbeddingStates":
        return EmbeddingStates(*super().states(model))


class DistillationData(RowData):
    """Encoded texts whose labels (N, d) are the embeddings that the encoder returned before its training."""

    def scores(self, model: EmbeddingExits, batch_size: int) -> tuple[list[float], dict]:
        """Mean cosine to the label at every exit."""
        embeddings = record(model.segments(), self.encoded, batch_size).logits
        with_labels = np.concatenate((embeddings, self.labels[:, None]), axis=1)
        return full_cosines(with_labels)[:, :-1].mean(axis=0).tolist(), {}


class PairData(NamedTuple):
    """P pairs of texts, each with a score."""

    encoded: Encoded  # 2 P texts: all first ones, then all second ones
    first: Encoded  # the P first texts, by whose length batches are made
    labels: np.ndarray  # (P,)

    def __len__(self) -> int:
        return len(self.labels)

    def order(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        """As RowData.order."""
        return batches(self.first, batch_size, shuffle_seed=seed)

    def steps(self, batch_size: int) -> int:
        """Number of batches in an epoch."""
        return -(-len(self) // batch_size)

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs of the B first texts and the B second ones, and the scores (B,)."""
        both = RowData(self.encoded, np.tile(self.labels, 2), None)
        inputs, labels = both.batch(np.concatenate((rows, rows + len(self))), device)
        return inputs, labels[: len(rows)]

    def scores(self, model: EmbeddingExits, batch_size: int) -> tuple[list[float], dict]:
        """Spearman correlation of cosines and scores at every exit."""
        embeddings = record(model.segments(), self.encoded, batch_size).logits
        unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=2, keepdims=True), 1e-12)
        cosines = (unit[: len(self)] * unit[len(self) :]).sum(axis=2)
        return [spearman(exit_cosines, self.labels) for exit_cosines in cosines.T], {}


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
        embeddings = torch.stack(self.embeddings(model), dim=1).float().numpy()
        return full_cosines(embeddings).mean(axis=0).tolist(), {}
