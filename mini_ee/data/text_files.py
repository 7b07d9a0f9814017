"""Texts, and pairs of texts, from files: one a line, or a table with its columns; and their labels. No torch here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mini_ee.data.columns import TaskOptions, columns_of
from mini_ee.data.files import read_text
from mini_ee.data.lines import row_of_line
from mini_ee.data.table_files import SUFFIXES, file_error, table_rows, text_flaw
from mini_ee.data.tasks import label_text
from mini_ee.data.values import shortened

Row = tuple[str, ...]


def read_texts(paths: Sequence[Path], options: TaskOptions = TaskOptions()) -> list[Row]:
    """The texts of files: one a line, or .tsv, .csv and .jsonl with their columns. Pairs stay pairs.

    Raises ValueError, of one line, for a file that holds none, or rows with another number of texts than the first.
    """
    return [row for row, _ in _read(paths, options, labelled=False)]


def read_labelled(paths: Sequence[Path], options: TaskOptions = TaskOptions()) -> tuple[list[Row], list[str]]:
    """The texts of .tsv, .csv and .jsonl files, and the label of each. Raises ValueError as `read_texts` does."""
    rows, labels = zip(*_read(paths, options, labelled=True))
    return list(rows), list(labels)


def rows_of_file(path: Path, options: TaskOptions = TaskOptions()) -> Iterator[Row]:
    """The texts of each row of one file; they may be blank. Raises ValueError, of one line, for a row that cannot be
    read.
    """
    return (row for row, _ in _rows(path, options, labelled=False, blank=True))


def _read(paths: Sequence[Path], options: TaskOptions, labelled: bool) -> list[tuple[Row, str | None]]:
    found: list[tuple[Row, str | None]] = []
    for path in paths:
        rows = list(_rows(path, options, labelled))
        if not rows:
            raise file_error(path, 1, "texts", "none", "give a file with one text a line")
        found += rows
        if len({len(row) for row, _ in found}) > 1:
            expected = f"rows of {len(found[0][0])} texts, as before"
            raise file_error(path, 1, expected, f"{len(rows[0][0])}", "give one kind")
    return found


def _rows(path: Path, options: TaskOptions, labelled: bool, blank: bool = False) -> Iterator[tuple[Row, str | None]]:
    """The texts and the label of each row. blank: texts may be blank."""
    for line, row, label in _parsed(path, options, labelled):
        read = (text for text in row if not (blank and isinstance(text, str) and not text.strip()))
        if flaw := next(filter(None, map(text_flaw, read)), None):
            raise file_error(path, line, "text", flaw, "correct or drop the row")
        yield row, label


def _parsed(path: Path, options: TaskOptions, labelled: bool) -> Iterator[tuple[int, Row, str | None]]:
    """(line, texts, label) of each row."""
    if path.suffix.lower() in SUFFIXES:
        (_, header), *rows = table_rows(path)
        columns = columns_of(path, header, options, labelled)
        for at_line, fields in rows:
            value = None if columns.label is None or not labelled else fields[columns.label]
            label = label_text(value)
            if labelled and label is None:
                found = shortened(value)
                raise file_error(path, at_line, f"a label in {columns.label_name}", found, "fill it in")
            yield at_line, tuple(fields[at] for at in columns.texts), label
        return
    if labelled:
        raise file_error(path, 1, f"{', '.join(SUFFIXES)} with a label column", "lines of text", "give such a file")
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        try:
            if line.strip():
                yield number, row_of_line(line.encode(), 2 if "\t" in line else 1), None
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
