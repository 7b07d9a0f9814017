"""Cuts the rows of files into blocks, of which memory holds one. No torch here."""

import json
import math
from collections.abc import Iterator
from time import process_time
from typing import NamedTuple

from mini_ee.lab.data.text_files import InputRow, TextReader
from mini_ee.lab.data.values import shortened

CHARACTERS = 1 << 25  # of the texts of a block, if its rows are long


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


def rows_of(reader: TextReader) -> Iterator[InputRow]:
    """The rows of a file, with ids that JSON and Parquet hold. The last one is an error if the rest is not read."""
    count = 0
    try:
        for count, row in enumerate(reader, start=1):
            if isinstance(row.id, float) and not math.isfinite(row.id):
                row = row._replace(id=None if math.isnan(row.id) else str(row.id))
            try:
                json.dumps(row.id, default=str, allow_nan=False, ensure_ascii=False).encode()
            except ValueError:
                error = f"expected an id that UTF-8 and JSON hold, found {shortened(row.id)}; correct or drop the row"
                row = InputRow(row.line, error=error)
            yield row
    except ValueError as error:
        line, _, found = str(error).removeprefix(f"{reader.path}:").partition(": ")
        part = "the rest of this file is not read" if count else "no row of this file is read"
        yield InputRow(int(line), error=f"{found}; {part}")


def blocks_of(reader: TextReader, size: int, format: str) -> Iterator[Block]:
    """The blocks of a file: `size` rows each, or fewer if their texts have more than CHARACTERS characters.

    format: of the part files, and their suffix.
    """
    count, position, characters, rows, begin = 0, 0, 0, list[tuple[int, InputRow]](), process_time()

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

    for number, row in enumerate(rows_of(reader), start=1):
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
