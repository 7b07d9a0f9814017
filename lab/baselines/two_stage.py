"""Two-stage training (Xin et al. 2020, arXiv:2004.12993v1): first the backbone for the last exit, then other heads."""

from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import fine_tune_then_heads

METHOD = Method(recipe=lambda model, config: fine_tune_then_heads(model), exits=None, trained_as="fine-tune-then-heads")
