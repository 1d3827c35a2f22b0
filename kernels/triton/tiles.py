"""Which tiles a kernel may be compiled with for a problem, best guess first: by head size, dtype and shared memory.

BLOCK_M queries and BLOCK_N keys stay in registers as scores, BLOCK_M x head size as the accumulator. In a backward,
BLOCK_M is the side that streams and BLOCK_N the side that stays, whichever of the two passes it is.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, float16_parts_of
from sdpa.kernels.triton.target import HOPPER, Target, target_of
from sdpa.problem import AttentionProblem, Tile

# By the rounded head size: the tiles worth trying, the best measured on an H200 first.
FORWARD = {
    64: (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2), Tile(128, 64, 4, 3), Tile(64, 32, 4, 3)),
    128: (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    512: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
}
# For float32 operands in two float16 parts, and in one (float16_parts.py).
FORWARD_TWO_PARTS = {
    64: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(32, 32, 4, 1)),
    128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    256: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
    512: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
FORWARD_ONE_PART = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(32, 32, 4, 1)),
    128: (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    256: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
    512: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
# For float32 operands without float16 parts.
FORWARD_FLOAT32 = {
    64: (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 3), Tile(128, 128, 8, 2), Tile(32, 32, 4, 1)),
    128: (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 1)),
    256: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
    512: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
BACKWARD = {
    64: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), Tile(32, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
    256: (Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1)),
    512: (Tile(32, 64, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
}
# Up to so many rows, and so many blocks of this tile per core, an H200's backwards took less time than by larger ones.
FEW_ROWS, FEW_BLOCKS, FEW_TILE = 256, 8, Tile(32, 32, 4, 3)
# For float32 operands without float16 parts: AMD's, whose matrix units multiply float32.
BACKWARD_FLOAT32 = {
    64: (Tile(32, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
    128: (Tile(32, 64, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
    256: (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
    512: (Tile(16, 16, 8, 1),),
}
# For float32 operands whose float16 parts are in memory (row_parts.py).
BACKWARD_PARTS = {
    64: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
    128: (Tile(32, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
    256: (Tile(64, 64, 8, 1), Tile(32, 64, 8, 1), Tile(16, 16, 4, 1)),
    512: (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}
# Of the weights. Scores are twice in registers, as a product and as a sum, so 128 x 128 is the largest tile. It comes
# first: smaller ones load so often that, by the count of bytes, the L2 cache takes longer than the exponentials.
WEIGHTS = {
    64: (Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
    128: (Tile(128, 128, 8, 2), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    512: (Tile(64, 64, 8, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
}
# Few rows, as in a backward: what spills least.
WEIGHTS_FLOAT32 = {
    64: (Tile(32, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
    128: (Tile(32, 64, 8, 1), Tile(16, 32, 4, 1)),
    256: (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
    512: (Tile(16, 16, 8, 1),),
}
# By direction, whether it is float32, and its parts.
TABLES = {
    ("forward", False, 0): FORWARD,
    ("forward", True, 0): FORWARD_FLOAT32,
    ("forward", True, 1): FORWARD_ONE_PART,
    ("forward", True, 2): FORWARD_TWO_PARTS,
    ("backward", False, 0): BACKWARD,
    ("backward", True, 0): BACKWARD_FLOAT32,
    ("backward", True, 1): BACKWARD_PARTS,
    ("backward", True, 2): BACKWARD_PARTS,
    ("weights", False, 0): WEIGHTS,
    ("weights", True, 0): WEIGHTS_FLOAT32,
}
TILES = tuple(
    dict.fromkeys([FEW_TILE, *(tile for table in TABLES.values() for tiles in table.values() for tile in tiles)])
)
# Of backwards whose keys are one block (one_block.py), by the largest head size and the keys that they hold. Few
# queries at a time, all that registers hold of wide heads, take longer than two passes where programs fill the device.
BLOCKS = (
    (64, (Tile(64, 64, 4, 1), Tile(128, 128, 8, 1))),
    (128, (Tile(64, 64, 8, 2), Tile(32, 128, 8, 1))),
    (256, (Tile(64, 64, 8, 1),)),
)
# Of float32, which is cut into float16 parts on chip: beyond these sizes parts take more registers than there are.
BLOCKS_FLOAT32 = (
    (32, (Tile(32, 32, 2, 1), Tile(64, 64, 4, 1))),
    (64, (Tile(64, 64, 4, 1),)),
    (128, (Tile(32, 32, 4, 1), Tile(32, 64, 8, 1))),
)
# Tiles that a program may take one after the other where programs do not fill the device, in half precision and where
# float32 is cut into parts: two passes have a program for each head of queries.
LONGEST, LONGEST_FLOAT32 = 4, 2
# The heads of a group are divided among programs over keys where one program would visit more blocks of queries than
# this, and where all together take this factor less time: the sums take a launch more. No other values were measured.
FEWEST_STEPS, SUMS_GAIN = 8, 1.5
SUMMED = 64  # keys of which a program keeps the sum of the bias's gradient, too
# Stages of loads, tried in this order (docs/log/dropout-and-windows.md).
STAGES = (3, 2, 1)
SIZES = (64, 128, 256, 512)
SHORT = 64  # queries and keys up to which most of a tile may be empty
SMALL_SIDE = 32  # of a tile that is never too large

RANDOM_BYTES = 1  # of dropout per score, as bits change their layout through shared memory
ID_BYTES = 8  # of documents' ids per row and per column of a tile, for the same reason
BARRIER_BYTES = 2 << 10  # of barriers and what else is small: 1,048 at most in what was compiled
# Bytes of dK and dV of a block of keys in float32 beyond which each has a launch: more than half a core's registers.
ACCUMULATOR_BYTES = 128 << 10
# The same for each warp where products of float16 parts are summed in registers of their own: 64 registers of a thread.
WARP_BYTES = 8 << 10
# Registers per thread that a kernel of larger heads may take. If not told, ptxas 12.9 gives up on some, and takes 32.
WIDE_HEADS, MOST_REGISTERS = 256, 255


class Part(Enum):
    """What one launch over blocks of keys computes."""

    BOTH = "dK and dV"
    KEYS = "dK"
    VALUES = "dV"


def passes(problem: AttentionProblem, tile: Tile) -> tuple[tuple[Part, Tile], ...]:
    """The launches of a backward over blocks of keys. dK's keeps values in shared memory, too, so less streams."""
    if not is_split(problem, tile):
        return ((Part.BOTH, tile),)
    return (Part.VALUES, tile), (Part.KEYS, half(tile))


