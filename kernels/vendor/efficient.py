"""CUTLASS memory-efficient attention as torch ships it, forward and backward, with the gradient of the bias."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.kernels.vendor.common import (
    Native,
    expanded_mask,
    is_causal,
    lse_for_backward,
    no_cuda,
    no_rng,
    scale_option,
    settle,
)
from sdpa.layout import with_dense_rows
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()
LSE_MULTIPLE = 32  # rows of the operator's log-sum-exp are padded to this

unavailable = no_cuda


def native(inputs: AttentionInputs) -> Native:
    """torch's operator without a mask or a log-sum-exp, as torch calls it."""
    options = (None, False, 0.0, True) if is_causal(inputs) else (None, False)
    return torch._scaled_dot_product_efficient_attention, options, scale_option(inputs)


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
    return Results(*settle(inputs, out, lse[:, :, : inputs.q.shape[2]] if "lse" in problem.features else None))


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    wanted = "bias_grad" in problem.features
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        with_dense_rows(upstream.out),
        inputs.q,
        inputs.k,
        inputs.v,
        expanded_mask(inputs),
        rows_outside(results.out),
        padded_lse(inputs, results.lse),
        *no_rng(inputs.q),
        0.0,
        [True, True, True, wanted],
        is_causal(inputs),
        scale=inputs.scale,
    )
    bias = gradients[3].sum_to_size(inputs.bias.shape) if wanted else None
    return Gradients(*gradients[:3], bias)


def padded_lse(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """The log-sum-exp with its rows filled up as the backward operator expects them."""
    lse, missing = lse_for_backward(inputs, lse), -lse.shape[2] % LSE_MULTIPLE
    return torch.nn.functional.pad(lse, (0, missing), value=torch.inf) if missing else lse.contiguous()


def rows_outside(out: Tensor) -> Tensor:
    """`out` in (B, M, H, Dv) memory: the half-precision kernel derives the stride of its rows from the sizes."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)
