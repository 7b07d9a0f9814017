"""`mini-ee add-exits`: the stage in which heads learn what a fine-tuned classifier, or regression, predicts itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn, stack, zeros_like

from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.token_tasks import SPAN
from mini_ee.lab.training.stages import Batch, Stage

HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits of a head and of the full model, (..., C) each -> (...)."""


def kept_model_stage(model: FrozenClassifier, head_loss: HeadLoss) -> Stage:
    """All heads at once, by the sum of their losses. Nothing below the states is trained: they are computed once."""
    last = len(model.exits) - 1

    def full_logits(model: FrozenClassifier, states: Any) -> np.ndarray:
        return states.logits(model, [last])[:, 0]

    def agreement(model: FrozenClassifier, states: Any) -> dict[str, float]:
        """Mean over the heads of the score against the model's own predictions."""
        return {"score": float(np.mean(states.scores(model)[0][:-1]))}

    def begin(model: FrozenClassifier, train: Any) -> None:
        """The heads of a regression start at the mean of the model's numbers, of whatever scale they are."""
        if model.num_labels == 1:
            for head in model.heads[:-1]:
                nn.init.constant_(head.out.bias, float(train.targets().mean()))

    def loss(model: FrozenClassifier, batch: Batch) -> Tensor:
        logits, targets = [model.classify(k, batch.states[k]) for k in range(last)], batch.targets
        if model.token_task is not None and model.token_task.kind == SPAN:  # a softmax over tokens
            *logits, targets = (tensor.transpose(-1, -2) for tensor in (*logits, targets))
        return sum(row_loss(exit_logits, targets, head_loss, model.multi_label) for exit_logits in logits)

    return Stage(
        name="heads",
        trainable=lambda name: name.startswith("heads."),
        loss=loss,
        on_states=True,
        begin=begin,
        validate=agreement,
        make_targets=full_logits,
        settings={"weight_decay": 0.0},
    )


def row_loss(logits: Tensor, full_logits: Tensor, head_loss: HeadLoss, multi_label: bool = False) -> Tensor:
    """The mean of `head_loss` over examples, (..., C), (..., C) -> scalar; of a regression the mean squared difference.

    multi_label: the mean over examples and labels, because each label is two classes: sigmoid(z) is softmax(z, 0).
    """
    if logits.shape[-1] == 1:
        return nn.functional.mse_loss(logits.float(), full_logits.float())
    if multi_label:
        logits, full_logits = (stack((tensor, zeros_like(tensor)), -1) for tensor in (logits, full_logits))
    return head_loss(logits, full_logits).mean()
