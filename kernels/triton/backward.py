"""The backward kernels: delta, then dK and dV by blocks of keys, then dQ by blocks of queries.

The probabilities are computed again from the log-sum-exp (FlashAttention-2; Dao, 2023). Blocks of keys work on
transposed scores, so that P^T and dS^T go into their products from registers. There are no atomics, so a call gives
the same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import DENSE_MASKS, block_size, float16_parts_of, readable, section_of, strides_of
from sdpa.kernels.triton.bias_grad import bias_grad_launch, sum_parts
from sdpa.kernels.triton.block_ranges import range_tables
from sdpa.kernels.triton.head_sums import partial_sums, sum_heads_launch
from sdpa.kernels.triton.kernel_arguments import BackwardRows, LoopOver
from sdpa.kernels.triton.launch import GRADIENTS, Launch, Pass, with_memory
from sdpa.kernels.triton.mask import (
    TileCoords,
    cap_slope,
    capped,
    memory_batch,
    of_head,
    score_mod,
    seqlen_info,
    visible,
    visited_keys,
    visited_queries,
)
from sdpa.kernels.triton.one_block import one_block_launch
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order, in_order
from sdpa.kernels.triton.primitives import (
    LOG2E,
    Operands,
    RowRange,
    clear_behind,
    dropout_keep,
    load_lse,
    load_rows,
    locate,
    probabilities,
    store_rows,
    stream_of,
)
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.row_parts import (
    Split,
    add_weighted_rows,
    backward_args,
    load_key_rows,
    load_query_rows,
    load_upstream_rows,
    load_value_rows,
    products_of_rows,
    split_launch,
)
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import Part, heads_of_program, one_block_tile, passes, queries_tile, registers_of
from sdpa.layout import empty_as, with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of
from sdpa.sinks import sinks_grad

DELTA_ROWS = 64  # a few rows a warp: the kernel only streams
DELTA_TILE = Tile(DELTA_ROWS, 0, 4, 1)
DELTA, BASE2 = 4, 5  # places among the arguments of its kernel
FIRST_DELTA = 3  # the place of delta among the tensors that a backward makes, behind the gradients of q, k and v


class KeyTile(NamedTuple):
    """A block of keys, which stays on chip while queries stream."""

    k: tl.tensor  # [BLOCK_N, BLOCK_D]
    v: tl.tensor  # [BLOCK_N, BLOCK_DV]; the keys again where dK is not wanted
    column: tl.tensor


class GradQueryTile(NamedTuple):
    """A block of queries and what belongs to it, which stay on chip while keys stream."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    grad_out: tl.tensor  # [BLOCK_M, BLOCK_DV]
    lse: tl.tensor  # [BLOCK_M]
    delta: tl.tensor  # [BLOCK_M]
    row: tl.tensor


