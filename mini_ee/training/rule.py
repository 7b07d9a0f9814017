"""The rule that a training ends with: candidates, and the one that is chosen on rows held out of train."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mini_ee.calibration import (
    Observed,
    TooFew,
    broken_promises,
    calibrate,
    conformal,
    fixed_sequence,
    kept,
    kept_by_sets,
    report,
)
from mini_ee.data.tasks import Task
from mini_ee.early_exit import ExitResult
from mini_ee.rules import LIMITS, NeverExit, Patience, Policy, QExit, Rule, Threshold
from mini_ee.training.promise import paired_p_values, rows_needed
from mini_ee.units.recording import Record, exit_scores, predictions


def asked(recorded: Record, rule: Rule) -> np.ndarray:
    """(N, K - 1): what the rule compares with its knob at every exit but the last."""
    if not rule.asks_policy:
        return recorded.confidence(rule.measure)
    if isinstance(rule, QExit):
        return left_by(recorded)
    return np.exp(-np.logaddexp(0, -recorded.segments.exit_logits.astype(np.float64)))


def left_by(recorded: Record) -> np.ndarray:
    """The probability of having left by each exit but the last, (N, K - 1)."""
    return -np.expm1(-np.logaddexp(0, recorded.segments.exit_logits.astype(np.float64)).cumsum(axis=1))


def cuts(recorded: Record) -> list[Rule]:
    """The papers' cut, .5, and cuts at quantiles of the probabilities of leaving."""
    return [Policy(), *(Policy(float(level)) for level in quantiles(asked(recorded, Policy())))]


def q_exits(recorded: Record) -> list[Rule]:
    """PALBERT's q, .5, and quantiles of the probabilities of having left by each exit."""
    return [QExit(), *(QExit(float(level)) for level in quantiles(asked(recorded, QExit())))]


def passing(recorded: Record, rule: Policy | Threshold) -> list[Rule]:
    """The rule with other thresholds, the strictest first: such as these shares of all that it is asked would pass."""
    levels = np.quantile(asked(recorded, rule), 1 - np.array(PASSING)).tolist()
    return [replace(rule, **{KNOBS[rule.name]: level}) for level in levels]


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
    names, drawn = _half(observed, seed)
    try:
        rule = calibrate(observed.take(drawn), epsilon, delta, measure)
    except TooFew as error:
        units = math.ceil(2 * error.needed * len(observed.groups) / len(names))
        what = "rows are" if recorded.groups is None else f"texts like these, {units} tokens, are"
        raise ValueError(
            f"too few to promise epsilon {epsilon} with delta {delta}: at least {2 * error.needed} {what} needed (half "
            f"of them to check), got {len(names)}; give more, or lower epsilon, or leave delta out"
        ) from None
    answer = report(observed.take(drawn), observed.take(~drawn), rule, epsilon, delta)
    answer["mean_layers"] = float(recorded.replay(rule).layers_run[~drawn].mean())
    if sets:
        answer["broken"] = broken_promises(observed, epsilon, delta, measure, sets, seed)
    return rule, answer


def calibrate_conformal(
    recorded: Record, epsilon: float, measure: str, seed: int = 0, sets: int = 0
) -> tuple[Rule, dict]:
    """The same with one conformal cut for all exits, see calibration.py. sets: how many for `kept_by_sets`."""
    observed = observe(recorded, measure)
    names, drawn = _half(observed, seed)
    try:
        rule = conformal(observed.take(drawn), epsilon, measure)
    except TooFew as error:
        raise ValueError(
            f"too few for a conformal promise of epsilon {epsilon}: at least {2 * error.needed} rows or texts are "
            f"needed (half of them to check), got {len(names)}; give more, or lower epsilon"
        ) from None
    result, fresh = recorded.replay(rule), observed.take(~drawn)
    last = observed.confidence.shape[1]
    sure = (result.exit_index[:, None] == np.arange(last))[~drawn]
    shares = [float(agrees[left].mean()) if left.any() else None for agrees, left in zip(fresh.agrees.T, sure.T)]
    bar = rule.to_dict()[rule.fed[0]]
    answer = {"promise": "conformal", "epsilon": epsilon, "delta": None, "measure": measure}
    answer |= {"thresholds": [bar] * last, "tau_intervals": None, "agreement": shares, "end_to_end": kept(fresh, sure)}
    answer["exit_counts"] = np.bincount(result.exit_index[~drawn], minlength=last + 1).tolist()
    answer |= {"rows_calibration": int(drawn.sum()), "rows_fresh": int((~drawn).sum())}
    answer["mean_layers"] = float(result.layers_run[~drawn].mean())
    if sets:
        answer["kept"] = kept_by_sets(observed, epsilon, sets, seed)
    return rule, answer


