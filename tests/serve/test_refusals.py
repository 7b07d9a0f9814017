"""What a server and its commands refuse: with a status, in one line that says what to do. One table for each."""

import gzip
import json
import re
import shlex

import pytest
from conftest import refused
from http_server import ask, serving

from mini_ee.serve import app, engine_of

POINTS = [[0.4, 0.7, 0.2, 1.5], [0.9, 0.97, 0.0, 4.0], ["inf", 1.0, 0.0, 6.0]]
SERVERS = ("runtime", "decoder", "encoder", "classifier", "reranker")  # fixtures of conftest.py


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    """A server of each kind of export; the first has a curve of thresholds."""
    runtime = request.getfixturevalue(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(runtime.config, "curve", {"rows": 100, "points": POINTS})
        with serving(engine_of(runtime)) as (_, port):
            yield request.param, port


LONG = b" " * (app.MAX_BODY + 1)
PACKED = gzip.compress(b'{"text": "the film"}')
NUMBER = "expected threshold as a number of at least 0 and at most 1, "
LIST = "expected inputs as a text, a list of texts, or token ids, found"
TOKENS = "token ids of this model's tokenizer, .* in LangChain give check_embedding_ctx_length=False"
JSON_TYPE = "expected Content-Type: application/json, found"

REQUESTS = {  # server -> (path, body, status, a part of the line, or headers and a part); no body: GET
    "runtime": [
        ("/classify", b"", 400, "expected one JSON object"),
        ("/classify", b'{"text": "the fi', 400, "expected one JSON object"),
        ("/classify", b'["the film"]', 400, "expected one JSON object, found '\\[\"the film\"\\]'"),
        ("/classify", b'{"text": "caf\xe9"}', 400, "expected UTF-8"),
        ("/classify", b"[" * 100_000, 400, "expected one JSON object"),
        ("/classify", b'{"text": ' * 50_000, 400, "expected one JSON object"),
        ("/classify", {"text": ""}, 400, "empty"),
        ("/classify", {"text": 7}, 400, "no string"),
        ("/classify", b'{"text": "\\ud800"}', 400, ""),
        ("/classify", {"sentences": "the film"}, 400, "found the keys 'sentences'"),
        ("/classify", {"texts": "the film"}, 400, "expected texts as a list of at least one, found 'the film'"),
        ("/classify", {"texts": []}, 400, "expected texts as a list of at least one, found '\\[\\]'"),
        ("/classify", {"texts": ["a", ["a", "b"]]}, 400, "expected 1 texts in each row of texts, found 2 in row 1"),
        ("/classify", {"texts": ["a"], "text": "b"}, 400, "expected texts or text, found both; leave one out"),
        ("/classify", {"texts": ["a"], "sentence2": "b"}, 400, "expected texts or sentence2, found both"),
        ("/classify", {"text": "a", "treshold": 0.5}, 400, "the field 'treshold' is not supported here, found 0.5; le"),
        ("/classify", {"texts": ["a"], "stream": True}, 400, "the field 'stream' is not supported here"),
        ("/classify", {"text": "a", "text_b": "b"}, 400, "found the keys 'text', 'text_b'"),
        ("/classify", {"text": "a", "deadline_ms": -1}, 400, "deadline_ms"),
        ("/classify", {"text": "a", "deadline_ms": float("nan")}, 400, "deadline_ms"),
        ("/classify", {"text": "a", "deadline_ms": True}, 400, "deadline_ms"),
        ("/classify", LONG, 413, "at most 1048576 bytes"),
        ("/classify", None, 405, "takes POST, found GET"),
        ("/health", {}, 405, "takes GET, found POST"),
        ("/", None, 404, "expected /.*, found /"),
        ("/generate", {}, 404, "found /generate"),
        ("/embed", {}, 404, "found /embed"),
        # bodies of another kind, and hosts: what a web page may post without being asked is not taken
        ("/classify", {}, 415, {"content-type": "text/plain"}, JSON_TYPE),
        ("/classify", {}, 415, {"content-type": "application/x-www-form-urlencoded"}, JSON_TYPE),
        ("/classify", {}, 415, {"content-type": "multipart/form-data; boundary=x"}, JSON_TYPE),
        ("/classify", {}, 415, {"content-type": "text/plain; application/json"}, JSON_TYPE),
        ("/classify", {}, 415, {"content-type": ""}, JSON_TYPE),
        ("/classify", {}, 415, {"content-type": "application/json; charset=latin-1"}, "UTF-8, found charset=latin-1"),
        ("/classify", {}, 415, {"content-encoding": "br"}, "without Content-Encoding, or gzip, found br; send it unco"),
        ("/classify", {}, 400, {"content-encoding": "gzip"}, "expected a body in gzip, found"),
        ("/classify", b"", 400, {"content-encoding": "gzip"}, "one whole body in gzip, found its beginning alone"),
        ("/classify", PACKED[:-9], 400, {"content-encoding": "gzip"}, "one whole body in gzip, found its beginning"),
        ("/classify", PACKED * 2, 400, {"content-encoding": "gzip"}, "found bytes after its end"),
        ("/classify", gzip.compress(LONG), 413, {"content-encoding": "gzip"}, "at most 1048576 bytes"),
        ("/classify", {}, 415, {"content-encoding": "identity, deflate"}, "found identity, deflate"),
        (
            "/classify",
            {},
            421,
            {"host": "evil.example:8000"},
            "localhost\\), found evil.example:8000; see --allow-host",
        ),
        ("/health", None, 421, {"host": "evil.example"}, "localhost\\), found evil.example; see --allow-host"),
        ("/metrics", None, 421, {"host": "evil.example"}, "see --allow-host"),
        # thresholds of a request
        ("/classify", {"text": "a", "threshold": [0.5, 0.5]}, 400, NUMBER),
        ("/classify", {"text": "a", "threshold": [0.5] * 4}, 400, "a list of 3, one for each exit but the last, found"),
        ("/classify", {"text": "a", "threshold": []}, 400, "found \\[\\]"),
        ("/classify", {"text": "a", "threshold": float("nan")}, 400, "found nan"),
        ("/classify", {"text": "a", "threshold": [0.5, None, 0.5]}, 400, "found \\[0.5, None, 0.5\\]"),
        ("/classify", {"text": "a", "threshold": -0.1}, 400, NUMBER),
        ("/classify", {"text": "a", "threshold": 1.5}, 400, NUMBER),
        ("/classify", {"text": "a", "threshold": 10**400}, 400, NUMBER),
        ("/classify", {"text": "a", "threshold": "high"}, 400, "found 'high'"),
        ("/classify", {"text": "a", "threshold": True}, 400, "found True"),
        ("/classify", {"text": "a", "threshold": {"0": 1}}, 400, "found {'0': 1}"),
        ("/classify", {"text": "a", "threshold": 0.5, "max_loss": 0.1}, 400, "one of .*, found threshold and max_loss"),
        ("/classify", {"text": "a", "agreement": 1.01}, 400, "expected agreement as a number from 0 to 1, found 1.01"),
        (
            "/classify",
            {"text": "a", "agreement": "all"},
            400,
            "expected agreement as a number from 0 to 1, found 'all'",
        ),
        ("/classify", {"text": "a", "max_loss": -0.01}, 400, "expected max_loss as a number from 0 to 1, found -0.01"),
        (
            "/classify",
            {"text": "a", "max_loss": [0.1]},
            400,
            "expected max_loss as a number from 0 to 1, found \\[0.1\\]",
        ),
        ("/classify", {"texts": ["a"] * 3, "threshold": [0.5, 0.6]}, 400, "for all 3 texts, or one for each, found 2"),
        ("/classify", {"texts": ["a"] * 2, "threshold": "high"}, 400, "found 'high'"),
        ("/classify", {"texts": ["a"] * 2, "threshold": [0.5, "high"]}, 400, "found 'high'"),
    ],
    "decoder": [
        ("/generate", {"text": "a", "max_new_tokens": 0}, 400, "expected max_new_tokens as a whole number above 0"),
        ("/generate", {"text": "a", "stream": 1}, 400, "stream as true or false"),
        ("/generate", {"text": ""}, 400, "expected a prompt, found no text"),
        ("/generate", {"texts": ["a"], "stream": True}, 400, "expected one text to stream"),
        ("/generate", {"text": "a", "agreement": 0.9}, 400, "agreement is for classifiers, found a decoder; leave it"),
        ("/classify", {}, 404, "found /classify"),
    ],
    "encoder": [
        ("/classify", {}, 404, "found /classify"),
        ("/predict", {}, 404, "found /predict"),
        ("/embed", {"inputs": []}, 400, LIST),
        ("/embed", {"inputs": [[1, 2]]}, 400, TOKENS),
        ("/embed", {"inputs": [[2, 999999, 3]]}, 400, TOKENS),
        ("/embed", {"inputs": [[2, -1, 3]]}, 400, TOKENS),
        ("/embed", {"inputs": [2, 2, 3, 3]}, 400, TOKENS),
        ("/embed", {"inputs": [2, 3]}, 400, TOKENS),
        ("/embed", {"inputs": [[2, 5, 3], "a film", True]}, 400, LIST),
        ("/embed", {"inputs": [2, 5, 3], "prompt_name": "query"}, 400, "if there is a prompt_name, found token ids"),
        ("/embed", {"inputs": "a film", "normalize": 1}, 400, "expected normalize as true or false"),
        ("/embed", {"inputs": "very " * 200, "truncate": False}, 400, "expected at most"),
        ("/embed", {"inputs": "a film", "truncation_direction": "Left"}, 400, "not supported"),
        ("/embed", {"inputs": ["a film", ""]}, 400, "expected"),
        ("/v1/embeddings", b"{}", 400, "expected input as a text, a list of texts, or token ids, found None"),
        ("/v1/embeddings", {"input": "a film", "dimensions": 17}, 400, "expected dimensions from 1 to 16"),
        ("/v1/embeddings", {"input": "a film", "encoding_format": "int8"}, 400, "float or base64"),
        ("/v1/embeddings", {"inputs": "a film"}, 400, "the field 'inputs' is not supported here"),
        ("/v1/embeddings", {"input": [5, 6, 7]}, 400, TOKENS),
        ("/v1/embeddings", {"input": [[5], [6]]}, 400, TOKENS),
        ("/v1/embeddings", {"input": "a film", "input_type": "query"}, 400, "the field 'input_type' is not supported"),
        ("/v1/embeddings", {"input": ["a film", ""]}, 400, "^row 1: expected .* found an empty text"),
        ("/v1/embeddings", b" " * (app.MAX_LONG_BODY + 1), 413, "at most 16777216 bytes"),
        ("/v1/embeddings", b'{"input": "%s"}' % (b"a" * len(LONG)), 413, "expected texts of at most"),
        ("/v1/embeddings", b"{}", 415, {"content-encoding": "deflate"}, "found deflate"),
        ("/v1/embeddings", b"{}", 421, {"host": "evil.example"}, "--allow-host"),
        ("/v1/embeddings", {"input": "a film", "deadline_ms": 1e-6}, 503, "the deadline passed"),
        ("/v1/embeddings", None, 405, "takes POST"),
        ("/v1/other", b"{}", 404, "found /v1/other"),
        ("/v1/models/other", None, 404, "expected the model encoder, found other"),
    ],
    "classifier": [
        ("/predict", {"inputs": ["a", "b"]}, 400, "found 2"),
        ("/predict", {"inputs": []}, 400, "expected 1 texts, found 0"),
        (
            "/rerank",
            {"query": "a", "texts": ["b"]},
            400,
            "pairs of texts one label, found 2 of single texts; use /pred",
        ),
    ],
    "reranker": [
        ("/rerank", {"texts": ["a"]}, 400, "expected query as a text, found None"),
        ("/rerank", {"query": "a", "texts": []}, 400, "expected texts as a list of texts, found \\[\\]"),
        ("/rerank", {"query": "a", "texts": "b"}, 400, "expected texts as a list of texts, found 'b'"),
        ("/rerank", {"query": "a", "texts": ["b"], "return_text": 1}, 400, "expected return_text as true or false"),
        ("/rerank", {"query": "a", "texts": ["very " * 99], "truncate": False}, 400, "expected at most 30 tokens"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "expected documents as a list of texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "expected top_n as a whole number above 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, 400, "'rank_fields' is not supported"),
    ],
}


def test_a_wrong_request_has_a_status_and_one_line_and_the_next_is_answered(server):
    """Under /v1 the line stands in an object, as OpenAI's."""
    name, port = server
    for path, body, status, *headers, message in REQUESTS[name]:
        method, more = "GET" if body is None else "POST", headers[0] if headers else {}
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        status_given, answer, given = ask(port, body, path, method, {"content-type": "application/json"} | more)
        line = answer["error"]
        if path.startswith("/v1/"):
            kind = "server_error" if status == 503 else "invalid_request_error"
            assert list(line) == ["message", "type", "param", "code"] and line["type"] == kind
            line = line["message"]
        where = (path, (body or b"")[:80], status_given, line)
        assert (status_given, list(answer)) == (status, ["error"]) and re.search(message, line), where
        assert line and "\n" not in line and len(line) < 400 and given["x-model-id"], where
        assert given["allow"] == ({"GET": "POST", "POST": "GET"}[method] if status == 405 else None), where
    assert ask(port, None, "/health", "GET")[0] == 200


SCHEME = "--allow-host: expected the name of a host, without scheme and port, found"
WATCHED = "--shadow, --tighten and --epsilon are for classifiers"
COMMANDS = [  # words after mini-ee, a part of the line; in braces the folder of an export
    ("serve {runtime} --tighten", "give --shadow .05"),
    ("serve {runtime} --epsilon .9", "give --shadow .05"),
    ("serve {runtime} --shadow .1 --tighten", "--tighten needs the agreement to keep: give --epsilon .95"),
    ("serve {runtime} --shadow 0", "the share of shadow rows must be above 0 and at most 1"),
    ("serve {runtime} --shadow 2", "argument --shadow: expected a number up to 1, found 2"),
    ("serve {runtime} --shadow .1 --epsilon 1", "the guaranteed agreement must be above 0 and below 1"),
    ("serve {decoder} --shadow .1", WATCHED),
    ("serve {decoder} --tighten", WATCHED),
    ("serve {encoder} --epsilon .9", WATCHED),
    ("serve {runtime} --port 70000", "--port must be from 0 to 65535"),
    ("serve {runtime} --max-wait=-1", "--max-wait must be from 0 to 60000"),
    ("serve {runtime} --max-wait nan", "--max-wait must be from 0 to 60000"),
    ("serve {runtime} --replicas 2", "--replicas is for --ray"),
    ("serve {runtime} --ray --replicas 0", "of at least 1"),
    ("serve {runtime} --ray --replicas 4-1", "the least first"),
    ("serve {runtime} --ray --replicas 1-", "a whole"),
    ("serve {runtime} --share .1", "--share is the share of --canary"),
    ("serve {runtime} --canary new --share 1", "--share must be above 0 and below 1"),
    ("serve {runtime} --canary new --ray", "--canary is for one process"),
    ("serve {runtime} --canary {runtime}", "expected a new export, found"),
    ("serve {runtime} --canary {decoder}", "expected the kind of .*, rows, found tokens"),
    ("serve {runtime} {encoder} --canary {runtime}", "--canary is for one export, found 2"),
    ("serve {runtime} {encoder} --ray", "--ray is for one export, found 2; start a server for each"),
    ("serve {runtime} {encoder} --name a", "--name: expected a name of its own for each folder, found 'a' for 2"),
    ("serve {runtime} {encoder} --name a --name a", "expected a name of its own for each folder, found 'a', 'a'"),
    ("serve {runtime} {runtime}", "expected a name of its own for each folder, found 'exported', 'exported'"),
    ("serve {runtime} --name ''", "expected a name of its own for each folder, found ''"),
    ("serve {runtime} --api-key ''", "--api-key or MINI_EE_API_KEY: expected a key of visible ASCII characters"),
    ("serve {runtime} --api-key 'a b'", "expected a key of visible ASCII characters without blanks"),
    ("serve {runtime} --cors a.example", "--cors: expected an origin such as https://a.example:8080, or \\*, found"),
    ("serve {runtime} --cors https://a.example/", "--cors: expected an origin"),
    ("serve {runtime} --allow-host http://a.example", f"{SCHEME} 'http://a.example'"),
    ("serve {runtime} --allow-host a.example:80", SCHEME),
    ("serve {runtime} --allow-host 'a b'", SCHEME),
    ("serve {runtime} --allow-host ''", SCHEME),
    ("serve {runtime} --allow-host '[::1]:80'", SCHEME),
    ("run nowhere", "no manifest.json here"),
    ("run {runtime} no-such-file.txt", "no-such-file.txt"),
    ("run {runtime} --json", "--out"),
    ("run {runtime} --batch-size 0", "batch-size"),
    ("run {runtime} --engine jax", "engine"),
    ("run {runtime} texts.txt --out .", "is a folder; name a file"),
    ("run {runtime} texts.txt --out nowhere/out", "is in no folder; name a file"),
    ("run {runtime} texts.txt --out texts.txt", "is the input file; name another"),
    ("classify {runtime} --text a --device cuda:1", "expected cpu or cuda for an export"),
    ("calibrate {runtime}", "is an export: give texts like those in service, with --text FILE or --task"),
    ("calibrate {runtime} --text texts.txt --measure entropy", "found threshold on entropy; export the run with"),
    ("calibrate {runtime} --text texts.txt --model .", "--model is for runs"),
    ("calibrate {runtime} --text texts.txt --task .", "expected texts from --text or from --task, found both"),
    (
        "calibrate {runtime} --text texts.txt --new-tokens 3",
        "unrecognized arguments for an export of a classifier: --new-tokens 3",
    ),
    ("calibrate {runtime} --text texts.txt --split dev", "--split is for --task"),
    ("calibrate {runtime} --text texts.txt --out texts.txt", "texts.txt: is there already"),
    ("calibrate none --out new", "none: no run here"),
    ("calibrate {runtime} --text texts.txt --top-k 2 --measure entropy", "--top-k takes --epsilon and --delta, and no"),
    ("calibrate {runtime} --text texts.txt --top-k 2", "--top-k is for a reranker, which gives a pair of texts one n"),
    ("calibrate {reranker} --text texts.txt", "found a regression, which has no confidence; give --top-k if it ranks"),
    (
        "calibrate {reranker} --text texts.txt --top-k 2",
        "found the rule fixed; export the run with --threshold 0 --m",
    ),
    ("calibrate {decoder}", "is an export: give running text like that in service, with --text FILE"),
    ("calibrate {decoder} --text texts.txt --task x", "--task is for classifiers"),
    ("calibrate {decoder} --text rows.csv", "expected at least \\d+ tokens, two pieces of \\d+, found"),
    ("calibrate {decoder} --text texts.txt --top-k 2", "--top-k is for a reranker"),
    ("batch {decoder} --in texts.txt --out out", "expected a classifier or a sentence encoder, found a decoder"),
    ("batch {runtime} --in none* --out out", "none\\*: no such file"),
    ("batch {runtime} --in . --out out", "expected a file, found a folder"),
    ("batch {runtime} --in a.bin --out out", "expected a name that ends with .tsv, .csv"),
    ("batch {runtime} --in texts.txt texts.txt --out out", "found texts.txt twice"),
    ("batch {runtime} --in no-text.csv --out out", "no-text.csv:1: expected a text column"),
    ("batch {runtime} --in no-rows.csv --out out", "no-rows.csv: expected rows, found none; name a file with"),
    ("batch {runtime} --in rows.csv --out out --text-column words", "expected the column words"),
    ("batch {runtime} --in rows.csv --out out --id-column key", "expected the column key"),
    ("batch {runtime} --in rows.csv --out out --text-column ''", "--text-column: expected the name of a column"),
    ("batch {runtime} --in texts.txt --out texts.txt", "expected a folder, found a file"),
    ("batch {runtime} --in texts.txt --out .", "expected an empty folder"),
]


@pytest.mark.parametrize("words, message", COMMANDS)
def test_a_wrong_command_is_status_2_and_one_line_and_writes_nothing(
    request, capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    files = {
        "no-text.csv": "a\n1\n",
        "no-rows.csv": "text\n",
        "rows.csv": "text\na film\n",
        "a.bin": "",
        "texts.txt": "the film\n" * 50,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    folders = {name: request.getfixturevalue(name).folder for name in SERVERS if f"{{{name}}}" in words}
    more = ("--epsilon", ".6", "--delta", ".2") if words.startswith("calibrate") else ()
    line = refused(capsys, *shlex.split(words.format(**folders)), *more, status=2)
    assert re.search(message, line)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix != ".lock"} == files
