"""The default rule of a run: candidates, and the choice and the test on held-out train examples."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from mini_ee.calibrate import fixed_sequence
from mini_ee.lab.confidence import NUMBER_MEASURES, usual_measure
from mini_ee.lab.data.tasks import Task
from mini_ee.lab.early_exit import ExitResult
from mini_ee.lab.recording import Record, exit_scores, predictions
from mini_ee.lab.rules import Never, Patience, Rule, Threshold
from mini_ee.lab.statistics import paired_p_values, rows_needed
from mini_ee.lab.sweep import compared, from_loose_to_strict, knob
from mini_ee.lab.token_tasks import LABELS

CANDIDATES = 100  # candidate values of a rule's knob; two neighbours differ in about 1% of an exit's decisions

CURVE_POINTS = 24  # values of a rule's knob in a curve; the time of each is measured

PASSING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
"""Shares of all decisions that are exits, for candidate rules on tokens. There are few, because each rule generates all
texts again. Most are small, because a sequence of tests begins with the strictest rule."""

PATIENCE_TOLERANCES = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Tolerances of patience, in those of the task: how near the numbers of consecutive exits must be."""

Candidates = Callable[[Record], list[Rule]]
"""Makes candidate rules from the recorded logits of every exit."""

Point = TypeVar("Point")


def choose(points: Iterable[Point], score: Callable[[Point], float], budget: Callable[[Point], bool]) -> Point | None:
    """The point with the highest score among those within the budget (the first of equal ones), or None."""
    return max(filter(budget, points), key=score, default=None)


# ---- Candidates ----
def sweep(*rules: Rule) -> Candidates:
    """Candidates: each of these rules with other values of its knob, except the last one, which never exits early.

    The given rules come first, if they exit early. Rules that need a policy are left out for models without one.
    """

    def candidates(recorded: Record) -> list[Rule]:
        known = (rule for rule in rules if rule.needs != "exit_logit" or recorded.segments.exit_logits is not None)
        variants = [variant for rule in known for variant in from_loose_to_strict(rule, recorded, CANDIDATES)[:-1]]
        return sorted(variants, key=lambda rule: rule not in rules)

    return candidates


def usual_rule(task: Task) -> Rule:
    """The rule of most models: a threshold on the maximum probability; its knob is open.

    For a regression patience; for several labels, at once or of tokens, a threshold on the least confident of them; for
    a ranking a threshold below which numbers are too low for the top k.
    """
    if task.top_k is not None:
        return Threshold(math.inf, *NUMBER_MEASURES)
    measure = usual_measure(task.multi_label, bool(task.token_kind))
    return Patience(1) if task.regression else Threshold(math.inf, measure)


def usual_rules(task: Task) -> tuple[Rule, ...]:
    """The rules whose knobs a choice may set: of a regression with a tolerance, patience with several tolerances."""
    if task.tolerance is None:
        return (usual_rule(task),)
    return tuple(Patience(1, share * task.tolerance) for share in PATIENCE_TOLERANCES)


def passing(recorded: Record, rule: Rule) -> list[Rule]:
    """The rule with values of its knob at which the shares PASSING of the decisions are exits, the strictest first."""
    levels = np.quantile(compared(rule, recorded), 1 - np.array(PASSING)).tolist()
    return [replace(rule, **{knob(rule): level}) for level in levels]


# ---- Curves ----
def curves(recorded: Record, task: Task, labels: np.ndarray, chosen: Rule) -> list[dict]:
    """Curves of the chosen and the usual rule on recorded rows, from their loosest setting to the strictest.

    Each has a rule of the kind and points [value of the knob, score of the task, mean layers].
    """
    families = [chosen] if knob(chosen) else []
    if len(recorded.segments.exits) > 1:
        usual = usual_rules(task)[-1]
        families.append(replace(usual, threshold=0.5) if isinstance(usual, Threshold) else usual)
    by_kind = {}
    for rule in families:
        rule_dict = rule.to_dict()
        kind = str({name: value for name, value in rule_dict.items() if name != knob(rule)})
        points = curve(recorded, rule, lambda result: task.score(predictions(result.logits, task), labels)["score"])
        by_kind.setdefault(kind, {"rule": rule_dict, "points": points})
    return list(by_kind.values())


def curve(recorded: Record, rule: Rule, score: Callable[[ExitResult], float]) -> list[list]:
    """Points [value of the knob, score, mean layers], from the loosest setting to the strictest."""
    points = []
    for variant in from_loose_to_strict(rule, recorded, CURVE_POINTS):
        value, result = getattr(variant, knob(rule)), recorded.replay(variant)
        points.append([str(value) if math.isinf(value) else value, score(result), float(result.layers_run.mean())])
    return points


