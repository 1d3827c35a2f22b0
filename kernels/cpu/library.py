"""Finds and loads the native library, once and when first asked; failing is a sentence and not an exception."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from sdpa.environment import VariableError, cpu_isa
from sdpa.installed import broken

LIBRARY = Path(__file__).with_name("libsdpa_cpu.so")
OPERATORS = Path(__file__).with_name("libsdpa_operators.so")  # of programs without Python; never loaded here

_outcome: list[str | None] = []  # empty until the library was tried


def load_error() -> str | None:
    """Why the library cannot be used, in one sentence; None when it is loaded. Raises where SDPA_CPU_ISA asks for what
    this machine has not: nothing else is to answer then."""
    if not _outcome:
        _outcome.append(_load())
    return _outcome[0]


def _load() -> str | None:
    if (reason := broken(LIBRARY, "the CPU library")) is not None:
        return reason
    try:
        torch.ops.load_library(str(LIBRARY))
    except Exception as error:  # whatever the loader or the library raises is the reason
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the CPU library {LIBRARY} did not load: {first_line}"
    wanted = cpu_isa()
    if wanted is not None:
        if wanted not in isas():
            raise VariableError(
                f"environment variable SDPA_CPU_ISA: this machine has no {wanted!r}; choose from {', '.join(isas())}"
            )
        set_isa(wanted)
    return None


class Functions(NamedTuple):
    """The library's functions that are called past torch."""

    run: int  # the address of a function (recorded, addresses) -> 0 where it went well
    forget: Callable[[int], None]


@cache
def functions() -> Functions:
    library = ctypes.CDLL(str(LIBRARY))
    forget = library.sdpa_cpu_forget
    forget.argtypes, forget.restype = [ctypes.c_void_p], None
    return Functions(ctypes.cast(library.sdpa_cpu_run, ctypes.c_void_p).value or 0, forget)


def isa() -> str:
    """The instruction set in use: "scalar", "avx2", "avx512", "neon", ..."""
    return torch.ops.sdpa_cpu.isa()


def isas() -> list[str]:
    """What this machine can run, the narrowest first."""
    return torch.ops.sdpa_cpu.isas().split(",")


def set_isa(name: str) -> None:
    """Use another instruction set in this process; raises with the list of what there is."""
    torch.ops.sdpa_cpu.set_isa(name)
