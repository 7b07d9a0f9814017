"""Engines: they run a batch of a worker's rows on the exported model, through the loop of mini_ee/loop.py.

RowEngine    for classifiers. It has a queue for each segment if the folder has graphs by segment (`mini-ee export
             --segments`) and rows of several batches can be joined. Else it has one queue, for model.onnx. A rule that
             plans from texts has one more queue, before the others. Shadow rows run on to full depth after the answer.
TextEngine   for decoders. It has caches for a fixed number of texts. Each step generates one token of each text; when a
             text ends, the next one gets its caches. An encoder-decoder (T5) generates one text at a time, because the
             encoder's output is bound for a whole batch.

A row passes through several batches: RowEngine keeps in `row.part` the state of its last batch and its index there, and
joins the states of all rows of the next batch (OrtSegments.joined).
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_ee.lab.data.tokenizer import Encoded, Inputs
from mini_ee.lab.early_exit import early_exit, select_heads
from mini_ee.lab.exits.decoding import Tokens, greedy
from mini_ee.lab.export.runtime import Answer, Continuation, Runtime, TokenRuntime
from mini_ee.lab.row_thresholds import THRESHOLD, RowThresholds
from mini_ee.lab.rules import Never, Planned, Rule
from mini_ee.loop import at_exit
from mini_ee.serve.monitoring import Guarantee, Metrics
from mini_ee.serve.request_thresholds import RequestThresholds
from mini_ee.serve.worker import BATCH, Row

CAPACITY = 1024  # tokens of prompt and continuation in a decoder's caches, or fewer if the model's limit is lower

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the tokenizer decodes while the last bytes of a character are missing


def engine_of(runtime: Runtime, **settings) -> "RowEngine | TextEngine":
    """The engine for an exported folder. settings: its arguments."""
    return (TextEngine if isinstance(runtime, TokenRuntime) else RowEngine)(runtime, **settings)


class TextRow(Row):
    """A request to classify, which stops at several exits of the model on its way."""

    def __init__(self, encoded: Encoded, shadowed: bool, thresholds: np.ndarray | None = None):
        super().__init__(len(encoded.ids[0]))
        self.encoded, self.shadowed = encoded, shadowed
        self.thresholds = thresholds  # (K - 1,), its own; None: those of the rule
        self.plan: int | None = None  # its exit, if a rule has planned it
        self.part = self.memory = None  # (state of its last batch, its index there), (the rule's memory, its index)
        self.rule: Rule | None = None  # the rule by which it exited


class RowEngine:
    """Runs an exported folder of rows.

    rule: default: that of the folder. rebatch: run by segment if possible. guarantee: observes every shadow row. seed:
    draws the shadow rows.
    """

    by_length, room = True, 10**6

    def __init__(
        self,
        runtime: Runtime,
        rule: Rule | None = None,
        rebatch: bool = True,
        guarantee: Guarantee | None = None,
        seed: int = 0,
    ):
        self.runtime, self.guarantee = runtime, guarantee
        self.rule, self._random = rule or runtime.rule, random.Random(seed)
        self.rule.check(len(runtime.exits))
        self.requested = RequestThresholds(runtime, self.rule)
        self.metrics = Metrics(runtime.exits, guarantee, runtime.config.get("exit_counts"), runtime.model_id)
        self._segments = self._by_segment() if rebatch else None
        self._last, self._plans = len(runtime.exits) - 1, int(self.rule.plans_from_texts)
        names = map(str, runtime.exits) if self._segments else ("model", "shadow") if guarantee else ("model",)
        self.queues = ("plan",) * self._plans + tuple(names)
        if guarantee and not runtime.label_names:
            raise ValueError(
                f"{runtime.folder}: expected labels that can agree, found a regression; leave out --shadow"
            )
        if guarantee and "whole" in runtime.config["graphs"]:
            raise ValueError(
                f"{runtime.folder}: tokens exit within a row, so no row runs through all layers; leave out --shadow"
            )

    def _by_segment(self):
        """The graphs by segment; None if there are none, or if their rows cannot be joined."""
        if f"segment_{self.runtime.exits[0]}" not in self.runtime.config["graphs"]:
            return None
        segments = self.runtime.segments().by_segment(self.rule)
        return segments if segments.can_join() else None

    def row(self, texts: str | Sequence[str], **thresholds: Any) -> TextRow:
        """The row of a request. thresholds: of FIELDS. Raises ValueError for texts that cannot be classified, or as
        RequestThresholds does. A row with thresholds of its own is no shadow row: the guarantee is not about it.
        """
        row_thresholds = self.requested.of(**thresholds)
        expected, count = self.runtime.num_texts, 1 if isinstance(texts, str) else len(texts)
        if count != expected:
            raise ValueError(f"expected {expected} texts, found {count}")
        shadowed = (
            self.guarantee is not None and row_thresholds is None and self._random.random() < self.guarantee.share
        )
        try:
            return TextRow(self.runtime.encode([texts]), shadowed, row_thresholds)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("row 0: ")) from None

    def release(self, row: TextRow) -> None:
        """Drop the state of a row."""
        row.part = row.memory = None

    def run(self, at: int, rows: list[TextRow]) -> None:
        """Run a batch of the queue with index `at`."""
        inputs = _inputs(rows)
        if at < self._plans:
            for row, k in zip(rows, self.rule.plan(inputs).tolist()):
                row.plan, row.queue = k, at + 1
        elif self._segments:
            self._run_segment(at - self._plans, rows, inputs)
        else:
            self._run_model(at - self._plans, rows, inputs)

    def _run_segment(self, k: int, rows: list[TextRow], inputs: Inputs) -> None:
        segments, rule = self._segments, self._rule_of(rows)
        if not k and not self._plans and (plan := rule.plan(inputs)) is not None:
            for row, chosen in zip(rows, plan.tolist()):
                row.plan = chosen
        plan = None if rows[0].plan is None else np.array([row.plan for row in rows])
        segments = select_heads(segments, rule, plan)
        with segments.running():
            state = segments.joined(inputs, [row.part for row in rows]) if k else segments.start(inputs)
            memory = _memory([row.memory for row in rows]) if k else {}
            state, stops, logits = at_exit(segments, rule, k, state, memory, plan)
        memory.pop(THRESHOLD, None)  # its rows keep them; the next batch has other rows
        exiting, answers = (), []
        if logits is not None:  # before any row changes: if this fails, each row runs again alone from its old state
            exiting = np.flatnonzero(stops)
            count, depth = len(exiting), [self.runtime.exits[k]] * len(exiting)
            if segments.tokens_exit:
                depth = segments.token_cost(k, state)[exiting, 0].tolist()
            some = inputs if count == len(rows) else inputs.take(exiting)
            answers = self.runtime.answers(logits, some, [k] * count, depth)
        for at, row in enumerate(rows):
            row.part, row.memory, row.queue = (state, at), (memory, at), self._plans + k + 1
        self._answer([rows[at] for at in exiting], answers, self.rule)

    def _rule_of(self, rows: list[TextRow]) -> Rule:
        """The rule of a batch, in which some rows may have thresholds of their own."""
        if all(row.thresholds is None for row in rows):
            return self.rule
        unset = np.full(self._last, np.nan, np.float32)  # NaN: those of the rule
        return RowThresholds(self.rule, np.stack([unset if row.thresholds is None else row.thresholds for row in rows]))

    def _run_model(self, at: int, rows: list[TextRow], inputs: Inputs) -> None:
        rule = self._rule_of(rows)
        if at:  # the second queue has shadow rows
            rule = Never()
        elif self._plans:
            rule = Planned([row.plan for row in rows])
        result = early_exit(self.runtime.segments(), rule, inputs)
        depth = result.cost.depth.tolist()
        answers = self.runtime.answers(result.logits, inputs, result.exit_index.tolist(), depth)
        for row in rows:
            row.queue = self._plans + 1
        self._answer(rows, answers, self.rule)

    def _answer(self, rows: list[TextRow], answers: list[Answer], rule: Rule) -> None:
        """Give rows that exit their answers. At the last exit, report whether shadow rows agree with their answers.

        A shadow row exits twice: first by the rule, with its answer, then at the last exit.
        """
        now = time.perf_counter()
        for row, answer in zip(rows, answers):
            if row.answer is None:
                row.answer, row.rule = answer._replace(milliseconds=(now - row.begun) * 1e3), rule
            if answer.exit == self.runtime.exits[-1]:
                row.queue = None
                if row.shadowed and row.rule is self.rule:  # it exited by the present rule, not by an earlier one
                    self.rule = self.guarantee.observe(answer.agrees(row.answer), self.rule)
            elif not row.shadowed:
                row.queue = None
            elif row.plan is not None:
                row.plan = self._last


def _inputs(rows: list[TextRow]) -> Inputs:
    """The texts of these rows as one batch."""
    first = rows[0].encoded
    ids, type_ids = ([getattr(row.encoded, name)[0] for row in rows] for name in ("ids", "type_ids"))
    texts = tuple(row.encoded.texts[0] for row in rows)
    return Encoded(ids, type_ids, texts, 0, first.pad_token_id).batch(slice(None))


def _memory(parts: list[tuple[dict, int]]) -> dict[str, np.ndarray]:
    """The rule's memory of rows that come from several batches."""
    return {name: np.array([memory[name][at] for memory, at in parts]) for name in parts[0][0]}


