"""manifest.json, which describes an exported folder, and its checks. No torch here."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mini_ee.export.manifest import MANIFEST
from mini_ee.export.manifest import read_manifest as exported_files
from mini_ee.lab.data.files import how_to_download, run_config
from mini_ee.lab.errors import WrongArguments

COMMON = {"exits": [int], "rule": dict, "graphs": dict, "precision": str, "backbone": dict}

ROWS = COMMON | {
    "task": {"name": str, "texts": int, "label_names": (str,)},
    "backbone": {"vocab_size": int},
    "num_labels": int,
    "max_length": int,
    "layer_passes": [int],
    "flops": [[[float]]],
    "state_flops": [float],
    "whole_flops": [[float]],
}
"""Required keys and types for a folder of rows. [int]: a list of at least one number, (int,): of any length."""

BY_SEGMENT = {"by_segment": {"layer_passes": [int], "flops": [[[float]]]}}
"""The same for graphs by segment."""

TOKENS = COMMON | {
    "vocab_size": int,
    "max_tokens": int,
    "stop": (int,),
    "width": int,
    "cache_width": int,
    "decides": bool,
    "weights": {"layer": int, "attention": int, "head": int},
}
"""The same for a folder of tokens."""

DEPTH_KEYS = ("num_decoder_layers", "num_hidden_layers", "n_layers")
"""Keys of a backbone's config that say how many layers have exits: the first that it has counts."""

FORMS = {"rows": ROWS, "prompts": ROWS, "embeddings": ROWS | {"normalize": bool}, "tokens": TOKENS}


def output_of(unit: str) -> str:
    """The name that graphs give to the numbers of an exit: sentence_embedding (B, d), else logits (B, C)."""
    return "sentence_embedding" if unit == "embeddings" else "logits"


def _instead(folder: Path) -> str:
    """What to give in place of a folder without a manifest."""
    if run_config(folder) is not None:
        return f"this is a run, export it first: mini-ee export {folder} --out DIR"
    if (exported := folder / "exported" / MANIFEST).is_file():
        return f"did you mean {exported.parent}?"
    if (folder / "config.json").is_file() and not (folder / "onnx").is_dir():
        return f"if this is a fine-tuned model, add exits first: mini-ee add-exits {folder} --text FILE"
    return f"expected a folder that `mini-ee export` wrote{how_to_download(folder)}"


def read_manifest(folder: Path) -> dict:
    """The manifest of an exported folder. Checks that all files are those that were exported."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no {MANIFEST} here; {_instead(folder)}")
    manifest = exported_files(folder)
    _check_values(manifest, folder)
    return manifest


def _check_values(manifest: dict, folder: Path) -> None:
    """Raises ValueError if a value that the runtime needs is missing, has a wrong type, or contradicts another."""
    _check(manifest, {"unit": str, "files": dict}, folder)
    unit = manifest["unit"]
    if unit not in FORMS:
        raise ValueError(f"{folder}: {MANIFEST} has the unit {unit!r}, not {', '.join(FORMS)}; export the run again")
    _check(manifest, FORMS[unit], folder)
    exits, backbone = manifest["exits"], manifest["backbone"]
    layers = next((backbone[key] for key in DEPTH_KEYS if key in backbone), None)
    if exits[-1] != layers or any(above <= below for below, above in zip(exits, exits[1:])):
        problem = f"{MANIFEST} has the exits {exits!s:.100} of a model of {layers!r:.40} layers"
        raise ValueError(f"{folder}: {problem}, expected exits that ascend to the last layer; export the run again")
    if "encoder" in manifest:
        _check(manifest, {"encoder": {"name": str, "flops": [float]}}, folder)
    if "begins_with" in manifest:  # an encoder reads the prompts
        _check(manifest, {"begins_with": [int]}, folder)
    if unit == "tokens":
        return
    names, classes = manifest["task"]["label_names"], manifest["num_labels"]
    if unit != "embeddings" and classes != (len(names) or 1):
        problem = f"{MANIFEST} names {len(names)} labels for {classes} logits"
        raise ValueError(f"{folder}: {problem}; export the run again")
    of_engines = [manifest]
    if f"segment_{manifest['exits'][0]}" in manifest["graphs"]:
        _check(manifest, BY_SEGMENT, folder)
        of_engines.append(manifest | manifest["by_segment"])
    for engine in of_engines:
        exits, passes, flops, policies = (len(engine[key]) for key in ("exits", "layer_passes", "flops", "state_flops"))
        pairs = *engine["flops"], engine["whole_flops"]
        if not exits == passes == flops == policies or any(len(pair) != 2 for pair in pairs):
            problem = f"{exits} exits, the layers of {passes}, the costs of {flops} and of {policies} policies"
            raise ValueError(f"{folder}: {MANIFEST} has {problem}, two each; export the run again")


def _check(manifest: dict, form: dict, folder: Path, where: str = "") -> None:
    """Raises ValueError if a key of the form is missing, or has a value of another type. See ROWS."""
    for key, kind in form.items():
        if key not in manifest:
            raise ValueError(f"{folder}: {MANIFEST} has no key {where + key!r}; export the run again")
        value = manifest[key]
        if isinstance(kind, dict) and isinstance(value, dict):
            _check(value, kind, folder, f"{where}{key}.")
        elif not _is(value, kind):
            raise ValueError(
                f"{folder}: {MANIFEST} has a value of a wrong type for {where + key!r} ({value!r:.40}); "
                f"export the run again"
            )


def _is(value, kind) -> bool:
    """Whether a JSON value has a type as in ROWS. Ints are at least 0, floats finite."""
    if isinstance(kind, list | tuple):
        enough = isinstance(value, list) and len(value) >= isinstance(kind, list)
        return enough and all(_is(element, kind[0]) for element in value)
    if kind in (int, float):
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            return False
        return value >= 0 if kind is int else abs(value) < math.inf
    return isinstance(kind, type) and isinstance(value, kind)


@contextmanager
def blaming_manifest(folder: Path) -> Iterator[None]:
    """Turns errors about a missing or wrong setting into a ValueError that names the folder."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{folder}: {MANIFEST} has no key {error}; export the run again") from None
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: {MANIFEST} has a value of a wrong type ({error}); export the run again") from None
    except ValueError as error:
        if isinstance(error, WrongArguments) or str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from None
