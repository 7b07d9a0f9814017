"""The rule that a training ends with: candidates, and the one that is chosen on rows held out of train."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mini_ee.calibration import Observed, TooFew, broken_promises, calibrate, report
from mini_ee.confidence import MEASURES
from mini_ee.data.tasks import Task
from mini_ee.rules import NeverExit, Patience, Policy, Rule, Threshold
from mini_ee.units.recording import Record, predictions


def cuts(recorded: Record) -> list[Rule]:
    """The papers' cut, .5, and cuts at quantiles of the probabilities of leaving."""
    chances = 1 / (1 + np.exp(-recorded.segments.exit_logits.astype(np.float64)))
    return [Policy(), *(Policy(float(level)) for level in quantiles(chances))]


def passing(recorded: Record, rule: Policy | Threshold) -> list[Rule]:
    """The rule with other thresholds, the strictest first: such as these shares of all that it is asked would pass."""
    if isinstance(rule, Policy):
        values = 1 / (1 + np.exp(-recorded.segments.exit_logits.astype(np.float64)))
    else:
        values = recorded.confidence(rule.measure)
    name = "cut" if isinstance(rule, Policy) else "threshold"
    return [replace(rule, **{name: float(level)}) for level in np.quantile(values, 1 - np.array(PASSING))]


def observe(recorded: Record, measure: str = "max_probability") -> Observed:
    """What the exits but the last say of recorded units: rows are groups of their own, tokens belong to a text."""
    said = recorded.predictions
    if said.shape[1] < 2:
        raise ValueError("there is nothing to calibrate: the model has one exit; train one with more")
    groups = np.arange(len(said)) if recorded.groups is None else recorded.groups
    return Observed(recorded.confidence(measure), said[:, :-1] == said[:, -1:], groups)


def calibrate_record(
    recorded: Record,
    epsilon: float,
    delta: float | None = None,
    measure: str = "max_probability",
    seed: int = 0,
    sets: int = 0,
) -> tuple[Threshold, dict]:
    """Thresholds of all exits from recorded units that they were not trained on: the rule, and the JSON answer.

    A seeded half of the rows or texts gives the thresholds, the other half says what they keep; see calibration.py for
    epsilon and delta. sets: how many for `broken_promises`. Raises ValueError where there are too few, with the number
    that would do.
    """
    observed = observe(recorded, measure)
    names = np.unique(observed.groups)
    if len(names) < 2:
        raise ValueError(f"expected at least 2 rows or texts, some to calibrate on and some to check, got {len(names)}")
    chosen = names[np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]]
    drawn = np.isin(observed.groups, chosen)
    try:
        rule = calibrate(observed.take(drawn), epsilon, delta, measure)
    except TooFew as error:
        units = math.ceil(2 * error.needed * len(observed.groups) / len(names))
        what = "rows are" if recorded.groups is None else f"texts like these, {units} tokens, are"
        raise ValueError(
            f"too few to promise epsilon {epsilon} with delta {delta}: at least {2 * error.needed} {what} needed (half "
            f"of them to check), got {len(names)}; give more, or lower epsilon, or leave delta out"
        ) from None
    result = recorded.replay(rule)
    said = recorded.predictions
    same = said[np.arange(len(said)), result.exit_index] == said[:, -1]
    answer = report(observed.take(drawn), observed.take(~drawn), rule, epsilon, delta)
    answer["end_to_end"] = float(same[~drawn].mean())
    answer["mean_layers"] = float(result.layers_run[~drawn].mean())
    if sets:
        answer["broken"] = broken_promises(observed, epsilon, delta, measure, sets, seed)
    return rule, answer


class Chosen(NamedTuple):
    """The rule that a training ends with."""

    rule: Rule
    promise: dict | None  # what it keeps, and how sure that is; None: the hold-out is too small for any
    rows_needed: int | None = None  # held-out rows that would do for a promise
    about: dict = {}  # what was measured on the way


PASSING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)  # of all readings, under the rules of a sweep
LEVELS = 100  # thresholds tried for a default rule

Candidates = Callable[[Record], list[Rule]]
"""Rules to choose among, from what every exit says of some units."""


def thresholds(recorded: Record, measure: str = "max_probability") -> list[Rule]:
    """Thresholds at quantiles of what the exits but the last say."""
    _, least, most = MEASURES[measure]
    if len(recorded.segments.exits) < 2:
        return []
    levels = quantiles(recorded.confidence(measure))
    return [Threshold(float(np.clip(level, least, most)), measure) for level in levels]


def patiences(recorded: Record) -> list[Rule]:
    """Every patience that can end before the last exit."""
    return [Patience(patience) for patience in range(1, len(recorded.segments.exits) - 1)]


def quantiles(values: np.ndarray) -> np.ndarray:
    """LEVELS levels of all values."""
    return np.quantile(values.ravel(), np.linspace(0, 1, LEVELS))


def default_rule(
    recorded: Record,
    task: Task,
    labels: np.ndarray,
    max_loss: float,
    confidence: float,
    candidates: Candidates | None = None,
) -> Chosen:
    """The rule that computes fewest layers on these rows and scores within max_loss of the last exit.

    Of the candidates, by default thresholds on the max probability, for regression patiences. NeverExit where none
    qualifies.
    """
    candidates = candidates or (patiences if task.regression else thresholds)
    full = task.score(predictions(recorded.logits[:, -1]), labels)["score"]
    best, best_layers = NeverExit(), float(recorded.segments.exits[-1])
    for rule in candidates(recorded):
        result = recorded.replay(rule)
        good = task.score(predictions(result.logits), labels)["score"] >= full - max_loss
        if good and result.cost.layer_passes.mean() < best_layers:
            best, best_layers = rule, float(result.cost.layer_passes.mean())
    return Chosen(best, None)
