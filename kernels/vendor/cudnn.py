"""cuDNN's fused attention through torch's operators, forward and backward."""

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
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile

TILES: tuple[Tile, ...] = ()


def unavailable() -> str | None:
    if reason := no_cuda():
        return reason
    return None if torch.backends.cudnn.is_available() else "torch was built without cuDNN"


def native(inputs: AttentionInputs) -> Native:
    """torch's operator without a mask or a log-sum-exp, as torch calls it."""
    options = (None, False, 0.0, True) if is_causal(inputs) else (None, False)
    return torch._scaled_dot_product_cudnn_attention, options, scale_option(inputs)


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    results = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        inputs.q, inputs.k, inputs.v, expanded_mask(inputs), True, 0.0, is_causal(inputs), False, scale=inputs.scale
    )
    B, H, M = inputs.q.shape[:3]
    return Results(*settle(inputs, results[0], results[1].view(B, H, M)))


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    out = gapless(results.out)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        in_order_of(out, upstream.out),
        inputs.q,
        inputs.k,
        inputs.v,
        out,
        lse_for_backward(inputs, results.lse).contiguous().unsqueeze(-1),  # hooks may return one with gaps
        *no_rng(inputs.q),
        expanded_mask(inputs),
        None,
        None,
        inputs.q.shape[2],
        inputs.k.shape[2],
        0.0,
        is_causal(inputs),
        scale=inputs.scale,
    )
    return Gradients(*gradients)


def gapless(out: Tensor) -> Tensor:
    """`out` without gaps in memory, as the forward makes it; what hooks of saved tensors return may have some, and then
    no gradient could be in the same order."""
    return out if out.is_contiguous() or out.transpose(1, 2).is_contiguous() else out.contiguous()


def in_order_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """The gradient of `out` in its memory order: torch 2.11 hands cuDNN another one, or one that repeats, with wrong
    strides, and the gradients of q, k and v are then wrong numbers."""
    return grad_out if grad_out.stride() == out.stride() else torch.empty_like(out).copy_(grad_out)
