"""A server of this process and its clients, for the tests of everything that is served over HTTP."""

import http.client
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mini_ee.lab.cli.main import main
from mini_ee.lab.export import writer
from mini_ee.lab.training import holdout
from mini_ee.serve import Worker, server
from mini_ee.serve.app import App
from mini_ee.serve.http_messages import Access, Hosts
from mini_ee.serve.monitoring import Metrics
from mini_ee.serve.worker import Row

THINGS, WORDS = ("film", "meal", "book", "song", "room"), ("good", "great", "bad", "awful", "dull")
SENTENCES = [f"the {thing} was {'very ' * (at % 7)}{word}" for at, thing in enumerate(THINGS) for word in WORDS]
PROMPTS = ["the film was", "a meal", "book and song and room", "the", "very very good"]
KILLS = int(os.environ.get("MINI_EE_KILLS", 1))  # moments; 50 by hand


class Slow:
    """An engine of two queues, whose batches take as long as they are told; `ran` lists them."""

    queues, by_length, room = ("first", "second"), True, 100

    def __init__(self, seconds=0.0):
        self.seconds, self.ran, self.released = seconds, [], []
        self.metrics, self.held = Metrics((1, 2), None, None, "id"), threading.Event()
        self.held.set()

    def row(self, text):
        return Row(len(text))

    def release(self, row):
        self.released.append(row)

    def run(self, at, rows):
        self.held.wait(10)
        time.sleep(self.seconds)
        self.ran.append((self.queues[at], [row.width for row in rows]))
        for row in rows:
            if row.width == 13:
                raise RuntimeError("a batch that fails")
            row.queue = 1 if not at and row.width % 2 else None
            if row.queue is None:
                row.answer = Said(at + 1)


class Said:
    def __init__(self, layers):
        self.layers = layers


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def serving(engine, access=Access(Hosts("127.0.0.1")), served=None, **settings):
    """A server of this process on a free port; its worker and its port. served: worker -> the application."""
    import uvicorn

    made, began = [], threading.Event()

    class Noted(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            made.append(self)

    original, uvicorn.Server = uvicorn.Server, Noted
    address = []
    worker = Worker(engine, **settings)
    thread = threading.Thread(
        target=server.serve,
        args=(
            served(worker) if served else App(worker, access),
            "127.0.0.1",
            0,
            lambda line: (address.append(line), began.set()),
        ),
    )
    thread.start()
    try:
        assert began.wait(10)
        yield worker, int(address[0].rpartition(":")[2])
    finally:
        uvicorn.Server = original
        made[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive() and worker.state == "drained"


def ask(port, body, path="/classify", method="POST", headers=None):
    """(status, JSON, headers) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, body, {"content-type": "application/json"} if headers is None else headers)
        response = connection.getresponse()
        content, kind = response.read(), response.headers["content-type"]
        body_read = json.loads(content) if kind.startswith("application/json") else content.decode()
        return response.status, body_read, response.headers
    finally:
        connection.close()


def together(port, bodies, path="/classify"):
    """The answers of requests that are sent at the same time."""
    replies = [None] * len(bodies)

    def one(at):
        replies[at] = ask(port, bodies[at], path)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def run_block(which):
    """Run a block of shell of serve/README.md. Returns its line that installs, and the finished process."""
    page = (Path(server.__file__).parent / "README.md").read_text()
    install, *lines = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)[which].splitlines()
    return install, run_lines(lines)


def run_lines(lines):
    """Run lines of shell of a page, but on fewer examples and a free port. Returns the finished process.

    What needs a run and so torch is called in this process, unless the folder that it would write is there.
    """
    rest = []
    for line in lines:
        line = re.sub("--exits 4,8,12( --max-train 200 --epochs 1)?", "--exits 4,8,12 --max-train 40 --epochs 1", line)
        line = line.replace('split("dev").texts', 'split("dev").texts[:200]')
        program, *words = shlex.split(line.replace("--max-rows 200", "--max-rows 16"), comments=True)
        exported = words[0] == "calibrate" and (Path(words[1]) / "manifest.json").exists()
        if program != "mini-ee" or words[0] in ("serve", "batch") or exported:
            rest.append(line)
        elif "--out" not in words or not Path(words[-1]).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(holdout, "TEST_ROWS", 150)
                patch.setattr(writer, "VERIFIED_TEXTS", 8)
                patch.setattr(writer, "ROUNDED_TEXTS", 16)
                assert main(words) == 0
    script = "\n".join(rest).replace("8000", str(free_port())).replace("mini-ee ", f"{sys.executable} -m mini_ee ")
    script = script.replace("python -c", f"{sys.executable} -c")
    process = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stderr
    return process
