"""What an exported folder says of itself: manifest.json, checked when it is read. No torch here."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mini_ee.data.files import file_sha256, read_json

FORMAT_VERSION = 4  # since model.onnx

MANIFEST = "manifest.json"

BOTH = {"exits": [int], "rule": dict, "graphs": dict, "precision": str}

ROWS = BOTH | {
    "task": {"name": str, "texts": int, "label_names": (str,)},
    "num_labels": int,
    "max_length": int,
    "layer_passes": [int],
    "flops": [[[float]]],
    "state_flops": [float],
    "whole_flops": [[float]],
}
"""What a manifest must hold, and of which types, for a folder of rows: [int] has at least one number, (int,) any."""

BY_SEGMENT = {"by_segment": {"layer_passes": [int], "flops": [[[float]]]}}
"""The same of one with graphs by segment."""

TOKENS = BOTH | {
    "vocab_size": int,
    "max_tokens": int,
    "stop": (int,),
    "width": int,
    "cache_width": int,
    "decides": bool,
    "weights": {"layer": int, "attention": int, "head": int},
}
"""The same for a folder of tokens."""

FORMS = {"rows": ROWS, "prompts": ROWS, "tokens": TOKENS}


def read_manifest(folder: Path) -> dict:
    """The manifest of an exported folder, every file of which is the one that was exported."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no {MANIFEST} here; expected a folder that `mini-ee export` wrote")
    manifest = read_json(folder / MANIFEST, signed="format_version")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = "install a newer mini_ee" if newer else "export the run again"
        raise ValueError(f"{folder}: expected format_version {FORMAT_VERSION}, found {version!r}; {advice}")
    _check_values(manifest, folder)
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; export the run again")
        if file_sha256(path) != digest:
            raise ValueError(f"{path}: is not the file that was exported with {MANIFEST}; export the run again")
    return manifest


def _check_values(manifest: dict, folder: Path) -> None:
    """Raise ValueError where what the runtime takes from a manifest is missing, of a wrong type, or does not fit."""
    _check(manifest, {"unit": str, "files": dict}, folder)
    unit = manifest["unit"]
    if unit not in FORMS:
        raise ValueError(f"{folder}: {MANIFEST} has the unit {unit!r}, not {', '.join(FORMS)}; export the run again")
    _check(manifest, FORMS[unit], folder)
    if "encoder" in manifest:
        _check(manifest, {"encoder": {"name": str, "flops": [float]}}, folder)
    if "begins_with" in manifest:  # prompts are read apart
        _check(manifest, {"begins_with": [int]}, folder)
    if unit == "tokens":
        return
    names, classes = manifest["task"]["label_names"], manifest["num_labels"]
    if classes != (len(names) or 1):
        says = f"{MANIFEST} names {len(names)} labels for {classes} logits"
        raise ValueError(f"{folder}: {says}; export the run again")
    of_engines = [manifest]
    if f"segment_{manifest['exits'][0]}" in manifest["graphs"]:
        _check(manifest, BY_SEGMENT, folder)
        of_engines.append(manifest | manifest["by_segment"])
    for each in of_engines:
        exits, passes, flops, policies = (len(each[key]) for key in ("exits", "layer_passes", "flops", "state_flops"))
        pairs = *each["flops"], each["whole_flops"]
        if not exits == passes == flops == policies or any(len(pair) != 2 for pair in pairs):
            found = f"{exits} exits, the layers of {passes}, the costs of {flops} and of {policies} policies"
            raise ValueError(f"{folder}: {MANIFEST} has {found}, two each; export the run again")


def _check(manifest: dict, form: dict, folder: Path, where: str = "") -> None:
    """Raise ValueError where a manifest misses a key of the form, or holds a value of another type. See ROWS."""
    for key, kind in form.items():
        if key not in manifest:
            raise ValueError(f"{folder}: {MANIFEST} has no key {where + key!r}; export the run again")
        value = manifest[key]
        if isinstance(kind, dict) and isinstance(value, dict):
            _check(value, kind, folder, f"{where}{key}.")
        elif not _is(value, kind):
            raise ValueError(
                f"{folder}: {MANIFEST} holds a value of a wrong type for {where + key!r} ({value!r:.40}); "
                f"export the run again"
            )


def _is(value, kind) -> bool:
    """Whether a JSON value is of a type, as ROWS has them; whole numbers are at least 0, others finite."""
    if isinstance(kind, list | tuple):
        enough = isinstance(value, list) and len(value) >= isinstance(kind, list)
        return enough and all(_is(each, kind[0]) for each in value)
    if kind in (int, float):
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            return False
        return value >= 0 if kind is int else abs(value) < math.inf
    return isinstance(kind, type) and isinstance(value, kind)


@contextmanager
def blaming_manifest(folder: Path) -> Iterator[None]:
    """ValueError where what is opened here misses a setting, or finds one of a wrong type."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{folder}: {MANIFEST} has no key {error}; export the run again") from None
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: {MANIFEST} holds a value of a wrong type ({error}); export the run again"
        ) from None
