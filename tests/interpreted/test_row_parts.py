"""float32 backwards of float16 parts in memory: within float32's budget, whatever the sizes of rows."""

from __future__ import annotations

import pytest
import torch

from sdpa.inputs import Options
from sdpa.kernels.triton import backward, row_parts, tiles
from sdpa.kernels.triton.launch import run
from sdpa.kernels.triton.target import assume
from sdpa.problem import Results, Tile
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Case, Draw, differentiate, make_inputs, problem_of

SIZES = {"B": 2, "H": 2, "Hkv": 1, "M": 35, "N": 45, "D": 20, "Dv": 24, "dtype": torch.float32}
SMALL = Tile(16, 16, 4, 1)


@pytest.mark.parametrize("mask", ["none", "causal", "bias", "padding", "segments", "both_lengths", "alibi"])
def test_masks(mask, judge, target):
    judge(make_inputs(Case(**SIZES, mask=mask)), target=target, bias_grad=mask == "bias", float32="parts")


@pytest.mark.parametrize("mask", ["none", "causal", "bias", "lengths"])
def test_amd_takes_no_parts(mask, judge, targets):
    """Its kernels multiply float32 itself, by its sizes in passes over keys and over queries."""
    hip = targets[1]._replace(backend="hip")
    judge(make_inputs(Case(**SIZES, mask=mask)), target=hip, bias_grad=mask == "bias", float32="whole")


def test_one_part_is_as_exact_as_tf32(run_family, targets):
    """Operands rounded to 11 bits are off by 2^-12 each, in products of which several follow one another."""
    inputs = make_inputs(Case(**SIZES | {"N": 70}, mask="causal"))
    upstream = torch.randn(2, 2, 35, 24, generator=torch.Generator().manual_seed(3))
    results = run_family(inputs, Results(upstream, None), target=targets[0]).results
    with assume(targets[0]):
        problem = problem_of(inputs, "backward")._replace(tf32=True)
        grads = backward.backward(inputs, results, Results(upstream, None), problem, SMALL)
    wanted = differentiate(inputs, upstream, torch.float64)[1]
    for got, right in zip(grads[:3], wanted[:3], strict=True):
        assert 1e-5 < (got - right).norm() / right.norm() < 2.0**-10


@pytest.mark.parametrize("tile", [Tile(32, 16, 4, 1), Tile(32, 64, 1, 1)], ids=str)
def test_tiles_of_one_launch_and_of_two(tile, judge, targets):
    inputs = make_inputs(Case(**SIZES | {"D": 72, "Dv": 72}, dropout_p=0.2))
    with assume(targets[0]):
        assert tiles.is_split(problem_of(inputs, "backward"), tile) == (tile.num_warps == 1)
    judge(inputs, tile=tile, target=targets[0], float32="parts")


def test_packed_sequences(judge, targets):
    draw, cu = Draw(Case(**SIZES), 0), torch.tensor([0, 7, 45], dtype=torch.int32)
    q, k, v = (draw.normal(45, heads, 24) for heads in (2, 1, 1))
    inputs = build_packed(q, k, v, Documents(cu, cu, 38, 38), Options(is_causal=True, enable_gqa=True))
    judge(inputs, target=targets[0], float32="parts")


def of_rows(factors, tensor):
    """The tensor with each row times a factor, in turns."""
    return tensor * torch.tensor(factors, dtype=torch.float64).repeat(tensor.shape[2])[: tensor.shape[2], None].float()


@pytest.mark.parametrize("name", ["grad_out", "v", "k", "q"])
def test_rows_of_any_size_keep_their_digits(name, run_family, targets):
    """float16 holds 2^-24 to 2^16. The gradient of each row of q is as exact as float32's own products have it, where
    gradients of the output differ by 2^120; q, k and v may be as small, or as large, as others allow."""
    inputs = make_inputs(Case(**SIZES))
    out = inputs.q.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    if name == "grad_out":
        upstream = of_rows((2.0**60, 1.0, 2.0**-60), upstream)
    else:
        inputs = inputs._replace(**{name: of_rows((2.0**-40, 1.0), getattr(inputs, name))})
    got = run_family(inputs, Results(upstream, None), target=targets[0], float32="parts").grads
    wanted, plain = (differentiate(inputs, upstream, dtype)[1] for dtype in (torch.float64, torch.float32))
    size = wanted.q.norm(dim=-1)
    error, plain_error = ((grads.q.double() - wanted.q).norm(dim=-1) / size for grads in (got, plain))
    assert error.max() < 4 * plain_error.max() and plain_error.max() < 1e-5
    for found, right in ((got.k, wanted.k), (got.v, wanted.v)):
        assert (found.double() - right).norm() < 3e-6 * right.norm()


@pytest.mark.parametrize("parts,bits", [(1, 11), (2, 22)])
def test_parts_hold_what_they_say(parts, bits, targets):
    """Each number to so many bits, or to 2^-39 of its row's largest; units are powers of two, and pads are 0."""
    exponents = torch.linspace(-40, 0, 20).exp2()
    rows = [of_rows((1e-30, 1.0, 3e37, 0.0), torch.rand(2, 3, 37, size) + 0.5) for size in (20, 20, 24, 24)]
    rows[0] = rows[0] * exponents
    problem = problem_of(make_inputs(Case(**SIZES)), "backward")
    with assume(targets[0]):
        split, launch = row_parts.split_launch(tuple(rows), parts)
        run([launch], problem)
    for given, found, unit in zip(rows, split[:4], split.units, strict=True):
        size = given.shape[3]
        made = found.view(2, parts, 3, 37, -1).double()
        whole = (made.sum(1) if parts == 2 else made[:, 0])[..., :size] * unit[..., None].double()
        allowed = torch.maximum(given.double() * 2.0**-bits, given.double().amax(-1, keepdim=True) * 2.0**-39)
        assert ((whole - given.double()).abs() <= allowed).all()
        assert (torch.frexp(unit)[0] == 0.5).all() and not made[..., size:].any()


def test_what_is_not_finite_stays_so(run_family, targets):
    """A gradient that is not finite makes its own row's gradient NaN, and no other's."""
    inputs = make_inputs(Case(**SIZES))
    upstream = torch.randn(2, 2, 35, 24, generator=torch.Generator().manual_seed(3))
    upstream[0, 1, 5, 3] = float("inf")
    grads = run_family(inputs, Results(upstream, None), target=targets[0], float32="parts").grads
    bad = grads.q.isfinite().logical_not().any(-1)
    assert bad[0, 1, 5] and bad.sum() == 1


def test_which_backwards_read_parts(targets):
    longer = SIZES | {"N": 70}
    problem = problem_of(make_inputs(Case(**longer)), "backward")
    for target, dtype, expected in (
        (targets[0], torch.float32, True),
        (targets[0], torch.float16, False),
        (targets[0]._replace(backend="hip"), torch.float32, False),
    ):
        inputs = make_inputs(Case(**longer | {"dtype": dtype}))
        out = inputs.q.new_empty(*inputs.q.shape[:3], 24)
        with assume(target):
            asked = problem._replace(dtype=dtype)
            rest = Results(out, torch.empty(out.shape[:3])), Results(torch.empty_like(out), None)
            launches = backward.backward_launches(inputs, *rest, asked, tiles.tiles(asked)[0]).launches
        assert any(launch.kernel is row_parts.split_kernel for launch in launches) == expected
