"""The core's BERT and Llama compute what transformers does; the engine, decoding, and strict loading.

The equations of the papers: tests/spec. The lab's models are equal to these: tests/lab/parity/test_the_core.py.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from core_models import BERTS, LLAMAS, loaded, rows
from safetensors.torch import load_file, save_file

from mini_ee.bert import Bert, Exits
from mini_ee.data import Inputs
from mini_ee.llama import Llama, TokenExits, generate
from mini_ee.load import exits_of
from mini_ee.loop import early_exit
from mini_ee.rules import Fixed, Never, Patience, Rule, Threshold

GOLDEN = Path(__file__).parents[1] / "golden"
ATOL = 2e-5  # float32, 12 layers; measured max 2.0e-6 (BERT), 7.6e-6 (logits of Llama)


@pytest.fixture(scope="module", params=BERTS)
def model(request):
    """Four exits of a BERT with heads that differ."""
    folder, exits = loaded(BERTS, request.param)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = Exits(Bert.load(folder), exits, 3)
        for head in model.heads:
            head[3].weight.normal_(std=0.6, generator=torch.Generator().manual_seed(1))
    return model.eval()


# ---- Hugging Face transformers computed these: tests/make_golden.py ----


def expected_of(name):
    """(folder of the model, inputs, what transformers computed)."""
    tensors = load_file(GOLDEN / name / "expected.safetensors")
    if (GOLDEN / name / "model.safetensors").exists():
        return GOLDEN / name, tensors
    if "MINI_EE_SHARED" not in os.environ:
        pytest.skip(f"needs the real {name} (2026-11)")
    return Path(os.environ["MINI_EE_SHARED"]) / "weights" / name, tensors


def thinned(x, expected):
    """Of a large model only every eighth number was kept."""
    return x[..., :: x.shape[-1] // expected.shape[-1]]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["bert", "all-MiniLM-L6-v2"])
def test_every_hidden_state_of_bert_is_that_of_transformers(name):
    folder, expected = expected_of(name)
    bert = Bert.load(folder)
    inputs = Inputs(expected["input_ids"], expected["attention_mask"], expected["token_type_ids"])
    x, tokens = bert.embed(inputs), inputs.mask.bool()
    for layer in range(len(bert.layers) + 1):
        x = bert.run(x, inputs.mask, layer - 1, layer) if layer else x
        hidden = expected[f"hidden.{layer}"]
        torch.testing.assert_close(thinned(x, hidden)[tokens], hidden[tokens], rtol=0, atol=ATOL)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "stories260K"])
def test_logits_and_greedy_texts_of_llama_are_those_of_transformers(name):
    folder, expected = expected_of(name)
    llama = Llama.load(folder)
    model = TokenExits(llama, (len(llama.layers),)).eval()
    ids, mask = expected["input_ids"], expected["attention_mask"].bool()
    logits = model.classify(model.states(ids))[:, :, -1]
    whole, shown = mask.all(1), expected["lm_logits"]  # the others are padded on the left
    torch.testing.assert_close(thinned(logits, shown)[whole], shown[whole], rtol=0, atol=ATOL)
    greedy = expected["greedy"][whole].tolist()
    texts = generate(model, Never(), ids[whole].tolist(), len(greedy[0]))
    assert [text.ids for text in texts] == greedy


# ---- BERT ----


@torch.inference_mode()
@pytest.mark.parametrize("rule", [Threshold(0.6), Threshold((0.5, 0.9, 0.4, 0.0)), Patience(1)], ids=repr)
def test_a_row_of_a_padded_batch_stops_as_it_does_alone(rule, model):
    inputs = rows(8, 17, 8000)
    together = early_exit(model, rule, inputs)
    assert len(set(together.exit_index)) > 1
    for row in range(len(inputs)):
        length = int(inputs.mask[row].sum())
        alone = early_exit(model, rule, Inputs(*(tensor[row : row + 1, :length] for tensor in inputs)))
        assert alone.exit_index == together.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], together.logits[row], rtol=0, atol=ATOL)


@torch.inference_mode()
def test_never_is_the_full_model_always_the_first_head_and_depth_falls_with_tau(model):
    inputs = rows(8, 17, 8000)
    every = model(inputs).numpy()
    never, always = (early_exit(model, rule, inputs) for rule in (Never(), Threshold(0.0)))
    np.testing.assert_allclose(never.logits, every[:, -1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(always.logits, every[:, 0], rtol=0, atol=ATOL)
    assert (never.layers == model.exits[-1]).all() and (always.layers == model.exits[0]).all()
    depths = [early_exit(model, Threshold(tau), inputs).layers for tau in (1.1, 0.9, 0.7, 0.5, 0.3)]
    assert all((deep >= shallow).all() for deep, shallow in zip(depths, depths[1:]))
    assert (early_exit(model, Fixed(1), inputs).layers == model.exits[1]).all()


# ---- Llama ----


@pytest.fixture(scope="module", params=["random", *LLAMAS])
def decoder(request, llama_folder):
    """TokenExits of the core."""
    name, exits = (llama_folder, (1, 2, 3)) if request.param == "random" else loaded(LLAMAS, request.param)
    return TokenExits(Llama.load(name), exits).eval()


PROMPTS = [[1, 5, 9], [3], [7, 8, 9, 10, 11, 15], [4, 4], [10, 17]]


@pytest.mark.parametrize("missing", ["copy_state", "recompute"])
def test_a_prompt_of_a_batch_is_continued_as_it_is_alone(missing, decoder):
    rule = Threshold(0.1, "breaking_ties")
    together = generate(decoder, rule, PROMPTS, 6, missing)
    assert together == [generate(decoder, rule, [prompt], 6, missing)[0] for prompt in PROMPTS]


def test_never_exiting_a_text_is_that_of_the_full_model_token_by_token(decoder):
    core = decoder
    texts = generate(core, Never(), PROMPTS, 4)
    for prompt, text in zip(PROMPTS, texts):
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
    text = generate(decoder, EarlyThenFull(), [[1, 5, 9]], 6, "recompute")[0]
    assert text.layers == [decoder.exits[0]] * 5 + [decoder.exits[-1]]
    with torch.no_grad():
        logits = decoder.classify(decoder.states(torch.tensor([[1, 5, 9, *text.ids[:5]]])))
    assert text.ids[5] == logits[0, -1, -1].argmax()


def test_a_text_ends_with_a_stop_token_and_others_go_on(decoder):
    full = generate(decoder, Never(), PROMPTS, 6)
    stop = full[0].ids[2]
    for whole, text in zip(full, generate(decoder, Never(), PROMPTS, 6, stop=[stop])):
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
        generate(decoder, Never(), prompts, count, missing)


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
def test_a_strange_or_damaged_folder_is_one_line(kind, bert_folder, tmp_path):
    change, problem = STRANGE[kind]
    folder = shutil.copytree(bert_folder, tmp_path / "bert")
    Bert.load(folder)
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=problem) as raised:
        Bert.load(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def test_names_of_2018_are_read(bert_folder, tmp_path):
    """LayerNorm.gamma and .beta, as in bert-base-uncased."""
    folder, word = shutil.copytree(bert_folder, tmp_path / "bert"), "LayerNorm"
    weights = load_file(folder / "model.safetensors")
    old = {
        name.replace(f"{word}.weight", f"{word}.gamma").replace(f"{word}.bias", f"{word}.beta"): value
        for name, value in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, folder / "model.safetensors")
    for (_, ours), (_, theirs) in zip(Bert.load(folder).named_parameters(), Bert.load(bert_folder).named_parameters()):
        assert torch.equal(ours, theirs)


def test_another_rope_is_refused(llama_folder, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "llama")
    changed_config(rope_scaling={"rope_type": "llama3"})(folder)
    with pytest.raises(ValueError, match="rope_scaling must be None"):
        Llama.load(folder)


def test_the_exits_of_a_script_fit_the_model():
    assert exits_of((), (2, 4, 8, 12), 12) == [2, 4, 8, 12]
    assert exits_of((), (2, 4, 8, 12), 6) == [1, 2, 4, 6] and exits_of((), (4, 8, 12), 5) == [2, 3, 5]
    assert exits_of((), (3, 6, 9, 12), 1) == [1] and exits_of((1, 6), (4, 8, 12), 6) == (1, 6)
