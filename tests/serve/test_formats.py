"""The formats of other servers over HTTP: text-embeddings-inference's, OpenAI's, and Jina's /v1/rerank."""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ENCODED as TEXTS
from http_server import ask, serving

from mini_ee.serve import engine_of
from mini_ee.serve.app import MAX_BODY

pytest.importorskip("uvicorn", reason="the extra serve")
SAME = 1e-5
PAIR = ["the film was good", "a dull book"]


@pytest.fixture(scope="module")
def port(encoder):
    with serving(engine_of(encoder)) as (_, port):
        yield port


@pytest.fixture(scope="module")
def predict_port(classifier):
    with serving(engine_of(classifier)) as (_, port):
        yield port


def test_embed_answers_as_text_embeddings_inference(port, embedding_run):
    expected = embedding_run.embed(TEXTS[:3])
    status, embeddings, _ = ask(port, {"inputs": list(TEXTS[:3]), "truncate": True, "normalize": True}, "/embed")
    assert status == 200
    np.testing.assert_allclose(embeddings, expected, atol=SAME)
    _, one, _ = ask(port, {"inputs": TEXTS[0]}, "/embed")
    np.testing.assert_allclose(one, expected[:1], atol=SAME)
    _, short, _ = ask(port, {"inputs": list(TEXTS[:3]), "dimensions": 4}, "/embed")
    cut = expected[:, :4] / np.linalg.norm(expected[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=SAME)


def test_embeddings_answers_as_openai(port, encoder, embedding_run):
    expected = embedding_run.embed(TEXTS[:3])
    request = {"input": list(TEXTS[:3]), "model": "any"}
    status, reply, _ = ask(port, request, "/v1/embeddings")
    tokens = sum(len(embedding_run.tokenizer.ids_of(text)) for text in TEXTS[:3])
    assert status == 200 and list(reply) == ["object", "data", "model", "usage"] and reply["object"] == "list"
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} and reply["model"] == encoder.folder.name
    assert [(entry["object"], entry["index"]) for entry in reply["data"]] == [("embedding", k) for k in range(3)]
    np.testing.assert_allclose([entry["embedding"] for entry in reply["data"]], expected, atol=SAME)
    _, packed, _ = ask(port, {"input": TEXTS[0], "encoding_format": "base64"}, "/v1/embeddings")
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[0], atol=SAME)


def test_predict_answers_as_text_embeddings_inference(predict_port, classifier):
    (first, other), names = classifier.run(PAIR), classifier.label_names
    status, scored, _ = ask(predict_port, {"inputs": PAIR[0], "parameters": {}}, "/predict")
    assert status == 200 and scored[0]["label"] == first.label and {label["label"] for label in scored} == set(names)
    assert scored[0]["score"] == pytest.approx(first.confidence, abs=SAME)
    assert sum(label["score"] for label in scored) == pytest.approx(1, abs=SAME)
    _, several, _ = ask(predict_port, {"inputs": [[text] for text in PAIR]}, "/predict")
    assert [labels[0]["label"] for labels in several] == [first.label, other.label]
    _, raw, _ = ask(predict_port, {"inputs": PAIR[0], "raw_scores": True}, "/predict")
    scores = {label["label"]: label["score"] for label in raw}
    np.testing.assert_allclose([scores[name] for name in names], first.logits, atol=SAME)


@pytest.mark.parametrize("path, key", [("/embed", "inputs"), ("/v1/embeddings", "input")])
def test_token_ids_of_the_models_tokenizer_are_taken_for_their_text(port, encoder, path, key):
    ids = [row_ids.tolist() for row_ids in encoder.encode(TEXTS[:3]).ids]
    of_texts, of_ids, mixed = (
        ask(port, {key: given}, path)[1] for given in (list(TEXTS[:3]), ids, [ids[0], TEXTS[1], ids[2]])
    )
    vectors = [vectors_of(body) for body in (of_texts, of_ids, mixed)]  # requests share batches, which round otherwise
    assert np.allclose(vectors[0], vectors[1], atol=1e-6) and np.allclose(vectors[0], vectors[2], atol=1e-6)
    one, other = (vectors_of(ask(port, {key: given}, path)[1]) for given in (ids[1], TEXTS[1]))
    assert np.allclose(one, other, atol=1e-6)


def vectors_of(answer):
    return np.array(answer if isinstance(answer, list) else [entry["embedding"] for entry in answer["data"]])


