"""Segments in the CUDA library's kernel, on a device: ids in any order, beside every other mask that bands know."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import real, right

import sdpa
from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.testing import Draw, check_inputs, problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_flash_able")]

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SIZES = ((70, 70), (513, 300), (300, 1025), (700, 700))
FAR = (-(2**31), -1, 0, 2**31 - 1)


def forward(inputs):
    return by_name()["cuda_flash"].load().forward(inputs, problem_of(inputs, "forward"))


def int32(values):
    return torch.as_tensor(values, device="cuda").to(torch.int32)


def ids(kind, draw, B, M, N):
    """Of queries and keys: sorted documents, any order, some that nothing matches, the ends of int32, one row for all
    batch entries."""
    if kind == "shared":
        B = 1
    if kind == "far":
        far = int32(FAR)
        return tuple(far[draw.integers(0, len(FAR) - 1, B, size)] for size in (M, N))
    most = 3 if kind == "scattered" else 5
    queries, keys = (draw.integers(-1, most, B, size) for size in (M, N))
    if kind in ("documents", "shared"):
        queries, keys = queries.sort(-1).values, keys.sort(-1).values
        queries = keys if M == N else queries
    if kind == "strangers":
        queries, keys = queries.sort(-1).values, keys.sort(-1).values * 2  # odd ids have no key
    return int32(queries), int32(keys)


def masks(N):
    lengths, queries = torch.tensor([N, N // 3, 0], device="cuda"), torch.tensor([N // 2, 0, N], device="cuda")
    yield Mask()
    yield Mask(causal=True)
    yield Mask(causal=True, align="bottom_right")
    yield Mask(window=(37, 5))
    yield Mask(window=(200, 0), align="bottom_right", query_lengths=queries)
    yield Mask(lengths=lengths)
    yield Mask(causal=True, align="bottom_right", lengths=lengths, query_lengths=queries)


@pytest.mark.parametrize("D", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("kind", ["documents", "shared", "scattered", "strangers", "far"])
def test_ids_beside_other_masks(kind, D):
    for (M, N), dtype in itertools.product(SIZES, (BFLOAT16, FLOAT16)):
        draw = Draw(real(dtype=dtype), 21)
        q, k, v = draw.normal(3, 4, M, D), draw.normal(3, 2, N, D), draw.normal(3, 2, N, D)
        for mask in masks(N):
            mask = mask.replace(segments=ids(kind, draw, 3, M, N))
            inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True))
            right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, D, M, N, dtype))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("kind", ["documents", "strangers"])
def test_sinks_and_softcap(kind, D):
    """Sinks far above the scores, far below them and none, also for rows that see no key."""
    for (M, N), softcap in itertools.product(SIZES, (None, 3.0)):
        draw = Draw(real(), 22)
        q, k, v = draw.normal(3, 4, M, D) * 2, draw.normal(3, 2, N, D), draw.normal(3, 2, N, D)
        sinks = torch.tensor([0.5, -40.0, 30.0, -torch.inf], device="cuda", dtype=BFLOAT16)
        for mask in masks(N):
            mask = mask.replace(segments=ids(kind, draw, 3, M, N))
            for extra in (None, sinks):
                inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True, softcap=softcap, sinks=extra))
                right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, D, M, N, softcap, extra))


@pytest.mark.parametrize("sizes", [(1000, 33, 70), (1, 64, 40000), (1, 5000, 64), (2, 1, 1)])
def test_many_entries_and_many_blocks(sizes):
    """More blocks of keys, groups of queries or batch entries than warps that look for what they can see."""
    B, M, N = sizes
    draw = Draw(real(), 23)
    q, k, v = draw.normal(B, 2, M, 64), draw.normal(B, 2, N, 64), draw.normal(B, 2, N, 64)
    for mask in (Mask(), Mask(causal=True, align="bottom_right")):
        inputs = build_inputs(q, k, v, Options(mask.replace(segments=ids("documents", draw, B, M, N))))
        right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, sizes))


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_nothing_of_other_documents_is_loaded(D):
    """NaN in the keys and values of the first of three documents: the third one's results are as before, to the bit,
    but for rows whose group of 64 begins in the second."""
    lengths = torch.tensor([700, 500, 800], device="cuda")
    segments = int32(torch.repeat_interleave(torch.tensor([-7, 2, 40], device="cuda"), lengths))
    q, k, v = (torch.randn(2, 2, 2000, D, device="cuda", dtype=BFLOAT16) for _ in range(3))
    first = (torch.arange(2000, device="cuda") < 700)[:, None]
    for mask in (Mask(), Mask(causal=True), Mask(window=(900, 9)), Mask(lengths=torch.tensor([2000, 1400]).cuda())):
        mask = mask.replace(segments=segments)
        clean, spoilt = (
            build_inputs(q, *(t.masked_fill(first, fill) for t in (k, v)), Options(mask)) for fill in (0.0, torch.nan)
        )
        wanted, found = forward(clean), forward(spoilt)
        apart = slice(1280, None)
        assert torch.equal(wanted.out[:, :, apart], found.out[:, :, apart]) and wanted.out.isfinite().all()
        own = slice(700, None)
        assert torch.equal(wanted.lse[:, :, own], found.lse[:, :, own]), "hidden scores are none, NaN or not"


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_rows_without_a_key_are_zero_beside_nan(D):
    """All values are NaN, and every third row sees none of them."""
    stranger = torch.arange(300, device="cuda") % 3 == 0
    segments = (int32(torch.where(stranger, 77, 1)), int32(torch.ones(500)))
    q, k = (torch.randn(2, 2, size, D, device="cuda", dtype=BFLOAT16) for size in (300, 500))
    v = torch.full_like(k, torch.nan)
    for sinks, lse in ((None, -torch.inf), (torch.tensor([1.5, 1.5], device="cuda"), 1.5)):
        results = forward(build_inputs(q, k, v, Options(Mask(segments=segments), sinks=sinks)))
        assert not results.out[:, :, stranger].any() and results.out[:, :, ~stranger].isnan().all()
        torch.testing.assert_close(results.lse[:, :, stranger], torch.full((2, 2, 100), lse, device="cuda"))


def test_ids_of_any_strides():
    draw = Draw(real(), 24)
    q, k, v = (draw.normal(3, 2, 200, 64) for _ in range(3))
    wide = int32(draw.integers(0, 3, 3, 400).sort(-1).values)
    for segments in (wide[:, ::2], wide[:, 100:300], wide[:1, :200].expand(3, 200), wide[0, 7:207]):
        inputs = build_inputs(q, k, v, Options(Mask(segments=segments, causal=True)))
        right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), segments.stride())


def packed(total, average):
    """Ascending ids of documents of random lengths."""
    starts = torch.rand(total, generator=torch.Generator().manual_seed(25)) < 1 / average
    return int32(starts.cumsum(0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_the_same_bits_at_full_size(D, causal):
    """Many waves of blocks of queries, documents of a thousand tokens: again and again, and the last head against
    float64."""
    torch.manual_seed(26)
    q, k, v = (torch.randn(2, 2048 // D, 4096, D, device="cuda", dtype=BFLOAT16) for _ in range(3))
    mask = Mask(causal=causal, segments=packed(4096, 1000))
    inputs = build_inputs(q, k, v, Options(mask))
    first = forward(inputs)
    for _ in range(20):
        torch.empty_like(q).fill_(torch.nan)  # what the results are written over
        again = forward(inputs)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
    last = build_inputs(*(t[-1:, -1:] for t in (q, k, v)), Options(mask))
    right(check_inputs("cuda_flash", last, torch.randn_like(last.q)), (D, causal))
    assert torch.equal(forward(last).out, first.out[-1:, -1:])


def test_a_captured_launch_reads_the_ids_anew():
    q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=BFLOAT16) for _ in range(3))
    segments = packed(1000, 200)

    def attend():
        mask = Mask(causal=True, segments=segments)
        return sdpa.scaled_dot_product_attention(q, k, v, mask, kernel="cuda_flash")

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for other in (packed(1000, 50), segments.clone(), torch.zeros_like(segments)):
        segments.copy_(other)
        graph.replay()
        assert torch.equal(captured, attend())


def test_segments_in_training():
    """Through the front door; the gradient is another kernel's."""
    q, k, v = (torch.randn(2, 4, 600, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    found = []
    for kernel in ("cuda_flash", "triton_flash"):
        mask = Mask(causal=True, segments=packed(600, 150))
        out = sdpa.scaled_dot_product_attention(q, k, v, mask, kernel=kernel)
        found.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
