"""What cuda_flash's `record` gives to do a call again where the library did not record it: the same operator, told the
same of other tensors. No GPU."""

from __future__ import annotations

import pytest
import torch
from recorded_calls import KINDS, given_of, inputs_of, problem_of

from sdpa.inputs import Options, build_inputs
from sdpa.kernels.cuda import flash
from sdpa.problem import Results

TAKEN = [
    kind
    for kind in KINDS
    if not set("bias dropout alibi prefix allowed padding everything".split()) & set(kind.split())
]


@pytest.fixture
def called(monkeypatch):
    """What the three operators are called with, in order."""
    calls = []

    def operator(name):
        def run(q, *rest):
            calls.append((name, q, *rest))
            return torch.zeros(*q.shape[:3], 64), torch.zeros(q.shape[:3])

        return run

    monkeypatch.setattr(flash, "operators", lambda: tuple(map(operator, ("plain", "banded", "segments"))))
    return calls


def same(one, other):
    """Whether two arguments are the same tensor in memory, equal copies, or equal numbers."""
    if not isinstance(one, torch.Tensor):
        return one == other
    return one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("kind", TAKEN)
def test_every_kind_of_call_again(kind, rows, called):
    packed = "packed" in kind or "segments" in kind or kind == "unaligned"
    first, second = (inputs_of(kind, seed, rows=32 if packed else rows) for seed in (1, 2))
    problem = problem_of((first,), "forward", {"lse"})
    results, again = flash.record((first,), problem, None)
    given = given_of((second,))
    flash.forward(second, problem)
    forms = [given]
    if "packed" in problem.features:  # as rows (T, H, D), too, which PreparedRows repeats a call with
        forms.append((*(t.squeeze(0).transpose(0, 1) for t in given[:3]), *given[3:]))
    for form in forms:
        found = again(*form)
        assert [t.shape for t in found] == [t.shape for t in results]
        ordinary, repeated = called[1], called[-1]
        assert len(repeated) == len(ordinary) and all(map(same, repeated, ordinary))


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_no_keys(with_lse):
    """Sinks are all that a row sees: its log-sum-exp is the sink."""
    q, k, sinks = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8), torch.randn(3)
    inputs = build_inputs(q, k, k, Options(sinks=sinks))
    results = Results(torch.zeros(2, 3, 5, 8), sinks[None, :, None].expand(2, 3, 5).contiguous())
    upstream = Results(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5) if with_lse else None)
    found = flash.backward(inputs, results, upstream, problem_of((inputs,), "backward", set()))
    assert not found.q.any() and found.k.shape == found.v.shape == k.shape
    wanted = torch.zeros(3) if upstream.lse is None else upstream.lse.sum((0, 2))
    torch.testing.assert_close(found.sinks, wanted)
