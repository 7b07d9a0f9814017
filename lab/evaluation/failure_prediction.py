"""How well an exit's confidence predicts its failures (EEFP), and its calibration error (ECE). No torch.

Sources: EEFP: Kubaty et al. 2025, arXiv:2508.21495v3: "accounts for both prediction correctness and the cost of further
         computation". ECE: Guo et al. 2017, arXiv:1706.04599v2, Eq. 3.

Deviation: the paper's equation was not at hand, only its abstract. Here an exit fails on an example if its prediction
is wrong and that of a later exit is right. If no later exit is right, further computation is in vain.

Confidences are (N, K) floats, larger is more confident; right is (N, K) bool, whether the prediction of the exit is
right. For decoders without labels, right means equal to the last exit.
"""

import numpy as np

from mini_ee.lab.data.metrics import ranks

BINS = 15  # of the calibration error, as in Guo et al.


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a random positive has a larger score than a random negative; a tie counts one half.

    scores (N,), positive (N,) bool. NaN if all or none are positive.

    >>> auroc([0.9, 0.6, 0.6, 0.1], [True, True, False, False])
    0.875
    """
    positive = np.asarray(positive, bool)
    positives, lost = positive.sum(), (~positive).sum()
    if not positives or not lost:
        return float("nan")
    return float((ranks(scores)[positive].sum() - positives * (positives + 1) / 2) / (positives * lost))


def failures(right: np.ndarray) -> np.ndarray:
    """(N, K) -> (N, K) bool: the exit is wrong and a later exit is right. The last exit never fails.

    >>> failures(np.array([[False, True, False], [False, False, False]])).tolist()
    [[True, False, False], [False, False, False]]
    """
    later = np.logical_or.accumulate(right[:, ::-1], axis=1)[:, ::-1]  # this exit or a later one is right
    return later & ~right


def early_exit_failure_prediction(confidences: np.ndarray, right: np.ndarray) -> np.ndarray:
    """EEFP of each exit but the last, (K - 1,): the AUROC of its confidence for not failing.

    1: every example on which the exit fails has a smaller confidence than all others; 0.5: chance. NaN for an exit that
    fails on all examples or on none. A table shows np.nanmean of it.
    """
    fine = ~failures(np.asarray(right, bool))
    return np.array([auroc(confidences[:, k], fine[:, k]) for k in range(fine.shape[1] - 1)])


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """ECE of one exit: the mean over examples of |accuracy - mean confidence| of the bin of the example.

    confidence (N,): largest probabilities, in [0, 1]; right (N,) bool. Bin m contains ((m - 1) / bins, m / bins].
    """
    confidence = np.asarray(confidence, np.float64)
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=np.asarray(right, np.float64) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))
