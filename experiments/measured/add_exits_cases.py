"""Measured cases of results/add-exits.md: `mini-ee add-exits` on fine-tuned models, one process per call.

The JSON of a case is stored in work/cases as soon as it is measured, so an interrupted measurement can be continued.
"""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.experiments.bench.common import load_transformers
from mini_ee.experiments.measured.command import cost_of_command
from mini_ee.experiments.measured.fine_tuning import MODELS, SEEDS, FineTuned, fine_tuned, minutes_of
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import Task, load_task, subset
from mini_ee.lab.evaluation.row_evaluation import measure_seconds, timed_batches
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import predictions, record
from mini_ee.lab.rules import Never
from mini_ee.lab.training.few_exits import savings_curve

COUNTS = {"SST-2": (1_000, 3_000, 10_000), "TREC": (1_000, 3_000), "MRPC": (10_000,), "SICK-R": (3_000,)}
"""Task -> numbers of texts without labels, at most; a call gets all if there are fewer."""

AGREEMENT, BATCH = 0.99, 32
LARGER = {"model": "MPNet", "task": ("SST-2", "TREC", "MRPC")}  # a model of BERT-base's size
EXIT_0 = {"task": ("SST-2", "TREC"), "model": "MiniLM", "texts": 3_000}
KEPT, COMPARED = ("SST-2", "MiniLM", 3_000), 1_000  # the call with seed 0 whose export is kept
SERVED, SHADOW, REQUESTS = {"SST-2": "dev", "MR": "test", "TREC": "train"}, 0.5, 800
DIGITS, MEMORY = 5, "SST-2"


def stored(work: Path, name: str, measure: Callable[[], dict]) -> dict:
    """The JSON of a case, measured if the work folder does not have it."""
    path = work / "cases" / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measure())
    return read_json(path)


# ---- One call of add-exits ----
def call(model: FineTuned, out: Path, count: int, seed: int, *options) -> dict:
    """Run `mini-ee add-exits` in its own process: texts, minutes of processor time, and peak memory in MB."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = out.with_suffix(".jsonl")
    text_count = model.write_texts(texts, count)
    command = "add-exits", model.folder, "--text", texts, "--out", out, "--seed", seed, "--threads", 1
    return {"texts": text_count} | cost_of_command(*command, *options)


def tested(model: FineTuned, out: Path) -> dict:
    """What the finished call gives on the examples of dev or test, compared with transformers' own logits."""
    summary, model_predictions, labels = read_json(out / "summary.json"), predictions(model.logits), model.test.labels
    task = replace(model.task, tolerance=summary["tolerance"])
    figures = {name: summary[name] for name in ("pays", "exits", "required_agreement", "rows_needed", "tolerance")}
    figures |= {"guaranteed": summary["guarantee"] is not None, "used": summary["texts"]}
    figures |= {"agreement_own_test": summary["agreement"], "saved_own_test": summary["layers_saved"]}
    figures |= {"score": score(model.task, model_predictions, labels), "examples": len(labels)}
    if not summary["pays"]:
        return figures | {"agreement": 1.0, "score_with_exits": figures["score"], "layers_saved": 0.0, "time": 1.0}
    runtime = Runtime(out / "exported", threads=1)
    encoded = runtime.encode(model.test.texts)
    recorded = record(runtime.segments(), encoded, BATCH, "dev or test", runtime.whole_model())._replace(
        labels=model_predictions
    )
    both = [(runtime.whole_model(), Never(), encoded), (runtime.segments(), runtime.rule, encoded)]
    full, seconds = measure_seconds(both, timed_batches(encoded, 1))  # in turns; medians count
    answers = runtime.run(model.test.texts)
    late = [at for at, answer in enumerate(answers) if answer.exit == runtime.exits[-1]]
    differences = [float(abs(answers[at].logits - model.logits[at]).max()) for at in late]
    predicted = predictions(np.array([answer.logits for answer in answers]))
    curve = savings_curve(recorded, task, runtime.rule, summary["head_layers"])["curve"]
    return figures | {
        "agreement": float(task.agrees(predicted, model_predictions).mean()),
        "score_with_exits": score(model.task, predicted, labels),
        "layers_saved": 1 - float(np.mean([answer.layers for answer in answers])) / runtime.exits[-1],
        "time": float(seconds / full),
        "not_exited": len(late),
        "largest_difference": max(differences, default=0.0),
        "per_exit_agreement": [
            float(task.agrees(predicted, model_predictions).mean()) for predicted in recorded.predictions.T
        ],
        "curve": [[round(point[key], DIGITS) for key in ("layers_saved", "agreement", "net_saved")] for point in curve],
    }


