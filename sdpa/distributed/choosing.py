"""Which mode of context parallelism a call takes: a model of what each rank computes and what links carry."""

from __future__ import annotations

import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from sdpa.dispatch import tables
from sdpa.dispatch.device import device_of
from sdpa.distributed.blocks import Blocks
from sdpa.distributed.links import Link
from sdpa.distributed.modes import Part, blocks_of, count, needed
from sdpa.distributed.parts import Interval, Intervals, common
from sdpa.problem import UNLIMITED

SMALL, LARGE = 1 << 10, 1 << 20  # bytes for each rank, in what is timed
REPEATS = 3
PIECES = 16
BACKWARD = 2.5  # products of a backward, where a forward has 1
ONES = ("gather", "ring")  # modes by the keys that ranks need


class Rates(NamedTuple):
    """What the links of a group carry. All ranks have the same figures: those of the slowest."""

    latency: float  # seconds of a collective
    bandwidth: float  # bytes/s that a rank sends


class Way(NamedTuple):
    """A mode for one call: what it should take, or why it cannot be taken."""

    mode: str
    seconds: float = 0.0  # of a forward, and of a backward where one follows, on the slowest rank
    sent: int = 0  # bytes that a rank sends at most in a forward
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.mode}: not possible, {self.reason}"
        return f"{self.mode}: {self.seconds * 1e3:.3f} ms expected, {self.sent} bytes sent by a rank in a forward"


KNOWN: WeakKeyDictionary[Any, Rates] = WeakKeyDictionary()  # by process group


def rates_of(link: Link) -> Rates:
    """Once for a group, by all of its ranks at the same time: of their tables (`sdpa tune --distributed`), else
    measured."""
    found = KNOWN.get(link.group)
    if found is None:
        found = Rates(0.0, float("inf")) if link.ranks == 1 else told_by_tables(link) or measured(link)
        KNOWN[link.group] = found
    return found


def told_by_tables(link: Link) -> Rates | None:
    """What the tables of all ranks say, of the slowest; None where one says nothing. Where one rank's raise (a broken
    one is a warning, which may be an error), all ranks of the link do."""
    asked = place_of(link)
    own, fault = Rates(0.0, 0.0), None
    try:
        own = in_tables(own_device(link), asked) or own
    except Exception as error:
        fault = error
    told = torch.tensor([*own, float(fault is not None)], dtype=torch.float32, device=link.device)
    latencies, bandwidths, faults = link.ask(told).t().tolist()
    if fault is not None:
        raise fault
    if any(faults):
        at = faults.index(1.0)
        raise RuntimeError(f"context_parallel: rank {at} of {link.ranks} cannot read its tuning tables, and says why")
    return Rates(max(latencies), min(bandwidths)) if min(bandwidths) else None


def in_tables(device: str, asked: tuple[str, int, int]) -> Rates | None:
    every = (one for own in tables.of(device_of(device).names) for table in own for one in table.links)
    return next((Rates(one.latency, one.bandwidth) for one in every if one[:3] == asked), None)


def place_of(link: Link) -> tuple[str, int, int]:
    """The backend, and how many hosts and ranks it joins. Every rank has to ask."""
    host = torch.tensor([crc32(socket.gethostname().encode())], device=link.device)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(link.group).split(","))  # by kind of device
    return backends[link.device], len(set(link.ask(host).flatten().tolist())), link.ranks


def own_device(link: Link) -> str:
    return f"cuda:{torch.cuda.current_device()}" if link.device == "cuda" else link.device


def measured(link: Link, repeats: int = REPEATS) -> Rates:
    """By exchanges of a small and a large message. Every rank has to ask."""
    seconds = torch.tensor([fastest(link, size, repeats) for size in (SMALL, LARGE)], device=link.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, link.group)
    small, large = seconds.tolist()
    more = (LARGE - SMALL) * (link.ranks - 1)
    return Rates(small, more / max(large - small, 1e-9))


def fastest(link: Link, size: int, repeats: int) -> float:
    """Seconds of an exchange of `size` bytes between each two ranks, the least of some."""
    sent = torch.zeros(size * link.ranks, dtype=torch.uint8, device=link.device)
    received, found = torch.empty_like(sent), []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent, group=link.group)
        if sent.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def ways(part: Part, ranks: int, modes: Sequence[str], rates: Rates) -> list[Way]:
    """Each of `modes` for a call, the same on every rank."""
    return [by_heads(part, ranks, rates) if mode == "ulysses" else by_keys(mode, part, rates) for mode in modes]


