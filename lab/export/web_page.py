"""A page that runs an exported classifier or decoder in the browser: `mini-ee export RUN --out DIR --web`.

exported/index.html, page.css, *.js  the page; serve the folder with `python -m http.server`
exported/vendor/                     onnxruntime-web and a tokenizers library. web/vendor.sh downloads them; the command
                                     runs it if npm is installed
exported/onnx/model_web.onnx         model.onnx for onnxruntime-web, which cannot override the default of an input: here
                                     `threshold` and other settings have no default. It cannot load external weights of
                                     a branch either: here all weights are in the main graph. The graph also returns
                                     the numbers that the rule compares with each of these inputs, see model_graph.py
exported/web.json                    data of the page: exits, the rule with its settings and a sentence about it, the
                                     curve of score and depth, example texts with their tokens; labels, or for a
                                     decoder the tokens at which it stops

The page does not compute the rule. It runs the graph, with other values of the rule's inputs when the slider moves.
"""

import inspect
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import TOY
from mini_ee.lab.early_exit import ExitResult
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.generation import generated_texts
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.export.sessions import GraphRule
from mini_ee.lab.rule_inputs import runtime_inputs, runtime_settings, runtime_values
from mini_ee.lab.rules import Rule, rule_from_dict
from mini_ee.lab.sweep import knob
from mini_ee.lab.training.default_rule import curve
from mini_ee.lab.training.run_folder import Run

SOURCES = Path(__file__).parent / "web"
PAGE = ("index.html", "page.css", "*.js")
VENDOR = "vendor"

EXAMPLES, CANDIDATES = 4, 64
FIRST = (  # examples of a model of the built-in reviews: the sentences of the first picture, docs/pictures/loop.svg
    "A charming film.",
    "For all its wonderful bed, the inn was awful!",
    "I expected to hate the film, but it was wonderful.",
)
CURVE_TOKENS = 64  # tokens after each prompt, for the curve of a decoder


def check_page(run: Run) -> None:
    """Raises WrongArguments if the page cannot show the run."""
    if run.embeds:
        raise WrongArguments(f"--web: expected a classifier or a decoder, {run.folder} gives embeddings; leave it out")
    if run.multi_label:
        raise WrongArguments(f"--web: expected a model of one label, {run.folder} gives a text several; leave it out")
    if run.unit != "tokens" and run.token_task is not None:
        raise WrongArguments(f"--web: expected a model of one label, {run.folder} labels tokens; leave it out")
    if run.unit == "prompts":
        what = f"{run.folder} is read through a prompt"
        raise WrongArguments(f"--web: expected a classifier of sentences or a decoder, {what}; leave it out")
    if run.rule.plans_from_texts:
        raise WrongArguments(f"--web: the rule {run.rule.name} retrieves texts, which a page cannot; leave it out")
    if run.unit == "tokens" and run.model.backbone.is_encoder_decoder:
        raise WrongArguments("--web: expected a decoder that reads prompts, here an encoder reads them; leave it out")
    if run.unit == "tokens":
        return
    if run.segments().tokens_exit:
        raise WrongArguments("--web: expected rows that exit, here tokens exit within a row; leave it out")
    special = [run.tokenizer.backend.num_special_tokens_to_add(pair) for pair in (False, True)]
    if run.config["task"]["texts"] == 2 and special[0] == special[1]:
        raise WrongArguments("--web: expected a tokenizer for pairs of sentences, this one has no pairs")


