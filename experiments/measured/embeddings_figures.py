"""Figures of results/embeddings.md from the files that embeddings_runs.py writes, with intervals over seeds and texts.

An interval is a percentile bootstrap: every resample draws the seeds and, within each set, the pairs or the queries
with replacement, the same for both sides of a difference.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from mini_ee.experiments.measured.embeddings_runs import ONE_DEPTHS, TRAININGS, Evaluated
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.progress import tqdm

RESAMPLES, LEVEL = 200, 0.95
ADAPTIVE = ("maps", "starbucks", "2dmse")  # runs with adaptive rules
Curve = dict[str, float]  # label of an exit or a rule -> mean over the sets, of Spearman correlations or of recalls
Curves = Callable[[str, int], Curve]  # of a run and its seed


class Figures:
    """All files of figures."""

    def __init__(self, texts: Evaluated, paths: dict[tuple[str, int], Path]):
        self.texts, self.files = texts, {key: dict(np.load(path)) for key, path in paths.items()}
        self.seeds = {name: sorted(seed for other, seed in paths if other == name) for name, _ in paths}
        self.exits = [int(label.split()[1]) for label in self.labels("plain") if label.startswith("fixed")]
        self.golds = [gold for _, _, gold in texts.sets.values()]
        self.starts = np.cumsum([0, *map(len, self.golds)])
        self.queries = [len(queries) for queries, _ in texts.retrieval.values()]
        retrieved = [part for parts in texts.retrieval.values() for part in parts]
        self.retrieved = np.unique(np.concatenate(retrieved))  # queries and documents

    def labels(self, name: str) -> list[str]:
        """The exits and rules of a run."""
        return [key.removesuffix("/pairs") for key in self.files[name, self.seeds[name][0]] if key.endswith("/pairs")]

    def spearmans(self, name: str, seed: int, label: str, rows: list[np.ndarray] | None = None) -> list[float]:
        """Of each set, on all of its pairs or on resampled ones."""
        cosines, rows = self.files[name, seed][f"{label}/pairs"], rows or [slice(None)] * len(self.golds)
        parts = (cosines[start:end] for start, end in zip(self.starts, self.starts[1:]))
        return [spearman(part[some], gold[some]) for part, gold, some in zip(parts, self.golds, rows)]

    def recalls(self, name: str, seed: int, label: str, rows: list[np.ndarray] | None = None) -> list[float]:
        """Of each retrieval task, on all of its queries or on resampled ones."""
        parts = np.split(self.files[name, seed][f"{label}/recall"], np.cumsum(self.queries)[:-1])
        return [float(part[some].mean()) for part, some in zip(parts, rows or [slice(None)] * len(parts))]

    def layers(self, name: str, seed: int, label: str) -> float:
        """Mean layers of the texts of all pairs."""
        return float(self.files[name, seed][f"{label}/layers"][self.texts.paired].mean())

    def retrieval_layers(self, name: str, seed: int, label: str) -> float:
        """Mean layers of all queries and documents."""
        return float(self.files[name, seed][f"{label}/layers"][self.retrieved].mean())

    # ---- One exit or rule ----
    def summary(self, name: str, label: str) -> dict:
        """Lists over seeds: Spearman of each set, recall of each task, cosine to the full embedding, mean layers."""
        seeds = self.seeds[name]
        spearmans = [self.spearmans(name, seed, label) for seed in seeds]
        recalls = [self.recalls(name, seed, label) for seed in seeds]
        return {
            "spearman": np.mean(spearmans, axis=1).tolist(),
            "sets": dict(zip(self.texts.sets, np.transpose(spearmans).tolist())),
            "recall": dict(zip(self.texts.retrieval, map(list, zip(*recalls)))),
            "cosine": [float(self.files[name, seed][f"{label}/cosine"].mean()) for seed in seeds],
            "layers": [self.layers(name, seed, label) for seed in seeds],
            "retrieval layers": [self.retrieval_layers(name, seed, label) for seed in seeds],
        }

    # ---- Differences ----
    def curve(self, of: Callable, name: str, seed: int, rows: list[np.ndarray] | None) -> Curve:
        """The mean over sets at every exit and rule of a run. of: self.spearmans or self.recalls."""
        return {label: float(np.mean(of(name, seed, label, rows))) for label in self.labels(name)}

    def over_one_depth(self, name: str, depth: int, curves: Curves, seed: int) -> float:
        """2DMSE or Starbucks minus the model trained for that depth alone."""
        label = f"fixed {depth}"
        return curves(name, seed)[label] - curves(f"one-depth-{depth}", seed)[label]

    def over_fixed(self, name: str, label: str, curves: Curves, seed: int, layers: float) -> float:
        """An adaptive rule minus fixed depths of the same run, interpolated at the same mean number of layers."""
        fixed = [curves(name, seed)[f"fixed {layer}"] for layer in self.exits]
        return curves(name, seed)[label] - float(np.interp(layers, self.exits, fixed))

    def differences(self) -> dict[str, list[float]]:
        """Name of a difference -> its mean over seeds, and the two ends of its interval. Differences of the Spearman
        correlation are named RUN/DEPTH or RUN/RULE, those of the recall `recall RUN/RULE`.
        """
        random, whole = np.random.default_rng(0), self._differences(lambda seeds: seeds, None, None)
        drawn = []
        for _ in tqdm(range(RESAMPLES), desc="resamples", delay=2):
            rows = [random.integers(len(gold), size=len(gold)) for gold in self.golds]
            queries = [random.integers(count, size=count) for count in self.queries]
            drawn.append(self._differences(lambda seeds: random.choice(seeds, len(seeds)).tolist(), rows, queries))
        ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        return {
            key: [value, *np.quantile([resampled[key] for resampled in drawn], ends)] for key, value in whole.items()
        }

    def _differences(self, draw: Callable, rows: list | None, queries: list | None) -> dict[str, float]:
        """Each difference on some pairs and queries, the mean over drawn seeds. Each curve is computed once."""
        similarity = cache(lambda name, seed: self.curve(self.spearmans, name, seed, rows))
        recall = cache(lambda name, seed: self.curve(self.recalls, name, seed, queries))
        differences = {}
        for name in ("2dmse", "starbucks"):
            for depth in ONE_DEPTHS:
                seeds = draw(sorted({*self.seeds[name]} & {*self.seeds[f"one-depth-{depth}"]}))
                by_seed = [self.over_one_depth(name, depth, similarity, seed) for seed in seeds]
                differences[f"{name}/{depth}"] = float(np.mean(by_seed))
        for name in ADAPTIVE:
            seeds = draw(self.seeds[name])
            for label in (label for label in self.labels(name) if not label.startswith("fixed")):
                for key, curves, layers in (("", similarity, self.layers), ("recall ", recall, self.retrieval_layers)):
                    by_seed = [self.over_fixed(name, label, curves, s, layers(name, s, label)) for s in seeds]
                    differences[f"{key}{name}/{label}"] = float(np.mean(by_seed))
        return differences


def quality_of(texts: Evaluated, paths: dict[tuple[str, int], Path], rows_trained: int) -> dict:
    """What `--measure quality` adds to the JSON."""
    figures = Figures(texts, paths)
    names = ("plain", *TRAININGS)
    return {
        "exits": figures.exits,
        "trained_on": rows_trained,
        "texts": len(texts.number),
        "seeds": {name: len(figures.seeds[name]) for name in names},
        "pairs": {name: len(gold) for name, (_, _, gold) in texts.sets.items()},
        "retrieval": {name: [len(part) for part in parts] for name, parts in texts.retrieval.items()},
        "quality": {name: {label: figures.summary(name, label) for label in figures.labels(name)} for name in names},
        "differences": figures.differences(),
    }
