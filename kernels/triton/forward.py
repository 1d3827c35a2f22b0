"""The forward loop: FlashAttention-2's (Dao, 2023) with every mask as a policy, and its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import empty_results, forward_pass_of, prepare, readable, strides_of
from sdpa.kernels.triton.halves import add_values, is_doubtful, scaled_queries, scores_of
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import Spot, key_span, memory_batch, modified, place_of, visible
from sdpa.kernels.triton.nouns import Prepared, Side
from sdpa.kernels.triton.primitives import (
    Operands,
    Queries,
    Softmax,
    Stretch,
    begin_softmax,
    clear_behind,
    finish_softmax,
    keep_tile,
    load_keys,
    load_rows,
    locate,
    raise_scores,
    store_rows,
)
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.spans import tables_of
from sdpa.kernels.triton.tiles import careful_tile
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile, read_of

# A core's 65536 registers for two programs of eight warps, and the largest head and block of keys that fit in them.
SHARED_REGISTERS = 128
SHARING_WARPS = 8
SHARING_SIZE = 64
DOUBTS = 12  # their place among the arguments of the kernel


@triton.jit
def attend(state, queries, given, place, begin, end, scale, MASKED: tl.constexpr, BUILD: tl.constexpr, span=None):
    """The online softmax of one block of Queries over keys [begin, end) of the Operands `given`.

    The queries' tile is [BLOCK_M, BLOCK_D], or its halves where BUILD has them. Of a span, what is full is not masked.
    """
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    CLIP: tl.constexpr = MASKED and (BUILD.LENGTHS or not BUILD.DESCRIBED)
    mask, strides = given.mask, given.strides
    batch = memory_batch(mask, place.batch)
    limit = place.k_first + place.k_length
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        spot = Spot(queries.row, start, queries.rows, start + tl.arange(0, BLOCK_N)[None, :])
        at = Stretch(batch, place.kv_head, place.k_first + start, limit)
        k_tile = load_keys(given.k, strides.k, mask, at, BUILD.D, BLOCK_N, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
        if BUILD.HALVES:
            s = scores_of(queries.tile, k_tile, BUILD.HALVES)
        else:
            s = tl.dot(queries.tile, k_tile.T, input_precision=BUILD.PRECISION)  # [BLOCK_M, BLOCK_N]
        if BUILD.MODIFIED:
            s = modified(s, given.bias, mask, place, spot, scale, BUILD)
        if MASKED:
            if span is None:
                s = tl.where(visible(given.allowed, mask, place, spot, BUILD), s, float("-inf"))
            elif (start < span.full_begin) | (start >= span.full_end):
                s = tl.where(visible(given.allowed, mask, place, spot, BUILD), s, float("-inf"))
        p, state = raise_scores(state, s, unit_of(scale, BUILD), MASKED or BUILD.MODIFIED, BUILD.MODIFIED, BUILD.LIFT)
        if given.dropout is not None:
            stream = place.batch * given.sizes.H + place.head
            p = tl.where(keep_tile(given.dropout, stream, queries.rows, start, BLOCK_M, BLOCK_N), p, 0.0)
        v_tile = load_keys(given.v, strides.v, mask, at, BUILD.DV, BLOCK_N, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
        if BUILD.HALVES:
            acc = add_values(state.acc, p, v_tile, BUILD.HALVES)
        else:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, state.acc, input_precision=BUILD.PRECISION)
        state = Softmax(acc, state.row_sum, state.row_max)
    return state


@triton.jit
def unit_of(scale, BUILD: tl.constexpr):
    """What scores are multiplied by where they are plain products."""
    unit = scale
    if BUILD.MODIFIED:
        unit = 1.0
    return unit


@triton.jit
def attend_all(queries, span, given, place, sinks, scale, BUILD: tl.constexpr):
    """(acc, lse, row_sum) of one block of queries over all the keys of its span."""
    unit = unit_of(scale, BUILD)
    state = begin_softmax(sinks, place.head, unit, BUILD.BLOCK_M, BUILD.BLOCK_DV, BUILD.LIFT)
    shared = (queries, given, place)
    if BUILD.HALVES and BUILD.FULL and (BUILD.LEADING or BUILD.TRAILING):
        # In one loop Triton reads the parts of q from shared memory; for two it keeps them all in registers.
        state = attend(state, *shared, span.begin, span.end, scale, True, BUILD, span)
    else:
        if BUILD.LEADING:
            state = attend(state, *shared, span.begin, span.full_begin, scale, True, BUILD)
        if BUILD.FULL:
            state = attend(state, *shared, span.full_begin, span.full_end, scale, False, BUILD)
        if BUILD.TRAILING:
            state = attend(state, *shared, span.full_end, span.end, scale, True, BUILD)
    acc, row_lse = finish_softmax(state, unit, BUILD.LIFT)
    return acc, row_lse, state.row_sum


@triton.jit
def forward_kernel(q, k, v, out, lse, bias, allowed, strides, sizes, mask, sinks, dropout, doubts,
                   doubt_rows, scale, BUILD: tl.constexpr):  # fmt: skip
    """out [.., BLOCK_M, Dv] and lse of one block of queries of one head; grid: blocks * batch * heads.

    With halves it tells in `doubts` [entries, blocks of doubt_rows queries] which are to be made again; without, it
    makes those only, if there are any.
    """
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, BUILD.REVERSED)
    batch, head = entry // sizes.H, entry % sizes.H
    place = place_of(mask, sizes, batch, head, head // sizes.G)
    row = block * BLOCK_M
    if BUILD.PACKED:
        if mask.q_lengths is None:
            clear_results(out, lse, strides.other, sizes, mask, block, batch, head, BUILD)
        if row >= place.q_length:
            return
    if doubts is not None:
        doubt = doubts + entry * tl.cdiv(sizes.M, doubt_rows) + row // doubt_rows
        if not BUILD.HALVES:
            if tl.load(doubt) == 0:
                return
    memory = memory_batch(mask, batch)
    limit = sizes.M
    if BUILD.PACKED:
        limit = place.q_length
    at = Stretch(memory, head, place.q_first + row, place.q_first + limit)
    q_tile = load_rows(q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, not BUILD.DESCRIBED)
    span = key_span(mask, place, row, BLOCK_M, BUILD)
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    if BUILD.HALVES:
        if BUILD.LENGTHS:  # what lies behind them shall not choose the power of two
            q_tile = tl.where(rows < place.q_length, q_tile, 0.0)
        q_tile, scale, reach = scaled_queries(q_tile, scale, BUILD.HALVES)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout)
    acc, row_lse, row_sum = attend_all(Queries(q_tile, row, rows), span, given, place, sinks, scale, BUILD)
    if BUILD.HALVES:
        tl.store(doubt, is_doubtful(acc, row_sum, reach, BUILD.D, BUILD.DV).to(tl.int32))
    if dropout is not None:
        acc = acc * dropout.inverse_keep
    store_rows(out, strides.other, at, acc, BUILD.DV)
    if lse is not None:
        offsets = row + tl.arange(0, BLOCK_M)
        origin = lse + tl.cast(memory * sizes.H + head, tl.int64) * sizes.rows + place.q_first
        tl.store(origin + offsets, row_lse, mask=offsets < limit)


@triton.jit
def clear_results(out, lse, strides, sizes, mask, block, batch, head, BUILD: tl.constexpr):
    """0, and a log-sum-exp of -inf, in rows behind the last packed sequence: its programs share them."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    if batch == sizes.entries // sizes.H - 1:
        first = tl.load(mask.cu_q + batch + 1) + block * BLOCK_M
        clear_behind(out, strides, head, first, sizes.rows, sizes.blocks, BLOCK_M, BUILD.BLOCK_DV, BUILD.DV)
        if lse is not None:
            for start in tl.range(first, sizes.rows, sizes.blocks * BLOCK_M):
                offsets = start + tl.arange(0, BLOCK_M)
                origin = lse + tl.cast(head, tl.int64) * sizes.rows
                tl.store(origin + offsets, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=offsets < sizes.rows)


