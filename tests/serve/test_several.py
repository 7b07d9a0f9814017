"""Several exports in one server, a key, pages of other origins, and bodies in gzip."""

import gzip
import json
import re
import subprocess
import sys

import pytest
from http_server import SENTENCES, ask, serving

from mini_ee.lab.export.runtime import Runtime
from mini_ee.serve import Worker, engine_of, http_messages
from mini_ee.serve.app import App
from mini_ee.serve.http_messages import Access, Hosts
from mini_ee.serve.several import Several

pytest.importorskip("uvicorn", reason="the extra serve")
HERE = Hosts("127.0.0.1")
JSON = {"content-type": "application/json"}
NAMES = {"words": "runtime", "two": "classifier", "vectors": "encoder", "pairs": "reranker"}


@pytest.fixture(scope="module")
def opened(request):
    """The exports by their names in the server."""
    runtimes = {name: Runtime(request.getfixturevalue(fixture).folder, threads=1) for name, fixture in NAMES.items()}
    for name, runtime in runtimes.items():
        runtime.name = name
    return runtimes


@pytest.fixture(scope="module")
def port(opened):
    workers = {name: Worker(engine_of(runtime)) for name, runtime in opened.items() if name != "words"}
    with serving(
        engine_of(opened["words"]), served=lambda first: Several({"words": first} | workers, Access(HERE))
    ) as (_, port):
        yield port
    assert {worker.state for worker in workers.values()} == {"drained"}


ROUTES = [  # path, fields, the exports that can answer
    ("/classify", {"text": SENTENCES[0]}, ("words", "two")),
    ("/predict", {"inputs": SENTENCES[0]}, ("words", "two")),
    ("/embed", {"inputs": SENTENCES[0]}, ("vectors",)),
    ("/v1/embeddings", {"input": SENTENCES[0]}, ("vectors",)),
]


@pytest.mark.parametrize("path, fields, names", ROUTES)
def test_a_request_is_answered_by_the_export_that_it_names(port, opened, path, fields, names):
    for name in names:
        status, answer, headers = ask(port, fields | {"model": name}, path)
        with serving(engine_of(opened[name])) as (_, alone):
            expected = ask(alone, fields, path)[1]
        for body in (answer, expected):
            body.pop("milliseconds", None) if isinstance(body, dict) else None
        assert (status, answer, headers["x-model-id"]) == (200, expected, opened[name].model_id)


def test_without_a_name_a_request_is_for_the_one_export_that_answers_its_path(port, opened):
    assert ask(port, {"inputs": "the film"}, "/embed")[2]["x-model-id"] == opened["vectors"].model_id


WRONG = [  # path, fields, status, a part of the line
    ("/classify", {"text": "a"}, 400, "field model as words or two or pairs for /classify, found None"),
    ("/classify", {"text": "a", "model": "none"}, 404, "field model as words or two or pairs for /classify, found 'no"),
    ("/classify", {"text": "a", "model": "vectors"}, 400, "expected the field model as words or two or pairs"),
    ("/embed", {"inputs": "a", "model": "words"}, 400, "expected the field model as vectors for /embed, found 'words'"),
    ("/v1/embeddings", {"input": "a", "model": "gpt"}, 404, "field model as vectors for /v1/embeddings, found 'gpt'"),
    ("/classify", {"text": "a", "model": ["words"]}, 400, "found \\['words'\\]"),
    ("/generate", {"text": "a", "model": "words"}, 404, "found /generate"),
    ("/info", None, 404, "found /info"),
    ("/v1/models/none", None, 404, "expected the model words or two or vectors or pairs, found none"),
]


@pytest.mark.parametrize("path, fields, status, message", WRONG)
def test_another_name_is_one_clear_error(port, path, fields, status, message):
    status_given, answer, _ = ask(port, fields, path, "GET" if fields is None else "POST", JSON)
    line = answer["error"]["message"] if path.startswith("/v1/") else answer["error"]
    assert status_given == status and re.search(message, line) and "\n" not in line


def test_what_is_asked_by_get_is_about_all_exports(port, opened):
    models = ask(port, None, "/v1/models", "GET")[1]["data"]
    assert [model["id"] for model in models] == list(opened)
    assert ask(port, None, "/v1/models/two", "GET")[1] == models[1]
    status, health, headers = ask(port, None, "/health", "GET")
    assert status == 200 and health["status"] == "ready" and "x-model-id" not in headers
    assert {name: model["model"] for name, model in health["exports"].items()} == {
        name: runtime.model_id for name, runtime in opened.items()
    }
    assert ask(port, None, "/live", "GET")[:2] == (200, {"status": "ready"})
    page = ask(port, None, "/metrics", "GET")[1]
    for name, runtime in opened.items():
        assert f'mini_ee_model_info{{export="{name}",model="{runtime.model_id}"}} 1' in page
    assert page.count("# TYPE mini_ee_requests_total counter") == 1


def test_an_export_whose_worker_has_ended_makes_the_server_unready(opened):
    other = Worker(engine_of(opened["two"]))
    with serving(
        engine_of(opened["words"]), served=lambda first: Several({"words": first, "two": other}, Access(HERE))
    ) as (_, port):
        other.drain()
        status, health, _ = ask(port, None, "/health", "GET")
        assert status == 503 and health["exports"]["words"]["status"] == "ready" and health["status"] == "drained"
        assert ask(port, {"text": "the film", "model": "words"})[0] == 200
        assert ask(port, {"text": "the film", "model": "two"})[0] == 503


