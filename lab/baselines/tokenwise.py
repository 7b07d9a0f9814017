"""Token exits within an example: each layer computes fewer tokens, and the example itself exits at L, its only exit.

The common part of HashEE and TR-BERT; each decides which tokens exit.

TokenwiseExits      the model
TokenwiseSegments   its segments for early_exit; the cost of an example is known once it has run: `token_cost`
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import RowExits, RowSegments


class RemainingTokens(NamedTuple):
    """The tokens of each row that the head reads, after all layers."""

    hidden: Tensor  # (B, T', D)
    mask: Tensor | None  # (B, 1, 1, T'), true at tokens, None: nothing is padded
    token_cost: Tensor | None = None  # (B, 2), as in Segments


class TokenwiseExits(RowExits):
    """A backbone with one head, after the last layer. Raises ValueError for a backbone whose tokens cannot exit."""

    def run_reduced(self, inputs: Tensors | Inputs) -> RemainingTokens:
        """From the inputs of the backbone to the tokens that the head reads."""
        raise NotImplementedError

    def run_all(self, inputs: Tensors | Inputs) -> RemainingTokens:
        """The same up to rounding, but every layer computes all tokens: the cost without token exits."""
        raise NotImplementedError

    def each_state(self, *inputs: Tensor) -> Iterator[Tensor]:
        remaining = self.run_reduced(Tensors(*inputs))
        yield self.heads[0].state(remaining.hidden, remaining.mask)

    def segments(self) -> "TokenwiseSegments":
        return TokenwiseSegments(self)


class TokenwiseSegments(RowSegments):
    """The only segment of a TokenwiseExits in eval mode. Its state is the inputs, then the remaining tokens.

    tokens_exit: False computes the same with all tokens; a speed-up is measured against that.
    """

    def __init__(self, model: TokenwiseExits, tokens_exit: bool = True):
        super().__init__(model)
        self.tokens_exit = tokens_exit

    def start(self, inputs: Inputs) -> Inputs:
        return inputs

    def advance(self, k: int, state: Inputs) -> RemainingTokens:
        return self.model.run_reduced(state) if self.tokens_exit else self.model.run_all(state)

    def read(self, k: int, state: RemainingTokens) -> np.ndarray:
        logits = self.model.classify(k, self.model.heads[k].state(state.hidden, state.mask))
        return logits.float().numpy(force=True)

    def token_cost(self, k: int, state: RemainingTokens) -> np.ndarray:
        assert state.token_cost is not None
        return state.token_cost.numpy(force=True)

    def whole(self) -> "TokenwiseSegments":
        return TokenwiseSegments(self.model, tokens_exit=False)

    def full(self) -> RowSegments:
        """The same backbone and head without token exits."""
        return RowSegments(self.model)


def gather_tokens(order: Tensor, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens with the indices of `order`, in that order, and their mask. order (B, T') int64."""
    hidden = hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[2]))
    return hidden, mask if mask is None else mask.gather(3, order[:, None, None])


def token_costs(layers: Tensor, flops: Tensor | float) -> Tensor:
    """`token_cost` (B, 2) from the layers (B,) of each row and the FLOPs, which are equal for all rows."""
    layers = layers.double()
    return torch.stack((layers, torch.zeros_like(layers) + flops), dim=1)
