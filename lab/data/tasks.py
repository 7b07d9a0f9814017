"""Classification tasks: texts and labels from a folder of files, or the built-in reviews. No torch here.

A task folder has train, dev (also validation, valid, val) and test files (table_files.py). The nine tasks of GLUE are
read as they are distributed (Wang et al. 2018, arXiv:1804.07461v3). They are recognised by the folder's name, in
any spelling, or by their columns; their labels are names, or numbers in Hugging Face's order. In any other task the
labels are those of its train file; JSON's true and false are the labels "true" and "false". TaskOptions name the
columns of other files, turn a task with numbers as labels into a regression, and split a single file. Errors in a file
are one line: file:line, what was expected, what was found, what to do.
"""

import functools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mini_ee.lab.data.metrics as metrics
from mini_ee.lab.data.columns import Columns, TaskOptions, positions
from mini_ee.lab.data.files import json_sha256
from mini_ee.lab.data.glue import GLUE, GlueTask
from mini_ee.lab.data.rankings import top_k_kept
from mini_ee.lab.data.reviews import read_reviews
from mini_ee.lab.data.table_files import SUFFIXES, file_error, kind_of
from mini_ee.lab.data.text_files import InputRow, TextReader
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

TOY = "reviews"
HELD_OUT_SHARE = 0.1  # share of train that is held out for every choice


# ---- Tasks ----
@dataclass(frozen=True, eq=False)
class Split:
    """N rows (examples) of a task, each of one or two texts.

    labels: (N,) int64 class indices, float32 for regression, None if the file has no labels.
    hardness: the kind of each row, only in the built-in task (reviews.HARDNESS).
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

    def words(self) -> list[tuple[str, ...]]:
        """The texts of each row without case and extra blanks, to find equal rows."""
        return [tuple(" ".join(text.casefold().split()) for text in row) for row in self.texts]

    def __add__(self, other: "Split") -> "Split":
        """These rows, then the other's, both with labels. The hardness stays if both have it."""
        assert self.labels is not None and other.labels is not None
        hardness = None if self.hardness is None or other.hardness is None else self.hardness + other.hardness
        return Split(self.texts + other.texts, np.concatenate((self.labels, other.labels)), hardness)

    def sha256(self) -> str:
        """One digest over texts and labels, in order."""
        return json_sha256({"texts": self.texts, "labels": None if self.labels is None else self.labels.tolist()})