def write_page(run: Run, folder: Path, manifest: dict, texts: list[tuple[str, ...]] | list[str]) -> None:
    """Add the page to an exported folder that has model_web.onnx. texts: examples to choose from, rows or prompts."""
    for path in (path for pattern in PAGE for path in SOURCES.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    if (SOURCES / VENDOR).is_dir():
        shutil.copytree(SOURCES / VENDOR, folder / VENDOR)
    inputs = GraphRule(folder, manifest).defaults
    content = {
        "unit": run.unit,
        "method": run.config["method"],
        "exits": list(run.exits),
        "rule": run.rule.to_dict(),
        "about": _rule_text(run.rule, run.exits),
        "settings": {name: {"dtype": value.dtype.name, "values": _numbers(value)} for name, value in inputs.items()},
    }
    write_json(folder / "web.json", content | (_of_tokens if run.unit == "tokens" else _of_rows)(run, texts))


def _rule_text(rule: Rule, exits: tuple[int, ...]) -> dict:
    """The rule for the page: `words`, the first sentence about its class; `fixed`, settings that are no input of the
    graph; `compares`, the attribute of each input of the graph; `knob`, the help of the setting that the slider moves.
    """
    words, moved = inspect.getdoc(rule).split("\n\n")[0], {"name", *runtime_settings(rule)}
    fixed = {name: value for name, value in rule.to_dict().items() if name not in moved and not isinstance(value, list)}
    if "exit" in fixed:  # its layer
        fixed["exit"] = exits[fixed["exit"]]
    moves = knob(rule)
    help_text = rule.__dataclass_fields__[moves].metadata.get("help", moves) if moves else ""
    return {"words": " ".join(words.split()), "fixed": fixed, "compares": runtime_inputs(rule), "knob": help_text}


def _of_rows(run: Run, texts: list[tuple[str, ...]]) -> dict:
    """Entries of web.json that only a classifier has."""
    encoded = run.encode(_examples(run, texts[:CANDIDATES]))
    return {
        "task": run.config["task"]["name"],
        "labels": run.label_names,
        "texts": run.config["task"]["texts"],
        "max_length": run.tokenizer.max_length,
        "curve": _curve(run),
        "examples": [{"texts": row, "ids": ids.tolist()} for row, ids in zip(encoded.texts, encoded.ids)],
    }


def _of_tokens(run: Run, prompts: list[str]) -> dict:
    """Entries of web.json that only a decoder has."""
    config, prompts = run.model.backbone.config, prompts[:EXAMPLES]
    ids = [run.tokenizer.ids_of(prompt) for prompt in prompts]
    return {
        "max_length": run.model.backbone.max_written,
        "stop": config.stop_tokens,
        "curve": _curve_of_tokens(run, ids),
        "examples": [{"texts": [prompt], "ids": tokens} for prompt, tokens in zip(prompts, ids)],
    }


def _examples(run: Run, texts: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """EXAMPLES of the texts, first one of each exit layer. Of the built-in reviews they begin with FIRST."""
    task = run.config["task"]
    first = [(text,) for text in FIRST] if (task["name"], task["texts"]) == (TOY, 1) else []
    layers = [answer.layers for answer in run.classify(texts)]
    order = sorted(range(len(texts)), key=lambda row: layers[row] in layers[:row])
    return [*first, *(texts[row] for row in order)][:EXAMPLES]


def vendor_command(folder: Path) -> str | None:
    """The command that downloads the libraries of the page into this folder; None if it has them."""
    return None if (folder / VENDOR).is_dir() else shlex.join(("sh", str(SOURCES / "vendor.sh"), str(folder / VENDOR)))


def fetch_libraries(folder: Path, say: Callable[[str], None]) -> str | None:
    """Download the libraries of the page into this folder. Returns one line with the reason if that failed, else None.

    say: called with a line when the download starts. npm verifies the checksums of package-lock.json.
    """
    if not all(map(shutil.which, ("npm", "sh"))):
        return "npm is not installed"
    say("Downloading the libraries of the page with npm.")
    environment = os.environ | {"npm_config_fetch_retries": "0"}  # without a network, fail at once
    done = subprocess.run(shlex.split(vendor_command(folder)), capture_output=True, text=True, env=environment)
    lines = done.stderr.strip().splitlines() or [f"the script ended with status {done.returncode}"]
    return lines[0].strip() if done.returncode else None


def _numbers(values: np.ndarray) -> list:
    """Numbers for JSON: infinities as strings."""
    return [value if np.isfinite(value) else str(value) for value in values.tolist()]


def _curve(run: Run) -> dict | None:
    """The curve of the rule on the held-out rows, from metrics.json; None if it has no curve of such a rule.

    score: the task's metric, or the mean of several; of: the rows; setting: the input of the graph; points: its value,
    the score and the mean layers, ascending in the value.
    """
    metrics = read_json(run.folder / "metrics.json")
    for rule_curve in metrics.get("curves", []):
        if _family(rule_from_dict(rule_curve["rule"])) == _family(run.rule):
            score = " and ".join(run.config["task"]["metrics"])
            return {"score": score, "of": f"{metrics['rows_held']} held-out rows"} | _moved(
                run.rule, rule_curve["points"]
            )
    return None


def _curve_of_tokens(run: Run, prompts: list[list[int]]) -> dict | None:
    """The curve of a decoder: agreement of its tokens with the full model, on texts that the full model generates.

    own: agreement and mean layers of the run's own rule, which most often has a threshold per exit.
    """
    if knob(run.rule) is None or len(run.exits) < 2:
        return None
    backbone = run.model.backbone
    count = min(CURVE_TOKENS, backbone.max_written - max(map(len, prompts)))
    settings = {"greedy": True, "stop": backbone.config.stop_tokens}
    recorded = record_texts(run.model, generated_texts(backbone, prompts, len(prompts), count, **settings))
    predictions = recorded.predictions

    def agreement(result: ExitResult) -> float:
        return float((predictions[np.arange(len(predictions)), result.exit_index] == predictions[:, -1]).mean())

    result = recorded.replay(run.rule)
    curve_fields = {
        "score": "agreement with the full model",
        "of": f"{len(predictions)} tokens that the full model generated",
    }
    curve_fields |= {"own": [agreement(result), float(result.layers_run.mean())]}
    return curve_fields | _moved(run.rule, curve(recorded, run.rule, agreement))


def _moved(rule: Rule, points: list[list]) -> dict:
    """The input of the graph for the setting that moves, and the points with the values of that input."""
    setting = knob(rule)
    name = runtime_settings(rule)[setting]
    values = [runtime_values(rule_from_dict(rule.to_dict() | {setting: value}), 1)[name] for value, *_ in points]
    return {"setting": name, "points": [(*_numbers(value), *rest) for value, (_, *rest) in zip(values, points)]}


def _family(rule: Rule) -> dict:
    """The rule without the setting that moves."""
    return {name: value for name, value in rule.to_dict().items() if name != knob(rule)}
