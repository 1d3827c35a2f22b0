"""Attention for Hopper: tiles, descriptors and the launch of the Gluon forward; its backward is in hopper_backward.py.

Which build is best for which problem was measured on an H200, with bfloat16 and 16384 rows of 2048 columns in all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sdpa.kernels.triton import forward as plain
from sdpa.kernels.triton import hopper_backward
from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT, describable, forward_pass_of, section_of
from sdpa.kernels.triton.hopper_descriptors import describe, rows_descriptor
from sdpa.kernels.triton.hopper_kernel import Build, forward_kernel
from sdpa.kernels.triton.hopper_parts import GROUP_ROWS, LOG2E
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import tiles as plain_tiles
from sdpa.layout import empty_as, unexpanded
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of

HOPPER = (9, 0)
MIN_POWER = 2.0**-6  # float16 has no digits to lose far below 1
SMALL_D, MEDIUM_D = 64, 128  # head sizes; 64 of them fill a row of the 128-byte swizzle, so there are none smaller
# Warps are those of one group of 64 rows. Stages of keys and values fill the shared memory: 160 KB at D = 128, 192 KB
# at D = 256. Scores of 64 x 128 fill the registers beside an accumulator of D = 128; at D = 64 there is room for a
# third group, so that the products of two hide the softmax of one.
TWO_GROUP_TILE, THREE_GROUP_TILE, LARGE_TILE = Tile(128, 128, 4, 2), Tile(192, 128, 4, 2), Tile(128, 64, 4, 2)
TILES: tuple[Tile, ...] = (TWO_GROUP_TILE, THREE_GROUP_TILE, LARGE_TILE, *hopper_backward.TILES)
# A bias takes as many stages: 16 KB per group and stage, 8 KB at D = 256, which fills the rest.
# Registers per thread of (a group, the loaders), which setmaxnreg moves between them; 65536 are there for all.
TWO_GROUPS, THREE_GROUPS = (240, 24), (160, 32)
SHORT = 1024  # up to so many queries, blocks of 192 leave too many rows empty
# Up to so many keys a persistent program wins by loading beside the end of the block before (13 % at 1024 keys, 3 % at
# 4096); at 16384 there is nothing left to win, and it loses 1 %.
PERSISTENT_KEYS = 8192
# Shares are dealt out beforehand, so the last round may be short; the hardware's own order has nearly full rounds.
MIN_FILLED = 0.9


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    found = torch.cuda.get_device_capability()
    return None if found == HOPPER else f"needs a device of compute capability 9.0; got {found[0]}.{found[1]}"


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """Best guess first."""
    if problem.direction == "backward":
        return hopper_backward.tiles(problem)
    if problem.D > SMALL_D:
        return (TWO_GROUP_TILE,) if problem.D <= MEDIUM_D else (LARGE_TILE,)
    two_first = problem.M <= SHORT or (problem.causal and is_biased(problem))
    return (TWO_GROUP_TILE, THREE_GROUP_TILE) if two_first else (THREE_GROUP_TILE, TWO_GROUP_TILE)


def is_biased(problem: AttentionProblem) -> bool:
    return "bias" in problem.features


def build_of(problem: AttentionProblem, tile: Tile) -> Build:
    group, loader = TWO_GROUPS if tile.BLOCK_M == 2 * GROUP_ROWS.value else THREE_GROUPS
    persistent, biased = is_persistent(problem, tile), is_biased(problem)
    return Build(
        tile.BLOCK_M,
        tile.BLOCK_N,
        max(SMALL_D, triton.next_power_of_2(problem.D)),
        tile.num_stages,
        CAUSAL=problem.causal,
        BOTTOM_RIGHT=problem.bottom_right,
        BIAS=biased,
        WHOLE_SCALE=False,  # a problem does not tell: see `fix`
        PERSISTENT=persistent,
        OWN_OUT=persistent and problem.D <= (SMALL_D if biased else MEDIUM_D),  # beyond it shared memory is full
        PINGPONG=persistent and takes_turns(problem, tile),
        GROUP_REGISTERS=group,
        LOADER_REGISTERS=loader,
    )


def takes_turns(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether groups do well to take turns: where softmax takes longer than the products."""
    if is_biased(problem):
        return problem.D <= MEDIUM_D
    return tile == TWO_GROUP_TILE and problem.D <= SMALL_D and problem.N <= SHORT


