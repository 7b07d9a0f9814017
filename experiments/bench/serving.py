"""The benchmark serve: an open load on three servers of one model, and the highest load that keeps p99 within a limit.

    whole    model.onnx without early exits; the waiting requests form a batch
    graph    model.onnx with its exit rule; a batch ends when its last row exits
    rebatch  one graph per segment; after each exit, remaining rows of different requests form new batches

The limit on p99 is that of `whole` at LOADED of its saturating load. Goodput is the highest load within the limit; the
seconds of a case are 1 / goodput.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.experiments.bench.common import minilm_of, row_of, three_exits
from mini_ee.experiments.bench.open_load import BURST, Answered, arrivals, goodput, offer, saturation
from mini_ee.lab.backbones.hub import BUILT_IN_MODEL
from mini_ee.lab.data.files import MANIFEST
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import load_task, toy_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import CPU
from mini_ee.lab.export.writer import export
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Never, Rule, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.serve.engines import RowEngine
from mini_ee.serve.worker import Worker

EXIT_SHARES = (0.6, 0.3)  # of all rows, at the first two of three exits: half of the layers are saved
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 1.8, 2.1)  # relative to the saturating load of `whole`
LOADED = 0.8
SECONDS, ROUNDS = 3.0, 3  # of each load; how often it is repeated
FITTED, SATURATING = 256, 200  # texts that fit the thresholds; texts that saturate a server
OVERLOADED = 3.0  # a server whose p99 exceeds the first limit so many times gets no higher load
REBATCH, GRAPH, LEAST_IN_TIME = 1 / 1.3, 1 / 1.3, 0.97  # largest ratios that pass; least share answered in time


def bench_serve(model: Path | None, seed: int, task: str | None = None) -> Iterator[dict]:
    """Goodput compared with that of `whole`, with the same limit on p99, for Poisson arrivals and for bursts.

    model: an exported folder with segments, whose rule is used; or the weights of MiniLM (default: random ones) with
    random heads and thresholds that save half of the layers. task: the folder of the sentences (default: built-in).
    """
    task = load_task(task) if task else toy_task()
    rows = task.split(task.default_split).texts
    texts = [rows[at] for at in np.random.default_rng(seed).permutation(len(rows))]
    with tempfile.TemporaryDirectory() as folder:
        exported = model is not None and (model / MANIFEST).is_file()
        path = model if exported else _export_random(model, texts, Path(folder), seed)
        runtime = Runtime(path, [CPU], threads=torch.get_num_threads())
        if runtime.config["unit"] == "tokens":
            raise ValueError(f"{path}: contains a decoder; this benchmark takes a classifier, or no --model")
        if len({*RowEngine(runtime).queues} - {"plan"}) == 1:
            raise ValueError(f"{path}: it has no segments; export the run with --segments")
        rule = runtime.rule if exported else half_saving(runtime, texts[:FITTED])
        for kind, burst in (("", 1), (" bursts", BURST)):
            yield from _against_whole(f"minilm goodput{{}}{kind}", runtime, rule, texts, (burst, seed))


def _export_random(model: Path | None, texts: list, folder: Path, seed: int) -> Path:
    """Export a model with random heads; returns the folder."""
    backbone = minilm_of(model, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        exits = RowExits(backbone, three_exits(backbone), num_labels=2, pool="first").eval()
    task = {"name": "sentences", "label_names": ["negative", "positive"], "metrics": ["accuracy"], "texts": 1}
    config = {"method": "joint", "unit": "rows", "num_labels": 2, "settings": {}, "task": task}
    tokenizer = Tokenizer.from_folder(model or BUILT_IN_MODEL)
    export(Run(folder, config, exits, tokenizer, Threshold(0.9)), folder / "exported", texts[:8], segments=True)
    return folder / "exported"


def half_saving(runtime: Runtime, texts: list) -> Threshold:
    """Thresholds with which EXIT_SHARES of these rows exit."""
    recorded = record(runtime.segments().by_segment(Never()), runtime.encode(texts), 16)
    confidence = recorded.confidence("max_probability")
    remaining, thresholds = np.arange(len(texts)), []
    for k, share in enumerate(EXIT_SHARES):
        cut = np.sort(confidence[remaining, k])[-round(share * len(texts))]
        thresholds.append(float(cut))
        remaining = remaining[confidence[remaining, k] < cut]
    return Threshold((*thresholds, 0.0))


def _against_whole(case: str, runtime: Runtime, rule: Rule, texts: list, drawn: tuple[int, int]) -> Iterator[dict]:
    servers = {
        "whole": partial(RowEngine, runtime, Never(), rebatch=False),
        "graph": partial(RowEngine, runtime, rule, rebatch=False),
        "rebatch": partial(RowEngine, runtime, rule),
    }
    for name in servers:  # warm up: the first batches of a graph are slower
        _with_worker(servers[name], partial(saturation, texts=texts[:32]))
    full = float(
        np.median([_with_worker(servers["whole"], partial(saturation, texts=texts[:SATURATING])) for _ in "123"])
    )
    loads = measured(servers, texts, full, drawn)
    at = [load["offered"] for load in loads["whole"]]
    limit = float(np.interp(LOADED * full, at, [load["p99"] for load in loads["whole"]]))
    good = {
        name: goodput([(load["offered"], load["p99"]) for load in some], limit * 1.0001) for name, some in loads.items()
    }
    for name, bar in (("rebatch", REBATCH), ("graph", GRAPH)):
        row = row_of(case.format(f" {name}"), 1 / good[name], 1 / good["whole"], bar)
        pairs = [(in_time(one, limit), in_time(whole, limit)) for one, whole in zip(loads[name], loads["whole"])]
        up_to_saturation = [pair for load, pair in zip(loads["whole"], pairs) if load["load"] <= 1 and pair[1]]
        least = min((one / whole for one, whole in up_to_saturation), default=0.0)
        row |= {"least": least, "holds": row["holds"] and least >= LEAST_IN_TIME}
        yield row | {
            "limit": limit,
            "saturation": full,
            "loads": _loads_json(loads, limit) if name == "rebatch" else [],
        }


def _with_worker(engine, do):
    """Call a function with a new worker of an engine."""
    with Worker(engine(), max_open=10**6) as worker:
        return do(worker)


def measured(servers: dict, texts: list, full: float, drawn: tuple[int, int]) -> dict[str, list[dict]]:
    """Each load on each server in turns, ROUNDS times: medians over rounds of p50, p95 and p99."""
    (burst, seed), loads, overloaded = drawn, {name: [] for name in servers}, set()
    for share in tqdm(LOADS, desc="loads", delay=2, leave=False):
        answered: dict[str, list[Answered]] = {name: [] for name in servers if name not in overloaded}
        for turn in range(ROUNDS if answered else 0):
            moments = arrivals(share * full, SECONDS, burst, seed + turn)
            for name in answered:
                answered[name].append(
                    _with_worker(servers[name], partial(offer, texts=texts, moments=moments, seed=turn))
                )
        for name, some in answered.items():
            p50, p95, p99 = np.median([answers.quantiles for answers in some], axis=0).tolist()
            seconds = np.concatenate([answers.seconds for answers in some])
            offered = float(np.mean([answers.rate for answers in some]))
            loads[name].append(
                {"load": share, "offered": offered, "p50": p50, "p95": p95, "p99": p99, "seconds": seconds}
            )
            first = loads["whole"][min(len(loads["whole"]) - 1, LOADS.index(LOADED))]["p99"]
            if share > 1 and p99 > OVERLOADED * first:
                overloaded.add(name)
    return loads


def in_time(load: dict, limit: float) -> float:
    """Answers per second within the limit."""
    return Answered(load["offered"], load["seconds"]).within(limit)


def _loads_json(loads: dict[str, list[dict]], limit: float) -> list[dict]:
    """One entry per server and load, for the JSON."""
    return [
        {"server": name, "in_time": in_time(load, limit)} | {key: load[key] for key in load if key != "seconds"}
        for name, some in loads.items()
        for load in some
    ]
