"""Classification tasks: texts and labels from a folder of files, or the built-in reviews. No torch here.

A task folder holds train, dev (also validation, valid, val) and test files: .tsv, .csv or .jsonl. The nine
tasks of GLUE are read as they are distributed (Wang et al. 2018, arXiv:1804.07461v3), known by the folder's
name, however it is spelled, or by their columns; their labels are names, or numbers in Hugging Face's order.
Anything else is a plain task: its label set is what its train file holds; JSON's true and false are the labels
"true" and "false". Whatever is wrong with a file is one line: file:line, what was expected, what was found,
what to do.
"""

import csv
import functools
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mini_ee.data.metrics as metrics
from mini_ee.data.files import json_sha256
from mini_ee.data.glue import GLUE, GlueTask

TOY = "reviews"


# Tasks
@dataclass(frozen=True, eq=False)
class Split:
    """N rows of a task, each of one or two texts.

    labels: (N,) int64 class indices, float32 for regression, None where the file has none.
    hardness: what makes each row hard; only the built-in task knows.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: np.ndarray | None
    hardness: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: np.ndarray) -> "Split":
        """The given rows (indices, a mask or a slice), in the given order."""
        rows = np.arange(len(self))[rows]
        return Split(
            tuple(self.texts[row] for row in rows),
            None if self.labels is None else self.labels[rows],
            None if self.hardness is None else tuple(self.hardness[row] for row in rows),
        )

    def sha256(self) -> str:
        """One digest over texts and labels, in their order."""
        return json_sha256({"texts": self.texts, "labels": None if self.labels is None else self.labels.tolist()})


@dataclass(frozen=True, eq=False)
class Task:
    """A classification task, or a regression, where label_names is empty."""

    name: str
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    splits: dict[str, Split]

    @property
    def regression(self) -> bool:
        return not self.label_names

    @property
    def num_labels(self) -> int:
        """K, the width of the logits: 1 for regression."""
        return len(self.label_names) or 1

    @property
    def default_split(self) -> str:
        """The split that is reported: dev where there is one, else test. Raises: ValueError where there is neither."""
        for name in ("dev", "test"):
            if name in self.splits:
                return name
        raise ValueError(
            f"task {self.name}: expected a dev or a test file, whose rows are reported, found {', '.join(self.splits)} "
            f"alone; add dev.tsv or test.tsv, or give --split {next(iter(self.splits))}"
        )

    def split(self, name: str) -> Split:
        """Raises: ValueError that lists the splits where there is none of this name."""
        if name not in self.splits:
            raise ValueError(
                f"task {self.name}: expected one of its splits {', '.join(self.splits)}, "
                f"found {name!r}; choose another or add the file"
            )
        return self.splits[name]

    def score(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """The task's metrics, "accuracy" for any classification, and "score", the mean of the task's metrics.

        predictions, labels: (N,) class indices, or numbers for regression.
        """
        own = metrics.score(self.metrics, predictions, labels)
        extra = {} if self.regression else {"accuracy": metrics.accuracy(predictions, labels)}
        return {**own, **extra, "score": sum(own.values()) / len(own)}


@functools.cache
def toy_task() -> Task:
    """The built-in review task, the same on every machine; its splits know the hardness of each row."""
    from mini_ee.data.reviews import make_reviews

    splits = {
        name: Split(
            tuple((review.text,) for review in reviews),
            np.array([review.label for review in reviews], np.int64),
            tuple(review.hardness for review in reviews),
        )
        for name, reviews in make_reviews(seed=0).items()
    }
    return Task(TOY, ("negative", "positive"), ("accuracy",), splits)


def holdout(split: Split, seed: int, share: float = 0.1) -> tuple[Split, Split]:
    """(fit, held): a seeded share of the rows is held out for choosing; both keep the order of the file.

    Raises: ValueError where either part would be empty.
    """
    count = max(1, round(share * len(split)))
    if not 0 < share < 1 or count >= len(split):
        raise ValueError(f"expected a share that leaves rows on both sides, found {share} of {len(split)}")
    held = np.zeros(len(split), bool)
    held[np.random.default_rng(seed).permutation(len(split))[:count]] = True
    return split.take(~held), split.take(held)


def subset(split: Split, count: int, seed: int) -> Split:
    """A seeded choice of `count` rows in the order of the file; all of them where there are no more.

    Raises: ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"expected at least one row, found {count}")
    return split.take(np.sort(np.random.default_rng(seed).permutation(len(split))[:count]))


# Task folders
_TEXT_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("#1 String", "#2 String"),
    ("text", "text_b"),
    ("sentence",),
    ("text",),
)

SHOWN = 8  # labels that an error names

_LABEL_COLUMNS = ("gold_label", "label", "is_duplicate", "Quality", "score")

