"""A folder of a PEFT adapter is read as the model that peft's merge_and_unload gives, or refused by name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_ee.lab.backbones.adapter import model_folder, tokenizer_folder
from mini_ee.lab.backbones.fine_tuned import label_names
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone, read_config
from mini_ee.lab.errors import WrongArguments

GOLDEN = Path(__file__).parents[2] / "golden"
QUERY = "base_model.model.bert.encoder.layer.1.attention.self.query"
TOLERANCE = 1e-5


def adapter(tmp_path, change=lambda tensors: None, base="base", **keys):
    """A LoRA of rank 2 on one query map of the golden classifier, and a classifier of 5 labels of its own."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copytree(GOLDEN / "classifiers" / "bert", tmp_path / "base", dirs_exist_ok=True)
    width = read_config(tmp_path / "base" / "config.json").hidden_size
    torch.manual_seed(0)
    tensors = {f"{QUERY}.lora_A.weight": torch.randn(2, width), f"{QUERY}.lora_B.weight": torch.randn(width, 2)}
    tensors |= {
        "base_model.model.classifier.weight": torch.randn(5, width),
        "base_model.model.classifier.bias": torch.zeros(5),
    }
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 6, "target_modules": ["query"]}
    config |= {"base_model_name_or_path": str(tmp_path / base) if base == "base" else base, "lora_dropout": 0.1}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["classifier"]} | keys))
    return folder


def query_of(backbone):
    return backbone.state_dict()["layers.1.qkv.weight"][: backbone.config.hidden_size]


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"r": 8, "rank_pattern": {"layer.1.attention.self.query": 2}}, 3.0),
        ({"alpha_pattern": {".*query": 1}}, 0.5),
        ({"target_modules": "all-linear"}, 3.0),
        ({"target_modules": r".*\.self\.query", "layers_to_transform": [0]}, 3.0),
        ({"layers_to_transform": [1], "layers_pattern": "layer"}, 3.0),
    ],
)
def test_the_factors_are_added_with_their_scale(tmp_path, keys, scale):
    folder = adapter(tmp_path, **keys)
    tensors = load_file(folder / "adapter_model.safetensors")
    adapted, base = load_backbone(folder), load_backbone(tmp_path / "base")
    delta = tensors[f"{QUERY}.lora_B.weight"] @ tensors[f"{QUERY}.lora_A.weight"] * scale
    torch.testing.assert_close(query_of(adapted), query_of(base) + delta)
    assert label_names(folder) == tuple(f"LABEL_{number}" for number in range(5))
    torch.testing.assert_close(
        adapted.classification_head.weights["out.weight"], tensors["base_model.model.classifier.weight"]
    )


def test_base_and_adapter_have_one_checksum_and_a_tokenizer(tmp_path):
    folder = adapter(tmp_path, base="../base")
    before = backbone_sha256(folder)
    assert model_folder(folder) == folder / "../base" and tokenizer_folder(folder) == folder / "../base"
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(folder) == folder and backbone_sha256(folder) == before
    for path, key in (
        (folder / "adapter_config.json", "lora_dropout"),
        (tmp_path / "base" / "config.json", "use_cache"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: 0.5}))
        assert backbone_sha256(folder) != before
        before = backbone_sha256(folder)


def renamed(old, new):
    def change(tensors):
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def test_a_folder_with_a_whole_model_is_its_own_base_and_a_config_alone_is_none(tmp_path):
    folder = adapter(tmp_path)
    expected = query_of(load_backbone(folder))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "base" / name, folder)
        assert model_folder(folder) == (tmp_path / "base" if name == "config.json" else folder)
        torch.testing.assert_close(query_of(load_backbone(folder)), expected)


REFUSED = [
    ({"peft_type": "IA3"}, None, "adapter_config.json: expected a plain LoRA, found peft_type 'IA3'; merge it: python"),
    ({"peft_type": "PREFIX_TUNING"}, None, "peft_type PREFIX_TUNING adds tokens, which no weights can contain"),
    ({"use_dora": True}, None, "found use_dora True; merge it"),
    ({"layer_replication": [[0, 2]]}, None, "found layer_replication"),
    ({"a_key_of_tomorrow": 1}, None, "found a_key_of_tomorrow 1"),
    ({"init_lora_weights": "pissa"}, None, "found init_lora_weights 'pissa'"),
    ({"base_model_name_or_path": "google/bert"}, None, "must be a folder on this machine, found 'google/bert'; this"),
    ({"base_model_name_or_path": None}, None, "must be a folder on this machine, found None"),
    ({"r": 4}, None, "query must have rank 4 as in adapter_config.json, found 2 and 2"),
    ({"r": "2"}, None, "r must be a number above 0, found '2'"),
    ({"target_modules": ["key"]}, None, "has factors of .*query, which adapter_config.json does not name"),
    ({"exclude_modules": ["query"]}, None, "has factors of .*query, which"),
    ({"layers_to_transform": [0]}, None, "has factors of .*query, which"),
    ({}, lambda t: t.pop(f"{QUERY}.lora_A.weight"), "must have the factors A and B, found B: not a LoRA"),
    ({}, lambda t: t.update({f"{QUERY}.lora_magnitude_vector": torch.ones(2)}), "found A, B, magnitude_vector"),
    ({}, renamed("layer.1", "layer.9"), "expected a base model with encoder.layer.9.* of shape .*, found none"),
]


