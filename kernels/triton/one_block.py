"""The backward of problems whose keys are one block, in one pass: windows of images, short sequences, few keys.

A program owns the keys of one head and goes through the blocks of queries that see them. Scores are computed once: five
products, where a pass over keys and one over queries take seven. Delta is a sum over a tile, which has all keys, so
that the output need not be read.

Where the queries are one block, too, a program goes through batch entries and heads that share a tile of the bias. It
reads that tile once, and sums its gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import kernel_args, strides_of
from sdpa.kernels.triton.bias_grad import (
    differentiate,
    load_bias,
    load_key_block,
    reduction_of,
    share,
    store_part,
)
from sdpa.kernels.triton.kernel_arguments import LoopOver
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.mask import seqlen_info
from sdpa.kernels.triton.primitives import Operands, RowRange, store_rows
from sdpa.kernels.triton.row_parts import RowUnits, add_weighted_rows, weighted_rows, weights_for
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

# Programs per core, and where they sum a gradient of the bias, of which each has a part of its own.
PROGRAMS_PER_CORE, SUMMING_PER_CORE = 8, 2


@triton.jit
def one_block_kernel(q, k, v, grad_out, bias, allowed, dq, dk, dv, parts, lse, grad_lse, strides, dq_strides,
                     dk_strides, dv_strides, sizes, mask, dropout, bias_shape, reduction, scale, ONCE: tl.constexpr,
                     CONFIG: tl.constexpr):  # fmt: skip
    """dQ, dK and dV of the batch entries and heads of keys of one part. Grid: parts * tiles of the bias.

    ONCE: a head of keys meets one block of queries. Where `parts` is there, what they add to the gradient of the bias.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, None, grad_lse,
                     RowUnits(None, None, None, None))  # fmt: skip
    r = reduction
    tiles = r.batch * r.heads
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    bias_head, bias_batch = tile % r.heads, tile // r.heads
    held = None
    if ONCE and mask.bias is not None and not CONFIG.LENGTHS:  # an entry's length would cut the tile
        held = load_bias(given, bias_batch, bias_head, 0, 0, CONFIG)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, end = share(r.sum_batch * r.sum_heads, part, r.parts)
    for step in range(first, end):
        kv_head, batch = bias_head + step % r.sum_heads, bias_batch + step // r.sum_heads
        seqlen = seqlen_info(mask, sizes, batch, kv_head * sizes.G, kv_head)
        block = load_key_block(given, seqlen, 0, CONFIG)
        if ONCE:
            found = differentiate(given, block, held, seqlen, 0, 0, scale, CONFIG)
            ds = store_dq(dq, dq_strides, found, block[0], RowRange(batch, kv_head, 0, sizes.M), scale, CONFIG)
            dk_tile = weighted_rows(ds.T, found.q, CONFIG)
            weights = weights_for(found.weights, found.grad_out, CONFIG)
            dv_tile = weighted_rows(weights.T, found.grad_out, CONFIG)
            if parts is not None:
                total += found.ds
        else:
            dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
            for index in range(0, sizes.G * sizes.blocks):
                head, row = kv_head * sizes.G + index // sizes.blocks, index % sizes.blocks * BLOCK_M
                own = seqlen_info(mask, sizes, batch, head, kv_head)
                found = differentiate(given, block, held, own, row, 0, scale, CONFIG)
                ds = store_dq(dq, dq_strides, found, block[0], RowRange(batch, head, row, sizes.M), scale, CONFIG)
                dk_tile = add_weighted_rows(dk_tile, ds.T, found.q, CONFIG)
                weights = weights_for(found.weights, found.grad_out, CONFIG)
                dv_tile = add_weighted_rows(dv_tile, weights.T, found.grad_out, CONFIG)
        keys = RowRange(batch, kv_head, 0, sizes.N)
        store_rows(dk, dk_strides, keys, dk_tile * scale, CONFIG.D)
        store_rows(dv, dv_strides, keys, dv_tile, CONFIG.DV)
    if parts is not None:
        store_part(parts, total, (part, bias_batch, bias_head, 0, 0), r, bias_shape)


@triton.jit
def store_dq(dq, dq_strides, found, keys, at, scale, CONFIG: tl.constexpr):
    """Write dQ of the RowRange `at` of a Differentiated tile. Returns the gradient of the scores before softcap."""
    ds = weights_for(found.ds * found.slope, found.q, CONFIG)
    store_rows(dq, dq_strides, at, weighted_rows(ds, keys, CONFIG) * scale, CONFIG.D)
    return ds


def one_block_launch(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, lse: Tensor, upstream: Results, grads: Gradients
) -> tuple[Tensor | None, Launch]:
    """(the parts of the gradient of the bias, if it is wanted, the launch that fills them and `grads`)."""
    sums, once = "bias_grad" in problem.features, problem.G == 1 and problem.M <= tile.BLOCK_M
    given, _ = kernel_args(inputs, problem, tile, LoopOver.KEYS, upstream.out)
    shape = (1, 1, problem.M, problem.N) if inputs.bias is None or not once else tuple(inputs.bias.shape)
    owned = problem._replace(H=problem.Hkv, M=min(problem.M, tile.BLOCK_M))  # what a program sums is of one block
    reduction = reduction_of(shape, owned, tile, SUMMING_PER_CORE if sums else PROGRAMS_PER_CORE)
    parts = None
    if sums:
        dtype = inputs.bias.dtype if reduction.parts == 1 else torch.float32
        parts = torch.empty((reduction.parts, *shape), dtype=dtype, device=inputs.q.device)
    mask = given.mask._replace(key_ranges=None)  # one block needs no ranges of blocks
    made = (*grads[:3], parts, lse, upstream.lse, given.strides, *map(strides_of, grads[:3]))
    rest = (given.sizes, mask, given.dropout, shape[2:], reduction, inputs.scale, once, given.config)
    grid = (reduction.parts * reduction.batch * reduction.heads,)
    return parts, Launch(one_block_kernel, grid, (*given.tensors, *made, *rest), tile)
