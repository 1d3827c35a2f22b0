"""Derivatives of every order and kind: gradcheck, double backward, forward mode, vmap, and torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import sdpa
from sdpa import Mask
from sdpa.dispatch.catalog import KERNELS
from sdpa.testing import Case, able

attention = sdpa.scaled_dot_product_attention
WIDE = torch.float64


def draw(*shape, seed=0, dtype=WIDE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def qkv(B=2, H=2, Hkv=2, M=3, N=4, D=3, Dv=2, dtype=WIDE):
    tensors = (
        draw(B, H, M, D, dtype=dtype),
        draw(B, Hkv, N, D, seed=1, dtype=dtype),
        draw(B, Hkv, N, Dv, seed=2, dtype=dtype),
    )
    return [t.requires_grad_() for t in tensors]


ALLOWED = draw(2, 1, 3, 4) > -0.5
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool_mask": {"attn_mask": ALLOWED},
    "padding": {"attn_mask": draw(2, 1, 1, 4) > -0.8},
    "dead_rows": {"attn_mask": torch.tensor([True, False, True])[:, None].expand(3, 4)},
    "window": {"attn_mask": Mask(window=(1, 1), align="bottom_right")},
    "lengths": {"attn_mask": Mask(lengths=torch.tensor([0, 3]))},
    "segments": {"attn_mask": Mask(segments=(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 2])))},
    "alibi": {"attn_mask": Mask(alibi=torch.tensor([0.5, 0.25]))},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "no_scale": {"scale": 0.0},
}
LEARNED = {
    "bias": (draw(2, 2, 3, 4), lambda t: {"attn_mask": t}),
    "bias_rows": (draw(2, 1, 1, 4), lambda t: {"attn_mask": t}),
    "bias_matrix": (draw(3, 4), lambda t: {"attn_mask": t}),
    "bias_causal_softcap": (draw(1, 2, 1, 1), lambda t: {"attn_mask": Mask(bias=t, causal=True), "softcap": 2.0}),
    "sinks": (draw(2), lambda t: {"sinks": t}),
    "sinks_window": (draw(2), lambda t: {"sinks": t, "attn_mask": Mask(window=(0, 0))}),
}
BACKWARD = [k.name for k in KERNELS if "backward" in k.directions and not able(k.name, Case(dtype=WIDE))]
COMPLETE = [
    k.name for k in KERNELS if not able(k.name, Case(sinks=True, softcap=2.0, mask="bias", requires_bias_grad=True))
]


@pytest.mark.parametrize("kernel", BACKWARD)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name, kernel):
    tensors = qkv(Dv=3)
    explanation = sdpa.explain(*tensors, **OPTIONS[name], kernel=kernel)
    if explanation.chosen is None:
        assert COMPLETE and kernel not in COMPLETE, explanation
        return
    assert gradcheck(lambda *t: attention(*t, **OPTIONS[name], kernel=kernel), tensors)


@pytest.mark.parametrize("kernel", COMPLETE)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_biases_and_sinks(name, kernel):
    extra, options = LEARNED[name]
    leaves = [*qkv(), extra.clone().requires_grad_()]
    assert gradcheck(lambda q, k, v, e: attention(q, k, v, **options(e), kernel=kernel), leaves)


@pytest.mark.parametrize("shape", [(2, 2, 3, 1), (1, 2, 1, 1), (2, 1, 3, 1)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_bias_that_moves_whole_rows(shape, sinks, with_lse):
    """It changes a sink's weight and the log-sum-exp alone; a row without a key has neither."""
    leaves = [*qkv(), draw(*shape).requires_grad_(), *([draw(2).requires_grad_()] if sinks else [])]

    def call(q, k, v, bias, *rest):
        mask = Mask(bias=bias, window=(None, 0), align="bottom_right", lengths=torch.tensor([4, 2]))
        out, lse = attention(q, k, v, mask, sinks=rest[0] if rest else None, return_lse=True)
        return (out, lse.nan_to_num(neginf=0.0)) if with_lse else out

    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bias_that_moves_whole_rows_in_half_precision(dtype):
    """Its gradient is 0 where nothing else sees the row's sum; a sum over keys would leave the rounding of each."""
    q, k, v = (draw(2, 3, 40, 16).to(dtype) for _ in range(3))
    bias = draw(1, 3, 40, 1).to(dtype).requires_grad_()
    attention(q, k, v, bias).float().square().sum().backward()
    assert not bias.grad.any() and bias.grad.dtype == dtype
    sinks, exact = draw(3), bias.detach().double().requires_grad_()
    bias.grad = None
    attention(q, k, v, bias, sinks=sinks.float()).float().square().sum().backward()
    attention(*(t.double() for t in (q, k, v)), exact, sinks=sinks).square().sum().backward()
    assert (bias.grad.double() - exact.grad).norm() <= 4 * torch.finfo(dtype).eps * exact.grad.norm()


