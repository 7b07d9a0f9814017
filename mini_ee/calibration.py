"""Thresholds that keep a guarantee: so confident must an exit be to agree with the full model at rate epsilon.

Source: Valade 2024, Accelerating Large Language Model Inference with Self-Supervised Early Exits, section 3.3. An exit
agrees (Eq. 3) where its likeliest token, or class, is that of the last exit; no label is needed. The paper's tau
keeps the guarantee on the rows that it was taken from. On fresh rows chance breaks it, for half of all calibration sets
or more; with `delta` it is broken for a share of delta of them at most (Angelopoulos et al. 2021, Learn then Test;
Schuster et al. 2022, CALM): cuts are tested one after the other from the strictest down, until the first that fails.

A group is what was drawn independently: a text with all its tokens, or a classifier's row. The test of a cut is

    groups of one row   exact binomial: the guarantee holds whatever the rows are like
    larger groups       binomial of as many independent rows as the sample is worth (Korn & Graubard 1998), with one
                        more text, as long as the longest, in which every row is wrong: so nothing rests on a text
                        that has not been seen. It assumes that the correlation within texts shows in the sample; it
                        is simulated in the tests, with texts that are wrong as a whole too.

statistics.py has both.

A third guarantee is about the answer, wherever a row leaves: `conformal` (CAT, Schuster et al. 2021, 2104.08803v2).

Symbols:   N rows, K exits, of which the first K - 1 are calibrated; epsilon: the least share that agrees, in (0, 1];
           delta: the chance that the guarantee is broken, over all K - 1 exits together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mini_ee.data.progress import tqdm
from mini_ee.early_exit import early_exit
from mini_ee.recording import Record, Recorded
from mini_ee.rules import THRESHOLD_LIMITS, Policy, Rule, Threshold
from mini_ee.statistics import agreement_p_values, fixed_sequence, groups_needed

START = 0.05  # share of the rows in the strictest cut that is tested
TAU_RESAMPLES = 1000
ROUNDING = 1e-9  # of counts that are whole numbers but for it
MIN_RISK = 1e-9  # of delta, and of 1 - epsilon: below it the sums round
A_SET = "a calibration set is a quarter of the rows or texts"


class TooFew(ValueError):
    """Not even full agreement would keep the guarantee. needed: rows, or texts like those at hand, that could."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


class Observed(NamedTuple):
    """What the exits but the last predict for N rows, whatever the rows are."""

    confidence: np.ndarray  # (N, K - 1), Eq. 2; larger means surer
    agrees: np.ndarray  # (N, K - 1) bool, Eq. 3
    groups: np.ndarray  # (N,), which text a row belongs to

    def take(self, rows: np.ndarray) -> "Observed":
        """Some of the rows: an index or a mask (N,)."""
        return Observed(*(each[rows] for each in self))


def calibrate(
    observed: Observed, epsilon: float, delta: float | None = None, measure: str = "max_probability"
) -> Threshold:
    """tau of every exit, as a rule: the paper's, or with `delta` one that keeps the guarantee on fresh rows too.

    measure: the one in which the confidence was observed. inf: that exit takes no row. The last exit takes all.
    Raises ValueError for an epsilon or delta outside its range, and where there are too few rows or texts for them.
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
        each_delta = delta / observed.confidence.shape[1]
        _check_size(observed.groups, epsilon, each_delta)
        taus = [tau_with_confidence(*column, observed.groups, epsilon, each_delta) for column in columns]
    return Threshold((*taus, -math.inf), measure)


# ---- The paper's rule ----
def tau(confidence: np.ndarray, agrees: np.ndarray, epsilon: float) -> float:
    """Section 3.3.1: the lowest confidence from which on a share of at least epsilon of the rows agrees.

    confidence, agrees: (N,). inf where there is none. Rows of equal confidence stay together.

    >>> tau(np.array([0.2, 0.5, 0.7, 0.9]), np.array([True, False, True, True]), 0.7)
    0.2
    """
    order = np.argsort(confidence, kind="stable")
    return _tau(confidence[order], agrees[order], np.ones(len(order)), epsilon)


def _tau(confidence: np.ndarray, agrees: np.ndarray, counts: np.ndarray, epsilon: float) -> float:
    """tau of ascending confidences, each row standing there `counts` times."""
    share = _from_here_on(counts * agrees) / _from_here_on(counts)
    first_of_ties = np.diff(confidence, prepend=-np.inf) > 0
    qualifies = np.flatnonzero(first_of_ties & (share >= epsilon))
    return float(confidence[qualifies[0]]) if len(qualifies) else math.inf


def _from_here_on(values: np.ndarray) -> np.ndarray:
    return values[::-1].cumsum()[::-1]


def intervals(observed: Observed, epsilon: float, resamples: int = TAU_RESAMPLES, seed: int = 0) -> np.ndarray:
    """How far chance moves the paper's tau, at 95 %: percentile bootstrap over groups, (K - 1, 2) ends."""
    random = np.random.default_rng(seed)
    names, group = np.unique(observed.groups, return_inverse=True)
    order = np.argsort(observed.confidence, axis=0, kind="stable")
    taus = np.empty((resamples, observed.confidence.shape[1]))
    for drawn in taus:
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))[group]
        for k, column in enumerate(order.T):
            rows = column[times[column] > 0]
            drawn[k] = _tau(observed.confidence[rows, k], observed.agrees[rows, k], times[rows], epsilon)
    return np.quantile(taus, [0.025, 0.975], axis=0, method="inverted_cdf").T  # between 1 and inf there is no middle