@dataclass(frozen=True, eq=False)
class Task:
    """A classification task, or a regression if label_names is empty.

    folder, options: the absolute path of its folder or file, and how it was read. None: the built-in task.
    multi_label: whether an example may have several labels at once; then `labels` are numbers of sets of them.
    token_kind: of token_tasks.py, if each token has a label; then `labels` are numbers of all labels of a row.
    tolerance: of a regression whose score is the share of numbers that differ from the label by no more; None: no such.
    top_k: of pairs whose score is the share of queries that keep their k best texts; labels are RANKED (rankings.py).
    """

    name: str
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    splits: dict[str, Split]
    folder: str | None = None
    options: TaskOptions = TaskOptions()
    tolerance: float | None = None
    multi_label: bool = False
    top_k: int | None = None
    token_kind: str = ""

    @property
    def regression(self) -> bool:
        return not self.label_names

    @property
    def counts_agreement(self) -> bool:
        """Whether numbers are right or wrong, like classes."""
        return self.tolerance is not None or self.top_k is not None

    @property
    def num_labels(self) -> int:
        """C, the number of logits: 1 for regression."""
        return len(self.label_names) or 1

    def to_config(self) -> dict:
        """The `task` of a run's config.json."""
        return {
            "name": self.name,
            "label_names": list(self.label_names),
            "metrics": list(self.metrics),
            "texts": len(self.split("train").texts[0]),
            "train_sha256": self.split("train").sha256(),
            **({"multi_label": True} if self.multi_label else {}),
            **({"tokens": self.token_kind} if self.token_kind else {}),
        } | ({} if self.folder is None else {"folder": self.folder, "options": self.options.given()})

    @property
    def default_split(self) -> str:
        """The split on which we report: dev if there is one, else test. Raises ValueError if there is neither."""
        for name in ("dev", "test"):
            if name in self.splits:
                return name
        raise ValueError(
            f"task {self.name}: expected a dev or a test file, whose rows are reported, found {', '.join(self.splits)} "
            f"alone; add dev.tsv or test.tsv, let --split-file 0 split train, or give --split {next(iter(self.splits))}"
        )

    def split(self, name: str) -> Split:
        """The examples of a split. Raises WrongArguments, which lists the splits, if none has this name."""
        if name not in self.splits:
            raise WrongArguments(
                f"task {self.name}: expected one of its splits {', '.join(self.splits)}, "
                f"found {name!r}; choose another or add the file"
            )
        return self.splits[name]

    def seen_in_train(self, rows: Split) -> np.ndarray:
        """Whether each of these rows is in train, without case and extra blanks: (N,) bool."""
        train = set(self.splits["train"].words()) if "train" in self.splits else ()
        return np.array([words in train for words in rows.words()], bool)

    def without_seen_rows(self) -> tuple["Task", dict[str, int]]:
        """The task without the rows of other splits that are in train, and the number of these in each split."""
        seen = {name: self.seen_in_train(rows) for name, rows in self.splits.items() if name != "train"}
        for name in (name for name, rows in seen.items() if rows.all()):
            raise ValueError(f"task {self.name}: expected rows in {name} that train does not have, found none")
        others = {name: self.split(name).take(~rows) for name, rows in seen.items() if rows.any()}
        return replace(self, splits=self.splits | others), {name: int(rows.sum()) for name, rows in seen.items()}

    def agrees(self, predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Which predictions are the label, or within the tolerance of it: (..., N) bool.

        In a ranking, which queries keep their top k: (..., Q) bool.
        """
        if self.top_k is not None:
            return top_k_kept(predictions, labels, self.top_k)
        return predictions == labels if self.tolerance is None else abs(predictions - labels) <= self.tolerance

    def score(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """The task's metrics, "score", which is their mean, and in a classification "accuracy".

        predictions, labels: (N,) class indices, or numbers for regression.
        """
        if self.counts_agreement:
            within = float(self.agrees(predictions, labels).mean())
            return {"agreement": within, "score": within}
        scores = metrics.score(self.metrics, predictions, labels)
        extra = {} if self.regression or "accuracy" in scores else {"accuracy": metrics.accuracy(predictions, labels)}
        return {**scores, **extra, "score": sum(scores.values()) / len(scores)}


@functools.cache
def toy_task() -> Task:
    """The built-in review task, whose splits have the hardness of each row."""
    splits = {
        name: Split(
            tuple((review.text,) for review in reviews),
            np.array([review.label for review in reviews], np.int64),
            tuple(review.hardness for review in reviews),
        )
        for name, reviews in read_reviews().items()
    }
    return Task(TOY, ("negative", "positive"), ("accuracy",), splits)


def holdout(split: Split, seed: int) -> tuple[Split, Split]:
    """(fit, held_out): a random tenth of the rows is held out for every choice; both keep the order of the file.

    Raises ValueError if either part would be empty.
    """
    if len(split) < 2:
        raise ValueError(f"expected at least two rows, of which one is held out, found {len(split)}; add rows")
    held_out, fit = divided(split, max(1, round(HELD_OUT_SHARE * len(split))), seed)
    return fit, held_out


def subset(split: Split, count: int, seed: int) -> Split:
    """A random subset of `count` rows in the order of the file; all rows if there are fewer.

    Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"expected at least one row, found {count}")
    return divided(split, count, seed)[0]


