"""HTTP with JSON around a worker, as an ASGI application. No server of its own: server.py runs it on uvicorn.

    POST /classify   {"text": "A charming film."}, or of a pair text and text_b -> what `mini-ee run` says of it
    POST /generate   of a decoder, {"text": "Once upon a time", "max_new_tokens": 20}; with "stream": true a line of
                     JSON for each piece of text as it is written, the answer last
    GET  /health     200 while requests are taken, else 503
    GET  /metrics    as Prometheus reads it

A request may say "deadline_ms". What is wrong is told in one line of JSON, {"error": ...}: 400 for what no server could
answer, 408 and 413 for a body that does not come or does not end, 503, with the reason, for what is refused now.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from math import inf

from mini_ee.data.lines import decoded, json_object, row_of_object
from mini_ee.export.serving.worker import LATE, Refused, Worker

MAX_BODY = 1 << 20  # bytes

BODY_SECONDS = 10.0  # for a body to come

LONG = 1 << 14  # characters of a text that is encoded in a thread: it takes longer than some requests

JSON, TEXT = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("mini_ee.serve")

FAILED = "the model failed on this request; the server's log says why"


class Told(Exception):
    """A request that ends with a status and a reason. allow: the method that is taken, where another came."""

    def __init__(self, status: int, reason: str, allow: str | None = None):
        super().__init__(reason)
        self.status, self.allow = status, allow


class HungUp(Exception):
    """Nobody is there any more."""


class App:
    """The application of one worker. page: what /metrics shows; by default what this worker has counted."""

    def __init__(self, worker: Worker, page: Callable[[], Awaitable[str]] | None = None):
        self.worker, self._config = worker, worker.engine.runtime.config
        self._page = page
        answers = {"/generate": self._generate} if self._config["unit"] == "tokens" else {"/classify": self._classify}
        self._routes = {path: ("POST", handler) for path, handler in answers.items()}
        self._routes |= {"/health": ("GET", self._health), "/metrics": ("GET", self._metrics)}

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return
        try:
            method, handler = self._routes.get(scope["path"], (None, None))
            if method is None:
                raise Told(404, f"expected {', '.join(self._routes)}, found {scope['path'][:80]}")
            if scope["method"] != method:
                raise Told(405, f"{scope['path']} takes {method}, found {scope['method'][:20]}", allow=method)
            await handler(scope, receive, send)
        except Told as told:
            await self._send(send, told.status, {"error": " ".join(str(told).split())}, allow=told.allow)
        except HungUp:
            self.worker.watch.responses["hung up"] += 1
        except Exception:
            log.exception("a request failed")
            await self._send(send, 500, {"error": FAILED})

    # ---- What it offers ----
    async def _health(self, scope: dict, receive: Callable, send: Callable) -> None:
        state, rule = self.worker.state, self.worker.engine.rule.to_dict()
        about = {"status": state, "unit": self._config["unit"], "exits": self._config["exits"], "rule": rule}
        await self._send(send, 200 if state == "ready" else 503, about)

    async def _metrics(self, scope: dict, receive: Callable, send: Callable) -> None:
        page = await self._page() if self._page else self.worker.watch.page(self.worker.lengths())
        await self._send(send, 200, page.encode(), TEXT)

    async def _classify(self, scope: dict, receive: Callable, send: Callable) -> None:
        fields, deadline = await self._fields(scope, receive)
        with _errors():
            texts = row_of_object(fields, self.worker.engine.runtime.num_texts)
        await self._answer(*await self._submit(texts, deadline), receive, send)

    async def _generate(self, scope: dict, receive: Callable, send: Callable) -> None:
        fields, deadline = await self._fields(scope, receive)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: dict | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def told(text: str, layers: int) -> None:
            put({"text": text, "layers": layers})

        stream = fields.get("stream", False)
        with _errors():
            count = fields.get("max_new_tokens")
            if not (count is None or type(count) is int and count > 0) or type(stream) is not bool:
                raise ValueError("expected max_new_tokens as a whole number above 0, and stream as true or false")
            texts = row_of_object(fields, 1)
        settings = {"max_new_tokens": count, "told": told if stream else None}
        future, deadline = await self._submit(texts, deadline, **settings)
        if not stream:
            return await self._answer(future, deadline, receive, send)
        future.add_done_callback(lambda _: put(None))
        await self._stream(future, pieces, receive, send)

    # ---- Requests ----
    async def _fields(self, scope: dict, receive: Callable) -> tuple[dict, float]:
        """The object that a body holds, and the seconds that an answer may take."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        body, told = b"", Told(413, f"expected a body of at most {MAX_BODY} bytes, found more; send texts one by one")
        if length.isdigit() and len(length) < 20 and int(length) > MAX_BODY:
            raise told
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HungUp
                    body, more = body + message.get("body", b""), message.get("more_body", False)
                    if len(body) > MAX_BODY:
                        raise told
        except TimeoutError:
            raise Told(408, f"expected the body within {BODY_SECONDS:.0f} s, found {len(body)} bytes of it") from None
        with _errors():
            fields = json_object(decoded(body))
            return fields, deadline_of(fields)

    async def _submit(self, texts: Sequence[str], deadline: float, **settings) -> tuple[Future, float]:
        """The future answer, and what is left of the deadline. A long text is encoded beside the other requests."""
        begin, submit = time.perf_counter(), partial(self.worker.submit, texts, deadline, **settings)
        with _errors():
            long = any(len(text) > LONG for text in texts if isinstance(text, str))
            future = await asyncio.to_thread(submit) if long else submit()
        left = deadline - (time.perf_counter() - begin)
        if left <= 0:
            future.cancel()
            raise Told(503, LATE)
        return future, left

    async def _answer(self, future: Future, deadline: float, receive: Callable, send: Callable) -> None:
        """Wait for the answer, the deadline or the client to hang up, whichever comes first."""
        answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(receive())
        try:
            timeout = None if deadline == inf else deadline
            await asyncio.wait({answer, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise HungUp if gone.done() else Told(503, LATE)
            try:
                said = answer.result()
            except Refused as error:
                raise Told(503, str(error)) from None
        finally:
            gone.cancel()
            answer.cancel()
        await self._send(send, 200, said.to_dict())

    async def _stream(self, future: Future, pieces: asyncio.Queue, receive: Callable, send: Callable) -> None:
        """The pieces as they come, then the answer, or what became of it."""
        await self._start(send, 200, b"application/x-ndjson")
        gone = asyncio.ensure_future(receive())
        try:
            while True:
                piece = asyncio.ensure_future(pieces.get())
                await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    raise HungUp
                if piece.result() is None:
                    break
                await send(line(piece.result(), more=True))
        finally:
            gone.cancel()
            future.cancel()
        error = future.exception()
        if error and not isinstance(error, Refused):
            log.error("a request failed", exc_info=error)
            error = FAILED
        await send(line({"error": str(error)} if error else future.result().to_dict()))

    # ---- Responses ----
    async def _start(self, send: Callable, status: int, kind: bytes, *about) -> None:
        self.worker.watch.responses[status] += 1
        await send(head(status, kind, *about))

    async def _send(
        self, send: Callable, status: int, body: dict | bytes, kind: bytes = JSON, allow: str | None = None
    ) -> None:
        message = {"type": "http.response.body", "body": body} if isinstance(body, bytes) else line(body)
        await self._start(send, status, kind, len(message["body"]), allow)
        await send(message)


def head(status: int, kind: bytes, length: int | None = None, allow: str | None = None) -> dict:
    """The message that begins a response of so many bytes; None: as many as come. allow: as Told has it."""
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    if status == 503:
        headers.append((b"retry-after", b"1"))
    if allow:
        headers.append((b"allow", allow.encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


def line(fields: dict, more: bool = False) -> dict:
    """The message with a line of JSON. more: others follow."""
    return {"type": "http.response.body", "body": json.dumps(fields).encode() + b"\n", "more_body": more}


def deadline_of(fields: dict) -> float:
    """The seconds that a request may take; inf where it does not say. Raises ValueError for what is no time."""
    deadline = fields.get("deadline_ms", inf)
    if type(deadline) not in (int, float) or not deadline > 0:
        raise ValueError(f"expected deadline_ms as a number above 0, found {str(deadline)[:40]!r}")
    return min(deadline, 1e9) / 1e3 if deadline != inf else inf


@contextmanager
def _errors() -> Iterator[None]:
    """Statuses for what is refused or wrong."""
    try:
        yield
    except Refused as error:
        raise Told(503, str(error)) from None
    except ValueError as error:
        raise Told(400, str(error)) from None
