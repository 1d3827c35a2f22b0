"""Scores by torch operations, and products of heads that share keys: of attention and of its weights alike."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa import dense
from sdpa.problem import AttentionInputs


def scores_of(inputs: AttentionInputs, q: Tensor, k: Tensor, k_bad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[B, H, M, N] scores with -inf where hidden, and the derivative of softcap where there is one."""
    scores, slope = per_group(q, k.mT) * inputs.scale, None
    if inputs.softcap:
        capped = torch.tanh(scores / inputs.softcap)
        scores, slope = inputs.softcap * capped, 1 - capped * capped
    added = dense.additive(inputs)
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if k_bad is not None:
        scores = scores + spread(k_bad, inputs).mT
    seen = dense.visible(inputs)
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)), slope


def finite(values: Tensor) -> Tensor:
    """-inf replaced by 0, so that a row without keys subtracts nothing; NaN stays."""
    return values.masked_fill(values == -torch.inf, 0.0)


def per_group(x: Tensor, y: Tensor) -> Tensor:
    """x @ y with x (B, H, M, .) and y (B, Hkv, ., .): the heads of a group share y, which is not repeated."""
    H, Hkv = x.shape[1], y.shape[1]
    if H == Hkv:
        return x @ y
    grouped = x.reshape(x.shape[0], Hkv, (H // Hkv) * x.shape[2], x.shape[3])
    return (grouped @ y).reshape(*x.shape[:3], y.shape[-1])


def scaled_scores_less(q: Tensor, k: Tensor, scale: float, base: Tensor) -> Tensor:
    """[B, H, M, N] q k^T scale - base, of base [B, H, M, 1], in one pass over the result."""
    B, H, M, D = q.shape
    Hkv, N = k.shape[1:3]
    heads, rows = B * Hkv, H // Hkv * M
    keys = k.reshape(heads, N, D).mT
    found = torch.baddbmm(-base.reshape(heads, rows, 1), q.reshape(heads, rows, D), keys, alpha=scale)
    return found.reshape(B, H, M, N)


def over_group(per_head: Tensor, inputs: AttentionInputs) -> Tensor:
    """(B, H, N, .) summed over the heads of each group to (B, Hkv, N, .)."""
    B, H = per_head.shape[:2]
    Hkv = inputs.k.shape[1]
    return per_head if H == Hkv else per_head.reshape(B, Hkv, H // Hkv, *per_head.shape[2:]).sum(2)


def quarantine(values: Tensor) -> tuple[Tensor, Tensor]:
    """Non-finite entries as 0, and where they were: 0 * NaN must not reach the queries they are hidden from."""
    bad = ~torch.isfinite(values)
    return values.masked_fill(bad, 0.0), bad


def spread(bad: Tensor, inputs: AttentionInputs) -> Tensor:
    """[B, H, N, 1]: NaN for keys that hold a non-finite value, 0 for the others."""
    flagged = bad.any(-1, keepdim=True)
    column = torch.zeros_like(flagged, dtype=torch.float32).masked_fill(flagged, torch.nan)
    return column.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
