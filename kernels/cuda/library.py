"""Finds and loads the CUDA library, once and when first asked; failing is a sentence and not an exception."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

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
    try:
        torch.ops.load_library(str(LIBRARY))
    except Exception as error:  # whatever the loader raises is the reason
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the CUDA library {LIBRARY} did not load: {first_line}"
    return None
