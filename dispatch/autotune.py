"""autotune(): the first call of a problem that no table of its device knows times the able kernels, and the user's
table gets the figures.

Whether a call may be measured is part of its setting (`context.Setting`), so that it reaches the threads of a backward.
`calls.Pass` asks `better` once, at the first call of a form. The measuring is a higher layer's (sdpa.bench.autotune),
which is imported by name for the first problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from sdpa.dispatch import tables, tracing, tuning
from sdpa.dispatch.caches import forget_choices
from sdpa.dispatch.context import ALL_TOGGLES, Block, Setting, inside_of
from sdpa.dispatch.device import device_of
from sdpa.dispatch.select import choose, toggles_for
from sdpa.scalars import type_name

if TYPE_CHECKING:
    from sdpa.dispatch.choice import Choice
    from sdpa.problem import AttentionProblem

Function = TypeVar("Function", bound=Callable[..., Any])

SECONDS = 2.0
MEASURED = ("forward", "backward")  # the directions that tables have
# A problem is known where a measured one of its kind is this near (`tuning.near`): a single size 20 % apart.
NEAR = math.log(1.2)
MOST_ASKED = 4096

MEASURING = RLock()  # two at once would time each other
ASKED: set[tuple[object, ...]] = set()  # the problems that were measured, or could not be, in this process


class Everywhere:
    """What holds outside of with-blocks, and whether calls were prepared while it was off. These are prepared again
    when it is turned on."""

    seconds = 0.0  # 0: off
    prepared_without = False


def autotune(enabled: bool | None = None, *, seconds: float = SECONDS) -> Measuring | Turned:
    """Measure what no table knows: `sdpa.autotune(True)` from now on in every thread, until `sdpa.autotune(False)`;
    `with sdpa.autotune():` in the block and in this context alone, also as a decorator. Off by default.

    The first call of each new problem times the able kernels on copies of its tensors, in the order of the times that
    they should take. The user's table gets the figures (`sdpa info` says where it is), which later calls and later
    processes read, also where autotune is off. A problem is what an entry of a table is: direction, dtype, kind of
    mask, sizes, and whether there is dropout, softcap or sinks. It is new where no entry of this very device is within
    20 %. All other calls cost what they cost without autotune.

    Args:
        enabled: for the whole process. Not given: what is returned is a with-block and a decorator.
        seconds: of one measurement, about. A kernel that should take longer than what is left of the first half is not
            begun. What is being compiled is waited for, which for a Triton kernel takes seconds of its own. A problem
            is left alone whose two fastest kernels should take longer. 0 in a with-block turns it off there.

    Not measured are calls in a CUDA graph that is being captured or a graph that is being traced, calls under a setting
    that names kernels or switches some off, calls under torch.use_deterministic_algorithms, tensors that a kernel would
    be given copies of or that lie far apart in memory, and attention weights. Inside of a traced function a with-block
    does nothing; the graph's calls are measured where it runs inside of one. On a GPU a measurement takes half a
    gigabyte beside the copies.

    Raises TypeError for what is no bool or number, ValueError where `seconds` is negative or not finite.
    """
    if enabled is not None and type(enabled) is not bool:
        raise TypeError(f"autotune(): argument 'enabled' must be bool, not {type_name(enabled)}")
    if type(seconds) not in (int, float):
        raise TypeError(f"autotune(): argument 'seconds' must be a number, not {type_name(seconds)}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"autotune() expects a number of seconds >= 0, got {seconds:g}")
    if enabled is None:
        return Measuring(Setting(autotune=float(seconds)).encode())
    Everywhere.seconds = float(seconds) if enabled else 0.0
    if Everywhere.seconds and Everywhere.prepared_without:
        Everywhere.prepared_without = False
        forget_choices()
    return TURNED


class Measuring(Block):
    """The with-block, or the decorator, of `autotune`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._entered: list[bool] = []  # by entry whether it is one of a function that runs, and is not traced

    def __enter__(self) -> Measuring:
        if not is_dynamo_compiling():
            self._entered.append(not tracing.is_traced())
            if self._entered[-1]:
                super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_dynamo_compiling() and self._entered.pop():
            super().__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        """The function inside of a block of its own at each call."""
        return inside_of(partial(Measuring, self._text), function)


class Turned:
    """What `autotune` returns where it was turned on or off: no with-block."""

    def __enter__(self) -> None:
        raise TypeError(
            "autotune(True) and autotune(False) hold in the whole process; a block is `with sdpa.autotune():`"
        )

    def __exit__(self, *exception: object) -> None:
        pass


TURNED = Turned()


def seconds_for(setting: Setting) -> float:
    return Everywhere.seconds if setting.autotune is None else setting.autotune


def is_wanted(choice: Choice) -> bool:
    """Whether the first call of what was prepared for this choice asks `better`."""
    if not is_measurable(choice):
        return False
    setting = Setting.decode(choice.setting)
    Everywhere.prepared_without |= setting.autotune is None and not Everywhere.seconds
    return seconds_for(setting) > 0


def is_measurable(choice: Choice) -> bool:
    """Whether all kernels may answer such calls, as the figures of a table are meant."""
    problem, setting = choice.problem, Setting.decode(choice.setting)
    free = not setting.allowed and setting.switches(toggles_for(problem.direction)) == ALL_TOGGLES
    return free and not problem.deterministic and not problem.unaligned and problem.direction in MEASURED


def may_begin(choice: Choice) -> bool:
    """Whether a measurement would disturb nothing now: no graph is traced, and none is captured."""
    if tracing.is_traced():
        return False
    return choice.problem.device_type != "cuda" or not torch.cuda.is_current_stream_capturing()


def better(choice: Choice, *tensors: object) -> Choice:
    """The choice for the problem of `choice` once it is known. `tensors` are what its kernel is called with."""
    problem, seconds = choice.problem, seconds_for(Setting.decode(choice.setting))
    with MEASURING:
        bucket = bucket_of(problem)
        if seconds and bucket not in ASKED and not is_known(problem):
            if len(ASKED) >= MOST_ASKED:
                ASKED.clear()  # what the tables have is known all the same
            ASKED.add(bucket)
            import_module("sdpa.bench.autotune").remember(problem, tensors, seconds)
            choose.cache_clear()
    return choose(problem, choice.setting, toggles_for(problem.direction))


def bucket_of(problem: AttentionProblem) -> tuple[object, ...]:
    """What tables tell problems apart by, and the device."""
    sizes = tuple(getattr(problem, name) for name in tables.SIZES)
    dtype, mask = tuning.dtype_names(problem)[0], tuning.mask_kind(problem)
    return (problem.device, problem.direction, dtype, mask, sizes, tuning.beside_of(problem), tuning.window_of(problem))


def is_known(problem: AttentionProblem) -> bool:
    """Whether a table of this very device has an entry within `NEAR`, of more than one kernel."""
    own = (table for named in tables.of(device_of(problem.device).names[:1]) for table in named)
    near = (one for table in own for one in tuning.near(table, problem))
    return any(one.distance <= NEAR and len(one.bucket.ms) > 1 for one in near)
