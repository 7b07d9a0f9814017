"""The loop: segments + a rule -> a result. It is the only one; whatever exits early, on any engine, goes through it.

A model with exits e_1 < ... < e_K = L is K segments: the layers between two exits, and the head of the second. The loop
runs a segment, asks the rule who stops there, and goes on with the others alone. rules.py says what a rule offers.
Hidden states stay inside the segments. A Reading is numpy, because the decision is taken on the host anyway. No torch
here: the ONNX runtime runs this same file.
"""

import sys
import time
from collections.abc import Container
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from mini_ee import CallableModule


class Reading(NamedTuple):
    """What an exit says of the units (rows, or tokens) that reached it.

    Besides logits: what an engine has computed already, or what no function of logits could tell.
    """

    logits: np.ndarray | None  # (N, C); None where the rule needs the state alone
    exit_logit: np.ndarray | None = None  # (N,), where the model has a policy
    max_probability: np.ndarray | None = None  # (N,), one field for each measure of confidence.py
    breaking_ties: np.ndarray | None = None
    saturation: np.ndarray | None = None  # (N,), cosine of the state with that of the exit before
    entropy: np.ndarray | None = None
    normalised_entropy: np.ndarray | None = None
    breaking_ties_logits: np.ndarray | None = None
    prediction: np.ndarray | None = None  # (N,), index of the largest logit; of a regression the number
    spent: np.ndarray | None = None  # (N, 2), where tokens leave within a unit: layers of a mean token, and operations


class Segments:
    """What the loop drives. Engines offer these; k counts from 0 along exits.

    start(inputs) -> state           the embeddings; a state holds tensors whose first axis is the unit
    advance(k, state) -> state       the layers between exit k - 1 and exit k
    read(k, state) -> Reading        all that exit k says
    state.keep(rows) -> state        the units that go on
    read_logits(k, state) -> Reading its head alone, where nobody asks a policy
    read_state(k, state) -> Reading  without logits, for rules that need the state alone: what a policy says
    will_read(heads, state) -> state told which heads alone will be read, for engines that compute one with its layers
    flops(k, inputs)                 floating-point operations of a unit in advance(k), and in read_logits(k): a
                                     pair of numbers, or of arrays (N,); none of its tokens leaving, where tokens leave
    """

    exits: tuple[int, ...]  # (e_1, ..., e_K), in layers run
    engine = "numpy"  # whose threads compute
    tokens_leave = False  # within a unit: what it costs up to an exit is known from the run, and Reading.spent says it

    def running(self) -> AbstractContextManager:
        """Held while a batch runs, for engines that have a mode for it."""
        return nullcontext()

    def run_batch(self, rule, inputs) -> "Ran":
        """What the loop gives; an engine whose graph holds the loop runs that."""
        return _run(self, rule, inputs)

    def whole(self) -> "Segments":
        """The model without early exits, for rules that never leave: what a speed-up is measured against."""
        return self

    def will_read(self, heads: Container[int], state):
        """The same state, for most engines."""
        return state

    def read_state(self, k: int, state) -> Reading:
        """What a rule is given that needs no logits; all that is known, for engines that know no less."""
        return self.read(k, state)

    def read_logits(self, k: int, state) -> Reading:
        """As read, for engines without a policy, or that ask it in any case."""
        return self.read(k, state)

    def state_flops(self, k: int) -> float:
        """Operations of a unit in read_state(k)."""
        return 0.0

    def layer_passes(self, k: int) -> int:
        """Layers that one unit costs in advance(k)."""
        return self.exits[k] - (self.exits[k - 1] if k else 0)

    # ---- The same methods write a graph that stops by itself, on values of it; see export/model_graph.py ----
    def in_one_graph(self) -> "Segments":
        """What such a graph computes: these segments, for most."""
        return self

    def keep_in_graph(self, state, rows, leaves):
        """state.keep(rows); leaves (N,) is true for the others, which may have to leave something behind."""
        return state.keep(rows)

    def written(self, k: int, state) -> list:
        """What advance(k) leaves behind for later calls, as values with their axes: caches."""
        return []

    def filled(self, k: int, state) -> list:
        """The same of all layers above, if every unit has left at exit k."""
        return []


class Ran(NamedTuple):
    """A batch that has run."""

    logits: np.ndarray  # (N, C)
    exit_index: np.ndarray  # (N,)
    shown: list[str | None]  # (K,), what the rule was shown of all units at each exit
    spent: np.ndarray | None = None  # (N, 2), see Reading
    by: Segments | None = None  # whose layers and operations count, where an engine left the batch to others


class ExitResult(NamedTuple):
    """Where each unit left, and what the exit there said."""

    logits: np.ndarray  # (N, C)
    exit_index: np.ndarray  # (N,) int64, index into segments.exits, from 0
    layers_run: np.ndarray  # (N,) int64, depth of that exit, in 1..L
    cost: "Cost"


