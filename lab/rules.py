"""Exit rules: which rows (examples or tokens) stop at which exit. At the last exit all rows stop.

mini_ee/rules.py has what rules decide by: `plan`, `stop` and `needs`. Here are the rules of methods besides, and what
the lab knows of each rule; sweep.py has its curve, rule_inputs.py its inputs of a graph:

    rule.flops(classes)                                FLOPs of one decision for one row
    rule.plan_flops(inputs)                            FLOPs of a plan for one row
    rule.to_dict() <-> rule_from_dict                  the rule in a run's config.json

`plan` and `stop` are numpy code. The same code also runs on graph values, which writes model.onnx (export/tracing.py).
So it has no `if` on an array, changes no array in place, and a setting may be a graph value in place of a number. A
comparison with NaN is False: a row whose confidence is NaN does not exit early.

A rule is a frozen dataclass; the command line makes its options from the fields and their help. Exit indices k count
from 0 along `exits`. Depths count layers: 0 is the embeddings.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from mini_ee import rules
from mini_ee.lab.confidence import OF_LOGITS
from mini_ee.lab.data.settings import option
from mini_ee.lab.data.values import is_whole
from mini_ee.lab.registry import RULES as METHOD_RULES
from mini_ee.lab.token_tasks import WEAKEST

STATE_MEASURES = {"saturation": (-1.0, 1.0), "short_list": (0.0, 1.0), WEAKEST: (0.0, 1.0)}
"""Measures that an engine computes, by methods of these names: name -> (smallest, largest) useful threshold."""
THRESHOLD_LIMITS = {measure: (least, most) for measure, (_, least, most) in OF_LOGITS.items()} | STATE_MEASURES
"""Every measure -> (smallest, largest) useful threshold."""


class Rule(rules.Rule):
    """The base of all rules. By default a rule does not plan, and reads logits."""

    name = ""
    needs_embeddings = False  # whether `stop` compares embeddings
    plans_from_texts = False  # True if `plan` reads the inputs, not only their number
    embed: Callable | None = None  # the embedding that such a rule plans with: Inputs -> (N, D); it has a name

    def check(self, num_exits: int) -> None:
        """Raise ValueError if the rule does not fit a model with this number of exits."""

    def flops(self, classes: int) -> float:
        return 0.0

    def plan_flops(self, inputs: Any) -> float:
        """FLOPs of a plan for one row."""
        return 0.0

    def of_batches(self, inputs: Iterable) -> "Iterable[tuple[object, Rule]]":
        """Each batch of inputs with the rule for it."""
        return ((batch, self) for batch in inputs)

    def settings(self) -> dict:
        """The fields of the rule by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)} if is_dataclass(self) else {}

    def to_dict(self) -> dict:
        return {"name": self.name} | {key: _json(value) for key, value in self.settings().items()}


def _json(value: Any) -> Any:
    """A setting in JSON: a list for a tuple, and the strings "inf" and "-inf", for which JSON has no numbers."""
    if isinstance(value, tuple):
        return [_json(element) for element in value]
    return str(value) if value in (math.inf, -math.inf) else value


@dataclass(frozen=True)
class Never(rules.Never, Rule):
    """The full model: every row runs to the last exit, and only that head is computed."""

    name = "never"


@dataclass(frozen=True)
class Fixed(rules.Fixed, Rule):
    """All rows exit at the same exit, which is chosen in advance. `exit` is an index into exits, from 0."""

    exit: int = option(help="exit layer of every example or token", flag="--layer")
    name = "fixed"

    def check(self, num_exits: int) -> None:
        if not is_whole(self.exit) or self.exit not in range(num_exits):
            raise ValueError(f"the fixed exit must be one of the {num_exits} exits, got index {self.exit!r}")


