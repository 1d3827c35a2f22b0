"""The mask as a policy on the device: which blocks are visited, which of them are masked, and how a tile is masked.

Kernels hold no mask arithmetic of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sdpa.kernels.triton.primitives import SeqlenInfo, tanh


class VisitedRange(NamedTuple):
    """Rows to visit: [begin, end), of which [full_begin, full_end) need no mask. They count from the entry's first."""

    begin: tl.tensor
    full_begin: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


class TileCoords(NamedTuple):
    """The coordinates of one tile of scores: its first row and column, and all of them.

    `rows` is [BLOCK_M, 1] and `columns` is [1, BLOCK_N], or both are transposed.
    """

    row: tl.tensor
    column: tl.tensor
    rows: tl.tensor
    columns: tl.tensor


@triton.jit
def seqlen_info(mask, sizes, batch, head, kv_head):
    """The SeqlenInfo of entry `batch`."""
    q_first, k_first = 0, 0
    q_length, k_length = sizes.M, sizes.N
    if mask.cu_q is not None:
        q_first = tl.load(mask.cu_q + batch)
        q_length = tl.load(mask.cu_q + batch + 1) - q_first
        k_first = tl.load(mask.cu_k + batch)
        k_length = tl.load(mask.cu_k + batch + 1) - k_first
    if mask.q_lengths is not None:
        q_length = tl.minimum(q_length, tl.load(mask.q_lengths + batch))
    if mask.k_lengths is not None:
        k_length = tl.minimum(k_length, tl.load(mask.k_lengths + batch))
    shift = 0
    if mask.bottom_right is not None:
        shift = k_length - q_length
    return SeqlenInfo(batch, head, kv_head, q_first, q_length, k_first, k_length, shift)


@triton.jit
def of_head(seqlen, head):
    """The same of another head of its group."""
    return SeqlenInfo(
        seqlen.batch, head, seqlen.kv_head, seqlen.q_first, seqlen.q_length, seqlen.k_first, seqlen.k_length,
        seqlen.shift,
    )  # fmt: skip


@triton.jit
def memory_batch(mask, batch):
    """The index along the first dimension of q, k and v. Packed sequences share one."""
    memory = batch
    if mask.cu_q is not None:
        memory = 0
    return memory


@triton.jit
def aligned(begin, full_begin, full_end, end, BLOCK: tl.constexpr, CONFIG: tl.constexpr):
    """A VisitedRange on multiples of BLOCK. What is no whole unmasked block goes to its masked ends."""
    first = tl.maximum(begin, 0)
    begin = first // BLOCK * BLOCK
    end = tl.where(end <= first, begin, end)
    full_begin = (tl.maximum(full_begin, begin) + BLOCK - 1) // BLOCK * BLOCK
    full_end = tl.minimum(full_end, end) // BLOCK * BLOCK
    none = full_end <= full_begin
    if CONFIG.TRAILING:
        rest = begin
    else:
        rest = end
    return VisitedRange(begin, tl.where(none, rest, full_begin), tl.where(none, rest, full_end), end)


