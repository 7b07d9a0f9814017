"""Mistral, Qwen2, Qwen3 and Phi-3 against transformers on random configs, raw as config.json has them; and by hand."""

import functools
import json
import math
import shlex
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.cache import Cache, readable, token_positions
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tokenizer import Inputs, Tokenizer
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import generate
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Never
from mini_ee.lab.training.run_folder import load_run

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("mistral", "qwen2", "qwen3", "phi3")
TOLERANCE = 1e-4
"""Measured maximum against transformers, of 200 such configs: 1.3e-5, in Phi-3; cached against not 4.4e-6."""
ENGINES = 2e-5
"""ONNX Runtime against torch; measured maximum 1.1e-6."""
TOKENS = 14

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of odd configs


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_close(output, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=0)


# ---- Random configs, all switches ----
def drawn_config(kind, seed):
    """A config.json, small, with every switch that changes what is computed; keys may be missing or null."""
    draw = np.random.default_rng([seed, *kind.encode()])

    def one_of(*values):
        return values[draw.integers(len(values))]

    def some(**keys):
        """Each key is there, or not."""
        return {key: value for key, value in keys.items() if one_of(True, True, True, False)}

    (heads, width), head_dim, layers = one_of((1, 8), (2, 8), (4, 4), (3, 8)), one_of(4, 6, 10), one_of(1, 2, 3)
    config = {
        "model_type": kind,
        "vocab_size": 40,
        "hidden_size": heads * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": one_of(1, heads, heads if kind == "mistral" else None),
        "intermediate_size": one_of(8, 20),
        "max_position_embeddings": one_of(16, 64),
        "hidden_act": one_of("silu", "silu", "gelu", "relu", "gelu_pytorch_tanh"),
        "eos_token_id": one_of(2, [2, 3]),
        "pad_token_id": None,
    }
    config |= some(rms_norm_eps=one_of(1e-6, 1e-5, 1e-2), tie_word_embeddings=one_of(True, False))
    window, rotary = one_of(1, 3, 7, 13, 14, 64, None), 1.0
    if kind == "mistral":
        config |= some(sliding_window=window, use_sliding_window=False, max_window_layers=1, head_dim=head_dim)
    if kind in ("qwen2", "qwen3"):
        config |= some(use_sliding_window=one_of(True, True, False), sliding_window=window)
        config |= some(max_window_layers=one_of(0, 1, 2, 28))
        if config.get("use_sliding_window") and config.get("sliding_window"):
            types = [one_of("full_attention", "sliding_attention") for _ in range(layers)]
            config |= one_of({}, {"layer_types": types})
        config |= {"head_dim": head_dim} if kind == "qwen3" else one_of({}, {"head_dim": head_dim})
        config |= some(attention_bias=one_of(True, False)) if kind == "qwen3" else {}
    if kind == "phi3":
        rotary = one_of(1.0, 0.5)
        config |= some(sliding_window=window, partial_rotary_factor=rotary)
    return config | drawn_rope(one_of, config)


def drawn_rope(one_of, config):
    """rope_theta and its scaling, in the spelling of transformers 4 or 5."""
    theta, scaling, beside = one_of(100.0, 10000.0, 1000000), {}, {}
    if config["model_type"] != "phi3" and one_of(True, False, False):
        numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": 12} | numbers
    if config["model_type"] == "phi3" and one_of(True, True, False):
        head_width = config["hidden_size"] // config["num_attention_heads"]
        half = int(head_width * config.get("partial_rotary_factor", 1.0)) // 2
        factors = {key: [one_of(1.0, 1.3, 4) for _ in range(half)] for key in ("short_factor", "long_factor")}
        scaling = {one_of("type", "rope_type"): "longrope"} | factors
        scaling |= one_of({}, {}, {"factor": 8.0}, {"attention_factor": 1.25})
        beside = {"original_max_position_embeddings": one_of(4, 10, 16, 32)}
    if not scaling:
        return one_of({"rope_theta": theta}, {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}, {})
    spelling = {"rope_theta": theta, "rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": theta}}
    return one_of(*spelling) | beside


