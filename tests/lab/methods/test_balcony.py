"""Balcony: exits against decoders with one layer more than the exit, decoding against its definition, the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_decoder
from method_cases import GOLDEN

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.baselines.balcony import BalconyExits, BalconySegments, recipe, self_distillation_loss
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import MISSING_KV, decode, gather
from mini_ee.lab.exits.generation import token_segments
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.export import verification
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.rules import Fixed, Never, Rule
from mini_ee.lab.training.stages import Batch

EXITS, EXACT = (1, 2, 4), 1e-4  # measured maximum 1.3e-5
PROMPTS = ([5, 9, 33], [7], [40, 41, 8, 8, 21])


def drawn(decoder, exits):
    """With balconies that are no copies any more."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = BalconyExits(decoder, exits)
        for parameter in model.heads.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return drawn(random_decoder("llama", 4), EXITS)


def balcony_as_decoder(model, k):
    """A plain decoder: the layers up to exit k, its balcony as one layer more, its norm, the LM head."""
    depth = model.exits[k]
    shallow = Decoder(replace(model.backbone.config, num_hidden_layers=depth + 1)).eval()
    shallow.load_state_dict(
        {name: value for name, value in model.backbone.state_dict().items() if name in shallow.state_dict()}
        | {f"layers.{depth}.{name}": value for name, value in model.heads[k].layer.state_dict().items()}
        | {f"norm.{name}": value for name, value in model.heads[k].norm.state_dict().items()}
    )
    return shallow


def logits_of(decoder, ids):
    """(T, V) of one text."""
    inputs = Tensors(torch.tensor([ids]))
    hidden = decoder.run_layers(decoder.embed(inputs), decoder.context(inputs), 0, decoder.config.num_hidden_layers)
    return decoder.lm_logits(hidden)[0]


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi"])
@torch.no_grad()
def test_an_exit_is_a_decoder_with_one_layer_more_than_the_exit(kind):
    model, texts = drawn(random_decoder(kind, 4), EXITS), [Text([*prompt, 3, 4], 0) for prompt in PROMPTS]
    inputs, labels = TextData(texts, every=True).batch(np.arange(3), "cpu")
    *exits, full = model(*inputs)
    expected = torch.cat([logits_of(model.backbone, text.ids) for text in texts])
    torch.testing.assert_close(full, expected, rtol=0, atol=EXACT)
    recorded = record_texts(model, texts)
    for k, logits in enumerate(exits):
        decoder = balcony_as_decoder(model, k)
        expected = torch.cat([logits_of(decoder, text.ids) for text in texts])
        torch.testing.assert_close(logits, expected, rtol=0, atol=EXACT)
        assert (expected - full).abs().max() > 0.1
        assert (recorded.predictions[:, k] == expected.argmax(-1).numpy()).all()


def test_a_balcony_begins_as_the_last_layer_and_the_final_norm_and_the_model_is_frozen():
    decoder = random_decoder("llama", 4)
    model = BalconyExits(decoder, EXITS)
    (stage,) = recipe(model)
    for head in model.heads:
        theirs = {f"layer.{name}": value for name, value in decoder.layers[-1].state_dict().items()}
        theirs |= {f"norm.{name}": value for name, value in decoder.norm.state_dict().items()}
        weights = head.state_dict()
        assert weights.keys() == theirs.keys() and all(torch.equal(weights[name], theirs[name]) for name in weights)
    trained = {name for name, _ in model.named_parameters() if stage.trainable(name) and model.is_trainable(name)}
    assert trained == {name for name in model.state_dict() if name.startswith("heads.")} == set(model.own_state())
    assert stage.score(np.array([0.2, 0.4, 1.0])) == pytest.approx(0.3)


