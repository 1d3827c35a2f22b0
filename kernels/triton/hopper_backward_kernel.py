"""Hopper's backward in Gluon: the warps' roles of the forward kernel, in two or three passes without atomics.

A pass keeps blocks of a and b and lets x and y stream by, and every product is one of four:
  S = a x^T    dP = b y^T    grad_a += dS x    grad_b += P y    with P = exp(S - lse), dS = P (dP - delta)
Over blocks of keys a, b, x, y are k, v, q, grad_out (scores are transposed: a row is a key) and the sums are dK and dV;
over blocks of queries they are q, grad_out, k, v and the sum is dQ. P and dS go into their products from registers.
Seven products in place of the five of one pass with atomics, but the same bits every time, and nothing in memory beside
the results and two numbers per query. At D = 256 the registers hold one sum, and dV and dK have a pass each.

A group of four warps owns 64 of the rows that stay; one more warp only starts bulk copies. While one group computes dS,
the products of the others run. Who waits for whom:
  own_full[g]              a and b of group g are in shared memory: once
  x_full[s], x_empty[s]    stage s of a ring of blocks of x and, over blocks of keys, of their rows' lse and delta; and
  y_full[s], y_empty[s]    of y: block i is in stage i % STAGES, as that stage's use i // STAGES (see hopper_kernel.py)
The loader's order (x, then y) is the order in which groups ask, so no wait can close a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sdpa.kernels.triton.hopper_parts import GROUP_ROWS, GROUP_WARPS, LANE_BITS, barriers
from sdpa.kernels.triton.hopper_schedule import entry_and_block


class Operands(NamedTuple):
    """Descriptors of tensors in memory, or their places in shared memory."""

    a: Any
    b: Any
    x: Any
    y: Any
    grad_a: Any
    grad_b: Any
    lse: Any  # (B * H, queries), in base 2
    delta: Any


class Barriers(NamedTuple):
    own_full: Any
    x_full: Any
    x_empty: Any
    y_full: Any
    y_empty: Any


class Schedule(NamedTuple):
    """The grid: `blocks` that stay for each of `entries` = B * heads, of which `section` lie side by side."""

    blocks: Any
    entries: Any
    section: Any
    heads: Any
    group: Any  # query heads per key head


class Band(NamedTuple):
    """Row r sees columns r - near to r + far, below `limit`."""

    near: Any
    far: Any
    limit: Any


class Factors(NamedTuple):
    scale: Any
    scale_log2: Any


class Place(NamedTuple):
    batch: Any
    head: Any
    row: Any  # the first of the block that stays
    begin: Any  # of the blocks that stream
    count: Any


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled."""

    KEYS: bool  # blocks of keys stay
    GRAD_A: bool
    GRAD_B: bool
    OWN: int  # rows that stay
    STEP: int  # rows that stream at a time
    D: int
    STAGES: int
    NEAR: bool  # rows are cut off in front
    FAR: bool  # and behind
    REVERSED: bool  # the last blocks take longest
    GROUP_REGISTERS: int
    LOADER_REGISTERS: int


@gluon.jit
def place_of(schedule, band, BUILD: gl.constexpr):
    """The block of this program, the longest first."""
    entry, block = entry_and_block(gl.program_id(0), schedule)
    if BUILD.REVERSED:
        block = schedule.blocks - 1 - block
    row = block * BUILD.OWN
    begin = 0
    if BUILD.NEAR:
        begin = gl.maximum(row - band.near, 0) // BUILD.STEP
    end = band.limit
    if BUILD.FAR:
        end = gl.minimum(end, row + BUILD.OWN + band.far)
    count = gl.maximum(gl.cdiv(gl.maximum(end, 0), BUILD.STEP) - begin, 0)
    return Place(entry // schedule.heads, entry % schedule.heads, row, begin, count)


@gluon.jit
def is_cut(row, start, band, BUILD: gl.constexpr):
    """Whether some of the 64 rows from `row` on do not see all columns of the block at `start`. Queries beyond the end
    have an lse of infinity, so that nobody need hide them."""
    cut = False
    if not BUILD.KEYS:
        cut = start + BUILD.STEP > band.limit
    if BUILD.NEAR:
        cut = cut | (start < row + GROUP_ROWS - 1 - band.near)
    if BUILD.FAR:
        cut = cut | (start + BUILD.STEP > row + band.far + 1)
    return cut


@gluon.jit
def hide(t, row, start, band, BUILD: gl.constexpr):
    """t [64, STEP], 0 where a column of the block at `start` is not visible to its row (comparisons as in the forward
    kernel: of one value per row with a constant)."""
    layout: gl.constexpr = t.type.layout
    rows = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, BUILD.STEP, gl.SliceLayout(0, layout)), 0)
    limit = gl.full([GROUP_ROWS], 0, gl.int32, gl.SliceLayout(1, layout)) + band.limit
    if BUILD.FAR:
        limit = gl.minimum(limit, rows + band.far + 1)
    t = gl.where((columns & ~LANE_BITS) < gl.expand_dims(limit - start, 1) - (columns & LANE_BITS), t, 0.0)
    if BUILD.NEAR:
        first = gl.expand_dims(rows - band.near - start, 1)
        t = gl.where((columns & ~LANE_BITS) >= first - (columns & LANE_BITS), t, 0.0)
    return t


