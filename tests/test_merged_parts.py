"""The steps of a ring merged on one device as if by four ranks: results and gradients are those of one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sdpa
from sdpa import Mask, philox
from sdpa.dispatch import failure
from sdpa.dispatch.catalog import by_name, kernels_for
from sdpa.distributed import Parts
from sdpa.distributed.links import Link, Passing, pieces_of, rows_of
from sdpa.distributed.modes import Part, Random
from sdpa.distributed.ring import RingAttention, Steps, merging_launch

RANKS, LENGTH = 4, 96
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class Gradients(Link):
    """A link on which gradients of keys go to the whole of them."""

    def __init__(self, rank: int, totals: list[Tensor]) -> None:
        self.ranks, self.rank, self.sent, self.totals = RANKS, rank, 0, totals
        self.whole = ((0, totals[0].shape[2]),)
        self.steps: Any = None

    def pass_on(self, step: int, given: Any, shapes: Any) -> Passing:
        for total, (gradient,) in zip(self.totals, given, strict=True):
            taken = pieces_of(total, self.steps.taken(-step), self.whole)
            for place, piece in zip(taken, gradient.split([place.shape[2] for place in taken], 2), strict=True):
                place.add_(piece)
        return Passing([], [given[0][0].new_zeros(shape) for shape in shapes], [])


def steps_of(keys: Tensor, values: Tensor) -> type[Steps]:
    """Steps that take keys and values of the whole sequence."""

    class FromWhole(Steps):
        def begin(self, step: int, k: Tensor, v: Tensor) -> Passing:
            return Passing([], [rows_of(t, self.taken(step), ((0, t.shape[2]),)) for t in (keys, values)], [])

    return FromWhole


MASKS = {
    "none": lambda device: Mask(),
    "causal": lambda device: Mask(causal=True),
    "window": lambda device: Mask(window=(30, 5)),
    "lengths": lambda device: Mask(lengths=torch.tensor([70, 96], device=device)),
    "documents": lambda device: Mask(causal=True, cu_seqlens=torch.tensor([0, 20, 50], device=device)),
    "bias": lambda device: Mask(bias=torch.randn(1, 4, LENGTH, LENGTH, device=device)),
}


def once(tensors, mask, sinks, upstream, kernel=None, dropout_p=0.0):
    """Output, log-sum-exp and gradients of one call, in the dtype of its tensors."""
    learned = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = sdpa.scaled_dot_product_attention(
        *learned, mask, dropout_p, sinks=sinks, enable_gqa=True, return_lse=True, kernel=kernel
    )
    return (out, lse, *torch.autograd.grad(out, learned, upstream.to(out.dtype)))


def merged(tensors, mask, sinks, upstream, order, kernel=None, dropout_p=0.0, seed=None):
    """The same of four ranks, one after the other."""
    q, k, v = tensors
    whole, random = ((0, q.shape[2]),), None if seed is None else Random(seed, q.shape[1])
    parts = Parts.even(q.shape[2], RANKS) if order == "even" else Parts.zigzag(q.shape[2], RANKS)
    options = {"enable_gqa": True, "kernel": kernel, "dropout_p": dropout_p}
    totals = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v)]
    lse = torch.full(q.shape[:3], torch.nan, device=q.device, dtype=totals[0].dtype)
    out, dq = (torch.full_like(q, torch.nan) for _ in range(2))
    for rank, own in enumerate(parts.intervals):
        link = Gradients(rank, totals)
        mine = [rows_of(t, own, whole).clone().requires_grad_() for t in tensors]
        part = Part(*mine, mask, sinks, options, True, parts, parts, random)
        link.steps = steps_of(k, v)(link, part)
        found = RingAttention.apply(link.steps, *mine, mask.bias, sinks)
        gradient = torch.autograd.grad(found[0], mine[:1], rows_of(upstream, own, whole).to(q.dtype))
        rows = torch.cat([torch.arange(*interval) for interval in own]).to(q.device)
        for every, some in zip((out, lse, dq), (*found, *gradient), strict=True):
            every.index_copy_(2, rows, some.detach())
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


def able(device_type, marks=(), feature="lse"):
    """The kernels of the catalog with a forward, a backward and a feature, each with its dtypes."""
    return [
        pytest.param(device_type, kernel.name, dtype, marks=marks)
        for kernel in kernels_for(device_type)
        if {"forward", "backward"} <= set(kernel.directions) and feature in kernel.features
        for dtype in (torch.float32, torch.bfloat16)
        if dtype in kernel.dtypes
    ]


def root_mean_squares(found, exact):
    return [(one.double() - wanted).square().mean().sqrt().item() for one, wanted in zip(found, exact, strict=True)]


@pytest.mark.parametrize(("device", "kernel", "dtype"), able("cpu") + able("cuda", GPU))
def test_every_kernel(device, kernel, dtype):
    """Whether its backward takes the sums of a row from the results or not. Each rank's part of an output is rounded to
    the dtype before they are merged, and a share of a gradient is as exact as its log-sum-exp: the largest distance may
    show both, the root of the mean square neither."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, LENGTH, 64, device=device, dtype=dtype) for _ in range(3)]
    upstream = torch.randn_like(tensors[0], dtype=torch.float64)
    q, k, v = (t.double() for t in tensors)
    expected = once([q, k, v], None, None, upstream, "math")
    found = merged(tensors, Mask(), None, upstream, "even", kernel)
    allowed = [once(tensors, None, None, upstream, name) for name in (kernel, "math")]
    parts = [
        once([q, some_k, some_v], None, None, upstream, "math")[0].abs().max().item()
        for some_k, some_v in zip(k.chunk(RANKS, 2), v.chunk(RANKS, 2), strict=True)
    ]
    rounding = torch.finfo(dtype).eps / 2 * max(parts)
    shares = torch.finfo(torch.float32).eps * expected[1].abs().max().item()
    bands = (rounding, 0.0, *(shares * gradient.abs().max().item() for gradient in expected[2:]))
    for measure, more in ((distances, bands), (root_mean_squares, 5 * (0.0,))):
        measured = [measure(some, expected) for some in (found, *allowed)]
        for (error, *others), band in zip(zip(*measured, strict=True), more, strict=True):
            assert error <= 2 * max(others) + band, measured


