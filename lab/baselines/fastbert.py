"""FastBERT (Liu et al. 2020, arXiv:2004.02178v2): two stages; the other heads learn the predictions of the last one.

The second stage does not use labels. An example exits if the normalised entropy is below a threshold ("speed"). The
paper's heads have their own attention layer; here all methods share exits.heads.ExitHead.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, all_logits, fine_tune_then_heads


def self_distillation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Eq. 7 and 8: the sum over students of KL(student, teacher), in this order."""
    *students, teacher = (logits.float() for logits in all_logits(model, batch))
    log_t = F.log_softmax(teacher.detach(), dim=1)
    return sum(
        F.kl_div(log_t, F.log_softmax(student, dim=1), reduction="batchmean", log_target=True) for student in students
    )


METHOD = Method(
    recipe=lambda model, config: fine_tune_then_heads(model, self_distillation_loss),
    candidates=sweep(Threshold(math.inf, "normalised_entropy")),
    classes_only=True,
)
