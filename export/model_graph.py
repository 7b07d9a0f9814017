"""The loop of early_exit.py as one ONNX graph, which stops by itself: model.onnx.

    input_ids, attention_mask, ...  (B, T) int64; of tokens positions, rows and caches: see units/token_graphs.py
    threshold                       (K - 1,) float32, or `patience` (1,) int64: the rule's own unless others are fed; of
                                    a policy on its exit_logit; inf: nobody leaves, and no head is read
    exit_at                         (B,) or (1,) int64: index of the exit at which a row leaves; negative: the rule says
 -> logits (B, C), label (B,), confidence (B,), layers (B,); exit_logit (B,) where a policy decides; of tokens caches,
    and no label: the caches of layers that a token did not run are filled as `propagate` does; spent (B, 2), as Reading
    has it, where the tokens of a row leave

After exit k an If asks whether anybody stays. Its branch takes those rows, runs the layers up to exit k + 1, and in it
the same again; what it says is scattered over what exit k said. So a graph is as deep as the model has exits, and what
is not run costs nothing. The segments say what is computed: graph_start, graph_advance, graph_read, graph_read_state,
graph_read_saturation.
"""

import numpy as np

from mini_ee.confidence import graph_max_probability
from mini_ee.early_exit import Reading
from mini_ee.rules import Rule
from mini_ee.units.token_graphs import output_caches

INFINITY = np.array(np.inf, np.float32)


def write_model_graph(g, segments, rule: Rule) -> None:
    """The graph of a model under a rule; one that plans from texts is fed, as any plan is, by `exit_at`."""
    _ModelGraph(g, segments, rule).write()


