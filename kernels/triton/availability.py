"""Whether Triton's kernels can run here: its version, and a device, or its interpreter."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import knobs

OLDEST = (3, 4)  # named tuples as arguments, host tensor descriptors


@cache
def unavailable() -> str | None:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        return f"needs Triton {OLDEST[0]}.{OLDEST[1]} or newer, got {triton.__version__}"
    if knobs.runtime.interpret or torch.cuda.is_available():
        return None
    return "torch sees no CUDA device (TRITON_INTERPRET=1 runs it slowly on the CPU)"
