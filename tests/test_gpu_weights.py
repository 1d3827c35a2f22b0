"""The weights beside an output, on a GPU: against the float64 reference at real sizes, their gradients and memory."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import compile_ahead, name_for, real, right

import sdpa
from sdpa import operators as ops
from sdpa.dispatch import select as selection
from sdpa.dispatch.catalog import FLOATS, by_name
from sdpa.dispatch.select import select
from sdpa.operators import call_forward, call_weights
from sdpa.problem import AttentionProblem, Results
from sdpa.reference import attention as reference
from sdpa.testing import MASKS, Case, compare, compare_weights, default_tile, make_inputs

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16
SIZED = {
    "masks": [Case(M=200, N=264, D=64, Dv=64, mask=m, dtype=d, device="cuda") for m in MASKS for d in FLOATS],
    "real": [real(mask=m) for m in ("none", "causal", "padding", "allowed", "bias", "segments", "alibi", "lengths")],
    "layouts": [real(layout=layout, H=12, Hkv=12, M=500, N=515) for layout in ("bmhd", "expanded")],
    "groups": [real(H=16, Hkv=2, M=300, N=700, mask="window")],
    "head_sizes": [real(B=1, M=333, N=400, D=d, Dv=d, mask="causal") for d in (17, 96, 128, 256, 512)],
    "float32": [real(B=1, M=333, N=400, D=d, Dv=d, dtype=torch.float32, mask="bias") for d in (64, 128, 256, 512)],
    "extras": [
        real(M=300, N=300, softcap=5.0, sinks=True, mask="causal"),
        real(M=300, N=300, dropout_p=0.2, mask="padding"),
        real(M=300, N=300, D=128, Dv=128, dropout_p=0.2, mask="bias"),
        real(M=300, N=300, scale=-0.2),
    ],
}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("group", SIZED)
def test_weights(group, average):
    """The kernel, given the log-sum-exp of the reference."""
    compile_ahead("triton_efficient", SIZED[group], ["averaged" if average else "weights"])
    for case in SIZED[group]:
        inputs = make_inputs(case)
        problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"} if average else ()))
        row = by_name()[name_for(inputs)]
        assert not row.why_not(problem)
        module = row.load()
        weights = module.weights(inputs, reference(inputs).lse.float(), problem, default_tile(module, problem))
        right([compare_weights(weights, inputs, average)], case)


@pytest.mark.parametrize("average", [True, False])
def test_every_tile(average):
    for D, dtype in ((64, BFLOAT16), (128, BFLOAT16), (64, torch.float32)):
        inputs = make_inputs(real(B=1, M=300, N=333, D=D, Dv=D, dtype=dtype, mask="causal"))
        problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"} if average else ()))
        module = by_name()["triton_flash"].load()
        for tile in module.tiles(problem):
            weights = module.weights(inputs, reference(inputs).lse.float(), problem, tile)
            right([compare_weights(weights, inputs, average)], tile)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bias"])
def test_with_the_log_sum_exp_of_a_kernel(mask):
    """Rows add up to 1 whichever kernel answers the forward; the selector asks ours for the weights."""
    inputs = make_inputs(real(mask=mask))
    lse = call_forward(inputs, True, "")[1]
    weights = call_weights(inputs, lse, True, "")
    assert sdpa.last_choice().kernel.name == name_for(inputs) and sdpa.last_choice().problem.direction == "weights"
    share = torch.isfinite(reference(inputs).lse).double().mean(1)  # of heads that see a key
    torch.testing.assert_close(weights.double().sum(-1), share, rtol=0, atol=torch.finfo(BFLOAT16).eps)


def test_more_weights_than_32_bits_count():
    """Offsets beyond 2^31 elements, in entries and in rows."""
    inputs = make_inputs(real(B=1, H=3, Hkv=3, M=27000, N=27000, D=16, Dv=16))
    weights = call_weights(inputs, call_forward(inputs, True, "")[1], False, "")
    assert weights.numel() > 2**31
    last = inputs._replace(q=inputs.q[:, 2:, -64:], k=inputs.k[:, 2:], v=inputs.v[:, 2:])
    right([compare_weights(weights[:, 2:, -64:], last, False)], "the last rows")


def test_gradients_arrive_only_where_they_are_wanted(monkeypatch):
    """Through the output alone the backward is the fused one without a gradient of lse; no memory per pair is kept."""
    case = real(B=8, H=12, Hkv=12, M=512, N=512)
    inputs = make_inputs(case)
    q, k, v = (t.requires_grad_() for t in inputs[:3])
    results = Results(*call_forward(inputs, True, ""))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = call_weights(inputs, results.lse, True, "")
    size = weights.numel() * weights.element_size()
    assert torch.cuda.memory_allocated() - before < 1.1 * size
    assert torch.cuda.max_memory_allocated() - before < 1.1 * size
    problems = []

    def watched(problem, setting):
        problems.append(problem)
        return select(problem, setting)

    monkeypatch.setattr(ops, "select", watched)
    selection.clear_caches()
    torch.autograd.grad(results.out.sum(), (q, k, v), retain_graph=True)
    (problem,) = problems
    assert problem.direction == "backward" and "lse_grad" not in problem.features


@pytest.mark.parametrize("training", [True, False])
def test_a_module_with_weights(training):
    """Beside torch's in float64, no further away than torch's in bfloat16 may be."""
    torch.manual_seed(0)
    options = {"batch_first": True, "device": "cuda"}
    ours = sdpa.nn.MultiheadAttention(256, 4, **options, dtype=BFLOAT16).train(training)
    torchs, wide = (torch.nn.MultiheadAttention(256, 4, **options, dtype=d) for d in (BFLOAT16, torch.float64))
    for module in (torchs, wide):
        module.load_state_dict(ours.state_dict())
    x = torch.randn(4, 300, 256, device="cuda", dtype=BFLOAT16)
    padding = torch.arange(300, device="cuda") >= torch.tensor([300, 1, 77, 299], device="cuda")[:, None]
    for average in (True, False):
        asked = {"key_padding_mask": padding, "average_attn_weights": average}
        got, plain = (module(x, x, x, **asked)[1] for module in (ours, torchs))
        wanted = wide(*[x.double()] * 3, **asked)[1].detach()
        found = compare("weights", got.detach(), wanted, plain.detach(), x.shape[2], expected=BFLOAT16)
        right([found], asked)