@pytest.mark.parametrize("order", ["even", "zigzag"])
@pytest.mark.parametrize(("device", "kernel", "dtype"), able("cpu", feature="dropout") + able("cuda", GPU, "dropout"))
def test_dropout_by_every_kernel(device, kernel, dtype, order):
    """The same pairs are dropped as in one call: in float32 one other pair would show."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 128, 64, device=device, dtype=dtype) for heads in (4, 2, 2)]
    mask, upstream = Mask(causal=True), torch.randn_like(tensors[0], dtype=torch.float64)
    torch.manual_seed(1)
    expected = once([t.double() for t in tensors], mask, None, upstream, "math", 0.3)
    torch.manual_seed(1)
    found = merged(tensors, mask, None, upstream, order, kernel, 0.3, philox.next_seed(tensors[0].device))
    for one, wanted in zip(found, expected, strict=True):
        assert (one.double() - wanted).norm() <= 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize(("order", "calls"), [("zigzag", [1, 1, 1, 1]), ("even", [1, 1, 1, 0])])
def test_a_step_is_one_call_where_all_rows_see_all_keys(order, calls):
    """Under a causal mask, of the third of four ranks. A part of a call's random numbers is of one interval."""
    t, options = torch.empty(1, 2, 128, 16), {"enable_gqa": True}
    parts = Parts.even(512, RANKS) if order == "even" else Parts.zigzag(512, RANKS)
    part = Part(t, t, t, Mask(causal=True), None, options, True, parts, parts)
    link = Gradients(2, [t])
    assert [len(meetings) for meetings in Steps(link, part).plan] == calls
    dropping = part._replace(options=options | {"dropout_p": 0.5})
    assert sum(len(meetings) for meetings in Steps(link, dropping).plan) == (8 if order == "zigzag" else 3)


