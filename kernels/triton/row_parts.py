"""A backward's rows, and products of them: float32 as float16 parts in memory or on chip, other dtypes as they are.

A backward reads each block of queries, keys, values and gradients of the output many times, and as either side of a
product. Parts made in registers for each product, as a forward makes them (float16_parts.py), are more than there are.
Parts in memory are made once, and go to shared memory, from where tensor cores read both sides. Where keys are one
block, a program cuts each tile once and needs no memory.

Each row is divided by its unit, the power of two that brings its largest number to [2^14, 2^15), just below the largest
float16. Two parts leave out at most 2^-22 of a number, or 2^-39 of its row's largest where that is more: less than
float32's sums round off. One part holds what TF32 holds. Nothing is computed again, because units follow the rows. They
multiply a product one after the other, which is right while numbers are between 2^-100 and 2^100 in size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.arguments import block_size, kernel_args, strides_of
from sdpa.kernels.triton.float16_parts import TOP, exponent_of, power_of_two
from sdpa.kernels.triton.kernel_arguments import BackwardRows, KernelArgs, LoopOver, Strides
from sdpa.kernels.triton.launch import Launch
from sdpa.kernels.triton.order import ALONE, begin_in_order, end_in_order
from sdpa.kernels.triton.primitives import RowRange, load_rows, store_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Tile

SPLIT_ROWS = 32  # of a program that cuts rows into parts: it only streams
SPLIT_TILE = Tile(SPLIT_ROWS, 0, 4, 1)
# Units of smaller rows would have no inverse in float32.
LEAST_EXPONENT = tl.constexpr(-112)
WIDTH = tl.constexpr(8)  # numbers of 16 bits in what TMA wants rows to be a multiple of


class RowParts(NamedTuple):
    """A tile of rows, whose numbers are (high + low) * unit. With one part `high` stands in for `low` and is all."""

    high: tl.tensor  # [rows, size] float16
    low: tl.tensor
    unit: tl.tensor  # [rows] float32


class RowUnits(NamedTuple):
    """The units (B, heads, rows) of a backward's tensors. All are None where the tensors are read themselves."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    other: Tensor | None  # of the gradient of out


NO_UNITS = RowUnits(None, None, None, None)


class SplitJob(NamedTuple):
    """A tensor (B, heads, rows, size) to be cut into parts, and the programs that do it."""

    source: Tensor
    strides: Strides  # of the source
    target: Tensor  # dense
    unit: Tensor
    heads: int
    rows: int
    blocks: int  # of rows of a head
    end: int  # of its programs, which follow those of the job before


class Split(NamedTuple):
    """What a backward reads in place of its tensors (B, heads, rows, size): their parts
    (B * parts, heads, rows, size rounded up to WIDTH), those of a batch entry one after the other, and the units."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    units: RowUnits


@triton.jit
def units_of(x):
    """(unit, 1 / unit) of the rows of a tile, [rows] each. That of a row of zeros, or of smaller numbers, is 2^-126."""
    top = tl.max(tl.abs(x), 1)
    exponent = tl.maximum(exponent_of(top), LEAST_EXPONENT) - TOP
    return power_of_two(exponent), power_of_two(-exponent)


@triton.jit
def split_tile(x, PARTS: tl.constexpr):
    """The RowParts of a tile of float32."""
    unit, inverse = units_of(x)
    x = x * inverse[:, None]
    high = x.to(tl.float16)
    low = high
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(tl.float16)
    return RowParts(high, low, unit)


@triton.jit
def split_block(program, job, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Cut one block of rows into parts. Columns behind SIZE, up to a multiple of WIDTH, become 0."""
    WHOLE: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH * WIDTH
    entry, start = program // job.blocks, program % job.blocks * BLOCK
    batch, head = entry // job.heads, entry % job.heads
    at = RowRange(batch, head, start, job.rows)
    tile = split_tile(load_rows(job.source, job.strides, at, SIZE, BLOCK, BLOCK_SIZE, False, True), PARTS)
    of_head = tl.cast(job.rows, tl.int64) * WHOLE
    dense = Strides(job.heads * of_head, of_head, WHOLE, 1)
    store_rows(job.target, dense, part_of(at, 0, PARTS), tile.high, WHOLE)
    if PARTS == 2:
        store_rows(job.target, dense, part_of(at, 1, PARTS), tile.low, WHOLE)
    offsets = start + tl.arange(0, BLOCK)
    tl.store(job.unit + tl.cast(entry, tl.int64) * job.rows + offsets, tile.unit, mask=offsets < job.rows)


