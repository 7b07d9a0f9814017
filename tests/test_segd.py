"""SEGD (LoRAExit, section 3.2): Eq. 3 to 5, the chain of teachers, the three ways of Table 4."""

from dataclasses import fields

import numpy as np
import pytest
import torch

import mini_ee.methods.lora_exits as lora_exits
from mini_ee.backbones.hub import load_backbone
from mini_ee.exits.rows import RowData
from mini_ee.methods.lora_exits import (
    DISTILL,
    Config,
    LoRAExits,
    distillation_loss,
    exit_loss,
    log_soft_label,
    recipe,
    teach,
)
from mini_ee.training.stages import Batch
from mini_ee.training.train import train

EXITS = (1, 2, 3)


@pytest.fixture(scope="module")
def model(checkpoint_folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LoRAExits(load_backbone(checkpoint_folder), EXITS, 2).eval()


def batch_of(targets=None):
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(5, 20, (4, 6)))
    return Batch((ids, torch.ones_like(ids), torch.zeros_like(ids)), torch.tensor([0, 1, 1, 0]), None, targets)


def test_eq5_is_the_softmax_of_logits_over_t():
    z, T = np.array([[1.0, 3.0, -2.0]]), 10.0
    expected = np.exp(z / T) / np.exp(z / T).sum()
    np.testing.assert_allclose(log_soft_label(torch.from_numpy(z), T).exp().numpy(), expected, atol=1e-7)


def test_kl_is_from_teacher_to_student_summed_over_classes_and_averaged_over_rows():
    random, T = np.random.default_rng(1), 2.0
    student, teacher = random.normal(size=(2, 5, 3))
    p, q = (np.exp(z / T) / np.exp(z / T).sum(1, keepdims=True) for z in (teacher, student))
    expected = (p * np.log(p / q)).sum() / 5
    found = distillation_loss(torch.from_numpy(student), torch.from_numpy(teacher), T)
    assert found.item() == pytest.approx(expected, abs=1e-6)
    squared = distillation_loss(torch.from_numpy(student), torch.from_numpy(teacher), T, t_squared=True)
    assert squared.item() == pytest.approx(4 * expected, abs=1e-6)


def test_equal_logits_cost_nothing_and_a_shift_is_no_difference():
    z = torch.randn(4, 3)
    assert distillation_loss(z, z + 1.5, 2.0).item() == pytest.approx(0, abs=1e-6)


def test_a_regression_follows_its_teachers_value():
    found = distillation_loss(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]), 2.0)
    assert found.item() == 2.0


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_eq4_weighs_labels_and_teacher_with_lambda(model, weight):
    targets = torch.randn(4, 2)
    logits = model.logits_of(1, *batch_of().inputs)
    hard = torch.nn.functional.cross_entropy(logits, batch_of().labels)
    soft = distillation_loss(logits, targets, 10.0)
    found = exit_loss(logits, batch_of().labels, targets, Config(weight=weight, temperature=10.0))
    torch.testing.assert_close(found, (1 - weight) * hard + weight * soft)


def test_without_a_teacher_it_is_eq3(model):
    logits = model.logits_of(2, *batch_of().inputs)
    hard = torch.nn.functional.cross_entropy(logits, batch_of().labels)
    torch.testing.assert_close(exit_loss(logits, batch_of().labels, None, Config()), hard)


@pytest.mark.parametrize(
    "distill, teachers", [("vanilla", [None] * 4), ("kd", [3, 3, 3, None]), ("segd", [1, 2, 3, None])]
)
def test_who_teaches_whom(distill, teachers):
    config = Config(distill=distill)
    assert [config.teacher_of(k, 3) for k in range(4)] == teachers


def test_the_last_exit_learns_first_and_each_stage_one_exit_alone(model):
    stages = recipe(model, Config())
    assert [stage.name for stage in stages] == ["exit 3", "exit 2", "exit 1"]
    names = [name for name, _ in model.named_parameters()]
    learned = [{name for name in names if stage.trainable(name)} for stage in stages]
    for k, some in zip((2, 1, 0), learned):
        assert some and all(name.startswith((f"adapters.{k}.", f"heads.{k}.")) for name in some)
    assert not any(name.startswith("backbone.") for some in learned for name in some)


