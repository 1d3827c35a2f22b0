"""Attention for Hopper: tiles, descriptors and the launch of the Gluon forward; its backward is in hopper_backward.py.

Which build is best for which problem was measured on an H200, with bfloat16 and 16384 rows of 2048 columns in all.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sdpa.kernels.triton import forward as plain
from sdpa.kernels.triton import hopper_backward
from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT, describable, section_of
from sdpa.kernels.triton.hopper_kernel import GROUP_ROWS, LOG2E, Build, forward_kernel
from sdpa.kernels.triton.launch import Launch, run
from sdpa.kernels.triton.replay import Replay, run_recording
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import tiles as plain_tiles
from sdpa.layout import empty_as
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

HOPPER = (9, 0)
SMALL_D, MEDIUM_D = 64, 128  # head sizes; 64 of them fill a row of the 128-byte swizzle, so there are none smaller
# Warps are those of one group of 64 rows. Stages of keys and values fill the shared memory: 160 KB at D = 128, 192 KB
# at D = 256. Scores of 64 x 128 fill the registers beside an accumulator of D = 128; at D = 64 there is room for a
# third group, so that the products of two hide the softmax of one.
TWO_GROUP_TILE, THREE_GROUP_TILE, LARGE_TILE = Tile(128, 128, 4, 2), Tile(192, 128, 4, 2), Tile(128, 64, 4, 2)
TILES: tuple[Tile, ...] = (TWO_GROUP_TILE, THREE_GROUP_TILE, LARGE_TILE, *hopper_backward.TILES)
# Registers per thread of (a group, the loader), which setmaxnreg moves between them; 65536 are there for all.
TWO_GROUPS, THREE_GROUPS = (240, 24), (160, 32)
SHORT = 1024  # up to so many queries, blocks of 192 leave too many rows empty, and groups do well to take turns
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
    return (TWO_GROUP_TILE, THREE_GROUP_TILE) if problem.M <= SHORT else (THREE_GROUP_TILE, TWO_GROUP_TILE)


def build_of(problem: AttentionProblem, tile: Tile) -> Build:
    two = tile.BLOCK_M == 2 * GROUP_ROWS.value
    group, loader = TWO_GROUPS if two else THREE_GROUPS
    persistent = is_persistent(problem, tile)
    return Build(
        tile.BLOCK_M,
        tile.BLOCK_N,
        max(SMALL_D, triton.next_power_of_2(problem.D)),
        tile.num_stages,
        CAUSAL=problem.causal,
        BOTTOM_RIGHT=problem.bottom_right,
        PERSISTENT=persistent,
        OWN_OUT=persistent and problem.D <= MEDIUM_D,  # beyond it shared memory is full
        PINGPONG=persistent and two and problem.D <= SMALL_D and problem.N <= SHORT,
        GROUP_REGISTERS=group,
        LOADER_REGISTERS=loader,
    )


def is_persistent(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a program per core should go through its share of the blocks; where causal, only if shares are equal,
    which takes as many keys as queries at least, and fill the device."""
    if problem.N > PERSISTENT_KEYS:
        return False
    if not problem.causal:
        return True
    count, cores = shares(problem, tile, True), target_of(problem.device).cores
    return problem.M <= problem.N and count >= MIN_FILLED * cores * -(-count // cores)


def shares(problem: AttentionProblem, tile: Tile, persistent: bool) -> int:
    """What programs can divide among themselves: blocks of queries, or pairs of them (see the kernel's share_count)."""
    blocks = -(-problem.M // tile.BLOCK_M)
    return problem.B * problem.H * (-(-blocks // 2) if persistent and problem.causal else blocks)


class Fixed(NamedTuple):
    """What calls of the same problem, strides and tile share; made once."""

    build: Build
    programs: int
    blocks: int
    entries: int
    section: int
    descriptors: tuple[dict, ...]  # of q, k, v and out: all but the address


FIXED: dict[Hashable, Fixed | None] = {}
MAX_FIXED = 4096


def descriptor_of(tensor: Tensor, rows: int, size: int) -> dict:
    """Descriptor of (B, H, rows, D) moved in blocks of [1, 1, rows, size]; a dimension of one needs no true stride."""
    unit = DESCRIPTOR_ALIGNMENT // tensor.element_size()
    strides = [unit if n == 1 else s for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    block = [1, 1, rows, size]
    return vars(TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, layout)) | {"base": None}


def describe(fields: dict, tensor: Tensor) -> TensorDescriptor:
    """A checked descriptor with another address."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor


def fix(problem: AttentionProblem, tile: Tile, build: Build, tensors: tuple[Tensor, ...]) -> Fixed | None:
    """`tensors` are q, k, v and out; None where the bulk copy engine cannot follow their strides."""
    if not all(t.stride(3) == 1 and describable(t) for t in tensors):
        return None
    programs = shares(problem, tile, build.PERSISTENT)
    if build.PERSISTENT:
        programs = min(programs, target_of(problem.device).cores)
    entries, own = problem.B * problem.H, GROUP_ROWS.value
    rows = (own, tile.BLOCK_N, tile.BLOCK_N, own)
    descriptors = tuple(descriptor_of(t, n, build.D) for t, n in zip(tensors, rows, strict=True))
    return Fixed(build, programs, -(-problem.M // tile.BLOCK_M), entries, section_of(problem, entries), descriptors)


def forward_launch(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, build: Build | None = None
) -> tuple[Results, Launch] | None:
    """Results to be filled, and the launch that fills them, of the kernel that `build` tells or else the best; None
    where the bulk copy engine cannot read the tensors."""
    q, k, v = inputs[:3]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % DESCRIPTOR_ALIGNMENT:
        return None
    out = empty_as(q, problem.Dv)
    tensors = (q, k, v, out)
    key = (problem, tile, build, target_of(problem.device), q.stride(), k.stride(), v.stride())
    if key not in FIXED:
        if len(FIXED) >= MAX_FIXED:
            FIXED.clear()
        FIXED[key] = fix(problem, tile, build or build_of(problem, tile), tensors)
    fixed = FIXED[key]
    if fixed is None:
        return None
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    counts = (fixed.blocks, fixed.entries, fixed.section)
    args = (*map(describe, fixed.descriptors, tensors), lse, *counts, inputs.scale * LOG2E.value, fixed.build)
    return Results(out, lse), Launch(forward_kernel, (fixed.programs,), args, tile)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Results:
    """Tensors that the bulk copy engine cannot read (addresses or strides that are no multiples of 16 bytes, strides of
    zero), which a problem does not tell, go to the plain Triton loop: slower, but with the same results and no copy."""
    if inputs.q.numel() == 0 or problem.N == 0:
        out = empty_as(inputs.q, problem.Dv).zero_()
        return Results(out, out.new_full(out.shape[:3], -torch.inf, dtype=torch.float32))
    made = forward_launch(inputs, problem, tile)
    if made is None:
        return plain.forward(inputs, problem, plain_tiles(problem)[0])
    results, launch = made
    run([launch], problem)
    return results


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Results | Gradients, Replay | None]:
    """Like the pass that the problem names, and what does it again for tensors of the same form, of which none is
    empty."""
    if problem.direction == "backward":
        return hopper_backward.record(tensors, problem, tile)
    (inputs,) = tensors
    made = forward_launch(inputs, problem, tile)
    if made is None:
        return plain.record(tensors, problem, plain_tiles(problem)[0])
    results, launch = made
    return results, run_recording([launch], problem, inputs[:3], results, Results._make)


backward = hopper_backward.backward
