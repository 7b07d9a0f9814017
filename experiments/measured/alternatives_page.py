"""results/alternatives.md: what a user would take in place of exits, for the same fine-tuned model.

All of them answer the same examples of dev or test, on THREADS threads of one process. In a round each of them, in
another order, answers the same examples one by one and then in batches of BATCH; medians over ROUNDS rounds count.

    transformers         the model in torch
    whole graph          its ONNX graph, as torch.onnx writes it: what optimum exports
    optimized graph      the same after ONNX Runtime's optimizer of transformers
    int8 graph           its weights in int8, and its activations when they are known (dynamic quantization)
    OpenVINO, -int8      the graph in OpenVINO; quantized by nncf with CALIBRATED texts
    half of the layers   the first half of the layers, distilled from the model's logits on the same texts as the exits
    exits, -int8, -OpenVINO   `mini-ee add-exits`, with thresholds calibrated for each graph and engine
    exits, none taken         the same graph as exits, with a rule that stops no text
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch

from mini_ee.experiments.bench.common import load_transformers
from mini_ee.experiments.measured.add_exits_cases import AGREEMENT, call, stored
from mini_ee.experiments.measured.fine_tuning import BATCH, FineTuned, distilled, fine_tuned, minutes_of
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.data.tasks import Split
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.engine import Engine
from mini_ee.lab.rules import Never, Rule

TASKS, MODELS = ("TREC", "SST-2"), ("MiniLM", "DistilBERT", "MPNet")
TEXTS, CALIBRATED, TIMED, ROUNDS, THREADS, OPSET = 10_000, 300, 128, 5, 2, 17
REFERENCE = "whole graph"

Feeds = dict[str, np.ndarray]
Answer = Callable[[Feeds], np.ndarray]
"""Token ids and masks (B, T) -> logits (B, C)."""

MEMORY = """
import json, sys, numpy
def resident():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
kind, path, texts, before = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), resident()
if kind == "transformers":
    import torch, transformers
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        for ids in texts:
            model(torch.tensor([ids]))
elif kind == "openvino":
    import openvino
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for ids in texts:
        model({port.any_name: numpy.array([ids]) if port.any_name == "input_ids" else numpy.array([[1] * len(ids)])
               for port in model.inputs if port.any_name in ("input_ids", "attention_mask")})
else:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    for ids in texts:
        feeds = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "token_type_ids": [[0] * len(ids)]}
        session.run(["logits"], {name: numpy.array(feeds[name]) for name in names})
