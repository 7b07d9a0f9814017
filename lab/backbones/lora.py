"""Low-rank adapters on the projections of a layer (Hu et al. 2022)."""

from collections.abc import Sequence

from torch import nn

import mini_ee.lora_exits as paper
from mini_ee.lab.backbones.layers import StackedLinear
from mini_ee.lab.backbones.targets import TARGETS


def check_lora(rank: int = paper.RANK, alpha: float = paper.ALPHA, targets: Sequence[str] = paper.TARGETS) -> None:
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
