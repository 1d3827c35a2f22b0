"""What only the CUDA library's kernels know, on a device: every tile, order of tiles, strides, and the same bits."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from gpu_cases import real, right, room_for

import sdpa
from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Draw, check_inputs, problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_flash_able")]

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
CORNERS = {"none": Mask(), "causal": Mask(causal=True), "bottom_right": Mask(causal=True, align="bottom_right")}


@pytest.mark.parametrize("D", [8, 64, 72, 96, 128, 192, 200, 256])
@pytest.mark.parametrize("mask", CORNERS)
def test_lengths_that_no_tile_divides(mask, D):
    """Rows that see nothing, one key more than a block, fewer heads than multiprocessors and more of them."""
    for (M, N), heads, dtype in itertools.product(
        ((1, 1), (64, 65), (193, 129), (200, 1000), (1000, 200), (513, 513)), ((2, 1), (6, 2)), (BFLOAT16, FLOAT16)
    ):
        draw = Draw(real(dtype=dtype), 12)
        q = draw.normal(3, heads[0], M, D)
        k, v = draw.normal(3, heads[1], N, D), draw.normal(3, heads[1], N, D)
        inputs = build_inputs(q, k, v, Options(CORNERS[mask], enable_gqa=True))
        right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, D, M, N, heads, dtype))


def bands(N):
    """Windows on either side and both, with lengths that blocks divide, cut and leave empty."""
    lengths, queries = torch.tensor([N, N // 3, 0], device="cuda"), torch.tensor([N // 2, 0, N], device="cuda")
    yield Mask(window=(37, 5))
    yield Mask(window=(None, 70), lengths=lengths)
    yield Mask(window=(0, 0), lengths=torch.tensor([1, 128, 65], device="cuda"))
    yield Mask(lengths=lengths)
    yield Mask(causal=True, lengths=lengths, query_lengths=queries)
    yield Mask(causal=True, align="bottom_right", lengths=lengths, query_lengths=queries)
    yield Mask(window=(200, 0), align="bottom_right", query_lengths=queries)


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_bands_lengths_and_sinks(D, sinks):
    for (M, N), dtype in itertools.product(((70, 70), (513, 300), (300, 1025)), (BFLOAT16, FLOAT16)):
        draw = Draw(real(dtype=dtype), 14)
        q, k, v = draw.normal(3, 4, M, D), draw.normal(3, 2, N, D), draw.normal(3, 2, N, D)
        for mask in bands(N):
            # one sink far above the scores, one far below
            extra = torch.tensor([0.5, -40.0, 30.0, -torch.inf], device="cuda", dtype=dtype) if sinks else None
            inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True, sinks=extra))
            right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (mask, D, M, N, dtype))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_nothing_behind_the_lengths_or_before_the_window(D):
    """NaN in every key and value that no row may see: the results are as before, to the bit."""
    N, lengths = 700, torch.tensor([700, 450, 1, 0], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(4, 2, N, D, device="cuda", dtype=BFLOAT16) for _ in range(3))
    behind = (torch.arange(N, device="cuda") >= lengths[:, None])[:, None, :, None]
    kernel = by_name()["cuda_flash"].load()
    for mask in (Mask(lengths=lengths), Mask(causal=True, lengths=lengths), Mask(window=(100, 9), lengths=lengths)):
        clean, spoilt = (
            build_inputs(q, *(t.masked_fill(behind, fill) for t in (k, v)), Options(mask)) for fill in (0.0, torch.nan)
        )
        wanted, found = (kernel.forward(inputs, problem_of(inputs, "forward")) for inputs in (clean, spoilt))
        assert torch.equal(wanted.out, found.out) and torch.equal(wanted.lse, found.lse)
    # queries behind theirs, of a tile whose first block of keys nobody sees
    queries = torch.tensor([50, 0, 700, 1], device="cuda")
    hidden = Mask(window=(50, 0), align="bottom_right", query_lengths=queries)
    inputs = build_inputs(q, k, v.index_fill(2, torch.arange(64, device="cuda"), torch.nan), Options(hidden))
    out = kernel.forward(inputs, problem_of(inputs, "forward")).out
    assert not out[0, :, 50:].any() and not out[1].any() and not out[3, :, 1:].any()
    rows = q[:, :, 600:]  # of a window of 100 keys, whose blocks begin after the first 256 at the latest
    far = torch.arange(N, device="cuda")[:, None] < 256
    kept, spoilt = (
        build_inputs(
            rows, *(t.masked_fill(far, fill) for t in (k, v)), Options(Mask(window=(100, 0), align="bottom_right"))
        )
        for fill in (0.0, torch.nan)
    )
    wanted, found = (kernel.forward(inputs, problem_of(inputs, "forward")) for inputs in (kept, spoilt))
    assert torch.equal(wanted.out, found.out) and wanted.out.isfinite().all()


@pytest.mark.parametrize(
    "sizes", [(192, 128), (40, 128), (128, 40), (72, 120), (64, 8), (96, 200), (256, 64), (176, 120)]
)
def test_values_of_another_head_size(sizes):
    D, Dv = sizes
    for (M, N), mask in itertools.product(
        ((70, 70), (513, 300), (300, 1025)), (*CORNERS.values(), Mask(window=(90, 3)))
    ):
        draw = Draw(real(), 15)
        q, k, v = draw.normal(2, 4, M, D), draw.normal(2, 2, N, D), draw.normal(2, 2, N, Dv)
        inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True))
        right(check_inputs("cuda_flash", inputs, torch.randn(2, 4, M, Dv, device="cuda", dtype=BFLOAT16)), (M, N, mask))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.7, 30.0, 1000.0])
def test_softcap(D, softcap):
    """Scores far beyond the cap and far below it; with a sink, and in windows."""
    draw = Draw(real(), 16)
    q, k, v = draw.normal(2, 4, 300, D) * 4, draw.normal(2, 2, 400, D), draw.normal(2, 2, 400, D)
    sinks = torch.tensor([0.5, -40.0, 3.0, -torch.inf], device="cuda", dtype=BFLOAT16)
    for mask, extra in itertools.product((*CORNERS.values(), Mask(window=(90, 3))), (None, sinks)):
        inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True, softcap=softcap, sinks=extra))
        right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (D, softcap, mask))


def test_large_softcaps_are_a_reason():
    q = torch.empty(1, 1, 8, 64, device="cuda", dtype=BFLOAT16)
    reasons = [
        by_name()["cuda_flash"].why_not(problem_of(build_inputs(q, q, q, Options(None, softcap=cap)), "forward"))
        for cap in (1000.0, 1001.0)
    ]
    assert reasons[0] == [] and "softcap above 1000" in reasons[1][0]


@pytest.mark.parametrize("M", [1, 5, 63])
def test_few_queries_of_grouped_heads_share_a_block(M):
    """In both memory orders, of which only one allows it with several rows; with lengths; not where a mask tells rows
    apart."""
    kernel, lengths = by_name()["cuda_flash"].load(), torch.tensor([700, 1], device="cuda")
    draw = Draw(real(), 18)
    q, k, v = draw.normal(2, 8, M, 64), draw.normal(2, 2, 700, 64), draw.normal(2, 2, 700, 64)
    for mask in (Mask(), Mask(lengths=lengths), Mask(causal=True, align="bottom_right")):
        for queries in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
            inputs = build_inputs(queries, k, v, Options(mask, enable_gqa=True))
            problem = problem_of(inputs, "forward")
            in_order = M == 1 or queries is q
            assert kernel.heads_are_rows(queries, problem) == (in_order and not mask.causal)
            right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), (M, mask))


def packed(query_lengths, key_lengths, D, mask, dtype=BFLOAT16, behind=0, heads=(4, 2), **options):
    """AttentionInputs of sequences of those lengths, with `behind` rows that belong to none."""
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
        for lengths in (query_lengths, key_lengths)
    )
    draw = Draw(real(dtype=dtype), 17)
    q = draw.normal(sum(query_lengths) + behind, heads[0], D)
    k, v = (draw.normal(sum(key_lengths) + behind, heads[1], D) for _ in range(2))
    documents = Documents(cu_q, cu_q if query_lengths is key_lengths else cu_k, max(query_lengths), max(key_lengths))
    return build_packed(q, k, v, documents, Options(mask, enable_gqa=True, **options))


LENGTHS = [513, 1, 0, 64, 300, 7, 128, 1025]


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192, 256])
def test_packed_sequences(D):
    """Sequences that tiles cut, fill and leave empty, rows behind all of them, keys of other lengths than queries."""
    others = [300, 0, 70, 1, 1025, 128, 7, 64]
    lengths = torch.tensor([400, 1, 9, 0, 300, 5, 128, 1000], device="cuda")
    masks = (
        *CORNERS.values(),
        Mask(window=(37, 5)),
        Mask(window=(100, 0), align="bottom_right"),
        Mask(lengths=lengths),
        Mask(causal=True, align="bottom_right", lengths=lengths, query_lengths=lengths.flip(0)),
    )
    for mask, keys, dtype in itertools.product(masks, (LENGTHS, others), (BFLOAT16, FLOAT16)):
        inputs = packed(LENGTHS, keys, D, mask, dtype, behind=130)
        right(check_inputs("cuda_flash", inputs, torch.randn_like(inputs.q)), (D, mask, dtype))
    sinks = torch.tensor([0.5, -40.0, 30.0, -torch.inf], device="cuda", dtype=BFLOAT16)
    for name, mask in itertools.product(("cuda_flash", "triton_flash"), (Mask(causal=True), masks[-1])):
        inputs = packed(LENGTHS, others, D, mask, behind=3, softcap=2.0, sinks=sinks)
        right(check_inputs(name, inputs, torch.randn_like(inputs.q)), (name, D, mask))


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192, 256])
def test_a_sequence_does_not_see_its_neighbours(D):
    """NaN in every other sequence's queries, keys and values, and behind the last: the results are as before, to the
    bit, and the same as of each sequence alone."""
    kernel = by_name()["cuda_flash"].load()
    for mask in (Mask(), Mask(causal=True), Mask(window=(50, 9))):
        clean = packed(LENGTHS, LENGTHS, D, mask, behind=65)
        wanted = kernel.forward(clean, problem_of(clean, "forward"))
        ends = clean.cu_q.tolist()
        assert not wanted.out[:, :, ends[-1] :].any() and (wanted.lse[:, :, ends[-1] :] == -torch.inf).all()
        rows = torch.arange(clean.q.shape[2], device="cuda")[:, None]
        for begin, end in itertools.pairwise(ends):
            if begin == end:
                continue
            away = (rows < begin) | (rows >= end)
            spoilt = clean._replace(**{name: getattr(clean, name).masked_fill(away, torch.nan) for name in "qkv"})
            found = kernel.forward(spoilt, problem_of(spoilt, "forward"))
            assert torch.equal(found.out[:, :, begin:end], wanted.out[:, :, begin:end])
            assert torch.equal(found.lse[:, :, begin:end], wanted.lse[:, :, begin:end])


def test_packed_sequences_in_training():
    """Through the front door, as the default. Launches are recorded at the second call and run again at the third."""
    cu = torch.tensor([0, 513, 514, 1500], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(1500, 4, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    found = []
    for kernel in ("cuda_flash", "triton_flash", None):
        calls = []
        for _ in range(4):
            out = sdpa.varlen_attention(q, k, v, cu, cu, 986, 986, is_causal=True, kernel=kernel)
            calls.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
        for out, grad_q, *others in calls[1:]:
            assert all(map(torch.equal, (calls[0][0], *calls[0][2:]), (out, *others)))
            torch.testing.assert_close(grad_q, calls[0][1], atol=2e-2, rtol=1e-2)  # sums in the order of arrival
        found.append(calls[0])
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths", "causal_lengths"])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_the_same_bits_at_full_size(D, mask):
    """Many waves of tiles, heads in several sections: fifty times, and the last head against float64."""
    torch.manual_seed(13)
    q, k, v = (torch.randn(2, 2048 // D, 4096, D, device="cuda", dtype=BFLOAT16) for _ in range(3))
    mask = {
        **CORNERS,
        "window": Mask(window=(1000, 0)),
        "lengths": Mask(lengths=torch.tensor([4096, 2500], device="cuda")),
        "causal_lengths": Mask(causal=True, lengths=torch.tensor([4096, 2500], device="cuda")),
    }[mask]
    inputs = build_inputs(q, k, v, Options(mask))
    kernel, problem = by_name()["cuda_flash"].load(), problem_of(inputs, "forward")
    first = kernel.forward(inputs, problem)
    for _ in range(50):
        torch.empty_like(q).fill_(torch.nan)  # what the results are written over
        again = kernel.forward(inputs, problem)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
    own = mask if mask.lengths is None else Mask(causal=mask.causal, lengths=mask.lengths[-1:])
    last = build_inputs(*(t[-1:, -1:] for t in (q, k, v)), Options(own))
    right(check_inputs("cuda_flash", last, torch.randn_like(last.q)), (D, mask))
    alone = kernel.forward(last, problem_of(last, "forward")).out  # of blocks of another size perhaps
    apart = (alone.double() - first.out[-1:, -1:]).norm(dim=-1)
    assert bool((apart <= 8e-3 * alone.double().norm(dim=-1)).all()), "beyond rounding of weights and results"


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_work_drawn_by_launches_side_by_side(mask):
    """Eager launches on two streams and one that was captured, each with more blocks than multiprocessors."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    draws = [[torch.randn(8, 16, 1024, 64, device="cuda", dtype=BFLOAT16) for _ in range(3)] for _ in range(3)]

    def attend(q, k, v):
        return sdpa.scaled_dot_product_attention(q, k, v, CORNERS[mask], kernel="cuda_flash")

    wanted = [attend(*qkv) for qkv in draws]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*draws[2])
    for _ in range(20):
        captured.fill_(torch.nan)
        torch.cuda.synchronize()
        found = []
        for stream, qkv in zip(streams, draws, strict=False):
            with torch.cuda.stream(stream):
                found += [attend(*qkv) for _ in range(4)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted[i // 4]) for i, out in enumerate(found))
        assert torch.equal(captured, wanted[2])


def test_captured_first_and_without_a_counter():
    """In a process of its own: the counters' memory is had while a launch is captured; then captures use them up."""
    script = """
import torch, sdpa
q, k, v = (torch.randn(4, 64, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
def attend(heads=64):
    return sdpa.scaled_dot_product_attention(*(t[:, :heads] for t in (q, k, v)), is_causal=True, kernel="cuda_flash")
def capture(times):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            out = attend()
    return graph, out
attend(1)  # loads the library, and has a multiprocessor for each block
(first, out), (spent, _), (last, other) = capture(1), capture(131072), capture(1)
first.replay(), last.replay()
assert torch.equal(out, attend()) and torch.equal(other, out), "other results"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mask", ["none", "bottom_right", "lengths"])
def test_scores_of_minus_infinity_are_weights_of_zero(mask):
    """Where they fill the first blocks of keys, and where they are all that a row sees but one key."""
    lengths, places = torch.tensor([1900, 2000], device="cuda"), torch.arange(2000, device="cuda")
    hidden = {
        "none": torch.zeros(128, 2000, device="cuda", dtype=torch.bool),
        "bottom_right": places > places[:128, None] + 2000 - 128,
        "lengths": (places >= lengths[:, None])[:, None, None],
    }[mask]
    mask = {**CORNERS, "lengths": Mask(lengths=lengths)}[mask]
    q = torch.rand(2, 2, 128, 128, device="cuda", dtype=BFLOAT16) + 0.5
    k, v = (torch.randn(2, 2, 2000, 128, device="cuda", dtype=BFLOAT16) for _ in range(2))
    for low in (slice(0, 700), slice(1300, 2000), slice(1, 2000)):
        keys = k.clone()
        keys[:, :, low] = -torch.inf
        out = sdpa.scaled_dot_product_attention(q, keys, v, mask, kernel="cuda_flash")
        scores = (q.double() @ keys.double().mT * 128**-0.5).masked_fill(hidden, -torch.inf)
        wanted = torch.softmax(scores, -1) @ v.double()
        distance = (out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert distance.max() <= 2**-7, "weights and results are rounded to 2^-9"


def test_any_strides_the_copy_engine_follows():
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BFLOAT16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    inputs = build_inputs(q, k, v, Options(Mask(causal=True)))
    right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), "slices of one tensor")
    with sdpa.sdpa_kernel("cuda_flash"):
        out = sdpa.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous(), "the queries' order of memory"


def test_strides_it_cannot_follow_are_a_reason():
    q, k = torch.randn(1, 2, 100, 64, device="cuda", dtype=BFLOAT16), torch.randn(1, 2, 100, 65, device="cuda")
    odd = k.to(BFLOAT16)[..., :64]
    for key in (odd, q[:, :1].expand(1, 2, 100, 64)):
        problem = problem_of(build_inputs(q, key, key, Options()), "forward")
        assert any("16 bytes" in reason for reason in by_name()["cuda_flash"].why_not(problem))


def test_addresses_it_cannot_read():
    """It is given copies, also where it is asked for by name; its operator refuses such addresses."""
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=BFLOAT16)
    off = torch.randn(2 * 128 * 64 + 1, device="cuda", dtype=BFLOAT16)[1:].view(1, 2, 128, 64)
    wanted = sdpa.scaled_dot_product_attention(q, off, off, kernel="math")
    found = sdpa.scaled_dot_product_attention(q, off, off, kernel="cuda_flash")
    assert sdpa.last_choice().copies == ("k", "v")
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    with pytest.raises(RuntimeError, match="cannot read addresses and rows that are no multiples of 16 bytes"):
        by_name()["cuda_flash"].load().operators()[0](q, off, off, 0.125, False, False)


def test_nothing_but_its_own_rows_and_keys():
    """NaN all around the tensors, and huge values beyond the head size."""
    wide = torch.full((2, 3, 130, 256), torch.nan, device="cuda", dtype=BFLOAT16)
    q, k, v = (wide.clone()[:, :, 1:129, 16:96] for _ in range(3))
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    inputs = build_inputs(q, k, v, Options())
    right(check_inputs("cuda_flash", inputs, torch.randn_like(q)), "an island")


def test_out_of_memory_is_torchs_error_and_names_kernel_and_problem():
    """The library's allocations fail with an error of their own, which the dispatcher has to know."""
    q, k, v = (torch.randn(1, 16, 1 << 16, 64, device="cuda", dtype=BFLOAT16) for _ in range(3))
    told = r"kernel cuda_flash ran out of memory .*needs 132 MiB of device 0"
    with room_for(16 << 20), pytest.raises(torch.OutOfMemoryError, match=told):
        sdpa.scaled_dot_product_attention(q, k, v, kernel="cuda_flash")


BEYOND = {
    "in_order": (
        {"deterministic": True},
        "expected head sizes up to 128 for a deterministic backward, got 192",
    ),
    "scale": ({"scale": -1.0}, "expected a positive scale, got -1"),
    "blocks": ({"packed": True}, "expected fewer blocks of 8 queries than 2147483647"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_the_operator_of_the_backward_refuses_what_it_cannot(name):
    """What the dispatcher's rules keep from it, in a call of the operator itself."""
    given, message = BEYOND[name]
    B, rows, D = (1 << 13, 1 << 17, 8) if "packed" in given else (1, 64, 192)
    q = torch.randn(1, 16, rows, D, device="cuda", dtype=BFLOAT16)
    lse = torch.zeros(1, 16, rows, device="cuda")
    cu = torch.linspace(0, rows, B + 1, device="cuda").int() if "packed" in given else None
    plain = (given.get("scale", 1.0), -1, -1, False, None, None, 0.0)
    packed = (cu, cu, rows, rows) if "packed" in given else (None, None, 0, 0)
    by_name()["cuda_flash"].load().operators()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.sdpa_cuda.flash_backward(
            q, q, q, q, q, lse, None, *plain, *packed, False, given.get("deterministic", False)
        )
