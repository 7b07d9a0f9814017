"""Shared by methods with policies: networks, and the default rule on tokens."""

import math

from torch import Tensor, nn

from mini_ee.lab.exits.token_exits import TextData, TokenExits, record_texts
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import Chosen, passing

POLICY_WIDTH = 32  # hidden units of a policy network


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


def policy_rule(model: TokenExits, source, held: TextData) -> Chosen:
    """The papers' rule, exit if the policy's probability is above .5, and others for `mini-ee compare --sweep`.

    The `default_rule` of a Method on tokens.
    """
    rules = passing(record_texts(model, held.texts), Policy())
    about = {"own": {"policy": Policy().to_dict()}, "sweep": {"policy": [rule.to_dict() for rule in rules]}}
    return Chosen(Policy(), None, None, about)
