"""Few keys that many heads share: programs visit a part of these heads, and what they add is summed."""

from __future__ import annotations

import pytest
import torch

from sdpa.kernels.triton import tiles
from sdpa.kernels.triton.target import assume
from sdpa.problem import Tile
from sdpa.testing import Case, make_inputs, problem_of

SIZES = {"B": 2, "H": 6, "Hkv": 2, "M": 60, "N": 37, "D": 24, "Dv": 16}
TILE = Tile(16, 32, 4, 1)


@pytest.mark.parametrize("cores,heads", [(132, 1), (9, 3), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_of_a_program(cores, heads, dtype, targets):
    """Two heads of three queries' heads each, of 37 keys in 2 blocks: 8 programs, or 24 of a third of the work."""
    with assume(targets[0]._replace(cores=cores)):
        problem = problem_of(make_inputs(Case(**SIZES, dtype=dtype)), "backward")
        assert tiles.heads_of_program(problem, TILE) == heads
        assert tiles.heads_of_program(problem._replace(M=16), TILE) == 3, "too few blocks of queries"
        assert tiles.heads_of_program(problem._replace(H=2), TILE) == 1


@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "segments", "bias", "allowed"])
@pytest.mark.parametrize("dtype,float32", [(torch.float32, "parts"), (torch.float16, "itself")], ids=str)
def test_masks(mask, dtype, float32, judge, targets):
    target = targets[0]._replace(cores=132)
    judge(make_inputs(Case(**SIZES, dtype=dtype, mask=mask)), tile=TILE, target=target, float32=float32)


def test_dropout_and_two_launches(judge, targets):
    """dK and dV have a launch each; random numbers are of a head, whichever program visits it."""
    target, tile = targets[0]._replace(cores=132), Tile(32, 64, 1, 1)
    inputs = make_inputs(Case(**SIZES | {"D": 72, "Dv": 72, "N": 70}, dtype=torch.float32, dropout_p=0.2))
    with assume(target):
        assert tiles.is_split(problem_of(inputs, "backward"), tile)
    judge(inputs, tile=tile, target=target, float32="parts")
