"""The HTTP interface of a worker, as an ASGI application with JSON. server.py runs it on uvicorn.

    POST /classify   {"text": "A charming film."}, for a pair text and text_b -> the answer, as `mini-ee run` prints it
    POST /generate   for a decoder: {"text": "Once upon a time", "max_new_tokens": 20}. With "stream": true the response
                     is a line of JSON for each piece of text when it is generated, and the answer as the last line
    POST /predict, /embed, /v1/embeddings   in the formats of other servers, see formats.py
    GET  /health     readiness: 200 while requests are accepted, else 503
    GET  /live       liveness: 200, also while the server drains, until its worker has failed; then 503: restart it
    GET  /metrics    Prometheus' text format

Every response names the exported model in the header x-model-id.

One request may have several texts: {"texts": ["A charming film.", "A dull one."]}, or pairs as lists of two. The
response is {"answers": [...]} in the same order; a text that fails has {"error": ...}. Each text needs a place in the
queue.

A request to a classifier or an encoder may have a "threshold", an "agreement" or a "max_loss" of its own, see
request_thresholds.py. A request may have a "deadline_ms". An error is one line of JSON, {"error": ...}, with a status:

    400   no server could answer the request            421   the Host header names another host, see hosts.py
    408   the body is not complete within 10 s          500   the model failed on the request
    413   the body is too large                         503   the request is refused now, with the reason
    415   the Content-Type is not JSON
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any

from mini_ee.data.lines import decoded, json_object, rows_of_object
from mini_ee.export.serving.formats import Format, formats_of
from mini_ee.export.serving.hosts import Hosts
from mini_ee.export.serving.request_thresholds import FIELDS, fields_of_rows
from mini_ee.export.serving.worker import ENDING, LATE, Refused, Worker, WrongRow

MAX_BODY = 1 << 20  # bytes

BODY_SECONDS = 10.0  # time in which a body must be complete

LARGE = 1 << 16  # bytes: a larger body needs a place in the queue before it is read to its end

JSON, TEXT = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("mini_ee.serve")

FAILED = "the model failed on this request; the server's log contains the reason"


class HTTPError(Exception):
    """Ends a request with a status and a reason. headers: further ones of the response."""

    def __init__(self, status: int, reason: str, *headers: tuple[bytes, bytes]):
        super().__init__(reason)
        self.status, self.headers = status, headers


class Disconnected(Exception):
    """The client has disconnected."""


class App:
    """The application of one worker.

    hosts: names that requests may have in their Host header. page: returns the text of /metrics (default: the metrics
    of this worker).
    """

    def __init__(
        self, worker: Worker, hosts: Hosts = Hosts("127.0.0.1"), page: Callable[[], Awaitable[str]] | None = None
    ):
        self.worker, self._config = worker, worker.engine.runtime.config
        self._hosts, self._page = hosts, page
        self._large = 0  # bodies above LARGE that are being read
        runtime = worker.engine.runtime
        answers = {path: partial(self._formatted, form) for path, form in formats_of(runtime).items()}
        if not runtime.embeds:
            answers |= {"/generate": self._generate} if runtime.generates else {"/classify": self._classify}
        self._routes = {path: ("POST", handler) for path, handler in answers.items()}
        self._routes |= {"/health": ("GET", self._health), "/live": ("GET", self._live)}
        self._routes["/metrics"] = ("GET", self._metrics)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._handler(scope)(scope, receive, send)
        except HTTPError as error:
            await self._send(send, error.status, {"error": one_line(error)}, JSON, *error.headers)
        except Disconnected:
            self.worker.metrics.responses["hung up"] += 1
        except asyncio.CancelledError:  # the server shuts down and no longer waits
            await self._send(send, 503, {"error": ENDING})
        except Exception:
            log.exception("a request failed")
            await self._send(send, 500, {"error": FAILED})

    def _handler(self, scope: dict) -> Callable:
        """The handler for the head of a request. Raises HTTPError if the head is wrong."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # request smuggling
            reason = "expected Content-Length or Transfer-Encoding, found both; the connection is closed"
            raise HTTPError(400, reason, (b"connection", b"close"))
        for name, value in scope["headers"]:
            if name == b"host" and not self._hosts.allow(value):
                found, names = value[:80].decode("latin-1"), ", ".join(sorted(self._hosts.names))
                raise HTTPError(421, f"expected a Host of this server ({names}), found {found}; see --allow-host")
        method, handler = self._routes.get(scope["path"], (None, None))
        if method is None:
            raise HTTPError(404, f"expected {', '.join(self._routes)}, found {scope['path'][:80]}")
        if scope["method"] != method:
            reason = f"{scope['path']} takes {method}, found {scope['method'][:20]}"
            raise HTTPError(405, reason, (b"allow", method.encode()))
        kind = headers.get(b"content-type", b"no Content-Type")
        if method == "POST" and not is_json(kind):
            raise HTTPError(415, f"expected Content-Type: application/json, found {kind[:80].decode('latin-1')}")
        return handler

    # ---- Routes ----
    async def _health(self, scope: dict, receive: Callable, send: Callable) -> None:
        state, rule = self.worker.state, self.worker.engine.rule.to_dict()
        about = {"status": state, "model": self.worker.engine.runtime.model_id}
        about |= {"unit": self._config["unit"], "exits": self._config["exits"], "rule": rule}
        await self._send(send, 200 if state == "ready" else 503, about)

    async def _live(self, scope: dict, receive: Callable, send: Callable) -> None:
        state = self.worker.state
        await self._send(send, 503 if state == "dead" else 200, {"status": state})

    async def _metrics(self, scope: dict, receive: Callable, send: Callable) -> None:
        page = await self._page() if self._page else self.worker.metrics.page(self.worker.lengths())
        await self._send(send, 200, page.encode(), TEXT)

    async def _classify(self, scope: dict, receive: Callable, send: Callable) -> None:
        fields, due = await self._fields(scope, receive)
        rows = _rows(fields, self.worker.engine.runtime.num_texts)
        futures = self._submit(rows, due, _row_fields(fields, len(rows)))
        await self._answer(fields, futures, due, receive, send)

    async def _formatted(self, form: Format, scope: dict, receive: Callable, send: Callable) -> None:
        """Answer in the format of another server."""
        fields, due = await self._fields(scope, receive)
        runtime = self.worker.engine.runtime
        with _errors():
            rows = form.rows(runtime, fields)
        futures = self._submit(rows, due, _row_fields(fields, len(rows)))
        await self._wait(futures, due, receive)
        await self._send(send, 200, form.reply(runtime, fields, rows, list(map(_result, futures))))

    async def _generate(self, scope: dict, receive: Callable, send: Callable) -> None:
        fields, due = await self._fields(scope, receive)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: dict | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def on_piece(text: str, layers: int) -> None:
            put({"text": text, "layers": layers})

        stream, count = fields.get("stream", False), fields.get("max_new_tokens")
        if not (count is None or type(count) is int and count > 0) or type(stream) is not bool:
            raise HTTPError(400, "expected max_new_tokens as a whole number above 0, and stream as true or false")
        if stream and "texts" in fields:
            raise HTTPError(400, "expected one text to stream, found texts; send a request for each of them")
        if given := [name for name in FIELDS if fields.get(name) is not None]:
            raise HTTPError(400, f"{given[0]} is for classifiers, found a decoder; leave it out")
        rows, settings = _rows(fields, 1), {"max_new_tokens": count, "on_piece": on_piece if stream else None}
        futures = self._submit(rows, due, [settings] * len(rows))
        if not stream:
            return await self._answer(fields, futures, due, receive, send)
        futures[0].add_done_callback(lambda _: put(None))
        await self._stream(futures[0], pieces, receive, send)

    # ---- Requests ----
    async def _fields(self, scope: dict, receive: Callable) -> tuple[dict, float]:
        """The JSON object of a body, and its deadline, as a time of perf_counter."""
        body = await self._body(scope, receive)
        with _errors():
            fields = json_object(decoded(body))
            return fields, time.perf_counter() + deadline_of(fields)

    async def _body(self, scope: dict, receive: Callable) -> bytes:
        """The body of a request. A large one needs a place in the queue while it arrives; else it is dropped."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = HTTPError(413, f"expected a body of at most {MAX_BODY} bytes, found more; send fewer texts at once")
        if length.isdigit() and len(length) < 20 and int(length) > MAX_BODY:
            raise too_large
        body, size, refused, large, more = bytearray(), 0, None, False, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    some, more = message.get("body", b""), message.get("more_body", False)
                    size += len(some)
                    if size > MAX_BODY:
                        raise too_large
                    if size > LARGE and not large and not refused:
                        try:
                            self.worker.check_room(self._large + 1)
                            self._large, large = self._large + 1, True
                        except Refused as error:
                            refused = error
                            body.clear()
                    if not refused:
                        body += some
        except TimeoutError:
            raise HTTPError(408, f"expected the body within {BODY_SECONDS:.0f} s, found {size} bytes of it") from None
        finally:
            self._large -= large
        if refused:
            raise HTTPError(503, str(refused))
        return bytes(body)

    def _submit(self, rows: list[tuple[str, ...]], due: float, settings: list[dict]) -> list[Future]:
        """The futures of the texts of a request. Either all of them get a place in the queue, or none.

        settings: of each row, for `engine.row`.
        """
        with _errors():
            if len(rows) > self.worker.max_open:
                raise ValueError(f"expected at most {self.worker.max_open} texts at once, found {len(rows)}")
            self.worker.check_room(len(rows))
            deadline = due - time.perf_counter()
            return [self.worker.submit(row, deadline, **each) for row, each in zip(rows, settings)]

    async def _wait(self, futures: list[Future], due: float, receive: Callable) -> None:
        """Wait for the answers. Raises HTTPError at the deadline, Disconnected if the client disconnects."""
        answers = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        gone = asyncio.ensure_future(receive())
        try:
            timeout = None if due == inf else max(0.0, due - time.perf_counter())
            await asyncio.wait({answers, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise Disconnected if gone.done() else HTTPError(503, LATE)
        finally:
            gone.cancel()
            answers.cancel()

    async def _answer(self, fields: dict, futures: list[Future], due: float, receive: Callable, send: Callable) -> None:
        """Send the answers, in this server's own format."""
        await self._wait(futures, due, receive)
        if "texts" in fields:
            return await self._send(send, 200, {"answers": list(map(_outcome_or_error, futures))})
        await self._send(send, 200, _outcome(futures[0]))

    async def _stream(self, future: Future, pieces: asyncio.Queue, receive: Callable, send: Callable) -> None:
        """Send each piece, then the answer or an error. An error before the first piece sets the status."""
        gone, started = asyncio.ensure_future(receive()), False
        try:
            while True:
                piece = asyncio.ensure_future(pieces.get())
                await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    raise Disconnected
                if piece.result() is None:
                    break
                if not started:
                    await self._start(send, 200, b"application/x-ndjson")
                    started = True
                await send(line(piece.result(), more=True))
            last = _outcome_or_error(future) if started else _outcome(future)
        except asyncio.CancelledError:
            if not started:
                raise
            last = {"error": ENDING}
        finally:
            gone.cancel()
            future.cancel()
        if not started:
            await self._start(send, 200, b"application/x-ndjson")
        await send(line(last))

    # ---- Responses ----
    async def _start(
        self, send: Callable, status: int, kind: bytes, length: int | None = None, *headers: tuple[bytes, bytes]
    ) -> None:
        self.worker.metrics.responses[status] += 1
        model = (b"x-model-id", self.worker.engine.runtime.model_id.encode())
        await send(head(status, kind, length, model, *headers))

    async def _send(
        self, send: Callable, status: int, body: dict | list | bytes, kind: bytes = JSON, *headers: tuple[bytes, bytes]
    ) -> None:
        message = {"type": "http.response.body", "body": body} if isinstance(body, bytes) else line(body)
        await self._start(send, status, kind, len(message["body"]), *headers)
        await send(message)


