"""The gradient of a dense bias, reduced in the kernel over whatever the bias broadcasts along.

It needs memory of the bias's own size only. A program owns a tile of the bias and goes through everything that is
summed into it: batch entries and heads, and blocks of rows or columns where the bias has one. Where that leaves too few
programs, the sum is cut into parts, which are added in order, so a call gives the same bits twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, float16_parts_of
from sdpa.kernels.triton.kernel_arguments import BackwardRows, LoopOver
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.mask import TileCoords, cap_slope, capped, load_dense, score_mod, seqlen_info, visible
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order
from sdpa.kernels.triton.primitives import Operands, RowRange, dropout_keep, load_lse, probabilities, stream_of
from sdpa.kernels.triton.row_parts import (
    Split,
    backward_args,
    load_key_rows,
    load_query_rows,
    load_upstream_rows,
    load_value_rows,
    products_of_rows,
)
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import holds_operands, parts_memory, registers_of, staged
from sdpa.problem import AttentionInputs, AttentionProblem, Tile

PROGRAMS_PER_CORE = 2
# The tile of small heads, and how small (docs/log/dropout-and-windows.md).
SMALL, SMALL_SIZE = Tile(64, 64, 4, 2), 64
# The tiles of float16 parts: with rows enough for Hopper's products, and from FEW_ROWS on with fewer. With one stage,
# pointers' loads go through registers, and thousands of bytes of a thread's are spilled.
PARTED = (SMALL, Tile(64, 64, 4, 1), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1))
FEW_ROWS = 2


class Reduction(NamedTuple):
    """Sizes of the bias in entries, heads and blocks, and of what is summed into each of its tiles."""

    batch: int  # of the bias: B or 1
    heads: int
    row_blocks: int  # of the bias: blocks of M, or 1
    column_blocks: int
    sum_batch: int  # B where the bias has one, else 1
    sum_heads: int
    sum_rows: int  # blocks of M where the bias has one row, else 1
    sum_columns: int
    parts: int

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.row_blocks * self.column_blocks


class Differentiated(NamedTuple):
    """One tile of scores, with what it was made of and what gradients are made of."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    grad_out: tl.tensor  # [BLOCK_M, BLOCK_DV]
    weights: tl.tensor  # [BLOCK_M, BLOCK_N], after dropout
    ds: tl.tensor  # [BLOCK_M, BLOCK_N]: the gradient of the scores after softcap
    slope: tl.tensor  # softcap's derivative, or 1


@triton.jit
def load_key_block(given, seqlen, column, CONFIG: tl.constexpr):
    """(keys [BLOCK_N, BLOCK_D], values [BLOCK_N, BLOCK_DV]) from `column` on."""
    CLIP: tl.constexpr = CONFIG.LENGTHS or not CONFIG.TMA
    at = RowRange(seqlen.batch, seqlen.kv_head, column, seqlen.k_length)
    keys = load_key_rows(given, at, CONFIG.BLOCK_N, CLIP, CONFIG)
    values = load_value_rows(given, at, CONFIG.BLOCK_N, CLIP, CONFIG)
    return keys, values