@triton.jit
def visited_keys(mask, seqlen, row, count, CONFIG: tl.constexpr):
    """The keys that an entry's queries row .. row + count can see, as a VisitedRange."""
    last = tl.minimum(row + count, seqlen.q_length) - 1
    begin, end = 0, seqlen.k_length
    full_begin, full_end = 0, seqlen.k_length
    if mask.left is not None:
        begin = row + seqlen.shift - mask.left
        full_begin = last + seqlen.shift - mask.left
    if mask.right is not None:
        end = tl.minimum(end, last + seqlen.shift + mask.right + 1)
        full_end = tl.minimum(full_end, row + seqlen.shift + mask.right + 1)
    if mask.prefix is not None:
        prefix = tl.minimum(tl.load(mask.prefix + seqlen.batch), seqlen.k_length)
        end = tl.maximum(end, prefix)
        if mask.left is not None:  # the prefix and the window may lie apart: mask all between them
            begin = tl.where(prefix > 0, 0, begin)
            full_end = tl.where(prefix > 0, 0, full_end)
        else:
            full_end = tl.maximum(full_end, prefix)
    if mask.key_ranges is not None:
        first, last_one, whole = load_block_range(mask.key_ranges, seqlen, row // count)
        begin, end = tl.maximum(begin, first), tl.minimum(end, last_one)
        full_begin, full_end = tl.maximum(full_begin, first), tl.where(whole, tl.minimum(full_end, last_one), 0)
    if mask.dense is not None:
        full_end = 0
    if mask.q_lengths is not None:
        full_end = tl.where(row + count > seqlen.q_length, 0, full_end)
        end = tl.where(row >= seqlen.q_length, 0, end)
    return aligned(begin, full_begin, full_end, end, CONFIG.BLOCK_N, CONFIG)


@triton.jit
def load_block_range(block_ranges, seqlen, block):
    """(first, one past the last, whether all of them match): the block range of block `block` (block_ranges.py)."""
    visited = (
        block_ranges.pointer
        + seqlen.batch * block_ranges.batch
        + seqlen.head * block_ranges.head
        + block * block_ranges.block
    )
    return tl.load(visited), tl.load(visited + 1), tl.load(visited + 2) != 0


@triton.jit
def visited_queries(mask, seqlen, column, CONFIG: tl.constexpr):
    """The queries that can see an entry's keys column .. column + BLOCK_N: `visited_keys` from the other side."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    last = tl.minimum(column + BLOCK_N, seqlen.k_length) - 1
    begin, end = 0, seqlen.q_length
    full_begin, full_end = 0, seqlen.q_length
    if mask.right is not None:
        begin = column - seqlen.shift - mask.right
        full_begin = last - seqlen.shift - mask.right
    if mask.left is not None:
        end = tl.minimum(end, last - seqlen.shift + mask.left + 1)
        full_end = tl.minimum(full_end, column - seqlen.shift + mask.left + 1)
    if mask.prefix is not None:
        prefix = tl.load(mask.prefix + seqlen.batch)
        begin = tl.where(column < prefix, 0, begin)
        end = tl.where(column < prefix, seqlen.q_length, end)
        full_begin = tl.where(last < prefix, 0, full_begin)
        full_end = tl.where(last < prefix, seqlen.q_length, full_end)
    if mask.query_ranges is not None:
        first, last_one, whole = load_block_range(mask.query_ranges, seqlen, column // BLOCK_N)
        begin, end = tl.maximum(begin, first), tl.minimum(end, last_one)
        full_begin, full_end = tl.maximum(full_begin, first), tl.where(whole, tl.minimum(full_end, last_one), 0)
    if mask.dense is not None:
        full_end = 0
    end = tl.where(column >= seqlen.k_length, 0, end)
    return aligned(begin, full_begin, full_end, end, CONFIG.BLOCK_M, CONFIG)


@triton.jit
def visible(allowed, mask, seqlen, coords, CONFIG: tl.constexpr):
    """Which pairs of a tile of scores see each other, as bool in the shape of the tile."""
    rows, columns = coords.rows, coords.columns
    seen = (columns < seqlen.k_length) & (rows < seqlen.q_length)
    if mask.left is not None or mask.right is not None:
        distance = columns - rows - seqlen.shift
        if mask.left is None:
            band = distance <= mask.right
        elif mask.right is None:
            band = distance >= -mask.left
        else:
            band = (distance >= -mask.left) & (distance <= mask.right)
        if mask.prefix is not None:
            band = band | (columns < tl.load(mask.prefix + seqlen.batch))
        seen = seen & band
    if mask.q_segments is not None:
        q_ids = load_ids(mask.q_segments, seqlen.batch, rows, seqlen.q_length)
        seen = seen & (q_ids == load_ids(mask.k_segments, seqlen.batch, columns, seqlen.k_length))
    if mask.allowed is not None:
        tile = load_dense(allowed, mask.allowed, seqlen, coords, CONFIG.ALLOWED.ROWS, CONFIG.ALLOWED.COLUMNS,
                          CONFIG.ALLOWED.TMA, CONFIG)  # fmt: skip
        seen = seen & (tile != 0)
    return seen


@triton.jit
def load_ids(segments, batch, positions, length):
    return tl.load(segments.pointer + batch * segments.batch + positions, mask=positions < length, other=0)


@triton.jit
def load_dense(source, strides, seqlen, coords, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
               CONFIG: tl.constexpr):  # fmt: skip
    """The tile of a dense mask at `coords`, broadcast along what it has no ROWS or COLUMNS for.

    TMA: `source` is a tensor descriptor, and the first two strides are 0 or 1.
    """
    if TMA:
        own_batch, own_head = seqlen.batch * strides.batch, seqlen.head * strides.head
        tile = source.load([own_batch, own_head, coords.row, coords.column])
        tile = tile.reshape(CONFIG.BLOCK_M, CONFIG.BLOCK_N)
        if coords.rows.shape[0] == 1:
            tile = tl.trans(tile)
    else:
        pointers = (
            source + tl.cast(seqlen.batch, tl.int64) * strides.batch + tl.cast(seqlen.head, tl.int64) * strides.head
        )
        inside = (coords.rows < seqlen.q_length) & (coords.columns < seqlen.k_length)
        if ROWS:
            pointers = pointers + coords.rows.to(tl.int64) * strides.row
        else:
            inside = coords.columns < seqlen.k_length
        if COLUMNS:
            pointers = pointers + coords.columns.to(tl.int64) * strides.column
        else:
            inside = coords.rows < seqlen.q_length
        if ROWS or COLUMNS:
            tile = tl.load(pointers, mask=inside, other=0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def capped(s, mask, scale):
    """scale * s, with softcap where there is one."""
    s = s * scale
    if mask.softcap is not None:
        s = mask.softcap * tanh(s / mask.softcap)
    return s


@triton.jit
def cap_slope(s, mask):
    """The derivative of softcap at its result `s`."""
    share = s / mask.softcap
    return 1.0 - share * share


@triton.jit
def score_mod(s, bias, mask, seqlen, coords, scale, CONFIG: tl.constexpr, held=None):
    """The modified scores: softcap(scale * s) + bias - ALiBi's penalty. `held` is the tile of the bias, where it was
    loaded before."""
    s = capped(s, mask, scale)
    if mask.alibi is not None:
        slope = tl.load(mask.alibi.pointer + seqlen.batch * mask.alibi.batch + seqlen.head)
        s = s - slope * tl.abs(coords.rows + seqlen.shift - coords.columns).to(tl.float32)
    if mask.bias is not None:
        tile = held
        if held is None:
            tile = load_dense(
                bias, mask.bias, seqlen, coords, CONFIG.BIAS.ROWS, CONFIG.BIAS.COLUMNS, CONFIG.BIAS.TMA, CONFIG
            )
        s = s + tile.to(tl.float32)
    return s
