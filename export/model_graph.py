"""The loop of early_exit.py as one ONNX graph, which stops by itself: model.onnx.

    input_ids, attention_mask, ...  (B, T) int64; of tokens positions, rows and caches: see token_graphs.py
    threshold                       (K - 1,) float32, or `patience` (1,) int64: the rule's own unless others are fed; of
                                    a policy on its exit_logit; inf: nobody leaves, and no head is read
    exit_at                         (B,) or (1,) int64: index of the exit at which a row leaves; negative: the rule says
 -> logits (B, C), label (B,), confidence (B,), layers (B,); exit_logit (B,) where a policy decides; of tokens caches,
    and no label: the caches of layers that a token did not run are filled as `copy_state` does; spent (B, 2),
    the token_cost of a Reading, if tokens exit within a row; for the page in the browser, instead of exit_logit,
    compared_threshold (B,) or compared_patience (B,): what the rule compares with that input at the exit where a row
    leaves, inf if unknown

After exit k an If asks whether anybody stays. Its branch takes those rows, runs the layers up to exit k + 1, and in it
the same again; what it says is scattered over what exit k said. So a graph is as deep as the model has exits, and what
is not run costs nothing. What is computed is the segments' own start, advance, read_logits, read_state and keep, and
the rule's own stop, which run here on values of the graph (tracing.py).
"""

import numpy as np

from mini_ee.confidence import max_probability
from mini_ee.export.token_graphs import output_caches
from mini_ee.export.tracing import ArrayValue
from mini_ee.rules import Rule
from mini_ee.segments import Reading

INFINITY = np.array(np.inf, np.float32)


def write_model_graph(g, segments, rule: Rule, compared: bool = False) -> None:
    """The graph of a model under a rule; one that plans from texts is fed, as any plan is, by `exit_at`.

    compared: whether it also gives what the rule compares with each of its inputs.
    """
    _ModelGraph(g, segments, rule, compared).write()


