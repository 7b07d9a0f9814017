"""SGMV (LoRAExit, Eq. 6) for segments of equal and, by the core, of unequal lengths, against a loop over rows."""

import numpy as np
import pytest
import torch
from method_cases import SEGMENTS, segments_of, zeros

from mini_ee.lab.methods.lora_exits_sgmv import sgmv

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}  # at most 2e-5, ...


def by_hand(x, A, B, starts):
    """Gather, row by row, in float64."""
    adapter = np.repeat(np.arange(len(A)), np.diff(starts))
    x, A, B = (value.double().numpy() for value in (x, A, B))
    rows = [x[row] @ A[i] @ B[i] for row, i in enumerate(adapter)]
    return np.array(rows).reshape(len(x), B.shape[2])


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
def test_it_adds_in_place_to_the_columns_that_it_is_given(lengths):
    x, A, B, starts = segments_of(lengths)
    wide = torch.randn(len(x), 30, dtype=x.dtype)
    expected = wide.clone()
    expected[:, 10:20] += 0.5 * torch.from_numpy(by_hand(x, A, B, starts))
    y = sgmv(wide[:, 10:20], x, A, B, starts, scale=0.5)
    torch.testing.assert_close(wide, expected)
    assert y.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()


@pytest.mark.parametrize("lengths", [lengths for lengths in SEGMENTS.values() if sum(lengths)])
def test_it_is_one_product_of_all_adapters_side_by_side_under_a_block_mask(lengths):
    x, A, B, starts = segments_of(lengths, rank=3)
    mask = torch.repeat_interleave(torch.eye(len(A), dtype=x.dtype), torch.tensor(lengths), dim=0)  # (N, n)
    shrunk = x @ A.permute(1, 0, 2).flatten(1) * mask.repeat_interleave(3, dim=1)
    torch.testing.assert_close(sgmv(zeros(x, B), x, A, B, starts), shrunk @ B.flatten(0, 1))


@pytest.mark.parametrize("rank", [1, 2, 8, 64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [[4, 4], [3, 6], [20, 20], [40, 3]])
def test_every_rank_and_type(lengths, dtype, rank):
    x, A, B, starts = segments_of(lengths, rank, inputs=16, dtype=dtype)
    x, A = x / 4, A / rank**0.5
    y = sgmv(zeros(x, B), x, A, B, starts)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.double().numpy(), by_hand(x, A, B, starts), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [SEGMENTS["equal"], SEGMENTS["ragged"], SEGMENTS["empty first"], [17, 2]])
def test_gradients_are_those_of_the_definition(lengths):
    *tensors, starts = segments_of(lengths, 2)
    y = torch.randn(sum(lengths), 10, dtype=torch.float64)
    arguments = [tensor.requires_grad_() for tensor in (y, *tensors)]
    assert torch.autograd.gradcheck(lambda y, *rest: sgmv(y.clone(), *rest, starts, 0.5), arguments)