def by_heads(part: Part, ranks: int, rates: Rates) -> Way:
    q, k, v = part[:3]
    H, Hkv = q.shape[1], k.shape[1]
    if H % ranks or Hkv % ranks:
        return Way("ulysses", reason=f"{H} query heads and {Hkv} key heads are not both multiples of {ranks} ranks")
    try:
        pairs = pairs_of(blocks_of(part), [(0, part.queries.length)])
    except RuntimeError:  # blocks are of the other modes
        pairs = part.queries.length * part.keys.length
    held = max(part.queries.lengths) * H * (q.shape[3] + v.shape[3])
    held += max(part.keys.lengths) * Hkv * (k.shape[3] + v.shape[3])
    sent = q.shape[0] * q.element_size() * held * (ranks - 1) // ranks
    compute, passes = products(part, pairs / ranks), 2 if learns(part) else 1
    return Way("ulysses", compute + passes * (2 * rates.latency + sent / rates.bandwidth), sent)


def by_keys(mode: str, part: Part, rates: Rates) -> Way:
    """Ranks compute and send different amounts: the slowest counts."""
    try:
        blocks = blocks_of(part, in_steps=mode == "ring")
    except RuntimeError as error:
        return Way(mode, reason=str(error).removeprefix("context_parallel: "))
    key, value = part[1:3]
    ranks = len(part.queries.intervals)
    bytes_of_key = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3]) * key.element_size()
    most = max(keys_sent(needed(blocks, part), part.keys.intervals)) * bytes_of_key
    compute = products(part, max(pairs_of(blocks, own) for own in part.queries.intervals))
    wire = most / rates.bandwidth
    if mode == "gather":
        return Way(mode, compute + (2 if learns(part) else 1) * (rates.latency + wire), most)
    # Keys travel beside the products, and in a backward once more, with gradients in float32.
    steps = (ranks - 1) * rates.latency
    back = wire * (1 + torch.float32.itemsize / key.element_size()) if learns(part) else 0.0
    forward = compute / (1 + BACKWARD) if learns(part) else compute
    return Way(mode, max(forward, wire) + max(compute - forward, back) + (3 if learns(part) else 1) * steps, most)


def keys_sent(needs: Sequence[Intervals], owned: Sequence[Intervals]) -> list[int]:
    """How many keys each rank sends to others: of its own, each as often as another rank needs it."""
    edges = sorted({place for own in (*needs, *owned) for interval in own for place in interval})
    steps = dict.fromkeys(edges, 0)  # by place how many more ranks need what follows
    for begin, end in (interval for own in needs for interval in own):
        steps[begin] += 1
        steps[end] -= 1
    needing = list(accumulate(steps.values()))
    widths = [after - before for before, after in pairwise(edges)]
    below = list(accumulate((n * width for n, width in zip(needing, widths, strict=False)), initial=0))
    # By place the keys before it, each as often as it is needed; where there is no place, there is a sum, too.
    total = dict(zip(edges, below, strict=False))
    return [
        sum(total[end] - total[begin] for begin, end in own) - count(common(own, need))
        for own, need in zip(owned, needs, strict=True)
    ]


def products(part: Part, pairs: float) -> float:
    """Seconds of the matrix products of some pairs of query and key, at the device's peak."""
    q, v = part.query, part.value
    flops = 2.0 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3])
    return flops * (1 + BACKWARD if learns(part) else 1) / device_of(str(q.device)).peak(q.dtype)


def learns(part: Part) -> bool:
    given: tuple[Tensor, ...] = part[:3]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def pairs_of(blocks: Blocks, intervals: Sequence[Interval]) -> int:
    """Pairs of query and key that see each other, of queries in intervals, by trapezoids of PIECES parts of each and of
    each document, where these are those of all batch entries."""
    cuts = blocks.ends[0][0] if blocks.ends is not None and len(blocks.ends) == 1 else []
    total = 0
    for begin, end in intervals:
        inside = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        even = (begin + (end - begin) * piece // PIECES for piece in range(PIECES + 1))
        total += sum(seen_pairs(blocks, rows) for rows in pairwise(sorted({*even, *inside})))
    return total


def seen_pairs(blocks: Blocks, rows: Interval) -> int:
    (begin, end), (first, last) = blocks.seen(rows, (0, blocks.N))
    if begin >= end or first >= last:
        return 0

    def seen(row: int) -> int:
        at = row + blocks.shift
        low = first if blocks.left == UNLIMITED or blocks.has_prefix else max(first, at - blocks.left)
        high = last if blocks.right == UNLIMITED or blocks.has_prefix else min(last, at + blocks.right + 1)
        return max(0, high - low)

    return (seen(begin) + seen(end - 1)) * (end - begin) // 2
