"""The kernel `triton_hopper`: tiles, descriptors and the launch of the forward; its backward is in hopper_backward.py.

Which configuration is best for which problem was measured on an H200, with bfloat16 and 16384 rows of 2048 columns.
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
from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT, fits_tma, forward_pass_of, section_of
from sdpa.kernels.triton.hopper_descriptors import describe, rows_descriptor
from sdpa.kernels.triton.hopper_forward_kernel import ForwardConfig, forward_kernel
from sdpa.kernels.triton.hopper_primitives import LOG2E, WG_ROWS
from sdpa.kernels.triton.launch import Launch, Pass, with_memory
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import tiles as plain_tiles
from sdpa.layout import empty_as, unexpanded
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of

HOPPER = (9, 0)
UNSEEN = (3, 9)  # the first release of Triton whose code for this kernel compiles, but has not run on a GPU
MIN_POWER = 2.0**-6  # float16 has no digits to lose far below 1
SMALL_D, MEDIUM_D = 64, 128  # head sizes; 64 numbers fill a row of the 128-byte swizzle, so none is smaller
# Warps are those of one consumer warpgroup. Stages of keys and values fill the shared memory: 160 KB at D = 128, 192 KB
# at D = 256. Scores of 64 x 128 fill the registers beside an accumulator of D = 128. At D = 64 there is room for a
# third consumer, so that the products of two hide the softmax of one.
TWO_WARPGROUP_TILE, THREE_WARPGROUP_TILE, LARGE_TILE = Tile(128, 128, 4, 2), Tile(192, 128, 4, 2), Tile(128, 64, 4, 2)
TILES: tuple[Tile, ...] = (TWO_WARPGROUP_TILE, THREE_WARPGROUP_TILE, LARGE_TILE, *hopper_backward.TILES)
# A bias takes as many stages: 16 KB per consumer and stage, 8 KB at D = 256, which fills the rest.
# Registers per thread of (a consumer, a producer), which setmaxnreg moves between them. 65536 are there for all.
TWO_CONSUMERS, THREE_CONSUMERS = (240, 24), (160, 32)
SHORT = 1024  # up to so many queries, blocks of 192 leave too many rows empty
# Up to so many keys a persistent program wins by loading during the epilogue before (13 % at 1024 keys, 3 % at
# 4096); at 16384 there is nothing left to win, and it loses 1 %.
PERSISTENT_KEYS = 8192
# Shares are assigned beforehand, so the last wave may be short. The hardware's own order has nearly full waves.
MIN_FILLED = 0.9


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    found = torch.cuda.get_device_capability()
    if found != HOPPER:
        return f"needs a device of compute capability 9.0; got {found[0]}.{found[1]}"
    return unseen_release(triton.__version__)


def unseen_release(version: str) -> str | None:
    """Gluon is experimental, and the kernel's named barriers and registers were counted in what Triton made of it."""
    release = tuple(int(part) for part in version.split(".")[:2])
    return None if release < UNSEEN else f"needs Triton older than {UNSEEN[0]}.{UNSEEN[1]}, got {version}"


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """Best guess first."""
    if problem.direction == "backward":
        return hopper_backward.tiles(problem)
    if problem.D > SMALL_D:
        return (TWO_WARPGROUP_TILE,) if problem.D <= MEDIUM_D else (LARGE_TILE,)
    two_first = problem.M <= SHORT or (problem.causal and is_biased(problem))
    return (TWO_WARPGROUP_TILE, THREE_WARPGROUP_TILE) if two_first else (THREE_WARPGROUP_TILE, TWO_WARPGROUP_TILE)


def is_biased(problem: AttentionProblem) -> bool:
    return "bias" in problem.features


def config_of(problem: AttentionProblem, tile: Tile) -> ForwardConfig:
    consumer, producer = TWO_CONSUMERS if tile.BLOCK_M == 2 * WG_ROWS.value else THREE_CONSUMERS
    persistent, biased = is_persistent(problem, tile), is_biased(problem)
    return ForwardConfig(
        tile.BLOCK_M,
        tile.BLOCK_N,
        max(SMALL_D, triton.next_power_of_2(problem.D)),
        tile.num_stages,
        CAUSAL=problem.causal,
        BOTTOM_RIGHT=problem.bottom_right,
        BIAS=biased,
        POWER_OF_TWO_SCALE=False,  # a problem does not tell; see `prepare_forward`
        PERSISTENT=persistent,
        EPILOGUE_SMEM=persistent and problem.D <= (SMALL_D if biased else MEDIUM_D),  # beyond it shared memory is full
        PINGPONG=persistent and uses_ping_pong(problem, tile),
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
    )


