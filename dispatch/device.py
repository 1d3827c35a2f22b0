"""Static facts of a device: vendor, architecture, cores, instruction sets, shared memory, peaks. They are cached."""

from __future__ import annotations

import platform
import re
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from sdpa.dispatch import apple

# Operations per cycle and core of a fused multiply-add unit, counted as two: instruction set -> float32.
CPU_FLOPS_PER_CYCLE = {"avx512": 32, "avx2": 32, "neon": 32, "scalar": 4}
DEFAULT_CPU_HERTZ = 3.0e9
DEFAULT_CPU_BANDWIDTH = 20e9  # bytes/s of one core's share of memory

# Dense half-precision operations per cycle and multiprocessor or compute unit (vendors' data sheets: peak operations
# divided by units and boost clock). NVIDIA by compute capability, AMD by architecture: HIP's major and minor collide.
TENSOR_FLOPS_PER_CYCLE = {
    "sm70": 1024,
    "sm75": 1024,
    "sm80": 2048,
    "sm86": 1024,
    "sm89": 1024,
    "sm90": 4096,
    "sm100": 8192,
    "sm103": 8192,
    "sm120": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
}
DEFAULT_TENSOR_FLOPS = 1024
# Ordinary float32 operations per cycle and multiprocessor: 128 fused multiply-adds, in older and in AMD's units 64.
FLOAT32_FLOPS_PER_CYCLE = 256
NARROW_FLOAT32_FLOPS = 128
NARROW_FLOAT32 = frozenset({"sm70", "sm75", "sm80", "gfx90a"})
# Units made for computing run float64 at half the rate of float32, the others at a 64th.
FULL_FLOAT64 = frozenset({"sm70", "sm80", "sm90", "sm100", "gfx90a", "gfx942", "gfx950"})
SLOW_FLOAT64 = 64
# TF32 products run at half the rate of bfloat16 ones.
TF32_SHARE = 0.5
# Transfers per cycle of the memory clock that torch reports: two. For AMD's HBM3 it reports half of the clock.
TRANSFERS = 2
TRANSFERS_TOLD = {"gfx942": 4, "gfx950": 4}
# Defaults for what torch does not report: clocks in kHz and the bus in bits of an H100-like card, the shared memory
# that every architecture since sm80 gives a thread block, NVIDIA's warp.
DEFAULT_CLOCK = 1_700_000
DEFAULT_MEMORY_CLOCK = 2_600_000
DEFAULT_BUS = 5120
DEFAULT_SHARED_MEMORY = 99 << 10
DEFAULT_WARP = 32
SIMDGROUP = 32  # Apple's warp


@dataclass(frozen=True)
class Device:
    """Static facts of one device; `names` are the tuning tables that fit it, the most specific first."""

    kind: str
    description: str
    names: tuple[str, ...]
    cores: int
    half_flops: float  # peak operations/s in bfloat16 and float16
    float32_flops: float
    float64_flops: float
    bandwidth: float  # bytes/s
    vendor: str = ""  # "nvidia", "amd", "apple"; "" where it does not matter
    architecture: str = ""  # "sm90", "gfx942", "m2"
    shared_memory: int = 0  # bytes for one thread block; 0: not known, or none
    warp_size: int = 0

    def peak(self, dtype: torch.dtype, tf32: bool = False) -> float:
        """Operations/s of matrix products in `dtype`; `tf32` allows float32 ones to be rounded to TF32."""
        if dtype == torch.float64:
            return self.float64_flops
        if dtype == torch.float32:
            return max(self.float32_flops, TF32_SHARE * self.half_flops) if tf32 else self.float32_flops
        return self.half_flops


# What "cuda" stands for where somebody asks about a card that is not here (sdpa.dispatch.cards).
ASSUMED: ContextVar[Device | None] = ContextVar("assumed card", default=None)


def device_of(name: str) -> Device:
    """The device behind "cpu", "cuda:0", "mps", ..."""
    kind, _, index = name.partition(":")
    if kind == "cuda" and (card := ASSUMED.get()) is not None:
        return card
    if kind == "cpu":
        return cpu(torch.get_num_threads())
    if kind == "mps":
        return mps(apple.gpu(name))
    if kind == "cuda" and torch.cuda.is_available():
        return cuda(int(index or 0))
    return Device(kind, kind, (kind,), 1, 4e12, 2e12, 1e11, 1e11)


@lru_cache(maxsize=64)
def cpu(threads: int) -> Device:
    isa = cpu_isa()
    flops = threads * DEFAULT_CPU_HERTZ * CPU_FLOPS_PER_CYCLE[isa]
    names = tuple(dict.fromkeys((cpu_table_name(), f"cpu_{isa}")))
    return Device("cpu", cpu_model(), names, threads, flops, flops, flops / 2, DEFAULT_CPU_BANDWIDTH)


