"""triton_decode in the interpreter: few queries, keys in parts, heads of a group in one tile, keys in pages."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa import Mask
from sdpa.inputs import Options
from sdpa.kernels.triton import decode
from sdpa.kernels.triton.target import assume
from sdpa.packing import gathered
from sdpa.problem import Tile
from sdpa.reference import attention as reference
from sdpa.sequences import Pages, build_paged
from sdpa.testing import MASKS, Case, Draw, make_inputs, problem_of

# Instead of what hides latency on a device, and of what a program and its parts cost: many parts of few keys.
FEW_KEYS = {"MIN_KEYS": 16, "START_KEYS": 4, "COMBINE_KEYS": 0}
SIZES = {"B": 2, "H": 6, "Hkv": 2, "D": 24, "Dv": 24}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    for name, keys in FEW_KEYS.items():
        monkeypatch.setattr(decode, name, keys)
    decode.split.cache_clear()
    yield
    decode.split.cache_clear()


def test_parts(targets):
    """These tests mean nothing if keys are not cut: the number of parts that each kind of device takes."""
    problem = problem_of(make_inputs(Case(**SIZES, M=1, N=75)), "forward")
    assert decode.parts_of(problem, Tile(16, 16, 4, 1)) == 1
    with assume(targets[1]._replace(cores=1 << 20)):
        assert decode.parts_of(problem, Tile(16, 16, 4, 1)) == 5
        assert decode.parts_of(problem._replace(N=1 << 20), Tile(16, 16, 4, 1)) == decode.MAX_PARTS


def test_parts_give_every_core_as_much(monkeypatch):
    """The busiest core, in keys, beside an even share of all; no part has fewer keys than hide latency."""
    monkeypatch.undo()
    decode.split.cache_clear()
    for programs, keys in ((160, 10671), (4, 49881), (64, 32609), (8, 32768)):
        parts = decode.split(programs, keys, 132)
        assert -(-keys // parts) >= decode.MIN_KEYS
        assert -(-programs * parts // 132) * -(-keys // parts) <= 1.1 * max(programs * keys / 132, decode.MIN_KEYS)
    assert decode.split(1000, 4096, 132) == decode.split(1, 256, 132) == 1


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
