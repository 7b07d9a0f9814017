"""RAEE's datastore: the embedding, values, label and text of each collected example; search for nearest neighbours.

Datastore       N examples (rows) with an index of their embeddings (raee_shards.py); add, delete, take, search
exact_search    the exact search, which the index approximates
build           Algorithm 3.1: write keys and values to a datastore on disk (raee_files.py); it can be resumed

Paper: see raee.py. No torch here: the runtime without torch retrieves with this file. hnswlib, which may have to be
compiled, is imported when a datastore is made or opened; everything else works without it.
The equations as tests: tests/spec/test_3_raee.py.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tokenizer import Encoded, Inputs, batches
from mini_ee.lab.methods.raee_files import MANIFEST, Entries, read_datastore, read_manifest, write_datastore
from mini_ee.lab.methods.raee_shards import Shards

M, EF_CONSTRUCTION, EF = 16, 400, 256  # parameters of hnswlib; recall@12 is .9938: SST-2 dev in train, MiniLM

SAME_TEXT = 1e-10  # squared distance below which two embeddings are of one text; measured max between batches 7.9e-13

MIN_EMBEDDING_NORM = 1e-15  # least length of an embedding: squares of float32 lose digits below 1e-38

Embed = Callable[[Inputs], np.ndarray]
"""Inputs -> embeddings (B, D) float32. It may have a method flops(inputs), FLOPs per row; see raee_encoders.py."""


class Neighbours(NamedTuple):
    """The result of a search, nearest first."""

    rows: np.ndarray  # (B, k) int64, into the datastore's values, labels and texts
    distances: np.ndarray  # (B, k) float32, squared L2 between unit vectors, from 0 to 4


class Datastore:
    """N collected examples: an index of their embeddings, their values (N, K), labels (N,) and texts.

    encoder: a unique name of the encoder of the embeddings. exits: the layer of each exit; 0 is the embedding layer.
    Embeddings are scaled to length 1.
    """

    sharded = Shards  # the class of its indexes

    def __init__(
        self,
        encoder: str,
        dimension: int,
        exits: tuple[int, ...],
        *,
        m: int = M,
        ef_construction: int = EF_CONSTRUCTION,
        ef: int = EF,
        shards: int = 1,
    ):
        self.encoder, self.dimension, self.exits = encoder, dimension, tuple(exits)
        self.values = np.empty((0, len(self.exits)), np.float32)  # (N, K)
        self.labels = np.empty(0, np.int64)  # (N,)
        self.texts: list[tuple[str, ...]] = []
        self._ids = np.empty(0, np.int64)  # (N,) ascending: the id of each row in the index; deleted ids are skipped
        self._shards = self.sharded(dimension, shards, m, ef_construction, ef)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def embeddings(self) -> np.ndarray:
        """(N, D) float32, of length 1."""
        return self._shards.vectors(self._ids)

    @property
    def shards(self) -> int:
        """The number of indexes."""
        return len(self._shards.indexes)

    # ---- Search ----
    def search(self, embeddings: np.ndarray, k: int) -> Neighbours:
        """The k nearest rows of each embedding (B, D), or all rows if there are fewer than k.

        A distance below SAME_TEXT is set to 0: rounding must not decide between copies of the query.
        Raises ValueError for embeddings of another encoder (dimension) and for an empty datastore.
        """
        unit, k = self._unit(embeddings), min(k, len(self))
        if k < 1:
            raise ValueError(
                f"expected k of at least 1 and a datastore with rows, found {k} rows to retrieve; add some"
            )
        try:
            ids, distances = self._shards.search(unit, k, self._ids)
            rows = np.searchsorted(self._ids, ids)  # the index of each id, as _ids is ascending and has all of them
        except RuntimeError:  # hnswlib's graph does not reach k rows, for example among many copies of one
            rows, distances = exact_search(self.embeddings, unit, k)
        return Neighbours(rows, np.where(distances < SAME_TEXT, np.float32(0), distances))

    def _unit(self, embeddings: np.ndarray) -> np.ndarray:
        """(B, D) float32 of length 1."""
        embeddings = np.asarray(embeddings, np.float32)
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dimension:
            raise ValueError(
                f"expected embeddings (B, {self.dimension}) of the encoder {self.encoder}, "
                f"found {embeddings.shape}; give the encoder that the datastore was built with"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # raises below
            length = np.linalg.norm(embeddings, axis=1, keepdims=True)
        if not (np.isfinite(length) & (length > MIN_EMBEDDING_NORM)).all():
            raise ValueError("expected embeddings that are finite and not zero, found another; correct the encoder")
        return embeddings / length

    # ---- Change ----
    def add(
        self,
        embeddings: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        texts: Iterable[tuple[str, ...]],
        threads: int = 1,
    ) -> None:
        """Append n rows: embeddings (n, D), values (n, K), labels (n,) and n texts.

        threads: number per shard; more than one is faster, but then the index is different each time.
        Raises ValueError if the parts do not fit each other or the datastore.
        """
        unit, texts = self._unit(embeddings), list(map(tuple, texts))
        if np.shape(values) != (len(unit), len(self.exits)) or not len(labels) == len(texts) == len(unit):
            raise ValueError(
                f"expected {len(unit)} rows with values for {len(self.exits)} exits, "
                f"found values {np.shape(values)}, {len(labels)} labels and {len(texts)} texts"
            )
        ids = self._shards.add(unit, threads)
        self.values = np.concatenate([self.values, np.asarray(values, np.float32)])
        self.labels = np.concatenate([self.labels, np.asarray(labels, np.int64)])
        self.texts += texts
        self._ids = np.concatenate([self._ids, ids])

    def delete(self, rows: Iterable[int]) -> None:
        """Delete rows; the later rows move up. Raises ValueError for a row that does not exist.

        Their vectors stay in the index and connect others, but are never found. `take` builds an index without them.
        """
        rows = np.unique(np.asarray(list(rows), np.int64))
        if not np.isin(rows, range(len(self))).all():
            raise ValueError(f"expected rows from 0 to {len(self) - 1}, found {rows.min()} to {rows.max()}")
        self._shards.delete(self._ids[rows])
        for name in ("_ids", "values", "labels"):
            setattr(self, name, np.delete(getattr(self, name), rows, axis=0))
        deleted = set(rows.tolist())
        self.texts = [text for row, text in enumerate(self.texts) if row not in deleted]

    def take(self, rows: np.ndarray) -> "Datastore":
        """A new datastore with the given rows (indices, a mask or a slice), in the given order."""
        rows, own = np.arange(len(self))[rows], self._shards
        settings = {"m": own.m, "ef_construction": own.ef_construction, "ef": own.ef, "shards": self.shards}
        part = type(self)(self.encoder, self.dimension, self.exits, **settings)
        texts = [self.texts[row] for row in rows]
        part.add(self.embeddings[rows], self.values[rows], self.labels[rows], texts)
        return part

    # ---- On disk ----
    def save(self, folder: str | Path, built_from: str | None = None) -> None:
        """Write the datastore, replacing an existing one. If the write is killed, the old or the new one is there.

        built_from: the digest of the rows of an unfinished `build`, by which a resumed one recognises it.
        Raises OSError, which names the file, if the disk is full.
        """
        about = {"encoder": self.encoder, "dimension": self.dimension, "exits": list(self.exits)}
        entries = Entries(self.values, self.labels, self._ids, self.texts)
        write_datastore(Path(folder), about, self._shards, entries, built_from)

    @classmethod
    def load(cls, folder: str | Path, encoder: str) -> "Datastore":
        """Open a datastore and check all of it.

        Raises FileNotFoundError if there is none, ValueError if it is damaged, has another format or another encoder,
        or was put together from parts of different datastores.
        """
        manifest, entries, indexes = read_datastore(Path(folder), encoder)
        settings = {name.lower(): manifest["index"][name] for name in ("M", "ef_construction", "ef", "shards")}
        store = cls(encoder, manifest["dimension"], tuple(manifest["exits"]), **settings)
        store.values, store.labels, store._ids, store.texts = entries
        store._shards.load(indexes, manifest["vectors"], store._ids)
        return store


def exact_search(embeddings: np.ndarray, queries: np.ndarray, k: int) -> Neighbours:
    """The k nearest of the embeddings (N, D) to each query (B, D), all of length 1, by measuring every distance."""
    distances = np.stack([((embeddings - query) ** 2).sum(axis=1) for query in queries])
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return Neighbours(rows, np.take_along_axis(distances, rows, axis=1))


# ---- Building ----
class Collected(NamedTuple):
    """N examples for a datastore, encoded for the encoder, with the values of K exits."""

    encoded: Encoded
    values: np.ndarray  # (N, K)
    labels: np.ndarray  # (N,)
    exits: tuple[int, ...]  # (K,) layers
    shards: int = 1

    def sha256(self, encoder: str) -> str:
        """A digest over everything from which a datastore is built; a resumed build compares it."""
        about = [encoder, list(self.exits), self.shards, list(self.encoded.texts)]
        digest = hashlib.sha256(json.dumps(about).encode())
        digest.update(np.asarray(self.values, np.float32).tobytes() + np.asarray(self.labels, np.int64).tobytes())
        return digest.hexdigest()


def build(
    folder: str | Path,
    encoder: str,
    embed: Embed,
    collected: Collected,
    *,
    batch_size: int = 64,
    save_every: int = 10_000,
    progress: str | None = None,
) -> Datastore:
    """Embed N examples, index them in batches and write the datastore. Its rows are ordered from short to long texts.

    After every `save_every` rows the unfinished datastore is saved in `folder`.building; the same call resumes it.
    Raises FileExistsError if `folder` exists, ValueError if `folder`.building has other rows.
    """
    folder = Path(folder)
    encoded, values, labels, exits, shards = collected
    if not len(encoded) == len(values) == len(labels) > 0:
        raise ValueError(
            f"expected at least one row and as many values and labels, "
            f"found {len(encoded)} rows, {len(values)} values and {len(labels)} labels"
        )
    if folder.exists():
        raise FileExistsError(f"{folder}: is there already; name another folder, remove it, or add to it")
    unfinished = folder.with_name(f"{folder.name}.building")
    source = collected.sha256(encoder)
    store: Datastore | None = None
    if (unfinished / MANIFEST).exists():
        if read_manifest(unfinished).get("built_from") != source:
            raise ValueError(f"{unfinished}: an unfinished build of other rows is there; remove it")
        store = Datastore.load(unfinished, encoder)
    order = np.concatenate(list(batches(encoded, batch_size)))
    done = saved = len(store) if store else 0
    with tqdm(total=len(order), initial=done, desc=progress, unit="row", delay=2, disable=progress is None) as bar:
        for start in range(done, len(order), batch_size):
            rows = order[start : start + batch_size]
            embeddings = embed(encoded.batch(rows))
            store = store or Datastore(encoder, np.shape(embeddings)[-1], exits, shards=shards)
            store.add(embeddings, values[rows], labels[rows], [encoded.texts[row] for row in rows])
            bar.update(len(rows))
            if len(store) - saved >= save_every:
                store.save(unfinished, built_from=source)
                saved = len(store)
    assert store is not None  # there is at least one row
    store.save(unfinished, built_from=source)
    os.rename(unfinished, folder)
    return store
