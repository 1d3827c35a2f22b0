"""What a tuning table is made of: the grid of problems, every able kernel and tile timed on each, the entries' form."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdpa.bench import book
from sdpa.bench.calls import DROPOUT, SOFTCAP
from sdpa.bench.gpu_grid import Cell, gpu_grid, mps_grid
from sdpa.bench.pool import first_line
from sdpa.bench.problems import DTYPES, VIT, Problem, square
from sdpa.bench.timing import (
    HOPELESS,
    Call,
    DeviceClock,
    Racer,
    Timing,
    host_stopwatch,
    interleave,
    queue_seconds,
    sample_for,
    stopwatch_for,
    synchronize,
)
from sdpa.bench.timing import device_race as race_on_device
from sdpa.bench.workload import Workload, make_workload, precision
from sdpa.dispatch import cost, select
from sdpa.dispatch.catalog import DENSE
from sdpa.dispatch.device import device_of
from sdpa.dispatch.kernel import Kernel
from sdpa.dispatch.placing import placed
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile, read_of
from sdpa.repeated import Operator

# A kernel's first calls, where each takes less than SHORT seconds: one may wait for a thread that the system took away.
FIRST_CALLS = 5
SHORT = 0.01
# A tile this much slower than the kernel's best is not measured again; a kernel whose first guess is this much slower
# than the fastest kernel is not saved by another tile.
TILE_SLACK = 1.3
TILE_REACH = 1.6
# On a GPU, where trying a kernel may cost compilations, those are left out whose estimate is this much longer than the
# shortest, and those that would write out more bytes of scores than this.
ESTIMATED_HOPELESS = 6.0
MOST_SCORES = 2 << 30
# A cell that does not explore tries what was best in so many entries near it.
LEARNT_FROM = 2
# A kernel that does nothing but spread keys over programs is for few rows of queries of a head, or for fewer programs
# of so many rows than a GPU has cores.
SPLIT_ROWS = 128
# Families whose tiles are worth a search under plain masks: the others are not chosen there.
PLAIN_FAMILIES = ("flash",)
LENGTHS = (64, 128, 256, 512, 1024, 2048)
LONGEST = 4096  # forward only
DECODE_LENGTHS = (256, 1024, 4096, 16384)
DECODE_HEADS = 8
# A call's options beside its mask, of those that tables tell from plain ones (tables.BESIDE).
BESIDE: dict[str, dict[str, Any]] = {"dropout": {"dropout_p": DROPOUT}, "softcap": {"softcap": SOFTCAP}}
# A call that takes the device longer than this hides what its launch takes the host.
HOST_MATTERS = 1e-4
# Most of it: where the host takes longer, a program that is no CUDA graph waits for it and never for the device. Of two
# calls that take it alike, the one that leaves the device sooner is chosen.
HOST_SHARE = 0.75
# Samples of each contender on a GPU at least.
MIN_SAMPLES = 5


def anything(kernel: Kernel, tile: Tile | None, asked: AttentionProblem) -> bool:
    return True


@dataclass
class Contest:
    """What is measured and what has been learnt: which kernels (none: all), the entries so far, who hears of a kernel
    or tile that fails, and which of them are ready to run (none are tried that a process of their own failed with)."""

    kernels: tuple[str, ...] = ()
    entries: list[dict[str, Any]] = field(default_factory=list)
    report: Callable[[str], object] = print
    ready: Callable[[Kernel, Tile | None, AttentionProblem], bool] = anything


def grid(device: str) -> tuple[Problem, ...]:
    """The problems of a table, those first that matter to most calls: a run that is cut short has them all coarsely."""
    if device.startswith("mps"):
        return mps_grid(device)
    return gpu_grid(device) if device.startswith("cuda") else cpu_grid(device)


def cpu_grid(device: str) -> tuple[Problem, ...]:
    cells = [
        square(length, D, dtype=dtype, mask=mask, direction=direction)
        for length, direction, D, dtype, mask in product(
            (*LENGTHS, LONGEST), ("forward", "backward"), (64, 128), DTYPES, ("none", "causal")
        )
        if direction == "forward" or length < LONGEST
    ]
    for D, N, Hkv, dtype in product((64, 128), DECODE_LENGTHS, (DECODE_HEADS, DECODE_HEADS // 4), DTYPES):
        cells.append(Problem(1, DECODE_HEADS, 1, N, D, dtype=dtype, Hkv=Hkv))
    for dtype, direction in product(DTYPES, ("forward", "backward")):
        cells.append(Problem(**VIT, dtype=dtype, direction=direction, layout="bmhd"))
        for length, mask in product((256, 1024), ("padding", "window", "lengths")):
            cells.append(square(length, 64, dtype=dtype, mask=mask, direction=direction))
    return tuple(replace(cell, device=device) for cell in sorted(cells, key=importance))


def importance(problem: Problem) -> tuple[int, float]:
    """Every second length first, then the others; the cheap ones first among each."""
    doublings = max(problem.M, problem.N).bit_length()
    return doublings % 2 == 0, problem.flops()


def inputs_of(work: Workload) -> AttentionInputs:
    """The normalised inputs kernels take, cut off from autograd."""
    q, k, v = (t.detach() for t in work.qkv)
    return build_inputs(q, k, v, Options(work.our_mask, **work.options, **BESIDE.get(work.problem.call, {})))


@dataclass(frozen=True)
class Field:
    """A problem made ready: its tensors, what is asked of kernels, who takes part, and with which tiles beside each
    kernel's first guess."""

    inputs: AttentionInputs
    asked: AttentionProblem
    grad_out: Tensor  # (B, H, M, Dv)
    kernels: tuple[Kernel, ...]
    label: str
    other_tiles: Callable[[Kernel], tuple[Tile, ...]]


