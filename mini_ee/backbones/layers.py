"""Parts of a layer that several families share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import AdaptLayer


class StackedLinear(nn.Linear):
    """Several linear maps of one input in one product. sizes: the outputs of each, in order."""

    def __init__(self, width: int, sizes: tuple[int, ...], bias: bool):
        super().__init__(width, sum(sizes), bias)
        self.sizes = sizes


class Adapted(nn.Module):
    """A layer whose linear maps adapters may add to."""

    float_maps: tuple[str, ...] = ()  # whose inputs have outliers: they cannot bear int8

    def linear(self, name: str, x: Tensor, adapt: AdaptLayer | None) -> Tensor:
        """One of the layer's maps, with what adapters add."""
        y = getattr(self, name)(x)
        return y if adapt is None else adapt(name, x, y)

    @property
    def int8_maps(self) -> tuple[str, ...]:
        """The linear maps that can bear int8."""
        maps = (name for name, module in self.named_children() if isinstance(module, nn.Linear))
        return tuple(name for name in maps if name not in self.float_maps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019), in float32; offset: it stores w - 1."""

    def __init__(self, width: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # added in float32: in bfloat16 1 + w would keep two digits of w
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
