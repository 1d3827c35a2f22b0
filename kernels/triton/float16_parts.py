"""float32 products emulated by float16 ones: how operands are cut into parts, and whether the result can be trusted.

Two float16 parts hold 23 bits of a float32. The second part is kept 2^11 times too large, so that it is not subnormal
where the first is not. Three products of such parts leave out only the product of the second parts: at most 2^-22 of a
term, 2^-25 in the mean square, which is less than a sum of float32 products rounds off. One part holds what TF32 holds.

float16 cannot hold 65520 and more, nor very small numbers to their relative precision. The result shows where that
happened, and the block is then computed again with float32 products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# The second part is multiplied by this: one step of the first part's 11 bits.
STEP = tl.constexpr(2048.0)
# Queries are multiplied by the power of two that brings the largest to [2^14, 2^15), just below the largest float16.
TOP = tl.constexpr(14)
# Probabilities, at most 1, are multiplied by 2^P_EXPONENT: those of 2^-29 and more are then normal numbers.
P_EXPONENT = 15
BIAS_OF_EXPONENT = tl.constexpr(127)
FRACTION_BITS = tl.constexpr(23)
# A row of queries that is smaller than the block's largest by this factor still has 24 bits.
SPREAD = tl.constexpr(2.0**15)
MAX_EXPONENT = tl.constexpr(100)  # so that the powers of two stay finite; beyond it no result is right
# Keys and values are known to 2^-36 at least (2^-25 with one part). A score is then known to float32's 2^-24 (TF32's
# 2^-13) while |q| * scale * D is below the first, and a row of the output while its mean |out| is above the second.
MOST_REACH = tl.constexpr(4096.0)
LEAST_MEAN = tl.constexpr(1.0 / 4096)


class Float16Parts(NamedTuple):
    """The float16 parts of a tile of rows, the left operand [BLOCK_M, .]. Products of one part read `high` only."""

    high: tl.tensor
    low: tl.tensor  # the second part
    small: tl.tensor  # high / STEP, which meets the right operand's second part


@triton.jit
def split_float32(x, PARTS: tl.constexpr):
    """The parts of a left operand x [BLOCK_M, .] whose largest value is near float16's largest."""
    high = x.to(tl.float16)
    if PARTS == 1:
        parts = Float16Parts(high, high, high)
    else:
        low = (x - high.to(tl.float32)).to(tl.float16)
        parts = Float16Parts(high, low, high * (1.0 / STEP))
    return parts


@triton.jit
def exponent_of(x):
    """The exponent of a float32 that is not negative: -127 of 0 and of subnormal numbers, 128 of what is not finite."""
    return (x.to(tl.int32, bitcast=True) >> FRACTION_BITS) - BIAS_OF_EXPONENT


@triton.jit
def power_of_two(exponent):
    """2^exponent as float32, of an int32 from -126 to 127."""
    return ((exponent + BIAS_OF_EXPONENT) << FRACTION_BITS).to(tl.float32, bitcast=True)


@triton.jit
def scaled_queries(q_tile, scale, PARTS: tl.constexpr):
    """(parts of q_tile [BLOCK_M, BLOCK_D] times a power of two, scale over that power, the largest |q| * |scale|).

    The last is infinite where the rows differ too much in size for one power of two.
    """
    tops = tl.max(tl.abs(q_tile), 1)
    top = tl.max(tops, 0)
    exponent = exponent_of(top)
    raised = -tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT) + TOP
    up, down = power_of_two(raised), power_of_two(-raised)
    even = tl.min(((tops * SPREAD >= top) | (tops == 0.0)).to(tl.int32), 0) == 1
    return split_float32(q_tile * up, PARTS), scale * down, tl.where(even, tl.abs(top * scale), float("inf"))


@triton.jit
def scores_of(q, k_tile, PARTS: tl.constexpr):
    """q k^T [BLOCK_M, BLOCK_N], the smallest products first. It is NaN where a key is too large for float16."""
    high = k_tile.to(tl.float16)
    if PARTS == 1:
        s = tl.dot(q.high, (high + high * 0.0).T)  # an infinity becomes NaN, which no mask by -inf resembles
    else:
        low = ((k_tile - high.to(tl.float32)) * STEP).to(tl.float16)
        s = tl.dot(q.small, low.T)
        s = tl.dot(q.low, high.T, s)
        s = tl.dot(q.high, high.T, s)
    return s


@triton.jit
def add_values(acc, p, v_tile, PARTS: tl.constexpr):
    """acc + p v [BLOCK_M, BLOCK_DV]. It is not finite where a value is too large for float16.

    Products of two parts are summed from 0, because tensor cores cut off what they add to: over all keys that adds up.
    """
    high = v_tile.to(tl.float16)
    parts = split_float32(p, PARTS)
    if PARTS == 1:
        acc = tl.dot(parts.high, high, acc)
    else:
        low = ((v_tile - high.to(tl.float32)) * STEP).to(tl.float16)
        new = tl.dot(parts.small, low)
        new = tl.dot(parts.low, high, new)
        acc += tl.dot(parts.high, high, new)
    return acc


@triton.jit
def needs_recompute(acc, row_sum, reach, D: tl.constexpr, DV: tl.constexpr):
    """Whether some row of a normalised acc [BLOCK_M, BLOCK_DV] may have met what float16 parts cannot hold."""
    mean = tl.where(reach * D < MOST_REACH, tl.sum(tl.abs(acc), 1) / DV, float("inf"))
    sound = (mean >= LEAST_MEAN) & (mean < float("inf"))
    return tl.min((sound | (row_sum == 0.0)).to(tl.int32), 0) == 0
