"""Thresholds with a guarantee: how confident an exit must be so that a share of epsilon agrees with the full model.

Source: Valade 2024, Accelerating Large Language Model Inference with Self-Supervised Early Exits, section 3.3. An exit
agrees (Eq. 3) if its most likely token, or class, is that of the last exit; no label is needed. There are three rules:

    calibrate           the paper's, tau of mini_ee/calibrate.py: the share holds on the rows that the thresholds were
                        chosen on. On new rows it is broken for half of all calibration sets or more
    with `delta`        on new rows it is broken with probability delta at most (Angelopoulos et al. 2021, Learn then
                        Test; Schuster et al. 2022, CALM): cuts are tested from the strictest down, until one fails
    conformal           one threshold for all exits; the share is that of all rows, wherever they exit (CAT, Schuster et
                        al. 2021, arXiv:2104.08803v2)

A group is what was drawn independently: a text with all its tokens, or a single row. The tests of cuts (statistics.py):

    groups of one row   exact binomial: the guarantee holds for every distribution of the rows
    larger groups       binomial for the number of independent rows with the same variance (Korn & Graubard 1998), plus
                        one text as long as the longest in which no row agrees. It assumes that the correlation within
                        texts shows in the sample. The tests simulate it, also with texts in which no row agrees.

Symbols:   N rows, K exits, of which the first K - 1 are calibrated; epsilon: the least share that agrees, in (0, 1];
           delta: the probability that the guarantee is broken, for all K - 1 exits together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.calibrate import cuts, lowest_passing, tau
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import THRESHOLD_LIMITS, Policy, Rule, Threshold
from mini_ee.lab.statistics import agreement_p_values, groups_needed
from mini_ee.lab.sweep import knob

TAU_RESAMPLES = 1000
ROUNDING = 1e-9  # tolerance of counts that are whole numbers up to rounding
MIN_RISK = 1e-9  # least delta, and least 1 - epsilon: smaller ones are lost in rounding
A_SET = "a calibration set is a quarter of the rows or texts"


class TooFew(ValueError):
    """Even full agreement would not be enough for the guarantee. needed: the number of rows, or of such texts."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


class Observed(NamedTuple):
    """Confidence and agreement of the exits before the last, for N rows (examples or tokens)."""

    confidence: np.ndarray  # (N, K - 1), Eq. 2; larger means more confident
    agrees: np.ndarray  # (N, K - 1) bool, Eq. 3
    groups: np.ndarray  # (N,), the text of each row

    def take(self, rows: np.ndarray) -> "Observed":
        """Some of the rows: an index or a mask (N,)."""
        return Observed(*(array[rows] for array in self))


def calibrate(
    observed: Observed, epsilon: float, delta: float | None = None, measure: str = "max_probability"
) -> Threshold:
    """tau of every exit, as a rule: the paper's, or with `delta` one whose guarantee also holds on new rows.

    measure: that of observed.confidence. If tau is inf, no row exits there. At the last exit all rows stop.
    Raises ValueError if epsilon or delta is outside its range, TooFew if there are too few rows or texts for them.
    """
    check_guarantee(epsilon, delta)
    if not np.isfinite(observed.confidence).all():
        raise ValueError("every confidence must be a finite number, found NaN or infinity: did the model diverge?")
    if not observed.confidence.size:
        raise ValueError(f"expected rows and exits to calibrate on, found shape {observed.confidence.shape}")
    columns = zip(observed.confidence.T, observed.agrees.T, strict=True)
    if delta is None:
        taus = [tau(*column, epsilon) for column in columns]
    else:
        each_delta = delta / observed.confidence.shape[1]  # union bound over the exits (Bonferroni)
        _check_size(observed.groups, epsilon, each_delta)
        taus = [tau_with_confidence(*column, observed.groups, epsilon, each_delta) for column in columns]
    return Threshold((*taus, -math.inf), measure)