class _ModelGraph:
    def __init__(self, g, segments, rule: Rule, compared: bool):
        self.g, self.segments, self.rule = g, segments, rule
        self.last = len(segments.exits) - 1
        self.starts_anew = self.last > 0 and all(k in segments.from_embeddings for k in range(self.last + 1))
        self.tokens = segments.model.unit == "tokens"
        self.decides = self.last > 0 and rule.needs is not None and not rule.plans_from_texts
        self.compared = compared and self.decides
        self.beside = [f"compared_{name}" for name in rule.runtime_inputs] if self.compared else []
        if self.decides and rule.needs_policy and not compared:
            self.beside = ["exit_logit"]
        self.classes = segments.model.backbone.config.vocab_size if self.tokens else segments.model.num_labels
        memory: dict = {}
        if self.decides and rule.needs == "logits":
            rule.stop(0, Reading(np.zeros((1, self.classes), np.float32)), memory)
        self.remembers = bool(memory)

    def write(self) -> None:
        g, segments = self.g, self.segments
        with g.tracing():
            values = self._from_exit(0, segments.start(g.inputs()), self._plan(), {})
        names = ["logits", "layers", *["spent"] * segments.tokens_exit, *self.beside]
        for name, value in zip(names, values):
            g.output(name, value.name, "batch", *value.axes[1:], dtype=value.dtype)
        if self.tokens:
            kinds = (f"{kind}_{layer}" for layer in range(segments.exits[-1]) for kind in ("keys", "values"))
            output_caches(g, values[len(names) :], kinds)
        else:
            self._write_labels(values[0].name)

    def _write_labels(self, logits: str) -> None:
        g = self.g
        if self.classes == 1:
            g.output("label", g.op("Squeeze", logits, g.integers(1)), "batch", dtype=np.float32)
        else:
            g.output("label", g.op("ArgMax", logits, axis=1, keepdims=0), "batch", dtype=np.int64)
            confidence = max_probability(g.array(logits, "batch", self.classes)).name
            g.output("confidence", confidence, "batch", dtype=np.float32)

    def _plan(self) -> str:
        """(B,) int64: at which exit each row is to leave; negative: the rule decides. Else the rule's own plan."""
        g, rule, last = self.g, self.rule, self.last
        planned = None if self.decides or rule.plans_from_texts else rule.plan(range(1))
        own = np.array([-1 if self.decides else last]) if planned is None else planned
        exit_at = g.default("exit_at", own, "rows_planned")
        exits = g.constant("exits", np.arange(last + 1))
        known = g.op("Gather", exits, g.op("Max", exit_at, g.integers(0)))  # an error for an exit that is none
        exit_at = g.op("Where", g.op("Less", exit_at, g.integers(0)), g.integers(*own), known)
        return g.op("Expand", exit_at, g.shape(g.input("input_ids", "batch", "tokens"), 0, 1))

    def _rule_at(self, k: int) -> tuple[Rule, dict[str, ArrayValue], ArrayValue | None]:
        """The rule with the inputs of the graph as they are at exit k; these inputs; and its threshold (): if that is
        inf, the head is not read. Of a rule with a memory it is the least from there on: later exits ask for it.
        """
        g, values, least = self.g, {}, None
        for name, own in self.rule.runtime_values(self.last).items():
            values[name] = g.array(g.default(name, own, len(own)), len(own), dtype=own.dtype)
            if own.dtype == np.float32:  # one for each exit
                rest, values[name] = values[name][k:], values[name][k]
                if name == "threshold":
                    least = rest.min(axis=0) if self.remembers else values[name]
            values[name].compared = []
        return self.rule.with_runtime(values), values, least

    def _from_exit(self, k: int, state, exit_at: str, memory: dict[str, ArrayValue]) -> list:
        """What exit k says of the units that come to it, and later exits say over it, as values: logits, layers; behind
        them what the layers from here on leave behind.
        """
        g, segments = self.g, self.segments
        state = state if self.starts_anew else segments.advance(k, state)
        written, rows = segments.written(state) if self.tokens else [], g.shape(exit_at, 0, 1)
        if k == self.last:
            nothing = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), rows)
            read = self._read_logits(k, state)
            said = self._said(k, read.logits.name, rows, [nothing] * len(self.beside))
            if segments.tokens_exit:
                said.insert(2, g.value(read.token_cost.name, f"rows_{k}", 2, dtype=np.float32))
            return said + written
        said, leaves = self._at_exit(k, state, g.array(exit_at, f"rows_{k}", dtype=np.int64), memory)
        stays = ~leaves

        def go_on() -> list:
            index = np.flatnonzero(stays)
            on = {name: value[index] for name, value in memory.items()}
            rows = index.tensor()
            state_on = segments.keep_in_graph(state, rows, leaves.tensor()) if self.tokens else state.keep(rows)
            later = self._from_exit(k + 1, state_on, g.op("Gather", exit_at, index.name), on)
            places = g.op("Unsqueeze", index.name, g.integers(1))
            over = [v._replace(name=g.op("ScatterND", v.name, places, new.name)) for v, new in zip(said, later)]
            return over + later[len(said) :]

        def all_exit() -> list:
            return said + (segments.filled(k, state) if self.tokens else [])

        values = g.either(g.any(stays.name), go_on, all_exit)
        return values[: len(said)] + written + values[len(said) :]

    def _at_exit(self, k: int, state, exit_at: ArrayValue, memory: dict[str, ArrayValue]) -> tuple[list, ArrayValue]:
        """What an exit says as values, and who leaves (B,) bool. The head is read where somebody leaves, or asks."""
        g, segments = self.g, self.segments
        rows, beside, leaves = g.shape(exit_at.name, 0, 1), [], exit_at <= k
        if not self.decides:
            logits = self._where_asked(g.any(leaves.name), k, state, rows)
            return self._said(k, logits, rows, []), leaves
        planned, (rule, inputs, least) = exit_at >= 0, self._rule_at(k)  # what is not planned is negative: it may leave
        if rule.needs == "logits":
            asked = leaves if least is None else leaves & (planned | (least < np.inf))
            logits = self._where_asked(g.any(asked.name), k, state, rows)
            reading = Reading(g.array(logits, f"rows_{k}", self.classes))
        else:
            reading = segments.read_state(k, state)
            beside = [] if reading.exit_logit is None else [reading.exit_logit.name] * len(self.beside)
        leaves = leaves & (planned | rule.stop(k, reading, memory))
        if rule.needs != "logits":
            logits = self._where_asked(g.any(leaves.name), k, state, rows)
        if self.compared:
            beside = [self._one_number(value.compared, rows) for value in inputs.values()]
        return self._said(k, logits, rows, beside), leaves

    def _one_number(self, values: list, rows: str) -> str:
        """(B,) float32: the first of some values that has one number of each row; inf if there is none."""
        of_rows = (each for each in values if isinstance(each, ArrayValue) and each.ndim == 1)
        unknown = self.g.op("Expand", self.g.constant("infinity", INFINITY[None]), rows)
        return next((each.astype(np.float32).name for each in of_rows), unknown)

    def _said(self, k: int, logits: str, rows: str, beside: list[str]) -> list:
        g, axis = self.g, f"rows_{k}"
        layers = g.op("Expand", g.integers(self.segments.exits[k]), rows)
        said = [g.value(logits, axis, self.classes, dtype=np.float32), g.value(layers, axis, dtype=np.int64)]
        return said + [g.value(name, axis, dtype=np.float32) for name in beside]

    def _read_logits(self, k: int, state) -> Reading:
        """If all exits start from the embeddings, the layers of one run together with its head."""
        state = self.segments.advance(k, state) if self.starts_anew else state
        return self.segments.read_logits(k, state)

    def _where_asked(self, condition: str, k: int, state, rows: str) -> str:
        """What the head says (B, C), where the condition () holds; else zeros, which nobody looks at."""
        g = self.g

        def read() -> list:
            logits = self._read_logits(k, state).logits.name
            return [g.value(logits, "rows_read", self.classes, dtype=np.float32)]

        def nothing() -> list:
            shape = g.op("Concat", rows, g.integers(self.classes), axis=0)
            zeros = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), shape)
            return [g.value(zeros, "rows_read", self.classes, dtype=np.float32)]

        return g.either(condition, read, nothing)[0].name
