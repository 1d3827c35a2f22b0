"""The backward of `triton_hopper`: tiles, descriptors and the launches of its kernel.

Which configuration is best for a head size was measured on an H200, with bfloat16 and 16384 rows of 2048 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from sdpa.kernels.triton import backward as plain
from sdpa.kernels.triton.arguments import DESCRIPTOR_ALIGNMENT, L2_SHARE, fits_tma
from sdpa.kernels.triton.hopper_backward_kernel import BackwardConfig, backward_kernel
from sdpa.kernels.triton.hopper_descriptors import describe, numbers_descriptor, rows_descriptor
from sdpa.kernels.triton.hopper_primitives import LOG2E, WG_ROWS
from sdpa.kernels.triton.launch import GRADIENTS, Launch, Pass, with_memory
from sdpa.kernels.triton.order import ALONE, in_order
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.kernels.triton.recorded import RecordedCall, record_pass, run_pass
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.tiles import tiles as plain_tiles
from sdpa.layout import empty_as
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Gradients, Results, Tile, read_of

SMALL_D, MEDIUM_D = 64, 128
# As everywhere in a backward, BLOCK_M rows stream and BLOCK_N stay. These are tiles of launches over blocks of keys. At
# D = 64 two consumers and blocks of 128 are best where nothing is masked, else smaller scores, whose masks leave
# registers free. At 256 it is the tile of dV's launch; dK's, which keeps values as well, streams half as many rows.
SMALL_TILES = (Tile(128, 128, 4, 3), Tile(64, 192, 4, 4), Tile(64, 128, 4, 4))
MEDIUM_TILE, LARGE_TILE = Tile(64, 128, 4, 3), Tile(64, 128, 4, 2)
TILES: tuple[Tile, ...] = (*SMALL_TILES, MEDIUM_TILE, LARGE_TILE)
LARGE_STREAMING_TILE = Tile(32, 128, 4, 3)
# Of the launch over blocks of queries, by head size: a third consumer where its sum leaves registers for one.
QUERIES_TILES = {SMALL_D: Tile(64, 192, 4, 4), MEDIUM_D: Tile(64, 192, 4, 3), 256: LARGE_STREAMING_TILE}
# Registers per thread of (a consumer, the producer).
TWO_CONSUMERS, THREE_CONSUMERS = (240, 24), (160, 32)
ROW_ALIGNMENT = 128  # rows of lse and delta are padded to blocks of the largest size that streams


def tiles(problem: AttentionProblem) -> tuple[Tile, ...]:
    """Best guess first."""
    if problem.D > SMALL_D:
        return (MEDIUM_TILE,) if problem.D <= MEDIUM_D else (LARGE_TILE,)
    unmasked, three, two = SMALL_TILES
    return (unmasked, three, two) if "band" not in problem.features else (three, two)


class KernelPass(NamedTuple):
    """One launch: whether keys stay, which sums it makes, and its tile."""

    keys: bool
    grad_a: bool
    grad_b: bool
    tile: Tile


def passes(problem: AttentionProblem, tile: Tile) -> tuple[KernelPass, ...]:
    queries = KernelPass(False, True, False, QUERIES_TILES[width_of(problem)])
    if problem.D <= MEDIUM_D:
        return KernelPass(True, True, True, tile), queries
    return KernelPass(True, False, True, tile), KernelPass(True, True, False, LARGE_STREAMING_TILE), queries


def width_of(problem: AttentionProblem) -> int:
    """The head size that rows are padded to: a row of the 128-byte swizzle has 64 numbers."""
    return max(SMALL_D, triton.next_power_of_2(problem.D))


def config_of(problem: AttentionProblem, work: KernelPass, near: int | None, far: int | None) -> BackwardConfig:
    three = work.tile.BLOCK_N > 2 * WG_ROWS.value
    return BackwardConfig(
        work.keys,
        work.grad_a,
        work.grad_b,
        work.tile.BLOCK_N,
        work.tile.BLOCK_M,
        width_of(problem),
        work.tile.num_stages,
        CUT_FRONT=near is not None,
        CUT_BACK=far is not None,
        REVERSED=far is not None and near is None,
        CONSUMER_REGISTERS=(THREE_CONSUMERS if three else TWO_CONSUMERS)[0],
        PRODUCER_REGISTERS=(THREE_CONSUMERS if three else TWO_CONSUMERS)[1],
    )


class PreparedPass(NamedTuple):
    """What calls of the same problem, strides and tile share of one launch. It is made once (prepared.py)."""

    programs: int
    counts: tuple[int, ...]  # blocks, entries, section, near, far
    descriptors: tuple[dict | None, ...]  # of a, b, x, y, grad_a, grad_b, lse and delta: all but the address
    config: BackwardConfig
    tile: Tile


def reaches(problem: AttentionProblem, keys: bool) -> tuple[int | None, int | None]:
    """(near, far): how far a row that stays sees to the front and to the back. None where it sees everything."""
    shift = problem.N - problem.M if problem.bottom_right else 0
    left = None if problem.left == UNLIMITED else problem.left - shift
    right = None if problem.right == UNLIMITED else problem.right + shift
    return (right, left) if keys else (left, right)


def prepare_pass(problem: AttentionProblem, work: KernelPass, operands: tuple[Tensor, ...]) -> PreparedPass:
    near, far = reaches(problem, work.keys)
    config = config_of(problem, work, near, far)
    a, _, x = operands[:3]
    own = WG_ROWS.value
    heights = (own, own, config.BLOCK_INNER, config.BLOCK_INNER, own, own)
    rows = operands[:6]
    descriptors = [rows_descriptor(t, n, config.D) for t, n in zip(rows, heights, strict=True)]
    descriptors += [numbers_descriptor(t, config.BLOCK_INNER) for t in operands[6:]]
    blocks, entries = -(-a.shape[2] // config.BLOCK_OUTER), a.shape[0] * a.shape[1]
    section = l2_section_of(problem, x, entries)
    return PreparedPass(
        blocks * entries, (blocks, entries, section, near or 0, far or 0), tuple(descriptors), config, work.tile
    )


def prepare_passes(
    problem: AttentionProblem, tile: Tile, by_keys: tuple[Tensor, ...], by_queries: tuple[Tensor, ...]
) -> tuple[PreparedPass, ...]:
    return tuple(prepare_pass(problem, work, by_keys if work.keys else by_queries) for work in passes(problem, tile))


def l2_section_of(problem: AttentionProblem, x: Tensor, entries: int) -> int:
    """How many heads lie side by side in the grid: those for which what streams fits the L2 cache together."""
    streaming = x.shape[2] * (problem.D + problem.Dv) * problem.dtype.itemsize
    fitting = int(L2_SHARE * target_of(problem.device).l2) // max(1, streaming)  # heads of what streams
    own = max(1, fitting) * entries // (x.shape[0] * x.shape[1])
    return min(entries, max(1, own))


def backward_launches(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> tuple[Gradients, list[Launch]] | None:
    """Gradients to be filled, and the launches that fill them; None where TMA cannot read a tensor.

    `results` and `upstream` are readable (see `plain.readable_rows`).
    """
    q, k, v = inputs[:3]
    out, grad_out = results.out, upstream.out
    read = (q, k, v, grad_out)
    if any(t.data_ptr() % DESCRIPTOR_ALIGNMENT or not fits_tma(t) for t in read):
        return None
    grads = [empty_as(t, t.shape[3]) for t in (q, k, v)]
    lse, delta, first = plain.row_launch(out, grad_out, results.lse, upstream.lse, ROW_ALIGNMENT)
    by_keys = (k, v, q, grad_out, grads[1], grads[2], lse, delta)
    by_queries = (q, grad_out, k, v, grads[0], grads[0], lse, delta)
    key = ("hopper backward", problem, tile, target_of(problem.device), *(t.stride() for t in (*read, *grads)))
    prepared = PREPARED.get(key, prepare_passes, problem, tile, by_keys, by_queries)
    scale = inputs.scale
    launches = []
    for one in prepared:
        operands = by_keys if one.config.OVER_KEYS else by_queries
        described = map(describe, one.descriptors, operands)
        args = (*described, lse, delta, *one.counts, scale, scale * LOG2E.value, one.config, ALONE.value)
        launches.append(Launch(backward_kernel, (one.programs,), args, one.tile))
    return Gradients(*grads), in_order(target_of(problem.device), [first], launches)


def backward_pass(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Pass:
    """The pass of a backward. Tensors that TMA cannot read go to the plain Triton loops: slower, but with no copy."""
    given = with_memory(read_of(inputs, results, upstream))
    row, upstream_row = plain.readable_rows(results), plain.readable_rows(upstream)
    made = backward_launches(inputs, row, upstream_row, problem, tile)
    if made is None:
        return plain.backward_pass(inputs, results, upstream, problem, plain_tiles(problem)[0])
    grads, launches = made
    scratch = (launches[0].args[plain.BASE2], launches[0].args[plain.DELTA])
    read = read_of(inputs, row, upstream_row)
    return Pass(launches, given, read, (*grads[:3], *scratch), GRADIENTS)


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile
) -> Gradients:
    return run_pass(backward_pass(inputs, results, upstream, problem, tile), problem)


def record(tensors: tuple, problem: AttentionProblem, tile: Tile) -> tuple[Gradients, RecordedCall | None]:
    """Like `backward`, and what does it again for tensors of the same form."""
    return record_pass(backward_pass(*tensors, problem, tile), problem)
