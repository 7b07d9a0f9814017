"""AdaInfer: at each exit a linear classifier of two numbers, how far the likeliest is ahead and how likely it is.

Paper: Siqi Fan et al., Not All Layers of LLMs Are Necessary During Inference, 2024, arXiv:2403.02181v3. There is no
official code; what the paper leaves open is our decision.

Symbols:   gap = p_1 - p_2, top = p_1, the largest probabilities; x = (gap, top, 1), both less their mean and over their
           standard deviation at this exit, which the rule's weights take in again;
           y = 1 where the exit is right, else -1: right of the label (`gold`), or of what the last exit says (`final`).
Fit:       min_w |w|^2 / 2 + cost mean max(0, 1 - y w.x), each class of y with half the weight; an SVM for each exit.
Inference: the rule adainfer: a unit leaves at the first exit whose decision w.x is above 0.

Of two classes gap = 2 top - 1, so the rule is a threshold on the largest probability; an SVM that always says yes
leaves everybody at its exit.

Deviations, or our decisions where the paper leaves it open:
1. The classifier is a linear SVM, its bias among its weights; no CRF. Without the scaling the measures lie close to 1,
   and the SVM would say yes to all unless the cost is high.
2. Each exit has an SVM of its own, not one for all.
3. y is by the gold label in a decoder's own rule; of rows both labels propose rules, and so do margins other than 0,
   and the promise is tested on held-out rows that proposed none.
4. It is fitted to held-out units, as every choice here is.
5. Of rows the exits have heads, which learn on the fine-tuned, frozen backbone; a decoder stays frozen, and its exits
   have copies of the LM head that learn: as it is, it reads shallow states badly.

No torch at once here: the runtime without torch stops by the rule in this file.
"""

import math
from dataclasses import dataclass

import numpy as np

from mini_ee.recording import Record
from mini_ee.rules import RULES, Rule, confidence
from mini_ee.training.default_rule import Chosen, passing, sweep
from mini_ee.training.method import Method, NoConfig

COST = 10.0
MOST_UNITS = 5000  # that an SVM is fitted to, drawn with a fixed seed
MEASURES = "breaking_ties", "max_probability"
FLAT = 1e-6  # the least that a measure is taken to spread
MOST_STEPS, GAP = 20_000, 1e-5  # of the solver, which ends where the primal is within this share of the dual


