"""The specification: attention in plain torch, written for reading, right in float64. Every kernel is judged by it."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa import dense, philox
from sdpa.problem import AttentionInputs, Results

WIDE = torch.float64


def attention(inputs: AttentionInputs, dtype: torch.dtype = WIDE) -> Results:
    """out (B, H, M, Dv) and lse (B, H, M), every step computed and rounded in `dtype`; differentiable by autograd.

    With the inputs' own low precision this is "the same attention done by torch operations" that error budgets are
    measured from.
    """
    q, k, v = (t.to(dtype) for t in inputs[:3])
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = masked_scores(inputs, q, k)  # [B, H, M, N]
    lse = logsumexp(scores, inputs.sinks)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    if inputs.rng is not None:
        keep = philox.keep_mask(inputs.rng, inputs.dropout_p, tuple(weights.shape))
        weights = weights * keep / (1 - inputs.dropout_p)
    return Results(visible_values(inputs, weights, v), lse)


def masked_scores(inputs: AttentionInputs, q: Tensor, k: Tensor) -> Tensor:
    """softcap(scale * q k^T) + bias, and -inf where a query does not see a key."""
    scores = inputs.scale * (q @ k.mT)
    if inputs.softcap:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    added = dense.additive(inputs)
    if added is not None:
        scores = scores + added.to(scores.dtype)
    seen = dense.visible(inputs)
    return scores if seen is None else torch.where(seen, scores, -torch.inf)


def logsumexp(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Natural logarithm of the softmax's denominator, which a sink joins; -inf for a row without keys."""
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:3], -torch.inf)
    dead = (scores == -torch.inf).all(-1)
    safe = scores.masked_fill(dead.unsqueeze(-1), 0.0)
    return torch.logsumexp(safe, -1).masked_fill(dead, -torch.inf)


def visible_values(inputs: AttentionInputs, weights: Tensor, v: Tensor) -> Tensor:
    """weights @ v, where a value hidden by structure contributes nothing, not even 0 * NaN."""
    hidden = dense.structured(inputs)
    if hidden is None or bool(torch.isfinite(v).all()):
        return weights @ v
    pairs = weights.unsqueeze(-1) * v.unsqueeze(2)  # [B, H, M, N, Dv]: small cases only
    return torch.where(hidden.unsqueeze(-1), pairs, 0.0).sum(3)
