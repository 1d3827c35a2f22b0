"""Hopper's forward kernel in Gluon: warp-specialised, with the softmax overlapped by the matrix products.

The algorithm is FlashAttention-3's (Shah et al., 2024). A block of BLOCK_M queries belongs to BLOCK_M / 64 consumer
warpgroups, each with 64 rows. Two producer warps only start TMA copies, one of keys and one of values. A consumer
issues the product q k^T of the next keys before p v of the present ones, so that its softmax runs while the tensor
cores work. The other consumers fill what gaps remain. With ping-pong they issue their products in turn. Keys come last
to first, so that the masked blocks, at the diagonal or the end, come early.

One step of a consumer's main loop, with j counting down the blocks of keys (S scores, P probabilities):
  consumer      issue S[j] and acc     wait for S[j]   softmax: P[j], alpha        wait for acc   acc *= alpha
  tensor cores                         S[j] = q k[j]^T acc += P[j+1] v[j+1]                       another consumer's
  producers     TMA of k and v into stages, each as soon as all consumers gave it back

A bias costs instructions, of which the softmax has none to spare. So the product's accumulator starts with it: queries
are multiplied by the power of two in the scale, and the bias by what that leaves of the scale, if anything.

Synchronisation. Every mbarrier counts its completed phases, and a wait names the parity of the phase it waits for.
  q_full[g], q_empty[g]    The rows of consumer g are in shared memory; consumer g needs them no more. There is one use
                           per block of queries: use t waits for parity t & 1 when full, for the other one when empty.
  k_full[s], k_empty[s]    The same for stage s of a ring of key blocks, and again for values. Block i of a program,
  v_full[s], v_empty[s]    counted through all its blocks of queries, is in stage i % STAGES, as use i // STAGES of it.
                           A full barrier takes one arrival, the producer's, and the bytes that it announced. An empty
                           one takes an arrival of each consumer. A tile of the bias comes with its keys.
A fresh barrier lets the parity before its first phase pass, so no producer waits for a stage that was never used. Each
producer loads in the order in which consumers ask, so no wait can close a circle. Keys, which are given back before the
softmax, need not wait for values, which are given back behind it: hence two producers.
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
    LN2,
    LOG2E,
    WG_ROWS,
    WG_WARPS,
    apply_mask,
    barriers,
    copy_in,
    copy_out,
    hold_order,
    ping_pong_signal,
    ping_pong_wait,
    rescale,
    softmax_step,
    thread_sums,
    to_float32,
)
from sdpa.kernels.triton.hopper_schedule import (
    TileSchedule,
    find_share,
    first_row,
    full_blocks,
    key_blocks,
    locate,
    share_size,
)


class ForwardTensors(NamedTuple):
    """Tensor descriptors, or the tensors' buffers in shared memory."""

    q: Any
    k: Any
    v: Any
    out: Any
    bias: Any  # in shared memory one tile [64, BLOCK_N] per stage and consumer


class ForwardBarriers(NamedTuple):
    """The mbarriers of the module's text."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class SoftmaxState(NamedTuple):
    """The online softmax of a consumer, one product behind, in base 2. With a bias row_max is in the scores' units."""

    p: Any  # [64, BLOCK_N] probabilities not yet in acc
    acc: Any  # [64, D]
    row_max: Any  # [64]
    row_sum: Any  # [64, 4]: what each of the four threads of a row has seen


