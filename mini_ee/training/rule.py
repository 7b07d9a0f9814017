"""The rule that a training ends with: candidates, and the one that is chosen on rows held out of train."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mini_ee.calibration import Observed, broken_promises, calibrate, fixed_sequence, report
from mini_ee.confidence import MEASURES
from mini_ee.data.tasks import Task
from mini_ee.rules import NeverExit, Patience, PatienceConfidence, Policy, Rule, Threshold
from mini_ee.training.promise import paired_p_values, rows_needed
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


# ---- The rule that a training ends with ----
PROPOSING = 200
"""Rows at most, and a tenth of the hold-out, on which candidates are made and ordered, and nothing is promised."""


class Chosen(NamedTuple):
    """The default rule, and what is promised of it. In JSON: rule.to_dict(), promise and rows_needed as they are."""

    rule: Rule
    promise: dict | None  # keys: max_loss, confidence, of, rows, loss_on_holdout, p_value
    rows_needed: int | None  # without a promise: so many held-out rows would do; None where no rule can be promised

    def sentence(self) -> str:
        """What is promised, for whom, and what to do otherwise."""
        if self.promise:
            of = self.promise
            return (
                f"Promised with confidence {of['confidence']:.0%}: on rows like the {of['rows']} held-out ones the "
                f"default rule loses at most {of['max_loss']:g} of {of['of']} against the last exit. For other rows: "
                f"mini-ee calibrate RUN --task DIR."
            )
        more = f"; about {self.rows_needed} would do" if self.rows_needed else ""
        if self.rule == NeverExit():
            return f"The default rule is the full model: every other lost something on the held-out rows{more}."
        return f"The default rule lost nothing on the held-out rows, which are too few to promise it for others{more}."


class Replay(NamedTuple):
    """What a rule does with N recorded rows."""

    rule: Rule
    layer_passes: np.ndarray  # (N,)
    saves: bool  # layers, on average
    losses: np.ndarray  # (N,), see paired_losses
    score: float  # the task's


def default_rule(
    recorded: Record,
    task: Task,
    labels: np.ndarray,
    max_loss: float = 0.01,
    confidence: float = 0.95,
    candidates: Candidates | None = None,
) -> Chosen:
    """The rule that saves most layers among those promised to lose at most max_loss against the last exit.

    The promise is kept with this confidence on rows like these, see `paired_losses` for what is lost; by the task's own
    score, where that is another, the rule loses at most max_loss on the hold-out, without a promise. Candidates, by
    default thresholds on the max probability, for regression patiences, are made on rows of the hold-out that are not
    tested, and tested from the one that computes most layers on those down, until the first that fails. So the order
    is fixed before (`fixed_sequence`), and no correction for their number is needed. The confidences of the tested rows
    could not give it: they are no labels, but they go together with the losses.

    Without a promise: the rule that saves most among those that lose nothing on the hold-out.
    Raises ValueError for a max_loss outside [0, 1), or a confidence outside (0, 1).
    """
    if not (0 <= max_loss < 1 and 0 < confidence < 1):
        raise ValueError(
            f"expected a max_loss from 0 to below 1 and a confidence between 0 and 1, got {max_loss} and {confidence}"
        )
    candidates = candidates or (patiences if task.regression else thresholds)
    chosen = max_loss and _promised(recorded, task, labels, max_loss, confidence, candidates)
    return chosen or _without_promise(recorded, task, labels, max_loss, confidence, candidates)


def paired_losses(task: Task, labels: np.ndarray, said: np.ndarray, last: np.ndarray) -> np.ndarray:
    """What each row loses by a rule's prediction instead of the last exit's: (..., N) in {-1, 0, 1}.

    Classes: right(last) - right(rule), whose mean is the loss of accuracy. Regression: how much larger the absolute
    error is, over the range of these labels, clipped to [-1, 1] and rounded at random so that the mean stays.
    """
    if not task.regression:
        return (last == labels).astype(np.int8) - (said == labels)
    larger = (abs(said - labels) - abs(last - labels)) / (np.ptp(labels) or 1)
    return np.floor(np.clip(larger, -1, 1) + np.random.default_rng(0).random(len(labels))).astype(np.int8)


def _promised(
    recorded: Record, task: Task, labels: np.ndarray, max_loss: float, confidence: float, candidates: Candidates
) -> Chosen | None:
    """The rule that saves most layers among those that pass the test; None where none that saves any does."""
    proposing = np.zeros(len(labels), bool)
    proposing[np.random.default_rng(0).permutation(len(labels))[: min(PROPOSING, len(labels) // 10)]] = True
    replays = _replays(candidates, recorded, proposing, task, labels) if proposing.any() else []
    if not replays:
        return None
    replays.sort(key=lambda replay: replay.layer_passes[proposing].mean())
    replays.reverse()  # of equal ones the last comes first: candidates are listed from the loosest on
    losses = np.array([replay.losses[~proposing] for replay in replays])
    p_values = paired_p_values(losses, max_loss)
    least = _full_score(recorded, task, labels) - max_loss
    passed = range(fixed_sequence(p_values, 1 - confidence))
    passed = [at for at in passed if replays[at].saves and replays[at].score >= least]
    if not passed:
        return None
    best = min(passed, key=lambda at: replays[at].layer_passes.mean())
    promise = {
        "max_loss": max_loss,
        "confidence": confidence,
        "of": "the labels' range in mean absolute error" if task.regression else "accuracy",
        "rows": losses.shape[1],
        "loss_on_holdout": float(losses[best].mean()),
        "p_value": float(p_values[best]),
    }
    return Chosen(replays[best].rule, promise, None)


def _without_promise(
    recorded: Record, task: Task, labels: np.ndarray, max_loss: float, confidence: float, candidates: Candidates
) -> Chosen:
    """The rule that saves most layers among those that lose nothing here, and how many rows would promise it.

    Where none loses nothing, the rows for the one that differs least from the last exit. They are enough if the rule
    loses nothing on fresh rows either; twice the rows at hand, where those were enough but for bad luck.
    """
    replays = _replays(candidates, recorded, np.ones(len(labels), bool), task, labels)
    saving = [replay for replay in replays if replay.saves]
    harmless = [replay for replay in saving if replay.score >= _full_score(recorded, task, labels)]
    best = min(harmless, key=lambda replay: replay.layer_passes.mean(), default=None)
    needed = None
    if saving and max_loss:
        differing = min(np.count_nonzero(replay.losses) for replay in ([best] if best else saving))
        tested = rows_needed((differing + 1) / (len(labels) + 1), max_loss, confidence)
        needed = tested + min(PROPOSING, math.ceil(tested / 9))
        needed = needed if needed > len(labels) else 2 * len(labels)
    return Chosen(best.rule if best else NeverExit(), None, needed)


def _replays(
    candidates: Candidates, recorded: Record, proposing: np.ndarray, task: Task, labels: np.ndarray
) -> list[Replay]:
    """All rows under the rules that some of them, a mask (N,), propose."""
    exit_logits = recorded.segments.exit_logits
    rules = candidates(recorded.logits[proposing], None if exit_logits is None else exit_logits[proposing])
    last, replays = predictions(recorded.logits[:, -1]), []
    for rule in rules:
        result = recorded.replay(rule)
        passes, said = result.cost.layer_passes, predictions(result.logits)
        losses = paired_losses(task, labels, said, last)
        saves = bool(passes.mean() < recorded.segments.exits[-1])
        replays.append(Replay(rule, passes, saves, losses, task.score(said, labels)["score"]))
    return replays


def _full_score(recorded: Record, task: Task, labels: np.ndarray) -> float:
    return task.score(predictions(recorded.logits[:, -1]), labels)["score"]
