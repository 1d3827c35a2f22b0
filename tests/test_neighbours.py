"""What stands around a call in torch: autocast, layouts and strides, subclasses, nested, meta and fake tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import helpers
import sdpa
from helpers import qkv
from sdpa import Mask
from sdpa.dispatch.catalog import ALL_DTYPES

attention = sdpa.scaled_dot_product_attention
draw = partial(helpers.draw, dtype=torch.float32)
DTYPES = sorted(ALL_DTYPES, key=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def test_autocast_of_float32_and_mixed_inputs():
    q, k, v = qkv()
    half = [t.bfloat16() for t in (q, k, v)]
    wanted = attention(*half)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, k, v), wanted)
        assert torch.equal(attention(q.bfloat16(), k, v.bfloat16()), wanted)
        assert torch.equal(attention(*half), wanted)
        assert attention(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert attention(q, k, v).dtype == torch.float16


def test_autocast_of_masks():
    q, k, v = qkv()
    bias, half = draw(9, 11), [t.bfloat16() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, k, v, bias), attention(*half, bias.bfloat16()))
        assert torch.equal(attention(q, k, v, Mask(bias=bias)), attention(*half, bias.bfloat16()))
        assert torch.equal(attention(q, k, v, bias > 0), attention(*half, bias > 0))


def test_autocast_leaves_float64():
    q, k, v = qkv(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.float64
        assert torch.equal(attention(q, k, v), attention(q, k, v)) and attention(q, k, v).dtype == torch.float64


def test_autocast_gradients_return_to_float32():
    leaves = [t.requires_grad_() for t in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves, is_causal=True)
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in leaves)


def outside(t):
    """The same values in (B, M, H, D) memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@dtypes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_results_and_gradients_follow_the_layout(causal, dtype):
    inside = [t.requires_grad_() for t in qkv(dtype=dtype)]
    rows = [outside(t.detach()).requires_grad_() for t in inside]
    results = [attention(*leaves, is_causal=causal) for leaves in (inside, rows)]
    assert results[0].is_contiguous() and results[1].transpose(1, 2).is_contiguous()
    assert torch.allclose(results[0], results[1], rtol=0, atol=4 * torch.finfo(dtype).eps)
    gradients = [
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        for out, leaves in zip(results, (inside, rows), strict=True)
    ]
    assert all(g.is_contiguous() for g in gradients[0])
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients[1])


VIEWS = {
    "transposed": outside,
    "column_strided": lambda t: torch.stack([t, torch.full_like(t, 1e4)], -1).flatten(-2)[..., ::2],
    "row_strided": lambda t: torch.stack([t, torch.full_like(t, 1e4)], 3).flatten(2, 3)[:, :, ::2],
    "odd_offset": lambda t: torch.cat([torch.full((1,), 1e4, dtype=t.dtype), t.flatten()])[1:].view(t.shape),
    "slice_of_wider": lambda t: torch.cat([torch.full_like(t, 1e4), t, torch.full_like(t, 1e4)], -1)[..., 8:16],
    "packed_qkv": lambda t: torch.stack([torch.full_like(t, 1e4), t], 2)[:, :, 1],
    "column_major": lambda t: t.mT.contiguous().mT,
}


@dtypes
@pytest.mark.parametrize("view", VIEWS)
def test_strides_and_offsets(view, dtype, matches_torch):
    q, k, v = (VIEWS[view](t) for t in qkv(dtype=dtype))
    matches_torch(q, k, v)
    matches_torch(q, k, v, is_causal=True)


def test_expanded_tensors(matches_torch):
    q, k, v = qkv()
    matches_torch(q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 3, -1, -1), v[:, :, :1].expand(-1, -1, 11, -1))


def test_many_batch_entries_and_heads():
    """More than a CUDA grid's 65535 in its second dimension."""
    B, H = 1030, 64
    q, k, v = draw(B, H, 2, 4), draw(B, H, 3, 4), draw(B, H, 3, 4)
    out = attention(q, k, v)
    ends = slice(B - 2, B)
    assert torch.allclose(out[ends], F.scaled_dot_product_attention(q[ends], k[ends], v[ends]), atol=1e-6)


def test_the_same_bits_twice():
    for dtype in DTYPES:
        leaves = [t.requires_grad_() for t in qkv(M=129, N=131, D=32, dtype=dtype)]
        runs = []
        for _ in range(2):
            out = attention(*leaves, is_causal=True)
            runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


BIASES = {"rows": (2, 1, 1, 11), "heads": (1, 3, 1, 1), "matrix": (9, 11), "column": (9, 1), "full": (2, 3, 9, 11)}


@pytest.mark.parametrize("kernel", [None, "math"], ids=str)
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_gradient_of_a_bias_has_its_shape(shape, kernel):
    bias = draw(*shape).requires_grad_()
    tensors = qkv()
    grads = []
    for run in (lambda *a: attention(*a, kernel=kernel), F.scaled_dot_product_attention):
        wide = [t.double() if run is F.scaled_dot_product_attention else t for t in (*tensors, bias)]
        out = run(*wide)
        (grad,) = torch.autograd.grad(out.square().sum(), bias)
        grads.append(grad)
    assert grads[0].shape == shape and torch.allclose(*grads, atol=1e-4)


