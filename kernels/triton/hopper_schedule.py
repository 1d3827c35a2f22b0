"""On Hopper: which block of queries a program has, in which order, and which keys it visits."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Schedule(NamedTuple):
    """The grid: `blocks` of queries for each of `entries` = B * H, of which `section` lie side by side. Entries are
    counted by `inner` = H heads of a batch after another or, where `by_head`, by `inner` = B batches of a head.

    A persistent program takes `shares` of each entry: a block of queries each; where causal, the n-th block from the
    end and the n-th from the front, so that all shares take equally long."""

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
    """Where a program has one block: equal blocks of `section` entries lie side by side."""
    first = (program // (schedule.section * schedule.blocks)) * schedule.section
    inside = program - first * schedule.blocks
    width = gl.minimum(schedule.section, schedule.entries - first)
    return first + inside % width, inside // width


@gluon.jit
def locate(program, schedule, BUILD: gl.constexpr):
    """(batch, head, first row) where a program has one block: the longest first."""
    entry, block = entry_and_block(program, schedule)
    if BUILD.CAUSAL:
        block = schedule.blocks - 1 - block
    batch, head = batch_and_head(entry // schedule.inner, entry % schedule.inner, schedule)
    return batch, head, block * BUILD.BLOCK_M


@gluon.jit
def find_share(number, schedule):
    """(batch, head, n) of the n-th share of an entry, by its number among all. A section here is one entry or `inner`
    of them."""
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
def share_size(n, schedule, BUILD: gl.constexpr):
    """How many blocks the n-th share of an entry has: of an odd number of blocks the middle one is alone."""
    size = 1
    if BUILD.CAUSAL:
        if 2 * n + 1 < schedule.blocks:
            size = 2
    return size


@gluon.jit
def first_row(n, part, schedule, BUILD: gl.constexpr):
    """Where a block of the n-th share of an entry begins, the longer one first."""
    block = n
    if BUILD.CAUSAL:
        block += (1 - part) * (schedule.blocks - 1 - 2 * n)
    return block * BUILD.BLOCK_M


@gluon.jit
def key_blocks(row, rows, M, N, BUILD: gl.constexpr):
    """How many blocks of keys `rows` rows from `row` on visit: at least one, so that dead rows end like all others."""
    end = N
    if BUILD.CAUSAL:
        end = gl.minimum(N, row + rows + diagonal(M, N, BUILD))
    return gl.maximum(gl.cdiv(end, BUILD.BLOCK_N), 1)


@gluon.jit
def full_blocks(row, M, N, BUILD: gl.constexpr):
    """How many leading blocks of keys are visible to row `row` and all below it."""
    end = N
    if BUILD.CAUSAL:
        end = gl.maximum(gl.minimum(N, row + 1 + diagonal(M, N, BUILD)), 0)
    return end // BUILD.BLOCK_N


@gluon.jit
def diagonal(M, N, BUILD: gl.constexpr):
    shift = 0
    if BUILD.BOTTOM_RIGHT:
        shift = N - M
    return shift
