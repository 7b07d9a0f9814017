"""Metrics of classification and regression, as in GLUE, in numpy.

Sources: accuracy, F1, Matthews, Pearson and Spearman by task: Wang et al. 2018, arXiv:1804.07461v3, table 1.
         Matthews for K classes: Gorodkin 2004, "Comparing two K-category assignments by a K-category
         correlation coefficient".

Every metric takes predictions (N,) and labels (N,), N >= 1, and returns a float; larger is better. If its denominator
is zero (only one class, a constant prediction), F1, Matthews and the correlations are 0.0. scikit-learn does the same
for the first two; its correlations are NaN.
"""

import re
from collections.abc import Sequence

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The share of examples whose prediction is the label, in [0, 1].

    >>> accuracy([1, 0, 1, 1], [1, 0, 0, 1])
    0.75
    """
    predictions, labels = _pair(predictions, labels)
    return float(np.mean(predictions == labels))


def majority(labels: np.ndarray) -> float:
    """The accuracy of always predicting the most frequent label (N,), N >= 1: the majority baseline.

    >>> majority([0, 1, 1, 2])
    0.5
    """
    _, labels = _pair(labels, labels)
    return float(np.unique(labels, return_counts=True)[1].max() / len(labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1, in [0, 1]; 0.0 if neither labels nor predictions have class 1.

    >>> f1([1, 1, 0, 0], [1, 0, 1, 0])
    0.5
    """
    predictions, labels = _pair(predictions, labels)
    predicted, positive = predictions == 1, labels == 1
    return _ratio(2.0 * np.sum(predicted & positive), np.sum(predicted) + np.sum(positive))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of class indices, for any number of classes, in [-1, 1]; 0.0 if there is only one class.

    >>> matthews([1, 1, 0, 0], [1, 0, 0, 0])
    0.5773502691896258
    """
    predictions, labels = _pair(predictions, labels)
    classes = np.union1d(predictions, labels)[:, None]
    predicted, actual = predictions == classes, labels == classes
    n, times_predicted, times_actual = len(labels), predicted.sum(1), actual.sum(1)
    covariance = n * np.sum(predicted & actual) - times_predicted @ times_actual
    variances = n**2 - times_predicted @ times_predicted, n**2 - times_actual @ times_actual
    return _ratio(covariance, np.sqrt(float(variances[0]) * float(variances[1])))


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation, in [-1, 1]; 0.0 if predictions or labels are constant.

    >>> pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    1.0
    """
    predictions, labels = _pair(predictions, labels)
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    x, y = predictions - predictions.mean(), labels - labels.mean()
    return float(np.clip(_ratio(x @ y, np.sqrt((x @ x) * (y @ y))), -1, 1))


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson's correlation of the ranks; ties share their average rank. 0.0 if predictions or labels are constant.

    >>> spearman([1.0, 2.0, 300.0], [0.1, 0.2, 0.3])
    1.0
    """
    predictions, labels = _pair(predictions, labels)
    return pearson(ranks(predictions), ranks(labels))


def rouge_l(text: str, reference: str) -> float:
    """Rouge-L (Lin 2004): F1 of the longest common subsequence of words, in [0, 1]; 0.0 without common words, 1.0 for
    equal texts.

    Precision is the subsequence's share of the text, recall its share of the reference. Words are runs of letters and
    digits in lower case, without stemming, as in the package rouge-score.

    >>> rouge_l("The cat sat.", "the cat was fat")
    0.5714285714285714
    """
    if text == reference:
        return 1.0
    words, others = (re.findall("[a-z0-9]+", string.lower()) for string in (text, reference))
    # row[j]: the longest common subsequence of the words so far and the first j words of the reference.
    row = [0] * (len(others) + 1)
    for word in words:
        above = row
        row = [0]
        for at, other in enumerate(others):
            row.append(above[at] + 1 if word == other else max(row[at], above[at + 1]))
    return _ratio(2.0 * row[-1], len(words) + len(others))


METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "pearson": pearson, "spearman": spearman}


def score(metric_names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of predictions (N,) and labels (N,). Raises ValueError for a name that is not in METRICS.

    >>> score(["accuracy", "f1"], [1, 1, 0, 0], [1, 0, 1, 0])
    {'accuracy': 0.5, 'f1': 0.5}
    """
    unknown = [name for name in metric_names if name not in METRICS]
    if unknown:
        raise ValueError(f"expected metrics among {', '.join(METRICS)}, found {unknown}")
    return {name: METRICS[name](predictions, labels) for name in metric_names}


def _pair(predictions: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 (N,). Raises ValueError unless they are 1-D, equally long, finite and not empty."""
    predictions, labels = np.asarray(predictions, float), np.asarray(labels, float)
    if predictions.ndim != 1 or predictions.shape != labels.shape or not len(labels):
        raise ValueError(
            f"expected predictions (N,) and labels (N,) with N >= 1, "
            f"found shapes {predictions.shape} and {labels.shape}"
        )
    if not (np.isfinite(predictions).all() and np.isfinite(labels).all()):
        raise ValueError("expected finite predictions and labels, found nan or inf; did training diverge?")
    return predictions, labels


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (N,) from 1; equal values share the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]  # cumsum: the last rank of each distinct value
