"""Packed and paged calls of DTensors: each rank computes its own heads, or its own sequences of a paged cache.

Where documents begin and which pages belong to them is index arithmetic, of which DTensor has no strategies. So the
call is made of the ranks' local tensors, and its results are DTensors again. Gradients pass through both steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from sdpa.mask import Mask
from sdpa.validate import Call
from sdpa.validate_sequences import Pages

HEADS, SEQUENCES = "heads", "sequences"
# The dimensions of heads and of sequences, of the fields of masks.
MASK_DIMENSIONS: dict[str, tuple[int | None, int | None]] = {
    "lengths": (None, 0),
    "query_lengths": (None, 0),
    "prefix": (None, 0),
    "alibi": (-1, 0),
}


def as_distributed(tensor: Tensor) -> DTensor:
    """The same, for who reads types: `sharded` has seen to it."""
    assert isinstance(tensor, DTensor)
    return tensor


class Local:
    """The tensors of one call on this rank, for what each dimension of the mesh shards."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.query = as_distributed(call.query)
        self.mesh: DeviceMesh = self.query.device_mesh
        self.paged = isinstance(call.places, Pages)
        self.packed = self.query.dim() == 3
        self.query_heads = 1 if self.packed else 2
        self.key_heads = 2 if self.paged else 1
        self.ways = [self.way(placement) for placement in self.query.placements]
        along = math.prod(self.mesh.size(i) for i, way in enumerate(self.ways) if way == HEADS)
        H, Hkv = self.query.shape[self.query_heads], call.key.shape[self.key_heads]
        if Hkv % along or H % along:
            self.ways = [None if way == HEADS else way for way in self.ways]

    def way(self, placement: Placement) -> str | None:
        if placement.is_shard(self.query_heads):
            return HEADS
        return SEQUENCES if not self.packed and placement.is_shard(0) else None

    def placements(self, heads: int | None, sequences: int | None) -> list[Placement]:
        dims = {HEADS: heads, SEQUENCES: sequences}
        found = (None if way is None else dims[way] for way in self.ways)
        return [Replicate() if dim is None else Shard(dim) for dim in found]

    def local(self, tensor: Any, heads: int | None, sequences: int | None) -> Tensor:
        """This rank's part. What is whole on every rank has a part of its gradient on each."""
        heads = heads if heads is None else heads % tensor.dim()
        sequences = None if sequences is not None and tensor.dim() == 1 and heads == 0 else sequences  # slopes (H,)
        at = self.placements(heads, sequences)
        of_gradient = [
            Partial() if way is not None and not placement.is_shard() else placement
            for way, placement in zip(self.ways, at, strict=True)
        ]
        found: Tensor = tensor.redistribute(self.mesh, at).to_local(grad_placements=of_gradient)
        return found

    def whole(self, tensor: Any) -> Tensor | None:
        return None if tensor is None else self.local(tensor, None, None)

    def mask(self, mask: Mask) -> Mask:
        given = {f.name: getattr(mask, f.name) for f in fields(mask)}
        found = {
            name: self.local(value, *MASK_DIMENSIONS[name])
            for name, value in given.items()
            if isinstance(value, DTensor) and name in MASK_DIMENSIONS
        }
        return mask.replace(**found)

    def arguments(self) -> Call:
        key, value = (self.local(t, self.key_heads, None) for t in self.call[1:3])
        options, places = self.call.options, self.call.places
        mask = options.attn_mask
        options = options._replace(
            attn_mask=self.mask(mask) if isinstance(mask, Mask) else mask,
            sinks=None if options.sinks is None else self.local(options.sinks, 0, None),
        )
        if self.paged:
            table, lengths = (self.local(t, None, 0) for t in places[:2])
            places = places._replace(block_table=table, lengths=lengths, cu_q=self.whole(places.cu_q))
        else:
            cu_q = self.whole(places.cu_q)
            cu_k = cu_q if places.cu_k is places.cu_q else self.whole(places.cu_k)
            places = places._replace(cu_q=cu_q, cu_k=cu_k)
        return Call(self.local(self.query, self.query_heads, 0), key, value, options, places)

    def results(self, found: Any, returns_lse: bool) -> Any:
        out, lse = found if returns_lse else (found, None)
        entries, heads = self.query.shape[0], self.query.shape[self.query_heads]
        whole = [*self.query.shape[:-1], out.shape[-1]]
        out = self.of_mesh(out, whole, self.placements(self.query_heads, 0))
        if lse is None:
            return out
        if self.packed:  # (H, T)
            return out, self.of_mesh(lse, [heads, entries], self.placements(0, None))
        return out, self.of_mesh(lse, [entries, heads, self.query.shape[1]], self.placements(1, 0))

    def of_mesh(self, local: Tensor, shape: list[int], placements: list[Placement]) -> DTensor:
        """Ranks may have different numbers of sequences, so that the whole's shape has to be told."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return DTensor.from_local(
            local.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )


def attend(answer: Callable[[Call], Any], call: Call, returns_lse: bool) -> Any:
    """The results of a packed or paged call by `answer` of this rank's tensors. Raises RuntimeError with dropout."""
    if call.options.dropout_p:
        raise RuntimeError("Dropout of packed or paged DTensors is not supported: each rank would drop other weights.")
    own = Local(call)
    return own.results(answer(own.arguments()), returns_lse)
