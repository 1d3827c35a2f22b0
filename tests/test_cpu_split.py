"""Forwards in float16 by AMX, which multiplies each number as a sum of two in bfloat16.

Every kind of mask, odd sizes, what is not finite, and for which problems it is done.
"""

from __future__ import annotations

import pytest
import torch
from cpu_cases import Case, Sizes, check_forward, lay_out, make, run_forward
from test_cpu_flash import FEATURES, STRUCTURED
from torch import Tensor

from sdpa.kernels.cpu import library
from sdpa.problem import AttentionInputs, Results, Tile

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)

# Large enough to be split, and otherwise as test_cpu_flash has them.
S = Sizes(D=64, Dv=40)
SHAPES = [
    Sizes(1, 1, 1, 64, 64, 64, 64),
    Sizes(1, 2, 1, 257, 193, 16, 48),
    Sizes(1, 4, 2, 97, 65, 80, 80),
    Sizes(2, 6, 3, 31, 129, 72, 33),
    Sizes(1, 8, 1, 16, 321, 40, 8),
    Sizes(1, 2, 2, 1030, 70, 24, 24),
    Sizes(1, 2, 2, 33, 1100, 128, 160),
    Sizes(1, 1, 1, 20, 100, 256, 256),
]  # fmt: skip


def without(isa: str, inputs: AttentionInputs) -> Results:
    """The results of the same library's float16 products in float32."""
    library.set_isa("avx512bf16")
    try:
        return run_forward(inputs)
    finally:
        library.set_isa(isa)


def same_bits(found: Results, wanted: Results) -> bool:
    assert found.lse is not None and wanted.lse is not None
    pairs = ((found.out, wanted.out, torch.int16), (found.lse, wanted.lse, torch.int32))
    return all(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)) for a, b, kind in pairs)


@pytest.mark.parametrize("name", FEATURES)
def test_features(isa, name):
    torch.manual_seed(1)
    check_forward(make(Case(S, FEATURES[name]()), torch.float16))


@pytest.mark.parametrize("right", [-1, 0, 5])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_sizes(isa, sizes, right):
    check_forward(make(Case(sizes, {"right": right}), torch.float16))


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(48, 32), Tile(40, 80), Tile(512, 512)], ids=str)
def test_tiles(isa, tile):
    check_forward(make(Case(Sizes(M=150, N=200, D=40), {"left": 90, "right": 20}), torch.float16), tile)


@pytest.mark.parametrize("kind", ["bmhd", "strided", "transposed", "unaligned", "expanded"])
def test_memory_layouts(isa, kind):
    inputs = make(Case(S, {"right": 0}), torch.float16)
    q, k, v = (lay_out(t, kind) for t in inputs[:3])
    check_forward(inputs._replace(q=q, k=k, v=v))


@pytest.mark.parametrize("largest", [65504.0, 1.0, 6e-8])
def test_the_range_of_float16(isa, largest):
    """Its largest numbers, and subnormal ones. Scores are brought near 1."""
    torch.manual_seed(2)
    q, k = ((torch.rand(1, 2, n, 64) * 2 - 1) * largest for n in (70, 90))
    v = (torch.rand(1, 2, 90, 64) * 2 - 1) * min(largest * 4, 65504.0)
    check_forward(AttentionInputs(q.half(), k.half(), v.half(), 0.1 / largest**2))


def test_threads_give_the_same_bits(isa):
    inputs = make(Case(Sizes(B=3, M=100, N=300, D=64), {"right": 0}), torch.float16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(run_forward(inputs))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*found)


BY_SIZE = {
    "a tile of rows": (Sizes(1, 1, 1, 64, 64, 64, 64), True),
    "heads that share keys": (Sizes(1, 8, 1, 16, 64, 40, 40), True),
    "few rows": (Sizes(1, 8, 1, 15, 256, 64, 64), False),
    "few values": (Sizes(1, 1, 1, 63, 256, 64, 64), False),
    "few keys": (Sizes(1, 1, 1, 256, 63, 64, 64), False),
    "one query": (Sizes(1, 8, 1, 1, 1024, 64, 64), False),
}


@pytest.mark.skipif("amx" not in library.isas(), reason="no AMX here; test_amx.py runs this with emulated tiles")
@pytest.mark.parametrize("name", BY_SIZE)
def test_which_sizes_amx_splits(name):
    """By the last bits of the log-sum-exp, whose sums are other ones."""
    sizes, expected = BY_SIZE[name]
    inputs, before = make(Case(sizes), torch.float16), library.isa()
    library.set_isa("amx")
    try:
        assert same_bits(run_forward(inputs), without("amx", inputs)) is not expected
    finally:
        library.set_isa(before)


def poisoned(tensor: Tensor, poison: float, row: int) -> Tensor:
    found = tensor.clone()
    found[:, :, row, 3] = poison
    return found


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", "qkv")
def test_what_is_not_finite_is_not_split(isa, name, poison):
    """A part of infinity is NaN, where the number's own products are infinite. So those are computed."""
    inputs = make(Case(S, {"right": 0}), torch.float16)
    inputs = inputs._replace(**{name: poisoned(getattr(inputs, name), poison, 30)})
    found = run_forward(inputs)
    assert not found.out[:, :, 30:].isfinite().all() and found.out[:, :, :30].isfinite().all()
    if isa == "amx":
        assert same_bits(found, without(isa, inputs))


@pytest.mark.parametrize("name", STRUCTURED)
def test_hidden_values_do_not_leak(isa, name):
    """Zeros times what a mask hides are zeros: that is finite, or nothing is split."""
    features = {n: t.int() if isinstance(t, Tensor) and n != "allowed" else t for n, t in STRUCTURED[name].items()}
    inputs = make(Case(S, features), torch.float16)
    check_forward(inputs)
    huge = inputs._replace(v=torch.where(torch.rand_like(inputs.v.float()) < 0.5, 65504.0, -65504.0).half())
    assert run_forward(huge).out.isfinite().all()
