"""Figures of the leaderboard's decoders from their records: layers and FLOPs saved, agreement and ln p of each text."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.decoders import EXAMS, QUICK_EXAMS, DecoderExam, trainings
from mini_ee.experiments.leaderboard.ranking import (
    DIGITS,
    Drawn,
    Interval,
    drawn_mean,
    example_counts,
    has_interval,
    interval,
)
from mini_ee.experiments.leaderboard.tables import NOTHING
from mini_ee.experiments.leaderboard.token_rules import LEVEL, LEVELS, WITHIN, outcome
from mini_ee.experiments.pages import plus_minus
from mini_ee.experiments.records import read_records
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
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
                predictions = [record.reported.predictions for record in method_records.values()]
                agreement = np.array([(exits == exits[:, -1:]).mean(axis=0) for exits in predictions])
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


def decoder_figures(run: Decoders, quick: bool) -> list[dict]:
    """For each decoder, what its page shows."""
    return [_figures(exam, by_method, quick) for exam, by_method in run.items()]


def _figures(exam: DecoderExam, by_method: dict[str, Figures], quick: bool) -> dict:
    speeds = fastest(exam, by_method)
    quickest = max(speeds, key=lambda name: speeds[name].mean, default=None)
    every = [name for training in trainings(quick) if training.exam == exam for name in training.methods]
    original = [metadata["original"]["perplexity"] for figures in by_method.values() for metadata in figures.abouts]
    return {
        "name": exam.name,
        "model": exam.weights or f"the built-in decoder, weights/{BUILT_IN_DECODER.name}",
        "layers": next(iter(by_method.values())).exits[-1],
        "texts": exam.texts,
        "source": exam.text.partition("/")[0] if exam.text else "generated by the decoder itself",
        "recorded_texts": exam.recorded_texts,
        "new_tokens": exam.new_tokens,
        "head_layers": float(np.mean([figures.head_layers for figures in by_method.values()])),
        "perplexity": float(np.mean(original)),
        "methods": len(speeds),
        "faster": [name for name, speed in speeds.items() if has_interval(speed) and interval(speed).low > 1],
        "quickest": _quickest(quickest, speeds[quickest], by_method[quickest]) if quickest else None,
        "rows": [_row(exam, name, by_method[name]) for name in order(exam, by_method)],
        "lossless": lossless_rows(by_method),
        "missing": [name for name in every if name not in by_method],
    }


def fastest(exam: DecoderExam, by_method: dict[str, Figures]) -> dict[str, Drawn]:
    """Method -> its speed-up with the better of the two fills, of the methods that have a rule, the fastest first."""
    both = [drawn_figures(exam, by_method, f"speed-up {fill}") for fill in MISSING_KV]
    speeds = {name: max((drawn_speeds[name] for drawn_speeds in both), key=lambda one: one.mean) for name in both[0]}
    return dict(sorted(speeds.items(), key=lambda item: -item[1].mean))


def order(exam: DecoderExam, by_method: dict[str, Figures]) -> list[str]:
    """The methods, the fastest first; those without a rule last."""
    speeds = fastest(exam, by_method)
    return [*speeds, *(name for name in by_method if name not in speeds)]


def _quickest(name: str, speed: Drawn, figures: Figures) -> dict:
    """A method, its speed-up, and its perplexity without and with the rule."""
    before, after = (math.exp(-figures.values[f"ln p {rule}"].mean()) for rule in ("full", f"{LEVEL:g}"))
    return {"name": name, "speedup": interval(speed), "before": before, "after": after}


def _row(exam: DecoderExam, name: str, figures: Figures) -> list[str]:
    def at(figure: str) -> Interval | None:
        return None if (one := drawn(figures, figure, exam.folder)) is None else interval(one)

    speeds = [at(f"speed-up {fill}") for fill in MISSING_KV]
    shares = [at(f"{kind} {LEVEL:g}") if figures.saves else None for kind in ("saved", "FLOPs", "agreement")]
    rule = at(f"ln p {LEVEL:g}") if figures.saves else None
    return [
        name,
        *(NOTHING if speed is None else plus_minus(speed, 2, 1) for speed in speeds),
        *(NOTHING if share is None else plus_minus(share) for share in shares),
        *(NOTHING if log_p is None else f"{math.exp(-log_p.mean):.2f}" for log_p in (at("ln p full"), rule)),
        str(len(figures.seeds)),
    ]


def lossless_rows(by_method: dict[str, Figures]) -> list[list[str]]:
    """A row for each training whose exits can draft, the fastest first: name, layers that draft, shares, speed-up."""
    rows, seen = [], []
    for name, figures in by_method.items():
        speed = figures.lossless("speedup")
        if figures.abouts in seen or speed is None:
            continue
        seen.append(figures.abouts)
        layers = sorted({metadata["lossless"]["layer"] or 0 for metadata in figures.abouts})
        shares = [f"{100 * (figures.lossless(figure) or 0.0):.1f}" for figure in ("drafted", "equal_texts")]
        rows.append((speed, [name, ", ".join(str(layer or "each draft its own") for layer in layers), *shares]))
    return [[*row, f"{speed:.2f}"] for speed, row in sorted(rows, key=lambda row: -row[0])]


def decoder_rows(run: Decoders) -> list[dict[str, str]]:
    """The rows of the CSV file: every figure of each method on each decoder, the mean and half of its interval."""
    rows, levels = [], [f"{kind} {level:g}" for level in LEVELS for kind in ("saved", "FLOPs", "agreement", "ln p")]
    for exam, by_method in run.items():
        for name in order(exam, by_method):
            figures = by_method[name]
            row = {"decoder": exam.name, "method": name, "seeds": str(len(figures.seeds))}
            row |= {"trained as": figures.abouts[0]["settings"]["method"]}
            row |= {rate: f"{value:g}" for rate, value in figures.abouts[0]["rates"].items()}
            for figure in (*levels, "ln p full", f"ln p {WITHIN}", *(f"speed-up {fill}" for fill in MISSING_KV)):
                if one := drawn(figures, figure, exam.folder):
                    at = interval(one)
                    row |= {figure: f"{at.mean:.4f}", f"{figure} ±": f"{at.high - at.mean:.4f}".replace("nan", "")}
            for layer, share in zip(figures.exits[:-1], figures.agreement.mean(axis=0)):
                row[f"agreement after layer {layer}"] = f"{share:.4f}"
            for fill in MISSING_KV:
                for figure in ("agreement", "rouge_l"):
                    if (value := figures.decoding(fill, figure)) is not None:
                        row[f"{figure} while writing, {fill}"] = f"{value:.4f}"
            for figure in ("drafted", "equal_texts", "speedup"):
                if (value := figures.lossless(figure)) is not None:
                    row[f"lossless {figure}"] = f"{value:.4f}"
            original = figures.mean(lambda metadata: metadata["original"]["agreement"])
            row["full model agrees with the original"] = f"{original:.4f}"
            on_the_cpu = [
                metadata["cpu_seconds"]["training"] for metadata in figures.abouts if "gpu" not in metadata["how"]
            ]
            row["training seconds"] = f"{np.mean(on_the_cpu):.0f}" if on_the_cpu else ""
            made = figures.abouts[0]["how"]
            row |= {key: made[key] for key in ("processor", "torch", "commit")} | {"gpu": made.get("gpu", "")}
            rows.append(row | {f"sha256 of {text}": value for text, value in figures.abouts[0]["data"].items()})
    return rows
