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
        found = [read(about) for about in self.abouts]
        return None if None in found else float(np.mean(found))

    def decoding(self, fill: str, name: str) -> float | None:
        """The mean of a figure of decoding; None if no seed has a rule that saves layers."""
        found = [about["methods"][self.method]["decoding"] for about in self.abouts]
        return float(np.mean([each.get(fill, NO_EXITS)[name] for each in found])) if any(found) else None

    @property
    def saves(self) -> bool:
        """Whether some token exits early with the rule of the main table."""
        return bool(self.values[f"saved {LEVEL:g}"].any())

    def lossless(self, name: str) -> float | None:
        return self.mean(lambda about: about["lossless"].get(name))


Decoders = dict[DecoderExam, dict[str, Figures]]


def read_exam(out: Path, exam: DecoderExam, quick: bool) -> dict[str, Figures]:
    """Method -> its figures, of all methods that have a record with the present settings."""
    found = {}
    for training in trainings(quick):
        if training.exam != exam:
            continue
        made = read_records(training.record(out))
        made = {seed: each for seed, each in made.items() if each.about["settings"] == training.settings}
        for method in training.methods:
            if own := {seed: each for seed, each in made.items() if method in each.about["methods"]}:
                parts = [_of_seed(each.reported, each.about["methods"][method]["rules"]) for each in own.values()]
                shared = set.intersection(*(set(part) for part in parts))
                values = {name: np.stack([part[name] for part in parts]) for name in sorted(shared)}
                first, *_ = own.values()
                agreement = np.array([_agreement(each.reported) for each in own.values()])
                abouts = [each.about for each in own.values()]
                for fill in MISSING_KV:
                    if any(about["methods"][method]["decoding"] for about in abouts):
                        speeds = [about["methods"][method]["decoding"].get(fill, NO_EXITS) for about in abouts]
                        values[f"speed-up {fill}"] = np.array([[speed["speedup"]] for speed in speeds])
                exits, heads = first.reported.segments.exits, _head_layers(first.reported)
                found[method] = Figures((*own,), values, abouts, method, exits, agreement, heads)
    return found


def _of_seed(reported: Record, rules: dict[str, dict | None]) -> dict[str, np.ndarray]:
    """Name -> the mean of each text: layers and FLOPs that every rule saves, its agreement and ln p."""
    _, text, sizes = np.unique(reported.groups, return_inverse=True, return_counts=True)
    layers, found = reported.segments.exits[-1], {}
    every: dict[str, Rule] = {name: rule_from_dict(rule) for name, rule in rules.items() if rule is not None}
    for name, rule in (every | {"full": Never()}).items():
        got = outcome(reported, rule)
        kinds = {"saved": 1 - got.depth / layers, "FLOPs": 1 - got.flops, "agreement": got.agrees, "ln p": got.log_p}
        for kind, values in kinds.items():
            found[f"{kind} {name}"] = np.bincount(text, values.astype(np.float64)) / sizes
    return found


def _agreement(reported: Record) -> list[float]:
    predictions = reported.predictions
    return (predictions == predictions[:, -1:]).mean(axis=0).tolist()


def _head_layers(reported: Record) -> float:
    """The FLOPs of the last exit's head, divided by those of a layer of the full model."""
    head, full = reported.segments.costs[0][:, -1, 1].mean(), reported.full.mean()
    return float(head / (full - head) * reported.segments.exits[-1])


def drawn(found: Figures, name: str, folder: str) -> Drawn | None:
    """A figure with its draws of seeds and texts; None if some seed has no such rule."""
    if name not in found.values:
        return None
    values = found.values[name]
    by_seed = np.round(example_counts(folder, values.shape[1]) @ values.T / values.shape[1], DIGITS)
    return drawn_mean(by_seed, values.mean(axis=1), folder, found.seeds)


def drawn_figures(exam: DecoderExam, found: dict[str, Figures], name: str) -> dict[str, Drawn]:
    """Method -> a figure with its draws, of the methods that have it with every seed."""
    pairs = {method: drawn(each, name, exam.folder) for method, each in found.items()}
    return {method: each for method, each in pairs.items() if each is not None}


def read_decoders(out: Path, quick: bool) -> Decoders:
    """The figures of all decoders that have a record."""
    exams = {exam: read_exam(out, exam, quick) for exam in (QUICK_EXAMS if quick else EXAMS)}
    return {exam: found for exam, found in exams.items() if found}


def flops_saved(run: Decoders) -> tuple[str, dict[str, str]]:
    """The name of the first decoder, and for each method the FLOPs that it saves on it, in percent with an interval."""
    for exam, found in run.items():
        saved = drawn_figures(exam, {name: each for name, each in found.items() if each.saves}, f"FLOPs {LEVEL:g}")
        return exam.name, {method: plus_minus(interval(each)) for method, each in saved.items()}
    return "", {}