@pytest.mark.parametrize("kernel", COMPLETE)
def test_gradients_of_the_lse(kernel):
    for options in ({}, {"is_causal": True}, {"softcap": 1.5}):
        assert gradcheck(lambda *t, o=options: attention(*t, **o, return_lse=True, kernel=kernel), qkv())
        assert gradcheck(lambda *t, o=options: attention(*t, **o, return_lse=True, kernel=kernel)[1], qkv())


@pytest.mark.parametrize("kernel", COMPLETE)
def test_gradients_of_groups_and_dropout(kernel):
    assert gradcheck(lambda *t: attention(*t, enable_gqa=True, kernel=kernel), qkv(H=4, Hkv=2))

    def dropped(*tensors):
        torch.manual_seed(3)
        return attention(*tensors, dropout_p=0.4, kernel=kernel)

    assert gradcheck(dropped, qkv())


@pytest.mark.parametrize("name", OPTIONS)
def test_double_backward(name):
    assert gradgradcheck(lambda *t: attention(*t, **OPTIONS[name]), qkv())


@pytest.mark.parametrize("name", LEARNED)
def test_double_backward_of_biases_and_sinks(name):
    extra, options = LEARNED[name]
    leaves = [*qkv(), extra.clone().requires_grad_()]
    assert gradgradcheck(lambda q, k, v, e: attention(q, k, v, **options(e)), leaves)


def test_double_backward_of_the_lse_groups_and_dropout():
    assert gradgradcheck(lambda *t: attention(*t, return_lse=True), qkv())
    assert gradgradcheck(lambda *t: attention(*t, enable_gqa=True), qkv(H=4, Hkv=2))

    def dropped(*tensors):
        torch.manual_seed(3)
        return attention(*tensors, dropout_p=0.4)

    assert gradgradcheck(dropped, qkv())


def test_third_derivative():
    q, k, v = qkv(B=1, H=1, M=2, N=2, D=2)
    result = attention(q, k, v).sin().sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(result, q, create_graph=True)
        result = (grad * grad).sum()
    assert result.isfinite() and result.requires_grad


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_mode(name):
    function = lambda *t: attention(*t, **OPTIONS[name])  # noqa: E731
    assert gradcheck(function, qkv(), check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("name", LEARNED)
def test_forward_mode_of_biases_and_sinks(name):
    extra, options = LEARNED[name]
    leaves = [*qkv(), extra.clone().requires_grad_()]
    function = lambda q, k, v, e: attention(q, k, v, **options(e))  # noqa: E731
    assert gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=False)


def test_forward_mode_over_backward():
    assert gradgradcheck(lambda *t: attention(*t, is_causal=True), qkv(), check_fwd_over_rev=True)


def test_dual_tensors_and_the_lse():
    primal, tangent = qkv(), [draw(*t.shape, seed=9) for t in qkv()]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(primal, tangent, strict=True)]
        moved = [forward_ad.unpack_dual(r).tangent for r in attention(*duals, return_lse=True)]
    step = 1e-6
    ends = [
        attention(*(p + sign * step * t for p, t in zip(primal, tangent, strict=True)), return_lse=True)
        for sign in (1, -1)
    ]
    for got, plus, minus in zip(moved, *ends, strict=True):
        assert torch.allclose(got, (plus - minus) / (2 * step), atol=1e-8)


MAPS = {
    "all": (0, 0, 0),
    "query": (0, None, None),
    "keys": (None, 0, 0),
    "last_dimensions": (3, 2, 1),
    "values": (None, None, 0),
}


@pytest.mark.parametrize("in_dims", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("rank", [3, 4], ids=lambda r: f"rank{r}")
def test_vmap(in_dims, rank):
    shape = {3: (2, 4, 3), 4: (2, 2, 4, 3)}[rank]
    tensors = [
        draw(*shape, seed=i) if d is None else draw(5, *shape, seed=i).movedim(0, d) for i, d in enumerate(in_dims)
    ]
    got = torch.vmap(lambda *t: attention(*t, is_causal=True), in_dims=in_dims)(*tensors)
    for i in range(5):
        one = [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)]
        assert torch.allclose(got[i], attention(*one, is_causal=True))


