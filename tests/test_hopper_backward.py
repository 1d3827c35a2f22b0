"""Hopper's backward where there is no Hopper: compiled ahead, its protocol of barriers played at random, its plans.

As with the forward, a play cannot see a mistake in the kernel's text, but it shows that the protocol neither locks nor
lets a copy overwrite what is still read.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200, compiling_for, dump  # noqa: E402
from barriers import Barrier, play_out  # noqa: E402

from sdpa.kernels.triton import hopper, hopper_backward  # noqa: E402
from sdpa.kernels.triton.hopper_parts import GROUP_ROWS  # noqa: E402
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
            build, compiled = launch.args[-1], launch.compile()
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
    assert len(PREPARED) == 1 and first[0].args[-1] is second[0].args[-1]
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


class Play:
    """One program: a loader, its groups, and copies that land when they like. An actor is a generator that yields what
    it waits for, or None for a moment in which others may act."""

    def __init__(self, groups, stages, blocks, grads, rng, fault=None):
        self.groups, self.stages, self.blocks, self.rng, self.fault = range(groups), stages, blocks, rng, fault
        self.grad_a, self.grad_b = grads
        self.own = [Barrier(1) for _ in self.groups]
        self.full = {name: [Barrier(1) for _ in range(stages)] for name in "xy"}
        self.empty = {name: [Barrier(groups) for _ in range(stages)] for name in "xy"}
        self.held, self.readers, self.landing = {}, Counter(), []

    def copy(self, barrier, place, tag):
        def land():
            assert not self.readers[place], f"{place} overwritten while it is read"
            self.held[place] = tag
            barrier.land(1)

        barrier.arrive(announced=1)
        self.landing.append(land)

    def loader(self):
        for g in self.groups:
            self.copy(self.own[g], ("own", g), 0)
        for i in range(self.blocks):
            for name in "xy":
                slot, use = i % self.stages, i // self.stages
                yield lambda name=name, slot=slot, use=use: self.empty[name][slot].passed((use & 1) ^ 1)
                self.copy(self.full[name][slot], (name, slot), i)

    def begin(self, place, tag):
        assert self.held.get(place) == tag, f"{place} holds {self.held.get(place)}, not {tag}"
        self.readers[place] += 1

    def end(self, place):
        self.readers[place] -= 1

    def block(self, i):
        slot, use = i % self.stages, i // self.stages
        x, y = ("x", slot), ("y", slot)
        yield lambda: self.full["x"][slot].passed(use & 1)
        self.begin(x, i)  # for S
        yield lambda: self.full["y"][slot].passed(use & 1)
        self.begin(y, i)  # for dP, or for dV alone
        if self.fault == "x":  # given back after S, though dS will be multiplied by it
            self.empty["x"][slot].arrive()
        yield None
        if not self.grad_b:  # dP was the last to read y
            self.end(y)
            self.empty["y"][slot].arrive()
        yield None
        self.end(x)
        if self.grad_b:
            self.end(y)
            self.empty["y"][slot].arrive()
        if self.fault != "x":
            self.empty["x"][slot].arrive()

    def group(self, g):
        yield lambda: self.own[g].passed(0)
        self.begin(("own", g), 0)
        for i in range(self.blocks):
            yield from self.block(i)
        self.end(("own", g))

    def run(self):
        play_out([self.loader(), *map(self.group, self.groups)], self.landing, self.rng)


def plays(seeds, fault=None):
    for seed in seeds:
        rng = random.Random(seed)
        grads = rng.choice([(True, True), (True, False), (False, True)])
        yield Play(rng.choice([2, 3]), rng.choice([2, 3, 4]), rng.randint(0, 12), grads, rng, fault)


def test_protocol_neither_locks_nor_overwrites():
    for play in plays(range(1000)):
        play.run()
        assert not any(play.readers.values())


def test_play_sees_a_protocol_that_is_wrong():
    with pytest.raises(AssertionError, match=r"overwritten|holds"):
        for play in plays(range(200), "x"):
            play.run()


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
    assert rows == 256 and GROUP_ROWS.value * 2 == hopper_backward.ROW_ALIGNMENT
