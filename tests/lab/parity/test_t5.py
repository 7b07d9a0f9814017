"""T5 against transformers, through what tests/make_golden.py wrote and on random configs, and against loops."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from t5_cases import GOLDEN, KINDS, TOLERANCE, assert_close, golden
from torch.nn import functional as F

from mini_ee.lab.backbones.hub import load_backbone, read_config, save_backbone
from mini_ee.lab.backbones.relative_biases import Biases, buckets
from mini_ee.lab.backbones.t5 import T5
from mini_ee.lab.backbones.t5_layers import HeadNorm, Pairs, T5Config

RANDOM_TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def states_of(model, inputs):
    """What the encoder and the decoder make of texts and answers, by the names of the golden files."""
    depth, context, hidden = len(model.encoder), model.context(inputs), model.embed(inputs)
    states = {f"encoder.{layer}": model.encode(inputs, layer)[0] for layer in range(depth)}
    states |= {f"encoder.{depth}": context.memory, "hidden.0": hidden}
    for layer in range(model.config.num_hidden_layers):
        hidden = model.run_layers(hidden, context, layer, layer + 1)
        states[f"hidden.{layer + 1}"] = hidden
    last = states.pop(f"hidden.{model.config.num_hidden_layers}")
    return states | {"normed": model.norm(last) / model.norm.scale, "lm_logits": model.lm_logits(last)}


def assert_states(model, inputs, expected, tolerance=TOLERANCE):
    states, real = states_of(model, inputs), inputs.attention_mask.bool()
    assert states.keys() == expected.keys()
    for name, tensor in expected.items():
        counted = real if name.startswith("encoder") else ...
        assert_close(states[name][counted], tensor[counted], tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits_are_those_of_transformers(kind):
    model, inputs, expected = golden(kind)
    del expected["greedy"]
    assert_states(model, inputs, expected)
    alone = model.hidden_states(inputs.input_ids, inputs.attention_mask)  # of the token that an answer starts with
    assert [state.shape for state in alone] == [(3, 1, 8)] * 4
    for depth in range(3):
        assert_close(alone[depth], expected[f"hidden.{depth}"][:, :1])
    assert_close(model.lm_logits(alone[3]), expected["lm_logits"][:, :1])


# ---- Random configs, all switches ----


def drawn_config(seed):
    """Small, with every switch that changes what is computed."""
    draw = np.random.default_rng([seed, 5])

    def one_of(*values):
        return values[draw.integers(len(values))]

    count = one_of(4, 5, 7, 8, 16, 32)
    return {
        "vocab_size": 40,
        "d_model": one_of(8, 12, 18),
        "d_kv": one_of(1, 3, 8),
        "d_ff": one_of(8, 20),
        "num_heads": one_of(1, 2, 5),
        "num_layers": one_of(1, 2, 3),
        "num_decoder_layers": one_of(None, 1, 2, 3),
        "relative_attention_num_buckets": count,
        "relative_attention_max_distance": count // 2 + one_of(1, 2, 5, 112),
        "feed_forward_proj": one_of(
            *(f"{gate}{act}" for gate in ("", "gated-") for act in ("relu", "gelu", "gelu_new", "silu"))
        ),
        "layer_norm_epsilon": one_of(1e-6, 1e-3, 0.1),
        "tie_word_embeddings": one_of(True, False),
        "decoder_start_token_id": one_of(0, 3),
        "eos_token_id": one_of(1, 2),
    }


def theirs(config, seed, own_head):
    """The model of transformers, every parameter drawn."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**config)).eval()
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(config["vocab_size"], config["d_model"]))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3).add_(1)
        else:
            parameter.mul_(parameter.shape[1] ** -0.5)
    return model


def drawn_pairs(config, seed):
    """Three texts of 12, 7 and 1 tokens, the second with its padding on the left; answers of 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids, written = (torch.randint(2, config["vocab_size"], (3, n), generator=generator) for n in (12, 6))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    mask[1] = mask[1].flip(0)
    written[:, 0] = config["decoder_start_token_id"]
    return Pairs(ids * mask, mask, written)


def as_version_4(folder):
    """config.json as transformers 4 wrote it, which told by the tie whether the head's input is scaled."""
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_random_configs_are_equal_to_transformers_and_written_as_they_are_read(seed, tmp_path):
    config, own_head = drawn_config(seed), seed % 2 == 0
    model, inputs = theirs(config, seed, own_head), drawn_pairs(config, seed)
    model.save_pretrained(tmp_path / "theirs")
    if own_head or config["tie_word_embeddings"]:
        as_version_4(tmp_path / "theirs")
    output = model(**inputs._asdict(), output_hidden_states=True)
    *states, normed = output.decoder_hidden_states
    expected = {f"encoder.{depth}": state for depth, state in enumerate(output.encoder_hidden_states)}
    expected |= {f"hidden.{depth}": state for depth, state in enumerate(states)}
    ours = load_backbone(tmp_path / "theirs")
    assert_states(ours, inputs, expected | {"normed": normed, "lm_logits": output.logits}, RANDOM_TOLERANCE)
    assert ours.config.decoder_start_token_id == config["decoder_start_token_id"]
    assert (ours.lm_head is not None) == own_head

    save_backbone(ours, tmp_path / "ours")
    assert load_backbone(tmp_path / "ours").config == ours.config
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_close(again.eval()(**inputs._asdict()).logits, output.logits)


