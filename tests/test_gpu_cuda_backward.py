"""What only the CUDA library's backward knows, on a device: orders of memory, streams, poison.

Its gradients by mask and size are held against float64 in test_gpu_cuda.py, beside the results.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest
import torch
from gpu_cases import right, room_for
from test_gpu_cuda import CORNERS, LENGTHS, packed

import sdpa
from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.problem import Results
from sdpa.testing import check_inputs, problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_flash_able")]

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SIZES = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]  # the largest head sizes of each instance
LARGEST_IN_ORDER = 128  # head sizes up to this have a deterministic mode (kLargestInOrder in bindings.cpp)


def checked(inputs, about):
    """Forward, and gradients too: a kernel without a backward would leave them out."""
    q, v = inputs.q, inputs.v
    found = check_inputs("cuda_flash", inputs, torch.randn(*q.shape[:3], v.shape[3], device="cuda", dtype=q.dtype))
    assert any(c.name == "grad_q" for c in found)
    right(found, about)


def passes(inputs, grad_out, grad_lse=None):
    """The results of the forward, and the gradients."""
    kernel = by_name()["cuda_flash"].load()
    results = kernel.forward(inputs, problem_of(inputs, "forward"))
    return results, kernel.backward(inputs, results, Results(grad_out, grad_lse), problem_of(inputs, "backward"))


def same(one, other, sums="q"):
    """Gradients of k and v have one writer and one order, unless heads of a group or parts of the rows are summed.
    Those of q are sums in the order of arrival."""
    for name in "qkv":
        first, second = getattr(one, name), getattr(other, name)
        if name in sums:
            spread = (first.double() - second.double()).norm()
            assert spread <= 2e-3 * first.double().norm(), f"{name}: more than sums in another order"
        else:
            assert torch.equal(first, second), name


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_thread_that_called_nothing_of_the_runtime(D):
    """As autograd's thread may be, where memory comes from the allocator's cache: there is no context, without which
    the driver makes no TMA descriptors."""
    q, k, v, up = (torch.randn(60, 2, 70, D, device="cuda", dtype=BFLOAT16) for _ in range(4))
    inputs = build_inputs(q, k, v, Options(Mask()))
    wanted, spare = (passes(inputs, up) for _ in range(2))
    torch.cuda.synchronize()
    del spare  # what the thread will take
    found = []
    thread = threading.Thread(target=lambda: found.append(passes(inputs, up)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0][0].out, wanted[0].out)
    same(found[0][1], wanted[1])


@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_a_sequence_does_not_see_its_neighbours(D):
    """NaN in every other sequence, and behind the last: its gradients are as before."""
    for mask in (Mask(), Mask(causal=True), Mask(window=(50, 9))):
        clean = packed(LENGTHS, LENGTHS, D, mask, behind=65)
        grad_out = torch.randn_like(clean.q)
        wanted = passes(clean, grad_out)[1]
        ends = clean.cu_q.tolist()
        assert not any(grad[:, :, ends[-1] :].any() for grad in wanted[:3])
        rows = torch.arange(clean.q.shape[2], device="cuda")[:, None]
        for begin, end in itertools.pairwise(ends):
            if begin == end:
                continue
            away = (rows < begin) | (rows >= end)
            spoilt = clean._replace(**{name: getattr(clean, name).masked_fill(away, torch.nan) for name in "qkv"})
            found = passes(spoilt, grad_out.masked_fill(away, torch.nan))[1]
            parts = (g._replace(**{n: getattr(g, n)[:, :, begin:end] for n in "qkv"}) for g in (wanted, found))
            same(*parts, sums="qkv")  # few blocks of keys: several work tiles may have the rows of each


@pytest.mark.parametrize("D, Dv", SIZES)
def test_nothing_behind_the_lengths(D, Dv):
    """NaN in keys, values, queries and upstream gradients that the mask leaves out: zeros there, all else as before."""
    N = 700
    lengths, queries = (torch.tensor(n, device="cuda", dtype=torch.int32) for n in ([700, 450, 1, 0], [50, 700, 0, 65]))
    q, k, v, grad_out = (torch.randn(4, 2, N, size, device="cuda", dtype=BFLOAT16) for size in (D, D, Dv, Dv))
    places = torch.arange(N, device="cuda")
    hidden_keys, hidden_rows = ((places >= n[:, None])[:, None, :, None] for n in (lengths, queries))
    for options in ({}, {"causal": True}, {"window": (100, 9)}, {"causal": True, "align": "bottom_right"}):
        mask = Mask(lengths=lengths, query_lengths=queries, **options)
        found = []
        for fill in (0.0, torch.nan):
            rows = (t.masked_fill(hidden_rows, fill) for t in (q, grad_out))
            keys = (t.masked_fill(hidden_keys, fill) for t in (k, v))
            rows, given = next(rows), next(rows)
            found.append(passes(build_inputs(rows, *keys, Options(mask)), given)[1])
        same(*found)
        assert not found[1].q.masked_select(hidden_rows).any()
        assert not found[1].k.masked_select(hidden_keys).any() and not found[1].v.masked_select(hidden_keys).any()


@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [*CORNERS, "window"])
def test_the_gradient_of_the_log_sum_exp(mask, D):
    mask = {**CORNERS, "window": Mask(window=(90, 3))}[mask]
    q, k, v = (torch.randn(2, 4, 300, D, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    up, up_lse = torch.randn_like(q), torch.randn(2, 4, 300, device="cuda")

    def gradients(kernel, *tensors):
        out, lse = sdpa.scaled_dot_product_attention(*tensors, mask, return_lse=True, kernel=kernel)
        return torch.autograd.grad((out, lse), tensors, (up.to(out.dtype), up_lse.to(lse.dtype)))

    wanted = gradients("math", *(t.detach().double().requires_grad_() for t in (q, k, v)))
    for _ in range(3):  # recorded at the second call, and run again at the third
        for found, exact in zip(gradients("cuda_flash", q, k, v), wanted, strict=True):
            assert (found.double() - exact).norm() <= 6e-3 * exact.norm()


ALIBI = {
    **CORNERS,
    "window": Mask(window=(90, 3)),
    "lengths": Mask(causal=True, lengths=torch.tensor([300, 65]), query_lengths=torch.tensor([1, 250])),
    "segments": Mask(segments=(torch.arange(513) // 97, torch.arange(1025) // 130)),
}


@pytest.mark.parametrize("D, Dv", SIZES)
@pytest.mark.parametrize("kind", ALIBI)
def test_alibi(kind, D, Dv):
    """Slopes of all batch entries or of each, heads that share keys. The forward is another kernel's."""
    backward, H = by_name()["cuda_flash"].load().backward, 4
    for (M, N), slopes in itertools.product(((70, 70), (513, 300), (300, 1025)), (torch.rand(H), torch.rand(2, H))):
        ids = ALIBI[kind].segments
        options = {} if ids is None else {"segments": (ids[0][:M].cuda(), ids[1][:N].cuda())}
        ends = [getattr(ALIBI[kind], name) for name in ("lengths", "query_lengths")]
        if ends[0] is not None:
            options = {"lengths": ends[0].clamp(max=N).cuda(), "query_lengths": ends[1].clamp(max=M).cuda()}
        mask = dataclasses.replace(ALIBI[kind], alibi=(slopes / 8).cuda(), **options)
        q, k, v = (
            torch.randn(2, h, n, d, device="cuda", dtype=BFLOAT16) for h, n, d in ((H, M, D), (2, N, D), (2, N, Dv))
        )
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        out, lse = sdpa.scaled_dot_product_attention(*exact, mask, enable_gqa=True, return_lse=True, kernel="math")
        up = torch.randn(2, H, M, Dv, device="cuda", dtype=BFLOAT16)
        wanted = torch.autograd.grad(out, exact, up.double())
        inputs = build_inputs(q, k, v, Options(mask, enable_gqa=True))
        results = Results(out.detach().to(BFLOAT16), lse.detach().float())
        found = backward(inputs, results, Results(up, None), problem_of(inputs, "backward"))
        for name, one, other in zip("qkv", found[:3], wanted, strict=True):
            assert (one.double() - other).norm() <= 6e-3 * other.norm(), (name, M, N, slopes.shape)


