"""The steps of a ring merged on one device as if by four ranks: results and gradients are those of one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sdpa
from sdpa import Mask
from sdpa.distributed import Parts
from sdpa.distributed.links import Link, Passing, pieces_of, rows_of
from sdpa.distributed.modes import Part
from sdpa.distributed.ring import RingAttention, Steps, halves

RANKS, LENGTH = 4, 96
WHOLE = ((0, LENGTH),)
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class Gradients(Link):
    """A link on which gradients of keys go to the whole of them."""

    def __init__(self, rank: int, totals: list[Tensor]) -> None:
        self.ranks, self.rank, self.sent, self.totals = RANKS, rank, 0, totals
        self.steps: Any = None

    def pass_on(self, step: int, given: Any, shapes: Any) -> Passing:
        for total, pieces in zip(self.totals, halves(given), strict=True):
            for place, piece in zip(pieces_of(total, self.steps.taken(-step), WHOLE), pieces, strict=True):
                place.add_(piece)
        return Passing([], [given[0].new_zeros(shape) for shape in shapes], [])


def steps_of(keys: Tensor, values: Tensor) -> type[Steps]:
    """Steps that take keys and values of the whole sequence."""

    class FromWhole(Steps):
        def begin(self, step: int, k: Tensor, v: Tensor) -> Passing:
            return Passing([], [piece for t in (keys, values) for piece in pieces_of(t, self.taken(step), WHOLE)], [])

    return FromWhole


MASKS = {
    "none": lambda device: Mask(),
    "causal": lambda device: Mask(causal=True),
    "window": lambda device: Mask(window=(30, 5)),
    "lengths": lambda device: Mask(lengths=torch.tensor([70, 96], device=device)),
    "documents": lambda device: Mask(causal=True, cu_seqlens=torch.tensor([0, 20, 50], device=device)),
    "bias": lambda device: Mask(bias=torch.randn(1, 4, LENGTH, LENGTH, device=device)),
}


def once(tensors, mask, sinks, upstream, kernel=None):
    """Output, log-sum-exp and gradients of one call, in the dtype of its tensors."""
    learned = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = sdpa.scaled_dot_product_attention(
        *learned, mask, sinks=sinks, enable_gqa=True, return_lse=True, kernel=kernel
    )
    return (out, lse, *torch.autograd.grad(out, learned, upstream.to(out.dtype)))


def merged(tensors, mask, sinks, upstream, order):
    """The same of four ranks, one after the other."""
    q, k, v = tensors
    parts = Parts.even(LENGTH, RANKS) if order == "even" else Parts.zigzag(LENGTH, RANKS)
    totals = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v)]
    lse = torch.full(q.shape[:3], torch.nan, device=q.device, dtype=totals[0].dtype)
    out, dq = (torch.full_like(q, torch.nan) for _ in range(2))
    for rank, own in enumerate(parts.intervals):
        link = Gradients(rank, totals)
        mine = [rows_of(t, own, WHOLE).clone().requires_grad_() for t in tensors]
        part = Part(*mine, mask, sinks, {"enable_gqa": True}, True, parts, parts)
        link.steps = steps_of(k, v)(link, part)
        found = RingAttention.apply(link.steps, *mine, mask.bias, sinks)
        gradient = torch.autograd.grad(found[0], mine[:1], rows_of(upstream, own, WHOLE).to(q.dtype))
        rows = torch.cat([torch.arange(*interval) for interval in own]).to(q.device)
        for whole, some in zip((out, lse, dq), (*found, *gradient), strict=True):
            whole.index_copy_(2, rows, some.detach())
    return (out, lse, dq, *totals)


def distances(found, exact):
    return [(one.double() - wanted.double()).abs().max().item() for one, wanted in zip(found, exact, strict=True)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=GPU),
        pytest.param("cuda", torch.float32, marks=GPU),
    ],
)
@pytest.mark.parametrize("order", ["even", "zigzag"])
def test_merged_as_by_four_ranks(device, dtype, name, order):
    """The distance to float64 is at most twice that of one call in the same dtype, by the default or by torch's
    operations."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, LENGTH, 64, device=device, dtype=dtype) for heads in (4, 2, 2)]
    mask, sinks = MASKS[name](device), torch.randn(4, device=device)
    upstream = torch.randn_like(tensors[0], dtype=torch.float64)
    exact = mask if mask.bias is None else mask.replace(bias=mask.bias.double())
    expected = once([t.double() for t in tensors], exact, sinks.double(), upstream, "math")
    if dtype == torch.float64:
        mask, sinks = exact, sinks.double()
    found = distances(merged(tensors, mask, sinks, upstream, order), expected)
    allowed = [distances(once(tensors, mask, sinks, upstream, kernel), expected) for kernel in (None, "math")]
    for error, *others in zip(found, *allowed, strict=True):
        assert error <= 2 * max(others) + 1e-14, (found, allowed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_with_a_large_log_sum_exp(device):
    """Each share of a row is as exact as its log-sum-exp: kernels that normalise such rows anew do it by block."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, LENGTH, 32, device=device) for _ in range(3)]
    mask = Mask(bias=torch.randn(LENGTH, LENGTH, device=device) - 3000.0)
    upstream, sinks = torch.randn_like(tensors[0]), torch.full((2,), -3000.0, device=device)
    expected = once([t.double() for t in tensors], mask.replace(bias=mask.bias.double()), sinks.double(), upstream)
    largest = [t.abs().max().item() for t in expected]
    rounding = 3000.0 * torch.finfo(torch.float32).eps
    for error, size in zip(distances(merged(tensors, mask, sinks, upstream, "even"), expected), largest, strict=True):
        assert error <= 4 * rounding * size
