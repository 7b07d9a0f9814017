"""A decoder family is one file and one line: own_decoder.py is trained, cached, exported and run like all others.

What to write, and where: the family's file, and its line in the registry. These are two places. Nothing of it is ONNX.
test_new_backbone.py asks the contract of all backbones of it too.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import own_decoder
import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_ee.lab import registry
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import backbone_class, generates, load_backbone, save_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.exits.decoding import MISSING_KV, decode, gather
from mini_ee.lab.exits.generation import generate
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import verification
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Fixed, Never, Threshold, rule_from_dict
from mini_ee.lab.training.run_folder import load_run

ROOT = Path(__file__).parents[2]
LINE = {"sloped": "own_decoder"}  # what registry.py would say
CONFIG = {
    "model_type": "sloped",
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
}
TOLERANCE = 1e-4
"""Hidden states of up to 40 against those of the oracle in float64; measured maximum 1.2e-5."""

PROMPTS = ([5, 9, 33], [7], [40, 41, 8, 8, 21])
PROMPTS_OF_WORDS = ([5, 9, 13], [7], [12, 6, 8, 8, 21])  # as ids, of the tokenizer's vocabulary
LINES = ("the film was", "a very good song", "the")


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        for model_type, module in LINE.items():
            patch.setitem(registry.BACKBONES, model_type, module)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory, registered, checkpoint_folder):
    """A checkpoint as Hugging Face keeps one, written by hand; a tokenizer of 27 words beside it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "sloped"
    folder.mkdir()
    generator, width, head = torch.Generator().manual_seed(0), 24, 6
    shapes = {"wte.weight": (64, width), "wpe.weight": (48, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    for i in range(3):
        shapes |= {f"h.{i}.ln.weight": (width,), f"h.{i}.ln.bias": (width,), f"h.{i}.attn.q.weight": (width, width)}
        shapes |= {f"h.{i}.attn.{name}.weight": (head, width) for name in "kv"}
        shapes |= {f"h.{i}.attn.out.weight": (width, width), f"h.{i}.attn.out.bias": (width,)}
        shapes |= {f"h.{i}.mlp.fc_in.weight": (40, width), f"h.{i}.mlp.fc_in.bias": (40,)}
        shapes |= {f"h.{i}.mlp.fc_out.weight": (width, 40), f"h.{i}.mlp.fc_out.bias": (width,)}
    tensors = {
        f"transformer.{name}": torch.randn(shape, generator=generator) * (1.0 if name[0] == "w" else 0.3)
        + float("ln" in name and name.endswith("weight"))
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["SlopedForCausalLM"]}))
    shutil.copy(checkpoint_folder / "tokenizer.json", folder)
    return folder


