"""SGMV: the low-rank part of a linear map, where rows belong to different adapters.

Source: LoRAExit, Eq. 6, second term; the operator is Punica's (Chen et al. 2023, Segmented Gather Matrix-Vector
multiplication). Rows are sorted into segments, segment i computes with adapter i:

    y[s_i : s_{i+1}] = x[s_i : s_{i+1}] A_i B_i              shrink to rank r, then expand

The caller scales it and adds it to x W, the first term; `expand_` does both in place.

    x (N, I)   A (n, I, r)   B (n, r, O)   starts (n + 1), s_0 = 0 .. s_n = N   y (N, O)

Ways that are equal up to rounding: `sgmv_loop` is the definition. `sgmv` takes two batched products where segments are
equal, as those of LoRA streams are, which carry the same tokens: `shrink` and `expand_`. Where they are not, it goes
one by one on a processor, which is bound by arithmetic, and through sgmv_triton.py's kernel on a GPU, by launches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_ee.backbones.shapes import check


def sgmv_loop(x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int]) -> Tensor:
    """The definition: one product a segment. Empty segments add nothing."""
    _check(x, A, B, starts)
    y = x.new_zeros(len(x), B.shape[2])
    parts = [x[start:stop] @ A[i] @ B[i] for i, (start, stop) in enumerate(zip(starts, starts[1:]))]
    return torch.cat(parts) if parts else y


def sgmv(x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int]) -> Tensor:
    """The same, fast: (N, O). Gradients flow to x, A and B. Raises ValueError where shapes or segments do not fit."""
    _check(x, A, B, starts)
    lengths = {stop - start for start, stop in zip(starts, starts[1:])}
    if len(lengths) == 1:
        return torch.bmm(shrink(x.view(len(A), *lengths, x.shape[1]), A), B).flatten(0, 1)
    if not x.is_cuda:
        return sgmv_loop(x, A, B, starts)
    from mini_ee.backbones.sgmv_triton import segmented_product

    with torch.cuda.device(x.device):
        return segmented_product(segmented_product(x, A, starts), B, starts)


def shrink(x: Tensor, A: Tensor) -> Tensor:
    """Equal segments, x (n, T, I), to the rank: (n, T, r)."""
    return torch.bmm(x, A)


def expand_(y: Tensor, shrunk: Tensor, B: Tensor, scale: float) -> Tensor:
    """Add `scale` times what comes back from the rank, shrunk (n, T, r) B, to y (n, T, O), in place."""
    return y.baddbmm_(shrunk, B, alpha=scale)


def by_adapter(adapter: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Rows in any order: adapter (N,) of each -> the order that sorts them, and where the segments start.

    >>> by_adapter(torch.tensor([2, 0, 2]), 3)
    (tensor([1, 0, 2]), [0, 1, 1, 3])
    """
    ends = torch.bincount(adapter, minlength=count).cumsum(0)
    return torch.argsort(adapter, stable=True), [0, *ends.tolist()]


def _check(x: Tensor, A: Tensor, B: Tensor, starts: Sequence[int]) -> None:
    sizes = check(x, "N I")
    sizes = check(B, "n r O", **check(A, "n I r", I=sizes["I"]))
    ascending = all(start <= stop for start, stop in zip(starts, starts[1:]))
    if len(starts) != sizes["n"] + 1 or not ascending or starts[0] != 0 or starts[-1] != len(x):
        raise ValueError(f"starts must ascend from 0 to {len(x)} with {sizes['n']} segments, got {list(starts)}")
