"""The loop of early_exit.py as one ONNX graph, which stops by itself: model.onnx.

    input_ids, attention_mask, ...  (B, T) int64
    threshold                       (K - 1,) float32, or `patience` (1,) int64: the rule's own unless others are fed; of
                                    a policy on its exit_logit; inf: nobody leaves, and no head is read
    exit_at                         (B,) or (1,) int64: index of the exit at which a row leaves; -1, where the rule says
 -> logits (B, C), label (B,), confidence (B,), layers (B,); exit_logit (B,) where a policy decides

After exit k an If asks whether anybody stays. Its branch takes those rows, runs the layers up to exit k + 1, and in it
the same again; what it says is scattered over what exit k said. So a graph is as deep as the model has exits, and what
is not run costs nothing. The segments say what is computed: graph_start, graph_advance, graph_read, graph_read_state.
"""

from collections.abc import Callable

import numpy as np

from mini_ee.early_exit import Reading
from mini_ee.rules import Rule

INFINITY = np.array(np.inf, np.float32)


def write_model_graph(g, segments, rule: Rule) -> None:
    """The graph of a model of rows under a rule; one that plans from texts is fed, as any plan is, by `exit_at`."""
    _ModelGraph(g, segments, rule).write()


class _ModelGraph:
    def __init__(self, g, segments, rule: Rule):
        self.g, self.segments, self.rule = g, segments, rule
        self.last = len(segments.exits) - 1
        self.decides = self.last > 0 and rule.needs is not None and not rule.plans_from_texts
        self.classes = segments.facts()["num_labels"]

    def write(self) -> None:
        g, state = self.g, self.segments.graph_start(self.g)
        names, values = ["logits", "layers", "exit_logit"], self._from_exit(0, state, self._bars(), {})
        for name, value in zip(names, values):
            g.output(name, value, "batch", *[self.classes] * (name == "logits"), dtype=self._dtype(name))
        logits = values[0]
        if self.classes == 1:
            g.output("label", g.op("Squeeze", logits, g.integers(1)), "batch", dtype=np.float32)
        else:
            g.output("label", g.op("ArgMax", logits, axis=1, keepdims=0), "batch", dtype=np.int64)
            surest = g.op("ReduceMax", g.op("Softmax", logits, axis=1), g.integers(1), keepdims=0)
            g.output("confidence", surest, "batch", dtype=np.float32)

    @staticmethod
    def _dtype(name: str) -> type:
        return np.int64 if name == "layers" else np.float32

    def _bars(self) -> str | None:
        """(B, K - 1) float32: what each row is compared with at each exit; -inf and inf where a plan decides."""
        g, rule, last = self.g, self.rule, self.last
        planned = rule.plan(range(1)) if not rule.plans_from_texts else None
        own = last if not self.decides else -1
        own = own if planned is None else int(planned[0])
        exit_at = g.default("exit_at", np.array([own]), "rows_planned")
        zero, one, beyond = (g.constant(f"scalar_{value}", np.array(value)) for value in (0, 1, last + 2))
        row = g.op("Add", exit_at, one)
        row = g.op("Where", g.op("Less", row, zero), beyond, row)  # Gather would count it from the end
        exits = np.arange(last)
        table = np.stack([np.full(last, np.nan), *(np.where(at <= exits, -np.inf, np.inf) for at in range(last + 1))])
        bars = g.op("Gather", g.constant("plans", table.astype(np.float32)), row)
        shape = g.op("Concat", g.shape(g.input("attention_mask", "batch", "tokens"), 0, 1), g.integers(last), axis=0)
        if not self.decides:
            return g.op("Expand", bars, shape)
        settings = [(name, g.default(name, value, len(value))) for name, value in rule.graph_settings(last).items()]
        own = g.cast(settings[0][1], np.float32) if settings else g.constant("zero", np.zeros(1, np.float32))
        return g.op("Expand", g.op("Where", g.op("IsNaN", bars), own, bars), shape)

    def _from_exit(self, k: int, state: str | None, bars: str, memory: dict[str, str]) -> list[str]:
        """What exit k says of the rows that come to it, and later exits say over it: logits, layers."""
        g, segments, rule = self.g, self.segments, self.rule
        state = segments.graph_advance(k, g, state)
        rows = g.shape(bars, 0, 1)
        layers = g.op("Expand", g.integers(segments.exits[k]), rows)

        def read() -> str:
            return g.float32(segments.graph_read(k, g, state))

        if k == self.last:
            nothing = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), rows)
            return [read(), layers, *[nothing] * self._says_exit_logit]
        bar = g.op("Gather", bars, g.constant(f"scalar_{k}", np.array(k)), axis=1)
        if not self.decides:
            leaves = g.op("Less", bar, g.constant("float_0", np.zeros((), np.float32)))
            said = [self._where_asked(g.any(leaves), read, rows), layers]
        elif rule.needs == "state":
            reading = segments.graph_read_state(k, g, state)
            leaves = rule.graph_stop(g, k, reading, bar, memory)
            said = [self._where_asked(g.any(leaves), read, rows), layers]
            said += [reading.exit_logit] * self._says_exit_logit
        else:
            asked = g.op("Less", g.op("ReduceMin", bar, keepdims=0), g.constant("inf", INFINITY))
            logits = self._where_asked(asked, read, rows)
            number = g.op("Squeeze", logits, g.integers(1)) if self.classes == 1 else None
            leaves = rule.graph_stop(g, k, Reading(logits, prediction=number), bar, memory)
            said = [logits, layers]
        stays = g.op("Not", leaves)
        axes = [("rows", self.classes), ("rows",), ("rows",)]
        values = [
            g.value(name, f"rows_{k}", *axis[1:], dtype=dtype)
            for name, axis, dtype in zip(said, axes, (np.float32, np.int64, np.float32))
        ]

        def go_on() -> list:
            index = g.op("Squeeze", g.op("NonZero", stays), g.integers(0))

            def kept(value: str) -> str:
                return g.op("Gather", value, index)

            with g.rows(index):
                on = {name: kept(value) for name, value in memory.items()}
                later = self._from_exit(k + 1, state and kept(state), kept(bars), on)
            places = g.op("Unsqueeze", index, g.integers(1))
            return [v._replace(name=g.op("ScatterND", v.name, places, new)) for v, new in zip(values, later)]

        return [value.name for value in g.either(g.any(stays), go_on, lambda: values)]

    @property
    def _says_exit_logit(self) -> bool:
        return self.decides and self.rule.needs == "state"

    def _where_asked(self, condition: str, read: Callable[[], str], rows: str) -> str:
        """What the head says (B, C), where somebody asks; else zeros, which nobody looks at."""
        g = self.g

        def nothing() -> list:
            zeros = g.op(
                "Expand",
                g.constant("zero", np.zeros(1, np.float32)),
                g.op("Concat", rows, g.integers(self.classes), axis=0),
            )
            return [g.value(zeros, "rows_read", self.classes, dtype=np.float32)]

        return g.either(condition, lambda: [g.value(read(), "rows_read", self.classes, dtype=np.float32)], nothing)[
            0
        ].name
