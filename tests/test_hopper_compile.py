"""Hopper's kernel where there is no Hopper: compiled ahead, and its protocol of barriers played through at random.

The play follows what kernels/triton/hopper_kernel.py says about who waits for whom. It cannot see a mistake in the
kernel's text, but it shows that the protocol neither locks nor lets a copy overwrite what is still read.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdpa.dispatch.catalog import by_name
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


def problem_of(D, N, mask, M=None, bias=None):
    """Inputs of which only the addresses and shapes count, and their problem."""
    q, k, v = (torch.empty(1, HEADS, rows, D, dtype=torch.bfloat16) for rows in (M or N, N, N))
    bias = None if bias is None else torch.empty(1, 1, M or N, N, dtype=torch.bfloat16)
    right, bottom_right = -1 if mask == "none" else 0, mask == "bottom_right"
    inputs = AttentionInputs(q, k, v, D**-0.5, right=right, bottom_right=bottom_right, bias=bias)
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


def product_loops(sass):
    """The instructions of each innermost loop that holds matrix products: a branch back that has a condition."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    back = [(at, int(to, 16)) for at, text in code for to in re.findall(r"^@.*BRA.* 0x([0-9a-f]+)", text)]
    spans = sorted(((to, at) for at, to in back if to < at), key=lambda span: span[1] - span[0])
    found = []
    for first, last in spans:
        body = [text for at, text in code if first <= at <= last]
        inner = any(first <= a and b <= last for a, b, _ in found)
        if not inner and any("HGMMA" in text for text in body):
            found.append((first, last, body))
    return [body for _, _, body in found]


BUILDS = [
    *((D, SHORT, mask, bias) for D in (64, 128, 256) for mask in ("none", "causal") for bias in (None, "bias")),
    (64, LONG, "causal", None),
    (64, LONG, "none", "bias"),
    (128, LONG, "none", None),
    (128, LONG, "causal", "bias"),
    (256, LONG, "causal", None),
    (128, SHORT, "bottom_right", None),
    (64, SHORT, "bottom_right", "bias"),
]


@pytest.mark.parametrize("D,N,mask,bias", BUILDS)
def test_every_tile_compiles_to_hoppers_instructions(D, N, mask, bias, pretend, tmp_path):
    inputs, problem = problem_of(D, N, mask, M=N - 64 if mask == "bottom_right" else N, bias=bias)
    offered = hopper.tiles(problem)
    assert offered and set(offered) <= set(hopper.TILES)
    for tile in offered:
        _, launch = hopper.forward_launch(inputs, problem, tile)
        build = launch.args[-1]
        assert build.PERSISTENT == (N == SHORT) and build.CAUSAL == (mask != "none"), build
        assert build.BIAS == bool(bias) and build.WHOLE_SCALE == (build.BIAS and D != 128), build
        compiled = launch.compile()
        assert compiled.metadata.shared <= TARGET.shared_memory, (tile, compiled.metadata.shared)
        sass = dump(compiled, tmp_path)
        groups = tile.BLOCK_M // hopper_kernel.GROUP_ROWS.value
        if bias and build.PERSISTENT and groups == 3:  # a few numbers are kept from block to block of queries
            loops = product_loops(sass)
            assert len(loops) == groups and not re.search(r"\b(LDL|STL)\b", str(loops)), tile
        else:
            assert re.findall(r"STACK:(\d+)", sass) == ["0"], tile
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", *(["LDSM"] if bias else [])):
            assert instruction in sass, (tile, instruction)
        own = tile.BLOCK_N * hopper_kernel.GROUP_ROWS.value // GROUP_THREADS  # exponentials of one thread
        counts = hidden_exponentials(sass)
        assert len(counts) == groups, (tile, counts)
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


@pytest.mark.parametrize("name", ["address", "strides", "expanded", "bias"])
def test_unreadable_tensors_go_to_the_plain_loop(name, monkeypatch):
    q = torch.randn(1, HEADS, 32, 64, dtype=torch.bfloat16)
    inputs = AttentionInputs(q, unreadable(name), q, 0.125)
    if name == "bias":  # rows 72 bytes apart
        inputs = inputs._replace(k=q, bias=torch.randn(1, 1, 32, 36, dtype=torch.bfloat16)[..., :32])
    problem, seen = AttentionProblem.of(inputs), []

    def forward(given, problem, tile):
        seen.append((given, tile))
        return Results(*reference(given))

    monkeypatch.setattr(hopper.plain, "forward", forward)
    tile = hopper.tiles(problem)[0]
    assert hopper.forward_launch(inputs, problem, tile) is None
    hopper.forward(inputs, problem, tile)
    assert seen[0][0] is inputs and seen[0][1] in hopper.plain_tiles(problem)


FULL_OR_NOT = {
    "own": (torch.empty(2, 4, 64, 128), True),
    "of all": (torch.empty(64, 128)[None, None], True),
    "expanded heads": (torch.empty(1, 1, 64, 128).expand(2, 4, -1, -1), True),
    "one row": (torch.empty(2, 1, 1, 128), False),
    "one column": (torch.empty(1, 4, 64, 1), False),
    "expanded rows": (torch.empty(1, 1, 1, 128).expand(1, 1, 64, 128), False),
}


