"""sdpa.warm_up: what the attention calls of a function need is compiled and loaded before the function runs.

The function runs once on fake tensors, which computes nothing, and the operators that it calls are noted. Each is then
run once on zeros of the same sizes and strides. Where there are many on a GPU, other processes run them first: Triton
keeps on disk what they compile, and this process finds it there.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa.bench import pool
from sdpa.bench.timing import synchronize
from sdpa.dispatch.context import Setting, effective, keep, kept, sdpa_kernel, torch_toggles
from sdpa.dispatch.select import describe, last_choice
from sdpa.scalars import type_name
from sdpa.torch_private import float32_precision

VALUELESS = (DataDependentOutputException, DynamicOutputShapeException)
# They make fake tensors of those that torch.tensor() makes, and keep the values of small ones.
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# A process takes seconds to start: fewer calls are compiled here.
FEW_CALLS = 3
# Processes at once, each with a context of its own on the GPU.
MOST_JOBS = 4


class StandIn(NamedTuple):
    """What is kept of an operator's tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


class Noted(NamedTuple):
    """A call of one of our operators: by argument its number, or what stands for its tensor."""

    operator: str
    arguments: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Warmed:
    """A call that was run ahead: its problem in words, the kernel that answered, and the seconds of its first run."""

    problem: str
    kernel: str
    seconds: float


def warm_up(function: Callable[..., Any], *args: Any, jobs: int | None = None, **kwargs: Any) -> tuple[Warmed, ...]:
    """Compile and load now what the attention of `function(*args, **kwargs)` will need, so that its first run waits for
    none of it: a model with a batch of the sizes that it will see, or a function that calls several.

    The function is run on fake tensors (torch._subclasses.FakeTensorMode): it computes nothing, random numbers are not
    drawn, and parameters, their gradients, buffers and the attributes of modules that are given stay as they are. What
    else it keeps are fake tensors, which raise where they meet real ones: in a list or dict of a module, in a closure,
    or in an optimizer, whose step should be left out. Where an output
    requires gradients, the backward is prepared, too, unless the function runs one of its own; run it under
    torch.no_grad() to leave that out. A function that looks at the values of tensors cannot be run so.

    Args:
        function: a module or function that calls attention of this library, or of torch inside of `sdpa.patch()`.
        *args: what it will be called with. Of tensors only sizes, strides, dtypes and devices matter.
        **kwargs: likewise.
        jobs: processes that compile for a GPU at once; 1: none but this one. Not given: up to 4 where there are more
            than 3 different calls, else this one alone.

    Returns, for each different call in the order in which they come, what answered it and how long its first run took.

    Raises TypeError for a function that cannot be called or jobs that are no int, ValueError for jobs below 1, for
    nested tensors, and for a function that looks at values or makes no attention call of this library, and whatever the
    function raises.
    """
    if not callable(function):
        raise TypeError(f"warm_up(): argument 'function' must be callable, not {type_name(function)}")
    if jobs is not None and type(jobs) is not int:
        raise TypeError(f"warm_up(): argument 'jobs' must be int, not {type_name(jobs)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"Expected jobs >= 1, but got {jobs} instead.")
    calls = noted_calls(function, args, kwargs)
    if not calls:
        raise ValueError(f"{name_of(function)} makes no attention call of this library; is it inside of sdpa.patch()?")
    compile_elsewhere(calls, jobs)
    with sdpa_kernel():  # each has its own setting
        return tuple(map(run, calls))


def noted_calls(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Noted, ...]:
    """The different operator calls of the function, of its backward after those of its forward."""
    notes = Notes()
    try:
        with unchanged((function, args, kwargs)), notes.gradients_unchanged(), notes.fakes, notes:
            given, named = pytree.tree_map(notes.fake, (args, kwargs))
            results = function(*given, **named)
            if notes.awaits_backward:
                differentiate(results)
    except VALUELESS as error:
        raise ValueError(
            f"{name_of(function)} looks at the values of tensors, and warm_up() runs it on fake ones, which have none: "
            + pool.first_line(error)
        ) from error
    except UnsupportedOperatorException as error:
        raise ValueError(
            f"{name_of(function)} calls {error.func}, which has no fake implementation for warm_up() to run: "
            "torch.library.register_fake gives it one"
        ) from error
    finally:
        torch.clear_autocast_cache()  # which holds fake casts of parameters
        notes.fakes.allow_non_fake_inputs = False  # a fake tensor that the function has kept raises, beside real ones
    return tuple(dict.fromkeys(notes.calls))


class Notes(TorchDispatchMode):
    """Notes the calls of our operators that run beneath it, and puts fake tensors in the place of real ones, as of
    parameters: torch itself would write to these where an operator's arguments are all real."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Noted] = []
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.gradients: dict[int, tuple[Tensor, Tensor | None]] = {}  # by identity a real leaf, and its gradient

    @property
    def awaits_backward(self) -> bool:
        """Whether gradients are wanted of an attention call, and the function has not run its own backward."""
        learns = any(dict(call.arguments).get("needs_lse") for call in self.calls)
        return learns and all(call.operator != "attention_backward" for call in self.calls)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator not in LIFTS:
            args, kwargs = pytree.tree_map(self.fake, (args, kwargs))
        results = operator(*args, **kwargs)
        if operator.namespace == "sdpa":
            self.note(operator, args, kwargs, results)
        return results

    def fake(self, value: Any) -> Any:
        """The fake tensor that stands for a real one, and any other value as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.is_nested:
            raise ValueError("warm_up() runs functions on fake tensors, which nested tensors have none of.")
        if not value.is_leaf:  # what it was computed from is not asked for
            return self.fakes.from_tensor(value.detach(), static_shapes=True).requires_grad_()
        if value.requires_grad:
            self.gradients.setdefault(id(value), (value, value.grad))
        return self.fakes.from_tensor(value, static_shapes=True)

    @contextmanager
    def gradients_unchanged(self) -> Iterator[None]:
        """A function that runs its own backward gives fake gradients to real leaves."""
        try:
            yield
        finally:
            for leaf, gradient in self.gradients.values():
                leaf.grad = gradient

    def note(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> None:
        """The call with the setting that holds for it here: where it is run again there may be no with-block, and a
        backward goes by its forward's."""
        given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
        setting = given.get("setting", "")
        setting = kept(setting, given["lse"]) if "grad_out" in given else effective(setting)
        if given.get("needs_lse"):
            keep(results[1], setting)
        told = Setting.decode(setting)
        given["setting"] = told._replace(toggles=told.switches(torch_toggles())).encode()
        if given["q"].numel() and given["k"].numel():  # else nothing is run
            held = tuple((name, stand_in(value)) for name, value in given.items())
            self.calls.append(Noted(operator._schema.name.partition("::")[2], held))


@contextmanager
def unchanged(given: Any) -> Iterator[None]:
    """Modules among what is given, and that of a method, have their attributes back afterwards: a forward may assign
    tensors to itself, which are fake ones here."""
    function = given[0]
    roots = (*pytree.tree_leaves(given), getattr(function, "__self__", None))
    modules = {module for root in roots if isinstance(root, torch.nn.Module) for module in root.modules()}
    held = [vars(module) for module in modules]
    held += [names[kind] for names in held for kind in ("_parameters", "_buffers", "_modules")]
    before = [dict(names) for names in held]
    try:
        yield
    finally:
        for names, old in zip(held, before, strict=True):
            for name in names.keys() - old.keys():
                del names[name]
            names.update(old)


def stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return StandIn(tuple(value.shape), value.stride(), value.dtype, str(value.device))


def differentiate(results: Any) -> None:
    """Runs the backward of everything that requires gradients, towards the leaves, without giving them any."""
    outputs = [value for value in pytree.tree_leaves(results) if isinstance(value, Tensor) and value.requires_grad]
    leaves = list(leaves_of(outputs))
    if leaves:
        upstream = [torch.empty_like(output) for output in outputs]
        torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


def leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors whose gradients a backward of the outputs would accumulate."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


# -- the calls, run ---------------------------------------------------------------------------------------------------


def run(call: Noted) -> Warmed:
    """The operator on tensors of the same sizes and strides, and how long that took."""
    given = dict(call.arguments)
    device = given["q"].device
    real = {name: filled(name, v, given) if isinstance(v, StandIn) else v for name, v in given.items()}
    synchronize(device)
    start = time.perf_counter()
    getattr(torch.ops.sdpa, call.operator)(**real)
    synchronize(device)
    seconds = time.perf_counter() - start
    choice = last_choice()
    assert choice is not None  # the operator made one
    return Warmed(describe(choice.problem), choice.kernel.name, seconds)


def filled(name: str, like: StandIn, given: Mapping[str, Any]) -> Tensor:
    """A tensor of zeros, or of what makes every query see keys, which is valid beside the call's other arguments."""
    span = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True))
    memory = torch.zeros(max(span, 0), dtype=like.dtype, device=like.device)
    if name == "allowed":
        memory.fill_(True)
    elif name == "k_lengths":  # of pages as many as the sequences have
        table = given.get("block_table")
        memory.fill_(given["k"].shape[2] * (1 if table is None else table.shape[1]))
    elif name == "q_lengths":
        memory.fill_(given["q"].shape[2])
    elif name in ("cu_q", "cu_k"):  # rows behind the last document belong to none
        side, documents = name[-1], like.shape[0] - 1
        rows = min(given[side].shape[2], documents * given[f"max_{side}"])
        memory.copy_(torch.linspace(0, rows, documents + 1, dtype=torch.float64).round())
    return memory.as_strided(like.shape, like.stride)


