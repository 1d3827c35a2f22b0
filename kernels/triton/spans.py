"""Which part of the other side a block can meet at all: found once per call for segments and for masks of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.launch import Launch
from sdpa.problem import Tile

CHUNK = 1024  # positions of the other side looked at in one step: one per thread and a few more
WORDS = 4  # int32 per span: first, one past the last, whole, and one to keep them aligned
SCAN = Tile(0, 0, 4, 1)


class Spans(NamedTuple):
    """A table of spans and its strides; `block` is 0 where all blocks share one."""

    pointer: Tensor
    batch: int
    head: int
    block: int


class Ids(NamedTuple):
    """Ids of one side, or None: every position has id 1 (a mask of keys is ids 0 and 1)."""

    pointer: Tensor | None
    outer: int
    inner: int
    length: int


@triton.jit
def spans_kernel(table, own, other, heads, blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """For one block of `own`: the hull of positions of `other` whose id lies in the range of the block's ids, and
    whether block and hull hold one id only. Grid: entries * blocks."""
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


def tables_of(launches: list[Launch]) -> tuple[Tensor, ...]:
    """The memory of the spans that launches find."""
    return tuple(launch.args[0] for launch in launches if launch.kernel is spans_kernel)


def find_spans(own: Ids, other: Ids, entries: tuple[int, int], block: int, device: torch.device):
    """(Spans, Launch) of blocks of `block` positions of `own`; `entries` are the batch and head sizes of the ids."""
    batch, heads = entries
    blocks = 1 if own.pointer is None else -(-own.length // block)
    table = torch.empty((batch, heads, blocks, WORDS), dtype=torch.int32, device=device)
    each = 0 if own.pointer is None else WORDS
    spans = Spans(table, table.stride(0) if batch > 1 else 0, table.stride(1) if heads > 1 else 0, each)
    return spans, Launch(
        spans_kernel, (batch * heads * blocks,), (table, own, other, heads, blocks, block, CHUNK), SCAN
    )
