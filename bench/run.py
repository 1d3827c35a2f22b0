"""Runs a suite: every problem is checked against the peer, then timed beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

import sdpa
from sdpa.bench.problems import Problem
from sdpa.bench.timing import Timing, interleave, stopwatch_for
from sdpa.bench.workload import GRADIENTS, Workload, WrongResult, calls, check_agreement, make_workload
from sdpa.dispatch.select import NoKernelError, clear_caches

PEERS = ("torch",)


@dataclass(frozen=True)
class Options:
    """How a suite is run; `kernel` forces ours."""

    peer: str = "torch"
    kernel: str | None = None
    repeat: int | None = None
    time_limit: float = 1.0
    flush: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One problem's outcome: two times, or why there are none."""

    problem: Problem
    ours: Timing | None = None
    peer: Timing | None = None
    kernel: str = ""
    backend: str = ""
    skipped: str = ""  # the forced kernel cannot do it
    error: str = ""  # a wrong result, or an exception

    @property
    def ratio(self) -> float | None:
        """peer / ours: above 1 means ours is faster."""
        return None if self.ours is None or self.peer is None else self.peer.minimum / self.ours.minimum

    def as_dict(self) -> dict:
        times = {"ours": self.ours, "peer": self.peer}
        figures = {name: timing and timing.as_dict() for name, timing in times.items()}
        texts = {"kernel": self.kernel, "backend": self.backend, "skipped": self.skipped, "error": self.error}
        return {"problem": asdict(self.problem), **figures, "ratio": self.ratio, **texts}


def run_suite(problems: Iterable[Problem], options: Options) -> Iterator[Row]:
    """A row per problem as it is measured. Nothing a problem raises ends the suite."""
    clear_caches()
    for problem in problems:
        yield run_problem(problem, options)


def run_problem(problem: Problem, options: Options) -> Row:
    if options.peer not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(PEERS)}, got {options.peer!r}")
    try:
        with nullcontext() if problem.needs_grad else torch.no_grad():
            return measure(make_workload(problem, options.seed), options)
    except NoKernelError as error:
        return Row(problem, skipped=reasons_of(error))
    except WrongResult as error:
        return Row(problem, kernel=kernel_of(problem), error=f"wrong result: {error}")
    except Exception as error:
        return Row(problem, error=first_line(error))


def reasons_of(error: Exception) -> str:
    """A forced kernel's reasons out of the dispatcher's refusal, or another refusal's one line."""
    reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("    - ")]
    return "; ".join(reasons) or str(error).splitlines()[0]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def measure(work: Workload, options: Options) -> Row:
    problem = work.problem
    backend = work.peer_backend()
    check_agreement(("out",), (work.ours(options.kernel),), (work.peer(),))
    ours, peer = calls(work, options.kernel)
    if problem.direction == "backward":
        check_agreement(GRADIENTS[: len(work.leaves)], ours(), peer())
    else:
        ours()
    kernel = kernel_of(problem) or planned_kernel(work, options.kernel)
    timings = interleave((ours, peer), stopwatch_for(problem.device), options.repeat, options.time_limit, options.flush)
    return Row(problem, *timings, kernel=kernel, backend=backend)


def kernel_of(problem: Problem) -> str:
    """The kernel that ran last in this thread, if it ran in the problem's direction."""
    choice = sdpa.last_choice()
    return choice.kernel.name if choice is not None and choice.problem.direction == problem.direction else ""


def planned_kernel(work: Workload, kernel: str | None) -> str:
    """For a backward that autograd ran in a thread of its own: what the dispatcher answers for it."""
    told = sdpa.explain(*work.qkv, work.our_mask, **work.options, kernel=kernel, direction=work.problem.direction)
    return told.chosen or ""
