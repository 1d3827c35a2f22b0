"""A problem as a contest: our kernels and every peer, torch among them, each held against float64, then timed in turns.

Who raises or is wrong is told as such and never timed; nothing a contestant raises ends the suite.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sdpa
from sdpa.bench.calls import our_call, torch_has
from sdpa.bench.peers import PEERS, TORCH_PEERS, Contestant, Maker, ours, peers_for
from sdpa.bench.pool import first_line
from sdpa.bench.problems import Problem
from sdpa.bench.timing import USUAL, Call, OwnNumbers, Pace, Racer, Timing, race
from sdpa.bench.truth import (
    Distance,
    gradient_error,
    host_work,
    mean_under_dropout,
    out_error,
    right_gradients,
    right_out,
)
from sdpa.bench.workload import Refusal, Workload, WrongResult, make_workload, surroundings
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.context import sdpa_kernel
from sdpa.dispatch.explain import Explanation, explain_problem
from sdpa.dispatch.select import NoKernelError, backward_setting, clear_caches

DEFAULT = "default"  # what the dispatcher chooses, in the place of a kernel's name
OWN = "triton"  # what it chooses with torch's kernels left out
OWN_KERNELS = tuple(kernel.name for kernel in KERNELS if kernel.name.startswith("triton_"))
NOT_A_REASON = ("runtime disabled", "not used because")  # torch warns of every backend, asked for or not
LONGEST_NOTE = 200
NOT_TORCHS = "torch has no such call: beside its closest one, if any"


class DeviceLost(RuntimeError):
    """A contestant left the device unusable: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Options:
    """How a suite is run: our kernels by name, peers by name (none: all that fit), samples of each."""

    kernels: tuple[str, ...] = (DEFAULT,)
    peers: tuple[str, ...] = ()
    pace: Pace = USUAL
    seed: int = 0
    lost: dict[tuple[Problem, str], str] = field(default_factory=dict)  # who must not run, and why


@dataclass(frozen=True)
class Entry:
    """One contestant's outcome: its time, or why there is none."""

    name: str  # the peer's, or what was asked of us
    kernel: str = ""  # of ours, the one that ran (beside a peer it says nothing)
    timing: Timing | None = None
    seconds: float | None = None  # the figure: the median on a GPU, the least time on a CPU
    error: float | None = None  # largest distance to float64, of the output or in a backward of the gradients
    rms_error: float | None = None  # root mean square of that distance over what is right; of gradients the largest
    bytes: int | None = None  # peak of what a step allocates, its results included
    reason: str = ""  # why it was not timed
    failed: bool = False  # because it raised or was wrong, and not because it cannot do such problems
    note: str = ""  # what it warned of; of ours, that torch has no such call


@dataclass(frozen=True)
class Row:
    """One of our kernels on one problem, beside all peers."""

    suite: str
    problem: Problem
    own: Entry
    peers: tuple[Entry, ...] = ()

    def best(self, names: Iterable[str] = tuple(PEERS)) -> Entry | None:
        """The fastest of the peers named."""
        timed = [peer for peer in self.peers if peer.name in names and peer.seconds is not None]
        return min(timed, key=lambda peer: peer.seconds or 0.0, default=None)

    def ratio(self, names: Iterable[str] = tuple(PEERS)) -> float | None:
        """The best peer's time over ours: above 1 means ours is faster."""
        best = self.best(names)
        if best is None or best.seconds is None or self.own.seconds is None:
            return None
        return best.seconds / self.own.seconds

    @property
    def torch_ratio(self) -> float | None:
        return self.ratio(TORCH_PEERS)


def run_contest(suite: str, problems: Iterable[Problem], options: Options) -> Iterator[list[Row]]:
    """The rows of each problem, one per kernel of ours, as it is measured."""
    clear_caches()
    gc.collect()
    gc.freeze()  # `recover` need not look through what was imported: 0.2 s each time, twice as long as a short problem
    try:
        for problem in problems:
            yield measure_cell(suite, problem, options)
    finally:
        gc.unfreeze()


