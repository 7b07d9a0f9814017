"""RAEE: ask the neighbours where to leave. Source: RAEE, a Robust Retrieval-Augmented Early Exit Framework.

collect           Algorithm 3.1: how sure each exit is of the right answer, for rows whose label is known
Datastore         those values beside an hnswlib index of the rows' embeddings; on disk whole or not there
Retrieval         Algorithm 3.2 as a rule: embed, retrieve, Eq. 4 to 6, and the exit is known before the model runs
knn_labels, ...   the controls that stand beside every figure of RAEE

No torch here: the runtime without torch retrieves with this file. The embedder is a callable, Inputs -> (B, D).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import hnswlib
import numpy as np
from tqdm import tqdm

from mini_ee.early_exit import Segments
from mini_ee.evaluation import Record, record, summary
from mini_ee.files import file_sha256, read_json, write_bytes, write_json
from mini_ee.rules import RULES, Planned, Rule
from mini_ee.tasks import Encoded, Inputs, Task, batches

FORMAT_VERSION = 1
M, EF_CONSTRUCTION, EF = 16, 400, 256  # hnswlib's; recall@12 of SST-2 dev in train's 67,349 MiniLM embeddings: .9938
SEED = 0  # of hnswlib's levels
LOTS = 10  # drawn for the random layers
KS, SHARES, WITHOUT = (2, 4, 8, 12, 16, 20), (0.2, 0.5, 1.0), "w/o"  # Tables 3, 4 and 2
SAME = 1e-10  # squared distance between embeddings of one text in other batches; measured max 7.9e-13, MiniLM
MANIFEST, INDEX, ENTRIES, NEXT = "manifest.json", "index.hnsw", "entries.safetensors", ".next"

Embed = Callable[[Inputs], np.ndarray]
"""(B, D) float32; with a method flops(inputs), what that costs a row, where the cost is to be counted (encoders.py)."""


# Algorithm 3.1: collect


def exit_values(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, K, C) logits of every exit, (N,) right classes -> values (N, K) float32, lines 8 to 11 of Algorithm 3.1.

    p_i^j, the probability of the right class, where exit j predicts it; 0 where the exit is wrong. Logits are over
    classes or label words: the paper's line takes the softmax over the vocabulary, its Fig. 2 over label words.
    """
    num_classes = logits.shape[2]
    if len(labels) != len(logits) or not np.isin(labels, range(num_classes)).all():
        raise ValueError(
            f"expected {len(logits)} labels from 0 to {num_classes - 1}, "
            f"found {len(labels)}, such as {np.unique(labels)[:5].tolist()}"
        )
    logits = logits.astype(np.float64)
    odds = np.exp(logits - logits.max(axis=2, keepdims=True))
    right = logits.argmax(axis=2) == np.asarray(labels)[:, None]
    return np.where(right, odds.max(axis=2) / odds.sum(axis=2), 0).astype(np.float32)


def collect(
    segments: Segments, encoded: Encoded, labels: np.ndarray, batch_size: int, progress: str | None = None
) -> np.ndarray:
    """Run every exit on every row: values (N, K). Of rows that the heads were not trained on, or all look right."""
    return exit_values(record(segments, encoded, batch_size, progress).logits, labels)


def full_model_is_right(values: np.ndarray) -> np.ndarray:
    """(N, K) values -> (N,) bool: the rows that the "w/o" variant of Table 2 keeps."""
    return values[:, -1] > 0


# Algorithm 3.2: choose


def neighbour_weights(distances: np.ndarray) -> np.ndarray:
    """Eq. 5, P(v_i | x) = min_j distance(v_j, x) / distance(v_i, x): distances (B, k) -> (B, k) float64.

    The nearest weighs 1. In the limit of distance 0: neighbours at distance 0 weigh 1, the rest 0.
    """
    distances = np.asarray(distances, np.float64)
    nearest = distances.min(axis=1, keepdims=True)
    return np.divide(nearest, distances, out=np.ones_like(distances), where=distances > 0)


