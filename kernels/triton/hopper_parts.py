"""What Hopper's kernels are made of: the softmax of scores in registers, masks, and barriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sdpa.kernels.triton.hopper_schedule import diagonal

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
GROUP_ROWS = gl.constexpr(64)  # rows of one warp group's matrix product
GROUP_WARPS = gl.constexpr(4)
TURNS = gl.constexpr(11)  # the barriers by which groups take turns
LANE_BITS = gl.constexpr(6)  # of a column number
# Rows whose largest score is beyond this in size compare by their differences alone (see `soften`).
FAR = gl.constexpr(2.0**26)


@gluon.jit
def largest(s):
    """The maximum of each row of s [64, BLOCK_N], neighbours first: half the length of one chain."""
    left, right = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    return gl.max(gl.maximum(left, right), 1)


@gluon.jit
def own_sums(p):
    """[64, 4] from p [64, BLOCK_N]: each thread of a row adds what it holds, and nothing passes between threads."""
    left, right = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    return gl.sum(gl.reshape(left + right, [p.shape[0], p.shape[1] // 8, 4]), 1)


@gluon.jit
def soften(s, row_max, scale, MASKED: gl.constexpr, BUILD: gl.constexpr):
    """(probabilities, factor for what was summed before, new row_max) of scores s [64, BLOCK_N].

    A bias may be as large as float32 gets (a mask of the lowest finite number), and times `scale` it would overflow.
    Scores beyond FAR lie 8 apart or so: whatever the base of the power, only those equal to the maximum count.
    """
    top = gl.convert_layout(largest(s), row_max.type.layout, assert_trivial=True)
    if not BUILD.BIAS:
        top *= scale
    raised = gl.maximum(row_max, top)
    base = raised
    if MASKED or BUILD.BIAS:  # a row that has seen no key yet subtracts nothing
        base = gl.where(raised == float("-inf"), 0.0, raised)
    if BUILD.BIAS:
        factor = gl.where(gl.abs(base) < FAR, scale, 1.0)
        e = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(base * factor, 1))
        alpha = gl.exp2((row_max - base) * factor)
    else:
        e, alpha = gl.exp2(s * scale - gl.expand_dims(base, 1)), gl.exp2(row_max - base)
    return e, alpha, raised


@gluon.jit
def hide(s, row, start, M, N, BUILD: gl.constexpr):
    """-inf where a key of the block at `start` is not visible to its row.

    In the product's register layout bits 1 and 2 of a column come from the lane and the others from the register: taken
    apart, every comparison is of one value per row with a constant.
    """
    layout: gl.constexpr = s.type.layout
    rows = row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    limit = gl.full([GROUP_ROWS], 0, gl.int32, gl.SliceLayout(1, layout)) + N
    if BUILD.CAUSAL:
        limit = gl.minimum(limit, rows + 1 + diagonal(M, N, BUILD))
    columns = gl.expand_dims(gl.arange(0, BUILD.BLOCK_N, gl.SliceLayout(0, layout)), 0)
    left = gl.expand_dims(limit - start, 1) - (columns & LANE_BITS)
    return gl.where((columns & ~LANE_BITS) < left, s, float("-inf"))


@gluon.jit
def widen(tile):
    """float32 of a tile in half precision. A pair of bfloat16 takes two instructions; Triton's own way takes three."""
    if tile.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [tile],
                                         dtype=gl.float32, is_pure=True, pack=2)  # fmt: skip
    else:
        wide = tile.to(gl.float32)
    return wide


@gluon.jit
def hold(row_sum):
    """row_sum itself, complete before whatever comes next. ptxas would wait for the tensor cores ahead of the
    exponentials, and not behind them; it moves no wait across a barrier, even one that no thread ever reaches, because
    no sum is below -1 (0fBF800000). Triton numbers barriers from 0, one per partition; 13 to 15 are free."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .f32 both; add.f32 both, $2, $3; setp.lt.f32 never, both, 0fBF800000;"
        " @never bar.arrive 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r", [row_sum], dtype=gl.float32, is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def take_turn(GROUP: gl.constexpr, BUILD: gl.constexpr):
    """Wait until the group before has issued its products."""
    if BUILD.PINGPONG:
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [TURNS + GROUP], gl.int32, False, 1)


@gluon.jit
def give_turn(GROUP: gl.constexpr, BUILD: gl.constexpr):
    """Let the group after GROUP issue its products."""
    if BUILD.PINGPONG:
        after: gl.constexpr = (GROUP + 1) % (BUILD.BLOCK_M // GROUP_ROWS)
        gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [TURNS + after], gl.int32, False, 1)


@gluon.jit
def rescale(acc, alpha):
    """acc [64, .] times alpha [64], which lies in the registers of scores."""
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers of ARRIVALS arrivals each."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(made.index(b), count=ARRIVALS)
    return made