def forward_launches(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> tuple[Results, list[Launch]]:
    """Results to be filled, and the launches that fill them."""
    results = empty_results(inputs, problem)
    given, before = prepare(inputs, problem, tile, Side.KEYS)
    if not given.build.HALVES:
        return results, [*before, forward_launch(inputs, results, given, tile)]
    doubts = doubts_of(given, results.out.device)
    again = careful_tile(problem, tile)
    careful, more = prepare(inputs, problem, again, Side.KEYS)
    build = careful.build._replace(HALVES=0, LIFT=0)
    careful = careful._replace(build=build)
    first = forward_launch(inputs, results, given, tile, doubts, tile.BLOCK_M)
    return results, [*before, first, *more, forward_launch(inputs, results, careful, again, doubts, tile.BLOCK_M)]


def forward_launch(
    inputs: AttentionInputs,
    results: Results,
    given: Prepared,
    tile: Tile,
    doubts: Tensor | None = None,
    doubt_rows: int | None = None,
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
        doubts,
        doubt_rows,
        inputs.scale,
        given.build,
    )
    grid = (given.sizes.blocks * given.sizes.entries,)
    return Launch(forward_kernel, grid, args, tile, registers=registers_of(given, tile))


def registers_of(given: Prepared, tile: Tile) -> int | None:
    """Registers that let two programs of eight warps share a core, where halves of small heads need hardly more than
    those. With dropout's generator in the loop they need far more."""
    build = given.build
    small = max(build.BLOCK_D, build.BLOCK_DV, build.BLOCK_N) <= SHARING_SIZE
    shared = build.HALVES and small and tile.num_warps == SHARING_WARPS and given.dropout is None
    return SHARED_REGISTERS if shared else None


def doubts_of(given: Prepared, device: torch.device) -> Tensor:
    """A word for each block of queries: whether float16 parts could not hold what it met. All are written but those
    behind a packed sequence, which none reads."""
    return torch.empty((given.sizes.entries, given.sizes.blocks), dtype=torch.int32, device=device)


def forward_pass(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Pass:
    given, read = with_memory(read_of(inputs)), readable(inputs)
    results, launches = forward_launches(read, problem, tile)
    doubts = launches[-1].args[DOUBTS]
    scratch = (*tables_of(launches), *(() if doubts is None else (doubts,)))
    return forward_pass_of(given, read, results, launches, scratch)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    return run_pass(forward_pass(inputs, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results, RecordedCall | None]:
    """Like `forward`, and what does it again for tensors of the same form."""
    return record_pass(forward_pass(*tensors, problem, tile), problem)
