"""torch's math: scores in memory, no log-sum-exp, so it answers only calls that need neither gradient nor LSE."""

from __future__ import annotations

import torch

from sdpa.kernels.vendor.common import float_mask, is_causal
from sdpa.layout import like_layout
from sdpa.problem import AttentionInputs, AttentionProblem, Results, Tile
from sdpa.torch_private import without_autocast

TILES: tuple[Tile, ...] = ()


def unavailable() -> str | None:
    return None


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    with without_autocast():
        out, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
            inputs.q,
            inputs.k,
            inputs.v,
            float_mask(inputs),
            0.0,
            is_causal(inputs),
            scale=inputs.scale,
            enable_gqa=inputs.q.shape[1] != inputs.k.shape[1],
        )
    return Results(like_layout(out, inputs.q), None)
