"""RAEE's datastore: the embedding, values, label and text of each collected example; search for nearest neighbours.

Datastore       N examples (rows) with an index of their embeddings; take, search, save, load
exact_search    the exact search, which the index approximates

A datastore on disk is a folder:

rows.safetensors    embeddings (N, D), values (N, K), labels (N,), texts (JSON as bytes)
index.hnsw          hnswlib's index of the embeddings; of S shards index.0.hnsw, index.1.hnsw, ...
manifest.json       format_version, encoder, exits, shards, and the sha256 of the other files

To build the index takes seconds for 5,000 rows, so it is read from its file. If the checksum of the file is not the
one in the manifest, hnswlib does not read it, and the index is built again from the embeddings.

Row i is number i // S of shard i % S. Threads build and search all shards at once, because hnswlib releases Python's
lock. The k nearest of all rows are among the k nearest of their shards.

Paper: see raee.py. No torch here: the runtime without torch retrieves with this file. hnswlib, which may have to be
compiled, is imported when a datastore is made or opened; everything else works without it.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.data.files import file_sha256, read_json, write_bytes, write_json
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.raee import EF, EF_CONSTRUCTION, M  # recall@12 is .9938 with them: SST-2 dev in train, MiniLM

FORMAT_VERSION = 2

MANIFEST, ROWS = "manifest.json", "rows.safetensors"

MOST_SHARDS = 1024

ADDED_AT_ONCE = 1000  # rows, between two steps of the progress bar

SAME_TEXT = 1e-10  # squared distance below which two embeddings are of one text; measured max between batches 7.9e-13

LEAST_LENGTH = 1e-15  # of an embedding: squares of float32 lose digits below 1e-38

Embed = Callable[[Inputs], np.ndarray]
"""Inputs -> embeddings (B, D) float32. It may have a method flops(inputs), FLOPs per row; see raee_encoders.py."""


class Neighbours(NamedTuple):
    """The result of a search, nearest first."""

    rows: np.ndarray  # (B, k) int64, into the datastore's values, labels and texts
    distances: np.ndarray  # (B, k) float32, squared L2 between unit vectors, from 0 to 4


def new_index(dimension: int) -> Any:
    """An empty hnswlib index for squared L2 distances. Raises ValueError if hnswlib is not installed."""
    try:
        import hnswlib
    except ModuleNotFoundError:
        raise ValueError(
            "a datastore needs hnswlib, which is not installed: pip install hnswlib (it may need a C++ compiler)"
        ) from None
    return hnswlib.Index("l2", dimension)


def unit_length(embeddings: np.ndarray) -> np.ndarray:
    """(B, D) -> (B, D) float32 of length 1. Raises ValueError for embeddings that are zero or not finite."""
    embeddings = np.asarray(embeddings, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # raises below
        length = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    if not (np.isfinite(length) & (length > LEAST_LENGTH)).all():
        raise ValueError("expected embeddings that are finite and not zero, found another; correct the encoder")
    return embeddings / length


@dataclass(eq=False)
class Datastore:
    """N collected examples, and an index of their embeddings, which is built if none is given.

    encoder: a unique name of the encoder of the embeddings. exits: the layer of each of the K exits; 0 is the embedding
    layer. embeddings (N, D) of length 1. Raises ValueError if the parts do not fit each other, or without hnswlib.
    """

    encoder: str
    exits: tuple[int, ...]
    embeddings: np.ndarray  # (N, D) float32
    values: np.ndarray  # (N, K) float32
    labels: np.ndarray  # (N,) int64
    texts: Sequence[tuple[str, ...]]
    shards: int = 1
    indexes: Sequence[Any] = ()  # one of hnswlib for each shard

    def __post_init__(self):
        self.values, self.labels = np.asarray(self.values, np.float32), np.asarray(self.labels, np.int64)
        if not len(self.embeddings) == len(self.values) == len(self) == len(self.texts) > 0 or (
            self.values.shape[1] != len(self.exits)
        ):
            raise ValueError(
                f"expected at least one row, and values of {len(self.exits)} exits, a label and a text for each, found "
                f"embeddings {self.embeddings.shape}, values {self.values.shape}, {len(self)} labels and "
                f"{len(self.texts)} texts"
            )
        self._threads = ThreadPoolExecutor(self.shards)
        if not self.indexes:
            self._build()
        for index in self.indexes:
            index.set_ef(EF)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dimension(self) -> int:
        """The width of an embedding, D."""
        return self.embeddings.shape[1]

    def _map_shards(self, work: Callable[[int], Any]) -> list:
        """work(shard) for every shard, at once."""
        return [work(0)] if self.shards == 1 else list(self._threads.map(work, range(self.shards)))

    def _build(self) -> None:
        """One thread adds the rows of a shard in their order, so an index is the same every time."""
        self.indexes = [new_index(self.dimension) for _ in range(self.shards)]
        parts = [self.embeddings[shard :: self.shards] for shard in range(self.shards)]
        for index, part in zip(self.indexes, parts):
            index.init_index(max(len(part), 1), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)

        def add(shard: int) -> None:
            if len(rows := parts[shard][start : start + ADDED_AT_ONCE]):
                self.indexes[shard].add_items(rows, num_threads=1)

        for start in tqdm(range(0, len(parts[0]), ADDED_AT_ONCE), desc="indexing", delay=2, leave=False):
            self._map_shards(add)

    def search(self, embeddings: np.ndarray, k: int) -> Neighbours:
        """The k nearest rows of each embedding (B, D), or all rows if there are fewer than k.

        A distance below SAME_TEXT is set to 0: rounding must not decide between copies of the query.
        Raises ValueError for embeddings of another encoder (dimension).
        """
        if np.ndim(embeddings) != 2 or np.shape(embeddings)[1] != self.dimension:
            raise ValueError(
                f"expected embeddings (B, {self.dimension}) of the encoder {self.encoder}, "
                f"found {np.shape(embeddings)}; give the encoder that the datastore was built with"
            )
        queries, k = unit_length(embeddings), min(k, len(self))

        def search_one(shard: int) -> tuple[np.ndarray, np.ndarray]:
            index = self.indexes[shard]
            numbers, distances = index.knn_query(queries, min(k, index.get_current_count()), num_threads=1)
            return numbers.astype(np.int64) * self.shards + shard, distances

        try:  # (B, at most k S): the candidates of all shards; of equal distances, the first shard's stay first
            rows, distances = (np.concatenate(parts, axis=1) for parts in zip(*self._map_shards(search_one)))
            order = np.argsort(distances, axis=1, kind="stable")[:, :k]
            rows, distances = (np.take_along_axis(values, order, axis=1) for values in (rows, distances))
        except RuntimeError:  # hnswlib's graph does not reach k rows, for example among many copies of one
            rows, distances = exact_search(self.embeddings, queries, k)
        return Neighbours(rows, np.where(distances < SAME_TEXT, np.float32(0), distances))

    def take(self, rows: np.ndarray) -> "Datastore":
        """A new datastore with the given rows (indices, a mask or a slice), in the given order."""
        rows = np.arange(len(self))[rows]
        arrays = {name: getattr(self, name)[rows] for name in ("embeddings", "values", "labels")}
        return replace(self, **arrays, texts=[self.texts[row] for row in rows], indexes=())

    # ---- On disk ----
    def save(self, folder: str | Path) -> None:
        """Write the datastore into a new folder. Raises OSError, which names the file, if the disk is full."""
        from safetensors.numpy import save

        (folder := Path(folder)).mkdir(parents=True)
        arrays = {"embeddings": self.embeddings, "values": self.values, "labels": self.labels}
        write_bytes(folder / ROWS, save(arrays | {"texts": np.frombuffer(json.dumps(self.texts).encode(), np.uint8)}))
        for index, name in zip(self.indexes, index_names(self.shards)):
            index.save_index(str(path := folder / name))  # does not report a full disk
            if not path.exists() or path.stat().st_size != index.index_file_size():
                raise OSError(f"{path}: could not be written completely; make room on the disk")
        description = {"encoder": self.encoder, "exits": list(self.exits), "shards": self.shards}
        files = {name: file_sha256(folder / name) for name in (ROWS, *index_names(self.shards))}
        write_json(folder / MANIFEST, {"format_version": FORMAT_VERSION, **description, "files": files})

    @classmethod
    def load(cls, folder: str | Path, encoder: str) -> "Datastore":
        """Open a datastore. Raises FileNotFoundError if there is none, ValueError if it is damaged, has another format
        or another encoder.
        """
        from safetensors.numpy import load

        path = (folder := Path(folder)) / ROWS
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{folder}: no datastore here; expected a folder with {MANIFEST} and {ROWS}")
        manifest = read_json(folder / MANIFEST, signed="format_version")
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{folder}: expected a datastore of format_version {FORMAT_VERSION}, found "
                f"{manifest.get('format_version')!r}; collect it again with this version: mini-ee train raee"
            )
        if manifest["encoder"] != encoder:
            raise ValueError(
                f"{folder}: encoder: expected {encoder}, found {manifest['encoder']}; "
                f"give that encoder, or collect again: mini-ee train raee"
            )
        if not path.is_file() or file_sha256(path) != manifest["files"][ROWS]:
            raise ValueError(
                f"{path}: missing, damaged, or of another datastore: its checksum is not the one in {MANIFEST}; "
                f"collect again: mini-ee train raee"
            )
        arrays, shards = load(path.read_bytes()), manifest["shards"]
        texts = [tuple(text) for text in json.loads(arrays.pop("texts").tobytes())]
        paths = {name: folder / name for name in index_names(shards)}
        indexes = []
        if all(path.is_file() and file_sha256(path) == manifest["files"][name] for name, path in paths.items()):
            indexes = [new_index(arrays["embeddings"].shape[1]) for _ in paths]
            for index, path in zip(indexes, paths.values()):
                index.load_index(str(path))
        return cls(encoder, tuple(manifest["exits"]), **arrays, texts=texts, shards=shards, indexes=indexes)


def index_names(shards: int) -> list[str]:
    """The file name of each shard's index."""
    return ["index.hnsw"] if shards == 1 else [f"index.{shard}.hnsw" for shard in range(shards)]


def exact_search(embeddings: np.ndarray, queries: np.ndarray, k: int) -> Neighbours:
    """The k nearest of the embeddings (N, D) to each query (B, D), all of length 1, by measuring every distance."""
    distances = np.stack([((embeddings - query) ** 2).sum(axis=1) for query in queries])
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return Neighbours(rows, np.take_along_axis(distances, rows, axis=1))
