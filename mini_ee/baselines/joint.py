"""Joint training: all exits at once, their losses summed with their depth as weight (ConsistentEE, Eq. 1).

PABEE, PCEE-BERT and Right-Tool train in this way too, and read the exits with rules of their own.
"""

from mini_ee.training.fit import joint_stage
from mini_ee.training.method import Method, NoConfig

METHOD = Method(NoConfig, lambda model, how: [joint_stage(model)], exits=None)