def divided(split: Split, count: int, seed: int) -> tuple[Split, Split]:
    """(some, others): a random subset of `count` rows, and the other rows; both keep the order of the file."""
    some = np.zeros(len(split), bool)
    some[np.random.default_rng(seed).permutation(len(split))[:count]] = True
    return split.take(some), split.take(~some)


# ---- Task folders ----
LISTED_LABELS = 8  # labels that an error lists

DEV_SHARE = 0.2  # share of dev if a single file is split

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
    """The content of one file of a task, with labels as text."""

    path: Path
    glue: GlueTask | None
    lines: list[int]
    texts: list[tuple[str, ...]]
    labels: Any  # list[str], or None if the file has no labels


def load_task(path: str | os.PathLike, options: TaskOptions = TaskOptions()) -> Task:
    """The task in a folder, in one of the formats above, or in a single file, if the options split it.

    Raises FileNotFoundError if the folder does not exist; ValueError, of one line, for errors in its files.
    """
    path = Path(os.path.abspath(path))
    named = next((glue for glue in GLUE if plain_name(glue.name) == plain_name(path.name)), None)
    named = None if options.regression else named
    files = {split: _read(file, split, named, options) for split, file in _files(path, options).items()}
    (wanted, first), *others = [(len(file.texts[0]), file.path) for file in files.values()]
    for num_texts, other in others:
        if num_texts != wanted:
            raise file_error(other, 1, f"{wanted} texts, as {first.name} has", f"{num_texts}", "rename the columns")
    glue = next((file.glue for file in files.values() if file.glue), None)
    name = path.stem if path.is_file() else path.name
    if glue is None and options.regression:
        glue = GlueTask(name, (), ("pearson", "spearman"))
    elif glue is None:
        glue = GlueTask(name, _labels_of_train(path, files.get("train")))
    splits = {split: Split(tuple(file.texts), _numbers(file, glue)) for split, file in files.items()}
    if options.split_file is not None:
        splits = _divided(splits["train"], path, options.split_file)
    return Task(glue.name, glue.label_names, glue.metrics, splits, str(path), options)


def _files(path: Path, options: TaskOptions) -> dict[str, Path]:
    """The file of each split. Raises FileNotFoundError, ValueError or WrongArguments if there is none, or too many."""
    if not path.exists():
        advice = "name the folder that holds train.tsv, dev.tsv or test.tsv"
        raise FileNotFoundError(f"{path}: expected a task folder, found nothing; {advice}")
    single = [path] if path.is_file() else _tables(path)
    if options.split_file is None and not path.is_dir():
        advice = "to split this file into train and dev, add --split-file 0, where 0 is the seed"
        raise FileNotFoundError(f"{path}: expected a task folder, found a file; {advice}")
    if options.split_file is None:
        return _split_files(path)
    if len(single) != 1 or kind_of(single[0]) not in SUFFIXES:
        tables = ", ".join(table.name for table in single[:5]) or "none"
        raise WrongArguments(f"{path}: --split-file: expected one table ({', '.join(SUFFIXES)}), found {tables}")
    return {"train": single[0]}


def _tables(folder: Path) -> list[Path]:
    """The tables of a folder; .json files, which often describe them, only if there are no others."""
    files = sorted(path for path in folder.iterdir() if kind_of(path) in SUFFIXES and path.is_file())
    return [path for path in files if kind_of(path) != ".json"] or files


def _divided(rows: Split, path: Path, seed: int) -> dict[str, Split]:
    """Random train and dev splits of one file. Rows with equal words are in one split, so train has none of dev."""
    number = {words: number for number, words in enumerate(dict.fromkeys(rows.words()))}
    count = max(1, round(DEV_SHARE * len(number)))
    if count == len(number):
        raise ValueError(f"{path}: --split-file: expected at least two different texts, found {len(number)}; add rows")
    drawn = np.zeros(len(number), bool)
    drawn[np.random.default_rng(seed).permutation(len(number))[:count]] = True
    dev = drawn[[number[words] for words in rows.words()]]
    return {"train": rows.take(~dev), "dev": rows.take(dev)}


