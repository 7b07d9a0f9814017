"""Hardness of examples: ConsistentEE's memorized layer compared with other measures of hardness (Table 1).

`mini-ee evaluate RUN --hardness` prints it for a run of any method: the correlation with the loss of the same examples,
and with the number of times that the training forgot a held-out example.

Paper: arXiv:2312.11882v2, mini_ee/consistent.py.
"""

from typing import Any

import numpy as np
import torch

from mini_ee.consistent import exit_losses, memorized_layer
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.recording import Record, record
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.stages import weighted_by_depth
from mini_ee.lab.training.train_run import trained_on


def hardness_of(logits: np.ndarray, labels: np.ndarray, exits: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The memorized layer of every example, (N,) in layers, and its loss by Eq. 1, (N,) in nats.

    logits (N, K, C), labels (N,) class indices, exits in layers.
    """
    right = torch.from_numpy(logits.argmax(axis=2) == labels[:, None])
    losses = exit_losses(torch.from_numpy(logits), torch.from_numpy(labels))
    return memorized_layer(right, torch.tensor(exits)).numpy(), weighted_by_depth(losses.T, exits).numpy()


def forgetting_events(right: np.ndarray) -> np.ndarray:
    """How often a right prediction is wrong in the next epoch (Toneva et al. 2019): (epochs, N) bool -> (N,).

    >>> forgetting_events(np.array([[True, True], [False, True], [True, True], [False, True]]))
    array([2, 0])
    """
    return (right[:-1] & ~right[1:]).sum(axis=0)


def hardness_correlations(memorized: np.ndarray, losses: np.ndarray, events: np.ndarray) -> dict[str, float]:
    """Table 1: Spearman's correlation of the memorized layer with the loss and with forgetting events, all (N,)."""
    return {"loss": spearman(memorized, losses), "forgetting events": spearman(memorized, events)}


def hardness(recorded: Record, rows: Split) -> dict:
    """The memorized layer of examples with classes, and its correlation with their loss."""
    assert rows.labels is not None
    memorized, losses = hardness_of(recorded.logits, rows.labels, recorded.segments.exits)
    report = {
        "memorized_layer": memorized.tolist(),
        "mean_memorized_layer": float(memorized.mean()),
        "spearman_loss": spearman(memorized, losses),
    }
    if kinds := rows.hardness:
        report["known"] = {kind: float(memorized[np.array(kinds) == kind].mean()) for kind in dict.fromkeys(kinds)}
    return report


def hardness_in_training(run: Any, task: Task, batch_size: int) -> dict | None:
    """Table 1 on the held-out examples that selected the best epoch; None if the run has no record of them."""
    folder = getattr(run, "folder", None)
    path = folder and folder / "metrics.json"
    if not path or not path.is_file():
        return None
    metrics = read_json(path)
    wrong = [epoch["wrong"] for epoch in metrics["epochs"] if "wrong" in epoch]
    if not trained_on(run, task):
        return None
    selection = split_rows(task, run.config["seed"], run.config["training"].get("max_train")).selection
    if metrics.get("rows_held") != len(selection):
        return None
    right = np.ones((len(wrong), len(selection)), bool)
    for epoch, rows in enumerate(wrong):
        right[epoch, rows] = False
    events = forgetting_events(right)
    if not events.any():
        return None
    recorded = record(run.segments(), run.encode(selection.texts), batch_size)
    assert selection.labels is not None
    memorized, losses = hardness_of(recorded.logits, selection.labels, run.exits)
    return {
        "rows": len(selection),
        "epochs": len(wrong),
        "forgotten": int((events > 0).sum()),
        "spearman": hardness_correlations(memorized, losses, events),
    }