def score(task: Task, predicted: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy, or of a regression the Spearman correlation."""
    return task.score(predicted, labels)["spearman" if task.regression else "accuracy"]


def case(sources: Sources, work: Path, task: str, name: str, seed: int, count: int, *options) -> dict:
    """A call and its test, measured unless it is stored. options: further options of the command."""
    title = " ".join(map(str, (task, name, seed, count, *options)))

    def measure() -> dict:
        torch.set_num_threads(1)
        model, out = fine_tuned(sources, work, task, name, seed), work / "calls" / title.replace(" ", "_")
        case_fields = {"task": task, "model": name, "seed": seed, "wanted": count}
        case_fields["fine_tuning_minutes"] = minutes_of(model.folder)
        figures = case_fields | call(model, out, count, seed, *options) | tested(model, out)
        if (task, name, count, seed, options) != (*KEPT, 0, ()):
            shutil.rmtree(out)
        return figures

    return stored(work, title, measure)


# ---- Models, exit 0 ----
def model_cases(sources: Sources, work: Path) -> dict:
    """All tasks and models: all with seed 0 come first."""
    cases = [
        case(sources, work, task, model, seed, count)
        for seed in range(SEEDS)
        for model in MODELS
        for task, counts in COUNTS.items()
        for count in counts
    ]
    return {"models": cases}


def larger_cases(sources: Sources, work: Path) -> dict:
    """A model of BERT-base's size: all tasks with seed 0 come first."""
    name, tasks = LARGER["model"], LARGER["task"]
    return {
        "larger": [case(sources, work, task, name, seed, COUNTS[task][-1]) for seed in range(SEEDS) for task in tasks]
    }


def memory_cases(sources: Sources, work: Path) -> dict:
    """Peak memory of the command, of each model with the fewest and with the most texts of a task."""

    def measure(name: str, count: int) -> dict:
        out = work / "calls" / "memory"
        figures = call(fine_tuned(sources, work, MEMORY, name, 0), out, count, 0)
        shutil.rmtree(out)
        return {"model": name, "texts": figures["texts"], "peak_mb": figures["peak_mb"]}

    few, *_, many = COUNTS[MEMORY]
    some = [(name, count) for name in MODELS for count in (few, many)]
    return {"memory": [stored(work, f"memory {name} {count}", partial(measure, name, count)) for name, count in some]}


def exit_0_cases(sources: Sources, work: Path) -> dict:
    """The exits that add-exits chose, and the same with exit 0 before them."""
    cases, (model, count) = [], (EXIT_0["model"], EXIT_0["texts"])
    for seed in range(SEEDS):
        for task in EXIT_0["task"]:
            without = case(sources, work, task, model, seed, count)
            exits = ",".join(map(str, (0, *without["exits"])))
            cases += [without, case(sources, work, task, model, seed, count, "--exits", exits)]
    return {"exit-0": cases}


# ---- The same labels as transformers ----
def exported(sources: Sources, work: Path) -> tuple[FineTuned, Path]:
    """The model and the folder of KEPT."""
    task, name, count = KEPT
    case(sources, work, task, name, 0, count)
    return fine_tuned(sources, work, task, name, 0), work / "calls" / f"{task}_{name}_0_{count}" / "exported"


def same_labels(sources: Sources, work: Path) -> dict:
    """Labels of model.onnx without exits, and with them, against transformers' pipeline on texts of no other use."""

    def measure() -> dict:
        (model, folder), correct = exported(sources, work), {}
        texts = [text for (text,) in model.texts[-COMPARED:]]
        pipeline = load_transformers().pipeline("text-classification", str(model.folder), device="cpu")
        expected = [answer["label"] for answer in pipeline(texts, truncation=True)]
        runtime = Runtime(folder, threads=1)
        for name, rule in (("never", Never()), ("chosen", runtime.rule)):
            answers = runtime.run(texts, rule=rule)
            correct[name] = sum(answer.label == label for answer, label in zip(answers, expected))
        return {"task": KEPT[0], "model": KEPT[1], "texts": len(texts)} | correct

    return {"same-labels": stored(work, "same labels", measure)}


# ---- Other texts than those that it was calibrated on ----
def shifts(sources: Sources, work: Path) -> dict:
    """Texts of other tasks through the exits of one, over HTTP with --shadow, without and with --tighten."""
    cases = []
    for name, split in SERVED.items():
        for tighten in (False, True):
            title = f"shift {name} {tighten}"
            cases.append(stored(work, title, lambda: shift(sources, work, name, split, tighten)))
    return {"shift": cases}


def shift(sources: Sources, work: Path, name: str, split: str, tighten: bool) -> dict:
    """One server, and one set of texts."""
    _, folder = exported(sources, work)
    rows = load_task(sources.find("data", name)).split(split)
    texts = [text for (text,) in subset(rows, min(REQUESTS, len(rows)), 0).texts]
    runtime = Runtime(folder, threads=1)
    full_labels = [answer.label for answer in runtime.run(texts, rule=Never())]
    served, metrics = serve(folder, texts, ["--epsilon", str(AGREEMENT), "--tighten"] if tighten else [])
    agreements = [answer["label"] == label for answer, label in zip(served, full_labels)]
    layers = [answer["layers"] for answer in served]
    return {
        "task": name,
        "tighten": tighten,
        "texts": len(texts),
        "served_agreement": float(np.mean(agreements)),
        "served_saved": 1 - float(np.mean(layers)) / runtime.exits[-1],
        "metrics": metrics,
    }


def serve(folder: Path, texts: list[str], options: list[str]) -> tuple[list[dict], dict]:
    """Answers of `mini-ee serve --shadow` to the texts one after the other, and its metrics of the agreement."""
    command = [sys.executable, "-m", "mini_ee", "serve", str(folder), "--port", "0", "--shadow", str(SHADOW), *options]
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)
    try:
        address = next(matches[0] for line in process.stderr if (matches := re.findall(r"http://[\w.:]+", line)))
        answers = [json.loads(_read(f"{address}/classify", {"text": text})) for text in texts]
        time.sleep(1)  # shadow rows run after the answer
        page = _read(f"{address}/metrics").decode()
    finally:
        process.terminate()
        process.communicate()
    wanted = r"^mini_ee_(agreement\{end=\"\w+\"\}|exit_drift|shadow_total|tightened_total) (\S+)$"
    return answers, {re.sub(r"\W+", " ", name).strip(): float(value) for name, value in re.findall(wanted, page, re.M)}


def _read(url: str, body: dict | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body and json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()
