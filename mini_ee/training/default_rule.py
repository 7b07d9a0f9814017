"""The rule that a training ends with: candidates, and the one that is chosen and tested on rows held out of train."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from mini_ee.data.tasks import Task
from mini_ee.early_exit import ExitResult
from mini_ee.recording import Record, exit_scores, predictions
from mini_ee.rules import NeverExit, Patience, Rule, Threshold
from mini_ee.statistics import fixed_sequence, paired_p_values, rows_needed

CANDIDATES = 100  # values of a rule's knob to choose among: neighbours differ on about 1 % of what an exit decides

CURVE_POINTS = 24  # values of a rule's knob in a curve: enough to draw one, and few enough to time each

PASSING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
"""Shares of all decisions under which units exit, for rules of tokens: under each of them texts are written anew, so
they are few; most are small, as a sequence of tests begins with the strictest."""

Candidates = Callable[[Record], list[Rule]]
"""Rules to choose among, from what every exit predicts for some units."""

Point = TypeVar("Point")


def choose(points: Iterable[Point], score: Callable[[Point], float], budget: Callable[[Point], bool]) -> Point | None:
    """Of the points within the budget the one with the highest score, the first of several; None if there is none."""
    return max(filter(budget, points), key=score, default=None)


# ---- Candidates ----
def sweep(*rules: Rule) -> Candidates:
    """Candidates: each of these rules with other values of its knob, but for the last, under which nothing exits early.

    These rules themselves come first, if something exits early under them. A policy's need a model that has one.
    """

    def candidates(recorded: Record) -> list[Rule]:
        known = (rule for rule in rules if not rule.needs_policy or recorded.segments.exit_logits is not None)
        found = [each for rule in known for each in rule.from_loose_to_strict(recorded, CANDIDATES)[:-1]]
        return sorted(found, key=lambda rule: rule not in rules)

    return candidates


def usual_rule(task: Task) -> Rule:
    """The rule of any model: a threshold on the max probability, for regression patience. Its knob is to be chosen."""
    return Patience(1) if task.regression else Threshold(math.inf)


def passing(recorded: Record, rule: Rule) -> list[Rule]:
    """The rule with other values of its knob, the strictest first: PASSING are the shares of decisions that exit."""
    levels = np.quantile(rule.compared(recorded), 1 - np.array(PASSING)).tolist()
    return [replace(rule, **{rule.knob: level}) for level in levels]


# ---- Curves ----
def curves(recorded: Record, task: Task, labels: np.ndarray, chosen: Rule) -> list[dict]:
    """What the chosen rule and the usual one score on recorded rows, from their loosest setting to their strictest.

    Of each: the rule, one of its kind, and points [value of its knob, the task's score, mean layers].
    """
    families = [chosen] if chosen.knob else []
    if len(recorded.segments.exits) > 1:
        families += [Patience(1)] if task.regression else [Threshold(0.5)]
    found = {}
    for rule in families:
        about = rule.to_dict()
        kind = str({name: value for name, value in about.items() if name != rule.knob})
        points = curve(recorded, rule, lambda result: task.score(predictions(result.logits), labels)["score"])
        found.setdefault(kind, {"rule": about, "points": points})
    return list(found.values())


def curve(recorded: Record, rule: Rule, score: Callable[[ExitResult], float]) -> list[list]:
    """[value of the rule's knob, score, mean layers], from its loosest setting to its strictest."""
    points = []
    for each in rule.from_loose_to_strict(recorded, CURVE_POINTS):
        value, result = getattr(each, rule.knob), recorded.replay(each)
        points.append([str(value) if math.isinf(value) else value, score(result), float(result.layers_run.mean())])
    return points


# ---- The rule that a training ends with ----
FALLBACK_LOSS, FALLBACK_CONFIDENCE = 0.05, 0.95
"""Without a guarantee a rule is taken only if the same test shows that it loses less than this: 59 examples that lose
nothing do."""


class Chosen(NamedTuple):
    """The default rule, and its guarantee. In JSON: rule.to_dict(), guarantee and rows_needed as they are."""

    rule: Rule
    guarantee: dict | None  # max_loss, confidence, of, rows, loss_on_holdout, p_value; of a regression label_range
    rows_needed: int | None = None  # without a guarantee: test examples that would do; None if no rule can have one
    about: dict = {}  # what else metrics.json says; of rows "guaranteed", the guarantee in words, and "fallback"


class Replay(NamedTuple):
    """What a candidate rule does with the recorded rows of both held-out parts."""

    rule: Rule
    layers: float  # mean layer passes on the selection part, by which candidates are ordered
    tested_layers: float  # the same on the test part
    saves: bool  # layers, on average over both parts
    losses: np.ndarray  # (N,) of the test part, see paired_losses
    differing: int  # rows of both parts that are worse or better than with the last exit
    score: float  # the task's, on the test part


def default_rule(
    selection: Record,
    test: Record,
    task: Task,
    max_loss: float = 0.01,
    confidence: float = 0.95,
    candidates: Candidates | None = None,
    label_range: float = 1.0,
) -> Chosen:
    """The rule that saves most layers among those guaranteed to lose at most max_loss against the last exit.

    selection, test: what the exits say of the two held-out parts, with labels. Candidates, by default thresholds on the
    max probability, for regression patiences, are made and ordered on the selection part, which may have chosen
    epochs and temperatures too. They are tested on the test part, which has chosen nothing, from the one that computes
    most layers down, until the first that fails. So the order is fixed before (`fixed_sequence`), and no correction
    for the number of candidates is needed. The guarantee holds with this confidence for rows like the tested ones;
    `paired_losses` says what is lost. By the task's own score, if that is not accuracy, the rule loses at most
    max_loss on the test part, without a guarantee.

    If no rule passes, the same test is made with FALLBACK_LOSS and FALLBACK_CONFIDENCE; if none passes that either,
    the full model is the default. Each of the two statements is wrong in at most 1 - confidence of all trainings.
    label_range: of a regression, the range of labels outside the test part.
    Raises ValueError for a max_loss outside [0, 1), or a confidence outside (0, 1).
    """
    if not (0 <= max_loss < 1 and 0 < confidence < 1):
        raise ValueError(
            f"expected a max_loss from 0 to below 1 and a confidence between 0 and 1, got {max_loss} and {confidence}"
        )
    candidates = candidates or sweep(usual_rule(task))
    replays = [_replayed(rule, selection, test, task, label_range) for rule in candidates(selection)]
    replays.sort(key=lambda replay: replay.layers)
    replays.reverse()  # of equal ones the last comes first: candidates are listed from the loosest on
    if not replays:
        exits = len(selection.segments.exits)
        why = f"The default rule is the full model: no rule of this method can exit before the last of {exits} exits."
        return Chosen(NeverExit(), None, None, {"guaranteed": why, "fallback": None})
    selecting = len(selection.labels)
    least = exit_scores(test, task, test.labels)[-1] - max_loss if len(test.labels) else math.inf
    useful = [replay.saves and replay.score >= least for replay in replays]
    if found := _passing(replays, useful, max_loss, confidence):
        guarantee = found[1] | _lost(task, label_range)
        return Chosen(found[0], guarantee, None, {"guaranteed": _guarantee(guarantee, selecting), "fallback": None})
    return _without_guarantee(replays, useful, selecting, task, (max_loss, confidence), label_range)


def _without_guarantee(
    replays: list[Replay],
    useful: list[bool],
    selecting: int,
    task: Task,
    wanted: tuple[float, float],
    label_range: float,
) -> Chosen:
    """The rule that passes the fallback's test, or the full model; and how many test examples would do for more."""
    (max_loss, confidence), tested = wanted, len(replays[0].losses)
    of, fallback = _lost(task, label_range), _passing(replays, useful, FALLBACK_LOSS, FALLBACK_CONFIDENCE)
    rule, fallback = (fallback[0], fallback[1] | of) if fallback else (NeverExit(), None)
    others = [replay for replay in replays if replay.saves and (replay.rule == rule or not fallback)]
    needed = _needed(others, selecting, max_loss, confidence)
    missing = f"A loss of at most {max_loss:g} with confidence {confidence:.0%} is not guaranteed"
    missing += f": about {needed} held-out test examples would do." if needed else "."
    less = f"less than {FALLBACK_LOSS:g} of {of['of']} with confidence {FALLBACK_CONFIDENCE:.0%}"
    if fallback:
        message = f"The default rule loses {less}, by a test on {tested} held-out examples. {missing}"
    else:
        enough = _needed(others, selecting, FALLBACK_LOSS, FALLBACK_CONFIDENCE)
        shown = f"{tested} held-out test examples show of no other rule that it loses {less}"
        enough = f"; about {enough} would do" if enough else ""
        message = f"The default rule is the full model: {shown}{enough}. {missing}"
    return Chosen(rule, None, needed, {"guaranteed": message, "fallback": fallback})


def _passing(replays: list[Replay], useful: list[bool], max_loss: float, confidence: float) -> tuple[Rule, dict] | None:
    """Of the useful rules that pass the test the one that saves most layers, and the test's figures; or None."""
    losses = np.array([replay.losses for replay in replays])
    if not losses.size or not max_loss:
        return None
    p_values = paired_p_values(losses, max_loss)
    passed = range(fixed_sequence(p_values, 1 - confidence))
    best = choose(passed, score=lambda at: -replays[at].tested_layers, budget=lambda at: useful[at])
    if best is None:
        return None
    about = {"max_loss": max_loss, "confidence": confidence, "rows": losses.shape[1]}
    about |= {"loss_on_holdout": float(losses[best].mean()), "p_value": float(p_values[best])}
    return replays[best].rule, about


def _needed(replays: list[Replay], selecting: int, max_loss: float, confidence: float) -> int | None:
    """Test examples that would do for the rule that differs least, if it loses nothing on average; None without rules.

    Twice those at hand, where those were enough but for bad luck.
    """
    if not replays or not max_loss:
        return None
    tested, differing = len(replays[0].losses), min(replay.differing for replay in replays)
    found = rows_needed((differing + 1) / (selecting + tested + 1), max_loss, confidence)
    return found if found > tested else 2 * tested


def _lost(task: Task, label_range: float) -> dict:
    """What a loss is a loss of."""
    if task.regression:
        return {"of": "the labels' range in mean absolute error", "label_range": label_range}
    return {"of": "accuracy"}


def _guarantee(of: dict, selecting: int) -> str:
    """What is guaranteed, from how many examples, and what to do otherwise."""
    return (
        f"Guaranteed with confidence {of['confidence']:.0%}: the default rule loses at most {of['max_loss']:g} of "
        f"{of['of']} against the last exit, on examples like the {of['rows']} held-out ones that tested it and chose "
        f"nothing else. {selecting} others chose the epoch and proposed rules. For other examples: mini-ee calibrate "
        f"RUN --task DIR."
    )


def paired_losses(
    task: Task, labels: np.ndarray, predicted: np.ndarray, last: np.ndarray, label_range: float = 1.0
) -> np.ndarray:
    """What each row loses by a rule's prediction instead of the last exit's: (..., N) in {-1, 0, 1}.

    Classes: right(last) - right(rule), whose mean is the loss of accuracy. Regression: how much larger the absolute
    error is, over label_range, clipped to [-1, 1] and rounded at random so that the mean stays. The range must be that
    of other labels than these: a test that scales by what it tests is none.
    """
    if not task.regression:
        return (last == labels).astype(np.int8) - (predicted == labels)
    larger = (abs(predicted - labels) - abs(last - labels)) / (label_range or 1)
    return np.floor(np.clip(larger, -1, 1) + np.random.default_rng(0).random(len(labels))).astype(np.int8)


def _replayed(rule: Rule, selection: Record, test: Record, task: Task, label_range: float) -> Replay:
    passes, losses, score = [], [], -math.inf
    for part in (selection, test) if len(test.labels) else (selection,):
        result = part.replay(rule)
        predicted, last = predictions(result.logits), predictions(part.logits[:, -1])
        passes.append(result.cost.layer_passes)
        losses.append(paired_losses(task, part.labels, predicted, last, label_range))
        score = task.score(predicted, part.labels)["score"]
    saves = bool(np.concatenate(passes).mean() < selection.segments.exits[-1])
    differing = int(sum(map(np.count_nonzero, losses)))
    tested = losses[1] if len(losses) > 1 else np.zeros(0, np.int8)
    return Replay(rule, passes[0].mean(), passes[-1].mean(), saves, tested, differing, score)
