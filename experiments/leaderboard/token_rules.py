"""Rules for tokens on a record: a method's own, and the one that saves most layers at a level of agreement.

Agreement is the share of tokens whose prediction is the full model's: the method's own last exit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.lab.calibration import calibrate, observe
from mini_ee.lab.evaluation.token_evaluation import EPSILON_GRID
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Fixed, Never, Rule
from mini_ee.lab.training.method import Method

LEVELS = (0.8, 0.9, 0.95)
LEVEL = 0.9  # of the rule whose decoding is measured
WITHIN = "within"  # name of the rule with the best perplexity within SHARE
SHARE = 3 / 4  # of the layers, with which perplexities are compared and rates are chosen
GAP = "breaking_ties"
KEPT_MEASURES = {"prediction", "exit_logit", "saturation", GAP, "max_probability"}


class Outcome(NamedTuple):
    """N tokens under a rule."""

    agrees: np.ndarray  # (N,) bool
    depth: np.ndarray  # (N,), layers run
    flops: np.ndarray  # (N,), compared with the full model, heads included
    log_p: np.ndarray  # (N,), ln p of the next token at the exit

    @property
    def agreement(self) -> float:
        return float(self.agrees.mean())


def outcome(recorded: Record, rule: Rule) -> Outcome:
    """Each token's agreement, depth, FLOPs and ln p at the exit where the rule stops it."""
    at, predictions, result = np.arange(len(recorded.logits)), recorded.predictions, recorded.replay(rule)
    agrees = predictions[at, result.exit_index] == predictions[:, -1]
    depth = np.array(recorded.segments.exits)[result.exit_index]
    return Outcome(agrees, depth, result.cost.flops / recorded.full, recorded.logits[at, result.exit_index, 0])


def own_rules(method: Method, calibration: Record) -> list[Rule]:
    """A method's candidates; if it has none, a threshold on the gap for each exit, for many shares that must agree.

    If the record has no confidences, the exits are models of fixed depth.
    """
    if GAP not in calibration.segments.measures:
        return [Fixed(k) for k in range(len(calibration.segments.exits) - 1)]
    candidates = method.candidates(calibration) if method.candidates else []
    return list(candidates) or gap_rules(calibration)


def gap_rules(calibration: Record) -> list[Rule]:
    """Self-supervised exits' thresholds on the gap between the two most probable tokens."""
    observed = observe(calibration, GAP)
    return [calibrate(observed, epsilon, measure=GAP) for epsilon in EPSILON_GRID]


def rule_at(rules: Sequence[Rule], calibration: Record, level: float) -> Rule:
    """The rule that saves most layers among those with at least this agreement; the full model if none saves any."""
    best, least = Never(), float(calibration.segments.exits[-1])
    for rule in rules:
        reached = outcome(calibration, rule)
        if reached.agreement >= level and reached.depth.mean() < least:
            best, least = rule, float(reached.depth.mean())
    return best


def rule_within(rules: Sequence[Rule], calibration: Record, share: float) -> Rule | None:
    """The rule with the highest mean ln p among those with at most this share of the layers, or None.

    All tokens at one exit is a rule too.
    """
    best, most = None, -np.inf
    for rule in [*rules, *map(Fixed, range(len(calibration.segments.exits) - 1))]:
        reached = outcome(calibration, rule)
        if reached.depth.mean() <= share * calibration.segments.exits[-1] and reached.log_p.mean() > most:
            best, most = rule, float(reached.log_p.mean())
    return best


def score_of_rates(calibration: Record) -> float:
    """The mean ln p of the next token with the best thresholds on the gap that run at most SHARE of the layers."""
    rule = rule_within(gap_rules(calibration), calibration, SHARE)
    return -np.inf if rule is None else float(outcome(calibration, rule).log_p.mean())


def needed_measures(rules: Sequence[Rule]) -> set[str]:
    """The measures that a record must contain for these rules, and those by which methods are compared."""
    return KEPT_MEASURES | {rule.measure for rule in rules if hasattr(rule, "measure")}
