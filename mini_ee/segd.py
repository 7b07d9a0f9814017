"""SEGD: superior-exit guided distillation, which trains what lora_exits.py defines.

Source: LoRAExit (see lora_exits.py), section 3.2, Eq. 3 to 5. The last exit learns from the labels; then exit after
exit, from K - 1 down to 1, each with the next one, its superior, as a frozen teacher:

    vanilla    every exit from the labels alone (Table 4)
    kd         the teacher is always the last exit (Table 4); at exit K - 1 the same as segd
    segd       the teacher of exit k is exit k + 1

Symbols: temperature = T, weight = lambda; soft label = y bar of Eq. 5.

Deviations: 1. Eq. 4 has no T^2, the factor of Hinton et al. 2015: `t_squared` adds it.
            2. Regression has no soft labels: the student follows the teacher's value, under a squared error.
            3. T, lambda and the learning rate are the same at every exit; the paper searches them.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.baselines import task_loss
from mini_ee.fitting import Batch, Stage
from mini_ee.lora_exits import LoRAExits
from mini_ee.tasks import Encoded, batches

TEACHERS = ("vanilla", "kd", "segd")
TEACHER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How the exits before the last one learn. Raises ValueError on a value that makes no sense."""

    distill: str = "segd"
    temperature: float = 2.0  # T; the paper tries 2, 10, 20
    weight: float = 0.95  # lambda; the paper tries 1, .95, .2
    t_squared: bool = False

    def __post_init__(self):
        if self.distill not in TEACHERS:
            raise ValueError(f"distill must be one of {', '.join(TEACHERS)}, got {self.distill!r}")
        if not self.temperature > 0 or not 0 <= self.weight <= 1:
            raise ValueError(
                f"temperature must be above 0 and lambda from 0 to 1, got {self.temperature} and {self.weight}"
            )

    def teacher_of(self, k: int, last: int) -> int | None:
        """The exit that teaches exit k, or None."""
        if self.distill == "vanilla" or k == last:
            return None
        return last if self.distill == "kd" else k + 1


def log_soft_label(logits: Tensor, temperature: float) -> Tensor:
    """Eq. 5, its logarithm: (B, C) -> (B, C), in float32."""
    return F.log_softmax(logits.float() / temperature, dim=-1)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, t_squared: bool = False) -> Tensor:
    """KL(teacher, student) of Eq. 4, the mean over rows; logits (B, C). A squared error where C = 1."""
    if student.shape[1] == 1:
        return F.mse_loss(student.float(), teacher.float())
    teacher, student = log_soft_label(teacher, temperature), log_soft_label(student, temperature)
    loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return loss * temperature**2 if t_squared else loss


def exit_loss(model: LoRAExits, batch: Batch, k: int, how: Distillation) -> Tensor:
    """Eq. 3 where there is no teacher, else Eq. 4."""
    logits = model.exit_logits(k, *batch.inputs)
    hard = task_loss(logits, batch.labels)
    if batch.taught is None:
        return hard
    soft = distillation_loss(logits, batch.taught, how.temperature, how.t_squared)
    return (1 - how.weight) * hard + how.weight * soft


def teach(model: LoRAExits, encoded: Encoded, k: int) -> np.ndarray:
    """What exit k, frozen, says of all rows: (N, C). Asked once: it does not change while its student learns."""
    device, said = next(model.parameters()).device, None
    model.eval()
    with torch.no_grad():
        for rows in batches(encoded, TEACHER_BATCH):
            inputs = encoded.batch(rows)
            arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
            logits = model.exit_logits(k, *(torch.from_numpy(array).to(device) for array in arrays))
            if said is None:
                said = np.empty((len(encoded), logits.shape[1]), np.float32)
            said[rows] = logits.float().cpu().numpy()
    return said


def recipe(model: LoRAExits, how: Distillation) -> list[Stage]:
    """One stage an exit, the last one first."""
    last = len(model.exits) - 1
    stages = []
    for k in range(last, -1, -1):
        teacher = how.teacher_of(k, last)
        own = (f"adapters.{k}.", f"heads.{k}.")
        stages.append(
            Stage(
                name=f"exit {model.exits[k]}",
                learns=lambda name, own=own: name.startswith(own),
                loss=partial(exit_loss, k=k, how=how),
                score=lambda scores, k=k: float(scores[k]),
                teacher=None if teacher is None else partial(teach, k=teacher),
            )
        )
    return stages
