"""Solutions of chapter 5."""

import math

import numpy as np


def threshold(confidence, agrees, epsilon):
    """Try each confidence that occurs, and keep the lowest that is enough."""
    enough = [c for c in np.unique(confidence) if agrees[confidence >= c].mean() >= epsilon]
    return min(enough, default=math.inf)


def best_probability(penalty, vocabulary):
    """The derivative is 0 where ln(p (V - 1) / (1 - p)) = ((1 - lambda) / lambda) / p; bisect for it."""
    low, high = 1 / vocabulary, 1 - 1e-12
    for _ in range(200):
        p = (low + high) / 2
        if math.log(p * (vocabulary - 1) / (1 - p)) < (1 - penalty) / penalty / p:
            low = p  # the right side falls and the left side rises with p
        else:
            high = p
    return p