def theirs(folder, config, seed):
    """The model of transformers for this very file, every parameter drawn; its weights are written beside it."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3).add_("norm" in name and name.endswith("weight"))
        else:
            parameter.mul_(0.5 if "embed_tokens" in name else parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def drawn_batch(seed):
    """Three rows of 14, 7 and 1 tokens; the second has its padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (3, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [7], [1]])).long()
    mask[1] = mask[1].flip(0)
    return ids * mask, mask


def said_of(model, ids):
    """What transformers says of one row alone: hidden states, the last behind the norm, and logits."""
    output = model(ids[None], output_hidden_states=True, use_cache=False)
    return [*output.hidden_states, output.logits]


def cached(model, ids, mask, cuts):
    """hidden[L] of a batch that runs in several blocks, each against the cache of those before it."""
    cache, positions, states = Cache(model, len(ids), ids.shape[1]), token_positions(mask), []
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1])):
        block = model.block(positions[:, start:stop], cache)
        states.append(model.run_layers(model.embed(Tensors(ids[:, start:stop])), block, 0, len(model.layers)))
    return torch.cat(states, dim=1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_random_configs_are_equal_to_transformers_cached_and_not_and_written_as_they_are_read(kind, seed, tmp_path):
    config = drawn_config(kind, seed)
    model, ours = theirs(tmp_path / "theirs", config, seed), load_backbone(tmp_path / "theirs")
    (ids, mask), L = drawn_batch(seed), config["num_hidden_layers"]
    states = ours.hidden_states(ids, mask)
    outputs = [*states[:L], ours.norm(states[L]), ours.lm_logits(states[L])]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for row, real in enumerate(mask.bool()):
            for tensor, expected in zip(outputs, said_of(model, ids[row, real]), strict=True):
                assert_close(tensor[row, real], expected[0])
    for row, real in enumerate(mask.bool()):
        row_ids = ids[row, real][None]
        if row_ids.shape[1] <= ours.max_written:
            assert_close(
                cached(ours, row_ids, torch.ones_like(row_ids), range(1, row_ids.shape[1])), states[L][row, real][None]
            )
    if TOKENS <= ours.max_written:
        assert_close(cached(ours, ids, mask, (5, 8, 9))[mask.bool()], states[L][mask.bool()])

    save_backbone(ours, tmp_path / "ours")
    assert load_backbone(tmp_path / "ours").config == ours.config
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_close(said_of(again.eval(), ids[0])[-1], said_of(model, ids[0])[-1], 1e-6)


# ---- Windows and LongRoPE by hand ----
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_a_window_shows_a_token_itself_and_the_nearest_before_it(window):
    at, reads = torch.tensor([[3, 4, 5], [0, 1, 2]]), torch.arange(6)[None]
    shown = readable(at, reads, window)
    for b, t, s in product(range(2), range(3), range(6)):
        behind = int(at[b, t]) - s  # how many tokens it stands behind the reader
        assert bool(shown[b, 0, t, s]) == (behind in range(6 if window is None else window))


def config_of(kind, **change):
    config = json.loads((GOLDEN / kind / "config.json").read_text()) | change
    return {key: value for key, value in config.items() if value is not ...}


def windows(kind, **change):
    config = DecoderConfig.from_hugging_face(config_of(kind, **change))
    return [config.window(depth) for depth in range(config.num_hidden_layers)]


def test_which_layers_have_a_window():
    assert windows("mistral") == [6] * 3
    assert windows("mistral", sliding_window=...) == [4096] * 3
    assert windows("mistral", sliding_window=None) == [None] * 3
    assert windows("mistral", use_sliding_window=False, max_window_layers=2) == [6] * 3  # as transformers: no Mistral's
    assert windows("phi3", sliding_window=...) == [None] * 3
    old = {"layer_types": ...}  # as transformers 4 wrote it
    assert windows("qwen2", **old) == [None, 5, 5]
    assert windows("qwen2", **old, max_window_layers=...) == [None] * 3  # 28
    assert windows("qwen2", **old, sliding_window=...) == [None, 4096, 4096]
    assert windows("qwen2", **old, use_sliding_window=False) == [None] * 3
    assert windows("qwen2", **old, use_sliding_window=...) == [None] * 3
    assert windows("qwen3") == [6, None, 6]
    assert windows("qwen3", max_window_layers=0) == [6, None, 6]
    assert load_backbone(GOLDEN / "qwen3").first_layers(2).config.to_dict()["layer_types"] == (
        "sliding_attention",
        "full_attention",
    )


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi", "mistral", "phi3"])
def test_layer_types_of_full_attention_alone_say_nothing_where_layers_are_all_alike(kind, tmp_path):
    shutil.copy(GOLDEN / kind / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, layer_types=["full_attention"] * 3)))
    (ids, mask), plain = drawn_batch(0), load_backbone(GOLDEN / kind)
    assert torch.equal(load_backbone(tmp_path)(ids, mask), plain(ids, mask))  # Mistral and Phi-3 keep their window


