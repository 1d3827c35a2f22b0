"""Dropout's random numbers: Philox4x32-7 (Salmon et al., SC 2011), the same bits in every kernel of ours."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sdpa.torch_private import current_stream

ROUNDS = 7  # the fewest of four words that pass BigCrush
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
WORD = 0xFFFFFFFF
HALF = 0xFFFF
PERIOD = 16  # of the rows and of the keys that one call of Philox serves
NUMBERS = 1 << 16  # that a pair of query and key may get

OFFSET_STEP = 4  # torch's CUDA generators count in steps of the four words of one Philox block
SEEDS = 1 << 12  # in one tensor of 64 KiB
MAX_POOLS = 16
VIEWS = 64
GOLDEN = 0x9E3779B97F4A7C15
WORD64 = 0xFFFFFFFFFFFFFFFF
MPS_BITS = 30


# What a call takes in this context in place of a seed of its own.
GIVEN: ContextVar[Tensor | None] = ContextVar("sdpa_dropout_rng", default=None)


def draw_seed(device: torch.device) -> Tensor:
    """A (2,) int64 key and offset from torch's generator of `device`, so that manual_seed and checkpointing hold."""
    if device.type == "mps":  # draws integers of 32 bits alone: two halves each
        low, high = torch.randint(0, 2**MPS_BITS, (2, 2), dtype=torch.int64, device=device).unbind()
        return low + (high << MPS_BITS)
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def next_seed(device: torch.device) -> Tensor:
    """The same for an eager call. On a CUDA device without a launch, except while a CUDA graph is captured."""
    if device.type != "cuda" or current_stream is None:
        return draw_seed(device)
    index = device.index
    assert index is not None  # of a tensor's device
    try:
        return POOLS.draw(torch.cuda.default_generators[index], index, current_stream(index))
    except (RuntimeError, AttributeError):  # a captured generator has no offset
        return draw_seed(device)


class Pool:
    """Consecutive seeds in one tensor, handed out as views that are made VIEWS at a time."""

    def __init__(self, seeds: Tensor) -> None:
        self.seeds, self.first = seeds, -VIEWS
        self.views: tuple[Tensor, ...] = ()

    def seed(self, number: int) -> Tensor:
        place = number - self.first
        if not 0 <= place < VIEWS:
            self.first, place = number, 0
            with torch.inference_mode(False):
                self.views = self.seeds[number : number + VIEWS].unbind(0)
        return self.views[place]


