"""Backwards of rows whose scores are all far below zero.

There exp(0 - lse) overflows, which kernels meet that pad their tiles with zeros and do not hide these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa
from sdpa.dispatch.catalog import kernels_for

SCORE = -120.0
HEADS, LATENT = (64, 64), (192, 128)  # head sizes of q and k, and of v
SIZES = ((1, 128), (1, 64), (64, 64), (64, 192), (192, 192), (100, 64), (130, 320))
# Where cuDNN is asked, too: these are none that dispatch/rules.py refuses.
SIZES += ((130, 128), (100, 72), (64, 200))
FORMS = [*product(SIZES, ("plain", "masked")), *((size, "causal") for size in SIZES if size[0] == size[1])]
WORSE = 4  # times the error of torch's operations in the same dtype


def named(device: str) -> tuple[str, ...]:
    return ("default", *(kernel.name for kernel in kernels_for(device) if "backward" in kernel.directions))


CPU = [(name, torch.float32) for name in named("cpu")]
# float16 differs from bfloat16 in kernels that are compiled for each.
GPU = [(name, torch.bfloat16) for name in named("cuda")]
GPU += [(name, torch.float16) for name in ("vendor_cudnn", "vendor_flash", "cuda_flash")]


def tensors(M: int, N: int, dtype: torch.dtype, device: str, heads: tuple[int, int]) -> list[Tensor]:
    """q, k and v. All scores are near SCORE: the first elements give it, the others are small."""
    generator = torch.Generator().manual_seed(M + 1000 * N)
    D, Dv = heads
    q, k, v = (torch.randn(1, 2, *sizes, generator=generator) for sizes in ((M, D), (N, D), (N, Dv)))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, SCORE * math.sqrt(D)
    return [t.to(device, dtype).requires_grad_() for t in (q, k, v)]


def gradients(attend: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    out = attend(*given)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad(out, given, upstream)


def check(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], form: str, device: str, heads: tuple[int, int] = HEADS
) -> None:
    given = tensors(*sizes, dtype, device, heads)
    mask = torch.ones(1, 1, *sizes, dtype=torch.bool, device=device) if form == "masked" else None
    kernel = None if name == "default" else name
    causal = form == "causal"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, kernel=kernel)

    try:
        found = gradients(attend, given)
    except sdpa.NoKernelError as error:
        assert kernel is not None  # some kernel answers
        pytest.skip(f"{name} refuses: {str(error).splitlines()[0]}")
    assert all(gradient.isfinite().all() for gradient in found)
    plain, exact = ([t.detach().cpu().to(d).requires_grad_() for t in given] for d in (dtype, torch.float64))
    with sdpa_kernel(SDPBackend.MATH):
        usual, wanted = (
            gradients(partial(F.scaled_dot_product_attention, is_causal=causal), tensors) for tensors in (plain, exact)
        )
    for got, rough, right in zip(found, usual, wanted, strict=True):
        budget = WORSE * distance(rough, right) + torch.finfo(dtype).eps
        assert distance(got, right) <= budget, (name, sizes, distance(got, right), budget)


def distance(found: Tensor, right: Tensor) -> float:
    """Of all elements but the first, which in dq and dk is a sum of terms that cancel, each much larger than it."""
    return float((found.double().cpu() - right)[..., 1:].norm() / right[..., 1:].norm())


@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), CPU, ids=str)
def test_on_a_cpu(name, dtype, sizes, form):
    check(name, dtype, sizes, form, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), GPU, ids=str)
def test_on_a_gpu(name, dtype, sizes, form):
    check(name, dtype, sizes, form, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), [one for one in GPU if one[0] in ("default", "vendor_cudnn")], ids=str)
def test_on_a_gpu_of_head_sizes_that_differ(name, dtype, sizes, form):
    check(name, dtype, sizes, form, "cuda", LATENT)