# ---- The rule with confidence delta ----
def tau_with_confidence(
    confidence: np.ndarray, agrees: np.ndarray, groups: np.ndarray, epsilon: float, delta: float
) -> float:
    """The lowest confidence down to which every cut passes; inf where the first fails, or could not pass at all.

    confidence, agrees, groups: (N,). With probability 1 - delta over the draw of the groups, rows at least so sure
    agree in a share of at least epsilon. The first cut holds f rows: START of all, and as many as would pass delta
    squared if all agreed, which leaves room for some that do not; where there are too few for that, delta.
    Why, for single rows without ties: a threshold is bad if its rows agree in less than epsilon; at the ends of a
    stretch of bad ones they agree in epsilon exactly. If the f-th row is outside, a bad tau has passed the cut at the
    next stretch, with probability delta at most. If it is inside, the first cut has passed. Let u be the share of rows
    as sure and q(u) = u^f P(f such rows pass) <= delta u^f, the same at the ends: the f-th row is at u and passes with
    density (N over f) (1 - u)^(N - f) q'(u), by parts at most delta times its chance to be there. The tests enumerate.
    """
    order = np.argsort(-confidence, kind="stable")
    confidence, agrees, groups = confidence[order], agrees[order], groups[order]
    cuts = np.diff(confidence, append=-np.inf) < 0  # behind the last of a group of ties
    cuts[: math.ceil(START * len(cuts)) - 1] = False
    best = agreement_p_values(np.ones_like(agrees), groups, epsilon)
    roomy = cuts & (best <= delta**2)
    cuts = np.flatnonzero(roomy if roomy.any() else cuts & (best <= delta))
    passed = fixed_sequence(agreement_p_values(agrees, groups, epsilon)[cuts], delta)
    return float(confidence[cuts[passed - 1]]) if passed else math.inf


def check_guarantee(epsilon: float, delta: float | None) -> None:
    """Raise ValueError where no thresholds can guarantee this, whatever the rows are."""
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
    """Raise TooFew where not even full agreement would pass."""
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
POLICY = "exit_logit"  # the measure that the rule Policy is on

COMPARED_DELTA = 0.05  # delta of the thresholds that a conformal cut is compared with


