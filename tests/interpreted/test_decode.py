"""triton_decode in the interpreter: few queries, keys in parts, heads of a group in one tile, keys in pages."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa import Mask
from sdpa.inputs import Options
from sdpa.kernels.triton import key_parts
from sdpa.kernels.triton.target import Target, assume
from sdpa.packing import gathered
from sdpa.problem import AttentionProblem, Tile
from sdpa.reference import attention as reference
from sdpa.sequences import Pages, build_paged
from sdpa.testing import MASKS, Case, Draw, make_inputs, problem_of

# Instead of what hides latency on a device, and of what a program and its parts cost: many parts of few keys.
FEW_KEYS = {"MIN_KEYS": 16, "START": 1e-9, "COMBINING": 0.0, "COMBINED_BYTES": 0.0}
SIZES = {"B": 2, "H": 6, "Hkv": 2, "D": 24, "Dv": 24}
H200 = Target("cuda", 90, 227 << 10, 132, 60 << 20, 4.9e12)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    for name, value in FEW_KEYS.items():
        monkeypatch.setattr(key_parts, name, value)
    key_parts.split.cache_clear()
    yield
    key_parts.split.cache_clear()


def test_parts(targets):
    """These tests mean nothing if keys are not cut: the number of parts that each kind of device takes."""
    problem, tile = problem_of(make_inputs(Case(**SIZES, M=1, N=75)), "forward"), Tile(16, 16, 4, 1)
    with assume(targets[1]._replace(cores=1)):
        assert key_parts.parts_of(problem._replace(B=9), tile) == 1, "a wave is full of whole rows of keys"
    with assume(targets[1]._replace(cores=1 << 20)):
        assert key_parts.parts_of(problem, tile) == 5
        assert key_parts.parts_of(problem._replace(N=1 << 20), tile) == key_parts.MAX_PARTS


# Of the sweep in docs/log/gpu-decode.md, on an H200: B, H, Hkv, M, N, D, then the us of the tiles of 64 and of 128 keys
# by parts, then the fastest of all tiles and parts that were swept.
SWEPT = [
    ((10, 16, 16, 1, 16413, 64), {1: 237.7, 2: 163.7, 3: 164.0, 4: 160.3, 5: 175.4}, {1: 174.9, 2: 172.0}, 160.3),
    ((21, 40, 8, 1, 2256, 128), {1: 52.3, 2: 56.1, 3: 62.4, 4: 59.2}, {1: 63.6, 2: 61.2}, 52.1),
    ((54, 14, 2, 1, 902, 64), {1: 15.9, 2: 17.4, 3: 17.2, 4: 18.3}, {1: 13.5, 2: 16.4}, 13.5),
    ((25, 48, 8, 1, 1530, 128), {1: 41.9, 2: 51.7, 3: 49.1}, {1: 47.2, 2: 56.2}, 41.9),
    ((64, 32, 8, 1, 4096, 128), {1: 271.0, 2: 262.1, 3: 259.3, 4: 257.8}, {1: 244.3, 2: 259.7}, 243.6),
    ((2, 64, 8, 1, 30000, 128), {6: 73.2, 8: 64.1, 16: 63.6}, {5: 67.8, 6: 64.5, 8: 63.8, 16: 67.3}, 63.1),
    ((1, 8, 8, 1, 8192, 128), {8: 24.0, 16: 18.4, 32: 17.3}, {8: 18.1, 12: 16.9, 16: 16.6, 32: 18.9}, 16.6),
    ((1, 71, 1, 7, 3524, 64), {8: 13.3, 12: 12.3, 16: 11.8}, {8: 14.8, 12: 13.9, 16: 13.7}, 11.8),
    ((3, 32, 32, 29, 8985, 80), {1: 161.0, 2: 140.1, 4: 142.9}, {1: 143.2, 2: 152.6, 3: 154.2, 4: 125.2}, 108.9),
    ((40, 8, 8, 1, 700, 256), {1: 64.1, 2: 65.3, 3: 65.5}, {}, 64.1),
]


@pytest.mark.parametrize(("sizes", "of_64", "of_128", "fastest"), SWEPT)
def test_the_model_finds_what_is_fast(monkeypatch, sizes, of_64, of_128, fastest):
    """Tile and parts are within 17 % of the fastest of the sweep, and the model's time within 30 % of the measured."""
    monkeypatch.undo()
    key_parts.split.cache_clear()
    problem = AttentionProblem("cuda:0", torch.bfloat16, *sizes, sizes[-1])
    with assume(H200):
        (tile,) = key_parts.tiles(problem)
    told = key_parts.split(key_parts.work_of(problem, tile), tile, H200)
    by_parts = {64: of_64, 128: of_128}[tile.BLOCK_N]
    measured = by_parts[min(by_parts, key=lambda parts: abs(math.log(parts / told.parts)))]
    assert measured <= 1.17 * fastest
    assert told.seconds == pytest.approx(measured * 1e-6, rel=0.3)


