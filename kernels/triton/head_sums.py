"""Sums of gradients of keys and values over heads that share them, where programs over keys visit a part of the heads.

Few keys of few heads have fewer programs than a device has cores. Then each program visits fewer of a group's heads of
queries (`heads_of_program` in tiles.py) and writes what these add. One more launch sums that, always in one order.
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

ROWS = 16  # of a program: there are few rows
TILE = Tile(0, ROWS, 4, 1)


@triton.jit
def sum_heads(parts, part_strides, target, strides, at, shares, SIZE: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """The rows `at` of a gradient, of its parts."""
    total = tl.zeros([BLOCK, BLOCK_SIZE], tl.float32)
    for share in range(shares):
        own = RowRange(at.batch, at.head * shares + share, at.start, at.limit)
        total += load_rows(parts, part_strides, own, SIZE, BLOCK, BLOCK_SIZE, False, True)
    store_rows(target, strides, at, total, SIZE)


@triton.jit
def sum_heads_kernel(k_parts, v_parts, dk, dv, k_strides, v_strides, dk_strides, dv_strides, Hkv, shares, rows,
                     D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_DV: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """dK and dV, of the `shares` parts that each head of keys has. Grid: blocks of keys * B * Hkv."""
    begin_in_order(ORDER)
    blocks = tl.cdiv(rows, BLOCK)
    entry, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    at = RowRange(entry // Hkv, entry % Hkv, start, rows)
    sum_heads(k_parts, k_strides, dk, dk_strides, at, shares, D, BLOCK, BLOCK_D)
    sum_heads(v_parts, v_strides, dv, dv_strides, at, shares, DV, BLOCK, BLOCK_DV)
    end_in_order(ORDER)


def parts_of_heads(inputs: AttentionInputs, heads: int) -> Gradients:
    """The parts of dK and dV that so many heads of queries have each, (B, H / heads, N, D) in float32, to be filled."""
    B, H = inputs.q.shape[:2]
    k, v = (t.new_empty((B, H // heads, *t.shape[2:]), dtype=torch.float32) for t in (inputs.k, inputs.v))
    return Gradients(None, k, v)


def sum_heads_launch(parts: Gradients, grads: Gradients) -> Launch:
    """What adds up the parts of dK and dV."""
    B, Hkv, rows, D = grads.k.shape
    Dv, shares = grads.v.shape[3], parts.k.shape[1] // Hkv
    strides = tuple(map(strides_of, (parts.k, parts.v, grads.k, grads.v)))
    sizes = (Hkv, shares, rows, D, Dv, ROWS, block_size(D), block_size(Dv), ALONE.value)
    grid = (-(-rows // ROWS) * B * Hkv,)
    return Launch(sum_heads_kernel, grid, (parts.k, parts.v, grads.k, grads.v, *strides, *sizes), TILE)