@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_alibi_of_packed_sequences(D):
    """As of each sequence alone, with slopes of its own."""
    backward, lengths = by_name()["cuda_flash"].load().backward, [n for n in LENGTHS if n]
    inputs = packed(lengths, lengths, D, Mask(causal=True))
    slopes, up = torch.rand(len(lengths), inputs.q.shape[1], device="cuda") / 8, torch.randn_like(inputs.q)
    alone = []
    for (begin, end), own in zip(itertools.pairwise(inputs.cu_q.tolist()), slopes, strict=True):
        mask = Mask(causal=True, alibi=own)
        q, k, v, grad_out = (t[:, :, begin:end] for t in (inputs.q, inputs.k, inputs.v, up))
        results = Results(*sdpa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, return_lse=True))
        one = build_inputs(q, k, v, Options(mask, enable_gqa=True))
        gradients = backward(one, results, Results(grad_out, None), problem_of(one, "backward"))
        alone.append((*results, *gradients[:3]))
    out, lse, *wanted = (torch.cat(parts, 2) for parts in zip(*alone, strict=True))
    inputs = inputs._replace(alibi=slopes)
    found = backward(inputs, Results(out, lse), Results(up, None), problem_of(inputs, "backward"))
    for one, other in zip(found[:3], wanted, strict=True):
        assert (one.double() - other.double()).norm() <= 2e-3 * other.double().norm()


