"""mini_ee's application on Ray Serve (the extra `ray`): so many processes, each with a worker of its own. No torch.

Ray's proxy takes requests and hands each to a replica; what it meets there is app.py, as on one process. Ray starts a
replica anew that has died. Front, in the proxy, says what only the proxy can say: that the replica which had a request
is gone, or that its deadline has passed while there was none.

A cluster of its own, on this machine, is started and ended by `serve`. Where the environment names one (RAY_ADDRESS),
the application is handed to that: it replaces the one that is there, replica by replica, and stays. Such a cluster has
Front where it was started with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mini_ee.export.serving.replicas.front.
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

from mini_ee.data.lines import decoded, json_object
from mini_ee.export.serving.app import JSON, MAX_BODY, App, deadline_of, head, line
from mini_ee.export.serving.hosts import Hosts
from mini_ee.export.serving.server import DRAIN, address_of, listen
from mini_ee.export.serving.watch import together
from mini_ee.export.serving.worker import LATE, Worker

NAME = "mini-ee"  # of the application, and of its deployment

STORE = 80 << 20  # bytes of Ray's object store, about the least: requests and answers do not go through it

PAGES = 5.0  # seconds that a replica may take to say what it has counted

LOOK = 1.0  # seconds between two looks at a replica, by which Ray knows that it has died

LOGGING = {"log_level": "WARNING", "enable_access_log": False}

GONE = "no replica is there, or the one that had this request is gone; ask again"

MARGIN = 0.05  # seconds after a deadline in which the replica itself may say that it has passed


class Size(NamedTuple):
    """How many replicas there are, and what each takes."""

    least: int
    most: int  # more than the least: Ray adds and removes replicas, so that each has about a batch of open requests
    batch: int
    max_open: int
    cores: int
    gpus: int


class Replica:
    """A worker in a process of its own, under an ASGI application. make: makes the worker there. hosts: as App's."""

    def __init__(self, make: Callable[[], Worker], hosts: Hosts):
        self.worker, self._hosts = make(), hosts

    def __serve_build_asgi_app__(self) -> App:
        return App(self.worker, self._hosts, self._pages)

    def check_health(self) -> None:
        """Asked by Ray, which starts the replica anew where this raises."""
        if self.worker.state == "dead":
            raise RuntimeError("the worker's thread has ended")

    async def page(self) -> tuple[str, str]:
        """Its name and what it has counted."""
        name = ray_serve.get_replica_context().replica_id.unique_id
        return name, self.worker.watch.page(self.worker.lengths())

    async def drain(self) -> Counter:
        """As the worker's; returns what became of its requests."""
        await asyncio.to_thread(self.worker.drain, DRAIN)
        return self.worker.watch.requests

    async def _pages(self) -> str:
        replies = ray_serve.get_deployment_handle(NAME, NAME).broadcast("page")
        try:
            found = await replies.results_async(timeout_s=PAGES, return_exceptions=True)
        except TimeoutError:  # of one of them: Ray gives nothing of the others either
            found = [await self.page()]
        return together(dict(each for each in found if isinstance(each, tuple)))


class Front:
    """Around Ray's proxy: an end for each request that gets none there. app: the proxy."""

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        clock, body, due, sent = asyncio.get_running_loop().time, b"", inf, None

        async def receive_in_time() -> dict:
            """To the proxy, a client whose deadline has passed has hung up."""
            nonlocal body, due
            try:
                async with asyncio.timeout_at(None if due == inf else due):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            if message["type"] == "http.request" and len(body) <= MAX_BODY:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    with suppress(ValueError):  # the replica says what is wrong
                        due = clock() + deadline_of(json_object(decoded(body))) + MARGIN
            return message

        async def send_ours(message: dict) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                ours = headers.get(b"content-type") == JSON
                if ours or message["status"] != 404:  # else the proxy's: there is no model
                    sent = "all" if b"content-length" in headers else "a part"
            elif sent and not message.get("more_body"):
                sent = "all"
            if sent:
                await send(message)

        await self.app(scope, receive_in_time, send_ours)
        last = line({"error": LATE if clock() >= due else GONE})
        if sent is None:
            await send(head(503, JSON, len(last["body"])))
        if sent != "all":
            await send(last)