@dataclass(frozen=True)
class ForwardConfig:
    """What the kernel is compiled for."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    STAGES: int
    CAUSAL: bool
    BOTTOM_RIGHT: bool
    BIAS: bool
    POWER_OF_TWO_SCALE: bool  # the scale is a power of two
    PERSISTENT: bool  # one program per core goes through many shares of the tiles
    EPILOGUE_SMEM: bool  # the epilogue stores through shared memory of its own, not through that of the queries
    PINGPONG: bool  # consumers issue their products in turn
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@gluon.jit
def load_bias(bias, i, scale, WG: gl.constexpr, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """The consumer's tile [64, BLOCK_N] of the bias for block i of the keys, in units of scores."""
    buffer = i % CONFIG.STAGES * (CONFIG.BLOCK_M // WG_ROWS) + WG
    tile = to_float32(bias.index(buffer).reshape([WG_ROWS, CONFIG.BLOCK_N]).load(LAYOUT))
    if not CONFIG.POWER_OF_TWO_SCALE:
        tile = tile * (LOG2E / scale)
    return tile


@gluon.jit
def scale_queries(q, power, CONFIG: gl.constexpr):
    """Multiply the consumer's queries q [64, D], in shared memory, by a power of two.

    That rounds only float16 numbers below about 2^-8, which may become subnormal.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WG_WARPS, 1], [1, 0])
    q.store((q.load(LAYOUT) * power).to(q.dtype))
    fence_async_shared()


@gluon.jit
def start_qk(q, smem, barriers, i, scale, WG: gl.constexpr, CONFIG: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue s [64, BLOCK_N] = q k^T of block i of the ring, added to the bias where there is one."""
    stage = i % CONFIG.STAGES
    mbarrier.wait(barriers.index(stage), (i // CONFIG.STAGES) & 1)
    keys = smem.k.index(stage).reshape([CONFIG.BLOCK_N, CONFIG.D]).permute((1, 0))
    if CONFIG.BIAS:
        bias = load_bias(smem.bias, i, scale, WG, CONFIG, LAYOUT)
        s = warpgroup_mma(q, keys, bias, is_async=True)
    else:
        nothing = gl.full([WG_ROWS, CONFIG.BLOCK_N], 0.0, gl.float32, LAYOUT)
        s = warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)
    return s


@gluon.jit
def start_pv(p, v, acc, barriers, i, CONFIG: gl.constexpr):
    """Issue acc [64, D] + p v of block i of the ring."""
    stage = i % CONFIG.STAGES
    mbarrier.wait(barriers.index(stage), (i // CONFIG.STAGES) & 1)
    return warpgroup_mma(p, v.index(stage).reshape([CONFIG.BLOCK_N, CONFIG.D]), acc, is_async=True)


@gluon.jit
def release_stage(barriers, i, CONFIG: gl.constexpr):
    """Give the stage of block i back to its producer."""
    mbarrier.arrive(barriers.index(i % CONFIG.STAGES), count=1)


@gluon.jit
def forward_step(state, q, smem, bars, i, row, start, full, M, N, scale, WG: gl.constexpr, CONFIG: gl.constexpr,
         LAYOUT: gl.constexpr):  # fmt: skip
    """Add p v of block i - 1 to acc while the scores of block i, which starts at key `start`, become probabilities."""
    ping_pong_wait(WG, CONFIG)
    s = start_qk(q, smem, bars.k_full, i, scale, WG, CONFIG, LAYOUT)
    acc = start_pv(state.p, smem.v, state.acc, bars.v_full, i - 1, CONFIG)
    ping_pong_signal(WG, CONFIG)
    s = warpgroup_mma_wait(1, deps=[s])
    release_stage(bars.k_empty, i, CONFIG)
    if CONFIG.CAUSAL:
        if start >= full:
            s = apply_mask(s, row, start, M, N, CONFIG)
    e, alpha, row_max = softmax_step(s, state.row_max, scale, CONFIG.CAUSAL, CONFIG)
    row_sum = hold_order(rescale(state.row_sum, alpha) + thread_sums(e))
    acc = warpgroup_mma_wait(0, deps=[acc])
    release_stage(bars.v_empty, i - 1, CONFIG)
    p = gl.convert_layout(e.to(state.p.dtype), state.p.type.layout, assert_trivial=True)
    return SoftmaxState(p, rescale(acc, alpha), row_max, row_sum)


@gluon.jit
def attend_query_block(
    descs, smem, bars, lse, block_coords, t, i, scale, power, WG: gl.constexpr, CONFIG: gl.constexpr
):
    """The rows of consumer WG in the program's t-th block of queries, whose keys are blocks i and more of the ring.

    Returns the number of the ring's next block.
    """
    batch, head, block_row = block_coords
    M, N, H = descs.q.shape[2], descs.k.shape[2], descs.q.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WG_WARPS, 1], [16, CONFIG.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WG_WARPS, 1], [16, CONFIG.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    row = block_row + WG * WG_ROWS
    blocks = key_blocks(block_row, CONFIG.BLOCK_M, M, N, CONFIG)
    full = full_blocks(row, M, N, CONFIG) * CONFIG.BLOCK_N

    mbarrier.wait(bars.q_full.index(WG), t & 1)
    q = smem.q.index(WG).reshape([WG_ROWS, CONFIG.D])
    if CONFIG.BIAS:
        scale_queries(q, power, CONFIG)
    s = start_qk(q, smem, bars.k_full, i, scale, WG, CONFIG, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=[s])
    release_stage(bars.k_empty, i, CONFIG)
    start = (blocks - 1) * CONFIG.BLOCK_N
    s = apply_mask(s, row, start, M, N, CONFIG)
    row_max = gl.full([WG_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    e, _, row_max = softmax_step(s, row_max, scale, True, CONFIG)
    p = gl.convert_layout(e.to(descs.q.dtype), P_LAYOUT, assert_trivial=True)
    acc = gl.full([WG_ROWS, CONFIG.D], 0.0, gl.float32, O_LAYOUT)
    state = SoftmaxState(p, acc, row_max, thread_sums(e))
    for _ in range(blocks - 1):
        i += 1
        start -= CONFIG.BLOCK_N
        state = forward_step(state, q, smem, bars, i, row, start, full, M, N, scale, WG, CONFIG, S_LAYOUT)
    if CONFIG.EPILOGUE_SMEM:
        mbarrier.arrive(bars.q_empty.index(WG), count=1)
    acc = start_pv(state.p, smem.v, state.acc, bars.v_full, i, CONFIG)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release_stage(bars.v_empty, i, CONFIG)

    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    dead = row_sum == 0.0
    total = gl.where(dead, 1.0, row_sum)
    row_max = state.row_max * LN2
    if CONFIG.BIAS:
        row_max *= scale
    row_lse = gl.where(dead, float("-inf"), row_max + gl.log2(total) * LN2)
    rows = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, S_LAYOUT))
    gl.store(lse + (batch * H + head).to(gl.int64) * M + rows, row_lse, mask=rows < M)
    out = smem.out.index(WG)
    if CONFIG.EPILOGUE_SMEM:
        tma.store_wait(0)
    out.reshape([WG_ROWS, CONFIG.D]).store(rescale(acc, 1.0 / total).to(descs.out.dtype))
    fence_async_shared()
    copy_out(descs.out, [batch, head, row, 0], out)
    if CONFIG.PERSISTENT and not CONFIG.EPILOGUE_SMEM:
        tma.store_wait(0)
        mbarrier.arrive(bars.q_empty.index(WG), count=1)
    return i + 1


@gluon.jit
def consumer(descs, smem, bars, lse, schedule, scale, power, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The role of consumer warpgroup WG: all the blocks of queries of this program."""
    t = 0
    i = 0
    if WG == CONFIG.BLOCK_M // WG_ROWS - 1:
        ping_pong_signal(WG, CONFIG)
    if CONFIG.PERSISTENT:
        for share in range(gl.program_id(0), schedule.all_shares, gl.num_programs(0)):
            batch, head, n = find_share(share, schedule)
            for part in range(share_size(n, schedule, CONFIG)):
                block_coords = (batch, head, first_row(n, part, schedule, CONFIG))
                i = attend_query_block(descs, smem, bars, lse, block_coords, t, i, scale, power, WG, CONFIG)
                t += 1
    else:
        block_coords = locate(gl.program_id(0), schedule, CONFIG)
        attend_query_block(descs, smem, bars, lse, block_coords, t, i, scale, power, WG, CONFIG)
    tma.store_wait(0)


@gluon.jit
def first_consumer(descs, smem, bars, lse, schedule, scale, power, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, lse, schedule, scale, power, 0, CONFIG)


@gluon.jit
def second_consumer(descs, smem, bars, lse, schedule, scale, power, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, lse, schedule, scale, power, 1, CONFIG)


@gluon.jit
def third_consumer(descs, smem, bars, lse, schedule, scale, power, CONFIG: gl.constexpr):
    consumer(descs, smem, bars, lse, schedule, scale, power, 2, CONFIG)


@gluon.jit
def fetch(desc, coordinates, smem, full, empty, i, BESIDE: gl.constexpr, CONFIG: gl.constexpr):
    """Start the TMA copy of a block of keys or values into its stage of the ring, as soon as the stage is free.

    BESIDE: bytes that are announced with it, of copies that its caller starts.
    """
    stage = i % CONFIG.STAGES
    mbarrier.wait(empty.index(stage), ((i // CONFIG.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes + BESIDE)
    copy_in(desc, coordinates, full.index(stage), smem.index(stage))


@gluon.jit
def fetch_keys(descs, smem, bars, block_coords, kv_head, start, i, CONFIG: gl.constexpr):
    """Start the TMA copy of the keys from `start` on, with the bias of their scores."""
    batch, head, row = block_coords
    coordinates = [batch, kv_head, start, 0]
    NUM_WGS: gl.constexpr = CONFIG.BLOCK_M // WG_ROWS
    if CONFIG.BIAS:
        beside: gl.constexpr = NUM_WGS * descs.bias.block_type.nbytes
        fetch(descs.k, coordinates, smem.k, bars.k_full, bars.k_empty, i, beside, CONFIG)
        own_batch, own_head = batch, head
        if descs.bias.shape[0] == 1:
            own_batch = 0
        if descs.bias.shape[1] == 1:
            own_head = 0
        stage = i % CONFIG.STAGES
        for g in gl.static_range(NUM_WGS):
            copy_in(descs.bias, [own_batch, own_head, row + g * WG_ROWS, start],
                                            bars.k_full.index(stage), smem.bias.index(stage * NUM_WGS + g))  # fmt: skip
    else:
        fetch(descs.k, coordinates, smem.k, bars.k_full, bars.k_empty, i, 0, CONFIG)


@gluon.jit
def fetch_queries(descs, smem, bars, block_coords, t, CONFIG: gl.constexpr):
    """Start the TMA copies of each consumer's rows, as soon as it needs those of the block before no more."""
    batch, head, row = block_coords
    for g in gl.static_range(CONFIG.BLOCK_M // WG_ROWS):
        mbarrier.wait(bars.q_empty.index(g), (t & 1) ^ 1)
        mbarrier.expect(bars.q_full.index(g), descs.q.block_type.nbytes)
        coordinates = [batch, head, row + g * WG_ROWS, 0]
        copy_in(descs.q, coordinates, bars.q_full.index(g), smem.q.index(g))


@gluon.jit
def load_query_block(descs, smem, bars, block_coords, t, i, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """Start every copy that one block of queries needs: KEYS and what goes with them, or values."""
    batch, head, row = block_coords
    kv_head = head // (descs.q.shape[1] // descs.k.shape[1])
    blocks = key_blocks(row, CONFIG.BLOCK_M, descs.q.shape[2], descs.k.shape[2], CONFIG)
    for n in range(blocks):
        start = (blocks - 1 - n) * CONFIG.BLOCK_N
        if KEYS:
            fetch_keys(descs, smem, bars, block_coords, kv_head, start, i + n, CONFIG)
            if n == 0:
                fetch_queries(descs, smem, bars, block_coords, t, CONFIG)
        else:
            fetch(descs.v, [batch, kv_head, start, 0], smem.v, bars.v_full, bars.v_empty, i + n, 0, CONFIG)
    return i + blocks


@gluon.jit
def producer(descs, smem, bars, schedule, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """The role of a producer warp."""
    t = 0
    i = 0
    if CONFIG.PERSISTENT:
        for share in range(gl.program_id(0), schedule.all_shares, gl.num_programs(0)):
            batch, head, n = find_share(share, schedule)
            for part in range(share_size(n, schedule, CONFIG)):
                block_coords = (batch, head, first_row(n, part, schedule, CONFIG))
                i = load_query_block(descs, smem, bars, block_coords, t, i, KEYS, CONFIG)
                t += 1
    else:
        load_query_block(descs, smem, bars, locate(gl.program_id(0), schedule, CONFIG), t, i, KEYS, CONFIG)


@gluon.jit
def key_producer(descs, smem, bars, schedule, CONFIG: gl.constexpr):
    producer(descs, smem, bars, schedule, True, CONFIG)


@gluon.jit
def value_producer(descs, smem, bars, schedule, CONFIG: gl.constexpr):
    producer(descs, smem, bars, schedule, False, CONFIG)


@gluon.jit(do_not_specialize=["blocks", "entries", "section", "inner", "by_head", "shares", "all_shares"])
def forward_kernel(q_desc, k_desc, v_desc, out_desc, bias_desc, lse, blocks, shares, all_shares, entries,
                   section, inner, by_head, scale, power, CONFIG: gl.constexpr):  # fmt: skip
    """out (B, H, M, D) and lse (B, H, M) for a TileSchedule.

    `scale` is log2(e) times the scale of the scores. With a bias queries are multiplied by `power`, a power of two, and
    `scale` is log2(e) times what remains.
    """
    NUM_WGS: gl.constexpr = CONFIG.BLOCK_M // WG_ROWS
    STAGES: gl.constexpr = CONFIG.STAGES
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [NUM_WGS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    out_smem = q_smem
    if CONFIG.EPILOGUE_SMEM:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [NUM_WGS] + out_desc.block_type.shape, out_desc.layout)
    bias_smem = q_smem
    if CONFIG.BIAS:
        tiles: gl.constexpr = [STAGES * NUM_WGS] + bias_desc.block_type.shape
        bias_smem = gl.allocate_shared_memory(bias_desc.dtype, tiles, bias_desc.layout)
    bars = ForwardBarriers(barriers(NUM_WGS, 1), barriers(NUM_WGS, 1), barriers(STAGES, 1), barriers(STAGES, NUM_WGS),
            barriers(STAGES, 1), barriers(STAGES, NUM_WGS))  # fmt: skip
    fence_async_shared()
    descs = ForwardTensors(q_desc, k_desc, v_desc, out_desc, bias_desc)
    smem = ForwardTensors(q_smem, k_smem, v_smem, out_smem, bias_smem)
    schedule = TileSchedule(blocks, shares, all_shares, entries, section, inner, by_head)
    if NUM_WGS == 2:
        gl.warp_specialize([
            (first_consumer, (descs, smem, bars, lse, schedule, scale, power, CONFIG)),
            (second_consumer, (descs, smem, bars, lse, schedule, scale, power, CONFIG)),
            (key_producer, (descs, smem, bars, schedule, CONFIG)),
            (value_producer, (descs, smem, bars, schedule, CONFIG)),
        ], [WG_WARPS, 1, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS, CONFIG.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_consumer, (descs, smem, bars, lse, schedule, scale, power, CONFIG)),
            (second_consumer, (descs, smem, bars, lse, schedule, scale, power, CONFIG)),
            (third_consumer, (descs, smem, bars, lse, schedule, scale, power, CONFIG)),
            (key_producer, (descs, smem, bars, schedule, CONFIG)),
            (value_producer, (descs, smem, bars, schedule, CONFIG)),
        ], [WG_WARPS, WG_WARPS, 1, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.CONSUMER_REGISTERS,
             CONFIG.PRODUCER_REGISTERS, CONFIG.PRODUCER_REGISTERS])  # fmt: skip
