"""ConsistentEE for text: every token is an instance, and a policy says at which layer it has been thought through.

Source: Zeng et al. 2024, ConsistentEE, "Experimental Settings", the part on generation; the equations are those of
reinforce.py. Step 1 is decoder_exits.fine_tune, which freezes the backbone; so steps 2 to 5 run on states that are
computed once. A text comes from `generate` with this model's heads and policies under the rule Policy (p > .5), and
with fill="propagate", the paper's state copying.

Deviations, each from a point that the paper leaves open:
1. s_t is the state as the internal classifier reads it, behind that head's norm: raw states grow from layer to layer.
2. The last exit keeps the LM head, which no step trains but through the adapters of step 1.
3. While it learns, the policy sees states of tokens whose past ran through all layers; state copying is for inference.
4. y is the token that follows in the text; `said_by_model` makes it the one that the full model would have written.
5. The vanilla reward is the default, as in the paper; Eq. 4 is free here, where all exits read every token anyway.
"""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mini_ee.backbones.llama import Decoder
from mini_ee.methods.consistent import (
    ConsistentEE,
    consistent_loss,
    exit_losses,
    inferred_reward,
    policy_loss,
    policy_network,
    rewards_of,
)
from mini_ee.training.fit import TrainConfig
from mini_ee.training.fit_tokens import fit_instances
from mini_ee.units.tokens import BATCH, ExitDecoder, Instances

DEFAULTS = ConsistentEE(alpha=0.1, reward="vanilla", policy_epochs=2, policy_lr=1e-3, task_lr=3e-4)
"""Layers are dearer than to a classifier: from one to the next the loss of a token falls by tenths of a nat."""


class ConsistentDecoder(ExitDecoder):
    """A policy beside every head. Arguments and errors as in ExitDecoder."""

    def __init__(self, decoder: Decoder, exits: tuple[int, ...], **lora):
        super().__init__(decoder, exits, **lora)
        width, behind = decoder.config.hidden_size, range(len(self.exits) - 1, 0, -1)
        self.networks = nn.ModuleList(policy_network(width, 1 / (1 + exits_behind)) for exits_behind in behind)

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of pi(Exit | s_t; theta): (..., D) -> (...). No gradient flows into the state or the norm."""
        return self.networks[k](self.heads[k].norm(state).detach())[..., 0]

    def graph_exit_logit(self, g, k: int, state: str) -> str:
        """exit_logit of states (B, D)."""
        return g.op("Squeeze", g.apply(self.networks[k], g.apply(self.heads[k].norm, state)), g.integers(1))

    @property
    def policies(self) -> list[partial]:
        return [partial(self.exit_logit, k) for k in range(len(self.networks))]


@torch.no_grad()
def said_by_model(model: ExitDecoder, some: Instances) -> Instances:
    """The same instances, each labelled with the likeliest token of the last exit."""
    said = [model.classify(len(model.exits) - 1, states[:, -1]).argmax(-1) for states in some.states.split(BATCH)]
    return some._replace(labels=torch.cat(said))


# ---- Steps 2 to 5 ----
def learn(
    model: ConsistentDecoder, train: Instances, held: Instances, how: ConsistentEE, config: TrainConfig
) -> list[dict]:
    """Rounds of policy steps (Eq. 5) and task steps (Eq. 6), in place; one record a step: step, reward, mean_layers.

    Rounds end when the reward on `held`, that of Eq. 3, no longer rises; the best is kept. Of config count seed,
    weight decay and clip. Uses torch's global random state. Raises ValueError where a loss becomes no number.
    """
    history, best, kept = [], -math.inf, None
    torch.manual_seed(config.seed)
    for number in range(1, how.rounds + 1):
        before = best
        for name, learn_one in (("policy", learn_policies), ("task", learn_heads)):
            learn_one(model, train, how, config)
            record = {"step": f"{name} {number}"} | held_out(model, held, how)
            history.append(record)
            if record["reward"] > best:
                best, kept = record["reward"], deepcopy(model.own.state_dict())
        if best == before:
            break
    model.own.load_state_dict(kept)
    return history


def learn_policies(model: ConsistentDecoder, train: Instances, how: ConsistentEE, config: TrainConfig) -> None:
    """Step 3. The heads are frozen, and so the rewards are computed once."""
    rewards = all_rewards(model, train, how)

    def loss(rows: Tensor) -> Tensor:
        return policy_loss(model.exit_logits(train.states[rows]), rewards[rows], how)

    fit_instances(model.networks, len(rewards), loss, how.policy_epochs, how.policy_lr, config)


def learn_heads(model: ConsistentDecoder, train: Instances, how: ConsistentEE, config: TrainConfig) -> None:
    """Step 4. The policies are frozen; a head learns from the tokens that leave there, and from no other."""

    def loss(rows: Tensor) -> Tensor:
        states = train.states[rows]
        losses = exit_losses(model.all_logits(states), train.labels[rows])
        return consistent_loss(losses, model.exit_logits(states), how)

    fit_instances(model.heads, len(train.labels), loss, how.task_epochs, how.task_lr, config)


@torch.no_grad()
def all_rewards(model: ConsistentDecoder, some: Instances, how: ConsistentEE) -> Tensor:
    """What leaving at each exit is worth, Eq. 3 or 4: (N, K)."""
    parts = zip(some.states.split(BATCH), some.labels.split(BATCH))
    return torch.cat([rewards_of(model, model.all_logits(states), labels, how) for states, labels in parts])


@torch.no_grad()
def held_out(model: ConsistentDecoder, held: Instances, how: ConsistentEE) -> dict[str, float]:
    """The mean of Eq. 3, and the mean depth in layers, of tokens that leave as at inference. See reinforce.py, 4."""
    exit_logits = model.exit_logits(held.states)
    depths = torch.tensor(model.exits, dtype=torch.float32, device=exit_logits.device)
    return {
        "reward": inferred_reward(exit_logits, all_rewards(model, held, replace(how, reward="vanilla"))),
        "mean_layers": inferred_reward(exit_logits, depths.expand(len(held.labels), -1)),
    }
