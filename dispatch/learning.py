"""Small calls that learn, where the host is what is waited for: their forward and their backward are weighed together.

torch's own operators bring a node of the autograd graph with them; before any other kernel stands ours, and in the
backward a call of ours from C++ into Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sdpa.dispatch.kernel import Kernel
from sdpa.problem import AttentionProblem

if TYPE_CHECKING:
    from sdpa.dispatch.candidates import Candidate

# Operations of a forward below which the host is what is waited for: 40 us of an H200. Beyond, a backward that can
# still choose its kernel, and another one where the device refuses, is worth its microseconds.
SMALL_FLOPS = 2e10
# Seconds by which the host of an H200 is longer at a forward and a backward through our node, of 1 x 4 x 16 x 64.
OWN_NODE = 6e-5
# Seconds of the same host for a backward, from one kernel of torch's as from another: which of two is the faster on the
# device does not matter below.
HOST_BACKWARD = 6e-5


def is_small(problem: AttentionProblem) -> bool:
    """Whether a forward that an operator of torch's may answer as it is, is small enough for its host to matter."""
    return not problem.features & {"bias", "allowed"} and problem.device_type != "cpu" and problem.flops() < SMALL_FLOPS


def backward_of(problem: AttentionProblem) -> AttentionProblem:
    return problem._replace(direction="backward", features=problem.features - {"lse"})


def is_native(kernel: Kernel) -> bool:
    """Whether it is torch's own operator, which torch can differentiate."""
    return hasattr(kernel.load(), "native")


def seconds_of(candidate: Candidate) -> float:
    """What a small forward takes: the device's time, which tables hold, or the host's where that is longer."""
    return max(candidate.time, candidate.kernel.overhead)


def backward_seconds(follower: Candidate) -> float:
    return max(follower.time, HOST_BACKWARD)


def seconds_together(candidate: Candidate, backward: Iterable[Candidate]) -> float:
    """A forward and the backward that then costs least."""
    first = seconds_of(candidate)
    if candidate.copies:  # which torch would not make again
        return first + min(map(backward_seconds, backward), default=0.0) + OWN_NODE
    return first + min((after(candidate.kernel, follower) for follower in backward), default=OWN_NODE)


def after(kernel: Kernel, follower: Candidate) -> float:
    """Seconds of a backward behind the forward of `kernel`, and of the node between them."""
    left = follower.kernel is kernel and is_native(kernel) and not follower.copies
    return backward_seconds(follower) + (0.0 if left else OWN_NODE)


def stays(kernel: Kernel, backward: Iterable[Candidate]) -> bool:
    """Whether the backward, too, is best left to torch's operator that answers the forward."""
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