def test_vmap_is_one_call(monkeypatch):
    seen = []
    from sdpa.kernels.math import composite

    original = composite.forward
    monkeypatch.setattr(
        composite, "forward", lambda inputs, *rest: seen.append(inputs.q.shape) or original(inputs, *rest)
    )
    sdpa.dispatch.select.clear_caches()
    torch.vmap(lambda q: attention(q, q, q, kernel="math", return_lse=True))(draw(5, 2, 3, 4, 3))
    assert seen == [(10, 3, 4, 3)]


MASKS = {
    "bool": lambda: draw(5, 2, 1, 3, 4) > -0.5,
    "bool_matrix": lambda: draw(5, 3, 4) > -0.5,
    "float": lambda: draw(5, 2, 1, 3, 4),
    "float_rows": lambda: draw(5, 1, 1, 4),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mapped", ["mask", "everything"])
def test_vmap_over_masks(name, mapped):
    mask, everything = MASKS[name](), mapped == "everything"
    tensors = [draw(*((5,) if everything else ()), 2, 2, n, 3, seed=i) for i, n in enumerate((3, 4, 4))]
    in_dims = (*(0 if everything else None,) * 3, 0)
    got = torch.vmap(attention, in_dims=in_dims)(*tensors, mask)
    for i in range(5):
        assert torch.allclose(got[i], attention(*(t[i] if everything else t for t in tensors), mask[i]))


def test_vmap_over_groups_lse_and_twice():
    q, k, v = draw(5, 2, 4, 3, 3), draw(5, 2, 2, 4, 3), draw(5, 2, 2, 4, 2)
    out, lse = torch.vmap(lambda *t: attention(*t, enable_gqa=True, return_lse=True))(q, k, v)
    wanted = attention(*(t.flatten(0, 1) for t in (q, k, v)), enable_gqa=True, return_lse=True)
    assert torch.allclose(out.flatten(0, 1), wanted[0]) and torch.allclose(lse.flatten(0, 1), wanted[1])
    twice = torch.vmap(torch.vmap(lambda *t: attention(*t, enable_gqa=True)))(q, k, v)
    assert torch.allclose(twice, out)


def test_vmap_over_learned_biases():
    q, k, v = (t.detach() for t in qkv())
    bias = draw(5, 2, 1, 3, 4)
    loss = lambda b: attention(q, k, v, b).square().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss))(bias)
    for i in range(5):
        assert torch.allclose(got[i], torch.func.grad(loss)(bias[i]))


SHARED = {
    "matrix": (4, 4),
    "row": (1, 1, 1, 4),
    "heads": (1, 2, 4, 4),
    "full": (None, 2, 4, 4),
    "full_row": (None, 1, 1, 4),
}


@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("mapped", [False, True], ids=["shared", "mapped"])
@pytest.mark.parametrize("name", SHARED)
def test_gradients_per_sample_of_a_bias(name, mapped, B):
    shape = tuple(B if n is None else n for n in SHARED[name])
    q, bias = draw(5, B, 2, 4, 3), draw(*((5,) if mapped else ()), *shape)
    loss = lambda a, b: attention(a, a, a, b).square().sum()  # noqa: E731
    both = torch.func.grad(loss, argnums=(0, 1))
    for outer in (q, None):
        in_dims = (None if outer is None else 0, 0 if mapped else None)
        if in_dims == (None, None):
            continue
        got = torch.vmap(both, in_dims=in_dims)(q[0] if outer is None else q, bias)
        for i in range(5):
            wanted = both(q[0] if outer is None else q[i], bias[i] if mapped else bias)
            assert all(a[i].shape == b.shape and torch.allclose(a[i], b) for a, b in zip(got, wanted, strict=True))


def test_gradients_per_sample_of_a_bias_twice_and_of_second_order():
    q, bias = draw(3, 5, 2, 2, 4, 3), draw(4, 4)
    loss = lambda a, b: attention(a, a, a, b).square().sum()  # noqa: E731
    one = torch.func.grad(loss, argnums=1)
    got = torch.vmap(torch.vmap(one, in_dims=(0, None)), in_dims=(0, None))(q, bias)
    assert torch.allclose(got, torch.stack([torch.stack([one(a, bias) for a in row]) for row in q]))
    second = torch.func.grad(lambda a, b: one(a, b).square().sum(), argnums=1)
    got = torch.vmap(second, in_dims=(0, None))(q[0], bias)
    assert torch.allclose(got, torch.stack([second(a, bias) for a in q[0]]))