class SeedPools:
    """Seeds of CUDA devices, made many at a time.

    The seed of a call is a function of the generator's seed and offset alone, and every call moves the offset on. So
    manual_seed, set_rng_state and checkpointing, which set these, bring the same seeds again. A pool holds the seeds of
    SEEDS consecutive steps of the offset, and belongs to the stream that it is written and read on. Like torch's own
    generators, which threads share, it gives a thread no numbers of its own.
    """

    def __init__(self, make: Callable[[int, torch.device], Tensor]) -> None:
        self.make = make  # (key, device) -> (SEEDS, 2) int64
        self.pools: OrderedDict[tuple[int, int, int, int], Pool] = OrderedDict()
        self.lock = threading.RLock()

    def draw(self, generator: Any, index: int, stream: int) -> Tensor:
        """(2,) int64: the seed at the generator's offset, which moves on by one step."""
        with self.lock:
            offset = generator.get_offset()
            generator.set_offset(offset + OFFSET_STEP)
            seed = generator.initial_seed()
            block, number = divmod(offset // OFFSET_STEP, SEEDS)
            place = index, stream, seed, block
            pool = self.pools.get(place)
            if pool is None:
                pool = self.pools[place] = Pool(self.make(mixed(seed, block), torch.device("cuda", index)))
                while len(self.pools) > MAX_POOLS:
                    self.pools.popitem(last=False)
            else:
                self.pools.move_to_end(place)
            return pool.seed(number)


def mixed(seed: int, block: int) -> int:
    """A key of 62 bits for a generator's seed and a block of its offsets, by SplitMix64 (Steele et al., OOPSLA 2014).
    It differs from the seed, which is the key of torch's own Philox streams."""
    state = seed & WORD64
    for number in (block, 1):
        state = (state + (number + 1) * GOLDEN) & WORD64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD64
        state ^= state >> 31
    return state >> 2  # numbers are counted from it on


def make_pool(key: int, device: torch.device) -> Tensor:
    """Keys and offsets count on from `key`, so that one launch writes all. Where others move the generator on by
    millions between calls, as torch's efficient kernel does, each of ours makes a pool."""
    with torch.inference_mode(False):  # where a call with gradients may read it later
        numbers = torch.arange(key, key + 2 * SEEDS, dtype=torch.int64, device=device)
    return numbers.view(SEEDS, 2)


POOLS = SeedPools(make_pool)


def threshold(p: float) -> int:
    """A pair is dropped where its number is below this: of NUMBERS so many that the share is p within 2^-17. p < 1."""
    return min(NUMBERS - 1, int(p * NUMBERS + 0.5))


def kept_factor(p: float) -> float:
    """What kept weights are multiplied by, so that the mean stays as it is: 1 over the share that `threshold` keeps."""
    return NUMBERS / (NUMBERS - threshold(p))


def of_part(rng: Tensor, heads: int, head: int, row: int = 0, key: int = 0) -> Tensor:
    """(4,) int64 for a call of some heads, queries and keys of a larger one, which draws the numbers that this one has.

    Args:
        rng: (2,), of the larger call.
        heads: the query heads of its batch entries, all of which the part has.
        head: the part's first head.
        row: its first query, a multiple of PERIOD.
        key: its first key, likewise.
    """
    assert row % PERIOD == 0 and key % PERIOD == 0 and rng.shape == (2,)
    first = (rng.new_full((1,), upper << 32 | lower) for upper, lower in ((heads, head), (row, key)))
    return torch.cat([rng, *first])  # no copy from the host, for which it would wait


def is_of_part(rng: Tensor) -> bool:
    return rng.shape[0] == 4


def streams_of(rng: Tensor, entries: Tensor, heads: Tensor, H: int) -> Tensor:
    """The numbers of the streams of heads of batch entries, of H heads."""
    if not is_of_part(rng):
        return entries * H + heads
    return entries * (rng[2] >> 32) + (rng[2] & WORD) + heads


def keep_mask(rng: Tensor, p: float, shape: tuple[int, int, int, int], streams: Tensor | None = None) -> Tensor:
    """Bool (B, H, M, N), True where the pair is kept, with probability 1 / kept_factor(p).

    For query i and key j Philox has the key rng[0] and these counter words:

        j // 16 * 4 + j % 8 // 2,  i // 16 * 8 + i % 8,  b * H + h,  low word of rng[1]

    The pair's number is the low (even j) or high half of word i // 8 % 2 * 2 + j // 8 % 2 of the result. So a call
    serves queries i and i + 8 and keys j, j + 1, j + 8 and j + 9. Of a tensor core's products one thread has all these
    pairs, and of the transposed ones two have. `streams` (B * H,) are the b * H + h (`streams_of`) where B and H are
    those of a part only. With an rng `of_part` b, h, i and j are counted in the larger call.
    """
    B, H, M, N = shape
    device, blocks = rng.device, (N + 15) // 16
    groups = torch.arange(blocks * 4, device=device).view(1, 1, -1)
    rows = torch.arange(M, device=device).view(1, M, 1)
    if streams is None:
        entries, own = (torch.arange(size, device=device) for size in (B, H))
        streams = streams_of(rng, entries[:, None], own, H)
    heads = streams.reshape(-1, 1, 1)
    if is_of_part(rng):
        rows, groups = rows + (rng[3] >> 32), groups + (rng[3] & WORD) // 4
    row_groups = rows // 16 * 8 + rows % 8
    counter = torch.broadcast_tensors(groups, row_groups, heads, (rng[1] & WORD).view(1, 1, 1))
    words = philox(counter, (rng[0] & WORD, (rng[0] >> 32) & WORD))
    upper, least = rows // 8 % 2 == 1, threshold(p)
    near, far = (torch.where(upper, words[2 + k], words[k]) for k in range(2))  # of keys j % 16 < 8, and of the others
    kept = torch.stack([half >= least for word in (near, far) for half in (word & HALF, word >> 16)], -1)
    kept = kept.view(B * H, M, blocks, 4, 2, 2).transpose(3, 4)  # [B*H, M, N/16, 2, 4, 2]
    return kept.reshape(B, H, M, blocks * 16)[..., :N]


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Philox on four counter words and two key words, each a 32-bit value held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, by halves of the constant: int64 would overflow, which is
    undefined in the C++ that Inductor writes."""
    low, high = word * (constant & HALF), word * (constant >> 16)  # below 2^48
    return (high + (low >> 16)) >> 16, (low + ((high & HALF) << 16)) & WORD
