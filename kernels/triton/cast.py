"""Query, key and value in another dtype by one launch, where three would take longer than the work itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdpa.kernels.triton.launch import Launch, OnDevice, Pass
from sdpa.kernels.triton.recorded import record_pass
from sdpa.layout import is_dense
from sdpa.problem import Tile

BLOCK = 2048
TILE = Tile(1, BLOCK, 4, 1)
LARGEST = 1 << 20  # numbers in one tensor: beyond, memory takes longer than launches, and torch's kernel will do


@triton.jit
def cast_block(source, target, offsets, size):
    numbers = tl.load(source + offsets, offsets < size)
    tl.store(target + offsets, numbers.to(target.dtype.element_ty), offsets < size)


@triton.jit
def cast_kernel(q, k, v, q_cast, k_cast, v_cast, q_size, k_size, v_size, BLOCK: tl.constexpr):
    """A block of one of three tensors. Grid: (blocks of the largest, 3)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        cast_block(q, q_cast, offsets, q_size)
    elif tl.program_id(1) == 1:
        cast_block(k, k_cast, offsets, k_size)
    else:
        cast_block(v, v_cast, offsets, v_size)


def cast_pass(tensors: Sequence[Tensor], dtype: torch.dtype) -> Pass | None:
    """The launch, where all three need it and each fills a piece of memory, whose order its result keeps."""
    sizes = [t.numel() for t in tensors]
    fit = all(t.dtype != dtype and is_dense(t) for t in tensors) and 0 < min(sizes) <= max(sizes) <= LARGEST
    if not fit:
        return None
    read = tuple(t.detach() for t in tensors)
    made = tuple(torch.empty_like(t, dtype=dtype) for t in read)
    grid = (triton.cdiv(max(sizes), BLOCK), len(sizes))
    launch = Launch(cast_kernel, grid, (*read, *made, *sizes, BLOCK), TILE)
    return Pass([launch], read, read, made, lambda read, made: tuple(made))


def record(tensors: Sequence[Tensor], dtype: torch.dtype) -> Callable[..., Any] | None:
    """What casts three tensors of this form again, on a GPU; None where they are cast one by one."""
    work = cast_pass(tensors, dtype)
    return None if work is None else record_pass(work, OnDevice(str(tensors[0].device)))[1]
