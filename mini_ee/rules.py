"""When to stop. A rule is asked at every exit but the last, which takes whoever is left.

    rule.plan(inputs) -> (N,) exit index, or None      known before the model runs; None: it does not plan
    rule.stop(k, reading, memory) -> (N,) bool         decided at exit k; memory is arrays by unit, kept with the units
    rule.needs                                         what `stop` looks at: "logits", "state" (no logits), or None
    rule.flops(classes)                                what one decision costs for one unit
    rule.plan_flops(inputs)                            what a plan costs for one unit
    rule.to_dict() <-> rule_from_dict                  as it stands in a run's config.json
    rule.graph_stop(g, k, reading, bar, memory)        `stop` as ONNX nodes, for a graph that stops by itself

A rule is a frozen dataclass; its fields carry their help, from which the command line's options are made.

Exit indices k count from 0 along `exits`; layers count from 1. Rules hold no state: one rule may serve many batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from mini_ee import WrongArguments
from mini_ee.confidence import GRAPH_MEASURES, MEASURES
from mini_ee.data.options import is_whole, option
from mini_ee.registry import METHODS

STATE_MEASURES = {"saturation": (-1.0, 1.0)}
"""Measures that are no function of logits: name -> smallest and largest threshold that makes sense."""
LIMITS = {measure: tuple(limits) for measure, (_, *limits) in MEASURES.items()} | STATE_MEASURES
"""Measure -> smallest and largest threshold that makes sense, of all of them."""

NO_POLICY = (
    "the rule {} needs a model that says when to leave, this one does not; "
    "give a run of a method with policies, such as consistent, berxit, palbert or cat, exported with such a rule if it "
    "is exported, or choose another rule"
)

NO_STATES = "{} is a measure of hidden states, which this model does not hand over; choose another measure"


class Rule:
    """What all rules share: they do not plan, and look at logits."""

    name = ""
    needs: str | None = "logits"
    asks_policy = False  # True where `stop` looks at the exit_logit
    plans_from_texts = False  # True where `plan` looks at the units themselves, not only at how many they are

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

    # ---- In a graph that stops by itself (export/model_graph.py) ----
    # Settings that such a graph takes as inputs; the first is what `graph_stop` compares with:
    fed: tuple[str, ...] = ()

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        """Input -> its values, for `count` exits besides the last. The first is the bar: (count,) or (1,)."""
        return {}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        """stop: (B,) bool. bar (B,) float32: that of exit k for each row, -inf and inf where a plan decides.

        Raises ValueError for a rule that was not given this twin.
        """
        raise ValueError(
            f"the rule {self.name} has no ONNX twin: write `graph_stop` below `stop`, or export --segments"
        )

    def served_by(self, other: "Rule") -> bool:
        """Whether a graph with the rule `other` in it can be fed so that it stops by this one."""
        return type(self) is type(other) and all(
            value == getattr(other, name) for name, value in vars(self).items() if name not in self.fed
        )

    def opened(self, folder: Path, config: dict, model) -> "Rule":
        """The rule of a run on disk, with what it needs of the run's other files. Most need nothing."""
        return self

    def to_dict(self) -> dict:
        return {"name": self.name} | {key: _json(value) for key, value in self.__dict__.items()}


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


def graph_confidence(g, reading, measure: str) -> str:
    """confidence."""
    handed_over = getattr(reading, measure, None)
    if handed_over is None and measure in STATE_MEASURES:
        raise WrongArguments(NO_STATES.format(measure))
    return GRAPH_MEASURES[measure](g, reading.logits) if handed_over is None else handed_over


