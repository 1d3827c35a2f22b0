"""Packed calls: the same results and derivatives as by the operator, found again by sizes and settings."""

from __future__ import annotations

import pytest
import torch
from remembered import PACKED, Other, prepared, remembered
from torch.utils.checkpoint import checkpoint

import sdpa
from sdpa import entry, sequences, varlen_attention
from sdpa.calls import CALLS
from sdpa.prepared import PreparedRows

NODE = "AttentionBackward"
T, LONGEST = 10, 7


@pytest.fixture(autouse=True)
def packed(nothing_remembered, monkeypatch):
    """A device whose kernels take packed sequences as they are: here math, which takes everything."""
    for module in (entry, sequences):
        monkeypatch.setattr(module, "served_form", lambda inputs: inputs)


def rows(dtype=torch.float64, heads=(4, 2)):
    generator = torch.Generator().manual_seed(0)
    H, Hkv = heads
    return [torch.randn(T, n, 8, generator=generator, dtype=dtype).requires_grad_() for n in (H, Hkv, Hkv)]


def lengths(alike=True):
    cu_q = torch.tensor([0, 4, 9], dtype=torch.int32)  # one row behind the last
    return cu_q, cu_q if alike else torch.tensor([0, 7, 8], dtype=torch.int32)


@pytest.fixture
def ways(monkeypatch):
    """The calls that went to the operator."""
    taken, way = [], entry.operator_results

    def counted(*given):
        taken.append(given)
        return way(*given)

    monkeypatch.setattr(entry, "operator_results", counted)
    return taken


def call(tensors, cu, **options):
    return varlen_attention(*tensors, *cu, LONGEST, LONGEST, enable_gqa=True, **options)


def ordinary(tensors, cu, is_causal=False, **options):
    """The same call as the operator's."""
    return call(tensors, cu, attn_mask=Other(causal=is_causal), **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alike", [True, False])
def test_results_and_derivatives_are_those_of_the_operator(alike, is_causal, ways):
    tensors, cu = rows(), lengths(alike)
    for number in range(1, 3):  # as it comes, and remembered
        found, wanted = call(tensors, cu, is_causal=is_causal), ordinary(tensors, cu, is_causal=is_causal)
        assert len(ways) == number
        assert type(found.grad_fn).__name__ == NODE != type(wanted.grad_fn).__name__
        assert found.stride() == wanted.stride() and not found._is_view()
        torch.testing.assert_close(found, wanted)
        upstream = torch.randn_like(found)
        first = [torch.autograd.grad(out, tensors, upstream, create_graph=True) for out in (found, wanted)]
        torch.testing.assert_close(*first)
        again = call(tensors, cu, is_causal=is_causal)
        torch.testing.assert_close(torch.autograd.grad(again, tensors, upstream), tuple(g.detach() for g in first[1]))
        second = [torch.autograd.grad(sum(g.square().sum() for g in grads), tensors) for grads in first]
        torch.testing.assert_close(*second)
    assert remembered(PACKED) == 1


def test_the_log_sum_exp_and_its_derivative():
    tensors, cu = rows(), lengths(alike=False)
    for _ in range(2):
        found, wanted = (way(tensors, cu, return_lse=True) for way in (call, ordinary))
        torch.testing.assert_close(found, wanted)
        upstream = [torch.randn_like(t) for t in found]
        seen = found[1].isfinite()
        upstream[1] = upstream[1].where(seen, 0.0)
        torch.testing.assert_close(*(torch.autograd.grad(results, tensors, upstream) for results in (found, wanted)))


def test_without_gradients():
    tensors, cu = rows(), lengths()
    with torch.no_grad():
        torch.testing.assert_close(call(tensors, cu), ordinary(tensors, cu))
    (found,) = prepared(PACKED)
    assert type(found) is PreparedRows and found.attend == found.run_rows


def test_a_call_is_known_by_its_sizes_lengths_and_settings():
    tensors, (cu, _) = rows(), lengths()
    strided = torch.stack([cu, cu], 1)[:, 0]
    calls = [
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST + 1, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True, scale=0.5),
        lambda: varlen_attention(*tensors, cu, cu.clone(), LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu[:2], cu[:2], LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*(t[:9] for t in tensors), cu, cu, LONGEST, LONGEST, enable_gqa=True),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=True, kernel="math"),
        lambda: call(tensors, (strided, strided)),
        lambda: call(tensors, (cu, cu), softcap=2.0),
        lambda: call(tensors, (cu, cu), return_lse=True)[1],
        lambda: call(tensors, (cu, cu), sinks=torch.ones(4, dtype=torch.float64)),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, sdpa.Mask(causal=True), enable_gqa=True),
        lambda: torch.no_grad()(call)(tensors, (cu, cu)),
    ]
    results = [function() for function in calls]
    for number, (function, wanted) in enumerate(zip(calls, results, strict=True), 1):
        torch.testing.assert_close(function(), wanted)
        assert remembered(PACKED) == len(calls), number


