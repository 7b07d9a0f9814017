"""The application on uvicorn (the extra `serve`): one process, which drains on SIGTERM or SIGINT. No torch."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_ee.serve.app import App
from mini_ee.serve.canary import Canary

HEAD_SECONDS = 15.0  # seconds in which a connection must send the head of a request

DRAIN = 30  # seconds for open requests after SIGTERM

CONNECTIONS = 1000  # at once; a further one gets 503


PROBE_SECONDS = 0.5  # seconds between two probes whether a client that has closed its sending side still reads

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an interim response, which every client of HTTP/1.1 skips


class Protocol(H11Protocol):
    """uvicorn's protocol, with two differences.

    It closes connections without a complete head of a request after HEAD_SECONDS. A client that closes its sending side
    after a whole request gets its answer. A client that hangs up looks the same until something is written to it, so
    CONTINUE is written now and then: to a client that is gone this fails, and ends the request.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _half_closed = False

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._start_head_timer()
        super().on_response_complete()
        if self._half_closed and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result, which uvicorn never gives
        """Whether the connection stays open: for the answer to a whole request."""
        cycle = self.cycle
        self._half_closed = cycle is not None and not cycle.response_complete and not cycle.more_body
        if self._half_closed:
            self.loop.call_later(PROBE_SECONDS, self._probe)
        return self._half_closed

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_started or self.scope["http_version"] != "1.1":
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(PROBE_SECONDS, self._probe)

    def _start_head_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0: a free port. Raises OSError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; choose another --host or --port", f"{host}:{port}") from None


def address_of(host: str, port: int) -> str:
    """The URL of the server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: App | Canary, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and answer the open ones.

    port 0: a free port. ready: called with the address. Raises OSError if the address is not available.
    """
    listening = listen(host, port)
    settings = {"loop": "asyncio", "http": Protocol, "ws": "none", "lifespan": "off", "access_log": False}
    limits = {"limit_concurrency": CONNECTIONS + 1, "timeout_graceful_shutdown": DRAIN}
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", server_header=False, **settings, **limits))
    in_main = threading.current_thread() is threading.main_thread()
    ends = (signal.SIGTERM, signal.SIGINT) if in_main else ()
    # Handlers for the time before and after uvicorn's own: after draining, uvicorn raises the signal again.
    before = {signum: signal.signal(signum, lambda *_: setattr(server, "should_exit", True)) for signum in ends}
    try:
        ready(address_of(host, listening.getsockname()[1]))
        server.run(sockets=[listening])
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        app.drain(DRAIN)
