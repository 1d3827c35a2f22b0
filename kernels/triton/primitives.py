"""What every kernel of the family shares on the device: the tile scheduler, loads, the online softmax, dropout."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)
NUMBER_BITS = tl.constexpr(16)  # of the random number of a pair of query and key
WORD_BITS = tl.constexpr(32)
# Below this the exponential form of tanh cancels, and its series to the ninth order is exact in float32.
SMALL_TANH = tl.constexpr(0.25)


class SeqlenInfo(NamedTuple):
    """The lengths of one entry and head: where rows begin in memory, how many there are, the diagonal's shift."""

    batch: tl.tensor
    head: tl.tensor  # a query head; a column of them where a tile packs the heads of a group
    kv_head: tl.tensor
    q_first: tl.tensor
    q_length: tl.tensor
    k_first: tl.tensor
    k_length: tl.tensor
    shift: tl.tensor


class Operands(NamedTuple):
    """What the loops of a kernel read, as pointers or tensor descriptors, and how the tensors lie in memory."""

    k: tl.tensor
    v: tl.tensor
    bias: tl.tensor
    allowed: tl.tensor
    strides: tl.tuple  # this and the next three as in kernel_arguments.py
    sizes: tl.tuple
    mask: tl.tuple
    dropout: tl.tuple
    q: tl.tensor | None = None  # from here on only in a backward or for weights
    grad_out: tl.tensor | None = None
    lse: tl.tensor | None = None
    delta: tl.tensor | None = None  # None: of a tile with all keys, out of its weights and dP
    grad_lse: tl.tensor | None = None  # where delta is None and a gradient arrives there
    units: tl.tuple | None = None  # RowUnits of a backward (row_parts.py)


class RowRange(NamedTuple):
    """The rows of one head from `start` on, which end before row `limit`."""

    batch: tl.tensor
    head: tl.tensor
    start: tl.tensor
    limit: tl.tensor


class QueryTile(NamedTuple):
    """A block of queries: its tile, its first row, and all of its rows."""

    tile: tl.tensor  # [BLOCK_M, BLOCK_D]
    row: tl.tensor
    rows: tl.tensor  # [BLOCK_M, 1]


class Softmax(NamedTuple):
    """Online-softmax state (Milakov and Gimelshein, 2018)."""

    acc: tl.tensor  # [BLOCK_M, BLOCK_DV]
    row_sum: tl.tensor  # [BLOCK_M]
    row_max: tl.tensor  # [BLOCK_M], in the units of the scores as they come from the product


