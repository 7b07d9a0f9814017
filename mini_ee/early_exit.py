"""The loop: segments + a rule -> a result. It is the only one; whatever exits early, on any engine, goes through it.

A model with exits e_1 < ... < e_K = L is K segments (class Segments); rules.py says what a rule offers. Hidden states
stay inside the segments; a Reading is numpy, because the decision is taken on the host anyway. No torch here: the ONNX
runtime runs this same file.
"""

import time
from collections.abc import Container
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np


class Reading(NamedTuple):
    """What an exit says of the rows that reached it."""

    logits: np.ndarray | None  # (B, C); None in a glance
    exit_logit: np.ndarray | None = None  # (B,), where the method has a policy
    max_probability: np.ndarray | None = None  # (B,), where the engine has computed it already, as
    breaking_ties: np.ndarray | None = None  # (B,), Eq. 2 of self-supervised exits
    saturation: np.ndarray | None = None  # (B,), cosine of the state with that of the exit before


class Segments:
    """What the loop drives. Engines offer these; k counts from 0 along exits.

    start(inputs) -> state         the embeddings; a state holds tensors whose first axis is the row
    reading(heads, state) -> state told which heads alone will be read, for engines that compute one with its layers
    advance(k, state) -> state     the layers between exit k - 1 and exit k
    read(k, state) -> Reading      the head at exit k
    glance(k, state) -> Reading    without the head, where states alone can decide; else as read
    state.keep(rows) -> state      row compaction: the rows that go on
    flops(k, inputs)               floating-point operations of a row in advance(k), and in read(k): a pair of numbers,
                                   or of arrays (B,)
    """

    exits: tuple[int, ...]  # (e_1, ..., e_K), in layers run
    engine = "numpy"  # whose threads compute

    def running(self) -> AbstractContextManager:
        """Held while a batch runs, for engines that have a mode for it."""
        return nullcontext()

    def reading(self, heads: Container[int], state):
        """The same state, for most engines."""
        return state

    def glance(self, k: int, state) -> Reading:
        """What a rule is given that decides without logits (`rule.glances`)."""
        return self.read(k, state)

    def layer_passes(self, k: int) -> int:
        """Layers that one row costs in advance(k)."""
        return self.exits[k] - (self.exits[k - 1] if k else 0)


class Cost:
    """What a batch cost. Layers and operations are counted when they are asked for: the run does not wait for it."""

    def __init__(self, seconds: float, segments: Segments, rule, inputs, logits, exit_index: np.ndarray, asked: list):
        self.seconds = seconds  # wall-clock time of the whole batch, heads and rule included
        self._run = segments, inputs, exit_index
        self._rule, self._classes, self._asked = rule, logits.shape[1], asked

    @property
    def layer_passes(self) -> np.ndarray:
        """(B,): layers computed for the row; more than its depth where a schedule restarts."""
        segments, _, exit_index = self._run
        return np.cumsum([segments.layer_passes(k) for k in range(len(segments.exits))])[exit_index]

    @property
    def flops(self) -> np.ndarray:
        """(B,): floating-point operations, a multiply-add as two.

        The segments up to each row's exit, the heads that were read on the way, and the rule's decisions.
        """
        segments, inputs, exit_index = self._run
        total = np.full(len(exit_index), self._rule.plan_flops(inputs))
        decision = self._rule.flops(self._classes)
        for k in range(len(segments.exits)):
            advance, read = segments.flops(k, inputs)
            reached = exit_index >= k
            total += reached * advance
            total += reached * (read + decision) if self._asked[k] else (exit_index == k) * read
        return total


class ExitResult(NamedTuple):
    """Where each row left, and what the exit there said."""

    logits: np.ndarray  # (B, C)
    exit_index: np.ndarray  # (B,) int64, index into segments.exits, from 0
    layers_run: np.ndarray  # (B,) int64, depth of that exit, in 1..L
    cost: Cost


def early_exit(segments: Segments, rule, inputs) -> ExitResult:
    """Run a batch; at each exit ask the rule who stops, and go on with the others alone.

    inputs: what segments.start and rule.plan take; len(inputs) is B. The last exit takes whoever is left.
    Raises ValueError where the rule does not fit the number of exits, and for a batch without rows.
    """
    rule.check(len(segments.exits))
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    begin = time.perf_counter()
    with segments.running():
        logits, exit_index, asked = _run(segments, rule, inputs)
    layers_run = np.asarray(segments.exits)[exit_index]
    seconds = time.perf_counter() - begin
    cost = Cost(seconds, segments, rule, inputs, logits, exit_index, asked)
    return ExitResult(logits, exit_index, layers_run, cost)