@pytest.mark.parametrize("heads", [(4, 1, 4), (4, 4, 1), (4, 2, 1), (6, 3, 2)])
def test_heads_that_are_repeated(heads, ways):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(T, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in heads]
    for number in range(1, 3):
        found, wanted = call(tensors, lengths()), ordinary(tensors, lengths())
        torch.testing.assert_close(found, wanted)
        upstream = torch.randn_like(found)
        torch.testing.assert_close(*(torch.autograd.grad(out, tensors, upstream) for out in (found, wanted)))
        assert len(ways) == number
    assert remembered(PACKED) == 1


def test_lengths_are_read_at_every_call():
    tensors = rows()
    for cu in (lengths()[0], torch.tensor([0, 2, 8], dtype=torch.int32)):
        torch.testing.assert_close(call(tensors, (cu, cu)), ordinary(tensors, (cu, cu)))
    assert remembered(PACKED) == 1


def test_what_goes_to_the_operator(ways):
    tensors, (cu, _) = rows(torch.float32), lengths()
    batched = torch.stack([tensors[0].detach()] * 2)
    calls = [
        lambda: torch.func.vmap(lambda q: varlen_attention(q, q, q, cu, cu, LONGEST, LONGEST))(batched),
        lambda: varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, scale=torch.tensor(0.5), enable_gqa=True),
        lambda: ordinary(tensors, (cu, cu)),
    ]
    for number, function in enumerate(calls, 1):
        function(), function()
        assert len(ways) == 2 * number
    assert not remembered(PACKED)


def test_dropout_and_autocast_are_remembered(ways):
    tensors, (cu, _) = rows(torch.float32), lengths()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(call(tensors, (cu, cu), dropout_p=0.5))
    assert torch.equal(*results) and remembered(PACKED) == 1
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert call(tensors, (cu, cu)).dtype == torch.bfloat16
    assert remembered(PACKED) == 2 and not ways


def test_wrong_arguments_are_refused_at_any_call():
    tensors, (cu, _) = rows(), lengths()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected cu_q to be int32, but got long"):
            call(tensors, (cu.long(), cu))
        with pytest.raises(RuntimeError, match="equally many documents"):
            call(tensors, (cu, cu[:2]))
        with pytest.raises((RuntimeError, TypeError), match="enable_gqa"):
            varlen_attention(*tensors, cu, cu, LONGEST, LONGEST, enable_gqa=1)
        with pytest.raises(RuntimeError, match="T, H, D"):
            call([t.unsqueeze(0) for t in tensors], (cu, cu))
        call(tensors, (cu, cu))


def test_checkpointing_and_the_saved_output():
    tensors, cu = rows(), lengths()
    upstream = torch.randn(T, 4, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(ordinary(tensors, cu), tensors, upstream)
    for reentrant in (False, True):
        out = checkpoint(lambda *given: call(given, cu), *tensors, use_reentrant=reentrant)
        out.backward(upstream)
        torch.testing.assert_close(tuple(t.grad for t in tensors), wanted)
        for tensor in tensors:
            tensor.grad = None
    with torch.no_grad():
        call(tensors, cu).mul_(2)
    out = call(tensors, cu)
    out.mul_(2)  # allowed; its derivative needs what was there
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_launches_are_recorded_when_a_call_comes_again(monkeypatch):
    tensors, cu = rows(torch.float32), lengths()
    recorded = []

    def record(given, problem, tile):
        recorded.append(problem.direction)
        return getattr(choice.kernel.load(), problem.direction)(*given, problem, tile), None

    call(tensors, cu).sum().backward()
    (found,) = prepared(PACKED)
    choice = found.choice
    monkeypatch.setattr(type(choice), "record", property(lambda self: record))
    found.came = False
    CALLS.clear()
    call(tensors, cu).sum().backward()
    assert recorded == []
    call(tensors, cu).sum().backward()
    assert recorded == ["forward", "backward"]
