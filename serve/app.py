"""The HTTP interface of a worker, as an ASGI application with JSON. server.py runs it on uvicorn.

    POST /classify   {"text": "A charming film."}, for a pair text and text_b -> the answer, as `mini-ee run` prints it
    POST /generate   for a decoder: {"text": "Once upon a time"}; "stream": true answers a line for each piece of text
    POST /predict, /predict_tokens, /rerank, /v1/rerank, /embed, /v1/embeddings, GET /info, /v1/models
                     as other servers, see formats.py
    GET  /health     readiness: 200 while requests are accepted, else 503
    GET  /live       liveness: 200, also while the server drains, until its worker has failed; then 503: restart it
    GET  /metrics    Prometheus' text format

Every response names the exported model in the header x-model-id.

One request may have several texts: {"texts": ["A charming film.", "A dull one."]}, or pairs as lists of two. The
response is {"answers": [...]} in the same order; a text that fails has {"error": ...}. Each text needs a place in the
queue; a request with more texts than there are places is answered in parts, with other requests in between.

A request to a classifier or an encoder may have a "threshold", an "agreement" or a "max_loss" of its own, see
request_thresholds.py. A request may have a "deadline_ms". An error is one line of JSON, {"error": ...}, and on /v1 an
object as OpenAI's, {"error": {"message": ..., "type": ..., "param": null, "code": null}}, with a status:

    400   no server could answer the request            415   the body is not JSON in UTF-8, or compressed, not by gzip
    401   the request has not the key of the server     421   the Host header names another host
    408   the body is not complete within 10 s          500   the model failed on the request
    413   the body is too large                         503   the request is refused now, with the reason
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any

from mini_ee.lab.data.lines import KEYS, decoded, json_object, rows_of_object
from mini_ee.serve.formats import Format, Rows, check_fields, formats_of, info_of, model_of
from mini_ee.serve.http_messages import (
    DEADLINE,
    JSON,
    V1,
    Access,
    Hosts,
    HTTPError,
    Inflating,
    Request,
    check_key,
    check_kind,
    deadline_of,
    error_of,
    head,
    line,
    one_line,
    with_cors,
)
from mini_ee.serve.request_thresholds import FIELDS, fields_of_rows
from mini_ee.serve.worker import ENDING, LATE, Refused, RowFuture, Worker, WrongRow, is_long

MAX_BODY = 1 << 20  # bytes

MAX_LONG_BODY = 16 * MAX_BODY  # the same in the formats of other servers, whose clients send thousands of texts at once

BODY_SECONDS = 10.0  # time in which a body must be complete

LARGE = 1 << 16  # bytes: a larger body needs a place in the queue for each MAX_BODY before it is read to its end

BESIDE = 1 << 12  # bytes: a larger body is parsed, and its response written, on another thread than the event loop's

ROOM_SECONDS = 0.005  # seconds between two looks whether there is room for the next part of a request

OWN = ("/classify", "/generate")  # paths in this server's own format

PROBES = ("/health", "/live")  # paths that need no key

TEXT = b"text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("mini_ee.serve")

FAILED = "the model failed on this request; the server's log contains the reason"


class Disconnected(Exception):
    """The client has disconnected."""


class App:
    """The application of one worker.

    access: who may send requests. page: returns the text of /metrics (default: the metrics of this worker).
    """

    def __init__(
        self,
        worker: Worker,
        access: Access = Access(Hosts("127.0.0.1")),
        page: Callable[[], Awaitable[str]] | None = None,
    ):
        self.worker, self._config = worker, worker.engine.runtime.config
        self._access, self._page, self._call = access, page, with_cors(self._respond, access.origins)
        self._model_headers = [(b"x-model-id", worker.engine.runtime.model_id.encode())]  # headers of each response
        self._large = 0  # places of the bodies above LARGE that are being read
        runtime = worker.engine.runtime
        answers = {path: partial(self._formatted, form) for path, form in formats_of(runtime).items()}
        if not runtime.embeds:
            answers |= {"/generate": self._generate} if runtime.generates else {"/classify": self._classify}
        gets = {"/health": self._health, "/live": self._live, "/metrics": self._metrics, V1 + "models": self._models}
        gets |= {} if runtime.generates else {"/info": self._info}
        self.answers, self.gets = answers, gets  # path -> handler of its requests by POST, and by GET

    def drain(self, seconds: float) -> None:
        """Refuse new requests and wait for the open ones."""
        self.worker.drain(seconds)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http":
            await self._call(scope, receive, send)

    async def _respond(self, scope: dict, receive: Callable, send: Callable) -> None:
        app = self
        try:
            path = self._checked(scope)
            if scope["method"] == "GET":
                return await self.gets[path](scope, send)
            request = await self._request(scope, receive)
            app = self.chosen(request)
            await app.answers[path](request, receive, send)
        except HTTPError as error:
            await app._fail(scope, send, error.status, one_line(error), *error.headers)
        except Disconnected:
            app.worker.metrics.responses["hung up"] += 1
        except asyncio.CancelledError:  # the server shuts down and no longer waits
            await app._fail(scope, send, 503, ENDING)
        except Exception:
            log.exception("a request failed")
            await app._fail(scope, send, 500, FAILED)

    def chosen(self, request: Request) -> "App":
        """The application that answers a request."""
        return self

    def _checked(self, scope: dict) -> str:
        """The path for the head of a request. Raises HTTPError if the head is wrong."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # request smuggling
            reason = "expected Content-Length or Transfer-Encoding, found both; the connection is closed"
            raise HTTPError(400, reason, (b"connection", b"close"))
        for name, value in scope["headers"]:
            if name == b"host" and not self._access.hosts.allow(value):
                host, names = value[:80].decode("latin-1"), ", ".join(sorted(self._access.hosts.names))
                raise HTTPError(421, f"expected a Host of this server ({names}), found {host}; see --allow-host")
        path = V1 + "models" if scope["path"].startswith(V1 + "models/") else scope["path"]
        if path not in PROBES:
            check_key(headers, self._access.key)
        if path not in self.answers and path not in self.gets:
            raise HTTPError(404, f"expected {', '.join((*self.answers, *self.gets))}, found {scope['path'][:80]}")
        method = "POST" if path in self.answers else "GET"
        if scope["method"] != method:
            reason = f"{scope['path']} takes {method}, found {scope['method'][:20]}"
            raise HTTPError(405, reason, (b"allow", method.encode()))
        if method == "POST":
            check_kind(headers)
        return path

    # ---- Routes ----
    async def _health(self, scope: dict, send: Callable) -> None:
        await self._send(send, 200 if self.worker.state == "ready" else 503, self.health())

    def health(self) -> dict:
        """What GET /health says."""
        health = {"status": self.worker.state, "model": self.worker.engine.runtime.model_id}
        health |= {"unit": self._config["unit"], "exits": self._config["exits"]}
        return health | {"rule": self.worker.engine.rule.to_dict()}

    async def _live(self, scope: dict, send: Callable) -> None:
        state = self.worker.state
        await self._send(send, 503 if state == "dead" else 200, {"status": state})

    async def _metrics(self, scope: dict, send: Callable) -> None:
        page = await self._page() if self._page else self.worker.page()
        await self._send(send, 200, page.encode(), TEXT)

    async def _info(self, scope: dict, send: Callable) -> None:
        await self._send(send, 200, info_of(self.worker.engine.runtime, self.worker.max_open, self.worker.batch))

    async def _models(self, scope: dict, send: Callable) -> None:
        name, models = scope["path"].removeprefix(V1 + "models").strip("/"), self.models()
        if name and name not in models:
            raise HTTPError(404, f"expected the model {' or '.join(models)}, found {name[:80]}")
        await self._send(send, 200, models[name] if name else {"object": "list", "data": list(models.values())})

    def models(self) -> dict[str, dict]:
        """Name -> the model as GET /v1/models shows it."""
        return {(model := model_of(self.worker.engine.runtime))["id"]: model}

    async def _classify(self, request: Request, receive: Callable, send: Callable) -> None:
        fields = request.fields
        rows = _rows(fields, self.worker.engine.runtime.num_texts, FIELDS)
        await self._answer(fields, rows, self._row_fields(fields, len(rows)), request.due, receive, send)

    async def _formatted(self, form: Format, request: Request, receive: Callable, send: Callable) -> None:
        """Answer in the format of another server."""
        _, fields, due, size = request
        runtime = self.worker.engine.runtime
        with _errors():
            check_fields(fields, {*form.fields, *FIELDS, DEADLINE})
            rows = await _beside(size, form.rows, runtime, fields)
        if any(isinstance(text, str) and len(text) > MAX_BODY for row in rows for text in row):
            raise HTTPError(413, f"expected texts of at most {MAX_BODY} characters, found a longer one; shorten it")
        answered = await self._answers(rows, self._row_fields(fields, len(rows)), due, receive, _result_and_tokens)
        answers, tokens = zip(*answered)
        body = await _beside(size, lambda: line(form.reply(runtime, fields, rows, list(answers), sum(tokens)))["body"])
        await self._send(send, 200, body)

    async def _generate(self, request: Request, receive: Callable, send: Callable) -> None:
        _, fields, due, _ = request
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
        rows = _rows(fields, 1, ("max_new_tokens", "stream"))
        settings = [{"max_new_tokens": count, "on_piece": on_piece if stream else None}] * len(rows)
        if not stream:
            return await self._answer(fields, rows, settings, due, receive, send)
        (future,) = self._submit(rows, due, settings)
        future.add_done_callback(lambda _: put(None))
        await self._stream(future, pieces, receive, send)

    # ---- Requests ----
    async def _request(self, scope: dict, receive: Callable) -> Request:
        """The content of a request by POST."""
        most = MAX_BODY if scope["path"] in OWN else MAX_LONG_BODY
        body = await self._body(scope, receive, min(most, self.worker.max_open * MAX_BODY))
        with _errors():
            fields = await _beside(len(body), lambda: json_object(decoded(body)))
            return Request(scope["path"], fields, time.perf_counter() + deadline_of(fields), len(body))

    async def _body(self, scope: dict, receive: Callable, most: int) -> bytes:
        """The body of a request. A large one needs places in the queue while it arrives; else it is dropped."""
        headers = dict(scope["headers"])
        length, inflating = headers.get(b"content-length", b"0"), Inflating(headers)
        too_large = HTTPError(413, f"expected a body of at most {most} bytes, found more; send fewer texts at once")
        if length.isdigit() and len(length) < 20 and int(length) > most:
            raise too_large
        body, size, refused, places, more = bytearray(), 0, None, 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    more = message.get("more_body", False)
                    for piece in inflating.pieces(message.get("body", b""), not more):
                        size += len(piece)
                        if size > most:
                            raise too_large
                        needed = -(-size // MAX_BODY) if size > LARGE else 0
                        if needed > places and not refused:
                            try:
                                self.worker.check_room(self._large + needed - places)
                                self._large, places = self._large + needed - places, needed
                            except Refused as error:
                                refused = error
                                body.clear()
                        if not refused:
                            body += piece
        except TimeoutError:
            raise HTTPError(408, f"expected the body within {BODY_SECONDS:.0f} s, found {size} bytes of it") from None
        finally:
            self._large -= places
        if refused:
            raise HTTPError(503, str(refused))
        return bytes(body)

    def _row_fields(self, fields: dict, count: int) -> list[dict]:
        """The thresholds that a request asks for, by row. Raises HTTPError for a wrong one."""
        with _errors():
            settings = fields_of_rows(fields, count)
            for thresholds in settings:
                self.worker.engine.requested.of(**thresholds)
            return settings

    async def _answers(
        self, rows: Rows, settings: list[dict], due: float, receive: Callable, read: Callable[[RowFuture], Any]
    ) -> list:
        """What `read` makes of the future of each row. settings: of each row, for `engine.row`.

        More rows than places in the queue run in parts of a quarter of the queue; a later part waits for room. Raises
        HTTPError, which names the row.
        """
        most, answers = self.worker.max_open, []
        size, long = most if len(rows) <= most else max(1, most // 4), is_long(rows)
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            while at and self.worker.state == "ready" and not self.worker.has_room(len(part)):
                if time.perf_counter() > due:
                    raise HTTPError(503, LATE)
                await asyncio.sleep(ROOM_SECONDS)
            futures = self._submit(part, due, settings[at : at + size], long)
            await self._wait(futures, due, receive)
            for number, future in enumerate(futures, start=at):
                try:
                    answers.append(read(future))
                except HTTPError as error:
                    where = f"row {number}: " if len(rows) > 1 else ""
                    raise HTTPError(error.status, f"{where}{error}", *error.headers) from None
        return answers

    def _submit(self, rows: Rows, due: float, settings: list[dict], long: bool | None = None) -> list[RowFuture]:
        """The futures of these rows. Either all of them get a place in the queue, or none."""
        with _errors():
            self.worker.check_room(len(rows))
            deadline = due - time.perf_counter()
            return [self.worker.submit(row, deadline, long, **thresholds) for row, thresholds in zip(rows, settings)]

    async def _wait(self, futures: list[RowFuture], due: float, receive: Callable) -> None:
        """Wait for the answers. Raises HTTPError at the deadline, Disconnected if the client disconnects."""
        answers = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        answers.add_done_callback(lambda done: done.exception())  # of `cancel` below; else asyncio logs it
        gone = asyncio.ensure_future(receive())
        try:
            timeout = None if due == inf else max(0.0, due - time.perf_counter())
            await asyncio.wait({answers, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise Disconnected if gone.done() else HTTPError(503, LATE)
        finally:
            gone.cancel()
            answers.cancel()

    async def _answer(
        self, fields: dict, rows: Rows, settings: list[dict], due: float, receive: Callable, send: Callable
    ) -> None:
        """Send the answers, in this server's own format."""
        read = _outcome_or_error if "texts" in fields else _outcome
        answers = await self._answers(rows, settings, due, receive, read)
        await self._send(send, 200, {"answers": answers} if "texts" in fields else answers[0])

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
    async def _fail(self, scope: dict, send: Callable, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
        await self._send(send, status, error_of(scope["path"], status, reason), JSON, *headers)

    async def _start(
        self, send: Callable, status: int, kind: bytes, length: int | None = None, *headers: tuple[bytes, bytes]
    ) -> None:
        self.worker.metrics.responses[status] += 1
        await send(head(status, kind, length, *self._model_headers, *headers))

    async def _send(
        self, send: Callable, status: int, body: dict | list | bytes, kind: bytes = JSON, *headers: tuple[bytes, bytes]
    ) -> None:
        message = {"type": "http.response.body", "body": body} if isinstance(body, bytes) else line(body)
        await self._start(send, status, kind, len(message["body"]), *headers)
        await send(message)


async def _beside(size: int, call: Callable, *arguments: Any) -> Any:
    """The result of a call, which runs on another thread if the body of its request is large."""
    return await asyncio.to_thread(call, *arguments) if size > BESIDE else call(*arguments)


def _rows(fields: dict, num_texts: int, settings: tuple[str, ...]) -> Rows:
    """The rows of a request in this server's own format, which may have these settings. Raises HTTPError."""
    with _errors():
        rows = rows_of_object(fields, num_texts)
        texts = {"texts"} if "texts" in fields else {name for names in KEYS[num_texts] for name in names}
        check_fields(fields, {*texts, *settings, DEADLINE})
        return rows


def _outcome(future: Future) -> dict:
    """The answer of a completed future, as JSON. Raises HTTPError if it failed."""
    return _result(future).to_dict()


def _result_and_tokens(future: RowFuture) -> tuple[Any, int]:
    return _result(future), future.tokens


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
