"""Prompt-based fine-tuning on a few shots, before RAEE collects."""

from mini_ee.training.fit import Stage, task_loss
from mini_ee.units.prompts import PromptModel


# ---- Prompt-based fine-tuning ----
def few_shot(model: PromptModel) -> list[Stage]:
    """LM-BFF's prompt-based fine-tuning: all of the backbone learns from cross-entropy over the label words."""
    return [
        Stage(
            name="prompt",
            learns=lambda name: True,
            loss=lambda model, batch: task_loss(model(*batch.inputs), batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]
