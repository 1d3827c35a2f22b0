"""The gradient of a dense bias, reduced in the kernel over whatever the bias broadcasts along: memory of its own size.

A program owns a tile of the bias and goes through everything that is summed into it: batch entries and heads, and
blocks of rows or columns where the bias has one. Where that leaves too few programs, the sum is cut into parts, which
are added in order: the same bits twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, prepare
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.mask import Spot, modified, place_of, visible
from sdpa.kernels.triton.nouns import Rows, Side
from sdpa.kernels.triton.primitives import Operands, Stretch, keep_tile, load_lse, load_rows, probabilities
from sdpa.kernels.triton.target import target_of
from sdpa.problem import AttentionInputs, AttentionProblem, Tile

PROGRAMS_PER_CORE = 2
# Small heads leave room for more keys than the other passes have registers for, and so less is read again.
WIDE, WIDE_SIZE = Tile(64, 128, 4, 2), 64


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


@triton.jit
def bias_tile(given, place, row, column, scale, BUILD: tl.constexpr):
    """dS [BLOCK_M, BLOCK_N] of one tile of scores of the Operands `given`."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    CLIP: tl.constexpr = BUILD.LENGTHS or not BUILD.DESCRIBED
    MASKED: tl.constexpr = BUILD.LEADING or BUILD.TRAILING or not BUILD.FULL
    strides, sizes, mask, dropout = given.strides, given.sizes, given.mask, given.dropout
    batch, head = place.batch, place.head
    at = Stretch(batch, head, row, sizes.M)
    q_tile = load_rows(given.q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    g_tile = load_rows(given.grad_out, strides.other, at, BUILD.DV, BLOCK_M, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
    at = Stretch(batch, place.kv_head, column, place.k_length)
    k_tile = load_rows(given.k, strides.k, at, BUILD.D, BLOCK_N, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    v_tile = load_rows(given.v, strides.v, at, BUILD.DV, BLOCK_N, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
    s = tl.dot(q_tile, k_tile.T, input_precision=BUILD.PRECISION)
    dp = tl.dot(g_tile, v_tile.T, input_precision=BUILD.PRECISION)
    offsets = row + tl.arange(0, BLOCK_M)
    spot = Spot(row, column, offsets[:, None], column + tl.arange(0, BLOCK_N)[None, :])
    origin = tl.cast(batch * sizes.H + head, tl.int64) * sizes.rows
    row_lse = load_lse(given.lse + origin, offsets, offsets < sizes.M)
    row_delta = tl.load(given.delta + origin + offsets, mask=offsets < sizes.M, other=0.0)
    s = modified(s, given.bias, mask, place, spot, scale, BUILD)
    p = probabilities(s, 1.0, row_lse[:, None], True)
    if MASKED:
        p = tl.where(visible(given.allowed, mask, place, spot, BUILD), p, 0.0)
    if dropout is not None:
        keep = keep_tile(dropout, batch * sizes.H + head, spot.rows, column, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp * dropout.inverse_keep, 0.0)
    ds = p * (dp - row_delta[:, None])
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit
def bias_grad_kernel(q, k, v, grad_out, bias, allowed, parts, lse, delta, strides, sizes, mask, dropout, bias_shape,
                     reduction, scale, BUILD: tl.constexpr):  # fmt: skip
    """One tile of parts [parts, bias.batch, bias.heads, rows, columns]. Grid: parts * tiles of the bias."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta)
    r = reduction
    tiles = r.batch * r.heads * r.row_blocks * r.column_blocks
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column_block, tile = tile % r.column_blocks, tile // r.column_blocks
    row_block, tile = tile % r.row_blocks, tile // r.row_blocks
    bias_head, bias_batch = tile % r.heads, tile // r.heads
    count = r.sum_batch * r.sum_heads * r.sum_rows * r.sum_columns
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    each, more = count // r.parts, count % r.parts  # not part * count: it may pass 2^31
    first = part * each + tl.minimum(part, more)
    for step in range(first, first + each + tl.where(part < more, 1, 0)):
        inner_column, rest = step % r.sum_columns, step // r.sum_columns
        inner_row, rest = rest % r.sum_rows, rest // r.sum_rows
        head, batch = bias_head + rest % r.sum_heads, bias_batch + rest // r.sum_heads
        place = place_of(mask, sizes, batch, head, head // sizes.G)
        row, column = (row_block + inner_row) * BLOCK_M, (column_block + inner_column) * BLOCK_N
        total += bias_tile(given, place, row, column, scale, BUILD)
    rows, columns = row_block * BLOCK_M + tl.arange(0, BLOCK_M), column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    M, N = bias_shape
    dtype = parts.dtype.element_ty
    origin = parts + tl.cast((part * r.batch + bias_batch) * r.heads + bias_head, tl.int64) * M * N
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
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, row: Rows
) -> tuple[Tensor, Launch]:
    """(the parts of the gradient, (parts, *bias.shape), the launch that fills them)."""
    bias, tile = inputs.bias, tile_of(problem, tile)
    given, _ = prepare(inputs, problem, tile, Side.KEYS, row.grad_out)
    reduction = reduction_of(bias.shape, problem, tile)
    dtype = bias.dtype if reduction.parts == 1 else torch.float32
    parts = torch.empty((reduction.parts, *bias.shape), dtype=dtype, device=bias.device)
    mask = given.mask._replace(key_spans=None)  # nobody looked for them, and no tile is passed over
    args = (*given.tensors, parts, row.lse, row.delta, given.strides, given.sizes, mask)
    args = (*args, given.dropout, tuple(bias.shape[2:]), reduction, inputs.scale, given.build)
    tiles = reduction.batch * reduction.heads * reduction.row_blocks * reduction.column_blocks
    return parts, Launch(bias_grad_kernel, (reduction.parts * tiles,), args, tile)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the bias, of the parts it was cut into."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)


def tile_of(problem: AttentionProblem, tile: Tile) -> Tile:
    """The tile of this pass, in a backward with `tile`: wide where a wide one fits and each tile of the bias is one."""
    size, width = problem.dtype.itemsize, block_size(problem.D) + block_size(problem.Dv)
    streams = (WIDE.BLOCK_M + WIDE.BLOCK_N) * width * size + WIDE.BLOCK_M * WIDE.BLOCK_N * problem.bias_dtype.itemsize
    fits = WIDE.num_stages * streams <= target_of(problem.device).shared_memory
    small = size < torch.float32.itemsize and width <= 2 * WIDE_SIZE
    return WIDE if problem.full_bias and small and fits else tile


def reduction_of(shape: torch.Size, problem: AttentionProblem, tile: Tile) -> Reduction:
    """A bias dimension of size 1 is summed over."""
    B, H, M, N = shape
    row_blocks, column_blocks = -(-problem.M // tile.BLOCK_M), -(-problem.N // tile.BLOCK_N)
    rows = (1, row_blocks) if M == 1 else (row_blocks, 1)
    columns = (1, column_blocks) if N == 1 else (column_blocks, 1)
    sums = (problem.B // B, problem.H // H, rows[1], columns[1])
    own = (B, H, rows[0], columns[0])
    tiles, count = own[0] * own[1] * own[2] * own[3], sums[0] * sums[1] * sums[2] * sums[3]
    wanted = -(-PROGRAMS_PER_CORE * target_of(problem.device).cores // tiles)
    return Reduction(*own, *sums, parts=max(1, min(wanted, count)))
