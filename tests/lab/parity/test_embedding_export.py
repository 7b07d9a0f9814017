"""An exported sentence encoder: `embedding` and `layers` of model.onnx equal torch, with and without adaptive depth."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import ENCODED as TEXTS

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines.cosine_predictor import Predictors
from mini_ee.lab.cli.main import main
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.embedding_exits import EmbeddingExits
from mini_ee.lab.export.runtime import EmbeddingRuntime, Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.methods.embedding_maps_rule import Similarity
from mini_ee.lab.rules import Fixed, Never, Policy

ENGINES = 1e-5
"""Numbers of an embedding in ONNX Runtime against torch; measured maximum 3e-7."""


@pytest.fixture(scope="module")
def rule(embedding_run):
    """Adaptive depth: about half of the texts stop at the second exit."""
    embeddings = [embedding_run._replace(rule=Fixed(k)).embed(TEXTS) for k in range(2)]
    return Similarity(float(np.median((embeddings[0] * embeddings[1]).sum(axis=1))))


@pytest.fixture(scope="module")
def exported(embedding_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "fixed"
    manifest = mini_ee.export(embedding_run, out, texts=[(text,) for text in TEXTS])
    assert manifest["verified"]["max_logit_difference"] < ENGINES
    return Runtime(out, threads=1)


@pytest.fixture(scope="module")
def adaptive(embedding_run, rule, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "adaptive"
    mini_ee.export(embedding_run._replace(rule=rule), out, segments=True)
    return Runtime(out, threads=1)


def test_the_graph_returns_embedding_and_layers(exported, embedding_run):
    session = onnxruntime.InferenceSession(exported.folder / "onnx/model.onnx")
    assert [node.name for node in session.get_outputs()] == ["sentence_embedding", "layers", "last_hidden_state"]
    encoded = exported.encode(TEXTS[:5]).batch(slice(None))
    inputs = {name: getattr(encoded, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for k, layer in enumerate(embedding_run.exits):
        embedding, layers, of_tokens = session.run(None, inputs | {"exit_at": np.array([k])})
        expected = embedding_run._replace(rule=Fixed(k)).embed(TEXTS[:5])
        np.testing.assert_allclose(embedding, expected, atol=ENGINES)
        assert layers.tolist() == [layer] * 5
        assert (of_tokens == embedding[:, None]).all() and of_tokens.shape[1] == inputs["input_ids"].shape[1]


def test_the_runtime_embeds_as_the_run_does(exported, embedding_run):
    assert isinstance(exported, EmbeddingRuntime)
    np.testing.assert_allclose(exported.embed(TEXTS, 7), embedding_run.embed(TEXTS), atol=ENGINES)
    full = embedding_run._replace(rule=Never()).embed(TEXTS[:3])
    np.testing.assert_allclose(exported.embed(TEXTS[:3], rule=Never()), full, atol=ENGINES)
    assert exported.embed([]).shape == (0, 16)
    torch_runtime = Runtime(exported.folder, segments=torch_segments(exported.folder))
    np.testing.assert_allclose(torch_runtime.embed(TEXTS[:3]), embedding_run.embed(TEXTS[:3]), atol=1e-6)


def test_similarity_compares_the_embeddings_of_two_exits(embedding_run, rule):
    """The oracle is a loop over the exits of one text."""
    result = early_exit(embedding_run.segments(), rule, embedding_run.encode(TEXTS).batch(slice(None)))
    embeddings = np.stack([embedding_run._replace(rule=Fixed(k)).embed(TEXTS) for k in range(3)], axis=1)
    for text, (first, second, last) in enumerate(embeddings):
        k = 1 if first @ second >= rule.least_cosine else 2
        assert result.exit_index[text] == k
        np.testing.assert_allclose(result.logits[text], (first, second, last)[k], atol=1e-6)
    assert set(result.exit_index) == {1, 2}
    with pytest.raises(ValueError, match="from -1 to 1"):
        Similarity(1.5)


def test_adaptive_depth_is_in_the_graph_and_in_graphs_by_segment(adaptive, embedding_run, rule):
    inputs = adaptive.encode(TEXTS).batch(slice(None))
    expected = early_exit(embedding_run.segments(), rule, inputs)
    for segments in (adaptive.segments(), adaptive.segments().by_segment(rule)):
        result = early_exit(segments, rule, inputs)
        same = result.exit_index == expected.exit_index
        assert same.mean() > 0.95  # rounding decides at the threshold, which is the median of these texts
        np.testing.assert_allclose(result.logits[same], expected.logits[same], atol=ENGINES)
    stricter = early_exit(adaptive.segments(), Similarity(np.inf), inputs)
    assert set(stricter.exit_index) == {2}


def test_a_learned_predictor_is_in_the_graph(embedding_run, encoder_folder, tmp_path):
    torch.manual_seed(0)
    model = EmbeddingExits(load_backbone(encoder_folder), (1, 2, 3), 16, "mean", True, Predictors).eval()
    for parameter in model.policy.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    run = embedding_run._replace(model=model, rule=Policy(0.5))
    inputs = run.encode(TEXTS).batch(slice(None))
    expected = early_exit(run.segments(), run.rule, inputs)
    assert len(set(expected.exit_index)) > 1
    mini_ee.export(run, tmp_path / "exported")
    result = early_exit(Runtime(tmp_path / "exported", threads=1).segments(), run.rule, inputs)
    np.testing.assert_array_equal(result.exit_index, expected.exit_index)
    np.testing.assert_allclose(result.logits, expected.logits, atol=ENGINES)


def test_embed_writes_an_array_or_lines(exported, embedding_run, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:5]))
    expected = embedding_run.embed(TEXTS[:5])
    for folder in (exported.folder, embedding_run.folder):
        for name in ("a.npy", "a.jsonl"):
            argv = ["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / name), "--json"]
            assert main(argv) == 0
            answer = json.loads(capsys.readouterr().out)
            assert answer["rows"] == 5 and answer["size"] == 16
        lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        for embeddings in (np.load(tmp_path / "a.npy"), np.array([line["embedding"] for line in lines], np.float32)):
            np.testing.assert_allclose(embeddings, expected, atol=ENGINES)
    deepest = ["embed", str(exported.folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "b.npy")]
    assert main([*deepest, "--rule", "fixed", "--layer", "3"]) == 0
    full = embedding_run._replace(rule=Never()).embed(TEXTS[:5])
    np.testing.assert_allclose(np.load(tmp_path / "b.npy"), full, atol=ENGINES)


def test_run_prints_an_embedding_a_line(exported, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]))
    assert main(["run", str(exported.folder), str(tmp_path / "texts.txt")]) == 0
    lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [sorted(line) for line in lines] == [["embedding", "exit", "layers", "line", "milliseconds"]] * 3
    np.testing.assert_allclose([line["embedding"] for line in lines], exported.embed(TEXTS[:3]), atol=1e-6)


def test_refusals_are_one_line_and_leave_no_file(exported, embedding_run, tmp_path, capsys):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a film\n")
    bad.write_text("a film\n\nthe film\n")
    run, out = str(embedding_run.folder), str(tmp_path / "a.npy")
    for argv, problem in (
        (["embed", run, str(bad), "--out", out], "bad.txt:2: expected text, found a blank line"),
        (["embed", run, str(good), "--out", str(tmp_path / "a.csv")], "ends with .npy or .jsonl"),
        (["classify", run, "--text", "a film"], "use mini-ee embed"),
        (["evaluate", run], "use mini-ee embed"),
        (["calibrate", run, "--epsilon", "0.9"], "needs --cosine"),
        (["generate", run, "--prompt", "a film"], "use mini-ee embed"),
        (["compare", run, run], "use mini-ee embed"),
    ):
        assert main(argv) != 0
        line = capsys.readouterr().err.strip()
        assert problem in line and "\n" not in line, line
    with pytest.raises(WrongArguments, match="gives embeddings"):
        mini_ee.export(embedding_run, tmp_path / "never", web=True)
    assert not (tmp_path / "a.npy").exists() and not (tmp_path / "never").exists()
