"""The modes of context parallelism: how ranks that hold parts of a sequence attend to the whole of it.

- `Heads`, Ulysses (Jacobs et al., DeepSpeed-Ulysses, 2023): ranks exchange their parts of the sequence for parts of the
  heads, compute some heads with all queries and keys, and exchange back. Every mask is taken as it is.
- `Keys`, gather (as in Llama 3, Dubey et al., 2024): each rank is given the keys and values that its own queries see.
- `Ring` in `ring.py`: the same, a rank's keys at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sdpa import philox
from sdpa.distributed.blocks import Block, Blocks
from sdpa.distributed.links import (
    Cut,
    Link,
    Pieces,
    Tied,
    joined,
    pieces_of,
    row_by_row,
    rows_of,
    shapes_of,
    side_by_side,
)
from sdpa.distributed.parts import Interval, Intervals, Parts, common, merged, places
from sdpa.functional import scaled_dot_product_attention
from sdpa.mask import Mask

MESSAGE = 32 << 20  # bytes of keys and values that are worth a message of their own
# By bytes of a number: with every instruction set of `cpu_flash` a block of keys ends at each of these multiples. Its
# sums over the keys from there on are then those of a call with all keys.
KEYS_OF_BLOCKS = {2: 1536, 4: 384, 8: 384}
HEAD_DIMENSIONS = {"alibi": -1, "allowed": -3, "bias": -3}  # of the fields of a mask


class Random(NamedTuple):
    """Dropout's numbers: those that one call of all heads, queries and keys would draw."""

    seed: Tensor  # (2,), the same on every rank
    heads: int  # of queries, all of them
    head: int = 0  # the first of a part

    def of_block(self, row: int = 0, key: int = 0) -> Tensor:
        """The rng of a kernel's call, by its first query and its first key."""
        return philox.of_part(self.seed, self.heads, self.head, row, key)


class Part(NamedTuple):
    """A call of this rank's part of a sequence."""

    query: Tensor  # (B, H, own queries, D)
    key: Tensor  # (B, Hkv, own keys, D)
    value: Tensor
    mask: Mask  # of the whole sequence
    sinks: Tensor | None
    options: dict[str, Any]  # scale, enable_gqa, softcap, dropout_p and kernel, where they are given
    returns_lse: bool
    queries: Parts
    keys: Parts
    random: Random | None = None
    begins: tuple[int, int] = (0, 0)  # the first query and the first key of a block

    def of_heads(self, first: int, heads: int) -> Part:
        """Of some query heads, which `query`, `key` and `value` are already of, mask, sinks and dropout's numbers."""
        mask, sinks = of_heads(self, (first, first + heads))
        random = self.random and self.random._replace(head=self.random.head + first)
        return self._replace(mask=mask, sinks=sinks, random=random)


Taken = Callable[[], Pieces[Tensor]]  # waits for them
Results = tuple[Tensor, Tensor | None]  # this rank's part of the output, and of the log-sum-exp where it is asked for
Stages = Iterator[Results | None]  # None while something travels, at last the results


class Mode(Protocol):
    """How a rank's part is computed."""

    def __call__(self, part: Part) -> Results: ...

    def local(self, part: Part) -> Part:
        """What stands for a kernel's (first) call: of its sizes, with memory that nobody fills. Nothing is sent."""
        ...


