"""MM: models of several depths, each alone; a row that one refuses begins anew in the next."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines.multi_model import METHOD, MultiModel, recipe
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Patience, Planned
from mini_ee.lab.training.run_folder import load_run

EXITS = (1, 2, 3)
ATOL = 1e-5  # float32 logits of size 7; measured max 1.2e-6


@pytest.fixture(scope="module")
def model(checkpoint_folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MultiModel(load_backbone(checkpoint_folder), EXITS, 3).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".heads." in name:
                    parameter.normal_(0, 1)
    return model


@pytest.fixture
def inputs(padded_inputs):
    """Ids that the small checkpoint knows."""
    return replace(padded_inputs, input_ids=padded_inputs.input_ids % 20)


def test_model_k_is_the_first_layers_of_the_backbone(model, checkpoint_folder):
    backbone = load_backbone(checkpoint_folder).state_dict()
    for layer, cascaded in zip(EXITS, model.models, strict=True):
        state = cascaded.backbone.state_dict()
        assert {name.split(".")[1] for name in state if name.startswith("layers.")} == set(map(str, range(layer)))
        for name, value in state.items():
            assert torch.equal(value, backbone[name])


def test_no_two_models_share_a_weight(model):
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(places)) == len(places)


def test_the_cascade_says_what_each_model_says_alone(model, inputs):
    arrays = inputs.input_ids, inputs.attention_mask, inputs.token_type_ids
    with torch.no_grad():
        expected = torch.stack(model(*map(torch.from_numpy, arrays)), dim=1).numpy()
    logits, *_ = read_every_exit(model.segments(), inputs)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("rule", [Never(), Fixed(1), Patience(1), Planned((2, 0, 1, 2, 1, 0, 2))])
def test_a_row_that_stops_at_model_k_has_run_all_models_up_to_it(model, inputs, rule):
    result, (every, *_) = early_exit(model.segments(), rule, inputs), read_every_exit(model.segments(), inputs)
    np.testing.assert_array_equal(result.cost.layer_passes, np.array([1, 3, 6])[result.exit_index])
    np.testing.assert_array_equal(result.layers_run, np.array(EXITS)[result.exit_index])
    np.testing.assert_allclose(result.logits, every[np.arange(len(inputs)), result.exit_index], rtol=0, atol=ATOL)


def test_speed_is_measured_against_the_deepest_model_alone(model, inputs):
    result = early_exit(model.segments().whole(), Never(), inputs)
    np.testing.assert_allclose(result.logits, read_every_exit(model.segments(), inputs)[0][:, -1], rtol=0, atol=ATOL)
    assert set(result.cost.layer_passes) == {3}


def test_each_stage_trains_one_model(model):
    names = [name for name, _ in model.named_parameters()]
    learn = [[name for name in names if stage.trainable(name)] for stage in recipe(model, METHOD.config())]
    assert sorted(sum(learn, [])) == sorted(names)
    assert all(name.startswith(f"models.{k}.") for k, trained in enumerate(learn) for name in trained)


@pytest.mark.slow
def test_a_run_of_it_is_trained_written_and_read(tmp_path, checkpoint_folder, task_folder):
    options = {"epochs": 8, "lr": 5e-3, "head_lr": 1e-2, "batch_size": 8, "exits": EXITS, "max_train": 45}
    run = mini_ee.train("multi-model", checkpoint_folder, task_folder, tmp_path / "run", **options)
    again = load_run(tmp_path / "run")
    assert isinstance(again.model, MultiModel) and again.config["method"] == "multi-model"
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    dev = load_task(task_folder).split("dev")
    encoded = again.encode(dev.texts).batch(slice(None))
    logits, *_ = read_every_exit(again.segments(), encoded)
    assert ((logits.argmax(axis=2) == dev.labels[:, None]).mean(axis=0) > 0.7).all()