# ---- How far chance moves the paper's rule ----
def intervals(observed: Observed, epsilon: float, resamples: int = TAU_RESAMPLES, seed: int = 0) -> np.ndarray:
    """95% intervals of the paper's tau, (K - 1, 2): percentile bootstrap over groups."""
    names, group = np.unique(observed.groups, return_inverse=True)
    columns = []  # of each exit: confidences in descending order, their agreement, their groups
    for confidence, agrees in zip(observed.confidence.T, observed.agrees.T):
        order = np.argsort(-confidence, kind="stable")  # so that no resample needs a sort
        columns.append((confidence[order], agrees[order], group[order]))
    random, taus = np.random.default_rng(seed), np.empty((len(columns), resamples))
    for at in range(resamples):
        # A row is drawn as often as its group.
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        for k, (confidence, agrees, groups) in enumerate(columns):
            drawn = times[groups]
            taus[k, at] = tau(np.repeat(confidence, drawn), np.repeat(agrees, drawn), epsilon)
    return np.quantile(taus, [0.025, 0.975], axis=1, method="inverted_cdf").T  # inf cannot be interpolated


# ---- The rule with confidence delta ----
def tau_with_confidence(
    confidence: np.ndarray, agrees: np.ndarray, groups: np.ndarray, epsilon: float, delta: float
) -> float:
    """As the core's, which tests one row of each group; here all rows count, in tests of `agreement_p_values`.

    confidence, agrees, groups: (N,). With probability 1 - delta over the draw of the groups, a share of epsilon or more
    agrees among new rows with at least this confidence. A cut contains the n most confident rows, the first one f rows.

    `fixed_sequence` needs hypotheses that do not depend on the tested rows, but the cuts are at observed confidences.
    Why it holds nevertheless, for single rows without ties: call a threshold bad if less than epsilon of the rows at or
    above it agree. Bad thresholds form intervals, at whose ends exactly epsilon agree.
    1. If the f-th row is in no bad interval, a bad tau requires that the rows above the next bad interval have passed.
       Given their number, these agree with probability epsilon: they pass with probability delta at most.
    2. If the f-th row is in one, a bad tau requires that the first cut has passed. Let u be the share of rows at or
       above a threshold, and q(u) = u^f P(f such rows pass): p u^f at the ends of the interval, for a p <= delta, and
       at most p u^f inside. The f-th row is at u and the cut passes with density (N over f) (1 - u)^(N - f) q'(u). By
       parts, its integral is at most p times the probability that the f-th row is in the interval.
    Together that is delta at most. The tests check it by enumeration.
    """
    order = np.argsort(-confidence, kind="stable")
    levels, count, _ = cuts(confidence, agrees)
    # Which cuts are tested depends on their rows and groups (the p-values if all agree), not on the agreement.
    given = np.ones_like(agrees), agrees[order]
    best, p_values = (agreement_p_values(agreeing, groups[order], epsilon)[count - 1] for agreeing in given)
    return lowest_passing(levels, count, best, p_values, delta)


def check_guarantee(epsilon: float, delta: float | None) -> None:
    """Raise ValueError if epsilon or delta is outside the range in which a guarantee is possible."""
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon must be above 0 and at most 1, got {epsilon}")
    if delta is None:
        return
    if not MIN_RISK <= delta < 1:
        raise ValueError(f"delta must be at least {MIN_RISK} and below 1, got {delta}")
    if epsilon > 1 - MIN_RISK:
        raise ValueError(
            f"epsilon {epsilon} cannot be guaranteed for fresh rows: too many are needed; take .99, or no delta"
        )


def _check_size(groups: np.ndarray, epsilon: float, delta: float) -> None:
    """Raise TooFew if even full agreement would not pass."""
    perfect = agreement_p_values(np.ones(len(groups), bool), groups, epsilon)[-1]
    if perfect > delta:
        sizes = np.unique(groups, return_counts=True)[1]
        needed, kind = groups_needed(sizes, epsilon, delta), "rows" if sizes.max() == 1 else "texts like these"
        raise TooFew(
            f"too few to guarantee epsilon {epsilon} with this delta: at least {needed} {kind} are needed, "
            f"got {len(sizes)}; calibrate on more, or lower epsilon, or leave delta out",
            needed,
        )


# ---- The conformal guarantee ----
POLICY = "exit_logit"  # the measure of the rule Policy

COMPARED_DELTA = 0.05  # delta of the thresholds with which a conformal cut is compared


