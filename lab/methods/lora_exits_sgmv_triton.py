"""The product of SGMV on a GPU: x[s_i : s_{i+1}] W_i for all segments in one launch, whatever their lengths.

Source: the shrink and expand kernels of Punica (Chen et al. 2023), which are this product twice: A, then B. A program
computes ROWS x COLUMNS of the output for one segment, and ends at once if its segment has no such rows.

It passes its tests in Triton's interpreter and on an H200; export/gpu.md has its times.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 64  # the smallest tile of a tensor core, and two cache lines of float32


@triton.jit
def kernel(x, W, y, starts, I, O, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: E741 - I inputs, O outputs
    """One block of y: rows of segment program_id(2), all tensors contiguous, sums in float32."""
    segment = tl.program_id(2)
    stop = tl.load(starts + segment + 1)
    first_row = tl.load(starts + segment) + tl.program_id(0) * ROWS
    if first_row < stop:
        rows, columns = first_row + tl.arange(0, ROWS)[:, None], tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, I, COLUMNS):  # x W in blocks of the inner dimension
            inner = begin + tl.arange(0, COLUMNS)
            left = tl.load(x + rows * I + inner, mask=(rows < stop) & (inner < I), other=0.0)
            weights = W + (segment * I + inner[:, None]) * O + columns
            right = tl.load(weights, mask=(inner[:, None] < I) & (columns < O), other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(y + rows * O + columns, total.to(y.dtype.element_ty), mask=(rows < stop) & (columns < O))


class _SegmentedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, starts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, W)
        ctx.starts = starts
        return _launch(x, W, starts)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, W = ctx.saved_tensors
        segments = zip(ctx.starts, ctx.starts[1:])
        dW = torch.stack([x[start:stop].T @ dy[start:stop] for start, stop in segments])
        return _launch(dy, W.transpose(1, 2), ctx.starts), dW, None


def _launch(x: Tensor, W: Tensor, starts: tuple[int, ...]) -> Tensor:
    x, W, (n, inputs, outputs) = x.contiguous(), W.contiguous(), W.shape
    y = x.new_empty(len(x), outputs)
    longest = max(stop - start for start, stop in zip(starts, starts[1:]))
    grid = triton.cdiv(longest, ROWS), triton.cdiv(outputs, COLUMNS), n
    if longest:
        kernel[grid](x, W, y, _on_device(starts, x.device), inputs, outputs, ROWS, COLUMNS)
    return y


@lru_cache(maxsize=64)
def _on_device(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: all layers of a batch have the same segments, and a copy takes as long as a product."""
    return torch.tensor(starts, dtype=torch.int32, device=device)


def segmented_product(x: Tensor, W: Tensor, starts: Sequence[int]) -> Tensor:
    """y (N, O) with y[s_i : s_{i+1}] = x[s_i : s_{i+1}] W_i. Gradients flow to x and W.

    x (N, I), W (n, I, O), starts (n + 1) from 0 to N; float32, float16 or bfloat16, summed in float32.
    """
    if torch.is_grad_enabled() and (x.requires_grad or W.requires_grad):
        return _SegmentedProduct.apply(x, W, tuple(starts))
    return _launch(x, W, tuple(starts))
