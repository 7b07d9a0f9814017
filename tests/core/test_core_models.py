"""The core's BERT, Llama, engine and decoding equal the lab's; loading is strict.

The equations of the papers, asked of both: tests/spec.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_ee.bert import Bert, Exits
from mini_ee.data import Inputs
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tokenizer import Inputs as LabInputs
from mini_ee.lab.exits.generation import gather, token_weights
from mini_ee.lab.exits.generation import generate as generate_with_the_lab
from mini_ee.lab.exits.heads import VocabularyHead
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.rules import Threshold as LabThreshold
from mini_ee.llama import Llama, TokenExits, generate
from mini_ee.load import folder_of
from mini_ee.loop import early_exit
from mini_ee.rules import Fixed, Never, Patience, Rule, Threshold

ATOL = 2e-5  # float32, 12 layers; measured max 2.0e-6 (BERT), 7.6e-6 (logits of Llama)


def rows(count, size, vocabulary, seed=0):
    """A padded batch with kinds 0 and 1."""
    random = np.random.default_rng(seed)
    lengths = torch.from_numpy(random.integers(3, size + 1, count))
    mask = (torch.arange(size) < lengths[:, None]).long()
    mask[0] = 1
    ids = torch.from_numpy(random.integers(5, vocabulary, (count, size))) * mask
    return Inputs(ids, mask, torch.from_numpy(random.integers(0, 2, (count, size))) * mask)


BERTS = {"built-in": ("bert", (2, 4, 8, 12)), "MiniLM": ("all-MiniLM-L6-v2", (1, 2, 4, 6))}
LLAMAS = {"built-in": ("llama", (4, 8, 12)), "stories260K": ("stories260K", (1, 3, 5))}


def loaded(models, name):
    """(folder, exits) of the built-in model, or of a checkpoint that the tests with real data have."""
    folder, exits = models[name]
    if name == "built-in":
        return folder_of(folder), exits
    if "MINI_EE_SHARED" not in os.environ:
        pytest.skip(f"needs the real {folder} (2026-11)")
    return Path(os.environ["MINI_EE_SHARED"]) / "weights" / folder, exits


@pytest.fixture(scope="module", params=BERTS)
def model(request):
    """Four exits of a BERT with heads that differ; and the lab's, with the same weights."""
    folder, exits = loaded(BERTS, request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        core, lab = Exits(Bert.load(folder), exits, 3), RowExits(load_backbone(folder), exits, 3)
    with torch.no_grad():
        for ours, theirs in zip(core.heads, lab.heads):
            ours[3].weight.normal_(std=0.6, generator=torch.Generator().manual_seed(1))
            for at, name in ((0, "dense"), (3, "out")):
                getattr(theirs, name).weight.copy_(ours[at].weight)
                getattr(theirs, name).bias.copy_(ours[at].bias)
    return core.eval(), lab.eval()


# ---- BERT ----


def test_bert_equals_the_labs_on_a_padded_batch_of_pairs(model):
    core, lab = model
    inputs = rows(6, 17, 8000)
    with torch.no_grad():
        expected = torch.stack(lab(*inputs), 1)
        torch.testing.assert_close(core(inputs), expected, rtol=0, atol=ATOL)
        hidden = core.bert.run(core.bert.embed(inputs), inputs.mask, 0, core.exits[-1])
        difference = (hidden - lab.backbone(*inputs))[inputs.mask.bool()].abs().max()
    assert 0 < difference < ATOL


def test_the_flops_are_the_labs(model):
    core, lab = model
    segments, inputs = lab.segments(), rows(2, 17, 8000)
    layers, heads = zip(*(segments.flops(k, as_arrays(inputs)) for k in range(4)))
    np.testing.assert_allclose(core.flops(17, every_head=True), np.cumsum(layers) + np.cumsum(heads))
    np.testing.assert_allclose(core.flops(17, every_head=False), np.cumsum(layers) + heads)


def as_arrays(inputs):
    return LabInputs(*(tensor.numpy() for tensor in inputs), tuple(("text",) for _ in range(len(inputs))))


@torch.inference_mode()
@pytest.mark.parametrize("rule", [Threshold(0.6), Threshold((0.5, 0.9, 0.4, 0.0)), Patience(1)], ids=repr)
def test_a_row_of_a_padded_batch_stops_as_it_does_alone(rule, model):
    inputs = rows(8, 17, 8000)
    together = early_exit(model[0], rule, inputs)
    assert len(set(together.exit_index)) > 1
    for row in range(len(inputs)):
        length = int(inputs.mask[row].sum())
        alone = early_exit(model[0], rule, Inputs(*(tensor[row : row + 1, :length] for tensor in inputs)))
        assert alone.exit_index == together.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], together.logits[row], rtol=0, atol=ATOL)


