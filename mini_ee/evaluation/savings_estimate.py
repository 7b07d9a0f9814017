"""Will early exit pay for a model and its data? Asked before anything is trained, of what the layers say already.

probes.py reads every layer as the last one is read: a decoder's tokens through its own head, rows through probes that
their labels fit, or through their neighbours. Here is counted what follows, if a unit (token or row) leaves early.

That one should ask, and that newer models gain less than older ones because their layers repeat each other less: Wei,
Du, Yu, Tiwari, Li, Xu, Wang 2026, "The Diminishing Returns of Early-Exit Decoding in Modern LLMs", arXiv:2603.23701v1.
They score a model by a metric of their own, which is not here; here is counted what would be saved on the data at hand.
The model stays as it is: what training makes of its layers, and of heads, is for the reader to try.

Symbols:   N units, L layers; h: what one head costs, in layers, by operations.
           saved = 1 - mean layers run / L; net of heads, 1 - mean (layers run + h heads read) / (L + h).
Not counted: the keys and values of layers that a token skips, and what is slower in a smaller batch.
"""

import math
from typing import NamedTuple

import numpy as np

from mini_ee.calibration import Observed, end_to_end, replay
from mini_ee.errors import WrongArguments
from mini_ee.evaluation.probes import MIN_PROBED, Costs, ProbeResult
from mini_ee.rules import Threshold

TARGET_AGREEMENT = 0.95  # of agreement with the last layer
PAYS, ROOM = 0.10, 0.25  # of all operations: what exits have to save at the lower end, and an oracle
CHANCE = 3  # standard errors above the most frequent label, from which on a probe knows something
LEAST_GAIN = 0.005  # of all operations: an exit that brings less is not among the few
SAVINGS_RESAMPLES = 200


def settled_layers(agrees: np.ndarray) -> np.ndarray:
    """(N, L - 1) bool -> (N,): the first layer from which on all say what the last does. There an oracle leaves.

    >>> settled_layers(np.array([[True, False, True], [True, True, True], [False, False, False]]))
    array([3, 1, 4])
    """
    differs = ~agrees[:, ::-1]
    return np.where(differs.any(axis=1), agrees.shape[1] - differs.argmax(axis=1) + 1, 1)


def threshold_at(observed: Observed, level: float = TARGET_AGREEMENT) -> Threshold:
    """One threshold for all exits but the last, so low that a share of `level` agrees end to end, by bisection.

    One, since thresholds of their own fit themselves to the units that they are taken from: on others they saved less.
    """
    taus = [-math.inf, *np.unique(observed.confidence), math.inf]  # all leave at once; nobody does, and all agree
    low, high = -1, len(taus) - 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = end_to_end(observed, _everywhere(observed, taus[middle])) >= level
        low, high = (low, middle) if reached else (middle, high)
    return _everywhere(observed, taus[high])


def _everywhere(observed: Observed, tau: float) -> Threshold:
    return Threshold((float(tau),) * observed.agrees.shape[1] + (-math.inf,))


class Savings(NamedTuple):
    """What a rule saves, and at which agreement."""

    agreement: float  # end to end
    saved: float
    net_saved: float


def savings_at(observed: Observed, rule: Threshold, exits: tuple[int, ...], costs: Costs) -> Savings:
    """exits: the layers that the columns of `observed` belong to, and the last."""
    exit_index, agrees = replay(observed, rule)
    layers, read, last = np.array(exits)[exit_index].mean(), (exit_index + 1).mean(), exits[-1]
    net = 1 - (costs.start + layers + costs.head * read) / (costs.start + last + costs.head)
    return Savings(float(agrees.mean()), float(1 - layers / last), float(net))


def at_exits(observed: Observed, exits: tuple[int, ...]) -> Observed:
    """Of exits after all layers those after these; the last is passed over."""
    before = np.array(exits[:-1], int) - 1
    return Observed(observed.confidence[:, before], observed.agrees[:, before], observed.groups)


def estimate(judged: Observed, exits: tuple[int, ...], costs: Costs, seed: int) -> dict:
    """What exits after these layers save if a share of TARGET_AGREEMENT agrees with the last layer.

    judged: units at exits after all layers. The threshold is taken from them, so TARGET_AGREEMENT or more agree there
    (`kept`). The exits must not be: many sets are tried, and the best on some units is worse on others. The 95 %
    intervals are percentiles of a bootstrap over texts or rows, in which the threshold is taken anew.
    """
    answer = {"exits": list(exits), "agreement": TARGET_AGREEMENT, "kept": 1.0}
    answer |= dict.fromkeys(("saved", "low", "high", "net_saved", "net_low", "net_high"), 0.0)
    if len(exits) == 1:  # the last
        return answer
    judged, random = at_exits(judged, exits), np.random.default_rng(seed)
    members = _members(judged)

    def once(units: Observed) -> Savings:
        return savings_at(units, threshold_at(units), exits, costs)

    found, drawn = once(judged), []
    for _ in range(SAVINGS_RESAMPLES):
        rows = np.concatenate([members[at] for at in random.integers(len(members), size=len(members))])
        drawn.append(once(judged.take(rows)))
    low, high = (Savings(*ends) for ends in np.quantile(drawn, (0.025, 0.975), axis=0).tolist())
    answer |= {"kept": found.agreement, "saved": found.saved, "low": low.saved, "high": high.saved}
    return answer | {"net_saved": found.net_saved, "net_low": low.net_saved, "net_high": high.net_saved}


