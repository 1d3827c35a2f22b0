"""The backward: delta, then dK and dV by blocks of keys, then dQ by blocks of queries; no atomics, the same bits twice.

The probabilities are computed again from the log-sum-exp (FlashAttention-2; Dao, 2023). Blocks of keys work on
transposed scores, so that P^T and dS^T go into their products from registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, prepare, readable, strides_of
from sdpa.kernels.triton.bias_grad import bias_grad_launch, sum_parts
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.mask import (
    Spot,
    cap_slope,
    capped,
    key_span,
    memory_batch,
    modified,
    place_of,
    query_span,
    visible,
)
from sdpa.kernels.triton.nouns import Rows, Side
from sdpa.kernels.triton.primitives import (
    LOG2E,
    Operands,
    Stretch,
    clear_behind,
    keep_tile,
    load_lse,
    load_rows,
    locate,
    probabilities,
    store_rows,
)
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.spans import tables_of
from sdpa.kernels.triton.tiles import Part, passes, queries_tile
from sdpa.layout import empty_as
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of

DELTA_ROWS = 64  # a few rows a warp: the kernel only streams
DELTA_TILE = Tile(DELTA_ROWS, 0, 4, 1)
DELTA, BASE2 = 4, 5  # places among the arguments of its kernel
FIRST_DELTA = 3  # the place of delta among the tensors that a backward makes, behind the gradients of q, k and v


class KeyBlock(NamedTuple):
    """A block of keys, which stays while queries stream."""

    k: tl.tensor  # [BLOCK_N, BLOCK_D]
    v: tl.tensor  # [BLOCK_N, BLOCK_DV]; the keys again where dK is not wanted
    column: tl.tensor


class QueryBlock(NamedTuple):
    """A block of queries and what belongs to it, which stay while keys stream."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    grad_out: tl.tensor  # [BLOCK_M, BLOCK_DV]
    lse: tl.tensor  # [BLOCK_M]
    delta: tl.tensor  # [BLOCK_M]
    row: tl.tensor


