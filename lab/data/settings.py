"""Settings that describe themselves: frozen dataclasses whose fields have a help text and limits.

The options of the command line (cli/command_options.py) and the checks of their values (`check_options`) are made from
the fields.
"""

from collections.abc import Container
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import get_args, get_origin

from mini_ee.lab.data.values import LIMITS, check_value


def option(
    default=MISSING,
    help: str = "",
    *,
    choices: Container[str] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **details,
):
    """A field of a settings class.

    help: the text of `--help`, without the default. choices: all allowed values of a text. least, most: inclusive
    limits. above, below: exclusive limits. details: `flag`, if the option is not named like the field; `metavar`;
    `default_text`: for the help, what None stands for; and `unused_when`: (another field, the value of it with which
    this field has no effect).
    """
    limits = {"choices": choices, "least": least, "above": above, "most": most, "below": below}
    return field(default=default, metadata={"help": help} | limits | details)


def flag_of(name: str, metadata) -> str:
    """`--head-lr` for head_lr, unless the metadata name another flag."""
    return metadata.get("flag", "--" + name.replace("_", "-"))


def scalar_type(annotation) -> type:
    """The type of one value: int for `int`, `int | None` and `tuple[int, ...]`."""
    if isinstance(annotation, UnionType):
        (annotation,) = (argument for argument in get_args(annotation) if argument is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation


def has_several(annotation) -> bool:
    """Whether the annotation is a tuple, or a tuple or None."""
    return any(get_origin(kind) is tuple for kind in (annotation, *get_args(annotation)))


def check_options(settings) -> None:
    """Raise ValueError for a value of another type or outside its limits. Lists become tuples."""
    for setting in fields(settings):
        value, metadata = getattr(settings, setting.name), setting.metadata
        if value is None or not metadata:
            continue
        several, flag = has_several(setting.type), f" ({metadata['flag']})" if "flag" in metadata else ""
        limits = {name: metadata[name] for name in ("choices", *LIMITS)}
        check_value(f"{setting.name}{flag}", value, scalar_type(setting.type), several=several, **limits)
        if several:
            object.__setattr__(settings, setting.name, tuple(value))


def unused_option(settings, named: Container[str]) -> str | None:
    """Error text if an option was given but has no effect with the others, else None."""
    details = {setting.name: setting.metadata for setting in fields(settings)}
    for name, metadata in details.items():
        other, value = metadata.get("unused_when", (None, None))
        if other and name in named and getattr(settings, other) == value:
            under = f"{flag_of(other, details[other])} {value}"
            return f"{flag_of(name, metadata)} has no effect with {under}; leave it out"
    return None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base of all settings classes. It checks the values."""

    def __post_init__(self):
        check_options(self)
