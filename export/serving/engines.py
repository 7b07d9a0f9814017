"""What a batch of a worker's rows runs on: the exported model, through the loop of early_exit.py.

RowEngine    rows: a queue for each segment, where the folder has graphs by segment (`mini-ee export --segments`) and
             rows of several batches can go on as one; else one queue, for model.onnx, which stops by itself. A rule
             that plans from texts has a queue before them. A row in the shadow runs on after its answer.
TextEngine   texts: caches for so many at once; each step writes a token of each, and who ends makes place for the next.
             Of a decoder whose prompts are read apart (T5) one text after the other: what is made of prompts is laid
             under a whole batch at once.
"""

import random
import time
from collections.abc import Sequence

import numpy as np

from mini_ee.data.tokens import Encoded, Inputs
from mini_ee.early_exit import at_exit, early_exit, select_heads
from mini_ee.exits.decoding import Tokens, greedy
from mini_ee.export.runtime import Answer, Continuation, Runtime, TokenRuntime
from mini_ee.export.serving.watch import Promise, Watch
from mini_ee.export.serving.worker import BATCH, Row
from mini_ee.rules import NeverExit, Planned, Rule

CAPACITY = 1024  # tokens of prompt and continuation that a decoder's caches have room for, or the model's fewer

PIECE = "\N{REPLACEMENT CHARACTER}"  # the tokenizer's word for a character whose last bytes are yet to be written


def engine_of(runtime: Runtime, **settings) -> "RowEngine | TextEngine":
    """The engine for what an exported folder holds. settings: as that takes them."""
    return (TextEngine if isinstance(runtime, TokenRuntime) else RowEngine)(runtime, **settings)


class TextRow(Row):
    """A row of texts on its way through the model."""

    def __init__(self, encoded: Encoded, shadowed: bool):
        super().__init__(len(encoded.ids[0]))
        self.encoded, self.shadowed = encoded, shadowed
        self.plan: int | None = None  # the exit where it leaves, where a rule has planned it
        self.part = self.memory = None  # (state of a batch, its row there), (what the rule kept of the batch, its row)
        self.rule: Rule | None = None  # by which it left


class RowEngine:
    """An exported folder of rows.

    rule: the folder's own by default. rebatch: by segment, where that can be. promise: asked and told of every row in
    the shadow; its share is drawn with the seed.
    """

    by_length, room = True, 10**6

    def __init__(
        self,
        runtime: Runtime,
        rule: Rule | None = None,
        rebatch: bool = True,
        promise: Promise | None = None,
        seed: int = 0,
    ):
        self.runtime, self.promise = runtime, promise
        self.rule, self._random = rule or runtime.rule, random.Random(seed)
        self.rule.check(len(runtime.exits))
        self.watch = Watch(runtime.exits, promise, runtime.config.get("exit_counts"))
        self._segments = self._by_segment() if rebatch else None
        self._last, self._plans = len(runtime.exits) - 1, int(self.rule.plans_from_texts)
        names = map(str, runtime.exits) if self._segments else ("model", "shadow") if promise else ("model",)
        self.queues = ("plan",) * self._plans + tuple(names)
        if promise and not runtime.label_names:
            raise ValueError(f"{runtime.folder}: agreement is of classes, this is a regression; leave out --shadow")
        if promise and "whole" in runtime.config["graphs"]:
            raise ValueError(f"{runtime.folder}: tokens leave within a row, none has full depth; leave out --shadow")

    def _by_segment(self):
        """The graphs by segment; None where there are none, or none whose rows can be joined."""
        if f"segment_{self.runtime.exits[0]}" not in self.runtime.config["graphs"]:
            return None
        segments = self.runtime.segments().by_segment(self.rule)
        return segments if segments.can_join() else None

    def row(self, texts: str | Sequence[str]) -> TextRow:
        """One request. Raises ValueError for texts that cannot be answered."""
        expected, found = self.runtime.num_texts, 1 if isinstance(texts, str) else len(texts)
        if found != expected:
            raise ValueError(f"expected {expected} texts, found {found}")
        shadowed = self.promise is not None and self._random.random() < self.promise.share
        try:
            return TextRow(self.runtime.encode([texts]), shadowed)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("row 0: ")) from None

    def release(self, row: TextRow) -> None:
        """Drop what it held."""
        row.part = row.memory = None

    def run(self, at: int, rows: list[TextRow]) -> None:
        """A batch of the queue `at`."""
        inputs = _inputs(rows)
        if at < self._plans:
            for row, k in zip(rows, self.rule.plan(inputs).tolist()):
                row.plan, row.queue = k, at + 1
        elif self._segments:
            self._run_segment(at - self._plans, rows, inputs)
        else:
            self._run_model(at - self._plans, rows, inputs)

    def _run_segment(self, k: int, rows: list[TextRow], inputs: Inputs) -> None:
        segments, rule = self._segments, self.rule
        if not k and not self._plans and (plan := rule.plan(inputs)) is not None:
            for row, chosen in zip(rows, plan.tolist()):
                row.plan = chosen
        plan = None if rows[0].plan is None else np.array([row.plan for row in rows])
        with segments.running():
            state = segments.joined(inputs, [row.part for row in rows]) if k else segments.start(inputs)
            state = select_heads(segments, rule, plan, state)
            memory = _memory([row.memory for row in rows]) if k else {}
            state, exited, _ = at_exit(segments, rule, k, state, memory, plan)
        exiting, answers = (), []
        if exited is not None:  # before any row changes: where this fails, each runs alone from the state that it has
            reading, exiting = exited.reading, exited.exiting
            count, token_cost = len(exiting), reading.token_cost
            depth = [self.runtime.exits[k]] * count if token_cost is None else token_cost[:, 0].tolist()
            answers = self.runtime.answers(reading.logits, [k] * count, depth, [0.0] * count)
        for at, row in enumerate(rows):
            row.part, row.memory, row.queue = (state, at), (memory, at), self._plans + k + 1
        self._answer([rows[at] for at in exiting], answers, rule)

    def _run_model(self, at: int, rows: list[TextRow], inputs: Inputs) -> None:
        rule = self.rule
        if at:  # in the shadow
            rule = NeverExit()
        elif self._plans:
            rule = Planned([row.plan for row in rows])
        result = early_exit(self.runtime.segments(), rule, inputs)
        depth = result.cost.depth.tolist()
        answers = self.runtime.answers(result.logits, result.exit_index.tolist(), depth, [0.0] * len(rows))
        for row in rows:
            row.queue = self._plans + 1
        self._answer(rows, answers, self.rule)

    def _answer(self, rows: list[TextRow], answers: list[Answer], rule: Rule) -> None:
        """Of rows that leave: their answers; or of those in the shadow, at the last exit, whether they agree."""
        now = time.perf_counter()
        for row, answer in zip(rows, answers):
            if row.answer is None:
                row.answer, row.rule = answer._replace(milliseconds=(now - row.begun) * 1e3), rule
            if answer.exit == self._last:
                row.queue = None
                if row.shadowed and row.rule is self.rule:  # told of the rule that is in force
                    self.rule = self.promise.observe(answer.label == row.answer.label, self.rule)
            elif not row.shadowed:
                row.queue = None
            elif row.plan is not None:
                row.plan = self._last


