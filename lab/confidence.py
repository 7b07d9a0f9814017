"""Confidence measures: numpy functions of the logits of an exit. For every measure larger means more confident.

Logits are (B, C) with C >= 2, of any float dtype, and computed in float32 at least; each function returns (B,). The
same code also runs on graph values (lab/export/tracing.py). All raise ValueError for C < 2: the output of a regression
has no confidence.

    measure               source                           range
    max_probability       LoRAExit, Right-Tool             [1/C, 1]
    entropy               DeeBERT, negated, in nats        [-ln C, 0]
    normalised_entropy    FastBERT, negated                [-1, 0]
    breaking_ties         self-supervised exits, Eq. 2     [0, 1]      largest minus second largest probability
    breaking_ties_logits  the same on logits               [0, inf)

If an input may have several labels at once, each logit is that of a sigmoid, and one measure suits:

    weakest_label         this project                     [.5, 1]     probability of the least confident of C decisions
"""

import math
from collections.abc import Sequence

import numpy as np

from mini_ee.lab.segments import check_finite


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(B, C) -> (B, C), in float32 at least."""
    logits = _checked(logits)
    if not isinstance(logits, np.ndarray):  # a graph value: ONNX has this operator
        return logits.log_softmax(axis=1)
    shifted = logits - logits.max(axis=1, keepdims=True)  # so that exp does not overflow
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _checked(logits: np.ndarray) -> np.ndarray:
    """The logits in float32 at least. Raises ValueError if there are fewer than two classes."""
    logits = logits if hasattr(logits, "__array_ufunc__") else np.asarray(logits)  # a graph value must stay one
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"confidence needs logits of shape (B, C) with at least 2 classes, found {logits.shape}: "
            f"a regression task takes the rules fixed and patience"
        )
    return logits.astype(np.float32) if logits.itemsize < 4 else logits


def max_probability(logits: np.ndarray) -> np.ndarray:
    """The largest softmax probability.

    >>> max_probability(np.zeros((1, 4)))
    array([0.25])
    """
    logits = _checked(logits)
    return np.reciprocal(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))


def entropy(logits: np.ndarray) -> np.ndarray:
    """Minus the entropy of the softmax, in nats: larger is more confident."""
    log_p = log_softmax(logits)
    p = np.exp(log_p)
    # If p is 0, ln p may be -inf, and 0 x -inf is NaN; the limit of p ln p is 0.
    return (p * np.where(p > 0, log_p, 0)).sum(axis=1)


def normalised_entropy(logits: np.ndarray) -> np.ndarray:
    """Minus the entropy of the softmax over ln C, its largest value."""
    return np.maximum(entropy(logits) / math.log(np.shape(logits)[1]), -1)  # rounding may leave the range


def breaking_ties(logits: np.ndarray) -> np.ndarray:
    """The largest softmax probability minus the second largest."""
    return _gap(np.exp(log_softmax(logits)))


def breaking_ties_logits(logits: np.ndarray) -> np.ndarray:
    """The largest logit minus the second largest: the logarithm of the ratio of their probabilities."""
    return _gap(log_softmax(logits))


def weakest_label(logits: np.ndarray) -> np.ndarray:
    """Of several labels at once, the probability of the decision that is nearest to its boundary: sigmoid(min |z|).

    >>> weakest_label(np.log([[4.0, 1 / 9]]))
    array([0.8])
    """
    return np.reciprocal(1 + np.exp(-abs(_checked(logits)).min(axis=1)))


def _gap(values: np.ndarray) -> np.ndarray:
    second, first = np.partition(values, -2, axis=1)[:, -2:].T  # (B, 2).T: the two largest, ascending
    return first - second


MEASURES = {
    "max_probability": (max_probability, 0.0, 1.0),
    "entropy": (entropy, -np.inf, 0.0),
    "normalised_entropy": (normalised_entropy, -1.0, 0.0),
    "breaking_ties": (breaking_ties, 0.0, 1.0),
    "breaking_ties_logits": (breaking_ties_logits, 0.0, np.inf),
}
"""name -> (function, smallest and largest useful threshold)."""

LABEL_MEASURES = {"weakest_label": (weakest_label, 0.5, 1.0)}
"""The same for several labels at once."""

OF_LOGITS = MEASURES | LABEL_MEASURES


def named(logits: np.ndarray, names: Sequence[str], multi_label: bool = False) -> tuple[list, list]:
    """What each row of logits (N, C) predicts, and its confidence: a label and its probability.

    Without names, a regression: the number, and None. multi_label: the labels with a probability above .5 as a dict
    name -> probability, the most likely first; and `weakest_label`. Raises ValueError if a logit is not finite.
    """
    check_finite(logits)
    if not names:
        return logits[:, 0].tolist(), [None] * len(logits)
    if not multi_label:
        return [names[best] for best in logits.argmax(axis=1)], max_probability(logits).tolist()
    order, probabilities = np.argsort(-logits, axis=1, kind="stable"), sigmoid(logits)
    labels = [
        {names[at]: float(each[at]) for at in by_size if row[at] > 0}
        for row, each, by_size in zip(logits, probabilities, order)
    ]
    return labels, weakest_label(logits).tolist()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) of each number, without overflow."""
    return np.exp(-np.logaddexp(0, -logits))
