"""A row whose tokens leave: layer by layer fewer of them go on, and the row itself ends at L, its only exit.

LeavingExits      the model: which tokens go on is its own
LeavingSegments   the same as segments for early_exit; a row's cost is known when it has run: `token_cost` of a Reading
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mini_ee.backbones.backbone import Tensors
from mini_ee.exits.rows import RowExits, RowSegments
from mini_ee.segments import Reading


class Left(NamedTuple):
    """What the layers leave of rows."""

    hidden: Tensor  # (B, T', D)
    mask: Tensor | None  # (B, 1, 1, T'), true at tokens, None: nothing is padded
    token_cost: Tensor | None = None  # (B, 2), as Reading has it


class LeavingExits(RowExits):
    """A backbone with one head, after the last layer. Raises ValueError for a backbone whose tokens cannot leave."""

    def leave(self, inputs) -> Left:
        """From the inputs of the backbone to what the head reads."""
        raise NotImplementedError

    def stay(self, inputs) -> Left:
        """The same, to what rounding is, with all tokens in all layers: what it would cost if none left."""
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
        token_cost = None if state.token_cost is None else state.token_cost.numpy(force=True)
        return Reading(logits.float().numpy(force=True), token_cost=token_cost)

    def whole(self) -> "LeavingSegments":
        return LeavingSegments(self.model, tokens_leave=False)

    def full(self) -> RowSegments:
        """The same backbone and head where no token leaves: what the model says then."""
        return RowSegments(self.model)


def in_order(order: Tensor, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens in another order, and their mask; or of them those that the order names. order (B, T') int64."""
    hidden = hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[2]))
    return hidden, mask if mask is None else mask.gather(3, order[:, None, None])


def token_costs(layers: Tensor, operations: Tensor | float) -> Tensor:
    """Layers (B,) of each row, and operations that all rows cost alike, as `token_cost` has them: (B, 2)."""
    layers = layers.double()
    return torch.stack((layers, torch.zeros_like(layers) + operations), dim=1)
