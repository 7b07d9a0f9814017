"""results/shards.md: a datastore in 1, 2, 4 and 8 shards on SST-2, and what a billion rows would take.

Rows are SST-2's train, queries its dev, embeddings all-MiniLM-L6-v2's (kept in the work folder). Seconds are of a
core: what each shard's own thread computed, whatever else runs on the machine.
"""

import math
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from mini_ee.data.progress import tqdm
from mini_ee.data.tasks import load_task
from mini_ee.data.tokenizer import Tokenizer, batches
from mini_ee.experiments.markdown import made_by_measuring, markdown_rows, wrapped
from mini_ee.experiments.trainings import Sources
from mini_ee.methods.raee_datastore import Datastore
from mini_ee.methods.raee_encoders import SentenceEncoder
from mini_ee.methods.raee_shards import Shards

SHARDS, K, ROUNDS, EXITS, AT_ONCE = (1, 2, 4, 8), 12, 5, (1, 2, 3, 4, 5, 6), 1000
BILLION, MACHINE, CORES = 10**9, 192e9, 64  # rows; of a machine with 256 GB the bytes for its index; its cores


class Timed(Shards):
    """Adds up what each shard's thread computed, in seconds."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seconds = np.zeros(len(self.indexes))

    def _each(self, ask):
        def timed(shard):
            begin = time.thread_time()
            found = ask(shard)
            self.seconds[shard] += time.thread_time() - begin
            return found

        return super()._each(timed)


# ---- Measuring ----
def embedded(sources: Sources, work: Path) -> tuple[np.ndarray, np.ndarray, list]:
    """Embeddings of train and dev, and train's texts."""
    task, path = load_task(sources.find("data", "SST-2")), work / "sst2.npz"
    if not path.exists():
        folder = sources.find("weights", "all-MiniLM-L6-v2")
        encoder, tokenizer, found = SentenceEncoder(folder), Tokenizer.from_folder(folder, 128), {}
        for split in ("train", "dev"):
            encoded = tokenizer.encode(task.split(split).texts)
            found[split] = np.empty((len(encoded), 384), np.float32)
            for rows in tqdm(list(batches(encoded, 64)), desc=f"embedding {split}"):
                found[split][rows] = encoder(encoded.batch(rows))
        np.savez(path, **found)
    found = np.load(path)
    return found["train"], found["dev"], list(task.split("train").texts)


