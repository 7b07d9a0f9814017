"""manifest.json, which describes an exported folder and has the SHA-256 of every file. No torch here."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mini_ee.rules import Fixed, Never, Patience, Policy, Rule, Threshold

FORMAT_VERSION = 5  # since onnx/model.onnx
MANIFEST = "manifest.json"
GRAPHS, MODEL, WEIGHTS = "onnx", "onnx/model.onnx", "onnx/model.onnx_data"  # names that Hugging Face's clients know
IDS = ("input_ids", "token_type_ids", "attention_mask")  # inputs of the graphs
OWN_THRESHOLD = "constant_own_threshold_float32"  # of the rule in model.onnx; `mini-ee calibrate` replaces it
STACKED = ("query", "key", "value")  # whose weights are one, `qkv`, for one product
RULES = {"never": Never, "fixed": Fixed, "threshold": Threshold, "patience": Patience, "policy": Policy}


def file_sha256(path: Path) -> str:
    """The digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: dict) -> str:
    """One digest over the content; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object with the checksum of its content."""
    path.write_text(json.dumps(content | {"sha256": json_sha256(content)}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict:
    """The manifest of a folder whose files are those that were exported; else FileNotFoundError or ValueError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no {MANIFEST} here; expected a folder that `mini-ee export` or --out wrote")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        digest, version, files = manifest.pop("sha256", None), manifest["format_version"], manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: expected the manifest of an export, found none ({error!r:.80})") from None
    if digest != json_sha256(manifest):
        problem = "is gone" if digest is None else "differs"
        raise ValueError(f"{path}: damaged or edited: the checksum that was written with it {problem}")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = "install a newer mini_ee" if newer else "export the run again"
        raise ValueError(f"{folder}: expected format_version {FORMAT_VERSION}, found {version!r}; {advice}")
    for name, digest in files:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; export the run again")
        if file_sha256(folder / name) != digest:
            raise ValueError(f"{folder / name}: expected the exported file, found another one; export the run again")
    return manifest


def rule_to_dict(rule: Rule) -> dict:
    """The rule in the manifest. A rule that plans from texts, such as RAEE's, is `never`: its plan is an input."""
    for name, kind in RULES.items():
        if type(rule) is kind:
            settings = json.dumps(asdict(rule)).replace("Infinity", '"inf"').replace('-"', '"-')  # type: ignore[call-overload]
            return {"name": name} | json.loads(settings)
    if rule.needs is not None:
        raise ValueError(f"the graph has the rules {', '.join(RULES)}, and plans; found {type(rule).__name__}")
    return {"name": "never"}


def rule_from_dict(settings: dict) -> Rule:
    """The rule of a manifest. Raises KeyError or ValueError for one that is not of the core."""
    given = dict(settings)
    kind = RULES[given.pop("name")]
    if kind is Threshold:  # JSON has no infinity, but "inf"
        tau = given["threshold"]
        given["threshold"] = tuple(map(float, tau)) if isinstance(tau, list) else float(tau)
    return kind(**given)


def graph_inputs(rule: Rule, exits: int) -> dict[str, np.ndarray]:
    """The inputs with which model.onnx stops by a rule; of a rule that decides at no exit, the last exit."""
    if isinstance(rule, Patience) and exits > 1:
        return {"patience": np.array([rule.patience])}
    if not isinstance(rule, Threshold | Policy) or exits == 1:
        return {"exit_at": np.array([rule.exit if isinstance(rule, Fixed) else exits - 1])}
    tau = rule.threshold if isinstance(rule, Threshold) else rule.least_logit
    values = [tau] * exits if isinstance(tau, int | float) else list(tau)
    if len(values) not in (exits - 1, exits):
        raise ValueError(f"expected one threshold or {exits}, one for each exit, found {len(values)}")
    return {"threshold": np.array(values[: exits - 1], np.float32)}