@torch.no_grad()
def test_the_loss_is_the_mean_divergence_from_the_full_model(model):
    inputs, labels = TextData([Text([5, 9, 33, 2], 0), Text([7, 1], 0)], every=True).batch(np.arange(2), "cpu")
    logits = [exit_logits.double().numpy() for exit_logits in model(*inputs)]
    p, *exits = (
        np.exp(exit_logits) / np.exp(exit_logits).sum(1, keepdims=True) for exit_logits in (logits[-1], *logits[:-1])
    )
    divergences = [(p * np.log(p / q)).sum(1).mean() for q in exits]
    loss = self_distillation_loss(model, Batch(inputs, labels, None, None))
    assert len(p) == 6 and loss.item() == pytest.approx(np.mean(divergences), rel=1e-4)


def test_the_full_model_does_not_learn(model):
    inputs, labels = TextData([Text([5, 9, 33, 2], 0)], every=True).batch(np.arange(1), "cpu")
    self_distillation_loss(model, Batch(inputs, labels, None, None)).backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.heads.parameters())
    model.zero_grad()


class Drawn(Rule):
    """Exits that are drawn beforehand for each row and step."""

    needs = None

    def __init__(self, plans):
        self.plans = iter(plans)

    def plan(self, inputs):
        return next(self.plans)


def written(model, missing_kv, plans):
    """Logits (steps, B, V) and tokens (B, steps) under drawn exits."""
    step_logits = []

    def choose(logits, rows):
        step_logits.append(logits)
        return logits.argmax(-1).tolist()

    segments = token_segments(model, missing_kv, len(PROMPTS), 32)
    with torch.inference_mode():
        steps = [step.tokens for step in decode(segments, PROMPTS, len(plans), Drawn(plans), choose)]
    return np.array(step_logits), np.array(steps).T.tolist()


def defined(model, ids, start, exit_of):
    """The logits of every token of a text from `start` on, each at its exit: no cache, all layers read from lists.

    inputs[i][l] is what layer l + 1 computes the keys of token i from, and the balcony after layer l.
    """
    layers, inputs, logits = model.exits[-1], [], []
    last_balcony = model.backbone.config.num_hidden_layers - 1
    for at, token in enumerate(ids):
        exit_k = exit_of(at)
        depth = model.exits[exit_k] if exit_k is not None else layers
        states = [model.backbone.embed(Tensors(torch.tensor([[token]])))]
        for layer in range(depth):
            read = torch.cat([token_inputs[layer] for token_inputs in inputs] + [states[-1]], dim=1)
            block = model.backbone.block(torch.arange(read.shape[1])[None])
            states.append(model.backbone.run_layers(read, block, layer, layer + 1)[:, -1:])
        if exit_k is not None and exit_k < len(model.heads):
            read = torch.cat([token_inputs[depth] for token_inputs in inputs] + [states[-1]], dim=1)
            block = model.backbone.block(torch.arange(read.shape[1])[None])
            logits.append(model.heads[exit_k](model.heads[exit_k].layer(read, block, last_balcony)[0, -1]))
        elif exit_k is not None:
            logits.append(model.backbone.lm_logits(states[-1])[0, 0])
        inputs.append(states + [states[-1]] * (layers - depth))
    return torch.stack(logits).numpy()


PLANS = np.random.default_rng(0).integers(0, 3, (9, 3))


@torch.no_grad()
def test_with_recompute_each_token_has_the_logits_of_its_exit_in_the_whole_text(model):
    logits, tokens = written(model, "recompute", PLANS)
    for row, prompt in enumerate(PROMPTS):
        text = torch.tensor([[*prompt, *tokens[row][:-1]]])
        states = model.states(text, torch.ones_like(text, dtype=torch.bool))
        for step, k in enumerate(PLANS[:, row]):
            expected = model.classify(k, states[k][len(prompt) - 1 + step])
            np.testing.assert_allclose(logits[step, row], expected.numpy(), atol=EXACT)


