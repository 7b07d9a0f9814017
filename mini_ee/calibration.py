"""Thresholds that keep a promise: how sure an exit must be, so that it agrees with the full model as often as epsilon.

Source: Valade 2024, Accelerating Large Language Model Inference with Self-Supervised Early Exits, section 3.3. An exit
agrees (Eq. 3) where its likeliest token, or class, is that of the last exit; no label is needed. The paper's tau
keeps the promise on the rows that it was taken from. On fresh rows chance breaks it, for half of all calibration sets
or more; with `delta` it is broken for a share of delta of them at most (Angelopoulos et al. 2021, Learn then Test;
Schuster et al. 2022, CALM): cuts are tested one after the other from the strictest down, until the first that fails.

A group is what was drawn independently: a text with all its tokens, or a classifier's row. The test of a cut is

    groups of one row   exact binomial (Clopper & Pearson 1934)
    larger groups       a bet against the promise, text by text (Waudby-Smith & Ramdas 2023): whoever bets on
                        sum_texts (agreeing - epsilon rows) at fair odds is not rich by luck. It holds for any dependence
                        within a text, if no text that is still to come has more rows than the longest here.

The price of the second is that a text where every row is wrong must be ruled out: it takes hundreds of texts.

Symbols:   N rows, K exits, of which the first K - 1 are calibrated; epsilon: the least share that agrees, in (0, 1];
           delta: the chance that the promise is broken, over all K - 1 exits together.
"""

import math
from typing import NamedTuple

import numpy as np

from mini_ee.confidence import MEASURES
from mini_ee.evaluation import Record, predictions
from mini_ee.rules import Threshold

START = 0.05  # share of the rows in the strictest cut that is tested
BETS = np.array([1, 1 / 2, 1 / 4, 1 / 8])  # of the capital, at risk where a longest text is wrong throughout
STAKES = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])  # how the capital is divided among the bets
RESAMPLES = 1000


class Observed(NamedTuple):
    """What the exits but the last said of N rows, whatever the rows are."""

    confidence: np.ndarray  # (N, K - 1), Eq. 2; larger means surer
    agrees: np.ndarray  # (N, K - 1) bool, Eq. 3
    groups: np.ndarray  # (N,), which text a row belongs to

    def take(self, rows: np.ndarray) -> "Observed":
        """Some of the rows: an index or a mask (N,)."""
        return Observed(*(each[rows] for each in self))


def observe(recorded: Record, measure: str = "max_probability") -> Observed:
    """What a classifier's exits say of recorded rows, each a group of its own."""
    function = MEASURES[measure][0]
    before_last = range(recorded.logits.shape[1] - 1)
    if not before_last:
        raise ValueError("there is nothing to calibrate: the model has one exit; train one with more")
    said = recorded.logits.argmax(axis=2)
    confidence = np.stack([function(recorded.logits[:, k]) for k in before_last], axis=1)
    return Observed(confidence, said[:, :-1] == said[:, -1:], np.arange(len(said)))


def calibrate(
    observed: Observed, epsilon: float, delta: float | None = None, measure: str = "max_probability"
) -> Threshold:
    """tau of every exit, as a rule: the paper's, or with `delta` one that keeps the promise on fresh rows too.

    measure: the one in which the confidence was observed. inf: that exit takes no row. The last exit takes all.
    Raises ValueError for an epsilon or delta outside its range, and where there are too few rows or texts for them.
    """
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon must be above 0 and at most 1, got {epsilon}")
    if not np.isfinite(observed.confidence).all():
        raise ValueError("every confidence must be a finite number, found NaN or infinity: did the model diverge?")
    if not observed.confidence.size:
        raise ValueError(f"expected rows and exits to calibrate on, found shape {observed.confidence.shape}")
    columns = zip(observed.confidence.T, observed.agrees.T, strict=True)
    if delta is None:
        taus = [tau(*column, epsilon) for column in columns]
    else:
        each_delta = _checked(delta, epsilon) / observed.confidence.shape[1]
        _check_size(observed.groups, epsilon, each_delta)
        taus = [tau_with_confidence(*column, observed.groups, epsilon, each_delta) for column in columns]
    return Threshold((*taus, -math.inf), measure)


# ---- The paper's rule ----


