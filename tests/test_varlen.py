"""varlen_attention against the plain function, document by document."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import sdpa
from helpers import CLOSE, CU_Q, MAX_K, MAX_Q, OPCHECKS, T_Q, WIDE, draw, int32, operands
from sdpa import Mask, packing, sequences
from sdpa.dispatch.catalog import ALL_DTYPES, by_name
from sdpa.dispatch.select import clear_caches
from sdpa.inputs import Options
from sdpa.operators import BACKWARD, FORWARD, backward_arguments, call_forward, forward_arguments
from sdpa.problem import AttentionProblem, Results
from sdpa.reference import attention as reference
from sdpa.sequences import Documents, build_packed
from sdpa.testing import compare, forward_band

plain, varlen = sdpa.scaled_dot_product_attention, sdpa.varlen_attention
NAN = math.nan
DTYPES = sorted(ALL_DTYPES, key=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


# How the front door passes documents on, by what the fused kernels of a device take: as segments of one batch entry,
# gathered into batch entries, or as they are, which math then answers.
FORMS = {"segments": {"segments"}, "apart": set(), "packed": {"packed"}}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    return take_form(request.param, monkeypatch)


def take_form(name, monkeypatch):
    served = {feature: frozenset({"cpu"} if feature in FORMS[name] else ()) for feature in sequences.SERVED}
    monkeypatch.setattr(sequences, "SERVED", served)
    clear_caches()  # of calls that were made where other forms are served
    return name


def alone(tensors, cu_q, cu_k, options_of):
    """out (T, H, Dv) and lse (H, T) of the plain function, one document after the other, and nothing around them."""
    q, k, v = tensors
    out, lse = q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for b, (start, end, first, last) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        rows = (q[start:end], k[first:last], v[first:last])
        rows = (t.transpose(0, 1).unsqueeze(0) for t in rows)
        one, its_lse = plain(*rows, return_lse=True, **options_of(b))
        out = torch.cat([out[:start], one[0].transpose(0, 1), out[end:]])
        lse = torch.cat([lse[:, :start], its_lse[0], lse[:, end:]], dim=1)
    return out, lse


SLOPES = draw(4, dtype=torch.float32).abs()
OWN_SLOPES = draw(4, 4, dtype=torch.float32).abs()
LENGTHS, QUERY_LENGTHS, PREFIX = int32(2, 4, 0, 20), int32(4, 0, 1, 3), int32(1, 2, 0, 4)
SINKS = draw(4)
# name: the options of the packed call, and of document b alone where they differ
CASES = {
    "full": ({}, None),
    "causal": ({"is_causal": True}, None),
    "bottom_right": ({"attn_mask": Mask(causal=True, align="bottom_right")}, None),
    "window": ({"attn_mask": Mask(window=(2, 1))}, None),
    "window_bottom_right": ({"attn_mask": Mask(window=(2, 0), align="bottom_right")}, None),
    "lengths": ({"attn_mask": Mask(lengths=LENGTHS)}, lambda b: {"attn_mask": Mask(lengths=LENGTHS[b])}),
    "both_lengths": (
        {"attn_mask": Mask(lengths=LENGTHS, query_lengths=QUERY_LENGTHS, causal=True, align="bottom_right")},
        lambda b: {
            "attn_mask": Mask(
                lengths=LENGTHS[b], query_lengths=QUERY_LENGTHS[b], causal=True, align="bottom_right"
            )
        },
    ),
    "prefix": (
        {"attn_mask": Mask(causal=True, prefix=PREFIX)},
        lambda b: {"attn_mask": Mask(causal=True, prefix=PREFIX[b])},
    ),
    "one_prefix": ({"attn_mask": Mask(causal=True, prefix=2)}, None),
    "alibi": ({"attn_mask": Mask(alibi=SLOPES)}, None),
    "alibi_of_each": (
        {"attn_mask": Mask(alibi=OWN_SLOPES, causal=True)},
        lambda b: {"attn_mask": Mask(alibi=OWN_SLOPES[b], causal=True)},
    ),
    "alibi_bottom_right": ({"attn_mask": Mask(alibi=SLOPES, causal=True, align="bottom_right")}, None),
    "softcap": ({"softcap": 1.5, "is_causal": True}, None),
    "scale": ({"scale": -0.4}, None),
    "sinks": ({"sinks": SINKS, "is_causal": True}, None),
}  # fmt: skip


@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
@pytest.mark.parametrize("name", CASES)
def test_documents_get_what_they_get_alone(name, own, form):
    options, options_of = CASES[name]
    tensors, documents = operands(own)
    got = varlen(*tensors, *documents, return_lse=True, **options)
    wanted = alone(tensors, documents[0], documents[1], options_of or (lambda b: options))
    inside = wanted[1] > -math.inf if "sinks" not in options else torch.arange(T_Q) < CU_Q[-1]
    upstream = draw(*got[0].shape, seed=7), draw(*got[1].shape, seed=8) * inside
    grads = []
    for out, lse in (got, wanted):
        loss = (out * upstream[0]).sum() + torch.where(inside, lse * upstream[1], 0.0).sum()
        grads.append(torch.autograd.grad(loss, tensors))
    for ours, theirs in zip((*got, *grads[0]), (*wanted, *grads[1]), strict=True):
        assert torch.allclose(ours, theirs, **CLOSE)
    assert not got[0][13:].any() and (got[1][:, 13:] == -math.inf).all() and not grads[0][0][13:].any()


def test_form_that_each_device_gets(form):
    """The one that this file's forms are meant to be; and where positions of a document matter, no segments."""
    tensors, documents = operands(own=True)
    inputs = build_packed(*tensors, Documents(*documents), Options(is_causal=True))
    served = sequences.served_form(inputs)
    got = "packed" if served.cu_q is not None else "apart" if served.q_segments is None else "segments"
    assert got == form
    for mask in (Mask(lengths=LENGTHS), Mask(causal=True, prefix=1), Mask(alibi=OWN_SLOPES)):
        inputs = build_packed(*tensors, Documents(*documents), Options(mask))
        assert sequences.served_form(inputs).q_segments is None
    copied = build_packed(*tensors, Documents(CU_Q, CU_Q.clone(), MAX_Q, MAX_Q), Options(is_causal=True))
    assert sequences.served_form(copied).q_segments is None


