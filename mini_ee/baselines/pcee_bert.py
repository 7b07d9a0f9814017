"""PCEE-BERT (Zhang et al. 2022): joint training; leave when several exits in a row were confident.

Source: PCEE-BERT: Accelerating BERT Inference via Patient and Confident Early Exiting, Findings of NAACL 2022.
"""

from mini_ee.recording import Record
from mini_ee.rules import PatienceConfidence, Rule
from mini_ee.training.method import Method
from mini_ee.training.rule import thresholds


def confident_patiences(recorded: Record) -> list[Rule]:
    """Every patience from 2 on with every fifth threshold on the max probability."""
    levels = [rule.threshold for rule in thresholds(recorded)[::5]]
    patiences = range(2, len(recorded.segments.exits))
    return [PatienceConfidence(patience, level) for patience in patiences for level in levels]


METHOD = Method(candidates=confident_patiences, classes_only=True)
