"""When to stop. A rule is asked at every exit but the last, which takes whoever is left.

    rule.plan(inputs) -> (N,) exit index, or None      known before the model runs; None: it does not plan
    rule.stop(k, reading, memory) -> (N,) bool         decided at exit k; memory is arrays by unit, kept with the units
    rule.needs                                         what `stop` looks at: "logits", "state" (no logits), or None
    rule.flops(classes)                                what one decision costs for one unit
    rule.plan_flops(inputs)                            what a plan costs for one unit
    rule.from_loose_to_strict(recorded, n)             the rule with other values of its `knob`, as a sweep tries them
    rule.to_dict() <-> rule_from_dict                  as it stands in a run's config.json

A rule is numpy code, which also runs on the values of a graph that stops by itself (export/tracing.py).
A rule is a frozen dataclass; its fields carry their help, from which the command line's options are made.

Exit indices k count from 0 along `exits`; layers count from 1. Rules hold no state: one rule may serve many batches.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from mini_ee.confidence import MEASURES
from mini_ee.data.options import option
from mini_ee.data.values import is_whole
from mini_ee.errors import WrongArguments
from mini_ee.registry import RULES as METHOD_RULES

STATE_MEASURES = {"saturation": (-1.0, 1.0)}
"""Measures that are no function of logits: name -> smallest and largest threshold that makes sense."""
LIMITS = {measure: tuple(limits) for measure, (_, *limits) in MEASURES.items()} | STATE_MEASURES
"""Measure -> smallest and largest threshold that makes sense, of all of them."""

NO_POLICY = (
    "the rule {} needs a model that says when to leave, this one does not; "
    "give a run of a method that trains policies, exported with such a rule if it is exported, or choose another rule"
)

NO_STATES = "{} is a measure of hidden states, which this model does not hand over; choose another measure"


class Rule:
    """What all rules share: they do not plan, and look at logits."""

    name = ""
    needs: str | None = "logits"
    needs_policy = False  # True where `stop` looks at the exit_logit
    plans_from_texts = False  # True where `plan` looks at the units themselves, not only at how many they are
    embed: Callable | None = None  # what such a rule plans by: Inputs -> (N, D), with a name

    def plan(self, inputs) -> np.ndarray | None:
        return None

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if self.needs is not None:
            raise NotImplementedError(f"{type(self).__name__} has no stop(k, reading, memory)")
        return np.zeros(len(reading.logits), bool)

    def check(self, num_exits: int) -> None:
        """Raise ValueError where the rule does not fit a model with so many exits."""

    def flops(self, classes: int) -> float:
        return 0.0

    def plan_flops(self, inputs) -> float:
        """What a plan costs for one row."""
        return 0.0

    def of_batches(self, inputs: Iterable) -> "Iterable[tuple[object, Rule]]":
        """Each batch of inputs with the rule that it is run under."""
        return ((batch, self) for batch in inputs)

    # ---- The curve of a rule: the same rule with other values of one setting ----
    knob: ClassVar[str | None] = None  # the setting that trades layers for score; None: no setting does
    never: ClassVar[float] = math.inf  # its value under which no unit exits early

    @property
    def knob_range(self) -> tuple[float, float]:
        """Smallest and largest value of the knob that makes sense, `never` aside: those of its option."""
        about = self.__dataclass_fields__[self.knob].metadata
        least, most = about["least"], about["most"]
        return -math.inf if least is None else least, math.inf if most is None else most

    def compared(self, recorded) -> np.ndarray:
        """(N, K - 1): what the rule compares with its knob at every exit but the last. recorded: a Record."""
        raise NotImplementedError(f"{type(self).__name__} has a knob, and no compared(recorded)")

    def from_loose_to_strict(self, recorded, count: int) -> list["Rule"]:
        """The rule with other values of its knob, under which ever fewer units exit early; the last lets none exit.

        The values are `count` quantiles of what is compared with the knob, and the rule's own. Empty if the
        model has one exit.
        """
        if self.knob is None or len(recorded.segments.exits) < 2:
            return []
        levels = np.quantile(self.compared(recorded), np.linspace(0, 1, count))
        own = np.atleast_1d(getattr(self, self.knob))
        values = np.clip([*levels, *own[own != self.never]], *self.knob_range)
        return [replace(self, **{self.knob: value}) for value in np.unique([*values, self.never]).tolist()]

    # ---- In a graph that stops by itself (export/model_graph.py) ----
    runtime_settings: tuple[str, ...] = ()  # settings that such a graph takes as inputs
    runtime_inputs: ClassVar[dict[str, str]] = {}
    """Input of the graph -> the attribute that `stop` compares with. Of a `threshold` inf means that nobody exits."""

    def runtime_values(self, count: int) -> dict[str, np.ndarray]:
        """Input -> its own values, for `count` exits besides the last: (count,) float32, or (1,) of an integer."""
        return {
            name: _runtime_value(getattr(self, attribute), count) for name, attribute in self.runtime_inputs.items()
        }

    def with_runtime(self, values: dict) -> Self:
        """The rule with these values of its inputs, as they are at one exit."""
        rule = copy(self)
        for name, value in values.items():
            object.__setattr__(rule, self.runtime_inputs[name], value)
        return rule

    def served_by(self, other: "Rule") -> bool:
        """Whether a graph with the rule `other` in it can be fed so that it stops by this one."""
        return type(self) is type(other) and all(
            value == getattr(other, name)
            for name, value in self.settings().items()
            if name not in self.runtime_settings
        )

    def opened(self, folder: Path, config: dict, model) -> "Rule":
        """The rule of a run on disk, with what it needs of the run's other files. Most need nothing."""
        return self

    def save(self, folder: Path) -> None:
        """Write the files that an exported rule asks, where it plans by an `embed`."""

    def served(self, folder: Path, embed: Callable) -> "Rule":
        """The rule of an exported folder, with what `save` wrote and its `embed`, which is a graph there."""
        raise ValueError(f"the rule {self.name} plans by no embeddings, the folder holds a graph for them")

    def settings(self) -> dict:
        """The fields of the rule by name."""
        return {name: getattr(self, name) for name in getattr(self, "__dataclass_fields__", ())}

    def to_dict(self) -> dict:
        return {"name": self.name} | {key: _json(value) for key, value in self.settings().items()}


