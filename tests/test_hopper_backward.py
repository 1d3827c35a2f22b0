"""Hopper's backward where there is no Hopper: compiled ahead, its protocol of barriers played at random, its plans.

As with the forward, a play cannot see a mistake in the kernel's text, but it shows that the protocol neither locks nor
lets a copy overwrite what is still read.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for, dump  # noqa: E402

from sdpa.kernels.triton import hopper, hopper_backward  # noqa: E402
from sdpa.kernels.triton.hopper_primitives import WG_ROWS  # noqa: E402
from sdpa.kernels.triton.launch import Pass  # noqa: E402
from sdpa.kernels.triton.prepared import PREPARED  # noqa: E402
from sdpa.testing import Case, make_inputs, problem_of  # noqa: E402

# What ptxas lays aside in the branch that hides, beside the loop's sums: a few registers at D = 64 and 128.
MAX_STACK = 72
BANDS = {"none": (-1, -1), "causal": (-1, 0), "window": (200, 0), "both": (100, 50)}


def given(D, band="none", M=256, N=256, H=2, Hkv=2, bottom_right=False):
    """Inputs, what a forward leaves, what comes from above, and the problem; only addresses and shapes count."""
    q, k, v = (torch.empty(1, h, rows, D, dtype=torch.bfloat16) for h, rows in ((H, M), (Hkv, N), (Hkv, N)))
    left, right = BANDS[band]
    inputs = AttentionInputs(q, k, v, D**-0.5, left=left, right=right, bottom_right=bottom_right)
    results = Results(torch.empty_like(q), torch.empty(1, H, M))
    return inputs, results, Results(torch.empty_like(q), None), AttentionProblem.of(inputs, "backward")


def launches_of(*arguments):
    return hopper_backward.backward_launches(*arguments)[1][1:]  # the first is delta's


@pytest.fixture
def at_hopper(tmp_path):
    PREPARED.clear()
    with compiling_for(H200, tmp_path / "cache"):
        yield


@pytest.mark.parametrize("D,band", list(itertools.product((64, 128, 256), ("none", "causal", "both"))))
def test_every_tile_compiles_to_hoppers_instructions(D, band, at_hopper, tmp_path):
    *arguments, problem = given(D, band)
    offered = hopper.tiles(problem)
    assert offered and set(offered) <= set(hopper.TILES)
    for tile in offered:
        made = launches_of(*arguments, problem, tile)
        assert len(made) == (2 if D < 256 else 3)
        for launch in made:
            build, compiled = launch.args[-2], launch.compile()
            assert compiled.metadata.shared <= H200.shared_memory, (build, compiled.metadata.shared)
            code = dump(compiled, tmp_path)
            (stack,) = re.findall(r"STACK:(\d+)", code)
            assert int(stack) <= MAX_STACK, (build, stack)
            for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
                assert instruction in code, (build, instruction)
            if build.GRAD_A:  # else ptxas runs the products one by one
                assert re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", code), build


def test_passes_make_every_gradient_once():
    for D in (64, 96, 128, 192, 256):
        problem = given(D)[-1]
        for tile in hopper_backward.tiles(problem):
            made = Counter()
            for work in hopper_backward.passes(problem, tile):
                a, b = ("dk", "dv") if work.keys else ("dq", None)
                made.update([a] * work.grad_a + [b] * work.grad_b)
            assert made == {"dq": 1, "dk": 1, "dv": 1}


def visible(problem):
    """[M, N] by the definition of a band."""
    shift = problem.N - problem.M if problem.bottom_right else 0
    rows, columns = torch.arange(problem.M)[:, None] + shift, torch.arange(problem.N)
    seen = torch.ones(problem.M, problem.N, dtype=torch.bool)
    if problem.left >= 0:
        seen &= columns >= rows - problem.left
    if problem.right >= 0:
        seen &= columns <= rows + problem.right
    return seen


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("M,N", [(300, 300), (70, 400), (400, 70)])
def test_reaches_are_the_band_from_either_side(M, N, band, bottom_right):
    problem = given(64, band, M, N, bottom_right=bottom_right)[-1]
    for keys, seen in ((False, visible(problem)), (True, visible(problem).mT)):
        near, far = hopper_backward.reaches(problem, keys)
        rows, columns = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])
        first = rows - near if near is not None else rows * 0
        last = rows + far if far is not None else rows * 0 + seen.shape[1]
        assert torch.equal((columns >= first) & (columns <= last), seen)


def test_calls_alike_share_what_is_prepared(at_hopper):
    *arguments, problem = given(128, "causal")
    (tile,) = hopper.tiles(problem)
    first, second = (launches_of(*arguments, problem, tile) for _ in range(2))
    assert len(PREPARED) == 1 and first[0].args[-2] is second[0].args[-2]
    inputs = arguments[0]
    moved = inputs._replace(k=inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
    other = launches_of(moved, *arguments[1:], problem, tile)[0]
    assert other.args[0].strides != first[0].args[0].strides and other.args[0].base is moved.k


def test_unreadable_tensors_go_to_the_plain_loops(monkeypatch):
    inputs, results, upstream, problem = given(64)
    inputs = inputs._replace(k=torch.empty(1, 1, 256, 64, dtype=torch.bfloat16).expand(1, 2, 256, 64))
    problem, seen = AttentionProblem.of(inputs, "backward"), []
    nothing = Pass([], (), (), (), lambda read, made: None)
    monkeypatch.setattr(hopper_backward.plain, "backward_pass", lambda *arguments: seen.append(arguments) or nothing)
    tile = hopper.tiles(problem)[0]
    hopper.backward(inputs, results, upstream, problem, tile)
    assert seen[0][0] is inputs and seen[0][-1] in hopper_backward.plain_tiles(problem)


def test_gradients_come_in_the_layouts_of_their_tensors(at_hopper):
    inputs = make_inputs(Case(B=2, H=4, Hkv=2, M=200, N=300, D=64, Dv=64, dtype=torch.bfloat16, layout="bmhd"))
    q = inputs.q
    results = Results(torch.empty_like(q), torch.empty(q.shape[:3]))
    problem = problem_of(inputs, "backward")
    tile = hopper.tiles(problem)[0]
    upstream = Results(torch.empty_like(q), None)
    grads, launches = hopper_backward.backward_launches(inputs, results, upstream, problem, tile)
    assert isinstance(grads, Gradients)
    for grad, tensor in zip(grads[:3], inputs[:3], strict=True):
        assert grad.shape == tensor.shape and grad.stride() == tensor.stride()
    rows = launches[0].grid[0] * 64 // (2 * 4)
    assert rows == 256 and WG_ROWS.value * 2 == hopper_backward.ROW_ALIGNMENT