@triton.jit
def differentiate(given, block, held, seqlen, row, column, scale, CONFIG: tl.constexpr):
    """The Differentiated tile of scores of the Operands `given` at `row` and `column`, where `block` is the
    `load_key_block`; `held` as in `score_mod`."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    CLIP: tl.constexpr = CONFIG.LENGTHS or not CONFIG.TMA
    MASKED: tl.constexpr = CONFIG.LEADING or CONFIG.TRAILING or not CONFIG.FULL
    sizes, mask, dropout = given.sizes, given.mask, given.dropout
    batch, head = seqlen.batch, seqlen.head
    at = RowRange(batch, head, row, seqlen.q_length)
    q_tile = load_query_rows(given, at, BLOCK_M, CLIP, CONFIG)
    g_tile = load_upstream_rows(given, at, BLOCK_M, CLIP, CONFIG)
    k_tile, v_tile = block
    s = products_of_rows(q_tile, k_tile, CONFIG)
    dp = products_of_rows(g_tile, v_tile, CONFIG)
    offsets = row + tl.arange(0, BLOCK_M)
    coords = TileCoords(row, column, offsets[:, None], column + tl.arange(0, BLOCK_N)[None, :])
    origin = tl.cast(batch * sizes.H + head, tl.int64) * sizes.rows
    row_lse = load_lse(given.lse + origin, offsets, offsets < sizes.M)
    slope = 1.0
    if mask.softcap is not None:
        slope = cap_slope(capped(s, mask, scale), mask)
    if CONFIG.SCORE_MOD:
        s = score_mod(s, given.bias, mask, seqlen, coords, scale, CONFIG, held)
    p = probabilities(s, scale, row_lse[:, None], CONFIG.SCORE_MOD)
    if MASKED:
        p = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), p, 0.0)
    weights = p
    if dropout is not None:
        stream = stream_of(dropout, batch, head, sizes.H)
        keep = dropout_keep(dropout, stream, coords.rows, column, BLOCK_M, BLOCK_N)
        weights = tl.where(keep, p * dropout.inverse_keep, 0.0)
        dp = tl.where(keep, dp * dropout.inverse_keep, 0.0)
    if given.delta is not None:
        row_delta = tl.load(given.delta + origin + offsets, mask=offsets < sizes.M, other=0.0)
    else:
        shares = p * dp
        if MASKED:
            shares = tl.where(p == 0.0, 0.0, shares)
        row_delta = tl.sum(shares, 1)
        if CONFIG.FLOAT16_PARTS > 0:
            # lse is of the forward's products, whose last bits are others: what p is off by cancels in the quotient.
            total = tl.sum(p, 1)
            row_delta = row_delta / tl.where(total == 0.0, 1.0, total)
        if given.grad_lse is not None:
            row_delta -= tl.load(given.grad_lse + origin + offsets, mask=offsets < sizes.M, other=0.0)
    ds = p * (dp - row_delta[:, None])
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)
    return Differentiated(q_tile, g_tile, weights, ds, slope)


@triton.jit
def bias_grad_kernel(q, k, v, grad_out, bias, allowed, parts, lse, delta, units, strides, sizes, mask, dropout,
                     bias_shape, reduction, scale, CONFIG: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """One tile of parts [parts, bias.batch, bias.heads, rows, columns]. Grid: parts * tiles of the bias."""
    begin_in_order(ORDER)
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta, units=units)
    r = reduction
    tiles = r.batch * r.heads * r.row_blocks * r.column_blocks
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column_block, tile = tile % r.column_blocks, tile // r.column_blocks
    row_block, tile = tile % r.row_blocks, tile // r.row_blocks
    bias_head, bias_batch = tile % r.heads, tile // r.heads
    count = r.sum_batch * r.sum_heads * r.sum_rows * r.sum_columns
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    held = None
    if CONFIG.BIAS.ROWS and CONFIG.BIAS.COLUMNS and not CONFIG.LENGTHS:
        held = load_bias(given, bias_batch, bias_head, row_block * BLOCK_M, column_block * BLOCK_N, CONFIG)
    first, end = share(count, part, r.parts)
    for step in range(first, end):
        inner_column, rest = step % r.sum_columns, step // r.sum_columns
        inner_row, rest = rest % r.sum_rows, rest // r.sum_rows
        head, batch = bias_head + rest % r.sum_heads, bias_batch + rest // r.sum_heads
        seqlen = seqlen_info(mask, sizes, batch, head, head // sizes.G)
        row, column = (row_block + inner_row) * BLOCK_M, (column_block + inner_column) * BLOCK_N
        block = load_key_block(given, seqlen, column, CONFIG)
        total += differentiate(given, block, held, seqlen, row, column, scale, CONFIG).ds
    at = part, bias_batch, bias_head, row_block * BLOCK_M, column_block * BLOCK_N
    store_part(parts, total, at, r, bias_shape)
    end_in_order(ORDER)


@triton.jit
def load_bias(given, batch, head, row, column, CONFIG: tl.constexpr):
    """A tile of a bias that many batch entries or heads share. An entry's own length would cut it."""
    seqlen = seqlen_info(given.mask, given.sizes, batch, head, head // given.sizes.G)
    rows, columns = row + tl.arange(0, CONFIG.BLOCK_M)[:, None], column + tl.arange(0, CONFIG.BLOCK_N)[None, :]
    coords = TileCoords(row, column, rows, columns)
    return load_dense(given.bias, given.mask.bias, seqlen, coords, CONFIG.BIAS.ROWS, CONFIG.BIAS.COLUMNS,
                      CONFIG.BIAS.TMA, CONFIG)  # fmt: skip


@triton.jit
def share(count, part, parts):
    """(first, end) of one of `parts` that count to `count` together. Not part * count: it may pass 2^31."""
    each, more = count // parts, count % parts
    first = part * each + tl.minimum(part, more)
    return first, first + each + tl.where(part < more, 1, 0)


@triton.jit
def store_part(parts, total, at, reduction, bias_shape):
    """Write a sum [BLOCK_M, BLOCK_N] to parts[part, batch, head], from a row and a column on, or its own sum along what
    the bias has one of. These five are `at`."""
    part, batch, head, row, column = at
    rows, columns = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    M, N = bias_shape
    dtype = parts.dtype.element_ty
    origin = parts + tl.cast((part * reduction.batch + batch) * reduction.heads + head, tl.int64) * M * N
    if M == 1 and N == 1:
        tl.store(origin, tl.sum(tl.sum(total, 1), 0).to(dtype))
    elif M == 1:
        tl.store(origin + columns, tl.sum(total, 0).to(dtype), mask=columns < N)
    elif N == 1:
        tl.store(origin + rows, tl.sum(total, 1).to(dtype), mask=rows < M)
    else:
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(origin + rows[:, None].to(tl.int64) * N + columns[None, :], total.to(dtype), mask=inside)


def bias_grad_launch(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, row: BackwardRows, split: Split | None
) -> tuple[Tensor, Launch]:
    """(the parts of the gradient, (parts, *bias.shape), the launch that fills them)."""
    bias, tile = inputs.bias, tile_of(problem, tile)
    given, units, _ = backward_args(inputs, problem, tile, LoopOver.KEYS, row, split)
    reduction = reduction_of(bias.shape, problem, tile)
    dtype = bias.dtype if reduction.parts == 1 else torch.float32
    parts = torch.empty((reduction.parts, *bias.shape), dtype=dtype, device=bias.device)
    mask = given.mask._replace(key_ranges=None)  # no block ranges are found for this kernel, which skips no tile
    args = (*given.tensors, parts, row.lse, row.delta, units, given.strides, given.sizes, mask)
    args = (*args, given.dropout, tuple(bias.shape[2:]), reduction, inputs.scale, given.config, ALONE.value)
    grid = (reduction.parts * reduction.tiles,)
    return parts, Launch(bias_grad_kernel, grid, args, tile, registers=registers_of(problem))


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the bias, of the parts it was cut into."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)


def tile_of(problem: AttentionProblem, tile: Tile) -> Tile:
    """The tile of this kernel in a backward with `tile`: its own one where it fits and the bias repeats nowhere. Of
    float16 parts, whose four blocks all stream, the first that fits."""
    if float16_parts_of(problem):
        target = target_of(problem.device)
        offered = PARTED[0 if holds_operands(target) else FEW_ROWS :]
        return next((t for t in offered if parts_memory(problem, t, target) <= target.shared_memory), offered[-1])
    width = block_size(problem.D) + block_size(problem.Dv)
    small = problem.dtype.itemsize < torch.float32.itemsize and width <= 2 * SMALL_SIZE
    return staged(SMALL, problem) or tile if problem.bias_matrices and small else tile


def reduction_of(
    shape: tuple[int, ...], problem: AttentionProblem, tile: Tile, programs: int = PROGRAMS_PER_CORE
) -> Reduction:
    """A bias dimension of size 1 is summed over. Parts are as many as leave that many programs per core."""
    B, H, M, N = shape
    row_blocks, column_blocks = -(-problem.M // tile.BLOCK_M), -(-problem.N // tile.BLOCK_N)
    rows = (1, row_blocks) if M == 1 else (row_blocks, 1)
    columns = (1, column_blocks) if N == 1 else (column_blocks, 1)
    sums = (problem.B // B, problem.H // H, rows[1], columns[1])
    own = (B, H, rows[0], columns[0])
    tiles, count = own[0] * own[1] * own[2] * own[3], sums[0] * sums[1] * sums[2] * sums[3]
    wanted = -(-programs * target_of(problem.device).cores // tiles)
    return Reduction(*own, *sums, parts=max(1, min(wanted, count)))
