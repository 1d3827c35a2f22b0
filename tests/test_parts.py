"""Parts of a sequence, and blocks of a mask: each block says what the whole mask says there."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from sdpa import Mask
from sdpa.distributed import Parts
from sdpa.distributed.blocks import Blocks
from sdpa.distributed.choosing import keys_sent, pairs_of
from sdpa.distributed.modes import KEYS_OF_BLOCKS
from sdpa.distributed.parts import common, merged, places, work_of

KERNELS = Path(__file__).resolve().parent.parent / "kernels/cpu"
B, H = 2, 2
SIZES = ((13, 13), (13, 13), (9, 14), (14, 9))


def drawn(chance: random.Random, g: torch.Generator, M: int, N: int) -> Mask:
    """A mask of some fields."""

    def lengths(limit: int) -> torch.Tensor:
        return torch.randint(0, limit + 1, (B,), generator=g)

    def ids() -> torch.Tensor:
        found = torch.randint(0, 3, (chance.choice([1, B]), M), generator=g)
        return found.sort(-1)[0] if chance.random() < 0.7 else found

    choices = {
        "causal": (0.6, lambda: True),
        "window": (0.4, lambda: (chance.choice([None, 0, 2, 5]), chance.choice([None, 0, 3]))),
        "align": (0.3, lambda: "bottom_right"),
        "lengths": (0.3, lambda: lengths(N)),
        "query_lengths": (0.2, lambda: lengths(M)),
        "prefix": (0.2, lambda: chance.choice([3, lengths(N)])),
        "alibi": (0.2, lambda: torch.rand(H, generator=g)),
        "allowed": (0.2, lambda: torch.rand(B, 1, M, N, generator=g) < 0.7),
        "bias": (0.2, lambda: torch.randn(1, H, chance.choice([1, M]), N, generator=g)),
    }
    fields = {name: make() for name, (likely, make) in choices.items() if chance.random() < likely}
    if chance.random() < 0.3 and M == N:
        fields["segments"] = ids()
    elif chance.random() < 0.2:
        fields["cu_seqlens"] = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 7])
    return Mask(**fields)


def test_blocks_of_random_masks():
    chance, g = random.Random(0), torch.Generator().manual_seed(0)
    told, refused = 0, set()
    for _ in range(2500):
        M, N = chance.choice(SIZES)
        mask, periods = drawn(chance, g, M, N), chance.choice([(1, 1), (1, 4), (4, 4)])
        (begin, end), (first, last) = (sorted(chance.sample(range(size + 1), 2)) for size in (M, N))
        rows, keys = (begin // periods[0] * periods[0], end), (first // periods[1] * periods[1], last)
        keys = (0, N) if chance.random() < 0.5 else keys
        try:
            block = Blocks(mask, M, N, keys != (0, N), periods).of(rows, keys)
        except RuntimeError as error:
            refused.add(str(error))
            continue
        wanted = mask.dense(B, H, M, N)[:, :, slice(*rows), slice(*keys)]
        nothing = False if wanted.dtype == torch.bool else -torch.inf
        found = torch.full_like(wanted, nothing)
        if block is not None:
            (begin, end), (first, last) = block.rows, block.keys
            dense = block.mask.dense(B, H, end - begin, last - first)
            if dense.dtype != wanted.dtype:
                dense = torch.where(dense, 0.0, -torch.inf)
            found[:, :, begin - rows[0] : end - rows[0], first - keys[0] : last - keys[0]] = dense
            assert begin % periods[0] == 0
            assert first % periods[1] == 0 or (mask.lengths is not None or mask.query_lengths is not None)
        torch.testing.assert_close(found, wanted, msg=f"{mask} {rows} {keys} {periods}")
        told += 1
    assert told > 1500 and len(refused) == 5 and all("mode='ulysses'" in text for text in refused), (told, refused)


def test_documents_that_are_one_need_no_ids():
    mask = Mask(causal=True, cu_seqlens=torch.tensor([0, 4, 10]))
    block = Blocks(mask, 10, 10).of((6, 8), (0, 10))
    assert block is not None and block.keys == (4, 8) and block.mask.segments is None and block.mask.cu_seqlens is None
    assert Blocks(mask, 10, 10).of((0, 4), (4, 10)) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_lengths_that_end_before_a_block(dtype):
    lengths = torch.tensor([20, 50], dtype=dtype)
    block = Blocks(Mask(lengths=lengths, query_lengths=lengths), 64, 64).of((32, 64), (32, 64))
    assert block is not None and block.mask.lengths.tolist() == block.mask.query_lengths.tolist() == [0, 18]


def test_parts_begin_where_blocks_of_the_cpu_do():
    """Keys from a multiple on are cut into blocks and chains as all keys are, by each instruction set."""
    sources = "".join((KERNELS / name).read_text() for name in ("primitives.h", "primitives_amx.cpp"))
    blocks = {name: int(size) for name, size in re.findall(r"Blocking (k\w+) = \{.*, (\d+)\};", sources)}
    (chain,) = re.findall(r"kValueChain = (\d+);", sources)
    assert set(blocks) == {"kVectorBlocking", "kBlocking", "kSplitBlocking"}, (
        blocks
    )  # the last two are AMX's, of 16 bits
    for size, multiple in KEYS_OF_BLOCKS.items():
        of_this = [keys for name, keys in blocks.items() if size == 2 or name == "kVectorBlocking"]
        assert all(multiple % keys == 0 for keys in (*of_this, int(chain))), (size, multiple, blocks, chain)


def test_documents_of_several_batch_entries():
    """Keys of no entry's documents are cut off, and ids where each entry's rows are of one."""
    ids = torch.tensor([[0] * 4 + [1] * 6, [0] * 3 + [1] * 5 + [2] * 2])
    blocks = Blocks(Mask(causal=True, segments=ids), 10, 10)
    block = blocks.of((5, 7), (0, 10))
    assert block is not None and block.keys == (3, 7) and block.mask.segments is not None
    one = blocks.of((5, 7), (4, 10))
    assert one is not None and one.keys == (4, 7) and one.mask.segments is None
    assert blocks.of((8, 9), (0, 4)) is None
    mixed = torch.tensor([[0] * 4 + [1] * 6, [0, 1] * 5])
    assert Blocks(Mask(segments=mixed), 10, 10).ends is None


@pytest.mark.parametrize("field", ["cu_seqlens", "segments"])
def test_documents_are_read_again_where_they_changed(field):
    given = torch.tensor([0, 4, 10] if field == "cu_seqlens" else [0] * 4 + [1] * 6)
    mask = Mask(causal=True, **{field: given})
    assert Blocks(mask, 10, 10).of((6, 8), (0, 10)).keys == (4, 8)
    given[1 if field == "cu_seqlens" else slice(2, 4)] = 2 if field == "cu_seqlens" else 1
    assert Blocks(mask, 10, 10).of((6, 8), (0, 10)).keys == (2, 8)
    given.numpy()[:] = given.clone().numpy()
    with torch.inference_mode():
        mask = Mask(causal=True, **{field: given.clone()})
        assert Blocks(mask, 10, 10).of((6, 8), (0, 10)).keys == (2, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 64, 1000])
def test_every_position_once(ranks, length):
    for parts in (Parts.even(length, ranks), Parts.zigzag(length, ranks), Parts.documents([length], ranks)):
        positions = [place for own in parts.intervals for interval in own for place in range(*interval)]
        assert sorted(positions) == list(range(length)) and sum(parts.lengths) == parts.length == length
        assert len(parts.intervals) == ranks and max(parts.lengths) - min(parts.lengths) <= 8


def test_zigzag_is_the_first_and_the_last():
    assert Parts.zigzag(16, 2).intervals == (((0, 4), (12, 16)), ((4, 12),))
    assert Parts.zigzag(24, 3).intervals == (((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),))


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_balanced(causal):
    """The most work of a rank is within 5 % of the mean, where one document after the other is not."""
    chance = random.Random(1)
    lengths = sorted(chance.randint(100, 9000) for _ in range(40))
    balanced, even = Parts.documents(lengths, 8, causal), Parts.even(sum(lengths), 8)

    def unevenness(parts: Parts) -> float:
        work = [sum(work_of(own, lengths, causal)) for own in parts.intervals]
        return max(work) / (sum(work) / len(work))

    assert unevenness(balanced) < 1.05 < 1.2 < unevenness(even)


def test_work_is_the_pairs_that_see_each_other():
    lengths, pieces = [3, 0, 5, 4], [(0, 2), (2, 7), (7, 12)]
    for causal in (True, False):
        mask = Mask(causal=causal, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
        dense = mask.dense(1, 1, 12, 12)[0, 0]
        assert work_of(pieces, lengths, causal) == [int(dense[slice(*piece)].sum()) for piece in pieces]


def test_intervals():
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]) == ((0, 3), (4, 9))
    assert common(((0, 4), (8, 12)), ((2, 9),)) == ((2, 4), (8, 9))
    assert places(((2, 4), (8, 9)), ((0, 4), (8, 12))) == [(2, 4), (4, 5)]


@pytest.mark.parametrize(
    ("intervals", "told"),
    [
        ((((0, 2),), ((3, 4),)), "every position of the sequence once"),
        ((((0, 2),), ((1, 4),)), "every position of the sequence once"),
        ((((2, 4), (0, 2)),), "in ascending order"),
        ((((0.0, 5.0),),), "by rank pairs of integers"),
        (5, "by rank pairs of integers"),
    ],
)
def test_wrong_parts(intervals, told):
    with pytest.raises((ValueError, TypeError), match=told):
        Parts(intervals)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Parts.even(10, 0), "Parts.even: expected ranks as integers from 1 on, got \\[0\\]"),
        (lambda: Parts.even(10.0, 2), "Parts.even: expected length as integers from 0 on"),
        (lambda: Parts.even(-1, 2), "Parts.even: expected length as integers from 0 on"),
        (lambda: Parts.documents([5, -3], 2), "Parts.documents: expected lengths as integers from 0 on"),
        (lambda: Parts.documents(10, 2), "Parts.documents: expected lengths as integers from 0 on, got 10"),
        (lambda: Parts.documents([5], 2, chunks=0), "Parts.documents: expected chunks as integers from 1 on"),
        (lambda: Parts.contiguous(10), "Parts.contiguous: expected lengths"),
    ],
)
def test_wrong_arguments(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def test_lengths_of_a_tensor():
    lengths = torch.tensor([5, 0, 3])
    assert Parts.documents(lengths, 2) == Parts.documents([5, 0, 3], 2)
    assert Parts.contiguous(lengths).intervals == (((0, 5),), (), ((5, 8),))


def test_keys_that_ranks_send():
    """As by counting each pair of ranks."""
    chance = random.Random(2)
    for _ in range(50):
        owned = Parts.documents([chance.randint(1, 30) for _ in range(5)], 4, chunks=3)
        needs = [
            merged(tuple(sorted(chance.sample(range(owned.length + 1), 2))) for _ in range(chance.randint(0, 3)))
            for _ in range(4)
        ]
        expected = [
            sum(end - begin for to in range(4) if to != rank for begin, end in common(own, needs[to]))
            for rank, own in enumerate(owned.intervals)
        ]
        assert keys_sent(needs, owned.intervals) == expected


@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True),
        Mask(causal=True, window=(16, 0)),
        Mask(causal=True, cu_seqlens=torch.arange(0, 2049, 128)),
        Mask(window=(100, 30)),
    ],
)
def test_pairs_are_counted_nearly(mask):
    expected = int(mask.dense(1, 1, 2048, 2048).sum())
    assert abs(pairs_of(Blocks(mask, 2048, 2048), [(0, 2048)]) / expected - 1) < 0.03
