"""Mixed training (Kubaty et al. 2025, arXiv:2407.14320v2): first the backbone alone, then all exits with all weights.

Paper: Piotr Kubaty et al., How to Train Your Multi-Exit Model? Analyzing the Impact of Training Strategies, ICML 2025;
v1 has the title Joint or Disjoint: Mixing Training Regimes for Early-Exit Models.

Symbols: L_k, the loss of exit k, from 1 to K.
Phase 1: the backbone and the last head learn from L_K.
Phase 2: all weights, the backbone's too, learn from 1/K sum_k L_k.
Phase 2 alone is joint training; phase 1, and then the other heads on the frozen backbone, is two-stage training.

Deviations: 1. both phases have the same number of epochs, and the best one on the held-out set counts; in the paper a
phase ends if no exit improves; 2. on tokens only heads and adapters learn.
"""

from torch import Tensor, nn

from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage, fine_tune_then_heads, joint_stage
from mini_ee.train import task_loss


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Phase 2: the mean of the losses of all exits."""
    return sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs)) / len(model.exits)


def recipe(model: nn.Module) -> list[Stage]:
    """Phase 1, then phase 2."""
    joint = joint_stage(model, name="all exits", loss=mean_loss, score=lambda scores: float(scores.mean()))
    return [fine_tune_then_heads(model)[0], joint]


METHOD = Method(recipe=lambda model, config: recipe(model), exits=None)
