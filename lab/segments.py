"""Segments: the parts of a model that the loop of mini_ee/loop.py runs one after the other, and what they cost.

Segment k contains the layers between exit k - 1 and exit k, and the head of exit k; k counts from 0 along exits. Each
engine (torch, ONNX Runtime, recorded logits) implements Segments. Hidden states stay inside the engine; what is read is
a numpy array, because the rule decides on the CPU. No torch here.
"""

import math
from collections.abc import Container, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mini_ee.lab.errors import WrongArguments

if TYPE_CHECKING:
    from mini_ee.lab.rules import Rule
    from mini_ee.lab.token_tasks import TokenTask

NO_POLICY = (
    "the rule {} needs a model with a policy, and this one has none; "
    "give a run of a method that trains policies, exported with such a rule if it is exported, or choose another rule"
)

NO_SHORT_LIST = (
    "short_list is read by lenses, and this model has none; choose another measure, or train a decoder with --head lens"
)

NO_STATES = "{} is computed from hidden states, which this model does not provide; choose another measure"


def check_finite(x: np.ndarray, what: str = "the logits") -> np.ndarray:
    """The same array. Raises ValueError if it has NaN or infinity."""
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():  # not checked for values of a graph
        raise ValueError(
            f"{what} must be finite, found NaN or infinity: the weights are damaged, or too large to compute with; "
            f"fetch or train them again"
        )
    return x


class Segments:
    """An engine of mini_ee/loop.py that knows its cost. It implements start, advance, read and flops; the other methods
    have defaults.

    k counts from 0 along exits. A `state` belongs to the engine: it holds tensors whose first axis is the row, and
    state.keep(rows) returns the state of some rows.
    """

    exits: tuple[int, ...]  # (e_1, ..., e_K), in layers run
    engine = "numpy"  # the library that computes
    tokens_exit = False  # whether tokens exit within a row, which itself has one exit: see token_cost
    token_task: "TokenTask | None" = None  # if rows are labelled token by token: logits are (N, T, C)
    has_policy = False  # whether there is an exit_logit, at every exit but the last
    from_embeddings: Container[int] = (0,)  # each k whose segment starts from the embeddings, not from segment k - 1
    metadata: dict = {}  # entries of their own in the manifest of an exported folder

    def start(self, inputs: Any) -> Any:
        """The state after the embeddings."""
        raise NotImplementedError

    def advance(self, k: int, state: Any) -> Any:
        """Run the layers between exit k - 1 and exit k."""
        raise NotImplementedError

    def read(self, k: int, state: Any) -> np.ndarray:
        """The logits (N, C) of exit k; of a token_task (N, T, C)."""
        raise NotImplementedError

    def flops(self, k: int, inputs: Any) -> tuple:
        """Floating-point operations (FLOPs) of one row in advance(k), and in read(k), if no token exits early.

        Two numbers, or two arrays (N,) if rows differ.
        """
        raise NotImplementedError

    def running(self) -> AbstractContextManager:
        """Context in which a batch runs, for engines that have a mode for it."""
        return nullcontext()

    def run_batch(self, rule: "Rule", inputs: Any) -> "BatchResult | None":
        """The whole batch, for an engine whose graph contains the loop; None: the loop itself runs it."""
        return None

    def whole(self) -> "Segments":
        """The model without early exits. A speed-up is measured against it."""
        return self

    def select_heads(self, heads: Container[int]) -> "Segments":
        """The same if only these heads will be read, for engines that compute a head together with its layers."""
        return self

    # ---- What rules read in place of logits ----
    def exit_logit(self, k: int, state: Any) -> np.ndarray:
        """(N,): the logit of the policy's exit probability."""
        raise ValueError(NO_POLICY.format("policy"))

    def saturation(self, k: int, state: Any) -> np.ndarray:
        """(N,): the cosine of the state and the state at the exit before."""
        raise WrongArguments(NO_STATES.format("saturation"))

    def short_list(self, k: int, state: Any) -> np.ndarray:
        """(N,): breaking ties among the tokens of a lens's short list."""
        raise WrongArguments(NO_SHORT_LIST)

    def counted(self, state: Any) -> np.ndarray:
        """(N, T) bool: the tokens that a token_task counts."""
        raise NotImplementedError

    def weakest_token(self, k: int, state: Any) -> np.ndarray:
        """(N,): the confidence of the least confident decision of a token_task."""
        if self.token_task is None:
            raise WrongArguments("weakest_token is for models that label tokens, found one label of a text")
        return self.token_task.weakest(self.read(k, state), self.counted(state))

    def state_flops(self, k: int, needs: str) -> float | None:
        """FLOPs of one row in the one that is called `needs`; None: the head is computed with it."""
        return None

    def token_cost(self, k: int, state: Any) -> np.ndarray:
        """(N, 2), if tokens exit within a row: mean layers per token, and FLOPs."""
        raise NotImplementedError

    def layer_passes(self, k: int) -> int:
        """Layers that are run for one row in advance(k)."""
        return self.exits[k] - (0 if k in self.from_embeddings else self.exits[k - 1])

    def in_one_graph(self) -> "Segments":
        """What the ONNX graph that stops by itself computes (lab/export/model_graph.py): these segments, for most."""
        return self


class BatchResult(NamedTuple):
    """The result of a batch of N rows."""

    logits: np.ndarray  # (N, C), or (N, T, C), of the exit where each row stopped
    exit_index: np.ndarray  # (N,)
    needs: str | None  # what the rule read at each exit but the last, of all rows that reached it; None: it planned
    token_cost: np.ndarray | None = None  # (N, 2), see Segments
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
        decision = self._rule.flops(math.prod(batch.logits.shape[1:]))
        for k in range(len(segments.exits)):
            advance, read = segments.flops(k, self._inputs)
            reached, exited = batch.exit_index >= k, batch.exit_index == k
            total += reached * advance if batch.token_cost is None else exited * batch.token_cost[:, 1]
            # A head that the rule reads is computed for every row that reaches it, else only for rows that stop there.
            if batch.needs is None or k == len(segments.exits) - 1:
                total += exited * read
            elif batch.needs == "logits" or (of_state := segments.state_flops(k, batch.needs)) is None:
                total += reached * (read + decision)
            else:
                total += exited * read + reached * (of_state + decision)
        return total
