"""AdaInfer (Fan et al. 2024, arXiv:2403.02181v3): at each exit a linear classifier of two probabilities decides.

Paper: Siqi Fan et al., Not All Layers of LLMs Are Necessary During Inference, 2024, arXiv:2403.02181v3. There is no
official code, so what the paper leaves open is our decision.

Symbols:   gap = p_1 - p_2, top = p_1, the largest probabilities; x = (gap, top, 1), where gap and top are standardised
           (minus the mean, over the standard deviation, at this exit); the weights of the rule include this scaling;
           y = 1 if the exit is right, else -1: equal to the label (`gold`), or to the last exit's prediction (`final`).
Fit:       min_w |w|^2 / 2 + cost mean max(0, 1 - y w.x), each class of y with half the weight; an SVM for each exit.
Inference: the rule adainfer: an example or token exits at the first exit whose decision w.x is above 0.

With two classes gap = 2 top - 1, so the rule is a threshold on the largest probability. If an SVM is always positive,
all that reach its exit stop there.

Deviations, and our decisions for what the paper leaves open:
1. The classifier is a linear SVM whose bias is one of its weights; no CRF. Without scaling the measures are close to 1,
   and the SVM would be positive for all unless the cost is high.
2. Each exit has its own SVM, instead of one for all.
3. The default rule of a decoder uses the gold label. On examples both labels propose rules, and so do margins other
   than 0; the guarantee is tested on held-out examples that proposed none.
4. The SVMs are fitted on held-out data, like every choice here.
5. On examples, the exits have heads that are trained on the fine-tuned, frozen backbone. A decoder stays frozen, and
   its exits are trained copies of the LM head: the LM head itself predicts badly from shallow states.

No import of torch at the top: the runtime without torch stops by the rule in this file.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_ee.lab.recording import Record
from mini_ee.lab.rule_inputs import INPUTS
from mini_ee.lab.rules import RULES, Rule, confidence
from mini_ee.lab.sweep import KNOBS, Knob
from mini_ee.lab.training.default_rule import Chosen, passing, sweep
from mini_ee.lab.training.method import Method, NoConfig

COST = 10.0
MAX_FITTED_ROWS = 5000  # to which an SVM is fitted, drawn with a fixed seed
SVM_INPUTS = "breaking_ties", "max_probability"
MIN_STD = 1e-6  # standard deviation of a measure, at least: it is divided by
MAX_STEPS, DUALITY_GAP = 20_000, 1e-5  # of the solver: it stops once primal and dual differ by this share


# ---- The rule ----
@dataclass(frozen=True)
class Svm(Rule):
    """Exit if gap * breaking_ties + top * max_probability + bias is above the margin: a linear SVM of two measures.

    gap, top, bias: a number for each exit but the last; raises ValueError if they are not. margin: -inf means always,
    inf never.
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
            raise ValueError(f"gap, top and bias must be finite numbers, equally many of each, got {self}")

    def check(self, num_exits: int) -> None:
        if len(self.gap) != num_exits - 1:
            wanted = f"expected {num_exits - 1} classifiers, one for each exit but the last"
            raise ValueError(f"{wanted}, got {len(self.gap)}")

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        gap, top = (confidence(read, measure) for measure in SVM_INPUTS)
        return self.gap[k] * gap + self.top[k] * top + self.bias[k] > self.margin

    def flops(self, classes: int) -> float:
        return 6.0 * classes + 5.0


def decisions(rule: Svm, recorded: Record) -> np.ndarray:
    """w.x of every row at every exit but the last, (N, K - 1)."""
    gap, top = (recorded.confidence(measure) for measure in SVM_INPUTS)
    return np.array(rule.gap) * gap + np.array(rule.top) * top + np.array(rule.bias)


RULES[Svm.name] = Svm
KNOBS[Svm] = Knob("margin", decisions)
INPUTS[Svm] = {"threshold": ("margin", "margin")}


