"""A fine-tuned classifier as transformers writes it: its own head is the last exit, and its logits are equal."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mini_ee.backbones import hub
from mini_ee.backbones.backbone import Tensors
from mini_ee.backbones.fine_tuned import is_multi_label, label_names
from mini_ee.backbones.hub import load_backbone, read_tensors
from mini_ee.errors import WrongArguments
from mini_ee.exits import heads
from mini_ee.exits.classification_head import ClassificationHead, FrozenClassifier

GOLDEN = Path(__file__).parents[1] / "golden" / "classifiers"
KINDS = sorted(path.name for path in GOLDEN.iterdir())
TOLERANCE = 1e-5
"""Of a logit, relative above one; measured maximum 1.1e-6."""


def logits_of(folder, depth=None):
    """Our logits after the layer `depth`, by default the last, for the golden rows; and theirs."""
    expected = read_tensors(folder / "expected.safetensors")
    backbone = load_backbone(folder)
    layers = backbone.config.num_hidden_layers
    labels = expected["logits"].shape[1]
    model = FrozenClassifier(backbone.without_heads(), (1, layers), labels, backbone.poolings[0]).eval()
    with torch.no_grad():
        each = model(*Tensors(expected["input_ids"], expected["attention_mask"]))
    return each[-1], expected["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_of_every_family_are_those_of_transformers(kind):
    ours, theirs = logits_of(GOLDEN / kind)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_kind_of_head_is_among_them():
    """One token or the last, with a dense map or without, one number or classes, with a bias or without."""
    found = [load_backbone(GOLDEN / kind).classification_head for kind in KINDS]
    assert {head.layout.pool for head in found} == {"first", "last", "mean"}
    assert (
        {head.layout.dense is None for head in found} == {True, False} == {"out.bias" in head.weights for head in found}
    )
    assert {head.layout.activation for head in found} == {"tanh", "gelu", "relu"}
    assert {len(head.weights["out.weight"]) for head in found} == {1, 2, 3}


def test_which_classifiers_give_several_labels_at_once_is_read_from_config_json():
    assert [kind for kind in KINDS if is_multi_label(GOLDEN / kind)] == ["several-labels"]
    assert [kind for kind in KINDS if load_backbone(GOLDEN / kind).classification_head.multi_label] == [
        "several-labels"
    ]


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        ("llama", lambda patch: patch.setattr(heads, "_last", lambda hidden, real: hidden[:, -1])),
        ("llama", lambda patch: patch.setattr(heads, "_last", lambda hidden, real: hidden[:, 0])),
        ("bert", lambda patch: patch.setattr(ClassificationHead, "inner", lambda self, state: state)),
        ("roberta", lambda patch: patch.setattr(ClassificationHead, "inner", lambda self, state: self.dense(state))),
    ],
    ids=["the padding is read", "the first token is read", "no dense map", "no activation"],
)
def test_a_wrong_head_would_be_found(kind, bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_logits_of_every_family_are_those_of_transformers(kind)


@pytest.mark.parametrize("kind", ("bert", "llama"))
def test_nothing_of_the_model_is_trained(kind):
    backbone = load_backbone(GOLDEN / kind)
    model = FrozenClassifier(backbone.without_heads(), (1, 2), 3, backbone.poolings[0])
    names = [name for name, _ in model.named_parameters() if model.is_trainable(name)]
    assert names and all(name.startswith("heads.0.") for name in names)
    assert model.own_state().keys() == set(names)


def edited(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | keys).items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, ("no", "maybe", "yes")),
        ({"id2label": {"10": "c", "2": "b", "1": "a"}}, ("a", "b", "c")),
        ({"id2label": None}, ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "LABEL_0"}}, ()),
        ({"id2label": {"0": "spam"}, "problem_type": "single_label_classification"}, ("spam",)),
        ({"problem_type": "regression", "id2label": {"0": "score"}}, ()),
        ({"problem_type": "multi_label_classification", "id2label": {"0": "rude", "1": "spam"}}, ("rude", "spam")),
    ],
)
def test_the_labels_are_those_of_config_json(tmp_path, keys, expected):
    folder = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    assert label_names(edited(folder, **keys)) == expected


REFUSED = [
    ({"architectures": ["BertModel"]}, "expected a fine-tuned classifier, .* found 'BertModel'; `mini-ee train joint`"),
    ({"architectures": None}, "expected a fine-tuned classifier, .* found None"),
    (
        {"problem_type": "multi_label_classification", "id2label": {str(i): str(i) for i in range(64)}},
        "several labels at once .* of 64; from 2 to 63",
    ),
    ({"problem_type": "multi_label_classification", "id2label": {"0": "spam"}}, "of 1; from 2 to 63"),
    ({"problem_type": "regression"}, "predicts 3 numbers for an input .*not supported yet"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_is_no_such_classifier_is_refused(tmp_path, keys, message):
    folder = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    with pytest.raises(WrongArguments, match=message):
        label_names(edited(folder, **keys))


def test_a_head_that_is_not_whole_or_has_an_unknown_activation_is_refused(tmp_path):
    backbone = load_backbone(edited(shutil.copytree(GOLDEN / "deberta", tmp_path / "d"), pooler_hidden_act="mish"))
    with pytest.raises(ValueError, match="pooler_hidden_act must be one of gelu, .* found 'mish'"):
        ClassificationHead(backbone)
    with pytest.raises(ValueError, match="expected a head of 5 labels, found one of 3"):
        FrozenClassifier(load_backbone(GOLDEN / "bert"), (2,), 5, "mean")
    folder = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    tensors = read_tensors(folder / "model.safetensors")
    hub.write_tensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if "pooler" not in k})
    with pytest.raises(ValueError, match="found a bert without classification head; `mini-ee train joint` trains one"):
        ClassificationHead(load_backbone(folder))
