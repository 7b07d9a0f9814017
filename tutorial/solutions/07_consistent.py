"""Solutions of chapter 7."""

import numpy as np


def exit_probabilities(stopping):
    """A sentence reaches an exit with the product of the probabilities of going on before it; at the last it stops."""
    reached = np.cumprod([1, *(1 - np.asarray(stopping))])
    return reached * [*stopping, 1]


def best_exits(losses, depths, alpha):
    """The largest of Eq. 3."""
    return (-losses - alpha * depths).argmax(axis=1)
