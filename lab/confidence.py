"""Confidence measures with their ranges; the functions: mini_ee/rules.py. Larger always means more confident.

Logits are (B, C) with C >= 2, of any float dtype, and computed in float32 at least; each function returns (B,). The
same code also runs on graph values (lab/export/tracing.py).

When an input may have several labels at once, each logit belongs to a sigmoid, and one measure applies:

    weakest_label         this project                     [.5, 1]     probability of the least confident of C decisions

If a model ranks texts by one number (C = 1), a text with a low number is surely not among the best:

    low_score             this project                     any         minus the number

If tokens have labels, or a span is looked for, engines compute the measure weakest_token of token_tasks.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_ee.lab.segments import check_finite
from mini_ee.lab.token_tasks import WEAKEST
from mini_ee.rules import MEASURES as FUNCTIONS
from mini_ee.rules import max_probability


def weakest_label(logits: np.ndarray) -> np.ndarray:
    """Of several labels at once, the probability of the decision that is nearest to its boundary: sigmoid(min |z|).

    >>> weakest_label(np.log([[4.0, 1 / 9]]))
    array([0.8])
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"expected logits (N, C) of at least 2 classes, found {logits.shape}")
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    return np.reciprocal(1 + np.exp(-abs(logits).min(axis=1)))


def low_score(logits: np.ndarray) -> np.ndarray:
    """Of one number, minus that number.

    >>> low_score(np.array([[2.0], [-1.5]]))
    array([-2. ,  1.5])
    """
    if logits.ndim != 2 or logits.shape[1] != 1:
        raise ValueError(f"expected logits (N, 1), found {logits.shape}")
    return -logits[:, 0]


_RANGES = {
    "max_probability": (0.0, 1.0),
    "entropy": (-np.inf, 0.0),
    "normalised_entropy": (-1.0, 0.0),
    "breaking_ties": (0.0, 1.0),
    "breaking_ties_logits": (0.0, np.inf),
}
MEASURES = {name: (function, *_RANGES[name]) for name, function in FUNCTIONS.items()}
"""name -> (function, smallest and largest useful threshold)."""

LABEL_MEASURES = {"weakest_label": (weakest_label, 0.5, 1.0)}
"""The same for several labels at once."""

NUMBER_MEASURES = {"low_score": (low_score, -np.inf, np.inf)}
"""The same for one number."""

OF_LOGITS = MEASURES | LABEL_MEASURES | NUMBER_MEASURES


def usual_measure(multi_label: bool, of_tokens: bool) -> str:
    """The measure of a model that gives a text one label, several at once, or labels to its tokens."""
    return WEAKEST if of_tokens else "weakest_label" if multi_label else "max_probability"


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
        {names[at]: float(row_probabilities[at]) for at in by_size if row[at] > 0}
        for row, row_probabilities, by_size in zip(logits, probabilities, order)
    ]
    return labels, weakest_label(logits).tolist()


def labels_of(one: Any, logits: np.ndarray, inputs: Any) -> tuple[list, list]:
    """What a Run or a Runtime answers for rows of these logits, and the confidences: `named`, or the labels of tokens.

    inputs: the rows, as data/tokenizer.py has them.
    """
    if one.token_task is None:
        return named(logits, one.label_names, one.multi_label)
    return one.token_task.answers(logits, inputs, one.tokenizer, one.label_names)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) of each number, without overflow."""
    return np.exp(-np.logaddexp(0, -logits))
