"""PABEE (Zhou et al. 2020, arXiv:2006.04152v3): joint training; leave when several exits in a row say the same."""

from mini_ee.training.method import Method
from mini_ee.training.rule import patiences

METHOD = Method(candidates=patiences)
