"""Who computes the blocks of a job: this process, several processes, or actors on Ray. No torch here.

Each has `map`, the parts of blocks in the order in which they are ready, and `compare`, see PartWriter. Blocks are read
while others are computed: each worker has one block, and one more waits for it. Hidden states stay in the worker.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait

from mini_ee.serve.batch.parts import Part, PartWriter
from mini_ee.serve.batch.rows import Block

WAITING = 2  # blocks of a worker: one that it computes and one that waits
OBJECT_STORE = 256 << 20  # bytes of the object store of a cluster that is started here
GONE = "expected every worker process to finish, found one that ended; the same command goes on where it stopped"


def pool_maker(processes: int | None = None, threads: int | None = None, device: str = "cpu", ray: bool = False):
    """A function that makes a pool from a function that makes a PartWriter.

    processes: default one for each core, with one thread each; on a GPU, or if threads are given, one.
    """
    alone = device != "cpu" or threads is not None
    count = processes or (1 if alone else os.cpu_count() or 1)

    def make_pool(make: Callable[..., PartWriter]) -> "InProcess | Processes | RayActors":
        make = partial(make, device=device, threads=threads or 1)
        if ray:
            return RayActors(make, count, threads or 1, device != "cpu")
        return Processes(make, count) if count > 1 else InProcess(make)

    return make_pool


class InProcess:
    """This process. make: creates the PartWriter."""

    def __init__(self, make: Callable[[], PartWriter]):
        self._writer = make()

    def map(self, blocks: Iterable[Block]) -> Iterator[Part]:
        """The part of each block."""
        return map(self._writer.write, blocks)

    def compare(self, *arguments) -> dict:
        """See PartWriter."""
        return self._writer.compare(*arguments)

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Several processes on this machine, each with its own PartWriter."""

    def __init__(self, make: Callable[[], PartWriter], count: int):
        self._processes, self._connections = [], list[Connection]()
        context = multiprocessing.get_context("spawn")
        with _without_interrupts():  # Ctrl-C goes to all processes: this one ends the others
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there, make), daemon=True)
                self._connections.append(here)
                self._processes.append(process)
                process.start()
                there.close()

    def map(self, blocks: Iterable[Block]) -> Iterator[Part]:
        """The part of each block, as they are ready."""
        blocks = iter(blocks)
        busy = {connection: self._send(connection, blocks, WAITING) for connection in self._connections}
        while any(busy.values()):
            for connection in wait([each for each, count in busy.items() if count]):
                yield self._receive(connection)
                busy[connection] += self._send(connection, blocks, 1) - 1

    def compare(self, *arguments) -> dict:
        """See PartWriter; in one of the processes."""
        self._connections[0].send(("compare", arguments))
        return self._receive(self._connections[0])

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join()

    def _send(self, connection: Connection, blocks: Iterator[Block], count: int) -> int:
        sent = 0
        for block in islice(blocks, count):
            try:
                connection.send(("write", (block,)))
            except OSError:
                raise RuntimeError(GONE) from None
            sent += 1
        return sent

    def _receive(self, connection: Connection):
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(GONE) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(connection: Connection, make: Callable[[], PartWriter]) -> None:
    """The loop of a process. A thread receives, so that the other side never waits; it sees when that side has died."""
    requests: queue.Queue = queue.Queue()

    def receive() -> None:
        try:
            while True:
                requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    writer = None
    while True:
        name, arguments = requests.get()
        try:
            writer = writer or make()
            answer = getattr(writer, name)(*arguments)
        except Exception as error:  # reported by the other side, which then ends this process
            answer = error if isinstance(error, ValueError | OSError) else RuntimeError(str(error))
        try:
            connection.send(answer)
        except OSError:  # the other side has died
            os._exit(1)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class RayActors:
    """Actors on Ray: a cluster on this machine, or the one that RAY_ADDRESS names.

    There, all machines must have the export and share the folder `out`. The texts come over the network.
    """

    def __init__(self, make: Callable[[], PartWriter], count: int, cores: int, gpu: bool):
        import ray
        from ray.util import ActorPool

        self._ray, self._count = ray, count
        about: dict = {
            "address": os.environ.get("RAY_ADDRESS", "local"),
            "logging_level": "ERROR",
            "log_to_driver": False,
        }
        if about["address"] == "local":
            room = {"num_cpus": count * cores, "object_store_memory": OBJECT_STORE}
            about |= room | {"include_dashboard": False}
        with _errors_of_ray():
            ray.init(**about)
            actor = ray.remote(_Actor).options(num_cpus=cores, num_gpus=int(gpu))
            self._pool = ActorPool([actor.remote(make) for _ in range(count)])

    def map(self, blocks: Iterable[Block]) -> Iterator[Part]:
        """The part of each block, as they are ready."""
        blocks, pool = iter(blocks), self._pool
        with _errors_of_ray():
            for block in islice(blocks, WAITING * self._count):
                pool.submit(_write, block)
            while pool.has_next():
                part = pool.get_next_unordered()
                for block in islice(blocks, 1):
                    pool.submit(_write, block)
                yield part

    def compare(self, *arguments) -> dict:
        """See PartWriter; in one of the actors."""
        with _errors_of_ray():
            self._pool.submit(lambda actor, given: actor.compare.remote(*given), arguments)
            return self._pool.get_next_unordered()

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        self._ray.shutdown()


class _Actor:
    """A PartWriter that is made in the actor's process."""

    def __init__(self, make: Callable[[], PartWriter]):
        self._writer = make()

    def write(self, block: Block) -> Part:
        return self._writer.write(block)

    def compare(self, *arguments) -> dict:
        return self._writer.compare(*arguments)


def _write(actor, block: Block):
    return actor.write.remote(block)


@contextmanager
def _errors_of_ray() -> Iterator[None]:
    """Raises an actor's error as it is. Ray's own, which have no common class, become a RuntimeError of one line."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ValueError | OSError) else RuntimeError(str(error))) from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeError(f"Ray could not finish: {reason}; the same command goes on where it stopped") from None
