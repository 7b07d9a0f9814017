"""Run an exported folder without torch: with numpy, ONNX Runtime and tokenizers.

    Runtime("exported").run(["A warm and funny film."])
    [Answer(label="positive", confidence=0.98, exit=4, layers=4, milliseconds=3.1, ...)]

A batch is one call of model.onnx, which stops by itself. A class of mini_ee.lab opens folders of other kinds, such as a
decoder's: its entry points `mini_ee.runtimes` name it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import onnxruntime as ort
from tokenizers import Encoding, Tokenizer

from mini_ee.export.manifest import GRAPHS, IDS, MODEL, graph_inputs, read_manifest, rule_from_dict
from mini_ee.loop import Result, early_exit
from mini_ee.rules import Rule, max_probability

ELSEWHERE = ("prompt", "encoder", "rule_in_graph")  # keys of the manifest that this file does not know


class Answer(NamedTuple):
    """The result for one row."""

    label: str | float | dict[str, float]  # a number in a regression; of several labels at once their probabilities
    confidence: float | None  # the largest probability, or that of the weakest label; None in a regression
    exit: int  # the layer of its exit
    layers: int | float  # the same number, or the mean depth of the tokens if these exit within the row
    milliseconds: float  # of its batch, over the rows of that batch
    logits: np.ndarray  # (C,)


@dataclass(frozen=True)
class Batch:
    """Inputs of a graph, (B, T) int64 each; after a segment, the rows of its outputs that are still in the model."""

    ids: dict[str, np.ndarray]
    rows: np.ndarray  # (B,), of `outputs`
    outputs: dict[str, np.ndarray] = field(default_factory=dict)  # of the last graph

    def __len__(self) -> int:
        return len(self.rows)

    def keep(self, rows: np.ndarray) -> Self:
        return type(self)({name: value[rows] for name, value in self.ids.items()}, self.rows[rows], self.outputs)


class Segments:
    """segment_*.onnx, as an engine of loop.py."""

    def __init__(self, folder: Path, exits: Sequence[int], threads: int):
        self.exits = exits
        self.sessions = [open_session(folder / GRAPHS / f"segment_{layer}.onnx", threads) for layer in exits]

    def start(self, inputs: Batch) -> Batch:
        return inputs

    def advance(self, k: int, state: Batch) -> Batch:
        given = state.ids | {"hidden": state.outputs.get("hidden_out"), "rows": state.rows, "read": np.array(True)}
        session, rows = self.sessions[k], np.arange(len(state))
        values = session.run(None, {node.name: given[node.name] for node in session.get_inputs()})
        return Batch(state.ids, rows, {output.name: value for output, value in zip(session.get_outputs(), values)})

    def read(self, k: int, state: Batch) -> np.ndarray:
        return state.outputs["logits"][state.rows]

    def exit_logit(self, k: int, state: Batch) -> np.ndarray:
        """(B,): of a policy. Raises ValueError if the model has none."""
        if "exit_logit" not in state.outputs:
            raise ValueError("this model has no policy; choose another rule")
        return state.outputs["exit_logit"][state.rows]


def open_session(path: Path, threads: int) -> ort.InferenceSession:
    """A graph on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Runtime:
    """An exported folder, checked and ready to run."""

    config: dict  # the manifest

    def __new__(cls, folder: str | Path, *arguments, **settings) -> "Runtime":
        """Of the lab's class for a decoder, for example. Raises FileNotFoundError or ValueError as read_manifest."""
        manifest = read_manifest(Path(folder))
        if cls is Runtime and not is_plain(manifest):
            if not (kinds := entry_points(group="mini_ee.runtimes", name=manifest["unit"])):
                raise ValueError(f"{folder}: mini_ee.lab runs this kind of export, and it is not installed")
            (kind,) = (entry.load() for entry in kinds)
            return kind(folder, *arguments, **settings)
        runtime = super().__new__(cls)
        runtime.config = manifest
        return runtime

    def __init__(self, folder: str | Path, threads: int = 0):
        self.folder, self.threads, config = Path(folder), threads, self.config
        self.exits, self.label_names = tuple(config["exits"]), config["task"]["label_names"]
        self.num_texts, self.rule = config["task"]["texts"], rule_from_dict(config["rule"])
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.session = open_session(self.folder / MODEL, threads)

    @cached_property
    def segments(self) -> Segments:
        """The engine for rules that model.onnx does not contain."""
        return Segments(self.folder, self.exits, self.threads)

    def run(self, texts: Sequence, batch_size: int = 32, rule: Rule | None = None) -> list[Answer]:
        """Answers in the order of the texts; rows of two texts are tuples. rule: in place of the folder's.

        Raises ValueError for a text that is empty, and for a rule that the folder cannot run.
        """
        encodings, answers = self.encode(texts), dict[int, Answer]()
        order = np.argsort([len(row.ids) for row in encodings], kind="stable")  # similar lengths: little padding
        for rows in (order[at : at + batch_size] for at in range(0, len(order), batch_size)):
            begin = time.perf_counter()
            inputs = self.batch([encodings[row] for row in rows])
            result = self.run_batch(inputs, rule or self.rule)
            milliseconds = (time.perf_counter() - begin) * 1e3 / len(rows)
            for row, logits, at, layers in zip(rows.tolist(), *result):
                label, confidence = float(logits[0]), None
                if self.label_names:
                    label, confidence = self.label_names[logits.argmax()], float(max_probability(logits[None])[0])
                answers[row] = Answer(label, confidence, self.exits[at], int(layers), milliseconds, logits)
        return [answers[row] for row in range(len(encodings))]

    def encode(self, texts: Sequence) -> list[Encoding]:
        """Rows of one or two texts as tokens. Raises ValueError for a text that is empty or not a string."""
        if isinstance(texts, str):
            raise ValueError(f"expected a list of texts, found one string, {texts[:40]!r}; put it in a list")
        rows = [tuple(row) if isinstance(row, tuple | list) else (row,) for row in texts]
        for number, row in enumerate(rows):
            if len(row) != self.num_texts or not all(isinstance(text, str) and text.strip() for text in row):
                raise ValueError(f"row {number}: expected texts, {self.num_texts} a row, found {str(row):.60}")
        return self.tokenizer.encode_batch([row if len(row) > 1 else row[0] for row in rows])

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Rows as one batch, padded on the right to the longest."""
        ids = np.zeros((3, len(encodings), max(len(encoding.ids) for encoding in encodings)), np.int64)
        for row, encoding in enumerate(encodings):
            ids[:, row, : len(encoding.ids)] = encoding.ids, encoding.type_ids, encoding.attention_mask
        return Batch(dict(zip(IDS, ids)), np.arange(len(encodings)))

    def run_batch(self, inputs: Batch, rule: Rule) -> Result:
        """One call of model.onnx, or, for a rule that it does not contain, of the graphs by segment."""
        plan, stored = rule.plan(inputs), self.rule
        feeds = graph_inputs(rule, len(self.exits)) if plan is None else {"exit_at": np.asarray(plan)}
        kinds = [(type(r).__name__, getattr(r, "measure", 0), getattr(r, "tolerance", 0)) for r in (rule, stored)]
        if "exit_at" not in feeds and kinds[0] != kinds[1]:  # apart from inputs of the graph
            if f"segment_{self.exits[0]}" not in self.config["graphs"]:
                raise ValueError(f"{self.folder}: model.onnx has the rule {stored}, found {rule}; export with segments")
            return early_exit(self.segments, rule, inputs)
        logits, layers = self.session.run(["logits", "layers"], inputs.ids | feeds)
        return Result(logits, np.searchsorted(self.exits, layers), layers)


def is_plain(manifest: dict) -> bool:
    """Whether this file runs the folder: a BERT that gives a row one label or number, with a rule of the core."""
    if manifest["unit"] != "rows" or "whole" in manifest["graphs"] or {"multi_label", "tokens"} & {*manifest["task"]}:
        return False
    try:
        rule_from_dict(manifest["rule"])
    except (KeyError, TypeError, ValueError):
        return False
    return manifest["backbone"].get("model_type") == "bert" and not any(key in manifest for key in ELSEWHERE)
