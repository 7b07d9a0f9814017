"""What policies that learn from rewards have in common: the network, and the baseline of REINFORCE."""

import math

from torch import Tensor, nn

POLICY_WIDTH = 32  # of the hidden layer of a policy network


def policy_network(width: int, chance: float) -> nn.Sequential:
    """Two layers, from a state to a logit; at first its probability is this chance, whatever the state."""
    network = nn.Sequential(nn.Linear(width, POLICY_WIDTH), nn.GELU(), nn.Linear(POLICY_WIDTH, 1))
    nn.init.zeros_(network[2].weight)
    nn.init.constant_(network[2].bias, math.log(chance / (1 - chance)))
    return network


def leave_one_out(rewards: Tensor) -> Tensor:
    """The baseline of each trajectory: the mean reward of the row's others. (B, n) -> (B, n), n >= 2."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
