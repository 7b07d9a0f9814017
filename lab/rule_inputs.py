"""Settings of a rule that are inputs of model.onnx, the graph that contains the loop (model_graph.py). No torch here.

A rule with a line in INPUTS can get other values from outside the graph; the file of a method adds the line of its own
rule. A graph value, or an array with a value per row, stands in the rule in place of a number.
"""

from copy import copy
from typing import Any, TypeVar

import numpy as np

from mini_ee.lab.rules import Patience, PatienceConfidence, Policy, QExit, Rule, Threshold

R = TypeVar("R", bound=Rule)

INPUTS: dict[type[Rule], dict[str, tuple[str, str]]] = {
    Threshold: {"threshold": ("threshold", "threshold")},
    Patience: {"patience": ("patience", "patience")},
    PatienceConfidence: {"patience": ("patience", "patience"), "threshold": ("threshold", "threshold")},
    Policy: {"threshold": ("cut", "least_logit")},
    QExit: {"threshold": ("q", "least_hazard")},
}
"""Input of the graph -> (the setting for which it stands, the attribute that `stop` compares with). With a `threshold`
of inf no row exits."""


def runtime_inputs(rule: Rule) -> dict[str, str]:
    """Input of the graph -> the attribute of the rule that `stop` compares with."""
    return {name: attribute for name, (_, attribute) in INPUTS.get(type(rule), {}).items()}


def runtime_settings(rule: Rule) -> dict[str, str]:
    """Setting of the rule -> the input of the graph that stands for it."""
    return {setting: name for name, (setting, _) in INPUTS.get(type(rule), {}).items()}


def runtime_values(rule: Rule, count: int) -> dict[str, np.ndarray]:
    """Input -> the rule's values at the first `count` exits: (count,) float32, or (1,) for an integer."""
    return {name: _values(getattr(rule, attribute), count) for name, attribute in runtime_inputs(rule).items()}


def _values(value: Any, count: int) -> np.ndarray:
    if isinstance(value, int):
        return np.array([value])
    return np.array(value[:count] if isinstance(value, tuple) else [value] * count, np.float32)


def with_runtime(rule: R, values: dict) -> R:
    """The rule with the graph's inputs at one exit in place of its own settings."""
    rule, attributes = copy(rule), runtime_inputs(rule)  # not replace: __post_init__ cannot check graph values
    for name, value in values.items():
        object.__setattr__(rule, attributes[name], value)
    return rule


def served_by(rule: Rule, other: Rule) -> bool:
    """Whether a graph that contains the rule `other` computes this one, if it gets other inputs."""
    moved = runtime_settings(rule)
    return type(rule) is type(other) and all(
        value == getattr(other, name) for name, value in rule.settings().items() if name not in moved
    )
