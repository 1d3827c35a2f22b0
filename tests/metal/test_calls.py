"""Public functions and modules through the Metal path: binding of arguments, grids, views, repeated calls."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import sdpa
import sdpa.nn
from helpers import MOVES, hooked_gradients, int32
from sdpa import Mask
from sdpa.dispatch.select import clear_caches
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.metal import flash, launch, source
from sdpa.problem import UNLIMITED, AttentionProblem

NAME = "metal_flash"


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(B=2, H=4, Hkv=4, M=17, N=21, D=16, learn=False, dtype=torch.float32):
    shapes = ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, D))
    return [draw(*shape, seed=i, dtype=dtype).requires_grad_(learn) for i, shape in enumerate(shapes)]


def gradients(function, tensors, create_graph=False):
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, draw(*out.shape, seed=9), create_graph=create_graph)


def close(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_calls_again(learn, is_causal):
    """The third call of a form runs what the second recorded; other values, the same results as torch's."""
    clear_caches()
    for seed in range(4):
        tensors = [(t.detach() + seed).requires_grad_(learn) for t in qkv()]
        ours = lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v, is_causal=is_causal, kernel=NAME)  # noqa: E731
        theirs = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: E731
        if learn:
            close(gradients(ours, tensors), gradients(theirs, tensors))
        else:
            close([ours(*tensors)], [theirs(*tensors)])
        assert sdpa.last_choice().kernel.name == NAME


def test_recorded_calls_choose_nothing(monkeypatch):
    """Nothing is compiled or planned for a call like one before."""
    tensors = qkv(Hkv=2)
    call = lambda: sdpa.scaled_dot_product_attention(*tensors, enable_gqa=True, kernel=NAME)  # noqa: E731
    first = call()
    call()
    monkeypatch.setattr(flash, "dispatches_of", None)
    assert torch.equal(call(), first)


def test_recorded_backwards_choose_nothing(monkeypatch):
    tensors = qkv(Hkv=2, learn=True)
    call = lambda *t: sdpa.scaled_dot_product_attention(*t, enable_gqa=True, kernel=NAME)  # noqa: E731
    first = gradients(call, tensors)
    gradients(call, tensors)
    monkeypatch.setattr(flash, "dispatches_of", None)
    assert all(torch.equal(a, b) for a, b in zip(gradients(call, tensors), first, strict=True))


def test_views_that_begin_elsewhere():
    """At an odd element rows are loaded one by one, also where aligned ones were recorded before."""
    tensors = qkv()
    wanted = F.scaled_dot_product_attention(*tensors)
    for offset in (0, 0, 1, 4, 0, 3):
        moved = [torch.empty(t.numel() + offset)[offset:].view(t.shape).copy_(t) for t in tensors]
        close([sdpa.scaled_dot_product_attention(*moved, kernel=NAME)], [wanted])


def test_a_last_stride_that_is_not_one():
    tensors = [t.repeat_interleave(2, dim=-1)[..., ::2] for t in qkv()]
    close([sdpa.scaled_dot_product_attention(*tensors, kernel=NAME)], [F.scaled_dot_product_attention(*tensors)])


def test_gradients_that_repeat():
    """The gradient of a sum is one number in memory."""
    tensors = qkv(learn=True)
    ours, theirs = (f(*tensors).sum() for f in (by_name, F.scaled_dot_product_attention))
    close(torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, tensors))


@pytest.mark.parametrize("move", MOVES)
def test_gradients_of_saved_tensors_that_moved(move):
    packed, grad_out = draw(2, 17, 3, 2, 16), draw(2, 2, 17, 16, seed=1)
    (wanted, *_) = hooked_gradients(F.scaled_dot_product_attention, "clone", packed, grad_out)
    for found in hooked_gradients(by_name, move, packed, grad_out):
        close([found], [wanted])


def by_name(*tensors, **options):
    return sdpa.scaled_dot_product_attention(*tensors, **options, kernel=NAME)


