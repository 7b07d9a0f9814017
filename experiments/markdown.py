"""Markdown of all result pages: tables and lists of names, and the check before a page is overwritten."""

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


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def check_is_page(path: Path, heading: str) -> None:
    """Raise WrongArguments if the path is a file with another heading, which would be overwritten."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(heading):
        raise WrongArguments(
            f"{path}: expected a page of `mini-ee reproduce` that begins with {heading!r}, found another file; "
            f"remove it, or name another folder with --out"
        )
