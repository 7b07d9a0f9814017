"""Joint training: all exits at once, their losses summed with their depth as weight (ConsistentEE, Eq. 1).

It is the recipe of every method that names no other (training/stages.py: joint_stage). PABEE, PCEE-BERT and Right-Tool
train in this way too, and read the exits with rules of their own.
"""

from mini_ee.training.method import Method

METHOD = Method(exits=None)
