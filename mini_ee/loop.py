"""The loop of early exit. No torch: an engine computes, a rule decides, the loop does the bookkeeping.

A model with exits e_1 < ... < e_K = L consists of K segments: the layers between two exits, and the head of the second
one. After a segment the rule decides which rows (examples or tokens) stop; the next segment runs on the others. An
engine is anything that has

    exits                   (K,) layers after which a row may stop; exit k = 0 .. K - 1 is after layer exits[k]
    start(inputs)           -> the state of all rows; state.keep(rows) -> the state of some of them
    advance(k, state)       -> the state after the layers between exit k - 1 and exit k
    read(k, state)          -> logits (B, C) of exit k, a numpy array
    exit_logit(k, state)    -> (B,): the logit of a policy's probability of stopping. Only the rule Policy reads it

Bert with exits (bert.py), Llama's tokens (llama.py) and a table of known logits (below) are engines.
"""

from collections.abc import Sequence, Sized
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np

from mini_ee.rules import Rule


class State(Protocol):
    """The rows that are still in the model."""

    def keep(self, rows: np.ndarray) -> Self: ...


S = TypeVar("S", bound=State)


class Engine(Protocol[S]):
    """See the head of this file."""

    exits: Sequence[int]

    def start(self, inputs) -> S: ...

    def advance(self, k: int, state: S) -> S: ...

    def read(self, k: int, state: S) -> np.ndarray: ...


class Result(NamedTuple):
    """Where each of N rows stopped."""

    logits: np.ndarray  # (N, C), of the exit where the row stopped
    exit_index: np.ndarray  # (N,), index into exits
    layers: np.ndarray  # (N,), the layer of that exit


def early_exit(engine: Engine[S], rule: Rule, inputs: Sized) -> Result:
    """Run a batch of N = len(inputs) rows; at each exit the rule decides which stop, and only the others continue.

    `rows` and `memory` hold only the rows that have not stopped. Raises ValueError if there is no row.
    """
    if not len(inputs):
        raise ValueError("expected a batch of at least one row, got none")
    plan, state, last = rule.plan(inputs), engine.start(inputs), len(engine.exits) - 1
    rows, memory, stopped = np.arange(len(inputs)), dict[str, np.ndarray](), []
    exit_index = np.empty(len(inputs), np.int64)
    for k in range(last + 1):
        state, logits = engine.advance(k, state), None
        if k == last:
            stops = np.ones(len(rows), bool)
        elif plan is not None:
            stops = plan[rows] <= k
        elif rule.needs is None:
            continue
        elif rule.needs == "exit_logit":
            stops = rule.stop(k, engine.exit_logit(k, state), memory)  # type: ignore[attr-defined]  # of some engines
        else:
            logits = engine.read(k, state)
            stops = rule.stop(k, logits, memory)
        exiting, staying = np.flatnonzero(stops), np.flatnonzero(~stops)
        if len(exiting):
            if logits is not None:
                logits = logits[exiting]
            else:  # the head is computed for the rows that stop here, and for no others
                logits = engine.read(k, state.keep(exiting) if len(staying) else state)
            stopped.append((rows[exiting], logits))
            exit_index[rows[exiting]] = k
        if not len(staying):
            break
        if len(exiting):
            state, rows = state.keep(staying), rows[staying]
            memory = {name: values[staying] for name, values in memory.items()}
    logits = np.empty((len(inputs), stopped[0][1].shape[1]), stopped[0][1].dtype)
    for at, values in stopped:
        logits[at] = values
    return Result(logits, exit_index, np.asarray(engine.exits)[exit_index])


class Known(NamedTuple):
    """The state of a Table: the numbers of its rows."""

    rows: np.ndarray

    def keep(self, rows: np.ndarray) -> "Known":
        return Known(self.rows[rows])


class Table:
    """An engine that computes nothing: the logits (N, K, C) of every exit are known. Its inputs are row numbers."""

    def __init__(self, exits: Sequence[int], logits: np.ndarray, exit_logits: np.ndarray | None = None):
        """exit_logits (N, K) or (N, K - 1): of a policy."""
        self.exits, self.logits, self.exit_logits = exits, logits, exit_logits

    def start(self, inputs: Sized) -> Known:
        return Known(np.asarray(inputs))

    def advance(self, k: int, state: Known) -> Known:
        return state

    def read(self, k: int, state: Known) -> np.ndarray:
        return self.logits[state.rows, k]

    def exit_logit(self, k: int, state: Known) -> np.ndarray:
        """(B,): as the policy of exit k computed it."""
        assert self.exit_logits is not None, "this table has no policy"
        return self.exit_logits[state.rows, k]