@pytest.mark.parametrize("D", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("H, Hkv", [(16, 1), (14, 2)])
def test_heads_that_share_keys_add_up(D, H, Hkv):
    """Under masks by which blocks of keys see different numbers of rows: from so many rows on (kRowsToSum in
    bindings.cpp) each head of a group adds to float32 sums. Below that a work tile may visit several."""
    fewest = -(-by_name()["cuda_flash"].sums_groups // (H // Hkv - 1))
    lengths = torch.tensor([fewest + 17, 130], device="cuda")
    for M, N, softcap in (
        (fewest, fewest + 150, 0.0),
        (fewest + 33, 77, 0.0),
        (fewest - 1, 300, 0.0),
        (2100, 2100, 9.0),
    ):
        q = torch.randn(2, H, M, D, device="cuda", dtype=BFLOAT16)
        k, v = (torch.randn(2, Hkv, N, D, device="cuda", dtype=BFLOAT16) for _ in range(2))
        for mask in (CORNERS["causal"], CORNERS["bottom_right"], Mask(causal=True, lengths=lengths.clamp(max=N))):
            options = Options(mask, enable_gqa=True, softcap=softcap)
            checked(build_inputs(q, k, v, options), (M, N, softcap, mask))
    for mask in (CORNERS["causal"], CORNERS["bottom_right"]):
        checked(packed(LENGTHS, LENGTHS[::-1], D, mask, behind=65, heads=(H, Hkv)), mask)


@pytest.mark.parametrize("D", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("B, H, Hkv", [(1, 16, 1), (2, 12, 2), (9, 8, 1), (40, 8, 2)])
def test_work_tiles_of_some_heads(D, B, H, Hkv):
    """So few blocks of keys that heads which share them have work tiles of their own; of some, of two, of all."""
    for M, N in ((60, 60), (155, 155), (300, 90)):
        q = torch.randn(B, H, M, D, device="cuda", dtype=BFLOAT16)
        k, v = (torch.randn(B, Hkv, N, D, device="cuda", dtype=BFLOAT16) for _ in range(2))
        ids = torch.arange(max(M, N), device="cuda", dtype=torch.int32) // 37
        for mask in (None, CORNERS["causal"], Mask(window=(40, 3)), Mask(segments=(ids[:M], ids[:N]))):
            checked(build_inputs(q, k, v, Options(mask, enable_gqa=True)), (M, N, mask))
    checked(packed((150, 40, 1), (90, 155, 5), D, None, behind=65, heads=(H, Hkv)), "packed")


@pytest.mark.parametrize("D", [64, 128, 192])
def test_work_tiles_of_some_heads_and_parts_of_rows(D):
    """On 132 multiprocessors two or three heads and two or more parts, for at least one of these at each head size."""
    ids = torch.arange(2048, device="cuda", dtype=torch.int32) // 300
    for (B, H, Hkv), (M, N) in itertools.product(((1, 32, 8), (1, 12, 2)), ((705, 705), (900, 900), (2048, 77))):
        q = torch.randn(B, H, M, D, device="cuda", dtype=BFLOAT16)
        k, v = (torch.randn(B, Hkv, N, D, device="cuda", dtype=BFLOAT16) for _ in range(2))
        for mask in (None, CORNERS["causal"], Mask(segments=(ids[:M], ids[:N]))):
            checked(build_inputs(q, k, v, Options(mask, enable_gqa=True)), (B, H, Hkv, M, N, mask))


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192, 256])
def test_parts_of_the_rows_add_up(D):
    """So few blocks of keys that several work tiles share the rows of each."""
    window, lengths = Mask(window=(900, 300)), Mask(lengths=torch.tensor([130, 1], device="cuda"))
    for (M, N), (H, Hkv) in itertools.product(((4099, 77), (3000, 333), (1111, 130)), ((3, 3), (4, 2))):
        q = torch.randn(2, H, M, D, device="cuda", dtype=BFLOAT16)
        k, v = (torch.randn(2, Hkv, N, D, device="cuda", dtype=BFLOAT16) for _ in range(2))
        for mask in (None, CORNERS["causal"], CORNERS["bottom_right"], window, lengths):
            short = mask is lengths and N < 130
            options = Options(Mask(lengths=lengths.lengths.clamp(max=N)) if short else mask, enable_gqa=True)
            checked(build_inputs(q, k, v, options), (M, N, H, Hkv, mask))
    checked(packed((2500, 40, 1), (90, 200, 5), D, None, behind=65, heads=(4, 2)), "packed")


def test_sums_of_many_waves():
    """More causal work tiles than multiprocessors, twenty times over poisoned memory, and in a graph."""
    kernel = by_name()["cuda_flash"].load()
    q, up = (torch.randn(2, 16, 2048, 128, device="cuda", dtype=FLOAT16) for _ in range(2))
    k, v = (torch.randn(2, 4, 2048, 128, device="cuda", dtype=FLOAT16) for _ in range(2))
    inputs = build_inputs(q, k, v, Options(CORNERS["causal"], enable_gqa=True))
    alone = build_inputs(q, *(t.repeat_interleave(4, 1) for t in (k, v)), Options(CORNERS["causal"]))
    results = kernel.forward(inputs, problem_of(inputs, "forward"))

    def learn(inputs):
        return kernel.backward(inputs, results, Results(up, None), problem_of(inputs, "backward"))

    wanted = learn(alone)
    sums = {name: getattr(wanted, name).double().unflatten(1, (4, 4)).sum(2) for name in "kv"}
    sums["q"] = wanted.q.double()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = learn(inputs)
    for _ in range(20):
        graph.replay()
        torch.empty(2 * q.numel() + 4 * k.numel(), device="cuda").fill_(torch.nan)  # where the workspace will be
        for found in (captured, learn(inputs)):
            for name, exact in sums.items():
                assert (getattr(found, name).double() - exact).norm() <= 3e-3 * exact.norm(), name


def test_any_strides_the_copy_engine_follows():
    """Slices of one tensor; gradients lie as their tensors do; upstream gradients of other orders, and expanded."""
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BFLOAT16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    inputs = build_inputs(q, k, v, Options(Mask(causal=True)))
    checked(inputs, "slices of one tensor")
    grads = passes(inputs, torch.randn_like(q))[1]
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads[:3]), "the queries' order of memory"
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    flat = torch.randn(2, 4, 300, 64, device="cuda", dtype=BFLOAT16)
    for up in (
        flat,
        flat[:1].expand_as(flat),
        flat[:, :, :1].expand_as(flat),
        flat[..., :1].expand_as(flat),
        flat.mT.contiguous().mT,
    ):
        found = [
            torch.autograd.grad(sdpa.scaled_dot_product_attention(*leaves, kernel=kernel), leaves, up)
            for kernel in ("cuda_flash", "triton_flash")
        ]
        for one, other in zip(*found, strict=True):
            assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()