_SPLITS = {
    "train": "train",
    "dev": "dev",
    "validation": "dev",
    "valid": "dev",
    "val": "dev",
    "dev_matched": "dev",
    "validation_matched": "dev",
    "dev_mismatched": "dev_mismatched",
    "validation_mismatched": "dev_mismatched",
    "test": "test",
    "test_matched": "test",
    "test_mismatched": "test_mismatched",
}


class _File(NamedTuple):
    """What one file of a task says, before labels become numbers."""

    path: Path
    glue: GlueTask | None
    lines: list[int]
    texts: list[tuple[str, ...]]
    labels: list[str] | None


def load_task(folder: str | os.PathLike) -> Task:
    """The task in a folder, see the module's docstring for what it may hold.

    Raises: FileNotFoundError for no such folder; ValueError, of one line, for anything wrong in it.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: expected a task folder, "
            f"found {'a file' if folder.exists() else 'nothing'}; "
            "name the folder that holds train.tsv, dev.tsv or test.tsv"
        )
    named = next((glue for glue in GLUE if plain_name(glue.name) == plain_name(folder.name)), None)
    files = {split: _read(path, split, named) for split, path in _split_files(folder).items()}
    (wanted, first), *others = [(len(file.texts[0]), file.path) for file in files.values()]
    for found, path in (each for each in others if each[0] != wanted):
        raise _error(path, 1, f"{wanted} texts, as {first.name} has", f"{found}", "rename the columns")
    glue = next((file.glue for file in files.values() if file.glue), None)
    if glue is None:
        glue = GlueTask(folder.name, _labels_of_train(folder, files.get("train")))
    splits = {split: Split(tuple(file.texts), _numbers(file, glue)) for split, file in files.items()}
    return Task(glue.name, glue.label_names, glue.metrics, splits)


def plain_name(name: str) -> str:
    """A task's name in the spelling by which names are compared: lower case, without dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def _split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for stem, split in _SPLITS.items():
        for path in (folder / f"{stem}{suffix}" for suffix in (".tsv", ".csv", ".jsonl")):
            if path.is_file():
                if split in files:
                    raise ValueError(
                        f"{folder}: expected one {split} file, found {files[split].name} and {path.name}; remove one"
                    )
                files[split] = path
    for split in ("train", "test"):  # MRPC as Microsoft distributes it; GLUE's own files go first
        path = folder / f"msr_paraphrase_{split}.txt"
        if path.is_file():
            files.setdefault(split, path)
    if not files:
        raise ValueError(
            f"{folder}: expected train, dev or test files (.tsv, .csv or .jsonl), "
            f"found {sorted(path.name for path in folder.iterdir())[:5]}; name another folder"
        )
    return files


def _read(path: Path, split: str, named: GlueTask | None) -> _File:
    """Texts and labels of one file. Raises: ValueError for all that is wrong in it, except unknown labels."""
    rows = _rows(path)
    _, header = next(rows)
    text_columns = next((names for names in _TEXT_COLUMNS if set(names) <= set(header)), None)
    if text_columns is None:
        expected = "a text column (sentence, text) or two (sentence1 and sentence2, ...)"
        raise _error(path, 1, expected, f"columns {shortened(header)}", "rename the columns")
    others = sorted({name for names in _TEXT_COLUMNS for name in names} & set(header) - set(text_columns))
    if others and len(text_columns) == 1:
        expected = f"{text_columns[0]} alone, or two that go together (text and text_b, sentence1 and sentence2, ...)"
        raise _error(path, 1, expected, f"{text_columns[0]} and {' and '.join(others)}", "rename or remove columns")
    label_column = next((name for name in _LABEL_COLUMNS if name in header), None)
    for name in (name for name in (*text_columns, label_column) if header.count(name) > 1):
        raise _error(path, 1, f"one column {name}", f"{header.count(name)}", "rename or remove the others")
    glue = named or next(
        (glue for glue in GLUE if glue.columns and glue.columns[0] in header and glue.columns[1] == label_column), None
    )
    if label_column is None and not split.startswith("test"):
        expected, advice = (
            f"a label column ({', '.join(_LABEL_COLUMNS)})",
            "rename the column; only test files go without",
        )
        raise _error(path, 1, expected, f"columns {shortened(header)}", advice)
    text_at = [header.index(name) for name in text_columns]
    file = _File(path, glue, [], [], None if label_column is None else [])
    for line, fields in rows:
        # QQP as GLUE distributes it has a few rows cut in two by a line end, or with one question missing.
        cut = len(fields) < len(header) or not all(str(fields[at]).strip() for at in text_at)
        if cut and glue and glue.name == "QQP":
            continue
        if len(fields) != len(header):
            advice = "quote texts that hold a comma" if path.suffix == ".csv" else "a text holds no tab"
            advice, found = (advice, f"{len(fields)}") if any(fields) else ("remove it", "a blank line")
            raise _error(path, line, f"{len(header)} columns", found, advice)
        texts = tuple(fields[at] for at in text_at)
        flaw = next(filter(None, map(text_flaw, texts)), None)
        if flaw:
            raise _error(path, line, f"text in {' and '.join(text_columns)}", flaw, "correct or drop the row")
        file.lines.append(line)
        file.texts.append(texts)
        if label_column is not None:
            label = _label(fields[header.index(label_column)])
            if label is None:
                found = shortened(fields[header.index(label_column)])
                raise _error(path, line, f"a label in {label_column}", found, "fill it in")
            file.labels.append(label)
    if not file.texts:
        raise _error(path, 1, "rows below the header", "none", "add rows or remove the file")
    return file


