"""RAEE's datastore: for each collected row its values, label and text, and an index of the embeddings (raee_shards.py).

No torch here: the runtime without torch retrieves with this file. hnswlib, which may have to be compiled, is imported
when a datastore is made or opened; everything else runs without it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.data.files import file_sha256, read_json, write_bytes, write_json
from mini_ee.data.progress import tqdm
from mini_ee.data.tokens import Encoded, Inputs, batches, text_rows
from mini_ee.methods.raee_shards import MOST_SHARDS, SEED, Shards

FORMAT_VERSION = 1

M, EF_CONSTRUCTION, EF = 16, 400, 256  # hnswlib's; recall@12 of SST-2 dev in train's 67,349 MiniLM embeddings: .9938

SAME = 1e-10  # squared distance between embeddings of one text in other batches; measured max 7.9e-13, MiniLM

SHORTEST = 1e-15  # length of an embedding that still has a direction: squares of float32 lose digits below 1e-38

MANIFEST, INDEX, ENTRIES, NEXT = "manifest.json", "index.hnsw", "entries.safetensors", ".next"

Embed = Callable[[Inputs], np.ndarray]
"""Inputs -> embeddings (B, D) float32. It may have a method flops(inputs), its cost a row; see raee_encoders.py."""


# The datastore
class Neighbours(NamedTuple):
    """What a search found, nearest first."""

    rows: np.ndarray  # (B, k) int64, into the datastore's values, labels and texts
    distances: np.ndarray  # (B, k) float32, squared L2 between unit vectors, from 0 to 4


class Datastore:
    """N collected rows: an index of their embeddings, their values (N, K), labels (N,) and texts.

    encoder: a name that tells the encoder of the embeddings from all others. exits: the layer of each exit; 0 is the
    embedding layer. Embeddings are scaled to length 1. On disk:

    index.hnsw             the index with the vectors, as hnswlib writes it (raee_index.py); if there are more shards
                           (raee_shards.py) index.0.hnsw, index.1.hnsw, ...
    entries.safetensors    values (N, K), labels (N,), ids (N,) in the index, texts (JSON as bytes)
    manifest.json          format_version, encoder, dimension, exits, counts, index parameters, and the sha256 of both

    `save` writes the first two as NAME.next, then the manifest, which makes them valid, then renames them. A kill
    leaves the old datastore or the new one: a file whose sha256 is not in the manifest is ignored.
    """

    sharded = Shards  # what holds its indexes

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
        self.encoder, self.dimension, self.exits, self.ef = encoder, dimension, tuple(exits), ef
        self.values = np.empty((0, len(self.exits)), np.float32)  # (N, K)
        self.labels = np.empty(0, np.int64)  # (N,)
        self.texts: list[tuple[str, ...]] = []
        self._ids = np.empty(0, np.int64)  # (N,) ascending: the rows' names in the index
        self._shards = self.sharded(dimension, shards, m, ef_construction, ef)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def embeddings(self) -> np.ndarray:
        """(N, D) float32, of length 1."""
        return self._shards.vectors(self._ids)

    @property
    def shards(self) -> int:
        """How many indexes there are."""
        return len(self._shards.indexes)

    def add(
        self,
        embeddings: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        texts: Iterable[tuple[str, ...]],
        threads: int = 1,
    ) -> None:
        """Append n rows: embeddings (n, D), values (n, K), labels (n,) and n texts.

        threads: of each shard; with more than one it is faster, but the index differs each time.
        Raises ValueError where the parts do not fit each other or the datastore.
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
        """Drop rows; later ones move up. Raises ValueError for a row that is not there.

        Their vectors stay in the index, which leads over them to others, but are never found. `take` makes an index
        without them.
        """
        rows = np.unique(np.asarray(list(rows), np.int64))
        if not np.isin(rows, range(len(self))).all():
            raise ValueError(f"expected rows from 0 to {len(self) - 1}, found {rows.min()} to {rows.max()}")
        self._shards.delete(self._ids[rows])
        self._ids, self.values, self.labels = (
            np.delete(array, rows, axis=0) for array in (self._ids, self.values, self.labels)
        )
        gone = set(rows.tolist())
        self.texts = [text for row, text in enumerate(self.texts) if row not in gone]

    def take(self, rows: np.ndarray) -> "Datastore":
        """A new datastore with the given rows (indices, a mask or a slice), in the given order."""
        rows = np.arange(len(self))[rows]
        parameters = {name: getattr(self._shards, name) for name in ("m", "ef_construction", "ef")}
        parameters["shards"] = self.shards
        part = type(self)(self.encoder, self.dimension, self.exits, **parameters)
        texts = [self.texts[row] for row in rows]
        part.add(self.embeddings[rows], self.values[rows], self.labels[rows], texts)
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
            ids, distances = self._shards.search(unit, k, self._ids)
            rows = np.searchsorted(self._ids, ids)
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
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            length = np.linalg.norm(embeddings, axis=1, keepdims=True)
        if not (np.isfinite(length) & (length > SHORTEST)).all():
            raise ValueError("expected embeddings that are finite and not zero, found others; correct the encoder")
        return embeddings / length

    def save(self, folder: str | Path, built_from: str | None = None) -> None:
        """Write the datastore, in the place of one that is there; a kill leaves the old one or the new one.

        built_from: a digest of the rows that an unfinished `build` collects, by which it finds itself again.
        Raises OSError that names the file where the disk is full.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():  # a kill may have left files that count under the names that are written now
            for name, digest in read_manifest(folder)["files"].items():
                path = folder / (name + NEXT)
                if path.is_file() and file_sha256(path) == digest:
                    os.replace(path, folder / name)
        names = index_names(self.shards)
        self._shards.save([folder / (name + NEXT) for name in names])
        self._save_entries(folder / (ENTRIES + NEXT))
        manifest = {
            "format_version": FORMAT_VERSION,
            "encoder": self.encoder,
            "dimension": self.dimension,
            "exits": list(self.exits),
            "rows": len(self),
            "vectors": len(self._shards),
            "index": {
                "space": "l2",
                "M": self._shards.m,
                "ef_construction": self._shards.ef_construction,
                "ef": self.ef,
                "random_seed": SEED,
                "shards": self.shards,
            },
            "files": {name: file_sha256(folder / (name + NEXT)) for name in (*names, ENTRIES)},
        }
        write_json(folder / MANIFEST, manifest | ({"built_from": built_from} if built_from else {}))
        for name in manifest["files"]:
            os.replace(folder / (name + NEXT), folder / name)

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
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest["encoder"] != encoder:
            raise ValueError(
                f"{folder}: encoder: expected {encoder}, found {manifest['encoder']}; "
                f"give that encoder, or build the datastore again"
            )
        about = {name.lower(): manifest["index"].get(name, 1) for name in ("M", "ef_construction", "ef", "shards")}
        names = (*index_names(about["shards"]), ENTRIES)
        if set(manifest["files"]) != set(names):
            raise ValueError(f"{folder}: an older mini_ee built it, which gave its files other names; build it again")
        *indexes, entries = (_find(folder, name, manifest["files"][name]) for name in names)
        store = cls(encoder, manifest["dimension"], tuple(manifest["exits"]), **about)
        store._load_entries(entries, manifest["rows"])
        store._shards.load(indexes, manifest["vectors"], store._ids)
        return store

    def _load_entries(self, path: Path, rows: int) -> None:
        """Raises ValueError where the file does not hold the entries of so many rows."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        expected = {
            "values": (np.float32, (rows, len(self.exits))),
            "labels": (np.int64, (rows,)),
            "ids": (np.int64, (rows,)),
        }
        try:
            arrays = load(path.read_bytes())
            self.texts = list(text_rows(json.loads(arrays["texts"].tobytes())))
            self.values, self.labels, self._ids = (arrays[name] for name in expected)
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}; build the datastore again") from None
        found = {name: (arrays[name].dtype, arrays[name].shape) for name in expected}
        if found != expected or len(self.texts) != rows or not np.isfinite(self.values).all():
            shapes = ", ".join(f"{name} {arrays[name].dtype} {arrays[name].shape}" for name in expected)
            raise ValueError(
                f"{path}: expected finite values, labels, ids and texts of {rows} rows, as {MANIFEST} says, "
                f"found {shapes} and {len(self.texts)} texts; build the datastore again"
            )


