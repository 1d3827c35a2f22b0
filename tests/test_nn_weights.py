"""Attention's weights beside its output: values, gradients of any order, what is saved and who is asked, on a CPU."""

from __future__ import annotations

import pytest
import torch
from nn_helpers import randn
from torch.utils.flop_counter import FlopCounterMode

import sdpa
import sdpa.nn
from sdpa import sdpa_kernel
from sdpa.dispatch.catalog import kernels_for
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.math import weights as by_math
from sdpa.kinds import lifted
from sdpa.nn.weights import attention_with_weights
from sdpa.operators import call_forward, call_weights, forward_arguments
from sdpa.problem import AttentionProblem, Results
from sdpa.reference import attention as reference
from sdpa.testing import MASKS, Case, Draw, compare_weights, learnable, make_inputs, reference_weights

SIZES = {"B": 2, "H": 4, "Hkv": 2, "M": 9, "N": 13, "D": 6, "Dv": 5}
WIDE = {**SIZES, "dtype": torch.float64}
EXTRAS = {
    "softcap": {"softcap": 2.0, "mask": "window"},
    "sinks": {"sinks": True, "mask": "both_lengths"},
    "dropout": {"dropout_p": 0.3, "mask": "bias_causal"},
    "scale": {"scale": -0.4, "mask": "alibi"},
    "everything": {"softcap": 3.0, "sinks": True, "dropout_p": 0.2, "mask": "bias_rows"},
}
# A float32 bias has gradients in float32: those of the output and of the weights are rounded before they are added.
EXACT = [mask for mask in MASKS if mask != "bias_float32"]
CASES = {**{mask: Case(**WIDE, mask=mask) for mask in EXACT}, **{n: Case(**WIDE, **e) for n, e in EXTRAS.items()}}


def learning(case):
    """Inputs whose q, k, v, bias and sinks learn, and those."""
    inputs = make_inputs(case)
    q, k, v, bias, sinks = (t if t is None else t.detach().requires_grad_() for t in learnable(inputs))
    return inputs._replace(q=q, k=k, v=v, bias=bias, sinks=sinks), [t for t in (q, k, v, bias, sinks) if t is not None]


def both(inputs, average):
    """Output and weights."""
    results = Results(*call_forward(inputs, True, ""))
    return results.out, call_weights(inputs, results.lse, average, "")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_weights_and_their_gradients(name, average):
    case = CASES[name]
    inputs, learned = learning(case)
    out, weights = both(inputs, average)
    draw = Draw(case, 5)
    upstream = draw.normal(*out.shape), draw.normal(*weights.shape)
    wanted = reference(inputs).out, reference_weights(inputs, average)
    torch.testing.assert_close((out, weights), wanted, rtol=1e-9, atol=1e-10)
    got, found = (torch.autograd.grad(results, learned, upstream) for results in ((out, weights), wanted))
    torch.testing.assert_close(got, found, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_lower_precision(dtype):
    for mask in ("none", "causal", "allowed", "bias"):
        inputs = make_inputs(Case(**{**SIZES, "dtype": dtype}, mask=mask))
        for average in (True, False):
            found = compare_weights(both(inputs, average)[1], inputs, average)
            assert found.ok, f"{mask}, averaged: {average}, {found}"


@pytest.mark.parametrize("average", [True, False])
def test_second_derivatives(average):
    inputs, learned = learning(Case(**{**WIDE, "M": 3, "N": 4, "D": 2}, mask="bias", dropout_p=0.3, softcap=2.0))

    def weights(q, k, bias):
        return both(inputs._replace(q=q, k=k, bias=bias), average)[1]

    q, k, _, bias = learned
    assert torch.autograd.gradcheck(weights, (q, k, bias))
    assert torch.autograd.gradgradcheck(weights, (q, k, bias))


@pytest.mark.parametrize("part", [1, 400])
def test_parts_make_the_whole(part, monkeypatch):
    """Group by group, and entry by entry; with the dropout that the whole has."""
    for mask in MASKS:
        inputs = make_inputs(Case(**SIZES, mask=mask, dropout_p=0.3))
        lse = call_forward(inputs, True, "")[1]
        for average in (True, False):
            monkeypatch.setattr(by_math, "PART", part)
            problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"}) if average else frozenset())
            got = by_math.weights(inputs, lse, problem, None)
            torch.testing.assert_close(got, by_math.composite_weights(inputs, lse, average))


@pytest.mark.parametrize("average", [True, False])
def test_nothing_of_their_size_is_saved(average):
    inputs, _ = learning(Case(**{**SIZES, "M": 40, "N": 50}, mask="padding"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        both(inputs, average)
    assert max(saved) < 40 * 50


def test_weights_that_nobody_differentiates_cost_the_backward_nothing():
    """No gradient arrives at the log-sum-exp, not even zeros; where the weights are in the loss, one does."""
    inputs, learned = learning(Case(**SIZES))
    out, weights = both(inputs, True)
    torch.autograd.grad(out.sum(), learned, retain_graph=True)
    assert "lse_grad" not in sdpa.last_choice().problem.features
    torch.autograd.grad(out.sum() + weights.square().sum(), learned)
    assert "lse_grad" in sdpa.last_choice().problem.features


def test_all_dropped():
    q = torch.ones(1, 2, 3, 4, requires_grad=True)
    out, weights = attention_with_weights(q, q, q, Options(None, 1.0), False)
    assert weights.shape == (1, 2, 3, 3) and not weights.any() and not out.any()


@pytest.mark.parametrize("average", [True, False])
def test_the_operator_has_a_fake(average):
    inputs = make_inputs(Case(**SIZES, mask="padding"))
    lse = call_forward(inputs, True, "")[1]
    checks = ("test_schema", "test_faketensor")
    given = (lse, *forward_arguments(inputs, average, ""))
    torch.library.opcheck(torch.ops.sdpa.attention_weights.default, given, test_utils=checks)


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}], ids=str)
def test_nothing_to_weigh(sizes):
    case = Case(**{**SIZES, **sizes})
    inputs, learned = learning(case)
    for average in (True, False):
        weights = both(inputs, average)[1]
        assert weights.shape == ((case.B, case.M, case.N) if average else (case.B, case.H, case.M, case.N))
        assert not any(g.any() for g in torch.autograd.grad(weights.sum(), learned[:2]))


