"""Nested tensors whose rows do not lie one after the other: jagged ones with holes, and those of torch's strided
layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdpa.inputs import Options

Answer = Callable[[Tensor, Tensor, Tensor, Options], Tensor]


def as_packed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Jagged tensors (B, H, length, D) without rows that belong to no entry, as torch.nested.narrow leaves them. A
    tensor is copied once."""
    made: dict[int, Tensor] = {}
    for tensor in (query, key, value):
        made.setdefault(id(tensor), without_holes(tensor))
    return made[id(query)], made[id(key)], made[id(value)]


def offsets_of(jagged: Any) -> Tensor:
    """The offsets of the entries; torch's annotations do not have this method."""
    return jagged.offsets()


def lengths_of(jagged: Any) -> Tensor | None:
    """The lengths of the entries, where they leave holes; else None."""
    return jagged.lengths()


def without_holes(tensor: Tensor) -> Tensor:
    lengths = lengths_of(tensor) if tensor.is_nested and tensor.layout == torch.jagged else None
    if lengths is None:
        return tensor
    rows = tensor.transpose(1, 2)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    # torch's contiguous() has no derivative for these.
    places = torch.repeat_interleave(offsets_of(rows)[:-1] - offsets[:-1], lengths)
    places = places + torch.arange(places.shape[0], device=places.device)
    packed = rows.values().index_select(0, places)
    return torch.nested.nested_tensor_from_jagged(packed, offsets).transpose(1, 2)


def are_strided(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return all(t.is_nested and t.layout == torch.strided for t in (query, key, value))


def strided_attention(query: Tensor, key: Tensor, value: Tensor, options: Options, answer: Answer) -> Tensor:
    """Strided nested tensors (B, H, length, D) or (B, length, D) by `answer`, which takes jagged (B, H, length, D).

    One call answers entries that have equally many heads; torch's layout also has others, which take a call each.
    """
    entries = entries_of(query, key, value)
    heads = [{entry.shape[0] for entry in some} for some in entries]
    alone = any(len(numbers) > 1 for numbers in heads)
    size = len(entries[0])
    groups = [slice(b, b + 1) for b in range(size)] if alone else [slice(0, size)]
    results: list[Tensor] = []
    for group in groups:
        q, k, v = (as_jagged(some[group]) for some in entries)
        results += answer(q, k, v, options).unbind()
    if query.dim() == 3:
        results = [result.squeeze(0) for result in results]
    return torch.nested.as_nested_tensor(results, layout=torch.strided)


def entries_of(query: Tensor, key: Tensor, value: Tensor) -> list[list[Tensor]]:
    """The entries (H, length, D) of each tensor, checked."""
    dims, sizes = (tuple(get(t) for t in (query, key, value)) for get in (Tensor.dim, lambda t: t.size(0)))
    if len(set(dims)) != 1 or dims[0] not in (3, 4):
        raise RuntimeError(
            "Expected strided nested tensors of 4 dimensions (batch, H, length, D) or 3 (batch, length, D), but got "
            f"{dims[0]}, {dims[1]} and {dims[2]} for query, key and value."
        )
    if len(set(sizes)) != 1:
        raise RuntimeError(
            f"Expected query, key and value to have the same batch size, but got {sizes[0]}, {sizes[1]} and {sizes[2]} "
            "nested tensors."
        )
    tensors = (query, key, value)
    return [[t.unsqueeze(0) if dims[0] == 3 else t for t in tensor.unbind()] for tensor in tensors]


def as_jagged(entries: list[Tensor]) -> Tensor:
    """(batch, H, length, D) of entries (H, length, D); gradients pass."""
    rows = [entry.transpose(0, 1) for entry in entries]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
