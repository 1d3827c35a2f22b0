"""The kernel `triton_decode`: split-KV attention of few queries over many keys, so that every core has work.

A program packs the query heads of a group into the rows of its tile, so that keys and values are read once for all of
them. It takes one part (split) of the keys, which may lie in pages. A second kernel combines the parts (Flash-Decoding;
Dao, Haziza, Massa and Sizov, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sdpa.kernels.triton.arguments import (
    block_size,
    empty_results,
    forward_pass_of,
    kernel_args,
    readable,
    strides_of,
)
from sdpa.kernels.triton.availability import unavailable
from sdpa.kernels.triton.forward import attend_range, unit_of
from sdpa.kernels.triton.kernel_arguments import LoopOver
from sdpa.kernels.triton.key_parts import MAX_PARTS, TILES, parts_of, tiles
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import VisitedRange, seqlen_info, visited_keys
from sdpa.kernels.triton.order import ALONE, begin_in_order, in_order
from sdpa.kernels.triton.primitives import LN2, LOG2E, Operands, QueryTile, Softmax, finish_softmax
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import registers_of
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile, read_of

__all__ = ["TILES", "forward", "parts_of", "record", "tiles", "unavailable"]

PARTS = 3  # the place of the parts among the arguments of the kernel that fills them
COMBINE = Tile(1, 32, 4, 1)  # parts read at a time


@triton.jit
def packed_pointers(source, strides, batch, heads, rows, BLOCK_SIZE: tl.constexpr):
    """[BLOCK_M, BLOCK_SIZE] pointers to rows of several heads (`row_pointers`)."""
    first = tl.cast(batch, tl.int64) * strides.batch
    of_head, of_row = heads.to(tl.int64) * strides.head, rows.to(tl.int64) * strides.row
    if strides.whole is not None:
        UNIT: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        first, of_head = tl.multiple_of(first, UNIT), tl.multiple_of(of_head, [UNIT, UNIT])
        of_row = tl.multiple_of(of_row, [UNIT, UNIT])
    return source + first + of_head + of_row + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def decode_kernel(q, k, v, out, lse, bias, allowed, strides, part_stride, lse_stride, sizes, mask, sinks, dropout,
                  scale, parts, CONFIG: tl.constexpr, SPLIT: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """One tile of packed rows over one part of the keys. Grid: parts * blocks * B * Hkv."""
    begin_in_order(ORDER)
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    part, program = tl.program_id(0) % parts, tl.program_id(0) // parts
    block, entry = program % sizes.blocks, program // sizes.blocks
    kv_heads = sizes.H // sizes.G
    batch, kv_head = entry // kv_heads, entry % kv_heads
    packed = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    rows, heads = packed // sizes.G, kv_head * sizes.G + packed % sizes.G
    inside = rows < sizes.M
    heads = tl.where(inside, heads, 0)
    seqlen = seqlen_info(mask, sizes, batch, heads, kv_head)
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = packed_pointers(q, strides.q, batch, heads, rows, BLOCK_D)
    q_tile = tl.load(pointers, mask=inside & (columns < CONFIG.D), other=0.0)
    first_row = block * BLOCK_M // sizes.G
    visited = visited_keys(mask, seqlen, first_row, (block * BLOCK_M + BLOCK_M - 1) // sizes.G + 1 - first_row, CONFIG)
    length = tl.cdiv(tl.cdiv(visited.end - visited.begin, BLOCK_N), parts) * BLOCK_N
    begin = visited.begin + part * length
    end = tl.minimum(begin + length, visited.end)
    full_begin = tl.minimum(tl.maximum(visited.full_begin, begin), tl.maximum(end, begin))
    full_end = tl.minimum(tl.maximum(visited.full_end, full_begin), tl.maximum(end, begin) // BLOCK_N * BLOCK_N)
    full_end = tl.maximum(full_end, full_begin)
    unit = unit_of(scale, CONFIG)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32).reshape(BLOCK_M) / unit
        row_max = tl.where(part == 0, sink, row_max)
    row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    state = Softmax(tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32), row_sum, row_max)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout)
    shared = (QueryTile(q_tile, first_row, rows), given, seqlen)
    if CONFIG.FULL and (CONFIG.LEADING or CONFIG.TRAILING):  # one loop, so that its loads begin once
        met = VisitedRange(begin, full_begin, full_end, end)
        state = attend_range(state, *shared, begin, end, scale, True, CONFIG, met)
    else:
        if CONFIG.LEADING:
            state = attend_range(state, *shared, begin, full_begin, scale, True, CONFIG)
        if CONFIG.FULL:
            state = attend_range(state, *shared, full_begin, full_end, scale, False, CONFIG)
        if CONFIG.TRAILING:
            state = attend_range(state, *shared, full_end, end, scale, True, CONFIG)
    acc, row_lse = finish_softmax(state, unit, 0)
    if dropout is not None:
        acc = acc * dropout.inverse_keep
    columns = tl.arange(0, BLOCK_DV)[None, :]
    target = out + tl.cast(part, tl.int64) * part_stride
    pointers = packed_pointers(target, strides.other, batch, heads, rows, BLOCK_DV)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside & (columns < CONFIG.DV))
    offsets = part * lse_stride + (batch * sizes.H + heads).to(tl.int64) * sizes.M + rows
    if SPLIT:  # two numbers, because the sum of a huge maximum and a logarithm would lose the latter
        behind = out + tl.cast(parts, tl.int64) * part_stride + offsets
        tl.store(behind, (state.row_max * unit)[:, None], mask=inside)
        tl.store(behind + parts * lse_stride, state.row_sum[:, None], mask=inside)
    elif lse is not None:
        tl.store(lse + offsets, row_lse[:, None], mask=inside)


@triton.jit
def combine_kernel(parts_out, out, lse, out_strides, H, M, rows, parts, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                   BLOCK: tl.constexpr, MOST: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """One row of the result, of its at most MOST parts weighted by their sums. Grid: B * H * M.

    Behind the parts [parts, rows, DV] lie their largest scores [parts, rows], and behind these their sums.
    """
    begin_in_order(ORDER)
    row = tl.program_id(0)
    entry, i = row // M, row % M
    columns = tl.arange(0, BLOCK_DV)
    parts_max = parts_out + tl.cast(parts, tl.int64) * rows * DV
    every = tl.arange(0, MOST)
    base = tl.max(tl.load(parts_max + every * rows + row, mask=every < parts, other=float("-inf")), 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        inside = part < parts
        part_max = tl.load(parts_max + part * rows + row, mask=inside, other=float("-inf"))
        part_sum = tl.load(parts_max + (parts + part) * rows + row, mask=inside, other=0.0)
        weight = tl.math.exp2((part_max - base) * LOG2E) * part_sum
        offsets = (part[:, None] * rows + row).to(tl.int64) * DV + columns[None, :]
        values = tl.load(parts_out + offsets, mask=inside[:, None] & (columns < DV)[None, :], other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
        total += tl.sum(weight, 0)
    dead = total == 0.0
    target = out + tl.cast(entry // H, tl.int64) * out_strides.batch + tl.cast(entry % H, tl.int64) * out_strides.head
    result = acc / tl.where(dead, 1.0, total)
    tl.store(
        target + tl.cast(i, tl.int64) * out_strides.row + columns, result.to(out.dtype.element_ty), mask=columns < DV
    )
    if lse is not None:
        tl.store(lse + row, tl.where(dead, float("-inf"), base + tl.math.log2(tl.where(dead, 1.0, total)) * LN2))


def forward_launches(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> tuple[Results, list[Launch]]:
    p, parts = problem, parts_of(problem, tile)
    results = empty_results(inputs, problem)
    out, lse = results
    rows = p.B * p.H * p.M
    if parts > 1:  # and behind them, in one piece of memory, what they are weighted by
        out, lse = torch.empty(parts * rows * (p.Dv + 2), dtype=torch.float32, device=inputs.q.device), None
    given, _ = kernel_args(inputs, problem, tile, LoopOver.SPLIT_KV)
    own = strides_of(results.out if parts == 1 else out[: rows * p.Dv].view(p.B, p.H, p.M, p.Dv))
    strides = given.strides._replace(other=own)
    args = (
        given.q,
        given.k,
        given.v,
        out,
        lse,
        given.bias,
        given.allowed,
        strides,
        rows * p.Dv,
        rows,
        given.sizes,
        given.mask,
        given.sinks,
        given.dropout,
    )
    grid = (parts * given.sizes.blocks * given.sizes.entries,)
    args = (*args, inputs.scale, parts, given.config, parts > 1, ALONE.value)
    launch = Launch(decode_kernel, grid, args, tile, registers=registers_of(problem))
    if parts == 1:
        return results, [launch]
    args = (out, *results, strides_of(results.out), p.H, p.M, rows, parts, p.Dv, block_size(p.Dv))
    combine = Launch(combine_kernel, (rows,), (*args, COMBINE.BLOCK_N, MAX_PARTS, ALONE.value), COMBINE)
    return results, in_order(target_of(p.device), [launch], [combine])


def forward_pass(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Pass:
    given, read = with_memory(read_of(inputs)), readable(inputs)
    results, launches = forward_launches(read, problem, tile)
    parts = launches[0].args[PARTS : PARTS + 1] if len(launches) > 1 else ()
    return forward_pass_of(given, read, results, launches, parts)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    return run_pass(forward_pass(inputs, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results, RecordedCall | None]:
    """Like `forward`, and what does it again for tensors of the same form."""
    return record_pass(forward_pass(*tensors, problem, tile), problem)
