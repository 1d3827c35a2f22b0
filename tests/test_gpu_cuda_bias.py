"""The CUDA kernel's backward under a bias that is added, on a device. The forward is another kernel's."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from test_gpu_cuda import CORNERS
from test_gpu_cuda_backward import deterministic, same

import sdpa
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.context import ALL_TOGGLES, forced_text
from sdpa.dispatch.select import choose
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionProblem, Gradients, Results, read_of
from sdpa.testing import problem_of

__all__ = ["deterministic"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_flash_able")]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SIZES = ((1, 65), (65, 1), (1, 1000), (64, 65), (193, 129), (200, 1000), (1000, 200), (513, 513))
LOW = -1e4  # what models write where a key is hidden


def in_rows(bias):
    """The bias in rows that begin at multiples of 16 bytes, with NaN between them."""
    *outer, N = bias.shape
    wide = bias.new_full((*outer, (N + 15) // 8 * 8), math.nan)
    wide[..., :N] = bias
    return wide[..., :N]


def drawn(sizes, heads, dtype, bias_sizes):
    (M, N), (D, Dv), (H, Hkv) = *sizes, heads
    shapes = ((2, H, M, D), (2, Hkv, N, D), (2, Hkv, N, Dv), (2, H, M, Dv))
    q, k, v, up = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    bias = torch.randn(*bias_sizes, M, N, device="cuda", dtype=dtype)
    bias[..., 1::7, 1::3], bias[..., 2::5, ::2] = -math.inf, LOW
    return (q, k, v), up, in_rows(bias)


def passed(tensors, mask, up, grad_lse=None):
    """(gradients by the kernel, those in float64)."""
    exact = [t.double().requires_grad_() for t in tensors]
    wide = dataclasses.replace(mask, bias=mask.bias.double())
    out, lse = sdpa.scaled_dot_product_attention(*exact, wide, enable_gqa=True, return_lse=True, kernel="math")
    upstream = (up.double(), torch.zeros_like(lse) if grad_lse is None else grad_lse.double())
    wanted = torch.autograd.grad((out, lse), exact, upstream)
    results = Results(out.detach().to(up.dtype), lse.detach().float())
    inputs = build_inputs(*tensors, Options(mask, enable_gqa=True))
    problem = problem_of(inputs, "backward")
    assert not by_name()["cuda_flash"].why_not(problem)
    return by_name()["cuda_flash"].load().backward(inputs, results, Results(up, grad_lse), problem), wanted


def close(found, wanted, about):
    for name, one, other in zip("qkv", found[:3], wanted, strict=True):
        budget = 6e-3 * other.norm() + 1e-4 * other.numel() ** 0.5  # of one key all but the values' gradient is 0
        assert (one.double() - other).norm() <= budget, (name, *about)


@pytest.mark.parametrize("D, Dv", [(8, 8), (32, 32), (64, 64), (64, 40), (80, 80), (128, 128), (64, 128)])
@pytest.mark.parametrize("mask", CORNERS)
def test_lengths_that_no_tile_divides(mask, D, Dv):
    """Shared by batch entries, by heads, by both and by none; keys that the bias hides, and rows without any."""
    shapes = itertools.cycle([(1, 6), (2, 1), (1, 1), (2, 6), (1, 6)])  # each meets each of what follows
    for sizes, heads, dtype in itertools.product(SIZES, ((6, 6), (6, 2)), (BFLOAT16, FLOAT16)):
        tensors, up, bias = drawn((sizes, (D, Dv)), heads, dtype, next(shapes))
        bias[..., 3:4, :] = -math.inf  # a row that sees no key
        close(*passed(tensors, dataclasses.replace(CORNERS[mask], bias=bias), up), (sizes, heads, dtype, bias.shape))


@pytest.mark.parametrize("D", [64, 128])
def test_batch_entries_and_heads_by_strides(D):
    """Expanded ones are read once, and heads may lie inside of rows."""
    tensors, up, bias = drawn(((300, 328), (D, D)), (4, 4), BFLOAT16, (1, 4))
    inside = torch.randn(2, 300, 4, 328, device="cuda", dtype=BFLOAT16).transpose(1, 2)
    for given in (bias.expand(2, -1, -1, -1), bias[:, :1].expand(2, 4, -1, -1), inside):
        close(*passed(tensors, dataclasses.replace(CORNERS["none"], bias=given), up), (given.shape, given.stride()))


@pytest.mark.parametrize("D", [64, 128])
def test_the_gradient_of_the_log_sum_exp(D):
    tensors, up, bias = drawn(((300, 300), (D, D)), (4, 2), BFLOAT16, (1, 4))
    grad_lse = torch.randn(2, 4, 300, device="cuda")
    close(*passed(tensors, dataclasses.replace(CORNERS["causal"], bias=bias), up, grad_lse), (D,))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("offset", [-3e4, LOW, 3e4])
def test_a_bias_as_large_as_the_log_sum_exp(offset, D):
    """Weights are found from the difference of two large numbers. Every second row has the same bias everywhere, as one
    has that a model hides, and the others where it does not hide keys."""
    tensors, up, bias = drawn(((200, 264), (D, D)), (2, 2), BFLOAT16, (1, 2))
    bias = in_rows(torch.where(bias < LOW / 2, bias, offset))
    bias[..., ::2, :] = offset
    close(*passed(tensors, dataclasses.replace(CORNERS["none"], bias=bias), up), (offset, D))


@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_in_one_order(D, deterministic):
    tensors, up, bias = drawn(((700, 900), (D, D)), (4, 2), BFLOAT16, (1, 4))
    mask = dataclasses.replace(CORNERS["causal"], bias=bias)
    first, wanted = passed(tensors, mask, up)
    close(first, wanted, (D,))
    for _ in range(3):
        assert all(map(torch.equal, first[:3], passed(tensors, mask, up)[0][:3]))


@pytest.mark.parametrize("N", [256, 251])
def test_calls_are_repeated_with_other_tensors(N):
    """The library records a call, and launches it again with the new addresses; a bias of odd rows is copied."""
    tensors, up, bias = drawn(((256, N), (64, 64)), (2, 2), BFLOAT16, (1, 2))
    inputs = build_inputs(*tensors, Options(bias.contiguous()))
    out, lse = sdpa.scaled_dot_product_attention(*tensors, bias.contiguous(), return_lse=True)
    learning = (inputs, Results(out, lse), Results(up, None))
    problem = AttentionProblem.of(inputs, "backward", others=(out, lse, up))
    choice = choose(problem, forced_text("cuda_flash"), ALL_TOGGLES)
    first, again = choice.record(learning, problem, None)
    assert bool(choice.copies) == (N % 8 > 0) and again is not None
    same(first, Gradients(*again(*read_of(*learning))[:3]), sums="qkv")
    for _ in range(4):
        tensors, up, bias = drawn(((256, N), (64, 64)), (2, 2), BFLOAT16, (1, 2))
        bias = bias.contiguous()
        leaves = [t.requires_grad_() for t in tensors]
        with sdpa.sdpa_kernel(["cuda_flash", "triton_efficient"], set_priority=True):
            out = sdpa.scaled_dot_product_attention(*leaves, bias)
        found = torch.autograd.grad(out, leaves, up)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        wanted = torch.autograd.grad(
            sdpa.scaled_dot_product_attention(*exact, bias.double(), kernel="math"), exact, up.double()
        )
        close(found, wanted, (N,))


def test_what_is_refused():
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=BFLOAT16)
    wide = torch.randn(2, 4, 128, 192, device="cuda", dtype=BFLOAT16)

    def reasons(tensor, bias, direction="backward", **options):
        inputs = build_inputs(
            tensor, tensor, tensor, Options(dataclasses.replace(CORNERS["none"], bias=bias, **options))
        )
        return " ".join(by_name()["cuda_flash"].why_not(problem_of(inputs, direction)))

    bias = torch.randn(1, 4, 128, 128, device="cuda", dtype=BFLOAT16)
    assert reasons(q, bias) == ""
    assert "in the backward only" in reasons(q, bias, "forward")
    assert "up to head size 128, got 192" in reasons(wide, bias)
    assert "bias in the query's dtype" in reasons(q, bias.float())
    assert "repeats along them" in reasons(q, bias[:, :, :1])
    assert "got a window" in reasons(q, bias, window=(3, 3))
    assert "got k_lengths" in reasons(q, bias, lengths=torch.tensor([3, 4], device="cuda"))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_sanitized(mask, D):
    """`make gpu-sanitize` runs these under compute-sanitizer."""
    tensors, up, bias = drawn(((200, 331), (D, D)), (4, 2), BFLOAT16, (1, 4))
    close(*passed(tensors, dataclasses.replace(CORNERS[mask], bias=bias), up), (mask, D))