@torch.inference_mode()
def test_never_is_the_full_model_always_the_first_head_and_depth_falls_with_tau(model):
    inputs = rows(8, 17, 8000)
    every = model[0](inputs).numpy()
    never, always = (early_exit(model[0], rule, inputs) for rule in (Never(), Threshold(0.0)))
    np.testing.assert_allclose(never.logits, every[:, -1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(always.logits, every[:, 0], rtol=0, atol=ATOL)
    assert (never.layers == model[0].exits[-1]).all() and (always.layers == model[0].exits[0]).all()
    depths = [early_exit(model[0], Threshold(tau), inputs).layers for tau in (1.1, 0.9, 0.7, 0.5, 0.3)]
    assert all((deep >= shallow).all() for deep, shallow in zip(depths, depths[1:]))
    assert (early_exit(model[0], Fixed(1), inputs).layers == model[0].exits[1]).all()


# ---- Llama ----


@pytest.fixture(scope="module", params=["random", *LLAMAS])
def decoder(request, decoder_checkpoint):
    """TokenExits of the core, and the lab's decoder with copied heads."""
    random = request.param == "random"
    name, exits = (decoder_checkpoint, (1, 2, 3)) if random else loaded(LLAMAS, request.param)
    core, lab = TokenExits(Llama.load(name), exits).eval(), load_backbone(name).float()
    return core, lab, [VocabularyHead(lab, "copy") for _ in exits[:-1]]


def test_llamas_logits_are_the_labs(decoder):
    core, lab, heads = decoder
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, core.llama.config["vocab_size"], (2, 9)))
    with torch.no_grad():
        logits = core.classify(core.states(ids))
        hidden = lab.hidden_states(ids)
        expected = [head(hidden[layer]) for head, layer in zip(heads, core.exits)] + [lab.lm_logits(lab(ids))]
    torch.testing.assert_close(logits, torch.stack(expected, 2), rtol=0, atol=ATOL)


PROMPTS = [[1, 5, 9], [3], [7, 8, 9, 10, 11, 15], [4, 4], [10, 17]]


@pytest.mark.parametrize("missing", ["copy_state", "recompute"])
@pytest.mark.parametrize("tau", [0.05, 0.3])
def test_prompts_of_any_lengths_are_continued_as_the_lab_does(tau, missing, decoder):
    core, lab, heads = decoder
    found = generate(core, Threshold(tau, "breaking_ties"), PROMPTS, 8, missing)
    rule = LabThreshold(tau, "breaking_ties")
    expected = gather(
        generate_with_the_lab(
            lab, PROMPTS, max_new_tokens=8, exits=core.exits, heads=heads, rule=rule, missing_kv=missing
        ),
        len(PROMPTS),
    )
    assert [(text.ids, text.layers) for text in found] == [(text.tokens, text.layers_run) for text in expected]
    assert len({layer for text in found for layer in text.layers}) > 1


@pytest.mark.parametrize("missing", ["copy_state", "recompute"])
def test_a_prompt_of_a_batch_is_continued_as_it_is_alone(missing, decoder):
    rule = Threshold(0.1, "breaking_ties")
    together = generate(decoder[0], rule, PROMPTS, 6, missing)
    assert together == [generate(decoder[0], rule, [prompt], 6, missing)[0] for prompt in PROMPTS]


def test_the_flops_of_a_token_are_the_labs(decoder):
    core, lab, _ = decoder
    weights = token_weights(lab)
    layer = 2.0 * weights.layer + 4.0 * weights.attention * 8  # the token at position 7 reads 8
    np.testing.assert_allclose(core.flops(7, every_head=False), np.array(core.exits) * layer + 2.0 * weights.head)
    np.testing.assert_allclose(core.flops(7, True) - core.flops(7, False), 2.0 * weights.head * np.arange(3))


def test_never_exiting_a_text_is_that_of_the_full_model_token_by_token(decoder):
    core = decoder[0]
    found = generate(core, Never(), PROMPTS, 4)
    for prompt, text in zip(PROMPTS, found):
        for length, token in enumerate(text.ids, len(prompt)):
            with torch.no_grad():
                logits = core.classify(core.states(torch.tensor([[*prompt, *text.ids][:length]])))
            assert logits[0, -1, -1].argmax() == token


