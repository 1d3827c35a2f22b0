"""sdpa_kernel(...): which kernels may run, for this context only (contextvars), and torch's own toggles, honoured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from functools import lru_cache, partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, isroutine
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling, is_exporting

from sdpa.dispatch import tracing
from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.kernel import FAMILIES
from sdpa.dispatch.tracing import torch_toggles as torch_toggles  # noqa: PLC0414
from sdpa.environment import VariableError, default_kernel
from sdpa.scalars import type_name
from sdpa.torch_private import constant

Function = TypeVar("Function", bound=Callable[..., Any])
# torch.nn.attention.SDPBackend member -> family; the enum is matched by name so that it need not be imported.
TORCH_BACKENDS = {
    "MATH": "math",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "CUDNN_ATTENTION": "cudnn",
    "OVERRIDEABLE": "overrideable",
}
# Order of the bits that `torch_toggles` returns.
TOGGLED_FAMILIES = ("flash", "efficient", "math", "cudnn")
ALL_TOGGLES = 0b1111


class Setting(NamedTuple):
    """What may run: names of kernels or families in order; empty allows all."""

    allowed: tuple[str, ...] = ()
    priority: bool = False  # the order given is the order of preference
    strict: bool = False  # falling to math is an error
    forced: bool = False  # asked for by kernel=: never falls back
    decomposed: bool = False  # operations of torch's answer
    toggles: int | None = None  # torch's switches of a with-block inside of a graph, instead of those where it runs
    autotune: float | None = None  # seconds to measure a problem for, 0: it is not; None: as holds everywhere

    def encode(self) -> str:
        """As a string, the form in which a setting passes through an operator."""
        flags = "".join(letter for letter, on in zip("psfd", self[1:5], strict=True) if on)
        flags += "" if self.autotune is None else f"a{self.autotune!r}"
        flags += "" if self.toggles is None else f"t{self.toggles}"
        return ",".join(self.allowed) + (f";{flags}" if flags else "")

    def switches(self, outside: int) -> int:
        """torch's switches, of which `outside` are those that hold where a kernel is chosen."""
        return outside if self.toggles is None else self.toggles

    @property
    def is_open(self) -> bool:
        """Whether it leaves open what may run, and how it is chosen."""
        return not (self.allowed or self.priority or self.strict or self.forced)

    @classmethod
    def decode(cls, text: str) -> Setting:
        return decode(text)


@lru_cache(maxsize=1024)
def decode(text: str) -> Setting:
    names, _, flags = text.partition(";")
    flags, _, toggles = flags.partition("t")
    flags, _, seconds = flags.partition("a")
    allowed = tuple(name for name in names.split(",") if name)
    priority, strict, forced, decomposed = (letter in flags for letter in "psfd")
    held, budget = int(toggles) if toggles else None, float(seconds) if seconds else None
    return Setting(allowed, priority, strict, forced, decomposed, held, budget)


class Entry:
    """A with-block that was entered and not left."""

    __slots__ = ("block", "ended", "recorded", "text", "token")

    def __init__(self, block: Block, text: str) -> None:
        self.block, self.text = block, text
        self.recorded = tracing.is_recording()  # inside of a function that is being exported
        self.ended = False  # left in another context than it was entered in, which cannot be reached from there
        self.token: Token[tuple[Entry, ...]]  # told once it is entered


# The open with-blocks of this context, the innermost last.
CURRENT: ContextVar[tuple[Entry, ...]] = ContextVar("sdpa_kernel", default=())


DECOMPOSED = ";d"  # the text of a with-block that decomposes
ALL: tuple[Any, ...] = ()
# Settings made before; a dict and not lru_cache, which Dynamo warns about.
TEXTS: dict[tuple[Any, ...], str] = {}