def early_exit(segments: Segments, rule, inputs) -> ExitResult:
    """Run a batch; at each exit ask the rule who stops, and go on with the others alone.

    inputs: what segments.start and rule.plan take; len(inputs) is N. The last exit takes whoever is left.
    Raises ValueError where the rule does not fit the number of exits, and for a batch without rows.
    """
    rule.check(len(segments.exits))
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    begin = time.perf_counter()
    with segments.running():
        ran = segments.run_batch(rule, inputs)
    layers_run = np.asarray(segments.exits)[ran.exit_index]
    seconds = time.perf_counter() - begin
    return ExitResult(ran.logits, ran.exit_index, layers_run, Cost(seconds, ran.by or segments, rule, inputs, ran))


class Exited(NamedTuple):
    """The units that leave at one exit."""

    logits: np.ndarray  # (n, C), of those that leave
    leaving: np.ndarray | slice  # (n,) which of the N units they are
    stay: np.ndarray  # (N - n,) the others
    spent: np.ndarray | None  # (n, 2), see Reading


ALL, NOBODY = slice(None), np.empty(0, np.int64)


def at_exit(segments: Segments, rule, k: int, state, memory: dict, plan: np.ndarray | None) -> tuple:
    """One turn of the loop: the state at exit k of the N units that come there, an Exited, or None where nobody leaves,
    and what the rule was shown. memory: what the rule keeps of the units. plan (N,), where the rule has made one.
    """
    state, shown, reading = segments.advance(k, state), None, None
    if k == len(segments.exits) - 1:
        reading = segments.read_logits(k, state)
        return state, Exited(reading.logits, ALL, NOBODY, reading.spent), None
    if plan is not None:
        leaves = plan <= k
    elif rule.needs is None:
        return state, None, None
    else:
        reading = segments.read_state(k, state) if rule.needs == "state" else segments.read_logits(k, state)
        leaves = rule.stop(k, reading, memory)
        shown = "state" if reading.logits is None else "logits"
    leaving = leaves.nonzero()[0]
    if not len(leaving):
        return state, None, shown
    everyone = len(leaving) == len(leaves)
    if shown != "logits":
        reading = segments.read_logits(k, state if everyone else state.keep(leaving))
        said, spent = reading.logits, reading.spent
    else:
        said = reading.logits if everyone else reading.logits[leaving]
        spent = reading.spent if everyone or reading.spent is None else reading.spent[leaving]
    if everyone:
        return state, Exited(said, ALL, NOBODY, spent), shown
    return state, Exited(said, leaving, np.flatnonzero(~leaves), spent), shown


def heads_read(rule, plan: np.ndarray | None, last: int) -> set[int] | None:
    """Which heads alone will be read; None: any, or all."""
    if plan is not None:
        return set(plan.tolist())
    return {last} if rule.needs is None else None


def _run(segments: Segments, rule, inputs) -> Ran:
    """The loop itself."""
    size, last = len(inputs), len(segments.exits) - 1
    exit_index, shown, logits, spent = np.zeros(size, np.int64), [None] * (last + 1), None, None
    plan, state = rule.plan(inputs), segments.start(inputs)
    heads = heads_read(rule, plan, last)
    if heads is not None:
        state = segments.will_read(heads, state)
    rows = np.arange(size)  # where those that are still in the model stand in the batch
    memory: dict[str, np.ndarray] = {}
    for k in range(last + 1):
        state, exited, shown[k] = at_exit(segments, rule, k, state, memory, plan)
        if exited is None:
            continue
        said, leaving, stay, cost = exited
        if logits is None:
            if not len(stay):  # all at once, as at batch 1
                exit_index.fill(k)
                return Ran(said, exit_index, shown, cost)
            logits = np.empty((size, said.shape[1]), said.dtype)
            spent = None if cost is None else np.empty((size, 2))
        out = rows[leaving]
        logits[out], exit_index[out] = said, k
        if spent is not None:
            spent[out] = cost
        if not len(stay):
            break
        state, rows = state.keep(stay), rows[stay]
        plan = None if plan is None else plan[stay]
        memory = {name: values[stay] for name, values in memory.items()}
    return Ran(logits, exit_index, shown, spent)


