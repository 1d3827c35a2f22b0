"""Launches run again: all but the addresses remembered, past Triton's look-up of what it has compiled.

Triton finds a compiled kernel by the type, the alignment and often the value of each argument, at every call: 30 to
80 us for nested tuples and descriptors. Where tensors have the sizes, strides and dtypes of a call before, only the
alignment of their addresses can differ, so that alone is asked here; what is not aligned takes the ordinary launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from sdpa.kernels.triton.launch import Launch, device_index, run
from sdpa.kernels.triton.target import target_of
from sdpa.problem import AttentionProblem

# Releases whose JITFunction.run ends in `compiled.run` with these arguments.
KNOWN = ((3, 4), (3, 5), (3, 6))
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
ALIGNMENT = 16  # bytes by which Triton tells addresses apart

current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
try:  # (size, stride, dtype) on the current device, as torch.compile's own code has it: a third of the time
    from torch._C._dynamo.guards import _empty_strided_cuda as empty
except ImportError:

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


class Slot(NamedTuple):
    """An argument that is another at each call, or a place for one inside of nested tuples."""

    tensor: int  # of those given, followed by those made
    rest: tuple | None  # of a descriptor: all but the tensor; None for a pointer


class Described(NamedTuple):
    """What a launcher reads of a tensor descriptor."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


class Step(NamedTuple):
    """A compiled kernel and its arguments."""

    run: Callable[..., None]
    head: tuple  # what the launcher wants to know before the arguments: the grid, then after the stream the kernel
    tail: tuple
    args: list  # with Slots
    changing: tuple[int, ...]  # positions of arguments that are or hold Slots


class Form(NamedTuple):
    """A tensor to be made: an uninitialised one like that of the call before."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Replay:
    """The launches of one call, for tensors of the same sizes, strides, dtypes and device."""

    def __init__(
        self,
        launches: Sequence[Launch],
        steps: Sequence[Step],
        index: int,
        strides: Sequence[tuple],
        made: Sequence[Form],
        pack: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        self.steps, self.index, self.strides, self.made, self.pack = steps, index, strides, made, pack
        self.hooks = [launch.kernel.pre_run_hooks for launch in launches]

    def __call__(self, *given: Tensor) -> Any:
        """What the launches fill, by `pack`; None where the ordinary way must be taken."""
        if hooked() or any(self.hooks) or current_device() != self.index:
            return None
        for tensor, stride in zip(given, self.strides, strict=False):
            if tensor.stride() != stride:
                return None
        made = [empty(size, stride, dtype) for size, stride, dtype in self.made]
        tensors = (*given, *made)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not aligned(addresses):
            return None
        stream = current_stream(self.index)
        for step in self.steps:
            args = step.args.copy()
            for position in step.changing:
                args[position] = filled(args[position], tensors, addresses)
            step.run(*step.head, stream, *step.tail, *args)
        return self.pack(made)


def run_recording(
    launches: list[Launch],
    problem: AttentionProblem,
    given: Sequence[Tensor],
    made: Sequence[Tensor],
    pack: Callable[[Sequence[Tensor]], Any],
) -> Replay | None:
    """Run `launches`, which read `given` (q, k, v, ...) and fill `made`, and remember them; None where that would not
    do: no CUDA device at hand, a release of Triton that is not known, tensors that are not aligned or that are one."""
    compiled = run(launches, problem)
    tensors = (*given, *made)
    index = device_index(problem.device)
    if index is None or target_of(problem.device).backend != "cuda" or VERSION not in KNOWN:
        return None
    if not all(isinstance(kernel, CompiledKernel) for kernel in compiled) or current_device() != index:
        return None
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not aligned(addresses) or len(set(addresses)) < len(tensors):
        return None  # one tensor twice: which of the two an argument is, cannot be told
    steps = [step_of(launch, kernel, tensors) for launch, kernel in zip(launches, compiled, strict=True)]
    if None in steps:
        return None
    forms = [Form(tuple(t.shape), t.stride(), t.dtype) for t in made]
    # A forward is asked for by strides; a backward comes with what its forward, others and saving made of them.
    strides = [] if problem.direction == "forward" else [t.stride() for t in given]
    return Replay(launches, steps, index, strides, forms, pack)


def step_of(launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor]) -> Step | None:
    """The launch with places for `tensors`; None where it knows another tensor."""
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
    try:
        slotted = [with_slots(arg, numbers) for arg in launch.args]
    except KeyError:
        return None
    args = [own if holds_slot(own) else arg for own, arg in zip(slotted, launch.args, strict=True)]
    changing = tuple(position for position, arg in enumerate(args) if holds_slot(arg))
    grid = (*launch.grid, 1, 1)[:3]
    no_metadata, no_hooks = None, (None, None)
    tail = (compiled.function, compiled.packed_metadata, no_metadata, *no_hooks)
    return Step(compiled.run, grid, tail, args, changing)


def with_slots(arg: Any, numbers: dict[int, int]) -> Any:
    """An argument with Slots for its tensors, which are known by their addresses. Raises KeyError for another one."""
    if isinstance(arg, Tensor):
        return Slot(numbers[arg.data_ptr()], None)
    if is_descriptor(arg):
        return Slot(numbers[arg.base.data_ptr()], (arg.shape, arg.strides, getattr(arg, "padding", "zero")))
    if isinstance(arg, tuple):
        return remade(arg, [with_slots(part, numbers) for part in arg])
    return arg


def filled(arg: Any, tensors: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    """An argument with what stands in its Slots this time."""
    if isinstance(arg, Slot):
        number, rest = arg
        return addresses[number] if rest is None else Described(tensors[number], *rest)
    if isinstance(arg, tuple):
        return remade(arg, [filled(part, tensors, addresses) for part in arg])
    return arg


def remade(like: tuple, parts: list) -> tuple:
    """A tuple of other parts, named where `like` is."""
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def holds_slot(arg: Any) -> bool:
    return isinstance(arg, Slot) or (isinstance(arg, tuple) and any(map(holds_slot, arg)))


def is_descriptor(arg: object) -> bool:
    return type(arg).__name__ == "TensorDescriptor"  # Triton has one and Gluon another


def aligned(addresses: Sequence[int]) -> bool:
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


def hooked() -> bool:
    """Whether a profiler wants to see launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
