"""Long sequences allocate nothing of size M x N: peak memory in a process of its own, and single allocations."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import sdpa
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.vendor.common import float_mask, rows_without_keys

N, H, D = 8192, 1, 16
SCORES = H * N * N  # bytes of a bool per pair, the least that a materialised mask or score matrix takes
RESULTS = 12 * H * N * D * 4  # q, k, v, out, their gradients and what a kernel keeps in float32
# Threads' scratch, the allocator's slack and the code that the first call loads; a tenth of the smallest M x N tensor.
SLACK = SCORES // 8
FUSED = by_name()["cpu_flash"].unavailable()

pytestmark = pytest.mark.skipif(FUSED is not None, reason=f"no kernel of ours without M x N memory here: {FUSED}")

CASES = {
    "causal": "dict(is_causal=True)",
    "padding": "dict(attn_mask=torch.arange(N).view(1, 1, 1, N) < N - 100)",
    "padding_expanded": "dict(attn_mask=(torch.arange(N).view(1, 1, 1, N) < N - 100).expand(1, H, N, N))",
    "learned_bias": "dict(attn_mask=torch.zeros(1, 1, 1, N, requires_grad=True))",
    "lengths": "dict(attn_mask=sdpa.Mask(lengths=torch.tensor([N - 100])) & sdpa.Mask(causal=True))",
}  # fmt: skip

# The process runs a short call first, so that loading code is not counted, and prints its growth in bytes.
SCRIPT = """
import json, resource, torch, sdpa
torch.set_num_threads(1)
def run(H, N, D):
    leaves = [torch.randn(1, H, N, D, requires_grad=True) for _ in range(3)]
    options = {options}
    out = sdpa.scaled_dot_product_attention(*leaves, **options)
    forward = sdpa.last_choice().kernel.name
    out.sum().backward()
    return forward, sdpa.last_choice().kernel.name
run({H}, 64, {D})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kernels = run({H}, {N}, {D})
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([kernels, (after - before) * 1024]))
"""


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_peak_memory_of_forward_and_backward(options):
    script = SCRIPT.format(options=options, H=H, N=N, D=D)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    kernels, growth = json.loads(done.stdout.splitlines()[-1])
    assert growth < RESULTS + SLACK < SCORES, f"{kernels}: {growth / 2**20:.1f} MiB"


def allocations(function):
    """Bytes of every operator's allocations while `function` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return [event.self_cpu_memory_usage for event in profiler.events()]


SIZE = 1024
MASKS = {
    "causal": lambda: sdpa.Mask(causal=True),
    "padding": lambda: torch.arange(SIZE).view(1, 1, 1, SIZE) < SIZE - 10,
    "learned_bias_rows": lambda: torch.zeros(2, 1, 1, SIZE, requires_grad=True),
    "learned_bias_of_heads": lambda: torch.zeros(1, 2, 1, 1, requires_grad=True),
    "groups_causal": lambda: sdpa.Mask(causal=True),
}


@pytest.mark.parametrize("name", MASKS)
def test_no_allocation_of_the_size_of_the_scores(name):
    heads = 1 if name.startswith("groups") else 2
    leaves = [torch.randn(2, h, SIZE, 8, requires_grad=True) for h in (2, heads, heads)]
    mask = MASKS[name]()

    def run():
        out = sdpa.scaled_dot_product_attention(*leaves, mask, enable_gqa=heads == 1, kernel="cpu_flash")
        out.sum().backward()

    run()
    assert max(allocations(run)) < SIZE * SIZE


FULL = (2, 2, SIZE, SIZE)
# Masks that users have expanded to the scores, of which memory holds one row, one column or one matrix.
EXPANDED = {
    "row": lambda: sdpa.Mask(allowed=(torch.arange(SIZE).view(1, 1, 1, SIZE) < SIZE - 10).expand(FULL)),
    "rows of a batch": lambda: sdpa.Mask(allowed=torch.rand(2, 1, 1, SIZE).gt(0.1).expand(FULL)),
    "column": lambda: sdpa.Mask(allowed=(torch.arange(SIZE).view(1, 1, SIZE, 1) < SIZE - 10).expand(FULL)),
    "bias and row": lambda: sdpa.Mask(
        bias=torch.randn(1, 2, 1, 1).expand(FULL), allowed=torch.rand(2, 1, 1, SIZE).gt(0.1).expand(FULL)
    ),
}


@pytest.mark.parametrize("kernel", ["vendor_cpu_flash", "vendor_math"])
@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_masks_stay_expanded_for_torchs_kernels(name, kernel):
    """What they take is as large as the given one in memory; torch's math holds its scores besides."""
    q, k, v = torch.randn(3, 2, 2, SIZE, 8).unbind()
    mask = EXPANDED[name]()
    inputs = build_inputs(q, k, v, Options(attn_mask=mask))
    made = float_mask(inputs)
    assert made.untyped_storage().nbytes() <= 2 * 2 * SIZE * q.element_size()
    assert torch.equal(
        made.expand(FULL), torch.where(mask.allowed, 0.0 if mask.bias is None else mask.bias, -torch.inf)
    )
    run = lambda: sdpa.scaled_dot_product_attention(q, k, v, mask, kernel=kernel)  # noqa: E731
    if kernel == "vendor_cpu_flash":
        run()
        assert max(allocations(run)) < SIZE * SIZE
    expected = sdpa.scaled_dot_product_attention(q, k, v, mask, kernel="math")
    assert torch.allclose(run(), expected, rtol=1e-5, atol=1e-5)


def test_masks_of_other_dimensions_are_as_large_as_both():
    """A bias of heads and a mask of batch entries: nothing is expanded along rows."""
    q = torch.randn(2, 3, 5, 8)
    bias, allowed = torch.randn(1, 3, 1, 5).expand(2, 3, 5, 5), torch.rand(2, 1, 1, 5).gt(0.3).expand(2, 3, 5, 5)
    inputs = build_inputs(q, q, q, Options(attn_mask=sdpa.Mask(bias=bias, allowed=allowed)))
    assert float_mask(inputs).shape == (2, 3, 1, 5)
    assert torch.equal(float_mask(inputs).expand(2, 3, 5, 5), bias.masked_fill(~allowed, -torch.inf))
    dead = rows_without_keys(inputs)
    assert dead.shape == (2, 3, 1) and torch.equal(dead.expand(2, 3, 5), ~allowed.any(-1))


def test_the_measurement_sees_a_score_matrix():
    leaves = [torch.randn(2, 2, SIZE, 8, requires_grad=True) for _ in range(3)]
    run = lambda: sdpa.scaled_dot_product_attention(*leaves, kernel="math").sum().backward()  # noqa: E731
    assert max(allocations(run)) >= SIZE * SIZE


def test_groups_are_not_repeated():
    """Keys and values of one head serve 32: a repeat would take 32 times their bytes."""
    q, k, v = torch.randn(1, 32, 4, 64), torch.randn(1, 1, 4096, 64), torch.randn(1, 1, 4096, 64)
    run = lambda: sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel="cpu_flash")  # noqa: E731
    run()
    assert max(allocations(run)) < 2 * k.numel() * k.element_size()
