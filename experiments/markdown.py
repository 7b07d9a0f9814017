"""Markdown of all result pages: tables, wrapped paragraphs, and the sentence that names the command."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from mini_ee.lab.errors import WrongArguments


def markdown_row(cells: Iterable) -> str:
    """One line of a table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def markdown_rows(rows: Iterable[Iterable]) -> str:
    """The rows of a table whose header is in a template."""
    return "\n".join(map(markdown_row, rows))


def markdown_table(names: Sequence[str], rows: Iterable[Iterable] = ()) -> list[str]:
    """The header and the rows of a table."""
    return [markdown_row(names), "|" + "---|" * len(names), *map(markdown_row, rows)]


def listed(names: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def folded(summary: str, lines: Iterable[str]) -> list[str]:
    """Lines that a reader unfolds by a click on the summary, which is HTML."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def made_by(command: str, source: str) -> str:
    """The sentence that names the command of a page and the files that it reads."""
    return f"Made by `{command}` from {source}."


def wrapped(text: str) -> str:
    """Wrap paragraphs, which empty lines separate. Tables, headings, pictures, lists and HTML stay unchanged."""
    parts = text.strip().split("\n\n")
    wrap = textwrap.TextWrapper(118, break_on_hyphens=False)
    return "\n\n".join(part if part[0] in "#|!-<" else wrap.fill(part) for part in parts) + "\n"


def check_is_page(path: Path, heading: str) -> None:
    """Raise WrongArguments if the path is a file with another heading, which would be overwritten."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(heading):
        raise WrongArguments(
            f"{path}: expected a page of `mini-ee reproduce` that begins with {heading!r}, found another file; "
            f"remove it, or name another folder with --out"
        )
