"""RAEE's datastore on disk. If a write is killed, the old or the new datastore is complete. Reading checks everything.

index.hnsw             the index with the vectors, as hnswlib writes it; with several shards (raee_shards.py)
                       index.0.hnsw, index.1.hnsw, ...
entries.safetensors    values (N, K), labels (N,), ids (N,) in the index, texts (JSON as bytes)
manifest.json          format_version, encoder, dimension, exits, counts, index parameters, and the sha256 of the others

The first two are written as NAME.next. Then the manifest is written, which makes them valid. Then they are renamed. A
file whose sha256 is not in the manifest is ignored. No torch here.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.data.files import file_sha256, read_json, write_bytes, write_json
from mini_ee.lab.data.tokenizer import text_rows
from mini_ee.lab.methods.raee_shards import MOST_SHARDS, SEED, Shards

FORMAT_VERSION = 1

MANIFEST, INDEX, ENTRIES, NEXT = "manifest.json", "index.hnsw", "entries.safetensors", ".next"


class Entries(NamedTuple):
    """The N rows of a datastore without their embeddings."""

    values: np.ndarray  # (N, K) float32
    labels: np.ndarray  # (N,) int64
    ids: np.ndarray  # (N,) int64, ascending: the id of each row in the index
    texts: list[tuple[str, ...]]


# ---- Writing ----
def write_datastore(folder: Path, about: dict, shards: Shards, entries: Entries, built_from: str | None) -> None:
    """Write a datastore, replacing an existing one. about: encoder, dimension, exits. built_from: see Datastore.save.

    Raises OSError, which names the file, if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        _finish_renaming(folder)
    names = [*index_names(len(shards.indexes)), ENTRIES]
    *indexes, rest = (folder / (name + NEXT) for name in names)
    shards.save(indexes)
    _write_entries(rest, entries)
    parameters = {"space": "l2", "M": shards.m, "ef_construction": shards.ef_construction, "ef": shards.ef}
    parameters |= {"random_seed": SEED, "shards": len(shards.indexes)}
    manifest = {"format_version": FORMAT_VERSION, **about, "rows": len(entries.labels), "vectors": len(shards)}
    manifest |= {
        "index": parameters,
        "files": {name: file_sha256(folder / (name + NEXT)) for name in (*names, ENTRIES)},
    }
    write_json(folder / MANIFEST, manifest | ({"built_from": built_from} if built_from else {}))
    for name in manifest["files"]:
        os.replace(folder / (name + NEXT), folder / name)


def index_names(shards: int) -> list[str]:
    """The file name of each shard."""
    return [INDEX] if shards == 1 else [f"index.{shard}.hnsw" for shard in range(shards)]


def _finish_renaming(folder: Path) -> None:
    """Rename the files that a killed write did not rename, before the next one writes files with the same names."""
    for name, digest in read_manifest(folder)["files"].items():
        path = folder / (name + NEXT)
        if path.is_file() and file_sha256(path) == digest:
            os.replace(path, folder / name)


def _write_entries(path: Path, entries: Entries) -> None:
    from safetensors.numpy import save

    texts = np.frombuffer(json.dumps(entries.texts).encode(), np.uint8)
    write_bytes(path, save(entries._asdict() | {"texts": texts}))


# ---- Reading ----
def read_datastore(folder: Path, encoder: str) -> tuple[dict, Entries, list[Path]]:
    """The manifest, the entries and the paths of the indexes, all checked but the content of the indexes.

    Raises FileNotFoundError if there is none, ValueError if it is damaged, has another format or another encoder, or
    was put together from parts of different datastores.
    """
    manifest = read_manifest(folder)
    if manifest["encoder"] != encoder:
        raise ValueError(
            f"{folder}: encoder: expected {encoder}, found {manifest['encoder']}; "
            f"give that encoder, or build the datastore again"
        )
    names = (*index_names(manifest["index"]["shards"]), ENTRIES)
    if set(manifest["files"]) != set(names):
        raise ValueError(f"{folder}: built by an older mini_ee, which used other file names; build it again")
    *indexes, entries = (_find(folder, name, manifest["files"][name]) for name in names)
    return manifest, _read_entries(entries, manifest["rows"], len(manifest["exits"])), indexes


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a datastore, checked. It names the encoder, for example.

    Raises FileNotFoundError if there is none, ValueError for another format or wrong values.
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
    if problem := next(_manifest_problems(manifest), None):
        raise ValueError(f"{folder / MANIFEST}: expected in {problem}")
    manifest["index"].setdefault("shards", 1)  # older manifests do not have it
    return manifest


def _manifest_problems(manifest: dict) -> Iterator[str]:
    """Values of a wrong type or out of range. Use only the first: the next checks rely on the ones before."""
    exits, index, files = (manifest.get(key) for key in ("exits", "index", "files"))
    index = index if isinstance(index, dict) else {}
    numbers: dict[str, tuple[Any, Any, int]] = {  # name: (value, least, most)
        "dimension": (manifest.get("dimension"), 1, 2**20),
        "rows": (manifest.get("rows"), 0, 2**31 - 1),
        "vectors": (manifest.get("vectors"), manifest.get("rows"), 2**31 - 1),
        "index.M": (index.get("M"), 2, 10_000),
        "index.ef_construction": (index.get("ef_construction"), index.get("M"), 2**31 - 1),
        "index.ef": (index.get("ef"), 1, 2**31 - 1),
        "index.shards": (index.get("shards", 1), 1, MOST_SHARDS),
    }
    for name, (value, least, most) in numbers.items():
        if type(value) is not int or not least <= value <= most:
            yield f"{name} a whole number from {least} to {most}, found {value!r}"
    if not isinstance(manifest.get("encoder"), str):
        yield f"encoder a text, found {manifest.get('encoder')!r}"
    ascending = isinstance(exits, list) and all(type(layer) is int for layer in exits) and sorted(set(exits)) == exits
    if not ascending or not exits or exits[0] < 0:
        yield f"exits ascending layers from 0, found {exits!r}"
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        yield f"files the sha256 of each, found {files!r}"


def _find(folder: Path, name: str, digest: str) -> Path:
    """The path of a file in the manifest: NAME, or NAME.next if the process was killed before the renaming."""
    paths = [path for path in (folder / name, folder / (name + NEXT)) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{folder / name}: no such file; build the datastore again")
    for path in paths:
        if file_sha256(path) == digest:
            return path
    raise ValueError(
        f"{folder / name}: damaged, or of another datastore: its checksum is not the one in {MANIFEST}; "
        f"build the datastore again"
    )


def _read_entries(path: Path, rows: int, exits: int) -> Entries:
    """Raises ValueError unless the file contains the entries of that many rows and exits."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    expected = {"values": (np.float32, (rows, exits)), "labels": (np.int64, (rows,)), "ids": (np.int64, (rows,))}
    try:
        arrays = load(path.read_bytes())
        texts = list(text_rows(json.loads(arrays["texts"].tobytes())))
        entries = Entries(arrays["values"], arrays["labels"], arrays["ids"], texts)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}; build the datastore again") from None
    found = {name: (arrays[name].dtype, arrays[name].shape) for name in expected}
    if found != expected or len(texts) != rows or not np.isfinite(entries.values).all():
        shapes = ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in found.items())
        raise ValueError(
            f"{path}: expected finite values, labels, ids and texts of {rows} rows, as in {MANIFEST}, "
            f"found {shapes} and {len(texts)} texts; build the datastore again"
        )
    return entries