class _ModelGraph:
    def __init__(self, g, segments, rule: Rule):
        self.g, self.segments, self.rule = g, segments, rule
        facts, self.last = segments.facts(), len(segments.exits) - 1
        self.decides = self.last > 0 and rule.needs is not None and not rule.plans_from_texts
        self.says_exit_logit = self.decides and rule.asks_policy
        self.classes = facts["vocab_size"] if facts["unit"] == "tokens" else facts["num_labels"]

    def write(self) -> None:
        g, state = self.g, self.segments.graph_start(self.g)
        names = ["logits", "layers", *["spent"] * self.segments.tokens_leave, *["exit_logit"] * self.says_exit_logit]
        values = self._from_exit(0, state, self._bars(), {})
        for name, value in zip(names, values):
            g.output(name, value.name, "batch", *value.axes[1:], dtype=value.dtype)
        if self.segments.facts()["unit"] == "tokens":
            kinds = (f"{kind}_{layer}" for layer in range(self.segments.exits[-1]) for kind in ("keys", "values"))
            output_caches(g, values[len(names) :], kinds)
        else:
            self._write_labels(values[0].name)

    def _write_labels(self, logits: str) -> None:
        g = self.g
        if self.classes == 1:
            g.output("label", g.op("Squeeze", logits, g.integers(1)), "batch", dtype=np.float32)
        else:
            g.output("label", g.op("ArgMax", logits, axis=1, keepdims=0), "batch", dtype=np.int64)
            g.output("confidence", graph_max_probability(g, logits), "batch", dtype=np.float32)

    def _bars(self) -> str:
        """(B, K - 1) float32: what each row is compared with at each exit; -inf and inf where a plan decides."""
        g, rule, last = self.g, self.rule, self.last
        planned = None if self.decides or rule.plans_from_texts else rule.plan(range(1))
        own = np.array([-1 if self.decides else last]) if planned is None else planned
        exit_at = g.default("exit_at", own, "rows_planned")
        plans = np.where(np.arange(last + 1)[:, None] <= np.arange(last), -np.inf, np.inf).astype(np.float32)
        bars = g.op("Gather", g.constant("plans", plans), g.op("Max", exit_at, g.integers(0)))
        shape = g.op("Concat", g.shape(g.input("input_ids", "batch", "tokens"), 0, 1), g.integers(last), axis=0)
        if self.decides:
            settings = [(name, g.default(name, value, len(value))) for name, value in rule.graph_settings(last).items()]
            ruled = g.cast(settings[0][1], np.float32) if settings else g.constant("zero", np.zeros(1, np.float32))
        else:
            ruled = g.constant("own_plan", plans[own[0]])
        unplanned = g.op("Unsqueeze", g.op("Less", exit_at, g.integers(0)), g.integers(1))
        return g.op("Expand", g.op("Where", unplanned, ruled, bars), shape)

    def _from_exit(self, k: int, state, bars: str, memory: dict[str, str]) -> list:
        """What exit k says of the units that come to it, and later exits say over it, as values: logits, layers; behind
        them what the layers from here on leave behind.
        """
        g, segments = self.g, self.segments
        state = segments.graph_advance(k, g, state)
        written, rows = segments.graph_written(k, g, state), g.shape(bars, 0, 1)
        if k == self.last:
            nothing = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), rows)
            read = g.float32(segments.graph_read(k, g, state))
            return self._said(k, read, state, rows, [nothing] * self.says_exit_logit) + written
        bar = g.op("Gather", bars, g.constant(f"scalar_{k}", np.array(k)), axis=1)
        said, leaves = self._at_exit(k, state, (bar, rows), memory)
        stays = g.op("Not", leaves)

        def go_on() -> list:
            index = g.op("Squeeze", g.op("NonZero", stays), g.integers(0))
            with g.rows(index):
                on = {name: g.op("Gather", value, index) for name, value in memory.items()}
                kept = segments.graph_keep(g, state, index, leaves)
                later = self._from_exit(k + 1, kept, g.op("Gather", bars, index), on)
            places = g.op("Unsqueeze", index, g.integers(1))
            over = [v._replace(name=g.op("ScatterND", v.name, places, new.name)) for v, new in zip(said, later)]
            return over + later[len(said) :]

        values = g.either(g.any(stays), go_on, lambda: said + segments.graph_fill(k, g, state))
        return values[: len(said)] + written + values[len(said) :]

    def _at_exit(self, k: int, state, of_rows: tuple[str, str], memory: dict[str, str]) -> tuple[list, str]:
        """What an exit says as values, and who leaves (B,) bool. The head is read where somebody leaves, or asks.

        of_rows: the bar of each (B,), and how many they are (1,).
        """
        (bar, rows), g, segments, rule = of_rows, self.g, self.segments, self.rule
        if self.decides and rule.needs == "logits":
            asked = g.op("Less", g.op("ReduceMin", bar, keepdims=0), g.constant("inf", INFINITY))
            logits = self._where_asked(asked, k, state, rows)
            number = g.op("Squeeze", logits, g.integers(1)) if self.classes == 1 else None
            leaves = rule.graph_stop(g, k, Reading(logits, prediction=number), bar, memory)
            return self._said(k, logits, state, rows, []), leaves
        exit_logit = []
        if self.decides:
            read = segments.graph_read_state if rule.asks_policy else segments.graph_read_saturation
            reading = read(k, g, state)
            leaves = rule.graph_stop(g, k, reading, bar, memory)
            exit_logit = [reading.exit_logit] * self.says_exit_logit
        else:
            leaves = g.op("Less", bar, g.constant("float_0", np.zeros((), np.float32)))
        return self._said(k, self._where_asked(g.any(leaves), k, state, rows), state, rows, exit_logit), leaves

    def _said(self, k: int, logits: str, state, rows: str, exit_logit: list[str]) -> list:
        g, axis = self.g, f"rows_{k}"
        layers = g.op("Expand", g.integers(self.segments.exits[k]), rows)
        said = [g.value(logits, axis, self.classes, dtype=np.float32), g.value(layers, axis, dtype=np.int64)]
        if self.segments.tokens_leave:
            said.append(g.value(self.segments.graph_spent(g, state), axis, 2, dtype=np.float32))
        return said + [g.value(name, axis, dtype=np.float32) for name in exit_logit]

    def _where_asked(self, condition: str, k: int, state, rows: str) -> str:
        """What the head says (B, C), where the condition () holds; else zeros, which nobody looks at."""
        g = self.g

        def read() -> list:
            logits = g.float32(self.segments.graph_read(k, g, state))
            return [g.value(logits, "rows_read", self.classes, dtype=np.float32)]

        def nothing() -> list:
            shape = g.op("Concat", rows, g.integers(self.classes), axis=0)
            zeros = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), shape)
            return [g.value(zeros, "rows_read", self.classes, dtype=np.float32)]

        return g.either(condition, read, nothing)[0].name
