"""Modules of layers that several families share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import AdaptLayer


class StackedLinear(nn.Linear):
    """Several linear maps of one input in one product. sizes: the number of outputs of each, in order."""

    def __init__(self, width: int, sizes: tuple[int, ...], bias: bool):
        super().__init__(width, sum(sizes), bias)
        self.sizes = sizes


class Adapted(nn.Module):
    """A layer whose linear maps may have adapters."""

    float_maps: tuple[
        str, ...
    ] = ()  # the linear maps that are not quantised to int8, because of outliers in their input

    def linear(self, name: str, x: Tensor, adapt: AdaptLayer | None) -> Tensor:
        """The output of one of the layer's linear maps, plus that of its adapters."""
        y = getattr(self, name)(x)
        return y if adapt is None else adapt(name, x, y)

    @property
    def int8_maps(self) -> tuple[str, ...]:
        """The linear maps that can be quantised to int8."""
        maps = (name for name, module in self.named_children() if isinstance(module, nn.Linear))
        return tuple(name for name in maps if name not in self.float_maps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019), in float32. offset: the parameter is w - 1."""

    def __init__(self, width: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # added in float32: in bfloat16, 1 + w would have two digits of w
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