def _inputs(rows: list[TextRow]) -> Inputs:
    """These rows as one batch."""
    first = rows[0].encoded
    ids, type_ids = ([getattr(row.encoded, name)[0] for row in rows] for name in ("ids", "type_ids"))
    texts = tuple(row.encoded.texts[0] for row in rows)
    return Encoded(ids, type_ids, texts, 0, first.pad_token_id).batch(slice(None))


def _memory(parts: list[tuple[dict, int]]) -> dict[str, np.ndarray]:
    """What a rule keeps of rows that stood in several batches."""
    return {name: np.array([memory[name][at] for memory, at in parts]) for name in parts[0][0]}


class PromptRow(Row):
    """A prompt, and what has been written after it."""

    def __init__(self, prompt: list[int], before: list[int], count: int, on_piece):
        super().__init__(len(prompt))
        self.prompt, self.before = prompt, before  # what stands before the text in the caches: the prompt, most often
        self.count, self.on_piece = count, on_piece
        self.place: int | None = None  # of the caches
        self.tokens, self.layers, self.text = [], [], ""


class TextEngine:
    """An exported decoder that writes up to `room` texts at once, whatever position each has come to.

    Texts stand in one queue, before their first token and after each; a text's prompt is run when it gets its place.
    """

    queues, by_length = ("texts",), False

    def __init__(self, runtime: TokenRuntime, rule: Rule | None = None, room: int = BATCH):
        self.runtime, self.rule = runtime, rule or runtime.rule
        self.rule.check(len(runtime.exits))
        self.room = room = 1 if runtime.decoder_start_tokens else room
        self.watch = Watch(runtime.exits, None, runtime.config.get("exit_counts"))
        self.capacity = min(CAPACITY, runtime.config["max_tokens"])
        self._segments = runtime.segments(room, self.capacity, rule=self.rule)
        self._free = list(range(room))

    def row(self, text: str | Sequence[str], max_new_tokens: int | None = None, on_piece=None) -> PromptRow:
        """One request. on_piece: the worker calls it with each piece of text and the layers of its last token.

        Raises ValueError for a prompt that cannot be continued by so many tokens.
        """
        (text,) = (text,) if isinstance(text, str) else text
        count = self.runtime.max_new_tokens if max_new_tokens is None else max_new_tokens
        prompt = self.runtime.encode(text, count)
        if len(prompt) > self.capacity:  # what is read apart, too: attention over it grows with its square
            raise ValueError(f"expected a prompt of at most {self.capacity} tokens, found {len(prompt)}")
        before = self.runtime.decoder_start_tokens or prompt
        if len(before) + count > self.capacity:
            raise ValueError(f"expected at most {self.capacity} tokens, found {len(before)} and {count} to write")
        return PromptRow(prompt, before, count, on_piece)

    def release(self, row: PromptRow) -> None:
        """Its place is free."""
        if row.place is not None:
            self._free.append(row.place)
            row.place = None

    def run(self, at: int, rows: list[PromptRow]) -> None:
        """One more token of each."""
        try:
            self._step(rows)
        except Exception:
            if len(rows) == 1:  # the worker gives its place to another text
                self._segments.wipe(rows[0].place)
            raise

    def _step(self, rows: list[PromptRow]) -> None:
        new = [row for row in rows if not row.tokens]  # those too whose first step failed in a batch
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
        written = greedy(result.logits, inputs.rows)
        for row, token, layers in zip(rows, written, result.layers_run.tolist()):
            self._write(row, token, layers)

    def _write(self, row: PromptRow, token: int, layers: int) -> None:
        row.tokens.append(token)
        row.layers.append(layers)
        ended = token in self.runtime.config["stop"] or len(row.tokens) == row.count
        if ended or row.on_piece:
            text = self.runtime.text_after(row.prompt, row.tokens)
            if row.on_piece and (ended or not text.endswith(PIECE)):
                row.on_piece(text[len(row.text) :], layers)
                row.text = text
        if ended:
            milliseconds = (time.perf_counter() - row.begun) * 1e3
            row.answer, row.queue = Continuation(text, row.tokens, row.layers, milliseconds), None