def test_no_part_is_shorter_than_what_hides_latency(monkeypatch):
    monkeypatch.undo()
    key_parts.split.cache_clear()
    tile = key_parts.TILES[0]
    for programs, keys in ((160, 10671), (4, 49881), (64, 32609), (8, 32768), (1, 0), (1, 256)):
        parts = key_parts.split(key_parts.Work(programs, 1, keys, 512, 512, programs * 520), tile, H200).parts
        assert parts == 1 or keys // parts >= key_parts.MIN_KEYS - 1


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, judge_decode):
    """One query over parts of the keys; nine queries, whose 27 rows of a group are two tiles."""
    judge_decode(make_inputs(Case(**SIZES, M=1, N=75, mask=mask)))
    judge_decode(make_inputs(Case(**{**SIZES, "B": 1}, M=9, N=37, mask=mask), seed=1))


EXTRAS = {
    "sinks": {"sinks": True},
    "sinks_window": {"sinks": True, "mask": "window_bottom_right"},
    "sinks_lengths": {"sinks": True, "mask": "lengths"},
    "softcap": {"softcap": 2.0, "mask": "causal_bottom_right"},
    "scale": {"scale": -0.6},
    "scale_zero": {"scale": 0.0, "mask": "causal_bottom_right"},
    "half": {"dtype": torch.float16, "mask": "lengths", "layout": "bmhd"},
    "dropout": {"dropout_p": 0.4, "mask": "causal_bottom_right"},
    "dropout_sinks": {"dropout_p": 0.4, "sinks": True, "M": 7},
    "odd": {"D": 19, "Dv": 7, "mask": "causal_bottom_right"},
    "expanded": {"layout": "expanded"},
    "many_heads": {"H": 20, "Hkv": 1},
    "one_head": {"H": 2, "Hkv": 2, "N": 80},
    "one_key": {"N": 1},
    "more_parts_than_combined_at_once": {"B": 1, "H": 1, "Hkv": 1, "N": 530},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extras(name, judge_decode):
    judge_decode(make_inputs(Case(**{**SIZES, "M": 3, "N": 75, **EXTRAS[name]}), seed=2))


@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min], ids=["infinity", "lowest"])
def test_bias_that_hides_a_row_or_a_part(number, judge_decode):
    """All keys of the first query, and of the others those of the first two parts."""
    inputs = make_inputs(Case(**SIZES, M=3, N=75), seed=2)
    hidden = (torch.arange(3).view(-1, 1) == 0) | (torch.arange(75) < 2 * FEW_KEYS["MIN_KEYS"])
    judge_decode(inputs._replace(bias=torch.zeros(1, 1, 3, 75).masked_fill(hidden, number)))


@pytest.mark.parametrize("name", ["sinks_lengths", "odd", "half"])
def test_one_part(name, judge_decode, targets):
    """A device that one program fills: the first kernel writes the results itself."""
    inputs = make_inputs(Case(**{**SIZES, "M": 3, "N": 75, **EXTRAS[name]}), seed=2)
    judge_decode(inputs, target=targets[1]._replace(cores=1))


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(64, 64, 4, 1)], ids=lambda t: f"{t[0]}x{t[1]}"
)
def test_tiles(tile, judge_decode):
    judge_decode(make_inputs(Case(**SIZES, M=4, N=131, mask="window_bottom_right"), seed=3), tile=tile)


