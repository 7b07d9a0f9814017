"""Reads .jsonl, .csv, .tsv, .parquet and .txt files row by row, and cuts them into blocks. No torch here.

A row that cannot be read becomes an InputRow with an error, and the next rows are read. Memory holds one block, and
of a Parquet file one row group.
"""

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from mini_ee.data.columns import TaskOptions, columns_of, positions
from mini_ee.data.lines import decoded, json_object, row_of_line
from mini_ee.data.table_files import delimiter_of, text_flaw
from mini_ee.data.values import shortened

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".txt")
LONGEST_LINE = 1 << 24  # bytes
CHARACTERS = 1 << 25  # of the texts of a block, if its rows are long
PARQUET_ROWS = 1000  # that are converted at a time
ID = "id"


class InputRow(NamedTuple):
    """One row of a file: its texts, or an error."""

    line: int  # its first line, from 1; of a Parquet file the row
    texts: tuple[str, ...] = ()
    id: Any = None
    error: str | None = None


class Block(NamedTuple):
    """The rows of one part."""

    part: str  # name of the part file: reviews.csv.part-00000.jsonl
    file: str  # name of the input
    numbers: list[int]  # of each row in its file, from 1; damaged rows count, blank lines do not
    lines: list[int]  # of each row
    ids: list | None  # of each row; None: the file has no ids
    texts: list[tuple[str, ...]]
    errors: list[dict]  # of the damaged rows: file, row, line, error
    seconds: float  # of CPU, for reading
    size: int  # bytes read