@triton.jit
def delta_kernel(out, grad_out, lse, grad_lse, delta, base2, out_strides, grad_strides, H, rows, width,
                 DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """delta [B, H, width] = rowsum(out * grad_out) - grad_lse, and 0 behind the first `rows`. Grid: blocks * B * H.

    base2 [B, H, width], where wanted, is lse in base 2. It is infinite where there is no row or the row sees no key, so
    that the row's probabilities are 0.
    """
    begin_in_order(ORDER)
    blocks = tl.cdiv(width, BLOCK)
    entry = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK
    batch, head = entry // H, entry % H
    at = RowRange(batch, head, start, rows)
    o = load_rows(out, out_strides, at, DV, BLOCK, BLOCK_DV, False, True)
    g = load_rows(grad_out, grad_strides, at, DV, BLOCK, BLOCK_DV, False, True)
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    offsets = start + tl.arange(0, BLOCK)
    source, target = tl.cast(entry, tl.int64) * rows + offsets, tl.cast(entry, tl.int64) * width + offsets
    if grad_lse is not None:
        total -= tl.load(grad_lse + source, mask=offsets < rows, other=0.0)
    if base2 is not None:
        row_lse = tl.load(lse + source, mask=offsets < rows, other=float("-inf"))
        dead = row_lse == float("-inf")
        total = tl.where(dead, 0.0, total)  # whatever gradient arrived, its product with 0 must be 0
        tl.store(base2 + target, tl.where(dead, float("inf"), row_lse * LOG2E), mask=offsets < width)
    tl.store(delta + target, total, mask=offsets < width)
    end_in_order(ORDER)


@triton.jit
def weights_of(s, row_lse, bias, mask, seqlen, coords, scale, CONFIG: tl.constexpr):
    """(probabilities, derivative of softcap or 1) of a tile of products s. row_lse is [.., 1] or [1, ..]."""
    slope = 1.0
    if mask.softcap is not None:
        slope = cap_slope(capped(s, mask, scale), mask)
    if CONFIG.SCORE_MOD:
        s = score_mod(s, bias, mask, seqlen, coords, scale, CONFIG)
    return probabilities(s, scale, row_lse, CONFIG.SCORE_MOD), slope


@triton.jit
def add_queries(grads, keys, given, seqlen, start, visited, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """(dK [BLOCK_N, BLOCK_D], dV [BLOCK_N, BLOCK_DV]) of one KeyTile, plus what a block of queries of one head of the
    Operands `given` adds. With `visited` (a VisitedRange), its unmasked blocks are not masked."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    CLIP: tl.constexpr = MASKED and (CONFIG.LENGTHS or not CONFIG.TMA)
    dk, dv = grads
    mask, dropout, column = given.mask, given.dropout, keys.column
    columns = column + tl.arange(0, BLOCK_N)[:, None]
    batch = memory_batch(mask, seqlen.batch)
    limit = seqlen.q_first + seqlen.q_length
    origin = tl.cast(batch * given.sizes.H + seqlen.head, tl.int64) * given.sizes.rows + seqlen.q_first
    start = tl.multiple_of(start, BLOCK_M)
    offsets = start + tl.arange(0, BLOCK_M)
    coords = TileCoords(start, column, offsets[None, :], columns)
    at = RowRange(batch, seqlen.head, seqlen.q_first + start, limit)
    q_tile = load_query_rows(given, at, BLOCK_M, CLIP, CONFIG)
    row_lse = load_lse(given.lse + origin, offsets, offsets < seqlen.q_length)
    st = products_of_rows(keys.k, q_tile, CONFIG)  # [BLOCK_N, BLOCK_M]
    pt, slope = weights_of(st, row_lse[None, :], given.bias, mask, seqlen, coords, scale, CONFIG)
    if MASKED:
        if visited is None:
            pt = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), pt, 0.0)
        elif (start < visited.full_begin) | (start >= visited.full_end):
            pt = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), pt, 0.0)
    g_tile = load_upstream_rows(given, at, BLOCK_M, CLIP, CONFIG)
    wt = pt
    if dropout is not None:
        stream = stream_of(dropout, seqlen.batch, seqlen.head, given.sizes.H)
        keep = tl.trans(dropout_keep(dropout, stream, offsets[:, None], column, BLOCK_M, BLOCK_N))
        wt = tl.where(keep, pt * dropout.inverse_keep, 0.0)
    if CONFIG.VALUES:
        dv = add_weighted_rows(dv, wt, g_tile, CONFIG)
    if CONFIG.KEYS:
        row_delta = tl.load(given.delta + origin + offsets, mask=offsets < seqlen.q_length, other=0.0)
        dpt = products_of_rows(keys.v, g_tile, CONFIG)
        if dropout is not None:
            dpt = tl.where(keep, dpt * dropout.inverse_keep, 0.0)
        dst = pt * (dpt - row_delta[None, :])
        if MASKED:
            dst = tl.where(pt == 0.0, 0.0, dst)
        dk = add_weighted_rows(dk, dst * slope, q_tile, CONFIG)
    return dk, dv


@triton.jit
def accumulate_dkdv(grads, keys, given, seqlen, begin, end, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """The same of the queries [begin, end) of one head."""
    for start in tl.range(begin, end, CONFIG.BLOCK_M):
        grads = add_queries(grads, keys, given, seqlen, start, None, scale, MASKED, CONFIG)
    return grads


@triton.jit
def accumulate_in_one_loop(grads, keys, given, seqlen, visited, heads, scale, HEADS: tl.constexpr,
                           CONFIG: tl.constexpr):  # fmt: skip
    """The same of all queries visited, of several heads from that of `seqlen` on where HEADS is set.

    The code of several loops, or of loops in one over heads, takes more registers than there are for float16 parts and
    for heads that share keys. It is long, too, and short problems wait for it.
    """
    MASKED: tl.constexpr = CONFIG.LEADING or CONFIG.TRAILING or not CONFIG.FULL
    blocks = tl.cdiv(tl.maximum(visited.end - visited.begin, 0), CONFIG.BLOCK_M)
    for index in tl.range(0, heads * blocks):
        own, block = seqlen, index
        if HEADS:
            own = of_head(seqlen, seqlen.head + index // blocks)
            block = index % blocks
        unmasked = visited
        if not CONFIG.FULL:
            unmasked = None
        start = visited.begin + block * CONFIG.BLOCK_M
        grads = add_queries(grads, keys, given, own, start, unmasked, scale, MASKED, CONFIG)
    return grads


@triton.jit
def accumulate_head(grads, keys, given, seqlen, visited, scale, CONFIG: tl.constexpr):
    """The same of all queries visited of one head."""
    shared = (keys, given, seqlen)
    if CONFIG.ONE_LOOP:
        grads = accumulate_in_one_loop(grads, *shared, visited, 1, scale, False, CONFIG)
    else:
        if CONFIG.LEADING:
            grads = accumulate_dkdv(grads, *shared, visited.begin, visited.full_begin, scale, True, CONFIG)
        if CONFIG.FULL:
            grads = accumulate_dkdv(grads, *shared, visited.full_begin, visited.full_end, scale, False, CONFIG)
        if CONFIG.TRAILING:
            grads = accumulate_dkdv(grads, *shared, visited.full_end, visited.end, scale, True, CONFIG)
    return grads


@triton.jit
def dkdv_kernel(q, k, v, grad_out, bias, allowed, dk, dv, lse, delta, units, strides, dk_strides, dv_strides, sizes,
                heads, mask, dropout, scale, CONFIG: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """dK and dV, or one of them, of one block of keys, summed over `heads` of those that share them. dK and dV have
    (B, H / heads) heads. Grid: blocks * B * H / heads."""
    # Parts of keys and values were written before, and of packed sequences a program may end before it loads any.
    EARLY: tl.constexpr = CONFIG.PACKED or CONFIG.FLOAT16_PARTS > 0
    if EARLY:
        begin_in_order(ORDER)
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, CONFIG.REVERSED)
    subgroups = sizes.H // heads
    batch, own = entry // subgroups, entry % subgroups
    head = own * heads
    kv_head = head // sizes.G
    column = block * BLOCK_N
    seqlen = seqlen_info(mask, sizes, batch, head, kv_head)
    limit = sizes.N
    if CONFIG.PACKED:
        if mask.k_lengths is None:
            if batch == sizes.entries // subgroups - 1:
                first, total = tl.load(mask.cu_k + batch + 1) + column, sizes.key_rows
                if CONFIG.KEYS:
                    clear_behind(dk, dk_strides, own, first, total, sizes.blocks, BLOCK_N, BLOCK_D, CONFIG.D)
                if CONFIG.VALUES:
                    clear_behind(dv, dv_strides, own, first, total, sizes.blocks, BLOCK_N, BLOCK_DV, CONFIG.DV)
        limit = seqlen.k_length
        if column >= limit:
            end_in_order(ORDER)
            return
    memory = memory_batch(mask, batch)
    seen = seqlen.k_first + seqlen.k_length
    CLIP: tl.constexpr = CONFIG.LENGTHS or not CONFIG.TMA
    at = RowRange(memory, kv_head, seqlen.k_first + column, seen)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta, units=units)
    k_tile = load_key_rows(given, at, BLOCK_N, CLIP, CONFIG)
    v_tile = k_tile
    if CONFIG.KEYS:
        v_tile = load_value_rows(given, at, BLOCK_N, CLIP, CONFIG)
    if not EARLY:
        begin_in_order(ORDER)
    keys = KeyTile(k_tile, v_tile, column)
    grads = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32))
    if CONFIG.ONE_LOOP and mask.query_ranges is None:
        visited = visited_queries(mask, seqlen, column, CONFIG)
        grads = accumulate_in_one_loop(grads, keys, given, seqlen, visited, heads, scale, CONFIG.GROUPED, CONFIG)
    else:
        for g in range(heads):
            own_seqlen = of_head(seqlen, head + g)
            visited = visited_queries(mask, own_seqlen, column, CONFIG)
            grads = accumulate_head(grads, keys, given, own_seqlen, visited, scale, CONFIG)
    rows = column + tl.arange(0, BLOCK_N)[:, None]
    target = RowRange(memory, own, seqlen.k_first + column, seqlen.k_first + limit)
    if CONFIG.KEYS:
        store_rows(dk, dk_strides, target, tl.where(rows < seqlen.k_length, grads[0] * scale, 0.0), CONFIG.D)
    if CONFIG.VALUES:
        store_rows(dv, dv_strides, target, tl.where(rows < seqlen.k_length, grads[1], 0.0), CONFIG.DV)
    end_in_order(ORDER)


@triton.jit
def add_keys(dq, queries, given, seqlen, start, visited, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """dQ [BLOCK_M, BLOCK_D] of one GradQueryTile, plus what a block of keys of the Operands `given` adds.

    With `visited` (a VisitedRange), its unmasked blocks are not masked.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    CLIP: tl.constexpr = MASKED and (CONFIG.LENGTHS or not CONFIG.TMA)
    mask, dropout = given.mask, given.dropout
    rows = queries.row + tl.arange(0, BLOCK_M)[:, None]
    batch = memory_batch(mask, seqlen.batch)
    limit = seqlen.k_first + seqlen.k_length
    start = tl.multiple_of(start, BLOCK_N)
    coords = TileCoords(queries.row, start, rows, start + tl.arange(0, BLOCK_N)[None, :])
    at = RowRange(batch, seqlen.kv_head, seqlen.k_first + start, limit)
    k_tile = load_key_rows(given, at, BLOCK_N, CLIP, CONFIG)
    v_tile = load_value_rows(given, at, BLOCK_N, CLIP, CONFIG)
    s = products_of_rows(queries.q, k_tile, CONFIG)  # [BLOCK_M, BLOCK_N]
    dp = products_of_rows(queries.grad_out, v_tile, CONFIG)
    p, slope = weights_of(s, queries.lse[:, None], given.bias, mask, seqlen, coords, scale, CONFIG)
    if MASKED:
        if visited is None:
            p = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), p, 0.0)
        elif (start < visited.full_begin) | (start >= visited.full_end):
            p = tl.where(visible(given.allowed, mask, seqlen, coords, CONFIG), p, 0.0)
    if dropout is not None:
        stream = stream_of(dropout, seqlen.batch, seqlen.head, given.sizes.H)
        keep = dropout_keep(dropout, stream, rows, start, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp * dropout.inverse_keep, 0.0)
    ds = p * (dp - queries.delta[:, None])
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)
    return add_weighted_rows(dq, ds * slope, k_tile, CONFIG)


