"""vmap: the mapped dimension is folded into the batch, so that one kernel call serves all of it."""

from __future__ import annotations

from torch import Tensor

from sdpa.problem import AttentionInputs

FIELDS = AttentionInputs._fields
# Tensors whose first dimension is B, or 1 to broadcast.
BATCHED = {"q", "k", "v", "bias", "allowed", "q_lengths", "k_lengths", "q_segments", "k_segments", "prefix", "alibi"}


def fold_batch(info, in_dims, args, leading: int = 0):
    """Arguments with the vmapped dimension folded into the batch, and the function that unfolds the results.

    `leading` tensors (B, ...) stand before the fields of AttentionInputs. sinks and the bias of a mapped call come out
    per entry, which one call cannot reduce: a mapped `sinks` or a gradient of a broadcast bias is therefore refused.
    """
    S = info.batch_size
    q, q_dim = args[leading], in_dims[leading]
    B = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
    names = ("",) * leading + FIELDS
    folded = []
    for position, value in enumerate(args):
        name = names[position] if position < len(names) else None
        folded.append(fold_one(name, value, in_dims[position], S, B) if isinstance(value, Tensor) else value)
    return folded, lambda results: tuple(unfold_one(r, S, B) for r in results)


def fold_one(name: str | None, value: Tensor, dim: int | None, S: int, B: int) -> Tensor:
    """One tensor (B|1, ...) with a mapped dimension, or shared by all entries, as (S * B, ...)."""
    if name == "rng":
        return value if dim is None else value.movedim(dim, 0)[0]
    if name == "sinks":
        if dim is not None:
            raise RuntimeError("vmap over attention sinks is not supported: map over query, key, value, bias or masks")
        return value
    if dim is None:
        if (value.shape[0] == 1 and B != 1) or (name not in (None, "", "q", "k", "v") and value.shape[0] == 1):
            return value
        return value.unsqueeze(0).expand(S, *value.shape).flatten(0, 1)
    value = value.movedim(dim, 0)
    if value.shape[1] != B:
        value = value.expand(S, B, *value.shape[2:])
    return value.flatten(0, 1)


def unfold_one(result: Tensor, S: int, B: int) -> Tensor:
    if result.shape[0] == S * B:
        return result.unflatten(0, (S, B))
    return result.unsqueeze(0).expand(S, *result.shape)
