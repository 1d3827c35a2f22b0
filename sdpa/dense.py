"""The definition of every mask, as an M x N tensor. Tests, the reference and the math kernel read masks through this
file."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.problem import UNLIMITED, AttentionInputs


def visible(inputs: AttentionInputs) -> Tensor | None:
    """Bool, broadcastable to (B, H, M, N): which keys each query sees; None when it sees all."""
    parts = [structured(inputs)]
    if inputs.allowed is not None:
        parts.append(inputs.allowed)
    return conjunction(parts)


def structured(inputs: AttentionInputs) -> Tensor | None:
    """The part of `visible` that comes from positions, lengths and segments, broadcastable to (B, 1, M, N)."""
    parts = [band(inputs)]
    if inputs.k_lengths is not None:
        parts.append(columns(inputs) < per_batch(inputs.k_lengths))
    if inputs.q_lengths is not None:
        parts.append(rows(inputs) < per_batch(inputs.q_lengths))
    if inputs.q_segments is not None and inputs.k_segments is not None:
        parts.append(inputs.q_segments[:, None, :, None] == inputs.k_segments[:, None, None, :])
    return conjunction(parts)


def band(inputs: AttentionInputs) -> Tensor | None:
    """Causal mask and window around the diagonal, and the prefix every query sees."""
    if inputs.left == UNLIMITED and inputs.right == UNLIMITED:
        return None
    distance = columns(inputs) - rows(inputs) - shift(inputs)  # [B|1, 1, M, N]
    seen = conjunction(
        [
            distance >= -inputs.left if inputs.left != UNLIMITED else None,
            distance <= inputs.right if inputs.right != UNLIMITED else None,
        ]
    )
    if inputs.prefix is not None and seen is not None:
        return seen | (columns(inputs) < per_batch(inputs.prefix))
    return seen


def additive(inputs: AttentionInputs) -> Tensor | None:
    """What is added to the scores, broadcastable to (B, H, M, N): the bias minus ALiBi's penalty."""
    if inputs.alibi is None:
        return inputs.bias
    distance = (columns(inputs) - rows(inputs) - shift(inputs)).abs()
    penalty = inputs.alibi[:, :, None, None] * distance.to(torch.promote_types(inputs.q.dtype, torch.float32))
    return -penalty if inputs.bias is None else inputs.bias - penalty


def shift(inputs: AttentionInputs) -> Tensor | int:
    """How far the diagonal is moved to the right: 0, or with bottom_right the key length minus the query length."""
    if not inputs.bottom_right:
        return 0
    M, N = inputs.q.shape[2], inputs.k.shape[2]
    keys = N if inputs.k_lengths is None else per_batch(inputs.k_lengths)
    queries = M if inputs.q_lengths is None else per_batch(inputs.q_lengths)
    return keys - queries


def rows(inputs: AttentionInputs) -> Tensor:
    return torch.arange(inputs.q.shape[2], device=inputs.q.device).view(1, 1, -1, 1)


def columns(inputs: AttentionInputs) -> Tensor:
    return torch.arange(inputs.k.shape[2], device=inputs.q.device).view(1, 1, 1, -1)


def per_batch(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def conjunction(parts: list[Tensor | None]) -> Tensor | None:
    """The conjunction of the parts that are not None; None without any."""
    result = None
    for part in parts:
        if part is not None:
            result = part if result is None else result & part
    return result
