"""ConsistentEE: the model, what learns in each step, rounds, tokens, and the measures of evaluation.

Eq. 2 to 7: tests/spec/test_4_consistent.py.
"""

import itertools
import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tensors

import mini_ee.consistent as paper
import mini_ee.lab.exits.row_exits as rows_module
import mini_ee.lab.methods.consistent as consistent
import mini_ee.lab.training.state as state
from mini_ee import train
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.tasks import load_task, subset
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.plots import draw_rewards
from mini_ee.lab.evaluation.row_evaluation import by_exit
from mini_ee.lab.exits.generation import Sampling
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.row_exits import RowData, RowExits, States
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.methods.consistent import (
    Config,
    classifier_loss,
    held_out_reward,
    policy_loss,
    recipe,
    rewards_of_all,
    with_coins,
)
from mini_ee.lab.methods.consistent_hardness import forgetting_events, hardness_correlations, hardness_of
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Fixed, Never, Policy, Threshold
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.run_folder import encode
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.state import Saved
from mini_ee.lab.training.train_settings import TrainConfig

GOLDEN = Path(__file__).parents[2] / "golden"
ATOL = 1e-5  # float32, rows alone against padded batches, logits of up to 8; at most 3e-6 here
EXITS = (1, 2, 4)
DRAWS = 10_000


def drawn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


# ---- Actions by coin, and the exact estimator ----


def enumerate_trajectories(exit_logits, epsilon):
    """The oracle, (B, K): walk through every sequence of coins and actions, and add its probability to its exit.

    At each exit a coin comes up with probability epsilon; then exiting has probability 1/2, else that of the policy.
    """
    rows, policies = exit_logits.shape
    chances = np.zeros((rows, policies + 1))
    for row in range(rows):
        for walk in itertools.product(itertools.product([False, True], repeat=2), repeat=policies):
            chance, exit_index = 1.0, policies
            for k, (coin, stops) in enumerate(walk):
                p = 0.5 if coin else 1 / (1 + np.exp(-float(exit_logits[row, k])))
                chance *= (epsilon if coin else 1 - epsilon) * (p if stops else 1 - p)
                if stops:
                    exit_index = min(exit_index, k)
            chances[row, exit_index] += chance
    return chances


