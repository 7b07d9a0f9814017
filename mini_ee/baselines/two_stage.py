"""Fine-tune for the last exit, freeze, then train the other heads (DeeBERT, Xin et al. 2020)."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from mini_ee.training.fit import Batch, Stage, task_loss
from mini_ee.units.rows import MultiExit


def two_stage(model: MultiExit) -> list[Stage]:
    """DeeBERT: first backbone and last head, as any fine-tuning; then the other heads, on the frozen backbone."""
    return _fine_tuned(
        model, lambda model, batch: sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs)[:-1])
    )


def _fine_tuned(model: MultiExit, heads_loss: Callable[[MultiExit, Batch], Tensor]) -> list[Stage]:
    """Backbone and last head, then the other heads by a loss of their own."""
    last = f"heads.{len(model.exits) - 1}."
    stages = [
        Stage(
            name="fine-tune",
            learns=lambda name: name.startswith(("backbone.", last)),
            loss=lambda model, batch: task_loss(model(*batch.inputs)[-1], batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]
    if len(model.exits) > 1:
        stages.append(
            Stage(
                name="heads",
                learns=lambda name: name.startswith("heads.") and not name.startswith(last),
                loss=heads_loss,
                score=lambda scores: float(np.mean(scores[:-1])),
            )
        )
    return stages
