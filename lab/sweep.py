"""The knob of a rule, the setting that trades layers for score, and the same rule with other values of it. No torch.

A rule with a line in KNOBS is swept; the file of a method adds the line of its own rule.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mini_ee.lab.rules import THRESHOLD_LIMITS, Patience, PatienceConfidence, Policy, QExit, Rule, Threshold

R = TypeVar("R", bound=Rule)


class Knob(NamedTuple):
    """The knob of a class of rules."""

    setting: str
    compared: Callable[[Any, Any], np.ndarray] | None  # see `compared`; None: the setting counts exits
    never: float = math.inf  # its value with which no row exits early
    limits: Callable[[Any], tuple[float, float]] | None = None  # of a rule; None: those of its option


def _confidence(rule: Threshold | PatienceConfidence, recorded: Any) -> np.ndarray:
    return recorded.confidence(rule.measure)


def _limits(rule: Threshold | PatienceConfidence) -> tuple[float, float]:
    return THRESHOLD_LIMITS[rule.measure]


def _exit_probabilities(rule: Policy, recorded: Any) -> np.ndarray:
    """sigmoid(x) = exp(-ln(1 + e^-x)), in float64."""
    return np.exp(-np.logaddexp(0, -recorded.segments.exit_logits.astype(np.float64)))


def _cumulative_probabilities(rule: QExit, recorded: Any) -> np.ndarray:
    return -np.expm1(-np.logaddexp(0, recorded.segments.exit_logits.astype(np.float64)).cumsum(axis=1))


KNOBS: dict[type[Rule], Knob] = {
    Threshold: Knob("threshold", _confidence, limits=_limits),
    Patience: Knob("patience", None),
    PatienceConfidence: Knob("threshold", _confidence, limits=_limits),
    Policy: Knob("cut", _exit_probabilities, never=1.0),
    QExit: Knob("q", _cumulative_probabilities, never=1.0),
}


def knob(rule: Rule) -> str | None:
    """The setting that trades layers for score; None: the rule has none."""
    return KNOBS[type(rule)].setting if type(rule) in KNOBS else None


def knob_range(rule: Rule) -> tuple[float, float]:
    """Smallest and largest useful value of the rule's knob, apart from `never`."""
    setting, _, _, limits = KNOBS[type(rule)]
    if limits:
        return limits(rule)
    metadata = type(rule).__dataclass_fields__[setting].metadata  # type: ignore[attr-defined]  # a rule is a dataclass
    least, most = metadata.get("least"), metadata.get("most")
    return -math.inf if least is None else least, math.inf if most is None else most


def compared(rule: Rule, recorded: Any) -> np.ndarray:
    """(N, K - 1): the numbers that the rule compares with its knob, at every exit but the last. recorded: a Record.

    Raises ValueError for a rule that compares nothing with a knob.
    """
    of = KNOBS[type(rule)].compared if type(rule) in KNOBS else None
    if of is None:
        raise ValueError(f"expected a rule with a threshold, found the rule {rule.name}")
    return of(rule, recorded)


def from_loose_to_strict(rule: R, recorded: Any, count: int) -> list[R]:
    """The rule with increasing values of its knob: fewer and fewer rows exit early, with the last value none.

    The values are `count` quantiles of `compared`, and the rule's own value; of a setting that counts exits all
    values. Empty if the rule has no knob, or the model one exit. recorded: a Record.
    """
    exits = len(recorded.segments.exits)
    if type(rule) not in KNOBS or exits < 2:
        return []
    setting, of, never, _ = KNOBS[type(rule)]
    if of is None:
        every = list(range(1, exits))
    else:
        levels, settings = (
            np.quantile(of(rule, recorded), np.linspace(0, 1, count)),
            np.atleast_1d(getattr(rule, setting)),
        )
        every = np.unique([*np.clip([*levels, *settings[settings != never]], *knob_range(rule)), never]).tolist()
    return [replace(rule, **{setting: value}) for value in every]  # type: ignore[type-var]  # a rule is a dataclass
