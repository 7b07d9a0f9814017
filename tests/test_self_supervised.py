"""Self-supervised exits: Eq. 1 and its optimum, what heads learn from, and where they are trained and used."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee.methods.self_supervised as self_supervised
from mini_ee.backbones.hub import load_backbone, save_backbone
from mini_ee.calibration import agreement, calibrate
from mini_ee.confidence import MEASURES
from mini_ee.data.texts import Text, cut_text
from mini_ee.data.tokens import Tokenizer
from mini_ee.methods.self_supervised import (
    CALIBRATION_PROMPTS,
    TRAINING_PROMPTS,
    HeadTraining,
    SelfSupervised,
    head_loss,
    load_heads,
    observe_texts,
    save_heads,
    train_heads,
    watch,
)
from mini_ee.rules import FixedExit, NeverExit, Threshold
from mini_ee.training.fit import NothingToResume
from mini_ee.units.decoding import gather
from mini_ee.units.generation import generate, generated_texts
from mini_ee.units.heads import VocabularyHead

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("llama", "gemma", "phi")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
ATOL = 1e-5  # float32 logits, padded batches and caches against texts alone; measured max 1.5e-6
QUICK = HeadTraining(penalty=0.1, epochs=4, lr=2e-2, batch_size=4, measure_every=3)


def model_of(kind="llama", exits=(1, 2, 3), init="scratch"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SelfSupervised(load_backbone(GOLDEN / kind), exits, init)


def texts_of(model, count=12, new_tokens=10, **settings):
    return generated_texts(model.decoder, PROMPTS, count, new_tokens, **settings)


# ---- Eq. 1 ----


@pytest.mark.parametrize("penalty", [0.0, 0.1, 0.95, 1.0])
@pytest.mark.parametrize("target", ["soft", "hard"])
def test_eq1_by_hand(penalty, target):
    generator = torch.Generator().manual_seed(0)
    logits, full = 2 * torch.randn(2, 3, 4, 7, generator=generator)
    found = head_loss(logits, full, penalty, target)
    for b in range(3):
        for t in range(4):
            p, p_theta = (np.exp(each[b, t].double().numpy()) for each in (logits, full))
            p, p_theta = p / p.sum(), p_theta / p_theta.sum()
            y = p_theta if target == "soft" else np.eye(7)[p_theta.argmax()]
            cross_entropy = -sum(y[i] * math.log(p[i]) for i in range(7))
            uncertainty = -sum(p[i] * math.log(p[i]) for i in range(7))
            assert found[b, t].item() == pytest.approx((1 - penalty) * cross_entropy - penalty * uncertainty, abs=1e-5)


def optimum(penalty, size):
    """The probability p of the target that solves ln(p (V-1)/(1-p)) = ((1-lambda)/lambda) / p, by bisection."""
    low, high = 1 / size, 1 - 1e-12
    for _ in range(200):
        p = (low + high) / 2
        rising = math.log(p * (size - 1) / (1 - p)) - (1 - penalty) / penalty / p
        low, high = (low, p) if rising > 0 else (p, high)
    return p


@pytest.mark.parametrize("penalty", [0.1, 0.5, 0.95])
def test_hard_targets_have_the_closed_form_optimum(penalty):
    size = 40
    logits = torch.zeros(1, size, requires_grad=True)
    full = torch.zeros(1, size)
    full[0, 3] = 1.0
    optimizer = torch.optim.LBFGS([logits], max_iter=40, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = head_loss(logits, full, penalty, "hard").sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    p = logits.detach()[0].softmax(-1)
    others = torch.cat((p[:3], p[4:]))
    assert p[3].item() == pytest.approx(optimum(penalty, size), abs=1e-3)
    assert (others.max() - others.min()).item() < 1e-3


@pytest.mark.parametrize("penalty, expected", [(0.95, 0.009), (0.5, 0.114), (0.1, 0.753)])
def test_the_optimum_at_phis_vocabulary_is_the_one_in_the_notes(penalty, expected):
    assert optimum(penalty, 51200) == pytest.approx(expected, abs=5e-4)


def test_without_a_penalty_the_optimum_is_the_full_model():
    full = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    logits = full.clone().requires_grad_()
    head_loss(logits, full, 0.0).sum().backward()
    assert logits.grad.abs().max() < 1e-6
    entropy = -(full.softmax(-1) * full.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(head_loss(full, full, 0.0), entropy)


@pytest.mark.parametrize(
    "bug",
    [
        lambda logits, full, penalty, target: RIGHT(logits, full, -penalty, target),
        lambda logits, full, penalty, target: RIGHT(logits.softmax(-1), full, penalty, target),
        lambda logits, full, penalty, target: RIGHT(logits, logits, penalty, target),
    ],
    ids=["entropy added", "softmax twice", "its own target"],
)
def test_the_tests_of_eq1_can_fail(monkeypatch, bug):
    monkeypatch.setitem(globals(), "head_loss", bug)
    with pytest.raises(AssertionError):
        test_eq1_by_hand(0.1, "soft")
    with pytest.raises(AssertionError):
        test_hard_targets_have_the_closed_form_optimum(0.1)


RIGHT = head_loss


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
    hidden = torch.randn(4, model.decoder.config.hidden_size)
    norm = torch.nn.functional.layer_norm if kind == "phi" else torch.nn.functional.rms_norm
    torch.testing.assert_close(one.norm(hidden), norm(hidden, hidden.shape[-1:], eps=model.decoder.config.norm_eps))
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert one.linear.weight.std().item() == pytest.approx(model.decoder.config.initializer_range, rel=0.1)


@pytest.mark.parametrize("init", ["scratch", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_every_head_and_leaves_the_backbone_as_it_was(kind, init):
    model = model_of(kind, init=init)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_heads(model, texts_of(model), texts_of(model, 3), replace(QUICK, epochs=1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is name.startswith("decoder."), name
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.decoder.parameters())


def test_every_epoch_sees_every_text_once_in_another_order_and_the_rate_rises_and_falls(monkeypatch):
    seen, rates, norms = [], [], []
    update = self_supervised._update

    def watched(model, texts, how, optimizer, parameters):
        loss = update(model, texts, how, optimizer, parameters)
        seen.append(texts)
        rates.append(optimizer.param_groups[0]["lr"])
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).item())
        return loss

    monkeypatch.setattr(self_supervised, "_update", watched)
    model = model_of()
    texts = texts_of(model)
    train_heads(model, texts, texts, replace(QUICK, epochs=4, lr=1.0, warmup=0.25, clip=0.01))
    epochs = [[text for batch in seen[at : at + 3] for text in batch] for at in range(0, 12, 3)]
    assert all(sorted(epoch) == sorted(texts) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1, 1, *(n / 9 for n in range(8, 0, -1))])
    np.testing.assert_allclose(norms, 0.01, rtol=1e-3)


@pytest.mark.parametrize("target", ["soft", "hard"])
def test_heads_learn_to_say_what_the_full_model_says(target):
    model = model_of()
    history = train_heads(model, texts_of(model), texts_of(model), replace(QUICK, epochs=20, target=target))
    assert [each["step"] for each in history] == list(range(0, 61, 3))
    assert history[-1]["loss"] < history[1]["loss"]
    assert min(history[-1]["agreement"]) > 0.4 > 0.1 > max(history[0]["agreement"])


def test_the_penalty_keeps_heads_unsure():
    entropies = []
    for penalty in (0.0, 0.5, 0.95):
        model = model_of()
        texts = texts_of(model)
        entropies.append(train_heads(model, texts, texts, replace(QUICK, epochs=10, penalty=penalty))[-1]["entropy"])
    assert np.all(np.diff(entropies, axis=0) > 0.05)


def test_train_and_inference_read_the_same_layer():
    model = model_of()
    for k in range(2):
        steps = generate(
            model.decoder, PROMPTS, max_new_tokens=1, exits=model.exits, heads=model.heads, rule=FixedExit(k)
        )
        for prompt, written in zip(PROMPTS, gather(steps, 3)):
            with torch.no_grad():
                logits = model(torch.tensor([prompt]))[0][k]
            assert written.tokens == [int(logits[0, -1].argmax())]


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_test_of_the_layer_can_fail(monkeypatch, shift):
    right = SelfSupervised.forward

    def off_by_one(self, *inputs):
        exits = self.exits
        self.exits = tuple(layer + shift for layer in exits[:-1]) + exits[-1:]
        found = right(self, *inputs)
        self.exits = exits
        return found

    monkeypatch.setattr(SelfSupervised, "forward", off_by_one)
    with pytest.raises(AssertionError):
        test_train_and_inference_read_the_same_layer()


# ---- Positions ----


UNEVEN = [Text([3, 1, 4, 1, 5, 9], 2), Text([2, 6]), Text([5, 3, 5, 8], 3)]


def alone(model, text):
    """What the heads and the full model say of one text: K - 1 times (T, V), and (T, V)."""
    with torch.no_grad():
        each_logits, full = model(torch.tensor([text.ids]))
    return [logits[0] for logits in each_logits], full[0]


def test_the_loss_is_the_mean_over_all_positions_summed_over_heads(monkeypatch):
    model = model_of()
    losses = [
        torch.stack([head_loss(logits, full, 0.95) for logits in each_logits])
        for each_logits, full in (alone(model, text) for text in UNEVEN)
    ]
    expected = torch.cat(losses, dim=1).mean(1).sum().item()
    history = train_heads(model, UNEVEN, UNEVEN, HeadTraining(epochs=1))
    assert history[-1]["loss"] == pytest.approx(expected, abs=ATOL)


def test_fig1_agreement_and_entropy_are_means_over_all_positions():
    model = model_of(init="copy")
    agrees, unsure = [[], []], [[], []]
    for text in UNEVEN:
        each_logits, full = alone(model, text)
        for k, logits in enumerate(each_logits):
            for position in range(len(text.ids)):
                p = logits[position].double().softmax(-1)
                agrees[k].append(bool(p.argmax() == full[position].argmax()))
                unsure[k].append(-float((p * p.log()).sum()))
    for batch_size in (1, 2, 3):
        found = watch(model, UNEVEN, batch_size)
        np.testing.assert_allclose(found.agreement, np.mean(agrees, axis=1))
        np.testing.assert_allclose(found.entropy, np.mean(unsure, axis=1), atol=ATOL)


@pytest.mark.parametrize("measure", MEASURES)
def test_calibration_sees_the_positions_that_count_and_a_text_is_a_group(measure):
    model = model_of()
    found = observe_texts(model, UNEVEN, measure, batch_size=2)
    assert found.groups.tolist() == [0] * 4 + [1] * 2 + [2]
    at = 0
    for text in UNEVEN:
        each_logits, full = alone(model, text)
        for position in range(text.start, len(text.ids)):
            for k, logits in enumerate(each_logits):
                sure = MEASURES[measure][0](logits[position : position + 1].numpy())[0]
                assert found.confidence[at, k] == pytest.approx(sure, abs=ATOL)
                assert found.agrees[at, k] == (logits[position].argmax() == full[position].argmax())
            at += 1
    assert at == len(found.groups)


# ---- The text ----


def test_texts_are_what_the_model_writes_and_what_it_says_next_is_counted():
    model = model_of()
    for text, prompt in zip(texts_of(model, 3, new_tokens=6, greedy=True), PROMPTS, strict=True):
        assert text.ids[: len(prompt)] == prompt and len(text.ids) == len(prompt) + 5
        with torch.no_grad():
            said = model(torch.tensor([text.ids]))[1][0].argmax(-1).tolist()
        assert said[text.start : -1] == text.ids[text.start + 1 :] and len(said) - text.start == 6


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


def test_table1_prompts_are_disjoint():
    assert len(TRAINING_PROMPTS) == len(CALIBRATION_PROMPTS) == 5
    assert not set(TRAINING_PROMPTS) & set(CALIBRATION_PROMPTS)


# ---- A training that was killed ----


@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_a_resumed_training_ends_with_the_same_heads_and_history(stop_at, tmp_path, monkeypatch):
    whole = model_of()
    texts = texts_of(whole)
    expected = train_heads(whole, texts, texts, QUICK)

    killed, update, steps = model_of(), self_supervised._update, iter(range(stop_at))

    def kill(*args):
        next(steps)  # StopIteration: the process ends
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(self_supervised, "SAVE_SECONDS", -1.0)
        patch.setattr(self_supervised, "_update", kill)
        with pytest.raises(StopIteration):
            train_heads(killed, texts, texts, QUICK, tmp_path / "state")
    resumed = model_of(init="copy")
    assert train_heads(resumed, texts, texts, QUICK, tmp_path / "state", resume=True) == expected
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_nothing_to_resume_and_other_settings_are_errors(tmp_path, monkeypatch):
    model = model_of()
    texts = texts_of(model)
    with pytest.raises(NothingToResume, match="no unfinished training here"):
        train_heads(model, texts, texts, QUICK, tmp_path, resume=True)
    monkeypatch.setattr(self_supervised, "SAVE_SECONDS", -1.0)
    train_heads(model, texts, texts, QUICK, tmp_path)
    with pytest.raises(ValueError, match=r"was started with penalty 0\.1; resume with the same settings"):
        train_heads(model, texts, texts, replace(QUICK, penalty=0.5), tmp_path, resume=True)
    with pytest.raises(ValueError, match="was started with texts [0-9a-f]{12}; resume"):
        train_heads(model, texts[1:], texts, QUICK, tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"was started with exits \[1, 2, 3\]; resume"):
        train_heads(model_of(exits=(2, 3)), texts, texts, QUICK, tmp_path, resume=True)
    train_heads(model, texts, texts, QUICK, tmp_path, about={"init": "copy"})
    with pytest.raises(ValueError, match="was started with init copy; resume"):
        train_heads(model, texts, texts, QUICK, tmp_path, resume=True, about={"init": "scratch"})


# ---- On disk ----


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_are_read_back_with_their_backbone_and_rule(kind, tmp_path):
    model = model_of(kind)
    rule = Threshold((0.5, math.inf, -math.inf), "breaking_ties")
    save_heads(
        model,
        tmp_path / "heads",
        GOLDEN / kind,
        rule=rule,
        about={"training": {"penalty": 0.5}},
        metrics={"history": []},
    )
    found = load_heads(tmp_path / "heads")
    assert found.rule == rule and found.model.exits == (1, 2, 3) and found.config["training"] == {"penalty": 0.5}
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        for mine, theirs in zip(found.model(ids)[0], model(ids)[0], strict=True):
            assert torch.equal(mine, theirs)
    with pytest.raises(FileExistsError):
        save_heads(model, tmp_path / "heads", GOLDEN / kind)


def test_heads_of_another_backbone_are_an_error(tmp_path):
    save_heads(model_of(), tmp_path / "heads", GOLDEN / "llama")
    other = load_backbone(GOLDEN / "llama")
    with torch.no_grad():
        other.embeddings.weight[0, 0] += 1
    save_backbone(other, tmp_path / "other")
    with pytest.raises(ValueError, match="trained on another backbone than the one in .*other; give that one"):
        load_heads(tmp_path / "heads", tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        load_heads(tmp_path / "heads", tmp_path / "nowhere")


def test_a_folder_that_holds_no_heads_and_a_damaged_one_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_heads(tmp_path)
    with pytest.raises(ValueError, match="expected heads of format_version 1 and method self-supervised, found None"):
        load_heads(GOLDEN / "llama")
    save_heads(model_of(), tmp_path / "heads", GOLDEN / "llama")
    path = tmp_path / "heads" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_heads(tmp_path / "heads")


# ---- Errors ----


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"penalty": 1.5}, r"penalty \(lambda\) must be from 0 to 1, got 1.5"),
        ({"penalty": math.nan}, "penalty"),
        ({"target": "both"}, "target must be one of soft, hard, got 'both'"),
        ({"epochs": 0}, "epochs"),
        ({"lr": -1.0}, "lr must be"),
        ({"measure_every": 0}, "measure_every must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        HeadTraining(**settings)


def test_exits_and_init_are_checked():
    with pytest.raises(ValueError, match="init must be one of scratch, copy, got 'new'"):
        model_of(init="new")
    with pytest.raises(ValueError, match="expected exits before the last layer, got only 3"):
        model_of(exits=(3,))
    with pytest.raises(ValueError, match="end at the last layer, 3"):
        model_of(exits=(1, 2))


def test_a_training_that_diverges_is_an_error():
    model = model_of()
    texts = texts_of(model)
    with torch.no_grad():
        model.heads[0].linear.weight[0] = math.inf
    with pytest.raises(ValueError, match="the training diverged; begin anew with a smaller lr"):
        train_heads(model, texts, texts, QUICK)


# ---- Together ----


def test_calibrated_thresholds_drive_generation_and_inf_is_plain_decoding():
    model = model_of()
    texts = texts_of(model, 30)
    train_heads(model, texts, texts[:5], replace(QUICK, epochs=20, penalty=0.0))
    observed = observe_texts(model, texts)
    rule = calibrate(observed, 0.8, measure="breaking_ties")
    assert all(kept >= 0.8 for kept in agreement(observed, rule))
    common = {"max_new_tokens": 12, "exits": model.exits, "heads": model.heads}
    written = gather(generate(model.decoder, PROMPTS, rule=rule, **common), 3)
    assert {layers for text in written for layers in text.layers_run} > {3}
    never = Threshold((math.inf, math.inf, -math.inf), "breaking_ties")
    plain = gather(generate(model.decoder, PROMPTS, max_new_tokens=12, rule=NeverExit()), 3)
    assert gather(generate(model.decoder, PROMPTS, rule=never, **common), 3) == plain


SHARED = os.environ.get("MINI_EE_SHARED")


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_heads_on_stories260k_agree_more_often_the_deeper_they_sit():
    folder = Path(SHARED) / "weights" / "stories260K"
    tokenizer = Tokenizer.from_folder(folder, 512)
    prompts = [ids.tolist() for ids in tokenizer.encode(["Once upon a time", "One day, a"]).ids]
    decoder = load_backbone(folder)
    texts = generated_texts(decoder, prompts, 64, 64)
    fresh = generated_texts(decoder, prompts, 16, 64, seed=1000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SelfSupervised(decoder, (1, 2, 3, 4, 5), "copy")
    history = train_heads(model, texts, fresh, HeadTraining(penalty=0.0, epochs=10))
    found = history[-1]["agreement"]
    assert found == sorted(found) and found[-1] > 0.6 > 0.4 > history[0]["agreement"][0]
