"""The forward's protocol of barriers on Hopper, played through at random.

"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from barriers import Barrier, play_out

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from test_hopper_schedule import visits  # noqa: E402

from sdpa.kernels.triton import hopper_forward_kernel  # noqa: E402
from sdpa.kernels.triton.hopper_primitives import WG_ROWS  # noqa: E402


class Turn:
    """A named barrier of two groups: its generation moves on when both have come."""

    def __init__(self):
        self.count = 0

    def arrive(self):
        self.count += 1
        return (self.count + 1) // 2


class Play:
    """One program: its loaders, its groups, and copies that land when they like. `lengths` are key blocks per block of
    queries. An actor is a generator that yields what it waits for, or None for a moment in which others may act."""

    def __init__(self, build, lengths, rng, fault=None):
        self.build, self.lengths, self.rng, self.fault = build, lengths, rng, fault
        groups, stages = build.BLOCK_M // WG_ROWS.value, build.STAGES
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

    def producer(self, name):
        i = 0
        for t, blocks in enumerate(self.lengths):
            for n in range(blocks):
                yield from self.fetch(name, i, (t, n))
                i += 1
                for g in self.groups if name == "k" and n == 0 else ():
                    yield lambda g=g, t=t: self.empty["q"][g].passed((t & 1) ^ 1)
                    self.copy("q", g, t)

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
        yield from self.start("k", i, (t, n))
        if self.fault == "keys":  # given back before the product has read them
            self.empty["k"][i % self.build.STAGES].arrive()
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
            own = self.build.EPILOGUE_SMEM or self.fault == "queries"
            if own:
                self.empty["q"][g].arrive()
            yield from self.start("v", i, (t, blocks - 1))
            yield None
            self.finish("v", i)
            if not self.build.EPILOGUE_SMEM:  # results lie where the queries lay until they are stored
                self.begin("q", g, t)
                yield None
                self.end("q", g)
            if not own:
                self.empty["q"][g].arrive()
            i += 1

    def run(self):
        play_out([self.producer("k"), self.producer("v"), *map(self.group, self.groups)], self.landing, self.rng)


def plays(seeds, fault=None, **fixed):
    """Random programs, whose lengths come from the kernel's own order of blocks."""
    for seed in seeds:
        rng = random.Random(seed)
        groups = rng.choice([2, 3])
        causal, own, turns = (rng.random() < 0.5 for _ in range(3))
        build = hopper_forward_kernel.ForwardConfig(groups * 64, 128, 64, rng.choice([2, 3, 4]), causal, False, False, False, True, own,
                                    turns and groups == 2, 0, 0)  # fmt: skip
        blocks, reach = rng.randint(1, 5), rng.randint(1, 3)
        own_visits = visits(1, rng.randint(1, 3), blocks, rng.randint(1, 3), causal)[0]
        lengths = [1 + block // reach if causal else blocks for _, block in own_visits]
        yield Play(replace(build, **fixed), lengths, rng, fault)


def test_protocol_neither_locks_nor_overwrites():
    for play in plays(range(1000)):
        play.run()
        assert not any(play.readers.values())


@pytest.mark.parametrize("fault", ["queries", "keys"])
def test_play_sees_a_protocol_that_is_wrong(fault):
    with pytest.raises(AssertionError, match=r"overwritten|holds"):
        for play in plays(range(200), fault, EPILOGUE_SMEM=False):
            play.run()
