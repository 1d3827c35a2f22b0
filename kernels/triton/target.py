"""What kernels are compiled for: architecture, shared memory, TMA, PDL; of the device at hand, or of one assumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch

HOPPER = 90
AMD_SHARED_MEMORY = 64 << 10  # bytes of a CDNA compute unit's local data share
UNLIMITED_MEMORY = 1 << 30
DEFAULT_L2 = 40 << 20
DEFAULT_BANDWIDTH = 2e12


class Target(NamedTuple):
    backend: str  # "cuda", "hip", or "interpreter" where Triton runs on the CPU
    arch: int | str  # 90, or "gfx942"
    shared_memory: int  # bytes that one program may use
    cores: int
    l2: int  # bytes
    bandwidth: float = DEFAULT_BANDWIDTH  # bytes a second of the device's memory, by its clock

    @property
    def has_tma(self) -> bool:
        """Whether tensors can be read by TMA, through tensor descriptors. The interpreter reads descriptors as well."""
        return self.backend == "interpreter" or (self.backend == "cuda" and self.arch >= HOPPER)

    @property
    def has_pdl(self) -> bool:
        """PDL, programmatic dependent launch: a kernel may begin before the one it depends on has ended."""
        return self.backend == "cuda" and self.arch >= HOPPER


INTERPRETER = Target("interpreter", 0, UNLIMITED_MEMORY, 1, DEFAULT_L2)
ASSUMED: ContextVar[Target | None] = ContextVar("assumed target", default=None)


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Prepare launches for a device that is not here, to compile them ahead."""
    token = ASSUMED.set(target)
    try:
        yield
    finally:
        ASSUMED.reset(token)


def target_of(device: str) -> Target:
    """The target behind "cuda:0"; the interpreter behind "cpu"."""
    return ASSUMED.get() or read(device)


@lru_cache(maxsize=16)
def read(device: str) -> Target:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(int(index or 0))
    cores, l2 = properties.multi_processor_count, getattr(properties, "L2_cache_size", DEFAULT_L2)
    if torch.version.hip is not None:
        return Target("hip", properties.gcnArchName.partition(":")[0], AMD_SHARED_MEMORY, cores, l2)
    arch = properties.major * 10 + properties.minor
    # Releases of torch report different facts. The clock is in kHz, the bus in bits, and a cycle has two transfers.
    clock, bus = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    bandwidth = clock * 1e3 * 2 * bus / 8 if clock and bus else DEFAULT_BANDWIDTH
    return Target("cuda", arch, properties.shared_memory_per_block_optin, cores, l2, bandwidth)