def plain_name(name: str) -> str:
    """A task's name for comparisons: lower case, without dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def _split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    there = {path.name.lower(): path for path in folder.iterdir()}
    for stem, split in _SPLITS.items():
        names = (f"{stem}{suffix}{packed}" for suffix in SUFFIXES for packed in ("", ".gz"))
        for path in filter(None, map(there.get, names)):
            if path.is_file():
                if split in files:
                    raise ValueError(
                        f"{folder}: expected one {split} file, found {files[split].name} and {path.name}; remove one"
                    )
                files[split] = path
    for split in ("train", "test"):  # MRPC as Microsoft distributes it; GLUE's own files have priority
        path = folder / f"msr_paraphrase_{split}.txt"
        if path.is_file():
            files.setdefault(split, path)
    if not files:
        single = "add --split-file 0 to split the file with the seed 0, or " if len(_tables(folder)) == 1 else ""
        raise ValueError(
            f"{folder}: expected train, dev or test files ({', '.join(SUFFIXES)}), "
            f"found {sorted(path.name for path in folder.iterdir())[:5]}; {single}name another folder"
        )
    return files


def _read(path: Path, split: str, named: GlueTask | None, options: TaskOptions) -> _File:
    """Texts and labels of one file. Raises ValueError for all errors in it, except for unknown labels."""
    reader = TextReader(path, options, labelled=None if split.startswith("test") else True)
    rows, glue = list[InputRow](), named
    for row in reader:
        if reader.columns and not rows and not named and not options.names_columns:
            glue = _glue_of(reader.header, reader.columns)
        # GLUE's QQP has a few rows that a line end cuts in two, or with one question missing: they are skipped.
        if row.lacks and glue and glue.name == "QQP":
            continue
        if row.error:
            raise WrongArguments(f"{path}:{row.line}: {row.error}")
        rows.append(row)
    if not rows:
        raise file_error(path, 1, "rows below the header", "none", "add rows or remove the file")
    labels = None if rows[0].label is None else [row.label for row in rows]
    return _File(path, glue, [row.line for row in rows], [row.texts for row in rows], labels)


def _glue_of(header: list[str], columns: Columns) -> GlueTask | None:
    """The task of GLUE that has these columns."""
    for glue in GLUE:
        if glue.columns and columns.label_name == glue.columns[1] and positions(header, glue.columns[0]):
            return glue
    return None


def _labels_of_train(folder: Path, train: _File | None) -> tuple[str, ...]:
    """The labels of a task that is not in GLUE: numbers in ascending order, words in alphabetical order."""
    if train is None:
        raise ValueError(f"{folder}: expected a train file, which defines the labels, found none; add train.tsv")
    names = set(train.labels)
    if len(names) < 2:
        expected, actual = "at least two labels in the file", f"only {shortened(train.labels[0])}"
        raise file_error(train.path, train.lines[0], expected, actual, "add rows with another label")
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
        if glue in GLUE and plain_name(glue.name) == plain_name(file.path.parent.name):
            other += f"; a folder of this name is read as GLUE's {glue.name}: rename it if your task is another"
        names = glue.label_names[:LISTED_LABELS] + ("...",) * (len(glue.label_names) > LISTED_LABELS)
        expected, actual = f"one of the labels {', '.join(names)}", shortened(file.labels[row])
        raise file_error(file.path, file.lines[row], expected, actual, f"correct it, or {other}")
    return np.array(numbers, np.int64)


def _finite(file: _File, row: int) -> float:
    try:
        number = float(file.labels[row])
    except ValueError:
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        advice = "write numbers with a decimal point" if "," in file.labels[row] else "correct it"
        raise file_error(file.path, file.lines[row], "a finite number as label", shortened(file.labels[row]), advice)
    return number
