"""Block ranges: which keys a block of queries can see at all, and the other way round.

For segments and for masks of keys a small kernel finds them once per call. Loops then skip all other blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order
from sdpa.problem import Tile

CHUNK = 1024  # positions of the other side looked at in one step: one per thread and a few more
WORDS = 4  # int32 per range: first, one past the last, whether all of it matches, and one for alignment
SCAN = Tile(0, 0, 4, 1)


class BlockRanges(NamedTuple):
    """A table of ranges and its strides. `block` is 0 where all blocks share one range."""

    pointer: Tensor  # (batch, heads, blocks, WORDS) int32
    batch: int
    head: int
    block: int


class Ids(NamedTuple):
    """The ids of one side. Without a pointer every position has id 1; a mask of keys is ids 0 and 1."""

    pointer: Tensor | None
    outer: int
    inner: int
    length: int


@triton.jit
def block_ranges_kernel(table, own, other, heads, blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
                        ORDER: tl.constexpr):  # fmt: skip
    """The range of one block of `own`. Grid: entries * blocks.

    It goes from the first to the last position of `other` whose id lies between the smallest and the largest id of the
    block. The third word tells whether the block and its range hold one id only, so that nothing in it is masked.
    """
    begin_in_order(ORDER)
    program = tl.program_id(0)
    entry, block = program // blocks, program % blocks
    batch, head = entry // heads, entry % heads
    low, high = 1, 1
    if own.pointer is not None:
        mine = block * BLOCK + tl.arange(0, BLOCK)
        own_ids = tl.load(own.pointer + batch * own.outer + head * own.inner + mine, mask=mine < own.length, other=0)
        low = tl.min(tl.where(mine < own.length, own_ids.to(tl.int32), 2147483647), 0)
        high = tl.max(tl.where(mine < own.length, own_ids.to(tl.int32), -2147483648), 0)
    first, last, count = other.length, 0, 0
    for start in range(0, other.length, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < other.length
        match = inside
        if other.pointer is not None:
            ids = tl.load(other.pointer + batch * other.outer + head * other.inner + places, mask=inside, other=0)
            match = inside & (ids.to(tl.int32) >= low) & (ids.to(tl.int32) <= high)
        elif own.pointer is not None:
            match = inside & (low <= 1) & (high >= 1)
        first = tl.minimum(first, tl.min(tl.where(match, places, other.length), 0))
        last = tl.maximum(last, tl.max(tl.where(match, places + 1, 0), 0))
        count += tl.sum(match.to(tl.int32), 0)
    whole = (low == high) & (count == last - first)
    target = table + program * 4
    tl.store(target, tl.minimum(first, last))
    tl.store(target + 1, last)
    tl.store(target + 2, whole.to(tl.int32))
    end_in_order(ORDER)


def range_tables(launches: list[Launch]) -> tuple[Tensor, ...]:
    """The tables that these launches fill."""
    return tuple(launch.args[0] for launch in launches if launch.kernel is block_ranges_kernel)


def find_block_ranges(own: Ids, other: Ids, entries: tuple[int, int], block: int, device: torch.device):
    """(BlockRanges, Launch) for blocks of `block` positions of `own`. `entries` are the ids' batch and head sizes."""
    batch, heads = entries
    blocks = 1 if own.pointer is None else -(-own.length // block)
    table = torch.empty((batch, heads, blocks, WORDS), dtype=torch.int32, device=device)
    each = 0 if own.pointer is None else WORDS
    block_ranges = BlockRanges(table, table.stride(0) if batch > 1 else 0, table.stride(1) if heads > 1 else 0, each)
    return block_ranges, Launch(
        block_ranges_kernel,
        (batch * heads * blocks,),
        (table, own, other, heads, blocks, block, CHUNK, ALONE.value),
        SCAN,
    )
