"""The check of values from options and JSON files, and their form in messages. No torch here.

Every message names what was expected and what was found: "epochs must be a whole number of at least 1, got 0".
"""

import json
import math
from numbers import Integral
from operator import ge, gt, le, lt

from mini_ee.lab.errors import WrongArguments

LIMITS = {"least": ("of at least", ge), "above": ("above", gt), "most": ("of at most", le), "below": ("below", lt)}
LONGEST = 100  # characters of a value in a message


def check_value(name: str, value, kind: type, *, several: bool = False, choices=None, **limits: float | None) -> None:
    """Raise ValueError unless a value has the type and is within its limits. The message is one line.

    kind: int, float, bool or str; other types are not checked. several: the value is a list or tuple of at least one.
    choices: the allowed values. limits: `least`, `above`, `most` and `below`; None is no limit.
    """
    wanted = expected(kind, choices, limits)
    if several and not (isinstance(value, list | tuple) and value):
        raise ValueError(f"{name} must be a list, each {wanted}, got {shortened(value)}")
    for one in value if several else (value,):
        if not (one in choices if choices is not None else fits(one, kind, **limits)):
            is_share = kind is float and 1 in (limits.get("most"), limits.get("below"))
            raise ValueError(f"{name} must be {wanted}, got {shortened(one)}{percentage(one) if is_share else ''}")


def fits(value, kind: type, **limits: float | None) -> bool:
    """Whether a value has the type and is within the limits of `check_value`. True and NaN are no numbers."""
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if kind not in (int, float):
        return True
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    bounds = ((LIMITS[name][1], limit) for name, limit in limits.items() if limit is not None)
    return abs(value) < math.inf and all(inside(value, limit) for inside, limit in bounds)


def expected(kind: type, choices, limits: dict[str, float | None]) -> str:
    """The expected value in words.

    >>> expected(int, None, {"least": 1, "most": 9}), expected(float, None, {"above": 0})
    ('a whole number from 1 to 9', 'a number above 0')
    """
    if choices is not None:
        return f"one of {', '.join(choices)}"
    if kind is bool or kind is str:
        return "true or false" if kind is bool else "text"
    what, bounds = "a whole number" if kind is int else "a number", {k: v for k, v in limits.items() if v is not None}
    if bounds.keys() == {"least", "most"}:
        return f"{what} from {_number(bounds['least'])} to {_number(bounds['most'])}"
    return " ".join(
        [what, " and ".join(f"{LIMITS[name][0]} {_number(limit)}" for name, limit in bounds.items())]
    ).strip()


LEAST_PERCENTAGE = 1.5  # a smaller number above 1, such as 1.1, is a mistake of another kind


def percentage(value: object) -> str:
    """`; did you mean .95?` for 95 in place of a share, else empty.

    >>> percentage(99.9), percentage(0.5)
    ('; did you mean .999?', '')
    """
    if not isinstance(value, int | float) or not LEAST_PERCENTAGE <= value <= 100:
        return ""
    return f"; did you mean {f'{value / 100:g}'.removeprefix('0')}?"


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, also one of numpy. True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """A value as one short line."""
    if isinstance(value, int) and abs(value) > 1e30:  # repr raises ValueError for thousands of digits
        return f"an integer of about 10^{math.floor(math.log10(abs(value)))}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def label_text(value: object) -> str | None:
    """A label as text: stripped, JSON's 1.0 as "1", true as "true". None if the value is not a label."""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return str(int(value) if value.is_integer() else value) if math.isfinite(value) else None
    return str(value).strip() or None if isinstance(value, str | int) else None


def text_flaw(text: object) -> str | None:
    """A description of what is wrong with a text, or None if it is a string, not blank, and can be written as UTF-8."""
    if not isinstance(text, str):
        return f"{shortened(text)}, which is no string"
    if not text.strip():
        return "an empty text"
    held = text.encode(errors="ignore").decode() == text
    return None if held else "half of a surrogate pair, which is no character"


def checked_text(text: str, name: str, what: str = "a prompt") -> str:
    """The text. Raises WrongArguments if it has no text. name, what: its option and kind, for the message."""
    if not text.strip():
        raise WrongArguments(f"{name}: expected {what}, found no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python represents invalid bytes of the command line as surrogates
        raise WrongArguments(f"{name}: expected text in UTF-8, found another byte at {error.start}") from None
    return text
