"""SWEET (Rotem et al. 2023, arXiv:2306.02307v1): all exits at once, but each layer learns from the loss of one exit.

The gradient of an exit does not reach the layers below the exit before it, so exits do not conflict in shared layers.
"""

from torch import Tensor, nn

from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, joint_stage
from mini_ee.train import task_loss


def separate_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of the exits; none reaches the layers that belong to earlier exits."""
    return sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs, fork=cut_off))


def cut_off(k: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The state for the head of exit k, and the state for the layers above, which send no gradient back."""
    return hidden, hidden.detach()


METHOD = Method(recipe=lambda model, config: [joint_stage(model, name="sweet", loss=separate_loss)])
