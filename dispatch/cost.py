"""Roofline estimate of a kernel's time, for what no table has measured.

Arithmetic and traffic run side by side, so the slower decides. On a GPU both are slowed down where there is too little
to do in parallel: programs are handed out to multiprocessors whole, and one multiprocessor draws only so much memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from sdpa.dispatch.device import Device, device_of
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import AttentionProblem, Tile

# A kernel that writes the scores moves each about this often: product, softmax (read and write), product.
SCORE_PASSES = 4
# Rows of a GPU kernel's program where no tile says: kernels have a smaller tile for short sides.
DEFAULT_ROWS = 128
SHORT_ROWS = 64
# Keys below which splitting a row of queries further costs more than it gives.
SPLIT_KEYS = 256
# A multiprocessor alone draws about this many times its share of the bandwidth.
DRAW = 2.0
# A tile whose operands do not fit the shared memory even once is spilled or refused: not to be tried before others.
SPILL = 8.0

# A copy's seconds on the host, by type of device.
COPY_OVERHEAD = {"cpu": 2e-6}
GPU_COPY_OVERHEAD = 6e-6  # as of every launch of an operation of torch's
# How much longer a GPU kernel takes that can read, but not by vectors or TMA: by the bytes that it loads at a time.
# Below 4 there is no asynchronous copy into shared memory.
SLOWING = {16: 1.0, 8: 1.3, 4: 1.6, 2: 3.0, 1: 3.0, 0: 1.0}


class Grid(NamedTuple):
    """How a GPU kernel hands out a problem: `programs`, each with `rows` of its own, sweeping over `swept` rows
    of the other side (forward: queries over keys; backward: keys over queries)."""

    programs: float
    rows: int
    padded: float  # rows of all programs / rows there are
    swept: float


def estimate(kernel: Kernel, problem: AttentionProblem, tile: Tile | None = None) -> float:
    """Seconds `kernel` should take with `tile`: the larger of arithmetic and traffic, plus the fixed cost of a call."""
    device = device_of(problem.device)
    computing, moving = arithmetic(kernel, problem, device), traffic(kernel, problem, device)
    if device.kind != "cpu":
        grid = grid_of(kernel, problem, device, tile)
        computing *= grid.padded
        # The products of a kernel that writes out the scores are torch's, which spread themselves over the device.
        if not kernel.materialises:
            computing *= unevenness(grid, device)
            moving = max(moving, one_program(grid, problem, device))
        if not fits(problem, device, tile):
            computing *= SPILL
    return max(computing, moving) + kernel.overhead + masking(kernel, problem)


def arithmetic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    flops = problem.flops()
    if kernel.materialises:
        share = problem.visible_share()
        flops = flops / share if share else flops  # computes what a mask hides, too
    return flops / (device.peak(problem.dtype, problem.tf32) * kernel.efficiency)


def traffic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    moved = problem.bytes()
    if kernel.materialises:
        moved += SCORE_PASSES * problem.B * problem.H * problem.M * problem.N * 4  # float32 scores
    return moved / device.bandwidth


def grid_of(kernel: Kernel, problem: AttentionProblem, device: Device, tile: Tile | None) -> Grid:
    splits = kernel.splits_keys and problem.direction == "forward"
    heads, length, swept = problem.B * problem.H, problem.M, problem.N
    rows = tile.BLOCK_M if tile else 0
    if splits:
        heads, length = problem.B * problem.Hkv, problem.M * problem.G
    elif problem.direction == "backward":
        length, swept, rows = problem.N, problem.M, tile.BLOCK_N if tile else 0
    rows = rows or (SHORT_ROWS if length <= SHORT_ROWS else DEFAULT_ROWS)
    blocks = -(-length // rows)
    whole = max(1, heads * blocks)
    programs: float = whole
    if splits and whole < device.cores:
        programs = min(device.cores, whole * max(1.0, swept / SPLIT_KEYS))
    return Grid(programs, rows, blocks * rows / max(1, length), swept * whole / programs)


def unevenness(grid: Grid, device: Device) -> float:
    """How much longer the busiest multiprocessor works than if the programs could be spread evenly."""
    return math.ceil(grid.programs / device.cores) * device.cores / grid.programs


def one_program(grid: Grid, problem: AttentionProblem, device: Device) -> float:
    """Seconds in which one program alone loads what it reads: few programs do not draw the whole bandwidth."""
    loaded = (grid.rows + grid.swept) * (problem.D + problem.Dv) * problem.dtype.itemsize
    return loaded * device.cores / (DRAW * device.bandwidth)


def fits(problem: AttentionProblem, device: Device, tile: Tile | None) -> bool:
    """Whether one tile each of q, k and v fits the shared memory that a block may have, where that is known."""
    if tile is None or not device.shared_memory:
        return True
    elements = tile.BLOCK_M * problem.D + tile.BLOCK_N * (problem.D + problem.Dv)
    return elements * problem.dtype.itemsize <= device.shared_memory


def slowing(kernel: Kernel, problem: AttentionProblem) -> float:
    """How much longer a kernel takes that reads unaligned tensors where they lie."""
    if problem.device_type == "cpu" or not kernel.alignment or kernel.copies_rows(problem):
        return 1.0
    found = [got for name, got in problem.unaligned if name in kernel.aligned]
    return max((SLOWING[got] for got in found), default=1.0)


def copying(problem: AttentionProblem, names: Iterable[str]) -> float:
    """Seconds in which the tensors of these names are read and written once more, a launch each."""
    whole = {name.removesuffix("_rows") for name in names}
    moved = 2 * sum(elements(problem, name) for name in whole) * problem.dtype.itemsize
    overhead = COPY_OVERHEAD.get(problem.device_type, GPU_COPY_OVERHEAD)
    return moved / device_of(problem.device).bandwidth + len(whole) * overhead


def masking(kernel: Kernel, problem: AttentionProblem) -> float:
    """Seconds of the operations of torch's that prepare a dense mask for a kernel and settle the rows without a key."""
    if not kernel.mask_launches or not problem.features & {"bias", "allowed"}:
        return 0.0
    moved = kernel.mask_launches * elements(problem, "bias") * problem.dtype.itemsize
    return moved / device_of(problem.device).bandwidth + kernel.mask_launches * GPU_COPY_OVERHEAD


def elements(problem: AttentionProblem, name: str) -> int:
    """Numbers that a tensor of PLACED holds; a bias with one matrix for all heads is taken for one of each."""
    p = problem
    return {
        "q": p.B * p.H * p.M * p.D,
        "k": p.B * p.Hkv * p.N * p.D,
        "v": p.B * p.Hkv * p.N * p.Dv,
        "bias": p.B * p.H * (1 if p.row_mask else p.M) * p.N,
        "lse": p.B * p.H * p.M,
    }.get(name, p.B * p.H * p.M * p.Dv)