def head(status: int, kind: bytes, length: int | None = None, *headers: tuple[bytes, bytes]) -> dict:
    """The message that starts a response. length: of the body in bytes; None: unknown. headers: further ones."""
    known = [(b"content-type", kind)]
    if length is not None:
        known.append((b"content-length", str(length).encode()))
    if status == 503:
        known.append((b"retry-after", b"1"))
    return {"type": "http.response.start", "status": status, "headers": [*known, *headers]}


def line(fields: dict | list, more: bool = False) -> dict:
    """The message with a line of JSON. more: further messages follow."""
    return {"type": "http.response.body", "body": json.dumps(fields).encode() + b"\n", "more_body": more}


def deadline_of(fields: dict) -> float:
    """Seconds until the deadline of a request; inf if it has none. Raises ValueError for a wrong value."""
    deadline = fields.get("deadline_ms", inf)
    if type(deadline) not in (int, float) or not deadline > 0:
        raise ValueError(f"expected deadline_ms as a number above 0, found {str(deadline)[:40]!r}")
    return min(deadline, 1e9) / 1e3 if deadline != inf else inf


def is_json(kind: bytes) -> bool:
    """Whether a Content-Type is JSON. A web page of another site cannot send JSON unless this server allows it."""
    kind = kind.partition(b";")[0].strip().lower()
    return kind == JSON or kind.startswith(b"application/") and kind.endswith(b"+json")


