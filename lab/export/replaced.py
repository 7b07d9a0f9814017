"""Functions that torch does not pass on to values of a graph, and what stands in their places during a trace.

torch.arange takes no size of a graph; other functions have a form of their own in a graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REPLACED: dict[tuple[Any, str], Callable] = {}
"""(a module or class, the name of its function) -> what stands there during a trace."""


def replaces(owner: Any, name: str) -> Callable:
    """Decorator: during a trace the function stands in the place of `owner.name`.

    It is called with the replaced function first, and calls that unless an argument is a value of a graph.
    """

    def register(function: Callable) -> Callable:
        REPLACED[owner, name] = function
        return function

    return register


@contextmanager
def replaced() -> Iterator[None]:
    """In this context, the functions of REPLACED stand in their places."""
    before = {place: getattr(*place) for place in REPLACED}
    for place, function in REPLACED.items():
        setattr(*place, _around(before[place], function))
    try:
        yield
    finally:
        for place, original in before.items():
            setattr(*place, original)


def _around(original: Callable, function: Callable) -> Callable:
    return lambda *args, **kwargs: function(original, *args, **kwargs)
