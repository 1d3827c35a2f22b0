"""A block of a mask: what a range of queries sees of a range of keys, as a mask of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sdpa.distributed.parts import Interval
from sdpa.inputs import ids_of
from sdpa.mask import Mask
from sdpa.problem import UNLIMITED

READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by tensor its version and what was read


class Block(NamedTuple):
    """Queries and keys of which some see each other, and their mask."""

    rows: Interval
    keys: Interval
    mask: Mask


class Blocks:
    """The blocks of one mask of M queries and N keys.

    Args:
        mask: of the whole sequence.
        M: queries.
        N: keys.
        in_steps: whether keys come in several ranges, and not all that a range of queries sees at once.
        periods: of rows and of keys. Blocks begin at multiples of them, where the ranges that they are cut from do.

    Raises:
        RuntimeError: a mask whose blocks are none that a Mask can say. It depends on what all ranks know.
    """

    def __init__(self, mask: Mask, M: int, N: int, in_steps: bool = False, periods: tuple[int, int] = (1, 1)) -> None:
        self.mask, self.M, self.N, self.periods = mask, M, N, periods
        self.left, self.right = mask.band
        self.shift = N - M if mask.align == "bottom_right" else 0
        self.has_lengths = mask.lengths is not None or mask.query_lengths is not None
        self.has_prefix = mask.prefix is not None and mask.has_band
        refused = self.refusal(in_steps)
        if refused:
            raise RuntimeError(f"context_parallel: {refused} mode='ulysses'")
        self.ends = documents(mask, M, N)

    def refusal(self, in_steps: bool) -> str:
        """What is no mask of a block, and which other mode takes it."""
        mask, shift = self.mask, self.shift
        if mask.align == "bottom_right" and self.has_lengths and (mask.has_band or mask.alibi is not None):
            return "a diagonal at the end of lengths is for"
        if self.has_prefix and (self.left != UNLIMITED or shift < 0):
            return "a prefix with a window to the left is for"
        pairs = isinstance(mask.segments, tuple) or isinstance(mask.cu_seqlens, tuple)
        is_causal = self.right == 0 and not (self.has_lengths or self.has_prefix or pairs)
        if mask.alibi is not None and not (is_causal and shift >= 0 and self.M + shift <= self.N):
            return "slopes without a plain causal mask are for"
        # A block would begin beside the band, where lengths keep it from being told from its end.
        beside = self.left != UNLIMITED or (self.right != UNLIMITED and self.right % self.periods[0] > 0)
        if self.periods[0] > 1 and self.has_lengths and beside:
            return "dropout with lengths and a window is for"
        if in_steps and (mask.alibi is not None or self.has_prefix):
            return "slopes and a prefix are for mode='gather' and"
        return ""

    def of(self, rows: Interval, keys: Interval) -> Block | None:
        """What of these rows sees some of these keys; None where nothing does."""
        rows, keys = self.cut(rows, keys)
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            return None
        mask, cut = self.mask, dict[str, Any]()
        if mask.has_band:
            cut = {"causal": False, **self.band(rows, keys)}
        if mask.lengths is not None:
            cut["lengths"] = (mask.lengths.long() - keys[0]).clamp(min=0)
        if mask.query_lengths is not None:
            cut["query_lengths"] = (mask.query_lengths.long() - rows[0]).clamp(min=0)
        if mask.segments is not None or mask.cu_seqlens is not None:
            cut |= {"cu_seqlens": None, "segments": self.segments(rows, keys)}
        for name in ("allowed", "bias"):
            dense = getattr(mask, name)
            if dense is not None:
                cut[name] = narrow(narrow(dense, -2, rows), -1, keys)
        return Block(rows, keys, mask.replace(**cut))

    def band(self, rows: Interval, keys: Interval) -> dict[str, Any]:
        """The window of these rows and keys alone, and its corner. A side that hides nothing is lifted."""
        M, N = rows[1] - rows[0], keys[1] - keys[0]
        offset = rows[0] + self.shift - keys[0]  # of the first query's own place among these keys
        left = None if self.left == UNLIMITED or self.left - offset >= M - 1 else self.left - offset
        right = None if self.right == UNLIMITED or self.right + offset >= N - 1 else self.right + offset
        align = "top_left"
        # From the last corner, which the band crosses: at the first one may lie rows and keys beside it.
        if N != M and not self.has_lengths and not self.has_prefix:
            align, left = "bottom_right", None if left is None else left + (N - M)
            right = None if right is None else right - (N - M)
        return {"align": align, "window": None if left is None and right is None else (left, right)}

    def cut(self, rows: Interval, keys: Interval) -> tuple[Interval, Interval]:
        """Those of them that `seen` leaves, from a multiple of the periods on."""
        (begin, end), (first, last) = self.seen(rows, keys)
        if begin < end and first < last and not (self.has_lengths and self.left != UNLIMITED):
            begin, first = (at // period * period for at, period in zip((begin, first), self.periods, strict=True))
        return (begin, end), (first, last)

    def seen(self, rows: Interval, keys: Interval) -> tuple[Interval, Interval]:
        """Without the rows at either end that see none of the keys, and without keys that none of the rows sees."""
        begin, end = rows
        first, last = keys
        if self.has_prefix:  # all rows see its keys, of which a device may know the number
            return rows, keys
        if self.ends is not None:
            firsts, lasts = zip(*(interval for interval, _ in self.of_documents(rows)), strict=True)
            first, last = max(first, min(firsts)), min(last, max(lasts))
        if self.right != UNLIMITED:
            last = min(last, end + self.shift + self.right)
            begin = max(begin, first - self.shift - self.right)
        if self.left != UNLIMITED:
            first = max(first, begin + self.shift - self.left)
            end = min(end, last - self.shift + self.left)
        return (begin, end), (first, last)

    def of_documents(self, rows: Interval) -> Iterator[tuple[Interval, bool]]:
        """By batch entry the keys of the documents that these rows lie in, and whether it is one document."""
        for queries, keys in self.ends or ():
            low, high = bisect_right(queries, rows[0]), bisect_right(queries, rows[1] - 1)
            yield ((keys[low - 1] if low else 0), (keys[high] if high < len(keys) else self.N)), low == high

    def segments(self, rows: Interval, keys: Interval) -> tuple[Tensor, Tensor] | None:
        """The ids of these rows and keys; None where all are of one document in every batch entry."""
        found = list(self.of_documents(rows))
        if found and all(is_one and of[0] <= keys[0] and keys[1] <= of[1] for of, is_one in found):
            return None
        given: Any = self.mask.segments if self.mask.segments is not None else self.mask.cu_seqlens
        pair = given if isinstance(given, tuple) else (given, given)
        of_rows, of_keys = ids_of(self.mask, pair, (self.M, self.N))
        return of_rows[:, slice(*rows)], of_keys[:, slice(*keys)]


def narrow(dense: Tensor, dim: int, interval: Interval) -> Tensor:
    """These rows or columns of a dense mask; all of it where they repeat."""
    begin, end = interval
    return dense if dense.dim() < -dim or dense.shape[dim] == 1 else dense.narrow(dim, begin, end - begin)


def documents(mask: Mask, M: int, N: int) -> list[tuple[list[int], list[int]]] | None:
    """Where documents end among queries and among keys, if they lie one after the other; by batch entry if these
    differ."""
    if mask.cu_seqlens is not None:
        given = mask.cu_seqlens if isinstance(mask.cu_seqlens, tuple) else (mask.cu_seqlens,) * 2
        queries, keys = (remembered(cu, lambda cu: cu.tolist()[1:]) for cu in given)
        return [(queries, keys)]
    ids = mask.segments
    if not isinstance(ids, Tensor) or M != N or not ids.numel():
        return None
    found = [(ends, ends) for ends in remembered(ids, ends_of)]
    return found if all(ends for ends, _ in found) else None


def ends_of(ids: Tensor) -> list[list[int]]:
    """By row where runs of the same id end; nothing where an id has several runs."""
    found = []
    for row in ids.reshape(-1, ids.shape[-1]).cpu():
        runs, counts = row.unique_consecutive(return_counts=True)
        found.append(list(accumulate(counts.tolist())) if len(runs.unique()) == len(runs) else [])
    return found


def remembered(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """What the host reads of a tensor: of a device's, for which it waits, once as long as nobody writes into it."""
    if tensor.is_inference() or tensor.device.type == "cpu":  # counts no writes, or not those of NumPy
        return read(tensor)
    version, found = READ.get(tensor, (None, None))
    if version != tensor._version:
        found = read(tensor)
        READ[tensor] = tensor._version, found
    return found
