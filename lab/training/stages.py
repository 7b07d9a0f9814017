"""Stages, the parts of a training that a recipe lists, and the losses and stages that several recipes use."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.consistent import depth_weighted_loss
from mini_ee.lab.training.train_settings import TrainConfig
from mini_ee.train import task_loss


class Batch(NamedTuple):
    """The input of a loss, on the model's device."""

    inputs: tuple[Tensor, ...]  # of the model's forward; empty if the stage learns from states
    labels: Tensor  # (N,)
    states: list[Tensor] | None  # (N, D) of every exit, if the stage learns from states
    targets: Tensor | None  # (N, ...), what the stage's make_targets returned for these units
    step: int = 0  # of the stage
    steps: int = 1  # of the whole stage


class Stage(NamedTuple):
    """One part of a training: the parameters that are trained, their loss, and the score that picks the best epoch."""

    name: str  # other than those of the recipe's other stages
    trainable: Callable[[str], bool]  # whether the parameter of this name is trained
    loss: Callable[[nn.Module, Batch], Tensor]  # -> scalar
    score: Callable[[np.ndarray], float] | None = None  # (K,) held-out scores of the exits -> score of the epoch
    on_states: bool = False  # the backbone is frozen: its states are computed once and are the input of the loss
    most: int | None = None  # tokens that it learns from, about; None: all
    make_targets: Callable[[nn.Module, object], np.ndarray | Tensor] | None = None
    """(model, train data or States) -> (N, ...), called once before the first step; units are its index."""
    validate: Callable[[nn.Module, object], dict[str, float]] | None = None
    """In place of `score`: (model, States of the held-out set) -> `score`, and other fields of the epoch's record."""
    log_metrics: Callable[[nn.Module, object], dict] | None = None
    """(model, held-out data) -> metrics, called before the first step and CURVE_POINTS times during the stage."""
    begin: Callable[[nn.Module, object], None] | None = None  # (model, train data), before the first step
    finish: Callable[[nn.Module, object], None] | None = None  # (best model, held-out data), at the end
    settings: dict = {}  # fields of TrainConfig that differ in this stage
    to_beat: float | None = None  # score of the initial weights of the stage; None: the first epoch is better

    def config(self, config: TrainConfig) -> TrainConfig:
        """The settings of the training with those of the stage."""
        return replace(config, **self.settings)


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """task_loss of each row: (N, C), (N,) -> (N,) float32."""
    if labels.is_floating_point():
        return (logits.float()[:, 0] - labels) ** 2
    return F.cross_entropy(logits.float(), labels, reduction="none")


def weighted_by_depth(losses, exits: tuple[int, ...]):
    """Eq. 1 of ConsistentEE for losses, or scores, of the exits; exit 0 has the weight of depth 1.

    >>> weighted_by_depth([1.0, 4.0], (1, 3)), weighted_by_depth([1.0, 4.0], (0, 3))
    (3.25, 3.25)
    """
    return depth_weighted_loss(losses, [max(1, depth) for depth in exits])


def joint_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The losses of all exits, weighted by Eq. 1."""
    losses = [task_loss(logits, batch.labels) for logits in model(*batch.inputs)]
    return weighted_by_depth(losses, model.exits)


def joint_stage(model: nn.Module, **stage_fields) -> Stage:
    """Train all exits and all trainable parts of the backbone with Eq. 1. stage_fields: other fields of the Stage."""
    stage = Stage("joint", lambda name: True, joint_loss, lambda scores: float(weighted_by_depth(scores, model.exits)))
    return stage._replace(**stage_fields)


def all_logits(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The logits (N, C) of every exit, from its state if the stage learns from states."""
    if batch.states is None:
        return model(*batch.inputs)
    return [model.classify(k, state) for k, state in enumerate(batch.states)]


def reads_states(model: nn.Module) -> bool:
    """Whether heads on a frozen backbone can learn from states that are computed once: of rows, and without weights."""
    return model.unit == "rows" and all(head.only_pools for head in model.heads)


def heads_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of all exits but the last."""
    return sum(task_loss(logits, batch.labels) for logits in all_logits(model, batch)[:-1])


def fine_tune_then_heads(
    model: nn.Module, heads_loss: Callable[[nn.Module, Batch], Tensor] = heads_loss
) -> list[Stage]:
    """Two stages: the backbone with the last head, as in ordinary fine-tuning; then the other heads by heads_loss."""
    last = f"heads.{len(model.exits) - 1}."
    stages = [
        Stage(
            name="fine-tune",
            trainable=lambda name: name.startswith(("backbone.", "adapters.", last)),
            loss=lambda model, batch: task_loss(model(*batch.inputs)[-1], batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]
    if len(model.exits) > 1:
        stages.append(
            Stage(
                name="heads",
                trainable=lambda name: name.startswith("heads.") and not name.startswith(last),
                loss=heads_loss,
                score=lambda scores: float(np.mean(scores[:-1])),
                on_states=reads_states(model),
            )
        )
    return stages