def index_names(shards: int) -> list[str]:
    """The file of each shard."""
    return [INDEX] if shards == 1 else [f"index.{shard}.hnsw" for shard in range(shards)]


def read_manifest(folder: str | Path) -> dict:
    """What a datastore says of itself, such as the encoder that it needs.

    Raises FileNotFoundError where there is none, ValueError for a manifest of another format or with wrong values.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no datastore here; expected a folder with {MANIFEST}, index and entries")
    manifest = read_json(folder / MANIFEST, signed="format_version")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: expected a datastore of format_version {FORMAT_VERSION}, "
            f"found {manifest.get('format_version')!r}; build it again with this version of mini_ee"
        )
    _check_manifest(folder / MANIFEST, manifest)
    return manifest


def _check_manifest(path: Path, manifest: dict) -> None:
    """Raise ValueError unless all values are of their types and in their ranges."""
    exits, index, files = (manifest.get(key) for key in ("exits", "index", "files"))
    about = index if isinstance(index, dict) else {}
    numbers = {  # name: (value, least, most)
        "dimension": (manifest.get("dimension"), 1, 2**20),
        "rows": (manifest.get("rows"), 0, 2**31 - 1),
        "vectors": (manifest.get("vectors"), manifest.get("rows"), 2**31 - 1),
        "index.M": (about.get("M"), 2, 10_000),
        "index.ef_construction": (about.get("ef_construction"), about.get("M"), 2**31 - 1),
        "index.ef": (about.get("ef"), 1, 2**31 - 1),
        "index.shards": (about.get("shards", 1), 1, MOST_SHARDS),
    }
    for name, (value, least, most) in numbers.items():
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{path}: expected in {name} a whole number from {least} to {most}, found {value!r}")
    if not isinstance(manifest.get("encoder"), str):
        raise ValueError(f"{path}: expected in encoder a text, found {manifest.get('encoder')!r}")
    ascending = isinstance(exits, list) and all(type(layer) is int for layer in exits) and sorted(set(exits)) == exits
    if not ascending or not exits or exits[0] < 0:
        raise ValueError(f"{path}: expected in exits ascending layers from 0, found {exits!r}")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"{path}: expected in files the sha256 of each, found {files!r}")


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


def exact_search(embeddings: np.ndarray, queries: np.ndarray, k: int) -> Neighbours:
    """What the index approximates: the k nearest of embeddings (N, D) to each query (B, D), all of length 1."""
    distances = np.stack([((embeddings - query) ** 2).sum(axis=1) for query in queries])
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return Neighbours(rows, np.take_along_axis(distances, rows, axis=1))


class Collected(NamedTuple):
    """N rows for a datastore, encoded for the embedder, with what each of K exits is worth on them."""

    encoded: Encoded
    values: np.ndarray  # (N, K)
    labels: np.ndarray  # (N,)
    exits: tuple[int, ...]  # (K,) layers
    shards: int = 1

    def sha256(self, encoder: str) -> str:
        """One digest over all that a datastore is built from, by which a resumed build knows its rows again."""
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
    """Embed N rows, index them in batches and write the datastore. Its rows stand from short to long.

    Every `save_every` rows what is done is saved in `folder`.building. After a kill the same call goes on from there.
    Raises FileExistsError where `folder` is there, ValueError where `folder`.building is of other rows.
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
            store = store or Datastore(encoder, np.shape(embeddings)[-1], exits, shards=shards)
            store.add(embeddings, values[rows], labels[rows], [encoded.texts[row] for row in rows])
            bar.update(len(rows))
            if len(store) - saved >= save_every:
                store.save(unfinished, built_from=source)
                saved = len(store)
    store.save(unfinished, built_from=source)
    os.rename(unfinished, folder)
    return store
