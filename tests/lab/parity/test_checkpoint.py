"""A backbone's folder: all layouts of names are read, what does not fit is told in one line."""

import json
import os
import random
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mini_ee.lab.backbones.bert as bert
import mini_ee.lab.backbones.hub as checkpoint
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone, read_config, save_backbone

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("bert", "roberta", "albert", "elasticbert", "xlm-roberta", "electra", "distilbert", "mpnet", "modernbert")
WORD = "bert.embeddings.word_embeddings.weight"
POOLER = "bert.pooler.dense.weight"
SELF = "bert.encoder.layer.1.attention.self"


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden BERT, to be damaged."""
    return shutil.copytree(GOLDEN / "bert", tmp_path / "model")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rewrite(folder, change):
    """The folder's tensors, changed: `change` alters the dictionary, or returns another."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def loads_as_before(folder, kind="bert"):
    return same(load_backbone(folder).state_dict(), golden_weights(kind))


@cache
def golden_weights(kind):
    return load_backbone(GOLDEN / kind).state_dict()


@cache
def golden_config(kind):
    return read_config(GOLDEN / kind / "config.json")


def refused(folder, kind, *parts):
    """Loading raises `kind` with a single line that names the folder and holds every part."""
    with pytest.raises(kind) as info:
        load_backbone(folder)
    message = str(info.value)
    assert type(info.value) is kind and "\n" not in message and str(folder) in message
    for part in parts:
        assert part in message
    return True


# ---- What is read ----


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_come_from_the_file_are_not_initialised_first(kind, monkeypatch):
    """Without memory that is slow: torch imports a second of Python for it."""
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, **settings: pytest.fail("drawn"))
    load_backbone(GOLDEN / kind)


def test_what_is_made_without_memory_may_be_initialised_as_it_is_made():
    with checkpoint.without_memory():
        weight = torch.nn.Parameter(torch.nn.init.normal_(torch.empty(3, 2)))
    assert weight.is_meta and weight.shape == (3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_names_may_lack_the_prefix(tmp_path, kind):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "model")
    rewrite(folder, lambda tensors: {name.removeprefix(f"{kind}."): tensor for name, tensor in tensors.items()})
    assert loads_as_before(folder, kind)


def test_norms_may_say_gamma_and_beta(folder):
    def old(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    rewrite(folder, lambda tensors: {old(name): tensor for name, tensor in tensors.items()})
    assert any(name.endswith("gamma") for name in load_file(folder / "model.safetensors")) and loads_as_before(folder)


def shard(folder, pieces=3):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{pieces:05}.safetensors" for i in range(pieces)]
    weight_map = {name: names[i % pieces] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_with_an_index_are_read_as_one(folder):
    assert len(set(shard(folder).values())) == 3
    assert loads_as_before(folder)


def test_tied_weights_may_be_stored_again(folder):
    rewrite(
        folder,
        lambda tensors: (
            tensors
            | {
                "cls.predictions.decoder.weight": tensors[WORD].clone(),
                "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
            }
        ),
    )
    assert loads_as_before(folder)


def test_a_tied_tensor_may_be_stored_under_its_other_name_only(folder):
    def rename(tensors):
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")

    rewrite(folder, rename)
    assert loads_as_before(folder)


def test_position_ids_and_the_next_sentence_head_are_passed_over(folder):
    rewrite(folder, lambda tensors: tensors | {"bert.embeddings.position_ids": torch.arange(16)[None]})
    assert "cls.seq_relationship.weight" in load_file(folder / "model.safetensors")
    assert loads_as_before(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_become_float32(folder, dtype):
    rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    wanted = load_file(GOLDEN / "bert" / "model.safetensors")[WORD].to(dtype).float()
    assert torch.equal(load_backbone(folder).embeddings.word.weight, wanted)


def test_a_saved_checkpoint_says_its_precision(folder, tmp_path):
    save_backbone(load_backbone(folder).bfloat16(), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_file(tmp_path / "saved" / "model.safetensors")[WORD].dtype == torch.bfloat16


def test_pooler_and_head_are_there_if_the_file_has_them(folder):
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(("cls", "bert.pooler"))})
    model = load_backbone(folder)
    assert model.lm_head is None and not model.poolers and not model.training


def test_loading_draws_no_random_numbers_and_keeps_no_hold_of_the_file(folder):
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    model = load_backbone(folder)
    assert torch.equal(torch.rand(1), wanted)
    before = model.embeddings.word.weight.clone()
    with open(folder / "model.safetensors", "r+b") as file:  # in place: a mapped file would change under the model
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(model.embeddings.word.weight, before) and model.embeddings.word.weight.requires_grad


# ---- What is taken, though more is there than a backbone ----


@pytest.fixture(params=("bert", "roberta", "llama"))
def fine_tuned(request, tmp_path):
    """A folder as transformers writes a fine-tuned classifier: the backbone under its prefix, a head of its own."""
    kind = request.param
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "model")
    prefix, head = ("model.", "score") if kind == "llama" else (f"{kind}.", "classifier")

    def classifier(tensors):
        remaining = {name: t for name, t in tensors.items() if name.startswith(prefix) and "pooler" not in name}
        return remaining | {f"{head}.weight": torch.ones(2, 24), f"{head}.bias": torch.ones(2)}

    rewrite(folder, classifier)
    config_with(architectures=[f"{kind.title()}ForSequenceClassification"])(folder)
    return kind, folder, (f"{head}.bias", f"{head}.weight")


def test_of_a_fine_tuned_classifier_the_backbone_is_taken_and_the_head_is_named(fine_tuned):
    kind, folder, head = fine_tuned
    model, whole = load_backbone(folder), load_backbone(GOLDEN / kind)
    assert model.left_out == head and whole.left_out == ()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(ids), whole(ids)) and not model.has_lm_head
        with pytest.raises(
            ValueError, match=rf"no (masked-)?LM head, the file's was left out \({head[0]}, {head[1]}\)"
        ):
            model.lm_logits(model(ids))