class RowReader:
    """Iterates over the InputRows of a file.

    options: the columns of the texts. id_column: default: the column `id`, if there is one. num_texts: per row.
    `columns` and `has_ids` are set when the first row is read. `position`: bytes read so far.
    """

    def __init__(self, path: Path, options: TaskOptions, num_texts: int, id_column: str | None = None):
        self.path, self._options, self._num_texts, self._id_column = path, options, num_texts, id_column
        self.has_ids, self.position = False, 0
        self.columns: tuple[str, ...] = ()  # names of the columns of the texts
        self._texts: tuple[int, ...] = ()
        self._id: int | None = None

    def __iter__(self) -> Iterator[InputRow]:
        kinds = {".jsonl": self._jsonl, ".csv": self._csv, ".tsv": self._tsv, ".parquet": self._parquet}
        read = kinds.get(self.path.suffix.lower(), self._plain)
        self.position = 0
        if not self.path.stat().st_size:
            yield InputRow(1, error="expected rows, found an empty file")
            return
        line = 1
        try:
            for row in read():
                line = row.line
                yield row
        except ValueError as error:  # of the whole file: a column is missing
            found = str(error).removeprefix(f"{self.path}:1: ")
            yield InputRow(line, error=f"{found}; no row of this file is read")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self.path, "rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                self.position += len(line)
                longer = len(line) == LONGEST_LINE and not line.endswith(b"\n")
                while longer:
                    rest = file.readline(LONGEST_LINE)
                    self.position += len(rest)
                    longer = len(rest) == LONGEST_LINE and not rest.endswith(b"\n")
                    line = b"\xff"  # an error, as it cannot be decoded
                yield number, line

    def _plain(self) -> Iterator[InputRow]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                yield self._checked(number, row_of_line(line, self._num_texts))
            except ValueError as error:
                yield InputRow(number, error=str(error))

    def _jsonl(self) -> Iterator[InputRow]:
        header: list[str] = []
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                fields = json_object(decoded(line))
            except ValueError as error:
                yield InputRow(number, error=str(error))
                continue
            if not header:
                header = list(fields)
                self._read_header(header)
            wanted = [header[at] for at in (*self._texts, *([self._id] if self.has_ids else []))]
            missing = [name for name in wanted if name not in fields]
            if missing:
                error = f"expected the keys {', '.join(wanted)}, found {shortened(list(fields))}"
                yield InputRow(number, error=error)
            else:
                texts = tuple(fields[header[at]] for at in self._texts)
                yield self._checked(number, texts, fields[header[self._id]] if self.has_ids else None)

    def _tsv(self) -> Iterator[InputRow]:
        """Without quoting, as data/table_files.py reads them."""
        count = 0
        for number, line in self._lines():
            if not line.strip() and count:
                continue
            try:
                fields = decoded(line).rstrip("\r\n").split("\t")
            except ValueError as error:
                if not count:
                    raise
                yield InputRow(number, error=str(error))
                continue
            if not count:
                count = len(fields)
                self._read_header(fields)
            else:
                yield self._of_fields(number, fields, count)

    def _csv(self) -> Iterator[InputRow]:
        count = 0
        for number, fields, error in self._records():
            if error and not count:
                raise ValueError(error)
            if error:
                yield InputRow(number, error=error)
            elif not count:
                count = len(fields)
                self._read_header(fields)
            elif fields:
                yield self._of_fields(number, fields, count)

    def _records(self) -> Iterator[tuple[int, list[str], str | None]]:
        """(first line, fields, error) of each record of a .csv file, which may have several lines.

        A quotation mark that is not closed takes in the lines below. So after an error, reading goes on at the line
        after the first one of that record.
        """
        source, again, taken = self._lines(), deque[tuple[int, bytes]](), list[tuple[int, bytes]]()
        first = next(source)
        again.append(first)
        delimiter = delimiter_of(first[1].decode("utf-8-sig", "replace").rstrip("\r\n"))

        def feed() -> Iterator[str]:
            while entry := again.popleft() if again else next(source, None):
                taken.append(entry)
                yield entry[1].decode("utf-8-sig" if entry[0] == 1 else "utf-8", "surrogateescape")

        reader = csv.reader(feed(), strict=True, delimiter=delimiter)
        while True:
            taken.clear()
            try:
                fields = next(reader, None)
                if fields is None:
                    return
                for _, line in taken:
                    decoded(line)
                yield taken[0][0], fields, None
            except csv.Error as error:
                advice = "close every quotation mark, and double the ones inside a text"
                yield taken[0][0], [], f"expected comma-separated values, found {error}; {advice}"
                again.extendleft(reversed(taken[1:]))
                reader = csv.reader(feed(), strict=True, delimiter=delimiter)
            except ValueError as error:
                yield taken[0][0], [], str(error)

    def _parquet(self) -> Iterator[InputRow]:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        number, size = 0, self.path.stat().st_size
        try:
            with ParquetFile(self.path) as file:
                header = file.schema_arrow.names
                self._read_header(header)
                wanted = [header[at] for at in (*self._texts, *([self._id] if self.has_ids else []))]
                for batch in file.iter_batches(PARQUET_ROWS, columns=wanted):
                    columns = [batch.column(name).to_pylist() for name in wanted]
                    for fields in zip(*columns):
                        number += 1
                        count = len(self._texts)
                        yield self._checked(number, fields[:count], fields[count] if self.has_ids else None)
                    self.position = size * number // file.metadata.num_rows
        except (ArrowException, OSError) as error:
            found = " ".join(str(error).split())[:300]
            yield InputRow(number + 1, error=f"expected Parquet, found {found}; the rest of this file is not read")

    def _read_header(self, header: list[str]) -> None:
        columns = columns_of(self.path, header, self._options, labelled=False)
        if len(columns.texts) != self._num_texts:
            advice = "name the columns to read with --text-column" + " and --text-pair-column" * (self._num_texts > 1)
            raise ValueError(f"expected {self._num_texts} texts a row, found {', '.join(columns.text_names)}; {advice}")
        found = positions(header, self._id_column or ID)
        if self._id_column and not found:
            raise ValueError(f"expected the column {self._id_column} (--id-column), found columns {shortened(header)}")
        self._texts, self.columns = columns.texts, columns.text_names
        self.has_ids, self._id = bool(found), found[0] if found else None

    def _of_fields(self, line: int, fields: list[str], count: int) -> InputRow:
        if len(fields) != count:
            return InputRow(line, error=f"expected {count} columns, found {len(fields)}")
        return self._checked(line, tuple(fields[at] for at in self._texts), fields[self._id] if self.has_ids else None)

    def _checked(self, line: int, texts: tuple, id: Any = None) -> InputRow:
        flaw = next(filter(None, map(text_flaw, texts)), None)
        if flaw:
            where = f" in {' and '.join(self.columns)}" if self.columns else ""
            return InputRow(line, error=f"expected text{where}, found {flaw}")
        return InputRow(line, texts, id)


def blocks_of(reader: RowReader, size: int, format: str) -> Iterator[Block]:
    """The blocks of a file: `size` rows each, or fewer if their texts have more than CHARACTERS characters.

    format: of the part files, and their suffix.
    """
    count, position, rows, begin = 0, 0, list[tuple[int, InputRow]](), process_time()

    def block() -> Block:
        good = [(number, row) for number, row in rows if row.error is None]
        return Block(
            part=f"{reader.path.name}.part-{count:05d}.{format}",
            file=reader.path.name,
            numbers=[number for number, _ in good],
            lines=[row.line for _, row in good],
            ids=[row.id for _, row in good] if reader.has_ids else None,
            texts=[row.texts for _, row in good],
            errors=[error_record(reader.path.name, number, row.line, row.error) for number, row in rows if row.error],
            seconds=process_time() - begin,
            size=reader.position - position,
        )

    characters = 0
    for number, row in enumerate(reader, start=1):
        rows.append((number, row))
        characters += sum(map(len, row.texts))
        if len(rows) == size or characters > CHARACTERS:
            yield block()
            count, position, rows, begin, characters = count + 1, reader.position, [], process_time(), 0
    if rows:
        yield block()


def error_record(file: str, row: int, line: int, error: str) -> dict:
    """A line of errors.jsonl. row: number in the file. line: first line of the row."""
    return {"file": file, "row": row, "line": line, "error": error}