# ---- The fit ----
def fit_svm(x: np.ndarray, y: np.ndarray, cost: float = COST) -> tuple[np.ndarray, np.ndarray]:
    """The weights w (F,) and alpha (N,) for features x (N, F) and y (N,) of 1 and -1; w = sum alpha y x.

    Solves the dual: maximise sum alpha - |w|^2 / 2 with 0 <= alpha <= bound, by accelerated projected gradient steps
    (FISTA) with a restart whenever the objective would fall (O'Donoghue and Candes 2015).
    """
    signed, bound = x * y[:, None], bounds(y, cost)
    step = 1 / np.linalg.eigvalsh(x.T @ x)[-1]
    alpha = ahead = np.zeros(len(y))
    speed = 1.0
    for _ in range(MAX_STEPS):
        gradient = 1 - signed @ (ahead @ signed)
        new = np.clip(ahead + step * gradient, 0, bound)
        if gradient @ (new - alpha) < 0:  # restart
            speed = 1.0
        faster = (1 + np.sqrt(1 + 4 * speed**2)) / 2
        ahead = new + (speed - 1) / faster * (new - alpha)
        alpha, speed = new, faster
        w = alpha @ signed
        hinge = bound @ np.maximum(0, 1 - signed @ w)
        if w @ w + hinge - alpha.sum() <= DUALITY_GAP * max(hinge, DUALITY_GAP):
            break
    return w, alpha


def bounds(y: np.ndarray, cost: float) -> np.ndarray:
    """The weight of each hinge loss, (N,): each class of y gets half of the cost."""
    return cost / 2 / np.where(y > 0, max(1, (y > 0).sum()), max(1, (y < 0).sum()))


def svm(recorded: Record, right: np.ndarray) -> Svm:
    """The rule, fitted to recorded exits. right: (N, K - 1) bool, whether each exit is right."""
    rows = np.random.default_rng(0).permutation(len(right))[:MAX_FITTED_ROWS]
    measures = np.stack([recorded.confidence(measure)[rows] for measure in SVM_INPUTS], axis=2).astype(np.float64)
    mean, spread = measures.mean(axis=0), np.maximum(measures.std(axis=0), MIN_STD)
    scaled, weights = (measures - mean) / spread, []
    for k in range(right.shape[1]):
        x = np.column_stack((scaled[:, k], np.ones(len(rows))))
        w, _ = fit_svm(x, np.where(right[rows, k], 1.0, -1.0))
        slopes = w[:2] / spread[k]  # undo the scaling: w.x = slopes.(measures - mean) + bias
        weights.append((*slopes, w[2] - slopes @ mean[k]))
    return Svm(*np.array(weights).T)


def right_of(recorded: Record) -> dict[str, np.ndarray]:
    """Whether each exit but the last is right, (N, K - 1) bool, for each definition of right."""
    predictions = recorded.predictions
    right = {"final": predictions[:, :-1] == predictions[:, -1:]}
    if recorded.groups is not None:
        return {"gold": recorded.logits[:, :-1, 1] > 0} | right
    return right if recorded.labels is None else {"gold": predictions[:, :-1] == recorded.labels[:, None]} | right


def svms(recorded: Record) -> list[Rule]:
    """The SVM for each label, with margin 0 and with margins at quantiles of its decisions."""
    if len(recorded.segments.exits) < 2:
        return []
    return sweep(*(svm(recorded, right) for right in right_of(recorded).values()))(recorded)


def svm_of_texts(model: Any, source: Any, held_out: Any) -> Chosen:
    """The SVMs of held-out tokens. The first is the default rule; `mini-ee compare --sweep` takes other margins too.

    The arguments are a TokenExits, a Source and a TextData, whose modules need torch.
    """
    from mini_ee.lab.exits.text_record import record_texts

    recorded = record_texts(model, held_out.texts, last=False)
    classifiers = {label: svm(recorded, right) for label, right in right_of(recorded).items()}
    metadata = {
        "own": {label: rule.to_dict() for label, rule in classifiers.items()},
        "sweep": {
            label: [candidate.to_dict() for candidate in passing(recorded, rule)] for label, rule in classifiers.items()
        },
    }
    return Chosen(classifiers["gold"], None, None, metadata)


def recipe(model: Any, config: NoConfig) -> list:
    """The training of the heads; the SVMs are fitted afterwards."""
    from mini_ee.lab.training.stages import fine_tune_then_heads, joint_stage

    return [joint_stage(model, name="heads")] if model.unit == "tokens" else fine_tune_then_heads(model)


METHOD = Method(
    recipe=recipe,
    candidates=svms,
    default_rule=svm_of_texts,
    exits=None,
    classes_only=True,
    trained_as="fine-tune-then-heads",
    defaults={"tokens": {"rank": None, "head_lr": 8e-3}},
    lacks=("rank",),
    own_heads=True,
)
