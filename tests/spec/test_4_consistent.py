"""ConsistentEE, equation by equation: Eq. 1 (the joint loss), Eq. 2 (losses), Eq. 3 and 4 (rewards), Eq. 5 (the
policies' objective and its gradient), Eq. 6 (the classifiers' loss), Eq. 7 (the memorized layer). The method:
mini_ee/consistent.py.

With K exits there are only K trajectories, so each expectation is checked against an enumeration. Actions by coin, the
exact estimator, Table 1, and trainings of the lab: tests/lab/methods/test_consistent.py.
"""

import itertools

import numpy as np
import pytest
import torch

from mini_ee import consistent as paper

DRAWS = 10_000


def drawn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def random_rewards(rows=5, exits=4):
    return -drawn(rows, exits, seed=1).abs() - 0.1 * torch.arange(1, exits + 1)


# ---- Eq. 1: all exits learn together ----


def test_eq1_is_the_sum_of_losses_weighted_with_their_depth_over_the_sum_of_depths():
    losses = drawn(3, 2)
    expected = (2 * losses[0] + 4 * losses[1] + 6 * losses[2]) / 12
    torch.testing.assert_close(paper.depth_weighted_loss(losses, (2, 4, 6)), expected, rtol=0, atol=1e-12)
    assert paper.depth_weighted_loss([3.0], (12,)) == 3.0
    with pytest.raises(ValueError):
        paper.depth_weighted_loss(losses[:2], (2, 4, 6))


# ---- Eq. 2: the loss of every exit ----


def test_eq2_is_the_cross_entropy_of_each_exit():
    logits, labels = drawn(3, 4, 5), torch.tensor([0, 4, 2])
    expected = [
        [-np.log(np.exp(row[k][label]) / np.exp(row[k]).sum()) for k in range(4)]
        for row, label in zip(logits.numpy(), labels)
    ]
    np.testing.assert_allclose(paper.exit_losses(logits, labels), expected, rtol=0, atol=1e-12)
    assert paper.exit_losses(logits.half(), labels).dtype == torch.float32


# ---- Eq. 3 and 4: the reward of exiting at each exit ----


def test_eq3_and_eq4_count_depth_in_layers():
    losses, depths = drawn(3, 3).abs(), (2, 5, 8)
    memorized = (2, 5, 8)
    vanilla = paper.vanilla_rewards(losses, torch.tensor(depths), 0.3)
    guided = paper.hardness_guided_rewards(losses, torch.tensor(depths), 0.3, torch.tensor(memorized))
    for row, k in itertools.product(range(3), range(3)):
        assert vanilla[row, k].item() == pytest.approx(-losses[row, k].item() - 0.3 * depths[k], abs=1e-6)
        weight = 0.3 * (1 - memorized[row] / 8)
        assert guided[row, k].item() == pytest.approx(-losses[row, k].item() - weight * depths[k], abs=1e-6)


def test_unlearning_the_last_exit_raises_eq4():
    """Deviation 4: an example that the last exit predicts wrong pays nothing for depth by Eq. 4, unlike by Eq. 3."""
    depths, labels = torch.tensor([2, 5, 8]), torch.tensor([0])
    right = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    unlearned = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    for guided, compare in ((True, torch.gt), (False, torch.eq)):
        before, after = (paper.rewards_of(z, labels, depths, 0.3, guided)[0, 0] for z in (right, unlearned))
        assert compare(after, before)


def test_policies_begin_with_equal_chances():
    """Deviation 2: whatever the state, each exit has probability 1 / K."""
    policies = paper.policy_networks(6, (1, 2, 3, 4))
    exit_logits = torch.cat([policy(torch.randn(5, 6)) for policy in policies], 1)
    chance = paper.log_exit_probabilities(exit_logits).exp()
    torch.testing.assert_close(chance, torch.full((5, 4), 0.25))


def test_eq4_an_example_memorized_at_the_last_layer_pays_nothing_for_depth():
    losses, depths = drawn(1, 3).abs(), torch.tensor([2, 5, 8])
    assert torch.equal(paper.hardness_guided_rewards(losses, depths, 0.3, torch.tensor([8])), -losses)
    assert (paper.hardness_guided_rewards(losses, depths, 0.3, torch.tensor([5])) < -losses).all()


# ---- Eq. 5: trajectories and their probabilities ----