class EarlyThenFull(Rule):
    """The first five tokens stop at the first exit, later ones never."""

    tokens = 0

    def stop(self, k, read, memory):
        self.tokens += k == 0
        return np.full(len(read), self.tokens <= 5)


def test_recomputed_keys_are_exact(decoder):
    """After five tokens that stopped early, a token in full is that of the full model."""
    text = generate(decoder[0], EarlyThenFull(), [[1, 5, 9]], 6, "recompute")[0]
    assert text.layers == [decoder[0].exits[0]] * 5 + [decoder[0].exits[-1]]
    with torch.no_grad():
        logits = decoder[0].classify(decoder[0].states(torch.tensor([[1, 5, 9, *text.ids[:5]]])))
    assert text.ids[5] == logits[0, -1, -1].argmax()


def test_a_text_ends_with_a_stop_token_and_others_go_on(decoder):
    full = generate(decoder[0], Never(), PROMPTS, 6)
    stop = full[0].ids[2]
    for whole, text in zip(full, generate(decoder[0], Never(), PROMPTS, 6, stop=[stop])):
        end = whole.ids.index(stop) + 1 if stop in whole.ids else 6
        assert text.ids == whole.ids[:end] and len(text.layers) == len(text.ids)


@pytest.mark.parametrize(
    "prompts, count, missing, problem",
    [
        ([[]], 1, "copy_state", "at least one token"),
        ([], 1, "copy_state", "at least one token"),
        ([[10**6]], 1, "copy_state", "from 0 to"),
        ([[1]], 10**4, "copy_state", "at most"),
        ([[1]], 1, "forget", "copy_state or recompute"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompts, count, missing, problem, decoder):
    with pytest.raises(ValueError, match=problem):
        generate(decoder[0], Never(), prompts, count, missing)


# ---- Loading ----


def changed_config(**keys):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | keys).items() if v != "gone"}))

    return change


def changed_weights(change):
    def write(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return write


def cut_file(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


WORD = "bert.embeddings.word_embeddings.weight"
STRANGE = {
    "another family": (changed_config(model_type="roberta"), "expected model_type 'bert', found 'roberta'"),
    "another activation": (changed_config(hidden_act="relu"), "hidden_act must be 'gelu', found 'relu'"),
    "an unknown key": (changed_config(new_norm=True), "unknown key 'new_norm'"),
    "a missing size": (changed_config(hidden_size="gone"), "a number above 0 as hidden_size, found None"),
    "another size": (changed_config(intermediate_size=48), "expected shape"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "damaged, expected JSON"),
    "half a file": (cut_file, "damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights here"),
    "a missing weight": (changed_weights(lambda weights: weights.pop(WORD)), "1 weights are missing, such as"),
    "a weight too many": (changed_weights(lambda w: w.update(extra=torch.ones(1))), "unknown, such as extra"),
    "NaN": (changed_weights(lambda w: w[WORD].fill_(torch.nan)), "expected finite"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_or_damaged_folder_is_one_line(kind, checkpoint_folder, tmp_path):
    change, problem = STRANGE[kind]
    folder = shutil.copytree(checkpoint_folder, tmp_path / "bert")
    Bert.load(folder)
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=problem) as raised:
        Bert.load(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def test_names_of_2018_are_read(checkpoint_folder, tmp_path):
    """LayerNorm.gamma and .beta, as in bert-base-uncased."""
    folder, word = shutil.copytree(checkpoint_folder, tmp_path / "bert"), "LayerNorm"
    weights = load_file(folder / "model.safetensors")
    old = {
        name.replace(f"{word}.weight", f"{word}.gamma").replace(f"{word}.bias", f"{word}.beta"): value
        for name, value in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, folder / "model.safetensors")
    for (_, ours), (_, theirs) in zip(
        Bert.load(folder).named_parameters(), Bert.load(checkpoint_folder).named_parameters()
    ):
        assert torch.equal(ours, theirs)


def test_another_rope_is_refused(decoder_checkpoint, tmp_path):
    folder = shutil.copytree(decoder_checkpoint, tmp_path / "llama")
    changed_config(rope_scaling={"rope_type": "llama3"})(folder)
    with pytest.raises(ValueError, match="rope_scaling must be None"):
        Llama.load(folder)
