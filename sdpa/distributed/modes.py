"""The modes of context parallelism: how ranks that hold parts of a sequence attend to the whole of it.

- `Heads`, Ulysses (Jacobs et al., DeepSpeed-Ulysses, 2023): ranks exchange their parts of the sequence for parts of the
  heads, compute some heads with all queries and keys, and exchange back. Every mask is taken as it is.
- `Keys`, gather (as in Llama 3, Dubey et al., 2024): each rank is given the keys and values that its own queries see.
- `Ring` in `ring.py`: the same, a rank's keys at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sdpa.distributed.blocks import Block, Blocks
from sdpa.distributed.links import Link, Tied, joined, rows_of
from sdpa.distributed.parts import Interval, Intervals, Parts, common, merged, places
from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask

HEAD_DIMENSIONS = {"alibi": -1, "allowed": -3, "bias": -3}  # of the fields of a mask


class Part(NamedTuple):
    """A call of this rank's part of a sequence."""

    query: Tensor  # (B, H, own queries, D)
    key: Tensor  # (B, Hkv, own keys, D)
    value: Tensor
    mask: Mask  # of the whole sequence
    sinks: Tensor | None
    options: dict[str, Any]  # scale, enable_gqa, softcap and kernel, where they are given
    returns_lse: bool
    queries: Parts
    keys: Parts


Results = tuple[Tensor, Tensor | None]  # this rank's part of the output, and of the log-sum-exp where it is asked for


class Mode(Protocol):
    """How a rank's part is computed."""

    def __call__(self, part: Part) -> Results: ...

    def local(self, part: Part) -> Part:
        """What stands for a kernel's (first) call: of its sizes, with memory that nobody fills. Nothing is sent."""
        ...


class Whole:
    """A call that has the whole sequence."""

    def __call__(self, part: Part) -> Results:
        found: Any = scaled_dot_product_attention(
            *part[:3], without_fields(part.mask), sinks=part.sinks, return_lse=part.returns_lse, **part.options
        )
        return (found[0], found[1]) if part.returns_lse else (found, None)

    def local(self, part: Part) -> Part:
        return part


def without_fields(mask: Mask) -> Mask | None:
    """None for a mask that says nothing."""
    return mask if mask.has_band or mask.tensors() else None