def passing_values(values: np.ndarray, tau: float, fallback_top: int = 0) -> np.ndarray:
    """The inner sum of Eq. 4, 1(p_i^j >= tau) p_i^j: values (B, k, K) of the neighbours -> (B, k, K).

    fallback_top: a neighbour none of whose exits passes votes for so many of its best right ones, the earlier of
    equals (3 in the authors' code, 0 in the paper).
    """
    passes = (values > 0) & (values >= tau)
    if fallback_top:
        rank = np.argsort(np.argsort(-values, axis=2, kind="stable"), axis=2)
        passes |= (rank < fallback_top) & ~passes.any(axis=2, keepdims=True)
    return np.where(passes, values, 0)


def exit_distribution(values: np.ndarray, distances: np.ndarray, tau: float = 0.9, fallback_top: int = 0) -> np.ndarray:
    """Eq. 4, P(z = l | x) = sum_i P(v_i | x) 1(p_i^l >= tau) p_i^l, which the paper leaves unnormalised.

    values (B, k, K) and squared distances (B, k) of the k neighbours -> (B, K) float64.
    """
    votes = neighbour_weights(distances)[:, :, None] * passing_values(values, tau, fallback_top)
    return np.sort(votes, axis=1).sum(axis=1)  # sorted: rounding must not depend on the neighbours' order


def chosen_exit(distribution: np.ndarray) -> np.ndarray:
    """Eq. 6, f(x) = argmax_l P(z = l | x): (B, K) -> exit index (B,).

    The earliest of equals; the last exit, m, where nobody votes.
    """
    last = distribution.shape[1] - 1
    return np.where(distribution.any(axis=1), distribution.argmax(axis=1), last)


# The datastore


class Neighbours(NamedTuple):
    """What a search found, nearest first."""

    rows: np.ndarray  # (B, k) int64, into the datastore's values, labels and texts
    distances: np.ndarray  # (B, k) float32, squared L2 between unit vectors, from 0 to 4