def conformal(observed: Observed, epsilon: float, measure: str = "max_probability") -> Rule:
    """One cut for all exits: a new row exits with the last exit's prediction with probability epsilon or more.

    The probability is over the draw of the calibration rows and of the new row together (they are exchangeable); for
    texts it is the mean share of tokens. measure: that of observed.confidence; POLICY for a policy. Raises ValueError
    if epsilon is outside (0, 1) or a confidence is not finite, TooFew if the only valid cut is infinity.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be above 0 and below 1 for a conformal guarantee, got {epsilon}")
    if not np.isfinite(observed.confidence).all():
        raise ValueError("every confidence must be a finite number, found NaN or infinity: did the model diverge?")
    needed = math.ceil(1 / (1 - epsilon) - 1 - ROUNDING)  # from 1 / (n + 1) <= 1 - epsilon, without any loss
    count = len(np.unique(observed.groups))
    if count < needed:
        raise TooFew(f"at least {needed} rows or texts are needed for epsilon {epsilon}, got {count}", needed)
    return above(conformal_cut(observed, epsilon), measure)


def conformal_cut(observed: Observed, epsilon: float) -> float:
    """The tau for the rule "exit if the confidence is above tau" (CAT's shared calibration, as conformal risk control,
    Angelopoulos et al. 2024, which also covers texts).

    Conformal risk control needs a loss that is at most 1 and does not grow with tau. Whether a row exits with a wrong
    prediction is not monotone in tau, but this upper bound is: the loss is 1 if tau is below M, the largest confidence
    among the row's exits that disagree. tau is the smallest with (losses + 1) / (n + 1) <= 1 - epsilon over n rows; the
    1 is the largest possible loss of the new row. For single rows tau is the ceil(epsilon (n + 1))-th smallest M.
    -inf if there are few enough losses at every tau, inf if n is too small.
    """
    worst = np.where(observed.agrees, -np.inf, observed.confidence).max(axis=1)
    names, group, sizes = np.unique(observed.groups, return_inverse=True, return_counts=True)
    order = np.argsort(-worst, kind="stable")
    # Losses, in groups, if tau falls below M of the rows one after the other: a row counts as its share of its text.
    losses = np.cumsum(1 / sizes[group[order]])
    most = (1 - epsilon) * (len(names) + 1) - 1 + ROUNDING
    if most < 0:
        return math.inf
    too_many = np.flatnonzero(losses > most)  # tau must not fall below M of the first of these
    return float(worst[order[too_many[0]]]) if len(too_many) else -math.inf


def above(tau: float, measure: str) -> Rule:
    """The rule "exit if the measure is above tau", strictly, also in float32."""
    if measure == POLICY:
        # The cut is the sigmoid of tau (exp(tau) if tau is very negative), or the next number whose logit is not below.
        cut = 1 / (1 + math.exp(-tau)) if tau > -30 else math.exp(tau)
        while Policy(cut).least_logit < tau:
            cut = math.nextafter(cut, 1)
        return Policy(cut)
    if math.isinf(tau):
        return Threshold(tau, measure)
    # The rule Threshold exits at or above its threshold, and engines compare in float32: so the next larger float32.
    threshold = float(np.nextafter(np.float32(tau), np.float32(np.inf)))
    return Threshold(threshold if threshold <= THRESHOLD_LIMITS[measure][1] else math.inf, measure)


def agreement_by_sets(observed: Observed, epsilon: float, sets: int = 1000, seed: int = 0) -> dict:
    """Mean agreement on the groups outside the calibration set, over many sets, for three rules on the same sets: the
    conformal cut, the paper's thresholds, and those with delta COMPARED_DELTA.
    """
    shares, each_delta = np.zeros((sets, 3)), COMPARED_DELTA / observed.confidence.shape[1]
    for at, drawn in enumerate(calibration_sets(observed, sets, seed)):
        some, fresh = observed.take(drawn), observed.take(~drawn)
        columns = list(zip(some.confidence.T, some.agrees.T))
        cut = np.nextafter(conformal_cut(some, epsilon), np.inf, dtype=some.confidence.dtype)  # strictly above it
        taus = [tau(*column, epsilon) for column in columns]
        stricter = [tau_with_confidence(*column, some.groups, epsilon, each_delta) for column in columns]
        rules = (_Cuts(thresholds) for thresholds in ([cut] * len(columns), taus, stricter))
        shares[at] = [mean_of_groups(replay(fresh, rule).agrees, fresh.groups) for rule in rules]
    means = dict(zip(("conformal", "paper", "delta"), shares.mean(axis=0).tolist()))
    return {"sets": sets, "groups_a_set": len(np.unique(observed.groups)) // 4} | means


class _Cuts(Rule):
    """A threshold for each exit on any observed measure, without the limits that Threshold checks."""

    needs = POLICY

    def __init__(self, cuts: Sequence[float]):
        self.cuts = cuts

    def stop(self, k: int, read: np.ndarray, memory: dict[str, np.ndarray]) -> np.ndarray:
        return read >= self.cuts[k]


def calibration_sets(observed: Observed, sets: int, seed: int) -> Iterator[np.ndarray]:
    """`sets` random quarters of the groups, as masks (N,) of rows. Raises ValueError for fewer than four groups."""
    random, names = np.random.default_rng(seed), np.unique(observed.groups)
    if len(names) < 4:
        raise ValueError(f"{A_SET}: expected at least 4, found {len(names)}")
    for _ in tqdm(range(sets), desc="calibration sets", delay=2):
        yield np.isin(observed.groups, random.permutation(names)[: len(names) // 4])


# ---- Agreement on new rows ----
class Outcome(NamedTuple):
    """The result of a rule for N observed rows."""

    exit_index: np.ndarray  # (N,)
    agrees: np.ndarray  # (N,) bool: whether the row exits with the last exit's prediction


def replay(observed: Observed, rule: Rule) -> Outcome:
    """Run early_exit on observed rows. rule: on the observed measure."""
    last = np.ones((len(observed.agrees), 1), bool)
    agrees = np.concatenate((observed.agrees, last), axis=1)[:, :, None]  # as logits, which the loop gathers
    count = agrees.shape[1]
    measures = {getattr(rule, "measure", POLICY): observed.confidence}
    segments = Recorded((*range(1, count + 1),), agrees, np.zeros((*agrees.shape[:2], 2)), [1] * count, measures)
    result = early_exit(segments, rule, range(len(agrees)))
    return Outcome(result.exit_index, result.logits[:, 0])


def end_to_end(observed: Observed, rule: Rule) -> float:
    """The share of rows that exit with the last exit's prediction, each at its own exit."""
    return float(replay(observed, rule).agrees.mean())


