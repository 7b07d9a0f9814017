"""A guarantee for rerankers: with confidence 1 - delta, at least a share epsilon of queries keep their k best texts.

Exits are chosen text by text, but the order is over all texts of a query, so a query is what was drawn independently
and what is counted: its loss is 1 if its k best texts are not those of the full model, in any order. A text exits early
if its number is low, by one threshold for all exits (`low_score` of confidence.py).

The test is Learn then Test (Angelopoulos et al. 2021): some queries propose thresholds, others test them from the
strictest down until one fails. The proposals do not depend on what is tested, and each test is exact: P(X <= the
queries that lost a text) for X ~ Binomial(queries, 1 - epsilon). It holds for queries like these, with as many texts.
"""

import math
from collections.abc import Iterator

import numpy as np

from mini_ee.calibrate import binomial_cdf, fixed_sequence
from mini_ee.lab.calibration import A_SET, MIN_RISK, TooFew
from mini_ee.lab.confidence import NUMBER_MEASURES
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.rankings import top_k_kept
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Rule, Threshold
from mini_ee.lab.sweep import from_loose_to_strict

PROPOSING = 0.2  # share of the calibrating queries that propose thresholds; the others test them
CANDIDATES = 50
(LOW_SCORE,) = NUMBER_MEASURES


def calibrate_top_k(
    recorded: Record, k: int, epsilon: float, delta: float, seed: int = 0, sets: int = 0
) -> tuple[Threshold, dict]:
    """(rule, JSON answer): the threshold that saves most among those that pass, from a random half of the queries.

    recorded: all exits of N pairs, with RANKED labels of the last exit. The other half of the queries only shows the
    share that keeps its top k. sets: number of calibration sets for `broken_top_k`. If no threshold passes, it is inf.
    Raises ValueError for an epsilon or a delta that no test can guarantee, and for too few queries.
    """
    drawn = next(_sets(recorded, 2, 1, seed))
    try:
        rule, tested = choose_threshold(recorded.take(drawn), k, epsilon, delta, seed)
    except TooFew as error:
        raise ValueError(
            f"too few to guarantee epsilon {epsilon} with delta {delta}: at least {2 * error.needed} queries with more "
            f"than {k} texts are needed (half of them to check), got {len(np.unique(recorded.labels['query']))}"
        ) from None
    fresh = recorded.take(~drawn)
    unchanged, result = queries_kept(fresh, rule, k), fresh.replay(rule)
    answer = {"top_k": k, "epsilon": epsilon, "delta": delta, "measure": LOW_SCORE}
    answer |= {"thresholds": [rule.to_dict()["threshold"]] * (len(recorded.segments.exits) - 1), "queries": tested}
    answer |= {"queries_fresh": len(unchanged), "end_to_end": float(unchanged.mean())}
    answer |= {"rows_calibration": int(drawn.sum()), "rows_fresh": int((~drawn).sum())}
    answer["exit_counts"] = np.bincount(result.exit_index, minlength=len(recorded.segments.exits)).tolist()
    answer["mean_layers"] = float(result.layers_run.mean())
    return rule, answer | ({"broken": broken_top_k(recorded, k, epsilon, delta, sets, seed)} if sets else {})


def choose_threshold(recorded: Record, k: int, epsilon: float, delta: float, seed: int = 0) -> tuple[Threshold, int]:
    """The loosest threshold down to which all proposals pass, and the number of queries that tested it."""
    if not (MIN_RISK <= 1 - epsilon < 1 and MIN_RISK <= delta < 1):
        raise ValueError(f"expected epsilon and delta above 0 and below 1 for a guarantee, got {epsilon} and {delta}")
    names = np.unique(recorded.labels["query"])
    proposing = np.random.default_rng(seed).permutation(names)[: math.ceil(PROPOSING * len(names))]
    proposes = np.isin(recorded.labels["query"], proposing)
    tested, needed = len(names) - len(proposing), math.ceil(math.log(delta) / math.log(epsilon))
    if tested < needed:
        enough = math.ceil(needed / (1 - PROPOSING)) + 1
        raise TooFew(f"expected at least {enough} queries to calibrate on for this guarantee, got {len(names)}", enough)
    proposed = from_loose_to_strict(Threshold(math.inf, LOW_SCORE), recorded.take(proposes), CANDIDATES)[::-1]
    testing, p_values = recorded.take(~proposes), list[float]()
    for rule in proposed:
        lost = int((~queries_kept(testing, rule, k)).sum())
        p_values.append(binomial_cdf(lost, tested, 1 - epsilon))
        if p_values[-1] > delta:
            break
    return proposed[fixed_sequence(p_values, delta) - 1], tested


def queries_kept(recorded: Record, rule: Rule, k: int) -> np.ndarray:
    """(Q,) bool: which queries keep the k best texts of the full model under a rule."""
    return top_k_kept(recorded.replay(rule).logits[:, 0], recorded.labels, k)


def broken_top_k(recorded: Record, k: int, epsilon: float, delta: float, sets: int = 1000, seed: int = 0) -> dict:
    """How often the guarantee is broken on new queries: the share of calibration sets, a random quarter of the queries
    each, after which less than epsilon of the other queries keep their top k. Raises TooFew as above.
    """
    broken, shares, layers, size = 0, 0.0, 0.0, 0
    for drawn in tqdm(_sets(recorded, 4, sets, seed), desc="calibration sets", total=sets, delay=2):
        try:
            rule, size = choose_threshold(recorded.take(drawn), k, epsilon, delta, seed)
        except TooFew as error:
            raise TooFew(f"{A_SET}: {error}", 4 * error.needed) from None
        fresh = recorded.take(~drawn)
        share = queries_kept(fresh, rule, k).mean()
        broken, shares = broken + (share < epsilon), shares + share
        layers += fresh.replay(rule).layers_run.mean()
    figures = {"sets": sets, "queries_tested": size, "delta": broken / sets}
    return figures | {"kept": float(shares / sets), "mean_layers": float(layers / sets)}


def _sets(recorded: Record, parts: int, sets: int, seed: int) -> Iterator[np.ndarray]:
    """`sets` random draws of one in `parts` queries, as masks (N,) of their rows."""
    random, names = np.random.default_rng(seed), np.unique(recorded.labels["query"])
    if len(names) < parts:
        raise ValueError(f"expected at least {parts} queries with more texts than the top k, got {len(names)}")
    for _ in range(sets):
        yield np.isin(recorded.labels["query"], random.permutation(names)[: len(names) // parts])
