"""autotune(): a call whose problem no table of this device has times the able kernels once, and the table gets them.

`Pass` asks `better` at the first call of each form. The measuring is a higher layer's (sdpa.bench.autotune), which is
imported by name for the first problem.
"""

from __future__ import annotations

import math
from contextvars import ContextVar, Token
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import torch

from sdpa.dispatch import tables, tuning
from sdpa.dispatch.caches import forget_choices
from sdpa.dispatch.context import ALL_TOGGLES, Setting
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import choose, toggles_for

if TYPE_CHECKING:
    from sdpa.dispatch.choice import Choice
    from sdpa.problem import AttentionProblem

SECONDS = 2.0
MOST_ASKED = 4096
MEASURED = ("forward", "backward")  # the directions that tables have


class State(NamedTuple):
    enabled: bool
    seconds: float


class Everywhere:
    """What holds where no with-block does, and whether calls were prepared while it was off, which have to be prepared
    again once it is on."""

    state = State(False, SECONDS)
    prepared_without = False


HERE: ContextVar[State | None] = ContextVar("autotune", default=None)
MEASURING = RLock()  # two at once would time each other
ASKED: set[tuple[object, ...]] = set()  # the buckets that were asked about in this process


class autotune:
    """Measure what no table knows: `sdpa.autotune(True)` from now on in every thread, `with sdpa.autotune():` inside of
    the block, where it holds for this context alone. Off by default.

    The first call of each new bucket, which is what a line of a tuning table tells apart (direction, dtype, kind of
    mask, sizes, and whether there is dropout, softcap or sinks), then times the able kernels on copies of its tensors.
    The figures go into the user's table (`sdpa info` says where), which later calls and processes read. Later calls
    cost what they cost without it.

    `seconds` bounds one measurement: after half of them no further kernel is begun, and what is being compiled is
    waited for. Kernels are tried in the order of the times that they should take.

    Nothing is measured while a CUDA graph is captured or a graph is traced, under a setting that names kernels or
    switches some off, under torch.use_deterministic_algorithms, for tensors that a kernel would be given copies of, and
    where only one kernel is able.

    Raises ValueError where `seconds` is not positive and finite.
    """

    def __init__(self, enabled: bool = True, *, seconds: float = SECONDS) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"expected enabled as a bool, got {type(enabled).__name__}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"expected seconds as a number, got {type(seconds).__name__}")
        if not 0 < seconds < math.inf:
            raise ValueError(f"expected a positive number of seconds, got {seconds:g}")
        self.state, self.before = State(enabled, float(seconds)), Everywhere.state
        self.tokens: list[Token[State | None]] = []
        Everywhere.state = self.state
        if enabled:
            prepare_again()

    def __enter__(self) -> autotune:
        if not self.tokens:
            Everywhere.state = self.before
        self.tokens.append(HERE.set(self.state))
        if self.state.enabled:
            prepare_again()
        return self

    def __exit__(self, *exception: object) -> None:
        HERE.reset(self.tokens.pop())


def prepare_again() -> None:
    if Everywhere.prepared_without:
        Everywhere.prepared_without = False
        forget_choices()


def is_on() -> bool:
    """Whether calls that are prepared now may be measured."""
    if state().enabled:
        return True
    Everywhere.prepared_without = True
    return False


def state() -> State:
    return HERE.get() or Everywhere.state


def better(choice: Choice, *tensors: object) -> Choice:
    """The choice for the problem of `choice` after it was measured; `choice` itself where nothing is to be measured.
    `tensors` are what its kernel is called with."""
    problem = choice.problem
    if not is_measurable(choice):
        return choice
    with MEASURING:
        if bucket_of(problem) in ASKED or is_known(problem):
            return choice
        if len(ASKED) >= MOST_ASKED:
            ASKED.clear()  # what the table has is known all the same
        ASKED.add(bucket_of(problem))
        remember = import_module("sdpa.bench.autotune").remember
        if not remember(problem, tensors, state().seconds):
            return choice
    forget_choices()
    return choose(problem, choice.setting, toggles_for(problem.direction))


def is_measurable(choice: Choice) -> bool:
    """Whether all kernels may answer this call, now and here, as the figures of a table are meant."""
    problem, setting = choice.problem, Setting.decode(choice.setting)
    free = not setting.allowed and setting.switches(toggles_for(problem.direction)) == ALL_TOGGLES
    plain = not problem.deterministic and not problem.unaligned and problem.direction in MEASURED
    return free and plain and not is_recording(problem.device_type)


def is_recording(device_type: str) -> bool:
    """Whether a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return True
    return device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def bucket_of(problem: AttentionProblem) -> tuple[object, ...]:
    """What a table tells problems apart by, and the device."""
    sizes = tuple(getattr(problem, name) for name in tables.SIZES)
    dtype, mask = tuning.dtype_names(problem)[0], tuning.mask_kind(problem)
    return (problem.device, problem.direction, dtype, mask, sizes, tuning.beside_of(problem))


def is_known(problem: AttentionProblem) -> bool:
    """Whether a table of the problem's device has its bucket."""
    wanted = bucket_of(problem)[1:]
    own = (table for named in tables.of(device_of(problem.device).names[:1]) for table in named)
    return any(tuning.key_of(bucket) == wanted for table in own for bucket in table.buckets)
