"""A page in the browser for an exported folder of rows: `mini-ee export RUN --out DIR --web`.

exported/index.html, page.css, *.js  the page; `python -m http.server` in the folder is enough for it
exported/vendor/                     onnxruntime-web and a tokenizers library, as web/vendor.sh fetches them
exported/model_web.onnx              model.onnx as onnxruntime-web takes it: `threshold` and other settings are plain
                                     inputs, as it refuses values for inputs that have a default; its weights stand
                                     outside of all branches, as it looks for the file of those inside on a disk
exported/web.json                    what the page shows: labels, exits, the rule with its settings, what each setting
                                     keeps on the held-out rows, texts to try with their tokens
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, numpy_helper

from mini_ee import WrongArguments
from mini_ee.data.files import read_json, write_json
from mini_ee.export.builder import branches_of
from mini_ee.rules import Rule, rule_from_dict
from mini_ee.training.rule import KNOBS
from mini_ee.training.run import Run

SOURCES = Path(__file__).parent / "web"
PAGE = ("index.html", "page.css", "page.js", "chart.js", "rules.js", "model.js")
VENDOR = "vendor"

GRAPH, WEB_GRAPH = "model.onnx", "model_web.onnx"
EXAMPLES, CANDIDATES = 4, 64


def check_page(run: Run) -> None:
    """Raise WrongArguments where the page cannot show the run."""
    if run.unit != "rows":
        what = {"tokens": "a decoder that writes", "prompts": "a model that is read through a prompt"}[run.unit]
        raise WrongArguments(
            f"--web: the page is for classifiers of sentences; {run.folder} holds {what}; leave it out"
        )
    if run.rule.plans_from_texts:
        raise WrongArguments(f"--web: the rule {run.rule.name} looks texts up, which a page cannot; leave it out")
    special = [run.tokenizer.backend.num_special_tokens_to_add(pair) for pair in (False, True)]
    if run.config["task"]["texts"] == 2 and special[0] == special[1]:
        raise WrongArguments("--web: the tokenizer knows no pairs of sentences, and the page needs one that does")


def write_page(run: Run, folder: Path, texts: list[tuple[str, ...]]) -> None:
    """Add the page to an exported folder that has its graph, model.onnx. texts: some to try, as rows of the run."""
    settings = _write_web_graph(folder)
    for name in PAGE:
        shutil.copyfile(SOURCES / name, folder / name)
    if (SOURCES / VENDOR).is_dir():
        shutil.copytree(SOURCES / VENDOR, folder / VENDOR)
    encoded = run.encode(_examples(run, texts[:CANDIDATES]))
    about = {
        "method": run.config["method"],
        "task": run.config["task"]["name"],
        "labels": run.label_names,
        "texts": run.config["task"]["texts"],
        "exits": list(run.exits),
        "max_length": run.tokenizer.max_length,
        "rule": run.rule.to_dict(),
        "settings": settings,
        "curve": _curve(run),
        "examples": [{"texts": row, "ids": ids.tolist()} for row, ids in zip(encoded.texts, encoded.ids)],
    }
    write_json(folder / "web.json", about)


def _examples(run: Run, texts: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """EXAMPLES of the texts, those first that leave after as many layers as none before them."""
    layers = [answer.layers for answer in run.classify(texts)]
    order = sorted(range(len(texts)), key=lambda row: layers[row] in layers[:row])
    return [texts[row] for row in order[:EXAMPLES]]


def vendor_command(folder: Path) -> str | None:
    """What puts the libraries beside the page of this folder; None where they are there."""
    return None if (folder / VENDOR).is_dir() else f"sh {SOURCES / 'vendor.sh'} {folder / VENDOR}"


def _write_web_graph(folder: Path) -> dict:
    """Write model_web.onnx; returns its settings: input -> dtype and the values that are its default in model.onnx."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    graph = model.graph
    inputs = {each.name for each in graph.input}
    defaults = [each for each in graph.initializer if each.name in inputs]
    for each in defaults:
        graph.initializer.remove(each)
    for branch in branches_of(graph):
        graph.initializer.extend(_taken_from_branch(branch))
    onnx.save(model, folder / WEB_GRAPH)
    onnx.checker.check_model(folder / WEB_GRAPH, full_check=True)
    values = {each.name: numpy_helper.to_array(each) for each in defaults}
    return {name: {"dtype": value.dtype.name, "values": _numbers(value)} for name, value in values.items()}


def _taken_from_branch(graph: GraphProto) -> list[TensorProto]:
    """Take those initialisers out of a branch, and of its branches, whose values stand in a file."""
    taken = [each for each in graph.initializer if each.data_location == TensorProto.EXTERNAL]
    for each in taken:
        graph.initializer.remove(each)
    return taken + [each for branch in branches_of(graph) for each in _taken_from_branch(branch)]


def _numbers(values: np.ndarray) -> list:
    """As JSON holds them: infinities as strings."""
    return [value if np.isfinite(value) else str(value) for value in values.tolist()]


def _curve(run: Run) -> dict | None:
    """What the setting that moves keeps on the held-out rows, as metrics.json has it of such a rule; None: it has not.

    score: the task's metric, of several their mean; rows: how many were held out; setting: the graph's input; points:
    its value, the score, and the mean layers, the value ascending.
    """
    metrics, knob = read_json(run.folder / "metrics.json"), KNOBS.get(run.rule.name)
    for curve in metrics.get("curves", []):
        if _family(rule_from_dict(curve["rule"])) == _family(run.rule):
            rules = [rule_from_dict(curve["rule"] | {knob: value}) for value, *_ in curve["points"]]
            moved = [_fed(rule) for rule in rules]
            points = [(value, *kept) for (_, value), (_, *kept) in zip(moved, curve["points"])]
            score = " and ".join(run.config["task"]["metrics"])
            return {"score": score, "rows": metrics["rows_held"], "setting": moved[0][0], "points": points}
    return None


def _family(rule: Rule) -> dict:
    """The rule without the setting that moves."""
    return {name: value for name, value in rule.to_dict().items() if name != KNOBS.get(rule.name)}


def _fed(rule: Rule) -> tuple[str, float | str]:
    """The input of the graph that the rule's knob is, and its value."""
    settings = rule.graph_settings(1)
    name = "threshold" if "threshold" in settings else "patience"
    return name, _numbers(settings[name])[0]