def test_deterministic_mode_is_respected_and_explained():
    torch.use_deterministic_algorithms(True)
    try:
        explanation = sdpa.explain(*qkv())
        leaves = [t.requires_grad_() for t in qkv()]
        attention(*leaves).sum().backward()
        assert sdpa.last_choice().kernel.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert explanation.problem.deterministic
    refused = {row.kernel: row.reasons for row in explanation.rows}
    assert any("deterministic" in reason for reason in refused["vendor_cudnn"])


class Logged(torch.Tensor):
    calls: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_the_call():
    q, k, v = qkv()
    out = attention(q.as_subclass(Logged), k, v, scale=0.5)
    assert attention in Logged.calls and isinstance(out, Logged)
    assert torch.equal(out.as_subclass(torch.Tensor), attention(q, k, v, scale=0.5))


def test_a_subclass_may_answer_itself():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return (func, sorted(kwargs))

    func, names = attention(*qkv()[:2], qkv()[2].as_subclass(Own), return_lse=True)
    assert func is attention and "return_lse" in names and "kernel" in names


def jagged(lengths, H=3, D=8, seed=0):
    rows = [draw(n, H, D, seed=seed + i) for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2), rows


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_jagged_nested_tensors(causal):
    lengths = (4, 1, 7)
    (q, rows), (k, keys), (v, values) = (jagged(lengths, seed=s) for s in (0, 10, 20))
    out = attention(q, k, v, is_causal=causal)
    assert out.is_nested and out.layout == torch.jagged
    for got, *one in zip(out.unbind(), rows, keys, values, strict=True):
        wanted = F.scaled_dot_product_attention(*(t.transpose(0, 1).double() for t in one), is_causal=causal)
        assert torch.allclose(got.double(), wanted, atol=1e-6)


def test_jagged_gradients_and_cross_attention():
    (q, _), (k, keys), (v, _) = jagged((4, 1, 7)), jagged((2, 5, 3), seed=10), jagged((2, 5, 3), seed=20)
    k = torch.nested.nested_tensor_from_jagged(torch.cat(keys), v.offsets()).transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    attention(*leaves).values().sum().backward()
    assert all(t.grad.shape == t.shape for t in leaves)


def test_jagged_calls_have_no_log_sum_exp():
    q, _ = jagged((4, 1, 7))
    with pytest.raises(RuntimeError, match="return_lse=True is not supported with nested tensors"):
        attention(q, q, q, return_lse=True)


def test_jagged_batch_sizes_must_agree():
    (q, _), (k, _) = jagged((4, 1, 7)), jagged((4, 8))
    with pytest.raises(RuntimeError, match="query and key to have the same batch size, but got 3 and 2"):
        attention(q, k, k)


def test_jagged_autocast():
    (q, _), (k, _), (v, _) = (jagged((4, 1, 7), seed=s) for s in (0, 10, 20))
    wanted = attention(*(t.bfloat16() for t in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        for out in (attention(q, k, v), attention(q.bfloat16(), k, v)):
            assert out.dtype == torch.bfloat16 and torch.equal(out.values(), wanted.values())
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves)
    out.values().float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_explain_describes_the_call_under_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        explained = sdpa.explain(q, k, v, draw(9, 11)).problem
    assert explained.dtype == explained.bias_dtype == torch.bfloat16


def test_explain_describes_causal_bias_and_jagged_calls():
    q, k, v = qkv()
    for make, align in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        assert (
            sdpa.explain(q, k, v, make(9, 11)).problem == sdpa.explain(q, k, v, Mask(causal=True, align=align)).problem
        )
        with pytest.raises(ValueError, match="CausalBias"):
            sdpa.explain(q, k, v, make(9, 11), is_causal=True)
    nested, _ = jagged((4, 1, 7))
    problem = sdpa.explain(nested, nested, nested).problem
    assert (problem.B, problem.H, problem.M) == (1, 3, 12) and "segments" in problem.features


def test_explain_refuses_an_unknown_keyword():
    with pytest.raises(TypeError, match=r"explain\(\).*'softcaps'"):
        sdpa.explain(*qkv(), softcaps=2.0)


META = {"plain": {}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.2}, "lse": {"return_lse": True}}


@dtypes
@pytest.mark.parametrize("options", META.values(), ids=META)
@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors(kind, layout, options, dtype):
    real = [outside(t) if layout == "bmhd" else t for t in qkv(dtype=dtype)]
    wanted = attention(*real, **options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        unreal = [t.to("meta") for t in real] if kind == "meta" else [mode.from_tensor(t) for t in real]
        found = attention(*unreal, **options)
    pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    for want, got in pairs:
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert got.device.type == ("meta" if kind == "meta" else "cpu")


def test_meta_tensors_without_a_mode():
    out = attention(*(t.to("meta") for t in qkv()), torch.ones(9, 11, dtype=torch.bool, device="meta"))
    assert out.is_meta and out.shape == (2, 3, 9, 8)


@pytest.mark.parametrize("repeats", [1, 3])
def test_causal_bias_under_autocast(repeats):
    """A mask with a __torch_function__ is read before autocast casts anything."""
    q, mask = torch.randn(1, 2, 5, 8), causal_lower_right(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(repeats):
            found = sdpa.scaled_dot_product_attention(q, q, q, mask)
        wanted = sdpa.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
