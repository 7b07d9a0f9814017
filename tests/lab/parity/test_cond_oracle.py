"""An oracle for model.onnx: the same BERT with exits, written with nested `torch.cond` and exported by `torch.onnx`.

Both graphs stop by themselves and let rows exit one by one, and they have nothing in common but the weights: here the
model is written as plain tensor operations, `torch.export` captures them, and onnxscript writes the nodes.

    pip install onnxscript        what the exporter of PyTorch needs; the extra `test` does not install it

Traps for anyone who exports an early-exit model in this way (PyTorch 2.13, onnxscript 0.7.2):
- A branch may not return what it was given: `stop` returns clones. Nothing may be changed in place: `index_copy`.
- Both branches return the same shapes and dtypes: exit layers are made like the mask, which is int64, in all of them.
- Inside nested branches the exporter may read the length of the rows from a tensor's stride. It has no ONNX function
  for that ("No ONNX function found for aten.sym_stride"): `stride_of_contiguous` is one.
- `torch.cond` compiles its branches even without an export, and there it asks whether the number of rows that stay is
  below 2 ("Could not guard on data-dependent expression"): this model can be exported, and not be run by torch itself.
- Each level of nesting is traced more than once, so that the export is slow: four exits take about a minute.
- Each node carries the stack that it was written by. Without this metadata the file is about 20 times smaller.
"""

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Threshold

onnxscript = pytest.importorskip("onnxscript", reason="the oracle is exported by PyTorch: pip install onnxscript")

EXITS = (1, 2, 4, 6)
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "threshold")
ATOL = 1e-5  # float32 logits of size 5.6; measured at most 1.7e-6
THRESHOLDS = {  # no confidence of the rows below is closer to one than 5e-4
    "all exit at once": (-np.inf, -np.inf, -np.inf),
    "none exits": (np.inf, np.inf, np.inf),
    "one threshold": (0.9, 0.9, 0.9),
    "looser with depth": (0.98, 0.9, 0.6),
    "no row at the second exit": (0.8, np.inf, 0.7),
}


