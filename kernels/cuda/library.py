"""Finds and loads the CUDA library, once and when first asked; failing is a sentence and not an exception."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from sdpa.installed import broken

LIBRARY = Path(__file__).with_name("libsdpa_cuda.so")


@cache
def load_error() -> str | None:
    """Why the library cannot be used, in one sentence; None when it is loaded."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "is CUDA code, and this torch is built for ROCm"
    if not LIBRARY.exists():
        return f"the CUDA library was not built, for want of nvcc or CUTLASS: {LIBRARY} does not exist"
    if (reason := broken(LIBRARY, "the CUDA library")) is not None:
        return reason
    try:
        torch.ops.load_library(str(LIBRARY))
    except Exception as error:  # whatever the loader raises is the reason
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the CUDA library {LIBRARY} did not load: {first_line}"
    return None


class Functions(NamedTuple):
    """Of the library, past torch's dispatcher (recorded.cpp)."""

    record: Callable[[], None]  # this thread records its last call
    recorded: Callable[..., int | None]  # (addresses, count) -> the address of that call
    run: int  # the address of a function of (call, addresses, stream)
    forget: Callable[[int], None]


@cache
def functions() -> Functions:
    library = ctypes.CDLL(str(LIBRARY))
    recorded, forget = library.sdpa_cuda_recorded, library.sdpa_cuda_forget
    recorded.argtypes, recorded.restype = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_int], ctypes.c_void_p
    forget.argtypes, forget.restype = [ctypes.c_void_p], None
    library.sdpa_cuda_record.restype = None
    run = ctypes.cast(library.sdpa_cuda_run, ctypes.c_void_p).value or 0
    return Functions(library.sdpa_cuda_record, recorded, run, forget)
