"""LoRAExit, Eq. 6: the adapters of several exits on the linear maps of a backbone. The paper: mini_ee/lora_exits.py.

sgmv       what the core's sgmv computes, faster
Streams    the adapters of several exits, stacked for sgmv; `adapt` adds their output to the linear maps of a backbone

Segments have equal lengths if all streams compute the same rows (all exits of a batch), and unequal lengths if each row
has its own exit (LoRAExits.ragged).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Adapt
from mini_ee.lab.backbones.lora import columns_of
from mini_ee.lab.backbones.targets import TARGETS

NARROW = 16  # a rank below this is faster with the transposed product


def sgmv(y: Tensor, x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int], scale: float = 1.0) -> Tensor:
    """The same result as the core's, which explains the arguments. Gradients flow to all four tensors.

    y may be a view of some columns of a larger tensor. If all segments have one length, two batched products do. If
    not, a CPU takes one segment after the other, as the core does, and a GPU runs the kernel of
    lora_exits_sgmv_triton.py, because many launches are slow there.
    """
    x, A, B = (tensor.to(y.dtype) for tensor in (x, A, B))  # under autocast y, the first term, has lower precision
    lengths = {stop - start for start, stop in zip(starts, starts[1:])}
    if len(lengths) == 1:  # (N, I) -> (n, N / n, I): adapter i of A and B multiplies block i of x
        segments = len(A), *lengths
        y.unflatten(0, segments).baddbmm_(_shrink(x.unflatten(0, segments), A), B, alpha=scale)
        return y
    if not x.is_cuda:
        for i, (start, stop) in enumerate(zip(starts, starts[1:])):
            if start < stop:
                y[start:stop].addmm_(_shrink(x[start:stop], A[i]), B[i], alpha=scale)
        return y
    from mini_ee.lab.methods.lora_exits_sgmv_triton import segmented_product

    with torch.cuda.device(x.device):
        return y.add_(segmented_product(segmented_product(x, A, starts), B, starts), alpha=scale)


def _shrink(x: Tensor, A: Tensor) -> Tensor:
    """x A: (..., T, I), (..., I, r) -> (..., T, r).

    If r is small and T is not, MKL computes the transposed product (A^T x^T)^T in a third of the time.
    """
    return (A.mT @ x.mT).mT if A.shape[-1] < NARROW <= x.shape[-2] else x @ A


# ---- The adapters of several exits ----
class Stacked(NamedTuple):
    """The adapters of n streams on one projection of one layer."""

    columns: slice  # where its outputs are in those of its linear map: qkv computes query, key and value in one
    A: Tensor  # (n, I, m)
    B: Tensor  # (n, m, O)

    def last(self, n: int) -> "Stacked":
        """The adapters of the last n streams."""
        return Stacked(self.columns, self.A[-n:], self.B[-n:])


def add_low_rank(y: Tensor, x: Tensor, adapters: Stacked, starts: Sequence[int], scale: float) -> None:
    """The second term of Eq. 6 for one projection, added in place to the first: $scale x_i A_i B_i$ for stream i.

    x (N, T, I), y (N, T, all outputs of the linear map). Rows starts[i] .. starts[i + 1] - 1 belong to stream i.
    """
    tokens = x.shape[1]
    vectors = x.reshape(-1, x.shape[2])  # (N T, I): the tokens of a row are consecutive, so row r begins at r T
    outputs = y.view(-1, y.shape[2])[:, adapters.columns]  # a view: sgmv changes y itself
    sgmv(outputs, vectors, adapters.A, adapters.B, [row * tokens for row in starts], scale)


def low_rank_of_map(x: Tensor, projections: list[Stacked], outputs: int, scale: float) -> Tensor:
    """The second term of Eq. 6 for all outputs of a linear map: (n, N T / n, outputs). For ONNX graphs, where nothing
    is added in place. All n streams have equally many rows.

    x (N, T, I). The A of all projections are concatenated to one (n, I, ranks), the B to one (n, ranks, outputs), each
    padded with zeros outside the columns of its projection. Both depend on weights alone: ONNX Runtime computes them
    once, when it loads the graph.
    """
    streams = len(projections[0].A)
    A = torch.cat([stacked.A for stacked in projections], dim=2)
    margins = [(stacked.columns.start, outputs - stacked.columns.stop) for stacked in projections]
    B = torch.cat([F.pad(stacked.B, margin) for stacked, margin in zip(projections, margins)], dim=1)
    return (x.reshape(streams, -1, x.shape[-1]) @ A) * scale @ B


class Streams:
    """The adapters of the exits first .. stop - 1, stacked. For a single exit they are the parameters themselves.

    Streams end in the order of their exits. So a deep layer has adapters of the *last* streams only, and the streams
    that are still running are always the last ones.
    """

    def __init__(self, model: nn.Module, first: int, stop: int):
        self.scale = model.scale
        exits = model.adapters[first:stop]  # exit -> stored layer -> target -> LowRank
        self.layers = [_stacked_layer(model, exits, stored) for stored in range(len(exits[-1]))]

    @property
    def tensors(self) -> list[Tensor]:
        """All stacked adapters."""
        projections = [stacked for layer in self.layers for parts in layer.values() for stacked in parts]
        return [tensor for stacked in projections for tensor in (stacked.A, stacked.B)]

    def adapt(self, live: int, starts: Sequence[int] | None = None) -> Adapt:
        """A function that adds the adapters of the last `live` streams to a linear map of the backbone:
        (stored layer, name of the map, its input, its output) -> output.

        starts (live + 1,): the batch row at which each stream begins, then the number of rows. None: all streams have
        equally many rows.
        """

        def adapt(stored: int, name: str, x: Tensor, y: Tensor) -> Tensor:
            projections = [stacked.last(live) for stacked in self.layers[stored].get(name, ())]
            if not projections:
                return y
            if not isinstance(x, Tensor):  # in a graph nothing is added in place
                return y + low_rank_of_map(x, projections, y.shape[-1], self.scale).reshape(y.shape)
            rows = starts or range(0, len(x) + 1, len(x) // live)
            for stacked in projections:
                add_low_rank(y, x, stacked, rows, self.scale)
            return y

        setattr(adapt, "streams", None if starts else live)  # see backbones.backbone.Adapt
        return adapt


def _stacked_layer(model: nn.Module, exits: nn.ModuleList, stored: int) -> dict[str, list[Stacked]]:
    """The stacked adapters on one stored layer, of the exits that reach it: name of a linear map -> its projections."""
    reaching = [layers[stored] for layers in exits if stored < len(layers)]
    maps: dict[str, list[Stacked]] = {}
    for target in model.targets:
        columns = columns_of(model.backbone.layers[stored], target)
        A, B = (_stack([getattr(adapters[target], factor) for adapters in reaching]) for factor in "AB")
        linear, _ = TARGETS[target]
        maps.setdefault(linear, []).append(Stacked(columns, A, B))
    return maps


def _stack(factors: list[Tensor]) -> Tensor:
    """n tensors -> (n, ...). A single one is not copied, so gradients and later changes reach the parameter."""
    return factors[0][None] if len(factors) == 1 else torch.stack(factors)