print(resident() - before)
"""


class Alternative(NamedTuple):
    """A way to answer. kind, path: what MEMORY opens, None: not measured. minutes: of processor time, to make it."""

    answer: Answer
    kind: str | None
    path: Path
    minutes: float


def alternatives(sources: Sources, work: Path, name: str) -> dict:
    """The rows of a model on every task."""
    return {name: [stored(work, f"{task} {name}", partial(measure, sources, work, task, name)) for task in TASKS]}


def measure(sources: Sources, work: Path, task: str, name: str) -> dict:
    """All alternatives of one fine-tuned model: made, then timed in turns, then tested."""
    torch.set_num_threads(THREADS)
    model = fine_tuned(sources, work, task, name, 0)
    folder = work / "alternatives" / f"{task}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_transformers().AutoTokenizer.from_pretrained(model.folder)
    ways = dict(_ways(model, folder, tokenizer))
    seconds = {size: _timed(ways, _batches(tokenizer, model.test.take(slice(TIMED)), size)) for size in (1, BATCH)}
    model_labels, batches = model.logits.argmax(axis=1), _batches(tokenizer, model.test, BATCH)
    texts = json.dumps([feeds["input_ids"][0].tolist() for feeds in _batches(tokenizer, model.test.take(slice(8)), 1)])
    rows = []
    for way_name, way in ways.items():
        label = np.concatenate([way.answer(feeds) for feeds in batches]).argmax(axis=1)
        row = {"name": way_name, "agreement": float((label == model_labels).mean())}
        row |= {"score": float((label == model.test.labels).mean()), "minutes": round(way.minutes, 3)}
        row |= {f"time_{size}": seconds[size][way_name] / seconds[size][REFERENCE] for size in seconds}
        rows.append(row | {"disk_mb": _megabytes(way.path), "memory_mb": _memory(way, texts)})
    milliseconds = {f"ms_{size}": 1e3 * seconds[size][REFERENCE] / TIMED for size in seconds}
    return {"task": task, "model": name, "examples": len(model_labels), "rows": rows} | milliseconds


# ---- What is compared ----
def _ways(model: FineTuned, folder: Path, tokenizer):
    """(name, alternative), one after the other."""
    import openvino
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model

    whole, optimized, int8 = (folder / f"{name}.onnx" for name in ("whole", "optimized", "int8"))
    yield "transformers", Alternative(_of_torch(model.folder), "transformers", model.folder, 0.0)
    seconds = _processor_seconds(partial(write_onnx, model.folder, whole))
    yield REFERENCE, Alternative(_of_onnx(whole), "onnx", whole, seconds / 60)
    config = load_transformers().AutoConfig.from_pretrained(model.folder)  # for the optimizer, a DistilBERT is a BERT
    sizes = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
    more = _processor_seconds(lambda: optimize_model(str(whole), "bert", **sizes).save_model_to_file(str(optimized)))
    yield "optimized graph", Alternative(_of_onnx(optimized), "onnx", optimized, (seconds + more) / 60)
    more = _processor_seconds(lambda: quantize_dynamic(whole, int8, weight_type=QuantType.QInt8))
    yield "int8 graph", Alternative(_of_onnx(int8), "onnx", int8, (seconds + more) / 60)
    yield "OpenVINO", Alternative(_of_openvino(whole), "openvino", whole, seconds / 60)
    feeds = [_feeds(tokenizer, [text]) for text in model.texts[:CALIBRATED]]
    more = _processor_seconds(partial(_quantized, openvino, whole, folder / "int8.xml", feeds))
    yield "OpenVINO int8", Alternative(_of_openvino(folder / "int8.xml"), "openvino", folder / "int8.xml", more / 60)
    half, half_onnx = folder / "half", folder / "half.onnx"
    if not half.exists():
        distilled(model, half, TEXTS)
    more = _processor_seconds(partial(write_onnx, half, half_onnx))
    yield "half of the layers", Alternative(_of_onnx(half_onnx), "onnx", half_onnx, minutes_of(half) + more / 60)
    yield from _exits(model, folder)


def _exits(model: FineTuned, folder: Path):
    """With exits, in float32 and int8, and in OpenVINO. Each has thresholds of its own."""
    out, texts = folder / "exits", folder / "exits.jsonl"
    minutes = stored(folder, "exits", partial(call, model, out, TEXTS, 0))["processor_minutes"]
    exported = {"exits": out / "exported", "exits, int8": folder / "int8", "exits, OpenVINO": folder / "openvino"}
    for name, path in exported.items():
        engine = Engine("openvino", "f32") if "OpenVINO" in name else Engine()
        make = partial(_calibrated, out, path, texts, engine)
        more = 0.0 if name == "exits" else stored(folder, name, make)["minutes"]
        runtime = engine.open(path, threads=THREADS)
        kind = None if "Open" in name else "onnx"
        yield name, Alternative(_of_runtime(runtime, runtime.rule), kind, path, minutes + more)
        if name == "exits":
            yield "exits, none taken", Alternative(_of_runtime(runtime, Never()), None, path, minutes)


def _calibrated(out: Path, path: Path, texts: Path, engine: Engine) -> dict:
    """Make the export in int8, or for another engine, with thresholds of its own: minutes of processor time."""
    calibrate = ["calibrate", path, "--text", texts, "--epsilon", AGREEMENT, *engine.options.split()]
    shutil.rmtree(path, ignore_errors=True)
    seconds = 0.0
    if engine == Engine():
        seconds = _processor_seconds(partial(_command, "export", out / "run", "--int8", "--out", path))
        calibrate += ["--batch-size", 1]  # in int8 a prediction depends on its batch
    else:
        shutil.copytree(out / "exported", path)
    return {"minutes": (seconds + _processor_seconds(partial(_command, *calibrate))) / 60}


def write_onnx(folder: Path, path: Path) -> None:
    """The whole graph of a folder of transformers, by torch's exporter, with batches and lengths of any size."""
    kind = load_transformers().AutoModelForSequenceClassification
    network = kind.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(1000, 2000, (2, 16))
    names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "tokens"}
    settings = {"input_names": names, "output_names": ["logits"], "opset_version": OPSET, "dynamo": False}
    with torch.inference_mode():
        arguments = (ids, torch.ones_like(ids))
        torch.onnx.export(network, arguments, str(path), dynamic_axes=dict.fromkeys(names, axes), **settings)