def mean_of_groups(values: np.ndarray, groups: np.ndarray) -> float:
    """The mean over groups of the means within groups."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return float((np.bincount(group, values) / sizes).mean())


def agreement(observed: Observed, rule: Threshold) -> list[float | None]:
    """For every exit but the last: the share of the rows at or above its threshold that agrees; None without rows."""
    shares = []
    for confidence, agrees, threshold in zip(observed.confidence.T, observed.agrees.T, np.atleast_1d(rule.threshold)):
        confident = confidence >= threshold
        shares.append(float(agrees[confident].mean()) if confident.any() else None)
    return shares


def broken_guarantees(
    observed: Observed,
    epsilon: float,
    delta: float | None = None,
    measure: str = "max_probability",
    sets: int = 1000,
    seed: int = 0,
) -> dict:
    """How often a guarantee is broken on new groups: the share of calibration sets, for each of the two rules.

    A set is a random quarter of the groups; the others are new. Broken: at some exit, less than epsilon agree among the
    new rows at or above the threshold. Raises TooFew if a quarter is too few groups for epsilon and delta.
    """
    rules = {"paper": None} if delta is None else {"paper": None, "delta": delta}
    broken = dict.fromkeys(rules, 0)
    for drawn in calibration_sets(observed, sets, seed):
        for name, rule_delta in rules.items():
            try:
                rule = calibrate(observed.take(drawn), epsilon, rule_delta, measure)
            except TooFew as error:
                raise TooFew(f"{A_SET}: {error}", 4 * error.needed) from None
            shares = agreement(observed.take(~drawn), rule)
            broken[name] += any(share is not None and share < epsilon for share in shares)
    of_sets = {name: count / sets for name, count in broken.items()}
    return {"sets": sets, "groups_a_set": len(np.unique(observed.groups)) // 4} | of_sets


# ---- From a record to a rule and its JSON answer: `mini-ee calibrate` ----
def observe(recorded: Record, measure: str = "max_probability") -> Observed:
    """Confidence and agreement of the exits before the last. A row is a group of its own, a token belongs to a text."""
    predicted = recorded.predictions
    if predicted.shape[1] < 2:
        raise ValueError("there is nothing to calibrate: the model has one exit; train one with more")
    groups = np.arange(len(predicted)) if recorded.groups is None else recorded.groups
    return Observed(recorded.confidence(measure), predicted[:, :-1] == predicted[:, -1:], groups)


def calibrate_record(
    recorded: Record,
    epsilon: float,
    delta: float | None = None,
    measure: str = "max_probability",
    seed: int = 0,
    sets: int = 0,
) -> tuple[Threshold, dict]:
    """(rule, JSON answer): thresholds of all exits, from recorded rows or tokens that were not trained on.

    Thresholds are chosen on a random half of the rows or texts; agreement is measured on the other half.
    tau_intervals: bootstrap intervals of the paper's thresholds; None with delta, whose thresholds allow for chance.
    sets: number of sets for `broken_guarantees`. Raises ValueError with the number needed, if there are too few.
    """
    observed = observe(recorded, measure)
    names, drawn = _half(observed, seed)
    taken, fresh = observed.take(drawn), observed.take(~drawn)
    try:
        rule = calibrate(taken, epsilon, delta, measure)
    except TooFew as error:
        units = math.ceil(2 * error.needed * len(observed.groups) / len(names))
        what = "rows are" if recorded.groups is None else f"texts like these, {units} tokens, are"
        raise ValueError(
            f"too few to guarantee epsilon {epsilon} with delta {delta}: at least {2 * error.needed} {what} needed "
            f"(half of them to check), got {len(names)}; give more, or lower epsilon, or leave delta out"
        ) from None
    answer = {"epsilon": epsilon, "delta": delta, "measure": measure, "thresholds": rule.to_dict()["threshold"][:-1]}
    answer["tau_intervals"] = _intervals(taken, epsilon) if delta is None else None
    answer |= {"agreement": agreement(fresh, rule), "end_to_end": end_to_end(fresh, rule)}
    answer |= _figures(recorded, rule, drawn)
    if sets:
        answer["broken"] = broken_guarantees(observed, epsilon, delta, measure, sets, seed)
    return rule, answer


def calibrate_conformal(
    recorded: Record, epsilon: float, measure: str, seed: int = 0, sets: int = 0
) -> tuple[Rule, dict]:
    """The same with one conformal cut for all exits. sets: number of sets for `agreement_by_sets`."""
    observed = observe(recorded, measure)
    names, drawn = _half(observed, seed)
    try:
        rule = conformal(observed.take(drawn), epsilon, measure)
    except TooFew as error:
        raise ValueError(
            f"too few for a conformal guarantee of epsilon {epsilon}: at least {2 * error.needed} rows or texts are "
            f"needed (half of them to check), got {len(names)}; give more, or lower epsilon"
        ) from None
    fresh, last = observed.take(~drawn), observed.confidence.shape[1]
    outcome = replay(fresh, rule)
    exited = [outcome.agrees[outcome.exit_index == k] for k in range(last)]
    answer = {"guarantee": "conformal", "epsilon": epsilon, "delta": None, "measure": measure}
    answer |= {"thresholds": [rule.to_dict()[knob(rule)]] * last, "tau_intervals": None}
    answer["agreement"] = [float(agrees.mean()) if len(agrees) else None for agrees in exited]
    answer["end_to_end"] = mean_of_groups(outcome.agrees, fresh.groups)
    answer |= _figures(recorded, rule, drawn)
    if sets:
        answer["kept"] = agreement_by_sets(observed, epsilon, sets, seed)
    return rule, answer


def _half(observed: Observed, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The groups, and a mask (N,) of the rows or tokens that are in a random half of the groups."""
    names = np.unique(observed.groups)
    if len(names) < 2:
        raise ValueError(f"expected at least 2 rows or texts, some to calibrate on and some to check, got {len(names)}")
    chosen = names[np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]]
    return names, np.isin(observed.groups, chosen)


def _figures(recorded: Record, rule: Rule, drawn: np.ndarray) -> dict:
    """Depth of the half on which thresholds were not chosen, and the sizes of both halves."""
    result = recorded.replay(rule)
    return {
        "exit_counts": np.bincount(result.exit_index[~drawn], minlength=len(recorded.segments.exits)).tolist(),
        "rows_calibration": int(drawn.sum()),
        "rows_fresh": int((~drawn).sum()),
        "mean_layers": float(result.layers_run[~drawn].mean()),
    }


def _intervals(calibration: Observed, epsilon: float) -> list[list[float | str]]:
    """`intervals` as JSON, in which inf is a string."""
    ends = intervals(calibration, epsilon).tolist()
    return [[end if np.isfinite(end) else str(end) for end in pair] for pair in ends]
