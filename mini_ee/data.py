"""Examples as token ids: the built-in reviews, or a file or folder of your own; batches; scores of exits and rules."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from mini_ee.load import load_tokenizer
from mini_ee.loop import early_exit
from mini_ee.rules import Fixed, Never, Patience, Rule, Threshold
from mini_ee.train import draw

TEXT_COLUMNS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")),
    *(("#1 String", "#2 String"), ("sentence",), ("text",)),
)
LABEL_COLUMNS = ("gold_label", "label", "is_duplicate", "Quality", "score")
SUFFIXES = (".tsv", ".csv", ".jsonl")
TEST_SPLITS = ("dev", "validation", "valid", "test")  # the first that a folder has
TEST_SHARE = 0.2  # of a single file
BATCH = 64  # rows that are scored together


class Inputs(NamedTuple):
    """A padded batch of B rows; len() of it is B."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 at tokens, 0 at padding
    kinds: Tensor  # (B, T), 1 at the tokens of a second text

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Rows:
    """N examples: token ids and kinds of each; labels (N,), int64 classes or float32 numbers; the classes' names."""

    ids: list[list[int]]
    kinds: list[list[int]]
    labels: Tensor
    names: tuple[str, ...]  # () for a regression

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def outputs(self) -> int:
        """C: the number of classes, 1 for a regression."""
        return len(self.names) or 1

    def take(self, rows: Sequence[int] | np.ndarray | slice) -> Self:
        """Some of the rows."""
        rows = np.arange(len(self))[rows]
        ids, kinds = ([values[row] for row in rows] for values in (self.ids, self.kinds))
        return replace(self, ids=ids, kinds=kinds, labels=self.labels[torch.from_numpy(rows)])

    def split(self, *shares: float) -> list[Self]:
        """Parts of these shares, in order; the rows were drawn in a random order before."""
        ends = np.round(np.cumsum((0, *shares)) * len(self)).astype(int)
        return [self.take(slice(begin, end)) for begin, end in zip(ends, ends[1:])]

    def batch(self, rows: Sequence[int] | np.ndarray) -> Inputs:
        """Some of the rows as one batch, padded to the longest of them."""
        ids, kinds, mask = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(values(row)) for row in rows], batch_first=True)
            for values in (self.ids.__getitem__, self.kinds.__getitem__, lambda row: [1] * len(self.ids[row]))
        )
        return Inputs(ids, mask, kinds)


def batches(data: Rows, size: int) -> list[np.ndarray]:
    """Row numbers in batches, from short to long texts, so that there is little padding."""
    order = np.argsort([len(row) for row in data.ids], kind="stable")
    return [order[at : at + size] for at in range(0, len(order), size)]


# ---- Tasks ----
class Task(NamedTuple):
    """Texts with labels: learn is for training, test for the final scores; test chooses nothing."""

    learn: Rows
    test: Rows


def open_task(path: str, model: str, tokens: int, most: int | None, seed: int) -> Task:
    """The examples of a file or folder, or, with no path, the built-in review sentences: negative 0, positive 1.

    model: whose tokenizer cuts texts to `tokens` tokens. most: number of training rows, drawn with the seed.
    """
    tokenizer = load_tokenizer(model, tokens)
    if path:
        return read_task(path, tokenizer, most, seed)
    records = read_table(Path(str(files("mini_ee") / "reviews.tsv")))
    learn, test = ([record for record in records if record["split"] == split] for split in ("train", "test"))
    return encoded(learn, test, tokenizer, most, seed)


def read_task(path: str | Path, tokenizer: Tokenizer, most: int | None = None, seed: int = 0) -> Task:
    """A folder with train and dev (or test) files, or one file, of which a fifth, drawn with the seed, is for the test.

    TSV, CSV or JSONL with columns such as sentence, or sentence1 and sentence2; and label, or score. Labels that are
    numbers with a decimal point make a regression. Raises FileNotFoundError, or ValueError that names file and line.
    """
    path = Path(path)
    if path.is_dir():
        learn, test = (read_table(split_file(path, names)) for names in (("train",), TEST_SPLITS))
    else:
        records = read_table(path)
        order, cut = np.random.default_rng(seed).permutation(len(records)), round(TEST_SHARE * len(records))
        test, learn = ([records[at] for at in some] for some in (order[:cut], order[cut:]))
    if not learn or not test:
        raise ValueError(f"{path}: expected rows for training and for the test, found {len(learn)} and {len(test)}")
    return encoded(learn, test, tokenizer, most, seed)


def split_file(folder: Path, names: Sequence[str]) -> Path:
    """The first of these splits that the folder has, as a table."""
    for path in [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]:
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: expected {' or '.join(names)} as {', '.join(SUFFIXES)}")


