"""Compiled sources, and passes: lists of dispatches that can be run again with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.kernels.metal.arguments import config_of, floats_of, integers_of, view_of
from sdpa.kernels.metal.source import FRAGMENT, ROWS_OF_COMBINE, SIMDGROUP, Config, Tiles, shared_buffers, source_of
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem

MAX_LIBRARIES = 512
# Operations of one dispatch. macOS ends a command buffer that keeps the GPU for some seconds, and the slowest GPU with
# simdgroup matrices computes about 2e12 operations in one.
MOST_FLOPS = 1e12

# The buffers of each kernel beside the shared ones, in their order.
OWN = {
    "forward": ("out", "lse"),
    "combine": ("out", "lse", "parts", "part_state"),
    "row_delta": ("out", "grad_lse", "grad_out", "delta"),
    "row_base": ("lse", "base", "inverse"),
    "backward_q": ("base", "delta", "grad_out", "dq", "inverse"),
    "backward_kv": ("base", "delta", "grad_out", "dk", "dv", "inverse"),
    "bias_grad": ("base", "delta", "grad_out", "dbias", "inverse"),
    "weights": ("base", "out", "inverse"),
}
BY_ROW = ("combine", "row_delta")  # a simdgroup has a row

Grid = tuple[int, int, int]
Tensors = Mapping[str, Tensor | None]


class ShaderError(RuntimeError):
    """A source that Apple's compiler refused: its log, and what the source was specialised for."""


@lru_cache(maxsize=MAX_LIBRARIES)
def library_of(config: Config) -> Any:
    """The compiled source, whose attributes are its kernels."""
    try:
        return torch.mps.compile_shader(source_of(config))
    except Exception as error:
        raise ShaderError(f"metal_flash: {config.kernel}.metal did not compile for {config}:\n{error}") from error


class Dispatch(NamedTuple):
    """One kernel over one grid of threadgroups."""

    function: Callable[..., None]
    names: tuple[str, ...]  # of its tensors: the shared buffers, then `own` of its own
    own: int
    numbers: tuple[list[int], list[float]]
    grid: Grid  # threadgroups
    threads: int  # of a threadgroup
    vector: int  # elements that are loaded together
    long: bool  # a part of a long call, before which the GPU is waited for

    def run(self, tensors: Tensors) -> None:
        given = [view_of(tensors[name]) for name in self.names]
        shared = len(given) - self.own
        x, y, z = self.grid
        if self.long:
            torch.mps.synchronize()
        self.function(
            *given[:shared],
            *self.numbers,
            *given[shared:],
            threads=(x * self.threads, y, z),
            group_size=(self.threads, 1, 1),
        )


class Work(NamedTuple):
    """What all dispatches of a pass are made for."""

    inputs: AttentionInputs
    problem: AttentionProblem
    beside: Tensors  # tensors beside the inputs that are loaded by rows
    strides: Mapping[str, int | tuple[int, ...]]  # by names in source.INTEGERS


def dispatches_of(
    work: Work, name: str, tiles: Tiles, grid: Grid, flags: frozenset[str] = frozenset(), **integers: int
) -> list[Dispatch]:
    """The dispatches of one kernel: several where it computes for long, of some entries, else heads, else blocks."""
    p = work.problem
    file = {"combine": "forward", "row_delta": "backward_q"}.get(name, name)
    config = config_of(file, work.inputs, tiles, flags, work.beside)
    function = getattr(library_of(config), name)
    names = (*shared_buffers(config.flags), *OWN[name])
    threads = ROWS_OF_COMBINE * SIMDGROUP if name in BY_ROW else threads_of(config)
    splits = integers.get("SPLITS", 1) if name == "forward" else 1  # of a block, which stay together
    most = most_flops_of_one(name, p, tiles, grid, "GROUPED" in flags)
    parts = [((0, 0, 0), grid)] if name in BY_ROW else parts_of(grid, splits, most)
    found = []
    for first, part in parts:
        numbers = integers_of(work.inputs, p, **work.strides, **integers, FIRST=first)
        given = (numbers, floats_of(work.inputs))
        found.append(Dispatch(function, names, len(OWN[name]), given, part, threads, config.vector, len(parts) > 1))
    return found


def threads_of(config: Config) -> int:
    return config.rows // FRAGMENT * SIMDGROUP


def most_flops_of_one(name: str, problem: AttentionProblem, tiles: Tiles, grid: Grid, grouped: bool = False) -> float:
    """Operations of the threadgroup of a kernel that has the most. One of `weights` or `bias_grad` may lie whole inside
    of the band; one of the others visits what its rows, or keys in `backward_kv`, see, whatever the lengths are."""
    p = problem._replace(D=-(-problem.D // FRAGMENT) * FRAGMENT, Dv=-(-problem.Dv // FRAGMENT) * FRAGMENT)
    x, y, z = grid
    average, rows = p.dense_flops() / max(1, x * y * z), p.G * p.M if grouped else p.M
    of_rows, of_keys = average * fullest(rows, tiles.BLOCK_M), average * fullest(p.N, tiles.BLOCK_N)
    if name in ("weights", "bias_grad"):
        return of_rows * fullest(p.N, tiles.BLOCK_N)
    by_keys = name == "backward_kv"
    whole, block, visited, others = (
        (of_keys, tiles.BLOCK_N, p.M, p.N) if by_keys else (of_rows, p.M if grouped else tiles.BLOCK_M, p.N, p.M)
    )
    if "prefix" in p.features:
        return whole
    seen = visited
    if UNLIMITED not in (p.left, p.right):
        seen = min(seen, p.left + p.right + block)
    corner = p.left if p.bottom_right != by_keys else p.right
    if corner != UNLIMITED:
        seen = min(seen, others + corner)  # all of them lie so near to the corner that the band starts from
    return whole * seen / max(1, visited)


def fullest(count: int, block: int) -> float:
    """The elements of a full block beside the average of all blocks, of which the last may be part of one."""
    return -(-count // block) * min(block, count) / max(1, count)


def parts_of(grid: Grid, unit: int, flops: float) -> list[tuple[Grid, Grid]]:
    """(first, size) of parts of a grid whose threadgroups have `flops` operations at most, none with more than
    MOST_FLOPS: whole planes of x and y, else whole lines of x, else multiples of `unit` threadgroups, one at least."""
    x, y, z = grid
    most = int(MOST_FLOPS / max(1.0, flops))  # threadgroups
    step_x = max(unit, min(x, most // unit * unit))
    step_y = max(1, min(y, most // max(1, x)))
    step_z = max(1, min(z, most // max(1, x * y)))
    return [
        ((i, j, k), (min(step_x, x - i), min(step_y, y - j), min(step_z, z - k)))
        for k in range(0, z, step_z)
        for j in range(0, y, step_y)
        for i in range(0, x, step_x)
    ]


def run(dispatches: Sequence[Dispatch], tensors: Tensors) -> None:
    for dispatch in dispatches:
        dispatch.run(tensors)
