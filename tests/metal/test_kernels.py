"""Every kernel of Metal in the emulator, forward and backward, against float64 within the usual budget."""

from __future__ import annotations

import pytest
import torch
from metal import emulator
from metal.mutation_cases import of_lse, sparse_memory

from sdpa import Mask
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.metal import flash, source
from sdpa.problem import AttentionProblem, Results, Tile
from sdpa.reference import attention as reference
from sdpa.testing import (
    MASKS,
    Case,
    Draw,
    check_inputs,
    check_kernel,
    compare_weights,
    lse_of,
    make_inputs,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
# Two groups of sizes, neither a multiple of a tile; the second has odd head sizes, which are loaded one by one.
WIDE = {"Hkv": 1, "H": 2, "M": 37, "N": 53, "D": 24, "Dv": 24}
TALL = {"Hkv": 2, "H": 4, "M": 35, "N": 32, "D": 19, "Dv": 40, "layout": "bmhd", "dtype": torch.float16}


def right(case, seed=0):
    holds(check_kernel("metal_flash", case, seed), case)


def holds(found, about):
    assert all(c.ok for c in found), f"{about}: " + "; ".join(str(c) for c in found if not c.ok)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    right(Case(**WIDE, mask=mask))


@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_half_precision(mask):
    right(Case(**TALL, mask=mask), seed=1)


@dtypes
@pytest.mark.parametrize("sizes", [(8, 8), (5, 3), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_sizes(sizes, dtype):
    D, Dv = sizes
    right(Case(B=1, H=2, Hkv=1, M=40, N=70, D=D, Dv=Dv, mask="causal", dtype=dtype))


@dtypes
@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 33), (8, 8), (9, 31), (33, 1), (64, 96), (31, 129)])
def test_lengths_beside_tiles(M, N, dtype):
    right(Case(B=1, H=2, Hkv=2, M=M, N=N, D=16, Dv=16, dtype=dtype))


EXTRAS = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "sinks_lengths": {"sinks": True, "mask": "both_lengths"},
    "dropout": {"dropout_p": 0.3},
    "dropout_of_all": {"dropout_p": 1.0},
    "everything": {"dropout_p": 0.3, "mask": "bias_causal", "sinks": True, "softcap": 2.0, "requires_bias_grad": True},
    "negative_scale": {"scale": -0.5, "mask": "causal"},
    "expanded": {"layout": "expanded"},
    "strided_rows": {"layout": "bmhd"},
}


@pytest.mark.parametrize("M", [3, 40], ids=["few", "many"])
@pytest.mark.parametrize("name", EXTRAS)
def test_extras(name, M):
    right(Case(Hkv=2, M=M, **EXTRAS[name]), seed=2)


@pytest.mark.parametrize("mask", ["bias", "bias_rows", "bias_float32", "bias_causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_of_a_bias(mask, dtype):
    """Bias of one row, of one batch entry, of every head, in two dtypes."""
    right(Case(Hkv=2, mask=mask, requires_bias_grad=True, M=70, N=45, dtype=dtype))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 40, 1), (1, 4, 1, 45), (2, 4, 1, 1)], ids=str)
def test_gradient_of_a_bias_that_repeats(shape):
    draw = Draw(Case(), 3)
    q, k, v = draw.normal(2, 4, 40, 16), draw.normal(2, 4, 45, 16), draw.normal(2, 4, 45, 16)
    inputs = build_inputs(q, k, v, Options(Mask(bias=draw.normal(*shape))))
    holds(check_inputs("metal_flash", inputs, draw.normal(2, 4, 40, 16), True), shape)


# Bounds one before, at and one behind the ends of tiles of 32.
NEAR = torch.tensor([31, 32, 33])
EDGES = {
    **{f"window_{a}_{b}": (96, Mask(window=(a, b))) for a, b in ((30, 32), (31, 31), (32, 30), (33, 29))},
    **{f"diagonal_{n}": (96 + n, Mask(causal=True, align="bottom_right")) for n in (-33, -32, -31, -1, 1, 31, 32)},
    "lengths": (96, Mask(lengths=NEAR + 32, query_lengths=NEAR)),
    "lengths_causal": (96, Mask(lengths=NEAR, query_lengths=NEAR.flip(0), causal=True, align="bottom_right")),
    "prefix": (96, Mask(causal=True, prefix=NEAR)),
    "prefix_window": (96, Mask(window=(31, 0), prefix=NEAR)),
    "segments": (96, Mask(segments=(torch.arange(96) >= NEAR[:, None]) + (torch.arange(96) >= 64).int())),
    "padding": (96, Mask(allowed=torch.arange(96) < 32 + NEAR.view(3, 1, 1, 1))),
}


@pytest.mark.parametrize("name", EDGES)
def test_bounds_at_the_ends_of_tiles(name):
    N, mask = EDGES[name]
    draw = Draw(Case(), 9)
    q, k, v = draw.normal(3, 1, 96, 16), draw.normal(3, 1, N, 16), draw.normal(3, 1, N, 16)
    holds(check_inputs("metal_flash", build_inputs(q, k, v, Options(mask)), draw.normal(3, 1, 96, 16)), name)


