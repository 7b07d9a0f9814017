"""A SetFit folder is a classifier: its logistic head reads the embedding, or the line is printed that exports it."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from method_cases import TEXTS, few_epochs_and_no_picture  # noqa: F401
from safetensors.torch import save_file

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.fine_tuned import is_sentence_encoder, label_names
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.heads import pooled
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Never

ABOUT = {"kind": "LogisticRegression", "classes": "[0, 1, 2]", "solver": "lbfgs", "multi_class": "None"}


@pytest.fixture
def encoder(tmp_path, checkpoint_folder):
    folder = shutil.copytree(checkpoint_folder, tmp_path / "it's a setfit")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    width = load_backbone(folder).config.hidden_size
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def with_head(folder, rows=3, config=None, **metadata):
    torch.manual_seed(0)
    tensors = {"coef": torch.randn(rows, load_backbone(folder).config.hidden_size), "intercept": torch.randn(rows)}
    save_file(tensors, folder / "model_head.safetensors", ABOUT | metadata)
    config = {"normalize_embeddings": False, "labels": ["bad", "so so", "good"]} | (config or {})
    (folder / "config_setfit.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("normalize", (False, True))
@pytest.mark.parametrize("rows", (1, 3))
def test_the_last_exit_is_the_logistic_regression_on_the_embedding(encoder, rows, normalize):
    classes = "[1, 0]" if rows == 1 else "[0, 1, 2]"
    head = with_head(encoder, rows, {"normalize_embeddings": normalize}, classes=classes)
    assert not is_sentence_encoder(encoder)
    assert label_names(encoder) == (("so so", "bad") if rows == 1 else ("bad", "so so", "good"))
    backbone = load_backbone(encoder)
    inputs = Tensors(torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    with torch.no_grad():
        embedding = pooled(backbone(*inputs), inputs.attention_mask[:, None, None], "mean")
        embedding = torch.nn.functional.normalize(embedding, dim=1) if normalize else embedding
        expected = embedding @ head["coef"].T + head["intercept"]
        layers = backbone.config.num_hidden_layers
        model = FrozenClassifier(backbone.without_heads(), (1, layers), max(2, rows), "mean").eval()
        logits = model(*inputs)[-1]
    torch.testing.assert_close(
        logits[:, 1] - logits[:, 0] if rows == 1 else logits, expected[:, 0] if rows == 1 else expected
    )


REFUSED = [
    ({}, {"classes": "[0, 1]"}, "expected coef, intercept and classes of a logistic regression"),
    ({}, {"kind": "MultiOutputClassifier"}, "found MultiOutputClassifier"),
    ({}, {"kind": "SetFitHead", "multitarget": "True"}, "found several labels at once"),
    ({}, {"solver": "liblinear"}, "expected one softmax over all classes"),
    ({"labels": ["bad", "good"]}, {}, "expected a label in config_setfit.json for each class"),
    ({"span_context": 3}, {}, "config_setfit.json: span_context 3: not supported"),
]


@pytest.mark.parametrize(("config", "metadata", "message"), REFUSED)
def test_another_head_is_refused_by_name(encoder, config, metadata, message):
    with_head(encoder, 3, config, **metadata)
    with pytest.raises(WrongArguments, match=message):
        label_names(encoder)


def test_a_prompt_or_lower_case_before_the_classifier_is_refused(encoder):
    with_head(encoder)
    (encoder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(WrongArguments, match="do_lower_case with the classifier of a SetFit model"):
        label_names(encoder)
    (encoder / "sentence_bert_config.json").unlink()
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (encoder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.raises(WrongArguments, match="a prompt before the classifier of a SetFit model"):
        label_names(encoder)


def test_a_head_that_joblib_saved_is_not_opened_and_named_if_it_is_not_used(encoder):
    (encoder / "model_head.pkl").write_bytes(b"not to be opened")
    with pytest.raises(WrongArguments, match="can run code; if you trust the file, this line unpickles it") as info:
        mini_ee.add_exits(encoder, TEXTS, encoder.parent / "fast")
    assert "\n" not in str(info.value) and not (encoder.parent / "fast").exists()
    assert load_backbone(encoder).left_out == ("model_head.pkl",)


def embeddings(folder, inputs):
    """Mean over the tokens, of length 1."""
    ids, mask, types = (torch.from_numpy(x) for x in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))
    with torch.no_grad():
        states = load_backbone(folder)(ids, mask, types)
        return torch.nn.functional.normalize(pooled(states, mask[:, None, None], "mean"), dim=1).numpy()


@pytest.mark.parametrize("solver", ("lbfgs", "liblinear"))
def test_the_printed_line_exports_the_head_of_scikit_learn(encoder, solver):
    """Two classes with names of their own; the export to ONNX answers as encoder and regression together."""
    linear_model, joblib = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("joblib")
    tokenized = Tokenizer.from_folder(encoder, 24).encode([(text,) for text in TEXTS])
    vectors = embeddings(encoder, tokenized.batch(slice(None)))
    names = np.where(vectors[:, 0] > np.median(vectors[:, 0]), "yes", "no")
    fitted = linear_model.LogisticRegression(solver=solver, C=1e4).fit(vectors, names)
    fitted.coef_ = np.asfortranarray(fitted.coef_)
    joblib.dump(fitted, encoder / "model_head.pkl")
    (encoder / "config_setfit.json").write_text('{"normalize_embeddings": true, "labels": null}')
    with pytest.raises(WrongArguments) as info:
        label_names(encoder)
    command = shlex.split(str(info.value).partition("model_head.safetensors: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert label_names(encoder) == ("no", "yes")
    run = mini_ee.add_exits(encoder, TEXTS, encoder.parent / "fast", agreement=0.5)
    inputs = run.encode(TEXTS[:20]).batch(slice(None))
    engines = [run.segments()]
    if Path(encoder.parent / "fast" / "exported").exists():
        engines.append(Runtime(encoder.parent / "fast" / "exported").segments())
    for segments in engines:
        logits = early_exit(segments, Never(), inputs).logits
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(probabilities, fitted.predict_proba(embeddings(encoder, inputs)), atol=1e-5)