class Datastore:
    """N collected rows: an index of their embeddings, and beside it values, labels and texts.

    encoder: who made the embeddings, a text that only the same encoder has; exits: in layers run, 0 the embeddings.
    Embeddings are scaled to length 1. On disk:

    index.hnsw             the index, as hnswlib writes it, with the vectors
    entries.safetensors    values (N, K), labels (N,), ids (N,) in the index, texts (JSON as bytes)
    manifest.json          format_version, encoder, dimension, exits, counts, index parameters, and the sha256 of both

    Both are written as NAME.next; with the manifest, renamed into place, the new ones count, and take their names then.
    So a kill leaves the old or the new: what a manifest's sha256 does not name is passed over.
    """

    def __init__(
        self,
        encoder: str,
        dimension: int,
        exits: tuple[int, ...],
        *,
        m: int = M,
        ef_construction: int = EF_CONSTRUCTION,
        ef: int = EF,
    ):
        self.encoder, self.dimension, self.exits, self.ef = encoder, dimension, tuple(exits), ef
        self.values = np.empty((0, len(self.exits)), np.float32)  # (N, K)
        self.labels = np.empty(0, np.int64)  # (N,)
        self.texts: list[tuple[str, ...]] = []
        self._ids = np.empty(0, np.int64)  # (N,) ascending: the rows' names in the index
        self._index = hnswlib.Index("l2", dimension)
        self._index.init_index(1024, M=m, ef_construction=ef_construction, random_seed=SEED)
        self._index.set_ef(ef)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def embeddings(self) -> np.ndarray:
        """(N, D) float32, of length 1."""
        return np.asarray(self._index.get_items(self._ids), np.float32).reshape(len(self), self.dimension)

    def add(
        self,
        embeddings: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        texts: Iterable[tuple[str, ...]],
        threads: int = 1,
    ) -> None:
        """More rows, after those that are there: embeddings (n, D), values (n, K), labels (n,), n texts.

        threads: more than one is faster, but then no two indexes are the same.
        Raises ValueError where the parts do not fit each other or the datastore.
        """
        unit, texts = self._unit(embeddings), list(map(tuple, texts))
        if np.shape(values) != (len(unit), len(self.exits)) or not len(labels) == len(texts) == len(unit):
            raise ValueError(
                f"expected {len(unit)} rows with values for {len(self.exits)} exits, "
                f"found values {np.shape(values)}, {len(labels)} labels and {len(texts)} texts"
            )
        used = self._index.get_current_count()  # with the deleted ones: an id is never given twice
        if used + len(unit) > self._index.get_max_elements():
            self._index.resize_index(2 * (used + len(unit)))
        ids = np.arange(used, used + len(unit))
        self._index.add_items(unit, ids, num_threads=threads)
        self.values = np.concatenate([self.values, np.asarray(values, np.float32)])
        self.labels = np.concatenate([self.labels, np.asarray(labels, np.int64)])
        self.texts += texts
        self._ids = np.concatenate([self._ids, ids])

    def delete(self, rows: Iterable[int]) -> None:
        """Drop rows; later ones move up.

        Their vectors stay in the index as ways to the others, never found; `take` makes an index without them.
        """
        rows = np.unique(np.asarray(list(rows), np.int64))
        if not np.isin(rows, range(len(self))).all():
            raise ValueError(f"expected rows from 0 to {len(self) - 1}, found {rows.min()} to {rows.max()}")
        for name in self._ids[rows]:
            self._index.mark_deleted(name)
        self._ids, self.values, self.labels = (
            np.delete(array, rows, axis=0) for array in (self._ids, self.values, self.labels)
        )
        gone = set(rows.tolist())
        self.texts = [text for row, text in enumerate(self.texts) if row not in gone]

    def merge(self, other: "Datastore", threads: int = 1) -> None:
        """Add all rows of another datastore, of the same encoder and exits."""
        _same("encoder", self.encoder, other.encoder, "embed the rows again with the same encoder")
        _same("exits", self.exits, other.exits, "collect the rows again with the same exits")
        self.add(other.embeddings, other.values, other.labels, other.texts, threads)

    def take(self, rows: np.ndarray, threads: int = 1) -> "Datastore":
        """A new datastore with the given rows (indices, a mask or a slice), in the given order."""
        rows = np.arange(len(self))[rows]
        parameters = {"m": self._index.M, "ef_construction": self._index.ef_construction, "ef": self.ef}
        part = Datastore(self.encoder, self.dimension, self.exits, **parameters)
        texts = [self.texts[row] for row in rows]
        part.add(self.embeddings[rows], self.values[rows], self.labels[rows], texts, threads)
        return part

    def search(self, embeddings: np.ndarray, k: int) -> Neighbours:
        """The k nearest rows of each embedding (B, D), or all where there are no k.

        A distance below SAME is 0: an encoder's rounding must not decide between copies of the query.
        Raises ValueError for embeddings of another encoder (dimension) and for an empty datastore.
        """
        unit, k = self._unit(embeddings), min(k, len(self))
        if k < 1:
            raise ValueError(
                f"expected k of at least 1 and a datastore with rows, found {k} rows to retrieve; add some"
            )
        try:
            ids, distances = self._index.knn_query(unit, k, num_threads=1)
            rows = np.searchsorted(self._ids, ids.astype(np.int64))
        except RuntimeError:  # the graph does not lead to k rows, as among many copies of one
            rows, distances = exact_search(self.embeddings, unit, k)
        return Neighbours(rows, np.where(distances < SAME, np.float32(0), distances))

    def _unit(self, embeddings: np.ndarray) -> np.ndarray:
        """(B, D) float32 of length 1."""
        embeddings = np.asarray(embeddings, np.float32)
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dimension:
            raise ValueError(
                f"expected embeddings (B, {self.dimension}) of the encoder {self.encoder}, "
                f"found {embeddings.shape}; give the encoder that the datastore was built with"
            )
        length = np.linalg.norm(embeddings, axis=1, keepdims=True)
        if not (np.isfinite(length) & (length > 0)).all():
            raise ValueError("expected embeddings that are finite and not zero, found others; correct the encoder")
        return embeddings / length

    def save(self, folder: str | Path, built_from: str | None = None) -> None:
        """Write the datastore, in the place of one that is there; a kill leaves the old one or the new one.

        built_from: what an unfinished `build` is recognised by.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():  # a kill may have left files that count under the names that are written now
            for name, digest in read_manifest(folder)["files"].items():
                path = folder / (name + NEXT)
                if path.is_file() and file_sha256(path) == digest:
                    os.replace(path, folder / name)
        self._save_index(folder / (INDEX + NEXT))
        self._save_entries(folder / (ENTRIES + NEXT))
        manifest = {
            "format_version": FORMAT_VERSION,
            "encoder": self.encoder,
            "dimension": self.dimension,
            "exits": list(self.exits),
            "rows": len(self),
            "vectors": self._index.get_current_count(),
            "index": {
                "space": "l2",
                "M": self._index.M,
                "ef_construction": self._index.ef_construction,
                "ef": self.ef,
                "random_seed": SEED,
            },
            "files": {name: file_sha256(folder / (name + NEXT)) for name in (INDEX, ENTRIES)},
        }
        write_json(folder / MANIFEST, manifest | ({"built_from": built_from} if built_from else {}))
        for name in manifest["files"]:
            os.replace(folder / (name + NEXT), folder / name)

    def _save_index(self, path: Path) -> None:
        """hnswlib does not say when a disk is full: the size tells."""
        self._index.save_index(str(path))
        if not path.exists() or path.stat().st_size != self._index.index_file_size():
            raise OSError(f"{path}: could not be written whole; make room on the disk")
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def _save_entries(self, path: Path) -> None:
        from safetensors.numpy import save

        texts = np.frombuffer(json.dumps(self.texts).encode(), np.uint8)
        write_bytes(path, save({"values": self.values, "labels": self.labels, "ids": self._ids, "texts": texts}))

    @classmethod
    def load(cls, folder: str | Path, encoder: str) -> "Datastore":
        """Open a datastore and check all of it.

        Raises FileNotFoundError where there is none, ValueError where it is damaged, of another format, of another
        encoder, or put together from parts of different ones.
        """
        from safetensors.numpy import load

        folder = Path(folder)
        manifest = read_manifest(folder)
        _same(f"{folder}: encoder", encoder, manifest["encoder"], "give that encoder, or build the datastore again")
        if set(manifest["files"]) != {INDEX, ENTRIES}:
            raise ValueError(f"{folder}: an older mini_ee built it, which gave its files other names; build it again")
        index, entries = (_find(folder, name, manifest["files"][name]) for name in (INDEX, ENTRIES))
        store = cls(encoder, manifest["dimension"], tuple(manifest["exits"]), ef=manifest["index"]["ef"])
        store._index = hnswlib.Index("l2", store.dimension)
        store._index.load_index(str(index))
        store._index.set_ef(store.ef)
        arrays = load(entries.read_bytes())
        store.values, store.labels, store._ids = (arrays[name] for name in ("values", "labels", "ids"))
        store.texts = list(map(tuple, json.loads(arrays["texts"].tobytes())))
        counts = {len(store.values), len(store.labels), len(store._ids), len(store.texts), manifest["rows"]}
        if len(counts) > 1 or store._index.get_current_count() != manifest["vectors"]:
            raise ValueError(f"{folder}: index and values do not belong together; build the datastore again")
        return store


def read_manifest(folder: str | Path) -> dict:
    """What a datastore says of itself, such as the encoder that it needs."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no datastore here; expected a folder with {MANIFEST}, index and entries")
    manifest = read_json(folder / MANIFEST, signed="format_version")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: expected a datastore of format_version {FORMAT_VERSION}, "
            f"found {manifest.get('format_version')!r}; build it again with this version of mini_ee"
        )
    return manifest