def test_documents_packed_in_a_row(served):
    lengths, H, D = (5, 0, 33, 40), 4, 16
    cu = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    total = sum(lengths) + 3  # rows of no document
    q, k, v = (draw(total, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, 2, 2)))

    def ours(q, k, v):
        return sdpa.varlen_attention(
            q, k, v, cu, cu, max(lengths), max(lengths), is_causal=True, enable_gqa=True, kernel=NAME
        )

    def theirs(q, k, v):
        parts = []
        for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
            one = [t[begin:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat([*parts, 0 * q[cu[-1] :]])

    for _ in range(3):
        close(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)))
        assert sdpa.last_choice().kernel.name == NAME and "packed" in sdpa.last_choice().problem.features


@pytest.mark.parametrize("M", [1, 3])
def test_pages(served, M):
    pages, size, H, Hkv, D = 9, 16, 8, 2, 32
    keys, values = draw(pages, size, Hkv, D, seed=1), draw(pages, size, Hkv, D, seed=2)
    table, lengths = int32(6, 1, -1, 4, 7, 2).view(2, 3), int32(20, 48)
    query = draw(2, M, H, D)
    for _ in range(3):
        got = sdpa.paged_attention(query, keys, values, table, lengths, enable_gqa=True, kernel=NAME)
        assert sdpa.last_choice().kernel.name == NAME and "paged" in sdpa.last_choice().problem.features
    for b, length in enumerate(lengths.tolist()):
        rows = [cache[table[b].clamp(0)].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values)]
        wanted = F.scaled_dot_product_attention(
            query[b].transpose(0, 1)[None], *(t[None] for t in rows), enable_gqa=True
        )
        close([got[b]], [wanted[0].transpose(0, 1)])


# Operations of (2,4,100,90,16) forward: 4.6e6. Parts are single blocks of rows, some of them, heads, batch entries.
@pytest.mark.parametrize("most", [1.0, 2e5, 1.2e6, 3e6])
@pytest.mark.parametrize("sizes", [{"M": 100, "N": 90}, {"M": 3, "N": 2000, "Hkv": 2}], ids=["many", "split"])
def test_long_calls_are_several_dispatches(most, sizes, monkeypatch):
    waits = []
    monkeypatch.setattr(launch, "MOST_FLOPS", most)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(1))
    clear_caches()
    tensors = [t.requires_grad_() for t in qkv(**sizes)]
    ours, theirs = (partial(f, enable_gqa=True) for f in (by_name, F.scaled_dot_product_attention))
    for _ in range(3):
        close(gradients(ours, tensors), gradients(theirs, tensors))
    assert len(waits) >= 3  # between the parts of a forward and of two kernels of the backward
    clear_caches()


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (6, 5, 4), (12, 3, 1), (2, 8, 16), (0, 2, 3)], ids=str)
def test_parts_of_a_grid(grid, monkeypatch):
    """Every threadgroup is in one part, no part computes for longer than it may, and parts are few."""
    monkeypatch.setattr(launch, "MOST_FLOPS", 100)
    count = grid[0] * grid[1] * grid[2]
    for unit in (1, 2) if grid[0] % 2 == 0 else (1,):
        for flops in (1e-3, 0.3, 1, 24, 26, 99, 101, 10**6):
            parts = launch.parts_of(grid, unit, flops)
            seen = [
                tuple(f + o for f, o in zip(first, other, strict=True))
                for first, size in parts
                for other in product(*map(range, size))
            ]
            assert sorted(seen) == sorted(product(*map(range, grid)))
            for first, (x, y, z) in parts:
                assert first[0] % unit == 0 and (x * y * z <= unit or x * y * z * max(1, flops) <= 100)
            assert len(parts) <= max(1, min(count, 4 * count * max(1, flops) / 100))


BANDS = [
    (UNLIMITED, UNLIMITED, False), (UNLIMITED, 0, False), (UNLIMITED, 0, True), (7, 0, False), (3, 9, True),
    (20, UNLIMITED, False), (20, UNLIMITED, True), (UNLIMITED, 5, False), (500, 500, True),
]  # fmt: skip


