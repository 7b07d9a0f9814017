"""The worker: requests wait in one queue per segment, and rows of different requests share a batch.

    with Worker(engine_of(Runtime("exported"))) as worker:
        worker.submit("A charming film.").result()

The next batch comes from the deepest queue that has a full batch, or whose oldest row has waited for `max_wait`. So
rows that have come far finish first. If there is no such queue, it comes from the first queue that has rows; those that
do not exit then join the rows of the next queue. The engine is never idle while a row waits. A batch has the oldest row
of its queue and the rows closest to it in length, as long as at most PADDING of its tokens are padding.

A request takes its place in the queue before it is tokenized. One extra thread tokenizes long texts, and the texts of
long requests, one at a time.
If a batch fails, its rows run one by one, and only rows that fail alone get an error.

`submit` and futures raise Refused, with the reason, if there is no room, the deadline has passed or the worker is
draining. Futures raise WrongRow for a request that no model could answer. Cancelling a future frees its row.
"""

import heapq
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf

MAX_WAIT, MAX_OPEN, BATCH = 0.005, 256, 16

LONG = 1 << 14  # characters: tokenizing a longer text, or longer texts of a request, takes longer than some requests

PER_ROW = 256  # characters whose tokenization takes as long as all else for one more row

ENDING = "the server is shutting down; send the request to another server"
LATE = "the deadline passed before the answer was ready; send the request again later"

PADDING = 0.1  # largest share of padding among the tokens of a batch


class Refused(Exception):
    """A request that is not answered now; the same request may succeed later. The message is the reason."""


class WrongRow(ValueError):
    """A request that no model could answer. The message is the reason."""


def is_long(rows: Sequence[str | Sequence[str]]) -> bool:
    """Whether the texts of these rows take as long to tokenize as one of more than LONG characters."""
    texts = (text for row in rows for text in ((row,) if isinstance(row, str) else row))
    return sum(len(text) for text in texts if isinstance(text, str)) + PER_ROW * (len(rows) - 1) > LONG


class RowFuture(Future):
    """The future of the answer to one row."""

    tokens = 0  # of the row, once it is tokenized


class Row:
    """A request in the queues. Engines add their own fields."""

    def __init__(self, width: int):
        self.width = width  # tokens
        self.future: Future | None = None  # set by the worker
        self.begun = self.arrived = self.due = self.deadline = 0.0
        self.queue: int | None = 0  # index of its next queue; None: it has finished
        self.answer, self.answered = None, False

    def expired(self, now: float) -> bool:
        """Whether the row was cancelled, or its deadline passed, before it had an answer."""
        return self.answer is None and (self.future.cancelled() or now > self.deadline)


