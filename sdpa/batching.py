"""vmap: the mapped dimension is folded into the batch, so that one kernel call computes all samples.

Some calls cannot be folded and are computed sample by sample, which is correct and takes as many calls as there are
samples:

- Dropout: its random numbers are counted by batch entry, and must be those of each sample by itself, in every
  derivative.

- Sinks, and packed or paged sequences: they have no batch dimension that would keep samples apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa.problem import AttentionInputs

Dims = Sequence[Any]  # the mapped dimension of each argument; None where samples share it

FIELDS = AttentionInputs._fields
RESULTS = ("out", "lse")
UPSTREAM = ("grad_out", "grad_lse", "out", "lse")
GRADIENTS = ("q", "k", "v", "bias", "sinks")
# Fields (B|1, ...): a size of 1 broadcasts after folding, too.
BROADCAST = {"bias", "allowed", "q_segments", "k_segments", "alibi"}


def map_forward(
    function: Callable[..., Any], info: Any, in_dims: Dims, args: Sequence[Any], names: Sequence[str] = FIELDS
) -> tuple[Tensor, ...]:
    """(out, lse), each (S, ...), of arguments of which some have a mapped dimension of S samples. `names` are those of
    the arguments. `function` may return anything else with one entry per batch entry."""
    if has_no_batch(names, args) or in_dims[names.index("sinks")] is not None:
        return one_by_one(function, info.batch_size, in_dims, args)
    S, B = info.batch_size, batch_of(names, in_dims, args)
    results = function(*fold(names, in_dims, args, S, B))
    return tuple(result.unflatten(0, (S, B)) for result in results)


def map_backward(function: Callable[..., Any], info: Any, in_dims: Dims, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The five gradients, each (S, ...), of AttentionBackward's arguments. What samples share also gets a gradient for
    each sample."""
    names = UPSTREAM + FIELDS
    if has_no_batch(names, args) or args[names.index("sinks")] is not None:
        return one_by_one(function, info.batch_size, in_dims, args)
    S, B = info.batch_size, batch_of(names, in_dims, args)
    position, bias_grad = names.index("bias"), args[len(names)]
    folded = fold(names, in_dims, args, S, B, keep_apart={"bias"} if bias_grad else set())
    present = {"q", "k", "v", "bias"} if bias_grad else {"q", "k", "v"}
    results = []
    for name, result in zip(GRADIENTS, function(*folded), strict=True):
        if name not in present:  # empty: not asked for
            results.append(result.unsqueeze(0).expand(S, *result.shape))
            continue
        unfolded = result.unflatten(0, (S, B))
        if name == "bias" and entries_of(args[position], in_dims[position]) != B:
            unfolded = unfolded.sum(1, keepdim=True)
        results.append(unfolded)
    return tuple(results)


def has_no_batch(names: Sequence[str], args: Sequence[Any]) -> bool:
    """Whether the batch dimension cannot be made longer: with dropout, pages or packed documents."""
    unlike = any(args[names.index(name)] is not None for name in ("cu_q", "block_table"))
    return unlike or args[names.index("dropout_p")] != 0.0


def one_by_one(function: Callable[..., Any], S: int, in_dims: Dims, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """`function` of each sample, and the results stacked."""
    samples = [
        function(*(a if dim is None else a.select(dim, s) for a, dim in zip(args, in_dims, strict=True)))
        for s in range(S)
    ]
    return tuple(torch.stack(results) for results in zip(*samples, strict=True))


def batch_of(names: Sequence[str], in_dims: Dims, args: Sequence[Any]) -> int:
    """B of one sample."""
    position = names.index("q")
    return entries_of(args[position], in_dims[position])


def entries_of(value: Tensor, dim: int | None) -> int:
    """The first size of one sample of `value`."""
    return value.shape[0] if dim is None or dim > 0 else value.shape[1]


def fold(
    names: Sequence[str], in_dims: Dims, args: Sequence[Any], S: int, B: int, keep_apart: Collection[str] = ()
) -> list[Any]:
    """Arguments with the S samples folded into the batch. Those named in `keep_apart` are expanded to an entry for each
    sample."""
    folded = list(args)
    for position, name in enumerate(names):
        value, dim = args[position], in_dims[position]
        if not isinstance(value, Tensor) or name == "sinks":
            continue
        if dim is None and value.shape[0] == 1 and name in BROADCAST and name not in keep_apart:
            continue
        value = value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
        folded[position] = value.expand(S, B, *value.shape[2:]).flatten(0, 1)
    return folded