def cpu_isa() -> str:
    """The widest instruction set torch's own detection reports."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    return next((isa for isa in ("avx512", "avx2") if isa in capability), "scalar")


@lru_cache(maxsize=1)
def cpu_info() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_model() -> str:
    return cpu_info().get("model name") or platform.processor() or platform.machine()


# Microarchitectures that a table was measured on, by vendor and family of x86 processors, with their models (those that
# Linux's kernel takes for them).
X86_TABLES = {
    ("AuthenticAMD", "25"): ("amd_zen4", (*range(0x10, 0x20), *range(0x60, 0x80), *range(0xA0, 0xB0))),
    ("AuthenticAMD", "26"): ("amd_zen5", (*range(0x00, 0x30), *range(0x40, 0x50), *range(0x60, 0x80))),
    ("GenuineIntel", "6"): ("intel_sapphire_rapids", (0x8F, 0xCF)),
}


def cpu_table_name() -> str:
    info = cpu_info()
    name, models = X86_TABLES.get((info.get("vendor_id", ""), info.get("cpu family", "")), ("", ()))
    return name if int(info.get("model") or -1) in models else f"cpu_{cpu_isa()}"


@lru_cache(maxsize=16)
def cuda(index: int) -> Device:
    return gpu(torch.cuda.get_device_properties(index), bool(torch.version.hip))


@lru_cache(maxsize=64)
def mps(gpu: apple.Gpu) -> Device:
    """The facts of one of Apple's GPUs, from public figures. MPS has no float64; an estimate is wanted all the same."""
    return Device(
        kind="mps",
        description=gpu.description,
        names=(f"apple_{slug(gpu.chip)}",),
        cores=gpu.cores,
        half_flops=gpu.flops,
        float32_flops=gpu.flops,
        float64_flops=gpu.flops / SLOW_FLOAT64,
        bandwidth=gpu.bandwidth,
        vendor="apple",
        architecture=gpu.chip.split()[0].lower(),
        warp_size=SIMDGROUP,
    )


class Properties(Protocol):
    """What every release of torch reports about a GPU."""

    @property
    def name(self) -> str: ...
    @property
    def multi_processor_count(self) -> int: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...


def gpu(properties: Properties, hip: bool) -> Device:
    """The facts of a GPU as torch reports them. Releases of torch report different ones; what is missing is assumed."""

    def told(name: str, default: int) -> int:
        return getattr(properties, name, None) or default

    vendor, architecture = ("amd" if hip else "nvidia"), gpu_architecture(properties, hip)
    units, clock = properties.multi_processor_count, told("clock_rate", DEFAULT_CLOCK) * 1e3
    per_cycle = NARROW_FLOAT32_FLOPS if architecture in NARROW_FLOAT32 else FLOAT32_FLOPS_PER_CYCLE
    float32 = units * clock * per_cycle
    memory_clock = told("memory_clock_rate", DEFAULT_MEMORY_CLOCK) * 1e3
    return Device(
        kind="cuda",
        description=properties.name,
        names=(f"{vendor}_{slug(properties.name)}", f"{vendor}_{architecture}"),
        cores=units,
        half_flops=units * clock * TENSOR_FLOPS_PER_CYCLE.get(architecture, DEFAULT_TENSOR_FLOPS),
        float32_flops=float32,
        float64_flops=float32 / (2 if architecture in FULL_FLOAT64 else SLOW_FLOAT64),
        bandwidth=memory_clock
        * told("memory_bus_width", DEFAULT_BUS)
        / 8
        * TRANSFERS_TOLD.get(architecture, TRANSFERS),
        vendor=vendor,
        architecture=architecture,
        shared_memory=told("shared_memory_per_block_optin", DEFAULT_SHARED_MEMORY),
        warp_size=told("warp_size", DEFAULT_WARP),
    )


def gpu_architecture(properties: Properties, hip: bool) -> str:
    """ "sm90" or "gfx942"."""
    if hip:
        return getattr(properties, "gcnArchName", "").partition(":")[0] or "gfx"
    return f"sm{properties.major}{properties.minor}"


def compute_capability(architecture: str) -> tuple[int, int]:
    """(9, 0) of "sm90", NVIDIA's."""
    digits = architecture.removeprefix("sm")
    return int(digits[:-1]), int(digits[-1])


def slug(name: str) -> str:
    """A device's name as part of a file name: lower case, without the vendor, with "_" for all but letters and
    digits."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "_".join(word for word in words if word and word not in ("nvidia", "amd")) or "gpu"
