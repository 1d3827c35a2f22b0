"""Hopper's kernel where there is no Hopper: compiled ahead, and its protocol of barriers played through at random.

The play follows what kernels/triton/hopper_kernel.py says about who waits for whom. It cannot see a mistake in the
kernel's text, but it shows that the protocol neither locks nor lets a copy overwrite what is still read.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, Results
from sdpa.reference import attention as reference

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from sdpa.kernels.triton import hopper, hopper_kernel  # noqa: E402
from sdpa.kernels.triton.target import Target, assume  # noqa: E402

# Four cores, which the four heads of a problem here always fill; the rest is an H200's.
TARGET = Target("cuda", 90, 227 << 10, 4, 60 << 20)
HEADS = 4
SHORT, LONG = 1024, 16384  # keys: a persistent program, and one program per block
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
GROUP_THREADS = 128


class FakeDriver:
    """What Triton asks of a driver while it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self  # by which Triton keeps what it compiled, whatever it is

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Hopper in place of whatever is here; the true driver and cache come back."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", FakeDriver())
    monkeypatch.setattr(hopper, "FIXED", {})
    with triton.knobs.cache.scope(), assume(TARGET):
        triton.knobs.cache.dir = str(tmp_path)
        yield


def problem_of(D, N, mask, M=None):
    """Inputs of which only the addresses and shapes count, and their problem."""
    q, k, v = (torch.empty(1, HEADS, rows, D, dtype=torch.bfloat16) for rows in (M or N, N, N))
    inputs = AttentionInputs(q, k, v, D**-0.5, right=-1 if mask == "none" else 0, bottom_right=mask == "bottom_right")
    return inputs, AttentionProblem.of(inputs)


def dump(compiled, folder):
    """The machine's instructions, and what they take of its resources."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [CUOBJDUMP, "-res-usage", "-sass", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def hidden_exponentials(sass):
    """How many exponentials lie between a wait for all products but one and the next wait for all of them."""
    found = [[]]
    for wait, more in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)|(MUFU\.EX2)", sass):
        if more:
            found[-1].append(more)
        else:
            found.append([wait])
    return [len(after) - 1 for after in found if after and after[0] == "1"]


BUILDS = [
    *((D, SHORT, mask) for D in (64, 128, 256) for mask in ("none", "causal")),
    (64, LONG, "causal"),
    (128, LONG, "none"),
    (256, LONG, "causal"),
    (128, SHORT, "bottom_right"),
]


@pytest.mark.parametrize("D,N,mask", BUILDS)
def test_every_tile_compiles_to_hoppers_instructions(D, N, mask, pretend, tmp_path):
    inputs, problem = problem_of(D, N, mask, M=N - 64 if mask == "bottom_right" else N)
    offered = hopper.tiles(problem)
    assert offered and set(offered) <= set(hopper.TILES)
    for tile in offered:
        _, launch = hopper.forward_launch(inputs, problem, tile)
        build = launch.args[-1]
        assert build.PERSISTENT == (N == SHORT) and build.CAUSAL == (mask != "none"), build
        compiled = launch.compile()
        assert compiled.metadata.shared <= TARGET.shared_memory, (tile, compiled.metadata.shared)
        sass = dump(compiled, tmp_path)
        assert re.findall(r"STACK:(\d+)", sass) == ["0"], tile
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert instruction in sass, (tile, instruction)
        own = tile.BLOCK_N * hopper_kernel.GROUP_ROWS.value // GROUP_THREADS  # exponentials of one thread
        counts = hidden_exponentials(sass)
        assert len(counts) == tile.BLOCK_M // hopper_kernel.GROUP_ROWS.value, (tile, counts)
        assert min(counts) >= own, f"{tile}: {counts} of {own} exponentials run beside the products"


def test_calls_alike_share_what_is_prepared(pretend):
    inputs, problem = problem_of(128, SHORT, "causal")
    tile = hopper.tiles(problem)[0]
    first, second = (hopper.forward_launch(inputs, problem, tile)[1] for _ in range(2))
    assert len(hopper.FIXED) == 1 and first.args[-1] is second.args[-1]
    others, _ = problem_of(128, SHORT, "causal")
    moved = hopper.forward_launch(others, problem, tile)[1]
    assert moved.args[1].base is others.k
    moved.args[1].base = inputs.k
    assert vars(moved.args[1]) == vars(first.args[1])
    rows_first = inputs._replace(k=inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
    assert hopper.forward_launch(rows_first, problem, tile)[1].args[1].strides != first.args[1].strides


def unreadable(name):
    """(1, 4, 32, 64) that the bulk copy engine cannot read, by what is wrong with it."""
    if name == "address":
        return torch.randn(HEADS * 32 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, HEADS, 32, 64)
    if name == "strides":
        return torch.randn(1, HEADS, 32, 68, dtype=torch.bfloat16)[..., :64]
    return torch.randn(1, 1, 32, 64, dtype=torch.bfloat16).expand(1, HEADS, 32, 64)


@pytest.mark.parametrize("name", ["address", "strides", "expanded"])
def test_unreadable_tensors_go_to_the_plain_loop(name, monkeypatch):
    q = torch.randn(1, HEADS, 32, 64, dtype=torch.bfloat16)
    inputs = AttentionInputs(q, unreadable(name), q, 0.125)
    problem, seen = AttentionProblem.of(inputs), []

    def forward(given, problem, tile):
        seen.append((given, tile))
        return Results(*reference(given))

    monkeypatch.setattr(hopper.plain, "forward", forward)
    tile = hopper.tiles(problem)[0]
    assert hopper.forward_launch(inputs, problem, tile) is None
    hopper.forward(inputs, problem, tile)
    assert seen[0][0] is inputs and seen[0][1] in hopper.plain_tiles(problem)


def test_pairs_need_equal_shares_and_full_rounds():
    """Of causal problems only those that leave no core idle for long are dealt out beforehand."""
    problem = AttentionProblem("cpu", torch.bfloat16, 4, 16, 16, 4096, 4096, 128, 128, right=0)
    tile = hopper.tiles(problem)[0]
    with assume(TARGET._replace(cores=132)):
        assert hopper.is_persistent(problem, tile)  # 1024 pairs: 7.76 rounds
        assert not hopper.is_persistent(problem._replace(H=9, Hkv=9), tile)  # 4.36 rounds
        assert not hopper.is_persistent(problem._replace(N=1024), tile)  # the last blocks are as long as the middle
        assert not hopper.is_persistent(problem._replace(M=LONG, N=LONG), tile)
        assert hopper.is_persistent(problem._replace(H=9, Hkv=9, right=-1), tile)


def visits(blocks, entries, programs, causal):
    """[(entry, block)] of each program, by the kernel's own functions."""
    build = SimpleNamespace(CAUSAL=causal, BLOCK_M=1)
    schedule = SimpleNamespace(blocks=blocks, entries=entries, H=entries)
    found = []
    for program in range(programs):
        found.append([])
        for share in range(program, hopper_kernel.share_count.fn(schedule, build), programs):
            for part in range(hopper_kernel.share_size.fn(share, schedule, build)):
                _, entry, block = hopper_kernel.locate_in.fn(share, part, schedule, build)
                found[-1].append((entry, block))
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_shares_hold_every_block_once(causal):
    for blocks in range(1, 14):
        for entries in (1, 3, 8):
            for programs in (1, 2, 5, 132):
                found = Counter(at for own in visits(blocks, entries, programs, causal) for at in own)
                assert found == Counter((e, b) for e in range(entries) for b in range(blocks))


