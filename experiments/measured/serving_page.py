"""results/serving.md: what load three servers bear, by the processor's clock and by the one on the wall.

wall       `mini-ee bench serve` as it is, for a machine that nothing else uses
processor  the same on a machine that others use, too: batches run as they are chosen, one after the other, on one
           thread. Time is what they take of the processor, on a clock that stands still otherwise: requests come at
           their moments on that clock. Neighbours then take no part in it, nor do HTTP, tokenizing and what threads
           cost each other.
"""

import os
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from mini_ee.evaluation.plots import can_draw
from mini_ee.experiments.bench import serving as bench
from mini_ee.experiments.bench.loads import draw_loads
from mini_ee.experiments.markdown import made_by_measuring, markdown_row, markdown_table, wrapped
from mini_ee.experiments.measured.command import answer_of_command
from mini_ee.experiments.trainings import Sources
from mini_ee.export.serving import worker
from mini_ee.export.serving.load import WARM, Answered

PICTURES = {"wall": "serving.png", "processor": "serving-processor.png"}
SECONDS = 4.0  # of each load, by the processor's clock
SERVERS = ("whole", "graph", "rebatch")
COMING = {"": "One by one (Poisson)", " bursts": "Bursts of eight"}


class Clock:
    """Stands in for the module `time` in worker.py."""

    now = 0.0

    @classmethod
    def perf_counter(cls):
        """The moment."""
        return cls.now


class Stepped(worker.Worker):
    """A worker without a thread: `step` runs the next batch."""

    state = "ready"  # of a worker with a thread: whether that is alive

    def _loop(self):
        pass

    def step(self):
        """Run one batch, and let the clock go on by what it took."""
        at, rows = self._next()
        begin = time.thread_time()
        self.engine.run(at, rows)
        Clock.now += time.thread_time() - begin
        self._hand_on(rows)


def offer(stepped, texts, moments, seed=0):
    """load.offer on the clock. A request that came while a batch ran is there when it has run."""
    chosen = np.random.default_rng(seed).integers(len(texts), size=len(moments)).tolist()
    seconds, given, now = np.zeros(len(moments)), 0, 0.0
    while given < len(moments) or stepped._open:
        now = now if stepped._open else max(now, moments[given])
        for at in range(given, len(moments)):
            if moments[at] > now:
                break
            Clock.now, given = moments[at], at + 1
            future = stepped.submit(texts[chosen[at]])
            future.add_done_callback(lambda _, at=at: seconds.__setitem__(at, Clock.now - moments[at]))
        Clock.now = now
        stepped.step()
        now = Clock.now
    return Answered(len(moments) / moments[-1], seconds[int(len(seconds) * WARM) :])


def saturation(stepped, texts):
    """load.saturation on the clock."""
    Clock.now = 0.0
    for text in texts:
        stepped.submit(text)
    while stepped._open:
        stepped.step()
    return len(texts) / Clock.now


def processor(sources: Sources, work: Path) -> dict:
    """The benchmark on one thread, timed by the processor's clock."""
    torch.set_num_threads(1)
    model, task = _model_and_task(sources)
    stepped = {"Worker": Stepped, "offer": offer, "saturation": saturation, "ROUNDS": 1, "SECONDS": SECONDS}
    with patch.object(worker, "time", Clock), patch.multiple(bench, **stepped):
        return {"processor": list(bench.bench_serve(model, 0, task)), "cores": os.cpu_count()}


def wall(sources: Sources, work: Path) -> dict:
    """The benchmark as a command."""
    model, task = _model_and_task(sources)
    answer = answer_of_command("bench", "serve", "--model", model, "--task", task, threads=1)
    return {"wall": answer["rows"], "cores": os.cpu_count()}


def _model_and_task(sources: Sources) -> tuple[Path, Path]:
    return sources.find("weights", "all-MiniLM-L6-v2"), sources.find("data", "SST-2")


PARTS = {"wall": wall, "processor": processor}

