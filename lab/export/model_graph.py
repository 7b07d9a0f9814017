"""The loop of early_exit.py as one ONNX graph that stops by itself: model.onnx.

    input_ids, attention_mask, ...  (B, T) int64; for tokens also positions, rows and caches, see token_graphs.py
    threshold                       float32: (B, K - 1), by row and exit but the last; (K - 1,), by exit; or () for all;
                                    sizes of 1 broadcast. By default, and for entries that are NaN, the run's own. For a
                                    policy it applies to the exit_logit. inf: no row exits there; if all rows have it,
                                    the head is not evaluated. For a decoder (K - 1,) only, and required
    patience                        (1,) int64, if the rule counts exits
    exit_at                         (B,) or (1,) int64: index of the exit of a row; negative: the rule decides
 -> logits (B, C), label (B,), confidence (B,), layers (B,); of a sentence encoder sentence_embedding (B, d) and layers
    labels (B, C) bool              instead of label, if a row may have several labels at once
    logits (B, T, C), label (B, T)  if tokens have labels; confidence (B,) is then that of the least confident token
    start_logits, end_logits        (B, T) instead of label, if a span of tokens answers a question
    last_hidden_state (B, T, d)     of a sentence encoder: the embedding of a text at each of its tokens, which clients
                                    that pool tokens in any way therefore get
    exit_logit (B,)                 if a policy decides; short_list (B,) if that measure of lenses does
    spent (B, 2)                    if tokens exit within a row: the token_cost of Segments
    keys_0_out, values_0_out, ...   for tokens, instead of a label; layers that a token did not run get the keys and
                                    values that `copy_state` computes
    compared_threshold (B,) or      for the page in the browser, instead of exit_logit: what the rule compares with that
    compared_patience (B,)          input at the exit of each row, inf if unknown

The graph is as deep as the model has exits. After exit k there is an If:

    then    gather the rows that continue, run the layers up to exit k + 1, and the same again for exit k + 1
    else    all rows have exited: the values of exit k are the result

ONNX has no loop that drops rows, so the branches are nested: the If of exit k + 1 stands within the `then` branch of
exit k. Its outputs have only the rows that continue. ScatterND writes them over the values of exit k, at the places
of these rows. A branch is run only if its condition holds, so layers that no row needs cost nothing.

Each step is the segments' own start, advance, read, exit_logit and keep, and the rule's own stop, run on values of the
graph (tracing.py).
"""

import numpy as np

from mini_ee.lab.confidence import weakest_label
from mini_ee.lab.export.manifest import output_of
from mini_ee.lab.export.token_graphs import output_caches
from mini_ee.lab.export.token_segments import OF_STATES, cache_names
from mini_ee.lab.export.tracing import ArrayValue
from mini_ee.lab.row_thresholds import THRESHOLD
from mini_ee.lab.rule_inputs import runtime_inputs, runtime_values, with_runtime
from mini_ee.lab.rules import Rule
from mini_ee.lab.token_tasks import ENDS, LABELS, WEAKEST
from mini_ee.rules import max_probability

INFINITY = np.array(np.inf, np.float32)