@pytest.mark.parametrize(("keys", "change", "message"), REFUSED)
def test_what_is_no_plain_lora_is_refused_in_one_line(tmp_path, keys, change, message):
    folder = adapter(tmp_path, change or (lambda tensors: None), **keys)
    with pytest.raises((WrongArguments, ValueError), match=message) as info:
        load_backbone(folder)
    assert "\n" not in str(info.value) and "adapter" in str(info.value)


def test_a_folder_of_weights_as_pickled_by_torch_gets_the_line_that_merges(tmp_path):
    folder = adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(WrongArguments, match="adapter_model.safetensors: no such file; merge the adapter with peft"):
        load_backbone(folder)


# ---- peft itself ----
BERT = {"target_modules": ["query", "value"]}
LLAMA = {"target_modules": ["q_proj", "v_proj"]}
ORACLE = {
    "bert": ("classifiers/bert", "SEQ_CLS", BERT),
    "bert rslora": ("classifiers/bert", "SEQ_CLS", BERT | {"use_rslora": True, "lora_alpha": 3}),
    "bert patterns": (
        "classifiers/bert",
        "SEQ_CLS",
        BERT | {"rank_pattern": {"layer.0.attention.self.query": 2}, "alpha_pattern": {"value": 1}},
    ),
    "bert biases": ("classifiers/bert", "SEQ_CLS", BERT | {"bias": "all"}),
    "bert biases of its maps": ("classifiers/bert", "SEQ_CLS", BERT | {"bias": "lora_only"}),
    "bert bias factors": ("classifiers/bert", "SEQ_CLS", BERT | {"lora_bias": True}),
    "bert embeddings": ("classifiers/bert", "SEQ_CLS", {"target_modules": ["word_embeddings", "dense"]}),
    "bert all maps": ("classifiers/bert", "SEQ_CLS", {"target_modules": "all-linear", "modules_to_save": ["pooler"]}),
    "bert one layer": ("classifiers/bert", "SEQ_CLS", BERT | {"layers_to_transform": [1]}),
    "bert without a task": ("classifiers/bert", None, BERT),
    "bare bert": ("bert", "FEATURE_EXTRACTION", {"target_modules": r".*\.(query|key)"}),
    "deberta": ("classifiers/deberta", "SEQ_CLS", {"target_modules": ["in_proj", "dense"]}),
    "roberta": ("classifiers/roberta", "SEQ_CLS", BERT | {"modules_to_save": ["classifier"]}),
    "distilbert": (
        "classifiers/distilbert",
        "SEQ_CLS",
        {"target_modules": ["q_lin"], "modules_to_save": ["pre_classifier"]},
    ),
    "modernbert": ("classifiers/modernbert", "SEQ_CLS", {"target_modules": ["Wqkv", "Wi", "Wo"]}),
    "llama": ("classifiers/llama", "SEQ_CLS", LLAMA),
    "llama of text": ("llama", "CAUSAL_LM", LLAMA | {"target_modules": ["q_proj", "embed_tokens"]}),
    "phi3": ("phi3", "CAUSAL_LM", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "t5": ("t5", "SEQ_2_SEQ_LM", {"target_modules": ["q", "v"]}),
}
AUTO = {
    "SEQ_CLS": "ForSequenceClassification",
    None: "ForSequenceClassification",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
    "FEATURE_EXTRACTION": "",
}


@pytest.mark.filterwarnings("ignore")  # of peft and transformers, about each other's releases
@pytest.mark.parametrize("case", ORACLE)
def test_the_model_is_that_of_merge_and_unload(tmp_path, case):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers", minversion="5")
    place, task, options = ORACLE[case]
    base = shutil.copytree(GOLDEN / place, tmp_path / "base")
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModel{AUTO[task]}").from_pretrained(base, dtype=torch.float32)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=4, **options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    made.save_pretrained(tmp_path / "adapter")
    merged = made.merge_and_unload()
    merged.config.tie_word_embeddings = model.config.tie_word_embeddings
    merged.save_pretrained(tmp_path / "merged")
    ours, theirs = load_backbone(tmp_path / "adapter"), load_backbone(tmp_path / "merged")
    assert ours.config == theirs.config and ours.state_dict().keys() >= theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, atol=TOLERANCE, rtol=TOLERANCE)
    assert (ours.classification_head is None) == (theirs.classification_head is None)
    if ours.classification_head is not None:
        for name, value in ours.classification_head.weights.items():
            torch.testing.assert_close(value, theirs.classification_head.weights[name], atol=TOLERANCE, rtol=TOLERANCE)
        assert label_names(tmp_path / "adapter") == label_names(tmp_path / "merged")


@pytest.mark.filterwarnings("ignore")
def test_the_line_that_merges_can_be_run(tmp_path):
    """For an adapter that is not read: its line is run as it stands, without the tokenizer, which is not there."""
    pytest.importorskip("peft")
    folder, weights = adapter(tmp_path), tmp_path / "base" / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "classifier" not in k}, weights, {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "olora"}))
    with pytest.raises(WrongArguments) as info:
        load_backbone(folder)
    line = re.search(r'python -c "(.*)"', str(info.value))[1]
    exec(line.split("; AutoTokenizer.from")[0])
    assert label_names(tmp_path / "adapter-merged") == tuple(f"LABEL_{number}" for number in range(5))
