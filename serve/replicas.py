"""The application on Ray Serve (the extra `ray`): several processes (replicas), each with its own worker. No torch.

Ray's proxy receives requests and passes each to a replica, which runs app.py, as in a single process. Ray restarts a
replica that has died. Front runs in the proxy, for the errors that no replica can report: the replica of a request has
died, or the deadline passed while there was no replica.

`serve` starts a Ray cluster on this machine and ends it. If RAY_ADDRESS names a cluster, the application is deployed
there instead: it replaces the previous one, replica by replica, and stays. Such a cluster has Front only if it was
started with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mini_ee.serve.replicas.front.
"""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import NamedTuple

import ray
from ray import serve as ray_serve
from starlette.middleware import Middleware

from mini_ee.lab.data.lines import decoded, json_object
from mini_ee.serve.app import MAX_BODY, App
from mini_ee.serve.http_messages import JSON, Access, deadline_of, error_of, head, line
from mini_ee.serve.monitoring import merge_pages
from mini_ee.serve.server import DRAIN, address_of, listen
from mini_ee.serve.worker import LATE, Worker

NAME = "mini-ee"  # of the application, and of its deployment

OBJECT_STORE = 80 << 20  # bytes of Ray's object store, about its minimum: requests and answers do not use it

METRICS_TIMEOUT = 5.0  # seconds to wait for the metrics of a replica

HEALTH_CHECK = 1.0  # seconds between two health checks, by which Ray detects that a replica has died

LOGGING = {"log_level": "WARNING", "enable_access_log": False}

NO_REPLICA = "there is no replica, or the replica of this request has died; send the request again"

MARGIN = 0.05  # seconds after a deadline in which the replica may still report it itself


class Size(NamedTuple):
    """The number of replicas, and the resources of each."""

    least: int
    most: int  # if above `least`: Ray adds and removes replicas until each has about a batch of open requests
    batch: int
    max_open: int
    cores: int
    gpus: int


class Replica:
    """A worker and its ASGI application in a process. make: creates the worker in that process. access: as for App."""

    def __init__(self, make: Callable[[], Worker], access: Access):
        self.worker, self._access = make(), access

    def __serve_build_asgi_app__(self) -> App:
        return App(self.worker, self._access, self._pages)

    def check_health(self) -> None:
        """Ray calls this, and restarts the replica if it raises."""
        if self.worker.state == "dead":
            raise RuntimeError("the worker's thread has ended")

    async def page(self) -> tuple[str, str]:
        """The name of the replica and its metrics."""
        name = ray_serve.get_replica_context().replica_id.unique_id
        return name, self.worker.page()

    async def drain(self) -> Counter:
        """Drain the worker; returns the outcomes of its requests."""
        await asyncio.to_thread(self.worker.drain, DRAIN)
        return self.worker.metrics.requests

    async def _pages(self) -> str:
        replies = ray_serve.get_deployment_handle(NAME, NAME).broadcast("page")
        try:
            pages = await replies.results_async(timeout_s=METRICS_TIMEOUT, return_exceptions=True)
        except TimeoutError:  # one replica was late: then Ray returns none of the pages
            pages = [await self.page()]
        return merge_pages(dict(page for page in pages if isinstance(page, tuple)))


class Front:
    """Wraps Ray's proxy, so that every request gets a complete response. app: the proxy.

    While no replica is ready, the proxy sends a 404, which Front drops. If a replica dies, the proxy sends nothing, or
    ends a stream in the middle. `sent` records how much of the response the client has: None, "a part" or "all". When
    the proxy returns, Front sends what is missing: a 503, or the last line of a stream.
    """

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        clock, body, due, sent = asyncio.get_running_loop().time, b"", inf, None

        async def receive_in_time() -> dict:
            """After the deadline, tell the proxy that the client has disconnected: then it stops waiting."""
            nonlocal body, due
            try:
                async with asyncio.timeout_at(None if due == inf else due):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            if message["type"] == "http.request" and len(body) <= MAX_BODY:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    with suppress(ValueError):  # the replica reports the error
                        due = clock() + deadline_of(json_object(decoded(body))) + MARGIN
            return message

        async def send_response(message: dict) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                no_replica = message["status"] == 404 and headers.get(b"content-type") != JSON  # the proxy's own 404
                if not no_replica:
                    sent = "all" if b"content-length" in headers else "a part"
            elif sent and not message.get("more_body"):
                sent = "all"
            if sent:
                await send(message)

        await self.app(scope, receive_in_time, send_response)
        last = line(error_of(scope["path"], 503, LATE if clock() >= due else NO_REPLICA))
        if sent is None:
            await send(head(503, JSON, len(last["body"])))
        if sent != "all":
            await send(last)


