"""Reads rows and line numbers of .tsv, .csv and .jsonl files; errors name file and line. No torch here."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from mini_ee.data.values import shortened

SUFFIXES = (".tsv", ".csv", ".jsonl")
DELIMITERS = ",;\t"  # of .csv files: spreadsheets write semicolons if numbers have a decimal comma
LONGEST_HEADER = 100_000  # characters in which the delimiter is searched


def table_rows(path: Path) -> Iterator[tuple[int, list]]:
    """(line number, fields) of each row, the column names first. Only a line feed ends a line.

    Raises ValueError, of one line, if the file is not such a table.
    """
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        line, found = data.count(b"\n", 0, error.start) + 1, f"byte {data[error.start]:#04x}"
        advice = "convert the file to UTF-8; a spreadsheet saves it as CSV UTF-8"
        raise file_error(path, line, "UTF-8", found, advice) from None
    if not text:
        raise file_error(path, 1, "a header and rows", "an empty file", "fill it in or remove it")
    yield from {".csv": _csv_rows, ".jsonl": _jsonl_rows}.get(path.suffix.lower(), _tsv_rows)(path, text)


def _tsv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows without quoting, because GLUE's files contain single quotation marks as text."""
    rows = (line.removesuffix("\r").split("\t") for line in text.split("\n"))
    for line, fields in enumerate(rows, start=1):
        if line == 1 and len(fields) == 4 and fields[1] in ("0", "1") and fields[2] in ("", "*"):
            yield 0, ["source", "label", "star", "sentence"]  # CoLA's train and dev files have no header
        if line == 1 and len(fields) == 1 and _fields(fields[0], delimiter_of(fields[0])) > 1:
            found, advice = shortened(fields[0]), f"rename the file to {path.stem}.csv"
            raise file_error(path, 1, "column names with tabs between them", found, advice)
        yield line, fields


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    delimiter = delimiter_of(text.partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline="\n"), strict=True, delimiter=delimiter)
    line = 1
    try:
        for fields in reader:
            yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        advice = "close every quotation mark, and double the ones inside a text"
        raise file_error(path, line, "comma-separated values", str(error), advice) from None


def delimiter_of(header: str) -> str:
    """The one of DELIMITERS that splits the header into most columns; a comma if several do."""
    return max(DELIMITERS, key=lambda delimiter: _fields(header, delimiter))


def _fields(header: str, delimiter: str) -> int:
    return len(next(csv.reader([header.partition("\r")[0][:LONGEST_HEADER]], delimiter=delimiter), ()))


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, list]]:
    header: list[str] = []
    for line, source in enumerate(text.split("\n"), start=1):
        if not source.strip():
            continue
        try:
            row = json.loads(source)
        except (ValueError, RecursionError) as error:
            found = f"{shortened(source)}: {error}"
            raise file_error(path, line, "one JSON object", found, "correct the line") from None
        if not isinstance(row, dict):
            advice = 'write {"text": ..., "label": ...}'
            raise file_error(path, line, "one JSON object", shortened(source), advice)
        if not header:
            header = list(row)
            yield 0, header
        if not row.keys() >= set(header):
            expected = f"the keys {shortened(header)} of the first line"
            raise file_error(path, line, expected, shortened(list(row)), "write every key in each line")
        yield line, [row[name] for name in header]


def text_flaw(text: object) -> str | None:
    """A description of what is wrong with a text, or None if it is a string, not blank, and can be written as UTF-8."""
    if not isinstance(text, str):
        return f"{shortened(text)}, which is no string"
    if not text.strip():
        return "an empty text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    return None


def file_error(path: Path, line: int, expected: str, found: str, advice: str) -> ValueError:
    """The error for a line of a file, as one line of text."""
    return ValueError(f"{path}:{line}: expected {expected}, found {found}; {advice}")
