"""Few keys that many heads share: programs visit some of these heads, and their partial sums are added."""

from __future__ import annotations

import pytest
import torch

from sdpa.kernels.triton import backward, head_sums, tiles
from sdpa.kernels.triton.target import assume
from sdpa.problem import Tile
from sdpa.testing import Case, make_inputs, problem_of

SIZES = {"B": 2, "H": 6, "Hkv": 2, "M": 60, "N": 37, "D": 24, "Dv": 16}
# Two of the four heads of each group, by eight cores.
SOME = {"B": 1, "H": 8, "Hkv": 2, "M": 60, "N": 37, "D": 24, "Dv": 16}
# Keys that are no single block in 16 bits, where one pass would answer.
LONGER = {"B": 1, "H": 3, "Hkv": 1, "M": 50, "N": 140, "D": 16, "Dv": 24}
TILE = Tile(16, 32, 4, 1)
MASKS = ["none", "causal", "lengths", "segments", "bias", "allowed"]


@pytest.fixture
def sums(monkeypatch):
    """How many partial sums each head of keys had, of the backwards that a test ran."""
    counts = []

    def counted(partial, grads):
        assert partial.k.dtype == partial.v.dtype == torch.float32
        counts.append(partial.k.shape[1] // grads.k.shape[1])
        return head_sums.sum_heads_launch(partial, grads)

    monkeypatch.setattr(backward, "sum_heads_launch", counted)
    return counts


@pytest.mark.parametrize("sizes,cores,heads", [(SIZES, 132, 1), (SIZES, 9, 3), (SIZES, 1, 3), (SOME, 8, 2)])
def test_heads_of_a_program(sizes, cores, heads, targets):
    """Of 37 keys in two blocks. Three of a group's heads by 9 cores: 24 programs would take as long as 8."""
    with assume(targets[0]._replace(cores=cores)):
        problem = problem_of(make_inputs(Case(**sizes, dtype=torch.float32)), "backward")
        assert tiles.heads_of_program(problem, TILE) == heads
        everyone = problem.G
        assert tiles.heads_of_program(problem._replace(M=16), TILE) == everyone, "too few blocks of queries"
        assert tiles.heads_of_program(problem._replace(H=problem.Hkv), TILE) == 1
        packed = problem._replace(features=problem.features | {"packed"})
        assert tiles.heads_of_program(packed, TILE) == everyone
        window = problem._replace(features=problem.features | {"band"}, left=3, right=0)
        assert tiles.heads_of_program(window, Tile(16, 16, 4, 1)) == everyone, "the rows that see a block are few"


@pytest.mark.parametrize("mask", MASKS)
def test_one_head_a_program(mask, judge, sums, targets):
    inputs = make_inputs(Case(**SIZES, dtype=torch.float32, mask=mask))
    judge(inputs, tile=TILE, target=targets[0]._replace(cores=132), float32="parts")
    assert sums == [3]


@pytest.mark.parametrize("mask", MASKS)
def test_some_heads_a_program(mask, judge, sums, targets):
    inputs = make_inputs(Case(**SOME, dtype=torch.float32, mask=mask))
    judge(inputs, tile=TILE, target=targets[1]._replace(cores=8), float32="parts")
    assert sums == [2]


@pytest.mark.parametrize("mask", MASKS[:4])
def test_sums_of_float16_are_float32(mask, judge, sums, targets):
    inputs = make_inputs(Case(**LONGER, dtype=torch.float16, mask=mask))
    judge(inputs, tile=TILE, target=targets[0]._replace(cores=132))
    assert sums == [3]


def test_dropout_and_two_launches(judge, sums, targets):
    """dK and dV have a launch each; random numbers are of a head, whichever program visits it."""
    target, tile = targets[0]._replace(cores=132), Tile(32, 64, 1, 1)
    inputs = make_inputs(Case(**SIZES | {"D": 72, "Dv": 72, "N": 70, "M": 100}, dtype=torch.float32, dropout_p=0.2))
    with assume(target):
        assert tiles.is_split(problem_of(inputs, "backward"), tile)
    judge(inputs, tile=tile, target=target, float32="parts")
    assert sums == [3]
