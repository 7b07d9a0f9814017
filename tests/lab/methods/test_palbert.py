"""PALBERT: probabilities, loss and Q-exit by loops; what an exit said goes with its row; the graphs repeat it."""

import json

import numpy as np
import pytest
import torch
from conftest import tensors
from method_cases import LABELS, of_exits

import mini_ee.consistent as paper
import mini_ee.lab.baselines.palbert as palbert
from mini_ee.lab.baselines.palbert import Config, Ponder, PonderExits, log_exit_probabilities, log_prior, pondering_loss
from mini_ee.lab.cli.main import main
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.consistent import exact_loss
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, QExit, Threshold
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.stages import Batch

ATOL = 1e-5
DRAWN = np.random.default_rng(0)
LOGITS = torch.from_numpy(DRAWN.normal(size=(5, 3)))
LOSSES = torch.from_numpy(DRAWN.uniform(0, 2, size=(5, 4)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def probabilities(logits):
    """p by the process itself: (K - 1,) -> K numbers."""
    chances, still = [], 1.0
    for logit in logits:
        chances.append(still * sigmoid(logit))
        still *= 1 - sigmoid(logit)
    return [*chances, still]


def geometric(exits, chance):
    """The prior, layer by layer."""
    prior = [0.0] * len(exits)
    still = 1.0
    for layer in range(1, exits[-1] + 1):
        k = next(k for k, e in enumerate(exits) if e >= layer)
        prior[k] += still * chance if layer < exits[-1] else still
        still *= 1 - chance
    return prior


# ---- The equations ----
@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_the_loss_is_the_expected_loss_and_the_divergence_from_the_prior(kl):
    exits, expected = (1, 3, 4, 8), []
    g = geometric(exits, 0.2)
    for row in range(5):
        p = probabilities(LOGITS[row].tolist())
        pair = zip(g, p) if kl == "forward" else zip(p, g)
        expected.append(
            sum(a * b for a, b in zip(p, LOSSES[row].tolist())) + 0.7 * sum(a * np.log(a / b) for a, b in pair)
        )
    loss = pondering_loss(LOSSES, LOGITS, log_prior(exits, 0.2), Config(beta=0.7, kl=kl))
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-6)


def test_probabilities_sum_to_one_however_early_or_late_rows_leave():
    """The released code gives the last exit lambda_L of the rest alone, and changes p where its sum passes .95."""
    for extreme in (LOGITS, LOGITS * 100, LOGITS * 0 + 30, LOGITS * 0 - 30):
        log_p = log_exit_probabilities(extreme)
        assert torch.isfinite(log_p).all()
        np.testing.assert_allclose(log_p.exp().sum(1), 1, rtol=1e-12)
    with pytest.raises(AssertionError):
        released = log_exit_probabilities(torch.cat((LOGITS, LOGITS[:, :1]), 1))[:, :-1]
        np.testing.assert_allclose(released.exp().sum(1), 1, rtol=1e-12)


def test_without_prior_the_loss_is_minus_the_exact_reward_of_a_policy():
    loss = pondering_loss(LOSSES, LOGITS, log_prior((1, 2, 3, 4), 0.1), Config(beta=0.0))
    expected = exact_loss(paper.log_exit_probabilities(LOGITS), paper.vanilla_rewards(LOSSES, torch.arange(4), 0.0))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_the_divergence_vanishes_where_every_lambda_is_the_priors(kl):
    logits = torch.full((2, 4), float(np.log(0.1 / 0.9)), dtype=torch.float64)
    loss = pondering_loss(torch.zeros(2, 5).double(), logits, log_prior((1, 2, 3, 4, 5), 0.1), Config(kl=kl))
    assert abs(loss.item()) < 1e-7


def best_p(losses, g, beta, kl):
    """Where the loss of one row is least, over all distributions."""
    if kl == "reverse":
        odds = g * np.exp(-losses / beta)
        return odds / odds.sum()
    low, high = losses.min() - 10, losses.min() - 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (beta * g / (losses - middle)).sum() < 1 else (low, middle)
    return beta * g / (losses - low)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_the_loss_is_least_at_the_closed_form_of_its_optimum(kl):
    g, losses = np.array(geometric((1, 2, 3, 4), 0.1)), LOSSES[0].numpy()
    p = best_p(losses, g, 0.5, kl)
    chances = [p[k] / p[k:].sum() for k in range(3)]
    logits = torch.tensor([[np.log(c / (1 - c)) for c in chances]], requires_grad=True)
    pondering_loss(LOSSES[:1], logits, log_prior((1, 2, 3, 4), 0.1), Config(kl=kl)).backward()
    assert abs(logits.grad).max() < 1e-6


# ---- The model ----
@pytest.fixture
def model(random_model):
    """A PonderExits whose every parameter is drawn, and whose rows leave at several exits."""
    source = random_model()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = PonderExits(source.backbone, source.exits, 3, policy=Ponder).eval()
        model.heads = source.heads
        for parameter in model.policy.parameters():
            torch.nn.init.normal_(parameter, std=0.6)
    return model


def said_by_hand(model, inputs):
    """Logits (B, K, C) and exit logits (B, K - 1), row by row in float64."""
    with torch.no_grad():
        hidden = model.backbone.hidden_states(*tensors(inputs))
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    logits, decisions = np.zeros((len(inputs), 4, 3)), np.zeros((len(inputs), 3))
    for row in range(len(inputs)):
        before = np.zeros(24)
        for k, layer in enumerate(model.exits):
            state = hidden[layer][row, : inputs.attention_mask[row].sum()].double().numpy().mean(0)
            output = np.tanh(weights[f"heads.{k}.dense.weight"] @ state + weights[f"heads.{k}.dense.bias"])
            logits[row, k] = weights[f"heads.{k}.out.weight"] @ output + weights[f"heads.{k}.out.bias"]
            x = np.concatenate((output, before))
            for number in (1, 3, 5):
                x = np.tanh(weights[f"policy.network.{number}.weight"] @ x + weights[f"policy.network.{number}.bias"])
            if k < 3:
                decisions[row, k] = (weights["policy.network.7.weight"] @ x + weights["policy.network.7.bias"])[0]
            before = output
    return logits, decisions


def test_a_chance_is_read_from_this_exit_and_the_one_before_and_from_nothing_at_first(model, padded_inputs):
    logits, decisions = said_by_hand(model, padded_inputs)
    read_logits, _, exit_logits = read_every_exit(model.segments(), padded_inputs)
    np.testing.assert_allclose(read_logits, logits, rtol=0, atol=ATOL)
    np.testing.assert_allclose(exit_logits, decisions, rtol=0, atol=ATOL)
    with torch.no_grad():
        np.testing.assert_allclose(
            model.exit_logits(model.states(*tensors(padded_inputs))), decisions, rtol=0, atol=ATOL
        )
        batch = Batch(tensors(padded_inputs), LABELS, None, None)
        loss = palbert.loss(model, batch, Config())
    losses = np.logaddexp.reduce(logits, axis=2) - logits[np.arange(7)[:, None], np.arange(4), LABELS[:, None].numpy()]
    of = pondering_loss(torch.from_numpy(losses), torch.from_numpy(decisions), log_prior(model.exits, 0.1), Config())
    assert loss.item() == pytest.approx(of.item(), rel=1e-4)


def left_at(decisions, q):
    """Q-exit by the probabilities themselves."""
    return [next((k for k in range(3) if sum(probabilities(row)[: k + 1]) > q), 3) for row in decisions]


def middle_qs(decisions):
    """Between two of the chances at each exit."""
    chances = np.sort([[sum(probabilities(row)[: k + 1]) for row in decisions] for k in range(3)], axis=1)
    return chances[:, 3:5].mean(1).tolist()


def test_a_row_leaves_once_it_would_have_left_with_a_chance_above_q_alone_as_in_a_batch(model, padded_inputs):
    logits, decisions = said_by_hand(model, padded_inputs)
    before, seen = np.zeros(7), set()
    for q in (0.0, *sorted(middle_qs(decisions)), 1.0):
        result = early_exit(model.segments(), QExit(q), padded_inputs)
        expected = [0] * 7 if q == 0 else left_at(decisions, q)
        assert result.exit_index.tolist() == expected and (result.exit_index >= before).all()
        np.testing.assert_allclose(result.logits, logits[np.arange(7), expected], rtol=0, atol=ATOL)
        for row in range(7):
            alone = early_exit(model.segments(), QExit(q), padded_inputs.take(slice(row, row + 1)))
            assert alone.exit_index[0] == expected[row]
        before, seen = result.exit_index, seen | set(expected)
    assert len(seen) > 2


def test_numbers_ponder_too(random_model, padded_inputs):
    source = random_model(num_labels=1)
    model = PonderExits(source.backbone, source.exits, 1, policy=Ponder).eval()
    batch = Batch(tensors(padded_inputs), LABELS.float(), None, None)
    assert torch.isfinite(palbert.loss(model, batch, Config()))
    assert early_exit(model.segments(), QExit(0.5), padded_inputs).logits.shape == (7, 1)


def test_palbert_needs_two_exits(random_model):
    source = random_model()
    with pytest.raises(ValueError, match="at least two exits to choose from, got 1"):
        PonderExits(source.backbone, (6,), 3, policy=Ponder)


def test_the_candidates_are_the_papers_q_and_quantiles_of_the_chances():
    rules = sweep(QExit())(of_exits(DRAWN.normal(size=(50, 4, 3)), DRAWN.normal(size=(50, 3))))
    assert rules[0] == QExit(0.5) and {type(rule) for rule in rules} == {QExit}
    assert max(rule.q for rule in rules) > 0.8


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_a_q_is_a_probability(q):
    with pytest.raises(ValueError, match="q, a cumulative exit probability, must be from 0 to 1"):
        QExit(q)


def test_a_model_without_chances_is_told(random_model, padded_inputs):
    with pytest.raises(ValueError, match="needs a model with a policy"):
        early_exit(random_model().segments(), QExit(0.5), padded_inputs)


# ---- ONNX ----
def test_one_graph_and_segments_leave_where_torch_leaves(model, padded_inputs, tmp_path):
    _, decisions = said_by_hand(model, padded_inputs)
    middle = QExit(middle_qs(decisions)[1])
    manifest = write_graphs(model, model.segments(), middle, tmp_path, segments=True)
    engines = OrtModel(tmp_path, manifest, threads=1), OrtSegments(tmp_path, manifest, threads=1)
    assert "carried" in manifest["graphs"]["segment_2"]["inputs"]
    for rule in (middle, QExit(0.9), QExit(1.0), QExit(0.0), Never(), Fixed(1), Threshold(0.6)):
        expected = early_exit(model.segments(), rule, padded_inputs)
        for engine in engines:
            result = early_exit(engine, rule, padded_inputs)
            assert result.exit_index.tolist() == expected.exit_index.tolist()
            np.testing.assert_allclose(result.logits, expected.logits, rtol=0, atol=ATOL)
    expected = read_every_exit(model.segments(), padded_inputs)
    for engine in engines:
        every_exit = read_every_exit(engine, padded_inputs)
        for one, other in ((every_exit[0], expected[0]), (every_exit[2], expected[2])):
            np.testing.assert_allclose(one, other, rtol=0, atol=ATOL)


# ---- On the command line ----
def test_it_is_trained_evaluated_compared_and_exported(checkpoint_folder, task_folder, tmp_path, capsys):
    def answer(*argv):
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run, data = tmp_path / "run", ("--task", task_folder)
    made = ("--model", checkpoint_folder, *data, "--out", run, "--epochs", 1, "--kl", "reverse", "--prior", 0.2)
    answer("train", "palbert", *made)
    assert load_run(run).config["settings"] == {"beta": 0.5, "prior": 0.2, "kl": "reverse"}
    assert answer("evaluate", run, *data, "--q", 0.3)["rule"] == {"name": "q-exit", "q": 0.3}
    (row,) = answer("compare", run, *data, "--sweep")["rows"]
    assert {point["rule"]["name"] for point in row["curve"]} == {"never", "q-exit"}
    out = answer("export", run, "--out", tmp_path / "exported", "--rule", "q-exit", "--segments", *data)
    assert out["verified"]["exit_agreement"] == 1.0 and out["rule"] == {"name": "q-exit", "q": 0.5}
