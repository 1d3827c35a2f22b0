"""The kernel `cpu_flash`: fused attention, forward and backward, in the native library."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sdpa.kernels.cpu.library import load_error
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES = (Tile(192, 64), Tile(96, 64), Tile(384, 64), Tile(192, 128))

OPTIONS = AttentionInputs._fields[AttentionInputs._fields.index("bias") :]
PLAIN = tuple(AttentionInputs._field_defaults[name] for name in OPTIONS)
FIRST_OPTION = AttentionInputs._fields.index("bias")


def unavailable() -> str | None:
    return load_error()


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None = None) -> Results:
    call = _operator("flash_forward")
    if inputs[FIRST_OPTION:] == PLAIN and (tile is None or tile is TILES[0]):
        out, lse = call(*inputs[:FIRST_OPTION])
    else:
        out, lse = call(*inputs[:FIRST_OPTION], **_options(inputs, tile))
    return Results(out, lse)


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None = None
) -> Gradients:
    q, k, v, *band = inputs[:FIRST_OPTION]
    bias_grad = "bias_grad" in problem.features
    dq, dk, dv, dbias, dsinks = _operator("flash_backward")(
        upstream.out, q, k, v, results.out, results.lse, *band,
        grad_lse=upstream.lse, bias_grad=bias_grad, **_options(inputs, tile),
    )  # fmt: skip
    return Gradients(dq, dk, dv, dbias if bias_grad else None, None if inputs.sinks is None else dsinks)


@cache
def _operator(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The bare operator: a third of the cost of calling it through its packet."""
    reason = load_error()
    if reason is not None:
        raise RuntimeError(f"cpu_flash is not available: {reason}")
    return getattr(torch.ops.sdpa_cpu, name).default._op


def _options(inputs: AttentionInputs, tile: Tile | None) -> dict[str, Tensor | float | int]:
    """The optional arguments that are there, by name."""
    given = {name: value for name, value in zip(OPTIONS, inputs[FIRST_OPTION:], strict=True) if value is not None}
    if tile is not None:
        given.update(block_m=tile.BLOCK_M, block_n=tile.BLOCK_N)
    return given
