"""Into how many parts `triton_decode` cuts the keys, and with which tile: a model of the time that both should take.

Programs run in waves: as many at once as the cores' shared memory and registers hold. A wave takes the longest of three
times: what the memory takes for all that the wave reads, what a core takes for the arithmetic of its programs, and what
one program takes alone. A program alone waits for its loads, which come back `LATENCY` after they were issued, for all
blocks of keys that the stages of the tile have under way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton

from sdpa.kernels.triton.arguments import block_size
from sdpa.kernels.triton.target import Target, target_of
from sdpa.problem import UNLIMITED, AttentionProblem, Tile

DENSE = {"bias", "allowed"}

# The rows of a tile are the query heads of a group times the queries: mostly 16, the least that tensor cores take.
ROWS = (16, 32, 64)
# Blocks of keys and stages. Those of 16-bit operands without a dense mask are weighed against each other; else, and on
# devices and for heads that these do not fit, the first is taken that fits. In float32 and with dense masks 128 keys
# took 1.2 to 6 times as long.
WEIGHED = tuple(Tile(rows, keys, 4, stages) for rows in ROWS for keys, stages in ((64, 3), (128, 3)))
IN_TURN = tuple(Tile(rows, keys, 4, s) for rows in ROWS for keys, s in ((64, 4), (64, 2), (32, 4), (32, 2), (16, 2)))
TILES = WEIGHED + IN_TURN
# The least keys of a part: fewer do not hide the latency of its first loads.
MIN_KEYS = 256
MAX_PARTS = 128
# What follows is fitted to a sweep of tiles and parts on an H200 (docs/log/gpu-decode.md).
LATENCY, PER_KEY, START = 0.95e-6, 8e-9, 1.5e-6  # seconds of one program: of its loads, per key in order, to start
# Seconds of a core per byte of keys and values, for each 16 rows; those of 16-bit operands count up to 32. A program
# alone on a core takes so much longer in float32, for which nothing else can hide its latencies.
ARITHMETIC, ARITHMETIC_FLOAT32, ALONE_FLOAT32 = 14e-12, 36e-12, 1.7
RESIDENT = 6  # programs of 16 rows on a core, by their registers
OVERHEAD = 3 << 10  # bytes of shared memory of a program beside its operands
COMBINING, COMBINED_BYTES = 6e-6, 5.0  # seconds of the kernel that combines the parts; how often a part's bytes count


class Work(NamedTuple):
    """What a call is to the model."""

    entries: int  # batch entries times heads of keys
    blocks: int  # programs of each, if its keys are one part
    keys: int
    width: int  # bytes of a key and its value
    padded: int  # the same in shared memory
    part_bytes: int  # of one part of the output, of all rows: float32, and what it is weighted by
    half: bool = True  # operands of 16 bits


class Splitting(NamedTuple):
    seconds: float
    parts: int


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tile of the fewest rows that hold a group's heads and queries, with as many keys as are done first."""
    rows = min(64, max(16, triton.next_power_of_2(problem.M * problem.G)))
    target, padded = target_of(problem.device), padded_bytes(problem)

    def fitting(offered: tuple[Tile, ...]) -> list[Tile]:
        most = target.shared_memory // padded
        return [t for t in offered if t.BLOCK_M == rows and t.num_stages * t.BLOCK_N <= most]

    weighed = problem.dtype.itemsize == 2 and not DENSE & problem.features
    if weighed and (large := fitting(WEIGHED)):
        large = [t for t in large if t.BLOCK_N < problem.N] or large[:1]
        return (min(large, key=lambda tile: split(work_of(problem, tile), tile, target).seconds),)
    return (next(iter(fitting(IN_TURN)), IN_TURN[-1]._replace(BLOCK_M=rows)),)


def parts_of(problem: AttentionProblem, tile: Tile) -> int:
    """The number of parts of the keys with which all is done first."""
    return split(work_of(problem, tile), tile, target_of(problem.device)).parts


def padded_bytes(problem: AttentionProblem) -> int:
    return (block_size(problem.D) + block_size(problem.Dv)) * problem.dtype.itemsize


def work_of(problem: AttentionProblem, tile: Tile) -> Work:
    p, keys = problem, problem.N
    if UNLIMITED not in (p.left, p.right):
        keys = min(keys, p.left + p.right + p.M)
    blocks = -(-p.M * p.G // tile.BLOCK_M)
    part_bytes = p.B * p.H * p.M * 4 * (p.Dv + 2)
    size = p.dtype.itemsize
    return Work(p.B * p.Hkv, blocks, keys, (p.D + p.Dv) * size, padded_bytes(p), part_bytes, size == 2)


@lru_cache(maxsize=4096)
def split(work: Work, tile: Tile, target: Target) -> Splitting:
    """The time of `work` with `tile`, and the parts of its keys with which it takes that."""
    programs, wave = max(1, work.entries * work.blocks), wave_of(work, tile, target)
    most = max(1, min(MAX_PARTS, -(-work.keys // MIN_KEYS)))
    filling = {count * wave // programs for count in range(1, 9)}  # as many parts as fill some waves
    tried = set(range(1, 17)) | filling
    return min(Splitting(seconds(work, tile, target, parts), parts) for parts in {min(most, max(1, p)) for p in tried})


def wave_of(work: Work, tile: Tile, target: Target) -> int:
    """How many programs run at once."""
    memory = OVERHEAD + (keys_ahead(tile) + tile.BLOCK_M) * work.padded
    most = max(1, RESIDENT * 16 // max(16, tile.BLOCK_M))
    return target.cores * max(1, min(most, target.shared_memory // memory))


def keys_ahead(tile: Tile) -> int:
    """The keys whose loads are under way at once: one stage of the tile's is what is computed with."""
    return max(1, tile.num_stages - 1) * tile.BLOCK_N


def seconds(work: Work, tile: Tile, target: Target, parts: int) -> float:
    keys, wave = -(-work.keys // parts), wave_of(work, tile, target)
    alone = keys * (LATENCY / keys_ahead(tile) + PER_KEY)
    read = keys * work.width / max(1, work.blocks) / target.bandwidth  # programs of one entry read the same keys
    per_byte = ARITHMETIC * min(32, tile.BLOCK_M) if work.half else ARITHMETIC_FLOAT32 * tile.BLOCK_M
    arithmetic = keys * work.padded * per_byte / 16
    alone = alone if work.half else max(alone, ALONE_FLOAT32 * arithmetic)
    full, rest = divmod(work.entries * work.blocks * parts, wave)
    time = 0.0
    for waves, programs in ((full, wave), (min(1, rest), rest)):
        busiest = -(-programs // target.cores)
        time += waves * (max(alone, programs * read, busiest * arithmetic) + START)
    return time if parts == 1 else time + COMBINING + COMBINED_BYTES * parts * work.part_bytes / target.bandwidth