@dataclass(frozen=True)
class Planned(Rule):
    """A plan for one batch: the exit indices of its B rows. cost: FLOPs of the plan of one row."""

    exit_index: tuple[int, ...]
    cost: float = 0.0
    name = "planned"
    needs = None

    def __post_init__(self):
        object.__setattr__(self, "exit_index", tuple(np.asarray(self.exit_index).tolist()))

    def plan(self, inputs: Any) -> np.ndarray:
        if len(inputs) != len(self.exit_index):
            raise ValueError(f"expected the {len(self.exit_index)} planned rows, found {len(inputs)}; plan again")
        return np.asarray(self.exit_index, np.int64)

    def plan_flops(self, inputs: Any) -> float:
        return self.cost

    def check(self, num_exits: int) -> None:
        if not set(self.exit_index) <= set(range(num_exits)):
            raise ValueError(f"the plan must name the {num_exits} exits by index, got {sorted(set(self.exit_index))}")


class Measured(NamedTuple):
    """What a record holds of one exit, for rules that read logits: `measures`, and `logits` for all others."""

    logits: np.ndarray  # (N, C)
    measures: dict[str, np.ndarray]  # (N,) each, by the name of a confidence measure; or "prediction"


def confidence(read: Any, measure: str) -> np.ndarray:
    """(N,): a confidence measure of logits (N, C) or of a Measured; a measure of states as the engine returned it."""
    if isinstance(read, Measured):
        return read.measures[measure] if measure in read.measures else OF_LOGITS[measure][0](read.logits)
    return read if measure in STATE_MEASURES else OF_LOGITS[measure][0](read)


@dataclass(frozen=True)
class Threshold(rules.Threshold, Rule):
    """Exit when a confidence measure is at least the threshold.

    threshold: one number, or one for each exit (the last is unused); inf means never, -inf always.
    Sources: DeeBERT (entropy), Right-Tool and LoRAExit (max_probability), FastBERT (normalised_entropy), CALM
    (breaking_ties, and saturation: the cosine of a decoder's state and its state at the exit before);
    short_list: exits/lens.py.
    Raises ValueError for an unknown measure or a threshold outside its range.
    """

    threshold: float | tuple[float, ...] = option(help="threshold of the measure: a number, or one per exit: .8,.8,.9")
    measure: str = option("max_probability", "confidence measure", choices=tuple(THRESHOLD_LIMITS))
    name = "threshold"

    def __post_init__(self):
        if self.measure not in THRESHOLD_LIMITS:
            raise ValueError(f"measure must be one of {', '.join(THRESHOLD_LIMITS)}, got {self.measure!r}")
        several = isinstance(self.threshold, Sequence) and not isinstance(self.threshold, str)
        value = tuple(map(float, self.threshold)) if several else float(self.threshold)
        object.__setattr__(self, "threshold", value)
        least, most = THRESHOLD_LIMITS[self.measure]
        for value in np.atleast_1d(self.threshold):
            if not (least <= value <= most or np.isinf(value)):
                raise ValueError(f"a threshold on {self.measure} must be from {least} to {most}, got {value}")

    @property
    def needs(self) -> str:  # type: ignore[override]  # it depends on the measure
        return self.measure if self.measure in STATE_MEASURES else "logits"

    def confidence(self, read: Any) -> np.ndarray:
        return confidence(read, self.measure)

    def check(self, num_exits: int) -> None:
        if isinstance(self.threshold, tuple) and len(self.threshold) != num_exits:
            raise ValueError(f"expected one threshold or {num_exits}, one for each exit, got {len(self.threshold)}")

    def flops(self, classes: int) -> float:
        return 5.0 * classes  # shift, exponential, sum, logarithm, comparison


@dataclass(frozen=True)
class Patience(rules.Patience, Rule):
    """Exit if `patience` consecutive exits repeat the prediction of the exit before them: patience + 1 equal ones.

    Source: PABEE (Zhou et al. 2020). For regression (C = 1) two
    predictions are equal if they differ by less than `tolerance`.
    """

    patience: int = option(help="number of consecutive exits that must agree (patience) or be confident")
    tolerance: float = option(0.5, "difference below which two predictions of a regression are equal", above=0)
    name = "patience"

    def __post_init__(self):
        if not is_whole(self.patience) or self.patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1, got {self.patience!r}")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a number above 0, got {self.tolerance}")

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        read = read.measures.get("prediction", read.logits) if isinstance(read, Measured) else read
        return super().stop(k, read, memory)

    def flops(self, classes: int) -> float:
        return classes + 3.0


