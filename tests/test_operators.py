"""The operators, which graphs call, remember calls too: results, layouts and kernels as of a fresh call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import sdpa
from helpers import OPCHECKS
from sdpa import calls as memory
from sdpa import operators
from sdpa.calls import CALLS, Pass
from sdpa.dispatch import select
from sdpa.operators import BACKWARD, FORWARD, WEIGHTS, backward_arguments, call_weights, forward_arguments
from sdpa.problem import Results
from sdpa.testing import Case, make_inputs

attention = sdpa.scaled_dot_product_attention
PLAIN_CASES = [
    Case(M=5, N=7, D=8, Dv=6),
    Case(M=5, N=7, D=8, Dv=8, Hkv=2, mask="causal"),
    Case(M=5, N=7, D=8, Dv=8, layout="bmhd"),
]
EMPTY_CASES = [Case(M=0, N=7, D=8), Case(M=5, N=0, D=8)]
MASKED_CASES = [
    Case(M=5, N=7, D=8, Dv=8, mask="bias"),
    Case(M=5, N=7, D=8, Dv=8, mask="lengths"),
    Case(M=5, N=7, D=8, Dv=8, mask="segments"),
]
SEEDS = (1, 2, 2)


pytestmark = pytest.mark.usefixtures("nothing_remembered")


def fresh(operator, *given):
    """What the operator returns where nothing is remembered."""
    kept = dict(CALLS.recent), CALLS.known.copy()
    CALLS.clear()
    try:
        return operator(*given)
    finally:
        CALLS.clear()
        CALLS.recent.update(kept[0])
        CALLS.known.update(kept[1])


def remembered(direction):
    return sum(key[0][0] == direction for key in CALLS.known)


def alike(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f, w)
        assert f.stride() == w.stride() and f.dtype == w.dtype


def qkv(N=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, size, 8, generator=generator) for size in (16, N, N)]


@pytest.mark.parametrize("needs_lse", [False, True])
@pytest.mark.parametrize("case", [*PLAIN_CASES, *MASKED_CASES, *EMPTY_CASES], ids=str)
def test_forward(case, needs_lse):
    """Also for tensors that it has seen the like of, of other numbers."""
    for seed in SEEDS:
        given = forward_arguments(make_inputs(case, seed), needs_lse, "")
        found = FORWARD(*given)
        alike(found, fresh(FORWARD, *given))
        assert found[1].shape == (found[0].shape[:3] if needs_lse else (0,))
    assert remembered("forward") == bool(case.M and case.N)
    if case.mask == "none":
        torch.library.opcheck(FORWARD, given, test_utils=OPCHECKS)


@pytest.mark.parametrize("case", [*PLAIN_CASES, *MASKED_CASES, *EMPTY_CASES], ids=str)
def test_backward(case):
    """Gradients in whatever layout arrive, and for a log-sum-exp, too."""
    for seed in SEEDS:
        inputs = make_inputs(case, seed)
        results = Results(*FORWARD(*forward_arguments(inputs, True, "")))
        spread, drawn = torch.ones(()).expand(results.out.shape), torch.randn(results.out.shape)
        for upstream in (Results(drawn, None), Results(spread, None), Results(drawn, torch.randn(results.lse.shape))):
            for bias_grad in {False, inputs.bias is not None}:
                given = backward_arguments(inputs, results, upstream, bias_grad, "")
                alike(BACKWARD(*given), fresh(BACKWARD, *given))
    many = 3 * (1 + (case.mask == "bias"))
    assert remembered("backward") == (many if case.M and case.N else 0)
    if case.mask == "none":
        torch.library.opcheck(BACKWARD, backward_arguments(inputs, results, upstream, False, ""), test_utils=OPCHECKS)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("case", [*PLAIN_CASES, *MASKED_CASES, *EMPTY_CASES], ids=str)
def test_weights(case, average):
    for seed in SEEDS:
        inputs = make_inputs(case, seed)
        lse = FORWARD(*forward_arguments(inputs, True, ""))[1]
        found = call_weights(inputs, lse, average, "")
        alike((found,), (fresh(call_weights, inputs, lse, average, ""),))
    assert remembered("weights") == bool(case.M and case.N)
    if case.mask == "none":
        given = (lse, *inputs[: operators.BAND_END], average, "")
        torch.library.opcheck(WEIGHTS, given, test_utils=OPCHECKS)


def test_they_follow_switches_and_settings():
    """What answered tensors of this form before says nothing under another switch or setting."""
    inputs = make_inputs(PLAIN_CASES[0])
    plain = nullcontext
    families = []
    for _ in range(2):
        for setting, context in (
            ("", plain),
            ("math", plain),
            ("", lambda: sdpa.sdpa_kernel("math")),
            ("", lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)),
        ):
            with context():
                results = FORWARD(*forward_arguments(inputs, True, setting))
                families.append(sdpa.last_choice().kernel.family)
                upstream = Results(results[0], None)
                BACKWARD(*backward_arguments(inputs, Results(*results), upstream, False, setting))
                families.append(sdpa.last_choice().kernel.family)
    assert families == 2 * (["flash", "flash", *["math"] * 6])
    assert remembered("forward") == remembered("backward") == 4


@pytest.mark.parametrize("setting", ["", "math", "cpu_flash"])
def test_what_only_a_graph_by_hand_gives_is_refused(setting):
    q = torch.randn(1, 2, 5, 8)
    results = FORWARD(q, q, q, 1.0, -1, -1, False, True, setting)
    for rng in (None, torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)):
        for call in (
            lambda **kw: FORWARD(q, q, q, 1.0, setting=setting, **kw),
            lambda **kw: BACKWARD(q, *results, q, q, q, 1.0, setting=setting, **kw),
            lambda **kw: WEIGHTS(results[1], q, q, q, 1.0, setting=setting, **kw),
        ):
            with pytest.raises(
                ValueError, match=r"dropout_p = 0.5 needs rng, two int64 numbers \(seed, offset\) or four, got"
            ):
                call(dropout_p=0.5, rng=rng)
    for bad in (q[0], q[None]):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"expected q as \(batch, heads, length, head size\), got shape"):
                FORWARD(bad, bad, bad, 1.0, setting=setting)


def test_they_follow_deterministic_mode():
    inputs = make_inputs(PLAIN_CASES[0])
    results = Results(*FORWARD(*forward_arguments(inputs, True, "")))
    try:
        for deterministic in (False, True, False):
            torch.use_deterministic_algorithms(deterministic)
            BACKWARD(*backward_arguments(inputs, results, Results(results.out, None), False, ""))
            assert sdpa.last_choice().problem.deterministic == deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_many_sizes_are_few_among_the_latest():
    for N in range(1, 3 * memory.LATEST):
        FORWARD(*qkv(N=N), 0.5)
    assert [len(found) for found in CALLS.recent.values()] == [memory.LATEST]


def test_what_they_remember_is_bounded(monkeypatch):
    monkeypatch.setattr(memory, "MAX_CALLS", 6)
    for N in range(1, 20):
        FORWARD(*qkv(N=N), 0.5)
    assert len(CALLS.known) == 6


def test_more_calls_than_the_latest_are_known(monkeypatch):
    """In rotation, one tensor in three roles among them: each is worked out once."""
    made = []
    monkeypatch.setattr(operators, "Pass", lambda *args: made.append(args) or Pass(*args))
    sizes = [*range(1, 2 * memory.LATEST), 16]
    for seed in range(3):
        for N in sizes:
            q, k, v = qkv(N=N, seed=seed)
            k, v = (q, q) if N == 16 else (k, v)
            out = FORWARD(q, k, v, 0.5)[0]
            assert torch.allclose(out, attention(q, k, v, scale=0.5), atol=1e-6)
    assert len(made) == len(sizes)


@pytest.mark.parametrize("masked", [False, True])
def test_one_tensor_in_several_roles(masked):
    """Before and after distinct tensors of the same form, forward and backward."""
    distinct, (one, _, _) = qkv(), qkv(seed=1)
    ids = torch.arange(16, dtype=torch.int32)[None].expand(2, 16).div(5, rounding_mode="floor").contiguous()
    mask = {"q_segments": ids, "k_segments": ids} if masked else {}
    apart = {"q_segments": ids, "k_segments": ids.clone()} if masked else {}
    example = make_inputs(Case(M=16, N=16, D=8, Dv=8))
    for q, k, v in (distinct, (one, one, one), (one, distinct[1], distinct[1]), distinct, (one, one, distinct[2])):
        for fields in (mask, apart, mask):
            inputs = example._replace(q=q, k=k, v=v, **fields)
            given = forward_arguments(inputs, True, "")
            results = Results(*FORWARD(*given))
            alike(results, fresh(FORWARD, *given))
            own = [t.clone() for t in (q, k, v)]
            alike(results, fresh(FORWARD, *forward_arguments(inputs._replace(q=own[0], k=own[1], v=own[2]), True, "")))
            back = backward_arguments(inputs, results, Results(results.out, None), False, "")
            alike(BACKWARD(*back), fresh(BACKWARD, *back))


def test_a_launch_that_failed_is_not_remembered(monkeypatch):
    tensors = qkv()
    FORWARD(*tensors, 0.5)
    chosen = sdpa.last_choice().kernel.load()
    select.clear_caches()
    attempts = []

    def fails(*_):
        attempts.append(None)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(chosen, "forward", fails)
    with pytest.warns(UserWarning, match="answers instead"):
        out = FORWARD(*tensors, 0.5)[0]
    for _ in range(2):
        assert torch.allclose(FORWARD(*tensors, 0.5)[0], out, atol=1e-6)
    assert len(attempts) == 1
