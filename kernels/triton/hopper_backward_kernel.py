"""Hopper's backward kernel in Gluon: warp-specialised as the forward's, in two or three launches without atomics.

A launch keeps blocks of a and b in shared memory while x and y stream by. Every product is one of four:
  S = a x^T    dP = b y^T    grad_a += dS x    grad_b += P y    with P = exp(S - lse), dS = P (dP - delta)
Over blocks of keys a, b, x, y are k, v, q, grad_out, and the sums are dK and dV. Scores are then transposed: a row is a
key. Over blocks of queries they are q, grad_out, k, v, and the sum is dQ. P and dS go into products from registers.
These are seven products where one launch with atomics has five. But the bits are the same every time, and memory holds
nothing beside the results and two numbers per query. At D = 256 the registers hold one sum, so that dV and dK have a
launch each.

A consumer warpgroup owns 64 of the rows that stay (BLOCK_OUTER). One producer warp only starts TMA copies of the rows
that stream, BLOCK_INNER at a time. While one consumer computes dS, the products of the others run. Synchronisation:
  ab_full[g]               a and b of consumer g are in shared memory. It is used once.
  x_full[s], x_empty[s]    Stage s of a ring of blocks of x and, over blocks of keys, of their rows' lse and delta.
  y_full[s], y_empty[s]    Stage s of a ring of blocks of y. Block i is in stage i % STAGES, as use i // STAGES of it
                           (see hopper_forward_kernel.py).
The producer loads x, then y: the order in which consumers ask, so no wait can close a circle.
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

from sdpa.kernels.triton.hopper_primitives import (
    LANE_BITS,
    WG_ROWS,
    WG_WARPS,
    barriers,
    begin_in_order,
    copy_in,
    copy_out,
    end_in_order,
)
from sdpa.kernels.triton.hopper_schedule import entry_and_block


class BackwardTensors(NamedTuple):
    """Tensor descriptors, or the tensors' buffers in shared memory."""

    a: Any
    b: Any
    x: Any
    y: Any
    grad_a: Any
    grad_b: Any
    lse: Any  # (B * H, queries), in base 2
    delta: Any


class BackwardBarriers(NamedTuple):
    """The mbarriers of the module's text."""

    ab_full: Any
    x_full: Any
    x_empty: Any
    y_full: Any
    y_empty: Any


class BackwardSchedule(NamedTuple):
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
    """The scale of the scores, and log2(e) times it."""

    scale: Any
    scale_log2: Any


class BlockInfo(NamedTuple):
    """The block that stays in a program, and which blocks stream by."""

    batch: Any
    head: Any
    row: Any  # the first of the block that stays
    begin: Any  # of the blocks that stream
    count: Any


@dataclass(frozen=True)
class BackwardConfig:
    """What the kernel is compiled for."""

    OVER_KEYS: bool  # blocks of keys stay
    GRAD_A: bool
    GRAD_B: bool
    BLOCK_OUTER: int  # rows that stay
    BLOCK_INNER: int  # rows that stream at a time
    D: int
    STAGES: int
    CUT_FRONT: bool  # a row sees no columns far in front of it
    CUT_BACK: bool  # a row sees no columns far behind it
    REVERSED: bool  # the last blocks take longest
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@gluon.jit
def block_info(schedule, band, CONFIG: gl.constexpr):
    """The block of this program, the longest first."""
    entry, number = entry_and_block(gl.program_id(0), schedule)
    if CONFIG.REVERSED:
        number = schedule.blocks - 1 - number
    row = number * CONFIG.BLOCK_OUTER
    begin = 0
    if CONFIG.CUT_FRONT:
        begin = gl.maximum(row - band.near, 0) // CONFIG.BLOCK_INNER
    end = band.limit
    if CONFIG.CUT_BACK:
        end = gl.minimum(end, row + CONFIG.BLOCK_OUTER + band.far)
    count = gl.maximum(gl.cdiv(gl.maximum(end, 0), CONFIG.BLOCK_INNER) - begin, 0)
    return BlockInfo(entry // schedule.heads, entry % schedule.heads, row, begin, count)


@gluon.jit
def needs_mask(row, start, band, CONFIG: gl.constexpr):
    """Whether some of the 64 rows from `row` on do not see all columns of the block at `start`.

    Queries beyond the end have an lse of infinity, so that they need no mask.
    """
    cut = False
    if not CONFIG.OVER_KEYS:
        cut = start + CONFIG.BLOCK_INNER > band.limit
    if CONFIG.CUT_FRONT:
        cut = cut | (start < row + WG_ROWS - 1 - band.near)
    if CONFIG.CUT_BACK:
        cut = cut | (start + CONFIG.BLOCK_INNER > row + band.far + 1)
    return cut


@gluon.jit
def zero_masked(t, row, start, band, CONFIG: gl.constexpr):
    """t [64, BLOCK_INNER] with 0 where a column of the block at `start` is not visible to its row.

    Comparisons are of one value per row with a constant, as in the forward kernel's `zero_masked`.
    """
    layout: gl.constexpr = t.type.layout
    rows = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, CONFIG.BLOCK_INNER, gl.SliceLayout(0, layout)), 0)
    limit = gl.full([WG_ROWS], 0, gl.int32, gl.SliceLayout(1, layout)) + band.limit
    if CONFIG.CUT_BACK:
        limit = gl.minimum(limit, rows + band.far + 1)
    t = gl.where((columns & ~LANE_BITS) < gl.expand_dims(limit - start, 1) - (columns & LANE_BITS), t, 0.0)
    if CONFIG.CUT_FRONT:
        first = gl.expand_dims(rows - band.near - start, 1)
        t = gl.where((columns & ~LANE_BITS) >= first - (columns & LANE_BITS), t, 0.0)
    return t


