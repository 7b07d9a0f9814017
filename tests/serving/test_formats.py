"""The formats of other servers over HTTP: text-embeddings-inference's /predict and /embed, OpenAI's /v1/embeddings."""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ENCODED as TEXTS
from http_server import ask, serving

import mini_ee
from mini_ee.cli.main import main
from mini_ee.export.runtime import Runtime
from mini_ee.export.serving import engine_of

pytest.importorskip("uvicorn", reason="the extra serve")
SAME = 1e-5
PAIR = ["the film was good", "a dull book"]


@pytest.fixture(scope="module")
def runtime(embedding_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "encoder"
    mini_ee.export(embedding_run, out, segments=True)
    return Runtime(out, threads=1)


@pytest.fixture(scope="module")
def port(runtime):
    with serving(engine_of(runtime)) as (_, port):
        yield port


@pytest.fixture(scope="module")
def classifier(checkpoint_folder, task_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    run = mini_ee.train("joint", checkpoint_folder, task_folder, folder / "run", epochs=1)
    mini_ee.export(run, folder / "exported")
    return Runtime(folder / "exported", threads=1)


@pytest.fixture(scope="module")
def predict_port(classifier):
    with serving(engine_of(classifier)) as (_, port):
        yield port


def test_embed_answers_as_text_embeddings_inference(port, embedding_run):
    expected = embedding_run.embed(TEXTS[:3])
    status, found, _ = ask(port, {"inputs": list(TEXTS[:3]), "truncate": True, "normalize": True}, "/embed")
    assert status == 200
    np.testing.assert_allclose(found, expected, atol=SAME)
    _, one, _ = ask(port, {"inputs": TEXTS[0]}, "/embed")
    np.testing.assert_allclose(one, expected[:1], atol=SAME)
    _, short, _ = ask(port, {"inputs": list(TEXTS[:3]), "dimensions": 4}, "/embed")
    cut = expected[:, :4] / np.linalg.norm(expected[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=SAME)


def test_embeddings_answers_as_openai(port, runtime, embedding_run):
    expected = embedding_run.embed(TEXTS[:3])
    request = {"input": list(TEXTS[:3]), "model": "any"}
    status, found, _ = ask(port, request, "/v1/embeddings")
    tokens = sum(len(embedding_run.tokenizer.ids_of(text)) for text in TEXTS[:3])
    assert status == 200 and list(found) == ["object", "data", "model", "usage"] and found["object"] == "list"
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} and found["model"] == runtime.folder.name
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", k) for k in range(3)]
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected, atol=SAME)
    _, packed, _ = ask(port, {"input": TEXTS[0], "encoding_format": "base64"}, "/v1/embeddings")
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[0], atol=SAME)


def test_predict_answers_as_text_embeddings_inference(predict_port, classifier):
    (own, other), names = classifier.run(PAIR), classifier.label_names
    status, found, _ = ask(predict_port, {"inputs": PAIR[0], "parameters": {}}, "/predict")
    assert status == 200 and found[0]["label"] == own.label and {each["label"] for each in found} == set(names)
    assert found[0]["score"] == pytest.approx(own.confidence, abs=SAME)
    assert sum(each["score"] for each in found) == pytest.approx(1, abs=SAME)
    _, several, _ = ask(predict_port, {"inputs": [[text] for text in PAIR]}, "/predict")
    assert [each[0]["label"] for each in several] == [own.label, other.label]
    _, raw, _ = ask(predict_port, {"inputs": PAIR[0], "raw_scores": True}, "/predict")
    scores = {each["label"]: each["score"] for each in raw}
    np.testing.assert_allclose([scores[name] for name in names], own.logits, atol=SAME)


@pytest.mark.parametrize(
    "path, request_fields, found",
    [
        ("/embed", {"inputs": []}, "expected inputs as a text or a list"),
        ("/embed", {"inputs": [[1, 2]]}, "expected inputs as a text or a list"),
        ("/embed", {"inputs": "a film", "normalize": 1}, "expected normalize as true or false"),
        ("/embed", {"inputs": "very " * 200, "truncate": False}, "expected at most"),
        ("/embed", {"inputs": "a film", "truncation_direction": "Left"}, "not supported"),
        ("/embed", {"inputs": ["a film", ""]}, "expected"),
        ("/v1/embeddings", {"input": "a film", "dimensions": 17}, "expected dimensions from 1 to 16"),
        ("/v1/embeddings", {"input": "a film", "encoding_format": "int8"}, "float or base64"),
        ("/v1/embeddings", {"inputs": "a film"}, "expected input as a text or a list"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(port, path, request_fields, found):
    status, answer, _ = ask(port, request_fields, path)
    assert status == 400 and found in answer["error"] and "\n" not in answer["error"]


def test_a_path_of_another_kind_of_model_is_not_found(port, predict_port):
    for each, path in ((port, "/classify"), (port, "/predict"), (predict_port, "/embed")):
        assert ask(each, {"inputs": "a film", "text": "a film"}, path)[0] == 404
    assert ask(predict_port, {"inputs": PAIR}, "/predict")[0] == 400  # a pair, for a model of single texts


OPENAI = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none")
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


@pytest.mark.parametrize("package, script", [("openai", OPENAI), ("huggingface_hub", HUB)])
def test_clients_get_the_embeddings_of_the_run(port, embedding_run, package, script):
    """MINI_EE_CLIENTS: a Python that has the clients, if this one has not."""
    python = os.environ.get("MINI_EE_CLIENTS", sys.executable)
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"needs {package}")
    argv = [python, "-c", script, str(port), json.dumps(TEXTS[:4])]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        np.testing.assert_allclose(json.loads(line), embedding_run.embed(TEXTS[:4]), atol=SAME)


def test_a_sentence_encoder_has_no_labels_that_shadow_rows_could_agree_on(runtime, capsys):
    assert main(["serve", str(runtime.folder), "--shadow", "0.1", "--port", "0"]) == 2
    assert f"are for classifiers; {runtime.folder} is a sentence encoder" in capsys.readouterr().err
