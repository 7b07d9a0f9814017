"""Settings that describe themselves: a frozen dataclass whose fields carry their help and their limits.

The command line's options and the checks of their values are both made from it (cli/options.py, `check_options`).
"""

import math
from collections.abc import Container
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral
from operator import ge, gt, le, lt
from types import NoneType, UnionType
from typing import get_args, get_origin

LIMITS = {"least": ("of at least", ge), "above": ("above", gt), "most": ("of at most", le), "below": ("below", lt)}


def option(
    default=MISSING,
    help: str = "",
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **about,
):
    """A field of a settings class.

    help: what `--help` prints. choices: all values of a text. least, most: limits that are allowed; above, below:
    ones that are not. about: `flag`, where the option is not named like the field, `metavar`, and `idle`, (another
    field, the value under which nothing reads this one).
    """
    limits = {"choices": choices, "least": least, "above": above, "most": most, "below": below}
    return field(default=default, metadata={"help": help} | limits | about)


def flag_of(name: str, metadata) -> str:
    """`--head-lr` for head_lr, unless the metadata name another flag."""
    return metadata.get("flag", "--" + name.replace("_", "-"))


def scalar_type(annotation) -> type:
    """The type of one value: int for `int`, `int | None` and `tuple[int, ...]`."""
    if isinstance(annotation, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation


def has_several(annotation) -> bool:
    """Whether the annotation is of a tuple, or of one or None."""
    return any(get_origin(each) is tuple for each in (annotation, *get_args(annotation)))


def check_options(settings) -> None:
    """Raise ValueError, of one line, for a value of another type or outside its limits; a list becomes a tuple."""
    for each in fields(settings):
        if not each.metadata:
            continue
        value, limits = getattr(settings, each.name), each.metadata
        if value is None:
            continue
        expected, several = _expected(scalar_type(each.type), limits), has_several(each.type)
        if several and isinstance(value, list):
            object.__setattr__(settings, each.name, value := tuple(value))
        flag = f" ({limits['flag']})" if "flag" in limits else ""
        if several and not (isinstance(value, tuple) and value):
            raise ValueError(f"{each.name}{flag} must be a list, each {expected}, got {value!r}")
        for one in value if several else (value,):
            if not _fits(one, scalar_type(each.type), limits):
                raise ValueError(f"{each.name}{flag} must be {expected}, got {one!r}")


def idle_option(settings, named: Container[str]) -> str | None:
    """A line about an option that was named, and that nothing reads under another one's value; None where all count."""
    about = {each.name: each.metadata for each in fields(settings)}
    for name, metadata in about.items():
        other, value = metadata.get("idle", (None, None))
        if other and name in named and getattr(settings, other) == value:
            under = f"{flag_of(other, about[other])} {value}"
            return f"{flag_of(name, metadata)}: counts for nothing with {under}; leave it out"
    return None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What settings derive from: their values are checked as they are made."""

    def __post_init__(self):
        check_options(self)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, numpy's too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _fits(value, kind: type, limits) -> bool:
    if limits["choices"] is not None:
        return value in limits["choices"]
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if kind not in (int, float):
        return True
    if (
        isinstance(value, bool)
        or not isinstance(value, int if kind is int else int | float)
        or not math.isfinite(value)
    ):
        return False
    return all(inside(value, limits[name]) for name, (_, inside) in LIMITS.items() if limits[name] is not None)


def _expected(kind: type, limits) -> str:
    if limits["choices"] is not None:
        return f"one of {', '.join(limits['choices'])}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text"
    what = "a whole number" if kind is int else "a number"
    bounds = [f"{word} {limits[name]:g}" for name, (word, _) in LIMITS.items() if limits[name] is not None]
    return " ".join([what, " and ".join(bounds)]).strip()
