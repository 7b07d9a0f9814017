"""Right-Tool (Schwartz et al. 2020): joint, then a temperature for each exit."""

import numpy as np
import torch

from mini_ee.baselines.joint import joint
from mini_ee.training.fit import Data, Stage
from mini_ee.units.recording import record
from mini_ee.units.rows import MultiExit

CALIBRATION_BATCH = 64


# ---- Right-Tool ----
def right_tool(model: MultiExit) -> list[Stage]:
    """Joint; then a temperature for each exit, fitted on the hold-out."""
    return [stage._replace(finish=calibrate) for stage in joint(model)]


def calibrate(model: MultiExit, held: Data) -> None:
    """Divide the logits of every exit by its temperature, in the weights of its head. Regression has nothing to do."""
    if model.num_labels == 1:
        return
    logits = record(model.segments(), held.encoded, CALIBRATION_BATCH).logits
    with torch.no_grad():
        for k, head in enumerate(model.heads):
            temperature = fit_temperature(logits[:, k], held.labels)
            head.out.weight /= temperature
            head.out.bias /= temperature


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature, from 1/10 to 10, under which the labels are likeliest (Guo et al. 2017).

    logits (N, C), labels (N,). The loss is convex in 1 / temperature: where its slope changes sign is found by halving.
    """
    logits = np.asarray(logits, np.float64)
    margins = logits - logits[np.arange(len(labels)), labels][:, None]  # over the label's own

    def slope(inverse: float) -> float:
        """Of the mean cross-entropy by the inverse temperature: the expected margin."""
        p = np.exp(inverse * (logits - logits.max(axis=1, keepdims=True)))
        return float(((p * margins).sum(axis=1) / p.sum(axis=1)).mean())

    low, high = np.log(0.1), np.log(10.0)  # of the inverse
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(np.exp(middle)) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))
