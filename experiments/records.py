"""Records of trained runs: the outputs of every exit for every example. Rules can be replayed on them without a model.

A file holds all seeds of a method on a task. Numbers are stored as float16, so figures are always computed from what
was read back. Labels are not stored, because the data sets are not ours: `right` says where an exit is right. The label
of an example is then the prediction of an exit that is right. If every exit is wrong, it is the other one of two
classes, else UNKNOWN. Scores are equal.

The file is an npz of two arrays of bytes, compressed with LZMA:

about     JSON. Of each seed: what its writer says, what is equal for all examples, the dtype and shape of its arrays
outputs   the arrays of all seeds, name by name: of all numbers of an array the first byte, then the second, and so on

If two methods differ by their rules alone, their outputs are the same. Then one of them has the arrays, and the file of
the other one, in the same folder, contains its name instead.
"""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from mini_ee.lab.data.files import check_regular, write_bytes
from mini_ee.lab.recording import Record, Recorded

UNKNOWN = -1  # the label of an example for which every exit is wrong, if there are more than two classes
PARTS = ("reported", "held_out")


class SeedRecord(NamedTuple):
    """The outputs of one trained run on the reported and on the held-out examples, and how the run was made."""

    reported: Record
    held_out: Record  # rules are chosen on it
    about: dict  # JSON: settings, what was tried, default rule, processor seconds, versions


class Stored(NamedTuple):
    """A seed in a file."""

    about: dict  # of the SeedRecord
    parts: dict[str, dict]  # what is equal for all examples of a part
    arrays: dict[str, np.ndarray]  # by PART/NAME
    sha256: str  # of parts and arrays
    outputs_of: str | None = None  # the method in whose file the arrays are


def write_record(path: Path, seed: int, made: SeedRecord) -> SeedRecord:
    """Add a seed to the file, atomically, or replace it; returns the record as `read_records` reads it.

    Outputs that another file of the folder has are not stored again. Raises ValueError if labels are missing, if the
    task is a regression, or if a file of the folder is damaged.
    """
    arrays, parts = {}, {}
    for part, recorded in zip(PARTS, made[:2]):
        some, parts[part] = _to_arrays(recorded)
        arrays |= {f"{part}/{name}": np.ascontiguousarray(values) for name, values in some.items()}
    parts = json.loads(json.dumps(parts))  # as it is read back
    stored = Stored(made.about, parts, arrays, _sha256(parts, arrays))
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / "records.lock"):  # so that no two files name each other
        others = [other for other in sorted(path.parent.glob("*.npz")) if other != path]
        if same := [other for other in others if stored.sha256 in _by_sha256(other, outputs=False)]:
            stored = stored._replace(arrays={}, outputs_of=same[0].stem)
        write_bytes(path, _packed(_load(path) | {seed: stored}))
    return read_records(path)[seed]


def read_records(path: Path) -> dict[int, SeedRecord]:
    """Seed -> record; empty if there is no file. A seed whose outputs were in the file of another method is left out if
    that file has others now. Raises ValueError if a file is damaged.
    """
    complete = _complete(path)
    try:
        return {seed: _from_stored(stored) for seed, stored in complete.items()}
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: expected records of runs; remove the file, so that they are made again") from error


def read_about(path: Path) -> dict[int, dict]:
    """Seed -> `about` of what `read_records` reads, without its arrays. Raises ValueError like it."""
    return {seed: stored.about for seed, stored in _complete(path, outputs=False).items()}


def rounded(recorded: Record) -> Record:
    """The record as it is read back from a file. Raises ValueError like `write_record`."""
    return _from_part(*_to_arrays(recorded))


# ---- Files ----


def _complete(path: Path, outputs: bool = True) -> dict[int, Stored]:
    """What `_load` finds, with arrays from the files of other methods. Seeds that have no arrays there are left out."""
    seeds = _load(path, outputs)
    names = {stored.outputs_of for stored in seeds.values()} - {None}
    others = {name: _by_sha256(path.with_stem(name), outputs) for name in names}
    complete = {}
    for seed, stored in sorted(seeds.items()):
        if stored.outputs_of is None:
            complete[seed] = stored
        elif other := others[stored.outputs_of].get(stored.sha256):
            complete[seed] = other._replace(about=stored.about)
    return complete


