"""Will early exit pay for a model and its data? An estimate before any training.

probes.py computes what every layer predicts: for tokens of a decoder through its own head, for rows through linear
probes or nearest neighbours. This file computes what is saved if a unit (token or row) exits early.

The question is from Wei, Du, Yu, Tiwari, Li, Xu, Wang 2026, "The Diminishing Returns of Early-Exit Decoding in Modern
LLMs", arXiv:2603.23701v1. They find that newer models gain less than older ones, because their layers are less
redundant. They score a model by their own metric; this file instead computes the savings on the given data. The model
is not trained, so training its layers or its heads may change the answer.

Symbols:   N units, L layers; h: FLOPs of one head divided by FLOPs of one layer.
           saved = 1 - mean layers run / L; net of heads, 1 - mean (layers run + h heads read) / (L + h).
           With a gate a unit reads one head.
Not counted: computing the keys and values of layers that a token skips, and lower efficiency of smaller batches.
"""

import math
from typing import NamedTuple

import numpy as np

from mini_ee.lab.calibration import Observed, end_to_end, replay
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.probes import MIN_PROBED, Costs, ProbeResult
from mini_ee.lab.rules import Threshold

TARGET_AGREEMENT = 0.95  # with the last layer
MIN_SAVED, MIN_ORACLE = 0.10, 0.25  # shares of all FLOPs that exits (lower end) and an oracle must save to pay
CHANCE = 3  # standard errors by which a probe must exceed the accuracy of the most frequent label
MIN_GAIN = 0.005  # share of all FLOPs that a further exit must save
SAVINGS_RESAMPLES = 200


def settled_layers(agrees: np.ndarray) -> np.ndarray:
    """(N, L - 1) bool -> (N,): the first layer from which on all layers agree with the last. An oracle exits there.

    >>> settled_layers(np.array([[True, False, True], [True, True, True], [False, False, False]]))
    array([3, 1, 4])
    """
    differs = ~agrees[:, ::-1]
    return np.where(differs.any(axis=1), agrees.shape[1] - differs.argmax(axis=1) + 1, 1)


def threshold_at(observed: Observed, level: float = TARGET_AGREEMENT) -> Threshold:
    """The lowest threshold, the same for all exits but the last, with end-to-end agreement of at least `level`.

    A threshold per exit would overfit the units that it is taken from: on other units it saved less.
    """
    taus = [-math.inf, *np.unique(observed.confidence), math.inf]  # with inf no unit exits early, and all agree
    # Bisection. Invariant: taus[high] reaches the level, and taus[low] does not, or low is -1.
    low, high = -1, len(taus) - 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = end_to_end(observed, _same_threshold(observed, taus[middle])) >= level
        low, high = (low, middle) if reached else (middle, high)
    return _same_threshold(observed, taus[high])


def _same_threshold(observed: Observed, tau: float) -> Threshold:
    return Threshold((float(tau),) * observed.agrees.shape[1] + (-math.inf,))


class Savings(NamedTuple):
    """What a rule saves, and its end-to-end agreement."""

    agreement: float
    saved: float  # share of the layers
    net_saved: float  # share of the FLOPs, heads included


def savings_at(observed: Observed, rule: Threshold, exits: tuple[int, ...], costs: Costs) -> Savings:
    """exits: the layer of each column of `observed`, then the last layer."""
    exit_index, agrees = replay(observed, rule)
    layers, last = np.array(exits)[exit_index].mean(), exits[-1]
    heads = 1.0 if costs.read_once else (exit_index + 1).mean()
    net = 1 - (costs.start + layers + costs.head * heads) / (costs.start + last + costs.head)
    return Savings(float(agrees.mean()), float(1 - layers / last), float(net))


def at_exits(observed: Observed, exits: tuple[int, ...]) -> Observed:
    """The columns of these exits, without the last, from columns of exits after all layers."""
    before = np.array(exits[:-1], int) - 1
    return Observed(observed.confidence[:, before], observed.agrees[:, before], observed.groups)


def estimate(observed: Observed, exits: tuple[int, ...], costs: Costs, seed: int) -> dict:
    """What exits after these layers save at the threshold of TARGET_AGREEMENT, with 95% intervals, as JSON.

    observed: units at exits after all layers. The threshold is chosen on the same units, so `kept`, their agreement
    with the last layer, is at least TARGET_AGREEMENT. The exits must be chosen on other units: the best of many sets on
    some units is worse on others. The intervals are percentiles of a bootstrap over texts or rows, which draws a text
    with all its tokens, because tokens of a text are not independent; each resample chooses its own threshold.
    """
    answer = {"exits": list(exits), "agreement": TARGET_AGREEMENT, "kept": 1.0}
    answer |= dict.fromkeys(("saved", "low", "high", "net_saved", "net_low", "net_high"), 0.0)
    if len(exits) == 1:
        return answer
    observed, random = at_exits(observed, exits), np.random.default_rng(seed)
    members = _members(observed)

    def once(units: Observed) -> Savings:
        return savings_at(units, threshold_at(units), exits, costs)

    estimated, drawn = once(observed), []
    for _ in range(SAVINGS_RESAMPLES):
        rows = np.concatenate([members[at] for at in random.integers(len(members), size=len(members))])
        drawn.append(once(observed.take(rows)))
    low, high = (Savings(*ends) for ends in np.quantile(drawn, (0.025, 0.975), axis=0).tolist())
    answer |= {"kept": estimated.agreement, "saved": estimated.saved, "low": low.saved, "high": high.saved}
    return answer | {"net_saved": estimated.net_saved, "net_low": low.net_saved, "net_high": high.net_saved}


