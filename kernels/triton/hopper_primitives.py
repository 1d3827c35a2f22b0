"""What Hopper's kernels share on the device: the softmax of scores in registers, masks, ping-pong, mbarriers.

WG is the number of a consumer warpgroup. [64, BLOCK_N] is its tile of scores, in the registers of a product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sdpa.kernels.triton.hopper_schedule import diagonal
from sdpa.kernels.triton.order import AFTER, ALONE, BESIDE

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
WG_ROWS = gl.constexpr(64)  # rows of one warpgroup's matrix product (wgmma)
WG_WARPS = gl.constexpr(4)  # of a warpgroup
PING_PONG_BARRIER = gl.constexpr(11)  # the first of the named barriers of ping-pong, one for each warpgroup
LANE_BITS = gl.constexpr(6)  # of a column number
# Rows whose largest score is beyond this in size compare by differences alone (see `softmax_step`).
LARGE_SCORE = gl.constexpr(2.0**26)
# Copies by TMA from global memory to shared memory, and back. Triton 3.9 has them under other names than 3.6.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def row_maximum(s):
    """[64]: the maximum of each row of s [64, BLOCK_N]. Neighbours come first, which halves the dependent chain."""
    left, right = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    return gl.max(gl.maximum(left, right), 1)


@gluon.jit
def thread_sums(p):
    """[64, 4] from p [64, BLOCK_N]: each of a row's four threads adds what it holds. Nothing passes between threads."""
    left, right = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    return gl.sum(gl.reshape(left + right, [p.shape[0], p.shape[1] // 8, 4]), 1)


@gluon.jit
def softmax_step(s, row_max, scale, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """(probabilities [64, BLOCK_N], factor [64] of what was summed before, new row_max [64]) of scores s [64, BLOCK_N].

    A bias may be as large as float32 gets (a mask of the lowest finite number), and times `scale` it would overflow.
    Scores beyond LARGE_SCORE lie 8 apart or so. Only those equal to the maximum count then, so `scale` is left out.
    """
    top = gl.convert_layout(row_maximum(s), row_max.type.layout, assert_trivial=True)
    if not CONFIG.BIAS:
        top *= scale
    raised = gl.maximum(row_max, top)
    base = raised
    if MASKED or CONFIG.BIAS:  # a row that has seen no key yet subtracts nothing
        base = gl.where(raised == float("-inf"), 0.0, raised)
    if CONFIG.BIAS:
        factor = gl.where(gl.abs(base) < LARGE_SCORE, scale, 1.0)
        e = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(base * factor, 1))
        alpha = gl.exp2((row_max - base) * factor)
    else:
        e, alpha = gl.exp2(s * scale - gl.expand_dims(base, 1)), gl.exp2(row_max - base)
    return e, alpha, raised


@gluon.jit
def apply_mask(s, row, start, M, N, CONFIG: gl.constexpr):
    """s [64, BLOCK_N] with -inf where a key of the block at `start` is not visible to its row.

    In the product's register layout bits 1 and 2 of a column's number come from the lane and the others from the
    register. With the two apart, every comparison is of one value per row with a constant.
    """
    layout: gl.constexpr = s.type.layout
    rows = row + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
    limit = gl.full([WG_ROWS], 0, gl.int32, gl.SliceLayout(1, layout)) + N
    if CONFIG.CAUSAL:
        limit = gl.minimum(limit, rows + 1 + diagonal(M, N, CONFIG))
    columns = gl.expand_dims(gl.arange(0, CONFIG.BLOCK_N, gl.SliceLayout(0, layout)), 0)
    left = gl.expand_dims(limit - start, 1) - (columns & LANE_BITS)
    return gl.where((columns & ~LANE_BITS) < left, s, float("-inf"))


@gluon.jit
def to_float32(tile):
    """float32 of a tile in half precision. A pair of bfloat16 takes two instructions; Triton's own way takes three."""
    if tile.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [tile],
                                         dtype=gl.float32, is_pure=True, pack=2)  # fmt: skip
    else:
        wide = tile.to(gl.float32)
    return wide


@gluon.jit
def hold_order(row_sum):
    """row_sum [64, 4] itself, complete before whatever comes next.

    Without it ptxas waits for the tensor cores ahead of the exponentials, not behind them. ptxas moves no wait across a
    named barrier. No thread ever reaches this one, because no sum is below -1 (0fBF800000). Triton numbers named
    barriers from 0, one per partition; 13 to 15 are free.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .f32 both; add.f32 both, $2, $3; setp.lt.f32 never, both, 0fBF800000;"
        " @never bar.arrive 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r", [row_sum], dtype=gl.float32, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def ping_pong_wait(WG: gl.constexpr, CONFIG: gl.constexpr):
    """Ping-pong: wait until the warpgroup before has issued its products."""
    if CONFIG.PINGPONG:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [PING_PONG_BARRIER + WG], gl.int32, False, 1
        )


@gluon.jit
def ping_pong_signal(WG: gl.constexpr, CONFIG: gl.constexpr):
    """Ping-pong: let the warpgroup after WG issue its products."""
    if CONFIG.PINGPONG:
        after: gl.constexpr = (WG + 1) % (CONFIG.BLOCK_M // WG_ROWS)
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [PING_PONG_BARRIER + after], gl.int32, False, 1
        )


@gluon.jit
def rescale(acc, alpha):
    """acc [64, .] times alpha [64], which lies in the register layout of scores."""
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1)


@gluon.jit
def begin_in_order(ORDER: gl.constexpr):
    """The same in Gluon as in order.py."""
    if ORDER == AFTER:
        wait_for_launch_before()
    if ORDER != ALONE:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def end_in_order(ORDER: gl.constexpr):
    """The same in Gluon as in order.py."""
    if ORDER == BESIDE:
        if gl.program_id(0) == gl.num_programs(0) - 1:
            wait_for_launch_before()


@gluon.jit
def wait_for_launch_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers in shared memory, each of ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(made.index(b), count=ARRIVALS)
    return made
