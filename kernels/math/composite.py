"""Attention by torch operations: every feature, any device, differentiable any number of times in either mode.

Low precision is computed in float32, as torch's math does. The score matrix is materialised, so this is the row that
answers when no other can. `forward_terms` and `backward_terms` are plain compositions: autograd, functorch and
torch.compile may differentiate or trace through them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from sdpa import dense, packing, philox
from sdpa.kernels.math.scores import finite, over_group, per_group, quarantine, scores_of
from sdpa.kernels.math.weights import weights
from sdpa.layout import like_layout
from sdpa.problem import AttentionInputs, AttentionProblem, Gradients, Results, Tile
from sdpa.torch_private import profiler_enabled, without_autocast

__all__ = [
    "TILES",
    "backward",
    "backward_terms",
    "forward",
    "forward_terms",
    "needs_whole_rows",
    "unavailable",
    "weights",
]

TILES: tuple[Tile, ...] = ()


class Terms(NamedTuple):
    """What forward and backward share."""

    out: Tensor  # [B, H, M, Dv]
    lse: Tensor  # [B, H, M]
    probabilities: Tensor  # [B, H, M, N], before dropout
    keep: Tensor | None  # [B, H, M, N], dropout's factor: 0 or philox.kept_factor(p)
    slope: Tensor | None  # [B, H, M, N], derivative of softcap
    dead: Tensor | None  # [B, H, M, 1], whether a row sees no key; None where all do
    q: Tensor
    k: Tensor
    v: Tensor


def unavailable() -> str | None:
    return None


def needs_whole_rows(problem: AttentionProblem, lse: Tensor) -> bool:
    """The probabilities are computed anew, from all keys that are given."""
    return True


def named(name: str) -> AbstractContextManager:
    """A range of the profiler, if one is on: kernels have names of their own, a composition has those of its parts."""
    return record_function(name) if profiler_enabled() else nullcontext()


def forward(inputs: AttentionInputs, problem: AttentionProblem, tile: Tile | None) -> Results:
    with without_autocast(), named("sdpa::math_forward"):
        terms = forward_terms(inputs)
        return Results(like_layout(terms.out.to(inputs.q.dtype), inputs.q), terms.lse)


def backward(
    inputs: AttentionInputs, results: Results, upstream: Results, problem: AttentionProblem, tile: Tile | None
) -> Gradients:
    with without_autocast(), named("sdpa::math_backward"):
        return backward_terms(inputs, upstream, "bias_grad" in problem.features)


def forward_terms(inputs: AttentionInputs) -> Terms:
    """softmax(mask(softcap(scale * q k^T) + bias)) v, with 0 and -inf for rows that see no key.

    Packed documents and pages are gathered first; `out` and `lse` are then packed again, the rest is as gathered.
    """
    if packing.is_ordinary(inputs):
        return ordinary_terms(inputs)
    terms = ordinary_terms(packing.ordinary(inputs))
    out, lse = packing.restored(Results(terms.out, terms.lse), inputs)
    return terms._replace(out=out, lse=lse)


def ordinary_terms(inputs: AttentionInputs) -> Terms:
    wide = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    q, k, v = (t.to(wide) for t in inputs[:3])
    structured = dense.structured(inputs)
    k_bad = v_bad = None
    if structured is not None:
        (k, k_bad), (v, v_bad) = quarantine(k), quarantine(v)
    scores, slope = scores_of(inputs, q, k, k_bad)
    probabilities, lse = softmax(scores, None if inputs.sinks is None else inputs.sinks.to(wide))
    keep = None
    if inputs.rng is not None:
        kept = philox.keep_mask(inputs.rng, inputs.dropout_p, tuple(scores.shape))
        keep = kept.to(wide) * philox.kept_factor(inputs.dropout_p)
    weights = probabilities if keep is None else probabilities * keep
    out = per_group(weights, v)
    if v_bad is not None:
        out = out + poison(structured, inputs)
    dead = None
    if structured is not None or inputs.allowed is not None or inputs.bias is not None:
        dead = (probabilities.detach() == 0).all(-1, keepdim=True)
        out = out.masked_fill(dead, 0.0)  # a weight of 0 times NaN is NaN
    return Terms(out, lse, probabilities, keep, slope, dead, q, k, v)


def backward_terms(inputs: AttentionInputs, upstream: Results, bias_grad: bool) -> Gradients:
    """Gradients by the closed formula, recomputing the probabilities so that the result is differentiable again."""
    if inputs.block_table is not None:
        raise RuntimeError("Expected no gradient to be asked for: attention over a paged cache has none.")
    if inputs.cu_q is None:
        return ordinary_gradients(inputs, upstream, bias_grad)
    grads = ordinary_gradients(packing.ordinary(inputs), packing.apart_upstream(upstream, inputs), bias_grad)
    q, k, v = (
        packing.together(grad, cu, source.shape[2])
        for grad, cu, source in zip(grads[:3], (inputs.cu_q, inputs.cu_k, inputs.cu_k), inputs[:3], strict=True)
    )
    return grads._replace(q=q, k=k, v=v)


def ordinary_gradients(inputs: AttentionInputs, upstream: Results, bias_grad: bool) -> Gradients:
    """The same for inputs that are neither packed nor paged."""
    terms = ordinary_terms(inputs)
    grad_out = upstream.out.to(terms.out.dtype)
    delta = (terms.out * grad_out).sum(-1)  # [B, H, M]
    if upstream.lse is not None:
        delta = delta - upstream.lse
    weights = terms.probabilities if terms.keep is None else terms.probabilities * terms.keep
    grad_weights = per_group(grad_out, terms.v.mT)
    if terms.keep is not None:
        grad_weights = grad_weights * terms.keep
    grad_scores = terms.probabilities * (grad_weights - delta.unsqueeze(-1))  # [B, H, M, N]
    q = terms.q
    if terms.dead is not None:
        grad_scores, q = grad_scores.masked_fill(terms.dead, 0.0), q.masked_fill(terms.dead, 0.0)
    grad_bias = grad_sinks = None
    if bias_grad:
        grad_bias = grad_scores.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if inputs.sinks is not None:
        share = torch.exp(inputs.sinks.to(delta.dtype).view(1, -1, 1) - finite(terms.lse))
        grad_sinks = -(share * delta).sum((0, 2)).to(inputs.sinks.dtype)
    if terms.slope is not None:
        grad_scores = grad_scores * terms.slope
    grad_q = per_group(grad_scores, terms.k) * inputs.scale
    grad_k = over_group(grad_scores.mT @ q, inputs) * inputs.scale
    grad_v = over_group(weights.mT @ grad_out, inputs)
    dtype = inputs.q.dtype
    return Gradients(grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), grad_bias, grad_sinks)


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp of the last dimension; a row of -inf gives 0 and -inf, with gradient 0."""
    top = (
        scores.detach().amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    )
    if sinks is not None:
        top = torch.maximum(top, sinks.detach().view(1, -1, 1, 1))
    top = finite(top)
    raised = torch.exp(scores - top)
    total = raised.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(1, -1, 1, 1) - top)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (torch.log(safe) + top).masked_fill(empty, -torch.inf)
    return raised / safe, lse.squeeze(-1)


def poison(structured: Tensor, inputs: AttentionInputs) -> Tensor:
    """[B, H, M, Dv]: the sum of the inf and NaN values a query sees, 0 where it sees none."""
    B, H, M, N = inputs.q.shape[0], inputs.q.shape[1], inputs.q.shape[2], inputs.k.shape[2]
    v = inputs.v.detach()
    kinds = torch.cat([v == torch.inf, v == -torch.inf, torch.isnan(v)], dim=-1)  # [B, Hkv, N, 3 * Dv]
    seen = structured.expand(B, 1, M, N).to(torch.float32) @ kinds.to(torch.float32) > 0  # [B, Hkv, M, 3 * Dv]
    up, down, broken = seen.repeat_interleave(H // inputs.k.shape[1], dim=1).chunk(3, dim=-1)
    zero = torch.zeros_like(up, dtype=torch.float32)
    return zero.masked_fill(up, torch.inf) + zero.masked_fill(down, -torch.inf) + zero.masked_fill(broken, torch.nan)
