"""Reads tables and files with a text a line, row by row; each may be compressed (.gz). No torch here.

A row that cannot be read is a Record with an error, and the next rows are read. Keys of JSON objects are optional.
Memory holds one row, of .json all rows, of .parquet one row group.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mini_ee.lab.data.files import check_regular
from mini_ee.lab.data.lines import json_object
from mini_ee.lab.data.token_files import questions_of, squad_data
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

SUFFIXES = (".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet")  # of tables; other files have a text a line
DELIMITERS = ",;\t"  # of .csv files: spreadsheets write semicolons if numbers have a decimal comma
LONGEST_LINE = 1 << 24  # characters, also of a quoted text
PARQUET_ROWS = 1000  # that are converted at a time
MARKED_ROWS = 1000  # with quotation marks, by which a .tsv file is judged
EMPTY = ("a header and rows", "an empty file", "fill it in or remove it")
UTF_8 = "convert the file to UTF-8; a spreadsheet saves it as CSV UTF-8"
Choose = Callable[[list[str]], Sequence[int]]  # column names -> indices of the wanted fields, in their order


class Record(NamedTuple):
    """A row. line: its first line, from 1; of .json and .parquet the row. short: whether fields are missing."""

    line: int
    fields: Sequence[Any]
    error: str | None = None
    lines: Sequence[str] = ()  # of a row with quotation marks, as they stand
    short: bool = False


class TableFile:
    """The rows of a file. position: bytes read so far. Raises WrongArguments if its name is not UTF-8."""

    def __init__(self, path: Path):
        self.path, self.position, self.kind = path, 0, kind_of(path)
        if (name := os.fsencode(path).decode("utf-8", "backslashreplace")) != str(path):
            raise WrongArguments(f"{name}: expected a file name in UTF-8, found other bytes; rename the file")

    def rows(self, choose: Choose = lambda header: range(len(header))) -> Iterator[Record]:
        """The rows of a table without blank lines, or all lines of another file, for which `choose` is not called.

        Raises ValueError, of one line, if the rest of the file cannot be read.
        """
        check_regular(self.path, pipe=self.kind not in SUFFIXES)
        kinds = {".tsv": self._delimited, ".csv": self._delimited, ".parquet": self._parquet}
        if self.kind in SUFFIXES:
            yield from kinds.get(self.kind, self._json)(choose)
        else:
            yield from (Record(line, [text.rstrip("\r\n")], error) for line, (text,), error, *_ in self._lines())

    def _lines(self) -> Iterator[Record]:
        """The lines with their ends, which are line feeds, in old files of a Mac carriage returns."""
        number, longest = 0, -1 if self.kind == ".json" else LONGEST_LINE
        with open(self.path, "rb") as raw:
            try:
                file = _unpacked(raw)
                head = file.peek(io.DEFAULT_BUFFER_SIZE)
                if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head[:2]:
                    raise file_error(self.path, 1, "UTF-8", "UTF-16", UTF_8)
                of_mac = head[:-1].count(b"\r") - head.count(b"\r\n") > head.count(b"\n")
                text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\r" if of_mac else "\n")
                while line := text.readline(longest):
                    number, rest, error = number + 1, line, None
                    while len(rest) == longest and rest[-1] not in "\r\n":
                        rest, error = text.readline(longest), f"expected lines of at most {longest:,} characters"
                    try:
                        line.encode()
                    except UnicodeEncodeError as flaw:
                        error = f"expected UTF-8, found byte {ord(line[flaw.start]) - 0xDC00:#04x}; {UTF_8}"
                    self.position = raw.tell() if raw.seekable() else 0
                    yield Record(number, [line], error)
            except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
                raise file_error(self.path, number + 1, "gzip", str(problem), "compress the file again") from None

    def _delimited(self, choose: Choose) -> Iterator[Record]:
        csv.field_size_limit(LONGEST_LINE)
        first = next((text for _, (text,), *_ in self._lines() if text.strip()), "").rstrip("\r\n")
        if self.kind == ".csv":
            rows = self._quoted(delimiter_of(first))
        elif "\t" not in first and delimiter_of(first) in first:
            advice = f"rename the file to {self.path.stem}.csv"
            raise file_error(self.path, 1, "column names with tabs between them", shortened(first), advice)
        elif self._is_quoted(first):
            rows = self._quoted("\t")
        else:
            lines = ((line, text.rstrip("\r\n"), error) for line, (text,), error, *_ in self._lines())
            rows = (Record(line, text.split("\t"), error) for line, text, error in lines if text.strip(" "))
        header = next(rows, None)
        if header is None:
            raise file_error(self.path, 1, *EMPTY)
        if header.error:
            raise WrongArguments(f"{self.path}:{header.line}: {header.error}")
        names = list(header.fields)
        if len(names) == 4 and names[1] in ("0", "1") and names[2] in ("", "*"):  # CoLA's train and dev have no header
            names, rows = ["source", "label", "star", "sentence"], chain([header], rows)
        wanted = choose(names)
        advice = "quote texts that hold the delimiter" if self.kind == ".csv" else "a text holds no tab"
        for row in rows:
            if not row.error and len(row.fields) != len(names):
                error = f"expected {len(names)} columns, found {len(row.fields)}; {advice}"
                row = row._replace(error=error, short=len(row.fields) < len(names))
            yield row if row.error else Record(row.line, [row.fields[at] for at in wanted])

    def _quoted(self, delimiter: str) -> Iterator[Record]:
        """The rows, which may have several lines, with these lines.

        A quotation mark that is not closed takes in the lines below. So after an error, reading goes on at the line
        after the first one of that row.
        """
        source, again, taken = self._lines(), deque[Record](), list[Record]()

        def feed() -> Iterator[str]:
            while (line := again.popleft() if again else next(source, None)) is not None:
                taken.append(line)
                yield line.fields[0]

        reader = csv.reader(feed(), strict=True, delimiter=delimiter)
        while True:
            taken.clear()
            try:
                fields = next(reader)
                error = next((line.error for line in taken if line.error), None)
            except StopIteration:
                return
            except csv.Error as problem:
                advice = "close every quotation mark, and double the ones inside a text"
                fields, error = [], f"expected closed quotation marks, found {problem}; {advice}"
                again.extendleft(reversed(taken[1:]))
                reader = csv.reader(feed(), strict=True, delimiter=delimiter)
            lines = [line.fields[0] for line in taken]
            if error or len(fields) > 1 or lines[0].strip():
                yield Record(taken[0].line, fields, error, lines)

    def _is_quoted(self, first: str) -> bool:
        """Whether a .tsv file was written with quoting: most of its rows with quotation marks are as csv writes them.

        csv and pandas set marks around a text with a tab, a line feed or a mark, which is doubled. In GLUE's files most
        marks stand otherwise: they are text. Rows in which marks join lines that have all columns each do not count.
        """
        quoted = list[bool]()
        for row in self._quoted("\t") if any('"' in text for _, (text,), *_ in self._lines()) else ():
            joins = len(row.lines) > 1 and 0 < first.count("\t") == min(line.count("\t") for line in row.lines)
            if any('"' in line for line in row.lines) and not joins:
                csv.writer(again := io.StringIO(), delimiter="\t").writerow(row.fields)
                quoted.append(again.getvalue().rstrip("\r\n") == "".join(row.lines).rstrip("\r\n"))
            if len(quoted) == MARKED_ROWS:
                break
        return first[:1] == first[-1:] == '"' or 2 * sum(quoted) > len(quoted)

    def _json(self, choose: Choose) -> Iterator[Record]:
        keys, last = dict[str, None](), None
        for last in self._objects():
            keys |= dict.fromkeys(() if last.error else last.fields[0])
        if last is None:
            raise file_error(self.path, 1, *EMPTY)
        header = list(keys)
        wanted = [header[at] for at in choose(header)] if keys or not last.error else []
        for row in self._objects():
            yield row if row.error else Record(row.line, [row.fields[0].get(name) for name in wanted])

    def _objects(self) -> Iterator[Record]:
        """The objects of an array, which a .json file may be, or questions as SQuAD has them; else those of lines."""
        lines = (line for line in self._lines() if line.error or line.fields[0].strip())
        first, more = next(lines, None), "write one object a line, or in a .json file an array of objects"
        if first and self.kind == ".json" and first.fields[0].lstrip().startswith("["):
            try:
                rows = json.loads("".join(line.fields[0] for line in self._lines()))
            except (ValueError, RecursionError) as error:
                line = getattr(error, "lineno", 1)
                raise file_error(self.path, line, "an array of JSON objects", str(error), "correct it") from None
            for number, row in enumerate(rows, start=1):
                flaw = None if isinstance(row, dict) else f"expected one JSON object, found {shortened(row)}; {more}"
                yield Record(number, [row], flaw)
            return
        if first and self.kind == ".json" and (data := squad_data("".join(line.fields[0] for line in self._lines()))):
            yield from (Record(number, [row], flaw) for number, (row, flaw) in enumerate(questions_of(data), start=1))
            return
        for line in chain([first] if first else (), lines):
            try:
                yield line if line.error else Record(line.line, [json_object(line.fields[0])])
            except ValueError as error:
                yield line._replace(error=f"{error}; {more}")

    def _parquet(self, choose: Choose) -> Iterator[Record]:
        if not find_spec("pyarrow"):
            raise file_error(self.path, 1, "pyarrow, which reads Parquet", "none", "pip install 'mini-ee[batch]'")
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        number, size = 0, self.path.stat().st_size
        with open(self.path, "rb") as raw:
            try:
                file = ParquetFile(_unpacked(raw))
                header = file.schema_arrow.names
                wanted = [header[at] for at in choose(header)]
                for batch in file.iter_batches(PARQUET_ROWS, columns=wanted):
                    for fields in zip(*(map(_value, batch.column(name)) for name in wanted)):
                        number += 1
                        yield Record(number, fields, next((str(v) for v in fields if isinstance(v, ValueError)), None))
                    self.position = size * number // file.metadata.num_rows
            except (ArrowException, OSError, EOFError, zlib.error) as error:
                actual = " ".join(str(error).split())[:300]
                raise file_error(self.path, number + 1, "Parquet", actual, "write the file again") from None


def kind_of(path: Path) -> str:
    """The suffix in lower case, before .gz."""
    name = path.name.lower().removesuffix(".gz")
    return ".tsv" if name.startswith("msr_paraphrase_") else Path(name).suffix  # MRPC as Microsoft distributes it


def delimiter_of(header: str) -> str:
    """The one of DELIMITERS that splits the header into most columns; a comma if several do."""
    return max(DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), ())))


def _unpacked(raw: io.BufferedReader) -> gzip.GzipFile | io.BufferedReader:
    """The content of a file that is compressed by gzip; else the file."""
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw


def _value(scalar):
    """A value of Arrow in Python; a ValueError for a text that is not UTF-8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"expected UTF-8, found {error.reason} at byte {error.start}; correct or drop the row")
    except (ValueError, OverflowError):  # a date or a duration that Python does not have
        with suppress(ValueError, NotImplementedError):
            return scalar.cast("string").as_py()
        return str(scalar.value)


def file_error(path: Path, line: int, expected: str, actual: str, advice: str) -> WrongArguments:
    """The error for a line of a file, as one line of text."""
    return WrongArguments(f"{path}:{line}: expected {expected}, found {actual}; {advice}")
