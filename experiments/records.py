"""Records of trained runs: the outputs of every exit for every example. Rules can be replayed on them without a model.

A file holds all seeds of a method on a task. Numbers are stored as float16, so figures are always computed from what
was read back. Labels are not stored, because the data sets are not ours: `right` says where an exit is right. The label
of an example is then the prediction of an exit that is right. If every exit is wrong, it is the other one of two
classes, else UNKNOWN. Scores are equal.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from mini_ee.data.files import check_regular, write_bytes
from mini_ee.recording import Record, Recorded

UNKNOWN = -1  # the label of an example for which every exit is wrong, if there are more than two classes
PARTS = ("reported", "held_out")


class SeedRecord(NamedTuple):
    """The outputs of one trained run on the reported and on the held-out examples, and how the run was made."""

    reported: Record
    held_out: Record  # rules are chosen on it
    about: dict  # JSON: settings, what was tried, default rule, processor seconds, versions


def write_record(path: Path, seed: int, made: SeedRecord) -> SeedRecord:
    """Add a seed to the file, atomically, or replace it; returns the record as `read_records` reads it.

    Raises ValueError if labels are missing, or if the task is a regression.
    """
    arrays, about = {}, {"about": made.about, "parts": {}}
    for part, recorded in zip(PARTS, made[:2]):
        some, constants = _to_arrays(recorded)
        arrays |= {f"{seed}/{part}/{name}": values for name, values in some.items()}
        about["parts"][part] = constants
    arrays[f"{seed}/about"] = np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        others = {name: values for name, values in _load(path).items() if not name.startswith(f"{seed}/")}
        content = io.BytesIO()
        np.savez_compressed(content, **dict(sorted((others | arrays).items())))
        write_bytes(path, content.getbuffer())
    return read_records(path)[seed]


def read_records(path: Path) -> dict[int, SeedRecord]:
    """Seed -> record; empty if there is no file. Raises ValueError if the file is damaged."""
    arrays = _load(path)
    try:
        seeds = sorted({int(name.partition("/")[0]) for name in arrays})
        return {seed: _from_arrays(arrays, seed) for seed in seeds}
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: expected records of runs; remove the file, so that they are made again") from error


def read_about(path: Path) -> dict[int, dict]:
    """Seed -> `about` of its record, without its arrays. Raises ValueError like `read_records`."""
    found = _load(path, lambda name: name.endswith("/about"))
    return {int(name.partition("/")[0]): json.loads(value.tobytes())["about"] for name, value in found.items()}


def rounded(recorded: Record) -> Record:
    """The record as it is read back from a file. Raises ValueError like `write_record`."""
    return _from_part(*_to_arrays(recorded))


def _load(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    check_regular(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if wanted(name)}
    except Exception as error:  # zip, zlib and numpy raise many kinds
        message = f"{path}: expected records of runs, found a damaged file; remove it, so that they are made again"
        raise ValueError(message) from error


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
    constants = {"exits": segments.exits, "layer_passes": layer_passes, "state_flops": state_flops}
    return arrays, constants


def _from_arrays(arrays: dict[str, np.ndarray], seed: int) -> SeedRecord:
    found = json.loads(arrays[f"{seed}/about"].tobytes())
    parts = []
    for part in PARTS:
        prefix = f"{seed}/{part}/"
        own = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
        parts.append(_from_part(own, found["parts"][part]))
    return SeedRecord(*parts, found["about"])


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
    segments = Recorded(tuple(constants["exits"]), logits, flops, passes, measures, constants["state_flops"])
    return Record(segments, logits, arrays["full"], groups, labels)


def _predicting(logits: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Logits (N, K, C) whose largest value is at the prediction (N, K), also where float16 made two values equal."""
    chosen, most = predictions[..., None].astype(np.int64), logits.max(axis=2, keepdims=True)
    ambiguous = (logits == most).sum(axis=2, keepdims=True) > 1
    own = np.take_along_axis(logits, chosen, axis=2)
    np.put_along_axis(logits, chosen, np.where(ambiguous, np.nextafter(most, np.float32(np.inf)), own), axis=2)
    return logits
