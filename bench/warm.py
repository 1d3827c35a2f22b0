"""Compiles beforehand, in processes of its own, what is about to be measured: Triton and inductor keep it on disk.

A kernel that cannot be built, dies or deadlocks does so there, and is not run again where the measuring is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sdpa.bench import contest, pool, tuner
from sdpa.bench.peers import PEERS, peers_for
from sdpa.bench.problems import Problem
from sdpa.bench.timing import synchronize
from sdpa.bench.workload import Refusal, make_workload, precision, surroundings
from sdpa.dispatch import select
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import UNLIMITED, AttentionProblem, Tile

# Triton compiles for integers that are 1, for multiples of this, and for all others.
DIVISOR = 16
# inductor takes a backward of FlexAttention a quarter of this, while a dozen others compile.
ENTRANT_SECONDS = 120.0
# Peers that compile; the others come as they are.
COMPILED_PEERS = ("flex",)


@dataclass(frozen=True)
class Build:
    """A kernel with a tile, on the smallest problem for which it is compiled alike."""

    kernel: str
    tile: Tile
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem.label}: {self.kernel} {list(self.tile)}"


def builds_of(problems: Iterable[Problem], kernels: tuple[str, ...] = ()) -> dict[tuple[Any, ...], Build]:
    """What tuning these problems may compile, by what makes it one compilation: each tile once for all problems that
    differ in nothing a compiler sees. Of cells that do not explore that is the first guess, and of the others' tiles
    those that are compiled alike."""
    found: dict[tuple[Any, ...], Build] = {}
    for problem in problems:
        with precision(problem):
            try:
                ready = tuner.prepare(problem, tuner.Contest(kernels))
            except torch.OutOfMemoryError:
                continue
        for kernel in ready.kernels:
            tiles = select.tiles_of(kernel, ready.asked)
            for tile in tiles if getattr(problem, "explore", True) else tiles[:1]:
                key, build = likeness(kernel, tile, ready.asked), Build(kernel.name, tile, problem)
                known = found.get(key)
                if known is None or problem.flops() < known.problem.flops():
                    found[key] = build
    return found


def likeness(kernel: Kernel, tile: Tile, asked: AttentionProblem) -> tuple[Any, ...]:
    """Equal for what is compiled alike. Two kernels of the catalog may share their code."""
    code = getattr(kernel.load(), asked.direction)
    left = asked.left if asked.left == UNLIMITED else specialised(asked.left)
    shape = asked._replace(B=0, H=0, Hkv=0, M=0, N=0, left=left)
    module: Any = kernel.load()
    parts = module.parts_of(asked, tile) if kernel.splits_keys else 1
    blocks = (-(-asked.M // tile.BLOCK_M), -(-asked.N // tile.BLOCK_N), -(-asked.M // tile.BLOCK_N))
    rest = (asked.N % tile.BLOCK_N == 0, asked.M % tile.BLOCK_M == 0, has_one_loop(asked))
    packed = (parts, -(-asked.M * asked.G // tile.BLOCK_M), asked.B * asked.H * asked.M)
    heads = (asked.B * asked.H, asked.B * asked.Hkv, sections(asked, asked.H), sections(asked, asked.Hkv))
    sizes = (asked.H, asked.G, asked.M, asked.N, *blocks, *heads, *packed)
    return code, tile, shape, rest, tuple(map(specialised, sizes))


def sections(asked: AttentionProblem, heads: int) -> int:
    """The one argument of the launches that no size of the problem shows."""
    if asked.device_type == "cpu":
        return 0
    from sdpa.kernels.triton.arguments import section_of

    return section_of(asked, asked.B * heads)


def has_one_loop(asked: AttentionProblem) -> bool:
    """The one field of the kernels' configuration that depends on the lengths beyond the tiles."""
    if asked.device_type == "cpu":
        return False
    from sdpa.kernels.triton.arguments import has_short_band

    return has_short_band(asked)


def specialised(size: int) -> int:
    return 1 if size == 1 else DIVISOR if size % DIVISOR == 0 else 0


def chains_of(builds: Iterable[Build]) -> list[list[pool.Task]]:
    """One process takes what shares most of its compilation: a kernel's tile and a head size in one direction."""
    chains: dict[tuple[Any, ...], list[pool.Task]] = {}
    for build in builds:
        p = build.problem
        same = (build.kernel, build.tile, p.D, p.dtype, p.mask, p.direction, p.precision, p.H == p.Hkv, p.M)
        chains.setdefault(same, []).append((run_build, build))
    return list(chains.values())