NULLS = dict.fromkeys(("encoding_format", "dimensions", "user"))


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/embeddings", NULLS | {"model": "any"}),
        ("/v1/embeddings", {"user": "a", "metadata": {"b": 1}, "input_type": None, "parameters": {}}),
        ("/embed", {"normalize": None, "truncate": None, "truncation_direction": "Right", "prompt_name": None}),
    ],
)
def test_a_field_that_is_null_or_changes_no_answer_is_left_out(port, path, fields):
    key = "input" if path.startswith("/v1/") else "inputs"
    plain, more = (ask(port, {key: TEXTS[0]} | null_or_not, path)[:2] for null_or_not in ({}, fields))
    assert plain[0] == more[0] == 200 and plain == more


def test_thousands_of_texts_are_embedded_in_parts(encoder, embedding_run):
    """LangChain sends up to 2,048 at once; a body may be larger than one of a single text."""
    texts = [f"{text} {'the ' * 260}" for text in (TEXTS * 100)[:1030]]
    assert sum(map(len, texts)) > MAX_BODY
    expected = embedding_run.embed(texts[:20])
    with serving(engine_of(encoder)) as (worker, port):
        status, reply, _ = ask(port, {"input": texts}, "/v1/embeddings")
        usage, data = reply["usage"]["prompt_tokens"], reply["data"]
        assert status == 200 and [entry["index"] for entry in data] == list(range(1030))
        np.testing.assert_allclose([entry["embedding"] for entry in data[:20]], expected, atol=SAME)
        assert len(ask(port, {"inputs": TEXTS[:1] * 257}, "/embed")[1]) == 257
    assert usage == sum(map(len, encoder.encode(texts).ids)) and not worker.metrics.requests["refused"]


def test_models_and_info_name_the_model_and_its_limits(port, predict_port, encoder, classifier):
    for at_port, opened in ((port, encoder), (predict_port, classifier)):
        status, reply, _ = ask(at_port, None, "/v1/models", "GET")
        (model,) = reply["data"]
        assert status == 200 and reply["object"] == "list" and model["id"] == opened.folder.name
        assert list(model) == ["id", "object", "created", "owned_by"] and type(model["created"]) is int
        assert ask(at_port, None, f"/v1/models/{model['id']}", "GET")[:2] == (200, model)
        info = ask(at_port, None, "/info", "GET")[1]
        assert info["model_sha"] == opened.model_id and info["max_input_length"] == opened.config["max_length"]
        assert info["max_client_batch_size"] == info["max_concurrent_requests"] == 256 and info["auto_truncate"]
    assert ask(port, None, "/info", "GET")[1]["model_type"] == {"embedding": {"pooling": "mean"}}
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    assert info["model_type"] == {"classifier": labels}


# ---- Pairs with one label ----
DOCUMENTS = [f"{text} film" for text in ("a good", "a very dull", "an awful", "the lovely")]


@pytest.fixture(scope="module")
def rerank_port(reranker):
    with serving(engine_of(reranker)) as (_, port):
        yield port


def test_one_label_has_the_sigmoid_as_its_score_and_the_number_if_raw(rerank_port, reranker):
    """As in text-embeddings-inference; transformers' pipeline does so too, unless problem_type is regression."""
    (number,) = reranker.run([("the film", "was good")])[0].logits.tolist()
    body = {"inputs": ["the film", "was good"]}
    for more, score in (({}, 1 / (1 + np.exp(-number))), ({"raw_scores": True}, number)):
        expected = [{"score": pytest.approx(score, abs=SAME), "label": "LABEL_0"}]
        assert ask(rerank_port, body | more, "/predict")[:2] == (200, expected)
        assert ask(rerank_port, {"inputs": [body["inputs"]]} | more, "/predict")[:2] == (200, [expected])


