"""The Metal kernels on CPU tensors: torch's compiler of shaders is the emulator, and `metal_flash` serves the CPU."""

from __future__ import annotations

import pytest
import torch
from metal import emulator

from sdpa import sequences
from sdpa.dispatch.catalog import by_name
from sdpa.dispatch.select import clear_caches
from sdpa.kernels.metal import flash


@pytest.fixture(scope="session", autouse=True)
def emulated():
    """For all tests here: libraries are compiled once."""
    row = by_name()["metal_flash"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.mps, "compile_shader", emulator.compile_shader)
        patch.setattr(torch.mps, "synchronize", lambda: None)
        patch.setattr(flash, "unavailable", lambda: None)
        devices = row.devices
        object.__setattr__(row, "devices", (*devices, "cpu"))  # the row is frozen
        clear_caches()
        yield
        object.__setattr__(row, "devices", devices)
        clear_caches()


@pytest.fixture
def served(monkeypatch):
    """Packed rows and pages are passed on as they are, as on a device with a kernel for them."""
    cpu = frozenset({"cpu"})
    monkeypatch.setattr(sequences, "SERVED", {**sequences.SERVED, "packed": cpu, "paged": cpu, "segments": cpu})
    monkeypatch.setattr(sequences, "keeps_pages", lambda inputs: True)  # of any number of queries, as on its device
    clear_caches()
    yield
    clear_caches()


@pytest.fixture(autouse=True)
def always_poisoned(poisoned_memory):
    """A kernel that leaves a part of its results unwritten, or reads what nobody wrote, shows NaN."""
