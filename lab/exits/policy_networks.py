"""What decides at an exit in place of its head: the policies of ConsistentEE, and the gate of lenses (lens.py)."""

from torch import Tensor, nn

from mini_ee.consistent import WIDTH, policy_networks


class PolicyNetworks(nn.Module):
    """A policy network at every exit but the last: $pi(Exit | s_t; theta)$. Raises ValueError for a single exit."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        self.networks = policy_networks(width, exits)
        self.flops = 2.0 * WIDTH * (width + 1)  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of $pi(Exit | s_t; theta)$: (..., D) -> (...). No gradient flows into the state."""
        return self.networks[k](state.detach())[..., 0]
