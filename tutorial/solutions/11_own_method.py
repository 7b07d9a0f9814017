"""Solutions of chapter 11."""

import numpy as np


def target(predictions, labels):
    """Without labels the method can also learn from texts of production; CAT and BERxiT use this target."""
    return (predictions[:, :-1] == predictions[:, -1:]).astype(float)


def oracle_layers(right, exits):
    """argmax finds the first correct exit."""
    first = np.where(right.any(axis=1), right.argmax(axis=1), right.shape[1] - 1)
    return float(np.asarray(exits)[first].mean())