# -- in other processes -----------------------------------------------------------------------------------------------


def compile_elsewhere(calls: Sequence[Noted], jobs: int | None) -> None:
    """Runs the calls in processes of their own, so that what they compile lies on disk. What fails there is left to
    this process, which tells why. They are started by a process of ours: the user's own main module may have no guard
    against being imported again."""
    calls = [call for call in calls if dict(call.arguments)["q"].device.startswith("cuda")]
    if jobs is None:
        jobs = min(MOST_JOBS, pool.default_jobs()) if len(calls) > FEW_CALLS else 1
    if jobs == 1 or len(calls) <= 1:
        return
    modes = Modes(float32_precision() == "tf32", torch.are_deterministic_algorithms_enabled())
    work = pickle.dumps((jobs, modes, tuple(calls)))
    subprocess.run([sys.executable, "-m", __name__], input=work, stdout=subprocess.DEVNULL, check=False)


class Modes(NamedTuple):
    """torch's switches of a process by which kernels are chosen, beside those in a call's setting."""

    tf32: bool
    deterministic: bool


def run_with(task: tuple[Modes, Noted]) -> None:
    modes, call = task
    torch.set_float32_matmul_precision("high" if modes.tf32 else "highest")
    if modes.deterministic:
        torch.use_deterministic_algorithms(True)
    run(call)


def main() -> int:
    """What `compile_elsewhere` starts: the calls come on standard input. Returns how many of them failed."""
    jobs, modes, calls = pickle.loads(sys.stdin.buffer.read())
    outcomes = pool.run_tasks([[(run_with, (modes, call))] for call in calls], jobs)
    return sum(bool(outcome.error) for outcome in outcomes)


if __name__ == "__main__":
    # The module under its own name, by which pickle finds it.
    from sdpa.bench import warm_up as itself

    sys.exit(itself.main())