@pytest.mark.parametrize("mapped", [False, True], ids=["shared", "mapped"])
@pytest.mark.parametrize("H", [2, 10])
def test_gradients_per_sample_of_sinks(H, mapped):
    """H = 10 is the number of samples times the batch: results are told apart by name, not by size."""
    q, sinks = draw(5, 2, H, 4, 3), draw(*((5,) if mapped else ()), H)
    loss = lambda a, s: attention(a, a, a, sinks=s).square().sum()  # noqa: E731
    both = torch.func.grad(loss, argnums=(0, 1))
    in_dims = (0, 0 if mapped else None)
    values = torch.vmap(loss, in_dims=in_dims)(q, sinks)
    got = torch.vmap(both, in_dims=in_dims)(q, sinks)
    for i in range(5):
        given = q[i], sinks[i] if mapped else sinks
        assert torch.allclose(values[i], loss(*given))
        assert all(torch.allclose(a[i], b) for a, b in zip(got, both(*given), strict=True))


def test_vmap_of_one_entry_with_shared_lengths():
    q = draw(5, 1, 2, 4, 3)
    mask = Mask(lengths=torch.tensor([2]))
    got = torch.vmap(lambda a: attention(a, a, a, mask))(q)
    assert all(torch.allclose(got[i], attention(q[i], q[i], q[i], mask)) for i in range(5))


def test_vmap_asks_for_a_kind_of_randomness():
    q = draw(5, 2, 2, 4, 3)
    run = lambda q: attention(q, q, q, dropout_p=0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(run)(q)
    for randomness in ("same", "different"):
        out = torch.vmap(run, randomness=randomness)(q)
        assert out.shape == q.shape and out.isfinite().all()
    equal = q[:1].expand(5, -1, -1, -1, -1)
    different = torch.vmap(run, randomness="different")(equal)
    assert not torch.equal(different[0], different[1])
    same = torch.vmap(run, randomness="same")(equal)
    assert all(torch.equal(one, same[0]) for one in same)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_dropout_has_the_same_mask_in_every_derivative(randomness):
    """The loss is linear in v, so its gradient times v is the loss if, and only if, both dropped the same weights."""
    q, k, v = (draw(5, 2, 2, 4, 3, seed=i) for i in range(3))

    def losses(q, k, v, function):
        torch.manual_seed(3)
        return torch.vmap(function, randomness=randomness)(q, k, v)

    loss = lambda *t: attention(*t, dropout_p=0.5).sum()  # noqa: E731
    values = losses(q, k, v, loss)
    backward = losses(q, k, v, torch.func.grad(loss, argnums=2))
    forward = losses(q, k, v, lambda q, k, v: torch.func.jvp(lambda v: loss(q, k, v), (v,), (v,))[1])
    assert torch.allclose((backward * v).sum((1, 2, 3, 4)), values) and torch.allclose(forward, values)


def test_vmap_of_a_gradient_drops_what_its_forward_dropped():
    q, k, v = (draw(2, 2, 4, 3, seed=i) for i in range(3))
    torch.manual_seed(3)
    out, pull_back = torch.func.vjp(lambda v: attention(q, k, v, dropout_p=0.5), v)
    upstream = draw(5, *out.shape)
    (got,) = torch.vmap(pull_back, randomness="same")(upstream)
    for i in range(5):
        assert torch.allclose(got[i], pull_back(upstream[i])[0])


def test_functional_gradients_agree_with_autograd():
    tensors = qkv()
    loss = lambda *t: attention(*t, is_causal=True).square().sum()  # noqa: E731
    wanted = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    assert all(torch.allclose(a, b) for a, b in zip(got, wanted, strict=True))


def test_gradients_per_sample():
    q, k, v = (draw(5, 2, 4, 3, seed=i) for i in range(3))
    loss = lambda *t: attention(*t).square().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(5):
        wanted = torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i])
        assert all(torch.allclose(a[i], b) for a, b in zip(got, wanted, strict=True))


def test_jacobians_and_hessians_agree_with_written_out_attention():
    q, k, v = (t.detach() for t in qkv(B=1, H=1, M=2, N=3, D=2))

    def written(q):
        return torch.softmax(q @ k.mT / 2**0.5, -1) @ v

    ours = lambda q: attention(q, k, v)  # noqa: E731
    assert torch.allclose(torch.func.jacrev(ours)(q), torch.func.jacrev(written)(q))
    assert torch.allclose(torch.func.jacfwd(ours)(q), torch.func.jacfwd(written)(q))
    loss = lambda function: lambda q: function(q).sin().sum()  # noqa: E731
    assert torch.allclose(torch.func.hessian(loss(ours))(q), torch.func.hessian(loss(written))(q))
    directions = torch.func.jvp(loss(ours), (q,), (torch.ones_like(q),))
    assert torch.allclose(directions[1], torch.func.jvp(loss(written), (q,), (torch.ones_like(q),))[1])


def test_only_asked_gradients_are_returned():
    q, k, v = (t.detach() for t in qkv())
    attention(q, k, v.requires_grad_()).sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()
