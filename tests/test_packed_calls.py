"""Plans of packed calls: the same results and derivatives as the ordinary way, found again by sizes and settings."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sdpa
from sdpa import eager, plans, varlen_attention
from sdpa.dispatch import select

NODE = "PlannedAttentionBackward"
T, LONGEST = 10, 7


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    """A device whose kernels take packed sequences as they are: here math, which takes everything."""
    monkeypatch.setattr(eager, "served_form", lambda inputs: inputs)
    select.clear_caches()
    yield
    select.clear_caches()


def rows(dtype=torch.float64, heads=(4, 2)):
    generator = torch.Generator().manual_seed(0)
    H, Hkv = heads
    return [torch.randn(T, n, 8, generator=generator, dtype=dtype).requires_grad_() for n in (H, Hkv, Hkv)]


def lengths(alike=True):
    cu_q = torch.tensor([0, 4, 9], dtype=torch.int32)  # one row behind the last
    return cu_q, cu_q if alike else torch.tensor([0, 7, 8], dtype=torch.int32)


def planned(tensors, cu, **options):
    return varlen_attention(*tensors, *cu, LONGEST, LONGEST, enable_gqa=True, **options)


def ordinary(tensors, cu, **options):
    return planned(tensors, cu, return_lse=True, **options)[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alike", [True, False])
def test_results_and_derivatives_are_those_of_the_ordinary_way(alike, is_causal):
    tensors, cu = rows(), lengths(alike)
    for _ in range(2):  # as it comes, and by its plan
        found, wanted = (call(tensors, cu, is_causal=is_causal) for call in (planned, ordinary))
        assert type(found.grad_fn).__name__ == NODE != type(wanted.grad_fn).__name__
        assert found.stride() == wanted.stride() and not found._is_view()
        torch.testing.assert_close(found, wanted)
        upstream = torch.randn_like(found)
        first = [torch.autograd.grad(out, tensors, upstream, create_graph=True) for out in (found, wanted)]
        torch.testing.assert_close(*first)
        again = planned(tensors, cu, is_causal=is_causal)
        torch.testing.assert_close(torch.autograd.grad(again, tensors, upstream), tuple(g.detach() for g in first[1]))
        second = [torch.autograd.grad(sum(g.square().sum() for g in grads), tensors) for grads in first]
        torch.testing.assert_close(*second)
    assert len(eager.PLANS) == 1


def test_without_gradients():
    tensors, cu = rows(), lengths()
    with torch.no_grad():
        torch.testing.assert_close(planned(tensors, cu), ordinary(tensors, cu))
    (plan,) = eager.PLANS.values()
    assert isinstance(plan, plans.PackedPlan) and not plan.learns


def test_a_plan_is_for_its_sizes_lengths_and_settings():
    tensors, (cu, _) = rows(), lengths()
    calls = [
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST + 1, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True, scale=0.5),
        lambda: varlen_attention(*tensors, cu, cu.clone(), LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu[:2], cu[:2], LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*(t[:9] for t in tensors), cu, cu, LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True, kernel="math"),
    ]
    for number, call in enumerate(calls, 1):
        call(), call()
        assert len(eager.PLANS) == number


@pytest.mark.parametrize("heads", [(4, 1, 4), (4, 4, 1), (4, 2, 1), (6, 3, 2)])
def test_heads_that_are_repeated_go_the_ordinary_way(heads):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(T, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in heads]
    for _ in range(2):
        found, wanted = planned(tensors, lengths()), ordinary(tensors, lengths())
        torch.testing.assert_close(found, wanted)
        upstream = torch.randn_like(found)
        torch.testing.assert_close(*(torch.autograd.grad(out, tensors, upstream) for out in (found, wanted)))
    assert not any(eager.PLANS.values())


def test_lengths_are_read_at_every_call():
    tensors = rows()
    for cu in (lengths()[0], torch.tensor([0, 2, 8], dtype=torch.int32)):
        torch.testing.assert_close(planned(tensors, (cu, cu)), ordinary(tensors, (cu, cu)))
    assert len(eager.PLANS) == 1


def test_what_a_plan_cannot_say_goes_the_ordinary_way():
    tensors, (cu, _) = rows(torch.float32), lengths()
    batched = torch.stack([tensors[0].detach()] * 2)
    strided = torch.stack([cu, cu], 1)[:, 0]
    calls = [
        lambda: torch.func.vmap(lambda q: varlen_attention(q, q, q, cu, cu, LONGEST, LONGEST))(batched),
        lambda: planned(tensors, (strided, strided)),
        lambda: planned(tensors, (cu, cu), dropout_p=0.5),
        lambda: planned(tensors, (cu, cu), softcap=2.0),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, sdpa.Mask(causal=True), enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, scale=torch.tensor(0.5), enable_gqa=True),
    ]
    for call in calls:
        call()
        assert not any(eager.PLANS.values())
    with torch.autocast("cpu", torch.bfloat16):
        assert planned(tensors, (cu, cu)).dtype == torch.bfloat16
    assert not any(eager.PLANS.values())


def test_wrong_arguments_are_refused_with_and_without_a_plan():
    tensors, (cu, _) = rows(), lengths()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected cu_q to be int32, but got long"):
            planned(tensors, (cu.long(), cu))
        with pytest.raises(RuntimeError, match="equally many documents"):
            planned(tensors, (cu, cu[:2]))
        with pytest.raises((RuntimeError, TypeError), match="enable_gqa"):
            varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=1)
        with pytest.raises(RuntimeError, match="T, H, D"):
            planned([t.unsqueeze(0) for t in tensors], (cu, cu))
        planned(tensors, (cu, cu))


def test_checkpointing_and_the_saved_output():
    tensors, cu = rows(), lengths()
    upstream = torch.randn(T, 4, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(ordinary(tensors, cu), tensors, upstream)
    for reentrant in (False, True):
        out = checkpoint(lambda *given: planned(given, cu), *tensors, use_reentrant=reentrant)
        out.backward(upstream)
        torch.testing.assert_close(tuple(t.grad for t in tensors), wanted)
        for tensor in tensors:
            tensor.grad = None
    with torch.no_grad():
        planned(tensors, cu).mul_(2)
    out = planned(tensors, cu)
    out.mul_(2)  # allowed; its derivative needs what was there
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_launches_are_recorded_when_a_call_comes_again(monkeypatch):
    tensors, cu = rows(torch.float32), lengths()
    recorded = []

    def record(given, problem, tile):
        recorded.append(problem.direction)
        return getattr(choice.kernel.load(), problem.direction)(*given, problem, tile), None

    planned(tensors, cu).sum().backward()
    (plan,) = eager.PLANS.values()
    choice = plan.choice
    monkeypatch.setattr(plan, "record", record)
    monkeypatch.setattr(type(choice), "record", property(lambda self: record))
    plan.came = False
    first = planned(tensors, cu)
    first.sum().backward()
    assert recorded == []
    planned(tensors, cu).sum().backward()
    assert recorded == ["forward", "backward"]
