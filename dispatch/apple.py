"""Apple's GPUs: which one is here or asked about, its cores, and its peaks as public figures have them.

Every peak is an estimate: nothing here was measured by us. GPU cores and bandwidth are those of Apple's own
specifications, of each chip's largest configuration. Clocks are those that reviews of the chips report, right to some
ten per cent. A core multiplies and adds 128 float32 numbers in a cycle.
"""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from typing import NamedTuple

import torch

# Operations of one core in a cycle: 128 fused multiply-adds, each counted as two. float16 and bfloat16 matrices have no
# faster units up to the M4. The M5's (neural accelerators) are reached by Metal 4's tensor operations alone, which no
# kernel of ours uses.
FLOPS_PER_CYCLE = 256
# Hertz, by generation (reviews).
CLOCKS = {"M1": 1.28e9, "M2": 1.40e9, "M3": 1.38e9, "M4": 1.58e9, "M5": 1.58e9}
# The cores of a GPU and bytes/s (Apple's specifications).
CHIPS = {
    "M1": (8, 68e9), "M1 Pro": (16, 200e9), "M1 Max": (32, 400e9), "M1 Ultra": (64, 800e9),
    "M2": (10, 100e9), "M2 Pro": (19, 200e9), "M2 Max": (38, 400e9), "M2 Ultra": (76, 800e9),
    "M3": (10, 100e9), "M3 Pro": (18, 150e9), "M3 Max": (40, 400e9), "M3 Ultra": (80, 819e9),
    "M4": (10, 120e9), "M4 Pro": (20, 273e9), "M4 Max": (40, 546e9),
    "M5": (10, 153e9), "M5 Pro": (20, 307e9), "M5 Max": (40, 614e9),
}  # fmt: skip
# What is assumed where nothing tells the chip: a frequent one, neither the slowest nor the fastest.
ASSUMED = "M2"
# A newer chip than the table knows counts as the newest of its size.
NEWEST = "M5"
# macOS 14 has Metal 3.1, the first with bfloat16.
BFLOAT16_MACOS = (14, 0)
APPLE_PROCESSOR = "arm64"
NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)  # torch's words


class Gpu(NamedTuple):
    """A GPU by its chip's name in CHIPS."""

    chip: str
    cores: int
    newer: str = ""  # what the chip is called that it stands for, where CHIPS does not have it

    @property
    def flops(self) -> float:
        """Operations/s in float32, float16 and bfloat16."""
        return self.cores * FLOPS_PER_CYCLE * CLOCKS[self.chip.split()[0]]

    @property
    def bandwidth(self) -> float:
        return CHIPS[self.chip][1]

    @property
    def description(self) -> str:
        standing = f", in place of {self.newer}" if self.newer else ""
        return f"Apple {self.chip} ({self.cores} GPU cores{standing})"


def gpu(name: str) -> Gpu:
    """The GPU behind "mps" or "mps:0": the one that is here, else an assumed one. "mps:M4 Max" asks about a chip."""
    index = name.partition(":")[2]
    if index and not index.isdigit():
        chip = chip_of(index)
        return Gpu(chip, CHIPS[chip][0])
    return here() if is_available() else Gpu(ASSUMED, CHIPS[ASSUMED][0])


def chip_of(text: str) -> str:
    """A name of CHIPS, from what a user writes: "m4 max", "M4-Max". Raises ValueError with those there are."""
    words = text.replace("-", " ").replace("_", " ").split()
    wanted = " ".join(word.upper() if word[:1] in "mM" and word[1:].isdigit() else word.title() for word in words)
    if wanted not in CHIPS:
        raise ValueError(f"expected a chip of Apple's, one of {', '.join(CHIPS)}, got {text!r}")
    return wanted


@cache
def here() -> Gpu:
    """The GPU of this machine."""
    name = processor()
    chip = known_chip(name)
    cores = core_count() or CHIPS[chip][0]
    return Gpu(chip, cores, "" if f"Apple {chip}" == name else name or "an unknown chip")


def known_chip(name: str) -> str:
    """The chip of CHIPS in "Apple M2 Max"; for a newer one the newest of that size, else the assumed one."""
    words = name.removeprefix("Apple ").split()
    if not words or not (words[0][:1] == "M" and words[0][1:].isdigit()):
        return ASSUMED
    size = words[1] if len(words) > 1 and words[1] in ("Pro", "Max", "Ultra") else ""
    for generation in (words[0], NEWEST, "M3"):  # the last Ultra is an M3
        chip = f"{generation} {size}".strip()
        if chip in CHIPS:
            return chip
    return ASSUMED


@cache
def processor() -> str:
    """What macOS calls the processor, as "Apple M2 Max"; empty elsewhere."""
    try:
        said = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def core_count() -> int:
    """The GPU's cores as torch tells them; 0 where it does not."""
    ask = getattr(torch.backends.mps, "get_core_count", None)
    try:
        return int(ask()) if ask is not None else 0
    except (AttributeError, RuntimeError):
        return 0


def why_estimated(name: str) -> str | None:
    """Why the GPU behind a name is not the one of this machine, as a clause; None where it is."""
    index = name.partition(":")[2]
    if index and not index.isdigit():
        return "which was named"
    absent = absence()
    return None if absent is None else f"which is assumed, because {absent}"


def is_available() -> bool:
    return torch.backends.mps.is_available()


def absence() -> str | None:
    """Why torch has no MPS device on this machine, or None."""
    if is_available():
        return None
    if not torch.backends.mps.is_built():
        return "this torch was built without MPS, which only torch for macOS has"
    return "torch sees no MPS device, for which it wants macOS 14 or newer on Apple silicon"


def machine() -> str:
    """The processor's instruction set, as macOS names it."""
    return platform.machine()


def is_apple_silicon() -> bool:
    return machine() == APPLE_PROCESSOR


@cache
def macos() -> tuple[int, int] | None:
    """The version of macOS; None elsewhere."""
    parts = platform.mac_ver()[0].split(".")
    return (int(parts[0]), int(parts[1]) if len(parts) > 1 else 0) if parts[0] else None