def test_a_compiled_step_learns_from_the_weights():
    module = sdpa.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))

    def loss(x):
        out, weights = module(x, x, x)
        return out.square().sum() + weights.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    parameters = [p for p in module.parameters() if p is not module.out_proj.bias]
    torch.testing.assert_close(*(torch.autograd.grad(step(x), parameters) for step in (compiled, loss)))


# Who is asked


def test_who_makes_weights():
    assert {k.name for k in kernels_for("cuda") if "weights" in k.directions} == {
        "triton_flash",
        "triton_efficient",
        "math",
    }
    told = sdpa.explain(*(torch.ones(1, 2, 4, 8) for _ in range(3)), direction="weights")
    assert told.chosen == "math" and told.problem.direction == "weights"
    refused = {row.kernel: row.reasons for row in told.rows}
    assert "has no weights pass" in refused["cpu_flash"]


def attended():
    q = torch.ones(1, 2, 4, 8)
    attention_with_weights(q, q, q, Options(), True)
    return sdpa.last_choice()


@pytest.mark.parametrize("setting", ["flash", "vendor_cpu_flash", ["flash", "math"], "math"], ids=str)
def test_a_setting_without_a_kernel_for_weights_leaves_them(setting):
    """As a kernel without a backward leaves that to whoever has one."""
    with sdpa_kernel(setting):
        choice = attended()
    assert choice.kernel.name == "math" and choice.problem.direction == "weights"
    assert choice.setting == ("" if "math" not in setting else ",".join(setting) if len(setting) == 2 else "math")


def test_strict_mode_where_only_math_makes_weights():
    with sdpa_kernel(strict=True):
        assert attended().kernel.name == "math"


def test_switches_of_torch_say_nothing_of_weights():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert attended().kernel.name == "math"


def test_their_product_is_counted():
    q = torch.ones(2, 3, 5, 8)
    with FlopCounterMode(display=False) as counter:
        attention_with_weights(q, q, q, Options(), True)
    assert counter.get_total_flops() == 3 * (2 * 2 * 3 * 5 * 5 * 8)


def test_operations_and_traffic():
    q = torch.ones(1, 2, 4, 8)
    inputs = build_inputs(q, q, q, Options())
    problem = AttentionProblem.of(inputs, "weights", frozenset({"averaged"}))
    assert problem.flops() == 2 * 2 * 4 * 4 * 8 and problem.bytes() == (2 * 64 + 16) * 4
    assert problem._replace(features=frozenset()).bytes() == (2 * 64 + 32) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [-1e5, -1e9, "lowest"])
def test_padding_by_a_large_number(offset, dtype):
    """Where it is added to all keys of a row, the weights are those without it: an offset changes no softmax."""
    offset = torch.finfo(dtype).min if offset == "lowest" else offset
    everywhere, partly, none = torch.zeros(3, 6, dtype=dtype)
    everywhere[:], partly[4:] = offset, offset
    x, half = randn(2, 6, 8).to(dtype), dtype == torch.bfloat16
    for average in (True, False):
        weights = []
        for kind, padding in ((torch.nn.MultiheadAttention, none), (sdpa.nn.MultiheadAttention, everywhere)):
            torch.manual_seed(0)
            module = kind(8, 2, batch_first=True, dtype=dtype)
            padding = torch.stack([padding, partly])
            weights.append(module(x, x, x, padding, average_attn_weights=average)[1])
        torch.testing.assert_close(*weights, rtol=1.6e-2 if half else 1e-4, atol=2e-3 if half else 1e-6)


def test_an_expanded_bias_is_not_written_out():
    bias = torch.full((1, 1, 1, 5), -1e9).expand(4, 3, 6, 5)
    raised = lifted(bias, False)
    assert raised.shape == (1, 1, 1, 5) and not raised.any()
