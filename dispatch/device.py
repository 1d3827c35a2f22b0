"""What a device is and what it can do at most: vendor, architecture, cores, instruction sets; cached."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

# Operations per cycle and core of a fused multiply-add unit, counted as two: instruction set -> float32.
CPU_FLOPS_PER_CYCLE = {"avx512": 32, "avx2": 32, "neon": 32, "scalar": 4}
DEFAULT_CPU_HERTZ = 3.0e9
DEFAULT_CPU_BANDWIDTH = 20e9  # bytes/s of one core's share of memory

# Dense half-precision operations per cycle and multiprocessor, by compute capability (vendors' data sheets).
TENSOR_FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
DEFAULT_TENSOR_FLOPS = 1024
FLOAT32_FLOPS_PER_CYCLE = 256
HALF_RATE_OF_MEMORY_CLOCK = 2  # double data rate


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

    def peak(self, dtype: torch.dtype) -> float:
        if dtype == torch.float64:
            return self.float64_flops
        return self.float32_flops if dtype == torch.float32 else self.half_flops


def device_of(name: str) -> Device:
    """The device behind "cpu", "cuda:0", ..."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return cpu(torch.get_num_threads())
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


# x86 families and models whose microarchitecture a table was or may be measured on.
ZEN4_MODELS = (*range(0x10, 0x20), *range(0x60, 0x80), *range(0xA0, 0xB0))
AMD_FAMILY_ZEN34 = 25
SAPPHIRE_RAPIDS_MODELS = (0x8F, 0xCF)


def cpu_table_name() -> str:
    info = cpu_info()
    vendor, family, model = (info.get(key, "") for key in ("vendor_id", "cpu family", "model"))
    if vendor == "AuthenticAMD" and family == str(AMD_FAMILY_ZEN34) and int(model or 0) in ZEN4_MODELS:
        return "amd_zen4"
    if vendor == "GenuineIntel" and family == "6" and int(model or 0) in SAPPHIRE_RAPIDS_MODELS:
        return "intel_sapphire_rapids"
    return f"cpu_{cpu_isa()}"


@lru_cache(maxsize=16)
def cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    clock = getattr(properties, "clock_rate", 1_700_000) * 1e3
    per_cycle = TENSOR_FLOPS_PER_CYCLE.get(capability, DEFAULT_TENSOR_FLOPS)
    float32 = properties.multi_processor_count * clock * FLOAT32_FLOPS_PER_CYCLE
    memory_clock = getattr(properties, "memory_clock_rate", 2_600_000) * 1e3
    bus = getattr(properties, "memory_bus_width", 5120) / 8
    slug = properties.name.lower().replace("nvidia", "").replace("amd", "").strip().replace(" ", "_").replace("-", "_")
    vendor = "amd" if torch.version.hip else "nvidia"
    return Device(
        "cuda",
        properties.name,
        (f"{vendor}_{slug}", f"{vendor}_sm{properties.major}{properties.minor}"),
        properties.multi_processor_count,
        properties.multi_processor_count * clock * per_cycle,
        float32,
        float32 / 2,
        memory_clock * bus * HALF_RATE_OF_MEMORY_CLOCK,
    )
