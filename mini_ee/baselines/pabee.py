"""PABEE (Zhou et al. 2020, arXiv:2006.04152v3): joint training; leave when several exits in a row say the same."""

from mini_ee.training.method import Method, NoConfig
from mini_ee.training.rule import patiences
from mini_ee.training.stages import joint_stage

METHOD = Method(NoConfig, lambda model, how: [joint_stage(model)], candidates=patiences)
