"""The run or export that a command line names: a command asks only for the options of its kind. No torch here."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from mini_ee.lab.cli.command_options import Parser
from mini_ee.lab.data.files import MANIFEST, read_json, run_config


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
    """Add the options of the kind of the RUN of the command line; without a RUN, as for --help, those of all kinds.

    kinds: name -> module with `add(parser)`. of: the names that belong to a RUN.
    """
    named = named_run(parser.words)
    parser.kind = named.kind if named else ""
    for name in kinds if named is None else of(named):
        kinds[name].add(parser)