@torch.no_grad()
def test_with_copy_state_a_balcony_reads_the_state_at_which_a_token_exited(model):
    logits, tokens = written(model, "copy_state", PLANS)
    for row, prompt in enumerate(PROMPTS):
        first = len(prompt) - 1
        exit_of = lambda at, row=row, first=first: None if at < first else PLANS[at - first, row]  # noqa: E731
        expected = defined(model, [*prompt, *tokens[row][:-1]], first, exit_of)
        np.testing.assert_allclose(logits[:, row], expected, atol=EXACT)
    recomputed, _ = written(model, "recompute", PLANS)
    assert abs(recomputed - logits).max() > 0.01


def test_the_layer_of_an_exit_counts_as_a_part_of_its_head(model):
    recorded = record_texts(model, [Text([*PROMPTS[0], 5], 2)])
    for missing_kv in MISSING_KV:
        segments = token_segments(model, missing_kv, 1, 8)
        inputs = segments.prefill(segments.begin([PROMPTS[0]]))
        layer = 2.0 * (segments.weights.layer + 2 * segments.weights.attention * 3)
        for k, passes in enumerate((1, 1, 2)):
            layers, head = segments.flops(k, inputs)
            np.testing.assert_allclose(layers, passes * layer)
            np.testing.assert_allclose(head, 2.0 * segments.weights.head + (layer if k < 2 else 0))
            np.testing.assert_allclose(np.array(recorded.segments.flops(k, None))[:, 0], [layers[0], np.ravel(head)[0]])


def test_an_encoder_decoder_is_refused():
    with pytest.raises(WrongArguments, match="balcony is for decoders without an encoder, found a t5; give --model"):
        BalconyExits(load_backbone(GOLDEN / "t5"), EXITS)


def test_all_engines_write_the_same_text_with_both_ways_to_fill_keys(tmp_path, decoder_checkpoint, monkeypatch):
    text = tmp_path / "stories.txt"
    text.write_text("\n\n".join(["the film was good and the room is poor and the song is lovely again " * 2] * 40))
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 8)
    options = {"text": text, "epochs": 1, "texts": 32, "new_tokens": 6, "exits": (1, 2, 3), "head_lr": 0.1}
    run = mini_ee.train("balcony", decoder_checkpoint, None, tmp_path / "run", **options)
    monkeypatch.setattr(verification, "VERIFIED_TOKENS", 8)
    mini_ee.export(run, tmp_path / "out", segments=True)  # compares texts under exits that are drawn
    ids = [[5, 9, 13], [7]]
    runtimes = [Runtime(tmp_path / "out", segments=engine) for engine in (None, torch_segments(tmp_path / "out"))]
    for rule in (Fixed(0), Fixed(1)):
        for missing_kv in MISSING_KV:
            expected = gather(run.model.generate(ids, rule, max_new_tokens=6, missing_kv=missing_kv, stop=()), 2)
            for runtime in runtimes:
                steps = decode(runtime.segments(2, 9, missing_kv), ids, 6, rule)
                assert gather(steps, 2) == expected


@pytest.mark.parametrize("k", [0, 1])
@torch.no_grad()
def test_a_balcony_drafts_what_its_exit_predicts_in_the_whole_text(model, k, monkeypatch):
    logits, right = [], BalconySegments.draft_logits
    monkeypatch.setattr(BalconySegments, "draft_logits", lambda *given: (logits.append(right(*given)), logits[-1])[1])
    prompt, last = PROMPTS[0], EXITS[-1]
    (full,) = gather(model.generate([prompt], Never(), max_new_tokens=12, stop=()), 1)
    (lossless,) = gather(model.generate_lossless([prompt], 12, EXITS[k], 1, ()), 1)
    assert lossless.tokens == full.tokens
    text = torch.tensor([[*prompt, *lossless.tokens]])
    states = model.states(text, torch.ones_like(text, dtype=torch.bool))
    # A round begins after each token of the full model; the last one has no room for a draft.
    begins = [0, *(at for at, layer in enumerate(lossless.layers_run, start=1) if layer == last and at < 11)]
    for at, drafted in zip(begins, logits, strict=True):
        expected = model.classify(k, states[k][len(prompt) - 1 + at])
        torch.testing.assert_close(drafted[0], expected, rtol=0, atol=EXACT)
