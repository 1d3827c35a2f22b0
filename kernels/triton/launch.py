"""A kernel launch as data, so that it can be run here, or compiled ahead for a device that is not here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

from sdpa.problem import AttentionProblem, Tile

POINTER_ALIGNMENT = 16  # bytes; Triton compiles for pointers that are multiples of it, and for others


class Launch(NamedTuple):
    """One kernel, its grid and arguments, the tile whose warps and stages it is built with, and what it is known by."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    tile: Tile
    compiled: dict | None = (
        None  # kernels that ran with arguments like these: Triton's look-up takes longer than they do
    )
    chained: bool = False  # may begin before the launch before it has ended, and waits inside

    @property
    def options(self) -> dict:
        sizes = {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages}
        return sizes | {"launch_pdl": True} if self.chained else sizes

    def __call__(self, stream: int | None = None) -> None:
        """Run on `stream`; without one Triton's own way, as in its interpreter."""
        if not self.grid[0]:
            return
        key = (self.kernel, all_aligned(self.args))
        known = None if self.compiled is None or stream is None else self.compiled.get(key)
        if known is not None and knobs.runtime.launch_enter_hook is None and knobs.runtime.launch_exit_hook is None:
            known.run(self.grid[0], 1, 1, stream, known.function, known.packed_metadata, None, None, None, *self.args)
            return
        known = self.kernel[self.grid](*self.args, **self.options)
        if self.compiled is not None and known is not None:
            self.compiled[key] = known

    def compile(self):
        """The compiled kernel for Triton's active target, without running it."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def all_aligned(args: tuple) -> bool:
    """Whether the tensors among `args` lie where kernels that ran before found theirs."""
    return all(not isinstance(arg, torch.Tensor) or arg.data_ptr() % POINTER_ALIGNMENT == 0 for arg in args)


def run(launches: list[Launch], problem: AttentionProblem) -> None:
    """Run `launches` in order on the problem's device."""
    index = device_index(problem.device)
    if index is None:
        for launch in launches:
            launch()
    elif index == torch.cuda.current_device():
        stream = driver.active.get_current_stream(index)
        for launch in launches:
            launch(stream)
    else:
        with torch.cuda.device(index):
            stream = driver.active.get_current_stream(index)
            for launch in launches:
                launch(stream)


@lru_cache(maxsize=64)
def device_index(device: str) -> int | None:
    """The number of a CUDA device; None for the CPU, where Triton's interpreter runs."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" else None
