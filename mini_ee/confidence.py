"""How sure an exit is: pure numpy functions of its logits. Larger means surer, for every measure.

logits are (B, C) with C >= 2, of any float dtype, computed in float32 at least; each function returns (B,).
All raise ValueError for C < 2: a regression output says nothing of its own certainty.

    measure               source                           range
    max_probability       LoRAExit, Right-Tool             [1/C, 1]
    entropy               DeeBERT, negated, in nats        [-ln C, 0]
    normalised_entropy    FastBERT, negated                [-1, 0]
    breaking_ties         self-supervised exits, Eq. 2     [0, 1]      largest minus second largest probability
    breaking_ties_logits  the same on logits               [0, inf)
"""

import math

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(B, C) -> (B, C), in float32 at least."""
    logits = _checked(logits)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _checked(logits: np.ndarray) -> np.ndarray:
    """The logits in float32 at least, or ValueError where they are not those of two classes or more."""
    logits = np.asarray(logits)
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
    """Minus the entropy of the softmax, in nats. A probability of zero adds nothing."""
    log_p = log_softmax(logits)
    p = np.exp(log_p)
    return (p * np.where(p > 0, log_p, 0)).sum(axis=1)


def normalised_entropy(logits: np.ndarray) -> np.ndarray:
    """Minus the entropy of the softmax over ln C, its largest value."""
    return np.maximum(entropy(logits) / math.log(np.shape(logits)[1]), -1)  # rounding would pass the end of the range


def breaking_ties(logits: np.ndarray) -> np.ndarray:
    """The largest softmax probability minus the second largest."""
    return _gap(np.exp(log_softmax(logits)))


def breaking_ties_logits(logits: np.ndarray) -> np.ndarray:
    """The largest logit minus the second largest, which is the log of the ratio of their probabilities."""
    return _gap(log_softmax(logits))


def _gap(values: np.ndarray) -> np.ndarray:
    second, first = np.partition(values, -2, axis=1)[:, -2:].T
    return first - second


# ---- The same as ONNX nodes: of logits (B, C) float32, (B,); g is an export.builder.Builder ----
def graph_max_probability(g, logits: str) -> str:
    """max_probability."""
    return g.op("ReduceMax", g.op("Softmax", logits, axis=1), g.integers(1), keepdims=0)


def graph_entropy(g, logits: str) -> str:
    """entropy."""
    log_p = g.op("LogSoftmax", logits, axis=1)
    p = g.op("Exp", log_p)
    zero = g.constant("scalar_0", np.zeros((), np.float32))
    terms = g.op("Where", g.op("Greater", p, zero), g.op("Mul", p, log_p), zero)
    return g.op("ReduceSum", terms, g.integers(1), keepdims=0)


def graph_normalised_entropy(g, logits: str) -> str:
    """normalised_entropy."""
    largest = g.op("Log", g.cast(g.op("Squeeze", g.shape(logits, 1, 2)), np.float32))
    least = g.constant("least", np.float32(-1).reshape(()))
    return g.op("Max", g.op("Div", graph_entropy(g, logits), largest), least)


def graph_breaking_ties(g, logits: str) -> str:
    """breaking_ties."""
    return graph_breaking_ties_logits(g, g.op("Softmax", logits, axis=1))


def graph_breaking_ties_logits(g, logits: str) -> str:
    """breaking_ties_logits."""
    largest, _ = g.several(2, "TopK", logits, g.integers(2), axis=1)
    first, second = g.several(2, "Split", largest, axis=1, num_outputs=2)
    return g.op("Squeeze", g.op("Sub", first, second), g.integers(1))


GRAPH_MEASURES = {
    "max_probability": graph_max_probability,
    "entropy": graph_entropy,
    "normalised_entropy": graph_normalised_entropy,
    "breaking_ties": graph_breaking_ties,
    "breaking_ties_logits": graph_breaking_ties_logits,
}

MEASURES = {
    "max_probability": (max_probability, 0.0, 1.0),
    "entropy": (entropy, -np.inf, 0.0),
    "normalised_entropy": (normalised_entropy, -1.0, 0.0),
    "breaking_ties": (breaking_ties, 0.0, 1.0),
    "breaking_ties_logits": (breaking_ties_logits, 0.0, np.inf),
}
"""name -> (function, smallest and largest threshold that makes sense)."""
