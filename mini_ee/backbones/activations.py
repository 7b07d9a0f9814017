"""Activations of feed-forward parts by the names that config.json gives them, with their ONNX twin."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def graph_activation(g, x: str, activation: Callable[[Tensor], Tensor]) -> str:
    """The twin of ACTIVATIONS."""
    if activation is F.relu:
        return g.op("Relu", x)
    if activation is F.silu:
        return g.op("Mul", x, g.op("Sigmoid", x))
    return g.op("Gelu", x, approximate="none" if activation is F.gelu else "tanh")
