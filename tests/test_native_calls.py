"""Calls that are left to torch's own operator, shown with torch's CPU flash in that role."""

from __future__ import annotations

import functools
import operator
import subprocess
import sys

import pytest
import torch
from remembered import forwards, remembered
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import sdpa
from sdpa import calls as memory
from sdpa import entry
from sdpa import scaled_dot_product_attention as attend
from sdpa.alignment import ADDRESS_BITS
from sdpa.bench import tuner
from sdpa.calls import CALLS
from sdpa.dispatch import select
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.vendor import flash_cpu
from sdpa.kernels.vendor.common import is_causal
from sdpa.problem import AttentionInputs, AttentionProblem
from sdpa.repeated import in_python
from sdpa.torch_private import float32_precision


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """torch's CPU flash as the GPU rows of torch are: called as torch does it. A list of the calls."""
    calls = []

    def make(inputs):
        def operator(q, k, v, *options, **named):
            calls.append(q.shape)
            return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, *options, **named)

        return operator, (0.0, is_causal(inputs)), {"attn_mask": None, "scale": inputs.scale}

    monkeypatch.setattr(flash_cpu, "native", make, raising=False)
    select.clear_caches()
    yield calls
    select.clear_caches()


def qkv(grad: bool = True, dtype: torch.dtype = torch.float32, N: int = 12):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, 8, generator=generator, dtype=dtype).requires_grad_(grad) for n in (12, N, N)]


def vendor(*tensors, **options):
    return attend(*tensors, kernel="vendor_cpu_flash", **options)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": sdpa.Mask(causal=True)}], ids=["flag", "mask"])
def test_training_has_our_node(native, options):
    """Which saves the log-sum-exp that the backward of every kernel takes, and has a second derivative."""
    tensors = qkv()
    with sdpa.sdpa_kernel("vendor_cpu_flash"):
        for _ in range(3):
            out = attend(*tensors, **options)
    assert type(out.grad_fn).__name__ == "AttentionBackward"
    assert not native
    assert [run.choice.kernel.name for run in forwards()] == [sdpa.last_choice().kernel.name] == ["vendor_cpu_flash"]
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    upstream = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(o, tensors, upstream) for o in (out, wanted))
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f, w)


def test_inference_is_left_to_torch(native):
    tensors = qkv(grad=False)
    for _ in range(2):
        out = vendor(*tensors)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(*tensors))
    assert len(native) == 2


def test_derivatives_of_derivatives():
    tensors = qkv(dtype=torch.float64)
    assert gradcheck(vendor, tensors, fast_mode=True)
    assert gradgradcheck(vendor, tensors, fast_mode=True)
    assert gradgradcheck(lambda k: vendor(tensors[0].detach(), k, tensors[2].detach()), tensors[1], fast_mode=True)


def test_second_derivative_sees_what_hooks_made_of_the_gradient():
    tensors = qkv(dtype=torch.float64)
    out = vendor(*tensors)
    plain = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    out.register_hook(lambda grad: 3 * grad)
    for _ in range(2):  # the graph is kept, and gone through again
        found = torch.autograd.grad(out.sum(), tensors, create_graph=True)
        for f, p in zip(found, plain, strict=True):
            assert f.requires_grad
            assert torch.allclose(f, 3 * p)


def test_another_call_is_not_changed_by_a_hook():
    tensors = qkv()
    first, second = vendor(*tensors), vendor(*tensors)
    wanted = torch.autograd.grad(second.sum(), tensors[0], retain_graph=True)[0]
    first.register_hook(lambda grad: 0 * grad)
    assert torch.equal(torch.autograd.grad(second.sum(), tensors[0])[0], wanted)


def test_checkpointing():
    tensors = qkv()
    wanted = torch.autograd.grad(vendor(*tensors).sum(), tensors)
    found = torch.autograd.grad(checkpoint(vendor, *tensors, use_reentrant=False).sum(), tensors)
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f, w)