def _run(segments: Segments, rule, inputs) -> tuple[np.ndarray, np.ndarray, list[bool]]:
    """The loop itself: logits (B, C), exit index (B,), and whether every row was read and judged, (K,)."""
    size, last = len(inputs), len(segments.exits) - 1
    exit_index = np.zeros(size, np.int64)
    asked = [False] * (last + 1)  # exits where every row was read and the rule decided
    logits = None

    plan = rule.plan(inputs)
    state = segments.start(inputs)
    if plan is not None:
        state = segments.reading(set(plan.tolist()), state)
    elif not rule.reads:
        state = segments.reading({last}, state)
    rows = np.arange(size)  # where the rows still in the model stand in the batch
    memory: dict[str, np.ndarray] = {}
    for k in range(last + 1):
        state = segments.advance(k, state)
        if plan is None:
            plan = rule.plan(inputs)

        reading, everyone = None, k == last
        if not everyone:
            if plan is not None:
                leaves = plan[rows] <= k
            elif rule.reads:
                reading = segments.glance(k, state) if rule.glances else segments.read(k, state)
                leaves = rule.stop(k, reading, memory)
                asked[k] = reading.logits is not None
                reading = reading if asked[k] else None
            else:
                continue
            leaving = leaves.nonzero()[0]
            if not len(leaving):
                continue
            everyone = len(leaving) == len(rows)

        if reading is None:
            said = segments.read(k, state if everyone else state.keep(leaving)).logits
        else:
            said = reading.logits if everyone else reading.logits[leaving]
        if logits is None:
            if everyone:  # all rows at once, as at batch 1
                exit_index.fill(k)
                return said, exit_index, asked
            logits = np.empty((size, said.shape[1]), said.dtype)
        out = rows if everyone else rows[leaving]
        logits[out], exit_index[out] = said, k
        if everyone:
            break
        stay = np.flatnonzero(~leaves)
        state, rows = state.keep(stay), rows[stay]
        memory = {name: values[stay] for name, values in memory.items()}
    return logits, exit_index, asked


def read_every_exit(segments: Segments, inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What every exit says of every row: logits (B, K, C); what it costs to advance to and to read each, (B, K, 2);
    exit_logits (B, K - 1) where the model has a policy, else None.
    """
    logits, exit_logits, flops = [], [], np.zeros((len(inputs), len(segments.exits), 2))
    with segments.running():
        state = segments.start(inputs)
        for k in range(len(segments.exits)):
            state = segments.advance(k, state)
            reading = segments.read(k, state)
            logits.append(reading.logits)
            if reading.exit_logit is not None:
                exit_logits.append(reading.exit_logit)
            flops[:, k, 0], flops[:, k, 1] = segments.flops(k, inputs)
    return np.stack(logits, axis=1), flops, np.stack(exit_logits, axis=1) if exit_logits else None


class Recorded(Segments):
    """Segments that play back what `read_every_exit` recorded, so that a sweep of rules runs the model once."""

    def __init__(
        self,
        exits: tuple[int, ...],
        logits: np.ndarray,
        flops: np.ndarray,
        layer_passes: list[int],
        exit_logits: np.ndarray | None = None,
    ):
        self.exits, self.logits, self.exit_logits = exits, logits, exit_logits
        self._flops, self._layer_passes = flops, layer_passes

    def start(self, inputs) -> "RecordedRows":
        """inputs: anything whose length is the number of recorded rows."""
        return RecordedRows(np.arange(len(inputs)))

    def advance(self, k: int, state: "RecordedRows") -> "RecordedRows":
        return state

    def read(self, k: int, state: "RecordedRows") -> Reading:
        decides = self.exit_logits is not None and k < len(self.exits) - 1
        return Reading(self.logits[state.rows, k], self.exit_logits[state.rows, k] if decides else None)

    def layer_passes(self, k: int) -> int:
        return self._layer_passes[k]

    def flops(self, k: int, inputs) -> tuple[np.ndarray, np.ndarray]:
        return tuple(self._flops[:, k].T)


class RecordedRows(NamedTuple):
    """The state of recorded segments: which rows are still in the model."""

    rows: np.ndarray

    def keep(self, rows: np.ndarray) -> "RecordedRows":
        return RecordedRows(self.rows[rows])