@pytest.mark.parametrize(
    "given, words, written",
    [
        (..., 64, None),  # Hugging Face's 32000 is none of 64 words
        (..., 32000, None),
        (..., 32001, 32000),
        (None, 32001, None),
        (3, 64, 3),
        (64, 64, None),
        (-1, 64, None),
    ],
)
def test_a_phi3_is_written_with_a_pad_token_that_is_one_of_its_words(given, words, written, tmp_path):
    config = DecoderConfig.from_hugging_face(config_of("phi3", vocab_size=words, pad_token_id=given))
    with torch.random.fork_rng():
        save_backbone(Decoder(config), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"] == written


def test_transformers_reads_a_phi3_of_few_words_that_named_no_pad_token(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config, (ids, _) = DecoderConfig.from_hugging_face(config_of("phi3", pad_token_id=...)), drawn_batch(0)
    ours = Decoder(config).eval()
    save_backbone(ours, tmp_path / "saved")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert_close(ours.lm_logits(ours(ids[:1])), other(ids[:1]).logits)


@pytest.mark.parametrize("more, scale", [({}, None), ({"factor": 8.0}, 8.0), ({"factor": 0.5}, 1.0)])
def test_longrope_divides_each_frequency_and_widens_all_heads(more, scale):
    rope = config_of("phi3")["rope_parameters"] | more
    config = DecoderConfig.from_hugging_face(config_of("phi3", rope_parameters=rope))
    for long, factors in ((False, rope["short_factor"]), (True, rope["long_factor"])):
        expected = [100.0 ** (-2 * i / 6) / factor for i, factor in enumerate(factors)]
        assert config.rope_frequencies(long).tolist() == pytest.approx(expected, rel=1e-6)
    assert config.rope_scale == pytest.approx(math.sqrt(1 + math.log(scale or 64 / 40) / math.log(40)))


def test_su_is_the_first_name_of_longrope():
    rope = config_of("phi3")["rope_parameters"]
    old = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    su = config_of("phi3", rope_parameters=..., rope_scaling=old, rope_theta=100.0, partial_rotary_factor=0.75)
    assert DecoderConfig.from_hugging_face(su) == DecoderConfig.from_hugging_face(config_of("phi3"))


def long_model(words=64):
    """Rows above five tokens turn by the long factors."""
    rope = config_of("phi3")["rope_parameters"] | {"original_max_position_embeddings": 5}
    config = config_of("phi3", original_max_position_embeddings=5, rope_parameters=rope, vocab_size=words)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(DecoderConfig.from_hugging_face(config | {"initializer_range": 0.3})).eval()


def test_each_row_turns_by_its_own_length_whatever_the_batch():
    model, (ids, mask) = long_model(), drawn_batch(0)
    whole = model(ids, mask)
    for row, real in enumerate(mask.bool()):
        assert_close(whole[row, real], model(ids[row, real][None])[0], 1e-5)
    short = model(ids[:1, :5])
    assert (whole[0, :5] - short[0]).abs().max() > 1e-2  # from the first token on
    for length in (5, 6):  # the longest that turns by the short factors, and the shortest that does not
        beside = torch.ones_like(ids[:2])
        beside[1, length:] = 0
        assert_close(model(ids[[0, 0]], beside)[1, :length], model(ids[:1, :length])[0], 1e-5)
    assert_close(model(ids[:1, :6])[0], model(ids[:1, :7])[0, :6], 1e-5)


def test_of_long_and_short_rows_transformers_agrees_on_each_alone_and_not_on_the_batch(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model, (ids, mask) = long_model(), drawn_batch(0)
    save_backbone(model, tmp_path / "saved")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids, mask = ids[[0, 0]], torch.stack((mask[0], (torch.arange(TOKENS) < 4).long()))
    logits, real = model.lm_logits(model(ids, mask)), mask.bool()
    for row in range(2):
        assert_close(logits[row, real[row]], other(ids[row, real[row]][None]).logits[0])
    batch = other(ids, attention_mask=mask).logits
    assert_close(logits[0], batch[0])
    assert (logits[1, :4] - batch[1, :4]).abs().max() > 1e-2  # the long row's factors turn the short one too


def test_what_would_turn_anew_is_not_written():
    model = long_model()
    assert (model.config.max_tokens, model.max_written) == (64, 5)
    with pytest.raises(ValueError, match="at most 5 tokens, prompt and continuation together, got 3 and 3"):
        generate(model, [[4, 5, 6]], max_new_tokens=3)
    with pytest.raises(ValueError, match="at most 5 tokens, prompt and continuation together, got 6"):
        Cache(model, 1, 6)


def test_a_command_writes_no_further_than_that(tmp_path, checkpoint_of, capsys):
    save_backbone(long_model(words=300), tmp_path / "long")
    shutil.copy(checkpoint_of("qwen2") / "tokenizer.json", tmp_path / "long")
    command = ["generate", str(tmp_path / "long"), "--prompt", "the film"]
    assert main([*command, "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message["prompt_tokens"] + len(message["tokens"]) == 5
    assert main([*command, "--max-new-tokens", "9"]) in (1, 2)
    printed = capsys.readouterr()
    assert "at most 5 tokens, prompt and continuation together" in printed.err and printed.err.count("\n") == 1


# ---- ONNX: rows ----
EXITS = (1, 2, 3)


@pytest.mark.parametrize("make", [*KINDS, pytest.param(long_model, id="phi3-long")])
def test_onnx_reads_rows_as_torch_does(make, tmp_path):
    backbone = load_backbone(GOLDEN / make) if isinstance(make, str) else make()
    model = RowExits(backbone, EXITS, 3, "mean").eval()
    generator = torch.Generator().manual_seed(0)
    for head in model.heads:
        for linear in (head.dense, head.out):
            linear.weight.normal_(std=0.5, generator=generator)
    ids, mask = (tensor.numpy() for tensor in drawn_batch(0))
    inputs = Inputs(ids, mask, np.zeros_like(ids), (("",),) * len(ids))
    manifest = write_graphs(model, model.segments(), Never(), tmp_path, "float32", segments=True)
    expected = read_every_exit(model.segments(), inputs)[0]
    for engine in (OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)):
        np.testing.assert_allclose(read_every_exit(engine, inputs)[0], expected, rtol=0, atol=ENGINES)


# ---- Folders ----
def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, folder / "model.safetensors")
    return folder


NAME = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("phi3", lambda t: {k: v for k, v in t.items() if k != NAME}, r"2 missing \(layers.1.mlp.gate_up_proj.gate"),
        (
            "phi3",
            lambda t: t | {NAME: t[NAME][:-2]},
            r"gate_up_proj.gate.weight must have shape \(16, 16\), found \(15",
        ),
        ("phi3", lambda t: t | {NAME: torch.tensor(1.0)}, r"1 unexpected \(layers.1.mlp.gate_up_proj.weight"),
        ("phi3", lambda t: t | {NAME.replace("weight", "bias"): torch.ones(32)}, "2 unexpected"),
        ("qwen2", lambda t: {k: v for k, v in t.items() if not k.endswith("0.self_attn.k_proj.bias")}, "1 missing"),
        ("mistral", lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)}, "1 unexpected"),
        ("qwen3", lambda t: {k: v for k, v in t.items() if not k.endswith("2.self_attn.q_norm.weight")}, "1 missing"),
        ("qwen3", lambda t: {k: v for k, v in t.items() if not k.endswith("o_proj.bias")}, "3 missing"),
    ],
)
def test_tensors_that_do_not_fit_are_told_in_one_line(kind, change, message, tmp_path):
    folder = rewritten(shutil.copytree(GOLDEN / kind, tmp_path / "model"), change)
    with pytest.raises(ValueError, match=message) as info:
        load_backbone(folder)
    assert "\n" not in str(info.value)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number from 1 to [0-9]*, got 0"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types must be None"),
        ("phi3", {"layer_types": "full_attention"}, "layer_types must be None"),
        ("phi3", {"default_theta": 500.0}, "default_theta must be None, got 500.0: not supported"),
        ("mistral", {"is_causal": False}, "is_causal must be True, got False: not supported"),
        ("mistral", {"num_key_value_heads": ...}, "multiple of num_key_value_heads, got 4 and 8"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in qwen2"),
        ("mistral", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default' or 'llama3', got 'yarn'"),
        ("qwen2", {"rope_parameters": LONG}, "rope_type must be 'default' or 'llama3', got 'longrope'"),
        ("qwen2", {"rope_parameters": {"full_attention": {}}}, "rope_parameters must be an object that serves all"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "needs a sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name .* for 3 layers, got"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types must name"),
        ("qwen2", {"layer_types": "full_attention"}, "layer_types must name"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be a whole number from 0 to"),
        ("qwen3", {"attention_bias": "no"}, "attention_bias must be true or false"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type must be 'default' or 'longrope' or 'su'"),
        ("phi3", {"rope_parameters": LONG | {"short_factor": [1.0]}}, "short_factor must be 3 numbers, got 1"),
        (
            "phi3",
            {"rope_parameters": LONG | {"long_factor": [1, 1, 0]}},
            "long_factor must be a number above 0 .*, got 0",
        ),
        ("phi3", {"rope_parameters": LONG | {"attention_factor": "1"}}, "attention_factor must be a number above 0"),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 1}, "must be a whole number from 2 to"),
        (
            "phi3",
            {"rope_parameters": LONG | {"original_max_position_embeddings": 9}},
            "original_max_position_embeddings must be 40 as outside the entry, got 9",
        ),
    ],
)
def test_a_switch_that_is_not_computed_is_refused_in_one_line(kind, change, message, tmp_path):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config_of(kind, **change)))
    with pytest.raises(ValueError, match=message) as info:
        load_backbone(folder)
    assert "\n" not in str(info.value) and str(folder) in str(info.value)


