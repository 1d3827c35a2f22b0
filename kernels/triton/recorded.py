"""Calls recorded as their launches, all but the addresses, and run again past Triton's look-up of what it compiled.

Triton finds a compiled kernel by the type, the alignment and often the value of each argument, at every call: 30 to
80 us for nested tuples and descriptors. Where tensors have the sizes, strides and dtypes of a call before, only the
alignment of their addresses can differ, so that alone is asked here; what differs takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from sdpa.alignment import LOW_ADDRESS
from sdpa.kernels.triton.driver_launch import driver_launch
from sdpa.kernels.triton.launch import Launch, Pass, Placed, device_index, run, with_memory
from sdpa.kernels.triton.target import target_of
from sdpa.kernels.triton.trial import TRIALS
from sdpa.kernels.triton.triton_private import (
    ALIGNMENT,
    STREAM,
    can_record,
    hooked,
    is_untried,
    launcher_of,
    pre_run_hooks,
)
from sdpa.repeated import BUILT, MAX_TENSORS, Launches, Recording
from sdpa.torch_private import empty_strided_cuda

PART_BYTES = 512  # torch's allocator begins tensors at multiples of so many bytes


class Slot(NamedTuple):
    """An argument that is another at each call, or a place for one inside of nested tuples."""

    tensor: int  # its number among those read, followed by those made
    rest: tuple | None  # of a descriptor: all but the tensor; None for a pointer


class Described(NamedTuple):
    """What a launcher reads of a tensor descriptor."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str
    round_f32_to_tf32: bool


class Step(NamedTuple):
    """A compiled kernel's launcher and its arguments."""

    launch: Callable[..., None]
    call: list  # with Slots, and without the stream
    pointers: tuple[tuple[int, int], ...]  # positions of plain Slots, and their tensors
    nested: tuple[int, ...]  # positions of what else holds Slots
    native: tuple[Any, ...] | None  # the same for the driver, where it needs nothing of Triton's

    def by_triton(self, tensors: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        """Where the driver refuses, Triton's launcher says what is wrong, or makes the context that a thread lacks."""
        call = self.call.copy()
        call[STREAM] = stream
        for position, number in self.pointers:
            call[position] = addresses[number]
        for position in self.nested:
            call[position] = filled(call[position], tensors, addresses)
        self.launch(*call)


class RecordedCall(Launches):
    """The launches of one call, for tensors of the same sizes, strides, dtypes and device.

    It is called with the tensors of the inputs (`read_of`), followed in a backward by out, lse, the gradient of out
    and, where there is one, that of lse; for weights by lse. Its caller knows that the same fields share a tensor.
    """

    __slots__ = ("kernels", "steps")

    kernels: list[CompiledKernel]  # held, since Triton unloads the machine code of one that nobody holds
    steps: list[Step]


def run_pass(work: Pass, problem: Placed) -> Any:
    """Run the launches of a pass; what its caller gets."""
    run(work.launches, problem)
    return work.finished()


def record_pass(work: Pass, problem: Placed) -> tuple[Any, RecordedCall | None]:
    """The same, and what does it again for tensors of the same form; None where that would not do."""
    compiled = run(work.launches, problem)
    results = work.finished()
    again = None if TRIALS.failed else recorded(work, compiled, problem)
    if again is not None and is_untried() and not TRIALS.allow(again, work.given, results):
        again = None
    return results, again


def recorded(work: Pass, compiled: list, problem: Placed) -> RecordedCall | None:
    """A pass that has run, as what does it again. None where there is no CUDA device, or not the current one; where
    Triton or torch lack what this relies on; and where two tensors begin at one address, so that it cannot be told
    which of the two an argument is."""
    index = device_index(problem.device)
    if index is None or target_of(problem.device).backend != "cuda" or not can_record() or not BUILT:
        return None
    if work.fills is None or not work.made or torch.cuda.current_device() != index:
        return None
    hooks = [pre_run_hooks(launch.kernel) for launch in work.launches]
    if None in hooks or not all(isinstance(kernel, CompiledKernel) for kernel in compiled):
        return None
    tensors = (*work.read, *work.made)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if len(work.read) != len(work.given) or 0 in addresses or len(set(addresses)) < len(tensors):
        return None
    plan = planned(work, compiled, is_pooled=True) or planned(work, compiled, is_pooled=False)
    if plan is None:
        return None
    pairs = enumerate(zip(work.given, work.read, strict=True))
    copied = [(number, read.stride()) for number, (given, read) in pairs if given is not read]
    results = work.made[: len(plan.forms) - bool(plan.parts)]
    unaligned = [*alignments([tensor.data_ptr() for tensor in (*work.read, *results)]), *[False] * bool(plan.parts)]
    recording = Recording(
        given=len(work.given),
        device=index,
        forms=plan.forms,
        empty=empty_strided_cuda,
        steps=tuple((step.by_triton, step.native) for step in plan.steps),
        finish=work.finish,
        watched=hooked,
        low=LOW_ADDRESS,
        check_memory=with_memory,
        unseen=tuple(hooks),
        copy=partial(with_copies, copied=copied) if copied else None,
        fills=work.fills,
        unaligned=tuple(unaligned) if any(unaligned) else None,
        stream_of=driver.active.get_current_stream,
        parts=plan.parts,
    )
    found = RecordedCall(recording)
    found.kernels, found.steps = compiled, plan.steps
    return found


class Plan(NamedTuple):
    """What a recorded call makes and launches."""

    forms: tuple[tuple[Any, ...], ...]  # of the tensors made
    steps: list[Step]
    parts: tuple[int, ...] = ()  # where in the last one the others begin, in bytes


def planned(work: Pass, compiled: list, is_pooled: bool) -> Plan | None:
    """The plan of a pass that has run. With `is_pooled` one tensor holds all that its caller does not get: the host
    takes 2 us for each tensor. None where a launch is of a kind that is not recorded, or not so."""
    made, finish = work.made, work.finish
    forms = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made]
    if not is_pooled:
        steps = steps_of(work, compiled, (*work.read, *made))
        return None if steps is None else Plan(tuple(forms), steps)
    if not isinstance(finish, tuple) or any(number not in finish for number, _ in work.fills or ()):
        return None
    # What the caller gets comes first among the tensors made.
    count = len([number for number in range(len(made)) if number in finish])
    scratch = made[count:]
    if len(scratch) < 2 or any(number not in finish for number in range(count)):
        return None
    *parts, end = accumulate((part_size(tensor) for tensor in scratch), initial=0)
    steps = steps_of(work, compiled, (*work.read, *made[:count], None, *scratch))
    if steps is None or any(step.native is None for step in steps):
        return None
    return Plan((*forms[:count], ((end,), (1,), torch.uint8)), steps, tuple(parts))


