"""results/serving.md: the load that three servers bear, in wall-clock time and in processor time.

wall       `mini-ee bench serve` on a machine that nothing else uses
processor  the same on a shared machine. The batches run one after the other on one thread. The clock advances only by
           the processor time of each batch, and requests arrive at their times on this clock. So other programs have no
           influence, nor have HTTP, tokenization and waiting threads.
"""

import os
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from mini_ee.experiments.bench import serving as bench
from mini_ee.experiments.bench.loads import draw_loads
from mini_ee.experiments.bench.open_load import WARM_UP, Answered
from mini_ee.experiments.measured.command import answer_of_command
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.evaluation.plots import can_draw
from mini_ee.serve import worker

PICTURES = {"wall": "serving.png", "processor": "serving-processor.png"}
SECONDS = 4.0  # processor time of each load
SERVERS = ("whole", "graph", "rebatch")
ARRIVALS = {"": "Single requests (Poisson arrivals)", " bursts": "Bursts of eight requests"}


class Clock:
    """Replaces the module `time` in worker.py."""

    now = 0.0

    @classmethod
    def perf_counter(cls):
        """Seconds of processor time since the beginning."""
        return cls.now


class Stepped(worker.Worker):
    """A worker without a thread: `step` runs the next batch."""

    state = "ready"  # as of a worker whose thread is alive

    def _loop(self):
        pass

    def step(self):
        """Run one batch and advance the clock by its processor time."""
        at, rows = self._next()
        begin = time.thread_time()
        self.engine.run(at, rows)
        Clock.now += time.thread_time() - begin
        self._hand_on(rows)


def offer(stepped, texts, moments, seed=0):
    """load.offer on this clock. A request that arrives during a batch is submitted after it."""
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
    return Answered(len(moments) / moments[-1], seconds[int(len(seconds) * WARM_UP) :])


def saturation(stepped, texts):
    """load.saturation on this clock."""
    Clock.now = 0.0
    for text in texts:
        stepped.submit(text)
    while stepped._open:
        stepped.step()
    return len(texts) / Clock.now


def processor(sources: Sources, work: Path) -> dict:
    """The benchmark on one thread, in processor time."""
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


# ---- The figures of the page ----
def goodput_rows(rows: list[dict]) -> list[list[str]]:
    """One row per case."""
    return [
        [f"`{row['case']}`", *(f"{1 / row[key]:.0f}" for key in ("seconds", "against_seconds"))]
        + [f"{1 / row['ratio']:.2f}", f"{row['least']:.2f}", f"{1e3 * row['limit']:.0f}"]
        for row in rows
    ]


def waits_rows(loads: list[dict]) -> list[list[str]]:
    """One row per load; the cell of a server to which it was not offered is empty."""
    rows = []
    for load in dict.fromkeys(case["load"] for case in loads):
        there = {case["server"]: case for case in loads if case["load"] == load}
        times = (
            ", ".join(f"{1e3 * there[server][key]:.0f}" for key in ("p50", "p95", "p99")) if server in there else ""
            for server in SERVERS
        )
        offered = next(iter(there.values()))["offered"]
        rows.append([f"{load:.0%}", f"{offered:.0f}", *times])
    return rows


def page_figures(figures: dict) -> dict:
    """The rows of the tables, the range of the ratios, and settings of the benchmark."""
    page: dict = {"processor_seconds": SECONDS, "target": f"{1 / figures['wall'][0]['bar']:.2g}"}
    for name, prefix in (("wall", ""), ("processor", "processor_")):
        times, waits = [1 / row["ratio"] for row in figures[name]], []
        for suffix, title in ARRIVALS.items():
            (loads,) = (
                row["loads"] for row in figures[name] if row["loads"] and row["case"].endswith(f"rebatch{suffix}")
            )
            waits.append((title, waits_rows(loads)))
        page |= {f"{prefix}least": min(times), f"{prefix}most": max(times)}
        page |= {f"{name}_goodput": goodput_rows(figures[name]), f"{name}_waits": waits}
    lowest = min(load["offered"] for row in figures["wall"] for load in row["loads"])
    page |= {"seconds": bench.SECONDS, "rounds": bench.ROUNDS, "saturating": bench.SATURATING}
    return page | {"overloaded": bench.OVERLOADED, "fewest": f"{bench.SECONDS * lowest:.0f}"}


def draw(figures: dict, folder: Path) -> None:
    """The page's pictures, if matplotlib is installed."""
    for name, picture in PICTURES.items() if can_draw() else ():
        draw_loads(folder / picture, figures[name])
