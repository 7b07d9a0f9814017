"""Right-Tool (Schwartz et al. 2020, arXiv:2004.07453v2): joint training, then a temperature for each exit.

An example exits if the calibrated maximum probability reaches a threshold.
"""

import numpy as np
import torch

from mini_ee.lab.exits.row_exits import RowData, RowExits
from mini_ee.lab.recording import record
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import joint_stage

CALIBRATION_BATCH = 64


def calibrate_heads(model: RowExits, held_out: RowData) -> None:
    """Divide the logits of every exit by its temperature, in the weights of its head."""
    logits = record(model.segments(), held_out.encoded, CALIBRATION_BATCH).logits
    with torch.no_grad():
        for k, head in enumerate(model.heads):
            temperature = fit_temperature(logits[:, k], held_out.labels)
            head.out.weight /= temperature
            head.out.bias /= temperature


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature, from 1/10 to 10, with the smallest cross-entropy of the labels (Guo et al. 2017).

    logits (N, C), labels (N,). The loss is convex in 1 / temperature: bisection finds where its slope changes sign.
    """
    logits = np.asarray(logits, np.float64)
    margins = logits - logits[np.arange(len(labels)), labels][:, None]  # minus the logit of the label

    def slope(inverse: float) -> float:
        """The derivative of the mean cross-entropy by the inverse temperature: the expected margin."""
        p = np.exp(inverse * (logits - logits.max(axis=1, keepdims=True)))
        return float(((p * margins).sum(axis=1) / p.sum(axis=1)).mean())

    low, high = np.log(0.1), np.log(10.0)  # logarithms of the inverse temperature
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(np.exp(middle)) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


METHOD = Method(
    recipe=lambda model, config: [joint_stage(model, finish=calibrate_heads)],
    units=("rows",),
    classes_only=True,
)
