"""The kernel `cuda_flash`: flash attention forward for Hopper, in the native library (sm90/flash.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sdpa.kernels.cuda.library import load_error
from sdpa.layout import empty_as
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile

TILES: tuple[Tile, ...] = ()  # each head size has one, in the library


def unavailable() -> str | None:
    return load_error()


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    if inputs.q.numel() == 0 or problem.N == 0:
        out = empty_as(inputs.q, problem.Dv).zero_()
        return Results(out, out.new_full(out.shape[:3], -torch.inf, dtype=torch.float32))
    out, lse = operator()(*inputs[:4], problem.causal, problem.bottom_right)
    return Results(out, lse)


@cache
def operator() -> Callable[..., tuple[Tensor, Tensor]]:
    """The bare operator: a third of the cost of calling it through its packet."""
    reason = load_error()
    if reason is not None:
        raise RuntimeError(f"cuda_flash is not available: {reason}")
    return torch.ops.sdpa_cuda.flash_forward.default._op
