"""Roofline estimate of a kernel's time, where no table has a measured one.

Arithmetic and memory traffic overlap, so the slower one decides. On a GPU both are slower where there is little
parallel work: a program runs on one multiprocessor, and one multiprocessor uses only a part of the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from sdpa.dispatch.device import Device, device_of
from sdpa.dispatch.kernel import Kernel
from sdpa.problem import UNLIMITED, AttentionProblem, Tile

# How often a kernel that writes the scores moves each: product, softmax (read and write), product.
SCORE_PASSES = 4
# How often float32 sums cost their traffic. They are moved more often, which products hide in part: fitted to the
# grouped heads of docs/log/hopper-backward.md.
SUM_PASSES = 1
# Rows of a GPU kernel's program where there is no tile; kernels have a smaller tile for few rows.
DEFAULT_ROWS = 128
SHORT_ROWS = 64
# Apple's: a simdgroup has 8 rows, a tile four simdgroups, and a tile of few rows no more than these need.
APPLE_SHORT_ROWS = 8
APPLE_ROWS = 32
# Keys below which splitting a row of queries further costs more than it gives.
SPLIT_KEYS = 256
# One multiprocessor alone can use about this many times its share of the bandwidth.
DRAW = 2.0
# The factor of time for a tile whose operands do not fit the shared memory: it spills or is refused.
SPILL = 8.0

# A copy's seconds on the host, by type of device.
COPY_OVERHEAD = {"cpu": 2e-6, "mps": 15e-6}
GPU_COPY_OVERHEAD = 6e-6  # as of every launch of an operation of torch's
# The factor of time for a GPU kernel that reads neither by vectors nor by TMA, by the bytes that it loads at a time.
# Below 4 bytes there is no asynchronous copy into shared memory.
SLOWING = {16: 1.0, 8: 1.3, 4: 1.6, 2: 3.0, 1: 3.0, 0: 1.0}


class Grid(NamedTuple):
    """The programs of a GPU kernel for a problem. Each of `programs` has `rows` of its own and reads `swept` rows of
    the other side: in a forward queries and keys, in a backward keys and queries."""

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
        # A kernel that writes out the scores uses torch's products, which use the whole device.
        if not kernel.materialises:
            computing *= unevenness(grid, device)
            moving = max(moving, one_program(grid, problem, device))
        if not fits(problem, device, tile):
            computing *= SPILL
    fixed = kernel.overhead_of(problem.direction) + masking(kernel, problem, device)
    return max(computing, moving) + summing(kernel, problem, device) + fixed


def beside(card: Device | None, kernel: Kernel, problem: AttentionProblem) -> float:
    """The factor of time of a kernel that was measured on another card of the architecture; None: on this one."""
    if card is None:
        return 1.0

    def bound(device: Device) -> float:
        fixed = kernel.overhead_of(problem.direction) + masking(kernel, problem, device)
        return max(arithmetic(kernel, problem, device), traffic(kernel, problem, device)) + fixed

    return bound(device_of(problem.device)) / bound(card)


def arithmetic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    flops = problem.flops()
    if kernel.materialises:
        share = problem.visible_share()
        flops = flops / share if share else flops  # computes what a mask hides, too
    efficiency = kernel.efficiency * (kernel.dense_efficiency if has_dense_mask(problem) else 1.0)
    return flops / (device.peak(problem.dtype, problem.tf32) * efficiency)


def traffic(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    moved = problem.bytes()
    if kernel.materialises:
        moved += SCORE_PASSES * problem.B * problem.H * problem.M * problem.N * 4  # float32 scores
    return moved / device.bandwidth


def summing(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    """Seconds in which a backward adds up float32 gradients of the keys that heads share, where keys and rows are many.
    Of few keys these sums are small."""
    growing = problem.left == UNLIMITED and problem.right != UNLIMITED
    fewest = kernel.sums_groups
    if problem.direction == "forward" or not (fewest and growing and (problem.G - 1) * problem.M >= fewest):
        return 0.0
    numbers = problem.B * problem.Hkv * problem.N * (problem.D + problem.Dv)
    return SUM_PASSES * 4 * numbers / device.bandwidth


def grid_of(kernel: Kernel, problem: AttentionProblem, device: Device, tile: Tile | None) -> Grid:
    splits = kernel.splits_keys and problem.direction == "forward"
    heads, length, swept = problem.B * problem.H, problem.M, problem.N
    rows = tile.BLOCK_M if tile else 0
    if splits:
        heads, length = problem.B * problem.Hkv, problem.M * problem.G
    elif problem.direction == "backward":
        length, swept, rows = problem.N, problem.M, tile.BLOCK_N if tile else 0
    rows = rows_of(rows, length, device)
    blocks = -(-length // rows)
    whole = max(1, heads * blocks)
    programs: float = whole
    if splits and whole < device.cores:
        programs = min(device.cores, whole * max(1.0, swept / SPLIT_KEYS))
    return Grid(programs, rows, blocks * rows / max(1, length), swept * whole / programs)


def rows_of(asked: int, length: int, device: Device) -> int:
    """The rows of one program: `asked` for by a tile (0: there is none), of `length` in all."""
    if device.kind == "mps":
        return min(asked or APPLE_ROWS, -(-max(1, length) // APPLE_SHORT_ROWS) * APPLE_SHORT_ROWS)
    return asked or (SHORT_ROWS if length <= SHORT_ROWS else DEFAULT_ROWS)


def unevenness(grid: Grid, device: Device) -> float:
    """The time of the busiest multiprocessor, as a multiple of the time with programs spread evenly."""
    return math.ceil(grid.programs / device.cores) * device.cores / grid.programs


def one_program(grid: Grid, problem: AttentionProblem, device: Device) -> float:
    """Seconds in which one program alone loads its operands; few programs do not use the whole bandwidth."""
    loaded = (grid.rows + grid.swept) * (problem.D + problem.Dv) * problem.dtype.itemsize
    return loaded * device.cores / (DRAW * device.bandwidth)


def fits(problem: AttentionProblem, device: Device, tile: Tile | None) -> bool:
    """Whether one tile each of q, k and v fits the shared memory of a thread block, where its size is known."""
    if tile is None or not device.shared_memory:
        return True
    elements = tile.BLOCK_M * problem.D + tile.BLOCK_N * (problem.D + problem.Dv)
    return elements * problem.dtype.itemsize <= device.shared_memory


def slowing(kernel: Kernel, problem: AttentionProblem) -> float:
    """The factor of time for a kernel that reads unaligned tensors where they lie."""
    if problem.device_type == "cpu" or not kernel.alignment or kernel.copies_rows(problem):
        return 1.0
    found = [got for name, got in problem.unaligned if name in kernel.aligned]
    return max((SLOWING[got] for got in found), default=1.0)


def ordering(kernel: Kernel, problem: AttentionProblem) -> float:
    """The factor of time for a kernel that adds in one order, because bits must not vary."""
    return kernel.order_cost if problem.deterministic and problem.direction in kernel.varies_in else 1.0


def copying(problem: AttentionProblem, names: Iterable[str]) -> float:
    """Seconds to copy the tensors of these names: each is read and written once, in a launch of its own."""
    whole = {name.removesuffix("_rows") for name in names}
    moved = 2 * sum(elements(problem, name) for name in whole) * problem.dtype.itemsize
    return moved / device_of(problem.device).bandwidth + len(whole) * launch_overhead(problem)


def launch_overhead(problem: AttentionProblem) -> float:
    return COPY_OVERHEAD.get(problem.device_type, GPU_COPY_OVERHEAD)


def masking(kernel: Kernel, problem: AttentionProblem, device: Device) -> float:
    """Seconds of the operations of torch's that prepare a dense mask for a kernel and settle the rows without a key."""
    if not kernel.mask_launches or not has_dense_mask(problem):
        return 0.0
    moved = kernel.mask_launches * elements(problem, "bias") * problem.dtype.itemsize
    return moved / device.bandwidth + kernel.mask_launches * launch_overhead(problem)


def has_dense_mask(problem: AttentionProblem) -> bool:
    return bool(problem.features & {"bias", "allowed"})


def elements(problem: AttentionProblem, name: str) -> int:
    """The number of elements of a tensor of PLACED. Who shares a boolean mask, or a bias that repeats along rows or
    columns, is not told: they count as one matrix for each head. So does a bias beside a boolean mask, with which it
    becomes one tensor."""
    p = problem
    matrices = 0 if "allowed" in p.features else p.bias_matrices
    return {
        "q": p.B * p.H * p.M * p.D,
        "k": p.B * p.Hkv * p.N * p.D,
        "v": p.B * p.Hkv * p.N * p.Dv,
        "bias": (matrices or p.B * p.H) * (1 if p.row_mask else p.M) * p.N,
        "lse": p.B * p.H * p.M,
    }.get(name, p.B * p.H * p.M * p.Dv)
