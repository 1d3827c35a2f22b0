"""A Metal emulator for tests: `torch.mps.compile_shader` for CPU tensors.

    from metal import emulator

    library = emulator.compile_shader(source)                     # SyntaxError, as torch's, with lines of the source
    library.NAME(q, out, 512, 0.125, [1, 2], threads=(128, 4, 1), group_size=(128, 1, 1))

Argument i is `[[buffer(i)]]`: a CPU tensor (its memory from its storage offset on), an int (int64), a float (float32),
or a list of ints or of floats. One fiber runs each thread of the GPU; simdgroups and threadgroups meet as on a GPU.
`with emulator.configure(schedule="random", seed=3, checked=True): ...` chooses how; see Settings.
A checked run reports every access: bounds to the byte, races between threads, and `traffic()`.
What a kernel does wrong raises a KernelError that names kernel, threadgroup, thread and line.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from . import build, source
from .arguments import BUFFERS, Buffer, bound

LANES, MAX_THREADS = 32, 1024  # of a simdgroup; of a threadgroup at most
SCHEDULES = {"greedy": 0, "random": 1}


class KernelError(RuntimeError):
    """What a kernel did wrong."""


class OutOfBounds(KernelError):
    """Memory outside of a buffer or of a threadgroup array was read or written."""


class Divergence(KernelError):
    """Threads that should meet at one place came to different ones."""


class ThreadgroupMemory(KernelError):
    """The threadgroup arrays of a kernel take more than a GPU has."""


class Race(KernelError):
    """Two threads touched the same memory with no barrier between them, and one wrote it."""


class Undefined(KernelError):
    """An integer overflowed, was divided by zero or shifted too far, or an address is not aligned."""


class TimeLimit(KernelError):
    """A kernel did not end."""


FAILURES = {1: OutOfBounds, 2: Divergence, 3: ThreadgroupMemory, 4: Race, 5: TimeLimit, 6: Undefined}


@dataclass(frozen=True)
class Settings:
    """How dispatches run.

    schedule: "greedy" runs each simdgroup until it waits at a barrier, "random" changes after each simdgroup operation.
    seed: of the order of threadgroups, simdgroups and lanes. Odd: memory begins at a guard page; even: it ends at one.
    checked: every access is reported: exact bounds, races, traffic. Some ten times slower.
    views: in checked runs the bounds are those of the view that was passed, not of its storage.
    flush: subnormal float32 are zero, as an Apple GPU may have them.
    seconds: of computing that one dispatch may take.
    """

    schedule: str = "greedy"
    seed: int = 0
    checked: bool = False
    views: bool = False
    flush: bool = False
    seconds: float = 60.0


settings = Settings()


@contextmanager
def configure(**changes):
    """Other settings, until the end of a with-block."""
    global settings
    before, settings = settings, replace(settings, **changes)
    try:
        yield settings
    finally:
        settings = before


class Position(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "xyz"]


TRAFFIC = ("read", "written", "read_per_group", "read_once", "written_once")


class CTraffic(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in TRAFFIC]


class Dispatch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("buffers", ctypes.POINTER(Buffer)),
        ("traffic", ctypes.POINTER(CTraffic)),
        ("groups", Position),
        ("threads", Position),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("random", "left", "checked", "strict_views", "flush")),
        ("seconds", ctypes.c_double),
        *((name, ctypes.c_uint64) for name in ("threadgroup_bytes", "library", "code", "code_before")),
        ("message", ctypes.c_char * 1024),
    ]


class Traffic(NamedTuple):
    """Bytes of one buffer in one dispatch: of all threads; that differ within a threadgroup, summed; that differ."""

    read: int
    written: int
    read_per_group: int
    read_once: int
    written_once: int


class Record(NamedTuple):
    """A dispatch that ran. `buffers` is empty where the run was not checked. `names` are those of the kernel."""

    kernel: str
    groups: tuple[int, ...]
    group_size: tuple[int, ...]
    threadgroup_bytes: int
    buffers: dict[int, Traffic]
    names: dict[str, int]

    def of(self, name: str) -> Traffic:
        return self.buffers[self.names[name]]


records: list[Record] = []
MAX_RECORDS = 4096


def traffic() -> list[Record]:
    """The dispatches since the last call, the oldest first."""
    taken = list(records)
    records.clear()
    return taken


def sizes(name: str, given) -> tuple[int, int, int]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(numbers) <= 3 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ValueError(f"{name} is {given!r}, wanted one to three positive ints")
    return (*numbers, 1, 1)[:3]


class Function:
    """One kernel of a library."""

    thread_execution_width = LANES

    def __init__(self, library: Library, kernel: source.Kernel):
        self.library, self.kernel, self.name = library, kernel, kernel.name
        self.handles: dict[bool, tuple] = {}

    def handle(self, checked: bool):
        """The compiled function, its buffers' types and its limit of threads."""
        if checked not in self.handles:
            loaded = self.library.loaded(checked)
            count = len(self.kernel.buffers) + 1
            types = (ctypes.c_int * count).in_dll(loaded, f"emulator_types_{self.name}")
            limit = ctypes.c_int.in_dll(loaded, f"emulator_limit_{self.name}").value
            entry = ctypes.cast(getattr(loaded, f"emulator_run_{self.name}"), ctypes.c_void_p).value
            self.handles[checked] = entry, dict(zip(self.kernel.buffers, types, strict=False)), limit
        return self.handles[checked]

    @property
    def max_threads_per_threadgroup(self) -> int:
        return self.handle(settings.checked)[2]

    def __call__(self, *args, threads=None, group_size=None):
        if threads is None or group_size is None:
            raise ValueError(f"{self.name}: the emulator wants threads= and group_size=")
        threads, group = sizes("threads", threads), sizes("group_size", group_size)
        entry, types, limit = self.handle(settings.checked)
        if any(total % size for total, size in zip(threads, group, strict=True)):
            raise ValueError(f"{self.name}: threads {threads} are no multiple of group_size {group}")
        if math.prod(group) % LANES or math.prod(group) > min(limit, MAX_THREADS):
            raise ValueError(
                f"{self.name}: {group} threads, wanted a multiple of {LANES} up to {min(limit, MAX_THREADS)}"
            )
        buffers, keep = bound(self.kernel, types, args)
        counts = (CTraffic * BUFFERS)()
        groups = tuple(total // size for total, size in zip(threads, group, strict=True))
        chosen = settings
        dispatch = Dispatch(
            entry, self.name.encode(), buffers, counts, Position(*groups), Position(*group), chosen.seed,
            SCHEDULES[chosen.schedule], chosen.seed % 2, chosen.checked, chosen.views, chosen.flush, chosen.seconds,
        )  # fmt: skip
        failure = runtime().emulator_dispatch(ctypes.byref(dispatch))
        del keep
        if failure:
            places = [place for place in (dispatch.code, dispatch.code_before) if place]
            lines = build.lines_of(self.library.path(chosen.checked), places)
            text = dispatch.message.decode(errors="replace") + (f" (lines {', '.join(lines)})" if lines else "")
            raise FAILURES[failure](text)
        seen = {}
        if chosen.checked:
            seen = {i: Traffic(*(getattr(counts[i], n) for n in TRAFFIC)) for i in self.kernel.buffers}
        names = {p.name: i for i, p in self.kernel.buffers.items()}
        records.append(Record(self.name, groups, group, dispatch.threadgroup_bytes, seen, names))
        del records[:-MAX_RECORDS]


class Library:
    """What compile_shader returns: kernels as attributes."""

    def __init__(self, text: str):
        self.text, found = source.translated(build.preprocessed(text))
        self.functions = {kernel.name: Function(self, kernel) for kernel in found}
        self.libraries: dict[bool, ctypes.CDLL] = {}
        self.loaded(settings.checked)

    def loaded(self, checked: bool) -> ctypes.CDLL:
        if checked not in self.libraries:
            runtime()
            self.libraries[checked] = ctypes.CDLL(str(self.path(checked)))
        return self.libraries[checked]

    def path(self, checked: bool) -> Path:
        return build.compiled(self.text, checked)

    def __getattr__(self, name: str) -> Function:
        if name.startswith("__") or "functions" not in self.__dict__:
            raise AttributeError(name)
        if name not in self.functions:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        return self.functions[name]

    def __dir__(self):
        return list(self.functions)


loaded_runtime: list[ctypes.CDLL] = []


def runtime() -> ctypes.CDLL:
    """The fibers and the memory, whose symbols the kernels' libraries want."""
    if not loaded_runtime:
        library = ctypes.PyDLL(str(build.runtime()), mode=ctypes.RTLD_GLOBAL)  # one dispatch at a time
        library.emulator_dispatch.argtypes = [ctypes.c_void_p]
        loaded_runtime.append(library)
    return loaded_runtime[0]


def compile_shader(text: str) -> Library:
    """As torch.mps.compile_shader."""
    return Library(text)
