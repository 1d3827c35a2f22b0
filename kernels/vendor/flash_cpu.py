"""torch's CPU flash attention, forward and backward, with the log-sum-exp between them."""

from __future__ import annotations

import math

import torch

from sdpa.kernels.vendor.common import float_mask, is_causal
from sdpa.layout import with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()


def unavailable() -> str | None:
    return (
        None
        if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        else "this torch has no CPU flash"
    )


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        inputs.q, inputs.k, inputs.v, 0.0, is_causal(inputs), attn_mask=float_mask(inputs), scale=inputs.scale
    )
    # torch writes zeros into a row whose scores hold a NaN; the row's log-sum-exp still tells.
    if math.isnan(lse.sum().item()):
        out = out.masked_fill(torch.isnan(lse).unsqueeze(-1), torch.nan)
    return Results(out, lse if "lse" in problem.features else None)


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        with_dense_rows(upstream.out),
        *inputs[:3],
        with_dense_rows(results.out),
        results.lse,
        0.0,
        is_causal(inputs),
        scale=inputs.scale,
    )
    return Gradients(*grads)
