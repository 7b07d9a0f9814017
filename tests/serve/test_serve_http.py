"""The server: what it answers over HTTP, and what bad, slow and vanishing clients do to it."""

import asyncio
import contextlib
import http.client
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_server import KILLS, PROMPTS, SENTENCES, ask, run_block, run_lines, serving, together

import mini_ee
from mini_ee.lab.cli.main import main, parser
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Fixed
from mini_ee.serve import Worker, app, engine_of, server
from mini_ee.serve import command_serve as serve
from mini_ee.serve.http_messages import Access, Hosts
from mini_ee.serve.monitoring import Guarantee
from mini_ee.serve.worker import ENDING, LATE, LONG

JSON_HEAD = b"HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def served(runtime):
    with serving(engine_of(runtime, guarantee=Guarantee(0.5, 0.9)), max_open=32) as (worker, port):
        yield worker, port


# ---- What it answers ----


def test_health_and_metrics_name_the_exported_model(served, runtime, tmp_path):
    status, health, _ = ask(served[1], None, "/health", "GET")
    assert status == 200 and health["status"] == "ready" and health["exits"] == [1, 2, 4, 6]
    assert health["model"] == runtime.model_id
    assert ask(served[1], None, "/live", "GET")[:2] == (200, {"status": "ready"})
    for _ in range(20):  # half of them run to full depth beside
        assert ask(served[1], {"text": "the film"})[2]["x-model-id"] == runtime.model_id
    status, page, headers = ask(served[1], None, "/metrics", "GET")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in ("requests_total", "request_seconds_bucket", "exits_total", "queue_rows", "agreement", "shadow_total"):
        assert f"\nmini_ee_{name}" in page, name
    assert 'mini_ee_http_responses_total{status="200"}' in page
    assert f'mini_ee_model_info{{model="{runtime.model_id}"}} 1' in page
    copy = shutil.copytree(runtime.folder, tmp_path / "copy")
    assert Runtime(copy).model_id == runtime.model_id
    write_json(copy / "manifest.json", read_json(copy / "manifest.json") | {"max_length": 64})
    assert Runtime(copy).model_id != runtime.model_id


def slowed(engine, seconds):
    """The engine, with so many seconds before each batch."""
    run = engine.run
    engine.run = lambda at, rows: (time.sleep(seconds), run(at, rows))
    return engine


def test_a_server_that_drains_is_unhealthy_and_one_whose_worker_has_failed_is_not_alive(runtime, monkeypatch):
    with serving(engine_of(runtime)) as (worker, port):
        with monkeypatch.context() as failed:
            failed.setattr(type(worker), "state", "dead")
            assert ask(port, None, "/live", "GET")[:2] == (503, {"status": "dead"})
        assert worker.drain(10)
        status, answer, headers = ask(port, None, "/health", "GET")
        assert (status, answer["status"], headers["retry-after"]) == (503, "drained", "1")
        assert ask(port, None, "/live", "GET")[:2] == (200, {"status": "drained"})
        status, answer, _ = ask(port, {"text": "the film"})
        assert (status, answer) == (503, {"error": "the server is shutting down; send the request to another server"})


def test_a_full_queue_is_503_with_the_reason(runtime):
    with serving(slowed(engine_of(runtime, rule=Fixed(0)), 0.05), max_open=2, batch=1) as (worker, port):
        replies = together(port, [{"text": "the film"}] * 12)
        assert {status for status, *_ in replies} == {200, 503}
        refused = [(answer, headers) for status, answer, headers in replies if status == 503]
        assert all("2 requests are open" in answer["error"] and headers["retry-after"] for answer, headers in refused)
    assert worker.metrics.responses[503] == len(refused)


def test_a_request_is_refused_when_its_deadline_has_passed(runtime, caplog):
    with serving(slowed(engine_of(runtime), 0.3)) as (worker, port):
        begin = time.perf_counter()
        status, answer, _ = ask(port, {"text": "the film", "deadline_ms": 50})
        assert status == 503 and "the deadline passed" in answer["error"] and time.perf_counter() - begin < 0.28
    assert worker.metrics.requests["late"] == 1 and not worker.metrics.requests["cancelled"] and not caplog.text