def queries_tile(problem: AttentionProblem, tile: Tile) -> Tile:
    """The tile of the launch over blocks of queries. There, too, the side that stays is the larger one."""
    tile = half(tile) if is_split(problem, tile) else tile
    return tile._replace(BLOCK_M=tile.BLOCK_N, BLOCK_N=tile.BLOCK_M)


def heads_of_program(problem: AttentionProblem, tile: Tile) -> int:
    """How many of the heads that share keys a program over keys visits. Where it visits all, its sums are complete;
    where it visits fewer, fewer cores are idle, and the sums of a group's programs are added up."""
    G, cores = problem.G, target_of(problem.device).cores
    programs = problem.B * problem.Hkv * -(-problem.N // tile.BLOCK_N)
    rows = min(problem.M, problem.width(problem.M) + tile.BLOCK_N)
    steps = G * -(-rows // tile.BLOCK_M)
    if "packed" in problem.features or programs >= cores or steps <= FEWEST_STEPS:
        return G

    def time(heads: int) -> int:
        return -(-programs * (G // heads) // cores) * heads

    best = min((heads for heads in range(G, 0, -1) if G % heads == 0), key=time)
    return best if SUMS_GAIN * time(best) <= time(G) else G


def is_split(problem: AttentionProblem, tile: Tile) -> bool:
    most = tile.num_warps * WARP_BYTES if float16_parts_of(problem) else ACCUMULATOR_BYTES
    return tile.BLOCK_N * (block_size(problem.D) + block_size(problem.Dv)) * 4 > most


def half(tile: Tile) -> Tile:
    return tile._replace(BLOCK_M=tile.BLOCK_M // 2)


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """The tiles that fit the problem and the device, at least the smallest one."""
    whole = one_block_tile(problem) if problem.direction == "backward" else None
    if whole is not None:
        return (whole,)
    listed = TABLES[problem.direction, problem.dtype == torch.float32, float16_parts_of(problem)][size_class(problem)]
    target = target_of(problem.device)
    listed = for_features(for_length(listed, problem), problem, target)
    fitting = tuple(tile for tile in listed if shared_memory(problem, tile, target) <= target.shared_memory)
    return fitting or (min(listed, key=lambda tile: tile.BLOCK_M * tile.BLOCK_N),)


def one_block_tile(problem: AttentionProblem) -> Tile | None:
    """The tile of a backward in one pass; None where it is not one."""
    parts, half = float16_parts_of(problem), problem.dtype.itemsize == 2
    if problem.features & {"packed", "sinks"} or not (half or parts):  # the gradient of sinks wants delta
        return None
    blocks = BLOCKS if half else BLOCKS_FLOAT32
    offered = next((tiles for largest, tiles in blocks if max(problem.D, problem.Dv) <= largest), ())
    tile = next((tile for tile in offered if problem.N <= tile.BLOCK_N), None)
    if tile is None:
        return None
    few = problem.B * problem.Hkv < target_of(problem.device).cores
    if half and not few and tile.BLOCK_M < tile.BLOCK_N:
        return None
    tile = tile._replace(BLOCK_M=min(tile.BLOCK_M, block_size(problem.M)), BLOCK_N=block_size(problem.N))
    each = problem.G * -(-problem.M // tile.BLOCK_M)
    if "bias_grad" in problem.features and (each > 1 or problem.N > SUMMED):
        return None
    return None if few and each > (LONGEST if half else LONGEST_FLOAT32) else staged(tile, problem)


def needs_whole_rows(problem: AttentionProblem, lse: Tensor) -> bool:
    """Where the keys are one block, delta is a sum over it (one_block.py)."""
    return one_block_tile(problem) is not None


def staged(tile: Tile, problem: AttentionProblem) -> Tile | None:
    """The tile with as many stages of loads, of those in STAGES, as fit into shared memory beside the gradient of the
    scores, dropout's random numbers, documents' ids and barriers. float32 takes one, beside one block being cut into
    parts, which take as much as it does."""
    size, width = problem.dtype.itemsize, block_size(problem.D) + block_size(problem.Dv)
    scores = tile.BLOCK_M * tile.BLOCK_N
    dense = 0 if problem.row_mask else scores * dense_bytes(problem)
    streams = (tile.BLOCK_M + tile.BLOCK_N) * width * size + dense
    beside = scores * (size + RANDOM_BYTES * ("dropout" in problem.features)) + BARRIER_BYTES
    if "segments" in problem.features:
        beside += (tile.BLOCK_M + tile.BLOCK_N) * ID_BYTES
    if size == torch.float32.itemsize:
        beside += max(tile.BLOCK_M, tile.BLOCK_N) * width // 2 * size
    room = target_of(problem.device).shared_memory - beside
    offered = STAGES if size < torch.float32.itemsize else STAGES[-1:]
    stages = next((stages for stages in offered if stages * streams <= room), None)
    return None if stages is None else tile._replace(num_stages=stages)


def for_length(listed: tuple[Tile, ...], problem: AttentionProblem) -> tuple[Tile, ...]:
    """Of a short problem first the tiles whose sides are no longer than it is."""
    longest = max(problem.M, problem.N)
    if longest > SHORT:
        return listed
    most = max(SMALL_SIDE, block_size(longest))
    return tuple(sorted(listed, key=lambda tile: max(tile.BLOCK_M, tile.BLOCK_N) > most))


def for_features(listed: tuple[Tile, ...], problem: AttentionProblem, target: Target) -> tuple[Tile, ...]:
    """The tiles of a backward of 16-bit operands: small ones of few scores; with dropout fewer queries at a time, whose
    random numbers take registers, too. Measured in docs/log/dropout-and-windows.md."""
    if problem.direction != "backward" or problem.dtype.itemsize != 2:
        return listed
    blocks = problem.B * problem.H * -(-problem.M // FEW_TILE.BLOCK_M) * -(-problem.N // FEW_TILE.BLOCK_N)
    if "band" in problem.features:
        blocks //= 2
    size, few = size_class(problem), blocks <= FEW_BLOCKS * target.cores
    if size <= 128 and few and max(problem.M, problem.N) <= FEW_ROWS and holds_operands(target):
        return (FEW_TILE,)
    if size == SIZES[0] and "dropout" in problem.features:
        return tuple(tile for tile in listed if tile.BLOCK_M <= FEW_TILE.BLOCK_M)
    return listed


def registers_of(problem: AttentionProblem) -> int | None:
    """The registers per thread that a kernel is told it may take; None where the assembler finds them."""
    wide = max(problem.D, problem.Dv) > WIDE_HEADS and target_of(problem.device).backend == "cuda"
    return MOST_REGISTERS if wide else None


def size_class(problem: AttentionProblem) -> int:
    return next((s for s in SIZES if max(block_size(problem.D), block_size(problem.Dv)) <= s), SIZES[-1])


def recompute_tile(problem: AttentionProblem, tile: Tile) -> Tile:
    """The tile that computes again what a kernel with `tile` flags. It is no higher, so that a block reads one flag."""
    target = target_of(problem.device)
    listed = (t for t in FORWARD_FLOAT32[size_class(problem)] if t.BLOCK_M <= tile.BLOCK_M)
    return next((t for t in listed if shared_memory(problem, t, target, 0) <= target.shared_memory), tile)


def shared_memory(problem: AttentionProblem, tile: Tile, target: Target, parts: int | None = None) -> int:
    """Bytes of shared memory a tile should take: what stays, and what streams as often as there are stages.

    `parts` are the float16 parts of a forward's operands, by default those that the problem's have.
    """
    width = block_size(problem.D) + block_size(problem.Dv)
    own = float16_parts_of(problem)
    size = own * torch.float16.itemsize if own and problem.direction == "backward" else problem.dtype.itemsize
    scores = tile.BLOCK_M * tile.BLOCK_N
    dense = 0 if problem.row_mask else scores * dense_bytes(problem)  # of a mask that streams with the keys
    if problem.direction == "forward":
        parts = own if parts is None else parts
        if parts:
            return float16_parts_memory(problem, tile, parts) + max(1, tile.num_stages) * dense
        stays = tile.BLOCK_M * block_size(problem.D) if holds_operands(target) else 0
        return stays * size + max(1, tile.num_stages) * (tile.BLOCK_N * width * size + dense)
    if problem.direction == "weights":
        sides = (tile.BLOCK_M + tile.BLOCK_N) * block_size(problem.D)
        words = scores * RANDOM_BYTES if "dropout" in problem.features else 0
        return max(1, tile.num_stages) * (sides * size + dense) + words
    streams = max(1, tile.num_stages) * (tile.BLOCK_M * width * size + dense)
    if is_split(problem, tile):
        one = tile.BLOCK_N * block_size(problem.D) * size + streams
        return max(one, tile.BLOCK_N * width * size + streams // 2) + scores * size // 2
    turned = 0 if holds_operands(target) else tile.BLOCK_M * block_size(problem.D) * size  # queries, transposed
    return (tile.BLOCK_N * width + scores) * size + streams + turned


def parts_memory(problem: AttentionProblem, tile: Tile, target: Target) -> int:
    """Bytes of shared memory of a tile of scores whose four blocks stream as float16 parts. What has no descriptors
    holds one of the stages in registers."""
    scores = tile.BLOCK_M * tile.BLOCK_N
    width = block_size(problem.D) + block_size(problem.Dv)
    parts = (tile.BLOCK_M + tile.BLOCK_N) * width * float16_parts_of(problem) * torch.float16.itemsize
    dense = 0 if problem.row_mask else scores * dense_bytes(problem)
    random = scores * RANDOM_BYTES if "dropout" in problem.features else 0
    stages = tile.num_stages if target.has_tma else max(1, tile.num_stages - 1)
    return stages * (parts + dense) + scores * torch.float32.itemsize + random + BARRIER_BYTES


def float16_parts_memory(problem: AttentionProblem, tile: Tile, parts: int) -> int:
    """Bytes of shared memory of a forward with float16 parts.

    Queries take one tile, or three for two parts. To these come the parts of keys or values, and what streams in
    float32, of which one stage is in registers.
    """
    D, Dv = block_size(problem.D), block_size(problem.Dv)
    queries = tile.BLOCK_M * D * (1 if parts == 1 else 3)
    streams = max(1, tile.num_stages - 1) * tile.BLOCK_N * (D + Dv) * torch.float32.itemsize
    return (queries + parts * tile.BLOCK_N * max(D, Dv)) * torch.float16.itemsize + streams


def dense_bytes(problem: AttentionProblem) -> int:
    """Bytes of dense masks per score."""
    bias = problem.bias_dtype.itemsize if problem.bias_dtype is not None else 0
    return bias + ("allowed" in problem.features)


def holds_operands(target: Target) -> bool:
    """Whether tensor cores read both operands from shared memory, as Hopper's do. Older ones need one in registers."""
    return target.backend == "cuda" and target.arch >= HOPPER
