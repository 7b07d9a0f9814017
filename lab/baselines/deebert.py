"""DeeBERT (Xin et al. 2020, arXiv:2004.12993v1): two stages; exit if the entropy is below a threshold.

First the backbone is fine-tuned for the last exit. Then the backbone is frozen, and the other heads learn from the sum
of their losses (section 3).
"""

import math

from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import fine_tune_then_heads

METHOD = Method(
    recipe=lambda model, config: fine_tune_then_heads(model),
    candidates=sweep(Threshold(math.inf, "entropy")),
    classes_only=True,
    trained_as="fine-tune-then-heads",
)