def test_a_kernel_that_cannot_be_started(monkeypatch, own_surroundings):
    """The next one may want whole rows, and is given the block's own results."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, LENGTH, 32) for _ in range(3)]
    upstream = torch.randn_like(tensors[0])
    expected = once([t.double() for t in tensors], None, None, upstream, "math")

    module = by_name()["cpu_flash"].load()
    own = module.record

    def record(given, problem, tile):
        if problem.direction == "backward":
            raise RuntimeError("no kernel image is available")
        return own(given, problem, tile)

    monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(failure, "FAILED", {})
    with pytest.warns(UserWarning, match="another kernel answers instead, given the block's own results"):
        found = distances(merged(tensors, Mask(), None, upstream, "even"), expected)
    assert max(found) < 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_small_share_of_large_values(device):
    """A share of e^-16 of a million is a tenth; the share of what is beside it is rounded to 1, and is not 1."""
    q, k = torch.ones(1, 1, LENGTH, 16, device=device), torch.zeros(1, 1, LENGTH, 16, device=device)
    v, bias = torch.ones_like(k), torch.zeros(LENGTH, LENGTH, device=device)
    v[:, :, -24:], bias[:, -24:] = 1e6, -16.0
    upstream = torch.ones_like(q)
    exact = once([t.double() for t in (q, k, v)], Mask(bias=bias.double()), None, upstream, "math")[0]
    for order in ("even", "zigzag"):
        out = merged((q, k, v), Mask(bias=bias), None, upstream, order)[0]
        torch.testing.assert_close(out.double(), exact, rtol=16 * torch.finfo(torch.float32).eps, atol=0.0)
    v[:, :, 0] = torch.inf
    assert merged((q, k, v), Mask(bias=bias), None, upstream, "even")[0].isposinf().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_with_a_large_log_sum_exp(device):
    """Each share of a row is as exact as its log-sum-exp: kernels that normalise such rows anew do it by block."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, LENGTH, 32, device=device) for _ in range(3)]
    mask = Mask(bias=torch.randn(LENGTH, LENGTH, device=device) - 3000.0)
    upstream, sinks = torch.randn_like(tensors[0]), torch.full((2,), -3000.0, device=device)
    exact = mask.replace(bias=mask.bias.double())
    expected = once([t.double() for t in tensors], exact, sinks.double(), upstream, "math")
    rounding = 3000.0 * torch.finfo(torch.float32).eps  # of the log-sum-exp
    found = distances(merged(tensors, mask, sinks, upstream, "even"), expected)
    # A share is off by the roundings of two log-sum-exps, of the block and of the row, and each by those of its merges.
    sizes = [1.0 if number == 1 else t.abs().max().item() for number, t in enumerate(expected)]
    for error, size in zip(found, sizes, strict=True):
        assert error <= 4 * rounding * size, (found, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_merging_by_one_launch_on_a_gpu(dtype):
    """As exact as torch's operations. A log-sum-exp that is no number stays one."""
    sums = torch.promote_types(dtype, torch.float32)
    out, lse = torch.randn(2, 3, 70, 40, device="cuda", dtype=sums), torch.randn(2, 3, 70, device="cuda", dtype=sums)
    more, more_lse = torch.randn_like(out).to(dtype), torch.randn_like(lse)
    lse[0, 0, 3], more_lse[0, 0, 3] = -torch.inf, torch.nan
    assert merging_launch("cuda:0") is not None
    shares = torch.softmax(torch.stack([lse, more_lse]).double(), 0).unsqueeze(-1)
    wanted = (shares * torch.stack([out.double(), more.double()])).sum(0), torch.logaddexp(lse, more_lse)
    merging_launch("cuda:0")(out, lse, more, more_lse)
    close = {"rtol": 4 * torch.finfo(sums).eps, "atol": 4 * torch.finfo(sums).eps, "equal_nan": True}
    for one, exact in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(one.double(), exact.double(), **close)
