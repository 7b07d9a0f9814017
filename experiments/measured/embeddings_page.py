"""results/embeddings.md: embeddings of MiniLM at each depth, with and without a map, and with adaptive depth.

One run of embedding-maps is trained on texts of SICK-R's and SST-2's train files. STS 2012 to 2016 and SICK-R's test
file are only evaluated. The hidden states of all texts are computed once; all figures but the times follow from them.
"""

import csv
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mini_ee.data.files import read_text
from mini_ee.data.metrics import spearman
from mini_ee.data.tasks import load_task, subset
from mini_ee.early_exit import early_exit
from mini_ee.exits.embedding_exits import EmbeddingData, full_cosines
from mini_ee.experiments.markdown import made_by_measuring, markdown_rows, wrapped
from mini_ee.experiments.trainings import Sources
from mini_ee.export.runtime import Runtime
from mini_ee.export.writer import export
from mini_ee.methods.embedding_maps_rule import Similarity
from mini_ee.recording import Record, Recorded
from mini_ee.rules import FixedExit, NeverExit
from mini_ee.training.run_folder import Run, load_run
from mini_ee.training.train_run import train

MODEL, TEXTS, WORDS = "all-MiniLM-L6-v2", 5000, 5  # training texts, with at least so many words
YEARS, NEIGHBOURS, QUERIES, DOCUMENTS, MOST_PAIRS = range(2012, 2017), 10, 300, 1000, 1500
LEAST_COSINES, TIMED = (0.7, 0.8, 0.85, 0.9, 0.95), 200


class Pairs(NamedTuple):
    """Pairs of texts with their gold similarity."""

    first: list[str]
    second: list[str]
    gold: np.ndarray


