"""Texts, and pairs of texts, from files: one a line, a token a line, or a table with its columns; and their labels.

No torch here.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mini_ee.lab.data.columns import Columns, TaskOptions, columns_of, positions
from mini_ee.lab.data.table_files import SUFFIXES, Record, TableFile, file_error
from mini_ee.lab.data.token_files import ANSWERS, TAGGED, gold_answers, tagged_texts
from mini_ee.lab.data.values import label_text, shortened, text_flaw
from mini_ee.lab.errors import WrongArguments

Row = tuple[str, ...]


class InputRow(NamedTuple):
    """One row of a file: its texts, or an error."""

    line: int  # its first line, from 1; of .json and .parquet the row
    texts: Row = ()
    label: str | None = None
    id: Any = None
    error: str | None = None
    gold: list[str] | None = None  # the tags of its tokens, or the answers to its question, if the file has them
    lacks: str | None = None  # of an error: "text" if one is empty or null, "fields" if there are too few


class TextReader(TableFile):
    """Iterates over the InputRows of a file. Raises ValueError, of one line, if the rest of it cannot be read.

    num_texts: of each row; None: as many as there are. On a line of text there is one, whatever it holds, or two with a
    tab between; None: two if each line has one tab. labelled: whether labels are read; None: if there are some.
    id_column: default the column `id`, if there is one. Blank lines are no rows.
    `columns`, `header` and `has_ids` are set when the first row of a table is read.
    """

    columns: Columns | None = None
    header: list[str]
    has_ids = has_answers = False

    def __init__(
        self,
        path: Path,
        options: TaskOptions = TaskOptions(),
        num_texts: int | None = None,
        labelled: bool | None = False,
        id_column: str | None = None,
    ):
        super().__init__(path)
        self._options, self._num_texts, self._labelled, self._id_column = options, num_texts, labelled, id_column

    def __iter__(self) -> Iterator[InputRow]:
        if self.kind in SUFFIXES:
            yield from map(self._row, self.rows(self._choose))
            return
        if self.kind in TAGGED:
            if self._num_texts == 2 or self._options.names_columns or self._labelled:
                advice = "give a file of another kind; tags are labels of tokens"
                raise file_error(self.path, 1, "pairs, or a table with columns", f"tagged tokens ({self.kind})", advice)
            for first, text, tags, error in tagged_texts(self.rows()):
                yield self._row(Record(first, [text], error))._replace(gold=tags)
            return
        if self._labelled or self._options.names_columns and self.kind != ".txt":
            wanted = f"a table with columns ({', '.join(SUFFIXES)})"
            raise file_error(self.path, 1, wanted, "lines of text", "give such a file, or rename it")
        lines = (line for line in self.rows() if line.error or line.fields[0].strip())
        pairs = self._num_texts == 2
        if self._num_texts is None:
            known = list(lines)
            pairs, lines = all(line.fields[0].count("\t") == 1 for line in known), (line for line in known)
        for line in lines:
            texts, error = line.fields[0].split("\t") if pairs else line.fields, line.error
            if not error and len(texts) != 1 + pairs:
                error = f"expected two texts with a tab between, found {len(texts)} texts; write one tab"
            yield self._row(Record(line.line, texts, error))

    def _choose(self, header: list[str]) -> list[int]:
        columns = columns_of(self.path, header, self._options, self._labelled)
        if self._num_texts not in (None, len(columns.texts)):
            wanted, more = ("one text", "") if self._num_texts == 1 else ("two texts", " and --text-pair-column")
            advice = f"name the columns to read with --text-column{more}"
            raise file_error(self.path, 1, f"{wanted} a row", " and ".join(columns.text_names), advice)
        ids = positions(header, self._id_column or "id")[:1]
        if self._id_column and not ids:
            wanted = f"the column {self._id_column} (--id-column)"
            raise file_error(self.path, 1, wanted, f"columns {shortened(header)}", "name one of these")
        answers = positions(header, ANSWERS)[:1] if len(columns.texts) == 2 else []
        self.header, self.columns, self.has_ids, self.has_answers = header, columns, bool(ids), bool(answers)
        return [at for at in (*columns.texts, columns.label, *ids, *answers) if at is not None]

    def _row(self, record: Record) -> InputRow:
        line, columns = record.line, self.columns
        if record.error:
            return InputRow(line, error=record.error, lacks="fields" if record.short else None)
        *fields, answers = record.fields if self.has_answers else (*record.fields, None)
        texts = tuple(fields[: len(columns.texts)] if columns else fields)
        if flaw := next(filter(None, map(text_flaw, texts)), None):
            where = f" in {' and '.join(columns.text_names)}" if columns else ""
            lacks = "text" if any(text is None or text != text or not str(text).strip() for text in texts) else None
            return InputRow(line, error=f"expected text{where}, found {flaw}; correct or drop the row", lacks=lacks)
        label = None
        if columns and columns.label is not None and (label := label_text(fields[len(texts)])) is None:
            problem = f"a label in {columns.label_name}, found {shortened(fields[len(texts)])}"
            return InputRow(line, error=f"expected {problem}; fill it in")
        return InputRow(line, texts, label, fields[-1] if self.has_ids else None, gold=gold_answers(answers))


def read_texts(paths: Sequence[Path], *arguments, **more) -> list[Row]:
    """The texts of files; arguments and errors as of `read_rows`."""
    return [row.texts for row in read_rows(paths, *arguments, **more)[0]]


def read_rows(paths: Sequence[Path], *arguments, drop: bool = False, **more) -> tuple[list[InputRow], int]:
    """(rows of files, number of rows that were left out). drop: leave out rows without text; others as of TextReader.

    Raises ValueError, of one line, for a row that cannot be read, for a file without texts, and for rows with another
    number of texts than the first.
    """
    rows, dropped = list[InputRow](), 0
    for path in paths:
        file_rows = list[InputRow]()
        for row in TextReader(path, *arguments, **more):
            if row.error and not (drop and row.lacks == "text"):
                raise WrongArguments(f"{path}:{row.line}: {row.error}")
            file_rows += [row] * (not row.error)
            dropped += bool(row.error)
        if not file_rows:
            raise file_error(path, 1, "texts", "none", "give a file with one text a line")
        rows += file_rows
        if len(rows[0].texts) != len(file_rows[0].texts):
            expected = f"rows of {len(rows[0].texts)} texts, as before"
            raise file_error(path, file_rows[0].line, expected, f"{len(file_rows[0].texts)}", "give one kind")
    return rows, dropped