class CondBert(nn.Module):
    """A BERT with exits as one function of tensors: (ids, mask, types, thresholds) -> logits (B, C), layers (B,)."""

    def __init__(self, model):
        super().__init__()
        config = model.backbone.config
        self.exits, self.heads, self.eps = model.exits, config.num_attention_heads, config.layer_norm_eps
        self.names = {}
        for name, value in model.state_dict().items():
            self.names[name] = name.replace(".", "_")
            self.register_buffer(self.names[name], value.detach().clone())

    def weight(self, name: str) -> Tensor:
        return getattr(self, self.names[name])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), self.eps)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        word, position, kind = (
            self.weight(f"backbone.embeddings.{name}.weight") for name in ("word", "position", "token_type")
        )
        hidden = F.embedding(ids, word) + F.embedding(types, kind) + position[: ids.shape[1]]
        return self.from_exit(0, self.norm("backbone.embeddings.norm", hidden), mask, thresholds)

    def layer(self, depth: int, hidden: Tensor, mask: Tensor) -> Tensor:
        at = f"backbone.layers.{depth}."
        parts = self.linear(at + "qkv", hidden).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, T, D/H)
        scores = query @ key.transpose(2, 3) / key.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        hidden = self.norm(at + "attention_norm", hidden + self.linear(at + "attention_output", attended))
        given_inputs = self.linear(at + "down", F.gelu(self.linear(at + "up", hidden)))
        return self.norm(at + "output_norm", hidden + given_inputs)

    def read(self, k: int, hidden: Tensor, mask: Tensor) -> Tensor:
        """The head of exit k on the mean over tokens: (B, T, D) -> (B, C)."""
        shares = mask.float()[:, :, None]
        state = (hidden * shares).sum(1) / shares.sum(1)
        return self.linear(f"heads.{k}.out", torch.tanh(self.linear(f"heads.{k}.dense", state)))

    def from_exit(self, k: int, hidden: Tensor, mask: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """hidden is that of the exit before. Returns the logits (B, C) and the exit layers (B,) of all rows."""
        for depth in range(0 if k == 0 else self.exits[k - 1], self.exits[k]):
            hidden = self.layer(depth, hidden, mask)
        logits = self.read(k, hidden, mask)
        layers = torch.full_like(mask[:, 0], self.exits[k])
        if k == len(self.exits) - 1:
            return logits, layers
        stays = logits.softmax(-1).amax(-1) < thresholds[k]

        def go_on(hidden, mask, thresholds, logits, layers, stays):
            rows = stays.nonzero()[:, 0]
            later_logits, later_layers = self.from_exit(k + 1, hidden[rows], mask[rows], thresholds)
            return logits.index_copy(0, rows, later_logits), layers.index_copy(0, rows, later_layers)

        def stop(hidden, mask, thresholds, logits, layers, stays):
            return logits.clone(), layers.clone()

        return torch.cond(stays.any(), go_on, stop, (hidden, mask, thresholds, logits, layers, stays))


def stride_of_contiguous(x, dim: int = 0):
    """torch.ops.aten.sym_stride as ONNX nodes: the exporter has none."""
    op = onnxscript.opset18
    return op.ReduceProd(op.Shape(x, start=dim + 1), keepdims=0)


def random_rows(batch, seed):
    """Rows of 2 to 24 random tokens, padded; one of a batch is padded to 2 tokens more than it needs."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(2, 25, batch)
    mask = (np.arange(lengths.max() + 2) < lengths[:, None]).astype(np.int64)
    return drawn.integers(5, 60, mask.shape) * mask, mask, drawn.integers(0, 2, mask.shape) * mask


def opened(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def oracle(random_model, tmp_path_factory):
    """The session of the graph that PyTorch exports; sizes in the sample are none of those that are tested."""
    ids, mask, types = (torch.from_numpy(array) for array in random_rows(5, seed=0))
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=40)
    sizes = {0: batch, 1: length}
    path = tmp_path_factory.mktemp("oracle") / "cond.onnx"
    sample = ids, mask, types, torch.zeros(len(EXITS) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of what it will drop
        program = torch.onnx.export(
            CondBert(random_model(EXITS)).eval(),
            sample,
            dynamo=True,
            dynamic_shapes=(sizes, sizes, sizes, None),
            input_names=INPUTS,
            output_names=("logits", "layers"),
            custom_translation_table={torch.ops.aten.sym_stride.int: stride_of_contiguous},
            verbose=False,
        )
    program.save(path)
    return opened(path)


def ours(model, folder):
    write_graphs(model, model.segments(), Threshold(0.5), folder)
    return opened(folder / "onnx/model.onnx")


def difference(graph, oracle):
    """The largest difference of logits over all batches and thresholds, and the exit layers seen. Layers are equal."""
    largest, seen = 0.0, set()
    for name, thresholds in THRESHOLDS.items():
        for seed, batch in enumerate((1, 3, 8, 1, 3, 8), start=1):
            feeds = dict(zip(INPUTS, (*random_rows(batch, seed), np.array(thresholds, np.float32))))
            logits, layers = graph.run(["logits", "layers"], feeds)
            expected_logits, expected_layers = oracle.run(["logits", "layers"], feeds)
            np.testing.assert_array_equal(layers, expected_layers, err_msg=f"{name}, batch {batch}, seed {seed}")
            largest, seen = max(largest, abs(logits - expected_logits).max()), seen | set(layers.tolist())
    return largest, seen


def test_our_graph_is_what_pytorch_exports_with_cond(random_model, oracle, tmp_path):
    largest, seen = difference(ours(random_model(EXITS), tmp_path), oracle)
    assert largest <= ATOL and seen == set(EXITS)
