"""The specification: attention in plain torch, written for reading, right in float64. Every kernel is compared with
it."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa import dense, packing, philox
from sdpa.problem import AttentionInputs, Results

WIDE = torch.float64


def attention(inputs: AttentionInputs, dtype: torch.dtype = WIDE) -> Results:
    """out (B, H, M, Dv) and lse (B, H, M), every step computed and rounded in `dtype`; differentiable by autograd.

    With the inputs' own low precision this is "the same attention done by torch operations" that error budgets are
    measured from. Packed documents and paged keys are gathered into batch entries first.
    """
    if not packing.is_ordinary(inputs):
        return packing.restored(attention(packing.ordinary(inputs), dtype), inputs)
    q, k, v = (t.to(dtype) for t in inputs[:3])
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = masked_scores(inputs, q, k)  # [B, H, M, N]
    weights, lse = softmax(scores, inputs.sinks)
    if inputs.rng is not None:
        B, H, M, N = weights.shape
        keep = philox.keep_mask(inputs.rng, inputs.dropout_p, (B, H, M, N))
        weights = weights * keep * philox.kept_factor(inputs.dropout_p)
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


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over keys, whose denominator a sink joins, and its logarithm; 0 and -inf for a row without keys.

    The largest score is taken off first and added to the logarithm last: where it is huge (a mask of the lowest finite
    number), exp(score - lse) would lose the number of keys.
    """
    columns = scores
    if sinks is not None:
        columns = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    if columns.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:3], -torch.inf)
    top = columns.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.exp(columns - top).sum(-1, keepdim=True)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    lse = (top + torch.log(total)).masked_fill(dead, -torch.inf)
    return torch.exp(scores - top) / total, lse.squeeze(-1)


def visible_values(inputs: AttentionInputs, weights: Tensor, v: Tensor) -> Tensor:
    """weights @ v, where a value hidden by structure contributes nothing, not even 0 * NaN."""
    hidden = dense.structured(inputs)
    if hidden is None or bool(torch.isfinite(v).all()):
        return weights @ v
    pairs = weights.unsqueeze(-1) * v.unsqueeze(2)  # [B, H, M, N, Dv]: small cases only
    return torch.where(hidden.unsqueeze(-1), pairs, 0.0).sum(3)
