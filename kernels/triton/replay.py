"""Launches run again: all but the addresses remembered, past Triton's look-up of what it has compiled.

Triton finds a compiled kernel by the type, the alignment and often the value of each argument, at every call: 30 to
80 us for nested tuples and descriptors. Where tensors have the sizes, strides and dtypes of a call before, only the
alignment of their addresses can differ, so that alone is asked here; what is not aligned takes the ordinary launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import ne, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from sdpa.kernels.triton.direct import Direct, direct
from sdpa.kernels.triton.launch import Launch, device_index, run
from sdpa.kernels.triton.target import target_of
from sdpa.problem import AttentionProblem, Results

# Releases whose JITFunction.run ends in `compiled.run` with these arguments.
KNOWN = ((3, 4), (3, 5), (3, 6))
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
ALIGNMENT = 16  # bytes by which Triton tells addresses apart
# The release whose launchers only put scratch memory, where a kernel wants some, before a function in C.
DIRECT = (3, 6)
STREAM = 3  # the place of the stream among a launcher's arguments, behind the grid

stride_of = Tensor.stride
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
    """A compiled kernel's launcher and its arguments."""

    launch: Callable[..., None]
    call: list  # with Slots, and without the stream
    pointers: tuple[tuple[int, int], ...]  # positions of plain Slots, and their tensors
    nested: tuple[int, ...]  # positions of what else holds Slots
    past_triton: Direct | None  # the same, where it needs nothing of Triton's


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
        if self.strides and any(map(ne, map(stride_of, given), self.strides)):
            return None
        made = [empty(size, stride, dtype) for size, stride, dtype in self.made]
        tensors = (*given, *made)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not aligned(addresses):
            return None
        stream = current_stream(self.index)
        for launch, call, pointers, nested, past_triton in self.steps:
            if past_triton is not None and past_triton(addresses, stream) == 0:
                continue  # else Triton's launcher says what is wrong, or makes the context that this thread lacks
            call = call.copy()
            call[STREAM] = stream
            for position, number in pointers:
                call[position] = addresses[number]
            for position in nested:
                call[position] = filled(call[position], tensors, addresses)
            launch(*call)
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


def tensors_of(results: Results) -> tuple[Tensor, ...]:
    """The tensors of a forward that are made: without the log-sum-exp where nobody asked."""
    return results[:1] if results.lse is None else results


def pack_of(results: Results) -> Callable[[Sequence[Tensor]], Results]:
    """Makes such results of the first tensors made."""
    if results.lse is None:
        return lambda made: Results(made[0], None)
    return lambda made: Results(made[0], made[1])


def step_of(launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor]) -> Step | None:
    """The launch with places for `tensors`; None where it knows another tensor."""
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
    try:
        slotted = [with_slots(arg, numbers) for arg in launch.args]
    except KeyError:
        return None
    launcher, call = entrance(compiled, (*launch.grid, 1, 1)[:3])
    pointers, nested = [], []
    for own, arg in zip(slotted, launch.args, strict=True):
        if isinstance(own, Slot) and own.rest is None:
            pointers.append((len(call), own.tensor))
        elif holds_slot(own):
            nested.append(len(call))
        call.append(own if holds_slot(own) else arg)

    def number_of(arg: Any) -> int | None:
        """Which tensor an argument is or describes; None where it is a number."""
        tensor = getattr(arg, "base", arg)
        return numbers[tensor.data_ptr()] if isinstance(tensor, Tensor) else None

    past_triton = direct(compiled, (*launch.grid, 1, 1)[:3], launch.args, number_of) if VERSION == DIRECT else None
    return Step(launcher, call, tuple(pointers), tuple(nested), past_triton)


def entrance(compiled: CompiledKernel, grid: tuple[int, int, int]) -> tuple[Callable[..., None], list]:
    """What launches a compiled kernel, and its arguments before the kernel's own: the function in C where it can be."""
    launcher, no_stream, no_scratch = compiled.run, None, (None, None)
    told = (compiled.packed_metadata, None, None, None)  # no metadata for hooks, and no hooks
    scratch = [getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    if VERSION != DIRECT or any(scratch):
        return launcher, [*grid, no_stream, compiled.function, *told]
    about = launcher.launch_cooperative_grid, launcher.launch_pdl, *no_scratch
    return launcher.launch, [*grid, no_stream, compiled.function, *about, *told]


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
    return reduce(or_, addresses) % ALIGNMENT == 0


def hooked() -> bool:
    """Whether a profiler wants to see launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