# ---- The equations ----


def bucket(r, both, count=32, most=128):
    """In plain Python, for the numbers that all published checkpoints have."""
    first, n = 0, max(-r, 0)
    if both:
        count //= 2
        first, n = count * (r > 0), abs(r)
    half = count // 2
    far = half + math.floor(math.log(n / half) / math.log(most / half) * (count - half)) if n >= half else 0
    return first + (n if n < half else min(far, count - 1))


@pytest.mark.parametrize("both", [True, False])
def test_buckets_are_those_of_the_formula(both):
    config, distances = load_backbone(GOLDEN / "t5").config, torch.arange(-600, 601)
    bucket_numbers = buckets(
        distances, both, replace(config, relative_attention_num_buckets=32, relative_attention_max_distance=128)
    )
    assert bucket_numbers.tolist() == [bucket(r, both) for r in distances.tolist()]
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    attention = transformers.models.t5.modeling_t5.T5Attention
    assert torch.equal(bucket_numbers, attention._relative_position_bucket(distances, both, 32, 128))


def by_loops(file, config, text, answer):
    """The logits of one text and answer, (T, V) in float64, from the tensors of Hugging Face's file, in loops."""
    get = {name: tensor.double().numpy() for name, tensor in file.items()}
    heads, d = config.num_attention_heads, config.head_width
    sizes = config.relative_attention_num_buckets, config.relative_attention_max_distance

    def norm(x, name):
        return [row / math.sqrt(sum(v * v for v in row) / len(row) + 1e-6) * get[f"{name}.weight"] for row in x]

    def attention(x, others, name, table, both):
        q, k, v = (
            [get[f"{name}.{part}.weight"] @ row for row in rows] for part, rows in zip("qkv", (x, others, others))
        )
        out = []
        for i in range(len(x)):
            read = np.zeros(heads * d)
            for h in range(heads):
                of_head, scores = slice(h * d, (h + 1) * d), []
                for j in range(len(others)):
                    bias = 0.0 if table is None else get[table][bucket(j - i, both, *sizes), h]
                    scores.append(-math.inf if table and not both and j > i else q[i][of_head] @ k[j][of_head] + bias)
                powers = [math.exp(score - max(scores)) for score in scores]
                for j, power in enumerate(powers):
                    read[of_head] += power / sum(powers) * v[j][of_head]
            out.append(get[f"{name}.o.weight"] @ read)
        return out

    def feed(x, name):
        outputs = []
        for row in x:
            if f"{name}.wi.weight" in get:
                inner = np.maximum(get[f"{name}.wi.weight"] @ row, 0)
            else:
                g = get[f"{name}.wi_0.weight"] @ row
                gelu = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
                inner = gelu * (get[f"{name}.wi_1.weight"] @ row)
            outputs.append(get[f"{name}.wo.weight"] @ inner)
        return outputs

    def add(x, y):
        return [a + b for a, b in zip(x, y)]

    def stack(name, ids, layers, memory):
        x, table = (
            [get["shared.weight"][i] for i in ids],
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        )
        for layer in range(layers):
            stem = f"{name}.block.{layer}.layer"
            normed = norm(x, f"{stem}.0.layer_norm")
            x = add(x, attention(normed, normed, f"{stem}.0.SelfAttention", table, name == "encoder"))
            if memory is not None:
                x = add(x, attention(norm(x, f"{stem}.1.layer_norm"), memory, f"{stem}.1.EncDecAttention", None, False))
            last = 1 if memory is None else 2
            x = add(x, feed(norm(x, f"{stem}.{last}.layer_norm"), f"{stem}.{last}.DenseReluDense"))
        return norm(x, f"{name}.final_layer_norm")

    memory = stack("encoder", text, config.num_encoder_layers, None)
    normed = stack("decoder", answer, config.num_hidden_layers, memory)
    scale = config.hidden_size**-0.5 if "lm_head.weight" not in get else 1.0
    return np.stack([get.get("lm_head.weight", get["shared.weight"]) @ (row * scale) for row in normed])


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_its_equations_in_loops_in_float64(kind):
    model, inputs, _ = golden(kind)
    file, model = load_file(GOLDEN / kind / "model.safetensors"), model.double()
    one = Pairs(inputs.input_ids[1:2, :6], None, inputs.decoder_input_ids[1:2, :5])
    hidden = model.run_layers(model.embed(one), model.context(one), 0, 3)
    logits = F.linear(model.norm(hidden), model.get_parameter(model.vocabulary["weight"]))[0].numpy()  # in float64
    expected = by_loops(file, model.config, one.input_ids[0].tolist(), one.decoder_input_ids[0].tolist())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12)


