"""What only the CUDA library's kernels know, on a device: every tile, order of tiles, strides, and the same bits."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from gpu_cases import real, right

import sdpa
from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.failure import LaunchError
from sdpa.inputs import Options, build_inputs
from sdpa.testing import Draw, check_inputs, problem_of

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
CORNERS = {"none": Mask(), "causal": Mask(causal=True), "bottom_right": Mask(causal=True, align="bottom_right")}


@pytest.fixture(autouse=True)
def _able():
    inputs = build_inputs(*(torch.empty(1, 1, 8, 64, device="cuda", dtype=BFLOAT16) for _ in range(3)), Options())
    reasons = by_name()["cuda_flash"].why_not(problem_of(inputs, "forward"))
    if reasons:
        pytest.skip(f"cuda_flash: {reasons[0]}")


@pytest.mark.parametrize("D", [8, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("mask", CORNERS)
def test_lengths_that_no_tile_divides(mask, D):
    """Rows that see nothing, one key more than a block, fewer heads than multiprocessors and more of them."""
    for (M, N), heads, dtype in itertools.product(
        ((1, 1), (64, 65), (193, 129), (200, 1000), (1000, 200), (513, 513)), ((2, 1), (6, 2)), (BFLOAT16, FLOAT16)
    ):
        draw = Draw(real(dtype=dtype), 12)
        q = draw.normal(3, heads[0], M, D)
        k, v = draw.normal(3, heads[1], N, D), draw.normal(3, heads[1], N, D)
        inputs = build_inputs(q, k, v, Options(CORNERS[mask], enable_gqa=True))
        right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, D, M, N, heads, dtype))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_same_bits_at_full_size(D, mask):
    """Many waves of tiles, heads in several sections: fifty times, and the last head against float64."""
    torch.manual_seed(13)
    q, k, v = (torch.randn(2, 2048 // D, 4096, D, device="cuda", dtype=BFLOAT16) for _ in range(3))
    inputs = build_inputs(q, k, v, Options(CORNERS[mask]))
    kernel, problem = by_name()["cuda_flash"].load(), problem_of(inputs, "forward")
    first = kernel.forward(inputs, problem)
    for _ in range(50):
        torch.empty_like(q).fill_(torch.nan)  # what the results are written over
        again = kernel.forward(inputs, problem)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
    last = build_inputs(*(t[-1:, -1:] for t in (q, k, v)), Options(CORNERS[mask]))
    right(check_inputs("cuda_flash", last, torch.randn_like(last.q)), (D, mask))
    assert torch.equal(kernel.forward(last, problem_of(last, "forward")).out, first.out[-1:, -1:])


def test_any_strides_the_copy_engine_follows():
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BFLOAT16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    inputs = build_inputs(q, k, v, Options(Mask(causal=True)))
    right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), "slices of one tensor")
    with sdpa.sdpa_kernel("cuda_flash"):
        out = sdpa.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous(), "the queries' order of memory"


def test_strides_it_cannot_follow_are_a_reason():
    q, k = torch.randn(1, 2, 100, 64, device="cuda", dtype=BFLOAT16), torch.randn(1, 2, 100, 65, device="cuda")
    odd = k.to(BFLOAT16)[..., :64]
    for key in (odd, q[:, :1].expand(1, 2, 100, 64)):
        problem = problem_of(build_inputs(q, key, key, Options()), "forward")
        assert any("16 bytes" in reason for reason in by_name()["cuda_flash"].why_not(problem))


def test_addresses_it_cannot_read():
    """A problem does not tell where tensors begin: another kernel answers and says so; for one asked by name, none."""
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=BFLOAT16)
    off = torch.randn(2 * 128 * 64 + 1, device="cuda", dtype=BFLOAT16)[1:].view(1, 2, 128, 64)
    wanted = sdpa.scaled_dot_product_attention(q, off, off, kernel="math")  # torch's fused kernels fault on these
    with (
        sdpa.sdpa_kernel(["cuda_flash", "triton_flash"], set_priority=True),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        found = sdpa.scaled_dot_product_attention(q, off, off)
        aligned = sdpa.scaled_dot_product_attention(q, q, q)
        assert sdpa.last_choice().kernel.name == "cuda_flash"
    assert "cuda_flash" in str(told[0].message) and "16 bytes" in str(told[0].message)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert aligned.isfinite().all()
    with pytest.raises(LaunchError, match=r"cuda_flash.*16 bytes"):
        sdpa.scaled_dot_product_attention(q, off, off, kernel="cuda_flash")


def test_nothing_but_its_own_rows_and_keys():
    """NaN all around the tensors, and huge values beyond the head size."""
    wide = torch.full((2, 3, 130, 256), torch.nan, device="cuda", dtype=BFLOAT16)
    q, k, v = (wide.clone()[:, :, 1:129, 16:96] for _ in range(3))
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    inputs = build_inputs(q, k, v, Options())
    right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), "an island")