@pytest.mark.parametrize("name", FULL_OR_NOT)
def test_biases_that_repeat_along_rows_or_columns_are_refused(name):
    bias, full = FULL_OR_NOT[name]
    q, k = torch.empty(2, 4, 64, 64), torch.empty(2, 4, 128, 64)
    problem = AttentionProblem.of(AttentionInputs(q, k, k, 0.125, bias=bias))
    reasons = by_name()["triton_hopper"].why_not(problem)
    assert any("repeats along them" in reason for reason in reasons) == (not full)
    assert not any("bias" in reason for reason in by_name()["triton_efficient"].why_not(problem))


def test_an_expanded_bias_is_described_once(pretend):
    inputs, problem = problem_of(64, SHORT, "none", bias="bias")
    inputs = inputs._replace(bias=inputs.bias.expand(-1, HEADS, -1, -1))
    _, launch = hopper.forward_launch(inputs, problem, hopper.tiles(problem)[0])
    assert launch.args[4].shape == [1, 1, SHORT, SHORT]


@pytest.mark.parametrize("scale", [1e-6, 0.1, 0.125, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scale_is_a_power_of_two_and_a_rest(scale, dtype):
    """bfloat16's bias may be as large as float32 gets: times what is left of the scale it must not become larger."""
    problem = AttentionProblem("cpu", dtype, 1, 1, 1, 64, 64, 64, 64)
    power = hopper.power_of(problem, scale)
    assert math.frexp(power)[0] == 0.5
    if dtype == torch.bfloat16:
        assert power <= scale < 2 * power
    else:
        assert hopper.MIN_POWER <= power <= 1.0


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


def problem_with(B, H, blocks, causal):
    tile = hopper.TILES[0]
    rows = blocks * tile.BLOCK_M
    problem = AttentionProblem("cpu", torch.bfloat16, B, H, H, rows, rows, 128, 128, right=0 if causal else -1)
    return problem, tile


def visits(B, H, blocks, programs, causal, bias=None):
    """[((batch, head), block)] of each program, by the order of the entries and the kernel's own functions."""
    build = SimpleNamespace(CAUSAL=causal, BLOCK_M=1)
    schedule = hopper.order_of(*problem_with(B, H, blocks, causal), True, bias)
    found = []
    for program in range(programs):
        found.append([])
        for share in range(program, schedule.all_shares, programs):
            batch, head, n = find_share(share, schedule)
            for part in range(hopper_kernel.share_size.fn(n, schedule, build)):
                found[-1].append(((batch, head), hopper_kernel.first_row.fn(n, part, schedule, build)))
    return found


def find_share(number, schedule):
    """The kernel's own, whose helper is no function of Python's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_kernel, "batch_and_head", hopper_kernel.batch_and_head.fn)
        return hopper_kernel.find_share.fn(number, schedule)


BIASES = {None: None, "heads": (1, 3), "batches": (2, 1), "both": (2, 3), "neither": (1, 1)}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_shares_hold_every_block_once(causal, name):
    bias = name and torch.empty(*BIASES[name], 1, 1)
    for blocks in range(1, 14):
        for programs in (1, 2, 5, 132):
            found = Counter(at for own in visits(2, 3, blocks, programs, causal, bias) for at in own)
            assert found == Counter(((b, h), n) for b in range(2) for h in range(3) for n in range(blocks))


def test_causal_shares_are_equally_long():
    work = [sum(block + 1 for _, block in own) for own in visits(1, 33, 32, 132, True)]
    assert min(work) == max(work)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name,shared", [("heads", 2), ("batches", 3), ("both", 1), ("neither", 3)])
def test_readers_of_the_same_bias_run_side_by_side(name, shared, persistent):
    """(batch, head) of neighbouring programs differ only along what the bias has one entry for."""
    bias = torch.empty(*BIASES[name], 1, 1)
    schedule = hopper.order_of(*problem_with(2, 3, 7, False), persistent, bias)
    build = SimpleNamespace(CAUSAL=False, BLOCK_M=1)
    places = [find_share(n, schedule) if persistent else locate(n, schedule, build) for n in range(schedule.all_shares)]
    assert len(set(places)) == len(places) == 2 * 3 * 7
    for first in range(0, len(places), shared):
        near = places[first : first + shared]
        own = {(b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, n) for b, h, n in near}
        assert len(own) == 1, near


def locate(number, schedule, build):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_kernel, "batch_and_head", hopper_kernel.batch_and_head.fn)
        patch.setattr(hopper_kernel.gl, "minimum", min)
        return hopper_kernel.locate.fn(number, schedule, build)


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
    """One program: its loaders, its groups, and copies that land when they like. `lengths` are key blocks per block of
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

    def loader(self, name):
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
        waiting = dict.fromkeys([self.loader("k"), self.loader("v"), *map(self.group, self.groups)])
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
        build = hopper_kernel.Build(groups * 64, 128, 64, rng.choice([2, 3, 4]), causal, False, False, False, True, own,
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
        for play in plays(range(200), fault, OWN_OUT=False):
            play.run()
