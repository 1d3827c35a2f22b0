"""Repeated calls on a GPU: launches run again and torch's own operators, beside torch and beside the first call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from remembered import Other, forwards, remembered
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as torch_kernel
from torch.utils.checkpoint import checkpoint

import helpers
import sdpa
import sdpa.nn
from sdpa import scaled_dot_product_attention as attend
from sdpa.dispatch.select import clear_caches
from sdpa.problem import AttentionInputs

pytestmark = pytest.mark.gpu

NATIVE = ("vendor_efficient", "vendor_flash", "vendor_cudnn")
AGAIN = ("triton_flash", "triton_efficient", "triton_hopper", "triton_decode")
qkv = partial(helpers.qkv, H=4, M=64, N=64, D=64, dtype=torch.bfloat16, device="cuda")
integers = partial(helpers.integers, device="cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def close(found, wanted):
    distance = torch.linalg.vector_norm((found - wanted).double())
    assert distance <= TOLERANCE[wanted.dtype] * torch.linalg.vector_norm(wanted.double())


def exact(*tensors, **options):
    with torch_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def able(name, tensors):
    rows = {row.kernel: row for row in sdpa.explain(*tensors, kernel=None).rows}
    if rows[name].reasons:
        pytest.skip("; ".join(rows[name].reasons))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", (*AGAIN, *NATIVE))
def test_calls_again(name, dtype, is_causal):
    able(name, qkv(dtype=dtype))
    first = attend(*qkv(dtype=dtype), is_causal=is_causal, kernel=name)
    for seed in range(4):
        tensors = qkv(dtype=dtype, seed=seed)
        close(attend(*tensors, is_causal=is_causal, kernel=name), exact(*tensors, is_causal=is_causal))
    assert torch.equal(attend(*qkv(dtype=dtype), is_causal=is_causal, kernel=name), first)
    unaligned = qkv(dtype=dtype, offset=1)
    if name in AGAIN:
        close(attend(*unaligned, is_causal=is_causal, kernel=name), exact(*unaligned, is_causal=is_causal))
        assert any(run.again is not None for run in forwards() if run.choice.kernel.name == name)
    close(attend(*tensors, is_causal=is_causal, kernel=name), exact(*tensors, is_causal=is_causal))


def masks(kind, seed):
    generator = torch.Generator("cuda").manual_seed(100 + seed)
    if kind == "bias":
        return torch.randn(1, 4, 64, 64, generator=generator, dtype=torch.bfloat16, device="cuda")
    shape = (2, 1, 1, 64) if kind == "padding" else (2, 1, 64, 64)
    allowed = torch.rand(shape, generator=generator, device="cuda") < 0.6
    return allowed.index_fill_(3, torch.tensor([seed], device="cuda"), True)  # a row sees one key at least


@pytest.mark.parametrize("kind", ["padding", "allowed", "bias"])
@pytest.mark.parametrize("name", AGAIN[1:])
def test_masked_calls_again(name, kind):
    """Forward and backward, each time with another mask; a backward that the kernel does not have is another's."""
    able(name, (*qkv(), masks(kind, 0)))
    backward = sdpa.explain(*qkv(grad=True), masks(kind, 0), direction="backward")
    learner = None if any(row.kernel == name and row.reasons for row in backward.rows) else name
    for seed in range(4):
        tensors, mask = qkv(grad=True, seed=seed), masks(kind, seed)
        with torch.no_grad():
            close(attend(*tensors, mask, kernel=name), exact(*tensors, mask))
        out = attend(*tensors, mask, kernel=learner)
        upstream = torch.randn_like(out)
        wanted = torch.autograd.grad(exact(*tensors, mask), tensors, upstream)
        for found, want in zip(torch.autograd.grad(out, tensors, upstream), wanted, strict=True):
            close(found, want)
    field = AttentionInputs._fields.index("bias" if kind == "bias" else "allowed")
    runs = [run for run in forwards() if run.choice.kernel.name == name]
    assert any(run.again is not None and run.form.places == (0, 1, 2, field) for run in runs)