# ---- The key, and pages of other origins ----


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer ", "Bearer secret2", "Bearer Secret", "Basic secret", "é"])
def test_a_request_without_the_key_is_401_and_one_line(opened, given):
    with serving(engine_of(opened["two"]), Access(HERE, "secret")) as (worker, port):
        more = {} if given is None else {"authorization": given}
        for path, body in (("/classify", {"text": "a"}), ("/metrics", None), ("/v1/models", None), ("/none", None)):
            status, answer, headers = ask(port, body, path, "POST" if body else "GET", JSON | more)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
            line = answer["error"]["message"] if path.startswith("/v1/") else answer["error"]
            assert line.startswith("expected the header Authorization: Bearer KEY") and "secret" not in line
        assert ask(port, None, "/health", "GET", more)[0] == ask(port, None, "/live", "GET", more)[0] == 200
        assert not worker.metrics.requests["answered"]


def test_a_request_with_the_key_is_answered(opened):
    with serving(engine_of(opened["two"]), Access(HERE, "secret")) as (_, port):
        for scheme in ("Bearer", "bearer"):
            assert ask(port, {"text": "a"}, headers=JSON | {"authorization": f"{scheme} secret"})[0] == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(http_messages.hmac, "compare_digest", lambda *both: compared.append(both) or False)
    with pytest.raises(http_messages.HTTPError, match="found another"):
        http_messages.check_key({b"authorization": b"Bearer given"}, "secret")
    assert compared == [(b"given", b"secret")]


def test_scripts_of_an_origin_that_is_allowed_may_read_answers(opened):
    pytest.importorskip("starlette", reason="the extra serve")
    page = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = page | {"access-control-request-headers": "content-type,authorization"}
    with serving(engine_of(opened["two"]), Access(HERE, "secret", ("https://a.example",))) as (_, port):
        status, _, headers = ask(port, None, "/classify", "OPTIONS", preflight)
        assert status == 200 and headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= set(headers["access-control-allow-headers"].lower().split(", "))
        for key, expected in (("secret", 200), ("other", 401)):  # a page can read why it was refused
            more = JSON | {"origin": page["origin"], "authorization": f"Bearer {key}"}
            status, _, headers = ask(port, {"text": "a"}, headers=more)
            assert (status, headers["access-control-allow-origin"]) == (expected, "https://a.example")
        assert ask(port, None, "/classify", "OPTIONS", preflight | {"origin": "https://b.example"})[0] == 400
    with serving(engine_of(opened["two"])) as (_, port):
        status, _, headers = ask(port, None, "/classify", "OPTIONS", preflight)
        assert status == 405 and "access-control-allow-origin" not in headers
        headers = ask(port, {"text": "a"}, headers=JSON | {"origin": "https://a.example"})[2]
        assert "access-control-allow-origin" not in headers


# ---- Bodies in gzip ----


def test_a_body_in_gzip_is_read(opened):
    with serving(engine_of(opened["words"])) as (_, port):
        for texts in (SENTENCES[:3], [text + " very" * 4000 for text in SENTENCES[:3]]):  # also a large one
            plain = {"texts": texts}
            packed = gzip.compress(json.dumps(plain).encode())
            reply = ask(port, packed, headers=JSON | {"content-encoding": "GZIP"})
            answers, expected = (
                [(row["label"], row["layers"], row["confidence"]) for row in given[1]["answers"]]
                for given in (reply, ask(port, plain))
            )
            assert reply[0] == 200 and answers == expected


def test_what_a_small_body_inflates_to_is_limited_while_it_is_read(opened):
    """A thousand times its size is never in memory at once."""
    packed = gzip.compress(b" " * (1 << 24))
    inflating = http_messages.Inflating({b"content-encoding": b"gzip"})
    sizes = [len(piece) for piece in inflating.pieces(packed, True)]
    assert sum(sizes) == 1 << 24 and max(sizes) <= 1 << 16 and len(packed) < 1 << 17
    with serving(engine_of(opened["words"])) as (_, port):
        status, answer, _ = ask(port, packed, headers=JSON | {"content-encoding": "gzip"})
        assert status == 413 and "at most 1048576 bytes" in answer["error"]


# ---- The command ----


def test_the_command_serves_several_exports_with_a_key_of_the_environment(opened, monkeypatch):
    monkeypatch.setenv("MINI_EE_API_KEY", "from-the-environment")
    words = [sys.executable, "-m", "mini_ee", "serve", opened["words"].folder, opened["two"].folder, "--name", "a"]
    words += ["--name", "b", "--port", "0", "--threads", "1", "--json"]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = next((line for line in process.stderr if "http://127.0.0.1:" in line), "it ended")
        port = int(re.search(r"http://127.0.0.1:(\d+)", line)[1])
        assert "models: a, b" in line and 'Bearer $MINI_EE_API_KEY" --json' in process.stderr.readline()
        key = {"authorization": "Bearer from-the-environment"}
        assert ask(port, {"text": "the film", "model": "b"})[0] == 401
        reply = ask(port, {"text": "the film", "model": "b"}, headers=JSON | key)
        assert (reply[0], reply[2]["x-model-id"]) == (200, opened["two"].model_id)
        process.terminate()
        out, error = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    summary = json.loads(out)
    assert process.returncode == 0 and "drained; 1 requests answered" in error and "environment" not in out + error
    assert summary["export"] == str(opened["words"].folder) and summary["requests"]["answered"] == 0
    assert [(other["export"], other["requests"]["answered"]) for other in summary["others"]] == [
        (str(opened["two"].folder), 1)
    ]


def test_one_export_takes_any_model_name(opened):
    worker = Worker(engine_of(opened["two"]))
    assert App(worker).models().keys() == {"two"}
    worker.drain()