def run_build(build: Build) -> None:
    """Once, in a process of the pool."""
    kernel = by_name()[build.kernel]
    with precision(build.problem), torch.no_grad():
        ready = tuner.prepare(build.problem, tuner.Contest((build.kernel,)))
        tuner.caller(ready.inputs, ready.asked, ready.grad_out)(kernel, build.tile)()
        synchronize(build.problem.device)


@dataclass
class Readiness:
    """Which kernels and tiles have run; as `ready` of a contest it lets only those take part, and what needs no
    compilation."""

    done: set[tuple[Any, ...]] = field(default_factory=set)

    def __call__(self, kernel: Kernel, tile: Tile | None, asked: AttentionProblem) -> bool:
        return tile is None or likeness(kernel, tile, asked) in self.done


@dataclass(frozen=True)
class Listener:
    """Who hears of the outcomes of other tasks, of builds that fail, and of every step."""

    judge: Callable[[pool.Outcome], object] = lambda outcome: None
    report: Callable[[str], object] = print
    step: Callable[[], object] = lambda: None


USUAL = Listener()


def warm_builds(
    builds: dict[tuple[Any, ...], Build],
    jobs: int,
    first: Sequence[pool.Task] = (),
    end: float = float("inf"),
    listener: Listener = USUAL,
) -> Readiness:
    """Runs the tasks `first`, whose outcomes are judged, and every build once. What fails is reported and is not ready;
    neither is what was not begun at the time `end` (of time.monotonic), when `first` is done."""
    keys = {build: key for key, build in builds.items()}
    readiness, left = Readiness(), len(first)
    outcomes = pool.run_tasks([*([task] for task in first), *chains_of(builds.values())], jobs)
    for outcome in outcomes:
        function, argument = outcome.task
        listener.step()
        if function is not run_build:
            listener.judge(outcome)
            left -= 1
        elif outcome.error:
            listener.report(f"{argument} fails: {outcome.error}")
        else:
            readiness.done.add(keys[argument])
        if not left and time.monotonic() >= end:
            outcomes.close()
            break
    return readiness


@dataclass(frozen=True)
class Entrant:
    """One contestant of a suite's problem."""

    problem: Problem
    name: str
    peer: bool

    def __str__(self) -> str:
        return f"{self.problem.label}: {self.name}"


def entrants_of(problems: Iterable[Problem], options: contest.Options) -> list[list[pool.Task]]:
    """Who has to compile before a contest: what takes longest first, our own problems of one kind after another."""
    peers: list[list[pool.Task]] = []
    own: dict[tuple[Any, ...], list[pool.Task]] = {}
    for problem in problems:
        taking_part = peers_for(problem, options.peers)
        peers += [[(run_entrant, Entrant(problem, name, True))] for name in taking_part if name in COMPILED_PEERS]
        kind = (problem.D, problem.dtype, problem.mask, problem.direction, problem.precision, problem.M == problem.N)
        own.setdefault(kind, []).extend((run_entrant, Entrant(problem, name, False)) for name in options.kernels)
    return [*peers, *own.values()]


def run_entrant(entrant: Entrant) -> None:
    """Once, in a process of the pool; a backward after its forward."""
    use_no_helpers()
    maker = PEERS[entrant.name] if entrant.peer else contest.maker_of(entrant.name)
    with surroundings(entrant.problem):
        try:
            one = maker(make_workload(entrant.problem))
            with one.around():
                out = one.forward()
            if entrant.problem.differentiates:
                one.gradients(out)
        except (Refusal, select.NoKernelError):
            return
        synchronize(entrant.problem.device)


def use_no_helpers() -> None:
    """inductor would start processes of its own to compile in, in every process of the pool."""
    from torch._inductor import config

    config.compile_threads = 1


def warm_entrants(
    chains: list[list[pool.Task]], jobs: int, report: Callable[[str], object], step: Callable[[], object]
) -> dict[tuple[Problem, str], str]:
    """Runs everyone once; why those must not run here whose process died or hung. Who only raised is asked again where
    it is measured, which tells the reason and may succeed with the memory of the whole device."""
    lost = {}
    for outcome in pool.run_tasks(chains, jobs, ENTRANT_SECONDS):
        entrant = outcome.task[1]
        if outcome.fatal:
            lost[entrant.problem, entrant.name] = outcome.error
            report(f"{entrant}: {outcome.error}")
        step()
    return lost