def test_what_torch_refuses_another_kernel_answers(monkeypatch):
    tensors = qkv(grad=False)

    def refused(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(flash_cpu, "native", lambda inputs: (refused, (), {}))
    with sdpa.sdpa_kernel(["vendor_cpu_flash", "cpu_flash"], set_priority=True):
        with pytest.warns(UserWarning, match="cpu_flash answers instead"):
            out = attend(*tensors)
        learned = attend(*qkv())  # the operator alone refuses here: the same kernel's own forward does not
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(*tensors), atol=1e-6)
    assert torch.allclose(learned, out, atol=1e-6)


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "grad", "no_grad", "autocast", "one twice"])
def test_a_call_is_remembered_for_what_it_was_made_of(change, native):
    q, k, v = qkv(grad=False)
    vendor(q, k, v)
    vendor(q, k, v)
    assert remembered() == len(recent()) == 1
    run = {
        "shape": lambda: vendor(q, k[:, :, :5], v[:, :, :5]),
        "stride": lambda: vendor(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        "dtype": lambda: vendor(q.double(), k.double(), v.double()),
        "grad": lambda: vendor(q.clone().requires_grad_(), k, v),
        "no_grad": lambda: torch.no_grad()(vendor)(q.clone().requires_grad_(), k, v),
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)(vendor)(q, k, v),
        "one twice": lambda: vendor(q, k, k),
    }[change]
    out = run()
    assert torch.equal(out, run())
    assert remembered() == 2
    assert len(recent()) == 2
    assert (out.dtype == torch.bfloat16) == (change == "autocast")
    assert out.requires_grad == (change == "grad")


def recent():
    return [entry for latest in CALLS.recent.values() for entry in latest]


def test_autocast_is_seen_whenever_it_changes(native):
    """Off and on, by the guards; one dtype or another, by being asked."""
    tensors = qkv(grad=False)
    for dtype in (None, None, torch.bfloat16, None, torch.float16, torch.bfloat16, None, torch.float16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            assert vendor(*tensors).dtype == (dtype or torch.float32)
    assert remembered() == len(recent()) == 3


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("fact", ["alignment", "precision"])
def test_facts_of_a_gpu_are_asked_again(fact, built, native, monkeypatch):
    """Which guards do not see, shown with tensors of a CPU."""

    def facts(tensors):
        if fact == "precision":
            return memory.Facts(precision=float32_precision())
        return memory.Facts(alignment=functools.reduce(operator.or_, (t.data_ptr() for t in tensors)) & ADDRESS_BITS)

    monkeypatch.setattr(entry, "facts_of", facts)
    if not built:
        monkeypatch.setattr(entry, "recognise", in_python.recognise)
    q, k, v = qkv(grad=False)
    odd = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)

    def call(changed):
        if fact == "alignment":
            return vendor(odd if changed else q, k, v)
        torch.set_float32_matmul_precision("high" if changed else "highest")
        return vendor(q, k, v)

    try:
        for changed in (False, False, True, True, False, True):
            call(changed)
            assert len(recent()) == remembered() == 1 + (remembered() > 1)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert remembered() == 2


def test_recent_calls_are_few():
    for N in range(1, 20):
        vendor(*qkv(grad=False, N=N))
    assert [len(found) for found in CALLS.recent.values()] == [memory.LATEST]
    select.clear_caches()
    assert not CALLS.recent
    assert not CALLS.known


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_remembered_calls_stay_out_of_transforms(transform, native):
    q, k, v = qkv(grad=False)
    wanted = vendor(q, k, v)
    vendor(q, k, v)
    before = len(native)
    if transform == "vmap":
        out = torch.vmap(lambda scale: vendor(q, k, v) * scale)(torch.ones(2))[0]
    elif transform == "grad":
        _, out = torch.func.grad(lambda x: (x.sum(), vendor(q, k, v)), has_aux=True)(q)
    else:
        _, _, out = torch.func.jvp(lambda x: (x.sum(), vendor(q, k, v)), (q,), (q,), has_aux=True)
    torch.testing.assert_close(out, wanted)
    assert len(native) == before