def write_model_graph(g, segments, rule: Rule, compared: bool = False) -> None:
    """Write the graph of a model with a rule. A rule that plans from texts passes its plan through `exit_at`.

    compared: whether the graph also returns what the rule compares with each of its inputs.
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
        self.extra = [f"compared_{name}" for name in runtime_inputs(rule)] if self.compared else []
        if self.decides and rule.needs in OF_STATES and not compared:
            self.extra = [rule.needs]
        self.classes = segments.model.backbone.config.vocab_size if self.tokens else segments.model.num_labels
        self.token_task = segments.token_task
        self.axes = (self.classes,) if self.token_task is None else ("tokens", self.classes)  # of a row's logits
        self.read, self.dtype = segments.read, np.float32
        # The rule reads no logits, so the vocabulary is read once, in the main graph, of the states that exited.
        self.reads_once = self.tokens and segments.shares_head and not (self.decides and rule.needs == "logits")
        if self.reads_once:
            self.axes, self.read = (segments.model.backbone.config.hidden_size,), segments.mapped
            self.dtype = g.dtype
        memory: dict = {}
        if self.decides and rule.needs == "logits":  # one call in numpy shows whether the rule remembers earlier exits
            rule.stop(0, np.zeros((1, self.classes), np.float32), memory)
        self.remembers = bool(memory)

    def write(self) -> None:
        g, segments = self.g, self.segments
        with g.tracing():
            values = self._from_exit(0, segments.start(g.inputs()), self._plan(), self._memory())
            if self.reads_once:
                states = g.tensor(values[0].name, "batch", *self.axes)
                logits = segments.model.backbone.lm_logits(states)
                values[0] = g.value(logits.name, "batch", self.classes, dtype=np.float32)
        names = [output_of(segments.model.unit), "layers", *["spent"] * segments.tokens_exit, *self.extra]
        for name, value in zip(names, values):
            g.output(name, value.name, "batch", *value.axes[1:], dtype=value.dtype)
        if self.tokens:
            output_caches(g, values[len(names) :], cache_names(segments.exits, segments.model.own_layers))
        elif names[0] == "logits":
            self._write_labels(values[0].name)
        else:
            self._write_tokens(values[0].name)

    def _write_labels(self, logits: str) -> None:
        g = self.g
        if self.token_task is not None:
            self._write_token_labels(g.array(logits, "batch", *self.axes))
        elif self.classes == 1:
            g.output("label", g.op("Squeeze", logits, g.integers(1)), "batch", dtype=np.float32)
        else:
            values, several = g.array(logits, "batch", self.classes), self.segments.model.multi_label
            if several:
                g.output("labels", (values > 0).name, "batch", self.classes, dtype=bool)
            else:
                g.output("label", g.op("ArgMax", logits, axis=1, keepdims=0), "batch", dtype=np.int64)
            confidence = weakest_label(values) if several else max_probability(values)
            g.output("confidence", confidence.name, "batch", dtype=np.float32)

    def _write_token_labels(self, logits: ArrayValue) -> None:
        g, inputs = self.g, self.g.inputs()
        if self.token_task.kind == LABELS:
            g.output("label", logits.argmax(axis=2).name, "batch", "tokens", dtype=np.int64)
        else:
            for at, end in enumerate(ENDS):
                g.output(f"{end}_logits", logits[..., at].name, "batch", "tokens", dtype=np.float32)
        counted = self.token_task.counted(inputs.input_ids, inputs.attention_mask).numpy()
        g.output("confidence", self.token_task.weakest(logits, counted).name, "batch", dtype=np.float32)

    def _write_tokens(self, embedding: str) -> None:
        g, tokens = self.g, self.g.shape(self.g.input("input_ids", "batch", "tokens"), 0, 2)
        shape = g.op("Concat", tokens, g.integers(self.classes), axis=0)
        of_tokens = g.op("Expand", g.op("Unsqueeze", embedding, g.integers(1)), shape)
        g.output("last_hidden_state", of_tokens, "batch", "tokens", self.classes, dtype=np.float32)

    def _plan(self) -> str:
        """(B,) int64: the exit of each row, from `exit_at` or the rule's own plan; negative: the rule decides."""
        g, rule, last = self.g, self.rule, self.last
        planned = None if self.decides or rule.plans_from_texts else rule.plan(range(1))
        default_plan = np.array([-1 if self.decides else last]) if planned is None else planned
        exit_at = g.default("exit_at", default_plan, "rows_planned")
        exits = g.constant("exits", np.arange(last + 1))
        known = g.op("Gather", exits, g.op("Max", exit_at, g.integers(0)))  # fails for an index that is no exit
        exit_at = g.op("Where", g.op("Less", exit_at, g.integers(0)), g.integers(*default_plan), known)
        return g.op("Expand", exit_at, g.shape(g.input("input_ids", "batch", "tokens"), 0, 1))

    def _memory(self) -> dict[str, ArrayValue]:
        """The rule's memory at the first exit: the thresholds of the rows (B, K - 1), see row_thresholds.py.

        ONNX has no input of any rank, but ONNX Runtime checks no sizes of an input that is declared a scalar. It trusts
        the declared sizes when it plans memory, so the first node gives the value sizes that are known only when the
        graph runs. The Reshape fails for sizes that do not fit.
        """
        g, thresholds = self.g, runtime_values(self.rule, self.last).get(THRESHOLD) if self.decides else None
        if thresholds is None or self.tokens:  # a token of a decoder takes little time: its rows share a threshold
            return {}
        given = g.default(THRESHOLD, np.array(np.nan, np.float32))
        rows = g.shape(g.input("input_ids", "batch", "tokens"), 0, 1)
        sizes = g.op("Concat", rows, g.integers(self.last), axis=0)
        given = g.op("Reshape", g.op("Expand", given, sizes), sizes)
        of_rows = g.op("Where", g.op("IsNaN", given), g.constant("own_threshold", thresholds), given)
        return {THRESHOLD: g.array(of_rows, "batch", self.last)}

    def _rule_at(self, k: int, memory: dict) -> tuple[Rule, dict[str, ArrayValue], ArrayValue | None]:
        """The rule with the graph's inputs as its settings at exit k, these inputs, and a threshold (B,) or ().

        If that threshold is inf, the head is not evaluated. A rule that remembers logits of earlier exits needs them at
        later exits too: then it is the smallest threshold from exit k on.
        """
        g, values, least = self.g, {}, None
        for name, default in runtime_values(self.rule, self.last).items():
            if name not in memory:
                values[name] = g.array(g.default(name, default, len(default)), len(default), dtype=default.dtype)
            if name == THRESHOLD:  # one value per exit
                given = memory.get(name, values.get(name))
                values[name] = given[..., k]
                least = given[..., k:].min(axis=-1) if self.remembers else values[name]
            values[name].compared = []
        return with_runtime(self.rule, values), values, least

    def _from_exit(self, k: int, state, exit_at: str, memory: dict[str, ArrayValue]) -> list:
        """The outputs of the rows that reach exit k, as values: logits, layers and `extra`, each from the exit of the
        row. For tokens, the caches of the layers from here on follow.
        """
        g, segments = self.g, self.segments
        state = state if self.starts_anew else segments.advance(k, state)
        written, rows = segments.written(state) if self.tokens else [], g.shape(exit_at, 0, 1)
        if k == self.last:  # every row that reaches the last exit exits there
            nothing = g.op("Expand", g.constant("zero", np.zeros(1, np.float32)), rows)
            state = segments.advance(k, state) if self.starts_anew else state
            here = self._exit_values(k, self.read(k, state).name, rows, [nothing] * len(self.extra))
            if segments.tokens_exit:
                here.insert(2, g.value(segments.token_cost(k, state).name, f"rows_{k}", 2, dtype=np.float32))
            return here + written
        here, exits = self._at_exit(k, state, g.array(exit_at, f"rows_{k}", dtype=np.int64), memory)
        continues = ~exits

        def later_exits() -> list:
            index = np.flatnonzero(continues)
            remaining_memory = {name: value[index] for name, value in memory.items()}
            rows = index.tensor()
            remaining = segments.keep_in_graph(state, rows, exits.tensor()) if self.tokens else state.keep(rows)
            later = self._from_exit(k + 1, remaining, g.op("Gather", exit_at, index.name), remaining_memory)
            # `later` has a row for each index. Where the row exited later, its values replace those of this exit.
            places = g.op("Unsqueeze", index.name, g.integers(1))
            merged = [v._replace(name=g.op("ScatterND", v.name, places, new.name)) for v, new in zip(here, later)]
            return merged + later[len(here) :]

        def all_exit() -> list:  # both branches return the same values: caches of layers above exit k are filled here
            return here + (segments.filled(k, state) if self.tokens else [])

        values = g.either(g.any(continues.name), later_exits, all_exit)
        return values[: len(here)] + written + values[len(here) :]

    def _at_exit(self, k: int, state, exit_at: ArrayValue, memory: dict[str, ArrayValue]) -> tuple[list, ArrayValue]:
        """The values of exit k, and which rows exit, (B,) bool.

        The head is in an If of its own: it is evaluated if a row exits here, or if the rule reads its logits.
        """
        g, segments = self.g, self.segments
        rows, extra, exits = g.shape(exit_at.name, 0, 1), [], exit_at <= k
        if not self.decides:
            logits = self._logits_if(g.any(exits.name), k, state, rows)
            return self._exit_values(k, logits, rows, []), exits
        planned, (rule, inputs, least) = exit_at >= 0, self._rule_at(k, memory)  # no plan is negative, and below k
        if rule.needs in ("logits", WEAKEST):
            evaluates = exits if least is None else exits & (planned | (least < np.inf))
            logits = self._logits_if(g.any(evaluates.name), k, state, rows)
            read = g.array(logits, f"rows_{k}", *self.axes)
            if rule.needs == WEAKEST:
                read = self.token_task.weakest(read, state.counted.numpy())
        else:
            read = getattr(segments, rule.needs)(k, state)
            extra = [read.name] * len(self.extra)
        exits = exits & (planned | rule.stop(k, read, memory))
        if rule.needs not in ("logits", WEAKEST):
            logits = self._logits_if(g.any(exits.name), k, state, rows)
        if self.compared:
            extra = [self._one_number(value.compared, rows) for value in inputs.values()]
        return self._exit_values(k, logits, rows, extra), exits

    def _one_number(self, values: list, rows: str) -> str:
        """(B,) float32: the first of these values that has one number per row; inf if there is none."""
        of_rows = (value for value in values if isinstance(value, ArrayValue) and value.ndim == 1)
        unknown = self.g.op("Expand", self.g.constant("infinity", INFINITY[None]), rows)
        return next((value.astype(np.float32).name for value in of_rows), unknown)

    def _exit_values(self, k: int, logits: str, rows: str, extra: list[str]) -> list:
        g, axis = self.g, f"rows_{k}"
        layers = g.op("Expand", g.integers(self.segments.exits[k]), rows)
        values = [g.value(logits, axis, *self.axes, dtype=self.dtype), g.value(layers, axis, dtype=np.int64)]
        return values + [g.value(name, axis, dtype=np.float32) for name in extra]

    def _logits_if(self, condition: str, k: int, state, rows: str) -> str:
        """Logits (B, C), or (B, T, C), or what a shared head reads (B, D), of exit k if the condition () holds; else
        zeros, which nothing reads.

        If every exit starts from the embeddings, its layers run only here, together with its head.
        """
        g, segments = self.g, self.segments

        def read() -> list:
            logits = self.read(k, segments.advance(k, state) if self.starts_anew else state)
            return [g.value(logits.name, "rows_read", *self.axes, dtype=self.dtype)]

        def nothing() -> list:
            tokens = [] if self.token_task is None else [g.shape(g.input("input_ids", "batch", "tokens"), 1, 2)]
            shape = g.op("Concat", rows, *tokens, g.integers(self.axes[-1]), axis=0)
            zeros = g.op("Expand", g.constant("zero", np.zeros(1, self.dtype)), shape)
            return [g.value(zeros, "rows_read", *self.axes, dtype=self.dtype)]

        return g.either(condition, read, nothing)[0].name
