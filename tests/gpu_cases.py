"""Cases of real sizes and their judgement, for tests that run on a device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from sdpa.testing import Case, problem_of

OURS = ("triton_flash", "triton_efficient")
DENSE = {"bias", "allowed", "dropout"}  # what only triton_efficient says it takes


def real(**sizes):
    usual = {
        "dtype": torch.bfloat16,
        "B": 2,
        "H": 4,
        "Hkv": 4,
        "M": 1024,
        "N": 1024,
        "D": 64,
        "Dv": 64,
        "device": "cuda",
    }
    return Case(**{**usual, **sizes})


def compile_ahead(name, cases, kinds=None):
    """Compile what `cases` launch in as many processes as there are cores: one takes many minutes. Where pytest itself
    has several, each compiles for itself."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if not name.startswith("triton_") or name == "triton_hopper":
        return
    from sdpa.kernels.triton.target import target_of

    kinds = kinds or (("decode",) if name == "triton_decode" else ("forward", "backward"))
    work = [(kind, replace(case, device="cpu")) for case in cases for kind in kinds]
    given, count = pickle.dumps((target_of("cuda:0"), work)), min(len(work), len(os.sched_getaffinity(0)))
    script = Path(__file__).with_name("compile_ahead.py")
    running = [
        subprocess.Popen([sys.executable, script, str(share), str(count)], stdin=subprocess.PIPE)
        for share in range(count)
    ]
    for process in running:
        process.stdin.write(given)
        process.stdin.close()
    assert [process.wait() for process in running] == [0] * count


@contextmanager
def room_for(size, piece=16 << 20):
    """This process may take `size` more bytes of the device. Free pieces of 16 MiB and more that its allocator holds
    are taken meanwhile. Smaller ones remain free."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total, held = torch.cuda.get_device_properties(0).total_memory, []
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        while True:
            try:
                held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def right(found, about):
    assert found and all(c.ok for c in found), f"{about}: " + "; ".join(str(c) for c in found if not c.ok)


def name_for(inputs):
    return OURS[bool(problem_of(inputs, "forward").features & DENSE)]