def _runtime_value(value, count: int) -> np.ndarray:
    if isinstance(value, int):
        return np.array([value])
    values = value[:count] if isinstance(value, tuple) else [value] * count
    return np.array(values, np.float32)


def _json(value):
    """A setting as JSON holds it: lists for tuples, and strings for what JSON has no numbers for, inf and -inf."""
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return str(value) if value in (math.inf, -math.inf) else value


@dataclass(frozen=True)
class NeverExit(Rule):
    """Every row runs to the last exit; only that head is read. The full model."""

    name = "never"
    needs = None


@dataclass(frozen=True)
class FixedExit(Rule):
    """Every row leaves at one exit, whatever it says. `exit` is an index into exits, from 0."""

    exit: int = option(help="the layer at which all leave", flag="--layer")
    name = "fixed"
    needs = None

    def plan(self, inputs) -> np.ndarray:
        return np.full(len(inputs), self.exit)

    def check(self, num_exits: int) -> None:
        if not is_whole(self.exit) or self.exit not in range(num_exits):
            raise ValueError(f"the fixed exit must be one of the {num_exits} exits, got index {self.exit!r}")


@dataclass(frozen=True)
class Planned(Rule):
    """The exits of one batch, known already: exit indices of its B rows. cost: operations that a row's plan took."""

    exit_index: tuple[int, ...]
    cost: float = 0.0
    name = "planned"
    needs = None

    def __post_init__(self):
        object.__setattr__(self, "exit_index", tuple(np.asarray(self.exit_index).tolist()))

    def plan(self, inputs) -> np.ndarray:
        if len(inputs) != len(self.exit_index):
            raise ValueError(f"expected the {len(self.exit_index)} rows that were planned, found {len(inputs)}")
        return np.asarray(self.exit_index, np.int64)

    def plan_flops(self, inputs) -> float:
        return self.cost

    def check(self, num_exits: int) -> None:
        if not set(self.exit_index) <= set(range(num_exits)):
            raise ValueError(f"the plan must name the {num_exits} exits by index, got {sorted(set(self.exit_index))}")


def confidence(reading, measure: str) -> np.ndarray:
    """(B,): a measure, computed here from the logits unless the engine handed it over with the reading."""
    handed_over = getattr(reading, measure, None)
    if handed_over is None and measure in STATE_MEASURES:
        raise WrongArguments(NO_STATES.format(measure))
    return MEASURES[measure][0](reading.logits) if handed_over is None else handed_over


