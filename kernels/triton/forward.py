"""The forward kernel, FlashAttention-2's loop (Dao, 2023) with every mask as a policy, and its launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import empty_results, forward_pass_of, kernel_args, readable, strides_of
from sdpa.kernels.triton.block_ranges import range_tables
from sdpa.kernels.triton.float16_parts import add_values, needs_recompute, scaled_queries, scores_of
from sdpa.kernels.triton.kernel_arguments import KernelArgs, LoopOver
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import TileCoords, memory_batch, score_mod, seqlen_info, visible, visited_keys
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order, in_order
from sdpa.kernels.triton.primitives import (
    Operands,
    QueryTile,
    RowRange,
    Softmax,
    clear_behind,
    dropout_keep,
    finish_softmax,
    init_softmax,
    load_keys,
    load_rows,
    locate,
    online_softmax_step,
    store_rows,
    stream_of,
)
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import recompute_tile, registers_of
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile, read_of

# Registers per thread that let two programs of eight warps share a core's 65536, and the largest head size and block of
# keys that fit in them.
SHARED_REGISTERS = 128
SHARING_WARPS = 8
SHARING_SIZE = 64
RECOMPUTE = 12  # the place of the recompute flags among the kernel's arguments


@triton.jit
def attend_range(
    state, queries, given, seqlen, begin, end, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr, visited=None
):
    """The online softmax of one QueryTile over the keys [begin, end) of the Operands `given`.

    The queries' tile is [BLOCK_M, BLOCK_D], or its Float16Parts where CONFIG has them. With `visited` (a VisitedRange),
    its unmasked blocks are not masked.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    CLIP: tl.constexpr = MASKED and (CONFIG.LENGTHS or not CONFIG.TMA)
    mask, strides = given.mask, given.strides
    batch = memory_batch(mask, seqlen.batch)
    limit = seqlen.k_first + seqlen.k_length
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        coords = TileCoords(queries.row, start, queries.rows, start + tl.arange(0, BLOCK_N)[None, :])
        at = RowRange(batch, seqlen.kv_head, seqlen.k_first + start, limit)
        k_tile = load_keys(given.k, strides.k, mask, at, CONFIG.D, BLOCK_N, CONFIG.BLOCK_D, CONFIG.TMA, CLIP)
        if CONFIG.FLOAT16_PARTS:
            s = scores_of(queries.tile, k_tile, CONFIG.FLOAT16_PARTS)
        else:
            s = tl.dot(queries.tile, k_tile.T, input_precision=CONFIG.PRECISION)  # [BLOCK_M, BLOCK_N]
        if CONFIG.SCORE_MOD:
            s = score_mod(s, given.bias, mask, seqlen, coords, scale, CONFIG)
        if MASKED:
            if visited is None:
                s = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), s, float("-inf"))
            elif (start < visited.full_begin) | (start >= visited.full_end):
                s = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), s, float("-inf"))
        p, state = online_softmax_step(
            state, s, unit_of(scale, CONFIG), MASKED or CONFIG.SCORE_MOD, CONFIG.SCORE_MOD, CONFIG.P_EXPONENT
        )
        if given.dropout is not None:
            stream = stream_of(given.dropout, seqlen.batch, seqlen.head, given.sizes.H)
            p = tl.where(dropout_keep(given.dropout, stream, queries.rows, start, BLOCK_M, BLOCK_N), p, 0.0)
        v_tile = load_keys(given.v, strides.v, mask, at, CONFIG.DV, BLOCK_N, CONFIG.BLOCK_DV, CONFIG.TMA, CLIP)
        if CONFIG.FLOAT16_PARTS:
            acc = add_values(state.acc, p, v_tile, CONFIG.FLOAT16_PARTS)
        else:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, state.acc, input_precision=CONFIG.PRECISION)
        state = Softmax(acc, state.row_sum, state.row_max)
    return state


@triton.jit
def unit_of(scale, CONFIG: tl.constexpr):
    """What the products are multiplied by to be scores: 1 where `score_mod` has done so."""
    unit = scale
    if CONFIG.SCORE_MOD:
        unit = 1.0
    return unit


