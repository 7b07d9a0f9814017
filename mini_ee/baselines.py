"""Training recipes that the papers compare with. A recipe gives the stages that training.py runs.

joint        one stage; the exits' losses summed with their depth as weight (ConsistentEE, Eq. 1; PABEE)
two-stage    fine-tune for the last exit, freeze, train the other heads (DeeBERT, Xin et al. 2020)
sweet        each layer learns from the next exit's loss alone (SWEET, Rotem et al. 2023)
"""

import numpy as np

from mini_ee.exits import MultiExit
from mini_ee.fitting import Stage, depth_weighted_sum, joint_loss, task_loss


def joint(model: MultiExit) -> list[Stage]:
    """All exits and the backbone at once, under Eq. 1."""
    return [
        Stage(
            name="joint",
            learns=lambda name: True,
            loss=joint_loss,
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


def two_stage(model: MultiExit) -> list[Stage]:
    """DeeBERT: first backbone and last head, as any fine-tuning; then the other heads, on the frozen backbone."""
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
                loss=lambda model, batch: sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs)[:-1]),
                score=lambda scores: float(np.mean(scores[:-1])),
            )
        )
    return stages


def sweet(model: MultiExit) -> list[Stage]:
    """SWEET: all exits at once, but no gradient passes from an exit to the layers below the one before it."""
    return [
        Stage(
            name="sweet",
            learns=lambda name: True,
            loss=lambda model, batch: sum(
                task_loss(logits, batch.labels) for logits in model(*batch.inputs, detach=True)
            ),
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


RECIPES = {"joint": joint, "two-stage": two_stage, "sweet": sweet}
