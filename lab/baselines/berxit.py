"""BERxiT (Xin et al. 2021, EACL): the loss alternates between the last exit and all exits; a module predicts certainty.

The learning-to-exit module is one linear map for all exits, OneForAll of training/policies.py.

Paper: Xin et al., BERxiT: Early Exiting for BERT with Better Fine-Tuning and Extension to Regression, EACL 2021,
2021.eacl-main.8.
"""

import torch
from torch import Tensor, nn

from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.policies import OneForAll, policy_rule
from mini_ee.lab.training.stages import Batch, joint_stage
from mini_ee.train import task_loss


def alternating_loss(model: nn.Module, batch: Batch) -> Tensor:
    """In even steps the loss of the last exit; in odd steps that of all exits, plus the squared error of the module."""
    states = model.states(*batch.inputs)
    last = len(states) - 1
    if batch.step % 2 == 0:
        return task_loss(model.classify(last, states[last]), batch.labels)
    each_logits = [model.classify(k, state) for k, state in enumerate(states)]
    truth = torch.stack([true_certainty(logits.detach(), batch.labels) for logits in each_logits[:-1]], dim=1)
    certainty = torch.sigmoid(model.exit_logits(states))
    return sum(task_loss(logits, batch.labels) for logits in each_logits) + ((certainty - truth) ** 2).mean(dim=0).sum()


def true_certainty(logits: Tensor, labels: Tensor) -> Tensor:
    """The target of the module: 1 if the head is right, else 0; for a regression 1 - tanh |error|. (B, C) -> (B,)."""
    if labels.is_floating_point():
        return 1 - torch.tanh((logits[:, 0].float() - labels).abs())
    return (logits.argmax(dim=1) == labels).float()


METHOD = Method(
    recipe=lambda model, config: [joint_stage(model, name="alternating", loss=alternating_loss)],
    policy=OneForAll,
    candidates=sweep(Policy()),
    default_rule=policy_rule,
)
