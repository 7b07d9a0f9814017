"""Activations of feed-forward parts by their names in config.json."""

import torch.nn.functional as F

from mini_ee.lab.data.values import shortened

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def check_activation(key: str, name: object) -> None:
    """Raise ValueError unless the value of a key of config.json is the name of an activation."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key} must be one of {', '.join(ACTIVATIONS)}, got {shortened(name)}")
