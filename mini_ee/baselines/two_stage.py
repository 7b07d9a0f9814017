"""Two stages: fine-tune the backbone for the last exit, freeze it, then train the other heads from the labels."""

from mini_ee.training.method import Method, NoConfig
from mini_ee.training.stages import fine_tune_then_heads

METHOD = Method(NoConfig, lambda model, how: fine_tune_then_heads(model), exits=None)