@pytest.mark.parametrize("M,N", [(64, 64), (33, 160), (160, 17), (48, 96), (5, 200)], ids=str)
@pytest.mark.parametrize("left,right,bottom_right", BANDS, ids=str)
def test_no_threadgroup_has_more_than_the_most(M, N, left, right, bottom_right):
    """Parts of a causal call, whose last rows have twice the average, keep their limit; and it is no wild guess."""
    q, k = draw(1, 2, M, 8), draw(1, 1, N, 8)
    problem = AttentionProblem.of(build_inputs(q, k, k, Options(enable_gqa=True)), "forward")
    problem = problem._replace(left=left, right=right, bottom_right=bottom_right)
    row, key = torch.arange(M)[:, None] + (N - M if bottom_right else 0), torch.arange(N)
    seen = ((left == UNLIMITED) | (key >= row - left)) & ((right == UNLIMITED) | (key <= row + right))
    size, pair = source.Tiles(16, 16, 0), 4 * 8
    own, grouped, keys = seen.split(16), torch.cat([seen, seen]).split(16), seen.T.split(16)
    all_see = seen.any(0, keepdim=True)
    for name, count, most in (
        ("forward", 2 * len(own), max(len(block) * int(block.any(0).sum()) for block in own)),
        ("grouped", len(grouped), max(len(block) for block in grouped) * int(all_see.sum())),
        ("backward_kv", len(keys), 2 * max(len(block) * int(block.any(0).sum()) for block in keys)),
        ("weights", 2 * len(own) * len(keys), min(16, M) * min(16, N)),
    ):
        kernel = {"grouped": "forward"}.get(name, name)
        found = launch.most_flops_of_one(kernel, problem, size, (count, 1, 1), name == "grouped")
        assert most * pair <= found * (1 + 1e-9) and found <= 2 * most * pair, name


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 1, 1, 90), (1, 4, 100, 1), (2, 1, 1, 90), (1, 1, 100, 90)], ids=str
)
def test_the_gradient_of_a_bias_that_repeats_is_the_work_of_many(shape, monkeypatch):
    """As many threadgroups as there are heads at least, in parts where the work is long."""
    grids, make = [], launch.dispatches_of

    def noted(work, name, *rest, **named):
        found = make(work, name, *rest, **named)
        grids.extend([dispatch.grid for dispatch in found] if name == "bias_grad" else [])
        return found

    monkeypatch.setattr(flash, "dispatches_of", noted)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    tensors = [*(t.requires_grad_() for t in qkv(M=100, N=90)), draw(*shape).requires_grad_()]

    def attend(*given):
        return sdpa.scaled_dot_product_attention(*given, kernel=NAME)

    wanted = gradients(
        lambda *given: F.scaled_dot_product_attention(*given[:3], given[3].expand(2, 4, 100, 90)), tensors
    )
    for most in (1e12, 1e5):
        monkeypatch.setattr(launch, "MOST_FLOPS", most)
        clear_caches()
        grids.clear()
        # Only where it may be differentiated again does a kernel add up the gradient of a bias that moves whole rows.
        close(gradients(attend, tensors, create_graph=shape[3] == 1), wanted)
        assert sum(x * y * z for x, y, z in grids) >= 8
        assert (len(grids) > 1) == (most < 1e12)
    clear_caches()


@pytest.mark.parametrize("shape", [(2, 4, 5, 0), (1, 1, 1, 0), (2, 4, 1, 0), (1, 1, 5, 0), (1, 1, 5, 1)], ids=str)
def test_the_gradient_of_a_bias_of_no_keys(shape):
    """There are results: sinks alone are seen."""
    tensors = [t.requires_grad_() for t in (*qkv(M=5, N=0), torch.zeros(shape), draw(4))]

    def attend(kernel):
        return sdpa.scaled_dot_product_attention(*tensors[:4], sinks=tensors[4], kernel=kernel)

    close(*(torch.autograd.grad(attend(kernel), tensors, draw(2, 4, 5, 16)) for kernel in (NAME, "cpu_flash")))


