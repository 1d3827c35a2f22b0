"""Every kernel of the catalog that this machine has, on every mask, dtype and layout it says it can do."""

from __future__ import annotations

import itertools

import pytest
import torch

from sdpa.dispatch.catalog import ALL_DTYPES, KERNELS, by_name
from sdpa.testing import LAYOUTS, MASKS, Case, able, check_kernel, make_inputs, problem_of, run_kernel, trains

# A row that cannot run here has no cases: `test_every_row_is_tested_or_says_why_not` shows its reason.
AVAILABLE = [kernel.name for kernel in KERNELS if kernel.unavailable() is None and kernel.serves("cpu")]
DTYPES = sorted(ALL_DTYPES, key=str)


def cases_of(variants):
    """(kernel, case) of everything that the catalog says a kernel can do."""
    pairs = itertools.product(AVAILABLE, variants)
    return [pytest.param(name, case, id=f"{name}-{case}") for name, case in pairs if not able(name, case)]


def check(name, case, seed=0):
    found = check_kernel(name, case, seed)
    assert all(c.ok for c in found), "; ".join(str(c) for c in found if not c.ok)
    assert len(found) > 2 or not trains(by_name()[name], make_inputs(case, seed))


def test_every_row_is_tested_or_says_why_not():
    problem = problem_of(make_inputs(Case()), "forward")
    for kernel in KERNELS:
        assert kernel.name in AVAILABLE or kernel.why_not(problem), kernel.name


MASKED = [Case(mask=mask, dtype=dtype) for mask in MASKS for dtype in DTYPES]
GROUPED = [Case(mask=mask, Hkv=2, M=17, N=65, D=24, Dv=40, layout="bmhd", dtype=torch.float32) for mask in MASKS]
LAID_OUT = [Case(layout=layout, dtype=d, mask=m) for layout in LAYOUTS for d in DTYPES for m in ("none", "causal")]
SIZES = [
    Case(B=1, H=1, Hkv=1, M=1, N=1, D=1, Dv=1),
    Case(B=1, H=2, Hkv=1, M=1, N=257, D=64, Dv=64),
    Case(B=3, H=5, Hkv=5, M=64, N=64, D=63, Dv=65),
    Case(B=1, H=4, Hkv=4, M=131, N=127, D=128, Dv=128, mask="causal"),
    Case(B=1, H=2, Hkv=2, M=65, N=193, D=256, Dv=256, mask="causal_bottom_right"),
    Case(B=1, H=2, Hkv=2, M=193, N=65, D=72, Dv=72, mask="causal_bottom_right"),
    Case(B=2, H=6, Hkv=1, M=40, N=40, D=80, Dv=16, mask="window"),
    Case(B=1, H=1, Hkv=1, M=300, N=300, D=16, Dv=16, mask="segments"),
]
SIZED = [Case(**{**case.__dict__, "dtype": dtype}) for case in SIZES for dtype in DTYPES]
EXTRA = [
    Case(softcap=2.0, dtype=dtype, mask=mask) for dtype in DTYPES for mask in ("none", "causal", "bias")
] + [
    Case(sinks=True, dtype=dtype, mask=mask, Hkv=2) for dtype in DTYPES for mask in ("none", "window", "lengths")
] + [
    Case(dropout_p=p, dtype=dtype, mask=mask) for dtype in DTYPES for p in (0.1, 0.5) for mask in ("none", "causal")
] + [
    Case(scale=scale, dtype=dtype) for dtype in DTYPES for scale in (0.0, -0.3, 1.0)
] + [
    Case(softcap=5.0, sinks=True, dropout_p=0.2, mask="bias_causal", requires_bias_grad=True, Hkv=2, dtype=dtype)
    for dtype in DTYPES
]  # fmt: skip
BIASED = [
    Case(mask=mask, requires_bias_grad=True, dtype=dtype)
    for mask in ("bias", "bias_rows", "bias_float32", "bias_causal")
    for dtype in DTYPES
]


@pytest.mark.parametrize("name,case", cases_of(MASKED))
def test_masks(name, case):
    check(name, case)


@pytest.mark.parametrize("name,case", cases_of(GROUPED))
def test_groups_with_other_sizes(name, case):
    check(name, case, seed=1)


@pytest.mark.parametrize("name,case", cases_of(LAID_OUT))
def test_layouts(name, case):
    check(name, case, seed=2)


@pytest.mark.parametrize("name,case", cases_of(SIZED))
def test_sizes(name, case):
    check(name, case, seed=3)


@pytest.mark.parametrize("name,case", cases_of(EXTRA))
def test_softcap_sinks_dropout_and_scale(name, case):
    check(name, case, seed=4)


@pytest.mark.parametrize("name,case", cases_of(BIASED))
def test_gradient_of_the_bias(name, case):
    check(name, case, seed=5)


LARGE = [
    Case(B=1, H=2, Hkv=1, M=1030, N=1030, D=64, Dv=64, mask=m, dtype=d) for m in ("none", "causal") for d in DTYPES
]


@pytest.mark.parametrize("name,case", cases_of(LARGE))
def test_many_tiles_and_two_threads(name, case):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(name, case, seed=6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("threads", [1, 2], ids=lambda n: f"threads{n}")
def test_the_same_bits_twice(name, threads):
    """Of a kernel that says it is deterministic, and on one thread of any."""
    if threads > 1 and not by_name()[name].deterministic:
        pytest.skip(f"the catalog says {name} is not deterministic")
    case = Case(M=200, N=300, D=64, Dv=64, mask="causal")
    inputs = make_inputs(case)
    grad_out = torch.randn(case.B, case.H, case.M, case.Dv) if "backward" in by_name()[name].directions else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = (run_kernel(name, inputs, grad_out) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    for a, b in zip((*first[0], *(first[1] or ())), (*second[0], *(second[1] or ())), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", AVAILABLE)
def test_results_follow_the_contract(name):
    """Dtypes and shapes of results; memory order of out and gradients is the operator's to see to, of out ours."""
    for layout, dtype in itertools.product(("bhmd", "bmhd"), DTYPES):
        case = Case(layout=layout, dtype=dtype)
        inputs = make_inputs(case)
        results, _ = run_kernel(name, inputs, None)
        assert results.out.shape == (case.B, case.H, case.M, case.Dv) and results.out.dtype == dtype
        order = results.out.transpose(1, 2) if layout == "bmhd" else results.out
        assert order.is_contiguous()
        if results.lse is not None:
            assert results.lse.shape == (case.B, case.H, case.M)
            assert results.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
