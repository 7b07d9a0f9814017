"""What policies of several methods have in common: their networks, and the baseline of REINFORCE."""

import math

from torch import Tensor, nn

POLICY_WIDTH = 32  # of the hidden layer of a policy network


class OneForAll(nn.Module):
    """One linear map of the state, for all exits: BERxiT's learning-to-exit module, CALM's classifier."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        if len(exits) < 2:
            raise ValueError(f"a policy needs at least two exits to choose from, got {len(exits)}")
        self.linear = nn.Linear(width, 1)
        self.flops = 2.0 * width  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of the chance that exit k is right, or agrees with the last: (..., D) -> (...)."""
        return self.linear(state)[..., 0]


def policy_network(width: int, chance: float) -> nn.Sequential:
    """Two layers, from a state to a logit; at first its probability is this chance, whatever the state."""
    network = nn.Sequential(nn.Linear(width, POLICY_WIDTH), nn.GELU(), nn.Linear(POLICY_WIDTH, 1))
    nn.init.zeros_(network[2].weight)
    nn.init.constant_(network[2].bias, math.log(chance / (1 - chance)))
    return network


def leave_one_out(rewards: Tensor) -> Tensor:
    """The baseline of each trajectory: the mean reward of the row's others. (B, n) -> (B, n), n >= 2."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
