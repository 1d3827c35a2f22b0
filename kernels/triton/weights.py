"""Attention's weights exp(score - lse) as a tensor, per head or averaged over heads.

Nothing else of that size is ever in memory. A program owns a tile of the result and goes through the heads that are
summed into it, all or one, so a call gives the same bits twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import kernel_args, readable
from sdpa.kernels.triton.backward import weights_of
from sdpa.kernels.triton.kernel_arguments import LoopOver
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import TileCoords, seqlen_info, visible, visited_keys
from sdpa.kernels.triton.primitives import Operands, RowRange, dead_as_inf, dropout_keep, load_rows, stream_of
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.tiles import registers_of
from sdpa.problem import AttentionInputs, AttentionProblem, Tile, read_of


@triton.jit
def head_weights(given, seqlen, row, column, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Weights [BLOCK_M, BLOCK_N] of one head of the Operands `given`. What is hidden is 0 if MASKED, else anything."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    # What lies behind an entry's last row stays in rows and columns of its own, which the mask hides.
    CLIP: tl.constexpr = not CONFIG.TMA
    strides, sizes, mask, dropout = given.strides, given.sizes, given.mask, given.dropout
    offsets = row + tl.arange(0, BLOCK_M)
    coords = TileCoords(row, column, offsets[:, None], column + tl.arange(0, BLOCK_N)[None, :])
    origin = tl.cast(seqlen.batch * sizes.H + seqlen.head, tl.int64) * sizes.rows
    # Loaded first and used last, so that it arrives during the product.
    row_lse = tl.load(given.lse + origin + offsets, mask=offsets < sizes.M, other=float("inf"))
    at = RowRange(seqlen.batch, seqlen.head, row, sizes.M)
    q_tile = load_rows(given.q, strides.q, at, CONFIG.D, BLOCK_M, CONFIG.BLOCK_D, CONFIG.TMA, CLIP)
    at = RowRange(seqlen.batch, seqlen.kv_head, column, seqlen.k_length)
    k_tile = load_rows(given.k, strides.k, at, CONFIG.D, BLOCK_N, CONFIG.BLOCK_D, CONFIG.TMA, CLIP)
    s = tl.dot(q_tile, k_tile.T, input_precision=CONFIG.PRECISION)
    p, _ = weights_of(s, dead_as_inf(row_lse)[:, None], given.bias, mask, seqlen, coords, scale, CONFIG)
    if MASKED:
        p = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), p, 0.0)
    if dropout is not None:
        stream = stream_of(dropout, seqlen.batch, seqlen.head, sizes.H)
        keep = dropout_keep(dropout, stream, coords.rows, column, BLOCK_M, BLOCK_N)
        p = tl.where(keep, p * dropout.inverse_keep, 0.0)
    return p


@triton.jit
def weights_kernel(q, k, bias, allowed, weights, lse, strides, sizes, mask, dropout, columns, heads, scale,
                   PER_HEAD_MASK: tl.constexpr, CONFIG: tl.constexpr):  # fmt: skip
    """One tile of weights [B, heads, M, N], each head the mean of H // heads. Grid: columns * blocks * B * heads.

    Tiles of the same queries lie side by side in the grid.
    PER_HEAD_MASK: heads see different keys, so each is masked by itself. Otherwise their sum is masked.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    column, rest = tl.program_id(0) % columns * BLOCK_N, tl.program_id(0) // columns
    row, entry = rest % sizes.blocks * BLOCK_M, rest // sizes.blocks
    batch, summed = entry // heads, sizes.H // heads
    first = entry % heads * summed
    seqlen = seqlen_info(mask, sizes, batch, first, first // sizes.G)
    visited = visited_keys(mask, seqlen, row, BLOCK_M, CONFIG)
    met = (visited.begin <= column) & (column < visited.end)
    given = Operands(k, k, bias, allowed, strides, sizes, mask, dropout, q=q, lse=lse)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for head in tl.range(first, tl.where(met, first + summed, first)):
        own_seqlen = seqlen_info(mask, sizes, batch, head, head // sizes.G)
        total += head_weights(given, own_seqlen, row, column, scale, PER_HEAD_MASK, CONFIG)
    rows, places = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_N)[None, :]
    if (CONFIG.LEADING or CONFIG.TRAILING) and not PER_HEAD_MASK:
        if (column < visited.full_begin) | (column + BLOCK_N > visited.full_end):
            seen = visible(allowed, mask, seqlen, TileCoords(row, column, rows, places), CONFIG)
            total = tl.where(seen, total, 0.0)
    origin = weights + tl.cast(entry, tl.int64) * sizes.M * sizes.N
    target = origin + rows.to(tl.int64) * sizes.N + places
    total = (total * (heads / sizes.H)).to(weights.dtype.element_ty)
    tl.store(target, total, mask=(rows < sizes.M) & (places < sizes.N))


def weights_launch(
    inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile
) -> tuple[Tensor, Launch]:
    """The weights to be filled, and the launch that fills them."""
    B, M, N = problem.B, problem.M, problem.N
    average = "averaged" in problem.features
    heads = 1 if average else problem.H
    weights = inputs.q.new_empty((B, M, N) if average else (B, heads, M, N))
    given, _ = kernel_args(inputs, problem, tile, LoopOver.HEADS)
    columns, per_head_mask = -(-N // tile.BLOCK_N), inputs.allowed is not None and inputs.allowed.shape[1] > 1
    args = (given.q, given.k, given.bias, given.allowed, weights, lse, given.strides, given.sizes)
    args = (*args, given.mask, given.dropout, columns, heads, inputs.scale, per_head_mask, given.config)
    grid = (columns * given.sizes.blocks * B * heads,)
    return weights, Launch(weights_kernel, grid, args, tile, registers=registers_of(problem))


def weights_pass(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile) -> Pass:
    given = with_memory(read_of(inputs, lse))
    read, own_lse = readable(inputs, problem), lse.contiguous()  # another kernel's may be a slice of a padded one
    result, launch = weights_launch(read, own_lse, problem, tile)
    return Pass([launch], given, read_of(read, own_lse), (result,), lambda read, made: made[0])


def weights(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile) -> Tensor:
    """(B, H, M, N) after dropout in the query's dtype, or (B, M, N), their mean over heads, where that is asked for."""
    return run_pass(weights_pass(inputs, lse, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Tensor, RecordedCall | None]:
    """Like `weights`, and what does it again for tensors of the same form."""
    return record_pass(weights_pass(*tensors, problem, tile), problem)
