"""The parser of every command, and its options: from the fields of settings classes, and by the kind of the run that
the command line names. No torch here.

An error is one line. `--help` shows the required options and those that most people use, on one screen; `--help-all`
shows all that apply.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mini_ee.lab.data.files import MANIFEST, read_json, run_config
from mini_ee.lab.data.settings import flag_of, has_several, scalar_type
from mini_ee.lab.data.values import percentage
from mini_ee.lab.errors import WrongArguments

INVALID_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)")  # a message of argparse
MOST_MEANT = 3  # names that a message shows
MORE = "more options"  # title of those that are in no group
DIGITS = 10  # maximum of a whole number
SCHEDULES = ("restart", "parallel", "adaptive")  # of the streams of LoRAExit
MAX_THREADS = 1024  # a process that starts too many ends without a message


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Ends the help of each option that has a default with that default."""

    def _get_help_string(self, action):
        default = action.default
        if default in (None, argparse.SUPPRESS, []) or isinstance(default, bool):
            return action.help
        return f"{action.help} (default %(default)s)"

    def usage_of(self, action: argparse.Action) -> str:
        """How the usage shows an option or a positional argument: `--out DIR`, `RUN`, `[FILE]`, `COMMAND`."""
        if isinstance(action, argparse._SubParsersAction):
            return str(action.metavar)
        values = self._format_args(action, action.metavar or action.dest.upper())
        return " ".join([*action.option_strings[-1:], values])


class HelpAll(argparse.Action):
    """--help-all: prints all options, and ends."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.shows_all = True
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Errors in one line, help with a working example.

    usual: the options that --help shows besides the required ones, in this order; None: all, so there is no --help-all.
    """

    def __init__(self, *args, example: str = "", usual: Sequence[str] | None = None, **kwargs):
        self.words: list[str] = []  # of the command line, after the command; see named_run
        self.kind = ""  # of that RUN, in words
        self.usual, self.shows_all = usual, usual is None
        self.of_rules: dict[str, str] = {}  # option that only other commands take -> the exit rule that it sets
        self.hidden: list[argparse._ArgumentGroup] = []  # options that are parsed, but do not fit what the line names
        super().__init__(
            *args,
            add_help=False,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            epilog=f"example:\n  {example}" if example else None,
            **kwargs,
        )
        self.every_command = self.add_argument_group("every command")  # its options
        if usual is None:
            self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        else:
            usual_help = "show the options that most people use"
            self.every_command.add_argument("-h", "--help", action="help", help=usual_help)
            self._all = self.every_command.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options")

    def format_help(self) -> str:
        """A sentence, the usage, the required options, and the usual ones or all."""
        formatter = self._get_formatter()
        positional = self._positionals._group_actions
        required = [action for action in self._actions if action.option_strings and action.required]
        either = [group._group_actions for group in self._mutually_exclusive_groups if group.required]
        usage = [formatter.usage_of(action) for action in (*positional, *required)]
        usage += [f"({' | '.join(map(formatter.usage_of, actions))})" for actions in either]
        needed = [action for action in positional if action.required and action.help] + sum(either, required)
        formatter.add_text(self.description)
        formatter.add_usage(" ".join(["%(prog)s", *usage, "[options]"]), [], [])
        for title, description, actions in (("required", None, needed), *self._sections(needed)):
            formatter.start_section(title)
            formatter.add_text(description)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _sections(self, needed: list) -> Iterator[tuple[str, str | None, list]]:
        """(title, description, options) of each section after the required options."""
        usual = [self._option_string_actions[flag] for flag in self.usual or () if flag in self._option_string_actions]
        first = [action for action in self._positionals._group_actions if action.help] + usual
        first = [action for action in first if action not in needed]
        others, elsewhere = [], (self._positionals, self.every_command, *self.hidden)
        for group in (*(group for group in self._action_groups if group not in elsewhere), self.every_command):
            if actions := [action for action in group._group_actions if action not in (*needed, *first)]:
                title = group.title if group is not self._optionals else MORE if first else "options"
                others.append((title, group.description, actions))
        if self.shows_all:
            yield "options", None, first
            yield from others
            return
        titles = ", ".join(title for title, *_ in others if title != MORE)
        self._all.help = f"show {sum(len(actions) for *_, actions in others) - 2} more options ({titles})"  # but --help
        yield "options", None, [*first, self._all]

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, but each command reports its unknown arguments itself, so the error names its help."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0][2:] for word in unknown if word.startswith("--")]
            known = [name[2:] for name in self._option_string_actions if name.startswith("--")]
            meant = did_you_mean(flags[0], known, "--") if flags else ""
            if rule := self.of_rules.get(f"--{flags[0]}" if flags else ""):
                command = f"mini-ee evaluate RUN --rule {rule} {' '.join(unknown)}"
                meant = f"; it is a setting of an exit rule, which takes effect after the training: {command}"
            of = f" for {self.kind}" if self.kind else ""
            every = "--help" if self.usual is None else "--help-all"
            self.error(f"unrecognized arguments{of}: {' '.join(unknown)}{meant}", every)
        return namespace, unknown

    def error(self, message: str, help: str = "--help"):
        """Print one line and end with status 2. Of wrong choices it shows those that are close, if there are any.

        help: the option to see.
        """
        wrong = INVALID_CHOICE.search(message)
        if wrong and (meant := did_you_mean(wrong[1], re.findall(r"[^\s',]+", wrong[2]))):
            message = f"{message[: wrong.start()]}invalid choice: '{wrong[1]}'{meant}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} {help}\n")


