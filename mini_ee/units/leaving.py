"""A row whose tokens leave: layer by layer fewer of them go on, and the row itself ends at L, its only exit.

LeavingExits      the model: which tokens go on is its own
LeavingSegments   the same as segments for early_exit; what a row has cost is known when it ran, and `spent` says it
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_ee.backbones.backbone import Tensors
from mini_ee.early_exit import Reading
from mini_ee.units.rows import RowExits, RowSegments


class Left(NamedTuple):
    """What the layers leave of rows; as names of values, in a graph."""

    hidden: Tensor  # (B, T', D)
    mask: Tensor | None  # (B, 1, 1, T'), true at tokens, None: nothing is padded; (B, T') in a graph
    spent: Tensor | None = None  # (B, 2), as Reading has it


class LeavingExits(RowExits):
    """A backbone with one head, after the last layer. Raises ValueError for a backbone whose tokens cannot leave."""

    def leave(self, inputs) -> Left:
        """From the inputs of the backbone to what the head reads."""
        raise NotImplementedError

    def stay(self, inputs) -> Left:
        """The same, to what rounding is, with all tokens in all layers: what it would cost if none left."""
        raise NotImplementedError

    def graph_leave(self, g, hidden: str) -> Left:
        """leave, from the embeddings on."""
        raise NotImplementedError

    def graph_stay(self, g, hidden: str) -> Left:
        """stay, from the embeddings on."""
        raise NotImplementedError

    def each_state(self, *inputs: Tensor) -> Iterator[Tensor]:
        left = self.leave(Tensors(*inputs))
        yield self.heads[0].state(left.hidden, left.mask)

    def segments(self) -> "LeavingSegments":
        return LeavingSegments(self)


class LeavingSegments(RowSegments):
    """The one segment of a LeavingExits in eval mode. Its state is the inputs, then what is left of them.

    tokens_leave: whether they do; else the same is computed by all tokens, which a speed-up is measured against.
    """

    def __init__(self, model: LeavingExits, tokens_leave: bool = True):
        super().__init__(model)
        self.tokens_leave = tokens_leave

    def start(self, inputs):
        return inputs

    def advance(self, k: int, state) -> Left:
        return self.model.leave(state) if self.tokens_leave else self.model.stay(state)

    def read_logits(self, k: int, state: Left) -> Reading:
        logits = self.model.classify(k, self.model.heads[k].state(state.hidden, state.mask))
        spent = None if state.spent is None else state.spent.numpy(force=True)
        return Reading(logits.float().numpy(force=True), spent=spent)

    def whole(self) -> "LeavingSegments":
        return LeavingSegments(self.model, tokens_leave=False)

    def full(self) -> RowSegments:
        """The same backbone and head where no token leaves: what the model says then."""
        return RowSegments(self.model)

    # ---- ONNX ----
    def graph_advance(self, k: int, g, hidden: str) -> Left:
        return self.model.graph_leave(g, hidden) if self.tokens_leave else self.model.graph_stay(g, hidden)

    def graph_read(self, k: int, g, state: Left) -> str:
        head = self.model.heads[k]
        return head.graph_classify(g, head.graph_state(g, state.hidden, state.mask))

    def graph_spent(self, g, state: Left) -> str:
        """The `spent` of a Reading, (B, 2) float32."""
        return state.spent


def in_order(order: Tensor, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens in another order, and their mask; or of them those that the order names. order (B, T') int64."""
    hidden = hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[2]))
    return hidden, mask if mask is None else mask.gather(3, order[:, None, None])


def graph_in_order(g, order: str, hidden: str, width: int) -> str:
    """in_order, of hidden states (B, T, width)."""
    index = g.op("Expand", g.op("Unsqueeze", order, g.integers(2)), g.integers(1, 1, width))
    return g.op("GatherElements", hidden, index, axis=1)


def graph_spent(g, layers: str, operations: str) -> str:
    """Layers (B,) and operations (1,), the same for all rows, both float32, as one (B, 2)."""
    layers = g.op("Unsqueeze", layers, g.integers(1))
    both = g.op("Expand", operations, g.shape(layers, 0, 2))
    return g.op("Concat", layers, both, axis=1)


def graph_first(g, mask: str) -> str:
    """Where the first token of a row stands: (T,) bool. mask (B, T)."""
    counted = g.op("CumSum", g.op("Expand", g.integers(1), g.shape(mask, 1, 2)), g.integers(0))
    return g.op("Equal", counted, g.integers(1))


def float_constant(g, value: float) -> str:
    """A constant () of float32, whatever the graph's dtype: operations are large numbers."""
    return g.constant(str(value), np.array(value, np.float32))


def spent_by(layers: Tensor, operations: float) -> Tensor:
    """The same as `spent` in torch: layers (B,) of each row, operations that all rows cost alike."""
    return torch.stack((layers.double(), layers.new_full(layers.shape, operations, dtype=torch.float64)), dim=1)