def conformal(observed: Observed, epsilon: float, measure: str = "max_probability") -> Rule:
    """One cut for all exits: a fresh row leaves with the last exit's answer with probability epsilon at least.

    The probability is over the draw of the calibration rows and of the fresh one together; a text counts by the share
    of its tokens. measure: the one in which the confidence was observed, POLICY for a policy's. Raises ValueError for
    an epsilon outside (0, 1) and for confidences that are no numbers, TooFew where no cut but infinity would do.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be above 0 and below 1 for a conformal guarantee, got {epsilon}")
    if not np.isfinite(observed.confidence).all():
        raise ValueError("every confidence must be a finite number, found NaN or infinity: did the model diverge?")
    needed = math.ceil(1 / (1 - epsilon) - 1 - ROUNDING)
    count = len(np.unique(observed.groups))
    if count < needed:
        raise TooFew(f"at least {needed} rows or texts are needed for epsilon {epsilon}, got {count}", needed)
    return above(conformal_cut(observed, epsilon), measure)


def conformal_cut(observed: Observed, epsilon: float) -> float:
    """tau: who leaves where the confidence is above it keeps the guarantee (shared calibration of CAT, in the form of
    conformal risk control, Angelopoulos et al. 2024, which takes texts too).

    A row is lost at tau, at worst, where an exit that disagrees is surer than tau: where M, the largest confidence of
    its exits that disagree, is above it. tau is the smallest with (losses + 1) / (n + 1) <= 1 - epsilon over n rows: of
    single rows the ceil(epsilon (n + 1))-th smallest M. -inf where no M matters, inf where n is too small.
    """
    worst = np.where(observed.agrees, -np.inf, observed.confidence).max(axis=1)
    names, group, sizes = np.unique(observed.groups, return_inverse=True, return_counts=True)
    order = np.argsort(-worst, kind="stable")
    lost = np.cumsum(1 / sizes[group[order]])
    bearable = (1 - epsilon) * (len(names) + 1) - 1 + ROUNDING
    if bearable < 0:
        return math.inf
    too_many = np.flatnonzero(lost > bearable)
    return float(worst[order[too_many[0]]]) if len(too_many) else -math.inf


def above(tau: float, measure: str) -> Rule:
    """The rule that lets leave who is above tau, strictly, in float32 too."""
    if measure == POLICY:
        cut = 1 / (1 + math.exp(-tau)) if tau > -30 else math.exp(tau)
        while Policy(cut).least_logit < tau:
            cut = math.nextafter(cut, 1)
        return Policy(cut)
    if math.isinf(tau):
        return Threshold(tau, measure)
    threshold = float(np.nextafter(np.float32(tau), np.float32(np.inf)))
    return Threshold(threshold if threshold <= THRESHOLD_LIMITS[measure][1] else math.inf, measure)


def agreement_by_sets(observed: Observed, epsilon: float, sets: int = 1000, seed: int = 0) -> dict:
    """The mean agreement on fresh groups, those in no set, over so many calibration sets: by the conformal cut, the
    paper's thresholds and those of confidence COMPARED_DELTA, all three on the same sets.
    """
    shares, each_delta = np.zeros((sets, 3)), COMPARED_DELTA / observed.confidence.shape[1]
    for at, drawn in enumerate(calibration_sets(observed, sets, seed)):
        some, fresh = observed.take(drawn), observed.take(~drawn)
        columns = list(zip(some.confidence.T, some.agrees.T))
        cut = np.nextafter(conformal_cut(some, epsilon), np.inf, dtype=some.confidence.dtype)  # strictly above it
        taus = [tau(*column, epsilon) for column in columns]
        stricter = [tau_with_confidence(*column, some.groups, epsilon, each_delta) for column in columns]
        rules = (_Cuts(each) for each in ([cut] * len(columns), taus, stricter))
        shares[at] = [mean_of_groups(replay(fresh, rule).agrees, fresh.groups) for rule in rules]
    means = dict(zip(("conformal", "paper", "delta"), shares.mean(axis=0).tolist()))
    return {"sets": sets, "groups_a_set": len(np.unique(observed.groups)) // 4} | means


class _Cuts(Rule):
    """A threshold for each exit, on whichever measure was observed: rules of a name know the limits of theirs."""

    needs = "state"

    def __init__(self, cuts: Sequence[float]):
        self.cuts = cuts

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        return reading.exit_logit >= self.cuts[k]


def calibration_sets(observed: Observed, sets: int, seed: int) -> Iterator[np.ndarray]:
    """So many seeded quarters of the groups, as masks (N,) of rows. Raises ValueError for fewer groups than four."""
    random, names = np.random.default_rng(seed), np.unique(observed.groups)
    if len(names) < 4:
        raise ValueError(f"{A_SET}: expected at least 4, found {len(names)}")
    for _ in tqdm(range(sets), desc="calibration sets", delay=2):
        yield np.isin(observed.groups, random.permutation(names)[: len(names) // 4])


# ---- What fresh rows show ----
class Outcome(NamedTuple):
    """What a rule does with N observed rows."""

    exit_index: np.ndarray  # (N,)
    agrees: np.ndarray  # (N,) bool: whether the row exits with the last exit's answer


def replay(observed: Observed, rule: Rule) -> Outcome:
    """The loop on observed rows. rule: on the measure that was observed."""
    last = np.ones((len(observed.agrees), 1), bool)
    agrees = np.concatenate((observed.agrees, last), axis=1)[:, :, None]  # as logits, which the loop gathers
    count = agrees.shape[1]
    measures = {getattr(rule, "measure", POLICY): observed.confidence}
    segments = Recorded((*range(1, count + 1),), agrees, np.zeros((*agrees.shape[:2], 2)), [1] * count, measures)
    result = early_exit(segments, rule, range(len(agrees)))
    return Outcome(result.exit_index, result.logits[:, 0])


def end_to_end(observed: Observed, rule: Rule) -> float:
    """The share of rows that exit with the full model's answer, each at its own exit."""
    return float(replay(observed, rule).agrees.mean())


