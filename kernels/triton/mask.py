"""The mask as a policy on the device: which blocks, which of them masked, apply. Kernels hold no mask arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sdpa.kernels.triton.primitives import Place, tanh


class Span(NamedTuple):
    """Blocks to visit: [begin, end), of which [full_begin, full_end) need no mask; counted from the entry's first."""

    begin: tl.tensor
    full_begin: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


class Spot(NamedTuple):
    """One tile of scores: its first row and column, and all of them, as [BLOCK_M, 1] and [1, BLOCK_N] or transposed."""

    row: tl.tensor
    column: tl.tensor
    rows: tl.tensor
    columns: tl.tensor


@triton.jit
def place_of(mask, sizes, batch, head, kv_head):
    """The lengths and offsets of entry `batch`."""
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
    return Place(batch, head, kv_head, q_first, q_length, k_first, k_length, shift)


@triton.jit
def memory_batch(mask, batch):
    """The index along the first dimension of q, k, v: packed sequences share one."""
    memory = batch
    if mask.cu_q is not None:
        memory = 0
    return memory


@triton.jit
def aligned(begin, full_begin, full_end, end, BLOCK: tl.constexpr, BUILD: tl.constexpr):
    """A Span on multiples of BLOCK; what is no whole unmasked block goes to its masked ends."""
    first = tl.maximum(begin, 0)
    begin = first // BLOCK * BLOCK
    end = tl.where(end <= first, begin, end)
    full_begin = (tl.maximum(full_begin, begin) + BLOCK - 1) // BLOCK * BLOCK
    full_end = tl.minimum(full_end, end) // BLOCK * BLOCK
    none = full_end <= full_begin
    if BUILD.TRAILING:
        rest = begin
    else:
        rest = end
    return Span(begin, tl.where(none, rest, full_begin), tl.where(none, rest, full_end), end)


