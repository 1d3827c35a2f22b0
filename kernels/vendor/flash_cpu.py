"""torch's CPU flash attention, forward and backward, with the log-sum-exp between them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdpa.kernels.vendor.common import float_mask, is_causal
from sdpa.layout import with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()
LANES = 16  # keys below which torch's maximum leaves out NaN: then a row that has nothing else gets log-sum-exp 0


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
    # torch writes zeros into a row whose scores hold a NaN; the row's log-sum-exp still tells, but for few keys.
    if inputs.k.shape[2] < LANES and (lse == 0.0).any().item():
        lse = lse.masked_fill((lse == 0.0) & sees_only_nan(inputs), torch.nan)
    if math.isnan(lse.sum().item()):
        out = out.masked_fill(torch.isnan(lse).unsqueeze(-1), torch.nan)
    return Results(out, lse if "lse" in problem.features else None)


def sees_only_nan(inputs: AttentionInputs) -> Tensor:
    """Whether every score that a query sees, and there is one, is NaN: [B, H, M]."""
    q, k, mask = inputs.q, inputs.k, float_mask(inputs)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT  # [B, H, M, N], N < LANES
    seen = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        seen, scores = seen & (mask != -torch.inf), scores + mask
    if is_causal(inputs):
        seen = seen & torch.ones_like(seen).tril()
    return seen.any(-1) & (scores.isnan() | ~seen).all(-1)


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