def enumerate_trajectories(exit_logits):
    """The oracle, (B, K): walk through every sequence of actions, and add its probability to its exit."""
    rows, policies = exit_logits.shape
    chances = np.zeros((rows, policies + 1))
    for row in range(rows):
        for walk in itertools.product([False, True], repeat=policies):
            chance, exit_index = 1.0, policies
            for k, stops in enumerate(walk):
                p = 1 / (1 + np.exp(-float(exit_logits[row, k])))
                chance *= p if stops else 1 - p
                if stops:
                    exit_index = min(exit_index, k)
            chances[row, exit_index] += chance
    return chances


def test_eq5_the_exit_probability_is_the_sum_over_all_sequences_of_actions():
    exit_logits = 2 * drawn(4, 3)
    chances = paper.log_exit_probabilities(exit_logits).exp()
    np.testing.assert_allclose(chances, enumerate_trajectories(exit_logits), rtol=0, atol=1e-12)
    np.testing.assert_allclose(chances.sum(dim=1), 1, rtol=0, atol=1e-12)


def test_eq5_the_forced_exit_adds_no_log_probability():
    """If the policies always continue, the trajectory is certain: its log-probability is 0."""
    exit_logits = torch.full((1, 3), -40.0, dtype=torch.float64, requires_grad=True)
    log_exit = paper.log_exit_probabilities(exit_logits)
    assert log_exit.shape == (1, 4) and log_exit[0, -1].item() == pytest.approx(0, abs=1e-12)
    log_exit[0, -1].backward()
    np.testing.assert_allclose(exit_logits.grad, -torch.sigmoid(exit_logits.detach()), rtol=1e-9)


def test_eq5_log_probabilities_are_finite_even_if_probabilities_round_to_zero():
    exit_logits = torch.tensor([[200.0, -200.0, 200.0]], requires_grad=True)
    log_exit = paper.log_exit_probabilities(exit_logits)
    (gradient,) = torch.autograd.grad(log_exit.sum(), exit_logits)
    assert torch.isfinite(log_exit).all() and torch.isfinite(gradient).all()


def test_eq5_sampled_trajectories_are_as_frequent_as_actions_drawn_one_by_one():
    exit_logits = drawn(1, 3)
    exits = paper.sample_exits(paper.log_exit_probabilities(exit_logits), 20_000, torch.Generator().manual_seed(0))
    random, walked = np.random.default_rng(0), []
    for _ in range(20_000):
        actions = random.random(3) < 1 / (1 + np.exp(-exit_logits[0].numpy()))
        walked.append(int(np.argmax([*actions, True])))
    difference = np.bincount(exits[0], minlength=4) - np.bincount(walked, minlength=4)
    assert abs(difference / 20_000).max() < 4 * np.sqrt(2 * 0.25 / 20_000)


# ---- Eq. 5: its gradient ----


def enumerated_gradient(exit_logits, rewards):
    """The gradient of sum_t P(t) R_t by each logit, by central differences on the enumeration."""
    gradient, step = np.zeros(exit_logits.shape), 1e-5
    for row, k in np.ndindex(*exit_logits.shape):
        values = []
        for sign in (1, -1):
            moved = exit_logits.numpy().copy()
            moved[row, k] += sign * step
            values.append((enumerate_trajectories(moved)[row] * rewards[row].numpy()).sum())
        gradient[row, k] = (values[0] - values[1]) / (2 * step)
    return gradient


def sampled_gradients(exit_logits, rewards, trajectories, baseline=True):
    """(DRAWS, K - 1): the gradient of `reinforce_loss` for one example, DRAWS times, as the rows of one batch."""
    repeated = exit_logits.expand(DRAWS, -1).clone().requires_grad_()
    log_exit = paper.log_exit_probabilities(repeated)
    exits = paper.sample_exits(log_exit, trajectories, torch.Generator().manual_seed(7))
    (DRAWS * paper.reinforce_loss(log_exit, rewards.expand(DRAWS, -1), exits, baseline)).backward()
    return -repeated.grad.numpy()


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("trajectories", [2, 8])
def test_eq5_the_mean_of_10000_sampled_gradients_is_the_enumerated_one_within_its_standard_error(
    trajectories, baseline
):
    exit_logits, rewards = drawn(1, 3), random_rewards(1)
    gradients = sampled_gradients(exit_logits, rewards, trajectories, baseline)
    error = gradients.std(axis=0) / np.sqrt(DRAWS)
    expected = enumerated_gradient(exit_logits, rewards)[0]
    assert (abs(gradients.mean(axis=0) - expected) < 4 * error).all()
    assert (abs(expected) > 8 * error).any()  # enough draws to distinguish it from 0


