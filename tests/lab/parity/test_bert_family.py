"""Relatives of BERT that have a file of their own: configs, names, exits, adapters, and what ONNX Runtime computes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import all_schedules, tensors
from safetensors.torch import load_file, save_file

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone, read_config, save_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.lora_exits_peft import save_adapters
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("xlm-roberta", "electra", "distilbert", "mpnet")
TOLERANCE = 1e-5
ENGINES = 2e-5
"""Logits of ONNX Runtime against torch's; measured maximum 6e-6."""
EXITS = (1, 2, 3)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def read(kind, tmp_path, **change):
    content = json.loads((GOLDEN / kind / "config.json").read_text()) | change
    content = {key: value for key, value in content.items() if value != "left out"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return read_config(tmp_path / "config.json")


# ---- Configs and files ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_written_as_it_is_read(kind, tmp_path):
    config = read(kind, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert read_config(tmp_path / "config.json") == config
    theirs = json.loads((GOLDEN / kind / "config.json").read_text())
    assert {key: theirs[key] for key in theirs.keys() & config.to_dict().keys()} == {
        key: value for key, value in config.to_dict().items() if key in theirs
    }


def test_keys_that_are_left_out_are_those_of_transformers(tmp_path):
    assert read("electra", tmp_path, embedding_size="left out").embedding_size == 128
    assert read("xlm-roberta", tmp_path, pad_token_id="left out").pad_token_id == 1
    assert read("mpnet", tmp_path, pad_token_id="left out", relative_attention_num_buckets="left out").max_tokens == 30
    assert read("distilbert", tmp_path, pad_token_id="left out").pad_token_id == 0


def test_distilbert_obeys_the_keys_that_transformers_obeys(tmp_path):
    config = read("distilbert", tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (16, 3, 16)
    passed_over = {"layer_norm_eps": 0.1, "hidden_act": "relu", "intermediate_size": 99, "type_vocab_size": 2}
    assert read("distilbert", tmp_path, **passed_over, hidden_size=16) == config
    assert read("distilbert", tmp_path, dim="left out", hidden_size=16) == config
    assert config.token_types is None and "layer_norm_eps" not in config.to_dict()


def test_electra_has_a_map_if_embeddings_are_narrower(tmp_path):
    assert read("electra", tmp_path).mapped and not read("electra", tmp_path, embedding_size=16).mapped


REFUSED = [
    ("xlm-roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute', got"),
    ("xlm-roberta", {"embedding_size": 8}, "embedding_size may differ from hidden_size in albert only, got 8"),
    ("xlm-roberta", {"is_decoder": True}, "is_decoder must be False, got True: not supported"),
    ("electra", {"hidden_act": "swish"}, "hidden_act must be one of gelu"),
    ("electra", {"embedding_size": 0}, "embedding_size must be a whole number from 1"),
    ("distilbert", {"dim": "left out"}, "missing key dim"),
    ("distilbert", {"dim": 18}, "dim must be a multiple of n_heads, got 18 and 4"),
    ("distilbert", {"activation": "tanh"}, "activation must be one of gelu, .*, got 'tanh'"),
    ("distilbert", {"dropout": 2.0}, "dropout must be a number from 0 to 1, got 2.0"),
    ("distilbert", {"hidden_size": 8}, "hidden_size must be 16, got 8: not supported"),
    ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets must be 32, got 16"),
    ("mpnet", {"pad_token_id": 0}, "pad_token_id must be 1, got 0: not supported"),
]


@pytest.mark.parametrize("kind, change, message", REFUSED, ids=str)
def test_a_config_that_is_not_supported_is_refused_in_one_line(kind, change, message, tmp_path):
    with pytest.raises(ValueError, match=message) as info:
        read(kind, tmp_path, **change)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_written_under_the_names_of_hugging_face(kind, head, tmp_path):
    model = load_backbone(GOLDEN / kind)
    prefix = {"xlm-roberta": "roberta."}.get(kind, f"{kind}.")
    save_backbone(model if head else model.without_heads(), tmp_path / "ours")
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / kind, tmp_path / "ours"))
    if not head:
        theirs = {name.removeprefix(prefix): t for name, t in theirs.items() if name.startswith(prefix)}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], t) for name, t in theirs.items())