@gluon.jit
def start_scores(own, ring, full, i, BUILD: gl.constexpr, LAYOUT: gl.constexpr):
    """own ring^T [64, STEP] of block i of the ring, under way."""
    stage = i % BUILD.STAGES
    mbarrier.wait(full.index(stage), (i // BUILD.STAGES) & 1)
    tile = ring.index(stage).reshape([BUILD.STEP, BUILD.D])
    nothing = gl.full([GROUP_ROWS, BUILD.STEP], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(own, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_sum(weights, ring, acc, i, BUILD: gl.constexpr):
    """acc + weights ring [64, D] of block i of the ring, under way; weights [64, STEP] lie in scores' registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(weights.to(ring.dtype), LAYOUT, assert_trivial=True)
    tile = ring.index(i % BUILD.STAGES).reshape([BUILD.STEP, BUILD.D])
    return warpgroup_mma(weights, tile, acc, is_async=True)


@gluon.jit
def release(empty, i, BUILD: gl.constexpr):
    mbarrier.arrive(empty.index(i % BUILD.STAGES), count=1)


@gluon.jit
def of_columns(rows, i, BUILD: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, STEP]: the numbers of block i's queries from the ring."""
    return rows.index(i % BUILD.STAGES).load(LAYOUT)


@gluon.jit
def collect(grads, own, smem, bars, stats, i, row, start, band, factors, BUILD: gl.constexpr, LAYOUT: gl.constexpr):
    """(grad_a, grad_b) with what block i of the ring, which starts at column `start`, adds."""
    grad_a, grad_b = grads
    lse, delta = stats
    s = start_scores(own[0], smem.x, bars.x_full, i, BUILD, LAYOUT)
    if BUILD.GRAD_A:
        dp = start_scores(own[1], smem.y, bars.y_full, i, BUILD, LAYOUT)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        mbarrier.wait(bars.y_full.index(i % BUILD.STAGES), (i // BUILD.STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s])
    if BUILD.KEYS:
        lse = of_columns(smem.lse, i, BUILD, LAYOUT)
    p = gl.exp2(s * factors.scale_log2 - lse)
    if is_cut(row, start, band, BUILD):
        p = hide(p, row, start, band, BUILD)
    if BUILD.GRAD_B:
        grad_b = start_sum(p, smem.y, grad_b, i, BUILD)
    if BUILD.GRAD_A:
        if BUILD.GRAD_B:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
            release(bars.y_empty, i, BUILD)
        if BUILD.KEYS:
            delta = of_columns(smem.delta, i, BUILD, LAYOUT)
        grad_a = start_sum(p * (dp - delta), smem.x, grad_a, i, BUILD)
        grad_a = warpgroup_mma_wait(0, deps=[grad_a])
    if BUILD.GRAD_B:
        grad_b = warpgroup_mma_wait(0, deps=[grad_b])
        release(bars.y_empty, i, BUILD)
    release(bars.x_empty, i, BUILD)
    return grad_a, grad_b


@gluon.jit
def store(grad, desc, smem, place, GROUP: gl.constexpr, BUILD: gl.constexpr):
    """Write the rows of GROUP by way of `smem`, which they do not need any more."""
    tile = smem.index(GROUP)
    tile.reshape([GROUP_ROWS, BUILD.D]).store(grad.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [place.batch, place.head, place.row + GROUP * GROUP_ROWS, 0], tile)


@gluon.jit
def group(descs, smem, bars, schedule, band, factors, GROUP: gl.constexpr, BUILD: gl.constexpr):
    """What the four warps of GROUP do."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BUILD.STEP, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BUILD.D, 16])
    place = place_of(schedule, band, BUILD)
    row = place.row + GROUP * GROUP_ROWS
    heads = schedule.group
    stats = (0.0, 0.0)
    if not BUILD.KEYS:
        heads = 1
        width = descs.lse.shape[1]
        rows = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S_LAYOUT))
        at = (place.batch * schedule.heads + place.head).to(gl.int64) * width + rows
        lse = gl.load(smem.lse + at, mask=rows < width, other=float("inf"))
        delta = gl.load(smem.delta + at, mask=rows < width, other=0.0)
        stats = (gl.expand_dims(lse, 1), gl.expand_dims(delta, 1))

    mbarrier.wait(bars.own_full.index(GROUP), 0)
    own = (smem.a.index(GROUP).reshape([GROUP_ROWS, BUILD.D]), smem.b.index(GROUP).reshape([GROUP_ROWS, BUILD.D]))
    grad_a = 0.0
    grad_b = 0.0
    if BUILD.GRAD_A:
        grad_a = gl.full([GROUP_ROWS, BUILD.D], 0.0, gl.float32, ACC_LAYOUT)
    if BUILD.GRAD_B:
        grad_b = gl.full([GROUP_ROWS, BUILD.D], 0.0, gl.float32, ACC_LAYOUT)
    i = 0
    for _ in range(heads):
        start = place.begin * BUILD.STEP
        for _ in range(place.count):
            grads = (grad_a, grad_b)
            grad_a, grad_b = collect(grads, own, smem, bars, stats, i, row, start, band, factors, BUILD, S_LAYOUT)
            start += BUILD.STEP
            i += 1
    if BUILD.GRAD_A:
        store(grad_a * factors.scale, descs.grad_a, smem.a, place, GROUP, BUILD)
    if BUILD.GRAD_B:
        store(grad_b, descs.grad_b, smem.b, place, GROUP, BUILD)
    tma.store_wait(0)


@gluon.jit
def first_group(descs, smem, bars, schedule, band, factors, BUILD: gl.constexpr):
    group(descs, smem, bars, schedule, band, factors, 0, BUILD)


@gluon.jit
def second_group(descs, smem, bars, schedule, band, factors, BUILD: gl.constexpr):
    group(descs, smem, bars, schedule, band, factors, 1, BUILD)


@gluon.jit
def third_group(descs, smem, bars, schedule, band, factors, BUILD: gl.constexpr):
    group(descs, smem, bars, schedule, band, factors, 2, BUILD)


@gluon.jit
def claim(full, empty, i, BYTES: gl.constexpr, BUILD: gl.constexpr):
    """The stage of block i, as soon as it is free, and announced that BYTES will come."""
    stage = i % BUILD.STAGES
    mbarrier.wait(empty.index(stage), ((i // BUILD.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def load_own(descs, smem, bars, place, BUILD: gl.constexpr):
    """Start the copies of a and, where dP is wanted, b."""
    BYTES: gl.constexpr = descs.a.block_type.nbytes
    for g in gl.static_range(BUILD.OWN // GROUP_ROWS):
        full = bars.own_full.index(g)
        at = [place.batch, place.head, place.row + g * GROUP_ROWS, 0]
        mbarrier.expect(full, 2 * BYTES if BUILD.GRAD_A else BYTES)
        tma.async_copy_global_to_shared(descs.a, at, full, smem.a.index(g))
        if BUILD.GRAD_A:
            tma.async_copy_global_to_shared(descs.b, at, full, smem.b.index(g))


@gluon.jit
def loader(descs, smem, bars, schedule, band, factors, BUILD: gl.constexpr):
    """What the loading warp does."""
    BYTES: gl.constexpr = descs.x.block_type.nbytes
    ROW_BYTES: gl.constexpr = BUILD.STEP * 8 if BUILD.KEYS else 0  # lse and delta
    place = place_of(schedule, band, BUILD)
    load_own(descs, smem, bars, place, BUILD)
    heads = 1
    head = place.head // schedule.group
    if BUILD.KEYS:
        heads = schedule.group
        head = place.head * schedule.group
    i = 0
    for _ in range(heads):
        start = place.begin * BUILD.STEP
        for _ in range(place.count):
            at = [place.batch, head, start, 0]
            stage = claim(bars.x_full, bars.x_empty, i, BYTES + ROW_BYTES, BUILD)
            full = bars.x_full.index(stage)
            tma.async_copy_global_to_shared(descs.x, at, full, smem.x.index(stage))
            if BUILD.KEYS:
                rows = [place.batch * descs.x.shape[1] + head, start]
                tma.async_copy_global_to_shared(descs.lse, rows, full, smem.lse.index(stage))
                tma.async_copy_global_to_shared(descs.delta, rows, full, smem.delta.index(stage))
            stage = claim(bars.y_full, bars.y_empty, i, BYTES, BUILD)
            tma.async_copy_global_to_shared(descs.y, at, bars.y_full.index(stage), smem.y.index(stage))
            start += BUILD.STEP
            i += 1
        head += 1


@gluon.jit
def ring_of(desc, BUILD: gl.constexpr):
    """Shared memory for STAGES blocks of `desc`."""
    return gl.allocate_shared_memory(desc.dtype, [BUILD.STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit(do_not_specialize=["blocks", "entries", "section", "near", "far"])
def backward_kernel(a, b, x, y, grad_a, grad_b, lse_desc, delta_desc, lse, delta, blocks, entries, section, near, far,
                    scale, scale_log2, BUILD: gl.constexpr):  # fmt: skip
    """One pass; see the module's text. Without BUILD.GRAD_A, what is stored of grad_a is not touched, and so for b."""
    GROUPS: gl.constexpr = BUILD.OWN // GROUP_ROWS
    a_smem = gl.allocate_shared_memory(a.dtype, [GROUPS] + a.block_type.shape, a.layout)
    b_smem = a_smem
    if BUILD.GRAD_A:
        b_smem = gl.allocate_shared_memory(b.dtype, [GROUPS] + b.block_type.shape, b.layout)
    if BUILD.KEYS:
        lse = ring_of(lse_desc, BUILD)
        delta = ring_of(delta_desc, BUILD)
    smem = Operands(a_smem, b_smem, ring_of(x, BUILD), ring_of(y, BUILD), None, None, lse, delta)
    descs = Operands(a, b, x, y, grad_a, grad_b, lse_desc, delta_desc)
    bars = Barriers(barriers(GROUPS, 1), barriers(BUILD.STAGES, 1), barriers(BUILD.STAGES, GROUPS),
            barriers(BUILD.STAGES, 1), barriers(BUILD.STAGES, GROUPS))  # fmt: skip
    fence_async_shared()
    heads = a.shape[1]
    shared = x.shape[1] // heads if BUILD.KEYS else heads // x.shape[1]
    schedule = Schedule(blocks, entries, section, heads, shared)
    band, factors = Band(near, far, x.shape[2]), Factors(scale, scale_log2)
    if GROUPS == 2:
        gl.warp_specialize([
            (first_group, (descs, smem, bars, schedule, band, factors, BUILD)),
            (second_group, (descs, smem, bars, schedule, band, factors, BUILD)),
            (loader, (descs, smem, bars, schedule, band, factors, BUILD)),
        ], [GROUP_WARPS, 1], [BUILD.GROUP_REGISTERS, BUILD.LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_group, (descs, smem, bars, schedule, band, factors, BUILD)),
            (second_group, (descs, smem, bars, schedule, band, factors, BUILD)),
            (third_group, (descs, smem, bars, schedule, band, factors, BUILD)),
            (loader, (descs, smem, bars, schedule, band, factors, BUILD)),
        ], [GROUP_WARPS, GROUP_WARPS, 1],
            [BUILD.GROUP_REGISTERS, BUILD.GROUP_REGISTERS, BUILD.LOADER_REGISTERS])  # fmt: skip
