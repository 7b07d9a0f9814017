"""model.onnx: a BERT with exits and a rule as one graph that stops by itself.

    input_ids, attention_mask, token_type_ids   (B, T) int64
    threshold       float32, () for all rows and exits, (K - 1,) by exit, or (B, K - 1); NaN and by default: the rule's.
                    Of a policy, compared with the exit_logit. inf: no row stops there; if all have it, no head runs
    patience        (1,) int64, of the rule Patience
    exit_at         (B,) or (1,) int64: the exit of a row, from 0, such as RAEE's plan; negative: the rule decides
 -> logits (B, C), layers (B,), label (B,), confidence (B,) of classes, exit_logit (B,) of a policy

After exit k there is an If. `then`: gather the rows that continue, run the layers up to exit k + 1, and the same again
for exit k + 1, whose If is therefore nested in this one; ScatterND writes the later values over those of exit k.
`else`: all rows have stopped. A branch runs only if it is taken, so layers and heads that no row needs cost nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mini_ee.bert import Exits
from mini_ee.export.graph import BOOL, FLOAT, INT64, Graph
from mini_ee.export.manifest import IDS, OWN_THRESHOLD, STACKED, graph_inputs
from mini_ee.rules import Policy, Rule, Threshold


class Rows(NamedTuple):
    """The rows that are still in the model."""

    hidden: str  # (B T, D)
    mask: str  # (B, T) bool
    shape: str  # (3,): B, T, D
    readable: str  # (B, 1, T, T) bool: which tokens a token may read


class Parts:
    """The parts of a model as nodes: what bert.py and the papers' models compute."""

    def __init__(self, g: Graph, model: Exits):
        self.g, self.model, self.width = g, model, model.bert.config["hidden_size"]
        self.restarts = hasattr(model, "adapters")  # LoRAExits: each exit starts from the embeddings

    def start(self) -> Rows:
        """The embeddings of the inputs."""
        g, at = self.g, "backbone.embeddings"
        ids, kinds, mask = (g.input(name, INT64, "batch", "tokens") for name in IDS)
        x = g.op("Add", g.op("Gather", f"{at}.word.weight", ids), g.op("Gather", f"{at}.token_type.weight", kinds))
        zero, tokens = g.constant([0]), g.op("Shape", ids, start=1, end=2)
        x = g.op("Add", x, g.op("Slice", f"{at}.position.weight", zero, tokens, zero))
        return self.rows(self.norm(x, f"{at}.norm"), g.op("Cast", mask, to=BOOL))

    def rows(self, hidden: str, mask: str) -> Rows:
        """Rows with these hidden states (B, T, D)."""
        g, (batch, tokens) = self.g, (self.g.op("Shape", mask, start=at, end=at + 1) for at in (0, 1))
        shape = g.op("Concat", batch, tokens, g.constant([self.width]), axis=0)
        square = g.op("Concat", batch, g.constant([1]), tokens, tokens, axis=0)
        return Rows(self.flat(hidden), mask, shape, g.op("Expand", g.op("Unsqueeze", mask, g.constant([1, 2])), square))

    def flat(self, x: str) -> str:
        """(B, T, D) -> (B T, D)."""
        return self.g.op("Reshape", x, self.g.constant([-1, self.width]))

    def advance(self, k: int, rows: Rows) -> Rows:
        """The layers of segment k."""
        for depth in range(0 if self.restarts else self.model.starts[k], self.model.exits[k]):
            rows = rows._replace(hidden=self.layer(rows, f"backbone.layers.{depth}", f"adapters.{k}.{depth}"))
        return rows

    def layer(self, rows: Rows, at: str, adapters: str) -> str:
        """The hidden states (B T, D) after a layer."""
        g, x, heads = self.g, rows.hidden, self.model.bert.config["num_attention_heads"]
        parts = zip(STACKED, g.several(3, "Split", self.linear(x, f"{at}.qkv"), axis=1, num_outputs=3))
        qkv = [g.op("Reshape", self.adapted(x, y, f"{adapters}.{name}"), rows.shape) for name, y in parts]
        a = self.flat(g.op("Attention", *qkv, rows.readable, q_num_heads=heads, kv_num_heads=heads))
        x = self.norm(g.op("Add", x, self.linear(a, f"{at}.attention_output", adapters)), f"{at}.attention_norm")
        inner = g.op("Gelu", self.linear(x, f"{at}.up", adapters))
        return self.norm(g.op("Add", x, self.linear(inner, f"{at}.down", adapters)), f"{at}.output_norm")

    def linear(self, x: str, name: str, adapters: str = "") -> str:
        """(N, I) -> (N, O)."""
        y = self.g.op("Gemm", x, f"{name}.weight", f"{name}.bias", transB=1)
        return self.adapted(x, y, f"{adapters}.{name.rpartition('.')[2]}")

    def adapted(self, x: str, y: str, name: str) -> str:
        """Eq. 2 of LoRAExit, y + scale x A B, if the exit has adapters of this name."""
        if f"{name}.A" not in self.g.weights:
            return y
        low = self.g.op("Mul", self.g.op("MatMul", x, f"{name}.A"), self.g.constant(self.model.scale))
        return self.g.op("Add", y, self.g.op("MatMul", low, f"{name}.B"))

    def norm(self, x: str, name: str) -> str:
        """Layer normalisation over the last axis."""
        return self.g.op("LayerNormalization", x, f"{name}.weight", f"{name}.bias", epsilon=self.model.bert.norm.eps)

    def pooled(self, rows: Rows) -> str:
        """What heads and policies read, (B, D)."""
        g, x = self.g, self.g.op("Reshape", rows.hidden, rows.shape)
        if self.model.pool == "first":
            return g.op("Gather", x, g.constant(0), axis=1)
        weights = g.op("Cast", rows.mask, to=FLOAT)
        total = g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", weights, g.constant([1])), x), g.constant([1]))
        return g.op("Div", total, g.op("ReduceSum", weights, g.constant([1])))

    def logits(self, k: int, pooled: str) -> str:
        """(B, D) -> (B, C)."""
        return self.linear(self.g.op("Tanh", self.linear(pooled, f"heads.{k}.dense")), f"heads.{k}.out")

    def exit_logit(self, k: int, pooled: str) -> str:
        """The policy's: (B, D) -> (B,)."""
        inner = self.g.op("Gelu", self.linear(pooled, f"policy.networks.{k}.0"))
        return self.g.op("Squeeze", self.linear(inner, f"policy.networks.{k}.2"), self.g.constant([1]))