def part_size(tensor: Tensor) -> int:
    """The bytes of a dense tensor, such that what follows it begins as tensors do."""
    return -(-tensor.numel() * tensor.element_size() // PART_BYTES) * PART_BYTES


def steps_of(work: Pass, compiled: list, tensors: Sequence[Tensor | None]) -> list[Step] | None:
    """`step_of` each launch; None where one has none."""
    if len(tensors) > MAX_TENSORS:
        return None
    found = [step_of(launch, kernel, tensors) for launch, kernel in zip(work.launches, compiled, strict=True)]
    return None if None in found else [step for step in found if step is not None]


def with_copies(given: Sequence[Tensor], copied: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    """The tensors given, with copies of those that `copied` numbers, in these strides."""
    read = list(given)
    with_memory([read[number] for number, _ in copied])
    for number, strides in copied:
        given_so = read[number]
        own = empty_strided_cuda(tuple(given_so.shape), strides, given_so.dtype)
        read[number] = own.copy_(given_so)
    return read


def alignments(addresses: Sequence[int]) -> list[bool]:
    """Whether each address is one that Triton compiles another kernel for."""
    return [address % ALIGNMENT != 0 for address in addresses]


def step_of(launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor | None]) -> Step | None:
    """The launch with places for `tensors`, of which it reads none that is None; None where it knows another tensor, or
    has no launcher that is known."""
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors) if tensor is not None}
    grid = (*launch.grid, 1, 1)[:3]
    try:
        slotted = [with_slots(arg, numbers) for arg in launch.args]
    except KeyError:
        return None
    entrance = launcher_of(compiled, grid)
    if entrance is None:
        return None
    launcher, call = entrance
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

    native = driver_launch(compiled, grid, launch.args, number_of)
    return Step(launcher, call, tuple(pointers), tuple(nested), native)


def with_slots(arg: Any, numbers: dict[int, int]) -> Any:
    """An argument with Slots for its tensors, which are known by their addresses. Raises KeyError for another one."""
    if isinstance(arg, Tensor):
        return Slot(numbers[arg.data_ptr()], None)
    if is_descriptor(arg):
        rest = (arg.shape, arg.strides, getattr(arg, "padding", "zero"), getattr(arg, "round_f32_to_tf32", False))
        return Slot(numbers[arg.base.data_ptr()], rest)
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
