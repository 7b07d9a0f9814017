"""FastBERT (Liu et al. 2020): two stages, in which the other heads learn from the last one."""

import torch.nn.functional as F
from torch import Tensor

from mini_ee.baselines.two_stage import _fine_tuned
from mini_ee.training.fit import Batch, Stage
from mini_ee.units.rows import MultiExit


# ---- FastBERT ----
def fastbert(model: MultiExit) -> list[Stage]:
    """Fine-tune backbone and last head; then the other heads learn what the last one says, labels unseen."""
    return _fine_tuned(model, self_distillation_loss)


def self_distillation_loss(model: MultiExit, batch: Batch) -> Tensor:
    """FastBERT, Eq. 7 and 8: sum over students of KL(student, teacher), in this order. A squared error where C = 1."""
    *students, teacher = (logits.float() for logits in model(*batch.inputs))
    teacher = teacher.detach()
    if model.num_labels == 1:
        return sum(F.mse_loss(student, teacher) for student in students)
    log_t = F.log_softmax(teacher, dim=1)
    return sum(
        F.kl_div(log_t, F.log_softmax(student, dim=1), reduction="batchmean", log_target=True) for student in students
    )