@triton.jit
def delta_kernel(out, grad_out, lse, grad_lse, delta, base2, out_strides, grad_strides, H, rows, width,
                 DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """delta [B, H, width] = rowsum(out * grad_out) - grad_lse, and 0 behind the first `rows`. Grid: blocks * B * H.

    base2 [B, H, width], where wanted: lse in base 2, infinite where there is no row or the row sees no key, so that its
    probabilities are 0.
    """
    blocks = tl.cdiv(width, BLOCK)
    entry = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK
    batch, head = entry // H, entry % H
    at = Stretch(batch, head, start, rows)
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
        total = tl.where(dead, 0.0, total)  # whatever came from above, its product with 0 shall be 0
        tl.store(base2 + target, tl.where(dead, float("inf"), row_lse * LOG2E), mask=offsets < width)
    tl.store(delta + target, total, mask=offsets < width)


@triton.jit
def weights_of(s, row_lse, bias, mask, place, spot, scale, BUILD: tl.constexpr):
    """(probabilities, derivative of softcap or 1) of a tile of products s; row_lse is [.., 1] or [1, ..]."""
    slope = 1.0
    if mask.softcap is not None:
        slope = cap_slope(capped(s, mask, scale), mask)
    if BUILD.MODIFIED:
        s = modified(s, bias, mask, place, spot, scale, BUILD)
    return probabilities(s, scale, row_lse, BUILD.MODIFIED), slope


@triton.jit
def collect_keys(grads, keys, given, place, begin, end, scale, MASKED: tl.constexpr, BUILD: tl.constexpr):
    """(dK, dV) of one KeyBlock with what queries [begin, end) of one head of the Operands `given` add."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    CLIP: tl.constexpr = MASKED and (BUILD.LENGTHS or not BUILD.DESCRIBED)
    dk, dv = grads
    mask, strides, dropout, column = given.mask, given.strides, given.dropout, keys.column
    columns = column + tl.arange(0, BLOCK_N)[:, None]
    batch = memory_batch(mask, place.batch)
    limit = place.q_first + place.q_length
    origin = tl.cast(batch * given.sizes.H + place.head, tl.int64) * given.sizes.rows + place.q_first
    for start in tl.range(begin, end, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        offsets = start + tl.arange(0, BLOCK_M)
        spot = Spot(start, column, offsets[None, :], columns)
        at = Stretch(batch, place.head, place.q_first + start, limit)
        q_tile = load_rows(given.q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
        row_lse = load_lse(given.lse + origin, offsets, offsets < place.q_length)
        st = tl.dot(keys.k, q_tile.T, input_precision=BUILD.PRECISION)  # [BLOCK_N, BLOCK_M]
        pt, slope = weights_of(st, row_lse[None, :], given.bias, mask, place, spot, scale, BUILD)
        if MASKED:
            pt = tl.where(visible(given.allowed, mask, place, spot, BUILD), pt, 0.0)
        g_tile = load_rows(given.grad_out, strides.other, at, BUILD.DV, BLOCK_M, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
        wt = pt
        if dropout is not None:
            stream = place.batch * given.sizes.H + place.head
            keep = tl.trans(keep_tile(dropout, stream, offsets[:, None], column, BLOCK_M, BLOCK_N))
            wt = tl.where(keep, pt * dropout.inverse_keep, 0.0)
        if BUILD.VALUES:
            dv = tl.dot(wt.to(g_tile.dtype), g_tile, dv, input_precision=BUILD.PRECISION)
        if BUILD.KEYS:
            row_delta = tl.load(given.delta + origin + offsets, mask=offsets < place.q_length, other=0.0)
            dpt = tl.dot(keys.v, g_tile.T, input_precision=BUILD.PRECISION)
            if dropout is not None:
                dpt = tl.where(keep, dpt * dropout.inverse_keep, 0.0)
            dst = pt * (dpt - row_delta[None, :])
            if MASKED:
                dst = tl.where(pt == 0.0, 0.0, dst)
            dk = tl.dot((dst * slope).to(q_tile.dtype), q_tile, dk, input_precision=BUILD.PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(q, k, v, grad_out, bias, allowed, dk, dv, lse, delta, strides, dk_strides, dv_strides, sizes, mask,
                dropout, scale, BUILD: tl.constexpr):  # fmt: skip
    """dK and dV, or one of them, of one block of keys, summed over the heads of its group. Grid: blocks * B * Hkv."""
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    BLOCK_D: tl.constexpr = BUILD.BLOCK_D
    BLOCK_DV: tl.constexpr = BUILD.BLOCK_DV
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, BUILD.REVERSED)
    kv_heads = sizes.H // sizes.G
    batch, kv_head = entry // kv_heads, entry % kv_heads
    column = block * BLOCK_N
    place = place_of(mask, sizes, batch, kv_head * sizes.G, kv_head)
    limit = sizes.N
    if BUILD.PACKED:
        if mask.k_lengths is None:
            if batch == sizes.entries // kv_heads - 1:
                first, total = tl.load(mask.cu_k + batch + 1) + column, sizes.key_rows
                if BUILD.KEYS:
                    clear_behind(dk, dk_strides, kv_head, first, total, sizes.blocks, BLOCK_N, BLOCK_D, BUILD.D)
                if BUILD.VALUES:
                    clear_behind(dv, dv_strides, kv_head, first, total, sizes.blocks, BLOCK_N, BLOCK_DV, BUILD.DV)
        limit = place.k_length
        if column >= limit:
            return
    memory = memory_batch(mask, batch)
    seen = place.k_first + place.k_length
    CLIP: tl.constexpr = BUILD.LENGTHS or not BUILD.DESCRIBED
    at = Stretch(memory, kv_head, place.k_first + column, seen)
    k_tile = load_rows(k, strides.k, at, BUILD.D, BLOCK_N, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    v_tile = k_tile
    if BUILD.KEYS:
        v_tile = load_rows(v, strides.v, at, BUILD.DV, BLOCK_N, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
    keys = KeyBlock(k_tile, v_tile, column)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta)
    grads = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32))
    for g in range(sizes.G):
        its_place = place_of(mask, sizes, batch, kv_head * sizes.G + g, kv_head)
        span = query_span(mask, its_place, column, BUILD)
        shared = (keys, given, its_place)
        if BUILD.LEADING:
            grads = collect_keys(grads, *shared, span.begin, span.full_begin, scale, True, BUILD)
        if BUILD.FULL:
            grads = collect_keys(grads, *shared, span.full_begin, span.full_end, scale, False, BUILD)
        if BUILD.TRAILING:
            grads = collect_keys(grads, *shared, span.full_end, span.end, scale, True, BUILD)
    rows = column + tl.arange(0, BLOCK_N)[:, None]
    target = Stretch(memory, kv_head, place.k_first + column, place.k_first + limit)
    if BUILD.KEYS:
        store_rows(dk, dk_strides, target, tl.where(rows < place.k_length, grads[0] * scale, 0.0), BUILD.D)
    if BUILD.VALUES:
        store_rows(dv, dv_strides, target, tl.where(rows < place.k_length, grads[1], 0.0), BUILD.DV)


@triton.jit
def collect_queries(dq, queries, given, place, begin, end, scale, MASKED: tl.constexpr, BUILD: tl.constexpr):
    """dQ of one QueryBlock with what keys [begin, end) of the Operands `given` add."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_N: tl.constexpr = BUILD.BLOCK_N
    CLIP: tl.constexpr = MASKED and (BUILD.LENGTHS or not BUILD.DESCRIBED)
    mask, strides, dropout = given.mask, given.strides, given.dropout
    rows = queries.row + tl.arange(0, BLOCK_M)[:, None]
    batch = memory_batch(mask, place.batch)
    limit = place.k_first + place.k_length
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        spot = Spot(queries.row, start, rows, start + tl.arange(0, BLOCK_N)[None, :])
        at = Stretch(batch, place.kv_head, place.k_first + start, limit)
        k_tile = load_rows(given.k, strides.k, at, BUILD.D, BLOCK_N, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
        v_tile = load_rows(given.v, strides.v, at, BUILD.DV, BLOCK_N, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
        s = tl.dot(queries.q, k_tile.T, input_precision=BUILD.PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(queries.grad_out, v_tile.T, input_precision=BUILD.PRECISION)
        p, slope = weights_of(s, queries.lse[:, None], given.bias, mask, place, spot, scale, BUILD)
        if MASKED:
            p = tl.where(visible(given.allowed, mask, place, spot, BUILD), p, 0.0)
        if dropout is not None:
            stream = place.batch * given.sizes.H + place.head
            keep = keep_tile(dropout, stream, rows, start, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * dropout.inverse_keep, 0.0)
        ds = p * (dp - queries.delta[:, None])
        if MASKED:
            ds = tl.where(p == 0.0, 0.0, ds)
        ds = ds * slope
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=BUILD.PRECISION)
    return dq


@triton.jit
def queries_kernel(q, k, v, grad_out, bias, allowed, dq, lse, delta, strides, dq_strides, sizes, mask, dropout, scale,
                   BUILD: tl.constexpr):  # fmt: skip
    """dQ of one block of queries of one head. Grid: blocks * B * H."""
    BLOCK_M: tl.constexpr = BUILD.BLOCK_M
    BLOCK_D: tl.constexpr = BUILD.BLOCK_D
    block, entry = locate(sizes.blocks, sizes.entries, sizes.section, BUILD.REVERSED)
    batch, head = entry // sizes.H, entry % sizes.H
    place = place_of(mask, sizes, batch, head, head // sizes.G)
    row = block * BLOCK_M
    limit = sizes.M
    if BUILD.PACKED:
        if mask.q_lengths is None:
            if batch == sizes.entries // sizes.H - 1:
                first = tl.load(mask.cu_q + batch + 1) + row
                clear_behind(dq, dq_strides, head, first, sizes.rows, sizes.blocks, BLOCK_M, BLOCK_D, BUILD.D)
        limit = place.q_length
        if row >= limit:
            return
    memory = memory_batch(mask, batch)
    CLIP: tl.constexpr = not BUILD.DESCRIBED
    at = Stretch(memory, head, place.q_first + row, place.q_first + limit)
    q_tile = load_rows(q, strides.q, at, BUILD.D, BLOCK_M, BUILD.BLOCK_D, BUILD.DESCRIBED, CLIP)
    g_tile = load_rows(grad_out, strides.other, at, BUILD.DV, BLOCK_M, BUILD.BLOCK_DV, BUILD.DESCRIBED, CLIP)
    offsets = row + tl.arange(0, BLOCK_M)
    origin = tl.cast(memory * sizes.H + head, tl.int64) * sizes.rows + place.q_first
    row_lse = load_lse(lse + origin, offsets, offsets < limit)
    row_delta = tl.load(delta + origin + offsets, mask=offsets < limit, other=0.0)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    span = key_span(mask, place, row, BLOCK_M, BUILD)
    given = Operands(k, v, bias, allowed, strides, sizes, mask, dropout, q, grad_out, lse, delta)
    shared = (QueryBlock(q_tile, g_tile, row_lse, row_delta, row), given, place)
    if BUILD.LEADING:
        dq_tile = collect_queries(dq_tile, *shared, span.begin, span.full_begin, scale, True, BUILD)
    if BUILD.FULL:
        dq_tile = collect_queries(dq_tile, *shared, span.full_begin, span.full_end, scale, False, BUILD)
    if BUILD.TRAILING:
        dq_tile = collect_queries(dq_tile, *shared, span.full_end, span.end, scale, True, BUILD)
    store_rows(dq, dq_strides, at, dq_tile * scale, BUILD.D)


class Backward(NamedTuple):
    """A backward as launches: what they fill, and what the gradients of bias and sinks are made of."""

    grads: Gradients
    launches: list[Launch]
    delta: Tensor  # (B, H, M)
    bias_parts: Tensor | None  # (parts, *bias.shape), whose sum is the gradient of the bias


def tensors_of(inputs: AttentionInputs, results: Results, upstream: Results) -> tuple[Tensor, ...]:
    """What a backward reads, in the order of a recorded call."""
    rest = () if upstream.lse is None else (upstream.lse,)
    return (*read_of(inputs), *results, upstream.out, *rest)


def readable_rows(results: Results) -> Results:
    """Results, or their gradients, as kernels read them; another kernel's lse may be a slice of a padded one."""
    out, lse = results
    return Results(out if out.stride(3) == 1 else out.contiguous(), None if lse is None else lse.contiguous())


def backward_pass(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Pass:
    given = with_memory(tensors_of(inputs, results, upstream))
    tensors = readable(inputs), readable_rows(results), readable_rows(upstream)
    grads, launches, delta, bias_parts = backward_launches(*tensors, problem, tile)
    made = (*grads[:3], delta, *tables_of(launches), *(() if bias_parts is None else (bias_parts,)))
    finish = finish_of(tensors[0], len(read_of(tensors[0])) + 1, None if bias_parts is None else len(made) - 1)
    return Pass(launches, given, tensors_of(*tensors), made, finish, gradient_fills(inputs))


def finish_of(
    inputs: AttentionInputs, lse: int, bias_parts: int | None
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Gradients]:
    """What makes Gradients of the tensors (read, made) of a backward; `lse` and `bias_parts` are places among them."""
    sinks = None if inputs.sinks is None else [t is inputs.sinks for t in read_of(inputs)].index(True)
    bias_dtype = None if inputs.bias is None else inputs.bias.dtype

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
    delta, first = delta_launch(results.out, upstream.out, upstream.lse)
    row = Rows(upstream.out, results.lse, delta)
    grads = empty_gradients(inputs)
    launches = [
        first,
        *keys_launches(inputs, problem, tile, row, grads),
        *queries_launches(inputs, problem, tile, row, grads),
    ]
    bias_parts = None
    if "bias_grad" in problem.features:
        bias_parts, launch = bias_grad_launch(inputs, problem, tile, row)
        launches.append(launch)
    return Backward(grads, launches, delta, bias_parts)


def empty_gradients(inputs: AttentionInputs) -> Gradients:
    """Gradients in the layouts of their tensors. Rows behind the last packed sequence are the kernels' to clear; those
    behind a sequence's own length are 0 already."""
    grads = Gradients(*(empty_as(t, t.shape[3]) for t in inputs[:3]))
    for place, value in gradient_fills(inputs):
        grads[place].fill_(value)
    return grads


def gradient_fills(inputs: AttentionInputs) -> tuple[tuple[int, float], ...]:
    """What the gradients of q, k and v hold before the launches, by place."""
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
    """lse in base 2 and delta, both (B * H, queries) with rows filled up to a multiple, and the launch that makes
    them."""
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
    sizes = (strides_of(out), strides_of(grad_out), H, rows, width, Dv, DELTA_ROWS, block_size(Dv))
    return (-(-width // DELTA_ROWS) * B * H,), (out, grad_out, lse, grad_lse, delta, base2, *sizes)


def keys_launches(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, row: Rows, grads: Gradients
) -> list[Launch]:
    """dK and dV in one pass, or in two where the registers do not hold the sums of both."""
    launches = []
    for part, parts_tile in passes(problem, tile):
        given, before = prepare(inputs, problem, parts_tile, Side.QUERIES, row.grad_out)
        build = given.build._replace(KEYS=part is not Part.VALUES, VALUES=part is not Part.KEYS)
        targets = (grads.k, grads.v, row.lse, row.delta, given.strides, strides_of(grads.k), strides_of(grads.v))
        args = (*given.tensors, *targets, given.sizes, given.mask, given.dropout, inputs.scale, build)
        grid = (given.sizes.blocks * given.sizes.entries,)
        launches += [*before, Launch(keys_kernel, grid, args, parts_tile)]
    return launches


def queries_launches(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, row: Rows, grads: Gradients
) -> list[Launch]:
    tile = queries_tile(problem, tile)
    given, before = prepare(inputs, problem, tile, Side.KEYS, row.grad_out)
    targets = (grads.q, row.lse, row.delta, given.strides, strides_of(grads.q))
    args = (*given.tensors, *targets, given.sizes, given.mask, given.dropout, inputs.scale, given.build)
    grid = (given.sizes.blocks * given.sizes.entries,)
    return [*before, Launch(queries_kernel, grid, args, tile)]


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum of P_sink * delta over batch and rows."""
    weight = torch.exp(sinks.float().view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