def uses_ping_pong(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether ping-pong pays: where the softmax takes longer than the products."""
    if is_biased(problem):
        return problem.D <= MEDIUM_D
    return tile == TWO_WARPGROUP_TILE and problem.D <= SMALL_D and problem.N <= SHORT


def is_persistent(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether persistent programs, one per core, should go through shares of the blocks.

    Where causal, only if the shares are equal, which takes at least as many keys as queries, and fill the device.
    """
    if problem.N > PERSISTENT_KEYS:
        return False
    if not problem.causal:
        return True
    count, cores = problem.B * problem.H * shares_of_head(problem, tile, True), target_of(problem.device).cores
    return problem.M <= problem.N and count >= MIN_FILLED * cores * -(-count // cores)


def shares_of_head(problem: AttentionProblem, tile: Tile, persistent: bool) -> int:
    """How many shares a head has: blocks of queries, or pairs of them (see TileSchedule)."""
    blocks = -(-problem.M // tile.BLOCK_M)
    return -(-blocks // 2) if persistent and problem.causal else blocks


class Order(NamedTuple):
    """The order in which programs take the entries (see TileSchedule)."""

    blocks: int
    shares: int
    all_shares: int
    entries: int
    section: int
    inner: int
    by_head: int


def order_of(problem: AttentionProblem, tile: Tile, persistent: bool, bias: Tensor | None) -> Order:
    """The Order of a problem. Entries that share a bias lie side by side, so that it is read from memory once."""
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


class PreparedForward(NamedTuple):
    """What calls of the same problem, strides and tile share. It is made once (prepared.py)."""

    config: ForwardConfig
    programs: int
    order: Order
    power: float  # of two, by which the kernel multiplies queries
    descriptors: tuple[dict | None, ...]  # of q, k, v, out and the bias: all but the address


def power_of(problem: AttentionProblem, scale: float) -> float:
    """The power of two next below the scale, but none that costs float16 queries digits."""
    power = 2.0 ** math.floor(math.log2(scale))
    return min(1.0, max(MIN_POWER, power)) if problem.dtype == torch.float16 else power


def prepare_forward(
    problem: AttentionProblem,
    tile: Tile,
    config: ForwardConfig | None,
    tensors: tuple[Tensor | None, ...],
    scale: float,
) -> PreparedForward | None:
    """`tensors` are q, k, v, out and the bias; None where TMA cannot follow their strides."""
    config = config or config_of(problem, tile)
    if not all(t is None or (t.stride(3) == 1 and fits_tma(t)) for t in tensors):
        return None
    order = order_of(problem, tile, config.PERSISTENT, tensors[-1])
    programs = min(order.all_shares, target_of(problem.device).cores) if config.PERSISTENT else order.all_shares
    own, keys, size = WG_ROWS.value, tile.BLOCK_N, config.D
    boxes = ((own, size), (keys, size), (keys, size), (own, size), (own, keys))
    descriptors = (None if t is None else rows_descriptor(t, *box) for t, box in zip(tensors, boxes, strict=True))
    power = power_of(problem, scale) if config.BIAS else 1.0
    config = replace(config, POWER_OF_TWO_SCALE=config.BIAS and power == scale)
    return PreparedForward(config, programs, order, power, tuple(descriptors))


def forward_launch(
    inputs: AttentionInputs, problem: AttentionProblem, tile: Tile, config: ForwardConfig | None = None
) -> tuple[Results, Launch] | None:
    """Results to be filled, and the launch that fills them: of the kernel that `config` tells, else of the best one.

    None where TMA cannot read the tensors.
    """
    q, k, v = inputs[:3]
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    key = ("hopper forward", problem, tile, config, target_of(problem.device), q.stride(), k.stride(), v.stride())
    bias = inputs.bias
    if bias is not None:
        bias = unexpanded(bias)
        addresses |= bias.data_ptr()
        key = (*key, bias.shape, bias.stride(), inputs.scale)
    if addresses % DESCRIPTOR_ALIGNMENT:
        return None
    out = empty_as(q, problem.Dv)
    tensors = (q, k, v, out, bias)
    prepared = PREPARED.get(key, prepare_forward, problem, tile, config, tensors, inputs.scale)
    if prepared is None:
        return None
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    numbers = (*prepared.order, inputs.scale / prepared.power * LOG2E.value, prepared.power)
    args = (*map(describe, prepared.descriptors, tensors), lse, *numbers, prepared.config)
    return Results(out, lse), Launch(forward_kernel, (prepared.programs,), args, tile)


def forward_pass(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile) -> Pass:
    """The pass of a forward.

    TMA cannot read addresses or strides that are no multiples of 16 bytes, nor strides of zero; a problem does not tell
    them. Such tensors go to the plain Triton loop: slower, but with the same results and no copy.
    """
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
