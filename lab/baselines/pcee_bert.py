"""PCEE-BERT (Zhang et al. 2022, Findings of NAACL): joint training; exit if consecutive exits are confident.

Source: PCEE-BERT: Accelerating BERT Inference via Patient and Confident Early Exiting, Findings of NAACL 2022,
2022.findings-naacl.25.
"""

import math
from typing import Any

from mini_ee.lab.recording import Record
from mini_ee.lab.rules import PatienceConfidence, Rule, Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method


def confident_patiences(recorded: Record) -> list[Rule]:
    """Every patience from 2 on, with every fifth threshold on the maximum probability."""
    rules: list[Any] = sweep(Threshold(math.inf))(recorded)[::5]  # each a Threshold with one number
    thresholds = [rule.threshold for rule in rules]
    patiences = range(2, len(recorded.segments.exits))
    return [PatienceConfidence(patience, threshold) for patience in patiences for threshold in thresholds]


METHOD = Method(candidates=confident_patiences, classes_only=True, trained_as="joint")