def front() -> list[Middleware]:
    """The middleware that Ray adds to its proxy."""
    return [Middleware(Front)]


def serve(
    make: Callable[[], Worker], size: Size, host: str, port: int, ready: Callable[[str], None], access: Access
) -> Counter | None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and answer the open ones.

    make: creates the worker of a replica, in the process of the replica. ready: called with the addresses. port 0: a
    free port. access: who may send requests.
    Returns the outcomes of the requests, from the replicas that were running at the end. Returns None once the
    application is ready if RAY_ADDRESS names a cluster, which goes on serving.
    Raises OSError if the address is not available, ValueError if Ray or a replica cannot start.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        with listen(host, port) as free:
            port = free.getsockname()[1]
    before = signal.getsignal(signal.SIGTERM)
    try:
        _start(size, joins)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends this process as SIGINT does
        ray_serve.start(http_options={"host": host, "port": port}, logging_config=LOGGING)
        _deploy(make, size, access)
        ready(f"{address_of(host, port)}, RAY_ADDRESS={ray.get_runtime_context().gcs_address}")
        while not joins:
            time.sleep(1)
    except (OSError, ValueError):
        raise
    except Exception as error:  # the exceptions of Ray have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ValueError(f"Ray could not serve: {reason} See the lines of Ray above") from None
    except KeyboardInterrupt:
        if joins or not ray.is_initialized():
            raise
        return _drained()
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def _start(size: Size, joins: bool) -> None:
    """Start Ray, or join the named cluster. A new one has room for one more replica, which an update needs."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if joins:
        return ray.init(logging_level="ERROR")
    room = {"num_cpus": (size.most + 1) * size.cores, "object_store_memory": OBJECT_STORE}
    ray.init("local", include_dashboard=False, logging_level="ERROR", **room)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus < size.most * size.gpus:
        raise ValueError(f"expected a GPU for each of {size.most} replicas, found {gpus}; use fewer --replicas")


def _deploy(make: Callable[[], Worker], size: Size, access: Access) -> None:
    """Deploy the application. A previous one is replaced: its replicas serve until the new ones are ready."""
    many = {"num_replicas": size.most}
    if size.least < size.most:
        ends = {"min_replicas": size.least, "max_replicas": size.most}
        many = {"autoscaling_config": ends | {"target_ongoing_requests": size.batch}}
    deployment = ray_serve.deployment(
        ray_serve.ingress()(Replica),
        name=NAME,
        **many,
        ray_actor_options={"num_cpus": size.cores, "num_gpus": size.gpus},
        max_ongoing_requests=2 * size.max_open,  # above `max_open` the worker refuses, with the reason
        max_surge_percent=0 if size.gpus else 1,  # an update starts a new replica first; with GPUs it stops one first
        max_constructor_retry_count=3,
        health_check_period_s=HEALTH_CHECK,
        graceful_shutdown_timeout_s=DRAIN,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=LOGGING,
    )
    ray_serve.run(deployment.bind(make, access), name=NAME)


def _drained() -> Counter:
    requests, application = Counter(), ray_serve.status().applications.get(NAME)
    if application and application.deployments[NAME].replica_states.get("RUNNING"):
        replies = ray_serve.get_app_handle(NAME).broadcast("drain")
        for counts in replies.results(timeout_s=DRAIN + METRICS_TIMEOUT, return_exceptions=True):
            requests.update(counts if isinstance(counts, Counter) else {})
        ray_serve.delete(NAME)
    return requests