def test_tensors_of_no_module_are_named_and_buffers_ignored(folder):
    more = {"loss_fct.weight": torch.ones(2), "my_head.weight": torch.ones(2, 24)}
    buffers = {f"bert.embeddings.{name}": torch.zeros(1, 8).long() for name in ("position_ids", "token_type_ids")}
    rewrite(folder, lambda tensors: tensors | more | buffers)
    assert loads_as_before(folder) and load_backbone(folder).foreign == ("loss_fct.weight", "my_head.weight")


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("bert", "_orig_mod."),
        ("bert", "module._orig_mod."),
        ("bert", "base_model.model."),
        ("bert", "model."),
        ("llama", "module."),
        ("llama", "model."),
        ("t5", "_fsdp_wrapped_module."),
        ("modernbert", "model."),
    ],
)
def test_the_prefix_of_a_wrapper_is_stripped(tmp_path, kind, wrapper):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / kind)
    rewrite(
        folder, lambda tensors: {wrapper + name: tensor for name, tensor in tensors.items()} | {"loss": torch.ones(1)}
    )
    assert loads_as_before(folder, kind) and load_backbone(folder).foreign == ("loss",)


def test_a_part_that_was_compiled_alone_has_its_plain_names(folder):
    rewrite(folder, lambda t: {name.replace("encoder.", "encoder._orig_mod."): tensor for name, tensor in t.items()})
    assert loads_as_before(folder)


def test_model_safetensors_counts_before_an_index_as_in_transformers(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "other.safetensors"}}')
    assert loads_as_before(folder)


