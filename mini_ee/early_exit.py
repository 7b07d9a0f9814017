"""The loop: segments and a rule give a result. All that exits early runs this loop, or one turn of it at a time
(export/serving/engines.py), except model.onnx, which holds the loop as nested Ifs (export/model_graph.py), and lossless
decoding, where an exit drafts tokens and the full model verifies them (exits/generation.py).

A model with exits e_1 < ... < e_K = L is K segments: the layers between two exits, and the head of the second one. The
loop runs a segment, asks the rule which rows stop at its exit, and goes on with the other rows alone. A row is an
example or a token. segments.py says what segments offer, rules.py what a rule offers. No torch here: the ONNX runtime
and the server run this same file.
"""

import sys
import time
from typing import NamedTuple

import numpy as np

from mini_ee import CallableModule
from mini_ee.segments import BatchResult, Cost, Reading, Segments


class ExitResult(NamedTuple):
    """At which exit each of N rows stopped, and the logits of that exit."""

    logits: np.ndarray  # (N, C)
    exit_index: np.ndarray  # (N,) int64, index into segments.exits, from 0
    layers_run: np.ndarray  # (N,) int64, depth of that exit, in 1..L
    cost: Cost


class ExitedRows(NamedTuple):
    """The n rows that stop at one exit, of the N rows that reached it."""

    reading: Reading  # of the n rows
    exiting: np.ndarray  # (n,), which of the N rows these are
    staying: np.ndarray  # (N - n,), the other rows


NO_ROWS = np.empty(0, np.int64)


def early_exit(segments: Segments, rule, inputs) -> ExitResult:
    """Run a batch; at each exit ask the rule which rows stop, and go on with the others alone.

    inputs: what segments.start and rule.plan take; len(inputs) is N. The last exit takes all rows that are left.
    Raises ValueError if the rule does not fit the number of exits, and for a batch without rows.
    """
    rule.check(len(segments.exits))
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    begin = time.perf_counter()
    with segments.running():
        batch = segments.run_batch(rule, inputs)
        if batch is None:
            batch = run_segments(segments, rule, inputs)
    layers_run = np.asarray(segments.exits)[batch.exit_index]
    seconds = time.perf_counter() - begin
    return ExitResult(batch.logits, batch.exit_index, layers_run, Cost(seconds, segments, rule, inputs, batch))


def run_segments(segments: Segments, rule, inputs) -> BatchResult:
    """The loop itself."""
    plan, state = rule.plan(inputs), segments.start(inputs)
    state = select_heads(segments, rule, plan, state)
    rows, memory = np.arange(len(inputs)), {}  # rows: which rows of the batch are still in the model
    exit_index, readings, evaluated = np.empty(len(inputs), np.int64), [], [None] * len(segments.exits)
    for k in range(len(segments.exits)):
        state, exited, evaluated[k] = at_exit(segments, rule, k, state, memory, plan)
        if exited is None:
            continue
        reading, exiting, staying = exited
        if len(exiting) == len(inputs):  # all rows at once, as at batch 1
            exit_index.fill(k)
            return BatchResult(reading.logits, exit_index, evaluated, reading.token_cost)
        exit_index[rows[exiting]] = k
        readings.append((rows[exiting], reading))
        if not len(staying):
            break
        state, rows = state.keep(staying), rows[staying]
        plan = None if plan is None else plan[staying]
        memory = {name: values[staying] for name, values in memory.items()}
    logits, token_cost = in_batch_order(readings, len(inputs))
    return BatchResult(logits, exit_index, evaluated, token_cost)


def at_exit(segments: Segments, rule, k: int, state, memory: dict, plan: np.ndarray | None) -> tuple:
    """One turn of the loop, for the N rows that reach exit k: their state there; ExitedRows, or None if no row stops;
    and what the rule read of all N rows: "logits", "state" or None.

    memory: what the rule remembers of these rows. plan (N,): the exit index of each, if the rule knows it beforehand.
    """
    state, evaluated, reading = segments.advance(k, state), None, None
    if k == len(segments.exits) - 1:
        reading = segments.read_logits(k, state)
        return state, ExitedRows(reading, np.arange(len(reading.logits)), NO_ROWS), None
    if plan is not None:
        exits = plan <= k
    elif rule.needs is None:
        return state, None, None
    else:
        reading = segments.read_state(k, state) if rule.needs == "state" else segments.read_logits(k, state)
        exits = rule.stop(k, reading, memory)
        evaluated = "state" if reading.logits is None else "logits"
    exiting = exits.nonzero()[0]
    if not len(exiting):
        return state, None, evaluated
    staying = (~exits).nonzero()[0]
    if evaluated != "logits":  # the head is read now, for the rows that stop
        reading = segments.read_logits(k, state.keep(exiting) if len(staying) else state)
    elif len(staying):
        reading = reading.keep(exiting)
    return state, ExitedRows(reading, exiting, staying), evaluated


def select_heads(segments: Segments, rule, plan: np.ndarray | None, state):
    """The state at the start, told which heads will be read, if the rule knows it before the model runs."""
    if plan is not None:
        return segments.select_heads(set(plan.tolist()), state)
    if rule.needs is None:
        return segments.select_heads({len(segments.exits) - 1}, state)
    return state


def in_batch_order(readings: list[tuple[np.ndarray, Reading]], size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits (size, C) of a batch from the readings of several exits, each with its rows; and token cost (size, 2), or
    None if the readings have none.
    """
    _, first = readings[0]
    logits = np.empty((size, first.logits.shape[1]), first.logits.dtype)
    token_cost = None if first.token_cost is None else np.empty((size, 2))
    for rows, reading in readings:
        logits[rows] = reading.logits
        if token_cost is not None:
            token_cost[rows] = reading.token_cost
    return logits, token_cost


sys.modules[__name__].__class__ = CallableModule
