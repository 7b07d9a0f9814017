"""results/shards.md: a datastore in 1, 2, 4 and 8 shards on SST-2, extrapolated to a billion rows.

The rows are SST-2's train split, the queries its dev split, embedded by all-MiniLM-L6-v2 (the embeddings stay in the
work folder). Times are processor times of the shards' threads, so other programs have no influence.
"""

import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from mini_ee.experiments.trainings import Sources
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer, batches
from mini_ee.lab.methods.raee_datastore import ROWS, Datastore, unit_length
from mini_ee.lab.methods.raee_encoders import SentenceEncoder

SHARDS, K, ROUNDS, STORE_EXITS = (1, 2, 4, 8), 12, 5, (1, 2, 3, 4, 5, 6)
BILLION, INDEX_BYTES, CORES = 10**9, 192e9, 64  # rows; of a machine with 256 GB: bytes for the index, cores


class Timed(Datastore):
    """A datastore that adds up the processor seconds of each shard's thread."""

    def __post_init__(self):
        self.seconds = np.zeros(self.shards)
        super().__post_init__()

    def _map_shards(self, work):
        def timed(shard):
            begin = time.thread_time()
            result = work(shard)
            self.seconds[shard] += time.thread_time() - begin
            return result

        return super()._map_shards(timed)


# ---- Measuring ----
def embedded(sources: Sources, work: Path) -> tuple[np.ndarray, np.ndarray, list]:
    """The embeddings of train and dev, and the texts of train."""
    task, path = load_task(sources.find("data", "SST-2")), work / "sst2.npz"
    if not path.exists():
        folder = sources.find("weights", "all-MiniLM-L6-v2")
        encoder, tokenizer, embeddings = SentenceEncoder(folder), Tokenizer.from_folder(folder, 128), {}
        for split in ("train", "dev"):
            encoded = tokenizer.encode(task.split(split).texts)
            embeddings[split] = np.empty((len(encoded), 384), np.float32)
            for rows in tqdm(list(batches(encoded, 64)), desc=f"embedding {split}"):
                embeddings[split][rows] = encoder(encoded.batch(rows))
        np.savez(path, **embeddings)
    embeddings = np.load(path)
    return embeddings["train"], embeddings["dev"], list(task.split("train").texts)


def filled(embeddings: np.ndarray, texts: list, shards: int) -> Timed:
    """A datastore with these embeddings, and random values and labels."""
    random, count = np.random.default_rng(0), len(embeddings)
    values, labels = random.random((count, len(STORE_EXITS)), np.float32), random.integers(0, 2, count)
    return Timed("all-MiniLM-L6-v2", STORE_EXITS, unit_length(embeddings), values, labels, texts, shards)


def brute_force(embeddings: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The exact K nearest rows of each query, (B, K), from the products of all unit vectors."""
    rows, queries = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in (embeddings, queries))
    return np.concatenate([np.argsort(-part @ rows.T, axis=1)[:, :K] for part in np.array_split(queries, 32)])


def measure_cases(sources: Sources, work: Path) -> dict:
    """Recall, times and sizes for each number of shards."""
    embeddings, queries, texts = embedded(sources, work)
    exact, stores, cases = brute_force(embeddings, queries), {}, {}
    for shards in tqdm(SHARDS, desc="building"):
        store = filled(embeddings, texts, shards)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            store.save(Path(folder) / "store")
            sizes = {path.name: path.stat().st_size for path in Path(folder).glob("store/*")}
        rows = store.search(queries, K).rows
        hits = sum(len(set(ours) & set(theirs)) for ours, theirs in zip(rows.tolist(), exact.tolist()))
        stores[shards], built = store, store.seconds.copy()
        cases[shards] = {"shards": shards, "recall": hits / exact.size}
        cases[shards] |= {"build_core": built.sum(), "build_longest": built.max()}
        cases[shards] |= {"index_bytes": sum(size for name, size in sizes.items() if name.endswith(".hnsw"))}
        cases[shards] |= {"entries_bytes": sizes[ROWS] - store.embeddings.nbytes}
    times = {shards: [] for shards in SHARDS}
    for _ in tqdm(range(ROUNDS), desc="searching"):  # the stores take turns
        for shards, store in stores.items():
            store.seconds[:] = 0
            for query in queries:
                store.search(query[None], K)
            seconds = store.seconds / len(queries)
            times[shards].append([seconds.sum(), seconds.max()])
    for shards, shard_times in times.items():
        cases[shards] |= dict(zip(("query_core", "query_longest"), np.median(shard_times, axis=0).tolist()))
    setting = {"rows": len(embeddings), "queries": len(queries), "width": embeddings.shape[1], "k": K}
    return setting | {"cores": os.cpu_count(), "exits": len(STORE_EXITS), "cases": list(cases.values())}


PARTS = {"cases": measure_cases}


# ---- The figures of the page ----
def growth(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """(a, b) of seconds = a + b ln(rows), by least squares."""
    b, a = np.polyfit(np.log(sizes), seconds, 1)
    return float(a), float(b)


def billion(figures: dict) -> dict:
    """The measurements extrapolated to a billion rows: one shard per machine, and one per core."""
    rows, cases = figures["rows"], figures["cases"]
    sizes = [rows / case["shards"] for case in cases]
    build = growth(sizes, [case["build_core"] / rows for case in cases])
    query = growth(sizes, [case["query_core"] / case["shards"] for case in cases])
    row = cases[0]["index_bytes"] / rows
    machines = math.ceil(BILLION * row / INDEX_BYTES)
    extrapolated = {"index_row": row, "entries_row": cases[0]["entries_bytes"] / rows, "machines": machines}
    extrapolated |= {"build": build, "query": query}
    for name, count in (("machine", machines), ("core", machines * CORES)):
        size = BILLION / count
        at_size = {line: a + b * math.log(size) for line, (a, b) in (("build", build), ("query", query))}
        extrapolated[name] = {"shards": count, "rows": size, "hours": size * at_size["build"] / 3600}
        at_once = CORES if name == "machine" else 1
        extrapolated[name] |= {"query": at_size["query"], "queries_a_second": at_once / at_size["query"]}
    return extrapolated


def page_figures(figures: dict) -> dict:
    """The ends of the table, and the extrapolation."""
    extrapolated = billion(figures)
    (build_a, build_b), (query_a, query_b) = (np.array(extrapolated[name]) * 1e3 for name in ("build", "query"))
    return {
        **{"one": figures["cases"][0], "most": figures["cases"][-1]},
        **{
            "index_row": extrapolated["index_row"],
            "entries_row": extrapolated["entries_row"],
            "machines": extrapolated["machines"],
        },
        **{
            "machine_gb": INDEX_BYTES / 1e9,
            "cores_each": CORES,
            "factor": extrapolated["machine"]["rows"] / figures["rows"],
        },
        **{"build_a": build_a, "build_b": build_b, "query_a": query_a, "query_b": query_b},
        "billion": [(name, extrapolated[name]) for name in ("machine", "core")],
    }
