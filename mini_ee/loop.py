"""The loop of early exit. No torch: an engine computes, a rule decides, the loop does the bookkeeping.

A model with exits e_1 < ... < e_K = L consists of K segments: the layers between two exits, and the head of the second
one. After a segment the rule decides which rows (examples or tokens) stop; the next segment runs on the others.
"""

from collections.abc import Sequence, Sized
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np

from mini_ee.rules import Memory, Rule


class State(Protocol):
    """The rows that are still in the model."""

    def keep(self, rows: np.ndarray) -> Self: ...  # some of them


S = TypeVar("S", bound=State)


class Engine(Protocol[S]):
    """What computes: bert.py, llama.py, Table. With exit_logit(k, state) -> (B,) it can also run the rule Policy."""

    exits: Sequence[int]  # (K,) layers after which a row may stop; exit k = 0 .. K - 1 is after layer exits[k]

    def start(self, inputs) -> S: ...  # all rows
    def advance(self, k: int, state: S) -> S: ...  # after the layers between exit k - 1 and exit k
    def read(self, k: int, state: S) -> np.ndarray: ...  # logits (B, C) of exit k


class Result(NamedTuple):
    """Where each of N rows stopped."""

    logits: np.ndarray  # (N, C), of the exit where the row stopped
    exit_index: np.ndarray  # (N,), index into exits
    layers: np.ndarray  # (N,), the layer of that exit


def early_exit(engine: Engine[S], rule: Rule, inputs: Sized) -> Result:
    """Run a batch of N = len(inputs) >= 1 rows; at each exit the rule decides which stop, and the others continue."""
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    plan, state = rule.plan(inputs), engine.start(inputs)
    rows, memory, stopped = np.arange(len(inputs)), dict[str, np.ndarray](), []
    exit_index = np.empty(len(inputs), np.int64)
    for k in range(len(engine.exits)):
        state, stops, logits = at_exit(engine, rule, k, state, memory, None if plan is None else plan[rows])
        if logits is None:
            continue
        exit_index[rows[stops]] = k
        stopped.append((rows[stops], logits))
        if stops.all():
            break
        staying = np.flatnonzero(~stops)
        state, rows = state.keep(staying), rows[staying]
        memory = {name: values[staying] for name, values in memory.items()}
    logits = np.empty((len(inputs), *stopped[0][1].shape[1:]), stopped[0][1].dtype)
    for at, values in stopped:
        logits[at] = values
    return Result(logits, exit_index, np.asarray(engine.exits)[exit_index])


def at_exit(
    engine: Engine[S], rule: Rule, k: int, state: S, memory: Memory, plan: np.ndarray | None
) -> tuple[S, np.ndarray, np.ndarray | None]:
    """One turn, for the n rows that reach exit k, with their memory and plan (n,).

    Returns their state there; which of them stop, (n,) bool; and the logits of those, or None if no row stops.
    """
    state, logits = engine.advance(k, state), None
    if k == len(engine.exits) - 1:
        return state, np.ones(len(logits := engine.read(k, state)), bool), logits
    if plan is not None:
        stops = plan <= k
    elif rule.needs is None:
        return state, np.zeros(0, bool), None
    elif rule.needs == "logits":
        logits = engine.read(k, state)
        stops = rule.stop(k, logits, memory)
    else:
        stops = rule.stop(k, getattr(engine, rule.needs)(k, state), memory)
    if not stops.any():
        return state, stops, None
    if logits is None:  # the head is computed for the rows that stop here, and for no others
        return state, stops, engine.read(k, state if stops.all() else state.keep(np.flatnonzero(stops)))
    return state, stops, logits if stops.all() else logits[stops]


class Known(NamedTuple):
    """The state of a Table: the numbers of its rows."""

    rows: np.ndarray

    def keep(self, rows: np.ndarray) -> "Known":
        return Known(self.rows[rows])


class Table:
    """An engine of known logits (N, K, C), and exit_logits (N, K - 1 or K) of a policy. Its inputs are row numbers."""

    def __init__(self, exits: Sequence[int], logits: np.ndarray, exit_logits: np.ndarray | None = None):
        self.exits, self.logits, self.exit_logits = exits, logits, exit_logits

    def start(self, inputs: Sized) -> Known:
        return Known(np.asarray(inputs))

    def advance(self, k: int, state: Known) -> Known:
        return state

    def read(self, k: int, state: Known) -> np.ndarray:
        return self.logits[state.rows, k]

    def exit_logit(self, k: int, state: Known) -> np.ndarray:
        assert self.exit_logits is not None, "this table has no policy"
        return self.exit_logits[state.rows, k]