# ---- The rule ----
@dataclass(frozen=True)
class Svm(Rule):
    """Leave where gap breaking_ties + top max_probability + bias is above the margin: -inf means always, inf never.

    gap, top, bias: a number for each exit but the last. Raises ValueError where they are not.
    """

    gap: tuple[float, ...]
    top: tuple[float, ...]
    bias: tuple[float, ...]
    margin: float = 0.0
    name = "adainfer"

    def __post_init__(self):
        for name in ("gap", "top", "bias"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        object.__setattr__(self, "margin", float(self.margin))
        sizes = {len(self.gap), len(self.top), len(self.bias)}
        if len(sizes) > 1 or not np.isfinite([self.gap, self.top, self.bias]).all():
            raise ValueError(f"gap, top and bias must be finite numbers, as many of each, got {self}")

    def check(self, num_exits: int) -> None:
        if len(self.gap) != num_exits - 1:
            wanted = f"expected {num_exits - 1} classifiers, one for each exit but the last"
            raise ValueError(f"{wanted}, got {len(self.gap)}")

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        gap, top = (confidence(reading, measure) for measure in MEASURES)
        return self.gap[k] * gap + self.top[k] * top + self.bias[k] > self.margin

    runtime_settings, runtime_inputs = ("margin",), {"threshold": "margin"}
    knob, knob_range = "margin", (-math.inf, math.inf)

    def compared(self, recorded: Record) -> np.ndarray:
        """The decisions, (N, K - 1)."""
        gap, top = (recorded.confidence(measure) for measure in MEASURES)
        return np.array(self.gap) * gap + np.array(self.top) * top + np.array(self.bias)

    def flops(self, classes: int) -> float:
        return 6.0 * classes + 5.0


RULES[Svm.name] = Svm


# ---- The fit ----
def fit_svm(x: np.ndarray, y: np.ndarray, cost: float = COST) -> tuple[np.ndarray, np.ndarray]:
    """(w (F,), alpha (N,)) of features x (N, F) and y (N,) of 1 and -1.

    w = sum alpha y x. The dual, the most of sum alpha - |w|^2 / 2 with 0 <= alpha <= bound, by accelerated projected
    gradient steps that begin anew where they would go down (FISTA; O'Donoghue and Candes 2015).
    """
    signed, bound = x * y[:, None], bounds(y, cost)
    step = 1 / np.linalg.eigvalsh(x.T @ x)[-1]
    alpha = ahead = np.zeros(len(y))
    speed = 1.0
    for _ in range(MOST_STEPS):
        gradient = 1 - signed @ (ahead @ signed)
        new = np.clip(ahead + step * gradient, 0, bound)
        if gradient @ (new - alpha) < 0:
            speed = 1.0
        faster = (1 + np.sqrt(1 + 4 * speed**2)) / 2
        ahead = new + (speed - 1) / faster * (new - alpha)
        alpha, speed = new, faster
        w = alpha @ signed
        hinge = bound @ np.maximum(0, 1 - signed @ w)
        if w @ w + hinge - alpha.sum() <= GAP * max(hinge, GAP):
            break
    return w, alpha


def bounds(y: np.ndarray, cost: float) -> np.ndarray:
    """The weight of each unit's hinge, (N,): half the cost goes to each class of y."""
    return cost / 2 / np.where(y > 0, max(1, (y > 0).sum()), max(1, (y < 0).sum()))


def svm(recorded: Record, right: np.ndarray) -> Svm:
    """The rule that is fitted to recorded units. right: (N, K - 1) bool, where each exit is right."""
    some = np.random.default_rng(0).permutation(len(right))[:MOST_UNITS]
    measures = np.stack([recorded.confidence(measure)[some] for measure in MEASURES], axis=2).astype(np.float64)
    mean, spread = measures.mean(axis=0), np.maximum(measures.std(axis=0), FLAT)
    scaled, weights = (measures - mean) / spread, []
    for k in range(right.shape[1]):
        x = np.column_stack((scaled[:, k], np.ones(len(some))))
        w, _ = fit_svm(x, np.where(right[some, k], 1.0, -1.0))
        slopes = w[:2] / spread[k]
        weights.append((*slopes, w[2] - slopes @ mean[k]))
    return Svm(*np.array(weights).T)


def right_of(recorded: Record) -> dict[str, np.ndarray]:
    """Where each exit but the last is right, (N, K - 1) bool, by what is held to be right."""
    said = recorded.predictions
    found = {"final": said[:, :-1] == said[:, -1:]}
    if recorded.groups is not None:
        return {"gold": recorded.logits[:, :-1, 1] > 0} | found
    return found if recorded.labels is None else {"gold": said[:, :-1] == recorded.labels[:, None]} | found


def svms(recorded: Record) -> list[Rule]:
    """The SVM under each label, as it is and with margins at quantiles of its decisions."""
    if len(recorded.segments.exits) < 2:
        return []
    return sweep(*(svm(recorded, right) for right in right_of(recorded).values()))(recorded)


def svm_of_texts(model, source, held) -> Chosen:
    """The SVMs of held-out tokens: the first is the rule; and for `mini-ee compare --sweep` others of theirs."""
    from mini_ee.exits.tokens import record_texts

    recorded = record_texts(model, held.texts, last=False)
    own = {label: svm(recorded, right) for label, right in right_of(recorded).items()}
    about = {
        "own": {label: rule.to_dict() for label, rule in own.items()},
        "sweep": {label: [each.to_dict() for each in passing(recorded, rule)] for label, rule in own.items()},
    }
    return Chosen(own["gold"], None, None, about)


def recipe(model, config: NoConfig) -> list:
    """What the SVMs read; they are fitted when it is done."""
    from mini_ee.training.stages import fine_tune_then_heads, joint_stage

    return [joint_stage(model, name="heads")] if model.unit == "tokens" else fine_tune_then_heads(model)


METHOD = Method(
    recipe=recipe,
    candidates=svms,
    default_rule=svm_of_texts,
    exits=None,
    classes_only=True,
    defaults={"tokens": {"rank": None, "head_lr": 8e-3}},
    lacks=("rank",),
)
