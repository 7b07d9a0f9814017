"""ModernBERT against transformers, through what tests/make_golden.py wrote, and from a checkpoint to an export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from conftest import SCHEDULES, all_schedules, tensors
from safetensors.torch import load_file, save_file

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone, read_config, save_backbone
from mini_ee.lab.backbones.modernbert import ModernBert, ModernBertConfig
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tokenizer import Inputs
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

GOLDEN = Path(__file__).parents[2] / "golden" / "modernbert"
FULL, WINDOW = "full_attention", "sliding_attention"
TOLERANCE = 1e-5  # absolute, and relative above one
"""Measured maximum against transformers on the golden files: 2e-6; on random configs 7e-6."""
ENGINES = 2e-5
"""Logits of ONNX Runtime against torch's; measured maximum 4e-6."""
EXITS = (1, 2, 4)
CONTENT = json.loads((GOLDEN / "config.json").read_text())


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_close(output, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def golden():
    """The backbone, its inputs, and what transformers computed."""
    expected = read_tensors(GOLDEN / "expected.safetensors")
    return load_backbone(GOLDEN), [expected.pop(name) for name in Tensors._fields], expected


def test_hidden_states_and_logits_are_those_of_transformers():
    model, inputs, expected = golden()
    *states, last = model.hidden_states(*inputs)
    outputs = {f"hidden.{depth}": state for depth, state in enumerate(states)}
    outputs |= {"normed": model.norm(last), "lm_logits": model.lm_logits(last)}
    assert outputs.keys() == expected.keys()
    real = inputs[1].bool()
    for name, tensor in expected.items():
        assert_close(outputs[name][real], tensor[real])


def test_a_sentence_encoder_reads_the_last_states_behind_the_final_norm():
    model, inputs, expected = golden()
    real = inputs[1].bool()
    for depth, name in ((2, "hidden.2"), (3, "normed")):
        assert_close(model.text_states(Tensors(*inputs), depth)[0][real], expected[name][real])


# ---- The equations, in loops ----


def layer_by_loops(file, depth, hidden, config):
    """hidden[depth] -> hidden[depth + 1] of one row, (T, D) in float64, from the tensors of Hugging Face's file."""
    get = {name.removeprefix(f"model.layers.{depth}."): t.double().numpy() for name, t in file.items()}
    heads, (tokens, width) = config["num_attention_heads"], hidden.shape
    d, kind = width // heads, config["layer_types"][depth]
    theta = config["rope_parameters"][kind]["rope_theta"]

    def norm(x, name):
        if name not in get:
            return x
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config["norm_eps"]) * get[name]

    def turned(x, at):
        pairs = (x[: d // 2] + 1j * x[d // 2 :]) * np.exp(1j * at * theta ** (-2 * np.arange(d // 2) / d))
        return np.concatenate((pairs.real, pairs.imag))

    qkv, read = norm(hidden, "attn_norm.weight") @ get["attn.Wqkv.weight"].T, np.zeros_like(hidden)
    for h in range(heads):
        q, k, v = (qkv[:, part * width + h * d :][:, :d] for part in range(3))
        for i in range(tokens):
            near = [j for j in range(tokens) if kind == FULL or abs(i - j) <= config["local_attention"] // 2]
            powers = np.exp([turned(q[i], i) @ turned(k[j], j) / np.sqrt(d) for j in near])
            read[i, h * d : (h + 1) * d] = powers / powers.sum() @ v[near]
    hidden = hidden + read @ get["attn.Wo.weight"].T
    gate, up = np.split(norm(hidden, "mlp_norm.weight") @ get["mlp.Wi.weight"].T, 2, axis=-1)
    return hidden + (F.gelu(torch.from_numpy(gate)).numpy() * up) @ get["mlp.Wo.weight"].T


@pytest.mark.parametrize("depth", range(3))
def test_layers_compute_the_equations_in_loops_in_float64(depth):
    model, (ids, *_), _ = golden()
    states = model.double().hidden_states(ids[:1])
    expected = layer_by_loops(load_file(GOLDEN / "model.safetensors"), depth, states[depth][0].numpy(), CONTENT)
    np.testing.assert_allclose(states[depth + 1][0].numpy(), expected, rtol=0, atol=1e-6)  # angles are float32


# ---- Configs ----


def read(tmp_path, **change):
    content = {key: value for key, value in (CONTENT | change).items() if value != "left out"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return read_config(tmp_path / "config.json")


def test_keys_of_transformers_4_and_5_are_the_same_config(tmp_path):
    five = read(tmp_path)
    old = {"global_rope_theta": 500.0, "local_rope_theta": 20.0, "global_attn_every_n_layers": 3}
    four = read(tmp_path, layer_types="left out", rope_parameters="left out", **old)
    assert [four.windowed(depth) for depth in range(3)] == [five.windowed(depth) for depth in range(3)]
    assert replace(four, layer_types=five.layer_types) == five
    assert ModernBertConfig.from_hugging_face(four.to_dict()) == four
    assert ModernBertConfig.from_hugging_face(five.to_dict()) == five
    more = {"position_embedding_type": "sans_pos", "reference_compile": True, "layer_norm_eps": 1e-3}
    assert read(tmp_path, **more) == five  # of mmBERT and of the first files


def test_keys_that_are_left_out_are_those_of_modernbert_base(tmp_path):
    shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    plain = {key: "left out" for key in CONTENT if key not in ("model_type", *shape)}
    config = read(tmp_path, **plain, vocab_size=50368)
    assert (config.max_tokens, config.window, config.global_rope_theta) == (8192, 64, 160_000)
    assert (config.local_rope_theta, config.pad_token_id, config.token_types) == (10_000, 50283, None)
    assert [config.windowed(depth) for depth in range(7)] == [False, True, True, False, True, True, False]
    assert read(tmp_path, pad_token_id=None).pad_token_id is None


def test_a_padding_token_outside_the_vocabulary_is_not_written(tmp_path):
    assert read(tmp_path, pad_token_id=50283).to_dict()["pad_token_id"] is None


ONE_BASE = {"rope_type": "default", "rope_theta": 10.0}
REFUSED = [
    ({"hidden_size": None}, "missing key hidden_size"),
    ({"hidden_size": 20}, "hidden_size / num_attention_heads must be even: .*, got 20 and 4"),
    ({"hidden_activation": "swish"}, "hidden_activation must be one of gelu, .*'swish'"),
    ({"classifier_activation": ["gelu"]}, "classifier_activation must be one of"),
    ({"classifier_pooling": "max"}, "classifier_pooling must be cls or mean, got 'max'"),
    ({"norm_bias": "no"}, "norm_bias must be true or false"),
    ({"decoder_bias": False}, "decoder_bias must be True, got False: not supported"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling must be None, got .*: not supported"),
    ({"rope_parameters": ONE_BASE}, "rope_parameters must have full_attention and sliding_attention, got"),
    ({"rope_parameters": [1]}, "rope_parameters must have full_attention and sliding_attention"),
    ({"rope_parameters": {FULL: ONE_BASE | {"partial_rotary_factor": 0.5}}}, "full_attention must hold rope_type and"),
    ({"rope_parameters": {WINDOW: {"rope_type": "linear"}}}, "sliding_attention must be 'default', got 'linear'"),
    ({"rope_parameters": {FULL: ONE_BASE | {"rope_theta": None}}}, "global_rope_theta must be a number above 0"),
    ({"rope_parameters": None, "local_rope_theta": None}, "local_rope_theta must be a number above 0 .*, got None"),
    ({"rope_parameters": None, "local_rope_theta": -1}, "local_rope_theta must be a number above 0 .*, got -1"),
    ({"layer_types": [FULL, WINDOW]}, "layer_types must name full_attention or sliding_attention for 3 layers, got"),
    ({"layer_types": [FULL, WINDOW, "chunked"]}, "layer_types must name"),
    ({"layer_types": "full"}, "layer_types must be a list, got 'full'"),
    ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be a whole number from 1"),
    ({"local_attention": -2}, "local_attention must be a whole number from 0"),
    ({"sliding_window": 4}, "sliding_window must be 2, got 4: not supported"),
    ({"head_dim": 8}, "head_dim must be 4, got 8: not supported"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=str)
def test_a_config_that_is_not_supported_is_refused_in_one_line(change, message, tmp_path):
    with pytest.raises(ValueError, match=message) as info:
        read(tmp_path, **change)
    assert "\n" not in str(info.value)


# ---- Checkpoints ----


def test_the_head_of_a_classifier_is_left_out(tmp_path):
    """A classifier has a dense map and a norm under the names that the masked-LM head has."""
    folder = shutil.copytree(GOLDEN, tmp_path / "classifier")
    file = {name: t for name, t in load_file(folder / "model.safetensors").items() if not name.startswith("decoder.")}
    save_file(
        file | {"classifier.weight": torch.ones(2, 16), "classifier.bias": torch.ones(2)}, folder / "model.safetensors"
    )
    model, whole = load_backbone(folder), load_backbone(GOLDEN)
    assert model.left_out == ("classifier.bias", "classifier.weight", "head.dense.weight", "head.norm.weight")
    assert not model.has_lm_head and not model.untied_head and model.norm is not None
    ids = torch.arange(5, 17)[None]
    assert torch.equal(model(ids), whole(ids))
    with pytest.raises(ValueError, match="no masked-LM head, the file's was left out"):
        model.lm_logits(model(ids))


def test_a_head_that_is_not_tied_is_left_out_whole(tmp_path):
    folder = shutil.copytree(GOLDEN, tmp_path / "untied")
    file = load_file(folder / "model.safetensors")
    save_file(file | {"decoder.weight": torch.ones(64, 16)}, folder / "model.safetensors")
    model = load_backbone(folder)
    assert model.untied_head and not model.has_lm_head
    assert model.left_out == ("decoder.bias", "decoder.weight", "head.dense.weight", "head.norm.weight")


@pytest.mark.parametrize("head", [True, False])
def test_a_folder_is_written_under_the_names_of_hugging_face(head, tmp_path):
    model = load_backbone(GOLDEN)
    model.lm_head = model.lm_head if head else None
    save_backbone(model, tmp_path / "ours")
    theirs = load_file(GOLDEN / "model.safetensors")
    expected = theirs if head else {n.removeprefix("model."): t for n, t in theirs.items() if n.startswith("model.")}
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], t) for name, t in expected.items())


def test_the_first_layers_keep_their_windows():
    model, inputs, _ = golden()
    every = replace(model.config, layer_types=(WINDOW, FULL, WINDOW))
    assert [every.windowed(depth) for depth in range(3)] == [True, False, True]
    model.config = every
    assert model.config_of([0, 2]).layer_types == (WINDOW, WINDOW)
    assert model.first_layers(2).config.layer_types == (WINDOW, FULL)


# ---- Padding and dropout ----


def test_padding_on_either_side_changes_no_token():
    model, (ids, *_), _ = golden()
    alone = model.hidden_states(ids[:1])
    for ends in ((0, 5), (5, 0), (3, 4)):
        more = F.pad(ids[:1], ends, value=9), F.pad(torch.ones_like(ids[:1]), ends)
        real = more[1].bool()
        for state, expected in zip(model.hidden_states(*more), alone, strict=True):
            assert state.isfinite().all()
            assert_close(state[real], expected[0])


def test_in_bfloat16_far_positions_turn_as_in_float32():
    model = ModernBert(replace(load_backbone(GOLDEN).config, max_position_embeddings=4000), lm_head=False)
    inputs = Tensors(torch.full((1, 2000), 5))
    expected = model.context(inputs)
    context = model.bfloat16().context(inputs)
    assert context.cos.dtype == context.sin.dtype == model.embed(inputs).dtype == torch.bfloat16
    assert_close(context.cos.float(), expected.cos, 0.005)


@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout", "mlp_dropout"])
def test_dropout_acts_in_train_mode_only(name):
    model = ModernBert(replace(load_backbone(GOLDEN).config, **{name: 0.5}, initializer_range=1.0))
    ids = torch.arange(5, 17)[None]
    assert torch.equal(model.eval()(ids), model(ids))
    assert not torch.equal(model.train()(ids), model(ids))


# ---- ONNX ----


def random_modernbert(**change):
    """A random backbone of four layers."""
    config = CONTENT | {"num_hidden_layers": 4, "layer_types": [FULL, WINDOW, WINDOW, FULL]} | change
    with torch.random.fork_rng():
        torch.manual_seed(1)
        backbone = ModernBert(ModernBertConfig.from_hugging_face(config), lm_head=False).eval()
        for name, parameter in backbone.named_parameters():
            mean = float("norm" in name and name.endswith("weight"))
            parameter.normal_(mean, 0.3 if parameter.dim() == 1 else 0.25 if "embeddings" not in name else 1.0)
    return backbone


def random_exits(backbone):
    model = RowExits(backbone, EXITS, 3).eval()
    for head in model.heads:
        head.dense.weight.normal_(std=0.3), head.out.weight.normal_(std=0.5)
    return model


def drawn_inputs(lengths=(12, 7, 1, 12, 9)):
    draw = np.random.default_rng(3)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return Inputs(draw.integers(5, 60, mask.shape) * mask, mask, np.zeros_like(mask), (("",),) * len(lengths))


def engines(model, segments, folder, precision="float32", chained=True):
    """The graph of a model and, if `chained` is true, its segments."""
    manifest = write_graphs(model, segments, Never(), folder, precision, chained)
    return [engine(folder, manifest, threads=1) for engine in (OrtModel, OrtSegments)[: 1 + chained]]


SWITCHES = [
    {},
    {"layer_types": [WINDOW] * 4, "norm_bias": True, "local_attention": 5},
    {"layer_types": [FULL] * 4, "attention_bias": True, "hidden_activation": "silu"},
    {"local_attention": 0, "mlp_bias": True, "hidden_activation": "gelu_new"},
    {"local_attention": 128, "num_attention_heads": 1},
]


@pytest.mark.parametrize("change", SWITCHES, ids=str)
def test_onnx_equals_torch(change, tmp_path):
    model = random_exits(random_modernbert(**change))
    for engine in engines(model, model.segments(), tmp_path, chained=not change):
        for lengths in ((12, 7, 1, 12, 9), (2, 3), (1,), (40,), (30, 30)):
            inputs = drawn_inputs(lengths)
            expected, logits = (read_every_exit(segments, inputs)[0] for segments in (model.segments(), engine))
            np.testing.assert_allclose(logits, expected, rtol=0, atol=ENGINES)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_are_near(precision, tmp_path):
    model, inputs = random_exits(random_modernbert()), drawn_inputs()
    expected = read_every_exit(model.segments(), inputs)[0]
    atol = {"float16": 0.05, "int8": 0.5}[precision]
    logits = read_every_exit(engines(model, model.segments(), tmp_path, precision, chained=False)[0], inputs)[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


def test_queries_and_keys_turn_in_one_node_a_layer(tmp_path):
    model = random_exits(random_modernbert())
    write_graphs(model, model.segments(), Never(), tmp_path, segments=True)
    graph = onnx.load(tmp_path / "onnx/segment_1.onnx", load_external_data=False).graph
    assert sum(node.op_type == "RotaryEmbedding" for node in graph.node) == 1
    assert all(np.prod(weight.dims) <= 64 * 16 for weight in graph.initializer)  # no table of positions


# ---- Adapters ----
TARGETS = [("query", "value"), ("key", "attention_output", "gate"), ("query", "key", "value", "up", "down")]


def lora_model(targets):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LoRAExits(random_modernbert(), EXITS, 3, rank=2, targets=targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
def test_adapters_fold_into_the_weights(targets):
    model, inputs = lora_model(targets), tensors(drawn_inputs())
    for k, logits in enumerate(model(*inputs)):
        assert_close(model.merged(k)(*inputs)[0], logits)


@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
def test_every_schedule_gives_every_exit_what_it_has_alone(targets):
    model, inputs = lora_model(targets), drawn_inputs()
    expected = torch.stack(model(*tensors(inputs)), 1).numpy()
    for schedule in all_schedules(3):
        logits, *_ = read_every_exit(model.segments(schedule), inputs)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    exits = [2, 0, 1, 2, 0]
    np.testing.assert_allclose(
        model.ragged(exits, *tensors(inputs)).numpy(), expected[range(5), exits], rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("targets, schedule", [*zip(TARGETS[1:], SCHEDULES)], ids=str)
def test_onnx_equals_torch_with_adapters(targets, schedule, tmp_path):
    model, inputs = lora_model(targets), drawn_inputs()
    segments = model.segments(schedule)
    expected, *_ = read_every_exit(segments, inputs)
    for engine in engines(model, segments, tmp_path):
        np.testing.assert_allclose(read_every_exit(engine, inputs)[0], expected, rtol=0, atol=ENGINES)


def test_adapters_are_saved_and_loaded(tmp_path):
    model, other = (lora_model(TARGETS[-1]) for _ in range(2))
    for parameter in other.adapters.parameters():
        parameter.zero_()
    load_adapters(other, tmp_path, save_adapters(model, tmp_path, "base"))
    assert all(torch.equal(a, b) for a, b in zip(model.adapters.parameters(), other.adapters.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_we_compute(tmp_path):
    """PEFT has no name for a part of a map, such as queries: they are left out here."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers peft")
    peft = pytest.importorskip("peft", reason="pip install transformers peft")
    model, inputs = lora_model(("attention_output", "down")), tensors(drawn_inputs())
    save_backbone(model.backbone, tmp_path / "base")
    save_adapters(model, tmp_path, str(tmp_path / "base"))
    for k, logits in enumerate(model(*inputs)):
        base, seen = transformers.AutoModel.from_pretrained(tmp_path / "base").eval(), []
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / f"exit_{EXITS[k]}")).eval()
        base.layers[EXITS[k] - 1].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        adapted(inputs[0], attention_mask=inputs[1])
        assert_close(model.heads[k](*seen, inputs[1].bool()[:, None, None, :]), logits)


# ---- From a checkpoint to an export ----


@pytest.mark.slow
def test_it_is_trained_exported_and_run_as_any_other(checkpoint_folder, task_folder, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    save_backbone(random_modernbert(), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_folder / name, folder)
    with torch.enable_grad():
        trained = mini_ee.train("lora-exits", folder, task_folder, tmp_path / "run", epochs=1, exits=EXITS)
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
    again = read_every_exit(torch_segments(tmp_path / "out", "cpu"), inputs)[0]
    np.testing.assert_allclose(again, logits, rtol=0, atol=TOLERANCE)
