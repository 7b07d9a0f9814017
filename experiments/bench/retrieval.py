"""The benchmark retrieval: the cost of RAEE compared with the model, on datastores of synthetic embeddings."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mini_ee.experiments.bench.common import (
    BERT_BASE,
    full_model,
    inputs_of,
    medians,
    minilm_of,
    random_encoder,
    row_of,
)
from mini_ee.lab.backbones.bert import Bert
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.methods.raee import Retrieval
from mini_ee.lab.methods.raee_datastore import Datastore, exact_search, unit_length
from mini_ee.lab.methods.raee_encoders import OwnStates
from mini_ee.lab.rules import Fixed, Planned

SST2_ROWS, LARGE = 67_349, 1_000_000  # as many rows as SST-2's train split; rows of --large
LATENT, CLUSTERS = 32, 256  # of the synthetic embeddings: dimensions in which they vary, clusters
QUERIES = 200  # for recall


def bench_retrieval(model: Path | None, seed: int, large: bool = False) -> Iterator[dict]:
    """Cases: `67k t32 plan|encoder`, `67k recall`, `67k build` and smaller ones, `minilm b256 t32 groups`; large: also
    `1m build`.

    The datastores contain synthetic embeddings in clusters, as many as SST-2 has training rows. The encoder may cost as
    much as the model. The ratio of recall is the share of the 12 nearest neighbours that is missed. The ratio of build
    is the seconds per row divided by those at 1k; it must grow more slowly than the square root of the rows.
    """
    bert, minilm = random_encoder(BERT_BASE, seed), minilm_of(model, seed)
    yield from _groups(minilm, seed)
    inputs = inputs_of(min(BERT_BASE, minilm.config, key=lambda config: config.vocab_size), 1, 32, seed)
    for name, embed, bar in (
        ("encoder", OwnStates(minilm, minilm.config.num_hidden_layers), 1.0),
        ("plan", OwnStates(bert, 0), 0.03),
    ):
        vectors = _clustered(SST2_ROWS + QUERIES, embed.backbone.config.hidden_size, seed)
        store, queries = _filled(vectors[:SST2_ROWS], seed), vectors[SST2_ROWS:]
        rule, turn = Retrieval().with_datastore(store, embed), itertools.cycle(queries)

        def plan(rule=rule, turn=turn):  # the model is random, so the queries are drawn like the rows instead
            rule.embed(inputs)
            return rule.chosen(rule.datastore.search(next(turn)[None], rule.k))

        ours, other = medians([plan, full_model(bert, inputs)], f"retrieval {name}")
        yield row_of(f"67k t32 {name}", ours, other, bar)
    yield _recall(store, queries)
    del store, vectors, queries, rule, turn, plan  # free the rows before the next datastores are built
    yield from _building(minilm.config.hidden_size, LARGE if large else SST2_ROWS, seed)


def _groups(backbone: Bert, seed: int) -> Iterator[dict]:
    exits = tuple(range(1, backbone.config.num_hidden_layers + 1))
    segments, inputs = RowExits(backbone, exits, num_labels=2).segments(), inputs_of(backbone.config, 256, 32, seed)
    plan = np.random.default_rng(seed).integers(0, len(exits), len(inputs))
    rows = [inputs.take([row]) for row in range(len(inputs))]

    def row_by_row():
        for row, exit in zip(rows, plan):
            early_exit(segments, Fixed(int(exit)), row)

    ours, other = medians([lambda: early_exit(segments, Planned(plan), inputs), row_by_row], "retrieval groups")
    yield row_of("minilm b256 t32 groups", ours, other, bar=1 / 1.5)


def _clustered(count: int, width: int, seed: int) -> np.ndarray:
    """(count, width) float32: points around CLUSTERS centres in a subspace of LATENT dimensions, like sentences."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(CLUSTERS, LATENT))
    latent = centres[random.integers(0, CLUSTERS, count)] + 0.5 * random.normal(size=(count, LATENT))
    return latent.astype(np.float32) @ random.normal(size=(LATENT, width)).astype(np.float32)


def _filled(vectors: np.ndarray, seed: int) -> Datastore:
    """A datastore of 12 exits with these vectors and random values."""
    random, count = np.random.default_rng(seed), len(vectors)
    values, labels = random.random((count, 12), np.float32), random.integers(0, 2, count)
    return Datastore("synthetic", tuple(range(1, 13)), unit_length(vectors), values, labels, [("",)] * count)


def _recall(store: Datastore, queries: np.ndarray) -> dict:
    rows, k = store.embeddings, Retrieval.k
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    begin = time.perf_counter()
    nearest = store.search(unit, k).rows
    middle = time.perf_counter()
    exact = exact_search(rows, unit, k).rows
    seconds, against = middle - begin, time.perf_counter() - middle
    hits = sum(len(set(ours) & set(theirs)) for ours, theirs in zip(nearest.tolist(), exact.tolist()))
    missed = 1 - hits / exact.size
    row = row_of(f"67k recall@{k}", seconds / len(unit), against / len(unit), bar=0.01)
    return row | {"ratio": missed, "holds": missed <= 0.01, "recall": 1 - missed}


def _building(width: int, most: int, seed: int) -> Iterator[dict]:
    vectors, first = _clustered(most, width, seed), None
    for name, count in (("1k", 1_000), ("10k", 10_000), ("67k", SST2_ROWS), ("1m", LARGE)):
        if count > most:
            return
        begin = time.perf_counter()
        store = _filled(vectors[:count], seed)
        row_seconds = (time.perf_counter() - begin) / count
        first = first or row_seconds
        with tempfile.TemporaryDirectory() as folder:
            store.save(Path(folder) / "store")
            size = sum(path.stat().st_size for path in Path(folder).glob("store/*"))
        row = row_of(f"{name} build", row_seconds, first, bar=(count / 1_000) ** 0.5)
        yield row | {"rows": count, "build_seconds": row_seconds * count, "bytes": size, "bytes_a_row": size / count}