@triton.jit
def locate(blocks, heads, section, REVERSED: tl.constexpr):
    """(block, head) of this program.

    Heads come in sections whose keys and values fit the L2 cache together. In a section the same block of all heads
    runs side by side. With REVERSED (causal) the longest blocks come first.
    """
    program = tl.program_id(0)
    first = (program // (section * blocks)) * section
    inside = program - first * blocks
    width = tl.minimum(section, heads - first)
    block = inside // width
    if REVERSED:
        block = blocks - 1 - block
    return block, first + inside % width


@triton.jit
def row_pointers(source, strides, at, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """[BLOCK, BLOCK_SIZE] pointers to the rows of the RowRange `at`.

    Triton is told where strides are multiples of 16 bytes. By itself it sees multiples of 16 numbers alone, and would
    move rows of 72 numbers one by one. It is told of products: a sum with a start of 0 would be folded, and forgotten.
    """
    batch, head = tl.cast(at.batch, tl.int64) * strides.batch, tl.cast(at.head, tl.int64) * strides.head
    start, rows = tl.cast(at.start, tl.int64) * strides.row, tl.arange(0, BLOCK)[:, None] * strides.row
    if strides.whole is not None:
        UNIT: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        batch, head = tl.multiple_of(batch, UNIT), tl.multiple_of(head, UNIT)
        start, rows = tl.multiple_of(start, UNIT), tl.multiple_of(rows, [UNIT, UNIT])
    return source + batch + head + start + rows + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def load_rows(source, strides, at, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              TMA: tl.constexpr, CLIP: tl.constexpr):  # fmt: skip
    """[BLOCK, BLOCK_SIZE]: the rows of the RowRange `at`, with zeros beyond SIZE columns; with CLIP, beyond its limit.

    TMA: `source` is a tensor descriptor. TMA fills with zeros behind the tensor's end by itself.
    """
    rows = tl.arange(0, BLOCK)[:, None]
    if TMA:
        tile = source.load([at.batch, at.head, at.start, 0]).reshape(BLOCK, BLOCK_SIZE)
        if CLIP:
            tile = tl.where(at.start + rows < at.limit, tile, 0.0)
    else:
        columns = tl.arange(0, BLOCK_SIZE)[None, :]
        pointers = row_pointers(source, strides, at, BLOCK, BLOCK_SIZE)
        if CLIP:
            tile = tl.load(pointers, mask=(at.start + rows < at.limit) & (columns < SIZE), other=0.0)
        elif SIZE == BLOCK_SIZE:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=columns < SIZE, other=0.0)
    return tile


@triton.jit
def load_keys(source, strides, mask, at, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              TMA: tl.constexpr, CLIP: tl.constexpr):  # fmt: skip
    """load_rows of keys or values, which may lie in pages that the block table names."""
    if mask.pages is None:
        tile = load_rows(source, strides, at, SIZE, BLOCK, BLOCK_SIZE, TMA, CLIP)
    else:
        positions = at.start + tl.arange(0, BLOCK)
        inside = positions < at.limit
        table = mask.pages.pointer + at.batch * mask.pages.batch
        page = tl.load(table + positions // mask.pages.size, mask=inside, other=0).to(tl.int64)
        offsets = page * strides.batch + positions % mask.pages.size * strides.row
        columns = tl.arange(0, BLOCK_SIZE)[None, :]
        pointers = source + tl.cast(at.head, tl.int64) * strides.head + offsets[:, None] + columns
        tile = tl.load(pointers, mask=inside[:, None] & (columns < SIZE), other=0.0)
    return tile


@triton.jit
def store_rows(target, strides, at, tile, SIZE: tl.constexpr):
    """Write the rows of `tile` [BLOCK, BLOCK_SIZE] to the RowRange `at`, below its limit and column SIZE."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    columns = tl.arange(0, tile.shape[1])[None, :]
    pointers = row_pointers(target, strides, at, tile.shape[0], tile.shape[1])
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(at.start + rows < at.limit) & (columns < SIZE))


@triton.jit
def clear_behind(target, strides, head, first, limit, blocks, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 SIZE: tl.constexpr):  # fmt: skip
    """Write 0 to every blocks-th block of packed rows from `first` to `limit`.

    These rows lie behind the last sequence, and `blocks` programs share them.
    """
    for start in tl.range(first, limit, blocks * BLOCK):
        store_rows(target, strides, RowRange(0, head, start, limit), tl.zeros([BLOCK, BLOCK_SIZE], tl.float32), SIZE)


@triton.jit
def init_softmax(sinks, head, unit, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, P_EXPONENT: tl.constexpr):
    """The Softmax before the first key. A sink is a key without a value.

    Scores are `unit` times what the state holds; probabilities and their sums are 2^-P_EXPONENT times what it holds.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    if sinks is not None:
        row_max = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) / unit
        row_sum = tl.where(row_max == float("-inf"), 0.0, 2.0**P_EXPONENT)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    return Softmax(acc, row_sum, row_max)


@triton.jit
def online_softmax_step(state, s, unit, MASKED: tl.constexpr, LARGE: tl.constexpr, P_EXPONENT: tl.constexpr):
    """(2^P_EXPONENT times the probabilities, state rescaled to them) of a tile [BLOCK_M, BLOCK_N] of scores s * unit.

    MASKED: some scores may be -inf. A row that has seen no other score yet subtracts nothing.
    LARGE: some scores may be so large (a mask of the lowest finite number) that they must not be multiplied before the
    maximum is subtracted.
    """
    row_max = tl.maximum(state.row_max, tl.max(s, 1))
    base = row_max
    if MASKED:
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
    factor = unit * LOG2E
    alpha = tl.math.exp2((state.row_max - base) * factor)
    if LARGE:
        p = tl.math.exp2((s - base[:, None]) * factor + P_EXPONENT)
    else:
        p = tl.math.exp2(s * factor - (base * factor - P_EXPONENT)[:, None])
    row_sum = state.row_sum * alpha + tl.sum(p, 1)
    return p, Softmax(state.acc * alpha[:, None], row_sum, row_max)


@triton.jit
def finish_softmax(state, unit, P_EXPONENT: tl.constexpr):
    """(acc [BLOCK_M, BLOCK_DV] normalised, lse [BLOCK_M]); 0 and -inf for rows that saw no key."""
    dead = state.row_sum == 0.0
    total = tl.where(dead, 1.0, state.row_sum)
    lse = tl.where(dead, float("-inf"), state.row_max * unit + (tl.math.log2(total) - P_EXPONENT) * LN2)
    return state.acc / total[:, None], lse


@triton.jit
def probabilities(s, unit, lse, LARGE: tl.constexpr):
    """exp(s * unit - lse). lse is [.., 1] or [1, ..], and +inf for rows that saw no key."""
    if LARGE:
        p = tl.math.exp2((s - lse) * LOG2E)
    else:
        p = tl.math.exp2(s * (unit * LOG2E) - lse * LOG2E)
    return p


@triton.jit
def load_lse(pointer, offsets, inside):
    """The log-sum-exp of rows. It is +inf where there is none, so that the row's probabilities are 0."""
    return dead_as_inf(tl.load(pointer + offsets, mask=inside, other=float("inf")))


@triton.jit
def dead_as_inf(lse):
    """A log-sum-exp with +inf for rows that saw no key."""
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def tanh(x):
    size = tl.abs(x)
    e = tl.math.exp2(-2.0 * LOG2E * size)
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    series = 1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835))))
    return tl.where(size < SMALL_TANH, x * series, tl.where(x < 0, -large, large))