class Heads:
    """Parts of the sequence of all heads for the whole sequence of some, and back.

    Args:
        link: the ranks that exchange.
        attend: what then computes; with further ranks, these hold other parts of the sequence.
        of: by rank of `link`, its place among the ranks that parts tell of.
        groups: the places that each of those further ranks exchanged with.
    """

    def __init__(self, link: Link, attend: Mode, of: list[int], groups: list[list[int]]) -> None:
        self.link, self.attend, self.of, self.groups = link, attend, of, groups

    def __call__(self, part: Part) -> Results:
        mask, sinks = self.of_heads(part)  # before anything is sent
        queries, keys = ([parts.intervals[at] for at in self.of] for parts in (part.queries, part.keys))
        q, k, v = self.gather(part[:3], (queries, keys, keys))
        sequences = self.together(part.queries), self.together(part.keys)
        out, lse = self.attend(Part(q, k, v, mask, sinks, part.options, part.returns_lse, *sequences))
        if lse is None:
            return self.scatter((out,), queries)[0], None
        out, lse = self.scatter((out, lse.unsqueeze(3)), queries)
        return out, lse.squeeze(3)

    def local(self, part: Part) -> Part:
        mask, sinks = self.of_heads(part)
        q, k, v = (
            empty(t, heads=t.shape[1] // self.link.ranks, length=sum(parts.lengths[at] for at in self.of))
            for t, parts in zip(part[:3], (part.queries, part.keys, part.keys), strict=True)
        )
        sequences = self.together(part.queries), self.together(part.keys)
        return self.attend.local(Part(q, k, v, mask, sinks, part.options, part.returns_lse, *sequences))

    def of_heads(self, part: Part) -> tuple[Mask, Tensor | None]:
        """The mask and the sinks of this rank's heads."""
        link, H, Hkv = self.link, part.query.shape[1], part.key.shape[1]
        if H % link.ranks or Hkv % link.ranks:
            raise ValueError(
                f"context_parallel: {H} query heads and {Hkv} key heads are not both multiples of the {link.ranks} "
                "ranks, which share them"
            )
        return self.mask(part.mask, H), self.own("sinks", part.sinks, -1, H)

    def together(self, parts: Parts) -> Parts:
        """What is held after the exchange, by the ranks that compute the same heads."""
        return Parts(tuple(merged(i for at in group for i in parts.intervals[at]) for group in self.groups))

    def gather(self, tensors: tuple[Tensor, ...], held: tuple[list[Intervals], ...]) -> list[Tensor]:
        """(B, own heads, length of all, size) of (B, heads, own length, size)."""
        ranks = self.link.ranks
        shapes = [
            [(t.shape[0], t.shape[1] // ranks, count(intervals), t.shape[3]) for intervals in of]
            for t, of in zip(tensors, held, strict=True)
        ]
        received = self.link.swap([t.chunk(ranks, 1) for t in tensors], shapes)
        return [joined(pieces, of) for pieces, of in zip(received, held, strict=True)]

    def scatter(self, tensors: tuple[Tensor, ...], held: list[Intervals]) -> list[Tensor]:
        """The way back: (B, heads, own length, size) of (B, own heads, length of all, size)."""
        everything = merged(interval for of in held for interval in of)
        own = count(held[self.link.rank])
        given = [[rows_of(t, of, everything) for of in held] for t in tensors]
        shapes = [[(t.shape[0], t.shape[1], own, t.shape[3])] * self.link.ranks for t in tensors]
        return [torch.cat(pieces, 1) for pieces in self.link.swap(given, shapes)]

    def own(self, name: str, tensor: Tensor | None, dim: int, H: int) -> Any:
        """This rank's heads of a tensor; all of it where the dimension is missing or broadcast."""
        if tensor is None or tensor.dim() < -dim or (tensor.shape[dim] == 1 and name != "sinks"):
            return tensor
        if tensor.shape[dim] != H:
            raise RuntimeError(f"context_parallel: expected {name} of {H} heads, got {tuple(tensor.shape)}")
        return tensor.chunk(self.link.ranks, dim)[self.link.rank]

    def mask(self, mask: Mask, H: int) -> Mask:
        """The mask of this rank's heads."""
        found = {name: getattr(mask, name) for name in HEAD_DIMENSIONS}
        return mask.replace(
            **{n: self.own(f"Mask.{n}", t, HEAD_DIMENSIONS[n], H) for n, t in found.items() if t is not None}
        )


class Keys:
    """This rank's own queries, with the keys and values that they see of all ranks.

    Args:
        link: all ranks.
        attend: what computes, for each interval of queries.
    """

    def __init__(self, link: Link, attend: Mode | None = None) -> None:
        self.link, self.attend = link, attend or Whole()

    def __call__(self, part: Part) -> Results:
        link = self.link
        blocks = Blocks(part.mask, part.queries.length, part.keys.length)
        needs = needed(blocks, part)
        seen = [blocks.of(rows, (0, blocks.N)) for rows in part.queries.intervals[link.rank]]
        own, held = part.keys.intervals[link.rank], needs[link.rank]
        given = [[rows_of(t, common(own, need), own) for need in needs] for t in part[1:3]]
        parts = [common(of, held) for of in part.keys.intervals]
        shapes = [[(t.shape[0], t.shape[1], count(of), t.shape[3]) for of in parts] for t in part[1:3]]
        k, v = (joined(pieces, parts) for pieces in link.swap(given, shapes))
        found = []
        for rows, block in zip(part.queries.intervals[link.rank], seen, strict=True):
            q = rows_of(part.query, (rows,), part.queries.intervals[link.rank])
            found += [unseen(part, q, v)] if block is None else self.of_block(part, (q, k, v), rows, block, held)
        out = torch.cat([out for out, _ in found], 2)
        lse = torch.cat([lse for _, lse in found if lse is not None], 2) if part.returns_lse else None
        if any(tensor.requires_grad for tensor in part[:3]):
            out = Tied.apply(out, part.query, k, v)
        return out, lse

    def local(self, part: Part) -> Part:
        return first_block(part, self.link.rank)

    def of_block(
        self, part: Part, tensors: Sequence[Tensor], rows: Interval, block: Block, held: Intervals
    ) -> list[Results]:
        """The results of a block's queries, and of those beside them among `rows`, which see no key."""
        q, k, v = tensors
        ((first, last),) = places((block.keys,), held)
        begin, end = (at - rows[0] for at in block.rows)
        k, v = k[:, :, first:last], v[:, :, first:last]
        found = [self.attend(part._replace(query=q[:, :, begin:end], key=k, value=v, mask=block.mask))]
        before = [unseen(part, q[:, :, :begin], v)] if begin else []
        after = [unseen(part, q[:, :, end:], v)] if end < q.shape[2] else []
        return [*before, *found, *after]


def first_block(part: Part, rank: int) -> Part:
    """The longest of a rank's own queries, and the keys that they see."""
    blocks = Blocks(part.mask, part.queries.length, part.keys.length)
    rows = max(part.queries.intervals[rank], key=lambda interval: interval[1] - interval[0], default=(0, 0))
    block = blocks.of(rows, (0, blocks.N)) or Block((0, 0), (0, 0), Mask())
    (begin, end), (first, last) = block.rows, block.keys
    q, (k, v) = empty(part.query, length=end - begin), (empty(t, length=last - first) for t in part[1:3])
    return part._replace(query=q, key=k, value=v, mask=block.mask)


def empty(tensor: Tensor, *, length: int, heads: int | None = None) -> Tensor:
    """A tensor like another one, of another length."""
    heads = tensor.shape[1] if heads is None else heads
    found = tensor.new_empty(tensor.shape[0], heads, length, tensor.shape[3])
    return found.requires_grad_(tensor.requires_grad)


def unseen(part: Part, q: Tensor, v: Tensor) -> Results:
    """The results of queries that see no key."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    if part.sinks is None:
        return out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, part.sinks.to(torch.promote_types(q.dtype, torch.float32)).view(1, -1, 1).expand(q.shape[:3])


def of_length(tensor: Tensor, parts: Parts) -> Tensor:
    """What stands for a tensor of the whole sequence: of its shape, without its memory."""
    return tensor.new_empty(()).expand(*tensor.shape[:2], parts.length, tensor.shape[3])


def needed(blocks: Blocks, part: Part) -> list[Intervals]:
    """The keys that the queries of each rank see."""
    everything = 0, blocks.N
    return [merged(keys_of(blocks, rows, everything) for rows in own) for own in part.queries.intervals]


def keys_of(blocks: Blocks, rows: Interval, keys: Interval) -> Interval:
    (begin, end), (first, last) = blocks.cut(rows, keys)
    return (first, last) if begin < end and first < last else (0, 0)


def count(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)
