"""Which assembler makes Hopper's machine code of what Triton compiles.

ptxas 12.8, which Triton 3.6 takes for Hopper, can lose a uniform register: where a TMA copy comes under a condition, it
puts the copy's address into the register of a later product's shared-memory descriptor, and the product reads wherever
that points (seen on an H200 as illegal addresses, first in the forward with lengths at D = 40, Dv = 24).
ptxas 12.9, which the same Triton brings for Blackwell, does not do so, and it knows Hopper as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from triton import knobs

from sdpa.kernels.triton.target import HOPPER

SOUND = (12, 9)
# The default of ptxas, given explicitly. Triton keeps what it made under its options, and must not take what the other
# assembler made of the same kernel for this one's.
MARK = {"ptx_options": "--opt-level 3"}
LOCK = threading.RLock()


def assembler_for(kernel: Any, backend: str, arch: int | str) -> str | None:
    """The path of the assembler to take instead of Triton's choice; None where that will do, or no other is at hand.

    Kernels in Gluon copy under no condition, and their order of instructions was measured as Triton's choice makes it.
    """
    if backend != "cuda" or arch != HOPPER or kernel.is_gluon():
        return None
    return sound_assembler()


@lru_cache(maxsize=1)
def sound_assembler() -> str | None:
    if is_sound(knobs.nvidia.ptxas):
        return None
    other = getattr(knobs.nvidia, "ptxas_blackwell", None)
    return other.path if is_sound(other) else None


def is_sound(tool: Any) -> bool:
    """Whether an assembler (path, version) is new enough."""
    return tool is not None and tuple(map(int, tool.version.split("."))) >= SOUND


def assembling(path: str | None):
    """A context in which Triton assembles with `path`, if there is one."""
    return nullcontext() if path is None else taking(path)


@contextmanager
def taking(path: str) -> Iterator[None]:
    """Like `knobs.nvidia.scope()`, which asks the environment for a dozen variables, at a tenth of its time."""
    chosen = vars(knobs.nvidia)
    with LOCK:
        before = chosen.get("ptxas")
        chosen["ptxas"] = path
        try:
            yield
        finally:
            if before is None:
                del chosen["ptxas"]
            else:
                chosen["ptxas"] = before