def test_a_fused_kernel_answers_on_the_cpu():
    for own in (False, True):
        tensors, documents = operands(own)
        varlen(*tensors, *documents, is_causal=True)
        assert sdpa.last_choice().kernel.name == "cpu_flash"
        varlen(*tensors, *documents, is_causal=True, kernel="math")
        assert sdpa.last_choice().kernel.name == "math"


def test_kernels_that_do_not_name_the_feature_refuse():
    tensors, documents = operands()
    packed = build_packed(*tensors, Documents(*documents), Options(Mask(causal=True, align="bottom_right")))
    problem = AttentionProblem.of(packed)
    assert (problem.B, problem.M, problem.N) == (4, MAX_Q, MAX_K)
    assert problem.features == {"packed", "band", "bottom_right"}
    assert by_name()["cpu_flash"].why_not(problem) == ["does not support packed sequences (cu_q, cu_k)"]
    assert not by_name()["math"].why_not(problem)


@dtypes
@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_every_dtype_within_the_budget(dtype, own, form):
    """The reference takes packed inputs as they are; it is what the kernels for them will be held against."""
    tensors, documents = operands(own, Hkv=2, dtype=dtype)
    options = Options(is_causal=True, enable_gqa=True)
    inputs = build_packed(*(t.detach() for t in tensors), Documents(*documents), options)
    wanted, rough = (reference(inputs, wide) for wide in (WIDE, dtype))
    got = varlen(*tensors, *documents, is_causal=True, enable_gqa=True, return_lse=True)
    assert got[0].dtype == dtype and got[1].dtype == (WIDE if dtype == WIDE else torch.float32)
    band = forward_band(packing.ordinary(inputs), wanted)
    for name, ours, want, plainly, extra in zip(("out", "lse"), got, wanted, rough, (band, 0.0), strict=True):
        want, plainly = (t.squeeze(0) if name == "lse" else t.squeeze(0).transpose(0, 1) for t in (want, plainly))
        found = compare(name, ours.detach(), want, plainly, 16, extra)
        assert found.ok, found


@pytest.mark.parametrize("Hkv", [1, 2], ids=lambda h: f"Hkv{h}")
def test_fewer_key_heads(Hkv, form):
    tensors, documents = operands(Hkv=Hkv)
    wanted = alone(tensors, *documents[:2], lambda b: {"enable_gqa": True})[0]
    assert torch.allclose(varlen(*tensors, *documents, enable_gqa=True), wanted, **CLOSE)
    if Hkv == 1:
        assert torch.allclose(varlen(*tensors, *documents), wanted, **CLOSE)


def test_gradient_of_sinks(form):
    (q, k, v), documents = operands()
    leaves = [SINKS.clone().requires_grad_() for _ in range(2)]
    out, lse = varlen(q, k, v, *documents, sinks=leaves[0], return_lse=True)
    assert (lse[:, 13:] == -math.inf).all() and lse[:, :13].isfinite().all()
    wanted, wanted_lse = alone((q, k, v), *documents[:2], lambda b: {"sinks": leaves[1]})
    for leaf, x, y in ((leaves[0], out, lse), (leaves[1], wanted, wanted_lse)):
        ((x * draw(*x.shape)).sum() + y[:, :13].sum()).backward()
        assert leaf.grad.any()
    assert torch.allclose(leaves[0].grad, leaves[1].grad, **CLOSE)