def prepare(problem: Problem, contest: Contest) -> Field:
    work = make_workload(replace(problem, grad=False))
    inputs = inputs_of(work)
    extra = frozenset({"bias_grad"} if problem.mask == "bias_grad" else ())
    asked = AttentionProblem.of(inputs, problem.direction, extra)
    kernels = tuple(k for k in without_twins(contestants(asked, contest), asked) if worth_building(k, problem, asked))
    others = partial(other_tiles, problem, asked, contest.entries)
    return Field(inputs, asked, work.grad_out.detach(), kernels, problem.label, others)


def measure(problem: Problem, time_limit: float, contest: Contest | None = None) -> dict[str, Any] | None:
    """One entry of a table: milliseconds by kernel, and the tiles they were reached with; None where no kernel can."""
    contest = contest or Contest()
    with precision(problem), torch.no_grad():
        try:
            ready = prepare(problem, contest)
        except torch.OutOfMemoryError:
            contest.report(f"{problem.label}: its tensors do not fit the device")
            return None
        if not ready.kernels:
            return None
        seconds = tournament(ready, time_limit, contest)
    if not seconds:
        return None
    return book.about(problem) | figures(seconds, ready.asked, {kernel.name: kernel for kernel in ready.kernels})


def contestants(asked: AttentionProblem, contest: Contest) -> list[Kernel]:
    """The able kernels that take part."""
    able = [c.kernel for c in select.consider(asked) if c.able]
    if asked.device_type != "cpu":
        able = worth_timing({k: cost.estimate(k, asked, select.tile_of(k, asked)) for k in able}, asked)
    return [kernel for kernel in able if not contest.kernels or kernel.name in contest.kernels]


