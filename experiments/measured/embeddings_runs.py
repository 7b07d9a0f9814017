"""Trains and evaluates the methods of results/embeddings.md. Each run is trained and evaluated once per seed.

The texts of a training are drawn from SICK-R's and SST-2's train files; no label is read. The embeddings of a run are
computed once for all texts of the page. WORK/NAME-SEED.npz then contains for every exit and every adaptive rule

    pairs        (P,) cosine of the two texts of each pair of STS 2012 to 2016 and SICK-R
    recall       (Q,) share of the original encoder's ten nearest documents that each query finds
    layers       (N,) layers that each text runs
    cosine       (N,) cosine of each embedding and that of the original encoder
"""

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mini_ee.experiments.trainings import Sources
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import load_task, subset
from mini_ee.lab.data.tokenizer import batches
from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.methods.embedding_maps_rule import Similarity
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.rules import Fixed, Policy, Rule
from mini_ee.lab.training.run_folder import Run, load_run
from mini_ee.lab.training.train_run import train

MODEL, SEEDS = "all-MiniLM-L6-v2", (0, 1, 2)
TEXTS, WORDS = 1600, 5  # training texts, with at least so many words
YEARS, NEIGHBOURS, QUERIES, DOCUMENTS = range(2012, 2017), 10, 300, 1000
RETRIEVAL = ("TREC", "MR", "SST-2")
LEAST_COSINES, CUTS = (0.7, 0.8, 0.85, 0.9, 0.95), (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
ONE_DEPTHS = (1, 3)
ENCODERS = {"epochs": 2, "lr": 1e-3}
"""Settings of all trainings of an encoder."""
TRAININGS = {
    "maps": ("cosine-predictor", {}),
    **{f"one-depth-{depth}": ("one-depth", ENCODERS | {"exits": (depth, 6)}) for depth in ONE_DEPTHS},
    "starbucks": ("starbucks", ENCODERS),
    "2dmse": ("2dmse", ENCODERS),
}
"""name -> (method, options). The run `maps` also has predictors, for its adaptive depth."""
BATCH = 64


class Pairs(NamedTuple):
    """Pairs of texts with their gold similarity."""

    first: list[str]
    second: list[str]
    gold: np.ndarray


def read_pairs(path: Path) -> Pairs:
    """A file with the columns sentence1, sentence2 and score."""
    rows = list(csv.DictReader(read_text(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    gold = np.array([float(row["score"]) for row in rows])
    return Pairs([row["sentence1"] for row in rows], [row["sentence2"] for row in rows], gold)


class Evaluated:
    """All texts of the page, each once: `sets` name -> rows of both texts and gold scores; `retrieval` -> rows."""

    def __init__(self, sources: Sources):
        files = {f"STS {year}": sources.find("data", "STS") / f"{year}.tsv" for year in YEARS}
        files["SICK-R"] = sources.find("data", "SICK-R") / "test.tsv"
        pairs = {name: read_pairs(path) for name, path in files.items()}
        retrieval = {}
        for name in RETRIEVAL:
            task = load_task(sources.find("data", name))
            parts = (subset(task.split(task.default_split), QUERIES, 0), subset(task.split("train"), DOCUMENTS, 0))
            retrieval[name] = [[text for (text,) in part.texts] for part in parts]
        texts = [text for pair in pairs.values() for part in pair[:2] for text in part]
        texts += [text for parts in retrieval.values() for part in parts for text in part]
        self.number = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        self.sets = {name: (self.rows(pair.first), self.rows(pair.second), pair.gold) for name, pair in pairs.items()}
        self.retrieval = {name: [self.rows(part) for part in parts] for name, parts in retrieval.items()}
        self.paired = np.unique(np.concatenate([part for columns in self.sets.values() for part in columns[:2]]))

    def rows(self, texts: list[str]) -> np.ndarray:
        return np.array([self.number[text] for text in texts])


# ---- Training ----
def training_texts(sources: Sources, work: Path) -> Path:
    """The file of the training texts, drawn from two train files."""
    path = work / "texts.txt"
    if not path.exists():
        pairs = read_pairs(sources.find("data", "SICK-R") / "train.tsv")
        reviews = [text for (text,) in load_task(sources.find("data", "SST-2")).split("train").texts]
        random, drawn = np.random.default_rng(0), []
        for source in ([*pairs.first, *pairs.second], reviews):
            texts = [text for text in dict.fromkeys(source) if len(text.split()) >= WORDS]
            drawn += [texts[at] for at in random.permutation(len(texts))[: TEXTS // 2]]
        path.write_text("\n".join(drawn), encoding="utf-8")
    return path


def trained(sources: Sources, work: Path, name: str, seed: int) -> Run:
    """The run of a training, trained if the work folder has none."""
    method, options = TRAININGS[name]
    out = work / f"{name}-{seed}"
    if not out.is_dir():
        shutil.rmtree(work / f"{out.name}.training", ignore_errors=True)
        texts = training_texts(sources, work)
        train(method, sources.find("weights", MODEL), texts, out, seed=seed, **options)
    return load_run(out)


# ---- Evaluating ----
@torch.inference_mode()
def pooled_states(model: EmbeddingExits, encoded, exits: int) -> np.ndarray:
    """(N, exits, D): the pooled state after the first `exits` exits. Layers above are not run."""
    states = None
    for rows in tqdm(list(batches(encoded, BATCH)), desc="states", delay=2):
        inputs = encoded.batch(rows)
        arrays = (torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))
        for k, state in zip(range(exits), model.each_state(*arrays)):
            if states is None:
                states = np.empty((len(encoded), exits, state.shape[1]), np.float32)
            states[rows, k] = state.numpy()
    return states


def scaled(embeddings: np.ndarray) -> np.ndarray:
    """To length 1 along the last axis."""
    return embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)


def nearest(unit: np.ndarray, queries: np.ndarray, documents: np.ndarray) -> list[set[int]]:
    """The NEIGHBOURS nearest documents of each query, by cosine."""
    order = np.argsort(-unit[queries] @ unit[documents].T, axis=1, kind="stable")
    return [set(neighbours) for neighbours in order[:, :NEIGHBOURS].tolist()]


def figures_of(texts: Evaluated, unit: np.ndarray, layers: np.ndarray, full: np.ndarray) -> dict[str, np.ndarray]:
    """The four arrays of one exit or rule. unit, full: (N, d), of length 1."""
    pairs = [(unit[first] * unit[second]).sum(axis=1) for first, second, _ in texts.sets.values()]
    recall = []
    for queries, documents in texts.retrieval.values():
        neighbours, expected = (nearest(embeddings, queries, documents) for embeddings in (unit, full))
        recall += [len(a & b) / NEIGHBOURS for a, b in zip(neighbours, expected)]
    cosine = (unit * full).sum(axis=1)
    return {"pairs": np.concatenate(pairs), "recall": np.array(recall), "layers": layers, "cosine": cosine}


def columns_of(name: str, run: Run, embeddings: np.ndarray, exit_logits: np.ndarray | None) -> Iterator[tuple]:
    """(label, embeddings (N, d), layers (N,)) of every exit, and of every adaptive rule."""
    count, exits = embeddings.shape[1], run.exits
    passes = np.diff((0, *exits)).tolist()
    rules: dict[str, Rule] = {f"fixed {layer}": Fixed(k) for k, layer in enumerate(exits[:count])}
    if count == len(exits):
        rules |= {f"similarity {least}": Similarity(least) for least in LEAST_COSINES}
    if exit_logits is not None:
        rules |= {f"predictor {cut}": Policy(cut) for cut in CUTS}
    measures = None if exit_logits is None else {"exit_logit": exit_logits}
    flops = np.zeros((*embeddings.shape[:2], 2))
    recorded = Record(Recorded(exits[:count], embeddings, flops, passes[:count], measures), embeddings, 1.0)
    for label, rule in rules.items():
        result = recorded.replay(rule)
        yield label, scaled(result.logits), result.layers_run


def original(sources: Sources, work: Path, texts: Evaluated) -> np.ndarray:
    """(N, K, D): the pooled states of the original encoder."""
    path = work / "original.npy"
    if not path.exists():
        run = trained(sources, work, "maps", SEEDS[0])
        np.save(path, pooled_states(run.model, run.encode([(text,) for text in texts.number]), len(run.exits)))
    return np.load(path)


def evaluated(sources: Sources, work: Path, texts: Evaluated, name: str, seed: int) -> Path:
    """The file of figures of a run, made if the work folder has none. `name` may be `plain`, exits without maps."""
    path = work / f"{name}-{seed}.npz"
    if path.exists():
        return path
    states = original(sources, work, texts)
    full, exit_logits = scaled(states[:, -1]), None
    run = trained(sources, work, "maps" if name == "plain" else name, seed)
    if name == "plain":
        embeddings = states
    elif name == "maps":
        with torch.inference_mode():
            parts = [torch.from_numpy(states[:, k]) for k in range(len(run.exits))]
            embeddings = np.stack([run.model.classify(k, part).numpy() for k, part in enumerate(parts)], axis=1)
            exit_logits = run.model.exit_logits(parts).numpy()
    else:
        count = 1 if name.startswith("one-depth") else len(run.exits)
        embeddings = pooled_states(run.model, run.encode([(text,) for text in texts.number]), count)
    arrays = {}
    for label, *column in columns_of(name, run, embeddings, exit_logits):
        arrays |= {f"{label}/{key}": values for key, values in figures_of(texts, *column, full).items()}
    np.savez(path.with_suffix(".part.npz"), **arrays)
    path.with_suffix(".part.npz").rename(path)
    return path


def every_run(sources: Sources, work: Path) -> dict[tuple[str, int], Path]:
    """(name, seed) -> file of figures, of all trainings. A call that was interrupted goes on."""
    texts = Evaluated(sources)
    paths = {("plain", SEEDS[0]): evaluated(sources, work, texts, "plain", SEEDS[0])}
    for seed in SEEDS:
        paths |= {(name, seed): evaluated(sources, work, texts, name, seed) for name in TRAININGS}
    return paths