class Whole:
    """A call that has the whole sequence."""

    def __call__(self, part: Part) -> Results:
        given = philox.GIVEN.set(part.random and part.random.of_block(*part.begins))
        try:
            found: Any = scaled_dot_product_attention(
                *part[:3], without_fields(part.mask), sinks=part.sinks, return_lse=part.returns_lse, **part.options
            )
        finally:
            philox.GIVEN.reset(given)
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
        self.check(part)
        ranks = self.link.ranks
        found = in_turn([self.stages(part, group) for group in groups_of(part, part.key.shape[1] // ranks)])
        out = of_groups([out for out, _ in found], ranks)
        return out, of_groups([lse for _, lse in found if lse is not None], ranks) if part.returns_lse else None

    def stages(self, part: Part, group: Interval) -> Stages:
        """The exchange begun; attention, and the exchange back begun; the results. Of some of each rank's key heads."""
        queries, keys = ([parts.intervals[at] for at in self.of] for parts in (part.queries, part.keys))
        taken = self.gather(part, group, (queries, keys, keys))
        yield None
        received = [joined(pieces, of) for pieces, of in zip(taken(), (queries, keys, keys), strict=True)]
        out, lse = self.attend(self.own(part, received, group))
        returned = self.scatter((out,) if lse is None else (out, lse.unsqueeze(3)), queries)
        yield None
        out, *others = map(side_by_side, returned())
        yield out, others[0].squeeze(3) if others else None

    def local(self, part: Part) -> Part:
        self.check(part)
        own = [
            empty(t, heads=t.shape[1] // self.link.ranks, length=sum(parts.lengths[at] for at in self.of))
            for t, parts in zip(part[:3], (part.queries, part.keys, part.keys), strict=True)
        ]
        return self.attend.local(self.own(part, own, (0, own[1].shape[1])))

    def check(self, part: Part) -> None:
        ranks, H, Hkv = self.link.ranks, part.query.shape[1], part.key.shape[1]
        if H % ranks or Hkv % ranks:
            raise ValueError(
                f"context_parallel: {H} query heads and {Hkv} key heads are not both multiples of the {ranks} ranks, "
                "which share them"
            )

    def own(self, part: Part, tensors: Sequence[Tensor], group: Interval) -> Part:
        """The call of the whole sequence by some of this rank's heads."""
        q, k, v = tensors
        share = part.query.shape[1] // part.key.shape[1]
        first = self.link.rank * (part.query.shape[1] // self.link.ranks) + group[0] * share
        found = part.of_heads(first, (group[1] - group[0]) * share)
        queries, keys = self.together(part.queries), self.together(part.keys)
        return found._replace(query=q, key=k, value=v, queries=queries, keys=keys)

    def together(self, parts: Parts) -> Parts:
        """What is held after the exchange, by the ranks that compute the same heads."""
        return Parts(tuple(merged(i for at in group for i in parts.intervals[at]) for group in self.groups))

    def gather(self, part: Part, group: Interval, held: tuple[list[Intervals], ...]) -> Taken:
        """Of each rank's own heads those of a group: by rank (B, heads, its length, size) of (B, heads, own length,
        size)."""
        given, shapes = list[tuple[Tensor, Cut]](), []
        for t, of in zip(part[:3], held, strict=True):
            share = t.shape[1] // part.key.shape[1]
            heads = group[0] * share, group[1] * share
            given.append((t, partial(self.heads_for, heads=heads, of=of[self.link.rank])))
            shapes.append([shapes_of(t, intervals, heads[1] - heads[0]) for intervals in of])
        return self.link.start(given, shapes)

    def heads_for(self, tensor: Tensor, heads: Interval, of: Intervals) -> list[list[Tensor]]:
        """Of each rank's heads some, of a tensor with the rows `of`."""
        some = tensor.unflatten(1, (self.link.ranks, -1))[:, :, slice(*heads)]
        return [pieces_of(one, of, of) for one in some.unbind(1)]

    def scatter(self, tensors: tuple[Tensor, ...], held: list[Intervals]) -> Taken:
        """The way back: by rank (B, its heads, own length, size) of (B, own heads, length of all, size)."""
        everything = merged(interval for of in held for interval in of)
        shapes = [[shapes_of(t, held[self.link.rank], t.shape[1])] * self.link.ranks for t in tensors]
        return self.link.start([(t, lambda t: [pieces_of(t, of, everything) for of in held]) for t in tensors], shapes)


def groups_of(part: Part, heads: int) -> Intervals:
    """Key heads in groups, each of as many bytes of keys and values as are worth a message of their own. The same on
    every rank."""
    B, Hkv, _, D = part.key.shape
    sent = B * Hkv * max(part.keys.lengths) * (D + part.value.shape[3]) * part.key.element_size()
    each = Parts.even(heads, max(1, min(heads, sent // MESSAGE))).intervals
    return tuple(interval for of_group in each for interval in of_group)


def parts_of_heads(part: Part) -> list[Part]:
    """The same call for each group of heads."""
    groups = groups_of(part, part.key.shape[1])
    if len(groups) == 1:
        return [part]
    share, found = part.query.shape[1] // part.key.shape[1], []
    for begin, end in groups:
        q, (k, v) = part.query[:, begin * share : end * share], (t[:, begin:end] for t in part[1:3])
        found.append(part.of_heads(begin * share, (end - begin) * share)._replace(query=q, key=k, value=v))
    return found


def of_groups(results: list[Tensor], ranks: int) -> Tensor:
    """(B, heads, ...) of results that have some heads of each rank."""
    if len(results) == 1:
        return results[0]
    return torch.cat([t.unflatten(1, (ranks, -1)) for t in results], 2).flatten(1, 2)


def in_turn(stages: Sequence[Stages]) -> list[Results]:
    """What the last stages yield. Each begins before the one ahead of it goes on, so that what one waits for travels
    while others compute."""
    running, found = list[Stages](), list[Results]()
    for following in (*stages, None, None):  # who began last has two steps to go
        if following is not None:
            next(following)
        still = []
        for one in reversed(running):
            results = next(one)
            if results is None:
                still.append(one)
            else:
                found.append(results)
        running = still + ([] if following is None else [following])
    return found


def of_heads(part: Part, heads: Interval) -> tuple[Mask, Tensor | None]:
    """Mask and sinks of some query heads; all of a tensor where the dimension of heads is missing or broadcast."""
    found = {}
    for name, dim in HEAD_DIMENSIONS.items():
        tensor = getattr(part.mask, name)
        if tensor is not None and tensor.dim() >= -dim and tensor.shape[dim] > 1:
            found[name] = tensor.narrow(dim, heads[0], heads[1] - heads[0])
    return part.mask.replace(**found), None if part.sinks is None else part.sinks[slice(*heads)]


class Keys:
    """This rank's own queries, with the keys and values that they see of all ranks.

    Args:
        link: all ranks.
        attend: what computes, for each interval of queries.
    """

    def __init__(self, link: Link, attend: Mode | None = None) -> None:
        self.link, self.attend = link, attend or Whole()

    def __call__(self, part: Part) -> Results:
        found = in_turn([self.stages(of_group) for of_group in parts_of_heads(part)])
        if len(found) == 1:
            return found[0]
        out = side_by_side([[out] for out, _ in found])
        return out, torch.cat([lse for _, lse in found if lse is not None], 1) if part.returns_lse else None

    def stages(self, part: Part) -> Stages:
        """The keys begun to be given; attention."""
        link = self.link
        blocks = blocks_of(part)
        needs, rows = needed(blocks, part), part.queries.intervals[link.rank]
        seen = [blocks.of(interval, (0, blocks.N)) for interval in rows]
        own, held = part.keys.intervals[link.rank], needs[link.rank]
        given = [common(own, need) for need in needs]
        parts = [common(of, held) for of in part.keys.intervals]
        shapes = [[shapes_of(t, of, t.shape[1]) for of in parts] for t in part[1:3]]
        taken = link.start([(t, lambda t: [pieces_of(t, of, own) for of in given]) for t in part[1:3]], shapes)
        yield None
        k, v = (joined(pieces, parts) for pieces in taken())
        found = []
        for interval, block in zip(rows, seen, strict=True):
            q = rows_of(part.query, (interval,), rows)
            found += [unseen(part, q, v)] if block is None else self.of_block(part, (q, k, v), interval, block, held)
        found = found or [unseen(part, part.query, v)]
        out = row_by_row([out for out, _ in found])
        lse = torch.cat([lse for _, lse in found if lse is not None], 2) if part.returns_lse else None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in part[:3]):
            out = Tied.apply(out, part.query, k, v)
            lse = None if lse is None else Tied.apply(lse, part.query, k, v)
        yield out, lse

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
        begins = block.rows[0], block.keys[0]
        own = part._replace(query=q[:, :, begin:end], key=k, value=v, mask=block.mask, begins=begins)
        found = [self.attend(own)]
        before = [unseen(part, q[:, :, :begin], v)] if begin else []
        after = [unseen(part, q[:, :, end:], v)] if end < q.shape[2] else []
        return [*before, *found, *after]


def first_block(part: Part, rank: int, in_steps: bool = False) -> Part:
    """The longest of a rank's own queries, and the keys that they see."""
    blocks = blocks_of(part, in_steps)
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


def blocks_of(part: Part, in_steps: bool = False) -> Blocks:
    """Raises RuntimeError for what is no mask of a block, and for dropout where a part begins inside of the rows or
    the keys that one call of Philox serves."""
    of_rows = philox.PERIOD if part.options.get("dropout_p") else 1
    begins = (begin for parts in (part.queries, part.keys) for own in parts.intervals for begin, _ in own)
    if any(begin % of_rows for begin in begins):
        raise RuntimeError(
            f"context_parallel: dropout, where parts begin elsewhere than at multiples of {of_rows}, is for "
            "mode='ulysses'"
        )
    exact = not in_steps and part.query.device.type == "cpu"
    of_keys = KEYS_OF_BLOCKS[part.query.element_size()] if exact else of_rows
    return Blocks(part.mask, part.queries.length, part.keys.length, in_steps, (of_rows, of_keys))


def needed(blocks: Blocks, part: Part) -> list[Intervals]:
    """The keys that the queries of each rank see."""
    everything = 0, blocks.N
    return [merged(keys_of(blocks, rows, everything) for rows in own) for own in part.queries.intervals]


def keys_of(blocks: Blocks, rows: Interval, keys: Interval) -> Interval:
    (begin, end), (first, last) = blocks.cut(rows, keys)
    return (first, last) if begin < end and first < last else (0, 0)


def count(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)