def read_pairs(path: Path) -> Pairs:
    """The first MOST_PAIRS of a file with the columns sentence1, sentence2 and score."""
    rows = list(csv.DictReader(read_text(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = rows[:MOST_PAIRS]
    gold = np.array([float(row["score"]) for row in rows])
    return Pairs([row["sentence1"] for row in rows], [row["sentence2"] for row in rows], gold)


def trained(sources: Sources, work: Path) -> Run:
    """The run, trained if the work folder has none."""
    if not (work / "maps").is_dir():
        pairs = read_pairs(sources.find("data", "SICK-R") / "train.tsv")
        reviews = (text for (text,) in load_task(sources.find("data", "SST-2")).split("train").texts)
        texts = [text for text in (*pairs.first, *pairs.second, *reviews) if len(text.split()) >= WORDS]
        (work / "texts.txt").write_text("\n".join(list(dict.fromkeys(texts))[:TEXTS]), encoding="utf-8")
        train("embedding-maps", sources.find("weights", MODEL), work / "texts.txt", work / "maps")
    return load_run(work / "maps")


# ---- Measuring ----
class Embedded:
    """Embeddings of texts at every exit, with maps and without: each text is computed once."""

    def __init__(self, run: Run, texts: list[str]):
        self.number = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        encoded = run.encode([(text,) for text in self.number])
        states = EmbeddingData(encoded, np.zeros(len(encoded)), None).states(run.model)
        self.maps = torch.stack(states.embeddings(run.model), dim=1).numpy()  # (N, K, d)
        self.plain = states.states.numpy()

    def rows(self, texts: list[str]) -> np.ndarray:
        return np.array([self.number[text] for text in texts])


def scaled(embeddings: np.ndarray) -> np.ndarray:
    """To length 1 along the last axis."""
    return embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)


def similarity_score(embeddings: np.ndarray, first: np.ndarray, second: np.ndarray, gold: np.ndarray) -> float:
    """Spearman correlation of cosines and gold scores. embeddings (N, d); first, second: rows of each pair."""
    unit = scaled(embeddings)
    return float(spearman((unit[first] * unit[second]).sum(axis=1), gold))


def nearest(embeddings: np.ndarray, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The NEIGHBOURS nearest documents of each query, by cosine: (Q, NEIGHBOURS)."""
    unit = scaled(embeddings)
    return np.argsort(-unit[queries] @ unit[documents].T, axis=1, kind="stable")[:, :NEIGHBOURS]


def recalls(embeddings: np.ndarray, queries: np.ndarray, documents: np.ndarray) -> list[float]:
    """For each exit, the share of the full model's nearest documents that are found at this exit. (N, K, d) -> (K,)."""
    each = [nearest(embeddings[:, k], queries, documents).tolist() for k in range(embeddings.shape[1])]
    return [float(np.mean([len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(found, each[-1])])) for found in each]


def measure_quality(sources: Sources, work: Path) -> dict:
    """Spearman, recall and cosines at each depth, and Spearman with adaptive depth."""
    run = trained(sources, work)
    sets = {f"STS {year}": read_pairs(sources.find("data", "STS") / f"{year}.tsv") for year in YEARS}
    sets["SICK-R"] = read_pairs(sources.find("data", "SICK-R") / "test.tsv")
    retrieval = {}
    for name in ("TREC", "MR", "SST-2"):
        task = load_task(sources.find("data", name))
        parts = (subset(task.split(task.default_split), QUERIES, 0), subset(task.split("train"), DOCUMENTS, 0))
        retrieval[name] = [[text for (text,) in part.texts] for part in parts]
    texts = [text for pairs in sets.values() for part in pairs[:2] for text in part]
    found = Embedded(run, texts + [text for parts in retrieval.values() for part in parts for text in part])
    rows = {name: (found.rows(pairs.first), found.rows(pairs.second), pairs.gold) for name, pairs in sets.items()}
    kinds, exits = {"plain": found.plain, "maps": found.maps}, range(len(run.exits))
    quality = {
        name: {"pairs": len(each[2])}
        | {kind: [similarity_score(part[:, k], *each) for k in exits] for kind, part in kinds.items()}
        for name, each in rows.items()
    }
    recall = {}
    for name, parts in retrieval.items():
        queries, documents = map(found.rows, parts)
        recall[name] = {"queries": len(queries), "documents": len(documents)}
        recall[name] |= {kind: recalls(part, queries, documents) for kind, part in kinds.items()}
    passes = np.diff((0, *run.exits)).tolist()
    segments = Recorded(run.exits, found.maps, np.zeros((*found.maps.shape[:2], 2)), passes)
    recorded, adaptive = Record(segments, found.maps, 1.0), []
    for least in LEAST_COSINES:
        result = recorded.replay(Similarity(least))
        scores = [similarity_score(result.logits, *each) for each in rows.values()]
        used = np.unique(np.concatenate([part for each in rows.values() for part in each[:2]]))
        layers = float(result.layers_run[used].mean())
        adaptive.append({"least_cosine": least, "mean_layers": layers, "spearman": float(np.mean(scores))})
    cosines = full_cosines(found.maps).mean(axis=0).tolist()
    about = {"exits": list(run.exits), "trained_on": run.metrics["rows"], "cosines": cosines}
    return about | {"quality": quality, "recall": recall, "adaptive": adaptive}


def measure_times(sources: Sources, work: Path) -> dict:
    """Median milliseconds of one text at each depth, in ONNX Runtime with one thread."""
    run, folder = trained(sources, work), work / "exported"
    if not folder.is_dir():
        export(run, folder)
    served = Runtime(folder, threads=1)
    texts = read_pairs(sources.find("data", "SICK-R") / "test.tsv").first[:TIMED]
    inputs = [served.encode([text]).batch(slice(None)) for text in texts]
    rules = [*map(FixedExit, range(len(run.exits) - 1)), NeverExit()]
    seconds = np.empty((len(inputs), len(rules)))
    for at, each in enumerate(inputs):
        for k, rule in enumerate(rules):  # the depths take turns
            begin = time.perf_counter()
            early_exit(served.segments(), rule, each)
            seconds[at, k] = time.perf_counter() - begin
    return {"times": (np.median(seconds, axis=0) * 1e3).tolist()}


PARTS = {"quality": measure_quality, "times": measure_times}


# ---- The page ----
EQUAL = 0.002  # scores that differ by less count as equal

PAGE_TEXT = """# Embeddings at each depth

`mini-ee train embedding-maps` freezes a sentence encoder. A linear map after each layer learns the encoder's own
embedding from texts without labels, by 1 - cosine.

{made_by} Model: all-MiniLM-L6-v2, {layers} layers, one seed. The maps learned from {trained_on:,} texts of the train
files of SICK-R and SST-2; texts of SST-2 may be among the documents below. No set below has chosen anything.

## Similarity

Spearman correlation of cosines and gold scores, with both texts at the same depth. *Without map* is the pooled hidden
state of that layer. Of each set the first {most_pairs:,} pairs count.

| set | pairs | | {depths} |
|---|---|---|{rule}
{quality}

## Neighbours

Recall of the full model's ten nearest documents, with queries and documents at the same depth. Queries are {queries}
examples of dev or test, documents {documents:,} of train.

| set | | {depths} |
|---|---|{rule}
{recall}

## Cosine and time

Mean cosine to the full embedding over all texts of this page, and the median time of one text of SICK-R in ONNX Runtime
(batch size 1, one thread, a machine that other programs used as well).

| | {depths} |
|---|{rule}
{times}

## Adaptive depth

The rule `similarity` stops if the cosine of the embeddings of two exits is large enough. The score is the mean Spearman
correlation over the six sets. *Fixed* is the mean score of the two nearest fixed depths, interpolated at the same mean
number of layers.

| least cosine | mean layers | Spearman | fixed |
|---|---|---|---|
{adaptive}

{verdict}
"""


def page(figures: dict) -> str:
    """results/embeddings.md."""
    exits = figures["exits"]
    names = {"plain": "without map", "maps": "with map"}
    quality, recall = [], []
    for name, each in figures["quality"].items():
        quality += [[name, f"{each['pairs']:,}", names[kind], *(f"{v:.3f}" for v in each[kind])] for kind in names]
    for name, each in figures["recall"].items():
        recall += [[name, names[kind], *(f"{v:.3f}" for v in each[kind])] for kind in names]
    times = [["cosine", *(f"{v:.3f}" for v in figures["cosines"])], ["ms", *(f"{v:.2f}" for v in figures["times"])]]
    fixed = np.mean([each["maps"] for each in figures["quality"].values()], axis=0)
    adaptive, better = [], 0
    for point in figures["adaptive"]:
        rival = float(np.interp(point["mean_layers"], exits, fixed))
        better += point["spearman"] > rival + EQUAL
        scores = f"{point['least_cosine']:.2f}", f"{point['mean_layers']:.2f}", f"{point['spearman']:.3f}"
        adaptive.append([*scores, f"{rival:.3f}"])
    verdict = (
        f"Adaptive depth scores higher than a fixed depth with as many layers, by more than {EQUAL}, at {better} of "
        f"{len(adaptive)} points. "
        f"A map after layer {exits[0]} keeps {fixed[0] / fixed[-1]:.1%} of the full model's mean Spearman correlation, "
        f"in {figures['times'][0] / figures['times'][-1]:.0%} of its time."
    )
    first = next(iter(figures["recall"].values()))
    text = PAGE_TEXT.format(
        made_by=made_by_measuring("embeddings"),
        layers=exits[-1],
        most_pairs=MOST_PAIRS,
        trained_on=figures["trained_on"],
        queries=first["queries"],
        documents=first["documents"],
        depths=" | ".join(f"layer {layer}" for layer in exits),
        rule="---|" * len(exits),
        quality=markdown_rows(quality),
        recall=markdown_rows(recall),
        times=markdown_rows(times),
        adaptive=markdown_rows(adaptive),
        verdict=verdict,
    )
    return wrapped(text)