def worth_timing(times: dict[Kernel, float], asked: AttentionProblem) -> list[Kernel]:
    """Those of the able kernels, with the times that they should take, that are not hopeless."""
    longest = ESTIMATED_HOPELESS * min(times.values(), default=0.0)
    scores = asked.B * asked.H * asked.M * asked.N * torch.float32.itemsize
    kept = [k for k in times if times[k] <= longest and not (k.materialises and scores > MOST_SCORES)]
    programs = asked.B * asked.H * -(-asked.M // SPLIT_ROWS)
    few = asked.M * asked.G <= SPLIT_ROWS or programs < device_of(asked.device).cores
    return [k for k in kept if few or not is_for_decode(k)]


def is_for_decode(kernel: Kernel) -> bool:
    return kernel.splits_keys and kernel.directions == ("forward",)


def without_twins(kernels: list[Kernel], asked: AttentionProblem) -> list[Kernel]:
    """Two rows of the catalog may be the same code, which is measured as the first of them."""
    first: dict[Callable[..., Any], Kernel] = {}
    for kernel in kernels:
        first.setdefault(getattr(kernel.load(), asked.direction), kernel)
    return list(first.values())


# (kernel, tile) -> a call of it
Caller = Callable[[Kernel, "Tile | None"], Call]


def caller(inputs: AttentionInputs, asked: AttentionProblem, grad_out: Tensor) -> Caller:
    """Makes calls of kernels' forwards; or of their backwards, all on the results of one forward. Kernels that need
    copies of tensors share them: what copies take is estimated for any kernel, and no part of its time."""
    tensors: tuple[Any, ...] = (inputs,)
    if asked.direction == "backward":
        tensors = inputs, results_of(inputs), Results(grad_out, None)
    moved: dict[frozenset[str], tuple[Any, ...]] = {}

    def call(kernel: Kernel, tile: Tile | None) -> Call:
        names = kernel.aligned
        if not kernel.misplaced(asked):
            return repeated(kernel, tile, asked, *tensors)
        if names not in moved:
            moved[names] = placed(names, *tensors)
        return repeated(kernel, tile, asked.placed(names), *moved[names])

    return call


def results_of(inputs: AttentionInputs) -> Any:
    """Those of a forward whose kernel need not be compiled, if there is one: it cannot fail or hang, and any right
    result serves."""
    forward = AttentionProblem.of(inputs, extra=frozenset({"lse"}))
    able = [c for c in select.consider(forward) if c.able]
    best = min(able, key=lambda c: (c.kernel.materialises, bool(select.tiles_of(c.kernel, forward)), c.seconds))
    return select.Choice(best.kernel, best.tile, forward, "", copies=best.copies).run(inputs)


def repeated(kernel: Kernel, tile: Tile | None, asked: AttentionProblem, *tensors: Any) -> Call:
    """What a call that was made before runs (sdpa.calls): torch's operator, launches run again, or the pass itself."""
    module, inputs = kernel.load(), tensors[0]
    if asked.direction == "forward" and hasattr(module, "native") and inputs.bias is None and inputs.allowed is None:
        native = module.native(inputs)
        if native is not None:
            attend = Operator(*native)
            return lambda: attend(*inputs[:3])
    run = getattr(module, asked.direction)
    again = module.record(tensors, asked, tile)[1] if hasattr(module, "record") else None
    if again is None:
        return lambda: run(*tensors, asked, tile)
    given = read_of(*tensors)
    return lambda: again(*given) or run(*tensors, asked, tile)


def tournament(ready: Field, time_limit: float, contest: Contest) -> dict[tuple[str, Tile | None], float]:
    """Seconds by kernel and tile. First guesses run first; other tiles where the kernel is near the fastest."""
    asked, kernels, device = ready.asked, ready.kernels, ready.asked.device
    call = caller(ready.inputs, asked, ready.grad_out)
    calls, first = {}, {}

    def sample(kernel: Kernel, tile: Tile | None) -> None:
        key = (kernel.name, tile)
        if not contest.ready(kernel, tile, asked):
            return
        try:
            calls[key] = call(kernel, tile)
            first[key] = first_sample(calls[key], device)
        except Exception as error:
            contest.report(f"{ready.label}: {kernel.name} {list(tile or ())} fails: {first_line(error)}")
            recover_device(device)

    for kernel in kernels:
        sample(kernel, select.tile_of(kernel, asked))
    fastest = min(first.values(), default=math.inf)
    for kernel in kernels:
        guess = first.get((kernel.name, select.tile_of(kernel, asked)), math.inf)
        if guess <= TILE_REACH * fastest or guess == math.inf:
            for tile in ready.other_tiles(kernel):
                sample(kernel, tile)
    kept = without_slow_tiles(first)
    return race({key: calls[key] for key in kept}, device, time_limit, kept) if kept else {}


def worth_building(kernel: Kernel, problem: Problem, asked: AttentionProblem) -> bool:
    """Whether a kernel takes part although each tile of it has to be compiled: under plain masks those of other
    families come second, and a figure at the most usual sizes is enough."""
    if not isinstance(problem, Cell) or problem.explore or len(select.tiles_of(kernel, asked)) < 2:
        return True
    return kernel.family in PLAIN_FAMILIES or is_left_to_others(asked)


def is_left_to_others(asked: AttentionProblem) -> bool:
    """Whether PLAIN_FAMILIES leave the problem to other families of ours."""
    return bool(asked.features & DENSE)


def other_tiles(
    problem: Problem, asked: AttentionProblem, entries: list[dict[str, Any]], kernel: Kernel
) -> tuple[Tile, ...]:
    """The tiles to try after a kernel's first guess: all, or in cells that do not explore what was best nearby."""
    others = select.tiles_of(kernel, asked)[1:]
    if not isinstance(problem, Cell):
        return others
    if problem.explore and (is_left_to_others(asked) or kernel.family in PLAIN_FAMILIES):
        return others
    near = learnt_tiles(kernel.name, problem, entries)
    return tuple(tile for tile in others if tile in near)


def learnt_tiles(kernel: str, problem: Problem, entries: list[dict[str, Any]]) -> tuple[Tile, ...]:
    """The kernel's tiles in the two entries most like the problem, as those of the next shorter and longer lengths."""
    known = [e for e in entries if kernel in e.get("tile", {}) and e["direction"] == problem.direction]

    def distance(entry: dict[str, Any]) -> float:
        sizes = sum(abs(math.log(entry[name] / getattr(problem, name))) for name in ("M", "N", "D", "Dv"))
        return sizes + (entry["mask"] != book.mask_kind(problem)) + (entry["dtype"] != book.dtype_name(problem))

    return tuple(Tile(*entry["tile"][kernel]) for entry in sorted(known, key=distance)[:LEARNT_FROM])


def without_slow_tiles(first: dict[tuple[str, Tile | None], float]) -> dict[tuple[str, Tile | None], float]:
    """Each kernel's best tile and those near it."""
    best: dict[str, float] = {}
    for (name, _), seconds in first.items():
        best[name] = min(seconds, best.get(name, math.inf))
    return {key: seconds for key, seconds in first.items() if seconds <= TILE_SLACK * best[key[0]]}


def figures(
    seconds: dict[tuple[str, Tile | None], float], asked: AttentionProblem, kernels: dict[str, Kernel]
) -> dict[str, Any]:
    """An entry's "ms" and "tile": each kernel's best, the tile only where there was a choice."""
    ms, tiles = {}, {}
    for (name, tile), value in sorted(seconds.items(), key=lambda pair: -pair[1]):
        ms[name] = float(f"{value * 1e3:.4g}")  # the fastest comes last and stays
        if tile is not None and len(select.tiles_of(kernels[name], asked)) > 1:
            tiles[name] = list(tile)
    ordered = {name: ms[name] for name in kernels if name in ms}
    return {"ms": ordered} | ({"tile": tiles} if tiles else {})


Key = TypeVar("Key", bound=Hashable)


def race(
    calls: dict[Key, Call],
    device: str,
    time_limit: float,
    first: dict[Key, float] | None = None,
    rounds: int | None = None,
) -> dict[Key, float]:
    """Seconds of each call, measured in turns; the hopeless ones by a single sample after their warm-up (`first`). On a
    CPU with so many `rounds`, where they are given, instead of a time limit."""
    first = first or {key: first_sample(call, device) for key, call in calls.items()}
    best = min(first.values())
    close = [key for key in calls if first[key] <= HOPELESS * best]
    if device.startswith("cuda"):
        return first | gpu_race({key: calls[key] for key in close}, device, time_limit)
    several, watch = [calls[key] for key in close], stopwatch_for(device)
    timings = interleave(several, watch, rounds, time_limit, min_sample=sample_for(device))
    return first | {key: timing.minimum for key, timing in zip(close, timings, strict=True)}


def first_sample(call: Call, device: str) -> float:
    """Seconds of a call once it is warm."""
    if device.startswith("cuda"):
        call()  # compiles, which says nothing about the second
        torch.cuda.synchronize(device)
    return warm_sample(call, stopwatch_for(device))


def warm_sample(call: Call, stopwatch: Callable[[Call, int], float] = host_stopwatch) -> float:
    """Seconds of a call once it is warm, or of the first where that took so long that warming up cannot matter."""
    cold = stopwatch(call, 1)
    if cold > 1.0:
        return cold
    warm = min(cold, stopwatch(call, 1))
    return min([warm, *(stopwatch(call, 1) for _ in range(FIRST_CALLS - 1 if warm <= SHORT else 0))])


def gpu_race(calls: dict[Key, Call], device: str, time_limit: float) -> dict[Key, float]:
    """Median seconds of each call on a cold cache, `time_limit` seconds of samples each, and most of what a short
    call's launch takes the host longer: an eager program waits for all of that, a CUDA graph for nothing."""
    racers = [Racer(call) for call in calls.values()]
    timings = device_race(racers, device, time_limit)
    found = {}
    for key, racer, timing in zip(calls, racers, timings, strict=True):
        seconds = timing.median
        if seconds < HOST_MATTERS:
            seconds += HOST_SHARE * max(0.0, queue_seconds(racer) - seconds)
        found[key] = seconds
    return found


def device_race(racers: list[Racer], device: str, time_limit: float) -> list[Timing]:
    with torch.cuda.device(device):
        return race_on_device(racers, DeviceClock(racers, device), time_limit=time_limit, fewest=MIN_SAMPLES)


def recover_device(device: str) -> None:
    """After a failed call: its memory is given back. Raises where the device itself is no longer usable."""
    synchronize(device)
    if not device.startswith("cpu"):
        (torch.cuda if device.startswith("cuda") else torch.mps).empty_cache()
