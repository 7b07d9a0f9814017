"""Doubt: an example stops at an exit if a small module predicts that the exit is correct."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Stage, joint_stage


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    caution: float = option(2.0, "weight of wrong exits in the loss", least=1)


class Trust(nn.Module):
    def __init__(self, width, exits):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(width, 1) for _ in exits[:-1])
        self.flops = 2.0 * width

    def exit_logit(self, k, state):
        return self.linear[k](state.detach())[..., 0]


def recipe(model, config):
    def loss(model, batch):
        total = 0.0
        for k, logit in enumerate(model.exit_logits(batch.states).unbind(1)):
            correct = (model.classify(k, batch.states[k]).argmax(-1) == batch.labels).float()
            weight = 1 + (config.caution - 1) * (1 - correct)
            total = total + F.binary_cross_entropy_with_logits(logit, correct, weight)
        return total

    heads = joint_stage(model, trainable=lambda name: not name.startswith("policy."))
    last = Stage("trust", lambda name: name.startswith("policy."), loss, score=lambda scores: 0.0, on_states=True)
    return [heads, last]


METHOD = Method(Config, recipe, policy=Trust, candidates=sweep(Policy()), classes_only=True)
