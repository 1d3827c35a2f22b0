"""Launch failures: which errors are a device's refusal, their sentence, and the launches that failed before."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sdpa.dispatch.kernel import Kernel
from sdpa.problem import UNLIMITED, AttentionProblem, Tile

MEMORY = "memory"  # may succeed later, or with a kernel that needs less
TILE = "tile"  # needs more than the device has; a smaller tile of the same kernel may fit
SIZE = "size"  # the kernel cannot run sizes like these
ADDRESS = "address"  # the kernel cannot read tensors that lie so; the problem should have said it
BUILD = "build"  # the kernel is not built for this device
# Errors that Triton raises before anything runs, by name: this file must not import it.
TRITON_ERRORS = frozenset({"OutOfResources", "CompilationError", "CompileTimeAssertionFailure", "PTXASError"})
# The error of a shader that Apple's compiler refuses, of our launcher (its module, its name): its message holds the
# compiler's log. Told by name, too, because this file must not import the launcher.
SHADER_ERROR = ("sdpa.kernels.metal.launch", "ShaderError")
# Messages of drivers and libraries for launches that were refused and left the device usable. Errors that leave it
# unusable (an illegal address) are not among them, because no other kernel could run.
REFUSALS = {
    "too many resources requested for launch": TILE,
    "out of resource": TILE,
    "invalid configuration argument": SIZE,  # a grid beyond the device's limits
    "no valid execution plans": SIZE,
    "no execution plans support": SIZE,
    "cudnn_status_not_supported": SIZE,
    "cannot read addresses": ADDRESS,
    "is not correctly aligned": ADDRESS,  # torch's efficient operator
    "no kernel image is available": BUILD,
    "invalid device function": BUILD,
    "unsupported gpu architecture": BUILD,
    "failed to create metal library": BUILD,
    "failed to create function state": BUILD,
    "failed to created pipeline state": TILE,  # torch's words; too much threadgroup memory, or too many threads
    "invalid buffer size": MEMORY,  # of MPS: larger than a buffer may be
    "provided ptx was compiled with an unsupported toolchain": BUILD,
}
PASSING = frozenset({MEMORY, ADDRESS})
MESSAGE_LENGTH = 300
LOG_LENGTH = 8000  # of a compiler, where it is not shortened to a line

# The refused launch -> the device's message.
FAILED: dict[Refused, str] = {}


class Refused(NamedTuple):
    """A launch that will fail again: a kernel, the tile if it is to blame, and what decides about it in a problem."""

    kernel: str
    tile: Tile | None
    problem: AttentionProblem


class LaunchError(RuntimeError):
    """A kernel could not be started, and no other may run in its place. The message names the problem and the
    kernel."""


def kind_of(error: BaseException) -> str | None:
    """One of the kinds above; None for any other error, which is a bug."""
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY
    kind = type(error)
    if kind.__module__.partition(".")[0] == "triton":
        return TILE if kind.__name__ in TRITON_ERRORS else None
    if is_shader_error(error):
        return BUILD
    if isinstance(error, RuntimeError):
        said = str(error).lower()
        if "out of memory" in said or "can't allocate memory" in said:  # a driver's and all of MPS, and a CPU's
            return MEMORY
        return next((kind for refusal, kind in REFUSALS.items() if refusal in said), None)
    return None


def is_shader_error(error: BaseException) -> bool:
    return any((kind.__module__, kind.__name__) == SHADER_ERROR for kind in type(error).__mro__)


def sentence(kind: str, kernel: str, problem: str, error: BaseException) -> str:
    what = "ran out of memory" if kind == MEMORY else "could not be launched"
    told = str(error)[:LOG_LENGTH] if is_shader_error(error) else message(error)
    return f"kernel {kernel} {what} on {problem}: {told}"


def message(error: BaseException) -> str:
    """The error on one line, short enough for a sentence."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= MESSAGE_LENGTH else said[: MESSAGE_LENGTH - 3] + "..."


def as_error(kind: str, told: str) -> RuntimeError:
    """The exception to raise: out of memory stays torch's, because programs catch it to make their batches smaller."""
    return torch.OutOfMemoryError(told) if kind == MEMORY else LaunchError(told)


def remember(kind: str, kernel: Kernel, tile: Tile | None, problem: AttentionProblem, error: BaseException) -> None:
    """Exclude what `error` is about from later selections. Nothing is excluded where the next call may succeed: memory
    may be free then, and tensors may lie elsewhere."""
    if kind not in PASSING:
        FAILED[refused(kind, kernel, tile, problem)] = message(error)


def reasons(kernel: Kernel, tile: Tile | None, problem: AttentionProblem) -> tuple[str, ...]:
    """Why `kernel` with `tile` is not tried although it supports `problem`: it failed on a similar one."""
    keys = (refused(kind, kernel, tile, problem) for kind in (TILE, SIZE, BUILD)) if FAILED else ()
    said = next((FAILED[key] for key in keys if key in FAILED), None)
    return () if said is None else (f"could not be launched before: {said}",)


def refused(kind: str, kernel: Kernel, tile: Tile | None, problem: AttentionProblem) -> Refused:
    like = alike_in_size(problem) if kind == SIZE else likeness(problem)
    return Refused(kernel.name, tile if kind == TILE else None, like)


def likeness(problem: AttentionProblem) -> AttentionProblem:
    """The problem without the sizes that a build does not depend on, so that a new length is not a new failure."""
    return problem._replace(B=0, H=0, Hkv=0, M=0, N=0, left=UNLIMITED, unaligned=())


def alike_in_size(problem: AttentionProblem) -> AttentionProblem:
    """The problem with sizes rounded to powers of two, so that a growing sequence does not fail at each step."""
    sizes = {name: getattr(problem, name).bit_length() for name in ("B", "H", "Hkv", "M", "N")}
    return problem._replace(**sizes, left=UNLIMITED, unaligned=())
