"""Texts, and pairs of texts, from files: one a line, or a table with its columns. No torch here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mini_ee.data.columns import TaskOptions, columns_of
from mini_ee.data.files import read_text
from mini_ee.data.lines import row_of_line
from mini_ee.data.table_files import SUFFIXES, file_error, table_rows

Row = tuple[str, ...]


def read_texts(paths: Sequence[Path], options: TaskOptions = TaskOptions()) -> list[Row]:
    """The texts of files: one a line, or .tsv, .csv and .jsonl with their columns. Pairs stay pairs.

    Raises ValueError, of one line, for a file that holds none, or rows with another number of texts than the first.
    """
    found: list[Row] = []
    for path in paths:
        rows = list(rows_of_file(path, options))
        if not rows:
            raise file_error(path, 1, "texts", "none", "give a file with one text a line")
        found += rows
        if len({len(row) for row in found}) > 1:
            raise file_error(path, 1, f"rows of {len(found[0])} texts, as before", f"{len(rows[0])}", "give one kind")
    return found


def rows_of_file(path: Path, options: TaskOptions = TaskOptions()) -> Iterator[Row]:
    """The texts of each row of one file. Raises ValueError, of one line, for a row that cannot be read."""
    if path.suffix.lower() in SUFFIXES:
        (_, header), *rows = table_rows(path)
        columns = columns_of(path, header, options, labelled=False)
        yield from (tuple(fields[at] for at in columns.texts) for _, fields in rows)
        return
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        try:
            if line.strip():
                yield row_of_line(line.encode(), 2 if "\t" in line else 1)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
