"""Torch and numpy code gives the same on arrays and on values of a graph, whose sizes are known only when it runs."""

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mini_ee.lab.backbones import cache
from mini_ee.lab.backbones.backbone import token_places
from mini_ee.lab.export.builder import int8_maps, parameters_of
from mini_ee.lab.export.graph import Graph
from mini_ee.lab.export.tracing import NotTraceable

B, T, D = 3, 5, 4
SIZES = [(B, T), (1, 1), (2, 7)]  # the graph is written once for all of them


def drawn(batch, tokens):
    """x (B, T, D), two tensors (B, D), ids (B, T), a mask (B, T) without an empty row, and rows (n,) of the batch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, tokens, D, generator=generator)
    a, b = torch.randn(2, batch, D, generator=generator).unbind()
    ids = torch.randint(0, 6, (batch, tokens), generator=generator)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (batch, 1), generator=generator)
    return {"x": x, "a": a, "b": b, "ids": ids, "mask": mask, "rows": torch.tensor([batch - 1, 0])}


AXES = {"x": ("batch", "tokens", D), "a": ("batch", D), "b": ("batch", D), "ids": ("batch", "tokens")}
AXES |= {"mask": ("batch", "tokens"), "rows": ("some",)}


def assert_traced(compute, tmp_path, module=None, numpy=False, atol=1e-6):
    """compute(**tensors), or of arrays: the same through ONNX Runtime, at several sizes."""
    g, given = Graph(parameters_of(module or nn.Linear(1, 1))), drawn(B, T)
    names = compute.__code__.co_varnames[: compute.__code__.co_argcount]
    with g.tracing():
        values = {}
        for name in names:
            dtype = given[name].numpy().dtype
            make = g.array if numpy else g.tensor
            values[name] = make(g.input(name, *AXES[name], dtype=dtype), *AXES[name], dtype=dtype)
        out = compute(**values)
        g.output("y", out.name, *(f"axis_{at}" for at in range(out.ndim)), dtype=out.kind)
    path = tmp_path / "graph.onnx"
    path.write_bytes(g.model("graph", {}).SerializeToString())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for sizes in SIZES:
        given = drawn(*sizes)
        with torch.no_grad():
            expected = compute(**{name: given[name].numpy() if numpy else given[name] for name in names})
        (output,) = session.run(None, {name: given[name].numpy() for name in names})
        assert output.shape == tuple(expected.shape)
        np.testing.assert_allclose(output, np.asarray(expected), rtol=0, atol=atol)


TORCH = {
    "arithmetic with numbers": lambda x: (1 - 2 * x) / 4 + x * x,
    "whole numbers divide to fractions": lambda ids: ids / (ids + 1),
    "whole numbers and fractions": lambda x, mask: x * mask[..., None],
    "comparisons": lambda a, b: (a > b) & (a <= 1) | ~(b != a),
    "maximum": lambda a, b: torch.maximum(a, b),
    "where with numbers": lambda mask: torch.where(mask, 2, -1),
    "where of truths": lambda mask, ids: torch.where(mask, ids > 2, ids < 1),
    "masked fill": lambda x, mask: x.masked_fill(~mask[..., None], -torch.inf).softmax(1),
    "activations": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.relu(x) + x.sigmoid() * x.tanh(),
    "log-sigmoid": lambda a: F.logsigmoid(a),
    "clamp": lambda x: x.clamp(min=-0.5, max=0.5) + x.clamp(min=0),
    "mean over tokens": lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    "reductions": lambda x: x.amax(1) - x.amin(1) + x.mean(1),
    "argmax": lambda x: x.argmax(-1),
    "running count": lambda mask: (mask.cumsum(1) - 1) * mask,
    "softmax": lambda a: a.softmax(1) + a.log_softmax(-1),
    "cosine": lambda a, b: torch.cosine_similarity(a, b),
    "normalised": lambda a: F.normalize(a, dim=1),
    "heads": lambda x: x.view(*x.shape[:2], 2, -1).permute(2, 0, 1, 3).unbind()[1],
    "there and back": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).transpose(1, 2).flatten(2),
    "two axes as one": lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], -1)),
    "parts of an axis": lambda x: torch.cat((x[:, 1:], x[:, :1], x[..., -2:].repeat(1, 1, 2)), dim=1),
    "last token": lambda x: x[:, -1],
    "split and stack": lambda x: torch.stack(x.split((1, 3), dim=-1)[1].unbind(-1)[::-1], dim=1),
    "chunks": lambda x: x.chunk(2, dim=-1)[1] - x.chunk(2, dim=-1)[0],
    "rows": lambda x, rows: x[rows],
    "rows of a mask": lambda ids, mask: ids[mask[:, 0].nonzero()[:, 0]],
    "gathered": lambda x, ids: x.gather(2, torch.where(ids >= 4, ids - 4, ids)[..., None]),
    "expanded": lambda a, x: a[:, None].expand(-1, x.shape[1], -1) + x,
    "sorted": lambda mask, ids: ids.gather(1, mask.byte().sort(dim=1, descending=True, stable=True).indices),
    "two largest": lambda a: a.topk(2).values,
    "one-hot": lambda ids: F.one_hot(ids, 6),
    "attention": lambda x, mask: attention(x, mask),
    "rotary positions": lambda x: turned(x, 2),
    "rotary positions of a part of each head": lambda x: turned(x, 1),
    "filled": lambda x: torch.zeros_like(x[:, :1]) + torch.ones_like(x),
}


def attention(x, mask):
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    seen = mask[:, None, None, :]
    scaled, unscaled = (F.scaled_dot_product_attention(*[heads] * 3, attn_mask=seen, scale=s) for s in (None, 1.0))
    return (scaled + unscaled).transpose(1, 2).flatten(2)


def turned(x, pairs):
    """Two heads of D numbers, of which so many pairs turn."""
    angle = token_places(x[..., 0]).float()[:, None] * torch.tensor([1.0, 0.1])[:pairs]
    cos, sin = (torch.cat(parts, -1)[None, :, None] for parts in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    return cache.rotate(torch.cat((x, 2 * x), -1).unflatten(-1, (2, -1)), cos, sin)


@pytest.mark.parametrize("compute", TORCH.values(), ids=TORCH)
def test_torch_code(compute, tmp_path):
    assert_traced(compute, tmp_path)


NUMPY = {
    "softmax": lambda a: (
        np.exp(a - a.max(axis=1, keepdims=True)) / np.exp(a - a.max(axis=1, keepdims=True)).sum(axis=1)[:, None]
    ),
    "two largest": lambda a: np.partition(a, -2, axis=1)[:, -2:].T[1] - np.partition(a, -2, axis=1)[:, -2:].T[0],
    "log-add-exp": lambda a, b: np.logaddexp(0, a) + np.logaddexp(a, b),
    "a streak": lambda a, b: np.where(a[:, 0] > b[:, 0], 3 + 1, 0),
    "clipped": lambda a: np.maximum(np.clip(a, -1, 0.5), -0.7) + abs(a),
    "places": lambda mask: np.flatnonzero(mask[:, 0]),
    "largest": lambda a: a.argmax(axis=1),
}


@pytest.mark.parametrize("compute", NUMPY.values(), ids=NUMPY)
def test_numpy_code(compute, tmp_path):
    assert_traced(compute, tmp_path, numpy=True)


def test_modules_and_what_is_made_of_their_parameters(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.ModuleDict({"words": nn.Embedding(6, D), "map": nn.Linear(D, 6), "norm": nn.LayerNorm(6)}).eval()
        module["norm"].weight.data.normal_()

    def compute(ids, x):
        inner = module["norm"](F.gelu(module["map"](module["words"](ids) + x)))
        half = F.linear(inner[..., :3], module["map"].weight[3:, :3] * 2.0, module["map"].bias[3:])
        some = module["words"].weight[torch.tensor([1, 3, 4])][:, 0]
        return some + half + F.rms_norm(half, (3,), 1.0 + module["norm"].weight[:3], 1e-6)

    assert_traced(compute, tmp_path, module, atol=5e-6)


def test_a_weight_that_is_used_in_other_shapes_is_stored_once_by_its_name():
    module = nn.Linear(4, 4)
    g = Graph(parameters_of(module))
    with g.tracing():
        x = g.tensor(g.input("x", "batch", 4, dtype=np.float32), "batch", 4)
        F.linear(module(x), 1.0 + module.weight, module.bias[:4])
    assert g.weights.keys() == {"weight", "bias"}


class Untraceable:
    def size_as_a_number(x):
        return range(x.shape[0])

    def a_size_for_torch(x):
        return torch.zeros(x.shape[1])

    def half_of_a_size(x):
        return x.shape[1] // 2

    def length(x):
        return len(x)

    def truth(x):
        return 1 if (x > 0).all() else 0

    def unknown_function(x):
        return torch.linalg.norm(x)

    def rising_sort(x):
        return x.sort(dim=-1)


REFUSALS = {
    "size_as_a_number": "the size batch is known only when the graph runs",
    "a_size_for_torch": "zeros takes no size that is known only when the graph runs",
    "half_of_a_size": "the size tokens is known only when the graph runs",
    "length": "the size batch is known only when the graph runs",
    "truth": "whether a value is true is known only when the graph runs",
    "unknown_function": "linalg_norm has no lowering to ONNX",
    "rising_sort": "an ascending sort has no lowering",
}


@pytest.mark.parametrize("name, why", REFUSALS.items(), ids=REFUSALS)
def test_what_a_graph_cannot_hold_is_one_line_with_its_place(name, why):
    g = Graph(parameters_of(nn.Linear(1, 1)))
    with pytest.raises(NotTraceable) as error, g.tracing():
        getattr(Untraceable, name)(g.tensor("x", "batch", "tokens", 4, dtype=np.float32))
    line = str(error.value)
    assert line.startswith("test_tracing.py:") and why in line and line.endswith("--engine torch") and "\n" not in line


def test_int8_is_what_modules_say_of_their_maps():
    class Layer(nn.Module):
        int8_maps = ("up",)

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    layer = Layer()
    assert int8_maps(nn.Sequential(layer, nn.Linear(4, 4))) == {id(layer.up.weight)}
