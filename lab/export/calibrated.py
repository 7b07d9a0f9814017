"""Another rule for an exported folder: `mini-ee calibrate EXPORTED`. No torch here.

The rule changes in manifest.json, in the thresholds that model.onnx has of its own, and in the model card. The
folder is written anew and then takes the place of the old one, so a killed call leaves one of them whole. A server that
has opened the old one keeps serving it.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mini_ee.export.manifest import MODEL, OWN_THRESHOLD
from mini_ee.lab.data.files import MANIFEST, atomic_folder, file_sha256, read_json, write_bytes, write_json
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.card import CARD, card
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import CPU
from mini_ee.lab.row_thresholds import THRESHOLD
from mini_ee.lab.rule_inputs import runtime_values, served_by
from mini_ee.lab.rules import Policy, Rule, rule_from_dict


def check_calibratable(runtime: Runtime, conformal: bool, ranks: bool) -> None:
    """Raises WrongArguments if the thresholds of an export cannot be replaced, or if onnx is not installed.

    conformal: the guarantee, which a policy can have too. ranks: whether the guarantee is about the top k of a query.
    """
    config, folder = runtime.config, runtime.folder
    if not find_spec("onnx"):
        raise WrongArguments("mini-ee calibrate EXPORTED needs onnx: pip install onnx")
    if runtime.embeds or "begins_with" in config:
        kind = "a sentence encoder" if runtime.embeds else "a decoder whose encoder reads prompts"
        expected = "expected a classifier or a decoder of running text"
        raise WrongArguments(f"{folder}: {expected}, found {kind}; calibrate its run, then export again")
    if ranks and (runtime.generates or runtime.label_names or runtime.num_texts != 2):
        raise WrongArguments(f"{folder}: --top-k is for a reranker, which gives a pair of texts one number")
    if not ranks and not runtime.generates and not runtime.label_names:
        advice = "; give --top-k if it ranks texts" if runtime.num_texts == 2 else ""
        raise WrongArguments(f"{folder}: expected a classifier, found a regression, which has no confidence{advice}")
    if len(runtime.exits) == 1:
        raise WrongArguments(f"{folder}: has one exit, so there is nothing to calibrate")
    if "model_web" in config["graphs"]:
        raise WrongArguments(f"{folder}: its page contains the thresholds; calibrate the run, then export again")
    rule = rule_from_dict(config["rule"])
    if not config.get("rule_in_graph", True) or THRESHOLD not in runtime_values(rule, len(runtime.exits) - 1):
        options = "--rule policy" if config.get("decides") else "--threshold .9"  # a policy or gate reads no head
        options = "--threshold 0 --measure low_score" if ranks else options
        expected = f"expected a graph with thresholds, found the rule {rule.name}"
        raise WrongArguments(f"{folder}: {expected}; export the run with {options}, then calibrate")
    if isinstance(rule, Policy) and not conformal:
        raise WrongArguments(
            f"{folder}: expected the rule threshold, found policy; calibrate it with --guarantee conformal"
        )


def write_calibrated(
    runtime: Runtime,
    out: Path,
    rule: Rule,
    guarantee: dict | None,
    exit_counts: list[int],
    measured: dict,
    curve: dict | None = None,
) -> str:
    """Write the folder of `runtime` with another rule to `out`, which may be that folder; returns its model id.

    measured: where the rows came from and what they showed, for the model card. curve: see threshold_curve.py.
    Raises WrongArguments if the graph does not contain the rule.
    """
    config = runtime.config
    exported_rule = rule_from_dict(config["rule"])
    if not served_by(rule, exported_rule):
        actual = f"{rule.name} on {getattr(rule, 'measure', None)}"
        expected = f"the rule of {MODEL}, {exported_rule.name} on {getattr(exported_rule, 'measure', None)}"
        raise WrongArguments(f"{runtime.folder}: expected {expected}, found {actual}; export the run with that measure")
    rule_fields = {"rule": rule.to_dict(), "guarantee": guarantee, "exit_counts": exit_counts, "calibration": measured}
    with atomic_folder(out, replace=out.resolve() == runtime.folder.resolve()) as partial:
        shutil.copytree(runtime.folder, partial, dirs_exist_ok=True)
        if not runtime.generates:  # the graph of a token has no defaults: it gets the thresholds at each call
            _set_thresholds(partial / MODEL, runtime_values(rule, len(runtime.exits) - 1)[THRESHOLD])
        manifest = read_json(partial / MANIFEST, signed="format_version") | rule_fields
        manifest["curve"] = curve
        manifest["files"][MODEL] = file_sha256(partial / MODEL)
        write_bytes(partial / CARD, card(manifest).encode())
        write_json(partial / MANIFEST, manifest)
        return Runtime(partial, [CPU], threads=1).model_id


def _set_thresholds(path: Path, thresholds: np.ndarray) -> None:
    """Replace the thresholds (K - 1,) that a graph has of its own."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path, load_external_data=False)
    (tensor,) = (initializer for initializer in model.graph.initializer if initializer.name == OWN_THRESHOLD)
    tensor.CopyFrom(numpy_helper.from_array(thresholds.reshape(tuple(tensor.dims)), OWN_THRESHOLD))
    write_bytes(path, model.SerializeToString())
