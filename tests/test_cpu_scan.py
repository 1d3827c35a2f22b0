"""The scan that decides whether products of pairs may meet hidden keys misses nothing, wherever and however it lies."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from cpu_cases import Case, Sizes, compare, expect, lay_out, lengths, make, random, run_forward
from torch import Tensor

from sdpa.kernels.cpu import flash, library
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results
from sdpa.reference import attention

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)

PAIRED = [name for name in library.isas() if name in ("amx", "avx512bf16", "neonbf16")]
if not PAIRED:
    pytest.skip("no instruction set here multiplies pairs", allow_module_level=True)
# Three parts of 256 rows, the last one not filled; more values in all than one thread scans.
SCANNED = Sizes(2, 4, 2, 604, 604, 112, 112)
# The first and the last row of a part, of the last part, and amid one: nowhere the first row of a tile.
POSITIONS = (1, 255, 256, 511, 603)
# Infinities and NaN of either sign, by their bits.
POISONS = {"inf": 0x7F80, "minus_inf": -0x80, "nan": 0x7FC0, "minus_nan": -1, "least_nan": 0x7F81}
LAYOUTS = ("contiguous", "bmhd", "strided", "transposed", "unaligned")


def head_of(position: int) -> int:
    """The first of the first batch entry, or the last of the last."""
    return 0 if position == POSITIONS[0] else -1


def spoil(tensor: Tensor, position: int, poison: str, kind: str) -> Tensor:
    """One value of one head: the last of its row."""
    values, head = tensor.clone(), head_of(position)
    values.view(torch.int16)[head, head, position, -1] = POISONS[poison]
    return values if kind == "contiguous" else lay_out(values, kind)


@pytest.fixture(autouse=True, params=PAIRED)
def paired(request):
    before = library.isa()
    library.set_isa(request.param)
    yield
    library.set_isa(before)


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request, threads_restored):
    torch.set_num_threads(request.param)


def gradients(inputs: AttentionInputs, results: Results, grad_out: Tensor) -> Gradients:
    problem = AttentionProblem.of(inputs, "backward", frozenset())
    return flash.backward(inputs, results, Results(grad_out, None), problem, None)


@pytest.fixture(scope="module")
def clean():
    inputs = make(Case(SCANNED, {"right": 0}), torch.bfloat16)
    return inputs, attention(inputs).out, attention(inputs, torch.bfloat16).out


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_values_under_a_diagonal(threads, clean, position, kind, poison):
    """Rows before it do not see it; those of its head from it on do."""
    inputs, exact, plain = clean
    out = run_forward(inputs._replace(v=spoil(inputs.v, position, poison, kind))).out
    before = (t[:, :, :position] for t in (out, exact, plain))
    expect([compare("out", *before, SCANNED.N)])
    assert not out[head_of(position), head_of(position), position:, -1].isfinite().any()


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out", "out"])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_under_a_diagonal(threads, clean, position, kind, name):
    """Of queries before it, and of keys behind a spoilt query."""
    inputs = clean[0]
    results, grad_out = run_forward(inputs), random(2, 4, SCANNED.M, SCANNED.Dv, dtype=torch.bfloat16)
    if name in ("q", "k", "v"):
        inputs = inputs._replace(**{name: spoil(getattr(inputs, name), position, "minus_nan", kind)})
    elif name == "out":
        results = results._replace(out=spoil(results.out, position, "minus_nan", kind))
    else:
        grad_out = spoil(grad_out, position, "minus_nan", kind)
    found = gradients(inputs, results, grad_out)
    assert found.q[:, :, :position].isfinite().all()
    if name not in ("k", "v"):
        assert found.q[:, :, position + 1 :].isfinite().all()
        assert all(t[:, :, position + 1 :].isfinite().all() for t in (found.k, found.v))


@lru_cache
def up_to(length: int) -> tuple[AttentionInputs, Results, Results]:
    """Inputs of so many keys, what float64 makes of them and what bfloat16 does."""
    inputs = make(Case(SCANNED, {"k_lengths": lengths(length, length)}), torch.bfloat16)
    return inputs, attention(inputs), attention(inputs, torch.bfloat16)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_behind_odd_lengths(threads, position, kind, name):
    """The first key behind the length is the second of a pair."""
    inputs, exact, plain = up_to(position)
    spoilt = inputs._replace(**{name: spoil(getattr(inputs, name), position, "nan", kind)})
    results, grad_out = run_forward(spoilt), random(2, 4, SCANNED.M, SCANNED.Dv, dtype=torch.bfloat16)
    expect([compare(n, *r, SCANNED.N) for n, *r in zip(Results._fields, results, exact, plain, strict=True)])
    found = gradients(spoilt, results, grad_out)
    assert all(t.isfinite().all() for t in (found.q, found.k, found.v))
