"""The kernel `cuda_flash`: flash attention forward for Hopper, in the native library (sm90/flash.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sdpa.kernels.cuda.library import load_error
from sdpa.layout import empty_as
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Results, Tile

BAND = frozenset({"k_lengths", "q_lengths", "sinks"})  # what instances for bands know beside windows
TILES: tuple[Tile, ...] = ()  # each head size has one, in the library


def unavailable() -> str | None:
    return load_error()


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    if inputs.q.numel() == 0 or problem.N == 0:
        out = empty_as(inputs.q, problem.Dv).zero_()
        lse = out.new_full(out.shape[:3], -torch.inf, dtype=torch.float32)
        return Results(out, lse if inputs.sinks is None else lse.copy_(inputs.sinks[None, :, None].expand_as(lse)))
    if problem.features & BAND or not (problem.left == UNLIMITED and problem.right in (UNLIMITED, 0)):
        out, lse = operators()[1](*inputs[:7], inputs.k_lengths, inputs.q_lengths, sinks_of(inputs))
    else:
        out, lse = operators()[0](*inputs[:4], problem.causal, problem.bottom_right)
    return Results(out, lse)


def sinks_of(inputs: AttentionInputs) -> Tensor | None:
    return None if inputs.sinks is None else inputs.sinks.float().contiguous()


@cache
def operators() -> tuple[Callable[..., tuple[Tensor, Tensor]], ...]:
    """The bare operators, without a band and with one: a third of the cost of calling them through their packets."""
    reason = load_error()
    if reason is not None:
        raise RuntimeError(f"cuda_flash is not available: {reason}")
    library = torch.ops.sdpa_cuda
    return library.flash_forward.default._op, library.flash_forward_band.default._op