def _label(value) -> str | None:
    """A label as text: without blanks around it, JSON's 1.0 as 1, true as true. None of what is no label."""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return str(int(value) if value.is_integer() else value) if math.isfinite(value) else None
    return str(value).strip() or None if isinstance(value, str | int) else None


def _rows(path: Path) -> Iterator[tuple[int, list]]:
    """(line number, fields) of each row, the column names first. A line feed, nothing else, ends a line."""
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        line, found = data.count(b"\n", 0, error.start) + 1, f"byte {data[error.start]:#04x}"
        raise _error(path, line, "UTF-8", found, "convert the file to UTF-8") from None
    if not text:
        raise _error(path, 1, "a header and rows", "an empty file", "fill it in or remove it")
    yield from {".csv": _csv_rows, ".jsonl": _jsonl_rows}.get(path.suffix, _tsv_rows)(path, text)


def _tsv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """No quoting: GLUE's files hold single quotation marks that stand for themselves."""
    rows = (line.removesuffix("\r").split("\t") for line in text.split("\n"))
    for line, fields in enumerate(rows, start=1):
        if line == 1 and len(fields) == 4 and fields[1] in ("0", "1") and fields[2] in ("", "*"):
            yield 0, ["source", "label", "star", "sentence"]  # CoLA's train and dev files have no header
        yield line, fields


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline="\n"), strict=True)
    line = 1
    try:
        for fields in reader:
            yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        advice = "close every quotation mark, and double the ones inside a text"
        raise _error(path, line, "comma-separated values", str(error), advice) from None


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, list]]:
    header: list[str] = []
    for line, source in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise _error(path, line, "one JSON object", f"{shortened(source)}: {error}", "correct the line") from None
        if not isinstance(row, dict):
            raise _error(path, line, "one JSON object", shortened(source), 'write {"text": ..., "label": ...}')
        if not header:
            header = list(row)
            yield 0, header
        if not row.keys() >= set(header):
            expected = f"the keys {shortened(header)} of the first line"
            raise _error(path, line, expected, shortened(list(row)), "write every key in each line")
        yield line, [row[name] for name in header]


def _labels_of_train(folder: Path, train: _File | None) -> tuple[str, ...]:
    """The label set of a plain task: numbers in their order, words in that of the alphabet."""
    if train is None:
        raise ValueError(
            f"{folder}: expected a train file, which says what labels there are, found none; add train.tsv"
        )
    names = set(train.labels)
    if len(names) < 2:
        expected, found = "at least two labels in the file", f"only {shortened(train.labels[0])}"
        raise _error(train.path, train.lines[0], expected, found, "add rows with another label")
    numeric = all(name.removeprefix("-").isdecimal() and len(name) < 20 for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numeric else 0, name)))


def _numbers(file: _File, glue: GlueTask) -> np.ndarray | None:
    """Labels (N,): int64 class indices, float32 for regression."""
    if file.labels is None:
        return None
    if not glue.label_names:
        return np.array([_finite(file, row) for row in range(len(file.labels))], np.float32)
    index = {name: number for number, name in enumerate(glue.label_names)}
    if glue in GLUE:
        index |= {str(number): number for number in index.values()}
    numbers = [index.get(label) for label in file.labels]
    if None in numbers:
        row = numbers.index(None)
        other = "remove the label column of a test file that has no labels"
        other = other if glue in GLUE else "add rows with this label to the train file"
        names = glue.label_names[:SHOWN] + ("...",) * (len(glue.label_names) > SHOWN)
        expected, found = f"one of the labels {', '.join(names)}", shortened(file.labels[row])
        raise _error(file.path, file.lines[row], expected, found, f"correct it, or {other}")
    return np.array(numbers, np.int64)


def _finite(file: _File, row: int) -> float:
    try:
        number = float(file.labels[row])
    except ValueError:
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise _error(file.path, file.lines[row], "a finite number as label", shortened(file.labels[row]), "correct it")
    return number


def text_flaw(text: object) -> str | None:
    """What is wrong with a text, or None: it has to be a string, not blank, and writable as UTF-8."""
    if not isinstance(text, str):
        return f"{shortened(text)}, which is no string"
    if not text.strip():
        return "an empty text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    return None


def _error(path: Path, line: int, expected: str, found: str, advice: str) -> ValueError:
    return ValueError(f"{path}:{line}: expected {expected}, found {found}; {advice}")


def shortened(value: object) -> str:
    """A value as an error shows it, in at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