def random_rewards(rows, exits=4):
    return -drawn(rows, exits, seed=1).abs() - 0.1 * torch.arange(1, exits + 1)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_the_probability_of_an_exit_is_the_sum_over_all_sequences_of_coins_and_actions(epsilon):
    exit_logits = 2 * drawn(4, 3)
    chances = paper.log_exit_probabilities(with_coins(exit_logits, epsilon)).exp()
    np.testing.assert_allclose(chances, enumerate_trajectories(exit_logits, epsilon), rtol=0, atol=1e-12)
    np.testing.assert_allclose(chances.sum(dim=1), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_with_coins_log_probabilities_are_finite_even_if_probabilities_round_to_zero(epsilon):
    exit_logits = torch.tensor([[200.0, -200.0, 200.0]], requires_grad=True)
    log_exit = paper.log_exit_probabilities(with_coins(exit_logits, epsilon))
    (gradient,) = torch.autograd.grad(log_exit.sum(), exit_logits)
    assert torch.isfinite(log_exit).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("estimator", ["reinforce", "exact"])
def test_with_epsilon_1_the_policy_learns_nothing(estimator):
    exit_logits = drawn(4, 3).requires_grad_()
    policy_loss(exit_logits, random_rewards(4), Config(epsilon=1.0, estimator=estimator)).backward()
    assert exit_logits.grad.abs().max() == 0


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_the_exact_losses_are_sums_over_the_enumerated_exits(epsilon):
    """Of Eq. 5 minus the mean reward, and its gradient by central differences; of Eq. 6 the mean loss."""
    exit_logits, rewards = drawn(2, 3).requires_grad_(), random_rewards(2)
    config = Config(estimator="exact", epsilon=epsilon)
    loss = policy_loss(exit_logits, rewards, config)
    loss.backward()

    def enumerated(logits):
        return -(enumerate_trajectories(logits, epsilon) * rewards.numpy()).sum() / 2  # a mean over 2 rows

    z = exit_logits.detach().numpy()
    assert loss.item() == pytest.approx(enumerated(z), abs=1e-12)
    for place in np.ndindex(*z.shape):
        step = np.zeros(z.shape)
        step[place] = 1e-5
        slope = (enumerated(z + step) - enumerated(z - step)) / 2e-5
        assert exit_logits.grad[place].item() == pytest.approx(slope, abs=1e-9)
    assert classifier_loss(-rewards, exit_logits, config).item() == pytest.approx(enumerated(z), abs=1e-12)


@pytest.mark.parametrize("loss", [policy_loss, classifier_loss])
def test_sampled_losses_are_on_average_those_of_the_coins(loss):
    """Of 2 trajectories each; the gradient of either is that of the exact estimator, within 4 standard errors."""
    torch.manual_seed(0)
    gradients = []
    for estimator in ("reinforce", "exact"):
        config = Config(epsilon=0.3, trajectories=2, estimator=estimator)
        z, rewards = (tensor.expand(DRAWS, -1).clone().requires_grad_() for tensor in (drawn(1, 3), random_rewards(1)))
        given = (z, rewards) if loss is policy_loss else (rewards, z)
        gradients.append(torch.autograd.grad(DRAWS * loss(*given, config), given[0])[0])
    sampled, exact = gradients
    error = sampled.std(dim=0) / DRAWS**0.5
    assert ((sampled.mean(dim=0) - exact[0]).abs() < 4 * error).all() and (exact[0].abs() > 8 * error).any()


# ---- Table 1 ----


def test_table1_forgetting_events_count_every_change_from_right_to_wrong():
    right = np.random.default_rng(0).random((9, 40)) < 0.6
    expected = [sum(before and not after for before, after in zip(row, row[1:])) for row in right.T]
    assert forgetting_events(right).tolist() == expected


# ---- Fig. 2 and 4 ----


def test_by_exit_is_the_mean_over_all_rows_and_over_those_that_left():
    """The third exit is taken by none: there is nothing to say of those that left there."""
    logits, labels = drawn(9, 4, 3).numpy(), np.array([0, 1, 2] * 3)
    exit_index = np.array([0, 0, 1, 3, 3, 1, 0, 3, 1])
    recorded = SimpleNamespace(segments=SimpleNamespace(exits=(1, 2, 4, 6)), logits=logits)
    for k, line in enumerate(by_exit(recorded, exit_index, labels)):
        losses = [-np.log(np.exp(row[k][y]) / np.exp(row[k]).sum()) for row, y in zip(logits, labels)]
        right = [row[k].argmax() == y for row, y in zip(logits, labels)]
        left = [i for i in range(9) if exit_index[i] == k]
        assert line["layer"] == (1, 2, 4, 6)[k] and line["left"] == len(left)
        assert (line["loss"], line["accuracy"]) == pytest.approx((np.mean(losses), np.mean(right)))
        if left:
            expected = np.mean([losses[i] for i in left]), np.mean([right[i] for i in left])
            assert (line["left_loss"], line["left_accuracy"]) == pytest.approx(expected)
        else:
            assert line["left_loss"] is line["left_accuracy"] is None


def test_rewards_are_drawn_over_alpha(tmp_path):
    rows = [
        {"reward": reward, "alpha": alpha, "layers_saved": 10 * alpha, "score": 0.9 - alpha}
        for reward in ("vanilla", "hardness-guided")
        for alpha in (0.05, 0.01, 0.02)
    ]
    draw_rewards(tmp_path / "rewards.png", {"task": "RTE", "split": "dev", "rows": rows})
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


# ---- The model ----


def policy_model(exits=EXITS, num_labels=3, pool="mean"):
    """Random in every part: policies too, which begin without an opinion."""
    config = BertConfig(
        model_type="bert",
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=exits[-1],
        num_attention_heads=3,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = RowExits(Bert(config, False, False), exits, num_labels, pool, PolicyNetworks).eval()
        for parameter in [*model.heads.parameters(), *model.policy.parameters()]:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_the_classifiers_are_those_of_a_model_without_policies_on_the_state_that_policies_share(pool, padded_inputs):
    model = policy_model(pool=pool)
    plain = RowExits(model.backbone, EXITS, 3, pool).eval()
    plain.heads = model.heads
    with torch.no_grad():
        for logits, expected in zip(model(*tensors(padded_inputs)), plain(*tensors(padded_inputs)), strict=True):
            torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_segments_say_the_logits_and_exit_logits_of_training(pool, padded_inputs):
    model = policy_model(pool=pool)
    with torch.no_grad():
        states = model.states(*tensors(padded_inputs))
        logits, exit_logits = model(*tensors(padded_inputs)), model.exit_logits(states)
    segments = model.segments()
    with segments.running():
        state = segments.start(padded_inputs)
        for k in range(3):
            state = segments.advance(k, state)
            np.testing.assert_allclose(segments.read(k, state), logits[k], rtol=0, atol=ATOL)
            if k < 2:
                np.testing.assert_allclose(segments.exit_logit(k, state), exit_logits[:, k], rtol=0, atol=ATOL)


def test_a_row_leaves_at_the_first_exit_whose_policy_says_more_than_one_half_alone_as_in_a_batch(padded_inputs):
    model = policy_model()
    result = early_exit(model.segments(), Policy(), padded_inputs)
    with torch.no_grad():
        chances = torch.sigmoid(model.exit_logits(model.states(*tensors(padded_inputs)))).numpy()
    assert result.exit_index.tolist() == [next((k for k in range(2) if row[k] > 0.5), 2) for row in chances]
    assert len(set(result.exit_index)) > 1
    for row in range(len(padded_inputs)):
        alone = early_exit(model.segments(), Policy(), padded_inputs.take(slice(row, row + 1)))
        assert alone.exit_index[0] == result.exit_index[row]
        np.testing.assert_allclose(alone.logits[0], result.logits[row], rtol=0, atol=ATOL)


def test_the_cut_is_a_knob_of_speed_from_always_to_never(padded_inputs):
    segments = policy_model().segments()
    layers = [early_exit(segments, Policy(cut), padded_inputs).layers_run for cut in (0, 0.3, 0.5, 0.7, 1)]
    assert all((a <= b).all() for a, b in zip(layers, layers[1:]))
    first, full = (early_exit(segments, rule, padded_inputs) for rule in (Fixed(0), Never()))
    assert layers[0].tolist() == first.layers_run.tolist() and layers[-1].tolist() == full.layers_run.tolist()


@pytest.mark.parametrize("rule", [Policy(), Policy(0.9), Threshold(0.6), Fixed(1), Never()])
def test_a_replay_costs_what_the_loop_costs(rule, padded_inputs):
    """Under a policy heads are read where rows leave, and nowhere else."""
    segments = policy_model().segments()
    replayed = record(segments, EncodedInputs(padded_inputs), 7).take(np.arange(7)).replay(rule)
    expected = early_exit(segments, rule, padded_inputs)
    np.testing.assert_array_equal(replayed.exit_index, expected.exit_index)
    np.testing.assert_array_equal(replayed.cost.flops, expected.cost.flops)


def test_policies_begin_with_all_exits_equally_likely(padded_inputs, checkpoint_folder):
    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2, policy=PolicyNetworks)
    with torch.no_grad():
        exit_logits = model.exit_logits(list(drawn(3, 5, 16).float()))
    np.testing.assert_allclose(paper.log_exit_probabilities(exit_logits).exp(), 1 / 3, rtol=0, atol=1e-6)


def test_a_policy_is_asked_and_counted_once_an_exit_and_only_by_rules_that_ask_it(padded_inputs):
    model = policy_model()
    plain, calls = RowExits(model.backbone, EXITS, 3).segments(), []
    for network in model.policy.networks:
        network.register_forward_hook(lambda network, *_: calls.append(network))
    for k, costs in enumerate((2 * (24 * 32 + 32), 2 * (24 * 32 + 32), 0)):
        segments = model.segments()
        assert (
            segments.flops(k, padded_inputs) == plain.flops(k, padded_inputs)
            and segments.state_flops(k, "exit_logit") == costs
        )
    for rule, times in ((Policy(1e-9), [0]), (Policy(1 - 1e-9), [0, 1]), (Threshold(0.6), []), (Fixed(1), [])):
        early_exit(model.segments(), rule, padded_inputs)
        assert calls == [model.policy.networks[k] for k in times]
        calls.clear()


def test_regression_a_single_exit_and_rows_of_one_class_are_refused(tmp_path, checkpoint_folder, task_folder):
    scores = tmp_path / "STS-B"
    scores.mkdir()
    rows = "".join(f"a film\ta film {row}\t{row / 5:.1f}\n" for row in range(20))
    for split in ("train", "dev"):
        (scores / f"{split}.tsv").write_text("sentence1\tsentence2\tscore\n" + rows)
    for task, settings, error, message in (
        (
            scores,
            {},
            WrongArguments,
            "consistent needs .* the accuracy of an exit, and STS-B is a regression; train joint",
        ),
        (task_folder, {"exits": (3,)}, WrongArguments, "at least two exits to choose from, got 1"),
        (
            task_folder,
            {"max_train": 1},
            ValueError,
            "found only the label . for all .* examples to train on.*; give examples with different labels",
        ),
    ):
        with pytest.raises(error, match=message.replace(";", ".*")):
            train("consistent", checkpoint_folder, task, tmp_path / "run", **settings)
        assert not (tmp_path / "run").exists()


# ---- Who learns in which step ----


def gradients_of(loss, model):
    """Names of the parameters that a loss reaches."""
    model.zero_grad()
    loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


LABELS = np.array([0, 1, 2, 0, 1, 2, 0])


def states_of(model, inputs):
    return RowData(EncodedInputs(inputs), LABELS, None).states(model)


class EncodedInputs:
    """Padded inputs in the guise of encoded rows, some of them at a time."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.ids = [ids[: mask.sum()] for ids, mask in zip(inputs.input_ids, inputs.attention_mask)]

    def __len__(self):
        return len(self.ids)

    def batch(self, rows):
        return self.inputs.take(rows)


@pytest.mark.parametrize("estimator", ["reinforce", "exact"])
def test_step_3_reaches_policies_only_and_step_4_everything_else(estimator, padded_inputs):
    torch.manual_seed(0)
    model, config = policy_model(), Config(estimator=estimator, alpha=0.1)
    names = {name for name, _ in model.named_parameters()}
    policies = {name for name in names if name.startswith("policy.")}
    states = states_of(model, padded_inputs)
    of_states, labels = states.batch(np.arange(7), "cpu")
    batch = Batch((), labels, of_states, rewards_of_all(model, states, config))
    assert gradients_of(consistent.learn_policy(model, batch, config), model) == policies
    batch = Batch(tuple(tensors(padded_inputs)), labels, None, None)
    reached = gradients_of(consistent.learn_task(model, batch, config), model)
    assert not reached & policies and {name for name in names if name.startswith("heads.")} <= reached


def every_stage(stages):
    """The stages of a recipe that is told that each was better than the one before: -100, -99, ..."""
    stages_run, scores = [next(stages)], itertools.count(-100)
    with suppress(StopIteration):
        while True:
            stages_run.append(stages.send(next(scores)))
    return stages_run


def test_the_stages_learn_what_their_losses_reach():
    stages = every_stage(recipe(policy_model(), Config(rounds=2)))
    assert [stage.name for stage in stages] == ["initialise", "policy 1", "task 1", "policy 2", "task 2"]
    assert [stage.to_beat for stage in stages] == [None, None, -99, -98, -97]
    for stage in stages:
        learned = {name for name, _ in policy_model().named_parameters() if stage.trainable(name)}
        assert {name.split(".")[0] for name in learned} == (
            {"policy"} if stage.name.startswith("policy") else {"backbone", "heads"}
        )


def test_states_are_those_of_each_row_in_its_place(padded_inputs, monkeypatch):
    monkeypatch.setattr(rows_module, "STATES_BATCH", 3)
    model = policy_model()
    data = states_of(model, padded_inputs)
    assert data.states.shape == (7, 3, 24) and data.states.dtype == torch.float32
    assert data.labels.tolist() == LABELS.tolist()
    with torch.no_grad():
        for row in range(7):
            alone = model.states(*tensors(padded_inputs.take(slice(row, row + 1))))
            torch.testing.assert_close(data.states[row], torch.cat(alone), rtol=0, atol=ATOL)


def test_the_reward_of_rows_held_out_is_that_of_the_exits_that_inference_takes(padded_inputs):
    model, config = policy_model(), Config(alpha=0.2)
    judged = held_out_reward(model, states_of(model, padded_inputs), config)
    result = early_exit(model.segments(), Policy(), padded_inputs)
    logits = np.stack([exit_logits.detach().numpy() for exit_logits in model(*tensors(padded_inputs))], axis=1)
    expected = []
    for row, k in enumerate(result.exit_index):
        p = np.exp(logits[row, k]) / np.exp(logits[row, k]).sum()
        expected.append(np.log(p[LABELS[row]]) - 0.2 * EXITS[k])
    assert judged["score"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert judged["mean_layers"] == pytest.approx(result.layers_run.mean())


def test_the_judge_may_take_the_reward_that_is_learned(padded_inputs):
    """Eq. 4, enumerated: the price of a layer falls with the memorized layer."""
    model, config = policy_model(), Config(alpha=0.2, selection="learned")
    judged = held_out_reward(model, states_of(model, padded_inputs), config)
    result = early_exit(model.segments(), Policy(), padded_inputs)
    logits = np.stack([exit_logits.detach().numpy() for exit_logits in model(*tensors(padded_inputs))], axis=1)
    expected = []
    for row, k in enumerate(result.exit_index):
        right = [bool(output.argmax() == LABELS[row]) for output in logits[row]]
        first = min((at for at in range(len(EXITS)) if all(right[at:])), default=len(EXITS) - 1)
        p = np.exp(logits[row, k]) / np.exp(logits[row, k]).sum()
        expected.append(np.log(p[LABELS[row]]) - 0.2 * (1 - EXITS[first] / EXITS[-1]) * EXITS[k])
    assert judged["score"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert judged["score"] > held_out_reward(model, states_of(model, padded_inputs), Config(alpha=0.2))["score"]


def test_a_row_that_the_last_exit_unlearns_is_worth_no_more_than_before_to_the_judge(monkeypatch):
    """Eq. 4 alone would pay for it: M becomes L, and depth costs nothing more."""
    model, config = policy_model(), Config(alpha=0.2)
    monkeypatch.setattr(RowExits, "classify", lambda self, k, state: state[:, :3])  # states that are logits too
    good = torch.zeros(1, 3, 24)
    good[0, :, 1] = 4
    bad = good.clone()
    bad[0, 2, :2] = torch.tensor([4.0, 0.0])
    for network, bias in zip(model.policy.networks, (-9.0, 9.0)):  # everyone leaves at the second exit
        torch.nn.init.zeros_(network[2].weight)
        network[2].bias.data.fill_(bias)
    judged, guided = [], []
    for states in (good, bad):
        judged.append(held_out_reward(model, States(states, torch.tensor([1]), None, None), config))
        rewards = paper.rewards_of(states[:, :, :3], torch.tensor([1]), torch.tensor(EXITS), config.alpha, guided=True)
        guided.append(rewards[0, 1].item())
    assert judged[0] == judged[1] and guided[1] > guided[0] + 0.2


# ---- Training ----


FAST = TrainConfig(epochs=2, lr=1e-3, head_lr=1e-2, batch_size=8)
ROUNDS = Config(rounds=2, policy_epochs=2, policy_lr=1e-2, task_lr=1e-3)


@pytest.fixture(scope="module")
def words(checkpoint_folder, task_folder):
    """(train, held) of the task that one word decides: 3 steps of 8 rows an epoch."""
    task, tokenizer = load_task(task_folder), Tokenizer.from_folder(checkpoint_folder)
    backbone = load_backbone(checkpoint_folder)
    parts = (subset(task.split(name), rows, seed=0) for name, rows in (("train", 24), ("dev", 10)))
    return [RowData(encode(tokenizer, part.texts, backbone), part.labels, task) for part in parts]


def train_model(checkpoint, words, folder, settings=ROUNDS, config=FAST, resume=False, stages=None, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RowExits(load_backbone(checkpoint), (1, 2, 3), 2, policy=PolicyNetworks)
        history = fit(model, stages or recipe(model, settings), *words, config, Saved(folder, {}, resume)).epochs
    return model, [{key: epoch[key] for key in epoch.keys() - {"seconds"}} for epoch in history]


def same(a, b):
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def test_a_training_that_was_killed_and_resumed_ends_with_the_same_weights(
    tmp_path, checkpoint_folder, words, monkeypatch
):
    """Among the policies of the first round: initialisation takes 6 steps, a round 6 and 3. Of the second: below."""
    whole, report = train_model(checkpoint_folder, words, tmp_path / "whole")
    with killed_after(8, monkeypatch):
        train_model(checkpoint_folder, words, tmp_path / "killed")
    resumed, again = train_model(checkpoint_folder, words, tmp_path / "killed", resume=True)
    assert same(whole, resumed) and report == again


@contextmanager
def killed_after(most, monkeypatch):
    """A training that is killed before its next step, each of which is saved."""
    steps, step = 0, torch.optim.AdamW.step

    def stopping(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps > most:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(state, "SAVE_SECONDS", -1.0)
        patch.setattr(torch.optim.AdamW, "step", stopping)
        yield


def judged(verdicts):
    """The recipe of four rounds with one epoch a stage, whose validations are given."""
    verdicts = iter(verdicts)
    stages = recipe(SimpleNamespace(exits=(1, 2, 3), unit="rows"), replace(ROUNDS, rounds=4, policy_epochs=1))
    stage = next(stages)
    with suppress(StopIteration):
        while True:
            given = stage._replace(validate=lambda *_: {"score": next(verdicts)})
            best = yield given if stage.validate else stage
            stage = stages.send(best)


@pytest.fixture(scope="module")
def weights_after(checkpoint_folder, words, tmp_path_factory):
    """The weights after each stage of four rounds, if each stage betters the one before."""
    weights = []

    def recorded(stage):
        def finish(model, held):
            if stage.finish:
                stage.finish(model, held)
            weights.append({name: value.clone() for name, value in model.state_dict().items()})

        return stage._replace(finish=finish)

    stages = list(map(recorded, every_stage(judged(range(8)))))
    train_model(checkpoint_folder, words, tmp_path_factory.mktemp("stages"), stages=stages)
    return weights


@pytest.mark.parametrize(
    "verdicts, rounds, best",
    [
        ([1, 2, 3, 4, 4, 3, 9, 9], 3, 4),  # nothing above 4 in the third round: it is the last, and undone
        ([1, 2, 2, 1, 9, 9, 9, 9], 2, 2),
        ([5, 1, 1, 1, 9, 9, 9, 9], 2, 1),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, 8),
    ],
)
def test_rounds_end_with_the_first_that_betters_nothing_and_leave_the_best_weights(
    verdicts, rounds, best, tmp_path, checkpoint_folder, words, weights_after
):
    model, history = train_model(checkpoint_folder, words, tmp_path, stages=judged(verdicts))
    names = [f"{kind} {number}" for number in range(1, rounds + 1) for kind in ("policy", "task")]
    assert [entry["stage"] for entry in history[FAST.epochs :]] == names
    assert all(torch.equal(value, weights_after[best][name]) for name, value in model.state_dict().items())


def test_a_resumed_training_knows_what_was_reached_in_the_rounds_before(
    tmp_path, checkpoint_folder, words, monkeypatch
):
    """It is killed in the task step of round 2, which is the last: nothing in it is above the 2 of round 1."""
    with killed_after(6 + 3 + 3 + 3 + 1, monkeypatch):
        train_model(checkpoint_folder, words, tmp_path, stages=judged([1, 2, 2]))
    _, history = train_model(checkpoint_folder, words, tmp_path, stages=judged([2, 9, 9, 9, 9]), resume=True)
    assert [entry["score"] for entry in history[FAST.epochs :]] == [1, 2, 2, 2]


def test_one_better_stage_in_a_round_is_enough_to_go_on(tmp_path, checkpoint_folder, words):
    _, history = train_model(checkpoint_folder, words, tmp_path, stages=judged([1, 2, 1, 3, 1, 4, 1, 5]))
    assert len(history) == FAST.epochs + 8


def test_more_alpha_leaves_earlier_and_no_alpha_where_the_loss_is_least(tmp_path, checkpoint_folder, words):
    config = replace(FAST, epochs=4)
    layers = []
    for alpha in (0.0, 1.0):
        settings = replace(ROUNDS, alpha=alpha, rounds=1, policy_epochs=10, reward="vanilla", estimator="exact")
        model, _ = train_model(checkpoint_folder, words, tmp_path / str(alpha), settings, config)
        held = words[1].encoded
        layers.append(early_exit(model.segments(), Policy(), held.batch(np.arange(len(held)))).layers_run.mean())
    assert layers[1] == 1.0 and layers[0] > 1.2


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"alpha": -0.1}, "alpha must be a number of at least 0, got -0.1"),
        ({"alpha": float("inf")}, "alpha must be a number of at least 0, got inf"),
        ({"alpha": float("nan")}, "got nan"),
        ({"epsilon": -0.1}, "epsilon must be a number from 0 to 1, got -0.1"),
        ({"epsilon": 1.1}, "from 0 to 1, got 1.1"),
        ({"trajectories": 1}, "trajectories must be a whole number of at least 2, got 1"),
        ({"estimator": "sampled"}, "estimator must be one of reinforce, exact, got 'sampled'"),
        ({"reward": "hard"}, "reward must be one of hardness-guided, vanilla, got 'hard'"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"policy_epochs": 0}, "policy_epochs must be a whole number of at least 1, got 0"),
        ({"policy_lr": 0.0}, "policy_lr must be a number above 0, got 0.0"),
        ({"task_lr": -1.0}, "task_lr must be a number above 0, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Config(**setting)


# ---- Tokens ----


QUICK = TrainConfig(epochs=6, lr=5e-3, head_lr=2e-2, batch_size=4, warmup=0.0)
TOKENS = replace(Config(), **consistent.TOKENS)


def counting(count=24, tokens=10, start=2):
    """Texts that count upwards from a number below 8: what comes next is known."""
    random = np.random.default_rng(0)
    return [Text([int(first + at) % 30 for at in range(tokens)], start) for first in random.integers(0, 8, count)]


def decoder_model(rank=8):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TokenExits(load_backbone(GOLDEN / "llama"), (1, 2, 3), policy=PolicyNetworks, rank=rank)


def fit_tokens(model, stages, folder, config=QUICK, resume=False, texts=24):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        train, held = TextData(counting(texts)), TextData(counting(12, 8))
        return fit(model, stages, train, held, config, Saved(folder, {}, resume)).epochs


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A model after step 1, with states: counting upwards, which the deeper exits know better."""
    model = decoder_model()
    fit_tokens(model, list(recipe(model, TOKENS))[:1], tmp_path_factory.mktemp("tuned"))
    return model.eval(), TextData(counting(40)).states(model), TextData(counting(12, 8)).states(model)


def copy_of(model):
    other = decoder_model()
    other.load_state_dict(model.state_dict())
    return other.eval()


def mixed(model):
    """The same model, folded, with policies drawn wide, so that tokens leave everywhere."""
    other = copy_of(model)
    other.fold()
    with torch.no_grad():
        for network in other.policy.networks:
            network[2].weight.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
            network[2].bias.zero_()
    return other


def learn(model, stage, train):
    """One stage on the states of a model, without a hold-out: its steps one after the other."""
    targets = stage.make_targets(model, train) if stage.make_targets else None
    settings = stage.settings
    names = [name for name, _ in model.named_parameters() if stage.trainable(name) and model.is_trainable(name)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], settings["head_lr"])
    for epoch in range(settings["epochs"]):
        for units in train.order(1, epoch):
            states, labels = train.batch(units, "cpu")
            loss = stage.loss(model, Batch((), labels, states, None if targets is None else targets[units]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return names


@pytest.mark.parametrize("reward", ["vanilla", "hardness-guided"])
def test_the_reward_of_every_token_is_eq_3_or_4(tuned, reward):
    model, _, held = tuned
    rewards = rewards_of_all(model, held, replace(TOKENS, alpha=0.3, reward=reward))
    with torch.no_grad():
        for row, (states, label) in enumerate(zip(held.states, held.labels)):
            p = [model.classify(k, state).double().softmax(-1) for k, state in enumerate(states)]
            right = [probabilities.argmax() == label for probabilities in p]
            memorized = min((depth for k, depth in enumerate(model.exits) if all(right[k:])), default=3)
            for k, depth in enumerate(model.exits):
                price = 0.3 * (1 - memorized / 3 if reward == "hardness-guided" else 1)
                assert rewards[row, k].item() == pytest.approx(math.log(p[k][label]) - price * depth, abs=1e-4)


@pytest.mark.parametrize("estimator", ["reinforce", "exact"])
def test_a_high_price_of_layers_makes_all_leave_at_once_and_none_brings_what_the_losses_want(tuned, estimator):
    model, train, held = tuned
    torch.manual_seed(0)
    config = replace(TOKENS, alpha=50.0, estimator=estimator, policy_epochs=20, policy_lr=0.02)
    dear, free = copy_of(model), copy_of(model)
    learn(dear, list(recipe(dear, config))[1], train)
    assert held_out_reward(dear, held, config)["mean_layers"] == 1.0
    config = replace(config, alpha=0.0)
    learn(free, list(recipe(free, config))[1], train)
    best_fixed = max(rewards_of_all(free, held, config).mean(0))
    assert held_out_reward(free, held, config)["score"] > best_fixed - 0.05


def test_more_alpha_lets_tokens_leave_earlier(tuned):
    """Of exits whose heads know less the earlier they are."""
    model, train, held = tuned
    depths = []
    for alpha in (0.0, 0.5, 2.0, 50.0):
        config, other = (
            replace(TOKENS, alpha=alpha, estimator="exact", policy_epochs=20, policy_lr=0.02),
            copy_of(model),
        )
        torch.manual_seed(0)
        with torch.no_grad():
            for head, noise in zip(other.heads, (0.6, 0.2)):
                head.linear.weight.add_(noise * torch.randn_like(head.linear.weight))
        learn(other, list(recipe(other, config))[1], train)
        depths.append(held_out_reward(other, held, config)["mean_layers"])
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[1] and depths[-1] == 1.0


def test_y_can_be_what_the_last_exit_says(tuned):
    model, _, held = tuned
    config = replace(TOKENS, target="hard", alpha=0.0)
    with torch.no_grad():
        logits = torch.stack([model.classify(k, state) for k, state in enumerate(held.states.unbind(1))], dim=1)
    predictions = logits[:, -1].argmax(-1)
    assert predictions.tolist() == [int(model.backbone.lm_logits(states[-1]).argmax()) for states in held.states]
    assert predictions.tolist() != held.labels.tolist()
    torch.testing.assert_close(rewards_of_all(model, held, config), -paper.exit_losses(logits, predictions))
    always = torch.full((len(predictions), 2), -60.0)  # all go to the last exit, whose loss of its own word counts
    model.policy.exit_logit, before = lambda k, state: always[: len(state), k], model.policy.exit_logit
    loss = consistent.learn_task(model, Batch((), held.labels, list(held.states.unbind(1)), None), config)
    model.policy.exit_logit = before
    assert loss.item() == pytest.approx(paper.exit_losses(logits, predictions)[:, -1].mean().item(), abs=1e-5)


def test_of_tokens_the_policy_step_changes_policies_alone_and_the_task_step_heads_alone(tuned, tmp_path):
    other, before = copy_of(tuned[0]), tuned[0].state_dict()
    for number, part in ((1, "policy"), (2, "heads")):
        stages = [list(recipe(other, TOKENS))[number]._replace(validate=lambda *_: {"score": 0.0})]
        fit_tokens(other, stages, tmp_path / part)
        now = {name: value.clone() for name, value in other.state_dict().items()}
        assert {name.split(".")[0] for name, value in now.items() if not torch.equal(value, before[name])} == {part}
        before = now


def test_a_head_at_which_no_token_leaves_learns_nothing(tuned):
    model, train, _ = tuned
    other = copy_of(model)
    with torch.no_grad():
        for network, logit in zip(other.policy.networks, (-50.0, 50.0)):
            network[2].weight.zero_()
            network[2].bias.fill_(logit)
    states, labels = train.batch(np.arange(40), "cpu")
    reached = gradients_of(consistent.learn_task(other, Batch((), labels, states, None), TOKENS), other)
    assert reached and {name.rpartition(".")[0].split(".")[1] for name in reached} == {"1"}


def test_exits_are_scored_anew_after_every_task_step(tuned, tmp_path):
    """Its heads learn, though they learn from states."""
    model, config, verdicts = copy_of(tuned[0]), replace(TOKENS, task_epochs=3, task_lr=0.05), itertools.count()
    stage = list(recipe(model, config))[2]._replace(validate=lambda *_: {"score": next(verdicts)})
    history = fit_tokens(model, [stage], tmp_path)
    scores, _ = TextData(counting(12, 8)).scores(model, 4)
    assert history[-1]["exit_scores"] == scores
    assert len({tuple(epoch["exit_scores"]) for epoch in history}) == 3


def test_held_out_tokens_leave_at_the_first_policy_above_one_half(tuned):
    model, _, held = tuned
    config, other = replace(TOKENS, alpha=0.1), mixed(model)
    judged, rewards = held_out_reward(other, held, config), rewards_of_all(other, held, config)
    with torch.no_grad():
        p = other.exit_logits(held.states.unbind(1)).sigmoid()
    left = [next((k for k in range(2) if row[k] > 0.5), 2) for row in p]
    assert len(set(left)) > 1
    assert judged["mean_layers"] == pytest.approx(np.mean([model.exits[k] for k in left]))
    assert judged["score"] == pytest.approx(float(np.mean([rewards[row, k] for row, k in enumerate(left)])), abs=1e-5)


def test_a_written_token_leaves_where_its_policy_first_says_more_than_the_cut(tuned):
    """With the cache, and by the definition of state copying without one, for the first token behind a prompt."""
    model, texts = mixed(tuned[0]), counting(20, 6, 4)
    written, exits = model.write(texts, Policy(), max_new_tokens=1), set()
    with torch.no_grad():
        for text, continuation in zip(texts, written):
            hidden = model.backbone.hidden_states(torch.tensor([text.ids[:5]]))
            states = [hidden[layer][0, -1] for layer in model.exits]
            normed = [head.norm(state) for head, state in zip(model.heads, states)]
            k = next((k for k in range(2) if model.policy.networks[k](normed[k]).sigmoid() > 0.5), 2)
            assert continuation.layers_run == [model.exits[k]]
            assert continuation.tokens == [int(model.classify(k, states[k]).argmax())]
            exits.add(k)
    assert len(exits) > 1


PAPER = Sampling(temperature=1.0, top_k=40, top_p=0.75)


@pytest.mark.parametrize("sampling", [Sampling(), PAPER], ids=["greedy", "paper"])
def test_cut_1_is_the_full_model_cut_0_the_first_head_and_a_batch_is_its_rows(tuned, sampling):
    model, texts = mixed(tuned[0]), counting(6, 6, 4)
    settings = {"max_new_tokens": 6, "sampling": sampling, "seed": 3}
    assert model.write(texts, Policy(1.0), **settings) == model.write(texts, Never(), **settings)
    assert model.write(texts, Policy(0.0), **settings) == model.write(texts, Fixed(0), **settings)
    together = model.write(texts, Policy(), **settings)
    assert len({layer for text in together for layer in text.layers_run}) > 1
    if sampling.temperature == 0:
        assert together == model.write(texts, Policy(), **settings, batch_size=1)


# ---- Hardness ----


def test_hardness_is_the_memorized_layer_and_the_loss_of_eq1(padded_inputs):
    model = policy_model()
    logits = torch.stack(model(*tensors(padded_inputs)), dim=1).detach()
    memorized, losses = hardness_of(logits.numpy(), LABELS, EXITS)
    for row in range(7):
        right = [logits[row, k].argmax() == LABELS[row] for k in range(3)]
        assert memorized[row] == next((EXITS[k] for k in range(3) if all(right[k:])), 4)
        by_exit = [-torch.log_softmax(logits[row, k].double(), 0)[LABELS[row]] for k in range(3)]
        assert losses[row] == pytest.approx(float(by_exit[0] + 2 * by_exit[1] + 4 * by_exit[2]) / 7, abs=1e-4)
    table = hardness_correlations(memorized, losses, np.arange(7))
    assert table == {"loss": spearman(memorized, losses), "forgetting events": spearman(memorized, np.arange(7))}
