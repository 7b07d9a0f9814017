"""Joint training: all exits at once, their losses summed with their depth as weight (ConsistentEE, Eq. 1).

PABEE, PCEE-BERT and Right-Tool train in this way too, and read the exits with rules of their own.
"""

from mini_ee.training.method import Method, NoConfig
from mini_ee.training.stages import joint_stage

METHOD = Method(NoConfig, lambda model, how: [joint_stage(model)], exits=None)
