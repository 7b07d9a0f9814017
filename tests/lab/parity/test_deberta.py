"""DeBERTa against transformers, through what tests/make_golden.py wrote and on random configs, and against loops."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import SCHEDULES, all_schedules
from safetensors.torch import load_file, save_file

import mini_ee
import mini_ee.lab.backbones.deberta as deberta
from mini_ee.lab.backbones.deberta import Deberta
from mini_ee.lab.backbones.deberta_config import DebertaConfig, table_rows
from mini_ee.lab.backbones.hub import load_backbone, read_config, save_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.lora_exits_peft import load_adapters, save_adapters
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.train_run import say_left_out

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("deberta", "deberta-v2")
TOLERANCE = 1e-5  # absolute, and relative above one
"""Measured maximum against transformers on the golden files: states 1.1e-6, logits 5.3e-6; on random configs 6.7e-6."""
RANDOM_TOLERANCE = 1e-4
ENGINES = 2e-5
"""Logits of ONNX Runtime against torch's; measured maximum 5e-6."""
EXITS = (1, 2, 3)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_close(output, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def golden(kind):
    """The backbone, its inputs, and what transformers computed."""
    expected = read_tensors(GOLDEN / kind / "expected.safetensors")
    names = ("input_ids", "attention_mask", "token_type_ids")
    return load_backbone(GOLDEN / kind), tuple(expected.pop(name) for name in names), expected


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits_are_those_of_transformers(kind):
    model, inputs, expected = golden(kind)
    states, real = model.hidden_states(*inputs), inputs[1].bool()
    outputs = {f"hidden.{depth}": state for depth, state in enumerate(states)}
    outputs["lm_logits"] = model.lm_logits(states[-1])
    assert outputs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(outputs[name][real], tensor[real])


# ---- Random configs, all switches ----


def drawn_config(kind, seed):
    """Small, with every switch that changes what is computed."""
    draw = np.random.default_rng([seed, *kind.encode()])

    def one_of(*values):
        return values[draw.integers(len(values))]

    heads, width = one_of((1, 8), (2, 12), (4, 16), (3, 24))
    config = {
        "vocab_size": 40,
        "hidden_size": width,
        "num_hidden_layers": one_of(1, 2, 3),
        "num_attention_heads": heads,
        "intermediate_size": one_of(8, 20),
        "max_position_embeddings": one_of(12, 16, 64),
        "hidden_act": one_of("gelu", "gelu_new", "relu", "gelu_pytorch_tanh", "silu"),
        "layer_norm_eps": one_of(1e-7, 1e-5, 1e-3),
        "pad_token_id": one_of(0, 1),
        "type_vocab_size": one_of(0, 0, 1, 2),
        "position_biased_input": one_of(True, False),
        "relative_attention": one_of(True, True, True, False),
        "pos_att_type": one_of(["c2p", "p2c"], "p2c|c2p", "c2p|p2c", ["p2c"], "c2p", [], None),
        "max_relative_positions": one_of(-1, 5, 7, 20),
        "legacy": one_of(True, False),
    }
    if config["legacy"] and one_of(True, False, False):
        config["embedding_size"] = 10
    if kind == "deberta-v2":
        config |= {
            "position_buckets": one_of(-1, 2, 4, 6),
            "share_att_key": one_of(True, False),
            "norm_rel_ebd": one_of("none", "layer_norm"),
            "conv_kernel_size": one_of(0, 1, 3, 5),
            "conv_groups": one_of(1, 2) if width % 2 == 0 else 1,
            "conv_act": one_of("tanh", "gelu", "relu", "silu"),
        }
    return config


def theirs(kind, config, seed):
    """The model of transformers, every parameter drawn."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    name = {"deberta": "Deberta", "deberta-v2": "DebertaV2"}[kind]
    model = getattr(transformers, f"{name}ForMaskedLM")(getattr(transformers, f"{name}Config")(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3).add_("norm" in key.lower() and key.endswith("weight"))
        else:
            parameter.mul_(0.5 if "embeddings." in key else parameter[0].numel() ** -0.5)
    return model


def drawn_batch(config, seed):
    """Three rows of 12, 7 and 1 tokens; the second has its padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, config["vocab_size"], (3, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    mask[1] = mask[1].flip(0)
    types = torch.randint(0, max(1, config["type_vocab_size"]), ids.shape, generator=generator)
    return ids * mask, mask, types


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", KINDS)
def test_random_configs_are_equal_to_transformers_and_written_as_they_are_read(kind, seed, tmp_path):
    config = drawn_config(kind, seed)
    model = theirs(kind, config, seed)
    model.save_pretrained(tmp_path / "theirs")
    ids, mask, types = batch = drawn_batch(config, seed)
    output = model(ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
    ours, real = load_backbone(tmp_path / "theirs"), mask.bool()
    states = ours.hidden_states(*batch)
    for state, expected in zip(states, output.hidden_states, strict=True):
        assert_close(state[real], expected[real], RANDOM_TOLERANCE)
    assert_close(ours.lm_logits(states[-1])[real], output.logits[real], RANDOM_TOLERANCE)

    save_backbone(ours, tmp_path / "ours")
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_close(again.eval()(ids, attention_mask=mask, token_type_ids=types).logits[real], output.logits[real])


# ---- The equations ----


def attention_by_loops(file, layer, table, hidden, heads):
    """What each token reads, (T, D) in float64, from the tensors of Hugging Face's v1 file: three loops."""
    name = f"deberta.encoder.layer.{layer}.attention.self."
    get = {key.removeprefix(name): value.double().numpy() for key, value in file.items() if key.startswith(name)}
    tokens, width = hidden.shape
    d, span = width // heads, len(table) // 2
    keys, queries = table @ get["pos_proj.weight"].T, table @ get["pos_q_proj.weight"].T + get["pos_q_proj.bias"]
    read = np.zeros((tokens, width))
    for h in range(heads):
        of_head = slice(h * d, (h + 1) * d)
        rows = get["in_proj.weight"][3 * h * d : 3 * (h + 1) * d]
        q = hidden @ rows[:d].T + get["q_bias"][of_head]
        k, v = hidden @ rows[d : 2 * d].T, hidden @ rows[2 * d :].T + get["v_bias"][of_head]
        for i in range(tokens):
            scores = np.zeros(tokens)
            for j in range(tokens):
                row = min(max(i - j + span, 0), 2 * span - 1)
                scores[j] = (q[i] @ k[j] + q[i] @ keys[row, of_head] + k[j] @ queries[row, of_head]) / np.sqrt(3 * d)
            powers = np.exp(scores - scores.max())
            read[i, of_head] = powers / powers.sum() @ v
    return read


def test_v1_reads_by_the_equation_in_loops_in_float64(monkeypatch):
    model, (ids, *_), _ = golden("deberta")
    model, file, seen = model.double(), load_file(GOLDEN / "deberta" / "model.safetensors"), []
    table = file["deberta.encoder.rel_embeddings.weight"].double().numpy()
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(
        deberta.F, "scaled_dot_product_attention", lambda *x, **more: seen.append(right(*x, **more)) or seen[-1]
    )
    states = model.hidden_states(ids[:1])
    for layer in range(3):
        attended = seen[layer][0].transpose(0, 1).flatten(1).numpy()
        expected = attention_by_loops(file, layer, table, states[layer][0].numpy(), model.config.num_attention_heads)
        np.testing.assert_allclose(attended, expected, rtol=0, atol=1e-12)


def v2_attention_by_loops(file, hidden, table, config, layer):
    """What each token reads, (T, D) in float64, from Hugging Face's tensors, keys shared."""
    name = f"deberta.encoder.layer.{layer}.attention.self."
    get = {key.removeprefix(name): value.double().numpy() for key, value in file.items() if key.startswith(name)}

    def project(kind, x):
        return x @ get[f"{kind}_proj.weight"].T + get[f"{kind}_proj.bias"]

    tokens, heads = len(hidden), config.num_attention_heads
    read, d = np.zeros_like(hidden), config.head_width
    for h in range(heads):
        of_head = slice(h * d, (h + 1) * d)
        q, k, v = (project(kind, hidden)[:, of_head] for kind in ("query", "key", "value"))
        queries, keys = (project(kind, table)[:, of_head] for kind in ("query", "key"))
        for i in range(tokens):
            scores = np.zeros(tokens)
            for j in range(tokens):
                row = bucket(i - j, config.position_buckets, config.max_relative_positions) + config.position_buckets
                row = min(max(row, 0), 2 * config.position_buckets - 1)
                scores[j] = (q[i] @ k[j] + q[i] @ keys[row] + k[j] @ queries[row]) / math.sqrt(3 * d)
            powers = np.exp(scores - scores.max())
            read[i, of_head] = powers / powers.sum() @ v
    return read


def bucket(distance, buckets, most):
    """In plain Python: which bucket a distance is in."""
    near, far = buckets // 2, abs(distance)
    if far <= near:
        return distance
    steps = math.log(far / near) / math.log((most - 1) / near) * (near - 1)
    return int(math.copysign(math.ceil(round(steps, 5)) + near, distance))


def test_v2_reads_by_the_equation_in_loops_in_float64(monkeypatch):
    model, (ids, *_), _ = golden("deberta-v2")
    model, file, seen = model.double(), load_file(GOLDEN / "deberta-v2" / "model.safetensors"), []
    table = file["deberta.encoder.rel_embeddings.weight"].double()
    norm = [file[f"deberta.encoder.LayerNorm.{part}"].double() for part in ("weight", "bias")]
    table = F.layer_norm(table, (16,), *norm, eps=1e-7).numpy()
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(
        deberta.F, "scaled_dot_product_attention", lambda *x, **more: seen.append(right(*x, **more)) or seen[-1]
    )
    states = model.hidden_states(ids[:1])
    for layer in range(3):
        expected = v2_attention_by_loops(file, states[layer][0].numpy(), table, model.config, layer)
        np.testing.assert_allclose(seen[layer][0].transpose(0, 1).flatten(1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("buckets, most, longest", [(256, 512, 512), (6, 8, 40), (32, 128, 300), (2, 20, 30)], ids=str)
def test_far_distances_share_rows_as_a_plain_formula_and_transformers_say(buckets, most, longest):
    content = json.loads((GOLDEN / "deberta-v2" / "config.json").read_text())
    content |= {"position_buckets": buckets, "max_relative_positions": most, "max_position_embeddings": longest}
    config, distances = DebertaConfig.from_hugging_face(content), torch.arange(1 - longest, longest)
    rows_read = table_rows(distances, config).tolist()
    by_hand = [bucket(distance, buckets, most) + buckets for distance in distances.tolist()]
    assert rows_read == [min(max(row, 0), 2 * buckets - 1) for row in by_hand]
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    matrix = theirs.build_relative_position(torch.empty(longest, 1), torch.empty(longest, 1), buckets, most)[0]
    rows = (matrix + buckets).clamp(0, 2 * buckets - 1)
    assert rows_read == [*rows[0].flip(0).tolist(), *rows[1:, 0].tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_without_positions_it_is_a_bag_of_words_and_with_them_it_is_not(kind):
    model, (ids, *_), _ = golden(kind)
    if model.layers[0].conv is not None:
        model.layers[0].conv.conv.weight.zero_()
    order = torch.tensor([0, 4, 3, 2, 1, 8, 7, 6, 5])
    assert not torch.allclose(model(ids[:1, order]), model(ids[:1])[:, order], atol=1e-2)
    for layer in model.layers:  # what a zero table does: BERT's attention, at the scale of three terms
        layer.terms = ()
    assert_close(model(ids[:1, order]), model(ids[:1])[:, order])


# ---- Folders ----


def changed(kind, tmp_path, tensors=lambda tensors: tensors, **config):
    """A copy of a golden folder with other tensors and other keys in config.json."""
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "changed")
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def microsoft(tensors):
    """As in microsoft/deberta-v3-base: another head, positions that are not read, a discriminator's head, a pooler."""
    head = "lm_predictions.lm_head."
    named = {name.replace("cls.predictions.transform.", head): value for name, value in tensors.items()}
    named = {name.replace("cls.predictions.", head): value for name, value in named.items()}
    extra = {
        "deberta.embeddings.position_embeddings.weight": torch.zeros(64, 16),
        "deberta.embeddings.position_ids": torch.arange(64)[None],
        "mask_predictions.dense.weight": torch.zeros(16, 16),
        "pooler.dense.weight": torch.zeros(16, 16),
    }
    return named | extra


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_as_it_is_downloaded_is_read_head_and_all(kind, tmp_path):
    model, inputs, expected = golden(kind)
    downloaded = load_backbone(changed(kind, tmp_path, microsoft))
    assert_close(downloaded.lm_logits(downloaded(*inputs))[inputs[1].bool()], expected["lm_logits"][inputs[1].bool()])
    assert not downloaded.left_out


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_fine_tuned_classifier_the_backbone_is_taken(kind, tmp_path):
    def classifier(tensors):
        plain = {name: value for name, value in tensors.items() if not name.startswith("cls.")}
        return plain | {"pooler.dense.bias": torch.zeros(16), "classifier.weight": torch.zeros(2, 16)}

    backbone = load_backbone(changed(kind, tmp_path, classifier))
    assert backbone.left_out == ("classifier.weight",) and not backbone.has_lm_head
    assert torch.equal(backbone(golden(kind)[1][0]), golden(kind)[0](golden(kind)[1][0]))


@pytest.mark.parametrize("kind", KINDS)
def test_silu_is_an_activation_like_the_others(kind, tmp_path):
    def by_hand(x):
        return x / (1 + torch.exp(-x))

    keys = {"hidden_act": "silu"} | ({"conv_act": "silu"} if kind == "deberta-v2" else {})
    loaded = load_backbone(changed(kind, tmp_path, lambda tensors: tensors, **keys))
    expected, inputs, _ = golden(kind)
    for module in (*expected.layers, expected.lm_head):
        module.activation = by_hand
    if kind == "deberta-v2":
        expected.layers[0].conv.activation = by_hand
    states, real = loaded.hidden_states(*inputs), inputs[1].bool()
    for state, other in zip(states, expected.hidden_states(*inputs), strict=True):
        assert_close(state[real], other[real])
    assert_close(loaded.lm_logits(states[-1]), expected.lm_logits(states[-1]))


UNTIED = r"\(cls\.predictions.*\) because its decoder is not tied to the word embeddings: load .* with a tied one$"


@pytest.mark.parametrize("kind", KINDS)
def test_an_untied_masked_lm_head_is_left_out_and_it_is_said_why(kind, tmp_path):
    words = "deberta.embeddings.word_embeddings.weight"
    untied = {"cls.predictions.decoder.weight": torch.ones(64, 16), "cls.predictions.decoder.bias": torch.zeros(64)}
    folder = changed(kind, tmp_path, lambda tensors: tensors | untied, tie_word_embeddings=False)
    loaded, (whole, inputs, _), lines = load_backbone(folder), golden(kind), []
    assert torch.equal(loaded(*inputs), whole(*inputs)) and not loaded.has_lm_head and loaded.untied_head
    with pytest.raises(ValueError, match=f"no masked-LM head, the file's was left out {UNTIED}") as error:
        loaded.lm_logits(loaded(*inputs))
    say_left_out(loaded, folder, lines.append)
    assert "\n" not in str(error.value) and lines[0].endswith(
        "; the masked-LM head is among them, because its decoder is not tied to the word embeddings."
    )
    shutil.rmtree(folder)
    changed(kind, tmp_path, lambda tensors: tensors | {"cls.predictions.decoder.weight": tensors[words].clone()})
    assert load_backbone(folder).has_lm_head and not load_backbone(folder).untied_head


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


TABLE, IN_PROJ = "deberta.encoder.rel_embeddings.weight", "deberta.encoder.layer.1.attention.self.in_proj.weight"
KEY = "deberta.encoder.layer.2.attention.self.key_proj.weight"
MISFITS = [
    ("deberta", without(TABLE), {}, r"1 missing \(encoder.rel_embeddings.weight\)$"),
    (
        "deberta",
        without("deberta.encoder.layer.0.attention.self.q_bias"),
        {},
        r"1 missing \(encoder.layer.0.*q_bias\)$",
    ),
    ("deberta", lambda t: t | {TABLE: t[TABLE][:8].clone()}, {}, r"rel_embeddings.weight must have shape \(10, 16\)"),
    ("deberta", lambda t: t | {IN_PROJ: t[IN_PROJ][:32].clone()}, {}, r"in_proj.weight must have shape \(48, 16\)"),
    ("deberta", lambda t: t | {"deberta.encoder.conv.conv.weight": torch.zeros(1)}, {}, "1 unexpected .encoder.conv"),
    ("deberta", lambda t: t, {"pos_att_type": ["p2c"]}, "3 unexpected .*pos_proj"),
    ("deberta", lambda t: t, {"relative_attention": False}, "10 unexpected"),
    ("deberta", lambda t: t, {"position_biased_input": True}, r"1 missing \(embeddings.position_embeddings.weight\)"),
    ("deberta", lambda t: t, {"type_vocab_size": 2}, r"1 missing \(embeddings.token_type_embeddings.weight\)"),
    ("deberta", lambda t: t | {"lm_predictions.lm_head.bias": torch.zeros(64)}, {}, "there twice"),
    ("deberta-v2", without("deberta.encoder.conv.LayerNorm.bias"), {}, r"1 missing \(encoder.conv.LayerNorm.bias\)$"),
    ("deberta-v2", without("deberta.encoder.LayerNorm.weight"), {}, r"1 missing \(encoder.LayerNorm.weight\)$"),
    ("deberta-v2", lambda t: t, {"conv_kernel_size": 5}, r"encoder.conv.conv.weight must have shape \(16, 16, 5\)"),
    ("deberta-v2", lambda t: t, {"conv_groups": 2}, r"encoder.conv.conv.weight must have shape \(16, 8, 3\)"),
    ("deberta-v2", lambda t: t, {"conv_kernel_size": 0}, "4 unexpected .encoder.conv"),
    ("deberta-v2", lambda t: t, {"norm_rel_ebd": "none"}, "2 unexpected .encoder.LayerNorm"),
    ("deberta-v2", lambda t: t, {"position_buckets": -1}, r"rel_embeddings.weight must have shape \(16, 16\)"),
    ("deberta-v2", lambda t: t, {"share_att_key": False}, "12 missing .*pos_key_proj"),
    ("deberta-v2", lambda t: t | {KEY: t[KEY][:8].clone()}, {}, r"key_proj.weight must have shape \(16, 16\)"),
    ("deberta", without("cls.predictions.bias"), {}, r"1 missing \(cls.predictions.bias\)"),
]


@pytest.mark.parametrize(
    "kind, change, config, message", MISFITS, ids=[f"{misfit[0]}: {misfit[3]}" for misfit in MISFITS]
)
def test_tensors_that_do_not_fit_are_one_line(kind, change, config, message, tmp_path):
    folder = changed(kind, tmp_path, change, **config)
    with pytest.raises(ValueError, match=message) as error:
        load_backbone(folder)
    assert str(error.value).startswith(f"{folder}: ") and "\n" not in str(error.value)


REFUSED = [
    ("deberta", {"talking_head": True}, "talking_head must be False, got True: not supported"),
    ("deberta", {"pos_att_type": "c2p|p2p"}, "pos_att_type must be some of c2p, p2c, got"),
    ("deberta", {"pos_att_type": ["c2p", "c2p"]}, "pos_att_type must be some of"),
    ("deberta", {"pos_att_type": 3}, "pos_att_type must be some of c2p, p2c, got 3"),
    ("deberta", {"pos_att_type": [3]}, "pos_att_type must be some of"),
    ("deberta", {"pos_att_type": ""}, "pos_att_type must be some of"),
    ("deberta", {"max_relative_positions": "far"}, "max_relative_positions must be a whole number"),
    ("deberta", {"relative_attention": 1}, "relative_attention must be true or false"),
    ("deberta", {"position_biased_input": "yes"}, "position_biased_input must be true or false"),
    ("deberta", {"type_vocab_size": -1}, "type_vocab_size must be a whole number from 0 to"),
    ("deberta", {"num_attention_heads": 3}, "multiple of num_attention_heads"),
    ("deberta", {"hidden_act": "mish"}, "hidden_act must be one of gelu, "),
    ("deberta", {"hidden_act": ["gelu"]}, "hidden_act must be one of gelu, "),
    ("deberta", {"hidden_size": None}, "missing key hidden_size"),
    ("deberta-v2", {"attention_head_size": 8}, "attention_head_size must be 4, got 8: not supported"),
    ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd must be none or layer_norm, got 'batch_norm'"),
    ("deberta-v2", {"norm_rel_ebd": "layer_norm|batch"}, "norm_rel_ebd must be none or layer_norm"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size must be odd and hidden_size a multiple of conv_groups"),
    ("deberta-v2", {"conv_groups": 3}, "got 3, 16 and 3"),
    ("deberta-v2", {"conv_act": "swish"}, "conv_act must be one of gelu, .*tanh, got 'swish'"),
    ("deberta-v2", {"position_buckets": 1}, "position_buckets must be from 2 to less than twice"),
    ("deberta-v2", {"position_buckets": 14}, "position_buckets must be from 2 .* got 14 and 8"),
    ("deberta-v2", {"share_att_key": "yes"}, "share_att_key must be true or false"),
    ("deberta", {"legacy": False, "embedding_size": 8}, "embedding_size must be 16, got 8: not supported"),
]


@pytest.mark.parametrize("kind, change, message", REFUSED, ids=str)
def test_a_config_that_no_model_can_have_is_one_line(kind, change, message, tmp_path):
    content = json.loads((GOLDEN / kind / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path / "config.json")
    assert "\n" not in str(error.value)


def test_v1_passes_over_the_switches_of_v2_and_both_have_their_defaults():
    content = json.loads((GOLDEN / "deberta" / "config.json").read_text())
    switches = {"position_buckets": 256, "share_att_key": True, "conv_kernel_size": 3, "norm_rel_ebd": "layer_norm"}
    assert DebertaConfig.from_hugging_face(content | switches) == DebertaConfig.from_hugging_face(content)
    for unset in (-1, 0, None):
        config = DebertaConfig.from_hugging_face(content | {"max_relative_positions": unset})
        assert config.span == config.max_position_embeddings == 64 and config.token_types is None
    assert DebertaConfig.from_hugging_face(config.to_dict()) == config


# ---- ONNX ----


def drawn_inputs(count=5):
    from mini_ee.lab.data.tokenizer import Inputs

    draw = np.random.default_rng(3)
    mask = (np.arange(12) < np.array([12, 7, 1, 12, 9])[:count, None]).astype(np.int64)
    ids = draw.integers(5, 40, mask.shape) * mask
    return Inputs(ids, mask, draw.integers(0, 2, mask.shape) * mask, (("",),) * count)


def random_deberta(kind, **change):
    """A random backbone of three layers."""
    config = json.loads((GOLDEN / kind / "config.json").read_text()) | {"num_hidden_layers": 3} | change
    with torch.random.fork_rng():
        torch.manual_seed(1)
        backbone = Deberta(DebertaConfig.from_hugging_face(config), lm_head=False).eval()
        for name, parameter in backbone.named_parameters():
            mean = float("norm" in name and name.endswith("weight"))
            parameter.normal_(mean, 0.3 if parameter.dim() == 1 else 0.25 if "embeddings" not in name else 1.0)
    return backbone


def logits_of_engines(model, folder, precision="float32", segments=False):
    """Logits (B, K, C) of torch, of model.onnx and, if `segments` is true, of the segments."""
    manifest = write_graphs(model, model.segments(), Never(), folder, precision, segments)
    engines = [engine(folder, manifest, threads=1) for engine in (OrtModel, OrtSegments)[: 1 + segments]]
    return [read_every_exit(engine, drawn_inputs())[0] for engine in (model.segments(), *engines)]


SWITCHES = [
    ("deberta", {}),
    ("deberta", {"pos_att_type": "c2p"}),
    ("deberta", {"pos_att_type": ["p2c"], "max_relative_positions": 30}),
    ("deberta", {"relative_attention": False, "position_biased_input": True, "type_vocab_size": 2}),
    ("deberta", {"pos_att_type": [], "embedding_size": 10, "hidden_act": "gelu_new"}),
    ("deberta-v2", {}),
    ("deberta-v2", {"share_att_key": False, "conv_act": "tanh", "conv_kernel_size": 5, "conv_groups": 2}),
    ("deberta-v2", {"pos_att_type": "p2c", "position_buckets": -1, "norm_rel_ebd": "none"}),
    ("deberta-v2", {"relative_attention": False, "position_biased_input": True, "conv_kernel_size": 0}),
    ("deberta-v2", {"share_att_key": False, "pos_att_type": ["c2p"], "type_vocab_size": 2, "embedding_size": 12}),
]


@pytest.mark.parametrize("kind, change", SWITCHES, ids=str)
def test_onnx_equals_torch(kind, change, tmp_path):
    model = RowExits(random_deberta(kind, **change), EXITS, 3).eval()
    for head in model.heads:
        head.dense.weight.normal_(std=0.3), head.out.weight.normal_(std=0.5)
    expected, *logits = logits_of_engines(model, tmp_path, segments=not change)
    for engine_logits in logits:
        np.testing.assert_allclose(engine_logits, expected, rtol=0, atol=ENGINES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_are_near(kind, precision, tmp_path):
    expected, whole = logits_of_engines(RowExits(random_deberta(kind), EXITS, 3).eval(), tmp_path, precision)
    np.testing.assert_allclose(whole, expected, rtol=0, atol={"float16": 0.02, "int8": 0.1}[precision])


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_folded_as_a_graph_is_loaded(kind, tmp_path):
    """No product of positions with weights is left in what ONNX Runtime makes of the first segment."""
    import onnx

    model = RowExits(random_deberta(kind), EXITS, 3).eval()
    write_graphs(model, model.segments(), Never(), tmp_path, segments=True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "onnx/segment_1.onnx", options, providers=["CPUExecutionProvider"])
    products = [
        sum("Gemm" in node.op_type for node in onnx.load(path, load_external_data=False).graph.node)
        for path in (tmp_path / "onnx/segment_1.onnx", tmp_path / "optimised.onnx")
    ]
    tables = 1 if model.backbone.config.share_att_key else 2
    assert products[0] >= 4 + tables and products[1] == products[0] - tables


def test_tables_are_folded_with_their_adapters(tmp_path):
    """Adapters on positions leave no node more than those on queries and values alone."""
    import onnx

    def kinds(name, targets):
        model, folder = lora_model("deberta", targets), tmp_path / name
        folder.mkdir()
        write_graphs(model, model.segments(), Never(), folder, segments=True)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(folder / "optimised.onnx"), 3
        onnxruntime.InferenceSession(folder / "onnx/segment_1.onnx", options, providers=["CPUExecutionProvider"])
        graph = onnx.load(folder / "optimised.onnx", load_external_data=False).graph
        return Counter(node.op_type for node in graph.node)

    assert kinds("tables", OWN_TABLES) == kinds("plain", ("query", "value"))


# ---- Adapters ----


def lora_model(kind, targets, **change):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LoRAExits(random_deberta(kind, **change), EXITS, 3, rank=2, targets=targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


OWN_TABLES = ("query", "value", "pos_proj", "pos_q_proj")
ADAPTED = [
    ("deberta", ("query", "value"), {}),
    ("deberta", OWN_TABLES, {}),
    ("deberta", ("pos_q_proj",), {}),
    ("deberta-v2", ("query", "value"), {}),
    ("deberta-v2", ("key", "attention_output", "up", "down"), {}),
    ("deberta-v2", OWN_TABLES, {"share_att_key": False}),
]


@pytest.mark.parametrize("kind, targets, change", ADAPTED, ids=str)
def test_adapters_fold_into_the_weights_and_into_the_tables(kind, targets, change):
    model, inputs = lora_model(kind, targets, **change), drawn_inputs()
    tensors = [torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]
    plain = RowExits(model.backbone, EXITS, 3)
    plain.heads = model.heads
    for k, (logits, without) in enumerate(zip(model(*tensors), plain(*tensors))):
        merged = model.merged(k)
        assert_close(merged(*tensors)[0], logits)
        assert abs(logits - without).max() > 1e-4
        assert isinstance(merged.backbone, Deberta) and len(merged.backbone.layers) == EXITS[k]


@pytest.mark.parametrize("kind, targets, change", ADAPTED, ids=str)
def test_every_schedule_gives_every_exit_what_it_has_alone(kind, targets, change):
    model, inputs = lora_model(kind, targets, **change), drawn_inputs()
    tensors = [torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)]
    expected = torch.stack(model(*tensors), 1).numpy()
    for schedule in all_schedules(3):
        logits, *_ = read_every_exit(model.segments(schedule), inputs)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    exits = [2, 0, 1, 2, 0]
    np.testing.assert_allclose(model.ragged(exits, *tensors).numpy(), expected[range(5), exits], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "kind, targets, change, schedule", [(*adapted, SCHEDULES[n % 2]) for n, adapted in enumerate(ADAPTED[2:])], ids=str
)
def test_onnx_equals_torch_with_adapters(kind, targets, change, schedule, tmp_path):
    model, inputs = lora_model(kind, targets, **change), drawn_inputs()
    segments = model.segments(schedule)
    manifest = write_graphs(model, segments, Never(), tmp_path, segments=True)
    expected, *_ = read_every_exit(segments, inputs)
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        np.testing.assert_allclose(read_every_exit(engine, inputs)[0], expected, rtol=0, atol=ENGINES)


@pytest.mark.parametrize("kind, targets, change", ADAPTED, ids=str)
def test_adapters_are_saved_and_loaded(kind, targets, change, tmp_path):
    model, other = (lora_model(kind, targets, **change) for _ in range(2))
    for parameter in other.adapters.parameters():
        parameter.zero_()
    load_adapters(other, tmp_path, save_adapters(model, tmp_path, "base"))
    assert all(torch.equal(a, b) for a, b in zip(model.adapters.parameters(), other.adapters.parameters(), strict=True))


def test_projections_that_are_not_there_are_told():
    with pytest.raises(ValueError, match="targets of a deberta must be some of query, key, value, pos_proj, att"):
        LoRAExits(random_deberta("deberta", pos_att_type="c2p"), EXITS, 3, targets=("pos_q_proj",))
    with pytest.raises(ValueError, match="targets of a deberta-v2 must be some of query, key, value, attention_output"):
        LoRAExits(random_deberta("deberta-v2"), EXITS, 3, targets=("pos_proj",))


IN_PEFT = [
    ("deberta", ("pos_proj", "pos_q_proj", "up"), {}),  # queries and values are parts of in_proj there
    ("deberta-v2", ("query", "key", "value", "down"), {}),  # an adapter on what is shared changes the tables too
    ("deberta-v2", OWN_TABLES, {"share_att_key": False}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, targets, change", IN_PEFT, ids=str)
def test_peft_computes_what_we_compute(kind, targets, change, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers peft")
    peft = pytest.importorskip("peft", reason="pip install transformers peft")
    model, inputs = lora_model(kind, targets, **change), drawn_inputs()
    ids, mask, types = (
        torch.from_numpy(array) for array in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
    )
    save_backbone(model.backbone, tmp_path / "base")
    save_adapters(model, tmp_path, str(tmp_path / "base"))
    for k, logits in enumerate(model(ids, mask, types)):
        base = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / f"exit_{EXITS[k]}")).eval()
        hidden = adapted(ids, attention_mask=mask, output_hidden_states=True).hidden_states[EXITS[k]]
        assert_close(model.heads[k](hidden, mask.bool()[:, None, None, :]), logits)


# ---- From a checkpoint to an export ----


@pytest.mark.slow
@pytest.mark.parametrize("kind, method", [("deberta", "lora-exits"), ("deberta-v2", "joint")])
def test_it_is_trained_exported_and_run_as_any_other(kind, method, checkpoint_folder, task_folder, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    save_backbone(random_deberta(kind, vocab_size=64), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    more = {"targets": OWN_TABLES} if method == "lora-exits" else {}
    with torch.enable_grad():
        trained = mini_ee.train(method, folder, task_folder, tmp_path / "run", epochs=1, exits=(1, 3), **more)
    texts = ["the film was good", "a very very dull song"]
    inputs, loaded = trained.encode(texts).batch(slice(None)), load_run(tmp_path / "run")
    message, logits = (read_every_exit(opened.segments(), inputs)[0] for opened in (trained, loaded))
    assert np.array_equal(logits, message)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json"]) == 0
    message = json.loads(capsys.readouterr().out)["verified"]
    assert message["max_logit_difference"] < ENGINES and message["exit_agreement"] == 1
    expected = [(answer.label, answer.layers) for answer in loaded.classify(texts)]
    answers = Runtime(tmp_path / "out", threads=1).run(texts)
    assert [(answer.label, answer.exit) for answer in answers] == expected
    again = read_every_exit(torch_segments(tmp_path / "out", "cpu"), inputs)[0]
    np.testing.assert_allclose(again, logits, rtol=0, atol=TOLERANCE)
