"""Attention together with its weights: the fused forward, and the weights from its log-sum-exp without a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.dense import additive, visible
from sdpa.dispatch.context import request_text
from sdpa.functional import dropped, run
from sdpa.inputs import Options, build_inputs
from sdpa.interop import cast_for_autocast, under_autocast
from sdpa.philox import keep_mask
from sdpa.problem import AttentionInputs


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, options: Options, average: bool) -> tuple[Tensor, Tensor]:
    """(out (B, H, M, Dv), weights (B, M, N), or (B, H, M, N) unless `average`) after dropout; both differentiable."""
    if under_autocast(q):
        device_type = q.device.type
        q, k, v, options = cast_for_autocast(q, k, v, options, device_type)
        with torch.autocast(device_type, enabled=False):
            return attention_with_weights(q, k, v, options, average)
    inputs = build_inputs(q, k, v, options)
    results = run(inputs, True, request_text(None))
    weights = weights_of(inputs, results.lse, options.dropout_p)
    return dropped(results, options).out, weights.mean(1) if average else weights


def weights_of(inputs: AttentionInputs, lse: Tensor, dropout_p: float) -> Tensor:
    """exp(score - lse) [B, H, M, N] in the query's dtype; a row that sees no key has weights of 0."""
    bias, seen = additive(inputs), visible(inputs)
    if bias is not None or seen is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of rows that see nothing
    powers = exponents(inputs, lse, bias)
    if seen is not None:  # before the power, which overflows for what is hidden and would make NaN of its gradient
        powers = powers.masked_fill(~seen, -torch.inf)
    weights = torch.exp(powers).to(inputs.q.dtype)
    if dropout_p == 0.0:
        return weights
    if dropout_p == 1.0:
        return torch.zeros_like(weights)
    return weights * keep_mask(inputs.rng, dropout_p, weights.shape) / (1.0 - dropout_p)


def exponents(inputs: AttentionInputs, lse: Tensor, bias: Tensor | None) -> Tensor:
    """scale q k^T + bias - lse [B, H, M, N], at least in float32: the fused forward's log-sum-exp is that of sums in
    float32, and against scores rounded to half precision the weights of a row would not add up to 1."""
    q, k = (t.to(lse.dtype).flatten(0, 1) for t in (inputs.q, inputs.k))
    shape = (*inputs.q.shape[:3], inputs.k.shape[2])
    start = -lse.unsqueeze(-1) if bias is None else bias - lse.unsqueeze(-1)
    return torch.baddbmm(start.expand(shape).flatten(0, 1), q * inputs.scale, k.mT).view(shape)