@dtypes
@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_what_is_in_no_document_may_be_nan(dtype, own, form):
    results = []
    for spoilt in (False, True):
        tensors, documents = operands(own, dtype=dtype)
        documents = (*documents[:2], MAX_Q + 2, MAX_K + 2)  # room for rows behind the last document
        if spoilt:
            for tensor, cu in zip(tensors, (CU_Q, documents[1], documents[1]), strict=True):
                tensor.data[cu[-1] :] = NAN
        out, lse = varlen(*tensors, *documents, is_causal=True, return_lse=True)
        upstream = torch.ones_like(out)
        upstream[13:] = NAN if spoilt else 1.0
        grads = torch.autograd.grad(out, tensors, upstream)
        assert not out[13:].any() and not grads[0][13:].any()
        assert not any(grad[documents[1][-1] :].any() for grad in grads[1:])
        results.append((out, lse, *grads))
    for clean, spoilt in zip(*results, strict=True):
        # A kernel may compute in a wider type where it finds NaN: one rounding of numbers up to 8.
        assert torch.allclose(clean, spoilt, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_first_document_need_not_begin_at_the_first_row(form):
    (q, k, v), _ = operands(own=True)
    cu = int32(2, 5, 9)
    out, lse = varlen(q, k, v, cu, cu, 4, 4, is_causal=True, return_lse=True)
    wanted, wanted_lse = alone((q, k, v), cu, cu, lambda b: {"is_causal": True})
    assert torch.allclose(out, wanted, **CLOSE) and torch.allclose(lse, wanted_lse, **CLOSE)


EMPTY = {
    "no_documents": lambda: (*zeros(3, 3), int32(0), int32(0), 0, 0),
    "no_rows": lambda: (*zeros(0, 0), int32(0, 0, 0), int32(0, 0, 0), 0, 0),
    "no_queries": lambda: (*zeros(0, 4), int32(0, 0), int32(0, 4), 0, 4),
    "no_keys": lambda: (*zeros(4, 0), int32(0, 4), int32(0, 0), 4, 0),
    "no_keys_but_room": lambda: (*zeros(4, 0), int32(0, 4), int32(0, 0), 4, 9),
    "empty_documents": lambda: (*zeros(4, 4), int32(0, 0, 0), int32(0, 0, 0), 1, 1),
    "lengths_of_0": lambda: (*zeros(4, 4), int32(0, 4), int32(0, 4), 0, 0),
}


def zeros(M, N):
    return draw(M, 2, 4).requires_grad_(), draw(N, 2, 4).requires_grad_(), draw(N, 2, 4).requires_grad_()


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_nothing_to_see_gives_zeros_with_zero_gradients(name, sinks, form):
    q, k, v, *documents = EMPTY[name]()
    out, lse = varlen(q, k, v, *documents, sinks=draw(2) if sinks else None, return_lse=True)
    assert out.shape == q.shape and not out.any() and lse.shape == (2, q.shape[0])
    assert sinks or (lse == -math.inf).all()
    for grad, leaf in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def test_dropout_is_reproducible_and_counted_by_document(monkeypatch):
    (q, k, v), documents = operands()
    results = []
    for name in ("apart", "packed", "packed"):
        take_form(name, monkeypatch)
        torch.manual_seed(5)
        results.append(varlen(q, k, v, *documents, dropout_p=0.4))
    assert torch.equal(results[1], results[2]) and torch.allclose(results[0], results[1], **CLOSE)
    assert not torch.allclose(results[0], varlen(q, k, v, *documents), **CLOSE)
    torch.manual_seed(5)
    inputs = build_packed(q, k, v, Documents(*documents), Options(dropout_p=0.4))
    assert torch.allclose(reference(inputs).out[0].transpose(0, 1), results[1], **CLOSE)


def test_dropout_of_everything(form):
    tensors, documents = operands()
    out = varlen(*tensors, *documents, dropout_p=1.0)
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_every_order_of_derivative(own, form):
    cu_q, cu_k = int32(0, 2, 2, 3), int32(0, 1, 2, 4)
    q, k, v = (draw(n, 2, 2, seed=i).requires_grad_() for i, n in enumerate((4, 4 if own else 5, 4 if own else 5)))
    documents = (cu_q, cu_q, 2, 2) if own else (cu_q, cu_k, 2, 2)

    def function(*tensors):
        return varlen(*tensors, *documents, is_causal=True)

    assert gradcheck(function, (q, k, v), check_forward_ad=True)
    assert gradgradcheck(function, (q, k, v), check_fwd_over_rev=True)


def test_vmap_takes_samples_apart(form):
    (q, k, v), documents = operands(own=True)
    samples = torch.stack([q, 2 * q, -q]).detach()

    def function(x):
        return varlen(x, k, v, *documents, is_causal=True)

    wanted = torch.stack([function(x) for x in samples])
    assert torch.allclose(torch.vmap(function)(samples), wanted, **CLOSE)
    gradient = torch.func.grad(lambda x: function(x).square().sum())
    assert torch.allclose(torch.vmap(gradient)(samples), torch.stack([gradient(x) for x in samples]), **CLOSE)


def test_views_are_passed_without_copies():
    (q, k, v), documents = operands()
    packed = build_packed(q, k, v, Documents(*documents), Options())
    assert [t.data_ptr() for t in packed[:3]] == [t.data_ptr() for t in (q, k, v)]
    assert packed.q.shape == (1, 4, T_Q, 6) and varlen(q, k, v, *documents).is_contiguous()


def test_strides(form):
    (q, k, v), documents = operands()
    wanted = varlen(q, k, v, *documents, is_causal=True)
    qkv = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    wide = [torch.stack([t, t], dim=-1).flatten(-2)[..., ::2] for t in (q, k, v)]
    for tensors in (qkv, wide):
        assert torch.allclose(varlen(*tensors, *documents, is_causal=True), wanted, **CLOSE)


def test_nothing_is_read_on_the_host(form):
    """A fake tensor has no values to read: whatever asks for one raises."""
    mode = FakeTensorMode()
    for own in (False, True):
        tensors, (cu_q, cu_k, *longest) = operands(own)
        q, k, v, cu_q, cu_k = (mode.from_tensor(t) for t in (*tensors, cu_q, cu_k))
        with mode:
            out, lse = varlen(q, k, v, cu_q, cu_q if own else cu_k, *longest, return_lse=True)
        assert out.shape == (T_Q, 4, 5) and lse.shape == (4, T_Q)


def test_flop_counter_adds_up_documents(monkeypatch):
    take_form("packed", monkeypatch)
    tensors, documents = operands()
    with FlopCounterMode(display=False) as counter:
        varlen(*tensors, *documents).sum().backward()
    pairs = 4 * (5 * 3 + 0 * 4 + 1 * 0 + 7 * 9)
    assert counter.get_total_flops() == 2 * pairs * (6 + 5) + 2 * pairs * (3 * 6 + 2 * 5)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("own", [False, True], ids=["cross", "self"])
def test_one_graph_with_the_same_results(own, training, form):
    torch._dynamo.reset()

    def function(q, k, v, cu_q, cu_k, max_q, max_k):
        return varlen(q, k, v, cu_q, cu_q if own else cu_k, max_q, max_k, is_causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for longer in (0, 4):
        tensors, (cu_q, cu_k, max_q, max_k) = operands(own)
        tensors = [torch.cat([t, t[:longer]]).detach().requires_grad_(training) for t in tensors]
        cu_q, cu_k = (torch.cat([cu[:-1], cu[-1:] + longer]) for cu in (cu_q, cu_k))
        arguments = (*tensors, cu_q, cu_k, max_q + longer, max_k + longer)
        got, wanted = compiled(*arguments), function(*arguments)
        assert torch.allclose(got, wanted, **CLOSE)
        if training:
            grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (got, wanted)]
            assert all(torch.allclose(a, b, **CLOSE) for a, b in zip(*grads, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("needs_lse", [False, True], ids=["out", "lse"])
def test_opcheck(needs_lse):
    tensors, documents = operands(Hkv=2, dtype=torch.float32)
    options = Options(Mask(causal=True, lengths=LENGTHS), enable_gqa=True)
    inputs = build_packed(*(t.detach() for t in tensors), Documents(*documents), options)
    torch.library.opcheck(FORWARD, forward_arguments(inputs, needs_lse, ""), test_utils=OPCHECKS)
    results = Results(*call_forward(inputs, True, ""))
    upstream = Results(torch.ones_like(results.out), torch.ones_like(results.lse) if needs_lse else None)
    given = backward_arguments(inputs, results, upstream, False, "")
    torch.library.opcheck(BACKWARD, given, test_utils=OPCHECKS)


def test_autocast():
    (q, k, v), documents = operands(own=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen(q, k, v, *documents)
    assert torch.equal(out, varlen(*(t.bfloat16() for t in (q, k, v)), *documents))


def test_torch_function_takes_the_whole_call():
    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    tensors, documents = operands()
    with Recorder():
        varlen(*tensors, *documents, is_causal=True)
    assert seen[0] == "varlen_attention"