UNTIED = {
    "weight": (lambda t: t | {"cls.predictions.decoder.weight": t[WORD] + 1}, {}),
    "bias": (lambda t: t | {"cls.predictions.decoder.bias": torch.ones(64)}, {}),
    "as the config says": (
        lambda t: t | {"cls.predictions.decoder.weight": t[WORD] + 1},
        {"tie_word_embeddings": False},
    ),
    "as the config says, and lost": (lambda t: None, {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("case", UNTIED)
def test_a_masked_lm_head_that_is_not_tied_is_left_out_and_the_encoder_is_taken(folder, case):
    change, config = UNTIED[case]
    rewrite(folder, change)
    config_with(**config)(folder)
    model, whole = load_backbone(folder), load_backbone(GOLDEN / "bert")
    assert "cls.predictions.bias" in model.left_out and not model.has_lm_head and model.poolers
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(ids), whole(ids))
    with pytest.raises(ValueError, match=r"no masked-LM head, the file's was left out \(cls\.predictions"):
        model.lm_logits(whole(ids))


def test_a_config_that_unties_what_is_equal_has_its_head(folder):
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": tensors[WORD].clone()})
    config_with(tie_word_embeddings=False)(folder)
    assert loads_as_before(folder)


# ---- What is refused: tensors ----

TENSOR_FAULTS = {
    "missing": (lambda t: t.pop(POOLER.replace("weight", "bias")), ["1 missing", "pooler.dense.bias"]),
    "a layer missing": (
        lambda t: [t.pop(n) for n in list(t) if "layer.1." in n] and None,
        ["16 missing", "encoder.layer.1."],
    ),
    "unexpected": (lambda t: t | {"bert.extra.weight": torch.ones(1)}, ["1 unexpected", "extra.weight"]),
    "a layer more": (
        lambda t: t | {n.replace("layer.2.", "layer.3."): x.clone() for n, x in t.items() if "layer.2." in n},
        ["16 unexpected", "encoder.layer.3."],
    ),
    "both": (lambda t: t | {"more": t.pop(WORD)}, ["1 missing", "1 unexpected (more)"]),
    "another shape": (lambda t: t | {POOLER: torch.ones(24, 23)}, ["pooler.dense.weight", "(24, 24)", "(24, 23)"]),
    "a key of another shape": (
        lambda t: t | {f"{SELF}.key.weight": torch.ones(23, 24), f"{SELF}.query.weight": torch.ones(25, 24)},
        ["attention.self.", "(24, 24)"],
    ),
    "integers": (lambda t: t | {POOLER: torch.ones(24, 24, dtype=torch.int32)}, ["floating-point", "int32"]),
    "nan": (lambda t: t | {POOLER: torch.full((24, 24), float("nan"))}, [POOLER, "finite"]),
    "infinity": (lambda t: t | {POOLER: torch.full((24, 24), float("-inf"))}, [POOLER, "finite"]),
    "too large": (lambda t: t | {POOLER: torch.full((24, 24), 1e300, dtype=torch.float64)}, [POOLER, "finite"]),
    "a weight that is too large": (
        lambda t: t | {POOLER: torch.full((24, 24), 3e38)},
        ["pooler.dense.weight holds numbers above 1e+18", "fetch the weights again"],
    ),
    "part of a head": (
        lambda t: t.pop("cls.predictions.transform.dense.bias"),
        ["1 missing (cls.predictions.transform.dense.bias)"],
    ),
    "the same tensor twice": (lambda t: t | {"pooler.dense.weight": t[POOLER] + 1}, ["pooler.dense.weight", "twice"]),
    "another model's": (lambda t: {f"roberta.{n}": x for n, x in t.items()}, ["missing", "unexpected"]),
    "none": (lambda t: {"bert.embeddings.position_ids": torch.arange(3)}, ["missing"]),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_are_told(folder, fault):
    change, parts = TENSOR_FAULTS[fault]
    rewrite(folder, lambda tensors: result if isinstance(result := change(tensors), dict) else None)
    assert refused(folder, ValueError, *parts)


# ---- What is refused: keys of config.json ----

HARMLESS = {  # as real folders have them
    **{"_name_or_path": "x/y", "_num_labels": 3, "transformers_version": "4.30.2", "finetuning_task": "sst2"},
    **{"gradient_checkpointing": True, "use_cache": True, "task_specific_params": {"a": 1}, "torch_dtype": "float16"},
    **{
        "label2id": {"a": 0},
        "classifier_dropout": 0.3,
        "summary_type": "last",
        "output_past": True,
        "directionality": "bidi",
    },
    **{"pooler_fc_size": 768, "sentence_transformers": {"version": "5.1"}, "unsloth_fixed": True, "train_loss": 0.1},
    **{"language": "de", "chunk_size_feed_forward": 3, "attn_implementation": "sdpa", "max_length": 20, "top_k": 5},
    **{"quantization_config": None, "pruned_heads": {}, "tie_encoder_decoder": False, "a_key_that_is_off": 0},
}
EFFECTIVE = {
    **{
        "quantization_config": {"bits": 4},
        "pruned_heads": {"0": [1]},
        "per_layer_config": {"0": {"hidden_act": "relu"}},
    },
    **{"auto_map": {"AutoModel": "modeling_mine.Mine"}, "logit_scale": 0.5, "a_key_of_tomorrow": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_nothing_is_passed_over_and_what_may_is_refused_by_its_key(tmp_path, kind):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "model")
    before = read_config(folder / "config.json")
    config_with(**HARMLESS)(folder)
    assert read_config(folder / "config.json") == before
    for key, value in EFFECTIVE.items():
        config_with(**{key: value})(folder)
        if key != "auto_map" or not kind.startswith("phi"):  # the files of Phi's authors name code of the same model
            assert refused(folder, ValueError, "config.json", f"{key} is not known for a", "remove it if transformers")
        config_with(**{key: "absent"})(folder)
    assert read_config(folder / "config.json") == before


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_writes_is_known(tmp_path, kind):
    transformers = pytest.importorskip("transformers", minversion="5")
    model_type = read_config(GOLDEN / kind / "config.json").model_type
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("not a model of transformers")
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "model")
    written = transformers.AutoConfig.from_pretrained(folder).to_dict()
    (folder / "config.json").write_text(json.dumps(written))
    assert (
        read_config(folder / "config.json").num_hidden_layers
        == read_config(GOLDEN / kind / "config.json").num_hidden_layers
    )


# ---- What is refused: files ----


def remove(name):
    return lambda folder: (folder / name).unlink()


def device(name):
    """Reading it would never end."""
    return lambda folder: (remove(name)(folder), (folder / name).symlink_to("/dev/zero"))


def pipe(name):
    return lambda folder: (remove(name)(folder), os.mkfifo(folder / name))


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def config_text(content):
    return lambda folder: (folder / "config.json").write_bytes(content)


def config_with(**change):
    def write(folder):
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))

    return write


def lost_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()


def index_with(change):
    def write(folder):
        weight_map = shard(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(change(weight_map)))

    return write


def cut(name, keep):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


INDEX = "model.safetensors.index.json"
FILE_FAULTS = {
    "no folder": (shutil.rmtree, FileNotFoundError, ["no such folder", "config.json"]),
    "no config": (remove("config.json"), FileNotFoundError, ["config.json", "no such file"]),
    "no weights": (remove("model.safetensors"), FileNotFoundError, ["model.safetensors: no such file"]),
    "pickled weights": (only_pickled, FileNotFoundError, ["model.safetensors", "only safetensors are read"]),
    "no key": (config_with(vocab_size="absent"), ValueError, ["config.json", "missing key vocab_size"]),
    "no model_type": (config_with(model_type="absent"), ValueError, ["config.json", "model_type", "found None"]),
    "another model_type": (config_with(model_type="gpt2"), ValueError, ["model_type must be one of bert, ", "'gpt2'"]),
    "a list for model_type": (
        config_with(model_type=["bert"]),
        ValueError,
        ["config.json", "model_type must be one of"],
    ),
    "a wrong value": (config_with(hidden_size=-1), ValueError, ["config.json", "hidden_size"]),
    "a decoder": (config_with(is_decoder=True), ValueError, ["config.json", "is_decoder"]),
    "10^60 layers": (
        config_with(num_hidden_layers=10**60),
        ValueError,
        ["config.json", "num_hidden_layers must be a whole number from 1 to 1000, got an integer of about 10^60"],
    ),
    "as many words as 64 bits count": (
        config_with(vocab_size=2**63 - 1),
        ValueError,
        ["config.json", "vocab_size must be a whole number from 1 to 16777216"],
    ),
    "a width of 10^60": (config_with(intermediate_size=10**60), ValueError, ["config.json", "intermediate_size"]),
    "a rate of 10^400": (config_with(layer_norm_eps=10**400), ValueError, ["config.json", "layer_norm_eps"]),
    "an activation of 10,000 letters": (config_with(hidden_act="a" * 10_000), ValueError, ["hidden_act", "aaa..."]),
    "a device as config": (device("config.json"), ValueError, ["config.json", "found a device"]),
    "a device as weights": (device("model.safetensors"), ValueError, ["model.safetensors", "found a device"]),
    "a pipe as weights": (pipe("model.safetensors"), ValueError, ["model.safetensors", "a pipe"]),
    "other sizes": (
        config_with(intermediate_size=41),
        ValueError,
        ["encoder.layer.0.intermediate.dense.weight", "(41, 24)", "(40, 24)"],
    ),
    "not JSON": (config_text(b"{'a': 1}\n\n"), ValueError, ["config.json", "expected a JSON object"]),
    "an empty config": (config_text(b""), ValueError, ["config.json", "expected a JSON object"]),
    "no object": (config_text(b"[1, 2]"), ValueError, ["config.json", "expected a JSON object, found list"]),
    "not UTF-8": (config_text(b'{"a": "\xff"}'), ValueError, ["config.json", "expected a JSON object"]),
    "too deep": (config_text(b"[" * 100_000), ValueError, ["config.json", "expected a JSON object"]),
    "a folder as config": (
        lambda f: (remove("config.json")(f), (f / "config.json").mkdir()),
        ValueError,
        ["config.json"],
    ),
    "a folder as weights": (
        lambda f: (remove("model.safetensors")(f), (f / "model.safetensors").mkdir()),
        ValueError,
        ["model.safetensors"],
    ),
    "cut": (cut("model.safetensors", -100), ValueError, ["model.safetensors", "truncated or damaged"]),
    "cut in the header": (cut("model.safetensors", 100), ValueError, ["model.safetensors", "truncated or damaged"]),
    "empty": (cut("model.safetensors", 0), ValueError, ["model.safetensors", "truncated or damaged"]),
    "a lost shard": (lost_shard, FileNotFoundError, ["model-00002-of-00003.safetensors"]),
    "an index without a map": (index_with(lambda m: {"metadata": {}}), ValueError, [INDEX, "weight_map"]),
    "an index that names more": (
        index_with(lambda m: {"weight_map": m | {"more": m[WORD]}}),
        ValueError,
        [INDEX, "different tensors (more)"],
    ),
    "an index that names fewer": (
        index_with(lambda m: {"weight_map": {k: v for k, v in m.items() if k != WORD}}),
        ValueError,
        [INDEX, WORD],
    ),
    "an index of numbers": (index_with(lambda m: {"weight_map": {k: 1 for k in m}}), ValueError, [INDEX, "weight_map"]),
    "an index that points outside": (
        index_with(lambda m: {"weight_map": m | {WORD: "../other.safetensors"}}),
        ValueError,
        [INDEX, "in this folder"],
    ),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_files_that_are_missing_or_damaged_are_told(folder, fault):
    change, kind, parts = FILE_FAULTS[fault]
    change(folder)
    assert refused(folder, kind, *parts)


def test_the_digest_of_a_folder_with_a_device_ends(folder):
    device("model.safetensors")(folder)
    with pytest.raises(ValueError, match="model.safetensors: expected a file, found a device"):
        backbone_sha256(folder)


def test_nothing_is_unpickled():
    unpickling = re.compile(r"\bpickle|\bimport (marshal|shelve|dill|joblib)|torch\.load\(|allow_pickle")
    modules = sorted(Path(checkpoint.__file__).parents[1].rglob("*.py"))
    printed = '"import joblib, json, sys; '  # a line for the user, about a SetFit head
    texts = {path.name: path.read_text().replace(printed, "") for path in modules}
    assert len(modules) > 10 and not [name for name, text in texts.items() if unpickling.search(text)]


NO_VALUES = (10**400, 2**63 - 1, [[]], 10**60, "x" * 10_000, {"a": {}})
NO_CONFIGS = [(kind, value) for kind in ("bert", "llama") for value in NO_VALUES]
OTHERS = ("deberta-v2", "modernbert", "distilbert", "electra", "mpnet", "phi")
NO_CONFIGS += [(kind, value) for kind in OTHERS for value in NO_VALUES[:3]]


@pytest.mark.parametrize("kind, value", NO_CONFIGS, ids=lambda parameter: str(parameter)[:9])
def test_a_value_that_no_config_has_is_one_short_line_or_changes_nothing(tmp_path, kind, value):
    folder, report = shutil.copytree(GOLDEN / kind, tmp_path / "model"), 0
    keys = json.loads((folder / "config.json").read_text()).keys()
    for key in sorted(keys | {"rope_scaling", "rope_theta", "pad_token_id", "eos_token_id", "head_dim"}):
        shutil.copy(GOLDEN / kind / "config.json", folder)
        config_with(**{key: value})(folder)
        try:
            if read_config(folder / "config.json") != golden_config(kind):
                assert loads_as_before(folder, kind)
        except ValueError as error:
            assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 400 + len(str(folder))
            report += 1
    assert report > 8


# ---- What is written ----


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    """(kind, folder): a golden backbone, saved by us."""
    save_backbone(load_backbone(GOLDEN / request.param), tmp_path / "saved")
    return request.param, tmp_path / "saved"


def test_a_saved_backbone_is_read_back_the_same_and_saved_again_with_the_same_bytes(saved, tmp_path):
    kind, folder = saved
    again = load_backbone(folder)
    assert loads_as_before(folder, kind) and again.config == load_backbone(GOLDEN / kind).config
    save_backbone(again, tmp_path / "again")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert backbone_sha256(folder) == backbone_sha256(tmp_path / "again") != backbone_sha256(GOLDEN / kind)


def without_pair_heads(tensors):
    return {name: tensor for name, tensor in tensors.items() if not re.match(r"cls\.seq_rel|sop_classifier", name)}


def test_saved_names_and_values_are_those_that_transformers_wrote(saved):
    kind, folder = saved
    theirs = load_file(GOLDEN / kind / "model.safetensors")
    assert same(
        load_file(folder / "model.safetensors"),
        without_pair_heads(theirs),
    )
    ours, golden = (json.loads((place / "config.json").read_text()) for place in (folder, GOLDEN / kind))
    assert {key: golden[key] for key in golden.keys() & ours.keys() - {"architectures"}} == {
        key: ours[key] for key in golden.keys() & ours.keys() - {"architectures"}
    }


def test_a_backbone_without_a_head_is_saved_without_prefix(tmp_path):
    with torch.random.fork_rng():
        model = bert.Bert(load_backbone(GOLDEN / "bert").config, lm_head=False)
    save_backbone(model, tmp_path / "saved")
    assert "pooler.dense.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    assert same(load_backbone(tmp_path / "saved").state_dict(), model.state_dict())


def flipped(content, position, bit):
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def test_a_bit_flipped_anywhere_in_a_saved_file_is_told_or_changes_nothing(tmp_path):
    folder, rng, report = tmp_path / "saved", random.Random(0), 0
    save_backbone(load_backbone(GOLDEN / "bert"), folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(8), *rng.sample(range(8, header), 200), *rng.sample(range(header, len(content)), 20)]
    for place in places:
        path.write_bytes(flipped(content, place, rng.randrange(8)))
        try:
            assert loads_as_before(folder)
        except (ValueError, FileNotFoundError) as error:
            assert "\n" not in str(error) and str(folder) in str(error)
            report += 1
        else:
            assert 8 <= place < header
    assert report > 0.9 * len(places)


def test_a_flipped_weight_is_told_by_its_checksum(saved):
    _, folder = saved
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(flipped(content, len(content) - 4, 0))
    assert refused(folder, ValueError, "model.safetensors: damaged", "checksum")


def test_the_checksum_of_a_config_that_transformers_changed_is_not_compared(saved):
    _, folder = saved
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | {"problem_type": "regression"}
    path.write_text(json.dumps(changed))
    assert refused(folder, ValueError, "config.json: damaged", "checksum")
    path.write_text(json.dumps(changed | {"transformers_version": "5.23.0"}))
    load_backbone(folder)


def test_an_existing_folder_is_not_written_over(folder):
    before = backbone_sha256(folder)
    with pytest.raises(FileExistsError, match="is there already"):
        save_backbone(load_backbone(folder), folder)
    assert backbone_sha256(folder) == before