@triton.jit
def key_span(mask, place, row, count, BUILD: tl.constexpr):
    """Keys that queries row.. < row + count of an entry can see."""
    last = tl.minimum(row + count, place.q_length) - 1
    begin, end = 0, place.k_length
    full_begin, full_end = 0, place.k_length
    if mask.left is not None:
        begin = row + place.shift - mask.left
        full_begin = last + place.shift - mask.left
    if mask.right is not None:
        end = tl.minimum(end, last + place.shift + mask.right + 1)
        full_end = tl.minimum(full_end, row + place.shift + mask.right + 1)
    if mask.prefix is not None:
        prefix = tl.minimum(tl.load(mask.prefix + place.batch), place.k_length)
        end = tl.maximum(end, prefix)
        if mask.left is not None:  # the prefix and the window may lie apart: mask all between them
            begin = tl.where(prefix > 0, 0, begin)
            full_end = tl.where(prefix > 0, 0, full_end)
        else:
            full_end = tl.maximum(full_end, prefix)
    if mask.key_spans is not None:
        first, last_one, whole = load_span(mask.key_spans, place, row // count)
        begin, end = tl.maximum(begin, first), tl.minimum(end, last_one)
        full_begin, full_end = tl.maximum(full_begin, first), tl.where(whole, tl.minimum(full_end, last_one), 0)
    if mask.dense is not None:
        full_end = 0
    if mask.q_lengths is not None:
        full_end = tl.where(row + count > place.q_length, 0, full_end)
        end = tl.where(row >= place.q_length, 0, end)
    return aligned(begin, full_begin, full_end, end, BUILD.BLOCK_N, BUILD)


@triton.jit
def load_span(spans, place, block):
    """(first, one past the last, whether all between match) of what block `block` meets on the other side."""
    span = spans.pointer + place.batch * spans.batch + place.head * spans.head + block * spans.block
    return tl.load(span), tl.load(span + 1), tl.load(span + 2) != 0


@triton.jit
def query_span(mask, place, column, BUILD: tl.constexpr):
    """Queries that can see keys column.. < column + BLOCK_N of an entry: key_span seen from the other side."""
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    last = tl.minimum(column + BLOCK_N, place.k_length) - 1
    begin, end = 0, place.q_length
    full_begin, full_end = 0, place.q_length
    if mask.right is not None:
        begin = column - place.shift - mask.right
        full_begin = last - place.shift - mask.right
    if mask.left is not None:
        end = tl.minimum(end, last - place.shift + mask.left + 1)
        full_end = tl.minimum(full_end, column - place.shift + mask.left + 1)
    if mask.prefix is not None:
        prefix = tl.load(mask.prefix + place.batch)
        begin = tl.where(column < prefix, 0, begin)
        end = tl.where(column < prefix, place.q_length, end)
        full_begin = tl.where(last < prefix, 0, full_begin)
        full_end = tl.where(last < prefix, place.q_length, full_end)
    if mask.query_spans is not None:
        first, last_one, whole = load_span(mask.query_spans, place, column // BLOCK_N)
        begin, end = tl.maximum(begin, first), tl.minimum(end, last_one)
        full_begin, full_end = tl.maximum(full_begin, first), tl.where(whole, tl.minimum(full_end, last_one), 0)
    if mask.dense is not None:
        full_end = 0
    end = tl.where(column >= place.k_length, 0, end)
    return aligned(begin, full_begin, full_end, end, BUILD.BLOCK_M, BUILD)


@triton.jit
def visible(allowed, mask, place, spot, BUILD: tl.constexpr):
    """Which pairs of a tile see each other."""
    rows, columns = spot.rows, spot.columns
    seen = (columns < place.k_length) & (rows < place.q_length)
    if mask.left is not None or mask.right is not None:
        distance = columns - rows - place.shift
        if mask.left is None:
            band = distance <= mask.right
        elif mask.right is None:
            band = distance >= -mask.left
        else:
            band = (distance >= -mask.left) & (distance <= mask.right)
        if mask.prefix is not None:
            band = band | (columns < tl.load(mask.prefix + place.batch))
        seen = seen & band
    if mask.q_segments is not None:
        q_ids = load_ids(mask.q_segments, place.batch, rows, place.q_length)
        seen = seen & (q_ids == load_ids(mask.k_segments, place.batch, columns, place.k_length))
    if mask.allowed is not None:
        tile = load_dense(allowed, mask.allowed, place, spot, BUILD.ALLOWED.ROWS, BUILD.ALLOWED.COLUMNS,
                          BUILD.ALLOWED.DESCRIBED, BUILD)  # fmt: skip
        seen = seen & (tile != 0)
    return seen


@triton.jit
def load_ids(segments, batch, positions, length):
    return tl.load(segments.pointer + batch * segments.batch + positions, mask=positions < length, other=0)


@triton.jit
def load_dense(source, strides, place, spot, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr,
               BUILD: tl.constexpr):  # fmt: skip
    """The tile of a dense mask at `spot`, broadcast along what it has no ROWS or COLUMNS for.

    DESCRIBED: `source` is a tensor descriptor, and the first two strides are 0 or 1.
    """
    if DESCRIBED:
        place_in_batch, place_in_heads = place.batch * strides.batch, place.head * strides.head
        tile = source.load([place_in_batch, place_in_heads, spot.row, spot.column])
        tile = tile.reshape(BUILD.BLOCK_M, BUILD.BLOCK_N)
        if spot.rows.shape[0] == 1:
            tile = tl.trans(tile)
    else:
        pointers = (
            source + tl.cast(place.batch, tl.int64) * strides.batch + tl.cast(place.head, tl.int64) * strides.head
        )
        inside = (spot.rows < place.q_length) & (spot.columns < place.k_length)
        if ROWS:
            pointers = pointers + spot.rows.to(tl.int64) * strides.row
        else:
            inside = spot.columns < place.k_length
        if COLUMNS:
            pointers = pointers + spot.columns.to(tl.int64) * strides.column
        else:
            inside = spot.rows < place.q_length
        if ROWS or COLUMNS:
            tile = tl.load(pointers, mask=inside, other=0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def capped(s, mask, scale):
    """scale * s, through softcap where there is one."""
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
def modified(s, bias, mask, place, spot, scale, BUILD: tl.constexpr):
    """softcap(scale * s) + bias - ALiBi's penalty."""
    s = capped(s, mask, scale)
    if mask.alibi is not None:
        slope = tl.load(mask.alibi.pointer + place.batch * mask.alibi.batch + place.head)
        s = s - slope * tl.abs(spot.rows + place.shift - spot.columns).to(tl.float32)
    if mask.bias is not None:
        tile = load_dense(
            bias, mask.bias, place, spot, BUILD.BIAS.ROWS, BUILD.BIAS.COLUMNS, BUILD.BIAS.DESCRIBED, BUILD
        )
        s = s + tile.to(tl.float32)
    return s
