"""The core's BERT, Llama, decoding and exact tests equal the lab's, on random and real checkpoints."""

import numpy as np
import pytest
import torch
from core_models import BERTS, LLAMAS, loaded, rows

from mini_ee.bert import Bert, Exits
from mini_ee.calibrate import binomial_cdf, tau_with_confidence
from mini_ee.lab import calibration, statistics
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.tokenizer import Inputs as LabInputs
from mini_ee.lab.exits.generation import gather, token_weights
from mini_ee.lab.exits.generation import generate as generate_with_the_lab
from mini_ee.lab.exits.heads import VocabularyHead
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.rules import Threshold as LabThreshold
from mini_ee.llama import Llama, TokenExits, generate
from mini_ee.rules import Threshold

ATOL = 2e-5  # float32, 12 layers; measured max 2.0e-6 (BERT), 7.6e-6 (logits of Llama)


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
    texts = generate(core, Threshold(tau, "breaking_ties"), PROMPTS, 8, missing)
    rule = LabThreshold(tau, "breaking_ties")
    expected = gather(
        generate_with_the_lab(
            lab, PROMPTS, max_new_tokens=8, exits=core.exits, heads=heads, rule=rule, missing_kv=missing
        ),
        len(PROMPTS),
    )
    assert [(text.ids, text.layers) for text in texts] == [(text.tokens, text.layers_run) for text in expected]
    assert len({layer for text in texts for layer in text.layers}) > 1


def test_the_flops_of_a_token_are_the_labs(decoder):
    core, lab, _ = decoder
    weights = token_weights(lab)
    layer = 2.0 * weights.layer + 4.0 * weights.attention * 8  # the token at position 7 reads 8
    np.testing.assert_allclose(core.flops(7, every_head=False), np.array(core.exits) * layer + 2.0 * weights.head)
    np.testing.assert_allclose(core.flops(7, True) - core.flops(7, False), 2.0 * weights.head * np.arange(3))


# ---- Exact tests ----
def draw(rows, seed, ties=False):
    """Confidences, and agreement that is more likely where they are high."""
    random = np.random.default_rng(seed)
    confidence = random.random(rows)
    return np.round(confidence, 2) if ties else confidence, random.random(rows) < 0.7 + 0.3 * confidence


@pytest.mark.parametrize("trials, p", [(1, 0.5), (20, 0.02), (300, 0.02), (3000, 0.9)])
def test_the_binomial_tail_is_the_projects(trials, p):
    for count in {0, 1, trials // 50, trials // 2, trials - 1, trials}:
        expected = float(statistics.binomial_cdf(count, trials, p))
        assert binomial_cdf(count, trials, p) == pytest.approx(expected, abs=1e-9)
    assert binomial_cdf(-1, trials, p) == 0


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("epsilon, delta", [(0.8, 0.05), (0.9, 0.1), (0.85, 0.01)])
def test_tau_with_confidence_is_the_projects_for_single_rows(epsilon, delta, ties):
    cuts = set()
    for seed in range(20):
        confidence, agrees = draw(400, seed, ties)
        given = confidence, agrees, np.arange(400), epsilon, delta
        cuts.add(tau_with_confidence(*given))
        assert tau_with_confidence(*given) == calibration.tau_with_confidence(*given)
    assert len(cuts) > 3
