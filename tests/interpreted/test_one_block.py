"""Backwards whose keys are one block, and a bias whose rows TMA cannot follow."""

from __future__ import annotations

import itertools

import pytest
import torch

from sdpa.inputs import Options, build_inputs
from sdpa.kernels.triton import arguments, efficient, flash, tiles
from sdpa.kernels.triton.arguments import in_whole_rows, is_worth_a_copy
from sdpa.kernels.triton.backward import backward_launches
from sdpa.kernels.triton.target import assume
from sdpa.problem import Results
from sdpa.testing import Case, make_inputs, problem_of

SIZES = {"B": 3, "H": 2, "Hkv": 2, "dtype": torch.float16}


@pytest.mark.parametrize("mask", ["none", "causal", "bias", "bias_low", "padding", "lengths", "alibi"])
def test_one_block(mask, judge, target):
    for M, N in ((49, 49), (17, 64), (64, 9)):
        case = Case(**SIZES, M=M, N=N, D=24, Dv=32, mask=mask)
        judge(make_inputs(case), target=target, bias_grad=mask.startswith("bias"))


@pytest.mark.parametrize("mask", ["none", "causal", "bias", "padding", "lengths", "segments", "window", "alibi"])
def test_several_blocks_of_queries(mask, judge, target):
    """Of one head, of a group's heads, and of both; keys in one block of 128; sizes that are no multiples."""
    for M, N, D, heads in ((70, 40, 24, (1, 1)), (40, 49, 72, (4, 2)), (130, 128, 64, (2, 1))):
        case = Case(B=1, H=heads[0], Hkv=heads[1], dtype=torch.float16, M=M, N=N, D=D, Dv=D, mask=mask)
        judge(make_inputs(case), target=target)


@pytest.mark.parametrize("more", [{"dropout_p": 0.3}, {"softcap": 5.0}, {"mask": "bias", "dropout_p": 0.3}], ids=str)
def test_one_block_beside_the_mask(more, judge, target):
    inputs = make_inputs(Case(**SIZES, **{"M": 33, "N": 49, "D": 32, "Dv": 32, **more}))
    judge(inputs, target=target, bias_grad="mask" in more)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_lies_behind_lengths_is_not_seen(softcap, run_family, target):
    """NaN there makes nothing else NaN, and gradients there are 0."""
    lengths = torch.tensor([50, 21, 3], dtype=torch.int32), torch.tensor([17, 40, 33], dtype=torch.int32)
    case = Case(**SIZES, M=40, N=50, D=24, Dv=24)
    inputs = make_inputs(case)._replace(k_lengths=lengths[0], q_lengths=lengths[1], softcap=softcap)
    beyond = [
        (torch.arange(length) >= own[:, None]).view(3, 1, length, 1)
        for length, own in zip((50, 40), lengths, strict=True)
    ]
    clean = run_family(inputs, target=target)
    keys = {name: getattr(inputs, name).masked_fill(beyond[0], torch.nan) for name in "kv"}
    got = run_family(inputs._replace(q=inputs.q.masked_fill(beyond[1], torch.nan), **keys), target=target)
    for a, b in zip((*clean.results, *clean.grads[:3]), (*got.results, *got.grads[:3]), strict=True):
        assert torch.equal(a, b)
    assert not got.grads.q.masked_select(beyond[1]).any() and not got.grads.k.masked_select(beyond[0]).any()


