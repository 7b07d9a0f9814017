"""Checks of arrays. Letters: B batch, T tokens, D width, H heads, C classes, V vocabulary, K exits, L layers."""

import numpy as np


def check(x, dims: str, **want: int) -> dict[str, int]:
    """Sizes of the named dimensions of an array or tensor.

    dims: one name a dimension, separated by spaces; want: sizes that are known.
    Raises ValueError where the rank differs, or a name stands for two sizes.

    >>> import numpy
    >>> check(numpy.zeros((2, 5, 8)), "B T D", D=8)
    {'D': 8, 'B': 2, 'T': 5}
    """
    names, shape = dims.split(), tuple(x.shape)
    if len(names) != len(shape):
        raise ValueError(f"expected {dims!r} ({len(names)} dimensions), got shape {shape}")
    for name, size in zip(names, shape):
        if want.setdefault(name, size) != size:
            raise ValueError(f"expected {dims!r} with {name}={want[name]}, got shape {shape}")
    return want


def check_finite(x: np.ndarray, what: str = "the logits") -> np.ndarray:
    """The same array, or ValueError where a number in it is NaN or infinite: no rule and no reader can use it."""
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():  # of a graph it is known when it runs
        raise ValueError(
            f"{what} must be finite, found NaN or infinity: the weights are damaged, or too large to compute with; "
            f"fetch or train them again"
        )
    return x
