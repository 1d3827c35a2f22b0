"""The backward of problems whose scores are one tile, in one pass: windows of images, short sequences.

A program goes through batch entries and heads that share a tile of the bias. It reads that tile once, and sums its
gradient. Scores are computed once: five products, where a pass over keys and one over queries take seven. Delta is a
sum over the tile, so that the output need not be read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, kernel_args, strides_of
from sdpa.kernels.triton.bias_grad import differentiate, load_bias, reduction_of, share, staged, store_part
from sdpa.kernels.triton.kernel_arguments import LoopOver
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.mask import seqlen_info
from sdpa.kernels.triton.primitives import Operands, RowRange, store_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

LARGEST = 64  # queries, keys and head size of which a program of four warps has everything in registers
# Programs per core, and where they sum a gradient of the bias, of which each has a part of its own.
PROGRAMS_PER_CORE, SUMMING_PER_CORE = 8, 2


@triton.jit
def one_tile_kernel(q, k, v, grad_out, bias, allowed, dq, dk, dv, parts, lse, grad_lse, strides, dq_strides, dk_strides,
                    dv_strides, sizes, mask, dropout, bias_shape, reduction, scale, CONFIG: tl.constexpr):  # fmt: skip
    """dQ, dK and dV of the batch entries and heads of one part, and where `parts` is there, what they add to the
    gradient of the bias. Grid: parts * tiles of the bias."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, None, grad_lse)
    r = reduction
    tiles = r.batch * r.heads
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    bias_head, bias_batch = tile % r.heads, tile // r.heads
    held = None
    if mask.bias is not None and not CONFIG.LENGTHS:  # an entry's length would cut the tile
        held = load_bias(given, bias_batch, bias_head, 0, 0, CONFIG)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, end = share(r.sum_batch * r.sum_heads, part, r.parts)
    for step in range(first, end):
        head, batch = bias_head + step % r.sum_heads, bias_batch + step // r.sum_heads
        seqlen = seqlen_info(mask, sizes, batch, head, head)
        found = differentiate(given, held, seqlen, 0, 0, scale, CONFIG)
        ds = (found.ds * found.slope).to(found.q.dtype)
        weights = found.weights.to(found.q.dtype)
        queries, keys = RowRange(batch, head, 0, sizes.M), RowRange(batch, head, 0, sizes.N)
        store_rows(dq, dq_strides, queries, tl.dot(ds, found.k) * scale, CONFIG.D)
        store_rows(dk, dk_strides, keys, tl.dot(ds.T, found.q) * scale, CONFIG.D)
        store_rows(dv, dv_strides, keys, tl.dot(weights.T, found.grad_out), CONFIG.DV)
        if parts is not None:
            total += found.ds
    if parts is not None:
        store_part(parts, total, (part, bias_batch, bias_head, 0, 0), r, bias_shape)


def is_one_tile(problem: AttentionProblem) -> bool:
    """Whether the backward is one pass."""
    sizes = problem.M, problem.N, problem.D, problem.Dv
    apart = problem.G == 1 and not problem.features & {"packed", "sinks"}  # the gradient of sinks wants delta
    return apart and problem.dtype.itemsize == 2 and max(sizes) <= LARGEST


def one_tile_launch(
    inputs: AttentionInputs, problem: AttentionProblem, lse: Tensor, upstream: Results, grads: Gradients
) -> tuple[Tensor | None, Launch]:
    """(the parts of the gradient of the bias, if it is wanted, the launch that fills them and `grads`)."""
    sums = "bias_grad" in problem.features
    tile = Tile(block_size(problem.M), block_size(problem.N), 4, 1)
    tile = staged(tile, problem) or tile
    given, _ = kernel_args(inputs, problem, tile, LoopOver.KEYS, upstream.out)
    shape = (1, 1, problem.M, problem.N) if inputs.bias is None else tuple(inputs.bias.shape)
    reduction = reduction_of(shape, problem, tile, SUMMING_PER_CORE if sums else PROGRAMS_PER_CORE)
    parts = None
    if sums:
        dtype = inputs.bias.dtype if reduction.parts == 1 else torch.float32
        parts = torch.empty((reduction.parts, *shape), dtype=dtype, device=inputs.q.device)
    mask = given.mask._replace(key_ranges=None)  # one tile needs no ranges of blocks
    made = (*grads[:3], parts, lse, upstream.lse, given.strides, *map(strides_of, grads[:3]))
    args = (*given.tensors, *made, given.sizes, mask, given.dropout, shape[2:], reduction, inputs.scale, given.config)
    return parts, Launch(one_tile_kernel, (reduction.parts * reduction.batch * reduction.heads,), args, tile)