class Worker:
    """A thread that runs an engine.

    max_wait: seconds that a row may wait for a fuller batch. max_open: maximum number of open requests; the next one is
    refused. batch: maximum number of rows in a batch.
    """

    def __init__(self, engine, *, max_wait: float = MAX_WAIT, max_open: int = MAX_OPEN, batch: int = BATCH):
        self.engine, self.metrics = engine, engine.metrics
        self._max_wait, self.max_open, self.batch = max_wait, max_open, min(batch, engine.room)
        self._queues: list[list[Row]] = [[] for _ in engine.queues]
        self._ready = threading.Condition()  # the lock of all fields below
        self._open, self._draining = 0, False
        self._encoding: dict[Future, bool] = {}  # requests without a row yet, and whether they are closed
        self._encoder = ThreadPoolExecutor(1, "mini-ee-encoder")
        self._thread = threading.Thread(target=self._loop, name="mini-ee-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error) -> None:
        self.drain()

    @property
    def state(self) -> str:
        """ready, draining, drained, or dead."""
        if self._draining:
            return "draining" if self._thread.is_alive() else "drained"
        return "ready" if self._thread.is_alive() else "dead"

    def lengths(self) -> dict[str, int]:
        """Number of waiting rows by name of the queue."""
        with self._ready:
            return {name: len(rows) for name, rows in zip(self.engine.queues, self._queues)}

    def page(self) -> str:
        """Its metrics in Prometheus' text format."""
        return self.metrics.page(self.lengths())

    def submit(
        self, texts: str | Sequence[str], deadline: float = inf, long: bool | None = None, **settings
    ) -> RowFuture:
        """The future of the answer to one row. deadline: seconds from now. long: whether the extra thread tokenizes it
        (default: if it is LONG). settings: further arguments of `engine.row`.

        Raises Refused. The future raises Refused or WrongRow.
        """
        begin, future = time.perf_counter(), RowFuture()
        with self._ready:  # the place is taken before any work
            self._check_room(1)
            self._open += 1
            self._encoding[future] = False
        future.add_done_callback(partial(self._closed, begin + deadline))
        admit = partial(self._admit, future, texts, begin, begin + deadline, settings)
        self._encoder.submit(admit) if (is_long([texts]) if long is None else long) else admit()
        return future

    def check_room(self, count: int) -> None:
        """Raises Refused if there is no room for `count` more rows."""
        with self._ready:
            self._check_room(count)

    def has_room(self, count: int = 1) -> bool:
        """Whether `count` more rows would be accepted now. Unlike `check_room` it counts no refused request."""
        with self._ready:
            return self.state == "ready" and self._open + count <= self.max_open

    def drain(self, seconds: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones; False if `seconds` were not enough."""
        with self._ready:
            self._draining = True
            self._ready.notify_all()
        self._thread.join(seconds)
        self._encoder.shutdown(wait=False)
        return not self._thread.is_alive()

    def _admit(self, future: RowFuture, texts, begin: float, deadline: float, settings: dict) -> None:
        """Put the row of a request into the first queue, or set the error of its future."""
        row = error = None
        try:
            row = None if future.cancelled() else self.engine.row(texts, **settings)
        except Exception as raised:  # a ValueError is a fault of the request
            error = WrongRow(str(raised)) if isinstance(raised, ValueError) else raised
        with self._ready:
            if row is not None:
                row.future, row.begun, row.arrived, row.deadline = future, begin, time.perf_counter(), deadline
                future.tokens = row.width
                row.due = row.arrived + self._max_wait
                self._queues[0].append(row)
            self._open -= self._encoding.pop(future)  # True if it was closed meanwhile
            self._ready.notify()
        if error:
            with suppress(InvalidStateError):  # cancelled
                future.set_exception(error)

    def _check_room(self, count: int) -> None:
        room = self.max_open - self._open
        if self.state == "ready" and room >= count:
            return
        self.metrics.requests["refused"] += 1
        if self.state == "dead":
            raise Refused("the worker has ended; restart this server, or send the request to another one")
        if self._draining:
            raise Refused(ENDING)
        raise Refused(
            f"{self._open} requests are open, with room for {max(room, 0)} more; send the request again later"
        )

    def _closed(self, deadline: float, future: Future) -> None:
        with self._ready:
            if future in self._encoding:  # its place is freed once the text is tokenized
                self._encoding[future] = True
            else:
                self._open -= 1
            if future.cancelled():
                late = time.perf_counter() >= deadline
                self.metrics.requests["late" if late else "cancelled"] += 1

    # ---- The thread ----
    def _loop(self) -> None:
        while (chosen := self._next()) is not None:
            at, rows = chosen
            self._run(at, rows)
            self._hand_on(rows)

    def _run(self, at: int, rows: list[Row]) -> None:
        """Run a batch of the queue `at`. If it fails, run its rows one by one, except those that have moved on."""
        self.metrics.count_batch(self.engine.queues[at], len(rows))
        try:
            self.engine.run(at, rows)
        except Exception as error:  # no error of a batch may end the thread
            if len(rows) > 1:
                for row in [row for row in rows if row.queue == at]:
                    self._run(at, [row])
                return
            rows[0].queue = None
            if rows[0].answer is None:
                self._end(rows[0], error, "failed")

    def _next(self) -> tuple[int, list[Row]] | None:
        """The next queue and its batch; None if the worker is drained."""
        while True:
            with self._ready:
                now = time.perf_counter()
                expired = self._take_expired(now)
                at = None if expired else self._choose(now)
                if at is not None:
                    return at, self._batch_of(at)
                if not expired and self._draining and not self._encoding:
                    return None
                if not expired:
                    self._ready.wait()
            for row in expired:
                self.engine.release(row)
                self._end(row, Refused(LATE), "late")

    def _take_expired(self, now: float) -> list[Row]:
        expired = []
        for queue in self._queues:
            if some := [row for row in queue if row.expired(now)]:
                expired += some
                taken = set(map(id, some))
                queue[:] = [row for row in queue if id(row) not in taken]
        return expired

    def _choose(self, now: float) -> int | None:
        for at in reversed(range(len(self._queues))):
            queue = self._queues[at]
            if queue and (len(queue) >= self.batch or queue[0].due <= now):
                return at
        return next((at for at, queue in enumerate(self._queues) if queue), None)

    def _batch_of(self, at: int) -> list[Row]:
        """Take the oldest row and those closest to it in length out of the queue."""
        queue = self._queues[at]
        if not self.engine.by_length:
            rows = heapq.nsmallest(self.batch, queue, key=lambda row: row.arrived)
        else:
            width = queue[0].width
            near = heapq.nsmallest(self.batch, queue, key=lambda row: abs(row.width - width))
            rows, tokens, widest = [], 0, 0
            for row in near:
                tokens, widest = tokens + row.width, max(widest, row.width)
                if widest * (len(rows) + 1) * (1 - PADDING) > tokens:
                    break
                rows.append(row)
        taken = set(map(id, rows))
        queue[:] = [row for row in queue if id(row) not in taken]
        return rows

    def _hand_on(self, rows: list[Row]) -> None:
        now = time.perf_counter()
        with self._ready:
            for row in rows:
                if row.queue is None:
                    self.engine.release(row)
                else:
                    row.due = now + self._max_wait
                    self._queues[row.queue].append(row)
        for row in rows:  # without the lock: callbacks of the future run here
            if row.answer is not None and not row.answered:
                row.answered = True
                try:
                    row.future.set_result(row.answer)
                    self.metrics.count_answer(row.answer.layers, now - row.begun)
                except InvalidStateError:  # cancelled meanwhile
                    row.future.set_running_or_notify_cancel()

    def _end(self, row: Row, error: Exception, outcome: str) -> None:
        try:
            row.future.set_exception(error)
            self.metrics.requests[outcome] += 1
        except InvalidStateError:  # cancelled: notify those who wait for several futures
            row.future.set_running_or_notify_cancel()
