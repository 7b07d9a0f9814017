"""The builder of ONNX graphs: parameters by identity, branches within branches, weights where they are used."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from mini_ee.lab.export.builder import Builder, branches_of, parameters_of
from mini_ee.lab.export.graph import Graph

EXITS, C = (1, 2, 4), 3
ATOL = 1e-5  # float32 logits of size 2


def opened(g, folder):
    """A session on what a builder wrote, which passes the checker."""
    folder.mkdir(exist_ok=True)
    onnx.save(g.model("graph", {}), folder / "graph.onnx")
    onnx.checker.check_model(folder / "graph.onnx", full_check=True)
    return onnxruntime.InferenceSession(folder / "graph.onnx", providers=["CPUExecutionProvider"])


def through(g, x, *modules):
    """The modules one after the other, of x (batch, width): the name of what comes out."""
    width, x = modules[0].in_features, x
    with g.tracing():
        value = g.tensor(x, "batch", width)
        for module in modules:
            value = module(value)
        return value.name


def test_a_parameter_of_another_model_is_told():
    with pytest.raises(ValueError, match=r"a parameter of the model, found another one of shape \(3, 2\)"):
        Builder(parameters_of(nn.Linear(2, 2))).parameter(nn.Linear(2, 3).weight)


def where_weights_stand(graph, depth=0):
    """Name -> how many branches deep."""
    depths = {tensor.name: depth for tensor in graph.initializer}
    for branch in branches_of(graph):
        depths |= where_weights_stand(branch, depth + 1)
    return depths


def test_a_constant_has_one_value():
    g = Builder({})
    assert g.constant("half", np.array(0.5)) == g.constant("half", np.array(0.5))
    with pytest.raises(ValueError, match="constant_half_float64 is 0.5 already, not 0.25"):
        g.constant("half", np.array(0.25))
    with pytest.raises(ValueError, match="already"):
        g.constant("half", np.array([0.5]))  # another shape


def test_a_weight_stands_in_the_branch_that_alone_uses_it_and_outside_of_two(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        maps = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    g = Graph(parameters_of(maps))
    x, first = g.input("x", "batch", 2, dtype=np.float32), g.input("first", dtype=bool)

    def branch(number):
        return [g.value(through(g, x, maps[number], maps[2]), "batch", 2)]

    (y,) = g.either(first, lambda: branch(0), lambda: branch(1))
    g.output("y", y.name, "batch", 2)
    session, values = opened(g, tmp_path), np.ones((1, 2), np.float32)
    assert where_weights_stand(onnx.load(tmp_path / "graph.onnx").graph) == {
        "0.weight": 1,
        "1.weight": 1,
        "2.weight": 0,
    }
    for number, is_first in ((0, True), (1, False)):
        (output,) = session.run(None, {"x": values, "first": np.array(is_first)})
        np.testing.assert_allclose(output, maps[2](maps[number](torch.ones(1, 2))).detach(), rtol=0, atol=1e-6)


def test_what_is_rounded_in_one_branch_is_rounded_anew_in_the_other(tmp_path):
    maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    g = Graph(parameters_of(maps), rounded={id(linear.weight) for linear in maps})
    x, first = g.input("x", "batch", 4, dtype=np.float32), g.input("first", dtype=bool)
    branches = [lambda k=k: [g.value(through(g, x, maps[k]), "batch", 4)] for k in range(2)]
    (y,) = g.either(first, *branches)
    g.output("y", y.name, "batch", 4)
    session, values = opened(g, tmp_path), torch.linspace(-1, 1, 8).view(2, 4)
    for number, is_first in ((0, True), (1, False)):
        (output,) = session.run(None, {"x": values.numpy(), "first": np.array(is_first)})
        np.testing.assert_allclose(output, maps[number](values).detach(), rtol=0, atol=0.03)


def test_int8_weights_leave_room_for_the_sum_of_two_products_in_16_bits(tmp_path):
    """Inputs and weights at the ends of their ranges: what overflows on a processor without VNNI."""
    layer = nn.Linear(64, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 64))
    g = Graph(parameters_of(layer), rounded={id(layer.weight)})
    g.output("y", through(g, g.input("x", "batch", 64, dtype=np.float32), layer), "batch", 2)
    assert 2 * 255 * int(abs(g.weights["weight_int8"].astype(int)).max()) < 2**15
    (output,) = opened(g, tmp_path).run(None, {"x": np.ones((1, 64), np.float32)})
    np.testing.assert_allclose(output, [[64, -64]], rtol=1e-3)


def test_a_weight_that_float16_does_not_hold_is_told():
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 1] = -7e4
    Builder(parameters_of(module)).parameter(module.weight)
    with pytest.raises(ValueError, match="a weight of 70000 is too large for float16 .65504.; use float32"):
        Builder(parameters_of(module), np.float16).parameter(module.weight)
