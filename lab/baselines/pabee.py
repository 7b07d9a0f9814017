"""PABEE (Zhou et al. 2020, arXiv:2006.04152v3): joint training; exit if consecutive exits predict the same."""

from mini_ee.lab.rules import Patience
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method

METHOD = Method(candidates=sweep(Patience(1)), trained_as="joint")
