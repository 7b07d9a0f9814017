"""`mini-ee add-exits` on a sentence encoder: maps, a fixed depth for a cosine, an export, one summary."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BAD, GOOD, THINGS

import mini_ee
from mini_ee.lab.backbones.fine_tuned import is_sentence_encoder
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.export import encoder_exits
from mini_ee.lab.export.add_exits import card, line_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Fixed, Never
from mini_ee.lab.training.holdout import split_rows

TEXTS = [
    f"{'very ' * n}{word} {thing} is {other}" for thing in THINGS for word in GOOD for other in BAD for n in (0, 1)
]


@pytest.fixture(scope="module")
def added(encoder_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("added") / "fast"
    (out.parent / "in.txt").write_text("\n".join(TEXTS))
    argv = ["add-exits", encoder_folder, "--text", out.parent / "in.txt", "--out", out, "--cosine", "0.2"]
    assert main([str(word) for word in argv]) == 0
    return SimpleNamespace(out=out, summary=read_json(out / "summary.json"), exported=Runtime(out / "exported"))


def test_the_cosines_are_those_of_the_exported_graph_on_texts_that_trained_nothing(added):
    test = split_rows(encoder_exits.encoder_task([(text,) for text in TEXTS]), 0, None).test
    texts = [text for (text,) in test.texts]
    full = added.exported.embed(texts, rule=Never())
    for k, depth in enumerate(added.summary["depths"]):
        embeddings = added.exported.embed(texts, rule=Fixed(k))
        cosines = (embeddings * full).sum(1) / np.linalg.norm(embeddings, axis=1) / np.linalg.norm(full, axis=1)
        assert depth["cosine"] == pytest.approx(cosines.mean(), abs=1e-5) and depth["layers"] == k + 1
        assert depth["low_cosine"] == pytest.approx(np.quantile(cosines, 0.1), abs=1e-5) and depth["speedup"] > 0
    assert added.summary["depths"][-1]["cosine"] == pytest.approx(1, abs=1e-5)
    assert sum(added.summary["texts"].values()) == len(TEXTS) and added.summary["texts"]["tested"] == len(texts)


def test_the_depth_is_the_shallowest_with_the_cosine_and_that_of_the_export(added):
    enough = [depth["layers"] for depth in added.summary["depths"] if depth["cosine"] >= 0.2]
    assert added.summary["depth"] == enough[0] < 3 and added.summary["layers_saved"] == 1 - enough[0] / 3
    assert added.exported.rule == Fixed(enough[0] - 1)


def test_the_last_exit_is_the_encoders_own_embedding(added, embedding_run):
    expected = embedding_run._replace(rule=Never()).embed(TEXTS[:9])
    np.testing.assert_allclose(added.exported.embed(TEXTS[:9], rule=Never()), expected, atol=1e-5)


def test_the_line_the_table_and_the_card_say_the_same(added, encoder_folder, tmp_path, capsys):
    line, text = line_of(added.summary), (added.out / "README.md").read_text()
    here = added.summary["depths"][added.summary["depth"] - 1]
    assert f"the mean cosine to the full embedding is {here['cosine']:.3f}" in line
    assert text == card(added.summary) and line in text and text.count("\n| ") == 4


def test_a_cosine_that_no_earlier_layer_has_leaves_the_encoder_as_it_is(encoder_folder, tmp_path):
    run = mini_ee.add_exits(encoder_folder, TEXTS, tmp_path / "fast", cosine=0.999, exits=(1, 3))
    summary = read_json(tmp_path / "fast" / "summary.json")
    assert run.exits == (1, 3) and not summary["pays"] and not (tmp_path / "fast" / "exported").exists()
    assert re.search(r"does not pay here: .* is at most 0\.\d+ on .* below 0.999", line_of(summary))
    assert line_of(summary) in (tmp_path / "fast" / "README.md").read_text()


def test_a_killed_call_goes_on_with_the_export(encoder_folder, tmp_path, monkeypatch):
    def killed(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encoder_exits, "export", killed)
        mini_ee.add_exits(encoder_folder, TEXTS, tmp_path / "fast", cosine=-1)
    monkeypatch.setattr(encoder_exits, "train", killed)
    mini_ee.add_exits(encoder_folder, TEXTS, tmp_path / "fast", cosine=-1)
    assert read_json(tmp_path / "fast" / "summary.json")["depth"] == 1
    with pytest.raises(FileExistsError, match="is there already"):
        mini_ee.add_exits(encoder_folder, TEXTS, tmp_path / "fast", cosine=-1)


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("encoder", "--agreement", "--agreement is for a classifier; this model is a sentence encoder"),
        ("encoder", "--tolerance", "--tolerance is for a classifier; this model is a sentence encoder"),
        ("classifier", "--cosine", "--cosine is for a sentence encoder; this model is a classifier"),
        ("classifier", "--prompt-name", "--prompt-name is for a sentence encoder; this model is a classifier"),
    ],
)
def test_options_of_the_other_kind_are_refused_in_one_line(
    kind, option, message, encoder_folder, classifier_folder, tmp_path, capsys
):
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    model = encoder_folder if kind == "encoder" else classifier_folder
    argv = ["add-exits", str(model), "--text", str(tmp_path / "in.txt"), "--out", str(tmp_path / "fast")]
    assert main([*argv, option, ".5"]) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and message in error


def test_a_reranker_with_modules_json_is_a_classifier(encoder_folder, classifier_folder, checkpoint_folder, tmp_path):
    folder = shutil.copytree(classifier_folder, tmp_path / "reranker")
    modules = [{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    kinds = (encoder_folder, folder, classifier_folder, checkpoint_folder)
    assert [is_sentence_encoder(kind) for kind in kinds] == [True, False, False, False]
