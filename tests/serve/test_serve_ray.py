"""Replicas on Ray: the answers of one process, and what clients see of replicas that die, are replaced, or drain."""

import asyncio
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from http_server import KILLS, PROMPTS, SENTENCES, ask, free_port, run_block, together

from mini_ee.lab.cli.main import main
from mini_ee.serve.http_messages import head, line

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, at what Ray's own options are written with
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mini-ee[ray]'")
GONE = "there is no replica, or the replica of this request has died; send the request again"

DEADLINE = 5.0  # seconds, of each request of the load


def line_of(folder, port, *options):
    named = ["--ray", "--replicas", "2", "--port", str(port), "--threads", "1", *options]
    return [sys.executable, "-m", "mini_ee", "serve", str(folder), *named]


def children(process, name):
    pgrep = subprocess.run(["pgrep", "-P", str(process), "-f", name], capture_output=True, text=True)
    return [int(number) for number in pgrep.stdout.split()]


class Cluster:
    """The program with Ray under it, and what it has said."""

    def __init__(self, folder, *options):
        self.port, self.output = free_port(), []
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(line_of(folder, self.port, *options), **piped)
        self._began = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self):
        assert self._began.wait(120) and self.process.poll() is None, "".join(self.output)
        self.whole()

    def _read(self):
        for output in self.process.stderr:
            self.output.append(output)
            if f"http://127.0.0.1:{self.port}" in output:
                self._began.set()
        self._began.set()

    def replicas(self):
        """Their processes: the program's Ray has them as children."""
        raylets = children(self.process.pid, "/raylet/raylet ")
        return [replica for raylet in raylets for replica in children(raylet, "^ray::ServeReplica:mini-ee")]

    def names(self):
        """Of the replicas, as /metrics shows them, and how many requests each has answered."""
        page = str(ask(self.port, None, "/metrics", "GET")[1])
        counts = re.findall(r'requests_total{replica="(\w+)",outcome="answered"} (\d+)', page)
        return {name: int(count) for name, count in counts}

    def whole(self, but=()):
        """Wait for two replicas that answer, none of them of these names."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(OSError):  # on busy cores Ray may take a slow proxy for a dead one, and start another
                if len(replica_names := self.names()) == 2 and not set(replica_names) & set(but):
                    return replica_names
            time.sleep(0.2)
        raise AssertionError("".join(self.output))

    def close(self):
        self.process.terminate()  # a kill would leave some of Ray's processes behind
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        self._reader.join(20)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def cluster(runtime):
    made = Cluster(runtime.folder, "--json")
    try:
        made.wait()
        yield made
    finally:
        made.close()


@contextmanager
def load(port, clients=4):
    """Requests of so many clients, one after the other; what each has seen: (status or error, seconds)."""
    seen, ended = [], threading.Event()

    def client(at):
        while not ended.is_set():
            body, begin = {"text": SENTENCES[at % len(SENTENCES)], "deadline_ms": DEADLINE * 1e3}, time.monotonic()
            try:
                status, answer, _ = ask(port, body)
                assert status == 200 or list(answer) == ["error"]
            except (OSError, http.client.HTTPException) as error:
                status = type(error)
            seen.append((status, time.monotonic() - begin))
            at += clients
            time.sleep(0.01)

    threads = [threading.Thread(target=client, args=(at,)) for at in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


# ---- What it answers ----
def test_replicas_answer_as_the_runtime_does_at_batch_1(cluster, runtime):
    alone = runtime.run(SENTENCES, batch_size=1)
    replies = together(cluster.port, [{"text": text} for text in SENTENCES])
    for (status, answer, _), expected in zip(replies, alone):
        assert status == 200 and (answer["label"], answer["layers"]) == (expected.label, expected.layers)
    counts = cluster.names()
    assert len(counts) == 2 and sum(counts.values()) == len(SENTENCES) and all(counts.values())


def test_errors_are_those_of_one_process(cluster):
    for body, status, message in (
        (b'{"text": "the fi', 400, "expected one JSON object"),
        (b'{"text": "a", "deadline_ms": -1}', 400, "deadline_ms"),
        (b" " * ((1 << 20) + 1), 413, "at most 1048576 bytes"),
        (b'{"text": "a", "deadline_ms": 0.001}', 503, "the deadline passed"),
    ):
        status_given, answer, _ = ask(cluster.port, body)
        assert status_given == status and message in answer["error"] and "\n" not in answer["error"]
    assert ask(cluster.port, None, "/", "GET")[0] == 404
    assert ask(cluster.port, None, "/health", "GET")[1]["status"] == "ready"


# ---- Replicas that die ----
def test_clients_of_killed_replicas_get_an_answer_or_an_error_in_time_and_ray_brings_them_back(cluster):
    """50 kills were made by hand, with MINI_EE_KILLS=50 and -s."""
    with load(cluster.port) as seen:
        for _ in range(KILLS):
            os.kill(cluster.replicas()[0], signal.SIGKILL)
            cluster.whole()
    statuses, slowest = Counter(status for status, _ in seen), max(seconds for _, seconds in seen)
    print(f"{KILLS} kills: {dict(statuses)}, slowest {slowest:.2f} s")
    assert set(statuses) <= {200, 503} and slowest < DEADLINE + 1
    assert statuses[200] > 0.9 * len(seen)


def test_a_deadline_is_kept_while_there_is_no_replica(cluster):
    for process in cluster.replicas():
        os.kill(process, signal.SIGKILL)
    begin = time.monotonic()
    for status, answer, _ in together(cluster.port, [{"text": "the film", "deadline_ms": 300}] * 4):
        assert status == 503 and ("the deadline passed" in answer["error"] or "is gone" in answer["error"])
    assert time.monotonic() - begin < 2
    cluster.whole()


# ---- Another model ----
def handed_over(cluster, folder, *options):
    """The command that replaces what a cluster serves."""
    (address,) = re.findall(r"RAY_ADDRESS=([\d.:]+)", "".join(cluster.output))
    line, named = line_of(folder, cluster.port, *options), os.environ | {"RAY_ADDRESS": address}
    return subprocess.run(line, env=named, capture_output=True, text=True, timeout=120)


def test_another_export_takes_over_without_a_lost_request(cluster, runtime):
    before = cluster.whole()
    with load(cluster.port) as seen:
        process = handed_over(cluster, runtime.folder)
        assert process.returncode == 0 and "the cluster serves it now" in process.stderr, process.stderr
        assert not set(cluster.whole(but=before)) & set(before)
    assert {status for status, _ in seen} == {200}


def test_a_replica_refuses_what_is_above_its_queue(cluster, decoder):
    """By itself: were fewer handed to it at a time, as Ray does by default, its batches would not fill."""
    assert handed_over(cluster, decoder.folder, "--queue", "2").returncode == 0
    cluster.whole()
    replies = together(cluster.port, [{"text": "the film", "max_new_tokens": 12}] * 32, "/generate")
    assert {status for status, *_ in replies} == {200, 503}
    refused = [answer["error"] for status, answer, _ in replies if status == 503]
    assert all(answer.startswith("2 requests are open, with room for 0 more") for answer in refused)


def test_a_decoder_streams_through_ray(cluster, decoder):
    for prompt in PROMPTS:
        body = {"text": prompt, "max_new_tokens": 5, "stream": True}
        status, lines, headers = ask(cluster.port, body, "/generate")
        *pieces, answer = map(json.loads, lines.splitlines())
        expected = decoder.run([prompt], max_new_tokens=5)[0]
        assert status == 200 and headers["content-type"] == "application/x-ndjson"
        assert "".join(piece["text"] for piece in pieces) == answer["text"] == expected.text


def test_sigterm_drains_and_no_process_remains(cluster):
    replies = []
    body = {"text": "the film", "max_new_tokens": 8}
    asking = threading.Thread(target=lambda: replies.extend(together(cluster.port, [body] * 16, "/generate")))
    asking.start()
    time.sleep(0.05)
    replicas = cluster.replicas()
    cluster.process.send_signal(signal.SIGTERM)
    asking.join(30)
    assert {status for status, *_ in replies} <= {200, 503}
    assert cluster.process.wait(60) == 0
    summary = json.loads(cluster.process.stdout.read())
    assert summary["requests"]["answered"] >= sum(status == 200 for status, *_ in replies)
    assert len(replicas) == 2 and not any(Path(f"/proc/{replica}").exists() for replica in replicas)
    assert any("drained" in output for output in cluster.output)


# ---- In front of the proxy ----
def through_front(proxy, body=b"{}"):
    """What a client sees of a proxy that does so: (status, lines), and the seconds that it took."""
    from mini_ee.serve.replicas import Front

    messages, sent = [{"type": "http.request", "body": body}], []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    begin = time.monotonic()
    asyncio.run(Front(proxy)({"type": "http", "path": "/classify"}, receive, send))
    status = sent[0]["status"]
    answer = [json.loads(line) for message in sent[1:] for line in message["body"].splitlines()]
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return status, answer, time.monotonic() - begin


def test_a_request_whose_replica_is_gone_gets_an_error():
    async def proxy(scope, receive, send):
        await receive()

    status, answer, _ = through_front(proxy)
    assert status == 503 and answer == [{"error": GONE}]


def test_a_stream_whose_replica_is_gone_ends_with_an_error():
    async def proxy(scope, receive, send):
        await receive()
        await send(head(200, b"application/x-ndjson"))
        await send(line({"text": "once"}, more=True))

    assert through_front(proxy)[:2] == (200, [{"text": "once"}, {"error": GONE}])


def test_a_deadline_that_passes_in_the_proxy_is_an_error():
    async def proxy(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    status, answer, seconds = through_front(proxy, b'{"deadline_ms": 100}')
    assert status == 503 and "the deadline passed" in answer[0]["error"] and 0.1 <= seconds < 0.5


@pytest.mark.parametrize(("status", "kind", "seen"), [(400, "application/json", 400), (404, "text/plain", 503)])
def test_an_answer_passes_as_it_is_but_for_the_proxys_own_that_there_is_no_model(status, kind, seen):
    async def proxy(scope, receive, send):
        await receive()
        await send(head(status, kind.encode(), 3))
        await send(line({}))

    assert through_front(proxy)[:2] == (seen, [{} if seen == status else {"error": GONE}])


# ---- The command ----
def test_wrong_arguments_are_refused_before_ray_starts(runtime, capsys):
    assert main(["serve", str(runtime.folder), "--ray", "--shadow", "0"]) == 2
    line = capsys.readouterr().err
    assert "the share of shadow rows must be above 0" in line and line.count("\n") == 1


# ---- The page ----
@pytest.mark.skipif(not shutil.which("curl"), reason="the page asks by curl")
def test_the_page_from_export_to_two_replicas_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split("train joint --exits 4,8,12 --max-train 40 --epochs 1 --out run")) == 0
    assert main(shlex.split("export run --segments --out served")) == 0
    install, process = run_block(1)
    assert install == "pip install -q -e '.[ray]'" and '"layers": ' in process.stdout
    assert "1" in re.findall(r'replica="\w+",outcome="answered"} (\d)', process.stdout)
    assert "drained; 1 requests answered" in process.stderr
