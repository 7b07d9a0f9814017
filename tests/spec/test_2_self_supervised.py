"""Self-supervised early exits, equation by equation: Eq. 1 (the loss of the heads) and its optimum, the measures of
Fig. 1, Table 1, and Eq. 2 and 3 (confidence and agreement). The method: mini_ee/self_supervised.py, and
lab/methods/self_supervised.py.

The thresholds tau_k on larger samples: tests/contract/test_calibration.py. Training, resuming and writing text:
tests/lab/methods/test_self_supervised.py.
"""

import math

import numpy as np
import pytest
import torch
from both import IMPLEMENTATIONS, SELF_SUPERVISED, token_models

from mini_ee import self_supervised as core_self_supervised
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.calibration import observe
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.exits.token_exits import TextData, record_texts
from mini_ee.lab.methods import self_supervised
from mini_ee.lab.methods.self_supervised import Config, build, metrics

ATOL = 1e-5  # float32 logits, padded batches against texts alone; measured max 1.5e-6
TEXTS = [Text([3, 1, 4, 1, 5, 9], 2), Text([2, 6]), Text([5, 3, 5, 8], 3)]  # tokens, and where the counted ones begin


@pytest.fixture(params=IMPLEMENTATIONS)
def paper(request):
    return SELF_SUPERVISED[request.param]


@pytest.fixture(scope="module")
def model(decoder_checkpoint):
    """A random decoder of 3 layers with heads after layers 1 and 2, and its own LM head after layer 3."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(load_backbone(decoder_checkpoint), (1, 2, 3), 1, None, Config(init="copy"))


def every_position(model, text):
    """The logits of one text alone: of the heads, K - 1 times (T, V), and of the full model, (T, V)."""
    inputs, _ = TextData([text], every=True).batch(np.array([0]), "cpu")
    with torch.no_grad():
        *each_logits, full = model(*inputs)
    return each_logits, full


# ---- Eq. 1: (1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k) ----


@pytest.mark.parametrize("penalty", [0.0, 0.1, 0.95, 1.0])
@pytest.mark.parametrize("target", ["soft", "hard"])
def test_eq1_position_by_position(penalty, target, paper):
    generator = torch.Generator().manual_seed(0)
    logits, full = 2 * torch.randn(2, 3, 4, 7, generator=generator)
    found = paper.head_loss(logits, full, penalty, target)
    for b in range(3):
        for t in range(4):
            p, p_theta = (np.exp(each[b, t].double().numpy()) for each in (logits, full))
            p, p_theta = p / p.sum(), p_theta / p_theta.sum()
            y = p_theta if target == "soft" else np.eye(7)[p_theta.argmax()]
            cross_entropy = -sum(y[i] * math.log(p[i]) for i in range(7))
            uncertainty = -sum(p[i] * math.log(p[i]) for i in range(7))
            assert found[b, t].item() == pytest.approx((1 - penalty) * cross_entropy - penalty * uncertainty, abs=1e-5)


def optimum(penalty, size):
    """The probability p of the target that minimises Eq. 1 over a vocabulary of V = size tokens.

    It solves ln(p (V - 1) / (1 - p)) = ((1 - lambda) / lambda) / p, here by bisection.
    """
    low, high = 1 / size, 1 - 1e-12
    for _ in range(200):
        p = (low + high) / 2
        slope = math.log(p * (size - 1) / (1 - p)) - (1 - penalty) / penalty / p
        low, high = (low, p) if slope > 0 else (p, high)
    return p


@pytest.mark.parametrize("penalty", [0.1, 0.5, 0.95])
def test_eq1_hard_targets_have_the_closed_form_optimum(penalty, paper):
    """An optimiser that minimises Eq. 1 finds the p of the formula, and equal probabilities for all other tokens."""
    size = 40
    logits = torch.zeros(1, size, requires_grad=True)
    full = torch.zeros(1, size)
    full[0, 3] = 1.0
    optimizer = torch.optim.LBFGS([logits], max_iter=40, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = paper.head_loss(logits, full, penalty, "hard").sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    p = logits.detach()[0].softmax(-1)
    others = torch.cat((p[:3], p[4:]))
    assert p[3].item() == pytest.approx(optimum(penalty, size), abs=1e-3)
    assert (others.max() - others.min()).item() < 1e-3


@pytest.mark.parametrize("penalty, expected", [(0.95, 0.009), (0.5, 0.114), (0.1, 0.753)])
def test_eq1_the_optimum_for_phis_vocabulary(penalty, expected):
    """With the paper's lambda of .95 a perfect head gives the right token a probability of only .9 %."""
    assert optimum(penalty, 51200) == pytest.approx(expected, abs=5e-4)