def front() -> list[Middleware]:
    """What Ray puts around its proxy."""
    return [Middleware(Front)]


def serve(
    make: Callable[[], Worker], size: Size, host: str, port: int, ready: Callable[[str], None], hosts: Hosts
) -> Counter | None:
    """Serve until SIGTERM or SIGINT; then take no more, and answer what was taken. ready: told the addresses.

    make: makes a replica's worker; it is sent to a process that imports what it needs. port 0: a free one. hosts: whom
    requests may be for.
    Returns what became of the requests, of the replicas that were there at the end; where the environment names a
    cluster, which serves on, None as soon as it does.
    Raises OSError where the address cannot be had, ValueError where Ray cannot start or a replica cannot be made.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    if not joins:
        with listen(host, port) as free:
            port = free.getsockname()[1]
    before = signal.getsignal(signal.SIGTERM)
    try:
        _start(size, joins)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT, wherever this process stands
        ray_serve.start(http_options={"host": host, "port": port}, logging_config=LOGGING)
        _deploy(make, size, hosts)
        ready(f"{address_of(host, port)}, RAY_ADDRESS={ray.get_runtime_context().gcs_address}")
        while not joins:
            time.sleep(1)
    except (OSError, ValueError):
        raise
    except Exception as error:  # Ray's have no class in common
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ValueError(f"Ray could not serve: {reason} Its own lines say why") from None
    except KeyboardInterrupt:
        if joins or not ray.is_initialized():
            raise
        return _drained()
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def _start(size: Size, joins: bool) -> None:
    """Ray: the cluster that is named, or one with room for a replica more, which an update needs for a while."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if joins:
        return ray.init(logging_level="ERROR")
    room = {"num_cpus": (size.most + 1) * size.cores, "object_store_memory": STORE}
    ray.init("local", include_dashboard=False, logging_level="ERROR", **room)
    found = int(ray.cluster_resources().get("GPU", 0))
    if found < size.most * size.gpus:
        raise ValueError(f"expected a GPU for each of {size.most} replicas, found {found}; take fewer --replicas")


def _deploy(make: Callable[[], Worker], size: Size, hosts: Hosts) -> None:
    """Put the application in the place of one that is there: the old replicas serve until new ones do."""
    many = {"num_replicas": size.most}
    if size.least < size.most:
        ends = {"min_replicas": size.least, "max_replicas": size.most}
        many = {"autoscaling_config": ends | {"target_ongoing_requests": size.batch}}
    deployment = ray_serve.deployment(
        ray_serve.ingress()(Replica),
        name=NAME,
        **many,
        ray_actor_options={"num_cpus": size.cores, "num_gpus": size.gpus},
        max_ongoing_requests=2 * size.max_open,  # what is above `max_open` is refused by the worker, with the reason
        max_surge_percent=0 if size.gpus else 1,  # a replica more; with GPUs, which may be few, one stops first
        max_constructor_retry_count=3,
        health_check_period_s=LOOK,
        graceful_shutdown_timeout_s=DRAIN,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=LOGGING,
    )
    ray_serve.run(deployment.bind(make, hosts), name=NAME)


def _drained() -> Counter:
    requests, about = Counter(), ray_serve.status().applications.get(NAME)
    if about and about.deployments[NAME].replica_states.get("RUNNING"):
        replies = ray_serve.get_app_handle(NAME).broadcast("drain")
        for each in replies.results(timeout_s=DRAIN + PAGES, return_exceptions=True):
            requests.update(each if isinstance(each, Counter) else {})
        ray_serve.delete(NAME)
    return requests