def test_a_teacher_says_what_the_exit_says_row_by_row(model, checkpoint_folder):
    from mini_ee.data.tokens import Tokenizer

    encoded = Tokenizer.from_folder(checkpoint_folder, 24).encode(["the film was good", "a bad, bad room", "dull"])
    said = teach(model.eval(), RowData(encoded, np.zeros(3, np.int64), None), 1)
    for row in range(3):
        inputs = encoded.batch(np.array([row]))
        arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
        with torch.no_grad():
            alone = model.logits_of(1, *map(torch.from_numpy, arrays))
        np.testing.assert_allclose(said[row], alone[0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"distill": "kl"},
        {"temperature": 0.0},
        {"temperature": float("inf")},
        {"weight": 1.5},
        {"weight": -0.1},
        {"rank": 0},
        {"alpha": -1.0},
        {"targets": ("pooler",)},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Config(**options)


def test_every_setting_says_what_it_is():
    assert all(field.metadata["help"] for field in fields(Config))


def test_adapters_are_as_the_settings_say(checkpoint_folder):
    config = Config(rank=3, alpha=6.0, targets=("key",))
    built = lora_exits.build(load_backbone(checkpoint_folder), EXITS, 2, "first", config)
    assert (built.rank, built.scale, built.targets, built.pool) == (3, 2.0, ("key",), "first")


def trained(out, checkpoint_folder, task_folder, distill, epochs=1):
    options = {"epochs": epochs, "lr": 1e-2, "head_lr": 1e-2, "batch_size": 8, "exits": EXITS, "rank": 2}
    return train("lora-exits", checkpoint_folder, task_folder, out, distill=distill, **options)


@pytest.fixture(scope="module")
def three_ways(tmp_path_factory, checkpoint_folder, task_folder):
    folder = tmp_path_factory.mktemp("ways")
    return {name: trained(folder / name, checkpoint_folder, task_folder, name).model.state_dict() for name in DISTILL}


def same(a, b, k):
    names = [name for name in a if name.startswith((f"adapters.{k}.", f"heads.{k}."))]
    return all(torch.equal(a[name], b[name]) for name in names)


def test_kd_is_segd_at_exit_k_minus_1_bit_for_bit_and_the_last_exit_is_the_same_in_all(three_ways):
    assert same(three_ways["kd"], three_ways["segd"], 1)
    assert same(three_ways["kd"], three_ways["segd"], 2) and same(three_ways["kd"], three_ways["vanilla"], 2)


def test_a_teacher_teaches_without_dropout(tmp_path, checkpoint_folder, task_folder, monkeypatch):
    learning = []

    def watched(model, data, k):
        learning.append(any(part.training for part in model.modules()))
        return teach(model, data, k)

    monkeypatch.setattr(lora_exits, "teach", watched)
    trained(tmp_path / "run", checkpoint_folder, task_folder, "segd")
    assert learning == [False, False]


def test_elsewhere_they_differ(three_ways):
    assert not same(three_ways["kd"], three_ways["segd"], 0)
    assert not same(three_ways["vanilla"], three_ways["segd"], 1)


def test_the_backbone_is_never_trained(three_ways, checkpoint_folder):
    before = load_backbone(checkpoint_folder).state_dict()
    for state in three_ways.values():
        for name, value in before.items():
            if not name.startswith(("poolers", "lm_head")):
                assert torch.equal(state[f"backbone.{name}"], value)


def test_the_comparison_of_kd_and_segd_can_fail(tmp_path, checkpoint_folder, task_folder, three_ways, monkeypatch):
    """Planted bug: the teacher is taken one exit too low, the student itself."""
    monkeypatch.setattr(
        Config, "teacher_of", lambda self, k, last: None if k == last else last if self.distill == "kd" else k
    )
    wrong = trained(tmp_path / "run", checkpoint_folder, task_folder, "segd").model.state_dict()
    assert not same(three_ways["kd"], wrong, 1)
