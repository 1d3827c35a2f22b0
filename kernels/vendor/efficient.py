"""CUTLASS memory-efficient attention as torch ships it, forward and backward, with the gradient of the bias."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.kernels.vendor.common import expanded_mask, is_causal, lse_for_backward, no_cuda, no_rng, settle
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()
LSE_MULTIPLE = 32  # rows of the operator's log-sum-exp are padded to this

unavailable = no_cuda


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        inputs.q,
        inputs.k,
        inputs.v,
        expanded_mask(inputs),
        "lse" in problem.features,
        0.0,
        is_causal(inputs),
        scale=inputs.scale,
    )
    if "lse" not in problem.features:
        lse = lse.new_zeros(1).expand(inputs.q.shape[:3])
    return Results(*settle(inputs, out, lse[:, :, : inputs.q.shape[2]]))


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    wanted = "bias_grad" in problem.features
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        upstream.out,
        inputs.q,
        inputs.k,
        inputs.v,
        expanded_mask(inputs),
        rows_outside(results.out),
        padded_lse(results.lse),
        *no_rng(inputs.q),
        0.0,
        [True, True, True, wanted],
        is_causal(inputs),
        scale=inputs.scale,
    )
    bias = gradients[3].sum_to_size(inputs.bias.shape) if wanted else None
    return Gradients(*gradients[:3], bias)


def padded_lse(lse: Tensor) -> Tensor:
    """The log-sum-exp with its rows filled up as the backward operator expects them."""
    missing = -lse.shape[2] % LSE_MULTIPLE
    return torch.nn.functional.pad(lse_for_backward(lse), (0, missing), value=torch.inf)


def rows_outside(out: Tensor) -> Tensor:
    """`out` in (B, M, H, Dv) memory: the half-precision kernel derives the stride of its rows from the sizes."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)