class PromptRow(Row):
    """A prompt, and the text generated after it so far."""

    def __init__(self, prompt: list[int], before: list[int], count: int, on_piece):
        super().__init__(len(prompt))
        self.prompt, self.before = prompt, before  # the tokens before the text in the caches, most often the prompt
        self.count, self.on_piece = count, on_piece
        self.place: int | None = None  # its row of the caches
        self.tokens, self.layers, self.text = [], [], ""


class TextEngine:
    """Runs an exported decoder, which generates up to `room` texts at once, each at a position of its own.

    All texts are in one queue. A text gets a row of the caches (`place`) in its first step, which also runs its prompt.
    """

    queues, by_length = ("texts",), False

    def __init__(self, runtime: TokenRuntime, rule: Rule | None = None, room: int = BATCH):
        self.runtime, self.rule = runtime, rule or runtime.rule
        self.rule.check(len(runtime.exits))
        self.room = room = 1 if runtime.decoder_start_tokens else room
        self.metrics = Metrics(runtime.exits, None, runtime.config.get("exit_counts"), runtime.model_id)
        self.capacity = min(CAPACITY, runtime.config["max_tokens"])
        self._segments = runtime.segments(room, self.capacity, rule=self.rule)
        self._free = list(range(room))

    def row(self, text: str | Sequence[str], max_new_tokens: int | None = None, on_piece=None) -> PromptRow:
        """The row of a request. on_piece: the worker calls it with each piece of text and the depth of its last token.

        Raises ValueError for a prompt that cannot be continued by so many tokens.
        """
        (text,) = (text,) if isinstance(text, str) else text
        count = self.runtime.max_new_tokens if max_new_tokens is None else max_new_tokens
        prompt = self.runtime.encode(text, count)
        if len(prompt) > self.capacity:  # also for an encoder, whose attention grows with the square
            raise ValueError(f"expected a prompt of at most {self.capacity} tokens, found {len(prompt)}")
        before = self.runtime.decoder_start_tokens or prompt
        if len(before) + count > self.capacity:
            raise ValueError(f"expected at most {self.capacity} tokens, found {len(before)} and {count} to generate")
        return PromptRow(prompt, before, count, on_piece)

    def release(self, row: PromptRow) -> None:
        """Free the caches' row of a text."""
        if row.place is not None:
            self._free.append(row.place)
            row.place = None

    def run(self, at: int, rows: list[PromptRow]) -> None:
        """Generate one more token of each text."""
        try:
            self._step(rows)
        except Exception:
            if len(rows) == 1:  # another text gets this row of the caches next
                self._segments.wipe(rows[0].place)
            raise

    def _step(self, rows: list[PromptRow]) -> None:
        new = [row for row in rows if not row.tokens]  # also those whose first step failed in a batch
        for row in new:
            if row.place is None:
                row.place = self._free.pop()
            self._segments.forget(row.place)
        rows = sorted(rows, key=lambda row: row.place)
        if new:
            new.sort(key=lambda row: row.place)
            prompts = self._segments.begin([row.prompt for row in new])
            self._segments.prefill(Tokens(prompts.ids, [row.place for row in new], prompts.positions))
        newest = [[(row.tokens or row.before)[-1]] for row in rows]
        positions = [[len(row.before) + len(row.tokens) - 1] for row in rows]
        inputs = Tokens(newest, [row.place for row in rows], positions)
        result = early_exit(self._segments, self.rule, inputs)
        tokens = greedy(result.logits, inputs.rows)
        for row, token, layers in zip(rows, tokens, result.layers_run.tolist()):
            self._write(row, token, layers)

    def _write(self, row: PromptRow, token: int, layers: int) -> None:
        row.tokens.append(token)
        row.layers.append(layers)
        ended = token in self.runtime.config["stop"] or len(row.tokens) == row.count
        if ended or row.on_piece:
            text = self.runtime.text_after(row.prompt, row.tokens)
            if row.on_piece and (ended or not text.endswith(INCOMPLETE)):
                row.on_piece(text[len(row.text) :], layers)
                row.text = text
        if ended:
            milliseconds = (time.perf_counter() - row.begun) * 1e3
            row.answer, row.queue = Continuation(text, row.tokens, row.layers, milliseconds), None
