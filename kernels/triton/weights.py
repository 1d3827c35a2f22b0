"""Attention's weights exp(score - lse) as a tensor, per head or averaged: nothing else of that size is ever in memory.

A program owns a tile of the result and goes through the heads that are summed into it, all or one: the same bits twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import prepare, readable
from sdpa.kernels.triton.backward import weights_of
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import Spot, key_span, place_of, visible
from sdpa.kernels.triton.nouns import Side
from sdpa.kernels.triton.primitives import Operands, Stretch, dead_as_inf, keep_tile, load_rows
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.problem import AttentionInputs, AttentionProblem, Tile, read_of


@triton.jit
def head_weights(given, place, row, column, scale, MASKED: tl.constexpr, BUILD: tl.constexpr):
    """Weights [BLOCK_M, BLOCK_N] of one head of the Operands `given`; what is hidden is 0 if MASKED, else anything."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    # What lies behind an entry's last row stays in rows and columns of its own, which are hidden.
    CLIP: tl.constexpr = not BUILD.DESCRIBED
    strides, sizes, mask, dropout = given.strides, given.sizes, given.mask, given.dropout
    offsets = row + tl.arange(0, BLOCK_M)
    spot = Spot(row, column, offsets[:, None], column + tl.arange(0, BLOCK_N)[None, :])
    stream = place.batch * sizes.H + place.head
    origin = tl.cast(stream, tl.int64) * sizes.rows
    # Asked for first and looked at last, so that it arrives during the product.
    row_lse = tl.load(given.lse + origin + offsets, mask=offsets < sizes.M, other=float("inf"))
    at = Stretch(place.batch, place.head, row, sizes.M)
    q_tile = load_rows(given.q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    at = Stretch(place.batch, place.kv_head, column, place.k_length)
    k_tile = load_rows(given.k, strides.k, at, BUILD.D, BLOCK_N, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    s = tl.dot(q_tile, k_tile.T, input_precision=BUILD.PRECISION)
    p, _ = weights_of(s, dead_as_inf(row_lse)[:, None], given.bias, mask, place, spot, scale, BUILD)
    if MASKED:
        p = tl.where(visible(given.allowed, mask, place, spot, BUILD), p, 0.0)
    if dropout is not None:
        keep = keep_tile(dropout, stream, spot.rows, column, BLOCK_M, BLOCK_N)
        p = tl.where(keep, p * dropout.inverse_keep, 0.0)
    return p


@triton.jit
def weights_kernel(q, k, bias, allowed, weights, lse, strides, sizes, mask, dropout, columns, heads, scale,
                   APART: tl.constexpr, BUILD: tl.constexpr):  # fmt: skip
    """One tile of weights [B, heads, M, N], each head the mean of H // heads. Grid: columns * blocks * B * heads, tiles
    of the same queries side by side.

    APART: heads see different keys, so each is masked by itself; otherwise their sum is.
    """
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    column, rest = tl.program_id(0) % columns * BLOCK_N, tl.program_id(0) // columns
    row, entry = rest % sizes.blocks * BLOCK_M, rest // sizes.blocks
    batch, summed = entry // heads, sizes.H // heads
    first = entry % heads * summed
    place = place_of(mask, sizes, batch, first, first // sizes.G)
    span = key_span(mask, place, row, BLOCK_M, BUILD)
    met = (span.begin <= column) & (column < span.end)
    given = Operands(k, k, bias, allowed, strides, sizes, mask, dropout, q=q, lse=lse)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for head in tl.range(first, tl.where(met, first + summed, first)):
        its_place = place_of(mask, sizes, batch, head, head // sizes.G)
        total += head_weights(given, its_place, row, column, scale, APART, BUILD)
    rows, places = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_N)[None, :]
    if (BUILD.LEADING or BUILD.TRAILING) and not APART:
        if (column < span.full_begin) | (column + BLOCK_N > span.full_end):
            seen = visible(allowed, mask, place, Spot(row, column, rows, places), BUILD)
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
    given, _ = prepare(inputs, problem, tile, Side.HEADS)
    columns, apart = -(-N // tile.BLOCK_N), inputs.allowed is not None and inputs.allowed.shape[1] > 1
    args = (given.q, given.k, given.bias, given.allowed, weights, lse, given.strides, given.sizes)
    args = (*args, given.mask, given.dropout, columns, heads, inputs.scale, apart, given.build)
    return weights, Launch(weights_kernel, (columns * given.sizes.blocks * B * heads,), args, tile)


def weights_pass(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile) -> Pass:
    given = with_memory((*read_of(inputs), lse))
    read, own_lse = readable(inputs), lse.contiguous()  # another kernel's may be a slice of a padded one
    result, launch = weights_launch(read, own_lse, problem, tile)
    return Pass([launch], given, (*read_of(read), own_lse), (result,), lambda read, made: made[0])


def weights(inputs: AttentionInputs, lse: Tensor, problem: AttentionProblem, tile: Tile) -> Tensor:
    """(B, H, M, N) after dropout in the query's dtype, or (B, M, N), their mean over heads, where that is asked for."""
    return run_pass(weights_pass(inputs, lse, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Tensor, RecordedCall | None]:
    """Like `weights`, and what does it again for tensors of the same form."""
    return record_pass(weights_pass(*tensors, problem, tile), problem)