def test_flags_are_those_of_the_code():
    """A flag that a comment alone names changes nothing that is compiled."""
    assert "BIAS_PARTS" in source.flags_read("bias_grad")
    assert "BIAS_PARTS" not in source.flags_read("backward_q")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_a_half_bias_are_float32(dtype):
    tensors = [t.to(dtype).requires_grad_() for t in (*qkv(M=40, N=30), draw(1, 1, 1, 30))]
    problem = AttentionProblem.of(build_inputs(*tensors[:3], Options(tensors[3])), "backward")
    assert flash.bias_sums(tensors[3], problem).dtype == torch.float32
    assert flash.bias_sums(draw(1, 1, 40, 30, dtype=dtype), problem).dtype == dtype
    found = gradients(lambda *given: sdpa.scaled_dot_product_attention(*given, kernel=NAME), tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = gradients(lambda *given: F.scaled_dot_product_attention(*given[:3], given[3].expand(2, 4, 40, 30)), exact)
    for f, w in zip(found, wanted, strict=True):
        assert f.dtype == dtype
        torch.testing.assert_close(f.double(), w, rtol=0.05, atol=0.05)


def test_modules_train(served):
    torch.manual_seed(0)
    ours, theirs = (
        kind(32, 4, 64, dropout=0.0, batch_first=True)
        for kind in (sdpa.nn.TransformerEncoderLayer, torch.nn.TransformerEncoderLayer)
    )
    ours.load_state_dict(theirs.state_dict())
    x = draw(2, 19, 32)
    padding = torch.arange(19) >= torch.tensor([[19], [11]])
    with sdpa.sdpa_kernel(NAME):
        loss = ours(x, src_key_padding_mask=padding)[~padding].square().sum()
        loss.backward()
        assert sdpa.last_choice().kernel.name == NAME
    wanted = theirs(x, src_key_padding_mask=padding)[~padding].square().sum()
    wanted.backward()
    close([loss], [wanted])
    close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize("averaged", [False, True])
def test_long_weights_are_several_dispatches(averaged, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(1))
    inputs = build_inputs(*qkv(M=100, N=90), Options())
    problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"} if averaged else ()))
    lse = (inputs.q @ inputs.k.mT * inputs.scale).logsumexp(-1)
    wanted = flash.weights(inputs, lse, problem)
    for most in (1e3, 1e5):
        waits.clear()
        monkeypatch.setattr(launch, "MOST_FLOPS", most)
        assert torch.equal(flash.weights(inputs, lse, problem), wanted)
        assert len(waits) > 1
    close([wanted.sum(-1)], [torch.ones(wanted.shape[:-1])])


def test_weights_of_a_module():
    ours, theirs = (kind(32, 4, batch_first=True) for kind in (sdpa.nn.MultiheadAttention, torch.nn.MultiheadAttention))
    ours.load_state_dict(theirs.state_dict())
    x = draw(2, 19, 32)
    with sdpa.sdpa_kernel(NAME):
        found = ours(x, x, x, need_weights=True)
    close(found, theirs(x, x, x, need_weights=True))


def test_a_mask_of_every_field_at_once(served):
    mask = Mask(causal=True, window=(9, 0), lengths=int32(21, 13), alibi=draw(4).abs(), align="bottom_right")
    tensors = qkv()
    exact = [t.double() for t in tensors]
    close([by_name(*tensors, mask)], [sdpa.scaled_dot_product_attention(*exact, mask, kernel="math").float()])


def test_a_source_that_does_not_compile(monkeypatch):
    """The log, and what it was specialised for; without a name, the next kernel answers."""

    def refuse(source):
        raise SyntaxError("program_source:7:3: error: no such thing")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    launch.library_of.cache_clear()
    clear_caches()
    tensors = qkv(D=24)
    told = r"(?s)forward\.metal did not compile for .*D=24.*program_source:7:3"
    with pytest.raises(RuntimeError, match=told):
        by_name(*tensors)
    tensors, told = qkv(D=40), told.replace("24", "40")
    with sdpa.sdpa_kernel([NAME, "cpu_flash"], set_priority=True), pytest.warns(UserWarning, match=told):
        out = sdpa.scaled_dot_product_attention(*tensors)
    assert sdpa.last_choice().kernel.name == "cpu_flash"
    close([out], [F.scaled_dot_product_attention(*tensors)])
    launch.library_of.cache_clear()
    clear_caches()