def _members(observed: Observed) -> list[np.ndarray]:
    """The indices of the units of each text or row."""
    # A stable sort puts the units of a group next to each other; the list is split where the group changes.
    order = np.argsort(observed.groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(observed.groups[order])) + 1)


def few_exits(observed: Observed, costs: Costs) -> tuple[tuple[int, ...], float]:
    """(exits, net savings): greedily adds the exit that saves most FLOPs, until none adds MIN_GAIN. Ends with L."""
    last, chosen, best = observed.agrees.shape[1] + 1, (), 0.0

    def net(exits: tuple[int, ...]) -> float:
        some = at_exits(observed, exits)
        return savings_at(some, threshold_at(some), exits, costs).net_saved

    while others := [layer for layer in range(1, last) if layer not in chosen]:
        tried = {exits: net(exits) for exits in (tuple(sorted((*chosen, layer, last))) for layer in others)}
        exits = max(tried, key=lambda exits: tried[exits])
        if tried[exits] < best + MIN_GAIN:
            break
        chosen, best = exits[:-1], tried[exits]
    return (*chosen, last), best


def suitability(probed: ProbeResult, seed: int = 0) -> dict:
    """The JSON answer of `mini-ee estimate`.

    settle_layer: the first layer from which on every layer's agreement with the last is at least TARGET_AGREEMENT.
    oracle_counts: number of units by the layer at which they settle. oracle_saved: if each unit exits there.
    oracle_net_saved: the same with heads, at the exits that `few_exits` chooses for the oracle. The entry few_exits:
    exits chosen on half of the texts or rows, drawn with the seed; their savings are measured on the other half.
    Raises WrongArguments for too few texts or rows, ValueError if a confidence is not finite.
    """
    observed, names = probed.observed, np.unique(probed.observed.groups)
    if len(names) < MIN_PROBED:
        raise WrongArguments(f"expected at least {MIN_PROBED} texts or rows, found {len(names)}; give more")
    if not np.isfinite(observed.confidence).all():
        raise ValueError("the layers' logits are not finite: the weights are damaged; download the model again")
    layers, settled = observed.agrees.shape[1] + 1, settled_layers(observed.agrees)
    agreement, every = [*observed.agrees.mean(axis=0).tolist(), 1.0], tuple(range(1, layers + 1))
    settles = settled[:, None] <= np.array(every[:-1])  # (N, L - 1): an oracle's confidence is 1 from there on
    first = np.isin(observed.groups, np.random.default_rng(seed).permutation(names)[: len(names) // 2])
    few, _ = few_exits(observed.take(first), probed.costs)
    answer = {
        "how": probed.probe,
        "layers": layers,
        "agreement": agreement,
        "settle_layer": max((layer for layer in every if agreement[layer - 1] < TARGET_AGREEMENT), default=0) + 1,
        "oracle_counts": np.bincount(settled, minlength=layers + 1)[1:].tolist(),
        "oracle_saved": float(1 - settled.mean() / layers),
        "oracle_net_saved": few_exits(Observed(settles * 1.0, settles, observed.groups), probed.costs)[1],
        "head_layers": probed.costs.head,
        "start_layers": probed.costs.start,
        "read_once": probed.costs.read_once,
        "estimate": estimate(observed, every, probed.costs, seed),
        "few_exits": estimate(observed.take(~first), few, probed.costs, seed),
    }
    if probed.accuracy is not None:
        answer |= {"accuracy": probed.accuracy, "majority": probed.majority}
    return answer | {"advice": advice(answer, len(names))}


def advice(answer: dict, count: int) -> str:
    """One sentence, with its cut-offs. count: number of rows on which accuracy was measured."""
    layers, settle, few = (answer[key] for key in ("layers", "settle_layer", "few_exits"))
    if "accuracy" in answer:
        most, error = max(answer["accuracy"]), math.sqrt(answer["majority"] * (1 - answer["majority"]) / count)
        if most < answer["majority"] + CHANCE * error:
            return (
                f"There is no answer before training: no layer predicts the labels. Accuracy of the best probe is "
                f"{most:.1%}, of the most frequent label {answer['majority']:.1%} (cut-off {CHANCE} standard errors "
                f"more)."
            )
    text = "no exit saves more than its head costs"
    if len(few["exits"]) > 1:
        text = (
            f"exiting after layer {' or '.join(map(str, few['exits'][:-1]))} saves {few['net_saved']:.0%} "
            f"({few['net_low']:.0%} to {few['net_high']:.0%}) of the FLOPs, heads included, "
            f"and {few['kept']:.1%} agree with the last layer"
        )
    extra = answer["head_layers"] + answer["start_layers"]
    cut, oracle = 1 - (settle + extra) / (layers + extra), answer["oracle_net_saved"]
    if cut > 0 and cut >= few["net_saved"]:
        return (
            f"Remove the upper layers instead: from layer {settle} of {layers} on, every layer agrees with the last "
            f"for {TARGET_AGREEMENT:.0%} or more. To end the model there saves {cut:.0%} of the FLOPs; {text}."
        )
    cut_off = f"cut-off {MIN_SAVED:.0%} at the lower end"
    if few["net_low"] >= MIN_SAVED:
        return f"Early exit should pay: {text}; {cut_off}."
    if oracle >= MIN_ORACLE:
        return (
            f"Early exit may pay once exits are trained: an oracle would save {oracle:.0%} (cut-off {MIN_ORACLE:.0%}), "
            f"but without training {text} ({cut_off})."
        )
    return (
        f"Early exit will hardly pay: without training {text} ({cut_off}), and an oracle would save only {oracle:.0%} "
        f"(cut-off {MIN_ORACLE:.0%})."
    )
