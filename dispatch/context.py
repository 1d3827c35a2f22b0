"""sdpa_kernel(...): which kernels may run, for this context only (contextvars), and torch's own toggles, honoured."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from sdpa.dispatch.catalog import KERNELS, by_name
from sdpa.dispatch.kernel import FAMILIES
from sdpa.environment import VariableError, default_kernel

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

    def encode(self) -> str:
        """As a string, the form in which a setting passes through an operator."""
        flags = "".join(letter for letter, on in zip("psf", self[1:], strict=True) if on)
        return ",".join(self.allowed) + (f";{flags}" if flags else "")

    @classmethod
    def decode(cls, text: str) -> Setting:
        return decode(text)


@lru_cache(maxsize=1024)
def decode(text: str) -> Setting:
    names, _, flags = text.partition(";")
    allowed = tuple(name for name in names.split(",") if name)
    return Setting(allowed, "p" in flags, "s" in flags, "f" in flags)


# The settings of the open with-blocks, the innermost first: (text, outer settings).
CURRENT: ContextVar[tuple | None] = ContextVar("sdpa_kernel", default=None)
# What `with sdpa_kernel(...)` inside a function under torch.compile sets: Dynamo follows a list, not a ContextVar.
TRACED: list[str] = []


ALL: tuple = ()
# Settings made before; a dict and not lru_cache, which Dynamo warns about.
TEXTS: dict[tuple, str] = {}


class sdpa_kernel(ContextDecorator):
    """Allow only some kernels, in this thread or task, until the with-block ends.

    Args:
        backends: all when not given; one or a list of torch's `SDPBackend` members, family names ("flash", "efficient",
            "cudnn", "math") or kernel names as `sdpa info` lists them.
        set_priority: prefer them in the order given instead of by speed.
        strict: raise instead of falling to math.

    Nests (the innermost holds), restores on exceptions, is seen by no other thread, and decorates functions. One object
    may be entered again. A name that is not known raises ValueError with the known ones, what is no name TypeError.
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

    def __enter__(self) -> sdpa_kernel:
        if is_compiling():
            TRACED.append(self._text)
        else:
            CURRENT.set((self._text, CURRENT.get()))
        return self

    def __exit__(self, *exception: object) -> None:
        if is_compiling():
            TRACED.pop()
        else:
            _, outer = CURRENT.get()
            CURRENT.set(outer)


def find_text(backends: object, set_priority: bool, strict: bool) -> str:
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
        f"sdpa_kernel(): argument '{name}' must be bool, not {type(value).__name__}; several kernels go into one list"
    )


def backend_name(backend: object, argument: str = "a kernel or backend", wanted: str = "a str or SDPBackend") -> str:
    """A family's or kernel's name from whatever a user may pass for it."""
    member = getattr(backend, "name", None)  # of torch's enum, which need not be imported
    if not isinstance(backend, str) and not isinstance(member, str):
        raise TypeError(f"{argument} must be {wanted}, but got {type(backend).__name__}")
    name = TORCH_BACKENDS.get(member, backend)
    if isinstance(name, str) and (name in FAMILIES or name in by_name() or name == "overrideable"):
        return name
    raise ValueError(
        f"unknown kernel or backend {backend!r}; known families: {', '.join(FAMILIES)}; known kernels: "
        f"{', '.join(kernel.name for kernel in KERNELS)}"
    )


def request_text(kernel: str | None) -> str:
    """The setting of one call: kernel= first, then the innermost with-block, then SDPA_KERNEL."""
    if kernel is not None:
        if isinstance(kernel, (list, tuple)):
            raise ValueError(f"kernel= takes one kernel or family, got {kernel!r}; sdpa_kernel takes several")
        return Setting((backend_name(kernel, "kernel", "a str or None"),), forced=True).encode()
    if is_compiling():
        return TRACED[-1] if TRACED else ""
    return current_text() or environment_text()


def current_text() -> str:
    """The setting of the innermost with-block of this context, or ""."""
    setting = CURRENT.get()
    return "" if setting is None else setting[0]


def effective(text: str) -> str:
    """What an operator was asked, completed by the context it runs in: in a graph, "" means whatever holds."""
    return text or current_text() or environment_text()


@lru_cache(maxsize=1)
def environment_text() -> str:
    names = [name.strip() for name in default_kernel().split(",") if name.strip()]
    try:
        return Setting(tuple(backend_name(name) for name in names)).encode()
    except ValueError as error:
        raise VariableError(f"environment variable SDPA_KERNEL: {error}") from None


def torch_toggles() -> int:
    """torch's process-global switches (torch.nn.attention.sdpa_kernel sets them) as bits of TOGGLED_FAMILIES."""
    c = torch._C
    return (
        c._get_flash_sdp_enabled()
        | c._get_mem_efficient_sdp_enabled() << 1
        | c._get_math_sdp_enabled() << 2
        | c._get_cudnn_sdp_enabled() << 3
    )


def enabled_families(toggles: int) -> frozenset[str]:
    return frozenset(family for bit, family in enumerate(TOGGLED_FAMILIES) if toggles >> bit & 1)