def is_persistent(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a program per core should go through its share of the blocks; where causal, only if shares are equal,
    which takes as many keys as queries at least, and fill the device."""
    if problem.N > PERSISTENT_KEYS:
        return False
    if not problem.causal:
        return True
    count, cores = problem.B * problem.H * shares_of_head(problem, tile, True), target_of(problem.device).cores
    return problem.M <= problem.N and count >= MIN_FILLED * cores * -(-count // cores)


def shares_of_head(problem: AttentionProblem, tile: Tile, persistent: bool) -> int:
    """What programs can divide among themselves: blocks of queries, or pairs of them (see the kernel's Schedule)."""
    blocks = -(-problem.M // tile.BLOCK_M)
    return -(-blocks // 2) if persistent and problem.causal else blocks


class Order(NamedTuple):
    """In which order programs take the entries (see the kernel's Schedule)."""

    blocks: int
    shares: int
    all_shares: int
    entries: int
    section: int
    inner: int
    by_head: int


def order_of(problem: AttentionProblem, tile: Tile, persistent: bool, bias: Tensor | None) -> Order:
    """Entries that share a bias come side by side, so that it is read from memory once; without one, see section_of."""
    blocks, entries = -(-problem.M // tile.BLOCK_M), problem.B * problem.H
    section, inner, by_head = 1, problem.H, 0
    if bias is None:
        section = 1 if persistent else section_of(problem, entries)
    elif bias.shape[1] == 1:
        section = problem.H
    elif bias.shape[0] == 1:
        section, inner, by_head = problem.B, problem.B, 1
    shares = shares_of_head(problem, tile, persistent)
    return Order(blocks, shares, shares * entries, entries, section, inner, by_head)


class Fixed(NamedTuple):
    """What calls of the same problem, strides and tile share; made once."""

    build: Build
    programs: int
    order: Order
    power: float  # of two, by which the kernel multiplies queries
    descriptors: tuple[dict | None, ...]  # of q, k, v, out and the bias: all but the address


def power_of(problem: AttentionProblem, scale: float) -> float:
    """The power of two next below the scale, so far as it does not cost float16 queries digits."""
    power = 2.0 ** math.floor(math.log2(scale))
    return min(1.0, max(MIN_POWER, power)) if problem.dtype == torch.float16 else power


def fix(
    problem: AttentionProblem, tile: Tile, build: Build | None, tensors: tuple[Tensor | None, ...], scale: float
) -> Fixed | None:
    """`tensors` are q, k, v, out and the bias; None where TMA cannot follow their strides."""
    build = build or build_of(problem, tile)
    if not all(t is None or (t.stride(3) == 1 and describable(t)) for t in tensors):
        return None
    order = order_of(problem, tile, build.PERSISTENT, tensors[-1])
    programs = min(order.all_shares, target_of(problem.device).cores) if build.PERSISTENT else order.all_shares
    own, keys, size = GROUP_ROWS.value, tile.BLOCK_N, build.D
    boxes = ((own, size), (keys, size), (keys, size), (own, size), (own, keys))
    descriptors = (None if t is None else rows_descriptor(t, *box) for t, box in zip(tensors, boxes, strict=True))
    power = power_of(problem, scale) if build.BIAS else 1.0
    build = replace(build, WHOLE_SCALE=build.BIAS and power == scale)
    return Fixed(build, programs, order, power, tuple(descriptors))


def forward_launch(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, build: Build | None = None
) -> tuple[Results, Launch] | None:
    """Results to be filled, and the launch that fills them, of the kernel that `build` tells or else the best; None
    where the bulk copy engine cannot read the tensors."""
    q, k, v = inputs[:3]
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    key = ("hopper forward", problem, tile, build, target_of(problem.device), q.stride(), k.stride(), v.stride())
    bias = inputs.bias
    if bias is not None:
        bias = unexpanded(bias)
        addresses |= bias.data_ptr()
        key = (*key, bias.shape, bias.stride(), inputs.scale)
    if addresses % DESCRIPTOR_ALIGNMENT:
        return None
    out = empty_as(q, problem.Dv)
    tensors = (q, k, v, out, bias)
    fixed = PREPARED.get(key, fix, problem, tile, build, tensors, inputs.scale)
    if fixed is None:
        return None
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    numbers = (*fixed.order, inputs.scale / fixed.power * LOG2E.value, fixed.power)
    args = (*map(describe, fixed.descriptors, tensors), lse, *numbers, fixed.build)
    return Results(out, lse), Launch(forward_kernel, (fixed.programs,), args, tile)


def forward_pass(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Pass:
    """Tensors that TMA cannot read (addresses or strides that are no multiples of 16 bytes, strides of zero), which a
    problem does not tell, go to the plain Triton loop: slower, but with the same results and no copy."""
    given = with_memory(read_of(inputs))
    made = forward_launch(inputs, problem, tile)
    if made is None:
        return plain.forward_pass(inputs, problem, plain_tiles(problem)[0])
    results, launch = made
    return forward_pass_of(given, inputs, results, [launch], ())


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    if inputs.q.numel() == 0 or problem.N == 0:
        out = empty_as(inputs.q, problem.Dv).zero_()
        return Results(out, out.new_full(out.shape[:3], -torch.inf, dtype=torch.float32))
    return run_pass(forward_pass(inputs, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results | Gradients, RecordedCall | None]:
    """Like the pass that the problem names, and what does it again for tensors of the same form, of which none is
    empty."""
    if problem.direction == "backward":
        return hopper_backward.record(tensors, problem, tile)
    return record_pass(forward_pass(*tensors, problem, tile), problem)


backward = hopper_backward.backward
