"""A guarantee on embeddings: with confidence 1 - delta, at least a share epsilon of new texts exits with an embedding
whose cosine to the full one is at least c. Whatever the distribution of the texts, which are drawn independently.

Rules are tested from the strictest on, until one fails (fixed_sequence of the core). They do not depend on the
texts that test them: either they are the fixed depths, from the last exit to the first, or other texts propose them.
The test of a rule is the exact binomial one, for the hypothesis that less than epsilon of the texts reach c.
"""

import math
from collections.abc import Sequence

import numpy as np

from mini_ee.calibrate import fixed_sequence
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.embedding_exits import reached_cosines
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Fixed, Never, Rule
from mini_ee.lab.statistics import binomial_cdf
from mini_ee.lab.sweep import from_loose_to_strict, knob

PROPOSING = 0.1  # share of the texts that proposes thresholds; the others test them
CANDIDATES = 40  # number of thresholds


def share_p_value(successes: int, count: int, epsilon: float) -> float:
    """P(at least as many successes) if a share epsilon of all texts is one: Binomial(count, epsilon)."""
    return float(1 - binomial_cdf(successes - 1, count, epsilon)) if successes else 1.0


def loosest_guaranteed(rules: Sequence[Rule], recorded: Record, cosine: float, epsilon: float, delta: float) -> Rule:
    """The last rule before the first that fails; rules from strict to loose, the first of them Never."""
    reached = [int((reached_cosines(recorded, rule) >= cosine).sum()) for rule in rules]
    p_values = [share_p_value(count, len(recorded.logits), epsilon) for count in reached]
    return rules[fixed_sequence(np.array(p_values), delta) - 1]


def candidates(rule: Rule, proposing: Record) -> list[Rule]:
    """Rules from strict to loose: other thresholds of an adaptive rule, else the fixed depths."""
    if knob(rule) is None:
        depths = reversed(range(len(proposing.segments.exits) - 1))
        return [Never(), *(Fixed(k) for k in depths)]
    return [Never(), *reversed(from_loose_to_strict(rule, proposing, CANDIDATES))]


def calibrate_cosine(
    recorded: Record, rule: Rule, cosine: float, epsilon: float, delta: float, seed: int = 0
) -> tuple[Rule, dict]:
    """(rule, JSON answer): the loosest setting of a rule with the guarantee. recorded: texts that trained nothing.

    Raises WrongArguments with the number needed, if there are too few texts for epsilon and delta.
    """
    count = len(recorded.logits)
    drawn = np.zeros(count, bool)
    if knob(rule) is not None:
        drawn[np.random.default_rng(seed).permutation(count)[: math.ceil(PROPOSING * count)]] = True
    testing = recorded.take(~drawn)
    needed = math.ceil(math.log(delta) / math.log(epsilon))  # epsilon^n <= delta, if all texts reach the cosine
    if len(testing.logits) < needed:
        share = 1 - PROPOSING if drawn.any() else 1
        raise WrongArguments(
            f"too few texts to guarantee epsilon {epsilon} with delta {delta}: at least {math.ceil(needed / share)} "
            f"are needed, got {count}; give more, or lower epsilon"
        )
    chosen = loosest_guaranteed(candidates(rule, recorded.take(drawn)), testing, cosine, epsilon, delta)
    result, reached = testing.replay(chosen), reached_cosines(testing, chosen)
    return chosen, {
        "guarantee": "cosine",
        "cosine": cosine,
        "epsilon": epsilon,
        "delta": delta,
        "rule": chosen.to_dict(),
        "share": float((reached >= cosine).mean()),
        "mean_cosine": float(reached.mean()),
        "mean_layers": float(result.layers_run.mean()),
        "exit_counts": np.bincount(result.exit_index, minlength=len(testing.segments.exits)).tolist(),
        "rows_calibration": int(drawn.sum()),
        "rows_tested": len(testing.logits),
    }
