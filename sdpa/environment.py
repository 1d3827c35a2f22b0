"""The environment variables: SDPA_KERNEL, SDPA_CPU_ISA, SDPA_TUNING_DIR. No other file acts by one; `sdpa info` lists
their values."""

from __future__ import annotations

import os
from pathlib import Path


def default_kernel() -> str:
    """SDPA_KERNEL: kernel, family or comma-separated list for the whole process; empty when unset."""
    return os.environ.get("SDPA_KERNEL", "").strip()


class VariableError(ValueError):
    """A variable has an unknown value."""


def cpu_isa() -> str | None:
    """SDPA_CPU_ISA: forces one instruction set of the CPU library ("scalar", "avx2", "avx512", ...)."""
    return os.environ.get("SDPA_CPU_ISA", "").strip() or None


def tuning_dir() -> Path | None:
    """SDPA_TUNING_DIR, or the user's own folder of tuning tables, which is read before the shipped ones. None where the
    user has no home that is known."""
    chosen = os.environ.get("SDPA_TUNING_DIR", "").strip()
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "sdpa" / "tuning_tables"
    except RuntimeError:
        return None