def test_causal_shares_are_equally_long():
    work = [sum(block + 1 for _, block in own) for own in visits(32, 33, 132, True)]
    assert min(work) == max(work)


class Barrier:
    """One in shared memory: a phase ends when all have arrived and all bytes that were announced."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes = self.phase = 0

    def arrive(self, announced=0):
        self.missing -= 1
        assert self.missing >= 0, "one arrival too many"
        self.land(-announced)

    def land(self, count):
        self.bytes -= count
        if self.missing == self.bytes == 0:
            self.phase ^= 1
            self.missing = self.arrivals

    def passed(self, parity):
        return self.phase != parity


class Turn:
    """A named barrier of two groups: its generation moves on when both have come."""

    def __init__(self):
        self.count = 0

    def arrive(self):
        self.count += 1
        return (self.count + 1) // 2


class Play:
    """One program: a loader, its groups, and copies that land when they like. `lengths` are key blocks per block of
    queries. An actor is a generator that yields what it waits for, or None for a moment in which others may act."""

    def __init__(self, build, lengths, rng, fault=None):
        self.build, self.lengths, self.rng, self.fault = build, lengths, rng, fault
        groups, stages = build.BLOCK_M // hopper_kernel.GROUP_ROWS.value, build.STAGES
        self.groups = range(groups)
        self.full = {name: [Barrier(1) for _ in range(n)] for name, n in (("q", groups), ("k", stages), ("v", stages))}
        self.empty = {"q": [Barrier(1) for _ in self.groups]}
        self.empty |= {name: [Barrier(groups) for _ in range(stages)] for name in "kv"}
        self.held, self.readers, self.landing = {}, Counter(), []
        self.turns = [Turn(), Turn()]

    def copy(self, name, slot, tag):
        def land():
            assert not self.readers[name, slot], f"{name}[{slot}] overwritten while it is read"
            self.held[name, slot] = tag
            self.full[name][slot].land(1)

        self.full[name][slot].arrive(announced=1)
        self.landing.append(land)

    def fetch(self, name, i, tag):
        slot, use = i % self.build.STAGES, i // self.build.STAGES
        yield lambda: self.empty[name][slot].passed((use & 1) ^ 1)
        self.copy(name, slot, tag)

    def loader(self):
        i = 0
        for t, blocks in enumerate(self.lengths):
            yield from self.fetch("k", i, (t, 0))
            for g in self.groups:
                yield lambda g=g, t=t: self.empty["q"][g].passed((t & 1) ^ 1)
                self.copy("q", g, t)
            for n in range(blocks - 1):
                yield from self.fetch("k", i + 1, (t, n + 1))
                yield from self.fetch("v", i, (t, n))
                i += 1
            yield from self.fetch("v", i, (t, blocks - 1))
            i += 1

    def begin(self, name, slot, tag):
        assert self.held.get((name, slot)) == tag, f"{name}[{slot}] holds {self.held.get((name, slot))}, not {tag}"
        self.readers[name, slot] += 1

    def end(self, name, slot):
        self.readers[name, slot] -= 1

    def start(self, name, i, tag):
        slot, use = i % self.build.STAGES, i // self.build.STAGES
        yield lambda: self.full[name][slot].passed(use & 1)
        self.begin(name, slot, tag)

    def finish(self, name, i):
        self.end(name, i % self.build.STAGES)
        self.empty[name][i % self.build.STAGES].arrive()

    def step(self, g, t, n, i):
        if self.build.PINGPONG:
            wanted = self.turns[g].arrive()
            yield lambda: self.turns[g].count // 2 >= wanted
        if self.fault == "keys":  # given back before the product has read them
            self.empty["k"][i % self.build.STAGES].arrive()
        yield from self.start("k", i, (t, n))
        self.begin("q", g, t)
        yield from self.start("v", i - 1, (t, n - 1))
        if self.build.PINGPONG:
            self.turns[1 - g].arrive()
        yield None
        self.end("q", g)
        if self.fault == "keys":
            self.end("k", i % self.build.STAGES)
        else:
            self.finish("k", i)
        yield None
        self.finish("v", i - 1)

    def group(self, g):
        i = 0
        if self.build.PINGPONG and g == 1:
            self.turns[0].arrive()
        for t, blocks in enumerate(self.lengths):
            yield lambda t=t: self.full["q"][g].passed(t & 1)
            yield from self.start("k", i, (t, 0))
            self.begin("q", g, t)
            yield None
            self.end("q", g)
            self.finish("k", i)
            for n in range(1, blocks):
                i += 1
                yield from self.step(g, t, n, i)
            own = self.build.OWN_OUT or self.fault == "queries"
            if own:
                self.empty["q"][g].arrive()
            yield from self.start("v", i, (t, blocks - 1))
            yield None
            self.finish("v", i)
            if not self.build.OWN_OUT:  # results lie where the queries lay until they are stored
                self.begin("q", g, t)
                yield None
                self.end("q", g)
            if not own:
                self.empty["q"][g].arrive()
            i += 1

    def run(self):
        waiting = dict.fromkeys([self.loader(), *map(self.group, self.groups)])
        while waiting or self.landing:
            ready = [actor for actor, wait in waiting.items() if wait is None or wait()]
            choice = self.rng.randrange(len(ready) + len(self.landing)) if ready or self.landing else None
            assert choice is not None, "all wait for each other"
            if choice >= len(ready):
                self.landing.pop(choice - len(ready))()
                continue
            try:
                waiting[ready[choice]] = next(ready[choice])
            except StopIteration:
                del waiting[ready[choice]]


def plays(seeds, fault=None, **fixed):
    """Random programs, whose lengths come from the kernel's own order of blocks."""
    for seed in seeds:
        rng = random.Random(seed)
        groups = rng.choice([2, 3])
        causal, own, turns = (rng.random() < 0.5 for _ in range(3))
        build = hopper_kernel.Build(groups * 64, 128, 64, rng.choice([2, 3, 4]), causal, False, True, own,
                                    turns and groups == 2, 0, 0)  # fmt: skip
        blocks, reach = rng.randint(1, 5), rng.randint(1, 3)
        own_visits = visits(blocks, rng.randint(1, 3), rng.randint(1, 3), causal)[0]
        lengths = [1 + block // reach if causal else blocks for _, block in own_visits]
        yield Play(replace(build, **fixed), lengths, rng, fault)


def test_protocol_neither_locks_nor_overwrites():
    for play in plays(range(1000)):
        play.run()
        assert not any(play.readers.values())


@pytest.mark.parametrize("fault", ["queries", "keys"])
def test_play_sees_a_protocol_that_is_wrong(fault):
    with pytest.raises(AssertionError, match=r"overwritten|holds"):
        for play in plays(range(200), fault, OWN_OUT=False):
            play.run()
