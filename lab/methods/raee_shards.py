"""The index of RAEE's datastore in S shards: hnswlib indexes, built and searched in parallel by threads (hnswlib
releases Python's lock).

Vector `id` is number id // S of shard id % S, so all shards have about the same size. One thread builds each shard, in
the order of its vectors, so the shards are the same every time. A search finds the k nearest of every shard and merges
them by distance. This loses nothing: the k nearest of all vectors are among the k nearest of their shards.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mini_ee.lab.data.files import errors_name
from mini_ee.lab.methods.raee_index import CAPACITY, check_index

SEED = 0  # hnswlib draws the levels of its graph

MOST_SHARDS = 1024


class Shards:
    """S hnswlib indexes for squared L2 distances. Raises ValueError if hnswlib is not installed."""

    def __init__(self, dimension: int, count: int, m: int, ef_construction: int, ef: int):
        self.dimension, self.m, self.ef_construction, self.ef = dimension, m, ef_construction, ef
        self.indexes = [self._new() for _ in range(count)]
        for index in self.indexes:
            index.init_index(CAPACITY, M=m, ef_construction=ef_construction, random_seed=SEED)
            index.set_ef(ef)
        self._threads = ThreadPoolExecutor(count)

    def _new(self) -> Any:
        try:
            import hnswlib
        except ModuleNotFoundError:
            raise ValueError(
                "a datastore needs hnswlib, which is not installed: pip install hnswlib (it may need a C++ compiler)"
            ) from None
        return hnswlib.Index("l2", self.dimension)

    def __len__(self) -> int:
        """The number of vectors, deleted ones included."""
        return sum(index.get_current_count() for index in self.indexes)

    def _each(self, work: Callable[[int], object]) -> list:
        """work(shard) for every shard, in parallel."""
        count = len(self.indexes)
        return [work(0)] if count == 1 else list(self._threads.map(work, range(count)))

    def add(self, vectors: np.ndarray, threads: int) -> np.ndarray:
        """Append vectors (n, D) of length 1; returns their ids (n,). threads: number per shard."""
        first, count = len(self), len(self.indexes)
        ids = np.arange(first, first + len(vectors))

        def fill(shard: int) -> None:
            index, own = self.indexes[shard], ids % count == shard
            used, new = index.get_current_count(), int(own.sum())
            if used + new > index.get_max_elements():
                index.resize_index(2 * (used + new))  # doubled, so that n calls copy the index only log n times
            if new:
                index.add_items(vectors[own], ids[own] // count, num_threads=threads)

        self._each(fill)
        return ids

    def delete(self, ids: np.ndarray) -> None:
        """Mark vectors as deleted. They stay in the index and connect others, but are never found."""
        for number in ids:
            self.indexes[number % len(self.indexes)].mark_deleted(number // len(self.indexes))

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """The vectors of these ids: (n,) -> (n, D) float32."""
        vectors, count = np.empty((len(ids), self.dimension), np.float32), len(self.indexes)
        for shard, index in enumerate(self.indexes):
            own = ids % count == shard
            if own.any():
                vectors[own] = index.get_items(ids[own] // count)
        return vectors

    def search(self, queries: np.ndarray, k: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(B, D) -> the ids (B, k) of the k nearest and their squared distances (B, k), nearest first.

        ids: (N,) those that are not deleted, N >= k. Raises RuntimeError if the graph of a shard does not reach k.
        """
        count = len(self.indexes)
        sizes = np.bincount(ids % count, minlength=count).tolist()  # of each shard, without deleted vectors

        def search_one(shard: int) -> tuple[np.ndarray, np.ndarray]:
            rows, distances = self.indexes[shard].knn_query(queries, min(k, sizes[shard]), num_threads=1)
            return rows.astype(np.int64) * count + shard, distances  # the ids of numbers in this shard

        # (B, at most k S): the candidates of all shards. Of equal distances, the stable sort keeps the first shard's.
        nearest, distances = (np.concatenate(parts, axis=1) for parts in zip(*self._each(search_one)))
        order = np.argsort(distances, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(nearest, order, axis=1), np.take_along_axis(distances, order, axis=1)

    def save(self, paths: Sequence[Path]) -> None:
        """Write each shard to its path. Raises OSError if a file is too short: hnswlib does not report a full disk."""
        for index, path in zip(self.indexes, paths, strict=True):
            index.save_index(str(path))
            if not path.exists() or path.stat().st_size != index.index_file_size():
                raise OSError(f"{path}: could not be written completely; make room on the disk")
            with errors_name(path), open(path, "rb+") as file:
                os.fsync(file.fileno())

    def load(self, paths: Sequence[Path], vectors: int, ids: np.ndarray) -> None:
        """Check and read the shards. vectors: their number in all. ids: (N,) ascending, those that are not deleted."""
        count = len(self.indexes)
        for shard, path in enumerate(paths):
            size = len(range(shard, vectors, count))  # the number of ids with id % count == shard
            check_index(path, self.dimension, self.m, self.ef_construction, size, ids[ids % count == shard] // count)
            self.indexes[shard] = self._new()
            self.indexes[shard].load_index(str(path))
            self.indexes[shard].set_ef(self.ef)