# ---- The page ----
PAGE_TEXT = """# Serving under load

MiniLM (all-MiniLM-L6-v2, exits after 2, 4 and 6 of 6 layers) on the 872 sentences of SST-2's dev, one thread. Its heads
are drawn, and its thresholds set so that .6 and .3 of the rows leave at the first two exits: half of the layers are
saved. What is answered is not looked at here; that it is what the model answers at batch 1 is tested
(`tests/serving/test_serving.py`, `tests/contract/test_conformance.py`). Three servers get the same requests:

- `whole`: `model.onnx` to full depth, batches of what is there: the model without early exits, with dynamic batching
- `graph`: `model.onnx` with its rule, which stops by itself
- `rebatch`: `mini-ee serve`'s worker over graphs by segment, where rows of different requests go on together

{made_by}

HTTP and tokenizing are not in these figures. Goodput: the highest load at which p99 stays within what the whole graph
takes at 80 % of its saturation (the grey line). A ratio is the whole graph's goodput over the server's; `least` is the
smallest share of the whole graph's answers in time at any load up to saturation.

## By the clock on the wall

`mini-ee bench serve --model all-MiniLM-L6-v2 --task SST-2 --threads 1` on {cores} cores that nothing else used.

![p50 and p99 of each server against the load, by the wall](serving.png)

{wall}

The layers predict 2.0 times the load. On one thread of a processor a batch is hardly cheaper than its rows, so that the
one graph, whose batch waits for its slowest row, comes as far: a batch of its own for those that stay pays where
batches are what is cheap, on a GPU, which was not measured.

## By the processor's clock

Time is processor time of the batches, so that what else the machine does has no part in it.

![p50 and p99 of each server against the load, by the processor](serving-processor.png)

{processor}

## What tests hold

- at 1.5 times the saturation load each request is answered or refused, once, with the label and the layers of batch 1:
  `tests/serving/test_serving.py`
- clients of a server that is killed under load get an answer or an error within their deadline:
  `MINI_EE_KILLS=50 pytest tests/serving/test_serve_http.py`, and on Ray `tests/serving/test_serve_ray.py`
- requests that are no requests bring nothing down, and others are answered meanwhile:
  `tests/serving/test_serve_http.py`
- thresholds are raised while a guarantee is broken, and the interval of `--shadow` covers the true agreement:
  `tests/serving/test_serve_guarantee.py`
"""


def goodput_table(rows: list[dict]) -> str:
    """A line a case."""
    bar = f"ratio (bar {rows[0]['bar']:.3f})"
    lines = markdown_table(["case", "requests a second", "whole", bar, "least", "p99 within, ms"])
    for row in rows:
        own, whole = (f"{1 / row[key]:.0f}" for key in ("seconds", "against_seconds"))
        numbers = own, whole, f"{row['ratio']:.3f}", f"{row['least']:.2f}", f"{1e3 * row['limit']:.0f}"
        lines.append(markdown_row([f"`{row['case']}`", *numbers]))
    return "\n".join(lines)


def waits_table(loads: list[dict]) -> str:
    """A line a load; where a server was not offered it, nothing."""
    lines = markdown_table(["load", "requests a second", "whole: p50, p95, p99 in ms", *SERVERS[1:]])
    for load in dict.fromkeys(each["load"] for each in loads):
        there = {each["server"]: each for each in loads if each["load"] == load}
        times = (
            ", ".join(f"{1e3 * there[server][key]:.0f}" for key in ("p50", "p95", "p99")) if server in there else ""
            for server in SERVERS
        )
        offered = next(iter(there.values()))["offered"]
        lines.append(markdown_row([f"{load:.0%}", f"{offered:.0f}", *times]))
    return "\n".join(lines)


def page(figures: dict) -> str:
    """results/serving.md."""
    found = {}
    for name in PARTS:
        rows = figures[name]
        parts = [goodput_table(rows)]
        for ending, coming in COMING.items():
            (loads,) = (row["loads"] for row in rows if row["loads"] and row["case"].endswith(f"rebatch{ending}"))
            parts += [f"### {coming}", waits_table(loads)]
        found[name] = "\n\n".join(parts)
    return wrapped(PAGE_TEXT.format(**found, cores=figures["cores"], made_by=made_by_measuring("serving")))


def draw(figures: dict, folder: Path) -> None:
    """The page's pictures, if matplotlib is installed."""
    for name, picture in PICTURES.items() if can_draw() else ():
        draw_loads(folder / picture, figures[name])