def test_texts_are_ranked_by_their_score_with_the_query(rerank_port, reranker):
    logits = np.array([answer.logits[0] for answer in reranker.run([("the film", text) for text in DOCUMENTS])])
    order, scores = np.argsort(-logits), 1 / (1 + np.exp(-logits))
    tei = {"query": "the film", "texts": DOCUMENTS}
    for more, of in (({}, scores), ({"raw_scores": True, "truncate": True}, logits)):
        status, ranking, _ = ask(rerank_port, tei | more, "/rerank")
        assert status == 200 and [list(ranked) for ranked in ranking] == [["index", "score"]] * 4
        assert [ranked["index"] for ranked in ranking] == order.tolist()
        np.testing.assert_allclose([ranked["score"] for ranked in ranking], of[order], atol=SAME)
    ranking = ask(rerank_port, tei | {"return_text": True}, "/rerank")[1]
    assert [ranked["text"] for ranked in ranking] == [DOCUMENTS[at] for at in order]
    jina = {
        "model": "any",
        "query": "the film",
        "documents": [{"text": document} for document in DOCUMENTS],
    }
    status, reply, _ = ask(rerank_port, jina, "/v1/rerank")
    assert status == 200 and [ranked["index"] for ranked in reply["results"]] == order.tolist()
    np.testing.assert_allclose([ranked["relevance_score"] for ranked in reply["results"]], scores[order], atol=SAME)
    assert [ranked["document"] for ranked in reply["results"]] == [{"text": DOCUMENTS[at]} for at in order]
    tokens = sum(map(len, reranker.encode([("the film", text) for text in DOCUMENTS]).ids))
    assert reply["usage"]["total_tokens"] == tokens and reply["model"] == reranker.folder.name
    ranking = ask(rerank_port, jina | {"top_n": 2, "return_documents": False}, "/v1/rerank")[1]["results"]
    assert [list(ranked) for ranked in ranking] == [["index", "relevance_score"]] * 2
    assert ask(rerank_port, jina, "/v2/rerank")[1] == ask(rerank_port, jina, "/v1/rerank")[1]
    many = ask(rerank_port, jina | {"documents": DOCUMENTS * 100}, "/v1/rerank")[1]["results"]
    assert sorted(ranked["index"] for ranked in many) == list(range(400))
    assert [ranked["index"] % 4 for ranked in many[::100]] == order.tolist()
    assert ask(rerank_port, None, "/info", "GET")[1]["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}


OPENAI = """
import json, sys
from openai import OpenAI
from openai import BadRequestError
client = OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none")
try:
    client.embeddings.create(model="any", input="")
except BadRequestError as error:
    assert "Error code: 400 - expected" in str(error), error
assert client.models.retrieve(client.models.list().data[0].id).owned_by == "mini_ee"
texts = json.loads(sys.argv[2])
for more in ({}, {"encoding_format": "float"}):
    response = client.embeddings.create(model="any", input=texts, **more)
    print(json.dumps([each.embedding for each in response.data]))
"""
HUB = """
import json, sys
from huggingface_hub import InferenceClient
texts = json.loads(sys.argv[2])
client = InferenceClient(f"http://127.0.0.1:{sys.argv[1]}/embed")
print(json.dumps(client.feature_extraction(texts).tolist()))
print(json.dumps([client.feature_extraction(text, normalize=True)[0].tolist() for text in texts]))
"""


COHERE = """
import json, sys
import cohere
query, *texts = json.loads(sys.argv[2])
for client in (cohere.Client, cohere.ClientV2):
    found = client("none", base_url=f"http://127.0.0.1:{sys.argv[1]}").rerank(model="any", query=query, documents=texts)
    print(json.dumps([[each.index, each.relevance_score] for each in found.results]))
"""


def lines_of(package, script, port, texts):
    """What a client prints. MINI_EE_CLIENTS: a Python that has the clients, if this one has not."""
    python = os.environ.get("MINI_EE_CLIENTS", sys.executable)
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"needs {package}")
    argv = [python, "-c", script, str(port), json.dumps(texts)]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(lines) == 2
    return map(json.loads, lines)


def test_coheres_clients_get_the_ranking_of_the_run(rerank_port, reranker):
    logits = np.array([answer.logits[0] for answer in reranker.run([("the film", text) for text in DOCUMENTS])])
    order = np.argsort(-logits)
    for line in lines_of("cohere", COHERE, rerank_port, ["the film", *DOCUMENTS]):
        expected = [[at, pytest.approx(1 / (1 + np.exp(-logits[at])), abs=SAME)] for at in order.tolist()]
        assert line == expected


@pytest.mark.parametrize("package, script", [("openai", OPENAI), ("huggingface_hub", HUB)])
def test_clients_get_the_embeddings_of_the_run(port, embedding_run, package, script):
    for line in lines_of(package, script, port, TEXTS[:4]):
        np.testing.assert_allclose(line, embedding_run.embed(TEXTS[:4]), atol=SAME)
