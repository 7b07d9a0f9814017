"""The rule that a training ends with: candidates, and the one that is chosen on rows held out of train."""

from collections.abc import Callable

import numpy as np

from mini_ee.calibration import Observed, broken_promises, calibrate, report
from mini_ee.confidence import MEASURES
from mini_ee.data.tasks import Task
from mini_ee.rules import NeverExit, Patience, PatienceConfidence, Policy, Rule, Threshold
from mini_ee.units.recording import Record, predictions


# ---- The rules that each system is read with ----
def confident_patiences(logits: np.ndarray, exit_logits: np.ndarray | None) -> list[Rule]:
    """Every patience from 2 on with every fifth threshold on the max probability."""
    levels = [rule.threshold for rule in thresholds(logits, None, "max_probability")[::5]]
    return [PatienceConfidence(patience, level) for patience in range(2, logits.shape[1]) for level in levels]


def cuts(logits: np.ndarray, exit_logits: np.ndarray | None) -> list[Rule]:
    """The papers' cut, .5, and cuts at quantiles of the probabilities of leaving: exit_logits (N, K - 1)."""
    chances = 1 / (1 + np.exp(-exit_logits.astype(np.float64)))
    return [Policy(), *(Policy(float(level)) for level in quantiles([chances.ravel()]))]


def observe(recorded: Record, measure: str = "max_probability") -> Observed:
    """What a classifier's exits say of recorded rows, each a group of its own."""
    function = MEASURES[measure][0]
    before_last = range(recorded.logits.shape[1] - 1)
    if not before_last:
        raise ValueError("there is nothing to calibrate: the model has one exit; train one with more")
    said = recorded.logits.argmax(axis=2)
    confidence = np.stack([function(recorded.logits[:, k]) for k in before_last], axis=1)
    return Observed(confidence, said[:, :-1] == said[:, -1:], np.arange(len(said)))


def calibrate_record(
    recorded: Record,
    epsilon: float,
    delta: float | None = None,
    measure: str = "max_probability",
    seed: int = 0,
    sets: int = 0,
) -> tuple[Threshold, dict]:
    """Calibrate a classifier on recorded rows that it was not trained on: the rule, and the JSON answer.

    A seeded half of the rows gives the thresholds, the other half says what they keep; end to end by the loop itself.
    sets: how many for `broken_promises`.
    """
    observed = observe(recorded, measure)
    drawn = np.random.default_rng(seed).permutation(len(observed.groups)) < len(observed.groups) // 2
    rule = calibrate(observed.take(drawn), epsilon, delta, measure)
    result = recorded.replay(rule)
    same = predictions(result.logits) == predictions(recorded.logits[:, -1])
    answer = report(observed.take(drawn), observed.take(~drawn), rule, epsilon, delta)
    answer["end_to_end"] = float(same[~drawn].mean())
    answer["mean_layers"] = float(result.layers_run[~drawn].mean())
    if sets:
        answer["broken"] = broken_promises(observed, epsilon, delta, measure, sets, seed)
    return rule, answer


LEVELS = 100  # thresholds tried for a default rule

Candidates = Callable[[np.ndarray, np.ndarray | None], list[Rule]]
"""Rules to choose among, from what every exit says of some rows: logits (N, K, C) and exit_logits (N, K - 1)."""


def thresholds(logits: np.ndarray, exit_logits: np.ndarray | None, measure: str = "max_probability") -> list[Rule]:
    """Thresholds at quantiles of what the exits but the last say."""
    function, least, most = MEASURES[measure]
    seen = [function(logits[:, k]) for k in range(logits.shape[1] - 1)]
    return [Threshold(float(np.clip(level, least, most)), measure) for level in quantiles(seen)]


def patiences(logits: np.ndarray, exit_logits: np.ndarray | None) -> list[Rule]:
    """Every patience that can end before the last exit."""
    return [Patience(patience) for patience in range(1, logits.shape[1] - 1)]


def quantiles(seen: list[np.ndarray]) -> np.ndarray:
    """LEVELS levels of some arrays together."""
    return np.quantile(np.concatenate(seen), np.linspace(0, 1, LEVELS)) if seen else np.empty(0)


def default_rule(
    recorded: Record, task: Task, labels: np.ndarray, max_loss: float, candidates: Candidates | None = None
) -> Rule:
    """The rule that computes fewest layers on these rows and scores within max_loss of the last exit.

    Of the candidates, by default thresholds on the max probability, for regression patiences. NeverExit where none
    qualifies.
    """
    candidates = candidates or (patiences if task.regression else thresholds)
    full = task.score(predictions(recorded.logits[:, -1]), labels)["score"]
    best, best_layers = NeverExit(), float(recorded.segments.exits[-1])
    for rule in candidates(recorded.logits, recorded.segments.exit_logits):
        result = recorded.replay(rule)
        good = task.score(predictions(result.logits), labels)["score"] >= full - max_loss
        if good and result.cost.layer_passes.mean() < best_layers:
            best, best_layers = rule, float(result.cost.layer_passes.mean())
    return best