OTHER_HEADS = {
    "xlm-roberta": ("classifier.dense.weight", "classifier.out_proj.bias"),
    "electra": ("classifier.dense.weight", "classifier.out_proj.bias"),
    "distilbert": ("pre_classifier.weight", "classifier.bias"),
    "mpnet": ("classifier.dense.weight", "classifier.out_proj.bias"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_a_classifier_is_left_out(kind, tmp_path):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / kind)
    save_backbone(load_backbone(folder).without_heads(), tmp_path / "bare")
    file = load_file(tmp_path / "bare" / "model.safetensors")
    prefix = {"xlm-roberta": "roberta."}.get(kind, f"{kind}.")
    named = {prefix + name: tensor for name, tensor in file.items()}
    save_file(named | {name: torch.ones(2) for name in OTHER_HEADS[kind]}, folder / "model.safetensors")
    model = load_backbone(folder)
    assert sorted(model.left_out) == sorted(OTHER_HEADS[kind]) and not model.has_lm_head


def test_the_head_of_electras_discriminator_is_passed_over(tmp_path):
    folder = shutil.copytree(GOLDEN / "electra", tmp_path / "electra")
    file = load_file(folder / "model.safetensors")
    file = {name: tensor for name, tensor in file.items() if not name.startswith("generator_")}
    save_file(file | {"discriminator_predictions.dense.weight": torch.ones(2)}, folder / "model.safetensors")
    model = load_backbone(folder)
    assert not model.has_lm_head and model.left_out == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_not_tied_is_left_out_whole(kind, tmp_path):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / kind)
    file, whole = load_file(folder / "model.safetensors"), load_backbone(folder)
    (copy,) = (name for name in whole.tied(whole.config) if name.endswith("weight"))
    width = whole.embeddings.word.weight.shape[1]
    save_file(file | {copy: torch.ones(64, width)}, folder / "model.safetensors")
    model = load_backbone(folder)
    assert model.untied_head and not model.has_lm_head
    head = {name for name in file if not name.startswith((f"{kind}.", "roberta."))}
    assert {*model.left_out} == head | {copy}


def test_mpnets_layers_are_not_split_because_their_halves_would_read_no_biases():
    with pytest.raises(ValueError, match="expected a backbone of post-norm layers, as BERT, .* found a mpnet"):
        load_backbone(GOLDEN / "mpnet").split_layer(0)


# ---- Exits, adapters and ONNX ----


def drawn_inputs(kind, lengths=(12, 7, 1, 12, 9)):
    draw, pad = np.random.default_rng(3), load_backbone(GOLDEN / kind).config.pad_token_id
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask == 1, draw.integers(5, 60, mask.shape), pad)
    return Inputs(ids, mask, np.zeros_like(mask), (("",),) * len(lengths))


def random_exits(kind):
    backbone = load_backbone(GOLDEN / kind).without_heads()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = RowExits(backbone, EXITS, 3).eval()
        for head in model.heads:
            head.dense.weight.normal_(std=0.3), head.out.weight.normal_(std=0.5)
    return model


def engines(model, segments, folder):
    """The graph and the segments of a model."""
    manifest = write_graphs(model, segments, Never(), folder, segments=True)
    return [engine(folder, manifest, threads=1) for engine in (OrtModel, OrtSegments)]


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_equals_torch(kind, tmp_path):
    model = random_exits(kind)
    for engine in engines(model, model.segments(), tmp_path):
        for lengths in ((12, 7, 1, 12, 9), (1,), (30, 29), (5, 5)):
            inputs = drawn_inputs(kind, lengths)
            expected, logits = (read_every_exit(segments, inputs)[0] for segments in (model.segments(), engine))
            np.testing.assert_allclose(logits, expected, rtol=0, atol=ENGINES)


