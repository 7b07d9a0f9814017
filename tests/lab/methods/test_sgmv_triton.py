"""SGMV's kernel against the definition: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="torch's build for CUDA brings triton; `pip install triton` runs it without a GPU")

from conftest import lora_model, tensors  # noqa: E402
from method_cases import SEGMENTS, each_exit_alone, segments_of, zeros  # noqa: E402

import mini_ee.lab.methods.lora_exits_sgmv_triton as sgmv_triton
import mini_ee.lora_exits as paper
from mini_ee.lab.methods.lora_exits_sgmv_triton import segmented_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"small": (12, 10), "beyond a block": (70, 130)}
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def shrink_and_expand(x, A, B, starts):
    return segmented_product(segmented_product(x, A, starts), B, starts)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("lengths", [*SEGMENTS.values(), [40, 0, 17]], ids=[*SEGMENTS, "beyond a block"])
@pytest.mark.parametrize("rank", [1, 8, 128])
def test_the_kernel_twice_equals_the_loop(lengths, sizes, rank):
    x, A, B, starts = segments_of(lengths, rank, *sizes, dtype=torch.float32)
    y = shrink_and_expand(x.to(DEVICE), A.to(DEVICE) / rank**0.5, B.to(DEVICE), starts).cpu()
    torch.testing.assert_close(y, paper.sgmv(zeros(x, B), x, A / rank**0.5, B, starts), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_summed_in_float32(dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of a bfloat16 as a whole number")
    x, A, _, starts = segments_of([3, 20], dtype=dtype)
    exact = torch.cat([x[:3].double() @ A[0].double(), x[3:].double() @ A[1].double()])
    y = segmented_product(x.to(DEVICE), A.to(DEVICE), starts)
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu().double(), exact.to(dtype).double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 20, 3], [0, 4, 2]])
def test_gradients_are_those_of_the_loop(lengths):
    *tensors, starts = segments_of(lengths, dtype=torch.float32)
    on_device, expected = ([part.clone().to(device).requires_grad_() for part in tensors] for device in (DEVICE, "cpu"))
    weights = torch.randn(sum(lengths), 10, generator=torch.Generator().manual_seed(1))
    (shrink_and_expand(*on_device, starts) * weights.to(DEVICE)).sum().backward()
    (paper.sgmv(zeros(expected[0], expected[2]), *expected, starts) * weights).sum().backward()
    for ours, theirs in zip(on_device, expected):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_models_ragged_batch_goes_through_the_kernel(monkeypatch, padded_inputs):
    """As on a GPU; without one, the kernel is put in the place of the loop that a processor takes."""
    model, exit_of_row, launched = lora_model(), (2, 0, 1, 2, 0, 0, 2), []
    expected, launch = each_exit_alone(model, padded_inputs, exit_of_row), sgmv_triton._launch
    monkeypatch.setattr(sgmv_triton, "_launch", lambda *args: launched.append(args[2]) or launch(*args))
    if DEVICE == "cpu":

        def through_the_kernel(y, x, A, B, starts, scale):
            return y.add_(shrink_and_expand(x, A, B, starts), alpha=scale)

        monkeypatch.setattr(paper, "sgmv", through_the_kernel)
    with torch.no_grad():
        logits = model.to(DEVICE).ragged(exit_of_row, *(tensor.to(DEVICE) for tensor in tensors(padded_inputs)))
    tokens = padded_inputs.input_ids.shape[1]
    assert (0, 3 * tokens, 4 * tokens, 7 * tokens) in launched
    torch.testing.assert_close(logits.cpu(), torch.from_numpy(expected), rtol=0, atol=1e-4)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mini_ee.lab.methods.lora_exits_sgmv_triton import COLUMNS, ROWS, kernel
for capability in (80, 90):
    for number in ("fp32", "fp16", "bf16"):
        signature = dict.fromkeys(("x", "W", "y"), "*" + number) | {"starts": "*i32", "I": "i32", "O": "i32"}
        blocks = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        source = ASTSource(kernel, signature | dict.fromkeys(blocks, "constexpr"), constexprs=blocks)
        print(capability, number, len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


def test_the_kernel_compiles_for_an_a100_and_an_h100(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 6