# Sequences of 37, 0 and 60 keys; pages in any order; entries behind a sequence's last page are not to be looked at.
LENGTHS = torch.tensor([37, 0, 60], dtype=torch.int32)
PAGED = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"attn_mask": Mask(window=(20, 0), align="bottom_right")},
    "prefix": {"attn_mask": Mask(causal=True, align="bottom_right", prefix=torch.tensor([9, 3, 60]))},
    "alibi": {"attn_mask": Mask(alibi=torch.tensor([0.1, 0.2, 0.4, 0.05]), causal=True, align="bottom_right")},
    "query_lengths": {"attn_mask": Mask(causal=True, align="bottom_right", query_lengths=torch.tensor([1, 2, 0]))},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.7},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "dropout": {"dropout_p": 0.4, "is_causal": True},
}


def paged_inputs(name, page_size, M=2, dtype=torch.float32, spoilt=None):
    """`spoilt` is what lies wherever no valid key does."""
    draw, per_sequence = Draw(Case(dtype=dtype), 5), -(-64 // page_size)
    pages = 3 * per_sequence + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(6))
    table = order[: 3 * per_sequence].view(3, per_sequence).to(torch.int32)
    keys, values = draw.normal(pages, page_size, 2, 24), draw.normal(pages, page_size, 2, 16)
    valid = torch.zeros(pages, page_size, dtype=torch.bool)
    for b, length in enumerate(LENGTHS.tolist()):
        for j in range(length):
            valid[table[b, j // page_size], j % page_size] = True
        table[b, -(-length // page_size) :] = -7 if spoilt is not None else 0
    if spoilt is not None:
        keys, values = (t.masked_fill(~valid[..., None, None], spoilt) for t in (keys, values))
    query = draw.normal(3, M, 4, 24)
    return build_paged(query, keys, values, Pages(table, LENGTHS), Options(**{"enable_gqa": True, **PAGED[name]}))


@pytest.mark.parametrize("name", PAGED)
def test_pages(name, judge_decode):
    judge_decode(paged_inputs(name, page_size=5))


@pytest.mark.parametrize("page_size", [1, 4, 16, 24, 64], ids=lambda n: f"page{n}")
def test_page_sizes(page_size, judge_decode):
    """Pages smaller and larger than a tile's keys, and such as divide neither."""
    judge_decode(paged_inputs("window", page_size))


@pytest.mark.parametrize("M", [1, 11], ids=lambda m: f"M{m}")
def test_pages_in_half_precision(M, judge_decode):
    judge_decode(paged_inputs("causal", 8, M=M, dtype=torch.float16))


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e30], ids=str)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_pages_beyond_the_lengths_are_not_seen(name, spoilt, judge_decode):
    wanted = reference(gathered(paged_inputs(name, 5)))
    judge_decode(paged_inputs(name, 5, spoilt=spoilt), results=wanted)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, align="bottom_right")], ids=["full", "causal"])
def test_what_lies_behind_lengths_is_not_seen(mask, judge_decode):
    inputs = make_inputs(Case(**{**SIZES, "H": 4}, M=2, N=75), seed=7)
    lengths = torch.tensor([21, 0], dtype=torch.int32)
    inputs = inputs._replace(k_lengths=lengths, right=0 if mask.has_band else inputs.right, bottom_right=mask.has_band)
    beyond = (torch.arange(75) >= lengths[:, None]).view(2, 1, 75, 1)
    clean = judge_decode(inputs)
    spoilt = inputs._replace(k=inputs.k.masked_fill(beyond, math.nan), v=inputs.v.masked_fill(beyond, math.nan))
    for a, b in zip(clean, judge_decode(spoilt, results=reference(inputs)), strict=True):
        assert torch.equal(a, b)
    assert (clean.lse[1] == -torch.inf).all() and not clean.out[1].any()


@pytest.mark.parametrize("mask", ["window_bottom_right", "causal"])
def test_key_blocks_outside_of_the_mask_are_not_loaded(mask, judge_decode):
    """Queries 0..1 of a causal mask meet the first block of keys only; of a window at the end the last ones."""
    inputs = make_inputs(Case(**SIZES, M=2, N=75, mask=mask), seed=8)
    hidden = torch.arange(75) >= 16 if mask == "causal" else torch.arange(75) < 64
    clean = judge_decode(inputs)
    spoilt = inputs._replace(**{n: getattr(inputs, n).masked_fill(hidden[:, None], math.nan) for n in "kv"})
    for a, b in zip(clean, judge_decode(spoilt, results=reference(inputs)), strict=True):
        assert torch.equal(a, b)
