"""Judging Triton's kernels in its interpreter: run one on CPU tensors, compare with float64 within the usual budget.

The interpreter computes products of bfloat16 on its raw bits, so everything here is float32 or float16.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from sdpa.problem import Gradients, Results, Tile
from sdpa.reference import attention as reference
from sdpa.testing import backward_bands, compare, differentiate, forward_band, learnable, problem_of

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreted wants a process of its own: TRITON_INTERPRET=1 pytest tests/interpreted")

from sdpa.kernels.triton import (  # they import Triton, which reads the variable above
    arguments,
    backward,
    bias_grad,
    decode,
    efficient,
    flash,
    tiles,
)
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.kernels.triton.target import UNLIMITED_MEMORY, Target, assume

# A device that has a few cores, so that sums are cut into parts, and whose L2 cache holds the keys and values of three
# heads of 53 x (24 + 24) float32, so that sections are neither one head nor all.
CORES, L2 = 4, 80 << 10
DESCRIPTORS = Target("interpreter", 0, UNLIMITED_MEMORY, CORES, L2)
POINTERS = Target("cuda", 80, UNLIMITED_MEMORY, CORES, L2)
MANY_CORES = POINTERS._replace(cores=1 << 20)
ONE_CORE = POINTERS._replace(cores=1)
SMALL = Tile(16, 16, 4, 1)
DENSE = {"bias", "allowed", "dropout"}  # what only triton_efficient says it takes


def pytest_configure(config):
    ignored = "ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton.runtime.interpreter"
    config.addinivalue_line("filterwarnings", ignored)  # why pyproject.toml wants a NumPy that still converts


class Judged(NamedTuple):
    results: Results
    grads: Gradients


@pytest.fixture(autouse=True)
def always_poisoned(poisoned_memory):
    """A kernel that leaves a part of its results unwritten, or reads what nobody wrote, shows NaN."""


def module_of(inputs):
    return efficient if problem_of(inputs, "forward").features & DENSE else flash


def drawn_like(values, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values.dtype)


def run_family(
    inputs, upstream=None, *, tile=SMALL, target=DESCRIPTORS, bias_grad=False, results=None, float32="itself"
):
    """Forward, unless its results are given, and backward of the kernel that the features ask for.

    A backward of float32 multiplies it "itself", as AMD's do, in a third of the interpreter's time; or it reads float16
    "parts" in passes over keys and over queries; or it is "whole", as its sizes ask for.
    """
    module = module_of(inputs)
    with assume(target):
        if results is None:
            results = module.forward(inputs, problem_of(inputs, "forward"), tile)
        upstream = upstream or Results(drawn_like(results.out, 1), None)
        with backwards_of_float32(float32 if inputs.q.dtype == torch.float32 else "whole"):
            grads = module.backward(inputs, results, upstream, problem_of(inputs, "backward", bias_grad), tile)
    return Judged(results, grads)


@contextmanager
def backwards_of_float32(how):
    """See run_family. What was prepared for another way is forgotten."""
    with ExitStack() as stack:
        if how != "whole":
            stack.enter_context(patch.object(backward, "one_block_tile", lambda problem: None))
        if how == "itself":
            for module in (arguments, backward, bias_grad, tiles):
                stack.enter_context(patch.object(module, "float16_parts_of", lambda problem: 0))
        PREPARED.clear()
        stack.callback(PREPARED.clear)
        yield


def differentiate_lse(inputs, upstream, dtype):
    """`sdpa.testing.differentiate` where a gradient arrives at the log-sum-exp, too."""
    learned = [t if t is None else t.detach().to(dtype).requires_grad_() for t in learnable(inputs)]
    q, k, v, bias, sinks = learned
    results = reference(inputs._replace(q=q, k=k, v=v, bias=bias, sinks=sinks), dtype)
    present = [t for t in learned if t is not None]
    found = iter(torch.autograd.grad(results, present, [t.to(dtype) for t in upstream]))
    return Results(*(t.detach() for t in results)), Gradients(*(None if t is None else next(found) for t in learned))


def judge(inputs, *, tile=SMALL, target=DESCRIPTORS, bias_grad=False, lse_grad=False, float32="itself"):
    """Run forward and backward, assert that every result is within its budget, and return them."""
    upstream = upstream_of(inputs, lse_grad)
    got = run_family(inputs, upstream, tile=tile, target=target, bias_grad=bias_grad, float32=float32)
    if lse_grad:
        wanted, plain = (differentiate_lse(inputs, upstream, dtype) for dtype in (torch.float64, inputs.q.dtype))
    else:
        wanted, plain = (differentiate(inputs, upstream.out, dtype) for dtype in (torch.float64, inputs.q.dtype))
    q, k = inputs.q, inputs.k
    terms = q.shape[2] * (q.shape[1] // k.shape[1]) + k.shape[2]
    bands = backward_bands(inputs, upstream.out, *wanted)
    found = [
        compare("out", got.results.out, wanted[0].out, plain[0].out, terms, forward_band(inputs, wanted[0])),
        compare("lse", got.results.lse, wanted[0].lse, plain[0].lse, terms),
    ]
    names = ["q", "k", "v", *["bias"] * bias_grad, *["sinks"] * (inputs.sinks is not None)]
    for name in names:
        grads = (getattr(g, name) for g in (got.grads, wanted[1], plain[1]))
        found.append(compare(f"grad_{name}", *grads, terms, bands[name]))
    assert all(c.ok for c in found), "; ".join(str(c) for c in found if not c.ok)
    return got


def upstream_of(inputs, lse_grad=False):
    q = inputs.q
    out = q.new_zeros(*q.shape[:3], inputs.v.shape[3])
    lse = torch.zeros(q.shape[:3], dtype=torch.float32)
    return Results(drawn_like(out, 1), drawn_like(lse, 2) if lse_grad else None)


def judge_decode(inputs, *, tile=SMALL, target=MANY_CORES, results=None):
    """The same of triton_decode, which has a forward only; `results` is what to compare with, else the reference."""
    with assume(target):
        got = decode.forward(inputs, problem_of(inputs, "forward"), tile)
    wanted, plain = results or reference(inputs), reference(inputs, inputs.q.dtype)
    terms = problem_of(inputs, "forward").N
    band = 0.0 if inputs.block_table is not None else forward_band(inputs, wanted)
    found = [
        compare("out", got.out, wanted.out, plain.out, terms, band),
        compare("lse", got.lse, wanted.lse, plain.lse, terms),
    ]
    assert all(c.ok for c in found), "; ".join(str(c) for c in found if not c.ok)
    return got


@pytest.fixture(name="judge")
def judge_fixture():
    return judge


@pytest.fixture(name="judge_decode")
def judge_decode_fixture():
    return judge_decode


@pytest.fixture(name="run_family")
def run_family_fixture():
    return run_family


@pytest.fixture
def targets():
    """Both ways in which kernels load q, k and v: by tensor descriptors and by pointers."""
    return DESCRIPTORS, POINTERS


@pytest.fixture
def target(request, targets):
    """The one way or the other, in turn along each parameter of the test."""
    return targets[sum(request.node.callspec.indices.values()) % len(targets)]
