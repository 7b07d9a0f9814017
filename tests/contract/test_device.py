"""What a run does on a GPU: everything is where it is needed. Without a GPU, one is pretended (pretended.py)."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from pretended import DEVICE, pretended
from test_conformance import DIFFERENT, PROMPTS, answers, decoded, house  # noqa: F401

from mini_ee.experiments import measures
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.exits.decoding import MISSING_KV

A_GPU = nullcontext if torch.cuda.is_available() else pretended
SHORT = {"rows": {"epochs": 1, "max_train": 32}, "tokens": {"texts": 20}}


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    with pretended():
        layer = torch.nn.Linear(3, 2).to("cuda")
        assert layer.weight.device == layer.bias.device == DEVICE
        given = torch.zeros(4, 3)
        with pytest.raises(RuntimeError, match="linear: expected all tensors to be on the same device"):
            layer(given)
        output = layer(given.to(DEVICE))
        output.sum().backward()
        assert output.device == layer.weight.grad.device == torch.zeros(2, device="cuda").device == DEVICE
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            output.detach().numpy()
        with pytest.raises(RuntimeError, match="add: expected all"):
            output + torch.ones(2)
        assert output.detach().cpu().numpy().shape == (4, 2) and output.cpu().device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("method, unit", DIFFERENT)
def test_a_run_is_trained_and_answers_on_the_device_as_on_the_host(house, method, unit, task_folder, tmp_path):  # noqa: F811
    def answered():
        if unit == "rows":
            return answers(run, run.rule)
        return [decoded(run, run.rule, PROMPTS[:2], missing_kv=missing_kv) for missing_kv in MISSING_KV]

    with A_GPU():
        short = SHORT[unit] if method != "raee" else {}
        run = house.train(method, unit, tmp_path / "run", device="cuda", **short)
        here = answered()
        run.model.to("cuda")
        assert {parameter.device for parameter in run.model.parameters()} == {DEVICE}
        if unit == "rows":
            for there, expected in zip(answered(), here):
                np.testing.assert_allclose(there, expected, rtol=1e-4, atol=1e-5)
            command = ("evaluate", "--task", str(task_folder), "--max-rows", "4")
        else:
            assert answered() == here
            command = ("generate", "--prompt", "the film", "--max-new-tokens", "3")
        assert main([command[0], str(tmp_path / "run"), *command[1:], "--device", "cuda"]) == 0


@pytest.mark.slow
def test_the_exits_of_an_experiment_are_read_where_it_was_trained_and_timed_on_the_cpu(
    house,  # noqa: F811
    task_folder,
    tmp_path,
    monkeypatch,
):
    devices = {"record": set(), "measure_seconds": set()}

    def noted(name):
        function = getattr(measures, name)

        def called(*args, **settings):
            devices[name] |= {parameter.device.type for parameter in run.model.parameters()}
            return function(*args, **settings)

        return called

    with A_GPU():
        run = house.train("joint", "rows", tmp_path / "run", device="cuda", **SHORT["rows"])
        run.model.to("cuda")
        for name in devices:
            monkeypatch.setattr(measures, name, noted(name))
        figures, _, made = measures.of_rows(run, load_task(task_folder), None)
    assert devices == {"record": {"cuda"}, "measure_seconds": {"cpu"}}
    assert figures["speed-up at one point"] > 0 and len(made.reported.labels) == 20
