"""Figures of the leaderboard's decoders from their records: layers and FLOPs saved, agreement and ln p of each text."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.decoders import EXAMS, QUICK_EXAMS, DecoderExam, trainings
from mini_ee.experiments.leaderboard.ranking import DIGITS, Drawn, drawn_mean, example_counts, interval
from mini_ee.experiments.leaderboard.token_rules import LEVEL, outcome
from mini_ee.experiments.pages import plus_minus
from mini_ee.experiments.records import read_records
from mini_ee.lab.exits.decoding import MISSING_KV
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Never, Rule, rule_from_dict

NO_EXITS = {"speedup": 1.0, "agreement": 1.0, "rouge_l": 1.0}  # decoding in full, compared with itself


class Figures(NamedTuple):
    """A method on a decoder, over S seeds and T texts each."""

    seeds: tuple[int, ...]
    values: dict[str, np.ndarray]  # name -> (S, T), means over the tokens of a text
    abouts: list[dict]  # of each seed
    method: str
    exits: tuple[int, ...]
    agreement: np.ndarray  # (S, K), of each exit
    head_layers: float  # the FLOPs of the last exit's head, in layers

    def mean(self, read: Callable[[dict], float | None]) -> float | None:
        """The mean over seeds of a figure in `about`; None if a seed has none."""
        values = [read(metadata) for metadata in self.abouts]
        return None if None in values else float(np.mean(values))

    def decoding(self, fill: str, name: str) -> float | None:
        """The mean of a figure of decoding; None if no seed has a rule that saves layers."""
        decodings = [metadata["methods"][self.method]["decoding"] for metadata in self.abouts]
        return (
            float(np.mean([decoding.get(fill, NO_EXITS)[name] for decoding in decodings])) if any(decodings) else None
        )

    @property
    def saves(self) -> bool:
        """Whether some token exits early with the rule of the main table."""
        return bool(self.values[f"saved {LEVEL:g}"].any())

    def lossless(self, name: str) -> float | None:
        return self.mean(lambda metadata: metadata["lossless"].get(name))


Decoders = dict[DecoderExam, dict[str, Figures]]


def read_exam(out: Path, exam: DecoderExam, quick: bool) -> dict[str, Figures]:
    """Method -> its figures, of all methods that have a record with the present settings."""
    by_method = {}
    for training in trainings(quick):
        if training.exam != exam:
            continue
        made = read_records(training.record(out))
        made = {seed: record for seed, record in made.items() if record.about["settings"] == training.settings}
        for method in training.methods:
            if method_records := {seed: record for seed, record in made.items() if method in record.about["methods"]}:
                parts = [
                    _of_seed(record.reported, record.about["methods"][method]["rules"])
                    for record in method_records.values()
                ]
                shared = set.intersection(*(set(part) for part in parts))
                values = {name: np.stack([part[name] for part in parts]) for name in sorted(shared)}
                first, *_ = method_records.values()
                agreement = np.array([_agreement(record.reported) for record in method_records.values()])
                abouts = [record.about for record in method_records.values()]
                for fill in MISSING_KV:
                    if any(metadata["methods"][method]["decoding"] for metadata in abouts):
                        speeds = [metadata["methods"][method]["decoding"].get(fill, NO_EXITS) for metadata in abouts]
                        values[f"speed-up {fill}"] = np.array([[speed["speedup"]] for speed in speeds])
                exits, heads = first.reported.segments.exits, _head_layers(first.reported)
                by_method[method] = Figures((*method_records,), values, abouts, method, exits, agreement, heads)
    return by_method


def _of_seed(reported: Record, rules: dict[str, dict | None]) -> dict[str, np.ndarray]:
    """Name -> the mean of each text: layers and FLOPs that every rule saves, its agreement and ln p."""
    _, text, sizes = np.unique(reported.groups, return_inverse=True, return_counts=True)
    layers, by_text = reported.segments.exits[-1], {}
    every: dict[str, Rule] = {name: rule_from_dict(rule) for name, rule in rules.items() if rule is not None}
    for name, rule in (every | {"full": Never()}).items():
        got = outcome(reported, rule)
        kinds = {"saved": 1 - got.depth / layers, "FLOPs": 1 - got.flops, "agreement": got.agrees, "ln p": got.log_p}
        for kind, values in kinds.items():
            by_text[f"{kind} {name}"] = np.bincount(text, values.astype(np.float64)) / sizes
    return by_text


def _agreement(reported: Record) -> list[float]:
    predictions = reported.predictions
    return (predictions == predictions[:, -1:]).mean(axis=0).tolist()


def _head_layers(reported: Record) -> float:
    """The FLOPs of the last exit's head, divided by those of a layer of the full model."""
    head, full = reported.segments.costs[0][:, -1, 1].mean(), reported.full.mean()
    return float(head / (full - head) * reported.segments.exits[-1])


def drawn(figures: Figures, name: str, folder: str) -> Drawn | None:
    """A figure with its draws of seeds and texts; None if some seed has no such rule."""
    if name not in figures.values:
        return None
    values = figures.values[name]
    by_seed = np.round(example_counts(folder, values.shape[1]) @ values.T / values.shape[1], DIGITS)
    return drawn_mean(by_seed, values.mean(axis=1), folder, figures.seeds)


def drawn_figures(exam: DecoderExam, by_method: dict[str, Figures], name: str) -> dict[str, Drawn]:
    """Method -> a figure with its draws, of the methods that have it with every seed."""
    pairs = {method: drawn(figures, name, exam.folder) for method, figures in by_method.items()}
    return {method: method_drawn for method, method_drawn in pairs.items() if method_drawn is not None}


def read_decoders(out: Path, quick: bool) -> Decoders:
    """The figures of all decoders that have a record."""
    exams = {exam: read_exam(out, exam, quick) for exam in (QUICK_EXAMS if quick else EXAMS)}
    return {exam: by_method for exam, by_method in exams.items() if by_method}


def flops_saved(run: Decoders) -> tuple[str, dict[str, str]]:
    """The name of the first decoder, and for each method the FLOPs that it saves on it, in percent with an interval."""
    for exam, by_method in run.items():
        saved = drawn_figures(
            exam, {name: figures for name, figures in by_method.items() if figures.saves}, f"FLOPs {LEVEL:g}"
        )
        return exam.name, {method: plus_minus(interval(method_drawn)) for method, method_drawn in saved.items()}
    return "", {}