def _find(folder: Path, name: str, digest: str) -> Path:
    """The file that a manifest means: by its name or, where a kill came between manifest and renaming, as written."""
    there = [path for path in (folder / name, folder / (name + NEXT)) if path.is_file()]
    if not there:
        raise FileNotFoundError(f"{folder / name}: no such file; build the datastore again")
    for path in there:
        if file_sha256(path) == digest:
            return path
    raise ValueError(
        f"{folder / name}: damaged, or of another datastore: it does not have the checksum in {MANIFEST}; "
        f"build the datastore again"
    )


def _same(what: str, expected, found, advice: str) -> None:
    if expected != found:
        raise ValueError(f"{what}: expected {expected}, found {found}; {advice}")


def exact_search(embeddings: np.ndarray, queries: np.ndarray, k: int) -> Neighbours:
    """What the index approximates: the k nearest of embeddings (N, D) to each query (B, D), all of length 1."""
    distances = np.stack([((embeddings - query) ** 2).sum(axis=1) for query in queries])
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return Neighbours(rows, np.take_along_axis(distances, rows, axis=1))


def build(
    folder: str | Path,
    encoder: str,
    embed: Embed,
    encoded: Encoded,
    values: np.ndarray,
    labels: np.ndarray,
    exits: tuple[int, ...],
    *,
    batch_size: int = 64,
    save_every: int = 10_000,
    progress: str | None = None,
) -> Datastore:
    """Embed N rows, index them in batches and write the datastore. Rows stand from short to long.

    Every so many rows the state is saved in `folder`.building, from which the same call goes on after a kill.
    Raises FileExistsError where `folder` is there, ValueError where `folder`.building is of other rows.
    """
    folder = Path(folder)
    if not len(encoded) == len(values) == len(labels) > 0:
        raise ValueError(
            f"expected at least one row and as many values and labels, "
            f"found {len(encoded)} rows, {len(values)} values and {len(labels)} labels"
        )
    if folder.exists():
        raise FileExistsError(f"{folder}: is there already; name another folder, remove it, or add to it")
    unfinished = folder.with_name(f"{folder.name}.building")
    source = _source_sha256(encoder, encoded.texts, values, labels, exits)
    store = None
    if (unfinished / MANIFEST).exists():
        if read_manifest(unfinished).get("built_from") != source:
            raise ValueError(f"{unfinished}: an unfinished build of other rows is there; remove it")
        store = Datastore.load(unfinished, encoder)
    order = np.concatenate(list(batches(encoded, batch_size)))
    done = len(store) if store else 0
    saved = done
    with tqdm(total=len(order), initial=done, desc=progress, unit="row", delay=2, disable=progress is None) as bar:
        for start in range(done, len(order), batch_size):
            rows = order[start : start + batch_size]
            embeddings = embed(encoded.batch(rows))
            store = store or Datastore(encoder, np.shape(embeddings)[-1], exits)
            store.add(embeddings, values[rows], labels[rows], [encoded.texts[row] for row in rows])
            bar.update(len(rows))
            if len(store) - saved >= save_every:
                store.save(unfinished, built_from=source)
                saved = len(store)
    store.save(unfinished, built_from=source)
    os.rename(unfinished, folder)
    return store