@triton.jit
def accumulate_dq(dq, queries, given, seqlen, begin, end, visited, scale, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """The same of the keys [begin, end)."""
    for start in tl.range(begin, end, CONFIG.BLOCK_N):
        dq = add_keys(dq, queries, given, seqlen, start, visited, scale, MASKED, CONFIG)
    return dq


@triton.jit
def dq_kernel(q, k, v, grad_out, bias, allowed, dq, lse, delta, units, strides, dq_strides, sizes, mask, dropout, scale,
              CONFIG: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """dQ of one block of queries of one head. Grid: blocks * B * H."""
    begin_in_order(ORDER)
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, CONFIG.REVERSED)
    batch, head = entry // sizes.H, entry % sizes.H
    seqlen = seqlen_info(mask, sizes, batch, head, head // sizes.G)
    row = block * BLOCK_M
    limit = sizes.M
    if CONFIG.PACKED:
        if mask.q_lengths is None:
            if batch == sizes.entries // sizes.H - 1:
                first = tl.load(mask.cu_q + batch + 1) + row
                clear_behind(dq, dq_strides, head, first, sizes.rows, sizes.blocks, BLOCK_M, BLOCK_D, CONFIG.D)
        limit = seqlen.q_length
        if row >= limit:
            end_in_order(ORDER)
            return
    memory = memory_batch(mask, batch)
    CLIP: tl.constexpr = not CONFIG.TMA
    at = RowRange(memory, head, seqlen.q_first + row, seqlen.q_first + limit)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta, units=units)
    q_tile = load_query_rows(given, at, BLOCK_M, CLIP, CONFIG)
    g_tile = load_upstream_rows(given, at, BLOCK_M, CLIP, CONFIG)
    offsets = row + tl.arange(0, BLOCK_M)
    origin = tl.cast(memory * sizes.H + head, tl.int64) * sizes.rows + seqlen.q_first
    row_lse = load_lse(lse + origin, offsets, offsets < limit)
    row_delta = tl.load(delta + origin + offsets, mask=offsets < limit, other=0.0)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    visited = visited_keys(mask, seqlen, row, BLOCK_M, CONFIG)
    shared = (GradQueryTile(q_tile, g_tile, row_lse, row_delta, row), given, seqlen)
    if CONFIG.ONE_LOOP and CONFIG.FULL and (CONFIG.LEADING or CONFIG.TRAILING):
        dq_tile = accumulate_dq(dq_tile, *shared, visited.begin, visited.end, visited, scale, True, CONFIG)
    else:
        if CONFIG.LEADING:
            dq_tile = accumulate_dq(dq_tile, *shared, visited.begin, visited.full_begin, None, scale, True, CONFIG)
        if CONFIG.FULL:
            dq_tile = accumulate_dq(dq_tile, *shared, visited.full_begin, visited.full_end, None, scale, False, CONFIG)
        if CONFIG.TRAILING:
            dq_tile = accumulate_dq(dq_tile, *shared, visited.full_end, visited.end, None, scale, True, CONFIG)
    store_rows(dq, dq_strides, at, dq_tile * scale, CONFIG.D)
    end_in_order(ORDER)


class Backward(NamedTuple):
    """A backward as launches: what they fill, and what the gradients of bias and sinks are made of."""

    grads: Gradients
    launches: list[Launch]
    # delta (B, H, M), where no single pass finds it for itself, float16 parts, and partial sums of dK and dV
    scratch: tuple[Tensor, ...]
    bias_parts: Tensor | None  # (parts, *bias.shape), whose sum is the gradient of the bias


def readable_rows(results: Results) -> Results:
    """Results, or their gradients, as kernels read them. The lse of another kernel may be a slice of a padded one."""
    out, lse = results
    return Results(with_dense_rows(out), None if lse is None else lse.contiguous())


def backward_pass(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Pass:
    given = with_memory(read_of(inputs, results, upstream))
    # Of one block of keys a bias is read once for all that share it, but a boolean mask for each.
    dense = DENSE_MASKS if one_block_tile(problem) is None else ("allowed",)
    tensors = readable(inputs, problem, dense), readable_rows(results), readable_rows(upstream)
    grads, launches, scratch, bias_parts = backward_launches(*tensors, problem, tile)
    made = (*grads[:3], *scratch, *range_tables(launches), *(() if bias_parts is None else (bias_parts,)))
    finish = finish_of(tensors[0], len(read_of(tensors[0])) + 1, None if bias_parts is None else len(made) - 1)
    return Pass(launches, given, read_of(*tensors), made, finish, gradient_fills(inputs))


def finish_of(
    inputs: AttentionInputs, lse: int, bias_parts: int | None
) -> tuple[int, ...] | Callable[[Sequence[Tensor], Sequence[Tensor]], Gradients]:
    """What makes Gradients of the tensors (read, made) of a backward. `lse` and `bias_parts` are places among them."""
    sinks = None if inputs.sinks is None else [t is inputs.sinks for t in read_of(inputs)].index(True)
    bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    if bias_parts is None and sinks is None:
        return GRADIENTS

    def finish(read: Sequence[Tensor], made: Sequence[Tensor]) -> Gradients:
        bias = None if bias_parts is None else sum_parts(made[bias_parts], bias_dtype)
        grad = None if sinks is None else sinks_grad(read[sinks], read[lse], made[FIRST_DELTA])
        return Gradients(*made[:FIRST_DELTA], bias, grad)

    return finish


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Gradients:
    return run_pass(backward_pass(inputs, results, upstream, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Gradients, RecordedCall | None]:
    """Like `backward`, and what does it again for tensors of the same form."""
    return record_pass(backward_pass(*tensors, problem, tile), problem)


def backward_launches(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Backward:
    """The launches of a backward. `inputs`, `results` and `upstream` are readable."""
    grads = empty_gradients(inputs)
    whole = one_block_tile(problem)
    if whole is not None:
        bias_parts, launch = one_block_launch(inputs, problem, whole, results.lse, upstream, grads)
        return Backward(grads, [launch], (), bias_parts)
    delta, first = delta_launch(results.out, upstream.out, upstream.lse)
    row = BackwardRows(upstream.out, results.lse, delta)
    split, before = None, [first]
    if float16_parts_of(problem):
        split, second = split_launch((*inputs[:3], upstream.out), float16_parts_of(problem))
        before.append(second)
    heads = heads_of_program(problem, tile)
    sums = grads if heads == problem.G else partial_sums(inputs, heads)
    ranges, launches = dkdv_launches(inputs, problem, tile, row, sums, split)
    more_ranges, launch = dq_launch(inputs, problem, tile, row, grads, split)
    launches.append(launch)
    bias_parts = None
    if "bias_grad" in problem.features:
        bias_parts, launch = bias_grad_launch(inputs, problem, tile, row, split)
        launches.append(launch)
    scratch = () if split is None else (*split[:-1], *split.units)
    summed = []
    if sums is not grads:
        summed, scratch = [sum_heads_launch(sums, grads)], (*scratch, sums.k, sums.v)
    launches = in_order(target_of(problem.device), [*before, *ranges, *more_ranges], launches, summed)
    return Backward(grads, launches, (delta, *scratch), bias_parts)


def empty_gradients(inputs: AttentionInputs) -> Gradients:
    """Gradients to be filled, in the memory order of their tensors.

    The kernels clear the rows behind the last packed sequence. The rows behind a sequence's own length are 0 already.
    """
    grads = Gradients(*(empty_as(t, t.shape[3]) for t in inputs[:3]))
    for number, value in gradient_fills(inputs):
        grads[number].fill_(value)
    return grads


def gradient_fills(inputs: AttentionInputs) -> tuple[tuple[int, float], ...]:
    """(number of a gradient, what it holds before the launches), of q, k and v."""
    if inputs.cu_q is None:
        return ()
    queries = ((0, 0.0),) if inputs.q_lengths is not None else ()
    no_programs = inputs.k_lengths is not None or not inputs.max_k  # for some keys, or for all
    return (*queries, (1, 0.0), (2, 0.0)) if no_programs else queries


def delta_launch(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Launch]:
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    return delta, Launch(delta_kernel, *delta_arguments(out, grad_out, None, grad_lse, delta, None), DELTA_TILE)


def row_launch(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, multiple: int
) -> tuple[Tensor, Tensor, Launch]:
    """(lse in base 2, delta, the launch that fills them). Both are (B * H, queries), padded to a multiple of rows."""
    B, H, rows = out.shape[:3]
    shape = (2, B * H, -(-rows // multiple) * multiple)
    base2, delta = torch.empty(shape, dtype=torch.float32, device=out.device)
    arguments = delta_arguments(out, grad_out, lse, grad_lse, delta, base2)
    return base2, delta, Launch(delta_kernel, *arguments, DELTA_TILE)


def delta_arguments(
    out: Tensor, grad_out: Tensor, lse: Tensor | None, grad_lse: Tensor | None, delta: Tensor, base2: Tensor | None
) -> tuple[tuple[int], tuple]:
    """The grid and the arguments of delta_kernel."""
    B, H, rows, Dv = out.shape
    width = delta.shape[-1]
    sizes = (strides_of(out), strides_of(grad_out), H, rows, width, Dv, DELTA_ROWS, block_size(Dv), ALONE.value)
    return (-(-width // DELTA_ROWS) * B * H,), (out, grad_out, lse, grad_lse, delta, base2, *sizes)


def dkdv_launches(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    tile: Tile,
    row: BackwardRows,
    sums: Gradients,
    split: Split | None,
) -> tuple[list[Launch], list[Launch]]:
    """The launches that find block ranges, and those of dK and dV: one for both, or two where the registers do not hold
    both. A program visits as many heads of queries as share one of `sums`."""
    ranges, launches, heads = [], [], problem.H // sums.k.shape[1]
    entries = problem.B * problem.H // heads
    for part, parts_tile in passes(problem, tile):
        given, units, before = backward_args(inputs, problem, parts_tile, LoopOver.QUERIES, row, split)
        config = given.config._replace(KEYS=part is not Part.VALUES, VALUES=part is not Part.KEYS, GROUPED=heads > 1)
        sizes = given.sizes._replace(entries=entries, section=section_of(problem, entries))
        targets = (sums.k, sums.v, row.lse, row.delta, units, given.strides, strides_of(sums.k), strides_of(sums.v))
        rest = (given.mask, given.dropout, inputs.scale, config, ALONE.value)
        args = (*given.tensors, *targets, sizes, heads, *rest)
        grid = (sizes.blocks * sizes.entries,)
        ranges += before
        launches.append(Launch(dkdv_kernel, grid, args, parts_tile, registers=registers_of(problem)))
    return ranges, launches


def dq_launch(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    tile: Tile,
    row: BackwardRows,
    grads: Gradients,
    split: Split | None,
) -> tuple[list[Launch], Launch]:
    """The launches that find block ranges, and that of dQ."""
    tile = queries_tile(problem, tile)
    given, units, before = backward_args(inputs, problem, tile, LoopOver.KEYS, row, split)
    targets = (grads.q, row.lse, row.delta, units, given.strides, strides_of(grads.q))
    args = (*given.tensors, *targets, given.sizes, given.mask, given.dropout, inputs.scale, given.config, ALONE.value)
    grid = (given.sizes.blocks * given.sizes.entries,)
    return before, Launch(dq_kernel, grid, args, tile, registers=registers_of(problem))
