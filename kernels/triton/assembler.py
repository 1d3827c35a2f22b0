"""Which assembler makes Hopper's machine code of what Triton compiles.

ptxas 12.8, which Triton 3.6 takes for Hopper, can lose a uniform register: where the bulk engine's copy comes under a
condition, it puts the copy's address into the register of a later product's shared-memory descriptor, and the product
reads wherever that points (seen on an H200 as illegal addresses, first in the forward with lengths at D = 40, Dv = 24).
ptxas 12.9, which the same Triton brings for Blackwell, does not do so, and it knows Hopper as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from triton import knobs

from sdpa.kernels.triton.target import HOPPER, Target

SOUND = (12, 9)
# ptxas' own default, said aloud: Triton keeps what it made under its options, and neither its key nor another kernel's
# may be met by what the other assembler made.
MARK = {"ptx_options": "--opt-level 3"}


def is_sound(tool) -> bool:
    return tool is not None and tuple(map(int, tool.version.split("."))) >= SOUND


def replacement(target: Target) -> str | None:
    """The path of the assembler to take instead of Triton's choice; None where that is sound, or none is at hand."""
    if target.backend != "cuda" or target.arch != HOPPER or is_sound(knobs.nvidia.ptxas):
        return None
    other = getattr(knobs.nvidia, "ptxas_blackwell", None)
    return other.path if is_sound(other) else None


def assembling(path: str | None):
    """A context in which Triton assembles with `path`."""
    return nullcontext() if path is None else taking(path)


@contextmanager
def taking(path: str) -> Iterator[None]:
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        yield
