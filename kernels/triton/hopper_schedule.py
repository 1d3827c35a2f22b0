"""The tile scheduler of Hopper's kernels: which blocks of queries a program has, in which order, with which keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class TileSchedule(NamedTuple):
    """The grid: `blocks` of queries for each of `entries` = B * H, of which `section` lie side by side.

    Entries count through the `inner` = H heads of a batch entry or, where `by_head`, the `inner` = B entries of a head.
    A persistent program takes `shares` of each entry. A share is a block of queries. Where causal, it is the n-th block
    from the end and the n-th from the front, so that all shares take equally long.
    """

    blocks: Any
    shares: Any
    all_shares: Any
    entries: Any
    section: Any
    inner: Any
    by_head: Any


@gluon.jit
def batch_and_head(outer, inner, schedule):
    batch, head = outer, inner
    if schedule.by_head:
        batch, head = inner, outer
    return batch, head


@gluon.jit
def entry_and_block(program, schedule):
    """(entry, block) where a program has one block. The same block of `section` entries lies side by side."""
    first = (program // (schedule.section * schedule.blocks)) * schedule.section
    inside = program - first * schedule.blocks
    width = gl.minimum(schedule.section, schedule.entries - first)
    return first + inside % width, inside // width


@gluon.jit
def locate(program, schedule, CONFIG: gl.constexpr):
    """(batch, head, first row) where a program has one block. The longest come first."""
    entry, block = entry_and_block(program, schedule)
    if CONFIG.CAUSAL:
        block = schedule.blocks - 1 - block
    batch, head = batch_and_head(entry // schedule.inner, entry % schedule.inner, schedule)
    return batch, head, block * CONFIG.BLOCK_M


@gluon.jit
def find_share(number, schedule):
    """(batch, head, n) of a share by its number among all: the n-th of its entry. A section is one entry or `inner`."""
    low, high = schedule.shares, schedule.inner
    if schedule.section > 1:
        low, high = high, low
    rest = number // low
    n, inner = number - rest * low, rest % high
    if schedule.section > 1:
        n, inner = inner, n
    batch, head = batch_and_head(rest // high, inner, schedule)
    return batch, head, n


@gluon.jit
def share_size(n, schedule, CONFIG: gl.constexpr):
    """How many blocks the n-th share of an entry has. Of an odd number of blocks the middle one is alone."""
    size = 1
    if CONFIG.CAUSAL:
        if 2 * n + 1 < schedule.blocks:
            size = 2
    return size


@gluon.jit
def first_row(n, part, schedule, CONFIG: gl.constexpr):
    """The first row of a block of the n-th share of an entry, the longer block first."""
    block = n
    if CONFIG.CAUSAL:
        block += (1 - part) * (schedule.blocks - 1 - 2 * n)
    return block * CONFIG.BLOCK_M


@gluon.jit
def key_blocks(row, rows, M, N, CONFIG: gl.constexpr):
    """How many blocks of keys the `rows` rows from `row` on visit. It is at least one, also where they see no key."""
    end = N
    if CONFIG.CAUSAL:
        end = gl.minimum(N, row + rows + diagonal(M, N, CONFIG))
    return gl.maximum(gl.cdiv(end, CONFIG.BLOCK_N), 1)


@gluon.jit
def full_blocks(row, M, N, CONFIG: gl.constexpr):
    """How many leading blocks of keys are visible to row `row` and to all rows below it."""
    end = N
    if CONFIG.CAUSAL:
        end = gl.maximum(gl.minimum(N, row + 1 + diagonal(M, N, CONFIG)), 0)
    return end // CONFIG.BLOCK_N


@gluon.jit
def diagonal(M, N, CONFIG: gl.constexpr):
    shift = 0
    if CONFIG.BOTTOM_RIGHT:
        shift = N - M
    return shift