@dataclass(frozen=True)
class Threshold(Rule):
    """Leave where a confidence is at least the threshold: one number, or one for each exit (the last is not asked).

    Sources: DeeBERT (entropy), Right-Tool and LoRAExit (max_probability), FastBERT (normalised_entropy), CALM
    (breaking_ties, and saturation: the cosine of a decoder's state with the one at the exit before).
    inf means never, -inf always. Raises ValueError for an unknown measure or a threshold outside its range.
    """

    threshold: float | tuple[float, ...] = option(help="one number, or one for each exit: --threshold=.8,.8,.9")
    measure: str = option("max_probability", "what a threshold is on", choices=tuple(LIMITS))
    name = "threshold"

    def __post_init__(self):
        if self.measure not in LIMITS:
            raise ValueError(f"measure must be one of {', '.join(LIMITS)}, got {self.measure!r}")
        several = isinstance(self.threshold, Sequence) and not isinstance(self.threshold, str)
        value = tuple(map(float, self.threshold)) if several else float(self.threshold)
        object.__setattr__(self, "threshold", value)
        least, most = LIMITS[self.measure]
        for value in np.atleast_1d(self.threshold):
            if not (least <= value <= most or np.isinf(value)):
                raise ValueError(f"a threshold on {self.measure} must be from {least} to {most}, got {value}")

    @property
    def needs(self) -> str:
        return "state" if self.measure in STATE_MEASURES else "logits"

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        threshold = self.threshold[k] if isinstance(self.threshold, tuple) else self.threshold
        return confidence(reading, self.measure) >= threshold

    runtime_settings, runtime_inputs = ("threshold",), {"threshold": "threshold"}
    knob = "threshold"

    @property
    def knob_range(self) -> tuple[float, float]:
        return LIMITS[self.measure]

    def compared(self, recorded) -> np.ndarray:
        return recorded.confidence(self.measure)

    def check(self, num_exits: int) -> None:
        if isinstance(self.threshold, tuple) and len(self.threshold) != num_exits:
            raise ValueError(f"expected one threshold or {num_exits}, one for each exit, got {len(self.threshold)}")

    def flops(self, classes: int) -> float:
        return 5.0 * classes  # shift, exponential, sum, logarithm, comparison


@dataclass(frozen=True)
class Patience(Rule):
    """Leave when `patience` exits in a row repeat the prediction of the exit before them.

    Source: PABEE (Zhou et al. 2020): patience t needs t + 1 equal predictions. For regression (C = 1) two
    predictions are equal when they differ by less than `tolerance`.
    """

    patience: int = option(help="exits in a row that must agree, or be sure")
    tolerance: float = option(0.5, "regression: numbers that differ by less are equal", above=0)
    name = "patience"

    def __post_init__(self):
        if not is_whole(self.patience) or self.patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1, got {self.patience!r}")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a number above 0, got {self.tolerance}")

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if reading.prediction is None and reading.logits.shape[1] == 1:
            prediction = reading.logits[:, 0]
            same = abs(prediction - memory.get("prediction", np.inf)) < self.tolerance
        else:
            prediction = reading.logits.argmax(axis=1) if reading.prediction is None else reading.prediction
            same = prediction == memory.get("prediction", -1)
        memory["streak"] = np.where(same, memory.get("streak", 0) + 1, 0)
        memory["prediction"] = prediction
        return memory["streak"] >= self.patience

    runtime_settings, runtime_inputs = ("patience",), {"patience": "patience"}
    knob = "patience"

    def from_loose_to_strict(self, recorded, count: int) -> list[Rule]:
        """Every patience, however many there are."""
        return [replace(self, patience=patience) for patience in range(1, len(recorded.segments.exits))]

    def flops(self, classes: int) -> float:
        return classes + 3.0


@dataclass(frozen=True)
class PatienceConfidence(Rule):
    """Leave when `patience` exits in a row were confident, whatever they predicted.

    Source: PCEE-BERT (Zhang et al. 2022). Confident: `measure` of at least `threshold`, one for all exits.
    """

    patience: int = option(help="exits in a row that must agree, or be sure")
    threshold: float = option(help="one number")
    measure: str = option("max_probability", "what a threshold is on", choices=tuple(LIMITS))
    name = "patience-confidence"

    def __post_init__(self):
        Patience(self.patience)
        threshold = Threshold(self.threshold, self.measure).threshold
        if isinstance(threshold, tuple):
            raise ValueError(f"the rule {self.name} takes one threshold, got {len(threshold)}")
        object.__setattr__(self, "threshold", threshold)

    @property
    def needs(self) -> str:
        return "state" if self.measure in STATE_MEASURES else "logits"

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        confident = confidence(reading, self.measure) >= self.threshold
        memory["streak"] = np.where(confident, memory.get("streak", 0) + 1, 0)
        return memory["streak"] >= self.patience

    runtime_settings, runtime_inputs = ("patience", "threshold"), {"patience": "patience", "threshold": "threshold"}
    knob, knob_range, compared = "threshold", Threshold.knob_range, Threshold.compared

    def flops(self, classes: int) -> float:
        return 5.0 * classes + 2.0


