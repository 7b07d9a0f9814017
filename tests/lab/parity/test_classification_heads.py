"""A fine-tuned classifier as transformers writes it: its own head is the last exit, and its logits are equal."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.fine_tuned import is_multi_label, label_names
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.classification_head import ClassificationHead, FrozenClassifier

GOLDEN = Path(__file__).parents[2] / "golden" / "classifiers"
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
        logits = model(*Tensors(expected["input_ids"], expected["attention_mask"]))
    return logits[-1], expected["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_of_every_family_are_those_of_transformers(kind):
    ours, theirs = logits_of(GOLDEN / kind)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_kind_of_head_is_among_them():
    """One token or the last, with a dense map or without, one number or classes, with a bias or without."""
    heads = [load_backbone(GOLDEN / kind).classification_head for kind in KINDS]
    assert {head.layout.pool for head in heads} == {"first", "last", "mean"}
    assert (
        {head.layout.dense is None for head in heads} == {True, False} == {"out.bias" in head.weights for head in heads}
    )
    assert {head.layout.activation for head in heads} == {"tanh", "gelu", "relu"}
    assert {len(head.weights["out.weight"]) for head in heads} == {1, 2, 3}


def test_which_classifiers_give_several_labels_at_once_is_read_from_config_json():
    assert [kind for kind in KINDS if is_multi_label(GOLDEN / kind)] == ["several-labels"]
    assert [kind for kind in KINDS if load_backbone(GOLDEN / kind).classification_head.multi_label] == [
        "several-labels"
    ]


@pytest.mark.parametrize("kind", ("bert", "llama"))
def test_nothing_of_the_model_is_trained(kind):
    backbone = load_backbone(GOLDEN / kind)
    model = FrozenClassifier(backbone.without_heads(), (1, 2), 3, backbone.poolings[0])
    names = [name for name, _ in model.named_parameters() if model.is_trainable(name)]
    assert names and all(name.startswith("heads.0.") for name in names)
    assert model.own_state().keys() == set(names)


def edited(folder, rows=None, **keys):
    """The folder with other keys in config.json, None for none, and with a head of `rows` labels."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | keys).items() if v is not None}))
    if rows is not None:
        tensors = read_tensors(folder / "model.safetensors")
        head = {"classifier.weight": torch.ones(rows, tensors["classifier.weight"].shape[1])}
        write_tensors(folder / "model.safetensors", tensors | head | {"classifier.bias": torch.ones(rows)})
    return folder


TWO = {"0": "no", "1": "yes"}
MULTI = "multi_label_classification"