def test_which_backwards_are_one_pass(targets):
    float32 = {"dtype": torch.float32}
    whole = [{}, {"N": 128}, {"D": 72, "Dv": 72}, {"Hkv": 1}, float32, {**float32, "D": 128, "N": 64}]
    parted = [{"N": 129}, {"D": 136, "Dv": 136, "N": 65}, {**float32, "N": 65}, {**float32, "D": 136}]
    # Programs that leave cores idle go through few blocks, each of 64 queries.
    whole += [{"M": 256}, {**float32, "M": 128}, {"M": 257, "B": 66}]
    parted += [{"M": 257}, {**float32, "M": 129}, {"M": 129, "Hkv": 1}]
    # Of wide heads and many keys, programs that fill the device are two passes.
    whole, parted = [*whole, {"D": 72, "N": 65}], [*parted, {"D": 72, "N": 65, "B": 66}]
    for sizes, one in (*((s, True) for s in whole), *((s, False) for s in parted)):
        case = Case(**{**SIZES, "M": 49, "N": 49, "D": 32, "Dv": 32, **sizes})
        inputs = make_inputs(case)
        problem = problem_of(inputs, "backward")
        out = inputs.q.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])
        results = Results(out, torch.empty(out.shape[:3]))
        with assume(targets[0]._replace(cores=132)):
            tile = tiles.tiles(problem)[0]
            assert {module.needs_whole_rows(problem, results.lse) for module in (flash, efficient)} == {one}
            launches = backward_launches(inputs, results, Results(out, None), problem, tile).launches
        names = [launch.kernel.fn.__name__ for launch in launches]
        assert (names == ["one_block_kernel"]) == one and (names[0] == "delta_kernel") != one


@pytest.mark.parametrize(
    "mask, copied",
    [
        (torch.zeros(1, 2, 9, 49), True),
        (torch.zeros(3, 1, 9, 49), True),
        (torch.zeros(3, 2, 9, 49), False),
        (torch.zeros(1, 1, 9, 48), False),
        (torch.zeros(1, 1, 1, 49), False),
        (torch.zeros(1, 1, 1, 49).expand(1, 1, 9, 49), False),
        (torch.zeros(1, 1, 9, 1).expand(1, 1, 9, 49), False),
    ],
    ids=["heads", "entries", "not shared", "whole rows", "one row", "one row expanded", "one column expanded"],
)
def test_which_masks_are_copied(mask, copied, targets, monkeypatch):
    """Those that many share and TMA cannot follow; never one whose memory is smaller than its copy."""
    inputs = make_inputs(Case(**SIZES, M=9, N=mask.shape[3], D=16, Dv=16))._replace(bias=mask.half())
    if 0 in mask.stride():
        inputs = inputs._replace(bias=mask)  # half() would make it whole
    problem = problem_of(inputs, "backward")
    with assume(targets[0]):
        assert not is_worth_a_copy(inputs.bias, inputs, problem), "few scores take less time than a copy"
        monkeypatch.setattr(arguments, "MIN_SCORES", problem.B * problem.H * problem.M * problem.N)
        assert is_worth_a_copy(inputs.bias, inputs, problem) == copied


@pytest.mark.parametrize(
    "mask, M, N, D, heads", [("bias", 49, 49, 24, 2), ("causal", 70, 40, 72, 1), ("lengths", 17, 22, 32, 2)]
)
def test_one_block_in_float32(mask, M, N, D, heads, judge, target):
    """Cut into float16 parts on chip: of one head, of a group's heads, and in several blocks of queries."""
    case = Case(**SIZES | {"dtype": torch.float32, "Hkv": heads}, M=M, N=N, D=D, Dv=D, mask=mask)
    judge(make_inputs(case), target=target, bias_grad=mask == "bias", float32="whole")


@pytest.mark.parametrize("more", [{"dropout_p": 0.3}, {"softcap": 5.0}, {"mask": "allowed"}], ids=str)
def test_one_block_in_float32_beside_the_mask(more, judge, target):
    inputs = make_inputs(Case(**SIZES | {"dtype": torch.float32}, **{"M": 33, "N": 49, "D": 32, "Dv": 32, **more}))
    judge(inputs, target=target, float32="whole")


def test_rows_of_a_copied_bias():
    for shape, dtype in itertools.product(((1, 2, 49, 49), (1, 1, 3, 8)), (torch.bfloat16, torch.float32)):
        bias = torch.randn(shape).to(dtype)
        copy = in_whole_rows(bias)
        assert torch.equal(copy, bias) and copy.stride(2) * copy.element_size() % 16 == 0 and copy.data_ptr() % 16 == 0
    assert build_inputs(*(torch.zeros(1, 2, 3, 8) for _ in range(3)), Options()).bias is None