@triton.jit
def attend_all_ranges(queries, visited, given, seqlen, sinks, scale, CONFIG: tl.constexpr):
    """(acc [BLOCK_M, BLOCK_DV], lse [BLOCK_M], row_sum [BLOCK_M]) of one QueryTile over all the keys it visits."""
    unit = unit_of(scale, CONFIG)
    state = init_softmax(sinks, seqlen.head, unit, CONFIG.BLOCK_M, CONFIG.BLOCK_DV, CONFIG.P_EXPONENT)
    shared = (queries, given, seqlen)
    if CONFIG.ONE_LOOP and CONFIG.FULL and (CONFIG.LEADING or CONFIG.TRAILING):
        # Float16 parts of q are then read from shared memory. For two loops Triton keeps them all in registers.
        state = attend_range(state, *shared, visited.begin, visited.end, scale, True, CONFIG, visited)
    else:
        if CONFIG.LEADING:
            state = attend_range(state, *shared, visited.begin, visited.full_begin, scale, True, CONFIG)
        if CONFIG.FULL:
            state = attend_range(state, *shared, visited.full_begin, visited.full_end, scale, False, CONFIG)
        if CONFIG.TRAILING:
            state = attend_range(state, *shared, visited.full_end, visited.end, scale, True, CONFIG)
    acc, row_lse = finish_softmax(state, unit, CONFIG.P_EXPONENT)
    return acc, row_lse, state.row_sum


@triton.jit
def forward_kernel(q, k, v, out, lse, bias, allowed, strides, sizes, mask, sinks, dropout, recompute,
                   recompute_rows, scale, CONFIG: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """out [.., BLOCK_M, Dv] and lse [.., BLOCK_M] of one block of queries of one head. Grid: blocks * batch * heads.

    `recompute` is [entries, blocks of recompute_rows queries]. With Float16Parts the kernel writes there which blocks
    must be computed again. Without parts it computes only those.
    """
    begin_in_order(ORDER)
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, CONFIG.REVERSED)
    batch, head = entry // sizes.H, entry % sizes.H
    seqlen = seqlen_info(mask, sizes, batch, head, head // sizes.G)
    row = block * BLOCK_M
    if CONFIG.PACKED:
        if mask.q_lengths is None:
            clear_results(out, lse, strides.other, sizes, mask, block, batch, head, CONFIG)
        if row >= seqlen.q_length:
            end_in_order(ORDER)
            return
    if recompute is not None:
        flag = recompute + entry * tl.cdiv(sizes.M, recompute_rows) + row // recompute_rows
        if not CONFIG.FLOAT16_PARTS:
            if tl.load(flag) == 0:
                end_in_order(ORDER)
                return
    memory = memory_batch(mask, batch)
    limit = sizes.M
    if CONFIG.PACKED:
        limit = seqlen.q_length
    at = RowRange(memory, head, seqlen.q_first + row, seqlen.q_first + limit)
    q_tile = load_rows(q, strides.q, at, CONFIG.D, BLOCK_M, CONFIG.BLOCK_D, CONFIG.TMA, not CONFIG.TMA)
    visited = visited_keys(mask, seqlen, row, BLOCK_M, CONFIG)
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    if CONFIG.FLOAT16_PARTS:
        if CONFIG.LENGTHS:  # rows behind the last must not choose the power of two
            q_tile = tl.where(rows < seqlen.q_length, q_tile, 0.0)
        q_tile, scale, reach = scaled_queries(q_tile, scale, CONFIG.FLOAT16_PARTS)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout)
    acc, row_lse, row_sum = attend_all_ranges(
        QueryTile(q_tile, row, rows), visited, given, seqlen, sinks, scale, CONFIG
    )
    if CONFIG.FLOAT16_PARTS:
        tl.store(flag, needs_recompute(acc, row_sum, reach, CONFIG.D, CONFIG.DV).to(tl.int32))
    if dropout is not None:
        acc = acc * dropout.inverse_keep
    store_rows(out, strides.other, at, acc, CONFIG.DV)
    if lse is not None:
        offsets = row + tl.arange(0, BLOCK_M)
        origin = lse + tl.cast(memory * sizes.H + head, tl.int64) * sizes.rows + seqlen.q_first
        tl.store(origin + offsets, row_lse, mask=offsets < limit)
    end_in_order(ORDER)