def test_eq1_without_a_penalty_the_optimum_is_the_full_model(paper):
    full = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    logits = full.clone().requires_grad_()
    paper.head_loss(logits, full, 0.0).sum().backward()
    assert logits.grad.abs().max() < 1e-6
    least = -(full.softmax(-1) * full.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(paper.head_loss(full, full, 0.0), least)


@pytest.mark.parametrize("target", ["soft", "hard"])
@pytest.mark.parametrize("module", [self_supervised, core_self_supervised], ids=IMPLEMENTATIONS)
def test_eq1_without_a_penalty_computes_no_entropy(monkeypatch, module, target):
    """The entropy would take a fifth of a training step, and be multiplied by 0."""
    calls, entropy = [], module.entropy
    monkeypatch.setattr(module, "entropy", lambda log_p: calls.append(log_p) or entropy(log_p))
    logits, full = torch.randn(2, 3, 7)
    for penalty, expected in ((0.0, 0), (0.1, 1)):
        module.head_loss(logits, full, penalty, target)
        assert len(calls) == expected


# ---- Fig. 1: agreement and entropy of each head ----


def test_fig1_agreement_and_entropy_are_means_over_all_positions(model):
    agrees, entropies = [[], []], [[], []]
    for text in TEXTS:
        each_logits, full = every_position(model, text)
        for k, logits in enumerate(each_logits):
            for position in range(len(text.ids)):
                p = logits[position].double().softmax(-1)
                agrees[k].append(bool(p.argmax() == full[position].argmax()))
                entropies[k].append(-float((p * p.log()).sum()))
    for batch_size in (1, 2, 3):
        found = metrics(model, TextData(TEXTS, True), batch_size)
        np.testing.assert_allclose(found["agreement"], np.mean(agrees, axis=1))
        np.testing.assert_allclose(found["entropy"], np.mean(entropies, axis=1), atol=ATOL)


# ---- Table 1 ----


def test_table1_training_and_calibration_prompts_are_disjoint(paper):
    assert len(paper.TRAINING_PROMPTS) == len(paper.CALIBRATION_PROMPTS) == 5
    assert not set(paper.TRAINING_PROMPTS) & set(paper.CALIBRATION_PROMPTS)


# ---- Section 3.3.1, Eq. 2 and 3: confidence, agreement, threshold ----


@pytest.mark.parametrize("measure", MEASURES)
def test_eq2_and_eq3_the_confidence_and_the_agreement_of_every_token_that_counts(measure, model):
    """A text is a group: its tokens are not independent."""
    found = observe(record_texts(model, TEXTS, batch_size=2), measure)
    assert found.groups.tolist() == [0] * 4 + [1] * 2 + [2]
    row = 0
    for text in TEXTS:
        each_logits, full = every_position(model, text)
        for position in range(text.start, len(text.ids)):
            for k, logits in enumerate(each_logits):
                confidence = MEASURES[measure][0](logits[position : position + 1].numpy())[0]
                assert found.confidence[row, k] == pytest.approx(confidence, abs=ATOL)
                assert found.agrees[row, k] == (logits[position].argmax() == full[position].argmax())
            row += 1
    assert row == len(found.groups)


def test_eq2_and_eq3_of_both_on_the_same_model(model, decoder_checkpoint, paper):
    """Breaking ties and agreement of every token of a text, from the logits of each exit."""
    name = "project" if paper is SELF_SUPERVISED["project"] else "core"
    both = token_models(decoder_checkpoint, model)
    for text in TEXTS:
        logits = paper.every_position(both[name], text.ids)
        expected = SELF_SUPERVISED["project"].every_position(model, text.ids)
        torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)
        confidence, agrees = paper.observed(both[name], text.ids)
        p = logits[:, :-1].double().softmax(-1).topk(2).values
        np.testing.assert_allclose(confidence, p[..., 0] - p[..., 1], atol=ATOL)
        np.testing.assert_array_equal(agrees, logits[:, :-1].argmax(-1) == logits[:, -1:].argmax(-1))


def test_tau_is_the_lowest_confidence_from_which_on_a_share_epsilon_agrees(paper):
    """From .2 on 3 of 4 tokens agree, from .7 on all do. The token that disagrees has confidence .5."""
    confidence, agrees = np.array([0.9, 0.2, 0.5, 0.7]), np.array([True, True, False, True])
    assert [paper.tau(confidence, agrees, epsilon) for epsilon in (0.75, 0.76, 1.0)] == [0.2, 0.7, 0.7]
