"""What all pages of results share: tables, wrapped paragraphs, and the sentence that names the command."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from mini_ee import WrongArguments


def markdown_row(cells: Iterable) -> str:
    """One line of a table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def markdown_rows(rows: Iterable[Iterable]) -> str:
    """The lines of a table whose head is in a template."""
    return "\n".join(map(markdown_row, rows))


def markdown_table(names: Sequence[str], rows: Iterable[Iterable] = ()) -> list[str]:
    """A table's head and its lines."""
    return [markdown_row(names), "|" + "---|" * len(names), *map(markdown_row, rows)]


def made_by(command: str, source: str) -> str:
    """The sentence that names a page's command and the files that it is made from."""
    return f"Made by `{command}` from {source}."


def made_by_measuring(name: str) -> str:
    """The same sentence on a measured page."""
    return made_by(f"mini-ee reproduce {name}", f"[{name}.json]({name}.json), which `--measure` writes anew")


def wrapped(text: str) -> str:
    """Wrap a page's paragraphs, which empty lines separate; tables, headings and lists stay as they are."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(part if part[0] in "#|!-" else textwrap.fill(part, 118) for part in parts) + "\n"


def check_is_page(path: Path, heading: str) -> None:
    """Raise WrongArguments if another file has the page's name."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(heading):
        raise WrongArguments(f"{path}: is no page of `mini-ee reproduce`; name another folder with --out")