def tau(confidence: np.ndarray, agrees: np.ndarray, epsilon: float) -> float:
    """Section 3.3.1: the lowest confidence from which on at least a share epsilon of the rows agrees; inf: there is none.

    confidence, agrees: (N,). Rows of equal confidence stay together: no threshold lies between them.

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


def intervals(
    observed: Observed, epsilon: float, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """How far chance moves the paper's tau: percentile bootstrap over groups, (K - 1, 2) lower and upper ends."""
    random = np.random.default_rng(seed)
    names, group = np.unique(observed.groups, return_inverse=True)
    order = np.argsort(observed.confidence, axis=0, kind="stable")
    taus = np.empty((resamples, observed.confidence.shape[1]))
    for drawn in taus:
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))[group]
        for k, column in enumerate(order.T):
            rows = column[times[column] > 0]
            drawn[k] = _tau(observed.confidence[rows, k], observed.agrees[rows, k], times[rows], epsilon)
    ends = [(1 - level) / 2, (1 + level) / 2]
    return np.quantile(taus, ends, axis=0, method="inverted_cdf").T  # between 1 and inf there is no middle


# ---- The rule with confidence delta ----


def tau_with_confidence(
    confidence: np.ndarray, agrees: np.ndarray, groups: np.ndarray, epsilon: float, delta: float
) -> float:
    """The lowest confidence down to which every cut passes; inf where the first fails, or could not pass at all.

    confidence, agrees, groups: (N,). With probability 1 - delta over the draw of the groups, rows at least so sure
    agree in a share of at least epsilon. Why: let t be the highest threshold that breaks the promise. A tau below t
    has passed the cut at t, which is wrong with probability delta. The first cut holds START of the rows, and as many as
    could pass if all agreed: it is placed by the confidences, never by the agreement.
    """
    order = np.argsort(-confidence, kind="stable")
    confidence, agrees, groups = confidence[order], agrees[order], groups[order]
    cuts = np.diff(confidence, append=-np.inf) < 0  # behind the last of a group of ties
    cuts[: math.ceil(START * len(cuts)) - 1] = False
    cuts = np.flatnonzero(cuts & (p_values(np.ones_like(agrees), groups, epsilon) <= delta))
    passes = p_values(agrees, groups, epsilon)[cuts] <= delta
    passed = len(cuts) if passes.all() else passes.argmin()
    return float(confidence[cuts[passed - 1]]) if passed else math.inf


def p_values(agrees: np.ndarray, groups: np.ndarray, epsilon: float) -> np.ndarray:
    """For rows from the surest down, (N,): how likely the first n would agree so often if they did less than epsilon.

    agrees, groups: (N,). One value for each n = 1..N; at most 1.
    """
    if len(np.unique(groups)) == len(groups):
        return _binomial_tail(agrees, epsilon)
    return 1 / _capital(agrees, groups, epsilon)


def _binomial_tail(agrees: np.ndarray, epsilon: float) -> np.ndarray:
    """P(Binomial(n, epsilon) >= x_n), where x_n of the first n rows agree: each follows from the one before."""
    n, x = np.arange(len(agrees)), np.cumsum(agrees) - agrees  # before the row
    log_factorial = np.cumsum(np.log(np.maximum(np.arange(len(agrees) + 1), 1)))

    def probability(x):
        x = np.maximum(x, 0)
        ways = log_factorial[n] - log_factorial[x] - log_factorial[n - x]
        return np.exp(ways + x * math.log(epsilon) + (n - x) * math.log1p(-epsilon))

    rises = epsilon * probability(x - 1) * (x > 0)
    falls = (1 - epsilon) * probability(x)
    return np.clip(1 + np.cumsum(np.where(agrees, -falls, rises)), 0, 1)


def _capital(agrees: np.ndarray, groups: np.ndarray, epsilon: float) -> np.ndarray:
    """What a gambler owns who began with 1 and bets, for each text i, on agreeing_i - epsilon rows_i being positive.

    prod_i (1 + b (x_i - epsilon n_i) / (epsilon longest)), mixed over the bets b. If the first n rows, as a cut, agree
    in less than epsilon, each factor has an expectation below 1; so P(capital >= 1/delta) <= delta (Markov).
    """
    order = np.argsort(groups, kind="stable")
    names, begins, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    count = np.arange(len(order)) - np.repeat(begins, sizes) + 1
    total = np.concatenate(([0], np.cumsum(agrees[order])))
    agreeing = total[1:] - np.repeat(total[begins], sizes)
    gain = np.empty((2, len(order)))  # of the text, before and after the row
    gain[1, order] = (agreeing - epsilon * count) / (epsilon * sizes.max())
    gain[0, order] = (agreeing - agrees[order] - epsilon * (count - 1)) / (epsilon * sizes.max())
    with np.errstate(divide="ignore"):  # all is lost where a longest text is wrong throughout
        before, after = np.log1p(BETS[:, None, None] * gain).swapaxes(0, 1)
    wealth = np.log(STAKES)[:, None] + np.cumsum(after - before, axis=1)
    return np.maximum(np.exp(np.minimum(np.logaddexp.reduce(wealth), 700)), 1)


