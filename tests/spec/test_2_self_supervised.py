"""Self-supervised early exits, equation by equation: Eq. 1 (the loss of the heads) and its optimum, Table 1, and Eq. 2
and 3 (confidence and agreement). The method: mini_ee/self_supervised.py.

The thresholds tau_k on larger samples: tests/contract/test_calibration.py. Fig. 1, and trainings of the lab:
tests/lab/methods/test_self_supervised.py.
"""

import math

import numpy as np
import pytest
import torch

from mini_ee import self_supervised as paper
from mini_ee.calibrate import tau
from mini_ee.llama import Llama, TokenExits

ATOL = 1e-6  # float32 against float64


# ---- Eq. 1: (1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k) ----


@pytest.mark.parametrize("penalty", [0.0, 0.1, 0.95, 1.0])
@pytest.mark.parametrize("target", ["soft", "hard"])
def test_eq1_position_by_position(penalty, target):
    generator = torch.Generator().manual_seed(0)
    logits, full = 2 * torch.randn(2, 3, 4, 7, generator=generator)
    losses = paper.head_loss(logits, full, penalty, target)
    for b in range(3):
        for t in range(4):
            p, p_theta = (np.exp(logit_rows[b, t].double().numpy()) for logit_rows in (logits, full))
            p, p_theta = p / p.sum(), p_theta / p_theta.sum()
            y = p_theta if target == "soft" else np.eye(7)[p_theta.argmax()]
            cross_entropy = -sum(y[i] * math.log(p[i]) for i in range(7))
            uncertainty = -sum(p[i] * math.log(p[i]) for i in range(7))
            assert losses[b, t].item() == pytest.approx((1 - penalty) * cross_entropy - penalty * uncertainty, abs=1e-5)


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
def test_eq1_hard_targets_have_the_closed_form_optimum(penalty):
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


def test_eq1_without_a_penalty_the_optimum_is_the_full_model():
    full = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    logits = full.clone().requires_grad_()
    paper.head_loss(logits, full, 0.0, "soft").sum().backward()
    assert logits.grad.abs().max() < 1e-6
    least = -(full.softmax(-1) * full.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(paper.head_loss(full, full, 0.0, "soft"), least)


@pytest.mark.parametrize("target", ["soft", "hard"])
def test_eq1_without_a_penalty_computes_no_entropy(monkeypatch, target):
    """The entropy would take a fifth of a training step, and be multiplied by 0."""
    calls, entropy = [], paper.entropy
    monkeypatch.setattr(paper, "entropy", lambda log_p: calls.append(log_p) or entropy(log_p))
    logits, full = torch.randn(2, 3, 7)
    for penalty, expected in ((0.0, 0), (0.1, 1)):
        paper.head_loss(logits, full, penalty, target)
        assert len(calls) == expected


# ---- Table 1 ----


def test_table1_training_and_calibration_prompts_are_disjoint():
    assert len(paper.TRAINING_PROMPTS) == len(paper.CALIBRATION_PROMPTS) == 5
    assert not set(paper.TRAINING_PROMPTS) & set(paper.CALIBRATION_PROMPTS)


# ---- Section 3.3.1, Eq. 2 and 3: confidence, agreement, threshold ----


def test_eq2_and_eq3_are_breaking_ties_and_agreement_of_every_token():
    """From the logits of each exit: (N T, K, V) of two texts."""
    model = TokenExits(Llama.load(), (4, 8, 12)).eval()
    logits = paper.logits_of(model, torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]))
    confidence, agrees = paper.confidence_and_agreement(logits)
    assert confidence.shape == agrees.shape == (12, 2)
    for row, k in np.ndindex(12, 2):
        p = np.exp(logits[row, k].astype(float))
        second, first = np.sort(p / p.sum())[-2:]
        assert confidence[row, k] == pytest.approx(first - second, abs=ATOL)
        assert agrees[row, k] == (logits[row, k].argmax() == logits[row, 2].argmax())


def test_tau_is_the_lowest_confidence_from_which_on_a_share_epsilon_agrees():
    """From .2 on 3 of 4 tokens agree, from .7 on all do. The token that disagrees has confidence .5."""
    confidence, agrees = np.array([0.9, 0.2, 0.5, 0.7]), np.array([True, True, False, True])
    assert [tau(confidence, agrees, epsilon) for epsilon in (0.75, 0.76, 1.0)] == [0.2, 0.7, 0.7]
