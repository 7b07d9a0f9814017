"""SLEB (Song et al. 2024): greedy removal of layers, against a search that builds every model anew."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WORDS, random_decoder

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.baselines.sleb import Config, ShortDecoder, next_token_losses, search, with_layers
from mini_ee.lab.cli.main import main
from mini_ee.lab.cli.open import plain_decoder
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.multiple_choice import Benchmark, Question
from mini_ee.lab.evaluation.token_evaluation import benchmark_answer, score_benchmark
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import generate, generated_texts
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.rules import Never

GOLDEN = Path(__file__).parents[2] / "golden"

EXACT = 2e-6  # nats; measured maximum 4e-7
LAYERS = 6


@pytest.fixture
def decoder():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return random_decoder("llama", LAYERS)


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    texts = [Text(random.integers(0, 60, size).tolist()) for size in (12, 7, 12, 3, 9)]
    return TextData(texts * 5, every=True)  # more than a batch


def built(decoder, remaining):
    """The short model, of copies: an oracle."""
    short = deepcopy(decoder)
    short.layers = torch.nn.ModuleList(short.layers[layer] for layer in remaining)
    return short


def loss_by_hand(decoder, data, remaining):
    """Text by text, token by token, in float64."""
    short, losses = built(decoder, remaining), []
    for text in data.texts:
        ids = torch.tensor([text.ids])
        hidden, context = short.embed(Tensors(ids)), short.context(Tensors(ids))
        with torch.no_grad():
            for depth in range(len(remaining)):
                hidden = short.run_layers(hidden, context, depth, depth + 1)
            logits = short.lm_logits(hidden)[0].double().numpy()
        for at, token in enumerate(text.ids[1:]):
            losses.append(np.log(np.exp(logits[at] - logits[at].max()).sum()) + logits[at].max() - logits[at, token])
    return np.mean(losses)


def searched_by_hand(decoder, data, count):
    remaining, losses = list(range(LAYERS)), []
    for _ in range(count):
        options = [[*remaining[:at], *remaining[at + 1 :]] for at in range(1, len(remaining) - 1)]
        option_losses = [loss_by_hand(decoder, data, option) for option in options]
        remaining = options[int(np.argmin(option_losses))]
        losses.append(min(option_losses))
    return remaining, losses


def test_the_loss_without_each_layer_is_that_of_a_model_without_it(decoder, data):
    remaining = [0, 1, 3, 4, 5]
    losses = next_token_losses(decoder, data, remaining)
    expected = [loss_by_hand(decoder, data, [*remaining[:at], *remaining[at + 1 :]]) for at in (1, 2, 3)]
    np.testing.assert_allclose(losses[1:-2], expected, atol=EXACT)
    assert losses[-1] == pytest.approx(loss_by_hand(decoder, data, remaining), abs=EXACT)


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi", "mistral", "qwen2", "qwen3", "phi3"])
def test_a_short_decoder_is_saved_and_loaded_as_any(kind, tmp_path):
    whole = load_backbone(GOLDEN / kind)  # layers of the last four have windows, of different widths
    layers, kept_layers = len(whole.layers), (0, len(whole.layers) - 1)
    save_backbone(with_layers(whole, kept_layers), tmp_path / "short")
    short, ids = load_backbone(tmp_path / "short"), torch.arange(5, 17)[None]
    expected, context = whole.embed(Tensors(ids)), whole.context(Tensors(ids))
    with torch.no_grad():
        for layer in kept_layers:
            expected = whole.run_layers(expected, context, layer, layer + 1)
        assert torch.equal(short.lm_logits(short(ids)), whole.lm_logits(expected))
    assert whole.config.num_hidden_layers == len(whole.layers) == layers


def test_the_search_is_the_greedy_one_over_models_that_are_built_anew(decoder, data):
    model = ShortDecoder(decoder)
    records = search(model, data, data, Config(share=0.5))
    remaining, losses = searched_by_hand(decoder, data, 3)
    assert model.kept_layers == remaining and model.exits == (3,) and model.whole.exits == (LAYERS,)
    np.testing.assert_allclose([record["loss"] for record in records[1:]], losses, atol=EXACT)
    gone = [int(record["stage"].split()[-1]) - 1 for record in records[1:]]
    assert sorted(gone + remaining) == list(range(LAYERS))


@pytest.mark.parametrize("unused", [0, 2, 4, 5])
def test_a_layer_that_adds_nothing_goes_first_unless_it_is_the_first_or_the_last(decoder, unused):
    """Of text that the model wrote itself: no other model is likelier to have written it."""
    layer = decoder.layers[unused]
    with torch.no_grad():
        layer.attention_output.weight.zero_()
        layer.down.weight.zero_()
    texts = TextData(generated_texts(decoder, [[1], [2]], 16, 30), every=True)
    model = ShortDecoder(decoder)
    records = search(model, texts, texts, Config(share=0.2))
    if unused in (0, LAYERS - 1):
        assert unused in model.kept_layers
    else:
        assert model.kept_layers == [layer for layer in range(LAYERS) if layer != unused]
        assert records[1]["loss"] == pytest.approx(records[0]["loss"], abs=EXACT)


def test_a_turn_asks_as_many_models_as_there_are_layers_that_may_go(decoder, data, monkeypatch):
    calls, lm_logits = [], Decoder.lm_logits
    monkeypatch.setattr(Decoder, "lm_logits", lambda self, *args: calls.append(1) or lm_logits(self, *args))
    few = TextData(data.texts[:4], every=True)  # one batch
    for turn in range(3):
        calls.clear()
        next_token_losses(decoder, few, range(LAYERS - turn))
        assert len(calls) == LAYERS - 2 - turn + 1  # and the one that is left


@pytest.fixture(scope="module")
def trained(tmp_path_factory, decoder_checkpoint):
    """A run of three layers, of which one goes."""
    out = tmp_path_factory.mktemp("sleb") / "run"
    return mini_ee.train("sleb", decoder_checkpoint, out=out, share=0.34, texts=8, new_tokens=12)


def test_a_run_is_shorter_and_told_against_the_full_model(trained, decoder_checkpoint, capsys):
    assert trained.exits == (2,) and trained.model.kept_layers == [0, 2] and trained.rule == Never()
    assert main(["generate", str(trained.folder), "--prompt", "the film", "--max-new-tokens", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layers"] == [2] * len(answer["tokens"]) and answer["layers_saved"] == pytest.approx(1 / 3)
    assert main(["compare", str(trained.folder), "--max-rows", "2", "--json"]) == 0
    full, shortened = json.loads(capsys.readouterr().out)["rows"]
    assert main(["compare", str(trained.folder), "--max-rows", "2", "--picture", "picture.png"]) == 2
    assert "draws savings and losses of these decoders: give --sweep too" in capsys.readouterr().err
    assert main(["calibrate", str(trained.folder), "--epsilon", ".9"]) == 2
    assert "has one exit, so there is nothing to calibrate" in capsys.readouterr().err
    assert (full["mean_layers"], full["layers_saved"], full["rouge_l"]) == (3, 0, 1)
    assert shortened["mean_layers"] == 2 and shortened["layers_saved"] == pytest.approx(1 / 3)
    ids = [trained.tokenizer.backend.encode("the film").ids]
    full = gather(trained.model.whole.generate(ids, Never(), max_new_tokens=6), 1)
    again = gather(generate(load_backbone(decoder_checkpoint), ids, max_new_tokens=6), 1)
    assert full[0].tokens == again[0].tokens


def test_a_benchmark_tells_the_full_models_score_beside_its_own(trained, decoder_checkpoint):
    words, questions = [f" {word}" for word in WORDS * 3], []
    for row in range(24):
        given, options = f"the{words[row]}{words[row + 4]}", (words[row + 7], words[row + 9], words[row + 12])
        questions.append(Question((given,) * 3, options, 0, row))
    benchmark = Benchmark("tiny", "test", tuple(questions), "log_p per character")
    answer = benchmark_answer(score_benchmark(trained, benchmark), Never())
    full = plain_decoder(decoder_checkpoint)
    assert answer["full_accuracy"] == benchmark_answer(score_benchmark(full, benchmark), Never())["accuracy"]
    assert answer["accuracy"] == answer["per_exit_accuracy"][0] != answer["full_accuracy"]
    assert answer["layers_saved"] == pytest.approx(1 / 3)


def test_its_checkpoint_is_one_like_any_other(trained, decoder_checkpoint):
    short, whole = load_backbone(trained.folder / "checkpoint"), load_backbone(decoder_checkpoint)
    expected = built(whole, [0, 2]).state_dict()
    assert short.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in short.state_dict().items())
    plain = plain_decoder(trained.folder / "checkpoint")
    prompt = ["the film was"]
    assert plain.generate(prompt, max_new_tokens=6) == trained.generate(prompt, max_new_tokens=6)


def test_its_export_writes_the_same(trained, tmp_path):
    mini_ee.export(trained, tmp_path / "exported")
    ids = [trained.tokenizer.backend.encode("the film was").ids]
    (expected,) = gather(trained.model.generate(ids, Never(), max_new_tokens=8), 1)
    for engine in (None, torch_segments(tmp_path / "exported")):
        runtime = Runtime(tmp_path / "exported", threads=1, segments=engine)
        (text,) = gather(runtime.generate(ids, max_new_tokens=8), 1)
        assert text == expected and set(text.layers_run) == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--remove", ".9"), "would remove 2 of 3 layers, but the first and last have to stay"),
        (("--remove", "1"), "must be a number of at least 0 and below 1"),
        (("--exits", "1,2"), "--exits"),
        (("--epochs", "2"), "--epochs"),
    ],
)
def test_what_cannot_be_is_one_line(options, message, decoder_checkpoint, tmp_path, capsys):
    argv = ["train", "sleb", "--model", str(decoder_checkpoint), "--out", str(tmp_path / "x"), "--texts", "4"]
    try:
        status = main([*argv, *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err.rstrip("\n").split("\n")[-1]
    assert not (tmp_path / "x").exists()


def test_an_encoder_is_refused(checkpoint_folder, tmp_path, capsys):
    assert main(["train", "sleb", "--model", str(checkpoint_folder), "--out", str(tmp_path / "x")]) == 2
    assert "writes no text" in capsys.readouterr().err
