"""Low-rank adapters on the projections of a layer (Hu et al. 2022)."""

from collections.abc import Sequence

import torch
from torch import nn

from mini_ee.lab.backbones.layers import StackedLinear
from mini_ee.lab.backbones.targets import TARGETS


class LowRank(nn.Module):
    """The factors A and B of an adapter's output x A B. A is random and B is 0, so the initial output is 0."""

    def __init__(self, inputs: int, rank: int, outputs: int):
        super().__init__()
        self.A = nn.Parameter(torch.empty(inputs, rank))
        self.B = nn.Parameter(torch.zeros(rank, outputs))
        nn.init.uniform_(self.A, -(inputs**-0.5), inputs**-0.5)  # as nn.Linear and PEFT do


def check_lora(rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = ("query", "value")) -> None:
    """Raise ValueError if rank, alpha or targets are invalid."""
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be a number above 0, got {alpha}")
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"targets must be some of {', '.join(TARGETS)}, got {', '.join(unknown) or 'none'}")
    if len(set(targets)) < len(targets):
        raise ValueError(f"targets must be different ones, got {', '.join(targets)}")


def columns_of(layer: nn.Module, target: str) -> slice:
    """The outputs of a projection (`target`) in the output of its linear map, which may stack several projections."""
    name, part = TARGETS[target]
    linear = getattr(layer, name)
    sizes = linear.sizes if isinstance(linear, StackedLinear) else [linear.out_features]
    return slice(sum(sizes[:part]), sum(sizes[: part + 1]))