def held_encoding(engine):
    """The engine, and an event until which no long text is encoded; how many are encoded at the same time is noted."""
    row, go, now, most = engine.row, threading.Event(), [], []

    def held(texts, **settings):
        if len(texts[0]) > LONG:
            now.append(texts)
            most.append(len(now))
            assert go.wait(20)
            now.pop()
        return row(texts, **settings)

    engine.row = held
    return engine, go, most


LONG_TEXT = "the film was good " * (LONG // 16)


def test_a_long_text_is_encoded_beside_other_requests_and_its_deadline_runs(runtime):
    engine, go, _ = held_encoding(engine_of(runtime))
    with serving(engine) as (worker, port):
        begin = time.perf_counter()
        assert ask(port, {"text": LONG_TEXT, "deadline_ms": 50})[:2] == (503, {"error": LATE})
        assert time.perf_counter() - begin < 10 and not go.is_set()
        assert ask(port, {"text": "the film"})[0] == 200
        go.set()
        assert ask(port, {"text": LONG_TEXT})[0] == 200
    assert worker._open == 0 and worker.metrics.requests["late"] == 1


def test_long_texts_take_their_place_before_they_are_encoded_one_at_a_time(runtime):
    """Above --queue they are refused while none is encoded yet, and one that is given up keeps its place till then."""
    engine, go, most = held_encoding(engine_of(runtime))
    with serving(engine, max_open=4) as (worker, port):
        replies = []
        asking = threading.Thread(target=lambda: replies.extend(together(port, [{"text": LONG_TEXT}] * 20)))
        asking.start()
        deadline = time.monotonic() + 10
        while worker.metrics.requests["refused"] < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert worker.metrics.requests["refused"] == 16 and worker._open == 4
        next(iter(worker._encoding)).cancel()
        status, answer, _ = ask(port, {"text": "the film"})
        assert status == 503 and "4 requests are open, with room for 0 more" in answer["error"]
        go.set()
        asking.join()
        assert ask(port, {"text": "the film"})[0] == 200
    assert sorted(status for status, *_ in replies if status == 200) == [200] * 3
    assert set(most) == {1} and worker._open == 0


def test_a_large_body_takes_a_place_while_it_comes(runtime):
    """Otherwise the bodies of all connections would be held at once; small ones take none, however slow they are."""
    start = b"POST /classify " + JSON_HEAD + b"content-length: 1000000\r\n\r\n"
    with serving(engine_of(runtime), max_open=2) as (worker, port), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(6)]
        for at, sock in enumerate(slow):
            sock.sendall(start + b" " * (app.LARGE + 1 if at < 3 else 100))
        deadline = time.monotonic() + 10
        while not worker.metrics.requests["refused"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ask(port, {"text": "the film"})[0] == 200
        for sock in slow[:3]:
            sock.sendall(b" " * (1_000_000 - app.LARGE - 1))
        statuses = sorted(sock.recv(1000).split(b" ")[1] for sock in slow[:3])
    assert statuses == [b"400", b"400", b"503"]  # blanks are no JSON


@pytest.mark.slow
def test_what_a_shutdown_does_not_wait_for_is_503_without_a_traceback(runtime, decoder, monkeypatch, caplog):
    monkeypatch.setattr(server, "DRAIN", 1)
    engine, go, _ = held_encoding(slowed(engine_of(runtime), 0.05))
    ended = []
    with serving(engine) as (_, port):
        asking = threading.Thread(target=lambda: ended.extend(together(port, [{"text": LONG_TEXT}] * 3)))
        asking.start()
        time.sleep(0.3)
        threading.Timer(1.2, go.set).start()  # so that the worker's thread ends at last
    asking.join()
    assert [(status, answer["error"]) for status, answer, _ in ended] == [(503, ENDING)] * 3
    with serving(slowed(engine_of(decoder, room=1), 0.3)) as (_, port):
        body = {"text": PROMPTS[0], "max_new_tokens": 8, "stream": True}
        asking = threading.Thread(target=lambda: ended.append(ask(port, body, "/generate")))
        asking.start()
        time.sleep(0.6)
    asking.join()
    *pieces, last = map(json.loads, ended[-1][1].splitlines())
    assert ended[-1][0] == 200 and pieces and last == {"error": ENDING}
    assert "Traceback" not in caplog.text


def test_a_client_that_hangs_up_frees_its_row(runtime):
    ran, engine, goes_on = [], engine_of(runtime), threading.Event()
    run = engine.run
    engine.run = lambda at, rows: (
        goes_on.wait(30),
        ran.extend(row.encoded.texts[0][0] for row in rows),
        run(at, rows),
    )
    with serving(engine, batch=1) as (worker, port):
        first = threading.Thread(target=ask, args=(port, {"text": "the film"}))
        first.start()
        until(lambda: worker._open == 1)
        body = b'{"text": "the meal was awful"}'
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"POST /classify " + JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: worker._open == 2)
        until(lambda: worker.metrics.requests["cancelled"] == 1)
        goes_on.set()
        first.join()
        assert ask(port, {"text": "a song"})[0] == 200
    assert ran[0] == "the film" and "the meal was awful" not in ran and worker.metrics.requests["cancelled"] == 1