def measured(g: Graph, name: str, logits: str, classes: int) -> str:
    """A confidence measure of rules.py on values of the graph: logits (B, C) -> (B,)."""
    axis = g.constant([1])
    shifted = g.op("Sub", logits, g.op("ReduceMax", logits, axis))
    total = g.op("ReduceSum", g.op("Exp", shifted), axis)
    if name == "max_probability":
        return g.op("Reciprocal", g.op("Squeeze", total, axis))
    log_p = g.op("Sub", shifted, g.op("Log", total))
    if name.startswith("breaking_ties"):
        values, _ = g.several(2, "TopK", log_p if name.endswith("logits") else g.op("Exp", log_p), g.constant([2]))
        first, second = g.several(2, "Split", values, axis=1, num_outputs=2)
        return g.op("Squeeze", g.op("Sub", first, second), axis)
    entropy = g.op("ReduceSum", g.op("Mul", g.op("Exp", log_p), log_p), axis, keepdims=0)
    share = g.op("Max", g.op("Div", entropy, g.constant(math.log(classes))), g.constant(-1.0))
    return entropy if name == "entropy" else share


class NestedIf(Parts):
    """The writer of one model.onnx. Raises ValueError for a rule that does not fit the model."""

    def __init__(self, g: Graph, model: Exits, rule: Rule):
        super().__init__(g, model)
        self.rule, self.last, self.defaults = rule, len(model.exits) - 1, graph_inputs(rule, len(model.exits))
        self.policy = isinstance(rule, Policy) and "threshold" in self.defaults
        if self.policy and not hasattr(model, "policies") or model.classes == 1 and isinstance(rule, Threshold):
            raise ValueError(f"{rule}: Policy needs a model with policies, and Threshold one with classes")

    def write(self) -> None:
        g, classes, rows, memory = self.g, self.model.classes, self.start(), dict[str, str]()
        count = g.op("Gather", rows.shape, g.constant([0]))
        default = self.defaults.get("exit_at", np.array([-1]))
        exit_at, zero = g.input("exit_at", INT64, "rows_planned", default=default), g.constant([0])
        known = g.op("Gather", g.constant(range(self.last + 1)), g.op("Max", exit_at, zero))  # fails if it is no exit
        exit_at = g.op("Expand", g.op("Where", g.op("Less", exit_at, zero), g.constant(default), known), count)
        if "threshold" in self.defaults:
            given = g.input("threshold", FLOAT, default=np.array(np.nan, np.float32))
            # Declared a scalar, which ONNX Runtime does not check; the Reshape declares the sizes that it gets.
            sizes = g.op("Concat", count, g.constant([self.last]), axis=0)
            given = g.op("Reshape", g.op("Expand", given, sizes), sizes)
            g.constants[OWN_THRESHOLD] = self.defaults["threshold"]
            memory["threshold"] = g.op("Where", g.op("IsNaN", given), OWN_THRESHOLD, given)
        if "patience" in self.defaults:
            g.input("patience", INT64, 1, default=self.defaults["patience"])
        logits, *others = self.from_exit(0, rows, exit_at, memory)
        g.output("logits", logits, FLOAT, "batch", classes)
        for value, (name, kind) in zip(others, (("layers", INT64), ("exit_logit", FLOAT))):
            g.output(name, value, kind, "batch")
        if classes == 1:
            g.output("label", g.op("Squeeze", logits, g.constant([1])), FLOAT, "batch")
        else:
            g.output("label", g.op("ArgMax", logits, axis=1, keepdims=0), INT64, "batch")
            g.output("confidence", measured(g, "max_probability", logits, classes), FLOAT, "batch")

    def from_exit(self, k: int, rows: Rows, exit_at: str, memory: dict[str, str]) -> list[str]:
        """Logits, layers (and exit_logit) of the rows that reach exit k, each from the exit where it stops."""
        g, count = self.g, self.g.op("Shape", exit_at, start=0, end=1)
        rows = rows if self.restarts else self.advance(k, rows)
        layers = g.op("Expand", g.constant([self.model.exits[k]]), count)
        if k == self.last:
            zero = [g.op("Expand", g.constant(0.0), count)] if self.policy else []
            return [self.read(k, rows), layers, *zero]
        (logits, *exit_logit), stops = self.at_exit(k, rows, exit_at, memory, count)
        here, continues = [logits, layers, *exit_logit], g.op("Not", stops)

        def later_exits() -> list[str]:
            index = g.op("Squeeze", g.op("NonZero", continues), g.constant([0]))
            hidden = g.op("Gather", g.op("Reshape", rows.hidden, rows.shape), index)
            kept = {name: g.op("Gather", value, index) for name, value in memory.items()}
            some = self.rows(hidden, g.op("Gather", rows.mask, index))
            later = self.from_exit(k + 1, some, g.op("Gather", exit_at, index), kept)
            places = g.op("Unsqueeze", index, g.constant([1]))
            return [g.op("ScatterND", value, places, new) for value, new in zip(here, later)]

        return g.either(continues, [FLOAT, INT64, FLOAT][: len(here)], later_exits, lambda: here)

    def at_exit(self, k: int, rows: Rows, exit_at: str, memory: dict[str, str], count: str) -> tuple[list[str], str]:
        """The logits (and exit_logit) of exit k, and which rows stop, (B,) bool. A head runs if its logits are read."""
        g, at, classes = self.g, self.g.constant(k), self.model.classes
        reached = g.op("LessOrEqual", exit_at, at)  # the plan has come to its exit, or there is none

        def logits_if(some: str, read: Callable[[], str]) -> str:  # else zeros, which nothing reads
            shape = g.op("Concat", count, g.constant([classes]), axis=0)
            return g.either(some, [FLOAT], lambda: [read()], lambda: [g.op("Expand", g.constant(0.0), shape)])[0]

        if "exit_at" in self.defaults:
            return [logits_if(reached, lambda: self.read(k, rows))], reached
        planned = g.op("GreaterOrEqual", exit_at, g.constant(0))
        if "patience" in self.defaults:
            logits = logits_if(reached, lambda: self.read(k, rows))
            return [logits], g.op("And", reached, g.op("Or", planned, self.patient(logits, memory, count)))
        least = g.op("Gather", memory["threshold"], at, axis=1)
        if self.policy:
            pooled = self.pooled(rows)
            exit_logit = self.exit_logit(k, pooled)
            stops = g.op("And", reached, g.op("Or", planned, g.op("Greater", exit_logit, least)))
            return [logits_if(stops, lambda: self.logits(k, pooled)), exit_logit], stops
        asked = g.op("And", reached, g.op("Or", planned, g.op("Less", least, g.constant(np.inf))))
        logits = logits_if(asked, lambda: self.read(k, rows))
        confident = g.op("GreaterOrEqual", measured(g, getattr(self.rule, "measure"), logits, classes), least)
        return [logits], g.op("And", reached, g.op("Or", planned, confident))

    def patient(self, logits: str, memory: dict[str, str], count: str) -> str:
        """Whether the rule Patience stops a row; `memory` gets its streak and its prediction."""
        g, zero, axis, regression = self.g, self.g.constant(0), self.g.constant([1]), self.model.classes == 1
        predicted = g.op("Squeeze", logits if regression else g.op("ArgMax", logits, axis=1), axis)
        streak = g.op("Expand", zero, count)
        if "streak" in memory:
            same = g.op("Equal", predicted, memory["predicted"])
            if regression:
                apart = g.op("Abs", g.op("Sub", predicted, memory["predicted"]))
                same = g.op("Less", apart, g.constant(getattr(self.rule, "tolerance")))
            streak = g.op("Where", same, g.op("Add", memory["streak"], g.constant(1)), zero)
        memory |= {"predicted": predicted, "streak": streak}
        return g.op("GreaterOrEqual", streak, "patience")

    def read(self, k: int, rows: Rows) -> str:
        """Logits of exit k. With restarts its layers run only here."""
        return self.logits(k, self.pooled(self.advance(k, rows) if self.restarts else rows))
