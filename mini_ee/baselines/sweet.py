"""SWEET (Rotem et al. 2023): each layer learns from the next exit's loss alone."""

from mini_ee.training.fit import Stage, depth_weighted_sum, task_loss
from mini_ee.units.rows import MultiExit


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