FIELDS = {
    "bottom_right": lambda: sdpa.Mask(causal=True, align="bottom_right"),
    "window": lambda: sdpa.Mask(window=(20, 0)),
    "lengths": lambda: sdpa.Mask(lengths=integers(40, 64)),
    "both lengths": lambda: sdpa.Mask(causal=True, lengths=integers(40, 64), query_lengths=integers(64, 30)),
    "segments": lambda: sdpa.Mask(segments=torch.arange(64, device="cuda") // 24),
    "cu_seqlens": lambda: sdpa.Mask(causal=True, cu_seqlens=integers(0, 30, 64)),
    "prefix": lambda: sdpa.Mask(causal=True, prefix=7),
    "prefixes": lambda: sdpa.Mask(causal=True, prefix=integers(7, 20)),
    "alibi": lambda: sdpa.Mask(causal=True, alibi=torch.rand(4, device="cuda")),
    "allowed": lambda: sdpa.Mask(lengths=integers(40, 64), allowed=masks("allowed", 0)),
    "bias": lambda: sdpa.Mask(lengths=integers(40, 64), bias=masks("bias", 0)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FIELDS)
def test_masks_of_fields_again(name, grad):
    """As remembered, and as the operator's, which a mask takes that may be read in another way; the host waits for
    nothing."""
    clear_caches()
    for seed in range(4):
        tensors, mask = qkv(grad=grad, seed=seed), FIELDS[name]()
        if mask.lengths is not None:
            mask.lengths.sub_(seed)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if seed > 1 else mode)
        try:
            out = attend(*tensors, mask)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        wanted = attend(*tensors, Other(**vars(mask)))
        close(out, wanted)
        if grad:
            upstream = torch.randn_like(out)
            for found, want in zip(*(torch.autograd.grad(o, tensors, upstream) for o in (out, wanted)), strict=True):
                close(found, want)
    assert remembered() == 1


def test_lengths_of_a_captured_call():
    """Lengths and a prefix are fitted inside of the graph."""
    tensors, lengths = qkv(), integers(40, 64)
    mask = sdpa.Mask(causal=True, lengths=lengths, prefix=5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            attend(*tensors, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors, mask)
    for shorter in (0, 11):
        lengths.sub_(shorter)
        graph.replay()
        close(out, attend(*tensors, Other(**vars(mask))))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ("triton_flash", *NATIVE))
def test_training_again(name, dtype):
    able(name, qkv(dtype=dtype))
    for seed in range(3):
        tensors = qkv(grad=True, dtype=dtype, seed=seed)
        out = attend(*tensors, kernel=name)
        assert type(out.grad_fn).__name__ == "AttentionBackward"
        upstream = torch.randn_like(out)
        wanted = torch.autograd.grad(exact(*tensors), tensors, upstream)
        for _ in range(2):
            found = torch.autograd.grad(out, tensors, upstream, retain_graph=True)
            for f, w in zip(found, wanted, strict=True):
                close(f, w)
        spread = torch.autograd.grad(out.sum(), tensors)  # a gradient of stride 0
        for f, w in zip(spread, torch.autograd.grad(exact(*tensors).sum(), tensors), strict=True):
            close(f, w)


def test_alignment_and_precision_follow_from_call_to_call():
    """Neither is seen by guards."""
    clear_caches()
    q, k, v = qkv(dtype=torch.bfloat16)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    wanted = exact(q, k, v)
    for _ in range(3):
        for query in (q, odd):
            close(attend(query, k, v), wanted)
    assert remembered() == 2
    tensors = qkv(dtype=torch.float32, M=256, N=256)
    wanted, before = exact(*tensors), torch.get_float32_matmul_precision()
    errors = {}
    try:
        for precision in ("highest", "high", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            errors.setdefault(precision, set()).add((attend(*tensors) - wanted).abs().max().item())
    finally:
        torch.set_float32_matmul_precision(before)
    assert max(errors["highest"]) < 1e-5
    assert max(errors["highest"]) < min(errors["high"]) < 1e-2
    assert remembered() == 4


@pytest.mark.parametrize("name", NATIVE)
def test_second_derivatives(name):
    dtype = torch.float32 if name == "vendor_efficient" else torch.bfloat16
    able(name, qkv(dtype=dtype))
    tensors = qkv(grad=True, dtype=dtype, M=40, N=40)

    def second(out):
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    for f, w in zip(second(attend(*tensors, kernel=name)), second(exact(*tensors)), strict=True):
        close(f, w)


@pytest.mark.parametrize("name", ("triton_flash", "triton_hopper", "vendor_efficient"))
def test_streams_and_graphs(name):
    tensors = qkv()
    able(name, tensors)
    wanted = exact(*tensors)
    for _ in range(2):
        attend(*tensors, kernel=name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = attend(*tensors, kernel=name)
    torch.cuda.current_stream().wait_stream(side)
    close(out, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors, kernel=name)
    others = qkv(seed=1)
    for tensor, other in zip(tensors, others, strict=True):
        tensor.copy_(other)
    graph.replay()
    close(out, exact(*others))


def test_captured_steps_of_a_decoder():
    """One graph, replayed for every position, beside steps that nobody captured."""
    generator = torch.Generator("cuda").manual_seed(0)
    tgt, memory, other = (torch.randn(2, N, 64, generator=generator, device="cuda") for N in (6, 5, 2))
    layer = sdpa.nn.TransformerDecoderLayer(64, 4, 128, 0.0, batch_first=True, device="cuda")
    decoder = sdpa.nn.TransformerDecoder(layer, 2).eval()
    with torch.no_grad():
        eager_cache, cache = (decoder.new_cache(memory, tgt.shape[1]) for _ in range(2))
        wanted = [decoder.step(part, eager_cache) for part in tgt.split(1, 1)]
        given = torch.empty_like(tgt[:, :1])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is compiled and allocated by a first call is, and other values are stored
            for part in other.split(1, 1):
                decoder.step(given.copy_(part), cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decoder.step(given, cache)
    for _ in range(2):  # two generations by one graph
        cache.reset()
        for part, want in zip(tgt.split(1, 1), wanted, strict=True):
            given.copy_(part)
            graph.replay()
            close(out, want)
        assert cache.lengths.tolist() == [tgt.shape[1]] * 2
    assert not torch.equal(wanted[0], wanted[1])


def dropping(q, k, v):
    return attend(q, k, v, dropout_p=0.5)


def test_dropouts_seeds_follow_torchs_generator():
    """Eager seeds are drawn without a launch, and torch.cuda's generator decides them all the same."""
    q, k, v = qkv()
    torch.manual_seed(3)
    first = [dropping(q, k, v) for _ in range(3)]
    state = torch.cuda.get_rng_state()
    fourth = dropping(q, k, v)
    assert not any(torch.equal(a, b) for a, b in zip(first, [*first[1:], fourth], strict=True))
    torch.cuda.set_rng_state(state)
    assert torch.equal(dropping(q, k, v), fourth)
    torch.manual_seed(3)
    assert all(torch.equal(dropping(q, k, v), out) for out in first)
    torch.manual_seed(4)
    assert not torch.equal(dropping(q, k, v), first[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.manual_seed(3)
        assert torch.equal(dropping(q, k, v), first[0])


def test_dropout_under_checkpointing_and_in_inference_mode():
    q, k, v = (t.requires_grad_() for t in qkv())
    with torch.inference_mode():
        torch.manual_seed(11)
        dropping(q, k, v)
    grads = []
    for run in (dropping, partial(checkpoint, dropping, use_reentrant=False)):
        torch.manual_seed(11)
        grads.append(torch.autograd.grad(run(q, k, v).float().square().sum(), (q, k, v)))
    for a, b in zip(*grads, strict=True):  # gradients of queries may be sums in the order of arrival
        assert (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()


def test_dropout_in_a_captured_graph():
    """The seed is drawn by each replay."""
    q, k, v = qkv()
    for _ in range(3):
        dropping(q, k, v)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        out = dropping(q, k, v)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert all(torch.isfinite(out).all() for out in found)
