"""The systems that the papers compare with: their losses by hand, what they fit afterwards, their rules."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tensors
from method_cases import LABELS, gradients, learner, of_exits  # noqa: F401  (learner is a fixture)

import mini_ee.lab.baselines.right_tool as right_tool_module
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines import mixed
from mini_ee.lab.baselines.berxit import alternating_loss, true_certainty
from mini_ee.lab.baselines.fastbert import self_distillation_loss
from mini_ee.lab.baselines.right_tool import calibrate_heads, fit_temperature
from mini_ee.lab.baselines.sweet import separate_loss
from mini_ee.lab.data.tasks import load_task, subset
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.row_exits import RowData, RowExits
from mini_ee.lab.recording import record
from mini_ee.lab.rules import Patience, PatienceConfidence, Policy, Threshold
from mini_ee.lab.sweep import from_loose_to_strict
from mini_ee.lab.training import default_rule
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.loop import fit
from mini_ee.lab.training.method import configured, load_method
from mini_ee.lab.training.policies import OneForAll
from mini_ee.lab.training.run_folder import build_model, encode
from mini_ee.lab.training.stages import Batch, joint_stage
from mini_ee.lab.training.state import Saved
from mini_ee.lab.training.train_settings import TrainConfig
from mini_ee.train import task_loss

FAST = TrainConfig(epochs=2, lr=1e-3, head_lr=1e-2, batch_size=8)
SYSTEMS = ("deebert", "fastbert", "right-tool", "pabee", "pcee-bert", "berxit", "sweet")
USUAL = sweep(Threshold(math.inf))  # candidates of a method that names none


def logits_of(model, inputs):
    """(B, K, C) in float64."""
    with torch.no_grad():
        return torch.stack(model(*tensors(inputs)), dim=1).double().numpy()


def cross_entropy(logits, labels):
    """Mean over rows, (B, C)."""
    return np.mean(np.logaddexp.reduce(logits, axis=1) - logits[range(len(labels)), labels])


@pytest.fixture
def words(checkpoint_folder, task_folder):
    """(train, held) of the task that one word decides: 3 steps of 8 rows an epoch."""
    task, tokenizer = load_task(task_folder), Tokenizer.from_folder(checkpoint_folder)
    backbone = load_backbone(checkpoint_folder)
    parts = (subset(task.split(name), rows, seed=0) for name, rows in (("train", 24), ("dev", 20)))
    return [RowData(encode(tokenizer, part.texts, backbone), part.labels, task) for part in parts]


def train_system(name, checkpoint, words, folder, config=FAST, resume=False):
    system, shape = load_method(name), {"exits": (1, 2, 3), "num_labels": 2, "pool": "mean", "settings": {}}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(system, "rows", load_backbone(checkpoint), shape)
        stages = system.recipe(model, configured(system, {}))
        fitted = fit(model, stages, *words, config, Saved(folder, {}, resume))
    return model, [{key: epoch[key] for key in epoch.keys() - {"seconds"}} for epoch in fitted.epochs]


def stages(name, model):
    system = load_method(name)
    return system.recipe(model, configured(system, {}))


def same(a, b):
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


# FastBERT


def test_self_distillation_is_the_divergence_of_each_student_from_the_teacher_student_first(
    random_model, padded_inputs
):
    model = random_model()
    logits = logits_of(model, padded_inputs)
    p = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    expected = 0.0
    for row in range(7):
        for k in range(3):
            expected += sum(p[row, k, c] * np.log(p[row, k, c] / p[row, 3, c]) for c in range(3)) / 7
    loss = self_distillation_loss(model, Batch(tensors(padded_inputs), LABELS, None, None))
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_self_distillation_never_sees_a_label_and_never_moves_the_teacher(random_model, padded_inputs):
    model = random_model()
    batch = Batch(tensors(padded_inputs), LABELS, None, None)
    loss = self_distillation_loss(model, batch)
    assert loss == self_distillation_loss(model, batch._replace(labels=None))
    reached = torch.autograd.grad(loss, list(model.heads[3].parameters()), allow_unused=True)
    assert all(gradient is None for gradient in reached)


def test_fastbert_learns_in_the_stages_of_deebert(checkpoint_folder):
    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2)
    names = [name for name, _ in model.named_parameters()]
    theirs, ours = (
        [[name for name in names if stage.trainable(name)] for stage in stages(system, model)]
        for system in ("deebert", "fastbert")
    )
    assert theirs == ours and len(ours) == 2


# Right-Tool


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_temperature_is_the_one_that_makes_the_labels_likeliest(true):
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (1000, 3))
    labels = (logits / true + random.gumbel(size=logits.shape)).argmax(axis=1)  # a draw from softmax(logits / true)
    fitted = fit_temperature(logits, labels)
    best = min(np.exp(np.linspace(-2, 2, 101)), key=lambda temperature: cross_entropy(logits / temperature, labels))
    assert fitted == pytest.approx(best, rel=0.041) and fitted == pytest.approx(true, rel=0.15)


def test_labels_that_are_always_or_never_right_take_a_temperature_at_the_end_of_the_range():
    logits = np.array([[3.0, 0.0], [0.0, 3.0]])
    assert fit_temperature(logits, np.array([0, 1])) == pytest.approx(0.1)
    assert fit_temperature(logits, np.array([1, 0])) == pytest.approx(10)


def test_calibration_divides_the_logits_of_each_exit_by_its_temperature_and_changes_no_prediction(
    checkpoint_folder, words
):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2)
        for head in model.heads:
            torch.nn.init.normal_(head.out.weight, std=0.5)
            torch.nn.init.normal_(head.out.bias, std=0.5)
    assert stages("right-tool", model)[0].finish is calibrate_heads
    held = words[1]
    before = record(model.segments(), held.encoded, 64).logits
    calibrate_heads(model, held)
    after = record(model.segments(), held.encoded, 64).logits
    for k in range(3):
        temperature = fit_temperature(before[:, k], held.labels)
        np.testing.assert_allclose(after[:, k], before[:, k] / temperature, rtol=1e-4, atol=1e-5)
        assert cross_entropy(after[:, k], held.labels) <= cross_entropy(before[:, k], held.labels) + 1e-6
        assert abs(np.log(temperature)) > 0.05
    np.testing.assert_array_equal(after.argmax(axis=2), before.argmax(axis=2))


# BERxiT


def berxit_model(random_model, num_labels=3):
    source = random_model(num_labels=num_labels)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = RowExits(source.backbone, source.exits, num_labels, policy=OneForAll).eval()
        model.heads = source.heads
        torch.nn.init.normal_(model.policy.linear.weight, std=0.5)
    return model


def certainty_by_hand(model, inputs):
    """(B, K - 1): a sigmoid of one linear map, the same for all exits, of the mean of the tokens."""
    weight, bias = (p.detach().double().numpy() for p in (model.policy.linear.weight[0], model.policy.linear.bias[0]))
    certainties = np.zeros((len(inputs), 3))
    with torch.no_grad():
        hidden = model.backbone.hidden_states(*tensors(inputs))
    for k, row in np.ndindex(3, len(inputs)):
        length = inputs.attention_mask[row].sum()
        state = hidden[model.exits[k]][row, :length].double().numpy().mean(axis=0)
        certainties[row, k] = 1 / (1 + np.exp(-(state @ weight + bias)))
    return certainties


def test_even_steps_pay_for_the_last_exit_and_odd_ones_for_all_and_for_the_certainty(random_model, padded_inputs):
    model = berxit_model(random_model)
    logits, certainty = logits_of(model, padded_inputs), certainty_by_hand(model, padded_inputs)
    right = logits.argmax(axis=2)[:, :3] == LABELS.numpy()[:, None]
    losses = [cross_entropy(logits[:, k], LABELS) for k in range(4)]
    for step in range(4):
        loss = alternating_loss(model, Batch(tensors(padded_inputs), LABELS, None, None, step))
        expected = sum(losses) + sum(((certainty - right) ** 2).mean(axis=0)) if step % 2 else losses[3]
        assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_training_counts_its_steps_for_the_turns(tmp_path, checkpoint_folder, words):
    seen = []

    def watched(model, batch):
        seen.append(batch.step)
        return alternating_loss(model, batch)

    model = RowExits(load_backbone(checkpoint_folder), (1, 2, 3), 2, policy=OneForAll)
    (stage,) = stages("berxit", model)
    assert stage.loss is alternating_loss
    fit(model, [stage._replace(loss=watched)], *words, FAST, Saved(tmp_path, {}))
    assert seen == [0, 1, 2, 3, 4, 5]


def test_the_truth_of_a_certainty_is_right_or_wrong_and_for_numbers_how_near():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert true_certainty(logits, torch.tensor([0, 0])).tolist() == [1.0, 0.0]
    truth = true_certainty(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.5]))
    assert truth.tolist() == pytest.approx([1.0, 1 - np.tanh(1.5)])


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_row_leaves_where_the_certainty_is_above_the_cut_alone_as_in_a_batch(num_labels, random_model, padded_inputs):
    model = berxit_model(random_model, num_labels)
    certainty = certainty_by_hand(model, padded_inputs)
    result = early_exit(model.segments(), Policy(0.6), padded_inputs)
    assert result.exit_index.tolist() == [next((k for k in range(3) if row[k] > 0.6), 3) for row in certainty]
    assert len(set(result.exit_index)) > 1
    for row in range(7):
        alone = early_exit(model.segments(), Policy(0.6), padded_inputs.take(slice(row, row + 1)))
        assert alone.exit_index[0] == result.exit_index[row]


def test_berxit_needs_two_exits(checkpoint_folder):
    with pytest.raises(ValueError, match="at least two exits to choose from, got 1"):
        RowExits(load_backbone(checkpoint_folder), (3,), 2, policy=OneForAll)


# SWEET


def test_sweet_teaches_each_layer_by_the_loss_of_the_first_exit_above_it_alone(learner):  # noqa: F811
    model, batch = learner
    gradient_of = gradients(separate_loss(model, batch), model)
    exit_gradients = [gradients(task_loss(logits, batch.labels), model) for logits in model(*batch.inputs)]
    assert gradient_of.keys() == set().union(*exit_gradients)
    for name, gradient in gradient_of.items():
        kind, number, *_ = f"{name.removeprefix('backbone.')}.".split(".")
        if kind in ("layers", "adapters"):
            k = next(k for k, layer in enumerate(model.exits) if layer > int(number))
        else:
            k = int(number) if kind == "heads" else 0
        torch.testing.assert_close(gradient, exit_gradients[k][name], rtol=1e-4, atol=1e-6)


def test_sweet_pays_for_all_exits_the_same(random_model, padded_inputs):
    model = random_model()
    logits = logits_of(model, padded_inputs)
    loss = separate_loss(model, Batch(tensors(padded_inputs), LABELS, None, None))
    assert loss.item() == pytest.approx(sum(cross_entropy(logits[:, k], LABELS) for k in range(4)), rel=1e-4)


# Mixed training


def test_mixed_training_teaches_the_backbone_by_the_last_exit_and_then_all_weights_by_the_mean(
    random_model, padded_inputs
):
    model = random_model()
    logits, batch = logits_of(model, padded_inputs), Batch(tensors(padded_inputs), LABELS, None, None)
    losses, names = [cross_entropy(logits[:, k], LABELS) for k in range(4)], dict(model.named_parameters())
    first, second = mixed.recipe(model)
    assert first.loss(model, batch).item() == pytest.approx(losses[3], rel=1e-4)
    assert second.loss(model, batch).item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert {name for name in names if not first.trainable(name)} == {
        name for name in names if name.startswith(("heads.0.", "heads.1.", "heads.2."))
    }
    assert all(map(second.trainable, names))
    scores = np.array([0.1, 0.2, 0.3, 0.8])
    assert (first.score(scores), second.score(scores)) == pytest.approx((0.8, 0.35))


# All of them


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_trains_and_its_rules_fit_what_it_says(name, tmp_path, checkpoint_folder, words):
    model, _ = train_system(name, checkpoint_folder, words, tmp_path)
    held = words[1].encoded
    recorded = record(model.segments(), held, 64)
    rules = (load_method(name).candidates or USUAL)(recorded)
    layers = []
    for rule in rules:
        rule.check(3)
        layers.append(early_exit(model.segments(), rule, held.batch(np.arange(len(held)))).layers_run.mean())
    assert rules and min(layers) < 3


def test_a_policy_that_is_as_sure_as_can_be_has_cuts_too():
    """1 / (1 + exp(800)) overflows on the way; warnings are errors here."""
    logits = np.array([[-800.0, 0.0], [800.0, -800.0]])
    recorded = of_exits(np.zeros((2, 3, 3)), logits)
    assert [rule.cut for rule in sweep(Policy())(recorded)][:2] == [0.5, 0.0]
    assert {rule.cut for rule in from_loose_to_strict(Policy(), recorded, 3)} >= {0.0, 0.5, 1.0}


def test_the_sweep_of_a_policy_is_empty_without_one():
    """As in an exported folder whose graph holds another rule."""
    assert sweep(Policy())(of_exits(np.zeros((2, 3, 3)))) == []


def test_the_rules_are_those_of_the_papers():
    random = np.random.default_rng(0)
    recorded = of_exits(random.normal(size=(50, 4, 3)), random.normal(size=(50, 3)))
    of = {name: (load_method(name).candidates or USUAL)(recorded) for name in SYSTEMS}
    for name, measure in (
        ("deebert", "entropy"),
        ("fastbert", "normalised_entropy"),
        ("right-tool", "max_probability"),
    ):
        assert {(type(rule), rule.measure) for rule in of[name]} == {(Threshold, measure)}
        assert len(of[name]) == default_rule.CANDIDATES
    assert of["pabee"] == [Patience(1), Patience(2)]  # a patience of 3 would leave at the last of 4 exits
    assert {(type(rule), rule.patience) for rule in of["pcee-bert"]} == {(PatienceConfidence, n) for n in (2, 3)}
    assert of["berxit"][0] == Policy(0.5) and {type(rule) for rule in of["berxit"]} == {Policy}


def test_one_exit_leaves_nothing_to_choose():
    alone = of_exits(np.zeros((5, 1, 2)))
    for name in SYSTEMS:
        if name != "berxit":
            assert (load_method(name).candidates or USUAL)(alone) == []


def test_a_training_that_was_killed_while_it_was_calibrated_is_not_calibrated_twice(
    tmp_path, checkpoint_folder, words, monkeypatch
):
    whole, _ = train_system("right-tool", checkpoint_folder, words, tmp_path / "whole")

    def calibrated(model, held):
        calibrate_heads(model, held)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stopped = replace(
            right_tool_module.METHOD, recipe=lambda model, config: [joint_stage(model, finish=calibrated)]
        )
        patch.setattr(right_tool_module, "METHOD", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_system("right-tool", checkpoint_folder, words, tmp_path / "killed")
    resumed, _ = train_system("right-tool", checkpoint_folder, words, tmp_path / "killed", resume=True)
    assert same(whole, resumed)