def test_a_bin_checkpoint_is_refused_with_the_line_that_converts_it(tmp_path):
    folder = shutil.copytree(GOLDEN / "phi3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for shard in range(2):
        some = dict([*tensors.items()][shard::2])
        torch.save(some, folder / f"pytorch_model-0000{shard + 1}-of-00002.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="only safetensors are read, convert the .bin file: python -c") as info:
        load_backbone(folder)
    _, flag, code = shlex.split(str(info.value).split("convert the .bin file: ")[1])
    assert flag == "-c" and "\n" not in str(info.value)
    exec(code, {})
    state, expected = load_backbone(folder).state_dict(), load_backbone(GOLDEN / "phi3").state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


# ---- Tokenizers, and from a checkpoint to an export ----
CORPUS = ["the film was good and the song was dull", "a very very lovely book", "naïve café déjà vu"] * 4


def tokenizer_of(kind):
    """A small tokenizer in the form of the family's: Qwen's on bytes, without a first token, or SentencePiece's."""
    sentence_piece = kind in ("mistral", "phi3")
    special = ["<unk>", "<s>", "</s>"] if sentence_piece else ["<|endoftext|>"]
    letters = (
        sorted({f"<0x{byte:02X}>" for byte in range(256)}) if sentence_piece else pre_tokenizers.ByteLevel.alphabet()
    )
    backend = tokenizers.Tokenizer(
        models.BPE(byte_fallback=sentence_piece, unk_token="<unk>" if sentence_piece else None)
    )
    if sentence_piece:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special + letters)
    else:
        backend.normalizer = normalizers.NFC()
        digits = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}| ?[^\s\p{L}\p{N}]+| ?\p{L}+|\s+"), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters)
    backend.train_from_iterator(CORPUS, trainer)
    if sentence_piece:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        content = json.loads(backend.to_str())
        for token in content["added_tokens"]:  # bytes are words like others
            token["special"] = token["id"] < 3
        content["added_tokens"] = content["added_tokens"][:3]
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """A random model of three layers with the switches of the golden one, and its family's tokenizer.json."""

    @functools.cache
    def make(kind):
        folder, backend = tmp_path_factory.mktemp("family") / kind, tokenizer_of(kind)
        config = config_of(kind, vocab_size=backend.get_vocab_size(), initializer_range=0.3, eos_token_id=0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            save_backbone(Decoder(DecoderConfig.from_hugging_face(config)), folder)
        backend.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_texts_are_tokens_as_transformers_has_them_and_come_back(kind, checkpoint_of, capsys):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    ours = Tokenizer.from_folder(checkpoint_of(kind))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint_of(kind) / "tokenizer.json"))
    for text in ("the film was good", "naïve  東京 🎉\n2 films", " the"):
        ids = ours.encode([text]).ids[0].tolist()
        assert ids == theirs(text)["input_ids"] and (ids[0] == 1) == (kind == "mistral")
        assert ours.backend.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    pair, lines = ours.encode([("the film", "was good"), "the film\nwas good"]).ids
    assert pair.tolist() == lines.tolist()
    argv = ["generate", str(checkpoint_of(kind)), "--prompt", "the 東京", "--max-new-tokens", "9", "--json"]
    assert main(argv) == 0
    message = json.loads(capsys.readouterr().out)
    ids = theirs("the 東京")["input_ids"]
    (expected,) = gather(generate(load_backbone(checkpoint_of(kind)), [ids], max_new_tokens=9, stop=[0]), 1)
    assert message["tokens"] == expected.tokens and message["prompt_tokens"] == len(ids)


