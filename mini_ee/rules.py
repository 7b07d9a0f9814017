"""Exit rules: which rows (examples or tokens) stop at which exit. At the last exit all rows stop. No torch.

    plan(inputs) -> (N,) exit index, or None      decided before the model runs; None: the rule decides at the exits
    stop(k, read, memory) -> (N,) bool            decided at exit k. read: what `needs` names, of the rows still running
    needs                                         "logits" (N, C), "exit_logit" (N,) of a policy, or None

`memory` is empty at the first exit. `stop` may put arrays by row into it; the loop keeps the entries of the rows that
go on. A rule has no state of its own: one rule serves many batches. To write a rule: a class with `plan` or `stop`.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np

Memory = dict[str, np.ndarray]


# ---- How confident is an exit? (N, C) logits -> (N,); larger is more confident ----
def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(N, C) -> (N, C), in float32 at least. Raises ValueError for fewer than two classes."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"expected logits (N, C) of at least 2 classes, found {logits.shape}: a regression takes Patience"
        )
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    shifted = logits - logits.max(axis=1, keepdims=True)  # so that exp does not overflow
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def max_probability(logits: np.ndarray) -> np.ndarray:
    """The largest probability (LoRAExit, Right-Tool)."""
    return np.exp(log_softmax(logits).max(axis=1))


def entropy(logits: np.ndarray) -> np.ndarray:
    """Minus the entropy, in nats (DeeBERT)."""
    log_p = log_softmax(logits)
    return (np.exp(log_p) * log_p).sum(axis=1)


def normalised_entropy(logits: np.ndarray) -> np.ndarray:
    """Minus the entropy over its largest value, ln C (FastBERT)."""
    return np.maximum(entropy(logits) / math.log(logits.shape[1]), -1)  # rounding may go below -1


def breaking_ties(logits: np.ndarray) -> np.ndarray:
    """The largest probability minus the second largest (self-supervised exits, Eq. 2)."""
    return _gap(np.exp(log_softmax(logits)))


def breaking_ties_logits(logits: np.ndarray) -> np.ndarray:
    """The same on logits."""
    return _gap(log_softmax(logits))


def _gap(values: np.ndarray) -> np.ndarray:
    second, first = np.partition(values, -2, axis=1)[:, -2:].T
    return first - second


MEASURES = {
    measure.__name__: measure
    for measure in (max_probability, entropy, normalised_entropy, breaking_ties, breaking_ties_logits)
}


# ---- The rules ----
class Rule:
    """The base of all rules."""

    needs: str | None = "logits"

    def plan(self, inputs: Sized) -> np.ndarray | None:
        return None

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} has no stop(k, read, memory)")


@dataclass(frozen=True)
class Never(Rule):
    """The full model: only the last head is computed."""

    needs = None


@dataclass(frozen=True)
class Fixed(Rule):
    """All rows stop at the same exit. `exit`: an index, from 0."""

    exit: int
    needs = None

    def plan(self, inputs: Sized) -> np.ndarray:
        return np.full(len(inputs), self.exit)


@dataclass(frozen=True)
class Threshold(Rule):
    """Stop if a measure of confidence is at least tau: one number, or one for each exit. inf: never."""

    tau: float | Sequence[float]
    measure: str = "max_probability"

    def __post_init__(self):
        if self.measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {self.measure!r}")

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        tau = self.tau if isinstance(self.tau, int | float) else self.tau[k]
        return MEASURES[self.measure](read) >= tau


@dataclass(frozen=True)
class Patience(Rule):
    """Stop if `t` consecutive exits repeat the prediction of the exit before them (PABEE, Zhou et al. 2020).

    Two predictions of a regression (C = 1) are equal if they differ by less than `tolerance`.
    """

    t: int
    tolerance: float = 0.5

    def __post_init__(self):
        if self.t < 1 or self.tolerance <= 0:
            raise ValueError(f"patience must be at least 1, its tolerance above 0, got {self.t} and {self.tolerance}")

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        if read.shape[1] == 1:  # the defaults inf and -1 are no predictions, so at the first exit no row is equal
            predicted = read[:, 0]
            same = abs(predicted - memory.get("predicted", np.inf)) < self.tolerance
        else:
            predicted = read.argmax(axis=1)
            same = predicted == memory.get("predicted", -1)
        memory["streak"] = np.where(same, memory.get("streak", 0) + 1, 0)
        memory["predicted"] = predicted
        return memory["streak"] >= self.t


@dataclass(frozen=True)
class Policy(Rule):
    """Stop if the model's own probability of stopping, the sigmoid of its exit_logit, is above `cut` (ConsistentEE)."""

    cut: float = 0.5
    needs = "exit_logit"

    def __post_init__(self):
        if not 0 < self.cut < 1:
            raise ValueError(f"a policy's cut is a probability between 0 and 1, got {self.cut}")

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        return read > math.log(self.cut / (1 - self.cut))