@triton.jit
def clear_results(out, lse, strides, sizes, mask, block, batch, head, CONFIG: tl.constexpr):
    """Write 0, and a log-sum-exp of -inf, to the rows behind the last packed sequence. Its programs share them."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    if batch == sizes.entries // sizes.H - 1:
        first = tl.load(mask.cu_q + batch + 1) + block * BLOCK_M
        clear_behind(out, strides, head, first, sizes.rows, sizes.blocks, BLOCK_M, CONFIG.BLOCK_DV, CONFIG.DV)
        if lse is not None:
            for start in tl.range(first, sizes.rows, sizes.blocks * BLOCK_M):
                offsets = start + tl.arange(0, BLOCK_M)
                origin = lse + tl.cast(head, tl.int64) * sizes.rows
                tl.store(origin + offsets, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=offsets < sizes.rows)


def forward_launches(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> tuple[Results, list[Launch]]:
    """Results to be filled, and the launches that fill them. With float16 parts a second launch computes again what the
    first one flags."""
    results = empty_results(inputs, problem)
    given, before = kernel_args(inputs, problem, tile, LoopOver.KEYS)
    target = target_of(problem.device)
    if not given.config.FLOAT16_PARTS:
        launch = forward_launch(inputs, results, given, tile)._replace(registers=registers_of(problem))
        return results, in_order(target, before, [launch])
    recompute = recompute_flags(given, results.out.device)
    again = recompute_tile(problem, tile)
    careful, more = kernel_args(inputs, problem, again, LoopOver.KEYS)
    config = careful.config._replace(FLOAT16_PARTS=0, P_EXPONENT=0)
    careful = careful._replace(config=config)
    first = forward_launch(inputs, results, given, tile, recompute, tile.BLOCK_M)
    last = forward_launch(inputs, results, careful, again, recompute, tile.BLOCK_M)
    first, last = first._replace(registers=shared_by_two(given, tile)), last._replace(registers=registers_of(problem))
    return results, in_order(target, [*before, *more], [first], [last])


def forward_launch(
    inputs: AttentionInputs,
    results: Results,
    given: KernelArgs,
    tile: Tile,
    recompute: Tensor | None = None,
    recompute_rows: int | None = None,
) -> Launch:
    out, lse = results
    strides = given.strides._replace(other=strides_of(out))
    args = (
        given.q,
        given.k,
        given.v,
        out,
        lse,
        given.bias,
        given.allowed,
        strides,
        given.sizes,
        given.mask,
        given.sinks,
        given.dropout,
        recompute,
        recompute_rows,
        inputs.scale,
        given.config,
        ALONE.value,
    )
    grid = (given.sizes.blocks * given.sizes.entries,)
    return Launch(forward_kernel, grid, args, tile)


def shared_by_two(given: KernelArgs, tile: Tile) -> int | None:
    """Registers per thread that let two programs of eight warps share a core.

    Float16 parts of small heads need hardly more than those. With dropout's generator in the loop they need far more.
    """
    config = given.config
    small = max(config.BLOCK_D, config.BLOCK_DV, config.BLOCK_N) <= SHARING_SIZE
    shared = config.FLOAT16_PARTS and small and tile.num_warps == SHARING_WARPS and given.dropout is None
    return SHARED_REGISTERS if shared else None


def recompute_flags(given: KernelArgs, device: torch.device) -> Tensor:
    """[entries, blocks] int32: whether float16 parts could not hold what a block of queries met.

    The kernel writes all flags but those behind a packed sequence, which no program reads.
    """
    return torch.empty((given.sizes.entries, given.sizes.blocks), dtype=torch.int32, device=device)


def forward_pass(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Pass:
    given, read = with_memory(read_of(inputs)), readable(inputs, problem)
    results, launches = forward_launches(read, problem, tile)
    recompute = launches[-1].args[RECOMPUTE]
    scratch = (*range_tables(launches), *(() if recompute is None else (recompute,)))
    return forward_pass_of(given, read, results, launches, scratch)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    return run_pass(forward_pass(inputs, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results, RecordedCall | None]:
    """Like `forward`, and what does it again for tensors of the same form."""
    return record_pass(forward_pass(*tensors, problem, tile), problem)