def until(reached, seconds=20):
    """Wait until it is so."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.005)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(runtime, monkeypatch, version):
    """Although it looks like one that hangs up. A slow answer comes after interim responses, if it speaks HTTP/1.1."""
    monkeypatch.setattr(server, "PROBE_SECONDS", 0.05)
    body = b'{"text": "the film"}'
    request = b"POST /classify " + JSON_HEAD.replace(b"1.1", version) + b"content-length: %d\r\n\r\n" % len(body) + body
    with serving(slowed(engine_of(runtime), 0.3)) as (_, port):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: sock.recv(10_000), b""))
    before, _, answer = received.rpartition(b"HTTP/1.1 200 OK")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["label"] in runtime.label_names
    assert before == server.CONTINUE * before.count(server.CONTINUE) and bool(before) == (version == b"1.1")


# ---- Decoders ----
def test_a_decoder_writes_the_whole_text_or_streams_its_pieces(decoder):
    with serving(engine_of(decoder, room=4)) as (_, port):
        alone = [decoder.run([prompt], max_new_tokens=5)[0] for prompt in PROMPTS]
        bodies = [{"text": prompt, "max_new_tokens": 5} for prompt in PROMPTS]
        for (status, body_read, _), expected in zip(together(port, bodies, "/generate"), alone):
            assert status == 200 and (body_read["text"], body_read["tokens"]) == (expected.text, expected.tokens)
        for (status, lines, headers), expected in zip(
            together(port, [body | {"stream": True} for body in bodies], "/generate"), alone
        ):
            *pieces, answer = map(json.loads, lines.splitlines())
            assert status == 200 and headers["content-type"] == "application/x-ndjson"
            assert "".join(piece["text"] for piece in pieces) == answer["text"] == expected.text
            assert answer["layers"] == expected.layers


def test_a_client_that_hangs_up_in_the_middle_of_a_stream_frees_its_place(decoder):
    with serving(slowed(engine_of(decoder, room=1), 0.02)) as (worker, port):
        body = json.dumps({"text": PROMPTS[0], "max_new_tokens": 30, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"POST /generate " + JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert gone.recv(100).startswith(b"HTTP/1.1 200")
        assert ask(port, {"text": PROMPTS[1], "max_new_tokens": 1}, "/generate")[0] == 200
    assert worker.metrics.requests["cancelled"] == worker.metrics.requests["answered"] == 1
    assert worker.metrics.responses["hung up"] == 1  # /metrics shows it among the statuses


def test_a_stream_whose_deadline_passes_ends_with_an_error(decoder, caplog):
    with serving(slowed(engine_of(decoder), 0.05)) as (worker, port):
        body = {"text": PROMPTS[0], "max_new_tokens": 30, "stream": True, "deadline_ms": 500}
        status, stream, _ = ask(port, body, "/generate")
    *pieces, last = map(json.loads, stream.splitlines())
    assert status == 200 and 0 < len(pieces) < 30 and last == {"error": LATE} and not caplog.text
    assert worker.metrics.requests["late"] == 1


# ---- Bad clients ----
def bad_request(port, chance):
    """One of those that a server meets: what it sends is wrong, too much, too slow, or never ends."""
    kind = chance.randrange(8)
    lines = b"POST /classify " + JSON_HEAD
    text = bytes(chance.randrange(256) for _ in range(60))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        if kind == 0:  # no HTTP
            sock.sendall(text + b"\r\n\r\n")
        elif kind == 1:  # a body of random bytes
            sock.sendall(lines + b"content-length: 60\r\n\r\n" + text)
        elif kind == 2:  # a body that is said to be huge
            sock.sendall(lines + b"content-length: 99999999999\r\n\r\n" + text)
        elif kind == 3:  # deep nesting
            body = b'{"text": [' * 2000
            sock.sendall(lines + b"content-length: %d\r\n\r\n" % len(body) + body)
        elif kind == 4:  # half a head
            sock.sendall(lines[: chance.randrange(len(lines))])
            return
        elif kind == 5:  # half a body, and the sending half closed
            sock.sendall(lines + b"content-length: 100\r\n\r\n" + text[:10])
            sock.shutdown(socket.SHUT_WR)
        elif kind == 6:  # a whole request, and gone
            sock.sendall(lines + b"content-length: 20\r\n\r\n" + b'{"text": "the film"}')
            return
        else:  # chunks of a wrong form
            sock.sendall(lines + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + text)
        status = sock.recv(100)
        assert not status or status.startswith(b"HTTP/1.1 4"), (kind, status)


def quickest(port, count):
    """Median seconds of so many good requests, one after the other."""
    seconds = []
    for at in range(count):
        begin = time.perf_counter()
        assert ask(port, {"text": SENTENCES[at % len(SENTENCES)]})[0] == 200
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[count // 2]


def test_300_bad_requests_bring_nothing_down(served):
    """Some 40 connections at the same time stay silent, or send a byte now and then."""
    worker, port = served
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        for at, sock in enumerate(slow):
            sock.sendall(b"POST /classify HTTP/1.1\r\n"[: at % 25])
        chance = random.Random(0)
        for at in range(300):
            bad_request(port, chance)
            if not at % 50:
                slow[at % 40].sendall(b"x")
                assert ask(port, {"text": "the film"})[0] == 200
        assert quickest(port, 20) < 0.5
    finally:
        for sock in slow:
            sock.close()
    assert worker.state == "ready"
    deadline = time.monotonic() + 5
    while worker._open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker._open == 0


def test_a_connection_that_brings_no_request_is_closed(runtime, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with serving(slowed(engine_of(runtime), 0.3)) as (_, port):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=4)) as connection:
            for _ in range(2):  # the answer takes longer, and silence is counted anew after it
                connection.request("POST", "/classify", b'{"text": "a"}', {"content-type": "application/json"})
                assert connection.getresponse().read()
            assert connection.sock.recv(1) == b""  # before uvicorn's own 5 s
        for sent in (b"", b"POST /cl", b"POST /classify HTTP/1.1\r\nhost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                sock.sendall(sent)
                assert sock.recv(100) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"POST /classify " + JSON_HEAD + b"content-length: 9\r\n\r\n{")
            assert sock.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_of_the_model_is_500_and_the_next_is_answered(runtime, caplog, kind):
    engine = engine_of(runtime)
    run = engine.run

    def failing(at, rows):
        if any("dull" in row.encoded.texts[0][0] for row in rows):
            raise kind("out of memory")
        run(at, rows)

    engine.run = failing
    with serving(engine) as (_, port):
        status, answer, _ = ask(port, {"text": "the film was dull"})
        assert status == 500 and answer["error"] == ("out of memory" if kind is ValueError else app.FAILED)
        assert ask(port, {"text": "the film was good"})[0] == 200
    assert "out of memory" in caplog.text


def test_an_error_of_the_model_in_a_stream_is_sent_and_logged(decoder, caplog):
    engine = engine_of(decoder)

    def failing(at, rows):
        raise RuntimeError("out of memory")

    engine.run = failing
    with serving(engine) as (_, port):
        status, answer, _ = ask(port, {"text": PROMPTS[0], "max_new_tokens": 2, "stream": True}, "/generate")
    assert status == 500 and answer == {"error": app.FAILED} and "out of memory" in caplog.text


def test_what_is_no_http_is_ignored(runtime):
    with Worker(engine_of(runtime)) as worker:
        assert asyncio.run(app.App(worker)({"type": "lifespan"}, None, None)) is None


# ---- Whom it answers ----
@pytest.mark.parametrize(
    ("bound", "more", "allowed", "refused"),
    [
        (
            "127.0.0.1",
            "",
            "127.0.0.1:8000 localhost LocalHost.:9000 127.0.0.2 [::1]:8000",  # a port may be forwarded
            "evil.example:8000 localhost.evil.example 127.0.0.1.evil.example 10.0.0.7 0.0.0.0:8000 localhost@a.b ::1",
        ),
        ("127.0.0.1", "api.example", "api.example localhost", "other.example"),  # behind a proxy that keeps the name
        ("127.0.0.1", "*", "evil.example", ""),
        ("localhost", "", "127.0.0.1:8000", "10.0.0.7"),
        ("::1", "", "[::1]", "evil.example"),
        ("0.0.0.0", "", f"10.1.2.3:8000 [fd00::7]:8000 localhost {socket.gethostname()}", "evil.example"),
        ("::", "", "10.1.2.3", "evil.example"),
        ("0.0.0.0", "reviews.default.svc", "reviews.default.svc:80", "evil.example"),
        ("10.1.2.3", "", "10.1.2.3:8000", "10.1.2.4:8000 localhost"),
        ("node7", "", "node7:8000", "localhost"),
    ],
)
def test_a_request_may_name_the_host_that_the_server_is_bound_to(bound, more, allowed, refused):
    hosts = Hosts(bound, more.split())
    assert all(hosts.allow(host.encode()) for host in allowed.split())
    assert not any(hosts.allow(host.encode()) for host in refused.split())
    assert hosts.allow(b"") is hosts.allow(b"localhost evil.example") is (more == "*")


def test_a_request_for_a_host_that_is_allowed_is_answered(runtime):
    headers = {"host": "evil.example:8000", "content-type": "application/json"}
    with serving(engine_of(runtime), Access(Hosts("127.0.0.1", ["evil.example"]))) as (_, port):
        assert ask(port, {"text": "the film"}, headers=headers)[0] == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ('application/json; charset="UTF8"', 200),
        (None, 415),
    ],
)
def test_only_a_body_that_is_called_json_is_taken(served, kind, status):
    headers = {"content-type": kind, "content-encoding": "Identity"} if kind else {}
    assert ask(served[1], {"text": "the film"}, headers=headers)[0] == status


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(served):
    """What a proxy takes for one request may be two for a server that goes by the other length."""
    inside = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = b"POST /classify " + JSON_HEAD
    both = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % (len(inside) + 5)
    with socket.create_connection(("127.0.0.1", served[1]), timeout=10) as sock:
        sock.sendall(head + both + inside)
        received = b"".join(iter(lambda: sock.recv(10_000), b""))
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
    assert b"connection: close" in received.lower()


# ---- Several texts in a request ----
def test_texts_are_answered_alone_and_together_as_by_the_runtime(runtime, decoder):
    alone = [answered.to_dict() for answered in runtime.run(SENTENCES, batch_size=1)]
    with serving(engine_of(runtime)) as (_, port):
        status, answer, _ = ask(port, {"texts": SENTENCES})
        of_one = [ask(port, {"text": text})[1] for text in SENTENCES]
        pair = ask(port, {"texts": [[SENTENCES[0]]]})[1]["answers"]
    assert status == 200 and set(answer) == {"answers"} and pair[0]["label"] == alone[0]["label"]
    for one, other, expected in zip(of_one, answer["answers"], alone, strict=True):
        assert one["milliseconds"] == round(one["milliseconds"], 3) > 0
        for answered_row in (one, other):
            confidence = pytest.approx(expected["confidence"], abs=1e-5)
            assert answered_row == expected | {"confidence": confidence, "milliseconds": answered_row["milliseconds"]}
    with serving(engine_of(decoder, room=4)) as (_, port):
        status, answer, _ = ask(port, {"texts": PROMPTS, "max_new_tokens": 3}, "/generate")
    alone = decoder.run(PROMPTS, max_new_tokens=3)
    assert status == 200 and [written["text"] for written in answer["answers"]] == [written.text for written in alone]


def test_more_texts_than_places_are_answered_in_parts_with_others_in_between(runtime):
    texts = (SENTENCES * 3)[:40]
    alone = [(answered.label, answered.layers) for answered in runtime.run(texts, batch_size=1)]
    with serving(slowed(engine_of(runtime), 0.01), max_open=8) as (worker, port):
        replies = []
        asking = threading.Thread(target=lambda: replies.append(ask(port, {"texts": texts})))
        asking.start()
        until(lambda: worker._open)
        between = 0
        while asking.is_alive():
            assert ask(port, {"text": "the film"})[0] == 200 and worker._open <= 8
            between += 1
        asking.join()
        assert ask(port, {"texts": texts, "deadline_ms": 60})[:2] == (503, {"error": LATE})
    status, answer, _ = replies[0]
    assert status == 200 and [(row["label"], row["layers"]) for row in answer["answers"]] == alone and between > 1
    assert not worker.metrics.requests["refused"] and not worker._open


def test_the_texts_of_a_long_request_are_tokenized_beside_the_loop(runtime):
    """Each is short. Otherwise no other request, not even /live, would be answered meanwhile."""
    engine, threads = engine_of(runtime), set()
    row = engine.row
    engine.row = lambda texts, **settings: (threads.add(threading.current_thread().name), row(texts, **settings))[1]
    with serving(engine) as (_, port):
        assert ask(port, {"texts": ["the film was good " * 50] * 40})[0] == 200
        assert {name.rpartition("_")[0] for name in threads} == {"mini-ee-encoder"}
        threads.clear()
        assert ask(port, {"texts": ["the film was good"] * 40})[0] == 200
    assert len(threads) == 1 and "mini-ee-encoder" not in threads.pop()


@pytest.mark.slow
def test_the_texts_of_a_request_all_have_a_place_or_none(runtime):
    engine, gate = engine_of(runtime), threading.Event()
    run = engine.run
    engine.run = lambda at, rows: (gate.wait(), time.sleep(0.1), run(at, rows))[-1]
    with serving(engine, max_open=4) as (worker, port):
        first = threading.Thread(target=ask, args=(port, {"texts": ["the film"] * 3}))
        first.start()
        while worker._open < 3:
            time.sleep(0.01)
        status, answer, _ = ask(port, {"texts": ["a meal"] * 2})
        assert status == 503 and "3 requests are open, with room for 1 more" in answer["error"] and worker._open == 3
        gate.set()
        first.join()
        assert ask(port, {"texts": ["a meal"] * 4, "deadline_ms": 30})[:2] == (503, {"error": LATE})


# ---- The command ----
@contextmanager
def command(folder, *options):
    """The program, and its port once it says so."""
    words = [sys.executable, "-m", "mini_ee", "serve", str(folder), "--port", "0", "--threads", "1", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = next((line for line in process.stderr if "http://127.0.0.1:" in line), "it ended")
        assert "http://127.0.0.1:" in line, line
        yield process, int(line.split("http://127.0.0.1:")[1].split(",")[0])
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_and_ends_with_the_summary(runtime):
    with command(runtime.folder, "--json") as (process, port):
        replies = []
        asking = threading.Thread(target=lambda: replies.extend(together(port, [{"text": "the film"}] * 16)))
        asking.start()
        while not replies and not ask(port, None, "/metrics", "GET")[1].count('outcome="answered"} 1'):
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=20)
        asking.join()
    assert process.returncode == 0 and "Traceback" not in error
    assert json.loads(out)["requests"]["answered"] == sum(status == 200 for status, *_ in replies)
    assert "drained" in error


def test_a_run_is_served_as_its_export_is(tmp_path, checkpoint_folder, task_folder):
    run = mini_ee.train("joint", checkpoint_folder, task_folder, tmp_path / "run", epochs=1)
    mini_ee.export(run, tmp_path / "exported")
    (expected,) = Runtime(tmp_path / "exported", threads=1).run(["the film was lovely"])
    with command(run.folder) as (_, port):
        status, answer, _ = ask(port, {"text": "the film was lovely"})
    assert (status, answer["label"], answer["exit"]) == (200, expected.label, expected.exit)
    assert answer["confidence"] == pytest.approx(expected.confidence)


@pytest.mark.parametrize("kind", ["runtime", "reranker", "decoder", "encoder"])
def test_the_request_that_the_command_shows_is_answered(request, capsys, kind):
    runtime = request.getfixturevalue(kind)
    with serving(engine_of(runtime)) as (_, port):
        args = SimpleNamespace(exported=[runtime.folder], name=["a"], access=Access(Hosts("127.0.0.1")))
        serve._ready(args, runtime, "")(f"http://127.0.0.1:{port}")
        *_, address, _, body = shlex.split(capsys.readouterr().err)
        assert ask(port, json.loads(body), f"/{address.rpartition('/')[2]}")[0] == 200


def test_an_interrupt_as_soon_as_the_server_is_ready_ends_it_with_the_summary(runtime):
    with command(runtime.folder, "--json") as (process, _):
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert process.returncode == 0 and json.loads(out)["requests"]["answered"] == 0 and "drained" in error


def test_clients_of_a_server_that_is_killed_get_an_error_and_its_next_start_serves(runtime):
    """50 kills were made by hand, with MINI_EE_KILLS=50."""
    for kill in range(KILLS):
        with command(runtime.folder) as (process, port):
            assert ask(port, {"text": "the film"})[0] == 200
            outcomes, begin = [], time.monotonic()

            def client():
                for _ in range(1000):
                    try:
                        outcomes.append(ask(port, {"text": "the film", "deadline_ms": 2000})[0])
                    except (OSError, http.client.HTTPException) as error:
                        outcomes.append(error)
                        return

            clients = [threading.Thread(target=client) for _ in range(4)]
            for started in clients:
                started.start()
            time.sleep(0.1 + 0.02 * kill)
            os.kill(process.pid, signal.SIGKILL)
            for started in clients:
                started.join(5)
            assert not any(ended.is_alive() for ended in clients) and time.monotonic() - begin < 5
        assert set(filter(lambda outcome: isinstance(outcome, int), outcomes)) <= {200, 503}
        assert sum(isinstance(outcome, Exception) for outcome in outcomes) == 4


@pytest.mark.parametrize(
    ("calibrated", "options", "watched"),
    [
        (None, ["--shadow", ".2"], (0.2, None, False)),
        ({"epsilon": 0.9}, ["--shadow", ".2", "--tighten"], (0.2, 0.9, True)),
        ({"epsilon": 0.9}, ["--shadow", ".2", "--epsilon", ".95"], (0.2, 0.95, False)),
    ],
)
def test_the_guarantee_in_service_is_the_calibrations_or_the_given_one(
    runtime, monkeypatch, calibrated, options, watched
):
    monkeypatch.setattr(runtime, "config", runtime.config | {"guarantee": calibrated})
    words = ["serve", str(runtime.folder), *options]
    guarantee = serve._engine(parser(words).parse_args(words), runtime).guarantee
    assert (guarantee.share, guarantee.epsilon, guarantee.tighten) == watched


def test_a_rule_that_cannot_be_tightened_is_refused_before_serving(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "rule", Fixed(1))
    words = ["serve", str(runtime.folder), "--shadow", ".2", "--tighten", "--epsilon", ".9"]
    with pytest.raises(WrongArguments, match="the rule fixed has no threshold to raise; leave out --tighten"):
        serve._engine(parser(words).parse_args(words), runtime)


def test_a_port_that_is_taken_is_an_error(runtime, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(runtime.folder), "--port", str(port)]) == 1
    line = capsys.readouterr().err
    assert f"127.0.0.1:{port}: " in line and "choose another --host or --port" in line


@pytest.mark.parametrize("options, module, extra", [([], "server", "serve"), (["--ray"], "replicas", "ray")])
def test_without_an_extra_the_command_names_what_to_install(runtime, capsys, monkeypatch, options, module, extra):
    monkeypatch.setitem(sys.modules, f"mini_ee.serve.{module}", None)
    assert main(["serve", str(runtime.folder), *options]) == 2
    assert f"pip install 'mini-ee[{extra}]'" in capsys.readouterr().err


# ---- The page ----
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="the page asks by curl")
def test_the_pages_from_a_run_to_a_running_server_run_as_they_stand(tmp_path, monkeypatch):
    """export/README.md first; then serve/README.md, with the run that is there."""
    monkeypatch.chdir(tmp_path)
    steps = (Path(server.__file__).parents[1] / "export" / "README.md").read_text()
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", steps, re.M | re.S)).splitlines()
    assert lines[0].startswith("pip install")
    process = run_lines(lines[1:])
    assert (
        '"layers": ' in process.stdout and '"status": "ready"' in process.stdout and '"error": ' not in process.stdout
    )
    assert Path("current").readlink() == Path("served-1") and Path("served-int8/onnx/model.onnx").exists()
    shutil.copytree("served-1", "served")  # which the other page exports by the same command
    install, process = run_block(0)
    assert install.startswith("pip install") and '"layers": ' in process.stdout
    assert 'mini_ee_requests_total{outcome="answered"} 1' in process.stdout
    assert "drained; 1 requests answered" in process.stderr
    page = (Path(server.__file__).parent / "README.md").read_text()
    (python,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(python, {})
    assert printed.getvalue().count("tive") == 2  # negative, positive
