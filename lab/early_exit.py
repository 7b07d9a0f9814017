"""The loop of early exit. One turn of it at a time also runs in the server (serve/engines.py). Two things exit
early without it: model.onnx contains the loop as nested Ifs (export/model_graph.py), and in lossless decoding an exit
drafts tokens and the full model verifies them (exits/generation.py).

A model with exits e_1 < ... < e_K = L consists of K segments: the layers between two exits, and the head of the second
one. After a segment the rule decides which rows (examples or tokens) stop; the next one runs on the others. No torch.
The loop and the rules as tests: tests/spec/test_0_loop.py.
"""

import time
from collections.abc import Sized
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.rules import Rule
from mini_ee.lab.segments import BatchResult, Cost, Reading, Segments, known_logits


class ExitResult(NamedTuple):
    """The exit at which each of N rows stopped, and the logits of that exit."""

    logits: np.ndarray  # (N, C)
    exit_index: np.ndarray  # (N,) int64, index into segments.exits, from 0
    layers_run: np.ndarray  # (N,) int64, depth of that exit, in 0..L
    cost: Cost


class ExitedRows(NamedTuple):
    """The n rows that stop at one exit, of the N rows that reached it. Row numbers count within these N rows."""

    reading: Reading  # of the n rows
    exiting: np.ndarray  # (n,), the rows that stop
    staying: np.ndarray  # (N - n,), the other rows


NO_ROWS = np.empty(0, np.int64)


def early_exit(segments: Segments, rule: Rule, inputs: Sized) -> ExitResult:
    """Run a batch of N rows; at each exit the rule decides which rows stop, and only the others continue.

    inputs: the argument of segments.start and rule.plan; len(inputs) is N. All remaining rows stop at the last exit.
    Raises ValueError if the rule does not fit the number of exits, or if the batch has no rows.
    """
    rule.check(len(segments.exits))
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    begin = time.perf_counter()
    with segments.running():
        batch = segments.run_batch(rule, inputs) or run_segments(segments, rule, inputs)
    layers_run = np.asarray(segments.exits)[batch.exit_index]
    seconds = time.perf_counter() - begin
    return ExitResult(batch.logits, batch.exit_index, layers_run, Cost(seconds, segments, rule, inputs, batch))


def run_segments(segments: Segments, rule: Rule, inputs: Sized) -> BatchResult:
    """The loop itself. `state`, `plan` and `memory` hold only the rows that have not stopped yet."""
    plan, state = rule.plan(inputs), segments.start(inputs)
    state = select_heads(segments, rule, plan, state)
    rows = np.arange(len(inputs))  # of each row that has not stopped: its number in the batch
    exit_index, memory = np.empty(len(inputs), np.int64), dict[str, np.ndarray]()
    readings = list[tuple[np.ndarray, Reading]]()
    evaluated: list[str | None] = [None] * len(segments.exits)
    for k in range(len(segments.exits)):
        state, exited, evaluated[k] = at_exit(segments, rule, k, state, memory, plan)
        if exited is None:
            continue
        reading, exiting, staying = exited
        if len(exiting) == len(inputs):  # all rows at once, as with one row: nothing to put in order
            exit_index.fill(k)
            return BatchResult(known_logits(reading), exit_index, evaluated, reading.token_cost)
        exit_index[rows[exiting]] = k
        readings.append((rows[exiting], reading))
        if not len(staying):
            break
        state, rows = state.keep(staying), rows[staying]
        plan = None if plan is None else plan[staying]
        memory = {name: values[staying] for name, values in memory.items()}
    logits, token_cost = in_batch_order(readings, len(inputs))
    return BatchResult(logits, exit_index, evaluated, token_cost)


def at_exit(
    segments: Segments, rule: Rule, k: int, state: Any, memory: dict[str, np.ndarray], plan: np.ndarray | None
) -> tuple[Any, ExitedRows | None, str | None]:
    """One turn of the loop, for the N rows that reach exit k.

    Returns their state; ExitedRows, or None if no row stops; what the rule read of all: "logits", "state" or None.
    memory: arrays by row that the rule keeps. plan (N,): exit index of each row, if the rule knows it beforehand.
    """
    state, evaluated = segments.advance(k, state), None
    if k == len(segments.exits) - 1:
        reading = segments.read_logits(k, state)
        return state, ExitedRows(reading, np.arange(len(known_logits(reading))), NO_ROWS), None
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
    if evaluated != "logits":  # the rule needed no logits: the head is computed now, for the rows that stop
        reading = segments.read_logits(k, state.keep(exiting) if len(staying) else state)
    elif len(staying):
        reading = reading.keep(exiting)
    return state, ExitedRows(reading, exiting, staying), evaluated


def select_heads(segments: Segments, rule: Rule, plan: np.ndarray | None, state: Any) -> Any:
    """The state at the start, with only the heads that will be read, if the rule knows them before the model runs."""
    if plan is not None:
        return segments.select_heads(set(plan.tolist()), state)
    if rule.needs is None:
        return segments.select_heads({len(segments.exits) - 1}, state)
    return state


def in_batch_order(readings: list[tuple[np.ndarray, Reading]], size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits (size, C) and token cost (size, 2) or None, from readings of several exits with their batch rows."""
    _, first = readings[0]
    some = known_logits(first)
    logits = np.empty((size, some.shape[1]), some.dtype)
    token_cost = None if first.token_cost is None else np.empty((size, 2))
    for rows, reading in readings:
        logits[rows] = reading.logits
        if token_cost is not None:
            token_cost[rows] = reading.token_cost
    return logits, token_cost
