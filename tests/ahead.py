"""Compiling for devices that are not here: what Triton asks of a driver, and what it made, read back."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from sdpa.kernels.triton.target import Target, assume

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
H200 = Target("cuda", 90, 227 << 10, 132, 60 << 20)


class FakeDriver:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, target: Target):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target  # by which Triton keeps what it compiled, whatever it is

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@contextmanager
def compiling_for(target: Target, cache: Path):
    """`target` in place of whatever is here, and nothing compiled before; the true driver and cache come back."""
    from triton.runtime import driver

    before = driver._active
    driver._active = FakeDriver(target)
    try:
        with triton.knobs.cache.scope(), assume(target):
            triton.knobs.cache.dir = str(cache)
            yield
    finally:
        driver._active = before


def dump(compiled, folder: Path) -> str:
    """The machine's instructions, and what they take of its resources."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [CUOBJDUMP, "-res-usage", "-sass", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