@triton.jit
def part_of(at, NUMBER: tl.constexpr, PARTS: tl.constexpr):
    """Where the first or second parts (NUMBER 0, 1) of the rows of the RowRange `at` lie."""
    return RowRange(at.batch * PARTS + NUMBER, at.head, at.start, at.limit)


@triton.jit
def split_kernel(q, k, v, grad_out, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """The parts of four tensors, each a SplitJob. Grid: the end of the last."""
    begin_in_order(ORDER)
    program = tl.program_id(0)
    if program < q.end:
        split_block(program, q, D, BLOCK, BLOCK_D, PARTS)
    elif program < k.end:
        split_block(program - q.end, k, D, BLOCK, BLOCK_D, PARTS)
    elif program < v.end:
        split_block(program - k.end, v, DV, BLOCK, BLOCK_DV, PARTS)
    else:
        split_block(program - v.end, grad_out, DV, BLOCK, BLOCK_DV, PARTS)
    end_in_order(ORDER)


@triton.jit
def load_parts(source, units, first, strides, at, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
               CLIP: tl.constexpr, CONFIG: tl.constexpr):  # fmt: skip
    """The rows `at`, as their RowParts where a kernel is compiled for parts.

    These are read where `units` is there, with the units of their head from units[first] on. Without, rows of float32
    are read and cut into parts here.
    """
    PARTS: tl.constexpr = CONFIG.FLOAT16_PARTS
    if PARTS == 0 or units is None:
        tile = load_rows(source, strides, at, SIZE, BLOCK, BLOCK_SIZE, CONFIG.TMA, CLIP)
        if PARTS > 0:
            tile = split_tile(tile, PARTS)
    else:
        high = load_rows(source, strides, part_of(at, 0, PARTS), SIZE, BLOCK, BLOCK_SIZE, CONFIG.TMA, CLIP)
        low = high
        if PARTS == 2:
            low = load_rows(source, strides, part_of(at, 1, PARTS), SIZE, BLOCK, BLOCK_SIZE, CONFIG.TMA, CLIP)
        rows = at.start + tl.arange(0, BLOCK)
        tile = RowParts(high, low, tl.load(units + first + rows, rows < at.limit, 1.0))
    return tile


@triton.jit
def load_query_rows(given, at, BLOCK: tl.constexpr, CLIP: tl.constexpr, CONFIG: tl.constexpr):
    """The queries `at`, [BLOCK, BLOCK_D], of the Operands `given`, as load_parts has them."""
    first = tl.cast(at.batch * given.sizes.H + at.head, tl.int64) * given.sizes.rows
    return load_parts(given.q, given.units.q, first, given.strides.q, at, CONFIG.D, BLOCK, CONFIG.BLOCK_D, CLIP, CONFIG)


@triton.jit
def load_upstream_rows(given, at, BLOCK: tl.constexpr, CLIP: tl.constexpr, CONFIG: tl.constexpr):
    """The gradients of the output `at`, [BLOCK, BLOCK_DV]."""
    first = tl.cast(at.batch * given.sizes.H + at.head, tl.int64) * given.sizes.rows
    return load_parts(given.grad_out, given.units.other, first, given.strides.other, at, CONFIG.DV, BLOCK,
                      CONFIG.BLOCK_DV, CLIP, CONFIG)  # fmt: skip


@triton.jit
def load_key_rows(given, at, BLOCK: tl.constexpr, CLIP: tl.constexpr, CONFIG: tl.constexpr):
    """The keys `at`, [BLOCK, BLOCK_D], of a head of keys."""
    first = tl.cast(at.batch * (given.sizes.H // given.sizes.G) + at.head, tl.int64) * given.sizes.key_rows
    return load_parts(given.k, given.units.k, first, given.strides.k, at, CONFIG.D, BLOCK, CONFIG.BLOCK_D, CLIP, CONFIG)


@triton.jit
def load_value_rows(given, at, BLOCK: tl.constexpr, CLIP: tl.constexpr, CONFIG: tl.constexpr):
    """The values `at`, [BLOCK, BLOCK_DV]."""
    first = tl.cast(at.batch * (given.sizes.H // given.sizes.G) + at.head, tl.int64) * given.sizes.key_rows
    return load_parts(given.v, given.units.v, first, given.strides.v, at, CONFIG.DV, BLOCK, CONFIG.BLOCK_DV, CLIP,
                      CONFIG)  # fmt: skip


@triton.jit
def products_of_rows(a, b, CONFIG: tl.constexpr):
    """a b^T [rows of a, rows of b]; with parts, the smallest products first."""
    if CONFIG.FLOAT16_PARTS == 0:
        s = tl.dot(a, b.T, input_precision=CONFIG.PRECISION)
    else:
        if CONFIG.FLOAT16_PARTS == 1:
            s = tl.dot(a.high, b.high.T)
        else:
            s = tl.dot(a.low, b.high.T)
            s = tl.dot(a.high, b.low.T, s)
            s = tl.dot(a.high, b.high.T, s)
        s = s * a.unit[:, None] * b.unit[None, :]
    return s


@triton.jit
def weights_for(w, b, CONFIG: tl.constexpr):
    """Weights as a product with the rows b takes them, before they are transposed: in the dtype of the rows, or in
    float32, of which parts are made."""
    if CONFIG.FLOAT16_PARTS == 0:
        w = w.to(b.dtype)
    return w


@triton.jit
def weighted_rows(w, b, CONFIG: tl.constexpr):
    """w b, of weights w [., rows of b]."""
    if CONFIG.FLOAT16_PARTS == 0:
        found = tl.dot(weights_for(w, b, CONFIG), b, input_precision=CONFIG.PRECISION)
    else:
        a = split_tile(w * b.unit[None, :], CONFIG.FLOAT16_PARTS)
        if CONFIG.FLOAT16_PARTS == 1:
            found = tl.dot(a.high, b.high)
        else:
            found = tl.dot(a.low, b.high)
            found = tl.dot(a.high, b.low, found)
            found = tl.dot(a.high, b.high, found)
        found = found * a.unit[:, None]
    return found


@triton.jit
def add_weighted_rows(acc, w, b, CONFIG: tl.constexpr):
    """acc + w b. Products of parts are summed from 0, because tensor cores cut off what they add to, which over all
    rows adds up."""
    if CONFIG.FLOAT16_PARTS == 0:
        acc = tl.dot(weights_for(w, b, CONFIG), b, acc, input_precision=CONFIG.PRECISION)
    else:
        acc += weighted_rows(w, b, CONFIG)
    return acc


def split_launch(tensors: tuple[Tensor, ...], parts: int) -> tuple[Split, Launch]:
    """The parts of q, k, v and the gradient of out, to be filled, and the launch that does it."""
    jobs: list[SplitJob] = []
    for tensor in tensors:
        B, heads, rows, size = tensor.shape
        target = tensor.new_empty((parts * B, heads, rows, -(-size // WIDTH.value) * WIDTH.value), dtype=torch.float16)
        blocks = -(-rows // SPLIT_ROWS)
        end = blocks * B * heads + (jobs[-1].end if jobs else 0)
        unit = tensor.new_empty((B, heads, rows))
        jobs.append(SplitJob(tensor, strides_of(tensor), target, unit, heads, rows, blocks, end))
    split = Split(*(job.target for job in jobs), RowUnits(*(job.unit for job in jobs)))
    D, Dv = tensors[0].shape[3], tensors[2].shape[3]
    arguments = (*jobs, D, Dv, SPLIT_ROWS, block_size(D), block_size(Dv), parts, ALONE.value)
    return split, Launch(split_kernel, (jobs[-1].end,), arguments, SPLIT_TILE)


def backward_args(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    tile: Tile,
    side: LoopOver,
    row: BackwardRows,
    split: Split | None,
) -> tuple[KernelArgs, RowUnits, list[Launch]]:
    """kernel_args of a backward, which reads parts where there are some, and their units."""
    if split is None:
        given, before = kernel_args(inputs, problem, tile, side, row.grad_out)
        return given, NO_UNITS, before
    given, before = kernel_args(inputs._replace(q=split.q, k=split.k, v=split.v), problem, tile, side, split.grad_out)
    return given, split.units, before
