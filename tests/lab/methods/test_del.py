"""DEL: tokens per layer and acceptance against loops, shadow tokens against the whole text, the full model's text."""

import json

import numpy as np
import pytest
import torch
from conftest import random_decoder
from method_cases import GOLDEN

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines.dynamic_exit_layer import (
    CONTEXT,
    Acceptance,
    DynamicExitLayer,
    DynamicExits,
    ShadowSegments,
    tokens_per_layer,
)
from mini_ee.lab.cli.main import main
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.rules import Never

EXITS = (1, 2, 4, 6)
PROMPTS = ([5, 9, 33, 7, 21, 40], [7, 1], [40, 41, 8, 8, 21])


@pytest.fixture(scope="module")
def model():
    """Upper layers that change little, so that many drafts are right, and more of the deeper exits."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = DynamicExits(random_decoder("llama", 6), EXITS).eval()
        with torch.no_grad():
            for depth, layer in enumerate(model.backbone.layers):
                for linear in (layer.attention_output, layer.down):
                    linear.weight *= 1.0 if depth < 2 else 0.35
    return model


def full(model, prompts, new=24, stop=()):
    return [text.tokens for text in gather(model.generate(prompts, Never(), max_new_tokens=new, stop=stop), 3)]


# ---- The equations ----
def test_tokens_per_layer_are_the_expected_tokens_over_the_layers_that_are_loaded():
    alpha, layers = np.array([0.0, 0.4, 0.9, 1.0]), (2, 3, 5, 7, 9)
    rates = tokens_per_layer(alpha, layers, 6)
    for c, a in enumerate(alpha):
        for d in range(7):
            # Of d drafts exactly i are accepted with probability a^i (1 - a), all of them with a^d.
            tokens = sum((i + 1) * a**i * (1 - a) for i in range(d)) + (d + 1) * a**d
            assert rates[c, d] == pytest.approx(tokens / (d * layers[c] + 9))


def test_acceptance_is_a_decayed_share_and_the_threshold_lies_between_the_two_confidences():
    random, acceptance, rounds = np.random.default_rng(0), Acceptance(2), []
    assert acceptance.alpha.tolist() == [0.0, 0.0] and np.isnan(acceptance.tau).all()
    for size in (4, 1, 3, 6):
        rounds.append((random.random((2, size)) < 0.6, random.random((2, size))))
        acceptance.update(*rounds[-1])
    for c in range(2):
        pairs = [(m, p, 0.95 ** (3 - at)) for at, (ms, ps) in enumerate(rounds) for m, p in zip(ms[c], ps[c])]
        right, wrong = ([(p, w) for m, p, w in pairs if m == kind] for kind in (True, False))
        weight = {True: sum(w for _, w in right), False: sum(w for _, w in wrong)}
        assert acceptance.alpha[c] == pytest.approx(weight[True] / (weight[True] + weight[False]))
        means = [sum(p * w for p, w in some) / sum(w for _, w in some) for some in (right, wrong)]
        assert acceptance.tau[c] == pytest.approx(sum(means) / 2)


# ---- Decoding ----
@pytest.mark.parametrize("draft", [None, 1])
def test_the_text_is_the_full_models_whatever_is_drafted(model, draft):
    expected = full(model, PROMPTS)
    steps, drafter = model.draft_dynamically(PROMPTS, 24, draft, ())
    texts = gather(steps, 3)
    assert [text.tokens for text in texts] == expected
    assert {layer for text in texts for layer in text.layers_run} > {6}  # some drafts were right
    stop = [expected[0][5]]
    texts = gather(model.generate_lossless(PROMPTS, 24, draft=draft, stop=stop), 3)
    assert [text.tokens for text in texts] == full(model, PROMPTS, stop=stop)


def test_the_text_of_an_encoder_decoder_is_the_full_models():
    decoder = load_backbone(GOLDEN / "t5")
    model = DynamicExits(decoder, tuple(range(1, decoder.config.num_hidden_layers + 1))).eval()
    texts = gather(model.generate_lossless(PROMPTS, 12, stop=()), 3)
    assert [text.tokens for text in texts] == full(model, PROMPTS, 12)


@torch.no_grad()
def test_shadow_tokens_are_those_of_every_exit_where_the_full_model_has_read_its_own_text(model, monkeypatch):
    rounds, update = [], Acceptance.update
    monkeypatch.setattr(Acceptance, "update", lambda self, *given: (rounds.append(given), update(self, *given))[1])
    prompt, new = [7, 1, 3] * 12, 3  # longer than what counts of it
    (text,) = gather(model.generate_lossless([prompt], new, stop=()), 1)
    ids = torch.tensor([[*prompt, *text.tokens]])
    states = model.states(ids, torch.ones_like(ids, dtype=torch.bool))
    probabilities = torch.stack([model.classify(k, state) for k, state in enumerate(states)]).softmax(-1)
    matched, confidence = (probabilities.argmax(-1) == probabilities[-1].argmax(-1))[:-1], probabilities.amax(-1)[:-1]
    ends = [len(prompt) + at for at, layer in enumerate(text.layers_run) if layer == 6]
    spans = [(len(prompt) - 1 - CONTEXT, len(prompt) - 1), *zip((len(prompt) - 1, *ends), ends)]
    assert len(rounds) == len(spans)
    for (shadow, certain), (begin, end) in zip(rounds, spans):
        assert (shadow == matched[:, begin:end].numpy()).all()
        np.testing.assert_allclose(certain, confidence[:, begin:end].numpy(), atol=1e-5)


def drafter_of(model, alpha, tau):
    segments = ShadowSegments(model.backbone, EXITS, model.heads, "recompute", 1, 8)
    drafter = DynamicExitLayer(segments)
    segments.acceptance.counts = np.array([[a, 1 - a] for a in alpha])
    segments.acceptance.confidences = segments.acceptance.counts * tau
    drafter.choose()
    return drafter


def test_the_exit_of_the_most_tokens_per_layer_drafts_and_none_where_no_draft_pays(model):
    drafter = drafter_of(model, [0.2, 0.9, 0.95], 0.5)
    assert (drafter.exit, drafter.most) == (1, 18)
    assert drafter_of(model, [0.8, 0.85, 0.9], 0.5).exit == 0
    assert drafter_of(model, [0.1, 0.2, 0.4], 0.5).most == 0


def test_the_first_draft_below_the_threshold_is_the_last(model):
    drafter = drafter_of(model, [0.2, 0.9, 0.95], 0.5)
    unsure, sure = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 4.0]])
    assert (drafter.limit(sure, 2, 18), drafter.limit(unsure, 2, 18), drafter.limit(unsure, 2, 2)) == (18, 3, 2)
    acceptance = drafter.segments.acceptance
    acceptance.counts[1], acceptance.confidences[1] = [1.0, 0.0], [0.5, 0.0]  # nothing to compare with yet
    assert drafter.limit(unsure, 2, 18) == 18


# ---- The run ----
def test_a_run_drafts_dynamically_unless_a_layer_is_named(tmp_path, decoder_checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 6)
    monkeypatch.setattr("mini_ee.lab.training.training_text.GIVEN", 8)
    run = mini_ee.train("del", decoder_checkpoint, out=tmp_path / "run", texts=8, new_tokens=4, epochs=1)
    metrics = mini_ee.lab.data.files.read_json(tmp_path / "run" / "metrics.json")
    assert {epoch["stage"] for epoch in metrics["epochs"]} == {"layer dropout"} and metrics["layers_loaded"] > 1
    command, answers = ["generate", str(run.folder), "--prompt", "the film", "--max-new-tokens", "9", "--json"], []
    for more in (["--rule", "never"], ["--lossless"], ["--lossless", "--layer", "2"]):
        capsys.readouterr()
        assert main([*command, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert len({answer["text"] for answer in answers}) == 1
    assert [answer.get("draft_layer", "none") for answer in answers] == ["none", None, 2]
