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
from mini_ee.experiments.markdown import fold_sections, made_by_measuring, markdown_row, markdown_table, wrapped
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

# ---- The page ----
PAGE_TEXT = """# Serving under load

**How much more load does a server bear with early exits?** If half of the layers are saved, {least:.2f} to {most:.2f}
times as many requests per second at the same limit on the 99th percentile of the latency (p99). In processor time it
is {processor_least:.2f} to {processor_most:.2f} times. By the number of layers it could be 2.0 times. Two servers with
exits were tested. `graph` runs a batch until its last example exits, and `rebatch` forms new batches after each exit.
On one thread of a CPU, `graph` is as good.

The thresholds were set so that half of the layers are saved, and the heads are random. So this page is about time, not
about accuracy.

![p50 and p99 of each server by load, wall-clock time](serving.png)

{goodput}

*Goodput* is the load at which p99 exceeds a limit for good. The limit is the p99 of `whole`, the model without exits,
at 80 % of the load that saturates it. Both are interpolated between the measured loads. *Answers in time*: at each load
up to saturation we count the answers within the limit, and divide by the count of `whole`; the column shows the
smallest of these ratios.

{made_by}

## How it was measured

MiniLM (all-MiniLM-L6-v2, exits after 2, 4 and 6 of 6 layers) classifies the 872 sentences of the dev set of SST-2 on
one thread. Its thresholds are set so that 60 % of the examples exit at the first exit and 30 % at the second. Tests
check that each prediction equals that of the model at batch size 1 (`tests/serve/test_serving.py`,
`tests/contract/test_conformance.py`). Three servers get the same requests:

- `whole`: the model without early exits. The requests that wait form the next batch (dynamic batching).
- `graph`: `model.onnx` with its exit rule. A batch ends when its last example exits.
- `rebatch`: the worker of `mini-ee serve` with one graph per segment. After each exit, the remaining examples of
  different requests form new batches.

HTTP and tokenization are not included. p50, p95 and p99 are quantiles of the latency; the grey line in the pictures is
the limit. The saturating load is the number of answers per second if {saturating} requests of `whole` arrive at once.
At each load, requests arrive at random times for {seconds:g} seconds, {rounds} times, and the medians of the quantiles
count. At the lowest load these are about {fewest} requests each time, so p99 is nearly the largest latency there.
*Requests per second* are those that were drawn, so they are not exact multiples of the saturating load. A server whose
p99 is more than {overloaded:g} times that of `whole` at 80 % gets no load above saturation any more; its cells are
empty.

## Wall-clock time

`mini-ee bench serve --model all-MiniLM-L6-v2 --task SST-2 --threads 1` on {cores} cores that nothing else used.

{wall}

New batches after each exit pay if a large batch costs little more than a single example, as on a GPU; this was not
measured.

## Processor time

Here the clock advances only by the processor time of each batch. So time in which other programs run does not count,
nor do waiting threads. Each load is run once, for {processor_seconds:g} seconds of this clock.

![p50 and p99 of each server by load, processor time](serving-processor.png)

{processor}

## Related tests

- `tests/serve/test_serving.py`: at 1.5 times the saturating load, each request is answered or refused exactly once,
  with the label and the number of layers of batch size 1.
- `MINI_EE_KILLS=50 pytest tests/serve/test_serve_http.py`, and on Ray `tests/serve/test_serve_ray.py`: if a
  server is killed under load, its clients get an answer or an error within their deadline.
- `tests/serve/test_serve_http.py`: invalid requests stop neither the server nor the answers to other requests.
- `tests/serve/test_serve_guarantee.py`: thresholds are raised while a guarantee is violated, and the interval of
  `--shadow` contains the true agreement.
"""


def goodput_table(rows: list[dict]) -> str:
    """One row per case."""
    goodput, times = "goodput, requests per second", f"times that of `whole` (target: {1 / rows[0]['bar']:.2g} or more)"
    lines = markdown_table(["case", goodput, "goodput of `whole`", times, "answers in time", "limit on p99, ms"])
    for row in rows:
        own, whole = (f"{1 / row[key]:.0f}" for key in ("seconds", "against_seconds"))
        numbers = own, whole, f"{1 / row['ratio']:.2f}", f"{row['least']:.2f}", f"{1e3 * row['limit']:.0f}"
        lines.append(markdown_row([f"`{row['case']}`", *numbers]))
    return "\n".join(lines)


def waits_table(loads: list[dict]) -> str:
    """One row per load; the cell of a server to which it was not offered is empty."""
    servers = (f"`{server}`: p50, p95, p99 in ms" for server in SERVERS)
    lines = markdown_table(["load, % of the saturating load", "requests per second", *servers])
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
        parts = [] if name == "wall" else [goodput_table(rows)]  # that of wall-clock time stands at the top
        for suffix, title in ARRIVALS.items():
            (loads,) = (row["loads"] for row in rows if row["loads"] and row["case"].endswith(f"rebatch{suffix}"))
            parts += [f"### {title}", waits_table(loads)]
        found[name] = "\n\n".join(parts)
    for name, prefix in (("wall", ""), ("processor", "processor_")):
        times = [1 / row["ratio"] for row in figures[name]]
        found |= {f"{prefix}least": min(times), f"{prefix}most": max(times)}
    found |= {"goodput": goodput_table(figures["wall"]), "processor_seconds": SECONDS}
    found |= {"seconds": bench.SECONDS, "rounds": bench.ROUNDS, "saturating": bench.SATURATING}
    found |= {"overloaded": bench.OVERLOADED}
    lowest = min(load["offered"] for row in figures["wall"] for load in row["loads"])
    found["fewest"] = f"{bench.SECONDS * lowest:.0f}"
    text = PAGE_TEXT.format(**found, cores=figures["cores"], made_by=made_by_measuring("serving"))
    return wrapped(fold_sections(text, 0))


def draw(figures: dict, folder: Path) -> None:
    """The page's pictures, if matplotlib is installed."""
    for name, picture in PICTURES.items() if can_draw() else ():
        draw_loads(folder / picture, figures[name])