def read_table(path: Path) -> list[dict[str, str]]:
    """The records of a table, all values as strings."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected {', '.join(SUFFIXES)}, found {path.suffix!r}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".jsonl":
                records = [json.loads(line) for line in file if line.strip()]
            elif path.suffix == ".csv":
                records = list(csv.DictReader(file, strict=True))
            else:  # in GLUE's TSV files a quotation mark is a character like others
                records = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a {path.suffix} file in UTF-8: {error}") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or None in record or None in record.values():
            raise ValueError(f"{path}: row {number} does not have one value for each column")
    return [{str(name): value if isinstance(value, str) else str(value) for name, value in r.items()} for r in records]


def encoded(learn: list[dict], test: list[dict], tokenizer: Tokenizer, most: int | None, seed: int) -> Task:
    """Records as token ids. Classes are numbered in the order of their names; train and test share the numbers."""
    texts = next((names for names in TEXT_COLUMNS if learn[0].keys() >= set(names)), None)
    label = next((name for name in LABEL_COLUMNS if name in learn[0]), None)
    if texts is None or label is None:
        columns = "sentence, text, or a pair such as sentence1 and sentence2; and label or score"
        raise ValueError(f"expected the columns {columns}; found {', '.join(learn[0])}")
    if not all(record.keys() >= {*texts, label} for record in test):
        raise ValueError(f"the rows of the test need the columns {', '.join((*texts, label))}")
    label_values = {record[label] for record in learn}
    numbers = all(re.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", value) for value in label_values)
    regression = numbers and any("." in value for value in label_values)
    names = () if regression else tuple(sorted(label_values, key=lambda name: (float(name) if numbers else 0, name)))
    index = {name: at for at, name in enumerate(names)}  # of all rows for training, even when fewer are drawn
    learn = [learn[at] for at in np.random.default_rng(seed).permutation(len(learn))[:most]]
    parts = []
    for records in (learn, test):
        if not regression and (new := {record[label] for record in records} - index.keys()):
            raise ValueError(f"label {min(new)!r} of the test is not one of the training's: {', '.join(names)}")
        several = [tuple(record[name] for name in texts) for record in records]
        encodings = tokenizer.encode_batch([pair if len(pair) > 1 else pair[0] for pair in several])
        values = [float(record[label]) if regression else index[record[label]] for record in records]
        labels = torch.tensor(values, dtype=torch.float32 if regression else torch.int64)
        parts.append(Rows([row.ids for row in encodings], [row.type_ids for row in encodings], labels, names))
    return Task(*parts)


# ---- Scores ----
@torch.no_grad()
def of_all(function: Callable[[Inputs], Tensor], data: Rows) -> Tensor:
    """A function of batches on all N rows, (N, ...): the logits of every exit, or the states of a frozen model."""
    order = batches(data, BATCH)
    values = torch.cat([function(data.batch(rows)) for rows in order])
    return values[torch.from_numpy(np.concatenate(order).argsort())]


def score_of(logits: np.ndarray | Tensor, labels: Tensor) -> float:
    """Accuracy of logits (N, C); of a regression, Pearson's correlation."""
    logits = np.asarray(logits)
    if labels.is_floating_point():
        return float(np.corrcoef(logits[:, 0], labels.numpy())[0, 1])
    return float((logits.argmax(1) == labels.numpy()).mean())


@torch.inference_mode()
def scored(model: nn.Module, rule: Rule, data: Rows) -> tuple[float, float, float]:
    """All rows through the loop: the score, the mean layers run, the share of the full model's FLOPs that is saved."""
    logits, every = np.empty((len(data), data.outputs), np.float32), rule.needs == "logits"
    layers = flops = full = 0.0
    for rows in batches(data, BATCH):
        result = early_exit(model, rule, inputs := data.batch(rows))
        logits[rows], tokens = result.logits, inputs.ids.shape[1]
        layers += model.passes(every)[result.exit_index].sum()
        flops += model.flops(tokens, every)[result.exit_index].sum()
        full += len(rows) * model.flops(tokens, every_head=False)[-1]
    return score_of(logits, data.labels), layers / len(data), 1 - flops / full


def usual_rules(data: Rows) -> dict[str, Rule]:
    """The rules that need no training: thresholds, or patience for a regression."""
    if not data.names:
        near = 0.3 * float(data.labels.std())
        return {f"patience {t}": Patience(t, near) for t in (1, 2)}
    rules: dict[str, Rule] = {f"threshold {tau}": Threshold(tau) for tau in (0.8, 0.9, 0.95)}
    return rules | {"patience 2": Patience(2)}


def report(model: nn.Module, data: Rows, rules: dict[str, Rule], title: str, path: str) -> None:
    """Print, and draw, score and layers of each exit and each rule on the test rows."""
    metric = "accuracy" if data.names else "correlation"
    print(f"\n{f'on {len(data)} test rows':34}{metric:>12}{'layers':>9}{'FLOPs saved':>13}")
    alone: dict[str, Rule] = {f"all exit after layer {layer}": Fixed(k) for k, layer in enumerate(model.exits[:-1])}
    every = alone | {"full model": Never()} | rules
    results = {name: scored(model, rule, data) for name, rule in every.items()}
    for name, (score, layers, saved) in results.items():
        print(f"{name:34}{score:12.3f}{layers:9.2f}{saved:13.0%}")
    points = {name: (layers, score) for name, (score, layers, _) in results.items()}
    draw(path, title, metric, [points.pop(name) for name in (*alone, "full model")], points)