class Cost:
    """What a batch cost. Layers and operations are counted when they are asked for: the run does not wait for it."""

    def __init__(self, seconds: float, segments: Segments, rule, inputs, ran: Ran):
        self.seconds = seconds  # wall-clock time of the whole batch, heads and rule included
        self._run = segments, inputs, ran.exit_index
        self._rule, self._classes, self._shown, self._spent = rule, ran.logits.shape[1], ran.shown, ran.spent

    @property
    def depth(self) -> np.ndarray:
        """(N,): layers run; where tokens leave, of a mean token of the unit."""
        segments, _, exit_index = self._run
        return np.asarray(segments.exits)[exit_index] if self._spent is None else self._spent[:, 0]

    @property
    def layer_passes(self) -> np.ndarray:
        """(N,): layers computed for the unit; more than its depth where a schedule restarts."""
        segments, _, exit_index = self._run
        if self._spent is not None:
            return self._spent[:, 0]
        return np.cumsum([segments.layer_passes(k) for k in range(len(segments.exits))])[exit_index]

    @property
    def flops(self) -> np.ndarray:
        """(N,): floating-point operations, a multiply-add as two.

        The segments up to each unit's exit, the heads that were read on the way, and the rule's decisions.
        """
        segments, inputs, exit_index = self._run
        total = np.full(len(exit_index), self._rule.plan_flops(inputs))
        decision = self._rule.flops(self._classes)
        for k in range(len(segments.exits)):
            advance, read = segments.flops(k, inputs)
            reached = exit_index >= k
            total += reached * advance if self._spent is None else (exit_index == k) * self._spent[:, 1]
            if self._shown[k] == "logits":
                total += reached * (read + decision)
            else:
                total += (exit_index == k) * read
            if self._shown[k] == "state":
                total += reached * (segments.state_flops(k) + decision)
        return total


# ---- Recorded once, replayed under many rules ----


class Recorded(Segments):
    """Segments that play back what every exit said of N units, so that a sweep of rules runs the model once.

    logits (N, K, C), or whatever C numbers are wanted of the exit where a unit leaves. measures: fields of a Reading by
    name, (N, K - 1) or (N, K), where a rule could not or need not compute them from the logits. flops (N, K, 2).
    state_flops: of each exit, for segments that need not read logits where a rule needs the state alone.
    """

    def __init__(
        self,
        exits: tuple[int, ...],
        logits: np.ndarray,
        flops: np.ndarray,
        layer_passes: list[int],
        measures: dict[str, np.ndarray] | None = None,
        state_flops: list[float] | None = None,
    ):
        self.exits, self.logits, self.measures = exits, logits, measures or {}
        self._flops, self._layer_passes, self._state_flops = flops, layer_passes, state_flops

    def take(self, units: np.ndarray) -> "Recorded":
        """Some of the units: an index or a mask (N,)."""
        measures = {name: values[units] for name, values in self.measures.items()}
        flops, passes = self._flops[units], self._layer_passes
        return Recorded(self.exits, self.logits[units], flops, passes, measures, self._state_flops)

    @property
    def exit_logits(self) -> np.ndarray | None:
        """(N, K - 1), what a policy said; None where the model has none."""
        return self.measures.get("exit_logit")

    def start(self, inputs) -> "RecordedRows":
        """inputs: anything whose length is the number of recorded units. Raises ValueError for another length."""
        if len(inputs) != len(self.logits):
            raise ValueError(f"expected {len(self.logits)} units, as were recorded, got {len(inputs)}")
        return RecordedRows(np.arange(len(inputs)))

    def advance(self, k: int, state: "RecordedRows") -> "RecordedRows":
        return state

    def read(self, k: int, state: "RecordedRows") -> Reading:
        measures = {name: values[state.rows, k] for name, values in self.measures.items() if k < values.shape[1]}
        return Reading(self.logits[state.rows, k], **measures)

    def read_state(self, k: int, state: "RecordedRows") -> Reading:
        reading = self.read(k, state)
        return reading if self._state_flops is None else reading._replace(logits=None)

    def state_flops(self, k: int) -> float:
        return self._state_flops[k]

    def layer_passes(self, k: int) -> int:
        return self._layer_passes[k]

    def flops(self, k: int, inputs) -> tuple[np.ndarray, np.ndarray]:
        return tuple(self._flops[:, k].T)


class RecordedRows(NamedTuple):
    """The state of recorded segments: which units are still in the model."""

    rows: np.ndarray

    def keep(self, rows: np.ndarray) -> "RecordedRows":
        return RecordedRows(self.rows[rows])


def read_every_exit(segments: Segments, inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What every exit says of every unit: logits (N, K, C); what it costs to advance to and to read each, (N, K, 2);
    exit_logits (N, K - 1) where the model has a policy, else None.
    """
    logits, flops, measures = read_and_measure(segments, inputs)
    return logits, flops, measures.get("exit_logit")


def read_and_measure(segments: Segments, inputs) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The same, but for what else readings hold: by their fields, as Recorded takes it."""
    logits, measures, flops = [], {}, np.zeros((len(inputs), len(segments.exits), 2))
    with segments.running():
        state = segments.start(inputs)
        for k in range(len(segments.exits)):
            state = segments.advance(k, state)
            reading = segments.read(k, state)
            logits.append(reading.logits)
            for name, value in (("exit_logit", reading.exit_logit), ("spent", reading.spent)):
                if value is not None:
                    measures.setdefault(name, []).append(value)
            flops[:, k, 0], flops[:, k, 1] = segments.flops(k, inputs)
    return np.stack(logits, axis=1), flops, {name: np.stack(each, axis=1) for name, each in measures.items()}


sys.modules[__name__].__class__ = CallableModule