def _checked(delta: float, epsilon: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {delta}")
    if epsilon == 1:
        raise ValueError("epsilon 1 cannot be promised for fresh rows from any number of rows; take .99, or no delta")
    return delta


def _check_size(groups: np.ndarray, epsilon: float, delta: float) -> None:
    """Raise ValueError, with the number that is needed, where not even full agreement would pass."""
    perfect = p_values(np.ones(len(groups), bool), groups, epsilon)[-1]
    if perfect > delta:
        rows = np.unique(groups, return_counts=True)[1]
        if rows.max() == 1:
            kind, needed = "rows", math.ceil(math.log(delta) / math.log(epsilon))
        else:
            kind, needed = "texts like these", _texts_needed(rows, epsilon, delta)
        raise ValueError(
            f"too few to promise epsilon {epsilon} with this delta: at least {needed} {kind} are needed, "
            f"got {len(rows)}; calibrate on more, or lower epsilon, or leave delta out"
        )


def _texts_needed(rows: np.ndarray, epsilon: float, delta: float) -> int:
    """How many texts of these lengths make 1 / delta out of 1 if all rows agree."""
    growth = np.log1p(BETS[:, None] * (1 - epsilon) / epsilon * rows / rows.max()).mean(axis=1)
    low, high = len(rows), len(rows)
    while STAKES @ np.exp(high * growth) < 1 / delta:
        low, high = high, 2 * high
    texts = np.arange(low, high + 1)
    return int(texts[np.searchsorted(STAKES @ np.exp(np.outer(growth, texts)), 1 / delta)])


# ---- What is kept of the promise ----


def agreement(observed: Observed, rule: Threshold) -> list[float | None]:
    """For every exit but the last: the share of rows at or above its threshold that agree. None: no row is."""
    kept = []
    for confidence, agrees, threshold in zip(observed.confidence.T, observed.agrees.T, rule.threshold):
        sure = confidence >= threshold
        kept.append(float(agrees[sure].mean()) if sure.any() else None)
    return kept


def exit_indices(observed: Observed, rule: Threshold) -> np.ndarray:
    """(N,): the first exit whose threshold the row reaches, K - 1 where none; what early_exit finds."""
    sure = observed.confidence >= np.array(rule.threshold[:-1])
    return np.where(sure.any(axis=1), sure.argmax(axis=1), sure.shape[1])


def end_to_end(observed: Observed, rule: Threshold) -> float:
    """The share of rows that leave with the full model's answer, each at its own exit."""
    agrees = np.column_stack((observed.agrees, np.ones(len(observed.agrees), bool)))
    return float(agrees[np.arange(len(agrees)), exit_indices(observed, rule)].mean())


def report(calibration: Observed, fresh: Observed, rule: Threshold, epsilon: float, delta: float | None) -> dict:
    """The JSON answer: thresholds, and what is kept of the promise on rows that they were not taken from."""
    counts = np.bincount(exit_indices(fresh, rule), minlength=len(rule.threshold))
    return {
        "epsilon": epsilon,
        "delta": delta,
        "measure": rule.measure,
        "thresholds": rule.to_dict()["threshold"][:-1],
        "tau_intervals": [[_json(end) for end in ends] for ends in intervals(calibration, epsilon)],
        "agreement": agreement(fresh, rule),
        "end_to_end": end_to_end(fresh, rule),
        "exit_counts": counts.tolist(),
        "rows_calibration": len(calibration.groups),
        "rows_fresh": len(fresh.groups),
    }


def _json(value: float) -> float | str:
    """JSON has no inf."""
    return float(value) if np.isfinite(value) else str(value)


def calibrate_record(
    recorded: Record,
    epsilon: float,
    delta: float | None = None,
    measure: str = "max_probability",
    seed: int = 0,
) -> tuple[Threshold, dict]:
    """Calibrate a classifier on recorded rows that it was not trained on: the rule, and the JSON answer.

    A seeded half of the rows gives the thresholds, the other half says what they keep; end to end by the loop itself.
    """
    observed = observe(recorded, measure)
    drawn = np.random.default_rng(seed).permutation(len(observed.groups)) < len(observed.groups) // 2
    rule = calibrate(observed.take(drawn), epsilon, delta, measure)
    result = recorded.replay(rule)
    same = predictions(result.logits) == predictions(recorded.logits[:, -1])
    answer = report(observed.take(drawn), observed.take(~drawn), rule, epsilon, delta)
    return rule, answer | {
        "end_to_end": float(same[~drawn].mean()),
        "mean_layers": float(result.layers_run[~drawn].mean()),
    }
