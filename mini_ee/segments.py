"""Segments: what the loop of early_exit.py drives. An engine offers them, and says what they cost.

Segment k holds the layers between exit k - 1 and exit k, and the head of exit k; k counts from 0 along exits. Hidden
states stay inside the segments. A Reading is numpy, because the rule decides on the host anyway. No torch here.
"""

from collections.abc import Container
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np


class Reading(NamedTuple):
    """What exit k reads of the N rows (examples or tokens) that reached it.

    Besides the logits: what an engine has computed already, or what cannot be computed from logits.
    """

    logits: np.ndarray | None  # (N, C); None if the rule needs the state alone
    exit_logit: np.ndarray | None = None  # (N,), if the model has a policy
    max_probability: np.ndarray | None = None  # (N,), one field for each measure of confidence.py
    breaking_ties: np.ndarray | None = None
    saturation: np.ndarray | None = None  # (N,), cosine of the state with that of the exit before
    entropy: np.ndarray | None = None
    normalised_entropy: np.ndarray | None = None
    breaking_ties_logits: np.ndarray | None = None
    prediction: np.ndarray | None = None  # (N,), index of the largest logit; of a regression the number
    token_cost: np.ndarray | None = None  # (N, 2), if tokens exit within a row: mean layers per token, and FLOPs

    def keep(self, rows: np.ndarray) -> "Reading":
        """Of some of the rows; what the rule alone reads is left out."""
        token_cost = None if self.token_cost is None else self.token_cost[rows]
        return Reading(self.logits[rows], token_cost=token_cost)


class Segments:
    """What the loop drives. An engine offers these methods; k counts from 0 along exits.

    start(inputs) -> state            the embeddings; a state holds tensors whose first axis is the row
    advance(k, state) -> state        the layers between exit k - 1 and exit k
    read(k, state) -> Reading         all that exit k predicts
    state.keep(rows) -> state         the rows that go on
    read_logits(k, state) -> Reading  the head of exit k alone, for callers that need no policy
    read_state(k, state) -> Reading   without logits, for rules that need the state alone, such as policies
    select_heads(heads, state) -> state  told which heads will be read, for engines that compute a head with its layers
    flops(k, inputs)                  floating-point operations (FLOPs) of a row in advance(k), and in read_logits(k): a
                                      pair of numbers, or of arrays (N,); as if none of its tokens exits
    """

    exits: tuple[int, ...]  # (e_1, ..., e_K), in layers run
    engine = "numpy"  # whose threads compute
    tokens_exit = False  # whether tokens exit within a row: then Reading.token_cost tells what each row has cost

    def running(self) -> AbstractContextManager:
        """Entered while a batch runs, for engines that have a mode for it."""
        return nullcontext()

    def run_batch(self, rule, inputs) -> "BatchResult | None":
        """The whole batch, by an engine whose graph holds the loop; None: the loop of early_exit.py runs it."""
        return None

    def whole(self) -> "Segments":
        """The model without early exits, for rules that never exit: what a speed-up is compared with."""
        return self

    def select_heads(self, heads: Container[int], state):
        """The same state, for most engines."""
        return state

    def read_state(self, k: int, state) -> Reading:
        """For rules that need no logits; the whole reading, for engines that cannot leave the logits out."""
        return self.read(k, state)

    def read_logits(self, k: int, state) -> Reading:
        """As read, for engines without a policy, or that compute it in any case."""
        return self.read(k, state)

    def state_flops(self, k: int) -> float:
        """FLOPs of a row in read_state(k)."""
        return 0.0

    def layer_passes(self, k: int) -> int:
        """Layers that are run for one row in advance(k)."""
        return self.exits[k] - (self.exits[k - 1] if k else 0)

    # ---- The same methods write a graph that stops by itself, on values of it; see export/model_graph.py ----
    def in_one_graph(self) -> "Segments":
        """What such a graph computes: these segments, for most."""
        return self


class BatchResult(NamedTuple):
    """A batch of N rows that has run."""

    logits: np.ndarray  # (N, C), of the exit where each row stopped
    exit_index: np.ndarray  # (N,)
    evaluated: list[str | None]  # (K,), what the rule read of all rows that reached the exit: "logits", "state" or None
    token_cost: np.ndarray | None = None  # (N, 2), see Reading
    segments: Segments | None = None  # whose layers and FLOPs count, if an engine passed the batch on to others


class Cost:
    """What a batch cost. Layers and FLOPs are counted when they are asked for: the run does not wait for it."""

    def __init__(self, seconds: float, segments: Segments, rule, inputs, batch: BatchResult):
        self.seconds = seconds  # wall-clock time of the whole batch, heads and rule included
        self._segments, self._rule, self._inputs, self._batch = batch.segments or segments, rule, inputs, batch

    @property
    def depth(self) -> np.ndarray:
        """(N,): layers run; if tokens exit within a row, the mean over its tokens."""
        token_cost = self._batch.token_cost
        return np.asarray(self._segments.exits)[self._batch.exit_index] if token_cost is None else token_cost[:, 0]

    @property
    def layer_passes(self) -> np.ndarray:
        """(N,): layers computed for the row; more than its depth if a schedule restarts from the embeddings."""
        segments, batch = self._segments, self._batch
        if batch.token_cost is not None:
            return batch.token_cost[:, 0]
        return np.cumsum([segments.layer_passes(k) for k in range(len(segments.exits))])[batch.exit_index]

    @property
    def flops(self) -> np.ndarray:
        """(N,): floating-point operations, a multiply-add as two.

        The segments up to each row's exit, the heads that were read on the way, and the rule's decisions.
        """
        segments, batch = self._segments, self._batch
        total = np.full(len(batch.exit_index), self._rule.plan_flops(self._inputs))
        decision = self._rule.flops(batch.logits.shape[1])
        for k in range(len(segments.exits)):
            advance, read = segments.flops(k, self._inputs)
            reached, exited = batch.exit_index >= k, batch.exit_index == k
            total += reached * advance if batch.token_cost is None else exited * batch.token_cost[:, 1]
            if batch.evaluated[k] == "logits":
                total += reached * (read + decision)
            else:
                total += exited * read
            if batch.evaluated[k] == "state":
                total += reached * (segments.state_flops(k) + decision)
        return total
