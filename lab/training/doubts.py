"""Warnings about a training, in sentences: before it about the data, after it about the result."""

from pathlib import Path

import numpy as np

from mini_ee.lab.data.tasks import Split, Task

FEW, FEW_HELD = 100, 100  # with fewer train, or held-out, examples the figures are uncertain
DOMINANT = 0.9  # share of the train examples that have one label
MANY = 20  # more numbers as labels may be meant as a regression


def of_data(task: Task) -> list[str]:
    """Warnings before the training: how a file was split, copies of train examples in other splits, and numbers that
    are read as classes.
    """
    lines = []
    if task.options.split_file is not None:
        sizes = " and ".join(f"{len(rows)} in {name}" for name, rows in task.splits.items())
        lines.append(f"{Path(task.folder).name} was split with seed {task.options.split_file}: {sizes}.")
    lines += [line for name, rows in task.splits.items() if name != "train" and (line := of_copies(task, name, rows))]
    if len(task.label_names) > MANY and all(map(_is_number, task.label_names)):
        lines.append(
            f"The labels are {len(task.label_names)} different numbers and are read as classes; see --regression."
        )
    return lines


def of_copies(task: Task, split: str, rows: Split) -> str | None:
    """A warning if the train split contains some examples of a split word for word, else None."""
    seen = int(task.seen_in_train(rows).sum())
    if not seen:
        return None
    return (
        f"{seen} of {len(rows)} examples of {task.name} {split} are in train word for word: a score on them "
        f"does not show what the model does with new text."
    )


def of_result(task: Task, train_labels: np.ndarray, held_labels: np.ndarray, predictions: np.ndarray) -> list[str]:
    """Why the figures on the held-out examples are uncertain. predictions: (N,), those under the default rule."""
    lines = []
    if len(train_labels) < FEW or len(held_labels) < FEW_HELD:
        lines.append(
            f"These figures are uncertain: {len(held_labels)} held-out examples show accuracy to about "
            f"{100 / np.sqrt(len(held_labels)):.0f} points, after a training on {len(train_labels)} examples."
        )
    if task.regression or task.multi_label or task.token_kind:
        return lines
    counts = np.bincount(train_labels, minlength=task.num_labels)
    most, share = int(counts.argmax()), counts.max() / len(train_labels)
    if share >= DOMINANT:
        lines.append(
            f"{share:.1%} of the train examples have the label {task.label_names[most]}: a model that always predicts "
            f"it has an accuracy of {np.mean(held_labels == most):.1%} on the held-out examples."
        )
    if (predictions == predictions[0]).all():
        lines.append(
            f"The model predicts {task.label_names[int(predictions[0])]} for every held-out example, so the layers "
            f"saved mean nothing: train on more examples, for more --epochs or with another --lr."
        )
    return lines


def of_majority(task: Task, predicted: np.ndarray, labels: np.ndarray | None) -> str | None:
    """A warning about a full model that is no better than one label for all examples; labels: None if not known.

    predicted, labels: (N,) class indices of held-out examples. Without labels, the warning is of a model that predicts
    one label for a share DOMINANT of them.
    """
    if task.regression or not len(predicted):
        return None
    values, counts = np.unique(predicted if labels is None else labels, return_counts=True)
    most, share = int(values[counts.argmax()]), counts.max() / len(predicted)
    label = "the same labels" if task.multi_label or task.token_kind else task.label_names[most]
    if labels is None:
        warning = (
            f"The model predicts {label} for {share:.1%} of the held-out texts: so often a constant agrees with it."
        )
        return warning if share >= DOMINANT else None
    accuracy = float(np.mean(predicted == labels))
    return (
        f"The full model is no better than a constant: its accuracy on {len(labels)} held-out examples is "
        f"{accuracy:.1%}, and {share:.1%} of them have the label {label}."
        if accuracy <= share
        else None
    )


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True