def sentence(help: str) -> str:
    """The line of a command in the list of commands, as a sentence."""
    return f"{help[0].upper()}{help[1:]}."


def did_you_mean(word: str, names: Iterable[str], dashes: str = "") -> str:
    """`; did you mean NAME?` with the names that begin with a mistyped word or are close to it; else empty.

    dashes: what stands before each name.

    >>> did_you_mean("jiont", ["joint", "two-stage"]), did_you_mean("xyz", ["joint"])
    ('; did you mean joint?', '')
    """
    names, word = list(names), word.lower()
    begins = [name for name in names if name == word or name.startswith(word) and len(word) > 2]
    close = begins or get_close_matches(word, names, 1)
    return f"; did you mean {' or '.join(dashes + name for name in close)}?" if 0 < len(close) <= MOST_MEANT else ""


# ---- Options ----
def add_options(
    parser: argparse._ActionsContainer, settings: type, defaults: dict | None = None, lacks: tuple[str, ...] = ()
) -> None:
    """Add an option for each field of a settings class. The parsed arguments contain only the options that were given.

    defaults: for the help, the defaults that differ from those of the class. lacks: fields that get no option.
    """
    for field in fields(settings):
        if not field.metadata or field.name in lacks:
            continue
        kind, metadata = scalar_type(field.type), field.metadata
        help = help_of(field, (defaults or {}).get(field.name, field.default))
        flag, name = flag_of(field.name, metadata), {"dest": field.name, "default": argparse.SUPPRESS}
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=help, **name)
            continue
        many = has_several(field.type)
        name |= {"metavar": metadata["metavar"]} if "metavar" in metadata else {}
        if metadata["choices"] is not None and not many:
            parser.add_argument(flag, choices=metadata["choices"], help=help, **name)
        elif many and kind is str and metadata["choices"] is None and "metavar" in metadata:
            parser.add_argument(flag, action="append", help=help, **name)
        else:
            parser.add_argument(flag, type=_several(kind) if many else READERS.get(kind, kind), help=help, **name)


def help_of(setting: Field, default: Any) -> str:
    """The help of a setting, which ends with this default, or with the words for it if it is None."""
    if default is MISSING or isinstance(default, bool):
        shown = None
    elif default is None:
        shown = setting.metadata.get("default_text")
    else:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text = setting.metadata["help"] + ("" if shown is None else f" (default {shown})")
    return text.replace("%", "%%")


def add_where(sub: argparse._ActionsContainer, device: bool = True) -> None:
    """Add --model and --device. cli/open.py opens what they name."""
    sub.add_argument("--model", type=Path, metavar="DIR", help="folder of the run's backbone, if it moved")
    if device:
        sub.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1, ...")


