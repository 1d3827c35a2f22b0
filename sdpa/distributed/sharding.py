"""How our operators are sharded where their arguments are DTensors: by batch entries, by heads, or not at all.

Importing this registers the strategies (`register_sharding`); `sdpa.sharded` imports it when it first sees a DTensor.
DTensor chooses among them for each dimension of the mesh by what it has to send. What is sharded otherwise, as along
the sequence, is gathered first.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sdpa.operators import of_backward, of_forward, of_weights
from sdpa.problem import AttentionInputs

Placements = list[Placement | None]
Strategy = tuple[Placements, Placements]  # of the results, and of the arguments, None for what is no tensor

BATCH, HEADS, SEQUENCE = 0, 1, 2  # dimensions of q, k and v
# The dimensions of batch entries and of heads of the fields beside q, k and v; they may have size 1 instead.
DIMENSIONS: dict[str, tuple[int | None, int | None]] = {
    "bias": (0, 1),
    "allowed": (0, 1),
    "q_lengths": (0, None),
    "k_lengths": (0, None),
    "q_segments": (0, None),
    "k_segments": (0, None),
    "prefix": (0, None),
    "alibi": (0, 1),
    "sinks": (None, 0),
    "rng": (None, None),
    "cu_q": (None, None),
    "cu_k": (None, None),
    "block_table": (0, None),
}


class Sharded:
    """One way to shard a call: along a dimension of q, of which every rank has a part, or along none."""

    def __init__(self, inputs: AttentionInputs, along: int | None) -> None:
        self.inputs, self.along = inputs, along

    def of_rows(self, tensor: Any) -> Placement | None:
        """Of a tensor whose first dimensions are batch entries and heads."""
        return None if tensor is None else Replicate() if self.along is None else Shard(self.along)

    def of_field(self, name: str) -> Placement | None:
        field = getattr(self.inputs, name)
        if name in ("q", "k", "v"):
            paged = self.inputs.block_table is not None and name != "q" and self.along == BATCH
            return Replicate() if paged else self.of_rows(field)
        if name not in DIMENSIONS or field is None:
            return None
        dim = None if self.along is None else DIMENSIONS[name][self.along]
        return Replicate() if dim is None or field.shape[dim] == 1 else Shard(dim)

    def of_fields(self, names: Iterable[str]) -> Placements:
        return [self.of_field(name) for name in names]

    def of_gradient(self, name: str) -> Placement:
        """Where a field is whole on every rank, each has the part of its gradient that comes of its own rows."""
        placement = self.of_field(name)
        if self.along is None or placement is None:
            return Replicate()
        return placement if placement.is_shard() else Partial()


FIELDS = AttentionInputs._fields
BAND = FIELDS[: FIELDS.index("bottom_right") + 1]
MASKS = FIELDS[len(BAND) :]


def forward_shardings(*args: Any) -> list[Strategy]:
    inputs, needs_lse, _ = of_forward(args)
    return [
        (
            [way.of_rows(inputs.q), way.of_rows(inputs.q) if needs_lse else Replicate()],
            [*way.of_fields(BAND), None, None, *way.of_fields(MASKS)][: len(args)],
        )
        for way in ways(inputs)
    ]


def backward_shardings(*args: Any) -> list[Strategy]:
    inputs, results, upstream, bias_grad, _ = of_backward(args)
    return [
        (
            [
                *map(way.of_gradient, ("q", "k", "v")),
                way.of_gradient("bias") if bias_grad else Replicate(),
                way.of_gradient("sinks"),
            ],
            [
                *map(way.of_rows, (upstream.out, results.out, results.lse)),
                *way.of_fields(BAND),
                way.of_rows(upstream.lse),
                None,
                None,
                *way.of_fields(MASKS),
            ][: len(args)],
        )
        for way in ways(inputs)
    ]


def weights_shardings(*args: Any) -> list[Strategy]:
    inputs, lse, average, _ = of_weights(args)
    return [
        (
            [Partial("avg") if average and way.along == HEADS else way.of_rows(inputs.q)],
            [way.of_rows(lse), *way.of_fields(BAND), None, None, *way.of_fields(MASKS)][: len(args)],
        )
        for way in ways(inputs)
    ]


def ways(inputs: AttentionInputs) -> list[Sharded]:
    """All that a dimension of a mesh may do with a call."""
    tell_of_gathered(inputs)
    along: list[int | None] = [None]
    if inputs.rng is None:  # dropout's bits are those of a head's place among all
        packed = inputs.cu_q is not None
        along += [] if packed else [BATCH]
        along += [HEADS] if heads_divide(inputs) else []
    return [Sharded(inputs, dimension) for dimension in along]


def heads_divide(inputs: AttentionInputs) -> bool:
    """Whether each rank has whole groups of query heads, as the tensors are sharded now."""
    H, Hkv = inputs.q.shape[HEADS], inputs.k.shape[HEADS]
    if H == Hkv:
        return True
    sharded = max(math.prod(sizes_along(spec, HEADS)) for spec in inputs[:3])
    spec: Any = inputs.q  # what DTensor has in the place of a tensor
    return all(Hkv % size == 0 for size in spec.mesh.shape) and Hkv % sharded == 0


def sizes_along(spec: Any, dimension: int) -> list[int]:
    """The sizes of the mesh along which a tensor is sharded in a dimension."""
    return [spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement.is_shard(dimension)]


def tell_of_gathered(inputs: AttentionInputs) -> None:
    if any(sizes_along(spec, SEQUENCE) for spec in inputs[:3]):
        warn_of_gathered()


@functools.cache
def warn_of_gathered() -> None:
    warnings.warn(
        "sdpa gathers DTensors that are sharded along the sequence on every rank; "
        "sdpa.distributed.context_parallel attends to parts of it, given as each rank's own tensors.",
        stacklevel=2,
    )


STRATEGIES: dict[Any, Callable[..., list[Strategy]]] = {
    torch.ops.sdpa.attention_forward.default: forward_shardings,
    torch.ops.sdpa.attention_backward.default: backward_shardings,
    torch.ops.sdpa.attention_weights.default: weights_shardings,
}
for _operator, _shardings in STRATEGIES.items():
    register_sharding(_operator)(_shardings)
