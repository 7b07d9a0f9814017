"""The application on uvicorn (the extra `serve`): one process, which drains on SIGTERM or SIGINT. No torch."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_ee.export.serving.app import App
from mini_ee.export.serving.canary import Canary
from mini_ee.export.serving.hosts import Hosts
from mini_ee.export.serving.worker import Worker

HEAD_SECONDS = 15.0  # seconds in which a connection must send the head of a request

DRAIN = 30  # seconds for open requests after SIGTERM

CONNECTIONS = 1000  # at once; a further one gets 503


class Protocol(H11Protocol):
    """uvicorn's protocol, which also closes connections without a complete head of a request after HEAD_SECONDS."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._start_head_timer()
        super().on_response_complete()

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


def serve(worker: Worker | Canary, host: str, port: int, ready: Callable[[str], None], hosts: Hosts) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and answer the open ones.

    port 0: a free port. ready: called with the address. hosts: names that requests may have in their Host
    header; a canary has its own.
    Raises OSError if the address is not available.
    """
    listening, app = listen(host, port), worker if isinstance(worker, Canary) else App(worker, hosts)
    settings = {"loop": "asyncio", "http": Protocol, "ws": "none", "lifespan": "off", "access_log": False}
    limits = {"limit_concurrency": CONNECTIONS + 1, "timeout_graceful_shutdown": DRAIN}
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", server_header=False, **settings, **limits))
    in_main = threading.current_thread() is threading.main_thread()
    ends = (signal.SIGTERM, signal.SIGINT) if in_main else ()
    # Handlers for the time before and after uvicorn's own: after draining, uvicorn raises the signal again.
    before = {each: signal.signal(each, lambda *_: setattr(server, "should_exit", True)) for each in ends}
    try:
        ready(address_of(host, listening.getsockname()[1]))
        server.run(sockets=[listening])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        worker.drain(DRAIN)