@triton.jit
def stream_of(dropout, batch, head, H):
    """The number of a head's stream of random numbers: of a part of a call among all heads of the call."""
    heads, first = H, 0
    if dropout.whole != 1:
        part = tl.load(dropout.rng + 2)
        heads, first = (part >> WORD_BITS).to(tl.int32), part.to(tl.int32)
    return batch * heads + first + head


@triton.jit
def dropout_keep(dropout, stream, rows, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] bool of queries rows [BLOCK_M, 1] and keys from `column` on: True where a pair is kept.

    It is Philox4x32-7 (Salmon et al., 2011) with the map of sdpa/philox.py, for which `column` is a multiple of 16.
    Rows may be any, so each call serves keys j, j + 1, j + 8 and j + 9 of one row. `stream` is that of the head, or a
    column of them where a tile packs several heads.
    """
    tl.static_assert(BLOCK_N % 16 == 0)
    key = tl.load(dropout.rng)
    offset = tl.load(dropout.rng + 1).to(tl.uint32)
    first_row, first_key = 0, 0
    if dropout.whole != 1:
        part = tl.load(dropout.rng + 3)
        first_row, first_key = (part >> WORD_BITS).to(tl.int32), part.to(tl.int32)
    groups = (first_key + column) // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    rows = (first_row + rows).to(tl.uint32)
    row_groups = rows // 16 * 8 + rows % 8
    zero = rows * 0 + groups.to(tl.uint32) * 0
    counter = (zero + groups.to(tl.uint32), zero + row_groups, zero + stream.to(tl.uint32), zero + offset)
    w0, w1, w2, w3 = tl.philox_impl(*counter, key.to(tl.uint32), (key >> WORD_BITS).to(tl.uint32), PHILOX_ROUNDS)
    upper = rows // 8 % 2 == 1
    near = tl.where(upper, w2, w0).to(tl.uint32, bitcast=True)  # of keys j % 16 < 8
    far = tl.where(upper, w3, w1).to(tl.uint32, bitcast=True)
    least = tl.cast(dropout.threshold, tl.uint32) << NUMBER_BITS
    even = tl.join(near << NUMBER_BITS >= least, far << NUMBER_BITS >= least)
    kept = tl.join(even, tl.join(near >= least, far >= least))  # [BLOCK_M, BLOCK_N / 4, far, odd]
    kept = kept.reshape(BLOCK_M, BLOCK_N // 16, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return kept.reshape(BLOCK_M, BLOCK_N)
