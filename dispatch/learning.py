"""Small calls that learn, where the host is slower than the device: forward and backward are chosen together.

torch's own operators have an autograd node in C++. All other kernels need our node, and in the backward a call from C++
into Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sdpa.dispatch.kernel import Kernel
from sdpa.problem import AttentionProblem

if TYPE_CHECKING:
    from sdpa.dispatch.candidates import Candidate

# Operations of a forward below which the host is slower than the device: 40 us of an H200. For larger ones a backward
# that selects its kernel, and has a successor where the device refuses it, is worth its microseconds.
SMALL_FLOPS = 2e10
# Additional seconds of the host for a forward and a backward through our node (H200, 1 x 4 x 16 x 64).
OWN_NODE = 6e-5
# Seconds of the same host for a backward, from one kernel of torch's as from another: which of two is the faster on the
# device does not matter below.
HOST_BACKWARD = 6e-5


def is_small(problem: AttentionProblem) -> bool:
    """Whether a forward that one of torch's operators may run as it is, is so small that the host's time matters."""
    return not problem.features & {"bias", "allowed"} and problem.device_type != "cpu" and problem.flops() < SMALL_FLOPS


def backward_of(problem: AttentionProblem) -> AttentionProblem:
    return problem._replace(direction="backward", features=problem.features - {"lse"})


def is_native(kernel: Kernel) -> bool:
    """Whether the kernel is an operator of torch's, which torch can differentiate."""
    return hasattr(kernel.load(), "native")


def seconds_of(candidate: Candidate) -> float:
    """What a small forward takes: the device's time, which tables hold, or the host's where that is longer."""
    return max(candidate.time, candidate.kernel.overhead)


def backward_seconds(follower: Candidate) -> float:
    return max(follower.time, HOST_BACKWARD)


def seconds_together(candidate: Candidate, backward: Iterable[Candidate]) -> float:
    """The time of a forward and of the fastest backward after it."""
    first = seconds_of(candidate)
    if candidate.copies:  # torch's backward would not make them again
        return first + min(map(backward_seconds, backward), default=0.0) + OWN_NODE
    return first + min((after(candidate.kernel, follower) for follower in backward), default=OWN_NODE)


def after(kernel: Kernel, follower: Candidate) -> float:
    """Seconds of a backward after the forward of `kernel`, and of the autograd node between them."""
    left = follower.kernel is kernel and is_native(kernel) and not follower.copies
    return backward_seconds(follower) + (0.0 if left else OWN_NODE)


def stays(kernel: Kernel, backward: Iterable[Candidate]) -> bool:
    """Whether the backward is fastest, too, by torch's operator that runs the forward."""
    followers = list(backward)
    if not is_native(kernel) or all(follower.kernel is not kernel for follower in followers):
        return False
    return min(followers, key=lambda follower: after(kernel, follower)).kernel is kernel


def ranking_together(
    rank: Callable[[Candidate], tuple[bool, float]], backward: Iterable[Candidate]
) -> Callable[[Candidate], tuple[bool, float]]:
    """The order `rank` among forwards, by the time of both."""
    followers = list(backward)
    return lambda candidate: (rank(candidate)[0], seconds_together(candidate, followers))
