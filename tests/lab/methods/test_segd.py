"""SEGD (LoRAExit, section 3.2): what a teacher gives, settings, and trainings in the three ways of Table 4.

Eq. 3 to 5: tests/spec/test_1_lora_exits.py.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

import mini_ee.lab.methods.lora_exits as lora_exits
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.methods.lora_exits import (
    Config,
    LoRAExits,
    recipe,
    teacher_logits,
)
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import train
from mini_ee.lora_exits import TEACHERS, exit_loss

EXITS = (1, 2, 3)


@pytest.fixture(scope="module")
def model(checkpoint_folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LoRAExits(load_backbone(checkpoint_folder), EXITS, 2).eval()


def test_a_teacher_says_what_the_exit_says_row_by_row(model, checkpoint_folder):
    from mini_ee.lab.data.tokenizer import Tokenizer

    encoded = Tokenizer.from_folder(checkpoint_folder, 24).encode(["the film was good", "a bad, bad room", "dull"])
    logits = teacher_logits(model.eval(), RowData(encoded, np.zeros(3, np.int64), None), 1)
    for row in range(3):
        inputs = encoded.batch(np.array([row]))
        arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
        with torch.no_grad():
            alone = model.logits_of(1, *map(torch.from_numpy, arrays))
        np.testing.assert_allclose(logits[row], alone[0].numpy(), atol=1e-5)


def test_the_last_exit_learns_first_and_each_stage_trains_one_exit(model):
    stages = recipe(model, Config())
    assert [stage.name for stage in stages] == ["exit 3", "exit 2", "exit 1"]
    names = [name for name, _ in model.named_parameters()]
    for k, stage in zip((2, 1, 0), stages):
        trained = [name for name in names if stage.trainable(name)]
        assert trained and all(name.startswith((f"adapters.{k}.", f"heads.{k}.")) for name in trained)


@pytest.mark.parametrize("classes, factor", [(2, 9.0), (1, 1.0)])
def test_t_squared_multiplies_the_divergence_and_not_a_squared_error(classes, factor, checkpoint_folder):
    torch.manual_seed(0)
    model = LoRAExits(load_backbone(checkpoint_folder), EXITS, classes).eval()
    inputs = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    labels, teacher = torch.tensor([0, 1] if classes == 2 else [0.3, 0.8]), torch.randn(2, classes)
    *_, stage = recipe(model, Config(temperature=3.0, weight=0.4, t_squared=True))
    expected = exit_loss(model.logits_of(0, *inputs), labels, teacher, 0.4, 3.0, factor)
    assert stage.loss(model, Batch(inputs, labels, None, teacher)) == expected


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
    options = {
        "epochs": epochs,
        "lr": 1e-2,
        "head_lr": 1e-2,
        "batch_size": 8,
        "exits": EXITS,
        "rank": 2,
        "max_train": 24,
    }
    return train("lora-exits", checkpoint_folder, task_folder, out, distill=distill, **options)


@pytest.fixture(scope="module")
def three_ways(tmp_path_factory, checkpoint_folder, task_folder):
    folder = tmp_path_factory.mktemp("ways")
    return {name: trained(folder / name, checkpoint_folder, task_folder, name).model.state_dict() for name in TEACHERS}


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
        return teacher_logits(model, data, k)

    monkeypatch.setattr(lora_exits, "teacher_logits", watched)
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
