"""torch's MPS operator as a kernel: what it is given, and what is made of its results, with another in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa.dispatch import catalog
from sdpa.kernels.vendor import mps
from sdpa.problem import AttentionProblem
from sdpa.repeated import Operator
from sdpa.testing import Case, check_kernel, make_inputs

CASES = [
    Case(dtype=dtype, D=64, Dv=64, Hkv=Hkv, mask=mask, layout=layout)
    for dtype in (torch.float32, torch.float16)
    for Hkv, mask, layout in (
        (4, "none", "bhmd"), (4, "none", "bmhd"), (2, "causal", "bhmd"), (2, "allowed", "bmhd"), (4, "padding", "bhmd"),
        (1, "bias", "expanded"), (4, "bias_rows", "bhmd"),
    )
]  # fmt: skip


def in_its_place(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *, scale=None, enable_gqa=False
):
    """What torch's operator takes, and NaN in rows whose keys are all hidden, as some of its releases have it."""
    assert all(t.is_contiguous() for t in (q, k, v)) and q.shape[3] == v.shape[3] and not dropout_p
    assert mask is None or (mask.dtype == q.dtype and not is_causal), "it adds a boolean mask as numbers"
    assert enable_gqa == (q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = (q.float() @ k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    return (weights @ v).to(q.dtype), weights


@pytest.fixture
def on_cpu(monkeypatch):
    """The operator as an operator of CPUs, and the row as one of theirs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_attention_math_for_mps", in_its_place, "CPU")
    monkeypatch.setattr(mps, "unavailable", lambda: None)
    monkeypatch.setitem(catalog.BY_NAME, "vendor_mps", replace(catalog.BY_NAME["vendor_mps"], devices=("cpu",)))
    yield
    library._destroy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case, on_cpu):
    assert catalog.by_name()["vendor_mps"].why_not(AttentionProblem.of(make_inputs(case))) == []
    found = check_kernel("vendor_mps", case)
    assert len(found) == 1 and all(comparison.ok for comparison in found), found


@pytest.mark.parametrize("Hkv", [4, 2])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_operator_as_it_is(mask, Hkv, on_cpu):
    """What repeated calls run."""
    inputs = make_inputs(Case(mask=mask, Hkv=Hkv, D=64, Dv=64))
    wanted = mps.forward(inputs, AttentionProblem.of(inputs), None).out
    operator = mps.native(inputs)
    assert operator is not None
    assert torch.equal(Operator(*operator)(*inputs[:3])[0], wanted)
    assert mps.native(make_inputs(Case(layout="bmhd"))) is None, "copies are made in the forward"


def test_where_it_is_not():
    if torch.backends.mps.is_available():
        pytest.skip("this machine has one of Apple's GPUs")
    assert mps.unavailable() == "torch sees no MPS device"


def test_older_releases_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    assert mps.unavailable() == "torch has fused MPS kernels for many queries from 2.13 on, got torch 2.12.1"
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert mps.unavailable() is None