def oracle(folder, ids):
    """All hidden states of one text, (L + 1, T, D) in float64, by its file's own names, token by token."""
    w = {name: tensor.double().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    w = {name.removeprefix("transformer."): array for name, array in w.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    states = [np.stack([w["wte.weight"][token] + w["wpe.weight"][place] for place, token in enumerate(ids)])]
    for layer in range(3):
        x, h = norm(states[-1], f"h.{layer}.ln"), f"h.{layer}"
        query, key, value = (x @ w[f"{h}.attn.{name}.weight"].T for name in "qkv")
        read = np.zeros_like(x)
        for head in range(4):
            part = slice(6 * head, 6 * head + 6)
            for i in range(len(ids)):
                scores = [query[i, part] @ key[j] / 6**0.5 - (i - j) * 2.0 ** -(head + 1) for j in range(i + 1)]
                weights = np.exp(np.array(scores) - max(scores))
                read[i, part] = weights / weights.sum() @ value[: i + 1]
        inner = np.maximum(x @ w[f"{h}.mlp.fc_in.weight"].T + w[f"{h}.mlp.fc_in.bias"], 0)
        out = read @ w[f"{h}.attn.out.weight"].T + w[f"{h}.attn.out.bias"]
        states.append(states[-1] + out + inner @ w[f"{h}.mlp.fc_out.weight"].T + w[f"{h}.mlp.fc_out.bias"])
    return np.stack(states), norm(states[-1], "ln_f") @ w["wte.weight"].T


def with_exits(folder):
    """Heads after layers 1 and 2 that are confident to a different degree from token to token."""
    model = TokenExits(load_backbone(folder), (1, 2, 3), "scratch").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.4 * torch.randn(parameter.shape, generator=generator))
    return model


# ---- The places ----


def test_a_decoder_family_is_its_file_and_a_line_and_no_graph_is_written_in_it():
    source = Path(own_decoder.__file__).read_text()
    assert not re.search(r"onnx|export|\.g\b|graph", source) and len(source.splitlines()) < 100
    for path in (*ROOT.glob("mini_ee/**/*.py"), *ROOT.glob("lab/export/**/*.py"), *ROOT.glob("experiments/**/*.py")):
        assert "sloped" not in path.read_text().lower(), f"{path} knows the family"
    for path in ROOT.glob("lab/backbones/*.py"):
        assert not re.search(r"onnx|is_traced|graph", path.read_text(), re.I), f"{path} knows the graph"
    assert generates("sloped") and backbone_class("sloped") is own_decoder.Sloped


# ---- What it computes ----


@pytest.mark.parametrize("length", [1, 2, 11])
@torch.no_grad()
def test_hidden_states_and_logits_are_those_of_the_oracle(folder, length):
    backbone, ids = load_backbone(folder), np.random.default_rng(length).integers(0, 64, length)
    states, logits = oracle(folder, ids)
    hidden = backbone.hidden_states(torch.tensor(ids)[None])
    np.testing.assert_allclose(torch.cat(hidden).numpy(), states, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(backbone.lm_logits(hidden[-1])[0].numpy(), logits, rtol=0, atol=10 * TOLERANCE)


@torch.no_grad()
def test_rows_padded_on_the_left_are_those_of_the_oracle(folder):
    backbone, (ids, mask) = load_backbone(folder), (torch.zeros(3, 5, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(PROMPTS):
        ids[row, 5 - len(prompt) :], mask[row, 5 - len(prompt) :] = torch.tensor(prompt), 1
    states = torch.stack(backbone.hidden_states(ids, mask))
    for row, prompt in enumerate(PROMPTS):
        expected, _ = oracle(folder, prompt)
        np.testing.assert_allclose(states[:, row, 5 - len(prompt) :].numpy(), expected, rtol=0, atol=TOLERANCE)


def test_a_text_that_is_too_long_is_refused(folder):
    backbone = load_backbone(folder)
    for too_long in (backbone.embed, backbone.context):
        with pytest.raises(ValueError, match="expected at most 48 tokens, got 49: truncate the input"):
            too_long(Tensors(torch.zeros(1, 49, dtype=torch.int64)))


def test_it_is_saved_under_the_names_of_its_layout_and_tied(folder, tmp_path):
    save_backbone(load_backbone(folder), tmp_path / "saved")
    weights, given = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
    assert weights.keys() == given.keys() and all(torch.equal(weights[name], given[name]) for name in given)
    save_file(given | {"lm_head.weight": given["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    assert load_backbone(folder).lm_head is None  # a copy of what it is tied to
    save_file(given, folder / "model.safetensors", metadata={"format": "pt"})


# ---- Text ----


@torch.no_grad()
def test_cached_text_is_that_without_a_cache(folder):
    backbone = load_backbone(folder)
    for prompt, text in zip(PROMPTS, gather(generate(backbone, PROMPTS, max_new_tokens=20), 3), strict=True):
        ids = list(prompt)
        for token in text.tokens:
            _, logits = oracle(folder, ids)
            assert logits[-1].argmax() == token
            ids.append(token)


@pytest.mark.parametrize("missing_kv", MISSING_KV)
@torch.no_grad()
def test_text_with_early_exits_is_that_of_the_definition_without_a_cache(folder, missing_kv):
    """Of each token the layers above its exit read its own state there, or by state copying that of its exit."""
    model, rule = with_exits(folder), Threshold((0.3, 0.5, 0.0))
    texts, depths = gather(model.generate(PROMPTS, rule, max_new_tokens=16, missing_kv=missing_kv), 3), set()
    layers, head = model.backbone.layers, model.classify
    for prompt, text in zip(PROMPTS, texts, strict=True):
        read = [torch.zeros(1, 0, 24) for _ in layers]  # what each layer read of every token so far
        for at, token in enumerate(ids := prompt + text.tokens[:-1]):
            hidden, exit_layer = model.backbone.embed_tokens(torch.tensor([[token]]), torch.tensor([[at]])), None
            context = model.backbone.context(Tensors(torch.tensor([ids[: at + 1]])))
            for depth, layer in enumerate(layers):
                read[depth] = torch.cat((read[depth], hidden), dim=1)
                if exit_layer is None or missing_kv == "recompute":
                    hidden = layer(read[depth], context, depth)[:, -1:]
                if exit_layer is None and at >= len(prompt) - 1:
                    p = head(depth, hidden[0, 0]).softmax(-1)
                    if depth == 2 or p.max() >= rule.threshold[depth]:
                        exit_layer, predictions = depth + 1, int(p.argmax())
            if at >= len(prompt) - 1:
                assert (text.tokens[at - len(prompt) + 1], text.layers_run[at - len(prompt) + 1]) == (
                    predictions,
                    exit_layer,
                )
                depths.add(exit_layer)
    assert depths == {1, 2, 3}


# ---- Trained, exported, run ----


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    options = ["--model", folder, "--exits", "1,2,3", "--texts", 96, "--new-tokens", 8, "--epochs", 4, "--out", out]
    assert main([str(word) for word in ("train", "self-supervised", *options)]) == 0
    return out


def test_its_heads_learn_to_agree_with_it_and_the_run_writes(trained, folder):
    run, metrics = load_run(trained), json.loads((trained / "metrics.json").read_text())
    assert run.unit == "tokens" and type(run.model.backbone) is own_decoder.Sloped
    assert metrics["agreement"][1] > 0.9 and metrics["agreement"] > metrics["history"][0]["agreement"]
    plain = run._replace(rule=Never()).generate(LINES, max_new_tokens=8)
    ids = [run.tokenizer.ids_of(line) for line in LINES]
    decode = run.tokenizer.backend.decode
    for prompt, text, ending in zip(ids, gather(generate(load_backbone(folder), ids, max_new_tokens=8), 3), plain):
        assert ending == decode(prompt + text.tokens)[len(decode(prompt)) :]


@pytest.fixture(scope="module")
def runtime(trained, tmp_path_factory):
    """The run as an export, which writes with three exit layers. The export itself compares it with torch."""
    out = tmp_path_factory.mktemp("exported") / "exported"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 8)
        assert main([*map(str, ("export", trained, "--out", out, "--threshold", "0.9,0.5,0", "--segments"))]) == 0
    return Runtime(out, threads=1)


def test_the_export_writes_what_the_run_writes(trained, runtime):
    run = load_run(trained)
    run = run._replace(rule=rule_from_dict(runtime.config["rule"]))
    assert [output.text for output in runtime.run(LINES, max_new_tokens=12)] == run.generate(LINES, max_new_tokens=12)
    prompts, settings = [run.tokenizer.ids_of(line) for line in LINES], {"max_new_tokens": 12}
    for rule in (run.rule, Fixed(1)):
        written = gather(runtime.generate(prompts, rule=rule, **settings), 3)
        assert written == gather(run.model.generate(prompts, rule, **settings), 3)
    assert {layers for text in gather(runtime.generate(prompts, **settings), 3) for layers in text.layers_run} == {
        1,
        2,
        3,
    }


def test_graphs_by_segment_write_what_the_run_writes_where_states_are_recomputed(trained, runtime):
    model, rule = load_run(trained).model, runtime.rule
    segments = runtime.segments(3, 30, missing_kv="recompute", rule=rule)
    written = gather(decode(segments, PROMPTS_OF_WORDS, 12, rule), 3)
    assert written == gather(model.generate(PROMPTS_OF_WORDS, rule, max_new_tokens=12, missing_kv="recompute"), 3)


def test_a_classifier_on_it_is_trained_and_exported(folder, task_folder, tmp_path):
    options = ["--model", folder, "--task", task_folder, "--exits", "1,3", "--epochs", 4, "--lr", 3e-3]
    assert main([*map(str, ("train", "joint", *options, "--batch-size", 8, "--out", tmp_path / "run"))]) == 0
    assert main([*map(str, ("export", tmp_path / "run", "--out", tmp_path / "exported", "--threshold", "0.8,0"))]) == 0
    run, texts = load_run(tmp_path / "run"), ["the film was good", "the book was very very awful", "a dull song"]
    run = run._replace(rule=rule_from_dict(json.loads((tmp_path / "exported" / "manifest.json").read_text())["rule"]))
    answers, expected = Runtime(tmp_path / "exported", threads=1).run(texts), run.classify(texts)
    assert [(answer.label, answer.layers) for answer in answers] == [
        (answer.label, answer.layers) for answer in expected
    ]


# ---- A wrong graph is found ----


def without_distance(right, self, at, reads):
    bias = right(self, at, reads)
    return bias if isinstance(at, torch.Tensor) else bias * 0


def one_place_off(right, self, ids, at):
    return right(self, ids, at if isinstance(at, torch.Tensor) else at + 1)


@pytest.mark.parametrize("name, wrong", [("position_bias", without_distance), ("embed_tokens", one_place_off)])
def test_a_graph_that_knows_other_positions_is_found(trained, tmp_path, monkeypatch, capsys, name, wrong):
    right = getattr(own_decoder.Sloped, name)
    monkeypatch.setattr(own_decoder.Sloped, name, lambda *where: wrong(right, *where))
    assert main(["export", str(trained), "--out", str(tmp_path / "exported")]) == 1
    assert "differ" in capsys.readouterr().err and not list(tmp_path.iterdir())