def test_a_backward_that_no_kernel_has_is_told_of_in_the_backward(monkeypatch, native):
    """Also where kernels were given an order, in which the backward has to be looked for."""
    kernel = by_name()["vendor_cpu_flash"]
    refuse = type(kernel).why_not

    def why_not(self, problem):
        return ["no backward today"] if problem.direction == "backward" else refuse(self, problem)

    monkeypatch.setattr(type(kernel), "why_not", why_not)
    select.clear_caches()
    with sdpa.sdpa_kernel(["vendor_cpu_flash", "cpu_flash"], set_priority=True):
        out = attend(*qkv())
        with pytest.raises(RuntimeError, match="no backward today"):
            out.sum().backward()
    select.clear_caches()


@pytest.mark.parametrize("warm", [False, True])
def test_infrastructure_modes_see_the_operator(warm):
    """make_fx, whose mode leaves no mark in the dispatch keys that guards compare."""
    tensors = qkv(grad=False)
    for _ in range(3 * warm):
        attend(*tensors)
    graph = make_fx(lambda *given: attend(*given, is_causal=False))(*tensors).graph
    assert "sdpa.attention_forward.default" in [str(node.target) for node in graph.nodes]


def test_a_nested_tensor_without_strides_is_not_compared_with_remembered_ones():
    """In a process of its own, which a guard would end."""
    script = "\n".join([
        "import torch, sdpa",
        "attend = sdpa.scaled_dot_product_attention",
        "q = torch.randn(1, 2, 4, 8)",
        "k, v, dense = q.clone(), q + 1, torch.randn(4, 4)",
        "masks = None, dense, sdpa.Mask(bias=dense)",
        "[attend(q, k, v, mask) for mask in 3 * masks]",
        "entries = [torch.randn(2, 5, 8), torch.randn(2, 7, 8)]",
        "n = torch.nested.nested_tensor(entries)",
        "for found, entry in zip(attend(n, n, n).unbind(), entries, strict=True):",
        "    torch.testing.assert_close(found, attend(entry, entry, entry))",
        "for call in (q, k, v, n), (q, k, v, sdpa.Mask(bias=n)):",
        "    try: attend(*call)",
        "    except RuntimeError as error: assert 'Nested' in str(error)",
        "    else: raise SystemExit(3)",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_precision_said_by_torchs_newer_switch(dtype, device):
    """It is for float32 on a GPU; a GPU's tensor is one whose device is only a name."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with FakeTensorMode() as mode:
        q = FakeTensor(mode, torch.empty(1, 2, 16, 8, dtype=dtype, device="meta"), torch.device(device))
        try:
            for name, asked in (("tf32", True), ("ieee", False)):
                matmul.fp32_precision = name
                found = AttentionProblem.of(AttentionInputs(q, q, q, 1.0)).tf32
                assert found == (asked and q.is_cuda and dtype == torch.float32)
        finally:
            matmul.fp32_precision = before


def test_a_bias_in_other_strides_is_another_call():
    tensors, bias = qkv(grad=False), torch.randn(2, 4, 12, 12)
    rows, columns = bias[:, :, :1].expand(-1, -1, 12, -1), bias[..., :1].expand(-1, -1, -1, 12)
    shared = bias[:1].expand(2, -1, -1, -1)
    given = ((bias, 8, False), (shared, 4, False), (rows, 0, False), (columns, 0, True))
    for mask, matrices, narrow in given:
        attend(*tensors, mask)
        problem = sdpa.last_choice().problem
        assert (problem.bias_matrices, problem.narrow_mask) == (matrices, narrow)


def test_derivatives_of_derivatives_of_what_is_checkpointed():
    tensors = qkv(dtype=torch.float64)

    def second(out):
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    found = second(checkpoint(vendor, *tensors, use_reentrant=False))
    for f, w in zip(found, second(vendor(*tensors)), strict=True):
        assert torch.allclose(f, w)


def test_the_tuner_times_what_repeated_calls_run(native):
    problem = AttentionProblem.of(build_inputs(*qkv(grad=False), Options()))
    inputs = build_inputs(*qkv(grad=False), Options())
    tuner.repeated(by_name()["vendor_cpu_flash"], None, problem, inputs)()
    assert len(native) == 1
    masked = build_inputs(*qkv(grad=False), Options(torch.zeros(12, 12)))
    results = tuner.repeated(by_name()["vendor_cpu_flash"], None, AttentionProblem.of(masked), masked)()
    assert results.out.shape == (2, 4, 12, 8)
    assert len(native) == 1
