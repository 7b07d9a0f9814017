"""Self-supervised exits: heads, training and resuming, the text that heads learn from, calibrated generation.

Eq. 1 to 3 and Table 1: tests/spec/test_2_self_supervised.py.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee.lab.training.loop as loop
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.calibration import agreement, calibrate, observe
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text, cut_text
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.generation import generated_texts
from mini_ee.lab.exits.heads import VocabularyHead
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.methods.self_supervised import Config, build, metrics, recipe
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.state import NothingToResume, Saved
from mini_ee.lab.training.train_settings import TrainConfig
from mini_ee.self_supervised import head_loss

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("llama", "gemma", "phi")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
ATOL = 1e-5  # float32 logits, padded batches and caches against texts alone; measured max 1.5e-6
QUICK = TrainConfig(epochs=4, head_lr=2e-2, batch_size=4)


def model_of(kind="llama", exits=(1, 2, 3), init="scratch"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(load_backbone(GOLDEN / kind), exits, 1, None, Config(init=init))


def texts_of(model, count=12, new_tokens=10, **settings):
    return generated_texts(model.backbone, PROMPTS, count, new_tokens, **settings)


def train_heads(model, texts, held, folder, config=QUICK, resume=False, settings=None, **method_config):
    """Train the heads in place; what was watched on the way, and the epochs."""
    method_config = Config(**{"penalty": 0.1, "target": "soft"} | method_config)
    saved = Saved(folder, settings or {}, resume)
    return fit(model, recipe(model, method_config), TextData(texts, True), TextData(held, True), config, saved)


def every_position(model, text):
    """What the heads and the full model say of one text: K - 1 times (T, V), and (T, V)."""
    inputs, _ = TextData([text], every=True).batch(np.array([0]), "cpu")
    with torch.no_grad():
        *each_logits, full = model(*inputs)
    return each_logits, full


# ---- The heads ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_head_at_the_last_layer_is_the_full_model(kind):
    decoder = load_backbone(GOLDEN / kind)
    with torch.no_grad():
        hidden = decoder(torch.tensor(PROMPTS[:1]))
        torch.testing.assert_close(VocabularyHead(decoder, "copy")(hidden), decoder.lm_logits(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_from_scratch_has_a_fresh_norm_and_drawn_weights(kind):
    model = model_of(kind)
    one, other = model.heads
    hidden = torch.randn(4, model.backbone.config.hidden_size)
    norm = torch.nn.functional.layer_norm if kind == "phi" else torch.nn.functional.rms_norm
    torch.testing.assert_close(one.norm(hidden), norm(hidden, hidden.shape[-1:], eps=model.backbone.config.norm_eps))
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert one.linear.weight.std().item() == pytest.approx(model.backbone.config.initializer_range, rel=0.1)


@pytest.mark.parametrize("init", ["scratch", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_every_head_and_leaves_the_backbone_as_it_was(kind, init, tmp_path):
    model = model_of(kind, init=init)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_heads(model, texts_of(model), texts_of(model, 3), tmp_path, replace(QUICK, epochs=1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is name.startswith("backbone."), name
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.backbone.parameters())


def test_every_epoch_sees_every_text_once_in_another_order_and_the_rate_rises_and_falls(monkeypatch, tmp_path):
    seen, rates, norms = [], [], []
    update = loop.Loop.step

    def recorded(self, stage, optimizer, batch, *settings):
        loss = update(self, stage, optimizer, batch, *settings)
        ids, counted = batch.inputs
        seen.append([row[real].tolist() for row, real in zip(ids, counted)])
        rates.append(optimizer.param_groups[0]["lr"])
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
        heads = [parameter.grad for parameter in self.model.heads.parameters()]
        norms.append(torch.nn.utils.get_total_norm(heads).item())
        return loss

    monkeypatch.setattr(loop.Loop, "step", recorded)
    model = model_of()
    texts = texts_of(model)
    train_heads(model, texts, texts, tmp_path, replace(QUICK, head_lr=1.0, warmup=0.25, clip=0.01))
    epochs = [[ids for batch in seen[at : at + 3] for ids in batch] for at in range(0, 12, 3)]
    assert all(sorted(epoch) == sorted(text.ids for text in texts) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1, 1, *(n / 9 for n in range(8, 0, -1))])
    np.testing.assert_allclose(norms, 0.01, rtol=1e-3)


@pytest.mark.parametrize("target", ["soft", "hard"])
def test_heads_learn_to_say_what_the_full_model_says(target, tmp_path):
    """Fig. 1 is measured before the first step and 20 times on the way."""
    model = model_of()
    texts = texts_of(model)
    trained = train_heads(model, texts, texts, tmp_path, replace(QUICK, epochs=20), target=target)
    history = trained.metrics
    assert [entry["step"] for entry in history] == list(range(0, 61, 3)) and history[0]["loss"] is None
    assert history[-1]["loss"] < history[1]["loss"]
    assert min(history[-1]["agreement"]) > 0.4 > 0.1 > max(history[0]["agreement"])
    best = max(range(20), key=lambda epoch: trained.epochs[epoch]["score"])  # whose heads are kept
    assert metrics(model, TextData(texts, True))["agreement"] == history[best + 1]["agreement"]
    assert trained.epochs[best]["score"] == pytest.approx(np.mean(history[best + 1]["agreement"]))


def test_each_entry_of_the_metrics_has_the_mean_loss_since_the_one_before(monkeypatch, tmp_path):
    """Though an epoch ended in between."""
    losses, update = [], loop.Loop.step
    monkeypatch.setattr(loop.Loop, "step", lambda *of: losses.append(update(*of)) or losses[-1])
    monkeypatch.setattr(loop, "CURVE_POINTS", 5)
    model = model_of()
    texts = texts_of(model)
    history = train_heads(model, texts, texts, tmp_path).metrics
    steps = [entry["step"] for entry in history]
    assert steps == [0, 2, 4, 6, 8, 10, 12]
    expected = [np.mean(losses[begin:end]) for begin, end in zip(steps, steps[1:])]
    assert [entry["loss"] for entry in history[1:]] == pytest.approx(expected)


def test_the_penalty_keeps_heads_unsure(tmp_path):
    entropies = []
    for penalty in (0.0, 0.5, 0.95):
        model = model_of()
        texts = texts_of(model)
        trained = train_heads(model, texts, texts, tmp_path / str(penalty), replace(QUICK, epochs=5), penalty=penalty)
        entropies.append(trained.metrics[-1]["entropy"])
    assert np.all(np.diff(entropies, axis=0) > 0.05)


def test_train_and_inference_read_the_same_layer():
    model = model_of()
    for k in range(2):
        given = [Text(prompt, len(prompt) - 1) for prompt in PROMPTS]
        for text, written in zip(given, model.write(given, Fixed(k), max_new_tokens=1), strict=True):
            assert written.tokens == [int(every_position(model, text)[0][k][-1].argmax())]


# ---- Positions ----


UNEVEN = [Text([3, 1, 4, 1, 5, 9], 2), Text([2, 6]), Text([5, 3, 5, 8], 3)]


def test_the_loss_is_the_mean_over_all_positions_summed_over_heads(tmp_path):
    model = model_of()
    losses = [
        torch.stack([head_loss(logits, full, 0.95, "soft") for logits in each_logits])
        for each_logits, full in (every_position(model, text) for text in UNEVEN)
    ]
    expected = torch.cat(losses, dim=1).mean(1).sum().item()
    (epoch,) = train_heads(model, UNEVEN, UNEVEN, tmp_path, TrainConfig(epochs=1), penalty=0.95).epochs
    assert epoch["loss"] == pytest.approx(expected, abs=ATOL)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_fig1_agreement_and_entropy_are_means_over_all_positions(batch_size):
    model, agrees, entropies = model_of(init="copy"), [[], []], [[], []]
    for text in UNEVEN:
        each_logits, full = every_position(model, text)
        for k, logits in enumerate(each_logits):
            for position in range(len(text.ids)):
                p = logits[position].double().softmax(-1)
                agrees[k].append(bool(p.argmax() == full[position].argmax()))
                entropies[k].append(-float((p * p.log()).sum()))
    measured = metrics(model, TextData(UNEVEN, True), batch_size)
    np.testing.assert_allclose(measured["agreement"], np.mean(agrees, axis=1))
    np.testing.assert_allclose(measured["entropy"], np.mean(entropies, axis=1), atol=ATOL)


@pytest.mark.parametrize("measure", MEASURES)
def test_confidence_and_agreement_are_observed_at_every_token_that_counts(measure):
    """A text is a group: its tokens are not independent."""
    model, row = model_of(init="copy"), 0
    observed = observe(record_texts(model, UNEVEN, batch_size=2), measure)
    assert observed.groups.tolist() == [0] * 4 + [1] * 2 + [2]
    for text in UNEVEN:
        each_logits, full = every_position(model, text)
        for position in range(text.start, len(text.ids)):
            for k, logits in enumerate(each_logits):
                confidence = MEASURES[measure][0](logits[position : position + 1].numpy())[0]
                assert observed.confidence[row, k] == pytest.approx(confidence, abs=ATOL)
                assert observed.agrees[row, k] == (logits[position].argmax() == full[position].argmax())
            row += 1
    assert row == len(observed.groups)


# ---- The text ----


def test_texts_are_what_the_model_writes_and_what_it_says_next_is_counted():
    model = model_of()
    for text, prompt in zip(texts_of(model, 3, new_tokens=6, greedy=True), PROMPTS, strict=True):
        assert text.ids[: len(prompt)] == prompt and len(text.ids) == len(prompt) + 5
        predictions = every_position(model, text)[1].argmax(-1).tolist()
        assert predictions[text.start : -1] == text.ids[text.start + 1 :] and len(predictions) - text.start == 6


def test_sampled_texts_differ_from_text_to_text_and_repeat_with_the_seed():
    model = model_of()
    first, again, other = (texts_of(model, 7, seed=seed, batch_size=3) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 7 and len({tuple(text.ids) for text in first}) == 7
    assert [text.ids[: len(prompt)] for text, prompt in zip(first, PROMPTS * 3)] == (PROMPTS * 3)[:7]


def test_a_text_ends_at_its_stop_token():
    model = model_of()
    whole = texts_of(model, 3, greedy=True)
    stop = whole[0].ids[len(PROMPTS[0]) + 2]
    cut = texts_of(model, 3, greedy=True, stop=[stop])
    assert cut[0].ids == whole[0].ids[: len(cut[0].ids)] and len(cut[0].ids) <= len(PROMPTS[0]) + 2


def test_a_text_is_cut_into_pieces_after_the_bos_token():
    assert cut_text(range(2, 13), 5, first=[1]) == [Text([1, 2, 3, 4, 5, 6]), Text([1, 7, 8, 9, 10, 11])]
    with pytest.raises(ValueError, match="expected a text of at least 5 tokens, got 3"):
        cut_text(range(3), 5)


# ---- A training that was killed ----


def test_nothing_to_resume_and_other_settings_are_errors(tmp_path):
    model = model_of()
    texts = texts_of(model)
    with pytest.raises(NothingToResume, match="no unfinished training here"):
        train_heads(model, texts, texts, tmp_path, resume=True)
    train_heads(model, texts, texts, tmp_path, settings={"penalty": 0.1})
    with pytest.raises(ValueError, match=r"was started with penalty 0\.1; resume with the same settings"):
        train_heads(model, texts, texts, tmp_path, resume=True, settings={"penalty": 0.5})


# ---- Errors ----


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"penalty": 1.5}, r"penalty \(--lambda\) must be a number from 0 to 1, got 1.5"),
        ({"penalty": math.nan}, "penalty"),
        ({"target": "both"}, "target must be one of soft, hard, got 'both'"),
        ({"init": "new"}, "init must be one of scratch, copy, got 'new'"),
    ],
)
def test_settings_that_make_no_sense_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_a_training_that_diverges_is_an_error(tmp_path):
    model = model_of()
    texts = texts_of(model)
    with torch.no_grad():
        model.heads[0].linear.weight[0] = math.inf
    with pytest.raises(ValueError, match="the training diverged; train again with a smaller --lr"):
        train_heads(model, texts, texts, tmp_path)


# ---- Together ----


def test_calibrated_thresholds_drive_generation_and_inf_is_plain_decoding(tmp_path):
    model = model_of()
    texts = texts_of(model, 20)
    train_heads(model, texts, texts[:5], tmp_path, replace(QUICK, epochs=10), penalty=0.0)
    observed = observe(record_texts(model, texts), "breaking_ties")
    rule = calibrate(observed, 0.8, measure="breaking_ties")
    assert all(remaining >= 0.8 for remaining in agreement(observed, rule))
    given = [Text(prompt, len(prompt) - 1) for prompt in PROMPTS]
    written = model.write(given, rule, max_new_tokens=12)
    assert {layers for text in written for layers in text.layers_run} > {3}
    never = Threshold((math.inf, math.inf, -math.inf), "breaking_ties")
    assert model.write(given, never, max_new_tokens=12) == model.write(given, Never(), max_new_tokens=12)


SHARED = os.environ.get("MINI_EE_SHARED")


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_heads_on_stories260k_agree_more_often_the_deeper_they_sit(tmp_path):
    folder = Path(SHARED) / "weights" / "stories260K"
    tokenizer = Tokenizer.from_folder(folder, 512)
    prompts = [ids.tolist() for ids in tokenizer.encode(["Once upon a time", "One day, a"]).ids]
    decoder = load_backbone(folder)
    texts = generated_texts(decoder, prompts, 48, 48)
    fresh = generated_texts(decoder, prompts, 16, 48, seed=1000)
    model = TokenExits(decoder, (1, 2, 3, 4, 5), "copy")
    config = TrainConfig(epochs=4, head_lr=2e-3, batch_size=16)
    history = train_heads(model, texts, fresh, tmp_path, config, penalty=0.0).metrics
    last_agreement = history[-1]["agreement"]
    assert last_agreement == sorted(last_agreement) and last_agreement[-1] > 0.6 > 0.4 > history[0]["agreement"][0]
