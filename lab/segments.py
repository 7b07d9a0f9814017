"""Segments: the parts of a model that the loop of early_exit.py runs one after the other, and what they cost.

Segment k contains the layers between exit k - 1 and exit k, and the head of exit k; k counts from 0 along exits. Each
engine (torch, ONNX Runtime, recorded logits) implements Segments. Hidden states stay inside the engine; a Reading holds
numpy arrays, because the rule decides on the CPU. No torch here.
"""

from collections.abc import Container, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mini_ee.lab.rules import Rule


class Reading(NamedTuple):
    """The outputs of exit k for the N rows (examples or tokens) that reached it.

    The fields besides the logits are None, unless the engine has computed them or they cannot be computed from logits.
    """

    logits: np.ndarray | None  # (N, C); None if the rule needs the state alone
    exit_logit: np.ndarray | None = None  # (N,), if the model has a policy
    max_probability: np.ndarray | None = None  # (N,), one field for each measure of confidence.py
    breaking_ties: np.ndarray | None = None
    saturation: np.ndarray | None = None  # (N,), cosine of the state and the state at the exit before
    entropy: np.ndarray | None = None
    normalised_entropy: np.ndarray | None = None
    breaking_ties_logits: np.ndarray | None = None
    prediction: np.ndarray | None = None  # (N,), index of the largest logit; for regression the number
    token_cost: np.ndarray | None = None  # (N, 2), if tokens exit within a row: mean layers per token, and FLOPs
    weakest_label: np.ndarray | None = None  # (N,), the measure of several labels at once

    def keep(self, rows: np.ndarray) -> "Reading":
        """The logits and costs of some rows. The other fields are for the rule, which has read them."""
        assert self.logits is not None
        token_cost = None if self.token_cost is None else self.token_cost[rows]
        return Reading(self.logits[rows], token_cost=token_cost)


def known_logits(reading: Reading) -> np.ndarray:
    """The logits (N, C) of a head that was computed."""
    assert reading.logits is not None
    return reading.logits


def check_finite(x: np.ndarray, what: str = "the logits") -> np.ndarray:
    """The same array. Raises ValueError if it has NaN or infinity."""
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():  # not checked for values of a graph
        raise ValueError(
            f"{what} must be finite, found NaN or infinity: the weights are damaged, or too large to compute with; "
            f"fetch or train them again"
        )
    return x


class Segments:
    """The parts of a model. An engine implements start, advance, read and flops; the other methods have defaults.

    k counts from 0 along exits. A `state` belongs to the engine: it holds tensors whose first axis is the row, and
    state.keep(rows) returns the state of some rows.
    """

    exits: tuple[int, ...]  # (e_1, ..., e_K), in layers run
    engine = "numpy"  # the library that computes
    tokens_exit = False  # whether tokens exit within a row: then Reading.token_cost is the cost of each row
    from_embeddings: Container[int] = (0,)  # each k whose segment starts from the embeddings, not from segment k - 1
    metadata: dict = {}  # entries of their own in the manifest of an exported folder

    def start(self, inputs: Any) -> Any:
        """The state after the embeddings."""
        raise NotImplementedError

    def advance(self, k: int, state: Any) -> Any:
        """Run the layers between exit k - 1 and exit k."""
        raise NotImplementedError

    def read(self, k: int, state: Any) -> Reading:
        """All outputs of exit k: logits, and what rules need besides."""
        raise NotImplementedError

    def flops(self, k: int, inputs: Any) -> tuple:
        """Floating-point operations (FLOPs) of one row in advance(k), and in read_logits(k), if no token exits early.

        Two numbers, or two arrays (N,) if rows differ.
        """
        raise NotImplementedError

    def running(self) -> AbstractContextManager:
        """Context in which a batch runs, for engines that have a mode for it."""
        return nullcontext()

    def run_batch(self, rule: "Rule", inputs: Any) -> "BatchResult | None":
        """The whole batch, for an engine whose graph contains the loop; None: the loop of early_exit.py runs it."""
        return None

    def whole(self) -> "Segments":
        """The model without early exits. A speed-up is measured against it."""
        return self

    def select_heads(self, heads: Container[int], state: Any) -> Any:
        """The state if only these heads will be read, for engines that compute a head together with its layers."""
        return state

    def read_state(self, k: int, state: Any) -> Reading:
        """A reading for rules that need no logits. An engine that can omit the logits overrides this."""
        return self.read(k, state)

    def read_logits(self, k: int, state: Any) -> Reading:
        """The logits of exit k. An engine whose `read` computes more, such as a policy, overrides this."""
        return self.read(k, state)

    def state_flops(self, k: int) -> float:
        """FLOPs of one row in read_state(k)."""
        return 0.0

    def layer_passes(self, k: int) -> int:
        """Layers that are run for one row in advance(k)."""
        return self.exits[k] - (0 if k in self.from_embeddings else self.exits[k - 1])

    def in_one_graph(self) -> "Segments":
        """What the ONNX graph that stops by itself computes (lab/export/model_graph.py): these segments, for most."""
        return self


class BatchResult(NamedTuple):
    """The result of a batch of N rows."""

    logits: np.ndarray  # (N, C), of the exit where each row stopped
    exit_index: np.ndarray  # (N,)
    evaluated: list[str | None]  # (K,), what the rule read at each exit, of all rows that reached it: see at_exit
    token_cost: np.ndarray | None = None  # (N, 2), see Reading
    segments: Segments | None = None  # the segments whose layers and FLOPs count, if an engine delegated the batch


class Cost:
    """The cost of a batch. Layers and FLOPs are counted when they are read, not while the batch runs."""

    def __init__(self, seconds: float, segments: Segments, rule: "Rule", inputs: Sized, batch: BatchResult):
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
        """(N,): floating-point operations; a multiply-add counts as two.

        The sum over the segments up to each row's exit, the heads that were read on the way, and the rule's decisions.
        """
        segments, batch = self._segments, self._batch
        total = np.full(len(batch.exit_index), self._rule.plan_flops(self._inputs))
        decision = self._rule.flops(batch.logits.shape[1])
        for k in range(len(segments.exits)):
            advance, read = segments.flops(k, self._inputs)
            reached, exited = batch.exit_index >= k, batch.exit_index == k
            total += reached * advance if batch.token_cost is None else exited * batch.token_cost[:, 1]
            # A head that the rule reads is computed for every row that reaches it, else only for rows that stop there.
            if batch.evaluated[k] == "logits":
                total += reached * (read + decision)
            else:
                total += exited * read
            if batch.evaluated[k] == "state":
                total += reached * (segments.state_flops(k) + decision)
        return total