def _half(observed: Observed, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Names of the rows or texts, and which units (N,) are of a seeded half of them."""
    names = np.unique(observed.groups)
    if len(names) < 2:
        raise ValueError(f"expected at least 2 rows or texts, some to calibrate on and some to check, got {len(names)}")
    chosen = names[np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]]
    return names, np.isin(observed.groups, chosen)


PASSING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)  # of all readings, under the rules of a sweep
LEVELS = 100  # thresholds tried for a default rule

Candidates = Callable[[Record], list[Rule]]
"""Rules to choose among, from what every exit says of some units."""


def thresholds(recorded: Record, measure: str = "max_probability") -> list[Rule]:
    """Thresholds at quantiles of what the exits but the last say."""
    if len(recorded.segments.exits) < 2:
        return []
    levels = quantiles(recorded.confidence(measure))
    return [Threshold(float(level), measure) for level in np.clip(levels, *LIMITS[measure])]


def patiences(recorded: Record) -> list[Rule]:
    """Every patience that can end before the last exit."""
    return [Patience(patience) for patience in range(1, len(recorded.segments.exits) - 1)]


def quantiles(values: np.ndarray) -> np.ndarray:
    """LEVELS levels of all values."""
    return np.quantile(values.ravel(), np.linspace(0, 1, LEVELS))


KNOBS = {
    "threshold": "threshold",
    "patience": "patience",
    "patience-confidence": "threshold",
    "policy": "cut",
    "q-exit": "q",
}
"""Rule -> the setting that trades layers for score."""
CURVE_POINTS = 24


def curves(recorded: Record, task: Task, labels: np.ndarray, chosen: Rule) -> list[dict]:
    """What the chosen rule and the usual ones keep on recorded rows, from their loosest setting to their strictest.

    Of each: the rule, one of its kind, and points [value of its knob, the task's score, mean layers].
    """
    families = [chosen] if chosen.name in KNOBS else []
    if len(recorded.segments.exits) > 1:
        families += [Patience(1)] if task.regression else [Threshold(0.5)]
    found = {}
    for rule in families:
        about = rule.to_dict()
        kind = str({name: value for name, value in about.items() if name != KNOBS[rule.name]})
        points = curve(recorded, rule, lambda result: task.score(predictions(result.logits), labels)["score"])
        found.setdefault(kind, {"rule": about, "points": points})
    return list(found.values())


def curve(recorded: Record, rule: Rule, score: Callable[[ExitResult], float]) -> list[list]:
    """[value of the rule's knob, score, mean layers], from its loosest setting to its strictest."""
    points = []
    for value in _settings(recorded, rule):
        result = recorded.replay(replace(rule, **{KNOBS[rule.name]: value}))
        points.append([str(value) if math.isinf(value) else value, score(result), float(result.layers_run.mean())])
    return points


def _settings(recorded: Record, rule: Rule) -> list:
    """Values of a rule's knob that let ever fewer units leave, the last one none of them."""
    if rule.name == "patience":
        return list(range(1, len(recorded.segments.exits)))
    levels = np.quantile(asked(recorded, rule), np.linspace(0, 1, CURVE_POINTS))
    values = [*levels, *np.atleast_1d(getattr(rule, KNOBS[rule.name]))]
    if rule.asks_policy:
        return np.unique([*values, 1.0]).tolist()
    return np.unique([*np.clip(values, *LIMITS[rule.measure]), math.inf]).tolist()


# ---- The rule that a training ends with ----
PROPOSING = 200
"""Rows at most, and a tenth of the hold-out, on which candidates are made and ordered, and nothing is promised."""


class Chosen(NamedTuple):
    """The default rule, and what is promised of it. In JSON: rule.to_dict(), promise and rows_needed as they are."""

    rule: Rule
    promise: dict | None  # keys: max_loss, confidence, of, rows, loss_on_holdout, p_value
    rows_needed: int | None = None  # without a promise: held-out rows that would do; None where no rule can be promised
    about: dict = {}  # what was measured on the way

    def sentence(self) -> str:
        """What is promised, for whom, and what to do otherwise."""
        if "promised" in self.about:
            return self.about["promised"]
        if self.promise:
            of = self.promise
            return (
                f"Promised with confidence {of['confidence']:.0%}: on rows like the {of['rows']} held-out ones the "
                f"default rule loses at most {of['max_loss']:g} of {of['of']} against the last exit. For other rows: "
                f"mini-ee calibrate RUN --task DIR."
            )
        more = f"; about {self.rows_needed} would do" if self.rows_needed else ""
        if self.rule == NeverExit():
            return f"The default rule is the full model: no other lost nothing on the held-out rows{more}."
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
    The hold-out chose the best epoch too, before: the confidence is that of a model chosen without these rows.
    `calibrate RUN --task DIR` on other rows promises with no such reserve.
    Raises ValueError for a max_loss outside [0, 1), or a confidence outside (0, 1).
    """
    if not (0 <= max_loss < 1 and 0 < confidence < 1):
        raise ValueError(
            f"expected a max_loss from 0 to below 1 and a confidence between 0 and 1, got {max_loss} and {confidence}"
        )
    recorded = recorded._replace(labels=labels)
    candidates = candidates or (patiences if task.regression else thresholds)
    chosen = max_loss and _promised(recorded, task, max_loss, confidence, candidates)
    return chosen or _without_promise(recorded, task, max_loss, confidence, candidates)


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
    recorded: Record, task: Task, max_loss: float, confidence: float, candidates: Candidates
) -> Chosen | None:
    """The rule that saves most layers among those that pass the test; None where none that saves any does."""
    rows = len(recorded.labels)
    proposing = np.zeros(rows, bool)
    proposing[np.random.default_rng(0).permutation(rows)[: min(PROPOSING, rows // 10)]] = True
    replays = _replays(candidates, recorded, proposing, task) if proposing.any() else []
    if not replays:
        return None
    replays.sort(key=lambda replay: replay.layer_passes[proposing].mean())
    replays.reverse()  # of equal ones the last comes first: candidates are listed from the loosest on
    losses = np.array([replay.losses[~proposing] for replay in replays])
    p_values = paired_p_values(losses, max_loss)
    least = exit_scores(recorded, task, recorded.labels)[-1] - max_loss
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
    recorded: Record, task: Task, max_loss: float, confidence: float, candidates: Candidates
) -> Chosen:
    """The rule that saves most layers among those that lose nothing here, and how many rows would promise it.

    Where none loses nothing, the rows for the one that differs least from the last exit. They are enough if the rule
    loses nothing on fresh rows either; twice the rows at hand, where those were enough but for bad luck.
    """
    rows = len(recorded.labels)
    replays = _replays(candidates, recorded, np.ones(rows, bool), task)
    if not replays:
        exits = len(recorded.segments.exits)
        said = f"The default rule is the full model: no rule of this method can leave before the last of {exits} exits."
        return Chosen(NeverExit(), None, None, {"promised": said})
    saving = [replay for replay in replays if replay.saves]
    full_score = exit_scores(recorded, task, recorded.labels)[-1]
    harmless = [replay for replay in saving if replay.score >= full_score]
    best = min(harmless, key=lambda replay: replay.layer_passes.mean(), default=None)
    needed = None
    if saving and max_loss:
        differing = min(np.count_nonzero(replay.losses) for replay in ([best] if best else saving))
        tested = rows_needed((differing + 1) / (rows + 1), max_loss, confidence)
        needed = tested + min(PROPOSING, math.ceil(tested / 9))
        needed = needed if needed > rows else 2 * rows
    return Chosen(best.rule if best else NeverExit(), None, needed)


def _replays(candidates: Candidates, recorded: Record, proposing: np.ndarray, task: Task) -> list[Replay]:
    """All rows under the rules that some of them, a mask (N,), propose."""
    labels, last, replays = recorded.labels, predictions(recorded.logits[:, -1]), []
    for rule in candidates(recorded.take(proposing)):
        result = recorded.replay(rule)
        passes, said = result.cost.layer_passes, predictions(result.logits)
        losses = paired_losses(task, labels, said, last)
        saves = bool(passes.mean() < recorded.segments.exits[-1])
        replays.append(Replay(rule, passes, saves, losses, task.score(said, labels)["score"]))
    return replays