def measure_cell(suite: str, problem: Problem, options: Options) -> list[Row]:
    try:
        with surroundings(problem):
            own, peers = compete(problem, options)
    except DeviceLost:
        raise
    except Exception as error:
        own, peers = [Entry(name, reason=first_line(error), failed=True) for name in options.kernels], []
    recover(problem.device)
    return [Row(suite, problem, entry, tuple(peers)) for entry in own]


def compete(problem: Problem, options: Options) -> tuple[list[Entry], list[Entry]]:
    """Ours and the peers' entries, in the order asked for."""
    work = make_workload(problem, options.seed)
    judge = Judge(work)
    names = peers_for(problem, options.peers)
    makers: list[tuple[str, Maker]] = [(name, maker_of(name)) for name in options.kernels]
    makers += [(name, PEERS[name]) for name in names]
    prepared = [
        (Entry(name, reason=options.lost[problem, name], failed=True), None)
        if (problem, name) in options.lost
        else prepare(name, maker, work, judge)
        for name, maker in makers
    ]
    racers = [drawing_alone(racer, problem) for _, racer in prepared if racer is not None]
    timings = iter(race(racers, problem.device, problem.host, options.pace))
    entries = [entry if racer is None else timed(entry, next(timings), problem) for entry, racer in prepared]
    for place, kernel in enumerate(options.kernels):
        entry = entries[place]
        note = entry.note or ("" if torch_has(work) else NOT_TORCHS)
        entries[place] = replace(entry, kernel=name_of(work, entry, kernel), note=note)
    return entries[: len(options.kernels)], entries[len(options.kernels) :]


def drawing_alone(racer: Racer, problem: Problem) -> Racer:
    """With random numbers of its own, where the problem takes any from a GPU's generator."""
    device = torch.device(problem.device)
    if problem.call != "dropout" or device.type != "cuda":
        return racer
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return replace(racer, around=OwnNumbers(racer.around, generator))


def maker_of(kernel: str) -> Maker:
    """Of ours: what is chosen, what is chosen among our own, or a kernel by name."""
    if kernel == DEFAULT:
        return partial(ours, kernel=None)
    return own_best if kernel == OWN else partial(forced, kernel=kernel)


def own_best(work: Workload) -> Contestant:
    return replace(ours(work, None), name=OWN, around=partial(sdpa_kernel, OWN_KERNELS))


def forced(work: Workload, kernel: str) -> Contestant:
    """A kernel without such a backward would leave that to another one, which is not what was asked for."""
    row, direction = by_name().get(kernel), work.problem.direction
    if row is not None and direction not in row.directions:
        raise Refusal(f"has no {direction} pass")
    if row is not None and direction == "backward":
        told = planned(work, kernel)
        if told.chosen != kernel:
            raise Refusal("; ".join(reason for one in told.rows if one.kernel == kernel for reason in one.reasons))
    return ours(work, kernel)


def timed(entry: Entry, timing: Timing, problem: Problem) -> Entry:
    seconds = timing.median if problem.device.startswith("cuda") else timing.minimum
    return replace(entry, timing=timing, seconds=seconds)


def name_of(work: Workload, entry: Entry, asked: str) -> str:
    if entry.reason:
        return "" if asked in (DEFAULT, OWN) else asked
    if entry.kernel:
        return entry.kernel
    with sdpa_kernel(OWN_KERNELS) if asked == OWN else nullcontext():
        return planned(work, None if asked in (DEFAULT, OWN) else asked).chosen or ""


def kernel_of(problem: Problem) -> str:
    """The kernel that ran last in this thread, if it ran in the problem's direction."""
    choice = sdpa.last_choice()
    return choice.kernel.name if choice is not None and choice.problem.direction == problem.direction else ""


def planned(work: Workload, kernel: str | None) -> Explanation:
    """What the dispatcher answers in the problem's direction; autograd may run a backward in a thread of its own. It is
    asked what a forward was, which knows of packed sequences and of all that a call asks."""
    our_call(work, kernel)()
    choice: Any = sdpa.last_choice()
    asked, setting = choice.problem, choice.setting
    if work.problem.direction == "backward":
        learns = {"bias_grad"} if work.problem.mask == "bias_grad" else set()
        asked = asked._replace(direction="backward", features=asked.features - {"lse"} | learns)
        setting = backward_setting(setting, asked)
    return explain_problem(asked, setting)


