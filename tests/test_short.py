"""The operators' short forms, which graphs call: as the long ones, whatever was remembered of calls before."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import sdpa
from sdpa import ops, repeats, short
from sdpa.dispatch import select
from sdpa.ops import BACKWARD, FORWARD
from sdpa.short import LEARNING_FORWARD, PLAIN, PLAIN_BACKWARD
from sdpa.testing import Case, make_inputs

attention = sdpa.scaled_dot_product_attention
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def qkv(N=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, size, 8, generator=generator) for size in (16, N, N)]


PLAIN_CASES = [
    Case(M=5, N=7, D=8, Dv=6),
    Case(M=5, N=7, D=8, Dv=8, Hkv=2, mask="causal"),
    Case(M=5, N=7, D=8, Dv=8, layout="bmhd"),
]


@pytest.mark.parametrize("case", [*PLAIN_CASES, Case(M=0, N=7, D=8), Case(M=5, N=0, D=8)], ids=str)
def test_the_short_form_of_a_forward(case):
    """As the long one, also for tensors that it has seen the like of."""
    select.clear_caches()
    for seed in (1, 2, 2):
        inputs = make_inputs(case, seed)
        assert short.is_plain(inputs)
        given = (*inputs[: ops.BAND_END], "")
        out, wanted = PLAIN(*given), FORWARD(*inputs, False, "")[0]
        assert torch.equal(out, wanted)
        assert out.stride() == wanted.stride()
    assert bool(short.INFERENCE.recent) == bool(case.M and case.N)
    torch.library.opcheck(PLAIN, given, test_utils=OPCHECKS)


@pytest.mark.parametrize("case", [*PLAIN_CASES, Case(M=0, N=7, D=8), Case(M=5, N=0, D=8)], ids=str)
def test_the_short_forms_of_training(case):
    """As the long ones, in results and layouts; gradients in whatever layout arrive."""
    select.clear_caches()
    for seed in (1, 2, 2):
        inputs = make_inputs(case, seed)
        given = (*inputs[: ops.BAND_END], "")
        results, wanted = LEARNING_FORWARD(*given), FORWARD(*inputs, True, "")
        for grad_out in (torch.randn_like(results[0]), torch.ones(()).expand(results[0].shape)):
            upstream = (grad_out, *results, *given)
            grads = PLAIN_BACKWARD(*upstream)
            long = BACKWARD(grad_out, None, *results, *inputs, False, "")[:3]
            for got, right in zip((*results, *grads), (*wanted, *long), strict=True):
                assert torch.equal(got, right)
                assert got.stride() == right.stride()
    assert bool(short.BACKWARD.recent) == bool(short.LEARNING.recent) == bool(case.M and case.N)
    torch.library.opcheck(LEARNING_FORWARD, given, test_utils=OPCHECKS)
    torch.library.opcheck(PLAIN_BACKWARD, upstream, test_utils=OPCHECKS)


def test_the_short_forms_of_training_follow_switches():
    inputs = make_inputs(PLAIN_CASES[0])
    given = inputs[: ops.BAND_END]
    select.clear_caches()
    for _ in range(2):
        for setting, context in (("", nullcontext), ("math", nullcontext), ("", lambda: sdpa.sdpa_kernel("math"))):
            with context():
                results = LEARNING_FORWARD(*given, setting)
                forward = select.last_choice().kernel.family
                PLAIN_BACKWARD(results[0], *results, *given, setting)
            assert {forward, select.last_choice().kernel.family} == {"math"} or (not setting and context is nullcontext)
    assert len(short.LEARNING.recent) == len(short.BACKWARD.recent) == 3


def test_the_short_form_follows_switches():
    """What answered tensors of this form before says nothing under another switch, setting or precision."""
    inputs = make_inputs(PLAIN_CASES[0])
    given = inputs[: ops.BAND_END]
    select.clear_caches()
    for _ in range(2):
        PLAIN(*given, "")
        usual = select.last_choice().kernel
        PLAIN(*given, "math")
        assert select.last_choice().kernel.family == "math" != usual.family
        with sdpa.sdpa_kernel("math"):
            PLAIN(*given, "")
            assert select.last_choice().kernel.family == "math"
    assert [len(found) for found in short.INFERENCE.recent.values()] == [1, 1, 1]
    select.clear_caches()
    assert not short.INFERENCE.recent


def test_many_sizes_of_the_short_form_are_not_kept():
    for N in range(1, 3 * repeats.LATEST):
        q, k, v = qkv(N=N)
        PLAIN(q, k, v, 0.5, -1, -1, False, "")
    assert max(map(len, short.INFERENCE.recent.values())) <= repeats.LATEST


def test_more_forms_than_are_recent_are_known(monkeypatch):
    """In rotation, one tensor in three roles among them: each is worked out once."""
    select.clear_caches()
    made, forward = [], short.Forward
    monkeypatch.setattr(short, "Forward", lambda *args: made.append(args) or forward(*args))
    sizes = [*range(1, 2 * repeats.LATEST), 16]
    for seed in range(3):
        for N in sizes:
            q, k, v = qkv(N=N, seed=seed)
            k, v = (q, q) if N == 16 else (k, v)
            out = PLAIN(q, k, v, 0.5)
            assert torch.allclose(out, attention(q, k, v, scale=0.5), atol=1e-6)
    assert len(made) == len(sizes)


def test_a_launch_that_failed_is_not_known(monkeypatch):
    tensors = qkv()
    PLAIN(*tensors, 0.5)
    chosen = select.last_choice().kernel.load()
    select.clear_caches()
    calls = []

    def fails(*_):
        calls.append(None)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(chosen, "forward", fails)
    try:
        with pytest.warns(UserWarning, match="answers instead"):
            out = PLAIN(*tensors, 0.5)
        for _ in range(2):
            assert torch.allclose(PLAIN(*tensors, 0.5), out, atol=1e-6)
        assert len(calls) == 1
    finally:
        select.clear_caches()
