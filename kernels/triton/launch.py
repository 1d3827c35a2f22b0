"""A kernel launch as data, so that it can be run here, compiled ahead for a device that is not here, or recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

from sdpa.alignment import has_memory
from sdpa.kernels.triton.assembler import MARK, assembler_for, assembling
from sdpa.kernels.triton.target import Target, target_of
from sdpa.kernels.triton.triton_private import compiling_together
from sdpa.problem import Gradients, Results, Tile

# What a pass returns, by the numbers of the tensors that it made.
OUTPUT_ALONE, WITH_LSE = (0, -1), (0, 1)
GRADIENTS = (0, 1, 2, -1, -1)  # of q, k and v

SEEN: set[Hashable] = set()  # kinds of launches that were tried to compile together
LOCK = threading.Lock()

Tensors = TypeVar("Tensors", bound=Sequence[Tensor])


class Launch(NamedTuple):
    """One kernel, its grid and arguments, and the options it is compiled with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    tile: Tile
    pdl: bool = False  # programmatic dependent launch: it may begin before the one before has ended, and waits inside
    registers: int | None = None  # per thread at most

    @property
    def options(self) -> dict:
        sizes = {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages}
        sizes["enable_fp_fusion"] = True  # Triton 3.9 warns where nothing is said, and 3.10 will not fuse
        if self.pdl:
            sizes["launch_pdl"] = True
        if self.registers:
            sizes["maxnreg"] = self.registers
        return sizes

    @property
    def kind(self) -> Hashable:
        """Equal for most launches that are compiled alike, and for some that are not: sizes do not count, of which some
        are constants. These are compiled one by one."""
        return (self.kernel, self.tile, self.pdl, self.registers, *map(kind_of, self.args))

    def __call__(self, backend: str, arch: int | str) -> Any:
        """Run on the current device, which is what `backend` and `arch` say; the compiled kernel, where there was
        something to do and Triton compiles."""
        if not self.grid[0]:
            return None
        path = assembler_for(self.kernel, backend, arch)
        with assembling(path):
            return self.kernel[self.grid](*self.args, **self.options, **(MARK if path else {}))

    def compile(self):
        """The compiled kernel for Triton's active target, without running it."""
        target = driver.active.get_current_target()
        path = assembler_for(self.kernel, target.backend, target.arch)
        with assembling(path):
            return self.compile_with(path)

    def compile_with(self, path: str | None) -> Any:
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options, **(MARK if path else {}))


class Pass(NamedTuple):
    """The launches of a forward, a backward or weights, the tensors they read and make, and what becomes of these."""

    launches: list[Launch]
    given: tuple[Tensor, ...]  # as a call has them: `read_of` its inputs, and what follows them
    read: tuple[Tensor, ...]  # the same as kernels read them: some are contiguous copies
    made: tuple[Tensor, ...]
    # (read, made) -> what the caller gets. Or, for Results and Gradients, the numbers of tensors made; -1: None.
    finish: tuple[int, ...] | Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
    # Numbers of tensors made, and what they hold before the first launch; None where that takes more than a number.
    fills: tuple[tuple[int, float], ...] | None = ()

    def finished(self) -> Any:
        """What the caller gets, after the launches."""
        if not isinstance(self.finish, tuple):
            return self.finish(self.read, self.made)
        found = [None if number < 0 else self.made[number] for number in self.finish]
        return tuple.__new__(Results if len(found) == len(Results._fields) else Gradients, found)


def with_memory(tensors: Tensors) -> Tensors:
    """The tensors. Raises RuntimeError where the storage of one was freed: a kernel would end the process with it."""
    for tensor in tensors:
        if not has_memory(tensor):
            raise RuntimeError(
                f"expected tensors with memory behind them; got one of shape {tuple(tensor.shape)} whose storage holds "
                "0 bytes: it was freed (untyped_storage().resize_(0)) before attention was called"
            )
    return tensors


class Placed(Protocol):
    """What launches ask of a problem."""

    @property
    def device(self) -> str: ...

    @property
    def direction(self) -> str: ...


class OnDevice(NamedTuple):
    """A device, for launches that compute no problem."""

    device: str
    direction: str = "forward"


def run(launches: list[Launch], problem: Placed) -> list:
    """Run `launches` in order on the problem's device; returns what each was compiled to."""
    target = target_of(problem.device)
    index = device_index(problem.device)
    elsewhere = index is not None and index != torch.cuda.current_device()
    with torch.cuda.device(index) if elsewhere else nullcontext():
        if target.backend != "interpreter":
            compile_together(launches, target)
        return [launch(target.backend, target.arch) for launch in launches]


def compile_together(launches: list[Launch], target: Target) -> None:
    """Compile those launches of a pass side by side, in threads, of whose kind none was tried for such a device. Triton
    compiles one when it is launched, and the next one then. What fails here is told of where it is launched.

    Who launches a kernel for Hopper in another thread meanwhile waits for the assembler, for as long as the longest.
    """
    if len(launches) < 2:
        return
    kinds = {(target.backend, target.arch, launch.kind): launch for launch in launches if launch.grid[0]}
    if SEEN.issuperset(kinds):
        return
    with LOCK:
        new = {kind: launch for kind, launch in kinds.items() if kind not in SEEN}
        SEEN.update(new)
    by_assembler: dict[str | None, list[Launch]] = {}
    for launch in new.values():
        path = assembler_for(launch.kernel, target.backend, target.arch)
        by_assembler.setdefault(path, []).append(launch)
    for path, alike in by_assembler.items():
        if len(alike) > 1:
            kernels = [launch.kernel for launch in alike]
            with suppress(Exception), assembling(path), compiling_together(kernels) as able:
                for launch in alike if able else ():
                    launch.compile_with(path)


def kind_of(arg: Any) -> Hashable:
    """Of an argument: the dtype of a tensor, a configuration as it is, of others whether they are there."""
    tensor = getattr(arg, "base", arg)
    if isinstance(tensor, Tensor):
        return tensor.dtype
    return arg if hasattr(arg, "BLOCK_M") else arg is None


@lru_cache(maxsize=64)
def device_index(device: str) -> int | None:
    """The number of a CUDA device; None for the CPU, where Triton's interpreter runs."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" else None
