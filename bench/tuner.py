"""What a tuning table is made of: the grid of problems, every able kernel timed on each, and the entries' form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch

from sdpa.bench.problems import DTYPES, VIT, Problem, square
from sdpa.bench.timing import Timing, host_stopwatch, interleave, stopwatch_for
from sdpa.bench.workload import Workload, make_workload
from sdpa.dispatch import tuning
from sdpa.dispatch.catalog import KERNELS
from sdpa.dispatch.kernel import Kernel
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionInputs, AttentionProblem, Results

# Whoever is this much slower than the fastest in its first call is not measured again: its rank is clear.
HOPELESS = 4.0
LENGTHS = (64, 128, 256, 512, 1024, 2048)
LONGEST = 4096  # forward only
DECODE_LENGTHS = (256, 1024, 4096, 16384)
DECODE_HEADS = 8
ENTRY_FIELDS = ("B", "H", "Hkv", "M", "N", "D", "Dv")


def grid(device: str) -> tuple[Problem, ...]:
    """The problems of a table, those first that matter to most calls: a run that is cut short has them all coarsely."""
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


def entry_key(problem: Problem) -> tuple:
    """What makes two entries of a table the same measurement."""
    sizes = tuple(getattr(problem, name) for name in ENTRY_FIELDS)
    return (problem.direction, problem.dtype, mask_kind(problem), *sizes)


def entry_key_of(entry: dict) -> tuple:
    return tuple(entry[name] for name in ("direction", "dtype", "mask", *ENTRY_FIELDS))


def mask_kind(problem: Problem) -> str:
    """A problem's mask in the tuning tables' words."""
    return {"padding": "dense", "bias": "dense", "lengths": "structured"}.get(problem.mask, problem.mask)


def inputs_of(work: Workload) -> AttentionInputs:
    """The normalised inputs kernels take, cut off from autograd."""
    q, k, v = (t.detach() for t in work.qkv)
    is_causal, enable_gqa = work.options["is_causal"], work.options["enable_gqa"]
    return build_inputs(q, k, v, Options(work.our_mask, is_causal=is_causal, enable_gqa=enable_gqa))


def able_kernels(problem: AttentionProblem) -> list[Kernel]:
    return [kernel for kernel in KERNELS if not kernel.why_not(problem)]


def call_of(kernel: Kernel, inputs: AttentionInputs, problem: AttentionProblem, work: Workload) -> Callable[[], object]:
    """One kernel's forward, or its backward on the results of its own forward."""
    module = kernel.load()
    tile = (getattr(module, "TILES", ()) or (None,))[0]
    if problem.direction == "forward":
        return lambda: module.forward(inputs, problem, tile)
    forward = problem._replace(direction="forward", features=problem.features | {"lse"})
    results = module.forward(inputs, forward, tile)
    upstream = Results(work.grad_out, None)
    return lambda: module.backward(inputs, results, upstream, problem, tile)


def measure(problem: Problem, time_limit: float) -> dict | None:
    """One entry of a table, milliseconds by kernel; None where no kernel is able."""
    work = make_workload(replace(problem, grad=False))
    inputs = inputs_of(work)
    asked = AttentionProblem.of(inputs, problem.direction)
    with torch.no_grad():
        calls = {kernel.name: call_of(kernel, inputs, asked, work) for kernel in able_kernels(asked)}
        if not calls:
            return None
        seconds = race(calls, problem.device, time_limit)
    sizes = {name: getattr(problem, name) for name in ENTRY_FIELDS}
    found = {"direction": problem.direction, "dtype": problem.dtype, "mask": tuning.mask_kind(asked), **sizes}
    return found | {"ms": {name: float(f"{value * 1e3:.4g}") for name, value in seconds.items()}}


def race(calls: dict[str, Callable[[], object]], device: str, time_limit: float) -> dict[str, float]:
    """The least seconds of each call; the hopeless ones by a single sample after their warm-up."""
    stopwatch = stopwatch_for(device)
    first = {name: warm_sample(call, stopwatch) for name, call in calls.items()}
    best = min(first.values())
    close = [name for name in calls if first[name] <= HOPELESS * best]
    timings: list[Timing] = interleave([calls[name] for name in close], stopwatch, time_limit=time_limit)
    return first | {name: timing.minimum for name, timing in zip(close, timings, strict=True)}


def warm_sample(call: Callable[[], object], stopwatch=host_stopwatch) -> float:
    """Seconds of the second call, or of the first where that took so long that warming up cannot matter."""
    cold = stopwatch(call, 1)
    return cold if cold > 1.0 else min(cold, stopwatch(call, 1))


def entries(problems: tuple[Problem, ...], time_limit: float) -> Iterator[tuple[Problem, dict | None]]:
    """Each problem with its entry, as it is measured."""
    for problem in problems:
        yield problem, measure(problem, time_limit)