def graph_streak(g, same: str, memory: dict[str, str]) -> str:
    """How many exits in a row were (B,) bool, in float32; kept in the memory."""
    one = g.cast(same, np.int64)
    streak = g.op("Mul", g.op("Add", memory["streak"], one), one) if "streak" in memory else one
    memory["streak"] = streak
    return g.cast(streak, np.float32)


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

    fed = ("threshold",)

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        values = self.threshold[:count] if isinstance(self.threshold, tuple) else [self.threshold] * count
        return {"threshold": np.array(values, np.float32)}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        return g.op("GreaterOrEqual", graph_confidence(g, reading, self.measure), bar)

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

    fed = ("patience",)

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        return {"patience": np.array([self.patience])}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        before = memory.get("prediction")
        if reading.prediction is not None:  # a number
            memory["prediction"] = reading.prediction
            if before is not None:
                apart = g.op("Abs", g.op("Sub", reading.prediction, before))
                same = g.op("Less", apart, g.constant("tolerance", np.array(self.tolerance, np.float32)))
        else:
            memory["prediction"] = g.op("ArgMax", reading.logits, axis=1, keepdims=0)
            if before is not None:
                same = g.op("Equal", memory["prediction"], before)
        if before is None:
            same = g.op("Greater", bar, bar)  # nothing to repeat
        return g.op("GreaterOrEqual", graph_streak(g, same, memory), bar)

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

    fed = ("patience", "threshold")

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        return {"patience": np.array([self.patience]), "threshold": np.full(count, self.threshold, np.float32)}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        sure = graph_confidence(g, reading, self.measure)
        confident = g.op("GreaterOrEqual", sure, g.op("Gather", "threshold", g.integers(k)))
        return g.op("GreaterOrEqual", graph_streak(g, confident, memory), bar)

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
    asks_policy = True

    def __post_init__(self):
        if not 0 <= self.cut <= 1:
            raise ValueError(f"the cut on the probability of leaving must be from 0 to 1, got {self.cut}")

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        return reading.exit_logit > self.least_logit

    fed = ("cut",)

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        """The bar is on the exit_logit: float32 holds more of it than of the cut."""
        return {"threshold": np.full(count, self.least_logit, np.float32)}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        return g.op("Greater", reading.exit_logit, bar)

    @property
    def least_logit(self) -> float:
        """Where the sigmoid reaches the cut: its values near 0 and 1 are equal in float32, the logits are not."""
        if self.cut in (0, 1):
            return math.inf if self.cut else -math.inf
        return math.log(self.cut / (1 - self.cut))

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
    asks_policy = True

    def __post_init__(self):
        if not 0 <= self.q <= 1:
            raise ValueError(f"q, a probability of having left, must be from 0 to 1, got {self.q}")

    def stop(self, k: int, reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        memory["hazard"] = memory.get("hazard", 0) + np.logaddexp(0, reading.exit_logit)
        return memory["hazard"] > self._bar

    fed = ("q",)

    def graph_settings(self, count: int) -> dict[str, np.ndarray]:
        """The bar is on the memory."""
        return {"threshold": np.full(count, self._bar, np.float32)}

    def graph_stop(self, g, k: int, reading, bar: str, memory: dict[str, str]) -> str:
        if reading.exit_logit is None:
            raise ValueError(NO_POLICY.format(self.name))
        here = g.op("Softplus", reading.exit_logit)
        memory["hazard"] = g.op("Add", memory["hazard"], here) if "hazard" in memory else here
        return g.op("Greater", memory["hazard"], bar)

    @property
    def _bar(self) -> float:
        if self.q in (0, 1):
            return math.inf if self.q else -math.inf
        return -math.log1p(-self.q)

    def flops(self, classes: int) -> float:
        return 4.0  # exponential, logarithm, sum, comparison


RULES = {rule.name: rule for rule in (NeverExit, FixedExit, Threshold, Patience, PatienceConfidence, Policy, QExit)}


def rule_from_dict(config: dict) -> Rule:
    """The rule that `to_dict` described. Raises ValueError for an unknown name, key or value."""
    settings = dict(config)
    name = settings.pop("name", None)
    if name not in RULES and name in METHODS:
        import_module(METHODS[name])  # a method may bring a rule of its name
    if name not in RULES:
        raise ValueError(f"the rule must be one of {', '.join(RULES)}, found {name!r}")
    try:
        return RULES[name](**settings)
    except TypeError as error:
        raise ValueError(f"the rule {name} does not take these settings: {error}") from None
