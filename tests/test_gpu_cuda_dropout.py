"""Dropout by the CUDA kernel on a device: gradients beside float64, the bits of every other kernel, one order.

Which pair a thread drops is tested on a CPU, by its own source (test_cuda_dropout.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import real
from test_gpu_cuda import CORNERS
from test_gpu_cuda_backward import checked, deterministic, passes, same

import sdpa
from helpers import of_part
from sdpa import philox
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.testing import Draw, problem_of

__all__ = ["deterministic"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_flash_able")]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("D", [8, 64, 96, 128])
@pytest.mark.parametrize("mask", CORNERS)
def test_lengths_that_no_tile_divides(mask, D):
    sizes, heads = ((1, 1), (64, 65), (193, 129), (200, 1000), (1000, 200), (513, 513)), ((2, 1), (6, 2))
    for (M, N), (H, Hkv), dtype, p in itertools.product(sizes, heads, (BFLOAT16, FLOAT16), (0.1, 0.6)):
        draw = Draw(real(dtype=dtype), 12)
        q, k, v = draw.normal(3, H, M, D), draw.normal(3, Hkv, N, D), draw.normal(3, Hkv, N, D)
        checked(build_inputs(q, k, v, Options(CORNERS[mask], p, enable_gqa=True)), (mask, D, M, N, H, dtype, p))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("mask", CORNERS)
def test_numbers_of_a_part_of_a_call(mask, D):
    for M, N in ((1, 65), (193, 129), (600, 1000)):
        draw = Draw(real(dtype=BFLOAT16), 12)
        q, k, v = draw.normal(3, 6, M, D), draw.normal(3, 2, N, D), draw.normal(3, 2, N, D)
        inputs = build_inputs(q, k, v, Options(CORNERS[mask], 0.3, enable_gqa=True))
        checked(of_part(inputs), (mask, D, M, N))


@pytest.mark.parametrize("D, Dv", [(128, 64), (64, 128), (40, 24)])
def test_values_of_another_head_size(D, Dv):
    q, k, v = (torch.randn(2, 3, L, W, device="cuda", dtype=BFLOAT16) for L, W in ((200, D), (331, D), (331, Dv)))
    checked(build_inputs(q, k, v, Options(None, 0.3)), (D, Dv))


@pytest.mark.parametrize("causal", [False, True], ids=["none", "causal"])
def test_pairs_of_every_block_are_those_of_every_kernel(causal):
    """Values are unit vectors, of one part of the keys after the other, so that the result is the weights."""
    B, H, M, N, D = 2, 3, 700, 600, 128
    q, k = (torch.randn(B, H, L, D, device="cuda", dtype=BFLOAT16) for L in (M, N))
    for first in range(0, N, D):
        v = torch.zeros(B, H, N, D, device="cuda", dtype=BFLOAT16)
        v[:, :, first : first + D] = torch.eye(D, device="cuda", dtype=BFLOAT16)[: N - first]
        torch.manual_seed(3)
        inputs = build_inputs(q, k, v, Options(None, 0.3, is_causal=causal))
        found = by_name()["cuda_flash"].load().forward(inputs, problem_of(inputs, "forward")).out != 0
        wanted = philox.keep_mask(inputs.rng.cpu(), 0.3, (B, H, M, N)).cuda()
        if causal:
            wanted &= torch.ones(M, N, device="cuda", dtype=torch.bool).tril()
        count = min(D, N - first)
        assert torch.equal(found[..., :count], wanted[..., first : first + count]), first


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["none", "causal"])
def test_the_gradient_of_the_log_sum_exp(causal, D):
    leaves = [torch.randn(2, 4, 333, D, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3)]
    up, rows = torch.randn_like(leaves[0]), torch.randn(2, 4, 333, device="cuda")

    def grads(kernel, dtype):
        given = [t.to(dtype) for t in leaves]
        torch.manual_seed(9)
        out, lse = sdpa.scaled_dot_product_attention(
            *given, dropout_p=0.2, is_causal=causal, return_lse=True, kernel=kernel
        )
        return torch.autograd.grad((out, lse), leaves, (up.to(dtype), rows.to(lse.dtype)))

    for found, wanted in zip(grads("cuda_flash", BFLOAT16), grads("math", torch.float64), strict=True):
        assert (found.double() - wanted.double()).norm() <= 8e-3 * wanted.double().norm()


@pytest.mark.parametrize("causal", [False, True], ids=["none", "causal"])
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_in_deterministic_mode(D, causal, deterministic):
    q, k, v = (torch.randn(2, H, L, D, device="cuda", dtype=BFLOAT16) for H, L in ((8, 1100), (2, 1000), (2, 1000)))
    inputs = build_inputs(q, k, v, Options(None, 0.1, is_causal=causal, enable_gqa=True))
    checked(inputs, (D, causal))
    up = torch.randn(2, 8, 1100, D, device="cuda", dtype=BFLOAT16)
    wanted = passes(inputs, up)
    for number in range(50):
        found = passes(inputs, up)
        assert torch.equal(found[0].out, wanted[0].out), number
        assert all(map(torch.equal, found[1][:3], wanted[1][:3])), number


@pytest.mark.parametrize("D", [64, 128])
def test_heads_whose_gradients_are_summed(D):
    """More rows of a group than kRowsToSum, under a causal mask, in many waves of work tiles."""
    q, k, v = (torch.randn(2, H, 3333, D, device="cuda", dtype=BFLOAT16) for H in (16, 4, 4))
    inputs = build_inputs(q, k, v, Options(None, 0.1, is_causal=True, enable_gqa=True))
    checked(inputs, D)


@pytest.mark.parametrize("D", [64, 128])
def test_full_size_again_and_again(D):
    q, k, v, up = (torch.randn(4, 2048 // D, 4096, D, device="cuda", dtype=BFLOAT16) for _ in range(4))
    for causal in (False, True):
        inputs = build_inputs(q, k, v, Options(None, 0.1, is_causal=causal))
        results, wanted = passes(inputs, up)
        for _ in range(20):
            again, found = passes(inputs, up)
            assert torch.equal(again.out, results.out)
            same(wanted, found)
        part = inputs._replace(**{name: getattr(inputs, name)[:1, :1] for name in ("q", "k", "v")})
        checked(part, (D, causal))
