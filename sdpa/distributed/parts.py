"""Parts: which positions of a sequence each rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from torch import Tensor

from sdpa.scalars import as_int

Interval = tuple[int, int]  # positions from the first number to before the second
Intervals = tuple[Interval, ...]
Item = TypeVar("Item")
CHUNKS = 8  # of a rank, where documents are balanced


@dataclass(frozen=True)
class Parts:
    """Which positions of a sequence each rank has: by rank, intervals (begin, end) in ascending order.

    Every position of the sequence belongs to one rank. Make them by `even`, `contiguous`, `zigzag` or `documents`.

    Raises:
        TypeError, ValueError: no integers; positions that no rank has, or two.
    """

    intervals: tuple[Intervals, ...]

    def __post_init__(self) -> None:
        try:
            own = tuple(tuple((as_count(a), as_count(b)) for a, b in of if a != b) for of in self.intervals)
        except (TypeError, ValueError):
            raise TypeError(f"Parts: expected by rank pairs of integers (begin, end), got {self.intervals}") from None
        object.__setattr__(self, "intervals", own)  # without empty ones
        found = sorted(interval for of_rank in own for interval in of_rank)
        ends = [0, *(end for _, end in found)]
        if [begin for begin, _ in found] != ends[:-1] or any(end < begin for begin, end in found):
            raise ValueError(f"Parts: expected every position of the sequence once, got {self.intervals}")
        if any(list(own) != sorted(own) for own in self.intervals):
            raise ValueError(f"Parts: expected each rank's intervals in ascending order, got {self.intervals}")

    @property
    def length(self) -> int:
        """How many positions the whole sequence has."""
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank has."""
        return tuple(sum(end - begin for begin, end in own) for own in self.intervals)

    @classmethod
    def contiguous(cls, lengths: Sequence[int] | Tensor) -> Parts:
        """One interval a rank, one after the other."""
        ends = [0, *accumulate(counts("Parts.contiguous", "lengths", lengths))]
        return cls(tuple((pair,) for pair in pairwise(ends)))

    @classmethod
    def even(cls, length: int, ranks: int) -> Parts:
        """One interval a rank; they differ by one position at most, the longer ones first."""
        (length,), (ranks,) = counts("Parts.even", "length", [length]), counts("Parts.even", "ranks", [ranks], 1)
        return cls.contiguous(even_lengths(length, ranks))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Parts:
        """Two intervals a rank, the first and the last of what is left: ranks have equal work under a causal mask."""
        return cls.documents([length], ranks, chunks=2)

    @classmethod
    def documents(cls, lengths: Sequence[int] | Tensor, ranks: int, causal: bool = True, chunks: int = CHUNKS) -> Parts:
        """The sequence in `chunks` equal pieces for each rank, handed out so that ranks have equal work.

        The work of a piece is the number of pairs of a query and a key that it sees, in documents of the given lengths
        one after the other. Largest first, each piece goes to the rank with least work that has room.

        Args:
            lengths: of the documents.
            ranks: how many.
            causal: whether queries see keys up to their own position, or all of their document.
            chunks: pieces of a rank.
        """
        name = "Parts.documents"
        lengths = counts(name, "lengths", lengths)
        (ranks,), (chunks,) = counts(name, "ranks", [ranks], 1), counts(name, "chunks", [chunks], 1)
        pieces = list(pairwise([0, *accumulate(even_lengths(sum(lengths), ranks * chunks))]))
        work = work_of(pieces, lengths, causal)
        loads, owned = [0] * ranks, [list[Interval]() for _ in range(ranks)]
        for piece in sorted(range(len(pieces)), key=lambda piece: -work[piece]):
            rank = min((r for r in range(ranks) if len(owned[r]) < chunks), key=lambda r: loads[r])
            owned[rank].append(pieces[piece])
            loads[rank] += work[piece]
        return cls(tuple(merged(own) for own in owned))


def as_count(given: object) -> int:
    """A Python integer of any integer of at least 0; ValueError of anything else."""
    number = as_int(given)
    if number is None or number < 0 or isinstance(given, bool):
        raise ValueError
    return number


def counts(function: str, name: str, given: Any, least: int = 0) -> list[int]:
    """Integers out of a sequence or a tensor."""
    items = given.tolist() if isinstance(given, Tensor) else given
    try:
        found = [as_count(item) for item in items]
    except (TypeError, ValueError):
        found = [least - 1]
    if any(number < least for number in found):
        raise ValueError(f"{function}: expected {name} as integers from {least} on, got {given}")
    return found


def even_lengths(length: int, parts: int) -> list[int]:
    each, longer = divmod(length, parts)
    return [each + (part < longer) for part in range(parts)]


def work_of(pieces: Sequence[Interval], lengths: Sequence[int], causal: bool) -> list[int]:
    """How many pairs of query and key each of the ascending pieces has."""
    documents = list(pairwise([0, *accumulate(lengths)]))
    found, first = [], 0
    for begin, end in pieces:
        while first < len(documents) and documents[first][1] <= begin:
            first += 1
        pairs, document = 0, first
        while document < len(documents) and documents[document][0] < end:
            start, stop = documents[document]
            low, high = max(begin, start), min(end, stop)
            pairs += triangle(high - start) - triangle(low - start) if causal else (high - low) * (stop - start)
            document += 1
        found.append(pairs)
    return found


def triangle(rows: int) -> int:
    return rows * (rows + 1) // 2


def merged(intervals: Iterable[Interval]) -> Intervals:
    """Intervals in ascending order, those that touch or overlap as one, without empty ones."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def common(one: Intervals, other: Intervals) -> Intervals:
    """What two ascending lists of intervals have in common."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return tuple((begin, end) for begin, end in pairs if begin < end)


def places(inside: Intervals, of: Intervals) -> list[Interval]:
    """Where intervals lie in a tensor that holds the positions of `of`, one interval after the other. Each lies in one
    interval of `of`."""
    starts = list(accumulate((end - begin for begin, end in of), initial=0))
    found = []
    for begin, end in inside:
        at = next(i for i, (low, high) in enumerate(of) if low <= begin and end <= high)
        found.append((starts[at] + begin - of[at][0], starts[at] + end - of[at][0]))
    return found
