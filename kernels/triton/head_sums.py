"""Sums of dK and dV over the heads of queries that share keys, where no program over keys visits all of these heads.

Few keys of few heads have fewer programs than a device has cores. Then each program visits fewer of a group's heads of
queries (`heads_of_program` in tiles.py) and writes its partial sums. One more launch adds these, always in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sdpa.kernels.triton.arguments import block_size, strides_of
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order
from sdpa.kernels.triton.primitives import RowRange, load_rows, store_rows
from sdpa.problem import AttentionInputs, Gradients, Tile

ROWS = 16  # of a program
TILE = Tile(0, ROWS, 4, 1)  # whose warps and stages count


@triton.jit
def sum_heads(partial, partial_strides, target, strides, at, count, SIZE: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """The rows `at` of a gradient, of `count` partial sums."""
    total = tl.zeros([BLOCK, BLOCK_SIZE], tl.float32)
    for number in range(count):
        own = RowRange(at.batch, at.head * count + number, at.start, at.limit)
        total += load_rows(partial, partial_strides, own, SIZE, BLOCK, BLOCK_SIZE, False, True)
    store_rows(target, strides, at, total, SIZE)


@triton.jit
def sum_heads_kernel(k_sums, v_sums, dk, dv, k_strides, v_strides, dk_strides, dv_strides, Hkv, count, rows,
                     D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_DV: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """dK and dV, of `count` partial sums of each head of keys. Grid: blocks of keys * B * Hkv."""
    begin_in_order(ORDER)
    blocks = tl.cdiv(rows, BLOCK)
    entry, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    at = RowRange(entry // Hkv, entry % Hkv, start, rows)
    sum_heads(k_sums, k_strides, dk, dk_strides, at, count, D, BLOCK, BLOCK_D)
    sum_heads(v_sums, v_strides, dv, dv_strides, at, count, DV, BLOCK, BLOCK_DV)
    end_in_order(ORDER)


def partial_sums(inputs: AttentionInputs, heads: int) -> Gradients:
    """The sums of dK and dV over so many heads of queries each, (B, H / heads, N, D) in float32, to be filled."""
    B, H = inputs.q.shape[:2]
    k, v = (t.new_empty((B, H // heads, *t.shape[2:]), dtype=torch.float32) for t in (inputs.k, inputs.v))
    return Gradients(None, k, v)


def sum_heads_launch(partial: Gradients, grads: Gradients) -> Launch:
    """What adds up the partial sums of dK and dV."""
    B, Hkv, rows, D = grads.k.shape
    Dv, count = grads.v.shape[3], partial.k.shape[1] // Hkv
    strides = tuple(map(strides_of, (partial.k, partial.v, grads.k, grads.v)))
    sizes = (Hkv, count, rows, D, Dv, ROWS, block_size(D), block_size(Dv), ALONE.value)
    grid = (-(-rows // ROWS) * B * Hkv,)
    return Launch(sum_heads_kernel, grid, (partial.k, partial.v, grads.k, grads.v, *strides, *sizes), TILE)