@pytest.mark.parametrize(
    "kind, precision",
    [("xlm-roberta", "int8"), ("electra", "float16"), ("distilbert", "int8"), ("mpnet", "float16")],
)
def test_other_precisions_are_near(kind, precision, tmp_path):
    model, inputs = random_exits(kind), drawn_inputs(kind)
    expected = read_every_exit(model.segments(), inputs)[0]
    manifest = write_graphs(model, model.segments(), Never(), tmp_path, precision)
    logits = read_every_exit(OrtModel(tmp_path, manifest, threads=1), inputs)[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol={"float16": 0.02, "int8": 0.2}[precision])


def lora_model(kind, targets):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LoRAExits(load_backbone(GOLDEN / kind).without_heads(), EXITS, 3, rank=2, targets=targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


TARGETS = [("query", "value"), ("key", "attention_output", "up", "down")]


@pytest.mark.parametrize("kind, targets", [(kind, TARGETS[n % 2]) for n, kind in enumerate(KINDS)], ids=str)
def test_every_schedule_gives_every_exit_what_it_has_alone(kind, targets):
    model, inputs = lora_model(kind, targets), drawn_inputs(kind)
    expected = torch.stack(model(*tensors(inputs)), 1).numpy()
    for schedule in all_schedules(3):
        logits, *_ = read_every_exit(model.segments(schedule), inputs)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    for k in range(3):
        np.testing.assert_allclose(model.merged(k)(*tensors(inputs))[0], expected[:, k], rtol=0, atol=TOLERANCE)
    exits = [2, 0, 1, 2, 0]
    logits = model.ragged(exits, *tensors(inputs)).numpy()
    np.testing.assert_allclose(logits, expected[range(5), exits], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["electra", "mpnet"])
def test_onnx_equals_torch_with_adapters(kind, tmp_path):
    """In parallel; the two that are trained below restart."""
    model, inputs = lora_model(kind, TARGETS[1]), drawn_inputs(kind)
    segments = model.segments([[0, 1, 2]])
    expected, *_ = read_every_exit(segments, inputs)
    for engine in engines(model, segments, tmp_path):
        np.testing.assert_allclose(read_every_exit(engine, inputs)[0], expected, rtol=0, atol=ENGINES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_what_we_compute(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers peft")
    peft = pytest.importorskip("peft", reason="pip install transformers peft")
    model, inputs = lora_model(kind, ("query", "key", "value", "attention_output", "up", "down")), drawn_inputs(kind)
    ids, mask, _ = tensors(inputs)
    save_backbone(model.backbone, tmp_path / "base")
    save_adapters(model, tmp_path, str(tmp_path / "base"))
    for k, logits in enumerate(model(*tensors(inputs))):
        base = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / f"exit_{EXITS[k]}")).eval()
        hidden = adapted(ids, attention_mask=mask, output_hidden_states=True).hidden_states[EXITS[k]]
        exit_logits = model.heads[k](hidden, mask.bool()[:, None, None, :])
        torch.testing.assert_close(exit_logits, logits, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "mpnet"])  # the least like BERT: its keys, its relative positions
def test_it_is_trained_exported_and_run_as_any_other(kind, checkpoint_folder, task_folder, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    save_backbone(load_backbone(GOLDEN / kind).without_heads(), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    with torch.enable_grad():
        trained = mini_ee.train("lora-exits", folder, task_folder, tmp_path / "run", epochs=1, exits=(1, 3))
    texts = ["the film was good", "a very very dull song"]
    inputs, loaded = trained.encode(texts).batch(slice(None)), load_run(tmp_path / "run")
    expected, logits = (read_every_exit(opened.segments(), inputs)[0] for opened in (trained, loaded))
    assert np.array_equal(logits, expected)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert verified["max_logit_difference"] < ENGINES and verified["exit_agreement"] == 1
    answers = Runtime(tmp_path / "out", threads=1).run(texts)
    classified = [(answer.label, answer.layers) for answer in loaded.classify(texts)]
    assert [(answer.label, answer.exit) for answer in answers] == classified