class Judge:
    """The right results of a workload, made when they are first needed and kept for all contestants."""

    def __init__(self, work: Workload) -> None:
        self.work = host_work(work)
        self.right_out = right_out(self.work)
        self.right_gradients: tuple[Tensor, ...] | None = None

    def error(self, contestant: Contestant, result: Any) -> Distance:
        """The distance to float64, where it differentiates of the gradients. Raises WrongResult beyond rounding."""
        problem = self.work.problem

        def read(made: Any) -> Tensor:
            return contestant.read(made).to(self.work.q.device)

        def gradients(made: Any) -> tuple[Tensor, ...]:
            found = contestant.gradients(made)
            found = (*map(contestant.standard, found[:3]), *found[3:])
            return tuple(gradient.to(self.work.q.device) for gradient in found)

        def all_of(made: Any) -> tuple[Tensor, ...]:
            return (read(made), *(gradients(made) if problem.differentiates else ()))

        dropping = problem.call == "dropout"
        out, *found = mean_under_dropout(lambda: all_of(contestant.forward())) if dropping else all_of(result)
        error = out_error(self.work, out, self.right_out)
        if not problem.differentiates:
            return error
        if self.right_gradients is None:
            self.right_gradients = right_gradients(self.work)
        return gradient_error(self.work, tuple(found), self.right_gradients)


def prepare(name: str, maker: Maker, work: Workload, judge: Judge) -> tuple[Entry, Racer | None]:
    """A contestant that is warm, right and ready to race; or an entry that says why it is not."""
    problem = work.problem
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            contestant = maker(work)
            with contestant.around():
                out = contestant.forward()
                error = judge.error(contestant, out)
                kernel = kernel_of(problem)
                size = extra_bytes(contestant, problem)
            call, around = call_of(contestant, out, problem)
            entry = Entry(name, kernel, error=error.largest, rms_error=error.rms, bytes=size, note=note_of(told))
            return entry, Racer(call, around)
        except (Refusal, NoKernelError) as error:
            reason, failed = reasons_of(error), False
        except WrongResult as error:
            reason, failed = f"wrong result: {error}", True
        except Exception as error:
            reason, failed = "; ".join(filter(None, (note_of(told), first_line(error)))), True
    try:
        recover(problem.device)
    except RuntimeError as error:
        raise DeviceLost(f"{problem.label}: after {name} the device is unusable: {reason}") from error
    return Entry(name, reason=reason, failed=failed), None


def call_of(contestant: Contestant, out: Tensor, problem: Problem) -> tuple[Call, Callable[[], Any]]:
    """What is timed, and what is entered around it: a graph remembers its backend, so a backward needs nothing."""
    if problem.direction == "backward":
        return partial(contestant.gradients, out), nullcontext
    return contestant.step if problem.is_step else contestant.forward, contestant.around


def reasons_of(error: Exception) -> str:
    """A forced kernel's reasons out of the dispatcher's refusal, or another refusal's one line."""
    reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("    - ")]
    return "; ".join(reasons) or str(error).splitlines()[0]


def note_of(told: list[warnings.WarningMessage]) -> str:
    """The first warning that says something of this contestant."""
    texts = [str(warning.message).split(" (Triggered internally")[0].splitlines() or [""] for warning in told]
    return next((t[0][:LONGEST_NOTE] for t in texts if not any(word in t[0] for word in NOT_A_REASON)), "")


def extra_bytes(contestant: Contestant, problem: Problem) -> int | None:
    """The peak that one call adds on a GPU with its results; of a backward the forward's part too, which it keeps."""
    if not problem.device.startswith("cuda"):
        return None
    torch.cuda.synchronize(problem.device)
    before = torch.cuda.memory_allocated(problem.device)
    torch.cuda.reset_peak_memory_stats(problem.device)
    out = contestant.forward()
    kept = (out, contestant.gradients(out, retain=False) if problem.differentiates else None)
    torch.cuda.synchronize(problem.device)
    del kept
    return torch.cuda.max_memory_allocated(problem.device) - before


def recover(device: str) -> None:
    """A GPU's memory is given back, after a failure and between problems."""
    if device.startswith(("cuda", "mps")):
        gc.collect()
        (torch.cuda if device.startswith("cuda") else torch.mps).empty_cache()
