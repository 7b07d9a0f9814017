"""Exit rules: which rows (examples or tokens) stop at which exit. At the last exit all rows stop. No torch.

    plan(inputs) -> (N,) exit index, or None      decided before the model runs; None: the rule decides at the exits
    stop(k, read, memory) -> (N,) bool            decided at exit k. read: what `needs` names, of the rows still running
    needs                                         "logits" (N, C), or a method of the engine ("exit_logit"), or None

`memory` is empty at the first exit. `stop` may put arrays by row into it; the loop keeps the entries of the rows that
go on. A rule has no state of its own: one rule serves many batches. To write a rule: a class with `plan` or `stop`.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

Memory = dict[str, np.ndarray]


# ---- How confident is an exit? (N, C) logits -> (N,); larger is more confident ----
def shifted(logits: np.ndarray) -> np.ndarray:
    """(N, C) minus the row's largest, so that exp does not overflow; float32 at least. Raises ValueError if C < 2."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"only 2 or more classes have a confidence, not logits {logits.shape}: take Fixed or Patience")
    return (x := logits.astype(np.promote_types(logits.dtype, np.float32))) - x.max(axis=1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(N, C) -> (N, C)."""
    return (x := shifted(logits)) - np.log(np.exp(x).sum(axis=1, keepdims=True))


def max_probability(logits: np.ndarray) -> np.ndarray:
    """The largest probability (LoRAExit, Right-Tool)."""
    return np.reciprocal(np.exp(shifted(logits)).sum(axis=1))


def entropy(logits: np.ndarray) -> np.ndarray:
    """MINUS the entropy, in nats: DeeBERT's rule "stop if the entropy is below S" is Threshold(-S, "entropy")."""
    log_p = np.maximum(log_softmax(logits), -1e30)  # 0 x -inf would be NaN
    return (np.exp(log_p) * log_p).sum(axis=1)


def normalised_entropy(logits: np.ndarray) -> np.ndarray:
    """MINUS the entropy over its largest value, ln C: from -1 to 0 (FastBERT)."""
    return np.maximum(entropy(logits) / math.log(logits.shape[1]), -1)  # rounding may go below -1


def breaking_ties(logits: np.ndarray) -> np.ndarray:
    """The largest probability minus the second largest (self-supervised exits, section 3.3.1)."""
    return _gap(np.exp(log_softmax(logits)))


def breaking_ties_logits(logits: np.ndarray) -> np.ndarray:
    """The same on logits."""
    return _gap(log_softmax(logits))


def _gap(values: np.ndarray) -> np.ndarray:
    second, first = np.partition(values, -2, axis=1)[:, -2:].T
    return first - second


_MEASURES = (max_probability, entropy, normalised_entropy, breaking_ties, breaking_ties_logits)
MEASURES = {measure.__name__: measure for measure in _MEASURES}


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
    """Stop if a measure of confidence is at least the threshold: one number, or one for each exit. inf: never."""

    threshold: float | Sequence[float]
    measure: str = "max_probability"

    def __post_init__(self):
        if self.measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {self.measure!r}")

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        return self.confidence(read) >= (self.threshold[k] if isinstance(self.threshold, Sequence) else self.threshold)

    def confidence(self, read: np.ndarray) -> np.ndarray:
        return MEASURES[self.measure](read)


@dataclass(frozen=True)
class Patience(Rule):
    """Stop if `patience` consecutive exits repeat the prediction of the exit before them (PABEE, Zhou et al. 2020).

    Two predictions of a regression (C = 1) are equal if they differ by less than `tolerance`.
    """

    patience: int
    tolerance: float = 0.5

    def __post_init__(self):
        if self.patience < 1 or self.tolerance <= 0:
            raise ValueError(f"patience must be at least 1, its tolerance above 0, got {self}")

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        if read.shape[1:] == (1,):  # the defaults inf and -1 are no predictions, so at the first exit no row is equal
            predicted = read[:, 0]
            same = abs(predicted - memory.get("predicted", np.inf)) < self.tolerance
        else:
            predicted = read.argmax(axis=1) if read.ndim == 2 else read  # (N,): predictions that were recorded
            same = predicted == memory.get("predicted", -1)
        memory["streak"] = np.where(same, memory.get("streak", 0) + 1, 0)
        memory["predicted"] = predicted
        return memory["streak"] >= self.patience


@dataclass(frozen=True)
class Policy(Rule):
    """Stop if the model's own probability of stopping, the sigmoid of its exit_logit, is above `cut` (ConsistentEE)."""

    cut: float = 0.5
    least_logit: ClassVar[float]  # of the cut. Logits are compared, because many sigmoids are 1 in float32
    needs = "exit_logit"

    def __post_init__(self):
        if not 0 <= self.cut <= 1:
            raise ValueError(f"the cut on the exit probability must be from 0 to 1, got {self.cut}")
        logit = math.log(self.cut / (1 - self.cut)) if 0 < self.cut < 1 else math.inf if self.cut else -math.inf
        object.__setattr__(self, "least_logit", logit)

    def stop(self, k: int, read: np.ndarray, memory: Memory) -> np.ndarray:
        return read > self.least_logit
