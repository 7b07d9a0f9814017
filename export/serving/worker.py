"""One worker: requests wait in a queue for each segment, and rows of different requests share a batch.

    with Worker(engine_of(Runtime("exported"))) as worker:
        worker.submit("A charming film.").result()

Which queue is next: the deepest that fills a batch or whose oldest row is due, so that who came far gets out; else the
first that has rows, whose survivors then join those that wait behind it. The engine is never idle while a row waits:
`max_wait` is how long a row may be held for company while others run. In a batch stand the oldest row of its queue and
those nearest to it in length, as long as little is padded.

A request takes its place before it is encoded. A long text is encoded by a thread of its own, one text at a time.
Where a batch fails, its rows run one by one: only those fail that fail alone.

Raised by submit, or by a future: Refused, with the reason, where there is no room, the deadline has passed or the
worker is draining. By a future: WrongRow for a request that no model could answer. Cancelling a future frees its row.
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

LONG = 1 << 14  # characters of a text whose encoding takes longer than some requests

ENDING = "the server is shutting down; ask another"

LATE = "the deadline passed before there was an answer; ask later"

PADDING = 0.1  # of a batch's tokens, at most


class Refused(Exception):
    """A request that is not answered, and why: the same request may be later."""


class WrongRow(ValueError):
    """A request that no model could answer, and why."""


class Row:
    """What all requests have in common. An engine's own rows say more."""

    def __init__(self, width: int):
        self.width = width  # tokens
        self.future: Future | None = None  # the worker's
        self.begun = self.arrived = self.due = self.deadline = 0.0
        self.queue: int | None = 0  # where it goes on; None: nowhere
        self.answer, self.answered = None, False

    def lost(self, now: float) -> bool:
        """Whether nobody waits for its answer any more."""
        return self.answer is None and (self.future.cancelled() or now > self.deadline)


