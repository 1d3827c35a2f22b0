"""The forward loop: FlashAttention-2's (Dao, 2023) with every mask as a policy, and its launch."""

from __future__ import annotations

import triton
import triton.language as tl

from sdpa.kernels.triton.arguments import empty_results, prepare, strides_of
from sdpa.kernels.triton.launch import Launch, run
from sdpa.kernels.triton.mask import Spot, key_span, memory_batch, modified, place_of, visible
from sdpa.kernels.triton.nouns import Side
from sdpa.kernels.triton.primitives import (
    Operands,
    Queries,
    Softmax,
    Stretch,
    begin_softmax,
    finish_softmax,
    keep_tile,
    load_keys,
    load_rows,
    locate,
    raise_scores,
    store_rows,
)
from sdpa.kernels.triton.replay import Replay, run_recording
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile


@triton.jit
def attend(state, queries, given, place, begin, end, scale, MASKED: tl.constexpr, BUILD: tl.constexpr):
    """The online softmax of one block of Queries over keys [begin, end) of the Operands `given`."""
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
        s = tl.dot(queries.tile, k_tile.T, input_precision=BUILD.PRECISION)  # [BLOCK_M, BLOCK_N]
        if BUILD.MODIFIED:
            s = modified(s, given.bias, mask, place, spot, scale, BUILD)
        if MASKED:
            s = tl.where(visible(given.allowed, mask, place, spot, BUILD), s, float("-inf"))
        p, state = raise_scores(state, s, unit_of(scale, BUILD), MASKED or BUILD.MODIFIED, BUILD.MODIFIED)
        if given.dropout is not None:
            stream = place.batch * given.sizes.H + place.head
            p = tl.where(keep_tile(given.dropout, stream, queries.rows, start, BLOCK_M, BLOCK_N), p, 0.0)
        v_tile = load_keys(given.v, strides.v, mask, at, BUILD.DV, BLOCK_N, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
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
def forward_kernel(q, k, v, out, lse, bias, allowed, strides, sizes, mask, sinks, dropout, scale, BUILD: tl.constexpr):
    """out [.., BLOCK_M, Dv] and lse of one block of queries of one head; grid: blocks * batch * heads."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, BUILD.REVERSED)
    batch, head = entry // sizes.H, entry % sizes.H
    place = place_of(mask, sizes, batch, head, head // sizes.G)
    row = block * BLOCK_M
    if BUILD.PACKED:
        if row >= place.q_length:
            return
    memory = memory_batch(mask, batch)
    limit = sizes.M
    if BUILD.PACKED:
        limit = place.q_length
    at = Stretch(memory, head, place.q_first + row, place.q_first + limit)
    q_tile = load_rows(q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, not BUILD.DESCRIBED)
    unit = unit_of(scale, BUILD)
    state = begin_softmax(sinks, head, unit, BLOCK_M, BUILD.BLOCK_DV)
    span = key_span(mask, place, row, BLOCK_M, BUILD)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout)
    shared = (Queries(q_tile, row, row + tl.arange(0, BLOCK_M)[:, None]), given, place)
    if BUILD.LEADING:
        state = attend(state, *shared, span.begin, span.full_begin, scale, True, BUILD)
    if BUILD.FULL:
        state = attend(state, *shared, span.full_begin, span.full_end, scale, False, BUILD)
    if BUILD.TRAILING:
        state = attend(state, *shared, span.full_end, span.end, scale, True, BUILD)
    acc, row_lse = finish_softmax(state, unit)
    if dropout is not None:
        acc = acc * dropout.inverse_keep
    store_rows(out, strides.other, at, acc, BUILD.DV)
    if lse is not None:
        offsets = row + tl.arange(0, BLOCK_M)
        origin = lse + tl.cast(memory * sizes.H + head, tl.int64) * sizes.rows + place.q_first
        tl.store(origin + offsets, row_lse, mask=offsets < limit)


def forward_launches(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> tuple[Results, list[Launch]]:
    """Results to be filled, and the launches that fill them."""
    results = empty_results(inputs, problem)
    given, before = prepare(inputs, problem, tile, Side.KEYS)
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
    )
    grid = (given.sizes.blocks * given.sizes.entries,)
    return results, [*before, Launch(forward_kernel, grid, (*args, inputs.scale, given.build), tile)]


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    results, launches = forward_launches(inputs, problem, tile)
    run(launches, problem)
    return results


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results, Replay | None]:
    """Like `forward`, and what does it again for tensors of the same form."""
    (inputs,) = tensors
    results, launches = forward_launches(inputs, problem, tile)
    return results, run_recording(launches, problem, inputs[:3], results, Results._make)
