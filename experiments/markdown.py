"""Markdown of all result pages: tables, wrapped paragraphs, and the sentence that names the command."""

import re
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


def link(out: Path, text: str, target: str) -> str:
    """A link from a page in the folder `out` to a file relative to it; else to the same file in ../results; else the
    text alone, because a folder of one's own has no other pages.
    """
    for place in (target, f"../results/{target}"):
        if (out / place.partition("#")[0]).exists():
            return f"[{text}]({place})"
    return text


def fold_sections(text: str, keep: int) -> str:
    """The page with every section after the first `keep` folded; its heading is what a reader clicks."""
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    rest = [section.partition("\n") for section in sections[keep:]]
    parts = [folded(f"<b>{title}</b>", body.strip().split("\n")) for title, _, body in rest]
    return "## ".join([head, *sections[:keep]]) + "\n".join(line for part in parts for line in part)


def made_by(command: str, source: str) -> str:
    """The sentence that names the command of a page and the files that it reads."""
    return f"Made by `{command}` from {source}."


def made_by_measuring(name: str) -> str:
    """The same sentence on a measured page."""
    return made_by(f"mini-ee reproduce {name}", f"[{name}.json]({name}.json), which `--measure` measures again")


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


def share(value: float) -> str:
    """In percent."""
    return f"{value:.1%}".replace("%", " %")
