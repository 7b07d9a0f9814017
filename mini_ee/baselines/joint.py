"""All exits at once, their losses summed with their depth as weight (ConsistentEE, Eq. 1)."""

from mini_ee.training.fit import Stage, depth_weighted_sum, joint_loss
from mini_ee.units.rows import MultiExit


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
