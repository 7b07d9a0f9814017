"""Finds the columns of texts and label in a task's files: the usual ones, or those that options name.

A name matches exactly, else without case and surrounding blanks. No torch here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from mini_ee.lab.data.settings import Settings, flag_of, option
from mini_ee.lab.data.table_files import file_error
from mini_ee.lab.data.values import shortened

TEXT_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("question", "context"),
    ("#1 String", "#2 String"),
    ("text", "text_b"),
    ("sentence",),
    ("text",),
)

LABEL_COLUMNS = ("gold_label", "label", "is_duplicate", "Quality", "score")


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Settings):
    """Options for reading the files of a task. Raises ValueError if two options name the same column."""

    text_column: str | None = option(None, "column with the text", metavar="NAME", default_text="sentence, text, ...")
    text_pair_column: str | None = option(None, "column with the second text of a pair", metavar="NAME")
    label_column: str | None = option(None, "column with the label", metavar="NAME", default_text="label, score, ...")
    regression: bool = option(False, "predict the label as a number, not as a class")
    split_file: int | None = option(
        None, "random seed that splits a single file into 80% train and 20% dev", least=0, metavar="SEED"
    )

    def __post_init__(self):
        super().__post_init__()
        named = {name: value for name, value in asdict(self).items() if name.endswith("_column") and value is not None}
        for name, value in named.items():
            if not value.strip():
                raise ValueError(f"{flag_of(name, {})}: expected the name of a column, found {value!r}")
            if same := [flag_of(other, {}) for other in named if other != name and named[other] == value]:
                raise ValueError(f"{flag_of(name, {})} and {same[0]}: expected two columns, found {value!r} for both")

    def given(self) -> dict:
        """The options that differ from the defaults."""
        usual = asdict(TaskOptions())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @property
    def names_columns(self) -> bool:
        """Whether the user describes the columns: then the task is not recognised by their names."""
        return self.regression or any(name.endswith("_column") for name in self.given())


class Columns(NamedTuple):
    """The names and indices of the columns of texts and label. label is None if the file has no labels."""

    text_names: tuple[str, ...]
    texts: tuple[int, ...]
    label_name: str | None
    label: int | None


def columns_of(path: Path, header: list[str], options: TaskOptions, labelled: bool | None) -> Columns:
    """Find the columns in a header. labelled: whether it must have labels; None: it may have them, False: not wanted.

    Raises ValueError, of one line, if a column is missing or occurs twice.
    """
    text_names = _text_names(path, header, options)
    texts = tuple(_position(path, header, name) for name in text_names)
    if labelled is False:
        return Columns(text_names, texts, None, None)
    usual = (name for name in LABEL_COLUMNS if set(positions(header, name)) - set(texts))
    label_name = options.label_column or next(usual, None)
    if label_name is not None and not positions(header, label_name):
        _check(path, header, "label_column", label_name if labelled else None)
        label_name = None
    if label_name is None and labelled:
        advice = "name it with --label-column or rename it; only test files go without"
        expected = f"a label column ({', '.join(LABEL_COLUMNS)})"
        raise file_error(path, 1, expected, f"columns {shortened(header)}", advice)
    label = None if label_name is None else _position(path, header, label_name)
    if label in texts:
        raise file_error(path, 1, "a label and a text", f"both in {header[label]}", "name two columns")
    return Columns(text_names, texts, label_name, label)


def positions(header: list[str], name: str) -> list[int]:
    """Indices of the columns with this name: exact matches, else matches without case and surrounding blanks."""
    exact = [at for at, column in enumerate(header) if column == name]
    return exact or [at for at, column in enumerate(header) if column.strip().casefold() == name.strip().casefold()]


def _text_names(path: Path, header: list[str], options: TaskOptions) -> tuple[str, ...]:
    first, second = options.text_column, options.text_pair_column
    _check(path, header, "text_column", first)
    _check(path, header, "text_pair_column", second)
    present = [names for names in TEXT_COLUMNS if all(positions(header, name) for name in names)]
    if second is not None:
        present = [names for names in present if len(names) == 1]
    if first is None and not present:
        expected = "a text column (sentence, text) or two (sentence1 and sentence2, ...)"
        advice = "name it with --text-column or rename it"
        raise file_error(path, 1, expected, f"columns {shortened(header)}", advice)
    if first is not None or second is not None:
        return tuple(filter(None, ((first,) if first is not None else present[0]) + (second,)))
    usual, *_ = present
    others = {name for names in TEXT_COLUMNS for name in names if positions(header, name)} - set(usual)
    if others and len(usual) == 1:
        expected = f"{usual[0]} alone, or two that go together (text and text_b, sentence1 and sentence2, ...)"
        advice = "name the columns to read with --text-column and --text-pair-column"
        raise file_error(path, 1, expected, f"{usual[0]} and {' and '.join(sorted(others))}", advice)
    return usual


def _position(path: Path, header: list[str], name: str) -> int:
    at = positions(header, name)
    if len(at) > 1:
        raise file_error(path, 1, f"one column {name}", f"{len(at)}", "rename or remove the others")
    return at[0]


def _check(path: Path, header: list[str], option_name: str, column: str | None) -> None:
    if column is not None and not positions(header, column):
        expected = f"the column {column} ({flag_of(option_name, {})})"
        raise file_error(path, 1, expected, f"columns {shortened(header)}", "name one of these")