def _quantized(openvino, whole: Path, out: Path, feeds: list[Feeds]) -> None:
    import nncf

    network = openvino.Core().read_model(whole)
    names = [port.any_name for port in network.inputs]
    rows = nncf.Dataset([{name: feed[name] for name in names} for feed in feeds])
    openvino.save_model(nncf.quantize(network, rows, model_type=nncf.ModelType.TRANSFORMER), out)


# ---- How each answers ----
def _of_torch(folder: Path) -> Answer:
    network = load_transformers().AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def answer(feeds: Feeds) -> np.ndarray:
        with torch.inference_mode():
            return network(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits.numpy()

    return answer


def _of_onnx(path: Path) -> Answer:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after a run, as in export/sessions.py
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(["logits"], feeds)[0]


def _of_openvino(path: Path) -> Answer:
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda feeds: compiled(feeds)["logits"].copy()


def _of_runtime(runtime, rule: Rule) -> Answer:
    """An export with exits: a rule stops each row."""
    segments = runtime.segments()

    def answer(feeds: Feeds) -> np.ndarray:
        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        return early_exit(segments, rule, Inputs(ids, mask, np.zeros_like(ids), (("",),) * len(ids))).logits

    return answer


# ---- Measuring ----
def _timed(ways: dict[str, Alternative], batches: list[Feeds]) -> dict[str, float]:
    """Median seconds for all batches; in each round all alternatives take turns, after one batch to warm up."""
    seconds, random = {name: [] for name in ways}, np.random.default_rng(0)
    for _ in range(ROUNDS):
        for name in random.permutation(list(ways)):
            ways[name].answer(batches[0])
            begin = time.perf_counter()
            for feeds in batches:
                ways[name].answer(feeds)
            seconds[name].append(time.perf_counter() - begin)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def _batches(tokenizer, rows: Split, size: int) -> list[Feeds]:
    return [_feeds(tokenizer, rows.texts[at : at + size]) for at in range(0, len(rows), size)]


def _feeds(tokenizer, texts: list) -> Feeds:
    made = tokenizer(*map(list, zip(*texts)), padding=True, truncation=True, max_length=128, return_tensors="np")
    return {name: made[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def _processor_seconds(make: Callable[[], object]) -> float:
    """Processor seconds of this process and of those that it waited for."""
    begin = sum(os.times()[:4])
    make()
    return sum(os.times()[:4]) - begin


def _command(*arguments) -> None:
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--threads", str(THREADS)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _megabytes(path: Path) -> float:
    """Of the weights: a file with what stands beside it under its name, or a folder."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in (".onnx", ".safetensors", ".onnx_data")]
    else:
        files = [path, path.with_suffix(".bin")]
    return round(sum(file.stat().st_size for file in files if file.exists()) / 1e6, 1)


def _memory(way: Alternative, texts: str) -> float | None:
    """Resident megabytes of a process that has answered eight texts, libraries included."""
    if way.kind is None:
        return None
    path = way.path / "onnx" / "model.onnx" if way.kind == "onnx" and way.path.is_dir() else way.path
    command = [sys.executable, "-c", MEMORY, way.kind, str(path), texts]
    return round(float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout), 1)


PARTS = {name: partial(alternatives, name=name) for name in MODELS}


def page_figures(figures: dict) -> dict:
    """The cases of each model and task, a table of them side by side, and their rows by name for the sentences."""
    cases = [case for name in MODELS for case in figures[name]]
    ways = zip(*(case["rows"] for case in cases), strict=True)
    return {
        "tables": cases,
        "columns": [f"{case['model']}, {case['task']}" for case in cases],
        "side_by_side": [
            [way[0]["name"], *(f"{row['time_1']:.2f} ({100 * row['agreement']:.1f})" for row in way)] for way in ways
        ],
        "of": {(case["model"], case["task"]): {row["name"]: row for row in case["rows"]} for case in cases},
        **{"wanted": AGREEMENT, "batch": BATCH, "timed": TIMED, "rounds": ROUNDS, "threads": THREADS},
        "calibrated": CALIBRATED,
        "reference": REFERENCE,
    }