def _load(path: Path, outputs: bool = True) -> dict[int, Stored]:
    """Seed -> what the file has of it. outputs: with its arrays."""
    if not path.exists():
        return {}
    check_regular(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            seeds = {int(seed): Stored(**fields) for seed, fields in json.loads(archive["about"].tobytes()).items()}
            content = archive["outputs"] if outputs else None
        return seeds if content is None else _unpacked(seeds, content)
    except Exception as error:  # zip, lzma, json and numpy raise many kinds
        message = f"{path}: expected records of runs, found a damaged file; remove it, so that they are made again"
        raise ValueError(message) from error


def _packed(seeds: dict[int, Stored]) -> memoryview:
    """The content of a file."""
    metadata, outputs = {}, []
    for seed, stored in seeds.items():
        kinds = {name: (values.dtype.str, values.shape) for name, values in stored.arrays.items()}
        metadata[seed] = stored._replace(arrays=kinds)._asdict()
    for name, seed in _order(seeds):
        values = seeds[seed].arrays[name]
        outputs.append(values.reshape(-1, 1).view(np.uint8).T.ravel())
    members = {"about": np.frombuffer(json.dumps(metadata, sort_keys=True).encode(), np.uint8)}
    members["outputs"] = np.concatenate([np.empty(0, np.uint8), *outputs])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as file:
        for name, values in members.items():
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
    return content.getbuffer()


def _unpacked(seeds: dict[int, Stored], content: np.ndarray) -> dict[int, Stored]:
    """The seeds with their arrays. Raises ValueError if they are others than `content` has."""
    at = 0
    for name, seed in _order(seeds):
        kind, shape = seeds[seed].arrays[name]
        size, count = np.dtype(kind).itemsize, int(np.prod(shape))
        numbers = np.ascontiguousarray(content[at : at + size * count].reshape(size, count).T)
        seeds[seed].arrays[name] = numbers.view(kind).reshape(shape)
        at += size * count
    if at != len(content):
        raise ValueError(f"expected {at} bytes, found {len(content)}")
    return seeds


def _order(seeds: dict[int, Stored]) -> list[tuple[str, int]]:
    """(name, seed) of all arrays, in the order of the file: what is alike is near to each other."""
    return sorted((name, seed) for seed, stored in seeds.items() for name in stored.arrays)


def _sha256(parts: dict, arrays: dict[str, np.ndarray]) -> str:
    sha256 = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for name, values in sorted(arrays.items()):
        sha256.update(f"{name} {values.dtype.str} {values.shape}".encode())
        sha256.update(values)
    return sha256.hexdigest()


def _by_sha256(path: Path, outputs: bool) -> dict[str, Stored]:
    """sha256 -> what a file has itself; nothing if there is no file."""
    return {stored.sha256: stored for stored in _load(path, outputs).values() if stored.outputs_of is None}


# ---- Arrays ----


def _to_arrays(recorded: Record) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays of a record, and what is equal for all its rows."""
    segments, logits = recorded.segments, recorded.logits
    if logits.shape[2] == 1:
        raise ValueError("expected classes or tokens, found a regression")
    flops, layer_passes, state_flops = segments.costs
    arrays = {"logits": logits.astype(np.float16), "flops": flops.astype(np.float32)}
    arrays["full"] = np.broadcast_to(np.asarray(recorded.full, np.float64), len(logits))
    for name, values in segments.measures.items():
        kind = np.float32 if name == "token_cost" else np.float16  # FLOPs are beyond float16
        arrays[f"measures/{name}"] = values.astype(kind if values.dtype.kind == "f" else np.int32)
    if recorded.groups is not None:
        arrays["groups"] = recorded.groups.astype(np.int32)
    else:
        if recorded.labels is None:
            raise ValueError("expected a record with labels")
        arrays["right"] = recorded.predictions == recorded.labels[:, None]
        arrays["predictions"] = recorded.predictions.astype(np.int8)
    decides = state_flops.get("exit_logit")  # no other measure of states is stored with its FLOPs
    constants = {"exits": segments.exits, "layer_passes": layer_passes, "state_flops": decides}
    return arrays, constants


def _from_stored(stored: Stored) -> SeedRecord:
    parts = []
    for part in PARTS:
        prefix = f"{part}/"
        arrays = {name.removeprefix(prefix): array for name, array in stored.arrays.items() if name.startswith(prefix)}
        parts.append(_from_part(arrays, stored.parts[part]))
    return SeedRecord(*parts, stored.about)


def _from_part(arrays: dict[str, np.ndarray], constants: dict) -> Record:
    """The record of which `_to_arrays` made these."""
    logits, groups, labels = arrays["logits"].astype(np.float32), arrays.get("groups"), None
    if groups is None:
        logits = _predicting(logits, arrays["predictions"])
        right = arrays["right"]
        labels = arrays["predictions"][np.arange(len(right)), right.argmax(axis=1)].astype(np.int64)
        two_classes = logits.shape[2] == 2  # then all exits agree, and the label is the other class
        others = 1 - arrays["predictions"][:, 0] if two_classes else np.full(len(right), UNKNOWN)
        labels = np.where(right.any(axis=1), labels, others)
    measures = {
        name.removeprefix("measures/"): values.astype(np.float32) if values.dtype.kind == "f" else values
        for name, values in arrays.items()
        if name.startswith("measures/")
    }
    flops, passes = arrays["flops"].astype(np.float64), constants["layer_passes"]
    state_flops = constants["state_flops"] and {"exit_logit": constants["state_flops"]}
    segments = Recorded(tuple(constants["exits"]), logits, flops, passes, measures, state_flops)
    return Record(segments, logits, arrays["full"], groups, labels)


def _predicting(logits: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Logits (N, K, C) whose largest value is at the prediction (N, K), also where float16 made two values equal."""
    chosen, most = predictions[..., None].astype(np.int64), logits.max(axis=2, keepdims=True)
    ambiguous = (logits == most).sum(axis=2, keepdims=True) > 1
    chosen_logits = np.take_along_axis(logits, chosen, axis=2)
    np.put_along_axis(
        logits, chosen, np.where(ambiguous, np.nextafter(most, np.float32(np.inf)), chosen_logits), axis=2
    )
    return logits
