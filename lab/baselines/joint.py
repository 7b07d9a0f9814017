"""Joint training (Zeng et al. 2024, arXiv:2312.11882v2, Eq. 1): all exits at once, their losses weighted by depth.

This is the recipe of every method that names no other (training/stages.py: joint_stage). PABEE, PCEE-BERT and
Right-Tool are trained in this way too, with their own rules.
"""

from mini_ee.lab.training.method import Method

METHOD = Method(exits=None)