def test_what_the_encoder_makes_of_a_text_does_not_depend_on_its_padding():
    model, inputs, _ = golden("t5")
    whole = model.context(inputs)
    for row, length in enumerate(inputs.attention_mask.sum(1)):
        alone = model.context(
            Pairs(inputs.input_ids[row : row + 1, :length], None, inputs.decoder_input_ids[row : row + 1])
        )
        assert alone.readable is None
        assert_close(whole.memory[row, :length], alone.memory[0], 2e-6)
    other = inputs.input_ids.where(inputs.attention_mask.bool(), torch.tensor(7))
    changed = model.context(inputs._replace(input_ids=other))
    assert torch.equal(changed.memory[inputs.attention_mask.bool()], whole.memory[inputs.attention_mask.bool()])


# ---- Folders ----


@pytest.fixture
def folder(tmp_path):
    """changed(kind, config, tensors): a golden folder with other keys and tensors; None takes one away."""

    def changed(kind="t5", config=None, tensors=None):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        keys = json.loads((GOLDEN / kind / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps({key: v for key, v in keys.items() if v != "absent"}))
        stored = load_file(GOLDEN / kind / "model.safetensors") | (tensors or {})
        save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")
        return folder

    return changed


def words():
    return load_file(GOLDEN / "t5" / "model.safetensors")["shared.weight"]


OLD_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def test_old_copies_and_what_nothing_reads_are_passed_over(folder):
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    path = folder(tensors={name: words() for name in copies} | {OLD_BIAS: torch.zeros(8, 2)})
    model = load_backbone(path)
    assert model.lm_head is None and model.config.tie_word_embeddings and not model.left_out
    assert model.state_dict().keys() == load_backbone(GOLDEN / "t5").state_dict().keys()


CLASSIFIER = {"classification_head.dense.weight": torch.ones(8, 8), "classification_head.dense.bias": torch.ones(8)}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_classifier_the_backbone_is_taken_and_the_head_is_left_out(folder, kind):
    file = load_file(GOLDEN / kind / "model.safetensors")
    renamed = dict.fromkeys(file) | {f"transformer.{name}": t for name, t in file.items() if name != "lm_head.weight"}
    keys = {"architectures": ["T5ForSequenceClassification"], "tie_word_embeddings": kind == "t5"}
    classifier, (whole, inputs, _) = load_backbone(folder(kind, keys, renamed | CLASSIFIER)), golden(kind)
    assert classifier.left_out == tuple(sorted(CLASSIFIER)) and not classifier.untied_head
    assert classifier.has_lm_head == (kind == "t5")  # v1.1 has a head of its own, which is not in this file
    for state, expected in zip(classifier.hidden_states(*inputs[:2]), whole.hidden_states(*inputs[:2]), strict=True):
        assert torch.equal(state, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_that_transformers_saved_is_read_as_it_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = drawn_config(0) | {"num_decoder_layers": 2}
    model = transformers.T5ForSequenceClassification(transformers.T5Config(**config)).eval()
    model.save_pretrained(tmp_path / "theirs")
    inputs, ours = drawn_pairs(config, 0), load_backbone(tmp_path / "theirs")
    output = model.transformer(**inputs._asdict(), output_hidden_states=True)
    context, hidden = ours.context(inputs), ours.embed(inputs)
    for depth, expected in enumerate(output.decoder_hidden_states[:2]):
        assert_close(hidden, expected, RANDOM_TOLERANCE)
        hidden = ours.run_layers(hidden, context, depth, depth + 1)
    assert_close(F.rms_norm(hidden, hidden.shape[-1:], ours.norm.weight, ours.norm.eps), output.last_hidden_state)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (
            "t5",
            {"encoder.embed_tokens.weight": torch.ones(64, 8)},
            "encoder.embed_tokens.weight must be tied to shared",
        ),
        ("t5", {"decoder.final_layer_norm.weight": None}, r"1 missing \(decoder.final_layer_norm.weight\)"),
        ("t5", {"encoder.block.1.layer.0.SelfAttention.k.weight": None}, "1 missing .*SelfAttention.k.weight"),
        ("t5", {"decoder.block.3.layer.0.layer_norm.weight": torch.ones(8)}, "1 unexpected .*block.3"),
        ("t5", {"encoder.block.0.layer.1.DenseReluDense.wi_0.weight": torch.ones(12, 8)}, "1 unexpected .*wi_0"),
        ("t5", {"shared.weight": torch.ones(60, 8)}, r"shared.weight must have shape \(64, 8\), found \(60, 8\)"),
        ("t5", {"shared.weight": None}, r"1 missing \(shared.weight\)"),
    ],
)
def test_tensors_that_do_not_fit_are_told(folder, kind, change, message):
    with pytest.raises(ValueError, match=message):
        load_backbone(folder(kind, tensors=change))


