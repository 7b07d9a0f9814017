"""Shared by methods with policies: networks, a stage that learns agreement, the gate of lenses, the rule on tokens."""

import math
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.exits.row_exits import States
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import Chosen, passing
from mini_ee.lab.training.stages import Batch, Stage

POLICY_WIDTH = 32  # hidden units of a policy network
GATE_TOKENS = 16_384  # from which a gate learns: the head of every exit reads each of them once
GATE = {"epochs": 8, "head_lr": 3e-3, "warmup": 0.0, "batch_size": 256}


class OneForAll(nn.Module):
    """One linear map of the state, for all exits: BERxiT's learning-to-exit module, CALM's classifier."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        if len(exits) < 2:
            raise ValueError(f"a policy needs at least two exits to choose from, got {len(exits)}")
        self.linear = nn.Linear(width, 1)
        self.flops = 2.0 * width  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of the probability that exit k is right, or agrees with the last exit: (..., D) -> (...)."""
        return self.linear(state)[..., 0]


def policy_network(width: int, chance: float) -> nn.Sequential:
    """Two layers from a state to a logit. Initially its probability is `chance` for every state."""
    network = nn.Sequential(nn.Linear(width, POLICY_WIDTH), nn.GELU(), nn.Linear(POLICY_WIDTH, 1))
    nn.init.zeros_(network[2].weight)
    nn.init.constant_(network[2].bias, math.log(chance / (1 - chance)))
    return network


# ---- A classifier of agreement ----
def classifier_stage(name: str, settings: dict, most: int | None = None) -> Stage:
    """The policy learns whether an exit agrees with the last one, while everything else is frozen."""
    truth = cache(lambda model, held_out: agreement(model, held_out))  # all heads read it, so once and not every epoch
    return Stage(
        name=name,
        trainable=of_policy,
        loss=classifier_loss,
        on_states=True,
        most=most,
        make_targets=agreement,
        validate=lambda model, held_out: {"score": -held_out_loss(model, held_out, truth(model, held_out))},
        settings=settings,
    )


def of_policy(name: str) -> bool:
    """Whether a parameter is one of the policy's."""
    return name.startswith("policy.")


def with_gate(recipe: Iterable[Stage], model: nn.Module) -> Iterable[Stage]:
    """The recipe, after which the gate learns, if the model has one: no other stage trains it."""
    if not getattr(model, "gated", False):
        return recipe

    def without(trainable: Callable[[str], bool]) -> Callable[[str], bool]:
        return lambda name: trainable(name) and not of_policy(name)

    stages = [stage._replace(trainable=without(stage.trainable)) for stage in recipe]
    return [*stages, classifier_stage("gate", GATE, GATE_TOKENS)]


def classifier_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy of the agreement, the mean over exits and over examples or tokens."""
    assert batch.targets is not None
    return F.binary_cross_entropy_with_logits(model.exit_logits(batch.states), batch.targets.float())


@torch.no_grad()
def agreement(model: nn.Module, data: States) -> np.ndarray:
    """Whether the prediction of an exit is that of the last exit: (N, K - 1) bool."""
    device, agrees = next(model.parameters()).device, []
    for rows in np.array_split(np.arange(len(data)), max(1, len(data) // 256)):
        states, _ = data.batch(rows, device)
        predicted = torch.stack([model.classify(k, state).argmax(-1) for k, state in enumerate(states)], dim=1)
        agrees.append((predicted[:, :-1] == predicted[:, -1:]).numpy(force=True))
    return np.concatenate(agrees)


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: States, truth: np.ndarray) -> float:
    """The loss of the classifier on the held-out set. truth: its `agreement`."""
    device = next(model.parameters()).device
    logits = model.exit_logits([state.to(device).float() for state in held_out.states.unbind(dim=1)])
    return float(F.binary_cross_entropy_with_logits(logits, torch.from_numpy(truth).float().to(device)))


# ---- The default rule on tokens ----
def policy_rule(model: TokenExits, source, held: TextData) -> Chosen:
    """The papers' rule, exit if the policy's probability is above .5, and others for `mini-ee compare --sweep`.

    The `default_rule` of a Method on tokens.
    """
    rules = passing(record_texts(model, held.texts), Policy())
    metrics = {"own": {"policy": Policy().to_dict()}, "sweep": {"policy": [rule.to_dict() for rule in rules]}}
    return Chosen(Policy(), None, None, metrics)
