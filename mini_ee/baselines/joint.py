"""Joint training: all exits at once; their losses are summed, weighted by depth (ConsistentEE, Eq. 1).

This is the recipe of every method that names no other (training/stages.py: joint_stage). PABEE, PCEE-BERT and
Right-Tool are trained in this way too, with their own rules.
"""

from mini_ee.training.method import Method

METHOD = Method(exits=None)