def _members(observed: Observed) -> list[np.ndarray]:
    """The units of each text or row."""
    order = np.argsort(observed.groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(observed.groups[order])) + 1)


def few_exits(taken: Observed, costs: Costs) -> tuple[tuple[int, ...], float]:
    """(the layers that are worth a head, and the last; what they save net): each in turn the one that saves most."""
    last, chosen, best = taken.agrees.shape[1] + 1, (), 0.0

    def net(exits: tuple[int, ...]) -> float:
        some = at_exits(taken, exits)
        return savings_at(some, threshold_at(some), exits, costs).net_saved

    while others := [layer for layer in range(1, last) if layer not in chosen]:
        tried = {exits: net(exits) for exits in (tuple(sorted((*chosen, layer, last))) for layer in others)}
        exits = max(tried, key=tried.get)
        if tried[exits] < best + LEAST_GAIN:
            break
        chosen, best = exits[:-1], tried[exits]
    return (*chosen, last), best


def suitability(probed: ProbeResult, seed: int = 0) -> dict:
    """The JSON answer.

    settle_layer: the first from which on every layer agrees with the last for a share of TARGET_AGREEMENT.
    oracle_counts: units by the layer at which they settle; oracle_saved: if each left there; oracle_net_saved: the same
    at the few exits that an oracle finds worth their heads. Without an oracle half of the texts or rows, drawn with the
    seed, choose the few exits; what these save is counted on the other half.
    Raises WrongArguments for too few texts or rows, ValueError where what is said is no numbers.
    """
    observed, names = probed.observed, np.unique(probed.observed.groups)
    if len(names) < MIN_PROBED:
        raise WrongArguments(f"expected at least {MIN_PROBED} texts or rows to judge by, found {len(names)}; give more")
    if not np.isfinite(observed.confidence).all():
        raise ValueError("what the layers say is no numbers: the weights are damaged; fetch the model again")
    layers, settled = observed.agrees.shape[1] + 1, settled_layers(observed.agrees)
    agreement, every = [*observed.agrees.mean(axis=0).tolist(), 1.0], tuple(range(1, layers + 1))
    stays = settled[:, None] <= np.array(every[:-1])
    first = np.isin(observed.groups, np.random.default_rng(seed).permutation(names)[: len(names) // 2])
    few, _ = few_exits(observed.take(first), probed.costs)
    answer = {
        "how": probed.how,
        "layers": layers,
        "agreement": agreement,
        "settle_layer": max((layer for layer in every if agreement[layer - 1] < TARGET_AGREEMENT), default=0) + 1,
        "oracle_counts": np.bincount(settled, minlength=layers + 1)[1:].tolist(),
        "oracle_saved": float(1 - settled.mean() / layers),
        "oracle_net_saved": few_exits(Observed(stays * 1.0, stays, observed.groups), probed.costs)[1],
        "head_layers": probed.costs.head,
        "start_layers": probed.costs.start,
        "estimate": estimate(observed, every, probed.costs, seed),
        "few_exits": estimate(observed.take(~first), few, probed.costs, seed),
    }
    if probed.accuracy is not None:
        answer |= {"accuracy": probed.accuracy, "majority": probed.majority}
    return answer | {"advice": advice(answer, len(names))}


def advice(answer: dict, count: int) -> str:
    """One sentence, with the cut-offs that it goes by. count: of the rows that an accuracy is of."""
    layers, settle, few = (answer[key] for key in ("layers", "settle_layer", "few_exits"))
    if "accuracy" in answer:
        most, error = max(answer["accuracy"]), math.sqrt(answer["majority"] * (1 - answer["majority"]) / count)
        if most < answer["majority"] + CHANCE * error:
            return (
                f"It cannot be told before training: no layer knows the labels, the best probe is right for {most:.1%} "
                f"and the most frequent label for {answer['majority']:.1%} (cut-off {CHANCE} standard errors more)."
            )
    found = "no exit is worth its head"
    if len(few["exits"]) > 1:
        found = (
            f"leaving after layer {' or '.join(map(str, few['exits'][:-1]))} saves {few['net_saved']:.0%} "
            f"({few['net_low']:.0%} to {few['net_high']:.0%}) of the operations, heads counted, "
            f"where {few['kept']:.1%} agree with the last layer"
        )
    beside = answer["head_layers"] + answer["start_layers"]
    cut, oracle = 1 - (settle + beside) / (layers + beside), answer["oracle_net_saved"]
    if cut > 0 and cut >= few["net_saved"]:
        return (
            f"Cut it rather than let it exit: from layer {settle} of {layers} on every layer agrees with the last for "
            f"{TARGET_AGREEMENT:.0%} or more, and to end there saves {cut:.0%} of the operations; {found}."
        )
    bar = f"cut-off {PAYS:.0%} at the lower end"
    if few["net_low"] >= PAYS:
        return f"Early exit should pay: {found}; {bar}."
    if oracle >= ROOM:
        return (
            f"It may pay once exits are trained: an oracle would save {oracle:.0%} (cut-off {ROOM:.0%}), but as it is "
            f"{found} ({bar})."
        )
    return (
        f"It will hardly pay: as it is {found} ({bar}), and an oracle would save but {oracle:.0%} (cut-off {ROOM:.0%})."
    )