def mean_of_groups(values: np.ndarray, groups: np.ndarray) -> float:
    """The mean over groups of their own means."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return float((np.bincount(group, values) / sizes).mean())


def agreement(observed: Observed, rule: Threshold) -> list[float | None]:
    """For every exit but the last: the share of rows at or above its threshold that agree. None: no row is."""
    shares = []
    for confidence, agrees, threshold in zip(observed.confidence.T, observed.agrees.T, rule.threshold):
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
    """How often a guarantee is broken on new groups: the share of so many calibration sets, for each of the two rules.

    A set is a seeded quarter of the groups; fresh are the others. Broken: at some exit the fresh rows that are sure
    enough agree in a share below epsilon. Raises TooFew where a quarter is too little for epsilon and delta.
    """
    rules = {"paper": None} if delta is None else {"paper": None, "delta": delta}
    broken = dict.fromkeys(rules, 0)
    for drawn in calibration_sets(observed, sets, seed):
        for name, each in rules.items():
            try:
                rule = calibrate(observed.take(drawn), epsilon, each, measure)
            except TooFew as error:
                raise TooFew(f"{A_SET}: {error}", 4 * error.needed) from None
            shares = agreement(observed.take(~drawn), rule)
            broken[name] += any(share is not None and share < epsilon for share in shares)
    of_sets = {name: count / sets for name, count in broken.items()}
    return {"sets": sets, "groups_a_set": len(np.unique(observed.groups)) // 4} | of_sets


# ---- From a record to a rule and its JSON answer: `mini-ee calibrate` ----
def observe(recorded: Record, measure: str = "max_probability") -> Observed:
    """What the exits but the last predict of recorded units: rows are groups of their own, tokens belong to a text."""
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
    """Thresholds of all exits from recorded units that they were not trained on: the rule, and the JSON answer.

    A seeded half of the rows or texts gives the thresholds, the other half shows how often they agree.
    tau_intervals: how far chance moves the paper's thresholds; None with delta, whose thresholds allow for chance.
    sets: how many for `broken_guarantees`. Raises ValueError if there are too few, with the number that would do.
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
    """The same with one conformal cut for all exits. sets: how many for `agreement_by_sets`."""
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
    answer |= {"thresholds": [rule.to_dict()[rule.knob]] * last, "tau_intervals": None}
    answer["agreement"] = [float(agrees.mean()) if len(agrees) else None for agrees in exited]
    answer["end_to_end"] = mean_of_groups(outcome.agrees, fresh.groups)
    answer |= _figures(recorded, rule, drawn)
    if sets:
        answer["kept"] = agreement_by_sets(observed, epsilon, sets, seed)
    return rule, answer


def _half(observed: Observed, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Names of the rows or texts, and which units (N,) are of a seeded half of them."""
    names = np.unique(observed.groups)
    if len(names) < 2:
        raise ValueError(f"expected at least 2 rows or texts, some to calibrate on and some to check, got {len(names)}")
    chosen = names[np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]]
    return names, np.isin(observed.groups, chosen)


def _figures(recorded: Record, rule: Rule, drawn: np.ndarray) -> dict:
    """Where the units exit that the thresholds were not taken from, and how many there are of both halves."""
    result = recorded.replay(rule)
    return {
        "exit_counts": np.bincount(result.exit_index[~drawn], minlength=len(recorded.segments.exits)).tolist(),
        "rows_calibration": int(drawn.sum()),
        "rows_fresh": int((~drawn).sum()),
        "mean_layers": float(result.layers_run[~drawn].mean()),
    }


def _intervals(calibration: Observed, epsilon: float) -> list[list[float | str]]:
    """As JSON, which has no inf."""
    ends = intervals(calibration, epsilon).tolist()
    return [[end if np.isfinite(end) else str(end) for end in pair] for pair in ends]