def test_a_model_without_a_head_of_its_own_is_asked_for_one_where_its_config_names_it(folder):
    untied, nothing = {"tie_word_embeddings": False}, {"lm_head.weight": None}
    with pytest.raises(ValueError, match=r"1 missing \(lm_head.weight\)"):
        load_backbone(folder("t5-v1.1", untied, nothing))
    bare = load_backbone(folder("t5-v1.1", untied | {"architectures": ["T5Model"]}, nothing))
    assert not bare.has_lm_head
    with pytest.raises(ValueError, match="this t5 has no LM head: load a checkpoint that was saved with one"):
        bare.lm_logits(torch.zeros(1, 8))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d_model": "wide"}, "d_model must be a whole number from 1 to [0-9]*, got 'wide'"),
        ({"d_kv": "absent"}, "missing key d_kv"),
        ({"num_layers": 10**9}, "num_layers must be a whole number from 1 to 1000"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be a whole number from 1 to [0-9]*, got 0"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj must be one of gelu, .* got 'gated-tanh'"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj must be one of"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance above half of it, got 8 and 4"),
        ({"decoder_start_token_id": 64}, "decoder_start_token_id must be below vocab_size, got 64 and 64"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder must be True, got False: not supported"),
        ({"is_causal": False}, "is_causal must be True, got False: not supported"),
        ({"is_causal": None}, "is_causal must be True, got None: not supported"),
        ({"dropout_rate": 2}, "dropout_rate must be a number from 0 to 1"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn must be 'relu', got 'gelu': not supported"),
        ({"feed_forward_proj": "gated-gelu"}, "dense_act_fn must be 'gelu_new', got 'relu': not supported"),
        ({"dense_act_fn": None}, "dense_act_fn must be 'relu', got None: not supported"),
        ({"is_gated_act": True}, "is_gated_act must be False, got True: not supported"),
        ({"scale_decoder_outputs": None}, "scale_decoder_outputs must be True, got None: not supported"),
    ],
)
def test_a_wrong_config_is_told_in_the_words_of_the_file(folder, change, message):
    path = folder(config=change) / "config.json"
    with pytest.raises(ValueError, match=message) as info:
        read_config(path)
    assert str(path) in str(info.value) and "\n" not in str(info.value)


def test_what_a_config_leaves_out_is_as_hugging_face_takes_it(folder):
    left_out = ["num_decoder_layers", "decoder_start_token_id", "scale_decoder_outputs", "n_positions"]
    left_out.append("tie_word_embeddings")  # as in the files of v1.0
    config = read_config(folder(config=dict.fromkeys(left_out, "absent") | {"pad_token_id": 5}) / "config.json")
    assert (config.num_hidden_layers, config.decoder_start_token_id, config.max_tokens) == (2, 5, 512)
    assert config.scale_decoder_outputs and config.tie_word_embeddings and isinstance(config, T5Config)


def test_a_new_one_is_drawn_as_hugging_face_draws_it():
    sizes = dict(vocab_size=900, hidden_size=64, num_hidden_layers=2, num_encoder_layers=2, num_attention_heads=4)
    config = T5Config(model_type="t5", **sizes, head_dim=25, intermediate_size=96, feed_forward_proj="gated-gelu")
    torch.manual_seed(0)
    model = T5(replace(config, tie_word_embeddings=False))
    wanted = {
        "embeddings.weight": 1,
        "lm_head.weight": 1,
        "biases.table.weight": 64**-0.5,
        "layers.1.gate.weight": 64**-0.5,
        "encoder.0.down.weight": 96**-0.5,
        "layers.0.attention_output.weight": 100**-0.5,
        "layers.0.cross_query.weight": (64 * 25) ** -0.5,
        "layers.0.cross_key_value.weight": 64**-0.5,
    }
    deviations = {name: float(model.get_parameter(name).std()) for name in wanted}
    assert deviations == pytest.approx(wanted, rel=0.1)
    query, key, _ = model.encoder[1].qkv.weight.split(100)
    assert float(query.std()) == pytest.approx((64 * 25) ** -0.5, rel=0.1) and float(key.std()) > 4 * float(query.std())
    assert isinstance(model.norm, HeadNorm) and isinstance(model.biases, Biases)
