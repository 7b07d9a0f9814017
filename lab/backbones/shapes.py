"""Checks of arrays. Letters: B batch, T tokens, D width, H heads, C classes, V vocabulary, K exits, L layers."""

from typing import Any


def check(x: Any, dims: str, **want: int) -> dict[str, int]:
    """Sizes of the named dimensions of an array or tensor.

    dims: one name per dimension, separated by spaces. want: the sizes that are known.
    Raises ValueError if the number of dimensions differs, or a name has two sizes.

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