def filled(embeddings: np.ndarray, texts: list, shards: int) -> Datastore:
    """A datastore with values and labels that are drawn."""
    random = np.random.default_rng(0)
    store = Datastore("all-MiniLM-L6-v2", embeddings.shape[1], EXITS, shards=shards)
    for part in np.array_split(np.arange(len(embeddings)), -(-len(embeddings) // AT_ONCE)):
        values, labels = random.random((len(part), len(EXITS)), np.float32), random.integers(0, 2, len(part))
        store.add(embeddings[part], values, labels, [texts[row] for row in part])
    return store


def brute_force(embeddings: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The K nearest rows of each query, (B, K), by all products of unit vectors."""
    rows, queries = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (embeddings, queries))
    return np.concatenate([np.argsort(-part @ rows.T, axis=1)[:, :K] for part in np.array_split(queries, 32)])


@patch.object(Datastore, "sharded", Timed)
def measure_cases(sources: Sources, work: Path) -> dict:
    """Everything that the page shows."""
    embeddings, queries, texts = embedded(sources, work)
    exact, stores, cases = brute_force(embeddings, queries), {}, {}
    for shards in tqdm(SHARDS, desc="building"):
        store = filled(embeddings, texts, shards)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            store.save(folder)
            sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        found = store.search(queries, K).rows
        hits = sum(len(set(ours) & set(theirs)) for ours, theirs in zip(found.tolist(), exact.tolist()))
        stores[shards], built = store, store._shards.seconds
        cases[shards] = {"shards": shards, "recall": hits / exact.size}
        cases[shards] |= {"build_core": built.sum(), "build_longest": built.max()}
        cases[shards] |= {"index_bytes": sum(size for name, size in sizes.items() if name.endswith(".hnsw"))}
        cases[shards] |= {"entries_bytes": sizes["entries.safetensors"]}
    times = {shards: [] for shards in SHARDS}
    for _ in tqdm(range(ROUNDS), desc="searching"):  # in turns
        for shards, store in stores.items():
            store._shards.seconds[:] = 0
            for query in queries:
                store.search(query[None], K)
            seconds = store._shards.seconds / len(queries)
            times[shards].append([seconds.sum(), seconds.max()])
    for shards, each in times.items():
        cases[shards] |= dict(zip(("query_core", "query_longest"), np.median(each, axis=0).tolist()))
    about = {"rows": len(embeddings), "queries": len(queries), "width": embeddings.shape[1], "k": K}
    return about | {"cores": os.cpu_count(), "exits": len(EXITS), "cases": list(cases.values())}


PARTS = {"cases": measure_cases}


# ---- The page ----
def growth(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """(a, b) of seconds = a + b ln(rows), by least squares."""
    b, a = np.polyfit(np.log(sizes), seconds, 1)
    return float(a), float(b)


def billion(figures: dict) -> dict:
    """What a billion rows would take, by what was measured: one shard a machine, and one a core."""
    rows, cases = figures["rows"], figures["cases"]
    sizes = [rows / case["shards"] for case in cases]
    build = growth(sizes, [case["build_core"] / rows for case in cases])
    query = growth(sizes, [case["query_core"] / case["shards"] for case in cases])
    row = cases[0]["index_bytes"] / rows
    machines = math.ceil(BILLION * row / MACHINE)
    found = {"index_row": row, "entries_row": cases[0]["entries_bytes"] / rows, "machines": machines}
    found |= {"build": build, "query": query}
    for name, count in (("machine", machines), ("core", machines * CORES)):
        size = BILLION / count
        each = {line: a + b * math.log(size) for line, (a, b) in (("build", build), ("query", query))}
        found[name] = {"shards": count, "rows": size, "hours": size * each["build"] / 3600}
        at_once = CORES if name == "machine" else 1
        found[name] |= {"query": each["query"], "queries_a_second": at_once / each["query"]}
    return found


PAGE_TEXT = """# A datastore in shards

`mini-ee train raee --shards N` puts RAEE's datastore into N hnswlib indexes. Threads of one process build them side
by side and search them side by side; the answers are merged by distance, so that nothing is lost that a shard found
(`mini_ee/methods/raee_shards.py`).

{made_by}

## Measured

{rows:,} rows of SST-2's train, {queries} rows of its dev asked one at a time, embeddings of all-MiniLM-L6-v2 ({width}
numbers), the {k} nearest; hnswlib's M 16, ef_construction 400, and ef 256 in every shard. Recall is against all
distances.

| shards | recall@{k} | build: s of a core | its longest shard | query: ms of a core | its longest shard |
|---|---|---|---|---|---|
{cases}

Seconds of a core are what the shards' threads computed; the longest shard is what a build or a query takes where each
shard has a core of its own. They were measured on {cores} cores that other work had in use, where the time that
passed says nothing; handing a query to threads and back is not in them. Every shard is searched as carefully as the
whole: so shards find more. They make the build shorter and cheaper, as each row is linked into a smaller graph, and a
query dearer, which is as many searches. One process gains a shorter build from them; what they are for is a datastore
beyond one machine.

## A billion rows, on paper

The index takes {index_row:,.0f} bytes a row on disk: {width} numbers of 4 bytes, links, a name. In memory hnswlib
has the same, and room for rows to come that it does not touch.
{billion:,} rows take {terabytes:.2f} TB: {machines} machines that give {machine:.0f} GB to it. Values of {exits}
exits, label, name and text take {entries_row:.0f} bytes a row on disk ({entries:.0f} GB).

Per row, building took {build_a:.3f} + {build_b:.3f} ln(rows of the shard) ms of a core, by least squares over the
sizes above; a search of one shard took {query_a:.3f} + {query_b:.3f} ln(rows) ms. Carried on to a billion rows, with
{cores_each} cores a machine:

| | shards | rows of a shard | build, hours | query, ms | queries a second, of all machines |
|---|---|---|---|---|---|
{on_paper}

With a shard a machine one core answers for it, and the others answer other queries; adding to one graph with many
threads is possible (`threads`), but the graph then differs each time. With a shard a core the build is short, and
every query takes all cores.

What this leaves out: the network (a query of {width} numbers, and {k} answers back, of each machine); that memory is
slower than the caches which held a part of these small graphs; and that the lines are carried {factor:,.0f} times
beyond what was measured. mini_ee's shards are threads of one process, or, on Ray, an actor each, on any of its
machines (`mini_ee/methods/raee_actors.py`): the same indexes, asked and merged in the same way. What that costs over
a network was not measured.
"""


def page(figures: dict) -> str:
    """results/shards.md."""
    cases = []
    for case in figures["cases"]:
        built = [f"{case[key]:.1f}" for key in ("build_core", "build_longest")]
        searched = [f"{case[key] * 1e3:.2f}" for key in ("query_core", "query_longest")]
        cases.append([str(case["shards"]), f"{case['recall']:.4f}", *built, *searched])
    found, paper = billion(figures), []
    for name in ("machine", "core"):
        at = found[name]
        numbers = f"{at['shards']:,}", f"{at['rows']:,.0f}", f"{at['hours']:.1f}", f"{at['query'] * 1e3:.2f}"
        paper.append([f"one a {name}", *numbers, f"{at['queries_a_second']:,.0f}"])
    (build_a, build_b), (query_a, query_b) = (np.array(found[name]) * 1e3 for name in ("build", "query"))
    text = PAGE_TEXT.format(
        **figures | {"cases": markdown_rows(cases), "on_paper": markdown_rows(paper)},
        made_by=made_by_measuring("shards"),
        **{"billion": BILLION, "terabytes": BILLION * found["index_row"] / 1e12, "machine": MACHINE / 1e9},
        **{"index_row": found["index_row"], "entries_row": found["entries_row"], "machines": found["machines"]},
        **{"entries": BILLION * found["entries_row"] / 1e9, "cores_each": CORES},
        **{"build_a": build_a, "build_b": build_b, "query_a": query_a, "query_b": query_b},
        factor=found["machine"]["rows"] / figures["rows"],
    )
    return wrapped(text)