@dataclass(frozen=True)
class PatienceConfidence(Rule):
    """Exit if at `patience` consecutive exits the confidence measure is at least the threshold, whatever they predict.

    Source: PCEE-BERT (Zhang et al. 2022). All exits have the same `measure` and `threshold`.
    """

    patience: int = option(help="number of consecutive exits that must agree (patience) or be confident")
    threshold: float = option(help="threshold of the confidence measure")
    measure: str = option("max_probability", "confidence measure", choices=tuple(THRESHOLD_LIMITS))
    name = "patience-confidence"

    def __post_init__(self):
        Patience(self.patience)
        threshold = Threshold(self.threshold, self.measure).threshold
        if isinstance(threshold, tuple):
            raise ValueError(f"the rule {self.name} takes one threshold, got {len(threshold)}")
        object.__setattr__(self, "threshold", threshold)

    @property
    def needs(self) -> str:  # type: ignore[override]  # it depends on the measure
        return self.measure if self.measure in STATE_MEASURES else "logits"

    def stop(self, k: int, read: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
        confident = confidence(read, self.measure) >= self.threshold
        memory["streak"] = np.where(confident, memory.get("streak", 0) + 1, 0)
        return memory["streak"] >= self.patience

    def flops(self, classes: int) -> float:
        return 5.0 * classes + 2.0


@dataclass(frozen=True)
class Policy(rules.Policy, Rule):
    """Exit if the exit probability, which a small trained network predicts at each exit, is above the cut.

    Sources: ConsistentEE (a policy network), BERxiT (certainty); both use .5. The probability is sigmoid(exit_logit).
    0 means always, 1 never. Raises ValueError for a cut outside [0, 1], and if the model has no policy.
    """

    cut: float = option(0.5, "exit probability of the policy above which an example or token exits", least=0, most=1)
    name = "policy"

    def flops(self, classes: int) -> float:
        return 1.0


@dataclass(frozen=True)
class QExit(Rule):
    """Exit if 1 - prod (1 - p) is above q: a product over the exits so far, where p is the policy's exit probability.

    Source: PALBERT (Balagansky and Gavrilov 2022). 0 means always, 1 never. Raises ValueError for a q outside [0, 1],
    and if the model has no policy. The memory is -ln prod (1 - sigmoid(exit_logit)), a sum of softplus over exits.
    """

    q: float = option(0.5, "cumulative exit probability above which an example exits", least=0, most=1)
    name = "q-exit"
    needs = "exit_logit"

    def __post_init__(self):
        if not 0 <= self.q <= 1:
            raise ValueError(f"q, a cumulative exit probability, must be from 0 to 1, got {self.q}")
        at_ends = math.inf if self.q else -math.inf
        object.__setattr__(self, "least_hazard", at_ends if self.q in (0, 1) else -math.log1p(-self.q))

    def stop(self, k: int, read: np.ndarray, memory: dict[str, np.ndarray]) -> np.ndarray:
        # -ln(1 - sigmoid(x)) = ln(1 + e^x), which logaddexp computes without overflow. The sum is compared, because the
        # product underflows.
        memory["hazard"] = memory.get("hazard", 0) + np.logaddexp(0, read)
        return memory["hazard"] > self.least_hazard  # type: ignore[attr-defined]  # set in __post_init__

    def flops(self, classes: int) -> float:
        return 4.0  # exponential, logarithm, sum, comparison


_OWN = (Never, Fixed, Threshold, Patience, PatienceConfidence, Policy, QExit)
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in _OWN}


def rule_class(name: Any) -> type[Rule]:
    """The rule class of a name, from this file or from a method. Raises ValueError for an unknown name."""
    if name not in RULES and name in METHOD_RULES:
        import_module(METHOD_RULES[name])
    if name not in RULES:
        raise ValueError(f"the rule must be one of {', '.join(RULES)}, found {name!r}")
    return RULES[name]


def rule_from_dict(config: dict) -> Rule:
    """The rule from the dict that `to_dict` returned. Raises ValueError for an unknown name, key or value."""
    settings = {key: float(value) if value in ("inf", "-inf") else value for key, value in config.items()}  # see _json
    name = settings.pop("name", None)
    kind = rule_class(name)
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"the rule {name} does not take these settings: {error}") from None