@pytest.mark.parametrize("D", [64, 80, 112, 128, 256])
@pytest.mark.parametrize("rows", [64, 128, 192])
def test_nothing_but_its_own_rows_and_keys(rows, D):
    """NaN all around the tensors, in memory that begins and ends where no block does."""
    wide = torch.full((2, 3, rows + 2, D + 32), torch.nan, device="cuda", dtype=BFLOAT16)
    q, k, v, up = (wide.clone()[:, :, 1:-1, 16:-16] for _ in range(4))
    for t in (q, k, v, up):
        t.copy_(torch.randn_like(t))
    for mask in (Mask(), Mask(causal=True), Mask(window=(50, 20))):
        found = check_inputs("cuda_flash", build_inputs(q, k, v, Options(mask)), up)
        assert any(c.name == "grad_q" for c in found)
        right(found, ("an island", mask))


@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths"])
@pytest.mark.parametrize("D, Dv", SIZES)
def test_the_same_at_full_size(D, Dv, mask):
    """Many waves of blocks, heads in several sections: twenty times over poisoned memory, and the last head against
    float64."""
    torch.manual_seed(13)
    lengths = torch.tensor([4096, 2500], device="cuda")
    q, k, v, up = (torch.randn(2, 2048 // D, 4096, size, device="cuda", dtype=BFLOAT16) for size in (D, D, Dv, Dv))
    mask = {**CORNERS, "window": Mask(window=(1000, 0)), "lengths": Mask(causal=True, lengths=lengths)}[mask]
    inputs = build_inputs(q, k, v, Options(mask))
    first = passes(inputs, up)[1]
    for _ in range(20):
        for t in (q, k, v):
            torch.empty_like(t).fill_(torch.nan)  # what the gradients and the workspace are written over
        torch.empty(q.numel() + 2 * q.shape[0] * q.shape[1] * 4096, device="cuda").fill_(torch.nan)
        same(first, passes(inputs, up)[1])
    own = mask if mask.lengths is None else Mask(causal=mask.causal, lengths=mask.lengths[-1:])
    checked(build_inputs(*(t[-1:, -1:] for t in (q, k, v)), Options(own)), (D, Dv, mask))
    alone = passes(build_inputs(*(t[-1:, -1:] for t in (q, k, v)), Options(own)), up[-1:, -1:])[1]
    for name in "qkv":  # of a forward in blocks of another size perhaps
        one, other = getattr(alone, name).double(), getattr(first, name)[-1:, -1:].double()
        assert (one - other).norm() <= 3e-3 * one.norm(), name


@pytest.mark.parametrize("D, in_order", [(64, False), (64, True), (128, True), (256, False)])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_work_drawn_by_launches_side_by_side(mask, D, in_order, request):
    """Eager backwards on two streams, of which one goes first where both wait, and one that was captured, each of more
    blocks than there are multiprocessors."""
    if in_order:
        request.getfixturevalue("deterministic")
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    draws = [[torch.randn(8, 16, 1024, D, device="cuda", dtype=BFLOAT16) for _ in range(4)] for _ in range(3)]

    def learn(q, k, v, up):
        return passes(build_inputs(q, k, v, Options(CORNERS[mask])), up)[1]

    wanted = [learn(*tensors) for tensors in draws]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = learn(*draws[2])
    for _ in range(10):
        for grad in captured[:3]:
            grad.fill_(torch.nan)
        torch.cuda.synchronize()
        found = []
        for stream, tensors in zip(streams, draws, strict=False):
            with torch.cuda.stream(stream):
                found += [learn(*tensors) for _ in range(4)]
        graph.replay()
        torch.cuda.synchronize()
        for one, other in [*((grads, wanted[i // 4]) for i, grads in enumerate(found)), (captured, wanted[2])]:
            same(one, other)
            assert not in_order or torch.equal(one.q, other.q)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


ORDERED = {
    "none": lambda q, k, v: build_inputs(q, k, v, Options(enable_gqa=True)),
    "causal": lambda q, k, v: build_inputs(q, k, v, Options(is_causal=True, enable_gqa=True)),
    "window": lambda q, k, v: build_inputs(q, k, v, Options(Mask(window=(300, 70)), enable_gqa=True)),
    "window to the left": lambda q, k, v: build_inputs(q, k, v, Options(Mask(window=(300, None)), enable_gqa=True)),
    "lengths": lambda q, k, v: build_inputs(
        q, k, v, Options(Mask(lengths=ints(999, 130), query_lengths=ints(500, 1100)), enable_gqa=True)
    ),
    "causal window, bottom right": lambda q, k, v: build_inputs(
        q, k, v, Options(Mask(causal=True, window=(200, 0), align="bottom_right"), enable_gqa=True)
    ),
}


def ints(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("D, Dv", [sizes for sizes in SIZES if max(sizes) <= LARGEST_IN_ORDER])
@pytest.mark.parametrize("mask", ORDERED)
def test_the_same_bits_in_deterministic_mode(mask, D, Dv, deterministic):
    """Of ragged sizes, with heads that share keys, 50 times amid other work, and right."""
    M, N = (1100, 1000)
    q, k, v = (torch.randn(2, H, L, W, device="cuda", dtype=BFLOAT16) for H, L, W in ((8, M, D), (2, N, D), (2, N, Dv)))
    inputs = ORDERED[mask](q, k, v)
    checked(inputs, (mask, D, Dv))
    grad_out = torch.randn(2, 8, M, Dv, device="cuda", dtype=BFLOAT16)
    wanted = passes(inputs, grad_out)[1]
    noise, stream = torch.randn(512, 512, device="cuda"), torch.cuda.Stream()
    for number in range(50):
        if number % 5 == 0:
            with torch.cuda.stream(stream):
                noise @ noise
        found = passes(inputs, grad_out)[1]
        assert all(map(torch.equal, found[:3], wanted[:3])), number


@pytest.mark.parametrize("options", [
    {"softcap": 5.0}, {"sinks": True}, {"is_causal": True, "softcap": 5.0}, {"is_causal": True, "sinks": True},
], ids=["softcap", "sinks", "causal softcap", "causal sinks"])  # fmt: skip
@pytest.mark.parametrize("D", [64, 96, 128])
def test_the_same_bits_beside_the_mask(options, D, deterministic):
    q, k, v, up = (torch.randn(2, 8, 700, D, device="cuda", dtype=FLOAT16) for _ in range(4))
    options = options | ({"sinks": torch.randn(8, device="cuda")} if "sinks" in options else {})
    inputs = build_inputs(q, k, v, Options(**options))
    checked(inputs, (options, D))
    wanted = passes(inputs, up)[1]
    for _ in range(20):
        found = passes(inputs, up)[1]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True) if other is not None)


def learn_beyond(room, kernel):
    """Gradients where the process may take `room` bytes more than the tensors of the forward have."""
    leaves = [torch.randn(1, 16, 1 << 15, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3)]
    out, up = sdpa.scaled_dot_product_attention(*leaves, kernel=kernel), torch.randn_like(leaves[0])
    with room_for(room):
        return torch.autograd.grad(out, leaves, up)


def test_a_workspace_that_does_not_fit():
    """The gradients take 192 MiB, the sums beside them 132: an error where the kernel was asked for by name, and where
    none was, the work of a kernel that needs less."""
    told = r"cuda_flash ran out of memory on backward .*needs 324 MiB of device 0 .*triton_hopper.* would need less"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        learn_beyond(260 << 20, "cuda_flash")
    with pytest.warns(UserWarning, match=r"ran out of memory on backward .* answers instead"):
        found = learn_beyond(260 << 20, None)
    assert all(grad.isfinite().all() for grad in found)


def test_explain_says_whether_bits_vary(deterministic):
    q = torch.randn(1, 8, 512, 64, device="cuda", dtype=BFLOAT16)
    for mode in (True, False):
        torch.use_deterministic_algorithms(mode)
        rows = sdpa.explain(q, q, q, direction="backward").rows
        varying = {row.kernel for row in rows if row.varies}
        assert varying == (set() if mode else {"cuda_flash", "vendor_cudnn", "vendor_flash", "vendor_efficient"})


def test_head_sizes_above_128_in_deterministic_mode(deterministic):
    """Another kernel answers, with the same bits."""
    q, k, v = (torch.randn(1, 2, 300, D, device="cuda", dtype=BFLOAT16, requires_grad=True) for D in (192, 192, 128))
    reasons = {row.kernel: row.reasons for row in sdpa.explain(q, k, v, direction="backward").rows}
    assert any("in an order that varies above head size 128, got 192" in r for r in reasons["cuda_flash"])
    up = torch.randn(1, 2, 300, 128, device="cuda", dtype=BFLOAT16)
    one, other = (torch.autograd.grad(sdpa.scaled_dot_product_attention(q, k, v), (q, k, v), up) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_packed_sequences_in_deterministic_mode(deterministic):
    for D in (64, 96, 128):
        for mask in (Mask(), Mask(causal=True), Mask(window=(50, 9))):
            inputs = packed(LENGTHS, LENGTHS, D, mask, behind=65)
            checked(inputs, (D, mask))
            grad_out = torch.randn_like(inputs.q)
            wanted = passes(inputs, grad_out)[1]
            for _ in range(5):
                assert all(map(torch.equal, passes(inputs, grad_out)[1][:3], wanted[:3])), (D, mask)


def test_scores_of_minus_infinity_are_weights_of_zero():
    """Whole blocks of keys that a row scores -inf: no gradient of theirs, and none that is not a number."""
    q = torch.rand(2, 2, 128, 128, device="cuda", dtype=BFLOAT16) + 0.5
    k, v = (torch.randn(2, 2, 700, 128, device="cuda", dtype=BFLOAT16) for _ in range(2))
    k[:, :, 100:400] = -torch.inf
    results, grads = passes(build_inputs(q, k, v, Options()), torch.randn_like(q))
    assert results.out.isfinite().all() and not grads.v[:, :, 100:400].any()
    assert grads.v.isfinite().all() and not grads.k[:, :, 100:400].any() and grads.k.isfinite().all()


@pytest.mark.parametrize("D, Dv", SIZES)
@pytest.mark.parametrize("ids", ["documents", "halves", "any", "one for all"])
def test_segments(ids, D, Dv):
    """Ids that ascend, that change at blocks' ends, in any order, and one row of them for all batch entries. Other
    masks, heads that share keys, sinks and a softcap are beside them. Keys that no row sees have no gradient."""
    M, N = 333, 517
    sizes = (1 if ids == "one for all" else 2, M), (1 if ids == "one for all" else 2, N)
    if ids == "documents":
        rows, keys = (torch.randint(0, 9, size, device="cuda").sort(1).values for size in sizes)
    elif ids == "halves":
        rows, keys = (
            torch.arange(size[1], device="cuda").div(128, rounding_mode="floor").expand(size) for size in sizes
        )
    else:
        rows, keys = (torch.randint(-3, 4, size, device="cuda") for size in sizes)
    rows, keys = rows.clone(), keys.clone()
    keys[:, 100:300] = 77  # an id that no row has
    q, k, v = (torch.randn(2, H, L, W, device="cuda", dtype=BFLOAT16) for H, L, W in ((4, M, D), (2, N, D), (2, N, Dv)))
    lengths = {"lengths": ints(N, 401), "query_lengths": ints(M, 222)}
    for options, more in (
        ({}, {}),
        ({"causal": True, "align": "bottom_right"}, {"softcap": 9.0}),
        ({"window": (60, 30), **lengths}, {"sinks": torch.randn(4, device="cuda")}),
    ):
        inputs = build_inputs(q, k, v, Options(Mask(segments=(rows, keys), **options), enable_gqa=True, **more))
        checked(inputs, (ids, D, Dv, options))
        grads = passes(inputs, torch.randn(2, 4, M, Dv, device="cuda", dtype=BFLOAT16))[1]
        assert not grads.k[:, :, 100:300].any() and not grads.v[:, :, 100:300].any()


def test_many_documents_of_many_heads():
    """More blocks of keys than multiprocessors, of which most see few rows; twenty times over poisoned memory."""
    ids = torch.randint(0, 40, (2, 4096), device="cuda").sort(1).values
    q, k, v, up = (torch.randn(2, 8, 4096, 64, device="cuda", dtype=BFLOAT16) for _ in range(4))
    for mask in (Mask(segments=ids), Mask(segments=ids, causal=True)):
        inputs = build_inputs(q, k, v, Options(mask))
        first = passes(inputs, up)[1]
        for _ in range(20):
            torch.empty(2 * q.numel(), device="cuda").fill_(torch.nan)  # where the workspace will be
            same(first, passes(inputs, up)[1])
        own = Mask(segments=ids[1:], causal=mask.causal)
        checked(build_inputs(*(t[1:, :1] for t in (q, k, v)), Options(own)), mask)


def test_what_it_has_no_backward_of_is_a_reason_and_another_kernels_work(deterministic):
    kernel = by_name()["cuda_flash"]
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BFLOAT16)
    mask = Mask(segments=torch.arange(64, device="cuda") // 20)
    backward = problem_of(build_inputs(q, q, q, Options()), "backward")
    assert kernel.why_not(backward) == []
    reasons = kernel.why_not(backward._replace(features=frozenset({"segments"})))
    assert any("in an order that varies with segments" in reason for reason in reasons)
    chosen = sdpa.explain(q, q, q, mask, direction="backward", kernel="cuda_flash").chosen
    assert chosen not in (None, "cuda_flash")
    tensors = [q.clone().requires_grad_() for _ in range(3)]
    found, wanted = (
        torch.autograd.grad(sdpa.scaled_dot_product_attention(*tensors, mask, kernel=name), tensors, torch.ones_like(q))
        for name in ("cuda_flash", "triton_flash")
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()
