"""Hopper's forward kernel in Gluon: warps with roles, and the softmax in the shade of the matrix products.

The algorithm is FlashAttention-3's (Shah et al., 2024): a block of BLOCK_M queries belongs to BLOCK_M / 64 groups of
four warps, each with its own 64 rows, and two more warps do nothing but start bulk copies, one of keys and one of
values. A group issues the product q k^T of the next keys before p v of the present ones, so that its softmax runs while
the tensor cores work; the other groups fill what gaps remain. Keys come last to first: the masked blocks, at the
diagonal or the end, come early.

A bias costs instructions, which the softmax has none to spare for. So it is where the product's sum starts: queries are
multiplied by the power of two in the scale, and the bias by what that leaves of the scale, if anything.

Who waits for whom. Every barrier counts its completed phases, and a wait names the parity of the phase it waits for.
  q_full[g], q_empty[g]    the rows of group g are in shared memory; group g needs them no more. One use per block of
                           queries, so use t waits for parity t & 1 when full and for the parity before it when empty.
  k_full[s], k_empty[s]    the same for stage s of a ring of key blocks, and again for values: block i of a program,
  v_full[s], v_empty[s]    counted through all its blocks of queries, lives in stage i % STAGES and is that stage's use
                           i // STAGES. A full barrier takes one arrival (the loader's) and the bytes it announced; an
                           empty one takes an arrival from each group. A tile of the bias travels with its keys.
A fresh barrier lets the parity before its first phase pass: no loader waits for a stage that was not yet used. Each
loader's order is that in which groups ask, so no wait can close a circle; and keys, given back before the softmax, need
not wait for values, given back behind it.
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

from sdpa.kernels.triton.hopper_parts import (
    GROUP_ROWS,
    GROUP_WARPS,
    LN2,
    LOG2E,
    barriers,
    give_turn,
    hide,
    hold,
    own_sums,
    rescale,
    soften,
    take_turn,
    widen,
)
from sdpa.kernels.triton.hopper_schedule import (
    Schedule,
    find_share,
    first_row,
    full_blocks,
    key_blocks,
    locate,
    share_size,
)


class Operands(NamedTuple):
    """Descriptors of tensors in memory, or their places in shared memory."""

    q: Any
    k: Any
    v: Any
    out: Any
    bias: Any  # in shared memory one tile [64, BLOCK_N] per stage and group


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class State(NamedTuple):
    """The online softmax of a group, behind by one product, in base 2; but row_max with a bias in the scores' units."""

    p: Any  # [64, BLOCK_N] probabilities not yet in acc
    acc: Any  # [64, D]
    row_max: Any  # [64]
    row_sum: Any  # [64, 4]: what each of the four threads of a row has seen


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    STAGES: int
    CAUSAL: bool
    BOTTOM_RIGHT: bool
    BIAS: bool
    WHOLE_SCALE: bool  # the scale is a power of two
    PERSISTENT: bool  # one program per core goes through many shares of blocks of queries
    OWN_OUT: bool  # results leave through shared memory of their own, not through that of the queries
    PINGPONG: bool  # groups take turns in issuing their products
    GROUP_REGISTERS: int
    LOADER_REGISTERS: int


