"""An open load: requests arrive at random times and do not wait for earlier answers. No torch.

Arrival times are drawn before with a seed, so that every server gets the same. The latency of a request counts from its
drawn arrival time, even if the generator was late.
"""

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import NamedTuple

import numpy as np

from mini_ee.serve.worker import Refused, Worker

BURST = 8  # requests that arrive at the same time

WARM_UP = 0.15  # share of the requests, the first ones, that are not counted

PATIENCE = 30.0  # seconds to wait for answers after the last request


def arrivals(rate: float, seconds: float, burst: int = 1, seed: int = 0) -> np.ndarray:
    """Arrival times in seconds: a Poisson process with `rate` requests per second, in bursts of `burst` requests."""
    random = np.random.default_rng(seed)
    moments = np.cumsum(random.exponential(burst / rate, max(1, round(rate * seconds / burst))))
    return np.repeat(moments, burst)


class Answered(NamedTuple):
    """The result of a load. seconds: latency of each request, inf if it was refused or failed."""

    rate: float  # requests per second
    seconds: np.ndarray

    @property
    def quantiles(self) -> tuple[float, float, float]:
        """p50, p95 and p99, in seconds."""
        return tuple(np.quantile(self.seconds, (0.5, 0.95, 0.99), method="inverted_cdf").tolist())

    def within(self, limit: float) -> float:
        """Requests per second that were answered within the limit."""
        return self.rate * float((self.seconds <= limit).mean())


def offer(worker: Worker, texts: Sequence, moments: np.ndarray, seed: int = 0) -> Answered:
    """Submit texts, drawn with the seed, at these times, and wait for all answers."""
    chosen = np.random.default_rng(seed).integers(len(texts), size=len(moments)).tolist()
    seconds, futures = np.full(len(moments), np.inf), []
    begin = time.perf_counter()

    def note_latency(at: int, moment: float):
        def note(future) -> None:
            if not future.cancelled() and future.exception() is None:
                seconds[at] = time.perf_counter() - begin - moment

        return note

    for at, (text, moment) in enumerate(zip(chosen, moments.tolist())):
        ahead = moment - (time.perf_counter() - begin)
        if ahead > 0:
            time.sleep(ahead)
        try:
            future = worker.submit(texts[text])
        except Refused:
            continue
        future.add_done_callback(note_latency(at, moment))
        futures.append(future)
    if wait(futures, PATIENCE).not_done:
        missing = sum(not answer.done() for answer in futures)
        raise ValueError(f"{missing} requests have no answer {PATIENCE:.0f} s after the last one was sent")
    counted = seconds[int(len(seconds) * WARM_UP) :]
    return Answered(len(moments) / moments[-1], counted)


def saturation(worker: Worker, texts: Sequence) -> float:
    """Answers per second if all texts arrive at once."""
    begin = time.perf_counter()
    for future in [worker.submit(text) for text in texts]:
        future.result(PATIENCE)
    return len(texts) / (time.perf_counter() - begin)


def goodput(loads: Sequence[tuple[float, float]], limit: float) -> float:
    """The highest rate whose latency is within the limit. loads: pairs (rate, latency), ascending.

    Between two rates the latency is interpolated linearly, below the first one from (0, 0).

    >>> goodput([(10, 1.0), (20, 2.0), (30, 4.0)], 3.0)
    25.0
    """
    points = [(0.0, 0.0), *loads]
    at = max(at for at, (_, seconds) in enumerate(points) if seconds <= limit)
    if at + 1 == len(points) or not np.isfinite(points[at + 1][1]):
        return float(points[at][0])
    rates, seconds = zip(*points[at : at + 2])
    return float(np.interp(limit, seconds, rates))
