"""Mistral, Qwen2, Qwen3 and Phi-3 against transformers on random configs, raw as config.json has them; and by hand."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_ee.backbones.backbone import Tensors
from mini_ee.backbones.hub import load_backbone, save_backbone
from mini_ee.backbones.llama import Cache, token_positions

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("mistral", "qwen2", "qwen3", "phi3")
TOLERANCE = 1e-4
"""Measured maximum against transformers, torch 2.13 on CPU."""
TOKENS = 14

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of odd configs


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_close(found, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


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
    said = model(ids[None], output_hidden_states=True, use_cache=False)
    return [*said.hidden_states, said.logits]


def cached(model, ids, mask, cuts):
    """hidden[L] of a batch that runs in several blocks, each against the cache of those before it."""
    cache, positions, states = Cache(model, len(ids), ids.shape[1]), token_positions(mask), []
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1])):
        block = model.block(positions[:, start:stop], cache)
        states.append(model.run_layers(model.embed(Tensors(ids[:, start:stop])), block, 0, len(model.layers)))
    return torch.cat(states, dim=1)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", KINDS)
def test_random_configs_are_equal_to_transformers_cached_and_not_and_written_as_they_are_read(kind, seed, tmp_path):
    config = drawn_config(kind, seed)
    model, ours = theirs(tmp_path / "theirs", config, seed), load_backbone(tmp_path / "theirs")
    (ids, mask), L = drawn_batch(seed), config["num_hidden_layers"]
    states = ours.hidden_states(ids, mask)
    found = [*states[:L], ours.norm(states[L]), ours.lm_logits(states[L])]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for row, real in enumerate(mask.bool()):
            for tensor, expected in zip(found, said_of(model, ids[row, real]), strict=True):
                assert_close(tensor[row, real], expected[0])
    for row, real in enumerate(mask.bool()):
        own = ids[row, real][None]
        if own.shape[1] <= ours.config.max_cached:
            assert_close(cached(ours, own, torch.ones_like(own), range(1, own.shape[1])), states[L][row, real][None])
    if TOKENS <= ours.config.max_cached:
        assert_close(cached(ours, ids, mask, (5, 8, 9))[mask.bool()], states[L][mask.bool()])

    save_backbone(ours, tmp_path / "ours")
    assert load_backbone(tmp_path / "ours").config == ours.config
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps(written | {"pad_token_id": None}))  # Phi-3's is 32000
    again, told = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert_close(said_of(again.eval(), ids[0])[-1], said_of(model, ids[0])[-1], 1e-6)
