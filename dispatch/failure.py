"""What a device refuses while a kernel starts: which errors those are, their sentence, and the launches that failed."""

from __future__ import annotations

import torch

from sdpa.dispatch.kernel import Kernel
from sdpa.problem import UNLIMITED, AttentionProblem

MEMORY = "memory"  # may succeed later, or with a kernel that needs less
LAUNCH = "launch"  # will fail again: a tile too large for the device, an architecture nobody built for
WHAT = {MEMORY: "ran out of memory", LAUNCH: "could not be launched"}
# Errors that Triton raises before anything runs, by name: this file must not import it.
TRITON_ERRORS = frozenset({"OutOfResources", "CompilationError", "CompileTimeAssertionFailure", "PTXASError"})
# What drivers and libraries say when a launch was refused and the device is as it was. Errors that leave a device
# unusable (an illegal address) are not among them: nothing could answer instead.
REFUSALS = (
    "invalid configuration argument",
    "too many resources requested for launch",
    "no kernel image is available",
    "invalid device function",
    "unsupported gpu architecture",
    "provided ptx was compiled with an unsupported toolchain",
    "out of resource",
    "no valid execution plans",
    "no execution plans support",
    "cudnn_status_not_supported",
)
MESSAGE_LENGTH = 300

# (kernel's name, what decides about a launch) -> what the device said.
FAILED: dict[tuple[str, AttentionProblem], str] = {}


class LaunchError(RuntimeError):
    """A kernel could not be started and no other may answer; the message names the problem and the kernel."""


def kind_of(error: BaseException) -> str | None:
    """MEMORY, LAUNCH, or None for an error that is a fault of the program."""
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY
    kind = type(error)
    if kind.__module__.partition(".")[0] == "triton":
        return LAUNCH if kind.__name__ in TRITON_ERRORS else None
    if isinstance(error, RuntimeError):
        said = str(error).lower()
        if "out of memory" in said:  # the driver's, as in loading a kernel
            return MEMORY
        return LAUNCH if any(refusal in said for refusal in REFUSALS) else None
    return None


def sentence(kind: str, kernel: str, problem: str, error: BaseException) -> str:
    return f"kernel {kernel} {WHAT[kind]} on {problem}: {message(error)}"


def message(error: BaseException) -> str:
    """The error on one line, short enough for a sentence."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= MESSAGE_LENGTH else said[: MESSAGE_LENGTH - 3] + "..."


def as_error(kind: str, told: str) -> RuntimeError:
    """The exception to raise: out of memory stays torch's, because programs catch it to make their batches smaller."""
    return torch.OutOfMemoryError(told) if kind == MEMORY else LaunchError(told)


def remember(kernel: Kernel, problem: AttentionProblem, error: BaseException) -> None:
    FAILED[kernel.name, likeness(problem)] = message(error)


def reasons(kernel: Kernel, problem: AttentionProblem) -> tuple[str, ...]:
    """Why `kernel` is not tried for `problem` although it could do it: it failed on one that is built the same way."""
    said = FAILED.get((kernel.name, likeness(problem))) if FAILED else None
    return () if said is None else (f"could not be launched before: {said}",)


def likeness(problem: AttentionProblem) -> AttentionProblem:
    """The problem without the sizes that a launch does not depend on, so that each new length is not a new failure."""
    return problem._replace(B=0, H=0, Hkv=0, M=0, N=0, left=UNLIMITED)