def test_eq5_the_baseline_lowers_the_variance():
    exit_logits, rewards = drawn(1, 3), random_rewards(1)
    without, with_baseline = (
        sampled_gradients(exit_logits, rewards, 8, baseline).var(axis=0).sum() for baseline in (False, True)
    )
    assert 0 < 2 * with_baseline < without
    more = sampled_gradients(exit_logits, rewards, 32).var(axis=0).sum()
    assert more < with_baseline / 3
    same = torch.ones(1, 4, dtype=torch.float64)  # equal rewards: the baseline removes all variance
    assert sampled_gradients(exit_logits, same, 8).var() < 1e-25
    assert sampled_gradients(exit_logits, same, 8, baseline=False).var() > 0.01


def test_eq5_the_baseline_of_a_trajectory_is_the_mean_reward_of_the_others():
    rewards = drawn(3, 5)
    expected = [[np.mean([*row[:i], *row[i + 1 :]]) for i in range(5)] for row in rewards.numpy()]
    np.testing.assert_allclose(paper.leave_one_out(rewards), expected, rtol=0, atol=1e-12)


def test_eq5_taken_literally_would_spread_the_probability():
    """Deviation 1: with R = -1 and -2, E[R prod pi] is largest at pi = 2/3 for the better exit, E[R] at 1."""
    rewards = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    settled = []
    for power in (1, 2):  # E[R] = sum_t P(t) R_t, and as printed
        z = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([z], lr=5.0)
        for _ in range(100):
            optimizer.zero_grad()
            (-(paper.log_exit_probabilities(z).exp() ** power * rewards).sum()).backward()
            optimizer.step()
        settled.append(torch.sigmoid(z).item())
    assert settled[0] > 0.99 and settled[1] == pytest.approx(2 / 3, abs=1e-3)


def policy_loss(exit_logits, rewards):
    log_exit = paper.log_exit_probabilities(exit_logits)
    return paper.reinforce_loss(log_exit, rewards, paper.sample_exits(log_exit, paper.TRAJECTORIES))


def test_eq5_a_policy_per_example_finds_the_best_exits_and_a_larger_alpha_exits_earlier():
    torch.manual_seed(0)
    losses, depths = drawn(6, 4).abs().sort(dim=1, descending=True).values, torch.tensor([1, 2, 3, 4])
    rewards = torch.cat([paper.vanilla_rewards(losses, depths, alpha) for alpha in (0.0, 0.1, 0.3, 1.0, 3.0)])
    z = torch.zeros(30, 3, dtype=torch.float64, requires_grad=True)  # a policy for each example and alpha
    optimizer = torch.optim.Adam([z], lr=0.2)
    for _ in range(150):
        optimizer.zero_grad()
        policy_loss(z, rewards).backward()
        optimizer.step()
    chance = paper.log_exit_probabilities(z.detach()).exp()
    assert ((chance * rewards).sum(dim=1) > rewards.max(dim=1).values - 0.03).all()
    layers = (chance * depths).sum(dim=1).view(5, 6).mean(dim=1).tolist()
    assert layers == sorted(layers, reverse=True)
    assert layers[0] > 3.9 and layers[-1] < 1.1


# ---- Eq. 6: the loss of the classifiers ----


@pytest.mark.parametrize("exits_at", [0, 1, 3])
def test_eq6_trains_only_the_exit_at_which_an_example_stops(exits_at):
    losses = drawn(5, 4).abs().requires_grad_()
    exit_logits = torch.full((5, 3), -60.0, dtype=torch.float64)
    if exits_at < 3:
        exit_logits[:, exits_at] = 60.0
    paper.consistent_loss(losses, exit_logits).backward()
    expected = torch.zeros(5, 4, dtype=torch.float64)
    expected[:, exits_at] = 1 / 5
    torch.testing.assert_close(losses.grad, expected)


def test_eq6_the_sampled_loss_is_on_average_the_sum_over_exits():
    torch.manual_seed(0)
    losses, exit_logits = drawn(1, 4).abs(), drawn(1, 3)
    many = paper.consistent_loss(losses.expand(DRAWS, -1), exit_logits.expand(DRAWS, -1))
    expected = (enumerate_trajectories(exit_logits) * losses.numpy()).sum()
    assert many.item() == pytest.approx(expected, abs=4 * losses.std().item() / np.sqrt(8 * DRAWS))


# ---- Eq. 7: the memorized layer ----


def test_eq7_is_the_first_layer_from_which_on_all_exits_are_right_for_every_pattern():
    depths = (1, 3, 4, 6)
    patterns = list(itertools.product([False, True], repeat=4))
    expected = [next((depths[k] for k in range(4) if all(pattern[k:])), 6) for pattern in patterns]
    assert paper.memorized_layer(torch.tensor(patterns), torch.tensor(depths)).tolist() == expected
    assert set(expected) == set(depths)