# ---- The default rule ----
FALLBACK_LOSS, FALLBACK_CONFIDENCE = 0.05, 0.95
"""If no rule is guaranteed, a rule must pass the same test with this loss and confidence. 59 examples without a loss
pass it."""


class Chosen(NamedTuple):
    """The default rule, and its guarantee. In JSON: rule.to_dict(), guarantee and rows_needed as they are."""

    rule: Rule
    guarantee: dict | None  # max_loss, confidence, of, rows, loss_on_holdout, p_value; of a regression label_range
    rows_needed: int | None = None  # without a guarantee: number of test examples for one; None if no rule can have it
    metrics: dict = {}  # further fields of metrics.json; for rows "guaranteed", the guarantee in words, and "fallback"
    curve: dict | None = None  # of its threshold, see threshold_curve.py


class Replay(NamedTuple):
    """A candidate rule on the recorded rows of both held-out parts."""

    rule: Rule
    layers: float  # mean layer passes on the selection part, by which candidates are ordered
    tested_layers: float  # the same on the test part
    saves: bool  # whether it saves layers, on average over both parts
    losses: np.ndarray  # (N,) of the test part, see paired_losses
    differing: int  # rows of both parts that are worse or better than with the last exit
    score: float  # score of the task on the test part


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

    selection, test: the recorded logits and labels of the two held-out parts. Candidates (default thresholds on the
    maximum probability, for a regression patiences) are made and ordered on the selection part, which may have chosen
    epochs and temperatures too. They are tested on the test part, which has chosen nothing, beginning with the one that
    computes most layers, until the first that fails. The order is fixed before the test (`fixed_sequence`), so no
    correction for the number of candidates is needed. The guarantee holds with this confidence for rows like the tested
    ones; `paired_losses` defines the loss. If the score of the task is not accuracy, the rule also loses at most
    max_loss of this score on the test part, without a guarantee.

    The core's default_rule has the same sequence for thresholds. Its test counts the rows that are worse and no others;
    that of `paired_p_values` also counts those that are better, which needs fewer rows.

    If no rule passes, the same test is made with FALLBACK_LOSS and FALLBACK_CONFIDENCE. If none passes this test
    either, the full model is the default. Each of the two statements is wrong in at most 1 - confidence of all
    trainings. label_range: for a regression, the range of the labels outside the test part.
    Raises ValueError for a max_loss outside [0, 1), or a confidence outside (0, 1).
    """
    if not (0 <= max_loss < 1 and 0 < confidence < 1):
        raise ValueError(
            f"expected a max_loss from 0 to below 1 and a confidence between 0 and 1, got {max_loss} and {confidence}"
        )
    candidates = candidates or sweep(*usual_rules(task))
    replays = [_replayed(rule, selection, test, task, label_range) for rule in candidates(selection)]
    replays.sort(key=lambda replay: replay.layers)
    replays.reverse()  # of equal ones the last comes first: candidates are listed from loose to strict
    if not replays:
        exits = len(selection.segments.exits)
        why = f"The default rule is the full model: no rule of this method can exit before the last of {exits} exits."
        return Chosen(Never(), None, None, {"guaranteed": why, "fallback": None})
    selecting = len(selection.labels)
    least = exit_scores(test, task, test.labels)[-1] - max_loss if len(test.labels) else math.inf
    useful = [replay.saves and replay.score >= least for replay in replays]
    if proven := _passing(replays, useful, max_loss, confidence):
        guarantee = proven[1] | _lost(task, label_range)
        return Chosen(proven[0], guarantee, None, {"guaranteed": _guarantee(guarantee, selecting), "fallback": None})
    return _without_guarantee(replays, useful, selecting, task, (max_loss, confidence), label_range)


def _without_guarantee(
    replays: list[Replay],
    useful: list[bool],
    selecting: int,
    task: Task,
    wanted: tuple[float, float],
    label_range: float,
) -> Chosen:
    """The rule that passes the fallback test, or the full model, and the number of examples for a guarantee."""
    (max_loss, confidence), tested = wanted, len(replays[0].losses)
    of, fallback = _lost(task, label_range), _passing(replays, useful, FALLBACK_LOSS, FALLBACK_CONFIDENCE)
    rule, fallback = (fallback[0], fallback[1] | of) if fallback else (Never(), None)
    others = [replay for replay in replays if replay.saves and (replay.rule == rule or not fallback)]
    needed = _needed(others, selecting, max_loss, confidence)
    missing = f"A loss of at most {max_loss:g} with confidence {confidence:.0%} is not guaranteed"
    missing += f": about {needed} held-out test examples are needed." if needed else "."
    less = f"less than {FALLBACK_LOSS:g} of {of['of']} with confidence {FALLBACK_CONFIDENCE:.0%}"
    if fallback:
        message = f"The default rule loses {less}, by a test on {tested} held-out examples. {missing}"
    else:
        enough = _needed(others, selecting, FALLBACK_LOSS, FALLBACK_CONFIDENCE)
        shown = f"on {tested} held-out test examples no other rule is shown to lose {less}"
        enough = f"; about {enough} are needed" if enough else ""
        message = f"The default rule is the full model: {shown}{enough}. {missing}"
    return Chosen(rule, None, needed, {"guaranteed": message, "fallback": fallback})


def _passing(replays: list[Replay], useful: list[bool], max_loss: float, confidence: float) -> tuple[Rule, dict] | None:
    """(rule, figures of the test) of the useful rule that saves most layers among those that pass, or None."""
    losses = np.array([replay.losses for replay in replays])
    if not losses.size or not max_loss:
        return None
    p_values = paired_p_values(losses, max_loss, level=1 - confidence)
    passed = range(fixed_sequence(p_values, 1 - confidence))
    best = choose(passed, score=lambda at: -replays[at].tested_layers, budget=lambda at: useful[at])
    if best is None:
        return None
    guarantee = {"max_loss": max_loss, "confidence": confidence, "rows": losses.shape[1]}
    guarantee |= {"loss_on_holdout": float(losses[best].mean()), "p_value": float(p_values[best])}
    return replays[best].rule, guarantee


def _needed(replays: list[Replay], selecting: int, max_loss: float, confidence: float) -> int | None:
    """Number of test examples for the rule that differs least, if it loses nothing on average; None without rules.

    It is at least twice the present number, because the present ones did not pass.
    """
    if not replays or not max_loss:
        return None
    tested, differing = len(replays[0].losses), min(replay.differing for replay in replays)
    needed = rows_needed((differing + 1) / (selecting + tested + 1), max_loss, confidence)
    return needed if needed > tested else 2 * tested


def _lost(task: Task, label_range: float) -> dict:
    """The quantity of which a part is lost."""
    if task.top_k is not None:
        return {"of": "the queries' top k", "top_k": task.top_k}
    if task.tolerance is not None:
        return {"of": "agreement within the tolerance", "tolerance": task.tolerance}
    if task.regression:
        return {"of": "the labels' range in mean absolute error", "label_range": label_range}
    if task.token_kind:
        return {"of": f"agreement in {'all labels of a text' if task.token_kind == LABELS else 'the span'}"}
    return {"of": "accuracy"}


def _guarantee(of: dict, selecting: int) -> str:
    """The guarantee in words."""
    return (
        f"Guaranteed with confidence {of['confidence']:.0%}: the default rule loses at most {of['max_loss']:g} of "
        f"{of['of']} against the last exit, for examples like the {of['rows']} held-out ones that tested it and "
        f"chose nothing. {selecting} others chose the epoch and proposed rules. For other examples use mini-ee "
        f"calibrate RUN --task DIR."
    )


def paired_losses(
    task: Task, labels: np.ndarray, predicted: np.ndarray, last: np.ndarray, label_range: float = 1.0
) -> np.ndarray:
    """The loss of each row by a rule's prediction in place of the last exit's: (..., N) in {-1, 0, 1}.

    Classes: right(last) - right(rule), whose mean is the loss of accuracy. Regression: the increase of the absolute
    error / label_range, clipped to [-1, 1] and rounded at random, which keeps the mean. label_range must be computed
    from other labels than these, because a test must not depend on the tested labels. So must a task's tolerance, with
    which numbers are right or wrong like classes. In a ranking a row is a query, which keeps its top k or not.
    """
    if not task.regression or task.counts_agreement:
        return task.agrees(last, labels).astype(np.int8) - task.agrees(predicted, labels)
    larger = (abs(predicted - labels) - abs(last - labels)) / (label_range or 1)
    return np.floor(np.clip(larger, -1, 1) + np.random.default_rng(0).random(len(labels))).astype(np.int8)


def _replayed(rule: Rule, selection: Record, test: Record, task: Task, label_range: float) -> Replay:
    passes, losses = [], []
    for part in (selection, test) if len(test.labels) else (selection,):
        result = part.replay(rule)
        predicted, last = (predictions(logits, task) for logits in (result.logits, part.logits[:, -1]))
        passes.append(result.cost.layer_passes)
        losses.append(paired_losses(task, part.labels, predicted, last, label_range))
    score = task.score(predicted, part.labels)["score"]
    saves = bool(np.concatenate(passes).mean() < selection.segments.exits[-1])
    differing = int(sum(map(np.count_nonzero, losses)))
    tested = losses[1] if len(losses) > 1 else np.zeros(0, np.int8)
    return Replay(rule, passes[0].mean(), passes[-1].mean(), saves, tested, differing, score)