def add_schedule(sub: argparse._ActionsContainer) -> None:
    """Add --schedule."""
    sub.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="schedule of lora-exits: exits one by one, in parallel, or in the fastest groups (default restart)",
    )


def given_options(args: argparse.Namespace, *settings: type) -> dict:
    """The options that were given, by name, of these classes' fields."""
    names = {field.name for part in settings for field in fields(part)}
    return {name: value for name, value in vars(args).items() if name in names}


def _several(kind: type):
    def read(text: str) -> tuple:
        return tuple(READERS.get(kind, kind)(part) for part in text.split(","))

    return read


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise WrongArguments if one of these options was given. why: the rest of the message, after its name."""
    for name in names:
        if getattr(args, name):
            raise WrongArguments(f"--{name.replace('_', '-')} {why}")


def whole_number(text: str) -> int:
    """A whole number. The settings class checks its limits."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    if len(text) > DIGITS:
        raise argparse.ArgumentTypeError(f"expected a number of at most {DIGITS} digits, found {text[:40]}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return value


def span(text: str) -> tuple[int, int]:
    """(least, most) from a number of at least 1, or from two with a dash."""
    least, dash, most = text.partition("-")
    limits = positive(least), positive(most if dash else least)
    if limits[0] > limits[1]:
        raise argparse.ArgumentTypeError(f"expected the least first, as in 1-4, found {text!r}")
    return limits


def seed(text: str) -> int:
    """A seed that numpy and torch accept."""
    value = whole_number(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2**32 - 1, found {text}")
    return value


def threads(text: str) -> int:
    """A number of threads that torch can start."""
    value = positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_THREADS} threads, found {text}")
    return value


def number(text: str) -> float:
    """A number, or infinity. The settings class checks its limits."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None


def share(text: str) -> float:
    """A number whose limits the command checks, but no percentage."""
    value = number(text)
    if meant := percentage(value):
        raise argparse.ArgumentTypeError(f"expected a number up to 1, found {text}{meant}")
    return value


def numbers(text: str) -> float | tuple[float, ...]:
    """One number, or several separated by commas."""
    values = tuple(number(part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


class Named(NamedTuple):
    """What the command opens later, and checks then."""

    unit: str  # what exits, see registry.UNITS
    rule: str  # name of its rule; empty for a checkpoint
    is_exported: bool = False

    @property
    def kind(self) -> str:
        """In words, for messages."""
        kind = {"tokens": "a decoder", "embeddings": "a sentence encoder"}.get(self.unit, "a classifier")
        return f"an export of {kind}" if self.is_exported else kind


def named_run(words: Sequence[str]) -> Named | None:
    """The first of these words that is a run or an export, else a decoder's checkpoint. None if there is neither."""
    folders = [Path(word) for word in words if not word.startswith("-")]
    for folder in folders:
        with suppress(ValueError, OSError):  # a damaged file: the command reports it
            exported = (folder / MANIFEST).is_file()
            config = read_json(folder / MANIFEST) if exported else run_config(folder)
            if config:
                rule = config.get("rule")
                return Named(config.get("unit", "rows"), rule["name"] if isinstance(rule, dict) else "", exported)
    checkpoints = ((folder / name).is_file() for folder in folders for name in ("config.json", "adapter_config.json"))
    with suppress(OSError):  # a word that is too long for the name of a file
        return Named("tokens", "") if any(checkpoints) else None
    return None


def add_kinds(parser: Parser, kinds: dict[str, ModuleType], of: Callable[[Named], Sequence[str]]) -> None:
    """Add the options of the kind of the RUN of the command line; without a RUN those of all kinds.

    kinds: name -> module with `add(parser)`. of: the names that belong to a RUN.
    """
    named = named_run(parser.words)
    parser.kind = named.kind if named else ""
    if named is None:
        parser.epilog += f"\n\noptions for the kind of a RUN:\n  {parser.prog} RUN --help-all"
    for name in kinds if named is None else of(named):
        kinds[name].add(parser)


READERS = {int: whole_number, float: number, float | tuple[float, ...]: numbers, Path: Path}
