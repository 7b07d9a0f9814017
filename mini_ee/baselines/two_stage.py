"""Two stages: fine-tune the backbone for the last exit, freeze it, then train the other heads on the labels."""

from mini_ee.training.method import Method
from mini_ee.training.stages import fine_tune_then_heads

METHOD = Method(recipe=lambda model, config: fine_tune_then_heads(model), exits=None)