@gluon.jit
def start_scores(own, ring, full, i, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue own ring^T [64, BLOCK_INNER] of block i of the ring."""
    stage = i % CONFIG.STAGES
    mbarrier.wait(full.index(stage), (i // CONFIG.STAGES) & 1)
    tile = ring.index(stage).reshape([CONFIG.BLOCK_INNER, CONFIG.D])
    nothing = gl.full([WG_ROWS, CONFIG.BLOCK_INNER], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(own, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_sum(weights, ring, acc, i, CONFIG: gl.constexpr):
    """Issue acc [64, D] + weights ring of block i of the ring. weights [64, BLOCK_INNER] have the layout of scores."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(weights.to(ring.dtype), LAYOUT, assert_trivial=True)
    tile = ring.index(i % CONFIG.STAGES).reshape([CONFIG.BLOCK_INNER, CONFIG.D])
    return warpgroup_mma(weights, tile, acc, is_async=True)


@gluon.jit
def release_stage(empty, i, CONFIG: gl.constexpr):
    """Give the stage of block i back to the producer."""
    mbarrier.arrive(empty.index(i % CONFIG.STAGES), count=1)


@gluon.jit
def load_columns(rows, i, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, BLOCK_INNER]: the numbers of block i's queries from the ring."""
    return rows.index(i % CONFIG.STAGES).load(LAYOUT)


@gluon.jit
def backward_step(
    grads, own, smem, bars, stats, i, row, start, band, factors, CONFIG: gl.constexpr, LAYOUT: gl.constexpr
):
    """(grad_a, grad_b), both [64, D], plus what block i of the ring, which starts at column `start`, adds."""
    grad_a, grad_b = grads
    lse, delta = stats
    s = start_scores(own[0], smem.x, bars.x_full, i, CONFIG, LAYOUT)
    if CONFIG.GRAD_A:
        dp = start_scores(own[1], smem.y, bars.y_full, i, CONFIG, LAYOUT)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        mbarrier.wait(bars.y_full.index(i % CONFIG.STAGES), (i // CONFIG.STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[s])
    if CONFIG.OVER_KEYS:
        lse = load_columns(smem.lse, i, CONFIG, LAYOUT)
    p = gl.exp2(s * factors.scale_log2 - lse)
    if needs_mask(row, start, band, CONFIG):
        p = zero_masked(p, row, start, band, CONFIG)
    if CONFIG.GRAD_B:
        grad_b = start_sum(p, smem.y, grad_b, i, CONFIG)
    if CONFIG.GRAD_A:
        if CONFIG.GRAD_B:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
            release_stage(bars.y_empty, i, CONFIG)
        if CONFIG.OVER_KEYS:
            delta = load_columns(smem.delta, i, CONFIG, LAYOUT)
        grad_a = start_sum(p * (dp - delta), smem.x, grad_a, i, CONFIG)
        grad_a = warpgroup_mma_wait(0, deps=[grad_a])
    if CONFIG.GRAD_B:
        grad_b = warpgroup_mma_wait(0, deps=[grad_b])
        release_stage(bars.y_empty, i, CONFIG)
    release_stage(bars.x_empty, i, CONFIG)
    return grad_a, grad_b


@gluon.jit
def store_grad(grad, desc, smem, block, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The epilogue: store the rows of consumer WG by TMA, through the `smem` of an operand that is needed no more."""
    tile = smem.index(WG)
    tile.reshape([WG_ROWS, CONFIG.D]).store(grad.to(desc.dtype))
    fence_async_shared()
    copy_out(desc, [block.batch, block.head, block.row + WG * WG_ROWS, 0], tile)


@gluon.jit
def consumer(descs, smem, bars, schedule, band, factors, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The role of consumer warpgroup WG."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WG_WARPS, 1], [16, CONFIG.BLOCK_INNER, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WG_WARPS, 1], [16, CONFIG.D, 16])
    block = block_info(schedule, band, CONFIG)
    row = block.row + WG * WG_ROWS
    heads = schedule.group
    stats = (0.0, 0.0)
    if not CONFIG.OVER_KEYS:
        heads = 1
        width = descs.lse.shape[1]
        rows = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
        at = (block.batch * schedule.heads + block.head).to(gl.int64) * width + rows
        lse = gl.load(smem.lse + at, mask=rows < width, other=float("inf"))
        delta = gl.load(smem.delta + at, mask=rows < width, other=0.0)
        stats = (gl.expand_dims(lse, 1), gl.expand_dims(delta, 1))

    mbarrier.wait(bars.ab_full.index(WG), 0)
    own = (smem.a.index(WG).reshape([WG_ROWS, CONFIG.D]), smem.b.index(WG).reshape([WG_ROWS, CONFIG.D]))
    grad_a = 0.0
    grad_b = 0.0
    if CONFIG.GRAD_A:
        grad_a = gl.full([WG_ROWS, CONFIG.D], 0.0, gl.float32, ACC_LAYOUT)
    if CONFIG.GRAD_B:
        grad_b = gl.full([WG_ROWS, CONFIG.D], 0.0, gl.float32, ACC_LAYOUT)
    i = 0
    for _ in range(heads):
        start = block.begin * CONFIG.BLOCK_INNER
        for _ in range(block.count):
            grads = (grad_a, grad_b)
            grad_a, grad_b = backward_step(
                grads, own, smem, bars, stats, i, row, start, band, factors, CONFIG, S_LAYOUT
            )
            start += CONFIG.BLOCK_INNER
            i += 1
    if CONFIG.GRAD_A:
        store_grad(grad_a * factors.scale, descs.grad_a, smem.a, block, WG, CONFIG)
    if CONFIG.GRAD_B:
        store_grad(grad_b, descs.grad_b, smem.b, block, WG, CONFIG)
    tma.store_wait(0)


# All partitions take the same arguments.
@gluon.jit
def first_consumer(descs, smem, bars, schedule, band, factors, ORDER: gl.constexpr, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, schedule, band, factors, 0, CONFIG)


@gluon.jit
def second_consumer(descs, smem, bars, schedule, band, factors, ORDER: gl.constexpr, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, schedule, band, factors, 1, CONFIG)


@gluon.jit
def third_consumer(descs, smem, bars, schedule, band, factors, ORDER: gl.constexpr, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, schedule, band, factors, 2, CONFIG)


@gluon.jit
def acquire_stage(full, empty, i, BYTES: gl.constexpr, CONFIG: gl.constexpr):
    """The stage of block i, as soon as it is free. BYTES are announced to its full barrier."""
    stage = i % CONFIG.STAGES
    mbarrier.wait(empty.index(stage), ((i // CONFIG.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def load_ab(descs, smem, bars, block, CONFIG: gl.constexpr):
    """Start the TMA copies of a and, where dP is wanted, b."""
    BYTES: gl.constexpr = descs.a.block_type.nbytes
    for g in gl.static_range(CONFIG.BLOCK_OUTER // WG_ROWS):
        full = bars.ab_full.index(g)
        at = [block.batch, block.head, block.row + g * WG_ROWS, 0]
        mbarrier.expect(full, 2 * BYTES if CONFIG.GRAD_A else BYTES)
        copy_in(descs.a, at, full, smem.a.index(g))
        if CONFIG.GRAD_A:
            copy_in(descs.b, at, full, smem.b.index(g))


@gluon.jit
def producer(descs, smem, bars, schedule, band, factors, ORDER: gl.constexpr, CONFIG: gl.constexpr):
    """The role of the producer warp."""
    BYTES: gl.constexpr = descs.x.block_type.nbytes
    ROW_BYTES: gl.constexpr = CONFIG.BLOCK_INNER * 8 if CONFIG.OVER_KEYS else 0  # lse and delta
    block = block_info(schedule, band, CONFIG)
    load_ab(descs, smem, bars, block, CONFIG)
    heads = 1
    head = block.head // schedule.group
    if CONFIG.OVER_KEYS:
        begin_in_order(ORDER)
        heads = schedule.group
        head = block.head * schedule.group
    i = 0
    for _ in range(heads):
        start = block.begin * CONFIG.BLOCK_INNER
        for _ in range(block.count):
            at = [block.batch, head, start, 0]
            stage = acquire_stage(bars.x_full, bars.x_empty, i, BYTES + ROW_BYTES, CONFIG)
            full = bars.x_full.index(stage)
            copy_in(descs.x, at, full, smem.x.index(stage))
            if CONFIG.OVER_KEYS:
                rows = [block.batch * descs.x.shape[1] + head, start]
                copy_in(descs.lse, rows, full, smem.lse.index(stage))
                copy_in(descs.delta, rows, full, smem.delta.index(stage))
            stage = acquire_stage(bars.y_full, bars.y_empty, i, BYTES, CONFIG)
            copy_in(descs.y, at, bars.y_full.index(stage), smem.y.index(stage))
            start += CONFIG.BLOCK_INNER
            i += 1
        head += 1


@gluon.jit
def ring_of(desc, CONFIG: gl.constexpr):
    """Shared memory for STAGES blocks of `desc`."""
    return gl.allocate_shared_memory(desc.dtype, [CONFIG.STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit(do_not_specialize=["blocks", "entries", "section", "near", "far"])
def backward_kernel(a, b, x, y, grad_a, grad_b, lse_desc, delta_desc, lse, delta, blocks, entries, section, near, far,
                    scale, scale_log2, CONFIG: gl.constexpr, ORDER: gl.constexpr):  # fmt: skip
    """One launch of the module's text. Without CONFIG.GRAD_A it does not touch grad_a's memory, and likewise for b."""
    if not CONFIG.OVER_KEYS:  # the consumers read what was written before
        begin_in_order(ORDER)
    NUM_WGS: gl.constexpr = CONFIG.BLOCK_OUTER // WG_ROWS
    a_smem = gl.allocate_shared_memory(a.dtype, [NUM_WGS] + a.block_type.shape, a.layout)
    b_smem = a_smem
    if CONFIG.GRAD_A:
        b_smem = gl.allocate_shared_memory(b.dtype, [NUM_WGS] + b.block_type.shape, b.layout)
    if CONFIG.OVER_KEYS:
        lse = ring_of(lse_desc, CONFIG)
        delta = ring_of(delta_desc, CONFIG)
    smem = BackwardTensors(a_smem, b_smem, ring_of(x, CONFIG), ring_of(y, CONFIG), None, None, lse, delta)
    descs = BackwardTensors(a, b, x, y, grad_a, grad_b, lse_desc, delta_desc)
    bars = BackwardBarriers(barriers(NUM_WGS, 1), barriers(CONFIG.STAGES, 1), barriers(CONFIG.STAGES, NUM_WGS),
            barriers(CONFIG.STAGES, 1), barriers(CONFIG.STAGES, NUM_WGS))  # fmt: skip
    fence_async_shared()
    heads = a.shape[1]
    shared = x.shape[1] // heads if CONFIG.OVER_KEYS else heads // x.shape[1]
    schedule = BackwardSchedule(blocks, entries, section, heads, shared)
    band, factors = Band(near, far, x.shape[2]), Factors(scale, scale_log2)
    if NUM_WGS == 2:
        gl.warp_specialize([
            (first_consumer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
            (second_consumer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
            (producer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
        ], [WG_WARPS, 1], [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_consumer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
            (second_consumer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
            (third_consumer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
            (producer, (descs, smem, bars, schedule, band, factors, ORDER, CONFIG)),
        ], [WG_WARPS, WG_WARPS, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS])  # fmt: skip
    end_in_order(ORDER)