OPTIONS = {
    "mistral": ("joint",),
    "qwen2": ("lora-exits", "--targets", "query,key,gate"),
    "qwen3": ("self-supervised", "--new-tokens", 12),
    "phi3": ("lora-exits", "--targets", "query,value,gate,up"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_exported_and_run_as_any_other(kind, checkpoint_of, task_folder, tmp_path, capsys):
    method, *more = OPTIONS[kind]
    source = ["--texts", 16] if method == "self-supervised" else ["--task", task_folder]
    folders = ["--model", checkpoint_of(kind), "--out", tmp_path / "run"]
    options = map(str, [*folders, *source, *more, "--epochs", 1, "--exits", "1,3"])
    with torch.enable_grad():
        assert main(["train", method, *options]) == 0, capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--segments", "--json"]) == 0
    message = json.loads(capsys.readouterr().out.splitlines()[-1])["verified"]
    assert message["max_logit_difference"] < ENGINES and message["exit_agreement"] == 1
    run, runtime = load_run(tmp_path / "run"), Runtime(tmp_path / "out", threads=1)
    texts = ["the film was good", "a dull"]
    if method == "self-supervised":
        assert [answer.text for answer in runtime.run(texts, max_new_tokens=9)] == run.generate(texts, max_new_tokens=9)
    else:
        expected = [(answer.label, answer.layers) for answer in run.classify(texts)]
        assert [(answer.label, answer.exit) for answer in runtime.run(texts)] == expected
