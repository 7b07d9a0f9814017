"""`mini-ee bench serve` on a machine that others use, too: the table and the picture of results/serving.md.

    python tests/serving_figures.py --model all-MiniLM-L6-v2 --task SST-2 --out results/serving

Batches run as they are chosen, one after the other, on one thread. Time is what they take of the processor, on a clock
that stands still otherwise: requests come at their moments on that clock. Neighbours then take no part in it, nor do
HTTP, tokenizing and what threads cost each other.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from mini_ee.export.serving import bench, worker
from mini_ee.export.serving.load import WARM, Answered
from mini_ee.measure.figures import draw_loads
from mini_ee.measure.tables import loads_table


class Clock:
    """Stands in for the module `time` in worker.py."""

    now = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now


class Stepped(worker.Worker):
    """A worker without a thread: `step` runs the next batch."""

    def _loop(self):
        pass

    def step(self):
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--task")
    parser.add_argument("--out", type=Path, required=True, help="the name that .json, .png are added to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker.time, bench.Worker, bench.offer, bench.saturation = Clock, Stepped, offer, saturation
    bench.ROUNDS, bench.SECONDS = 1, 4.0
    rows = []
    for row in bench.bench_serve(args.model, 0, args.task):
        rows.append(row)
        seconds, against = (1 / row[key] for key in ("seconds", "against_seconds"))
        print(
            f"{row['case']:<30} {seconds:.1f} requests a second, whole {against:.1f}, ratio {row['ratio']:.3f}", end=""
        )
        print(f", least {row['least']:.2f}, p99 within {1e3 * row['limit']:.0f} ms", flush=True)
        if row["loads"]:
            print(loads_table(row["loads"]), flush=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    draw_loads(args.out.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
