"""Plans of calls with masks: the same results, derivatives and errors as the ordinary way, which they do not take."""

from __future__ import annotations

import pytest
import torch

import sdpa
from sdpa import eager, functional
from sdpa import scaled_dot_product_attention as attend
from sdpa.dispatch import select

B, H, M, N = 2, 4, 12, 15
BANDS = {
    "empty": sdpa.Mask(),
    "causal": sdpa.Mask(causal=True),
    "bottom_right": sdpa.Mask(causal=True, align="bottom_right"),
    "window": sdpa.Mask(window=(4, 0)),
    "sides": sdpa.Mask(window=(None, 3), align="bottom_right"),
}


@pytest.fixture(autouse=True)
def no_plans():
    select.clear_caches()
    yield
    select.clear_caches()


@pytest.fixture
def ways(monkeypatch):
    """The calls that took the ordinary way."""
    taken, way = [], functional.attend

    def counted(*given):
        taken.append(given)
        return way(*given)

    monkeypatch.setattr(functional, "attend", counted)
    return taken


def qkv(grad: bool = False, dtype: torch.dtype = torch.float64, keys: int = N):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, 8, generator=generator, dtype=dtype).requires_grad_(grad) for n in (M, keys, keys)]


def ordinary(*given, **options):
    """A call that wants the log-sum-exp has no plan."""
    return attend(*given, **options, return_lse=True)[0]


@pytest.mark.parametrize("keys", [M, N])
@pytest.mark.parametrize("name", BANDS)
def test_bands(name, keys, ways):
    tensors = qkv(keys=keys)
    wanted, chosen = ordinary(*tensors, BANDS[name]), sdpa.last_choice().kernel
    for _ in range(3):
        assert torch.equal(attend(*tensors, BANDS[name]), wanted)
        assert torch.equal(attend(*tensors, BANDS[name].replace()), wanted)
        assert sdpa.last_choice().kernel is chosen
    assert len(ways) == len(eager.PLANS) == 1


@pytest.mark.parametrize("name", BANDS)
def test_derivatives_of_bands(name, ways):
    check_derivatives(BANDS[name])
    assert len(ways) == len(eager.PLANS) == 1


def check_derivatives(mask):
    """First derivatives through a plan, and second ones, which go the ordinary way."""
    tensors = qkv(grad=True)
    wanted = ordinary(*tensors, mask)
    upstream = torch.randn_like(wanted)
    first = torch.autograd.grad(wanted, tensors, upstream, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
    for _ in range(2):
        out = attend(*tensors, mask)
        assert type(out.grad_fn).__name__ == "PlannedAttentionBackward"
        torch.testing.assert_close(torch.autograd.grad(out, tensors, upstream, retain_graph=True), first)
        found = torch.autograd.grad(out, tensors, upstream, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(sum(g.square().sum() for g in found), tensors), second)


def test_a_plan_is_for_its_band_and_settings(ways):
    tensors = qkv()
    calls = [lambda mask=mask: attend(*tensors, mask) for mask in BANDS.values()]
    calls += [lambda: attend(*tensors), lambda: attend(*tensors, is_causal=True)]
    calls += [lambda: attend(*tensors, sdpa.Mask(window=(4, 1))), lambda: attend(*tensors, BANDS["window"], scale=2.0)]
    calls += [lambda: attend(*tensors, BANDS["window"], kernel="math")]
    results = [call() for call in calls]
    assert len(eager.PLANS) == len(calls)
    for call, wanted in zip(calls, results, strict=True):
        assert torch.equal(call(), wanted)
    assert len(eager.PLANS) == len(calls) and not ways
    with sdpa.sdpa_kernel("math"):
        attend(*tensors, BANDS["window"])
        assert sdpa.last_choice().kernel.name == "math"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attend(*tensors, BANDS["window"])
        assert sdpa.last_choice().kernel.name == "math"
    attend(*tensors, BANDS["window"])
    assert sdpa.last_choice().kernel.name == "cpu_flash"


def test_a_mask_beside_is_causal_is_refused_with_and_without_a_plan():
    tensors = qkv()
    for mask in (sdpa.Mask(), BANDS["window"], torch.ones(M, N, dtype=torch.bool)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
                attend(*tensors, mask, is_causal=True)
            attend(*tensors, mask)


class Other(sdpa.Mask):
    """A mask that may be read in another way."""


def test_what_has_no_plan(ways):
    q, k, v = qkv()
    calls = [
        lambda: attend(q, k, v, Other(causal=True)),
        lambda: attend(q, k, v, sdpa.Mask(causal=True), softcap=2.0),
        lambda: attend(q, k, v, torch.zeros(M, N, dtype=q.dtype, requires_grad=True)),
        lambda: attend(q[0], k[0], v[0], sdpa.Mask(causal=True)),
        lambda: attend(q[:, :, :0], k, v, sdpa.Mask(causal=True)),
        lambda: torch.func.vmap(lambda q: attend(q, q, q, sdpa.Mask(causal=True)))(q),
        lambda: torch.autocast("cpu", torch.bfloat16)(attend)(q.float(), k.float(), v.float(), sdpa.Mask(causal=True)),
    ]
    for number, call in enumerate(calls, 1):
        assert torch.equal(call(), call())
        assert len(ways) == 2 * number
    assert not any(eager.PLANS.values())