LABELS = [  # rows of the head, keys of config.json, labels
    (3, {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, ("no", "maybe", "yes")),
    (3, {"id2label": {"2": "c", " 0": "a", "01": "b"}}, ("a", "b", "c")),
    (2, {"id2label": None}, ("LABEL_0", "LABEL_1")),
    (3, {"id2label": None, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    (2, {"id2label": TWO, "num_labels": 2}, ("no", "yes")),
    (3, {"id2label": TWO, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    (2, {"id2label": {"0": 5, "1": 7}}, ("5", "7")),
    (2, {"id2label": TWO, "label2id": {"x": 0}}, ("no", "yes")),
    (2, {"id2label": TWO, "architectures": None}, ("no", "yes")),
    (2, {"id2label": TWO, "architectures": "BertForSequenceClassification"}, ("no", "yes")),
    (2, {"id2label": TWO, "architectures": ["BertModel", "BertForSequenceClassification"]}, ("no", "yes")),
    (1, {"id2label": {"0": "LABEL_0"}}, ()),
    (1, {"problem_type": "regression", "id2label": {"0": "score"}}, ()),
    (2, {"problem_type": MULTI, "id2label": {"0": "rude", "1": "spam"}}, ("rude", "spam")),
]


@pytest.mark.parametrize(("rows", "keys", "expected"), LABELS)
def test_the_labels_are_those_of_config_json(tmp_path, rows, keys, expected):
    folder = edited(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"), rows, **keys)
    assert label_names(folder) == expected
    assert len(load_backbone(folder).classification_head.weights["out.weight"]) == rows


@pytest.mark.parametrize(("rows", "keys", "expected"), LABELS)
def test_transformers_reads_the_same_labels(tmp_path, rows, keys, expected):
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = edited(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"), rows, **keys)
    config = transformers.AutoModelForSequenceClassification.from_pretrained(folder).config
    assert config.num_labels == rows and (
        not expected or expected == tuple(str(config.id2label[number]) for number in range(rows))
    )


REFUSED = [  # the last ones by transformers, too
    (3, {"architectures": ["BertModel"]}, "expected a fine-tuned classifier, .* found 'BertModel'; `mini-ee train"),
    (64, {"problem_type": MULTI, "id2label": {str(i): str(i) for i in range(64)}}, "at once .* of 64; from 2 to 63"),
    (1, {"problem_type": MULTI, "id2label": {"0": "spam"}}, "of 1; from 2 to 63"),
    (3, {"problem_type": "regression"}, "predicts 3 numbers for an input .*not supported yet"),
    (3, {"problem_type": "ranking"}, "config.json: problem_type must be regression, .* found 'ranking'"),
    (3, {"id2label": None}, "config.json: num_labels must give the 3 labels of the head, found 2; write id2label"),
    (3, {"id2label": None, "_num_labels": 3}, "num_labels must give the 3 labels"),
    (3, {"id2label": TWO}, "config.json: id2label must give the 3 labels of the head, found 2"),
    (2, {"id2label": TWO, "num_labels": 3}, "config.json: num_labels must give the 2 labels of the head, found 3"),
    (2, {"id2label": {"no": 0, "yes": 1}}, r"config.json: id2label must give each number .* \{'no': 0, 'yes': 1\}"),
    (2, {"id2label": ["no", "yes"]}, r"config.json: id2label must give each number .* \['no', 'yes'\]"),
    (2, {"id2label": {"1": "no", "2": "yes"}}, "config.json: id2label must have the keys 0 to 1, found"),
    (2, {"id2label": {}}, "config.json: id2label must"),
    (2, {"id2label": {"0": "no", "1": ["yes"]}}, "config.json: id2label must have texts as names"),
    (
        3,
        {"id2label": None, "num_labels": "3"},
        "config.json: num_labels must be a whole number of at least 1, found '3'",
    ),
    (1, {"problem_type": "single_label_classification", "id2label": {"0": "spam"}}, "needs at least 2 labels, found 1"),
]


@pytest.mark.parametrize(("rows", "keys", "message"), REFUSED)
def test_what_is_no_such_classifier_is_refused(tmp_path, rows, keys, message):
    folder = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    with pytest.raises(WrongArguments, match=message):
        label_names(edited(folder, rows, **keys))


def test_a_folder_without_architectures_is_a_classifier_if_it_has_the_whole_head(tmp_path):
    folder = edited(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"), architectures=None)
    tensors = read_tensors(folder / "model.safetensors")
    write_tensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if "classifier" not in k})
    with pytest.raises(WrongArguments, match="found None and no tensors of a head; `mini-ee train joint` trains one"):
        label_names(folder)


def test_a_head_of_another_kind_is_refused(tmp_path):
    folder = edited(
        shutil.copytree(GOLDEN.parent / "t5", tmp_path / "t5"), architectures=["T5ForSequenceClassification"]
    )
    with pytest.raises(
        WrongArguments, match="found 'T5ForSequenceClassification', whose kind of head is not supported"
    ):
        label_names(folder)


def pad_cases(folder, pad):
    """Rows of a decoder's classifier that end with its padding token, have it within, or hold nothing else."""
    expected = read_tensors(folder / "expected.safetensors")
    row = expected["input_ids"][0][expected["attention_mask"][0].bool()].tolist()
    rows = [row, [*row, pad], [*row[:2], pad, *row[2:], pad, pad], [pad, pad], [*row[:3], pad]]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row_ids, *[0] * (longest - len(row_ids))] for row_ids in rows])
    return rows, Tensors(ids, torch.tensor([[1] * len(row_ids) + [0] * (longest - len(row_ids)) for row_ids in rows]))


def frozen(folder):
    backbone = load_backbone(folder)
    layers, labels = backbone.config.num_hidden_layers, len(label_names(folder)) or 1
    return FrozenClassifier(backbone.without_heads(), (1, layers), labels, backbone.poolings[0]).eval()


DECODERS = [kind for kind in KINDS if load_backbone(GOLDEN / kind).generates]


@pytest.mark.parametrize("pad", (7, None, -1))
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_reads_the_last_token_that_is_not_its_padding_token(tmp_path, kind, pad):
    """As transformers does, row by row: cut before the last tokens that are padding; -1 and null: none is."""
    folder = shutil.copytree(GOLDEN / kind, tmp_path / kind)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps(config))
    rows, inputs = pad_cases(folder, 7)
    model, plain = frozen(folder), frozen(folder)
    plain.backbone.text_end = None
    with torch.no_grad():
        together = model(*inputs)[-1]
        for row, logits in zip(rows, together):
            read = row
            while pad == 7 and len(read) > 1 and read[-1] == pad:
                read = read[:-1]
            torch.testing.assert_close(logits, plain(torch.tensor([read]))[-1][0], atol=TOLERANCE, rtol=TOLERANCE)
            torch.testing.assert_close(logits, model(torch.tensor([row]))[-1][0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", DECODERS)
def test_transformers_reads_the_same_token(tmp_path, kind):
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = shutil.copytree(GOLDEN / kind, tmp_path / kind)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"pad_token_id": 7})
    )
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows, inputs = pad_cases(folder, 7)
    with torch.no_grad():
        for row, logits in zip(rows, frozen(folder)(*inputs)[-1]):
            expected = theirs(torch.tensor([row])).logits[0]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_head_that_is_not_whole_or_has_an_unknown_activation_is_refused(tmp_path):
    backbone = load_backbone(edited(shutil.copytree(GOLDEN / "deberta", tmp_path / "d"), pooler_hidden_act="mish"))
    with pytest.raises(ValueError, match="pooler_hidden_act must be one of gelu, .* found 'mish'"):
        ClassificationHead(backbone)
    with pytest.raises(ValueError, match="expected a head of 5 labels, found one of 3"):
        FrozenClassifier(load_backbone(GOLDEN / "bert"), (2,), 5, "mean")
    folder = shutil.copytree(GOLDEN / "bert", tmp_path / "bert")
    tensors = read_tensors(folder / "model.safetensors")
    write_tensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if "pooler" not in k})
    with pytest.raises(ValueError, match="found a bert without classification head; `mini-ee train joint` trains one"):
        ClassificationHead(load_backbone(folder))


def test_pairs_that_the_tokenizer_joins_are_refused(tmp_path):
    """Elsewhere two such texts are two lines, and transformers joins them without a separator."""
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    words = {word: number for number, word in enumerate(["<unk>", "a", "b"])}
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>")), None).save_beside_model(folder)
    pairs = [(f"text {number}", "a") for number in range(120)]
    with pytest.raises(WrongArguments, match="expected a tokenizer that separates the two texts of a pair, found"):
        mini_ee.add_exits(folder, pairs, tmp_path / "fast")
    assert not (tmp_path / "fast").exists()