@pytest.mark.parametrize("rows", [40, 1])
def test_a_mask_whose_neighbours_are_apart_in_memory(rows):
    inputs = sparse_memory(rows)
    assert inputs.allowed is not None and inputs.allowed.stride(3) == 2
    holds(check_inputs("metal_flash", inputs, torch.ones_like(inputs.q), True), "allowed")


DECODE = {
    "one_query": {"H": 8, "Hkv": 1, "M": 1, "N": 3000, "dtype": torch.float16},
    "lengths": {"H": 8, "Hkv": 2, "M": 4, "N": 1500, "mask": "lengths"},
    "sinks_window": {"H": 2, "Hkv": 2, "M": 9, "N": 1500, "mask": "window_bottom_right", "sinks": True},
    "many_rows": {"H": 6, "Hkv": 2, "M": 17, "N": 700, "mask": "causal_bottom_right"},
    "bias": {"H": 4, "Hkv": 1, "M": 3, "N": 900, "mask": "bias_rows", "dropout_p": 0.2},
}


@pytest.mark.parametrize("name", DECODE)
def test_few_queries(name):
    """Heads of a group in one threadgroup, and keys split among threadgroups."""
    case = Case(**DECODE[name])
    p = AttentionProblem.of(make_inputs(case))
    assert flash.splits_of(p, 1) > 1 and flash.is_grouped(p) == (case.H != case.Hkv)
    right(case)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "segments", "allowed_heads", "bias", "prefix"])
def test_weights(mask, average):
    inputs = make_inputs(Case(Hkv=2, mask=mask, M=37, N=70, softcap=2.0, dropout_p=0.2, dtype=torch.float16))
    extra = frozenset({"averaged"} if average else ())
    lse = lse_of(reference(inputs)).float()
    got = flash.weights(inputs, lse, AttentionProblem.of(inputs, "weights", extra))
    found = compare_weights(got, inputs, average)
    assert found.ok, str(found)


def test_a_gradient_that_arrives_at_the_log_sum_exp():
    holds(of_lse(), "log-sum-exp")


TILES = source.fitting("backward_q", torch.float16, 16, 16, 100)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, monkeypatch):
    """Is right in every kernel, and gives the same bits twice."""
    monkeypatch.setattr(source, "BLOCKS", (tile[:2],))
    case = Case(Hkv=2, M=40, N=50, D=16, Dv=16, mask="causal", dtype=torch.float16)
    right(case)
    inputs, grad_out = make_inputs(case), Draw(case, 1).normal(2, 4, 40, 16)
    forward, backward = (AttentionProblem.of(inputs, d, frozenset({"lse"})) for d in ("forward", "backward"))
    results = flash.forward(inputs, forward)
    pair = [flash.backward(inputs, results, Results(grad_out, None), backward)[:3] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


@dtypes
@pytest.mark.parametrize("D", [8, 64, 80, 128, 192, 256])
def test_tiles_fit_threadgroup_memory(D, dtype):
    """As the emulator counts it in every kernel, which is what `memory_of` says."""
    case = Case(B=1, H=1, Hkv=1, M=40, N=40, D=D, Dv=D, dtype=dtype, mask="bias", requires_bias_grad=True)
    inputs = make_inputs(case)
    emulator.traffic()
    right(case)
    lse = lse_of(reference(inputs)).float()
    flash.weights(inputs, lse, AttentionProblem.of(inputs, "weights"))
    found = {record.kernel: record.threadgroup_bytes for record in emulator.traffic()}
    for kernel in ("forward", "backward_q", "backward_kv", "bias_grad", "row_base", "weights"):
        told = source.memory_of(kernel, dtype, D, D, source.fitting(kernel, dtype, D, D, 40)[0])
        assert found[kernel] == told <= source.MAX_THREADGROUP_BYTES


def test_a_tile_that_does_not_fit_is_not_taken():
    """32 x 32 is offered for other head sizes and dtypes."""
    problem = AttentionProblem.of(make_inputs(Case(D=256, Dv=256)))
    assert flash.chosen("forward", problem, 100, Tile(32, 32))[:2] == (16, 8)
    half = AttentionProblem.of(make_inputs(Case(D=64, Dv=64, dtype=torch.float16)))
    assert flash.chosen("forward", half, 100, Tile(32, 32))[:2] == (32, 32)


# Numbers that hide, as masks of the lowest one: a row may hold nothing else.
@pytest.mark.parametrize("floor", [torch.finfo(torch.float32).min, -1e9, -3e4])
@pytest.mark.parametrize("N", [9, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_finite_biases_that_hide(N, floor, dtype):
    draw = Draw(Case(dtype=dtype), 4)
    q, k, v = draw.normal(1, 4, 3, 16), draw.normal(1, 2, N, 16), draw.normal(1, 2, N, 16)
    bias = torch.zeros(1, 1, 3, N)
    bias[:, :, 1], bias[:, :, 2, ::2] = floor, floor
    inputs = build_inputs(q, k, v, Options(Mask(bias=bias), enable_gqa=True))
    holds(check_inputs("metal_flash", inputs, draw.normal(1, 4, 3, 16), True), (N, floor))
    got = flash.weights(inputs, lse_of(reference(inputs)).float(), AttentionProblem.of(inputs, "weights"))
    found = compare_weights(got, inputs, False)
    assert found.ok, str(found)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)], ids=str)
def test_empty_head_sizes(sizes):
    D, Dv = sizes
    right(Case(D=D, Dv=Dv))