class Worker:
    """A thread that runs an engine. max_open: requests that may be open at once, the next is refused.

    max_wait: seconds, see above. batch: rows at most.
    """

    def __init__(self, engine, *, max_wait: float = MAX_WAIT, max_open: int = MAX_OPEN, batch: int = BATCH):
        self.engine, self.watch = engine, engine.watch
        self._max_wait, self.max_open, self._batch = max_wait, max_open, min(batch, engine.room)
        self._queues: list[list[Row]] = [[] for _ in engine.queues]
        self._ready = threading.Condition()  # guards all that follows
        self._open, self._draining = 0, False
        self._encoding: dict[Future, bool] = {}  # requests that are no rows yet, and whether they are closed already
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
        """How many rows wait in each queue, by its name."""
        with self._ready:
            return {name: len(rows) for name, rows in zip(self.engine.queues, self._queues)}

    def submit(self, texts: str | Sequence[str], deadline: float = inf, **settings) -> Future:
        """The future answer to one row. deadline: seconds from now. settings: as the engine's `row` takes them.

        Raises Refused. The future raises it as well, and WrongRow.
        """
        begin, future = time.perf_counter(), Future()
        with self._ready:  # before any work for it
            self._check_room(1)
            self._open += 1
            self._encoding[future] = False
        future.add_done_callback(partial(self._closed, begin + deadline))
        admit = partial(self._admit, future, texts, begin, begin + deadline, settings)
        given = (texts,) if isinstance(texts, str) else texts
        long = sum(len(text) for text in given if isinstance(text, str)) > LONG
        self._encoder.submit(admit) if long else admit()
        return future

    def check_room(self, count: int) -> None:
        """Raise Refused where there is no room for so many rows more."""
        with self._ready:
            self._check_room(count)

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more, and wait until all that was taken is answered; False where that took longer."""
        with self._ready:
            self._draining = True
            self._ready.notify_all()
        self._thread.join(seconds)
        self._encoder.shutdown(wait=False)
        return not self._thread.is_alive()

    def _admit(self, future: Future, texts, begin: float, deadline: float, settings: dict) -> None:
        """Put the row of a request into the first queue, or tell its future why there is none."""
        row = error = None
        try:
            row = None if future.cancelled() else self.engine.row(texts, **settings)
        except Exception as raised:  # a ValueError says what is wrong with the request
            error = WrongRow(str(raised)) if isinstance(raised, ValueError) else raised
        with self._ready:
            if row is not None:
                row.future, row.begun, row.arrived, row.deadline = future, begin, time.perf_counter(), deadline
                row.due = row.arrived + self._max_wait
                self._queues[0].append(row)
            self._open -= self._encoding.pop(future)  # closed meanwhile
            self._ready.notify()
        if error:
            with suppress(InvalidStateError):  # cancelled
                future.set_exception(error)

    def _check_room(self, count: int) -> None:
        room = self.max_open - self._open
        if self.state == "ready" and room >= count:
            return
        self.watch.requests["refused"] += 1
        if self.state == "dead":
            raise Refused("the worker has ended, and the server must be started again; ask another")
        if self._draining:
            raise Refused(ENDING)
        more = f"only {room} more" if room > 0 else "no more"
        raise Refused(f"{self._open} requests are open, and {more} may be; ask again later")

    def _closed(self, deadline: float, future: Future) -> None:
        with self._ready:
            if future in self._encoding:  # the place is free when its text is
                self._encoding[future] = True
            else:
                self._open -= 1
            if future.cancelled():
                late = time.perf_counter() >= deadline
                self.watch.requests["late" if late else "cancelled"] += 1

    # ---- The thread ----
    def _loop(self) -> None:
        while (chosen := self._next()) is not None:
            at, rows = chosen
            self._run(at, rows)
            self._hand_on(rows)

    def _run(self, at: int, rows: list[Row]) -> None:
        """A batch of the queue `at`; where it fails, those of its rows that have not gone on, one by one."""
        self.watch.ran(self.engine.queues[at], len(rows))
        try:
            self.engine.run(at, rows)
        except Exception as error:  # whatever a batch meets, the next one is answered
            if len(rows) > 1:
                for row in [row for row in rows if row.queue == at]:
                    self._run(at, [row])
                return
            rows[0].queue = None
            if rows[0].answer is None:
                self._end(rows[0], error, "failed")

    def _next(self) -> tuple[int, list[Row]] | None:
        """The next queue and its batch; None where all is drained."""
        while True:
            with self._ready:
                now = time.perf_counter()
                lost = self._take_lost(now)
                at = None if lost else self._choose(now)
                if at is not None:
                    return at, self._batch_of(at)
                if not lost and self._draining and not self._encoding:
                    return None
                if not lost:
                    self._ready.wait()
            for row in lost:
                self.engine.release(row)
                self._end(row, Refused(LATE), "late")

    def _take_lost(self, now: float) -> list[Row]:
        lost = []
        for queue in self._queues:
            if gone := [row for row in queue if row.lost(now)]:
                lost += gone
                taken = set(map(id, gone))
                queue[:] = [row for row in queue if id(row) not in taken]
        return lost

    def _choose(self, now: float) -> int | None:
        for at in reversed(range(len(self._queues))):
            queue = self._queues[at]
            if queue and (len(queue) >= self._batch or queue[0].due <= now):
                return at
        return next((at for at, queue in enumerate(self._queues) if queue), None)

    def _batch_of(self, at: int) -> list[Row]:
        """The oldest and those nearest to it in length, taken out of their queue."""
        queue = self._queues[at]
        if not self.engine.by_length:
            rows = heapq.nsmallest(self._batch, queue, key=lambda row: row.arrived)
        else:
            wanted = queue[0].width
            near = heapq.nsmallest(self._batch, queue, key=lambda row: abs(row.width - wanted))
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
        for row in rows:  # outside: whoever waits for the answer is called at once
            if row.answer is not None and not row.answered:
                row.answered = True
                try:
                    row.future.set_result(row.answer)
                    self.watch.answered(row.answer.layers, now - row.begun)
                except InvalidStateError:  # cancelled meanwhile
                    row.future.set_running_or_notify_cancel()

    def _end(self, row: Row, error: Exception, outcome: str) -> None:
        try:
            row.future.set_exception(error)
            self.watch.requests[outcome] += 1
        except InvalidStateError:  # cancelled; for those who wait for several
            row.future.set_running_or_notify_cancel()