def one_line(error: Exception) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split())


def _rows(fields: dict, num_texts: int) -> list[tuple[str, ...]]:
    """The rows of a request in this server's own format. Raises HTTPError."""
    with _errors():
        return rows_of_object(fields, num_texts)


def _row_fields(fields: dict, count: int) -> list[dict]:
    """The thresholds that a request asks for, by row. Raises HTTPError."""
    with _errors():
        return fields_of_rows(fields, count)


def _outcome(future: Future) -> dict:
    """The answer of a completed future, as JSON. Raises HTTPError if it failed."""
    return _result(future).to_dict()


def _result(future: Future) -> Any:
    """The answer of a completed future. Raises HTTPError if it failed."""
    try:
        return future.result()
    except Refused as error:
        raise HTTPError(503, str(error)) from None
    except WrongRow as error:
        raise HTTPError(400, str(error)) from None
    except ValueError as error:  # raised by mini_ee, with a message for the user
        log.error("a request failed: %s", one_line(error))
        raise HTTPError(500, str(error)) from None
    except Exception as error:
        log.error("a request failed", exc_info=error)
        raise HTTPError(500, FAILED) from None


def _outcome_or_error(future: Future) -> dict:
    try:
        return _outcome(future)
    except HTTPError as error:
        return {"error": one_line(error)}


@contextmanager
def _errors() -> Iterator[None]:
    """Turn Refused and ValueError into an HTTPError with a status."""
    try:
        yield
    except Refused as error:
        raise HTTPError(503, str(error)) from None
    except ValueError as error:
        raise HTTPError(400, str(error)) from None