@dataclass(frozen=True)
class Policy(Rule):
    """Leave where the probability of leaving, the sigmoid of the model's exit_logit, is above the cut.

    Sources: ConsistentEE (a policy network), BERxiT (the certainty of a learning-to-exit module); both cut at .5.
    0 means always, 1 never. Raises ValueError for another cut, and at an exit of a model that has no policy.
    """

    cut: float = option(0.5, "leave where the probability of leaving is above", least=0, most=1)
    name = "policy"
    needs = "state"
    needs_policy = True

    def __post_init__(self):
        if not 0 <= self.cut <= 1:
            raise ValueError(f"the cut on the probability of leaving must be from 0 to 1, got {self.cut}")
        # Where the sigmoid reaches the cut: its values near 0 and 1 are equal in float32, the logits are not.
        at_ends = math.inf if self.cut else -math.inf
        least = at_ends if self.cut in (0, 1) else math.log(self.cut / (1 - self.cut))
        object.__setattr__(self, "least_logit", least)

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        return reading.exit_logit > self.least_logit

    runtime_settings, runtime_inputs = (
        ("cut",),
        {"threshold": "least_logit"},
    )  # float32 holds more of the logit than of the cut
    knob, never = "cut", 1.0

    def compared(self, recorded) -> np.ndarray:
        """The probabilities of leaving."""
        return np.exp(-np.logaddexp(0, -recorded.segments.exit_logits.astype(np.float64)))

    def flops(self, classes: int) -> float:
        return 1.0


@dataclass(frozen=True)
class QExit(Rule):
    """Leave where the probability of having left by now, 1 - prod (1 - sigmoid(exit_logit)), is above q.

    Source: PALBERT (Balagansky and Gavrilov 2022). 0 means always, 1 never. Raises ValueError for another q, and at an
    exit of a model that has no policy. The memory is -ln of the probability to be still there, a sum over exits.
    """

    q: float = option(0.5, "leave where the probability of having left by now is above", least=0, most=1)
    name = "q-exit"
    needs = "state"
    needs_policy = True

    def __post_init__(self):
        if not 0 <= self.q <= 1:
            raise ValueError(f"q, a probability of having left, must be from 0 to 1, got {self.q}")
        at_ends = math.inf if self.q else -math.inf
        object.__setattr__(self, "least_hazard", at_ends if self.q in (0, 1) else -math.log1p(-self.q))

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        memory["hazard"] = memory.get("hazard", 0) + np.logaddexp(0, reading.exit_logit)
        return memory["hazard"] > self.least_hazard

    runtime_settings, runtime_inputs = ("q",), {"threshold": "least_hazard"}
    knob, never = "q", 1.0

    def compared(self, recorded) -> np.ndarray:
        """The probabilities of having left by each exit."""
        return -np.expm1(-np.logaddexp(0, recorded.segments.exit_logits.astype(np.float64)).cumsum(axis=1))

    def flops(self, classes: int) -> float:
        return 4.0  # exponential, logarithm, sum, comparison


RULES = {rule.name: rule for rule in (NeverExit, FixedExit, Threshold, Patience, PatienceConfidence, Policy, QExit)}


def rule_class(name: str) -> type[Rule]:
    """The class of a name, of these here or of one that a method brings. Raises ValueError for another name."""
    if name not in RULES and name in METHOD_RULES:
        import_module(METHOD_RULES[name])
    if name not in RULES:
        raise ValueError(f"the rule must be one of {', '.join(RULES)}, found {name!r}")
    return RULES[name]


def rule_from_dict(config: dict) -> Rule:
    """The rule that `to_dict` described. Raises ValueError for an unknown name, key or value."""
    settings = {key: float(value) if value in ("inf", "-inf") else value for key, value in config.items()}  # see _json
    name = settings.pop("name", None)
    kind = rule_class(name)
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"the rule {name} does not take these settings: {error}") from None
