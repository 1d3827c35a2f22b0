"""The steps of a ring merged on one device as if by four ranks: results and gradients are those of one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sdpa
from sdpa import Mask
from sdpa.distributed import Parts
from sdpa.distributed.links import Link, Passing, rows_of
from sdpa.distributed.modes import Part
from sdpa.distributed.ring import RingAttention, Steps

RANKS, LENGTH = 4, 96
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class Gradients(Link):
    """A link on which gradients of keys go to the whole of them."""

    def __init__(self, rank: int, totals: list[Tensor]) -> None:
        self.ranks, self.rank, self.sent, self.totals = RANKS, rank, 0, totals
        self.steps: Any = None

    def pass_on(self, step: int, given: Any, shapes: Any) -> Passing:
        whole = ((0, LENGTH),)
        taken = self.steps.taken(-step)
        for total, gradient in zip(self.totals, given, strict=True):
            for (begin, end), part in zip(
                taken, gradient.split([b - a for a, b in taken], 2) if taken else (), strict=True
            ):
                rows_of(total, ((begin, end),), whole).add_(part)
        return Passing([], [given[0].new_zeros(shape) for shape in shapes], [])


def steps_of(keys: Tensor, values: Tensor) -> type[Steps]:
    """Steps that take keys and values of the whole sequence."""

    class FromWhole(Steps):
        def begin(self, step: int, k: Tensor, v: Tensor) -> Passing:
            whole = ((0, LENGTH),)
            return Passing([], [rows_of(t, self.taken(step), whole) for t in (keys, values)], [])

    return FromWhole


MASKS = {
    "none": lambda device: Mask(),
    "causal": lambda device: Mask(causal=True),
    "window": lambda device: Mask(window=(30, 5)),
    "lengths": lambda device: Mask(lengths=torch.tensor([70, 96], device=device)),
    "documents": lambda device: Mask(causal=True, cu_seqlens=torch.tensor([0, 20, 50], device=device)),
    "bias": lambda device: Mask(bias=torch.randn(1, 4, LENGTH, LENGTH, device=device)),
}


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
    """The distance to float64 is at most twice that of one call in the same dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    mask, sinks = MASKS[name](device), torch.randn(4, device=device)
    if mask.bias is not None and dtype == torch.float64:
        mask = mask.replace(bias=mask.bias.double())
    if dtype == torch.float64:
        sinks = sinks.double()
    learned = [t.double().requires_grad_() for t in (q, k, v)]
    exact = mask if mask.bias is None else mask.replace(bias=mask.bias.double())
    out, lse = sdpa.scaled_dot_product_attention(
        *learned, exact, sinks=sinks.double(), enable_gqa=True, return_lse=True, kernel="math"
    )
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(out, learned, upstream)

    plain = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    once, once_lse = sdpa.scaled_dot_product_attention(*plain, mask, sinks=sinks, enable_gqa=True, return_lse=True)
    alone = (once, once_lse, *torch.autograd.grad(once, plain, upstream.to(dtype)))

    parts = Parts.even(LENGTH, RANKS) if order == "even" else Parts.zigzag(LENGTH, RANKS)
    totals = [torch.zeros(t.shape, device=device, dtype=torch.promote_types(dtype, torch.float32)) for t in (k, v)]
    found, found_lse, dq = (torch.full_like(t, torch.nan) for t in (out, lse, out))
    for rank, own in enumerate(parts.intervals):
        link = Gradients(rank, totals)
        mine = [rows_of(t, own, ((0, LENGTH),)).clone().requires_grad_() for t in (q, k, v)]
        part = Part(*mine, mask, sinks, {"enable_gqa": True}, True, parts, parts)
        link.steps = steps_of(k, v)(link, part)
        one, one_lse = RingAttention.apply(link.steps, *mine, mask.bias, sinks)
        given = rows_of(upstream, own, ((0, LENGTH),)).to(dtype)
        (gradient,) = torch.autograd.grad(one, mine[:1], given)
        at = 0
        for begin, end in own:
            size = end - begin
            found[:, :, begin:end], found_lse[:, :, begin:end] = (
                one[:, :, at : at + size],
                one_lse[:, :, at : at + size],
            )
            dq[:, :, begin:end] = gradient[:, :, at : at + size]
            at += size
    for one, by_one, wanted in zip((found, found_lse, dq, *totals), alone, (out, lse, *expected), strict=True):
        error, allowed = ((t.double() - wanted.double()).abs().max().item() for t in (one, by_one))
        assert error <= 2 * allowed + 1e-14, (error, allowed)
