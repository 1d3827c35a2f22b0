"""Attention together with its weights: the fused forward, and the weights from its log-sum-exp without a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.autograd import Weights, apply, below_autograd, composite_weights, is_transformed
from sdpa.decomposed import is_decomposed
from sdpa.dispatch.context import request_text
from sdpa.functional import dropped, run
from sdpa.inputs import Options, build_inputs
from sdpa.interop import cast_for_autocast, under_autocast
from sdpa.layout import unexpanded
from sdpa.ops import WEIGHTS
from sdpa.problem import AttentionInputs

FAR = -64.0  # from here on float32's rounding of a log-sum-exp passes 1e-5


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, options: Options, average: bool) -> tuple[Tensor, Tensor]:
    """(out (B, H, M, Dv), weights (B, M, N), or (B, H, M, N) unless `average`) after dropout; both differentiable."""
    if under_autocast(q):
        device_type = q.device.type
        q, k, v, options = cast_for_autocast(q, k, v, options, device_type)
        with torch.autocast(device_type, enabled=False):
            return attention_with_weights(q, k, v, options, average)
    inputs, request = build_inputs(q, k, v, options), request_text(None)
    inputs = inputs._replace(bias=lifted(inputs.bias))
    results = run(inputs, True, request)
    weights = weights_of(inputs, results.lse, average, request)
    if options.dropout_p == 1.0:
        weights = torch.zeros_like(weights)
    return dropped(results, options).out, weights


def lifted(bias: Tensor | None) -> Tensor | None:
    """The bias with its far negative rows, as of padding by -1e9, brought to 0: a row's offset changes no weight, but
    in the log-sum-exp it would drown the logarithm of the sum. One more tensor of the size that the bias has in memory,
    since looking first whether there is such a row would wait for the device."""
    if bias is None:
        return None
    if not bias.requires_grad:
        bias = unexpanded(bias)
    top = bias.detach().amax(-1, keepdim=True)
    return bias - top.masked_fill((top > FAR) | ~torch.isfinite(top), 0.0)


def weights_of(inputs: AttentionInputs, lse: Tensor, average: bool, request: str) -> Tensor:
    """exp(score - lse) in the query's dtype; a row that sees no key has weights of 0. By a kernel, but under functorch
    and in forward mode by the composition of operations, through which those see."""
    if is_decomposed():
        return composite_weights(inputs, lse, average)
    if torch.compiler.is_compiling():
        return WEIGHTS(lse, *inputs, average, request)
    if is_transformed():
        return composite_weights(inputs, lse, average)
    if torch.is_grad_enabled() and lse.requires_grad:
        # These get no gradient here; compiled autograd cannot add None to one.
        sinks = None if inputs.sinks is None else inputs.sinks.detach()
        given = inputs._replace(v=inputs.v.detach(), sinks=sinks)
        return apply(Weights, *given, request, lse, average)
    with below_autograd():
        return WEIGHTS(lse, *inputs, average, request)