def _source_sha256(encoder: str, texts: Iterable, values: np.ndarray, labels: np.ndarray, exits: Iterable) -> str:
    """One digest over what a datastore is built from, so that a resumed build knows its rows again."""
    digest = hashlib.sha256(json.dumps([encoder, list(exits), list(texts)]).encode())
    digest.update(np.asarray(values, np.float32).tobytes() + np.asarray(labels, np.int64).tobytes())
    return digest.hexdigest()


# The rule


@dataclass(frozen=True)
class Retrieval(Rule):
    """Leave where the k nearest collected rows were right, and sure of it: Algorithm 3.2, lines 2 to 8.

    tau: what a neighbour's probability must reach to vote (.9 in the paper). fallback_top: see `passing_values`.
    include_embeddings: plan exits after layer 0 too, where the datastore has one. The settings stand in a run's
    config.json; datastore and embedder are given by `with_datastore`, and without them the rule cannot plan.
    """

    k: int = 12
    tau: float = 0.9
    fallback_top: int = 0
    include_embeddings: bool = False
    datastore: Datastore | None = field(default=None, repr=False, compare=False)
    embed: Embed | None = field(default=None, repr=False, compare=False)
    name = "raee"
    reads = False
    looks = True

    def __post_init__(self):
        for name, least in (("k", 1), ("fallback_top", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be a probability from 0 to 1, got {self.tau}")
        if self.include_embeddings and self.datastore is not None and self.datastore.exits[0] != 0:
            raise ValueError(
                f"include_embeddings needs values of layer 0, the datastore has exits {self.datastore.exits}; "
                f"collect it again with that exit"
            )

    def with_datastore(self, datastore: Datastore, embed: Embed) -> "Retrieval":
        """The same settings, able to plan. embed: Inputs -> (B, D), the encoder that the datastore was built with."""
        return replace(self, datastore=datastore, embed=embed)

    def plan(self, inputs: Inputs) -> np.ndarray:
        if self.datastore is None:
            raise ValueError("the rule raee plans from a datastore, this one has none; give it one by with_datastore")
        return self.chosen(self.datastore.search(self.embed(inputs), self.k))

    def plan_flops(self, inputs: Inputs) -> float:
        return self.embed.flops(inputs) if hasattr(self.embed, "flops") else 0.0

    def chosen(self, neighbours: Neighbours) -> np.ndarray:
        """Eq. 4 to 6 on neighbours of the datastore: exit index (B,)."""
        values = self.datastore.values[neighbours.rows]
        if self.datastore.exits[0] == 0 and not self.include_embeddings:
            values[:, :, 0] = 0
        return chosen_exit(exit_distribution(values, neighbours.distances, self.tau, self.fallback_top))

    def check(self, num_exits: int) -> None:
        if self.datastore is not None and len(self.datastore.exits) != num_exits:
            raise ValueError(
                f"the datastore was collected at {len(self.datastore.exits)} exits, the model has {num_exits}; "
                f"collect it again with this model"
            )

    def to_dict(self) -> dict:
        settings = super().to_dict()
        return {key: value for key, value in settings.items() if key not in ("datastore", "embed")}


RULES[Retrieval.name] = Retrieval


def plan_ahead(rule: Rule, inputs: Iterable[Inputs]) -> Iterator[tuple[Inputs, Planned]]:
    """Each batch with its plan; while the caller runs the model on one, a thread plans the next.

    The paper lets both run in parallel (Section 3.2). A plan is waited for, so no result depends on who is first.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = None
        for batch in inputs:
            asked = batch, thread.submit(rule.plan, batch)
            if waiting:
                yield waiting[0], Planned(waiting[1].result())
            waiting = asked
        if waiting:
            yield waiting[0], Planned(waiting[1].result())


# The controls


def knn_labels(labels: np.ndarray) -> np.ndarray:
    """The neighbours' labels (B, k), nearest first -> the class that most of them have (B,), the nearest of equals.

    What the embeddings know without the model.
    """
    votes = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)  # (B, k): how many agree with each neighbour
    return np.take_along_axis(labels, votes.argmax(axis=1)[:, None], axis=1)[:, 0]


def best_single_exit(values: np.ndarray) -> int:
    """(N, K) collected values -> the exit that is right most often, the earliest of equals."""
    return int((values > 0).sum(axis=0).argmax())


def shuffled_plan(plan: np.ndarray, seed: int) -> np.ndarray:
    """The same exits given to rows by lot: the same mean depth, and nothing about the row."""
    return np.random.default_rng(seed).permutation(plan)


def earliest_right_exit(values: np.ndarray) -> np.ndarray:
    """The oracle: (N, K) values -> the first exit that is right (B,), the last where none is."""
    return chosen_exit((values > 0).astype(np.float64))


def controls(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> dict[str, dict]:
    """What must stand beside RAEE's figure on the same N rows, under DESIGN.md's JSON keys.

    knn_labels         the neighbours' labels alone: no layer of the model but what the embedding takes
    best_single_layer  the one exit that is right most often on the collected rows
    random_layers      RAEE's exits given to rows by lot: the mean over LOTS draws, and `spread`, the standard deviation
    oracle             the earliest exit that is right
    full_model         the last exit

    recorded: what every exit says of these rows, as `record` returns it.
    """
    near = rule.datastore.search(_queries(rule, encoded, batch_size)[0], rule.k)
    plan, last = rule.chosen(near), len(recorded.segments.exits) - 1
    single = best_single_exit(rule.datastore.values)
    right = (recorded.logits.argmax(axis=2) == labels[:, None]).astype(np.float32)

    def planned(exit_index: np.ndarray) -> dict:
        return summary(recorded.replay(Planned(exit_index)), recorded, task, labels)

    drawn = [planned(shuffled_plan(plan, seed + lot)) for lot in range(LOTS)]
    scores = {name: float(np.mean([each[name] for each in drawn])) for name in task.score(labels, labels)}
    return {
        "knn_labels": task.score(knn_labels(rule.datastore.labels[near.rows]), labels) | {"mean_layers": 0.0},
        "best_single_layer": planned(np.full(len(labels), single)) | {"layer": recorded.segments.exits[single]},
        "random_layers": scores
        | {"spread": float(np.std([each["score"] for each in drawn])), "mean_layers": drawn[0]["mean_layers"]},
        "oracle": planned(earliest_right_exit(right)),
        "full_model": planned(np.full(len(labels), last)),
    }


def ablation(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> list[dict]:
    """RAEE's figure on N rows by k (Table 3) and by how much of the datastore there is (Table 4): one dict for each.

    database: the share of the collected rows, drawn with the seed, or WITHOUT those that the full model gets wrong
    (Table 2). recorded: what every exit says of the N rows.
    """
    store = rule.datastore
    queries, cost = _queries(rule, encoded, batch_size)
    order = np.random.default_rng(seed).permutation(len(store))
    parts = {f"{share:.0%}": order[: max(1, round(share * len(store)))] for share in SHARES}
    parts[WITHOUT] = np.flatnonzero(full_model_is_right(store.values))
    points = []
    for name, rows in parts.items():
        if not len(rows):
            continue
        part = store.take(rows) if len(rows) < len(store) else store
        near = part.search(queries, max(KS))
        for k in KS:
            plan = replace(rule, datastore=part).chosen(Neighbours(near.rows[:, :k], near.distances[:, :k]))
            point = summary(recorded.replay(Planned(plan, cost)), recorded, task, labels)
            points.append({"database": name, "rows": len(part), "k": k} | point)
    return points


def _queries(rule: Retrieval, encoded: Encoded, batch_size: int) -> tuple[np.ndarray, float]:
    """The embeddings of all rows, (N, D), and what a plan costs for a row in the mean."""
    queries, flops = np.empty((len(encoded), rule.datastore.dimension), np.float32), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        queries[rows] = rule.embed(inputs)
        flops += len(rows) * rule.plan_flops(inputs)
    return queries, flops / len(encoded)
