"""Llama, Gemma and Phi against transformers, through what tests/make_golden.py wrote; the cache against no cache."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mini_ee.lab.backbones.hub as checkpoint
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.cache import Cache, rotate, token_positions
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.llama import DecoderConfig
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.exits.heads import VocabularyHead

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("llama", "llama3", "gemma", "phi", "mistral", "qwen2", "qwen3", "phi3")
TOLERANCE = 1e-4
"""Measured maximum against transformers, torch 2.13 on CPU: 7e-6, in Gemma, whose logits reach 8."""
SELF_TOLERANCE = 1e-4
"""Two ways to compute the same thing with other shapes; measured maximum 1.3e-5, in Gemma."""


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def golden(kind):
    """The decoder, its inputs, and what transformers computed."""
    expected = read_tensors(GOLDEN / kind / "expected.safetensors")
    return load_backbone(GOLDEN / kind), expected.pop("input_ids"), expected.pop("attention_mask"), expected


def assert_close(output, expected, tolerance=SELF_TOLERANCE):
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, "phi3-long"])
def test_hidden_states_and_logits_are_those_of_transformers(kind):
    model, ids, mask, expected = golden(kind)
    states, real = model.hidden_states(ids, mask), mask.bool()
    assert len(states) == model.config.num_hidden_layers + 1
    outputs = {f"hidden.{depth}": state for depth, state in enumerate(states[:-1])}
    outputs |= {"normed": model.norm(states[-1]), "lm_logits": model.lm_logits(states[-1])}
    assert outputs.keys() == expected.keys() - {"greedy"}
    for name, tensor in outputs.items():
        assert_close(tensor[real], expected[name][real], TOLERANCE)


# ---- Equations ----


def test_a_rotation_turns_the_pairs_as_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(2, 3, 4, 10, generator=generator, dtype=torch.float64)
    angle = torch.randn(2, 3, 1, 3, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos().repeat(1, 1, 1, 2), torch.cat((-angle.sin(), angle.sin()), dim=-1)
    turned = torch.complex(heads[..., :3], heads[..., 3:6]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, heads[..., 6:]), dim=-1)  # what is beyond R = 6 stays
    assert_close(rotate(heads, cos, sin), expected, 1e-12)


def test_llama3_keeps_quick_frequencies_divides_slow_ones_and_goes_over_between():
    config = load_backbone(GOLDEN / "llama3").config
    scaling, seen = config.rope_scaling, set()
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    longest, shortest = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    for i, scaled in enumerate(config.rope_frequencies().tolist()):
        frequency = config.rope_theta ** (-2 * i / config.rotary_width)
        wavelength = 2 * math.pi / frequency
        if wavelength < shortest:
            expected = frequency
        elif wavelength > longest:
            expected = frequency / factor
        else:
            smooth = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            expected = (1 - smooth) * frequency / factor + smooth * frequency
        seen.add((wavelength < shortest, wavelength > longest))
        assert scaled == pytest.approx(expected, rel=1e-5)
    assert len(seen) == 3  # all three cases


def test_attention_reads_what_loops_over_tokens_heads_and_groups_read():
    model = load_backbone(GOLDEN / "llama").double()
    layer, config, tokens = model.layers[0], model.config, 5
    normed = torch.randn(1, tokens, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attended = layer.attention(normed, model.block(torch.arange(tokens)[None]), None, None)[0]

    width, group = config.head_width, config.num_attention_heads // config.key_value_heads
    weights = layer.qkv.weight.split(layer.qkv.sizes)
    query, key, value = (normed[0] @ weight.T for weight in weights)

    def head(x, token, index, turn):
        part = x[token, index * width : (index + 1) * width]
        if not turn:
            return part
        pairs = [complex(part[i], part[i + width // 2]) for i in range(width // 2)]
        angles = token * config.rope_frequencies().double()
        turned = [pair * complex(math.cos(a), math.sin(a)) for pair, a in zip(pairs, angles.tolist())]
        return torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=torch.float64)

    rows = []
    for t in range(tokens):
        read = []
        for h in range(config.num_attention_heads):
            q = head(query, t, h, turn=True)
            scores = [float(q @ head(key, s, h // group, turn=True)) / math.sqrt(width) for s in range(t + 1)]
            shares = [math.exp(score) for score in scores]
            mixed = sum(share / sum(shares) * head(value, s, h // group, turn=False) for s, share in enumerate(shares))
            read.append(mixed)
        rows.append(torch.cat(read))
    assert_close(attended, torch.stack(rows) @ layer.attention_output.weight.T, 1e-6)  # cos and sin are float32


def test_positions_count_tokens_and_padding_on_either_side_has_none():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    assert token_positions(mask).tolist() == [[0, 1, 2], [-1, -1, 0], [0, 1, -1], [-1, -1, -1]]


# ---- The cache ----


def cached(model, ids, mask, cuts, rows=None):
    """hidden[L] of a batch that runs in several blocks, each against the cache of those before it."""
    cache, positions = Cache(model, len(ids), ids.shape[1]), token_positions(mask)
    states = []
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1])):
        block = model.block(positions[:, start:stop], cache, rows)
        states.append(model.run_layers(model.embed(Tensors(ids[:, start:stop])), block, 0, len(model.layers)))
    return torch.cat(states, dim=1)


CUTS = [(kind, (3, 4, 6)) for kind in KINDS] + [("llama", ()), ("llama", (8,))]
CUTS += [(kind, tuple(range(1, 9))) for kind in ("llama", "mistral", "phi3")]  # mistral has a window


@pytest.mark.parametrize("kind, cuts", CUTS)
def test_cached_equals_uncached(kind, cuts):
    model, ids, mask, _ = golden(kind)
    whole, real = model(ids, mask), mask.bool()
    assert_close(cached(model, ids, mask, cuts)[real], whole[real])
    assert_close(cached(model, ids, mask, cuts, rows=[0, 1, 2])[real], whole[real])
    assert_close(cached(model, ids[:1], mask[:1], cuts), whole[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing_and_a_batch_is_its_rows_alone(kind):
    model, ids, mask, _ = golden(kind)
    whole = model.hidden_states(ids, mask)
    for row in range(len(ids)):
        row_ids = ids[row, mask[row].bool()][None]
        alone = model.hidden_states(row_ids)
        right = model.hidden_states(
            torch.nn.functional.pad(row_ids, (0, 3)), torch.tensor([[1] * row_ids.shape[1] + [0] * 3])
        )
        for padded, plain, after in zip(whole, alone, right):
            assert_close(padded[row, mask[row].bool()], plain[0])
            assert_close(after[0, : row_ids.shape[1]], plain[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_named_by_index_and_those_that_left_keep_their_cache(kind):
    model, ids, mask, _ = golden(kind)
    layers, cache, positions = len(model.layers), Cache(model, 3, 12), token_positions(mask)
    model.run_layers(model.embed(Tensors(ids)), model.block(positions, cache), 0, layers)
    before, place = cache.keys.clone(), cache.keys.data_ptr()
    token, last = torch.tensor([[7], [9]]), positions[[2, 0], -1:]
    block = model.block(last + 1, cache, rows=[2, 0])
    states = model.run_layers(model.embed(Tensors(token)), block, 0, layers)[:, 0]
    for i, row in enumerate((2, 0)):
        longer = torch.cat((ids[row, mask[row].bool()], token[i]))[None]
        assert_close(states[i], model(longer)[0, -1])
    assert cache.keys.data_ptr() == place
    torch.testing.assert_close(cache.keys[:, 1], before[:, 1], atol=0, rtol=0)


def test_a_rejected_draft_leaves_nothing_behind():
    model, ids, _, _ = golden("llama")
    ids, layers, cache = ids[:1], len(model.layers), Cache(model, 1, 12)
    for draft, start in ((ids, 0), (torch.tensor([[5, 6]]), 9), (torch.tensor([[8, 3, 2]]), 9)):
        block = model.block(torch.arange(start, start + draft.shape[1])[None], cache)
        states = model.run_layers(model.embed(Tensors(draft)), block, 0, layers)
    assert_close(states, model(torch.cat((ids, torch.tensor([[8, 3, 2]])), dim=1))[:, 9:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, [2, 0, 1]])
def test_copying_the_true_hidden_states_writes_the_true_keys_and_values(kind, rows):
    model, ids, mask, _ = golden(kind)
    states, positions = model.hidden_states(ids, mask), token_positions(mask)
    ran, copied = Cache(model, 3, 9), Cache(model, 3, 9)
    model.run_layers(states[0], model.block(positions, ran, rows), 0, len(model.layers))
    for depth, state in enumerate(states[:-1]):
        model.copy_state(state, model.block(positions, copied, rows), depth, depth + 1)
    assert_close(copied.keys[..., :-1, :], ran.keys[..., :-1, :])  # the last slot is padding's
    assert_close(copied.values[..., :-1, :], ran.values[..., :-1, :])
    assert copied.keys[..., :-1, :].any()


def test_copy_state_takes_one_state_through_each_layers_own_norm_and_projections():
    model = load_backbone(GOLDEN / "phi")
    state = torch.randn(1, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    cache = Cache(model, 1, 4)
    model.copy_state(state, model.block(torch.tensor([[1, 2]]), cache), 1, 3)
    assert not cache.keys[0].any() and not cache.keys[1:, :, :, 0].any()
    for depth in (1, 2):
        layer = model.layers[depth]
        *_, value = layer.qkv(layer.attention_norm(state)).split(layer.qkv.sizes, dim=-1)
        assert_close(cache.values[depth, 0, :, 1:3].transpose(0, 1).flatten(1), value[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_runs_cached_and_is_near_float32(kind):
    model, ids, mask, expected = golden(kind)
    model, real = model.bfloat16(), mask.bool()
    hidden = cached(model, ids, mask, (4, 8))
    assert hidden.dtype == torch.bfloat16 and model.lm_logits(hidden).dtype == torch.float32
    error = (model.lm_logits(hidden) - expected["lm_logits"])[real].abs().mean()
    assert error < 0.05 * expected["lm_logits"][real].std()  # bfloat16 keeps 8 bits; measured at most .013


# ---- Folders ----


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_transformers_saved_and_loads_again(tmp_path, kind):
    model = load_backbone(GOLDEN / kind)
    save_backbone(model, tmp_path / "saved")
    ours, theirs = load_file(tmp_path / "saved/model.safetensors"), load_file(GOLDEN / kind / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = load_backbone(tmp_path / "saved")
    assert again.config == model.config
    architectures = [
        json.loads((folder / "config.json").read_text())["architectures"]
        for folder in (tmp_path / "saved", GOLDEN / kind)
    ]
    assert architectures[0] == architectures[1]


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def copy_of(kind, tmp_path):
    return shutil.copytree(GOLDEN / kind, tmp_path / "model")


def loads_as_before(folder, kind):
    weights, expected = load_backbone(folder).state_dict(), load_backbone(GOLDEN / kind).state_dict()
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


def test_names_may_lack_the_prefix_and_old_files_hold_frequencies(tmp_path):
    folder = copy_of("llama", tmp_path)
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    rewrite(folder, lambda tensors: tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    assert loads_as_before(folder, "llama")


def test_shards_are_read(tmp_path):
    folder = copy_of("phi", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / shard)
    index = {"weight_map": {name: shard for shard, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert loads_as_before(folder, "phi")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_as_float32(tmp_path, dtype):
    folder = copy_of("llama", tmp_path)
    rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    weights = load_file(GOLDEN / "llama" / "model.safetensors")
    model = load_backbone(folder)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert torch.equal(model.embeddings.weight, weights["model.embed_tokens.weight"].to(dtype).float())


def test_a_tied_head_may_be_stored_if_it_is_what_it_is_tied_to(tmp_path):
    folder = copy_of("gemma", tmp_path)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert loads_as_before(folder, "gemma")
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="lm_head.weight must be tied to embed_tokens.weight"):
        load_backbone(folder)


def test_a_head_that_is_not_tied_must_be_there(tmp_path):
    folder = copy_of("llama", tmp_path)
    rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"1 missing \(lm_head.weight\)"):
        load_backbone(folder)


def test_a_decoder_that_was_saved_without_head_is_taken_and_says_so_where_one_is_needed(tmp_path):
    folder = copy_of("llama", tmp_path)

    def bare(tensors):
        return {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}

    rewrite(folder, bare)
    (folder / "config.json").write_text(json.dumps(config_of("llama", architectures=["LlamaModel"])))
    model, (whole, ids, mask, _) = load_backbone(folder), golden("llama")
    assert torch.equal(model(ids, mask), whole(ids, mask)) and not model.has_lm_head and model.left_out == ()
    for ask in (lambda: model.lm_logits(model(ids)), lambda: VocabularyHead(model, "copy")):
        with pytest.raises(ValueError, match="this llama has no LM head: load a checkpoint that was saved with one"):
            ask()
    save_backbone(model, tmp_path / "saved")
    assert torch.equal(load_backbone(tmp_path / "saved")(ids, mask), whole(ids, mask))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]


def test_the_shares_of_a_stack_are_told_apart(tmp_path):
    folder, name = copy_of("llama", tmp_path), "model.layers.1.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].repeat(2, 1)})
    with pytest.raises(ValueError, match=r"k_proj.weight must have shape \(8, 16\), found \(16, 16\)"):
        load_backbone(folder)


# ---- Configs ----


def config_of(kind, **change):
    config = json.loads((GOLDEN / kind / "config.json").read_text()) | change
    return {key: value for key, value in config.items() if value is not ...}


def test_transformers_4_spelt_rotary_settings_apart():
    rope = config_of("llama3")["rope_parameters"]
    old = config_of("llama3", rope_parameters=..., rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert DecoderConfig.from_hugging_face(old) == DecoderConfig.from_hugging_face(config_of("llama3"))
    old = config_of("phi", rope_parameters=..., partial_rotary_factor=0.4)
    assert DecoderConfig.from_hugging_face(old) == DecoderConfig.from_hugging_face(config_of("phi"))


def test_an_old_gemma_says_gelu_and_means_the_tanh_form():
    for change in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_act": ...}):
        assert DecoderConfig.from_hugging_face(config_of("gemma", **change)).hidden_act == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "swish"},
        {"sliding_window": 4, "use_sliding_window": False},
        {"bos_token_id": -1},
        {"partial_rotary_factor": 1.0},
        {"rope_scaling": {"type": "default", "rope_theta": 10000.0}},
    ],
)
def test_other_spellings_of_the_same_model_compute_the_same(tmp_path, change):
    folder = copy_of("llama", tmp_path)
    (folder / "config.json").write_text(json.dumps(config_of("llama", **change)))
    model, ids, mask, _ = golden("llama")
    assert torch.equal(load_backbone(folder)(ids, mask), model(ids, mask))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("llama", {"hidden_size": 0}, "hidden_size must be a whole number from 1 to [0-9]*, got 0"),
        ("llama", {"vocab_size": ...}, "missing key vocab_size"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ("llama", {"hidden_size": 18, "head_dim": ...}, "hidden_size must be a multiple of num_attention_heads"),
        ("llama", {"head_dim": 7}, "must be an even number"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act must be one of"),
        ("llama", {"rms_norm_eps": -1}, "norm_eps must be a number from 0 to 1, got -1"),
        ("llama", {"attention_bias": True}, "attention_bias must be False, got True: not supported"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ("llama", {"eos_token_id": [2, -1]}, "eos_token_id must be a whole number from 0 to [0-9]*, got -1"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default' or 'llama3', got 'yarn'"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("llama", {"rope_parameters": {"type": "llama3"}}, "rope_scaling: factor must be a number above 0"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 10**400}},
            "rope_theta must be a number above 0 .*, got an integer",
        ),
        ("llama", {"rope_scaling": LLAMA3}, "rope_parameters and rope_scaling must agree"),
        ("llama3", {"rope_scaling": {"type": "default"}}, "rope_parameters and rope_scaling must agree"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in llama, got 0.5: not supported"),
        ("gemma", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in gemma"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1 in llama"),
        (
            "gemma",
            {"hidden_activation": "relu"},
            "hidden_act and hidden_activation must agree, got",
        ),
        ("gemma", {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "relu"}, "must agree, got 'relu'"),
        ("llama", {"sliding_window": 4}, "sliding_window must be None, got 4"),
        ("llama", {"sliding_window": 4, "use_sliding_window": True}, "sliding_window must be None, got 4"),
        ("llama", {"bos_token_id": -2}, "bos_token_id must be a whole number from 0 to [0-9]*, got -2"),
        (
            "llama",
            {"eos_token_id": 10**60},
            "eos_token_id must be a whole number .*, got an integer of about 10",
        ),
        ("llama", {"vocab_size": 2**63 - 1}, "vocab_size must be a whole number from 1 to 16777216"),
        ("llama", {"num_key_value_heads": 10**60}, "num_key_value_heads must be a whole number from 1 to 1048576"),
        ("llama", {"max_position_embeddings": 2**22, "head_dim": 1024}, "must be at most 1073741824, got 4194304 and"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm must be False"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings must be false in phi"),
        ("phi", {"model_type": "phi4"}, "model_type must be one of"),
    ],
)
def test_a_config_that_no_decoder_can_have_is_told_in_one_line(tmp_path, kind, change, message):
    folder = copy_of(kind, tmp_path)
    (folder / "config.json").write_text(json.dumps(config_of(kind, **change)))
    with pytest.raises(ValueError, match=message) as info:
        load_backbone(folder)
    assert "\n" not in str(info.value) and str(folder) in str(info.value)


def test_what_is_too_long_is_told():
    model = load_backbone(GOLDEN / "llama")
    with pytest.raises(ValueError, match="at most 64 tokens, got 65"):
        model.hidden_states(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="at most 64 tokens, prompt and continuation together, got 65"):
        Cache(model, 1, 65)
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        model.block(torch.arange(9)[None], Cache(model, 1, 8))
    with pytest.raises(ValueError, match="expected 'B T'"):
        model.embed(Tensors(torch.ones(3, dtype=torch.long)))


@pytest.mark.skipif("MINI_EE_SHARED" not in os.environ, reason="needs the real stories260K (2026-11)")
def test_the_real_stories260k_computes_what_it_does_in_transformers():
    expected = read_tensors(GOLDEN / "stories260K" / "expected.safetensors")
    model = checkpoint.load_backbone(Path(os.environ["MINI_EE_SHARED"]) / "weights" / "stories260K")
    *states, last = model.hidden_states(expected["input_ids"])
    states_by_name = {f"hidden.{depth}": state for depth, state in enumerate(states)}
    for name, tensor in (states_by_name | {"normed": model.norm(last), "lm_logits": model.lm_logits(last)}).items():
        assert_close(tensor[..., ::8], expected[name], TOLERANCE)