@gluon.jit
def load_bias(bias, i, scale, GROUP: gl.constexpr, BUILD: gl.constexpr, LAYOUT: gl.constexpr):
    """The group's tile [64, BLOCK_N] of the bias beside block i of the keys, in units of scores."""
    place = i % BUILD.STAGES * (BUILD.BLOCK_M // GROUP_ROWS) + GROUP
    tile = widen(bias.index(place).reshape([GROUP_ROWS, BUILD.BLOCK_N]).load(LAYOUT))
    if not BUILD.WHOLE_SCALE:
        tile = tile * (LOG2E / scale)
    return tile


@gluon.jit
def scale_queries(q, power, BUILD: gl.constexpr):
    """Multiply the group's queries, in shared memory, by a power of two, which rounds nothing but float16 numbers below
    about 2^-8, which may become subnormal."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GROUP_WARPS, 1], [1, 0])
    q.store((q.load(LAYOUT) * power).to(q.dtype))
    fence_async_shared()


@gluon.jit
def start_scores(q, smem, barriers, i, scale, GROUP: gl.constexpr, BUILD: gl.constexpr, LAYOUT: gl.constexpr):
    """q k^T [64, BLOCK_N] of block i of the ring, on top of the bias where there is one, under way."""
    stage = i % BUILD.STAGES
    mbarrier.wait(barriers.index(stage), (i // BUILD.STAGES) & 1)
    keys = smem.k.index(stage).reshape([BUILD.BLOCK_N, BUILD.D]).permute((1, 0))
    if BUILD.BIAS:
        bias = load_bias(smem.bias, i, scale, GROUP, BUILD, LAYOUT)
        s = warpgroup_mma(q, keys, bias, is_async=True)
    else:
        nothing = gl.full([GROUP_ROWS, BUILD.BLOCK_N], 0.0, gl.float32, LAYOUT)
        s = warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)
    return s


@gluon.jit
def start_values(p, v, acc, barriers, i, BUILD: gl.constexpr):
    """acc + p v [64, D] of block i of the ring, under way."""
    stage = i % BUILD.STAGES
    mbarrier.wait(barriers.index(stage), (i // BUILD.STAGES) & 1)
    return warpgroup_mma(p, v.index(stage).reshape([BUILD.BLOCK_N, BUILD.D]), acc, is_async=True)


@gluon.jit
def release(barriers, i, BUILD: gl.constexpr):
    mbarrier.arrive(barriers.index(i % BUILD.STAGES), count=1)


@gluon.jit
def step(state, q, smem, bars, i, row, start, full, M, N, scale, GROUP: gl.constexpr, BUILD: gl.constexpr,
         LAYOUT: gl.constexpr):  # fmt: skip
    """Add block i - 1 to acc while the scores of block i, which starts at key `start`, become probabilities."""
    take_turn(GROUP, BUILD)
    s = start_scores(q, smem, bars.k_full, i, scale, GROUP, BUILD, LAYOUT)
    acc = start_values(state.p, smem.v, state.acc, bars.v_full, i - 1, BUILD)
    give_turn(GROUP, BUILD)
    s = warpgroup_mma_wait(1, deps=[s])
    release(bars.k_empty, i, BUILD)
    if BUILD.CAUSAL:
        if start >= full:
            s = hide(s, row, start, M, N, BUILD)
    e, alpha, row_max = soften(s, state.row_max, scale, BUILD.CAUSAL, BUILD)
    row_sum = hold(rescale(state.row_sum, alpha) + own_sums(e))
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(bars.v_empty, i - 1, BUILD)
    p = gl.convert_layout(e.to(state.p.dtype), state.p.type.layout, assert_trivial=True)
    return State(p, rescale(acc, alpha), row_max, row_sum)


@gluon.jit
def attend(descs, smem, bars, lse, place, t, i, scale, power, GROUP: gl.constexpr, BUILD: gl.constexpr):
    """The 64 rows of GROUP in the program's t-th block of queries, whose keys are blocks i.. of the ring."""
    batch, head, block_row = place
    M, N, H = descs.q.shape[2], descs.k.shape[2], descs.q.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BUILD.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BUILD.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    row = block_row + GROUP * GROUP_ROWS
    blocks = key_blocks(block_row, BUILD.BLOCK_M, M, N, BUILD)
    full = full_blocks(row, M, N, BUILD) * BUILD.BLOCK_N

    mbarrier.wait(bars.q_full.index(GROUP), t & 1)
    q = smem.q.index(GROUP).reshape([GROUP_ROWS, BUILD.D])
    if BUILD.BIAS:
        scale_queries(q, power, BUILD)
    s = start_scores(q, smem, bars.k_full, i, scale, GROUP, BUILD, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=[s])
    release(bars.k_empty, i, BUILD)
    start = (blocks - 1) * BUILD.BLOCK_N
    s = hide(s, row, start, M, N, BUILD)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    e, _, row_max = soften(s, row_max, scale, True, BUILD)
    p = gl.convert_layout(e.to(descs.q.dtype), P_LAYOUT, assert_trivial=True)
    acc = gl.full([GROUP_ROWS, BUILD.D], 0.0, gl.float32, O_LAYOUT)
    state = State(p, acc, row_max, own_sums(e))
    for _ in range(blocks - 1):
        i += 1
        start -= BUILD.BLOCK_N
        state = step(state, q, smem, bars, i, row, start, full, M, N, scale, GROUP, BUILD, S_LAYOUT)
    if BUILD.OWN_OUT:
        mbarrier.arrive(bars.q_empty.index(GROUP), count=1)
    acc = start_values(state.p, smem.v, state.acc, bars.v_full, i, BUILD)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(bars.v_empty, i, BUILD)

    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    dead = row_sum == 0.0
    total = gl.where(dead, 1.0, row_sum)
    row_max = state.row_max * LN2
    if BUILD.BIAS:
        row_max *= scale
    row_lse = gl.where(dead, float("-inf"), row_max + gl.log2(total) * LN2)
    rows = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S_LAYOUT))
    gl.store(lse + (batch * H + head).to(gl.int64) * M + rows, row_lse, mask=rows < M)
    out = smem.out.index(GROUP)
    if BUILD.OWN_OUT:
        tma.store_wait(0)
    out.reshape([GROUP_ROWS, BUILD.D]).store(rescale(acc, 1.0 / total).to(descs.out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descs.out, [batch, head, row, 0], out)
    if BUILD.PERSISTENT and not BUILD.OWN_OUT:
        tma.store_wait(0)
        mbarrier.arrive(bars.q_empty.index(GROUP), count=1)
    return i + 1


@gluon.jit
def group(descs, smem, bars, lse, schedule, scale, power, GROUP: gl.constexpr, BUILD: gl.constexpr):
    """What the four warps of GROUP do."""
    t = 0
    i = 0
    if GROUP == BUILD.BLOCK_M // GROUP_ROWS - 1:
        give_turn(GROUP, BUILD)
    if BUILD.PERSISTENT:
        for share in range(gl.program_id(0), schedule.all_shares, gl.num_programs(0)):
            batch, head, n = find_share(share, schedule)
            for part in range(share_size(n, schedule, BUILD)):
                place = (batch, head, first_row(n, part, schedule, BUILD))
                i = attend(descs, smem, bars, lse, place, t, i, scale, power, GROUP, BUILD)
                t += 1
    else:
        place = locate(gl.program_id(0), schedule, BUILD)
        attend(descs, smem, bars, lse, place, t, i, scale, power, GROUP, BUILD)
    tma.store_wait(0)


@gluon.jit
def first_group(descs, smem, bars, lse, schedule, scale, power, BUILD: gl.constexpr):
    group(descs, smem, bars, lse, schedule, scale, power, 0, BUILD)


@gluon.jit
def second_group(descs, smem, bars, lse, schedule, scale, power, BUILD: gl.constexpr):
    group(descs, smem, bars, lse, schedule, scale, power, 1, BUILD)


@gluon.jit
def third_group(descs, smem, bars, lse, schedule, scale, power, BUILD: gl.constexpr):
    group(descs, smem, bars, lse, schedule, scale, power, 2, BUILD)


@gluon.jit
def fetch(desc, coordinates, smem, full, empty, i, BESIDE: gl.constexpr, BUILD: gl.constexpr):
    """Start copying a block of keys or values into its stage of the ring, as soon as that is free, and announce it and
    so many bytes beside it."""
    stage = i % BUILD.STAGES
    mbarrier.wait(empty.index(stage), ((i // BUILD.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes + BESIDE)
    tma.async_copy_global_to_shared(desc, coordinates, full.index(stage), smem.index(stage))


@gluon.jit
def fetch_keys(descs, smem, bars, place, kv_head, start, i, BUILD: gl.constexpr):
    """fetch of the keys from `start` on, with the bias of their scores."""
    batch, head, row = place
    coordinates = [batch, kv_head, start, 0]
    GROUPS: gl.constexpr = BUILD.BLOCK_M // GROUP_ROWS
    if BUILD.BIAS:
        beside: gl.constexpr = GROUPS * descs.bias.block_type.nbytes
        fetch(descs.k, coordinates, smem.k, bars.k_full, bars.k_empty, i, beside, BUILD)
        own_batch, own_head = batch, head
        if descs.bias.shape[0] == 1:
            own_batch = 0
        if descs.bias.shape[1] == 1:
            own_head = 0
        stage = i % BUILD.STAGES
        for g in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(descs.bias, [own_batch, own_head, row + g * GROUP_ROWS, start],
                                            bars.k_full.index(stage), smem.bias.index(stage * GROUPS + g))  # fmt: skip
    else:
        fetch(descs.k, coordinates, smem.k, bars.k_full, bars.k_empty, i, 0, BUILD)


@gluon.jit
def fetch_queries(descs, smem, bars, place, t, BUILD: gl.constexpr):
    """Start copying the rows of each group, as soon as it needs those of the block before no more."""
    batch, head, row = place
    for g in gl.static_range(BUILD.BLOCK_M // GROUP_ROWS):
        mbarrier.wait(bars.q_empty.index(g), (t & 1) ^ 1)
        mbarrier.expect(bars.q_full.index(g), descs.q.block_type.nbytes)
        coordinates = [batch, head, row + g * GROUP_ROWS, 0]
        tma.async_copy_global_to_shared(descs.q, coordinates, bars.q_full.index(g), smem.q.index(g))


@gluon.jit
def load_block(descs, smem, bars, place, t, i, KEYS: gl.constexpr, BUILD: gl.constexpr):
    """Start every copy that one block of queries needs: of keys and what goes with them, or of values."""
    batch, head, row = place
    kv_head = head // (descs.q.shape[1] // descs.k.shape[1])
    blocks = key_blocks(row, BUILD.BLOCK_M, descs.q.shape[2], descs.k.shape[2], BUILD)
    for n in range(blocks):
        start = (blocks - 1 - n) * BUILD.BLOCK_N
        if KEYS:
            fetch_keys(descs, smem, bars, place, kv_head, start, i + n, BUILD)
            if n == 0:
                fetch_queries(descs, smem, bars, place, t, BUILD)
        else:
            fetch(descs.v, [batch, kv_head, start, 0], smem.v, bars.v_full, bars.v_empty, i + n, 0, BUILD)
    return i + blocks


@gluon.jit
def load(descs, smem, bars, schedule, KEYS: gl.constexpr, BUILD: gl.constexpr):
    """What a loading warp does."""
    t = 0
    i = 0
    if BUILD.PERSISTENT:
        for share in range(gl.program_id(0), schedule.all_shares, gl.num_programs(0)):
            batch, head, n = find_share(share, schedule)
            for part in range(share_size(n, schedule, BUILD)):
                place = (batch, head, first_row(n, part, schedule, BUILD))
                i = load_block(descs, smem, bars, place, t, i, KEYS, BUILD)
                t += 1
    else:
        load_block(descs, smem, bars, locate(gl.program_id(0), schedule, BUILD), t, i, KEYS, BUILD)


@gluon.jit
def key_loader(descs, smem, bars, schedule, BUILD: gl.constexpr):
    load(descs, smem, bars, schedule, True, BUILD)


@gluon.jit
def value_loader(descs, smem, bars, schedule, BUILD: gl.constexpr):
    load(descs, smem, bars, schedule, False, BUILD)


@gluon.jit(do_not_specialize=["blocks", "entries", "section", "inner", "by_head", "shares", "all_shares"])
def forward_kernel(q_desc, k_desc, v_desc, out_desc, bias_desc, lse, blocks, shares, all_shares, entries,
                   section, inner, by_head, scale, power, BUILD: gl.constexpr):  # fmt: skip
    """out (B, H, M, D) and lse (B, H, M) for a Schedule. `scale` is log2(e) times that of the scores or, with a bias,
    times what remains of it when queries are multiplied by a `power` of two."""
    GROUPS: gl.constexpr = BUILD.BLOCK_M // GROUP_ROWS
    STAGES: gl.constexpr = BUILD.STAGES
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    out_smem = q_smem
    if BUILD.OWN_OUT:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS] + out_desc.block_type.shape, out_desc.layout)
    bias_smem = q_smem
    if BUILD.BIAS:
        tiles: gl.constexpr = [STAGES * GROUPS] + bias_desc.block_type.shape
        bias_smem = gl.allocate_shared_memory(bias_desc.dtype, tiles, bias_desc.layout)
    bars = Barriers(barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(STAGES, 1), barriers(STAGES, GROUPS),
            barriers(STAGES, 1), barriers(STAGES, GROUPS))  # fmt: skip
    fence_async_shared()
    descs = Operands(q_desc, k_desc, v_desc, out_desc, bias_desc)
    smem = Operands(q_smem, k_smem, v_smem, out_smem, bias_smem)
    schedule = Schedule(blocks, shares, all_shares, entries, section, inner, by_head)
    if GROUPS == 2:
        gl.warp_specialize([
            (first_group, (descs, smem, bars, lse, schedule, scale, power, BUILD)),
            (second_group, (descs, smem, bars, lse, schedule, scale, power, BUILD)),
            (key_loader, (descs, smem, bars, schedule, BUILD)),
            (value_loader, (descs, smem, bars, schedule, BUILD)),
        ], [GROUP_WARPS, 1, 1], [BUILD.GROUP_REGISTERS, BUILD.LOADER_REGISTERS, BUILD.LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_group, (descs, smem, bars, lse, schedule, scale, power, BUILD)),
            (second_group, (descs, smem, bars, lse, schedule, scale, power, BUILD)),
            (third_group, (descs, smem, bars, lse, schedule, scale, power, BUILD)),
            (key_loader, (descs, smem, bars, schedule, BUILD)),
            (value_loader, (descs, smem, bars, schedule, BUILD)),
        ], [GROUP_WARPS, GROUP_WARPS, 1, 1],
            [BUILD.GROUP_REGISTERS, BUILD.GROUP_REGISTERS, BUILD.LOADER_REGISTERS, BUILD.LOADER_REGISTERS])  # fmt: skip