class Block:
    """The with-block of one setting. Leaving it takes it, and no other, out of the context that it was entered in,
    wherever that happens; a context that was copied meanwhile keeps it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._open: list[Entry] = []

    def __enter__(self) -> Block:
        if is_dynamo_compiling():
            tracing.enter_traced(nested_text(self._text, tracing.traced_text()))
            return self
        outer = CURRENT.get() and current_text()
        entry = Entry(self, nested_text(self._text, outer) if outer else self._text)
        entry.token = CURRENT.set((*CURRENT.get(), entry))
        self._open.append(entry)
        return self

    def __exit__(self, *exception: object) -> None:
        if is_dynamo_compiling():
            tracing.leave_traced()
            return
        entries, mine = CURRENT.get(), None
        for entry in reversed(entries):
            if entry.block is not self or entry.ended:
                continue
            mine = mine or entry
            try:  # only a token knows whether this is the context that it was entered in
                CURRENT.reset(entry.token)
            except (ValueError, RuntimeError):
                continue
            if CURRENT.get() != entries[:-1] or entry is not entries[-1]:
                CURRENT.set(tuple(other for other in entries if other is not entry))
            self._open.remove(entry)
            return
        mine = mine or (self._open[-1] if self._open else None)
        if mine is not None:  # of another context
            mine.ended = True
            self._open.remove(mine)


def inside_of(make: Callable[[], Any], function: Function) -> Function:
    """The function, or coroutine, inside of a block that `make` makes at each call. A generator is refused: it runs
    after its call, when the block has ended."""
    runs = run_by(function)
    if isgeneratorfunction(runs) or isasyncgenfunction(runs):
        raise TypeError(
            f"a kernel setting decorates functions and coroutines, got the generator {runs.__qualname__}; write the "
            "with-block inside of it"
        )
    if iscoroutinefunction(runs):

        @wraps(function)
        async def awaited(*args: Any, **options: Any) -> Any:
            with make():
                return await function(*args, **options)

        found: Any = awaited
        return found

    @wraps(function)
    def inside(*args: Any, **options: Any) -> Any:
        with make():
            return function(*args, **options)

    same: Any = inside  # called as the function is
    return same


def run_by(called: Any) -> Any:
    """The function behind a partial, a static or bound method, or an object that can be called."""
    while isinstance(called, partial):
        called = called.func
    called = getattr(called, "__func__", called)
    return called if isroutine(called) or isinstance(called, type) else type(called).__call__


class PerCall(ContextDecorator):
    """A with-block without arguments. As a decorator it makes a block at each call, which Dynamo can trace; it cannot
    enter one that was made before."""

    def __call__(self, function: Function) -> Function:
        return inside_of(type(self), function)


class sdpa_kernel(Block, ContextDecorator):
    """Allow only some kernels, in this thread or task, until the with-block ends.

    Args:
        backends: all when not given; one or a list of torch's `SDPBackend` members, family names ("flash", "efficient",
            "cudnn", "math") or kernel names as `sdpa info` lists them.
        set_priority: prefer them in the order given instead of by speed.
        strict: leave math out where another allowed kernel is able, and raise where none is. Math named alone runs.

    Nests (the innermost holds), restores on exceptions, is seen by no other thread, and decorates functions. One object
    may be entered again, also inside of itself. Left in another context than it was entered in, as generators can be,
    it ends in the one that it was entered in. A name that is not known raises ValueError with the known ones, what is
    no name TypeError.
    """

    def __init__(self, backends: object = ALL, set_priority: bool = False, strict: bool = False) -> None:
        if type(set_priority) is not bool or type(strict) is not bool:
            refuse_flag(*(("strict", strict) if type(set_priority) is bool else ("set_priority", set_priority)))
        if type(backends) is list and backends:
            backends = tuple(backends)
        try:
            text = TEXTS.get((backends, set_priority, strict))
        except TypeError:  # no hash: no name, which is told below
            text = None
        self._text = find_text(backends, set_priority, strict) if text is None else text
        self._open = []  # as Block.__init__ has it, without its frame

    def __call__(self, function: Function) -> Function:
        """The function inside of a block of its own at each call, which Dynamo can trace."""
        return inside_of(partial(Block, self._text), function)


def find_text(backends: Any, set_priority: bool, strict: bool) -> str:
    several = not isinstance(backends, str) and isinstance(backends, Iterable)
    names = tuple(backends) if several else (backends,)
    if not names and backends is not ALL:
        raise ValueError("sdpa_kernel expects at least one kernel or backend, got an empty list")
    setting = Setting(tuple(backend_name(name) for name in names), set_priority, strict)
    text = setting.encode()
    if not several or isinstance(backends, tuple):  # what cannot change meanwhile
        TEXTS[backends, set_priority, strict] = text
    return text


def refuse_flag(name: str, value: object) -> None:
    raise TypeError(
        f"sdpa_kernel(): argument '{name}' must be bool, not {type_name(value)}; several kernels go into one list"
    )


def backend_name(backend: object, argument: str = "a kernel or backend", wanted: str = "a str or SDPBackend") -> str:
    """A family's or kernel's name from whatever a user may pass for it."""
    member: Any = getattr(backend, "name", None)  # of torch's enum, which need not be imported
    if not isinstance(backend, str) and not isinstance(member, str):
        raise TypeError(f"{argument} must be {wanted}, but got {type_name(backend)}")
    name = TORCH_BACKENDS.get(member, backend)
    if isinstance(name, str) and (name in FAMILIES or name in by_name() or name == "overrideable"):
        return name
    raise ValueError(
        f"unknown kernel or backend {backend!r}; known families: {', '.join(FAMILIES)}; known kernels: "
        f"{', '.join(kernel.name for kernel in KERNELS)}"
    )


def request_text(kernel: str | None) -> str:
    """The setting of one call: kernel= first, then the innermost with-block, then SDPA_KERNEL. In a graph that is being
    recorded only what its own function says: the rest is found where it runs."""
    own = "" if kernel is None else forced_text(kernel)
    if is_dynamo_compiling():
        return with_toggles(own or tracing.traced_text(), tracing.traced_toggles())
    if own:
        return own
    return recorded_text() if tracing.is_recording() else completed(current_text())


def forced_text(kernel: str) -> str:
    if isinstance(kernel, (list, tuple)):
        raise ValueError(f"kernel= takes one kernel or family, got {kernel!r}; sdpa_kernel takes several")
    return Setting((backend_name(kernel, "kernel", "a str or None"),), forced=True).encode()


@constant
def with_toggles(text: str, toggles: int | None) -> str:
    return text if toggles is None or toggles < 0 else Setting.decode(text)._replace(toggles=toggles).encode()


@constant
def nested_text(text: str, outer: str) -> str:
    """The setting of a with-block of `text` inside of one of `outer`: the inner one says what may run, inside of
    `decomposed()` everything is decomposed, and `autotune` changes nothing else."""
    setting, around = Setting.decode(text), Setting.decode(outer)
    if text == DECOMPOSED:
        return around._replace(decomposed=True).encode()
    if setting.autotune is not None:
        return around._replace(autotune=setting.autotune).encode()
    return setting._replace(decomposed=around.decomposed, autotune=around.autotune).encode()


def is_inside_decomposed() -> bool:
    """Whether a with-block `decomposed()` is open: in this context, or, in a function that Dynamo traces, inside of the
    function. torch.export also counts those around it; torch.compile, whose graph outlives them, does not."""
    if is_dynamo_compiling():
        return decomposes_traced()
    return bool(CURRENT.get()) and Setting.decode(current_text()).decomposed


@constant
def decomposes_traced() -> bool:
    held = current_text() if is_exporting() else ""
    return Setting.decode(tracing.traced_text()).decomposed or Setting.decode(held).decomposed


def current_text() -> str:
    """The setting of the innermost with-block of this context, or ""."""
    entries = CURRENT.get()
    while entries and entries[-1].ended:  # in another context, which could not take it out of this one
        entries = entries[:-1]
        CURRENT.set(entries)
    return entries[-1].text if entries else ""


def recorded_text() -> str:
    """The same of blocks inside of the function that this thread records."""
    return next((entry.text for entry in reversed(CURRENT.get()) if entry.recorded and not entry.ended), "")


def effective(text: str) -> str:
    """What an operator was asked, completed by the context it runs in: in a graph, "" means whatever holds."""
    if Setting.decode(text).is_open:  # names no kernel, and may only tell torch's switches
        held = completed(current_text())
        return with_toggles(held, Setting.decode(text).toggles) if text else held
    return text


def completed(text: str) -> str:
    """The setting of a with-block of `text`, with what SDPA_KERNEL names where it leaves open what may run. Whether
    calls are decomposed was asked before (`is_inside_decomposed`)."""
    if not text:
        return environment_text()
    setting = Setting.decode(text)
    if not setting.is_open:
        return text
    return Setting.decode(environment_text())._replace(autotune=setting.autotune).encode()


# The attribute of the memory of a log-sum-exp that tells a backward what its forward ran under. Not of the tensor: a
# graph saves an alias.
KEPT = "_sdpa_setting"


def keep(lse: Tensor, setting: str) -> None:
    """Remember with the log-sum-exp of a forward under which setting it was chosen: a graph's backward may run outside
    of the with-block."""
    if setting:
        setattr(lse.untyped_storage(), KEPT, setting)


def kept(text: str, lse: Tensor) -> str:
    """The setting of a backward that was asked `text`: what its forward ran under, where that was told."""
    return getattr(lse.untyped_storage(), KEPT, "") or effective(text)


@lru_cache(maxsize=1)
def environment_text() -> str:
    names = [name.strip() for name in default_kernel().split(",") if name.strip()]
    try:
        return Setting(tuple(backend_name(name) for name in names)).encode()
    except ValueError as error:
        raise VariableError(f"environment variable SDPA_KERNEL: {error}") from None


def enabled_families(toggles: int) -> frozenset[str]:
    return frozenset(family for bit, family in enumerate(TOGGLED_FAMILIES) if toggles >> bit & 1)
