"""SGMV: the low-rank part of a linear map, where rows belong to different adapters.

Source: LoRAExit, Eq. 6, second term; the operator is Punica's (Chen et al. 2023, Segmented Gather Matrix-Vector
multiplication). Rows are sorted into segments, segment i computes with adapter i:

    y[s_i : s_{i+1}] += scale x[s_i : s_{i+1}] A_i B_i              shrink to rank r, then expand

    x (N, I)   A (n, I, r)   B (n, r, O)   starts (n + 1), s_0 = 0 .. s_n = N   y (N, O): x W, the first term

Segments are equal where streams carry the same rows (all exits of a batch), and unequal where each row is at an exit of
its own (LoRAExits.ragged).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NARROW = 16  # columns


def sgmv_loop(y: Tensor, x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int], scale: float = 1.0) -> Tensor:
    """The definition, one segment after the other: adds to y in place and returns it. Empty segments add nothing.

    y may be a part of the columns of a larger tensor. Raises ValueError where shapes or segments do not fit.
    """
    _check(y, x, A, B, starts)
    for i, (start, stop) in enumerate(zip(starts, starts[1:])):
        if start < stop:
            y[start:stop].addmm_(_shrink(x[start:stop], A[i]), B[i], alpha=scale)
    return y


def sgmv(y: Tensor, x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int], scale: float = 1.0) -> Tensor:
    """The same, fast. Gradients flow to all four tensors.

    Segments of equal length take two batched products. Others take the kernel of lora_exits_sgmv_triton.py on a GPU,
    where launches cost most, and the loop on a CPU, where arithmetic costs most.
    """
    _check(y, x, A, B, starts)
    x, A, B = (each.to(y.dtype) for each in (x, A, B))  # under autocast the first term is of lower precision
    lengths = {stop - start for start, stop in zip(starts, starts[1:])}
    if len(lengths) == 1:
        segments = len(A), *lengths
        y.unflatten(0, segments).baddbmm_(_shrink(x.unflatten(0, segments), A), B, alpha=scale)
        return y
    if not x.is_cuda:
        return sgmv_loop(y, x, A, B, starts, scale)
    from mini_ee.methods.lora_exits_sgmv_triton import segmented_product

    with torch.cuda.device(x.device):
        return y.add_(segmented_product(segmented_product(x, A, starts), B, starts), alpha=scale)


def _shrink(x: Tensor, A: Tensor) -> Tensor:
    """x (..., T, I) A (..., I, r). MKL takes a third of the time for the transpose where r is small and T is not."""
    return (A.mT @ x.mT).mT if A.shape[-1] < NARROW <= x.shape[-2] else x @ A


def _check(y: Tensor, x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int]) -> None:
    rows, (n, inputs, rank), outputs = len(x), A.shape, B.shape[-1]
    found, expected = (x.shape, B.shape, y.shape), ((rows, inputs), (n, rank, outputs), (rows, outputs))
    if found != expected:
        raise ValueError(
            f"x, B and y: expected shapes {expected} beside A {tuple(A.shape)}, got {[*map(tuple, found)]}"
        )
    ascending = all(start <= stop for start, stop in zip(starts, starts[1:]))
    if len(starts) != n + 1 or not ascending or starts[0] != 0 or starts[-1] != rows:
        raise ValueError(f"starts must ascend from 0 to {rows} with {n} segments, got {list(starts)}")
