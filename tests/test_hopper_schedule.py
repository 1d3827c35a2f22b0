"""The order in which Hopper's programs take blocks of queries, by the kernel's own functions, without a device."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sdpa.problem import AttentionProblem

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200  # noqa: E402

from sdpa.kernels.triton import hopper, hopper_schedule  # noqa: E402
from sdpa.kernels.triton.target import assume  # noqa: E402

TARGET = H200._replace(cores=4)
LONG = 16384


def test_pairs_need_equal_shares_and_full_rounds():
    """Of causal problems only those that leave no core idle for long are dealt out beforehand."""
    problem = AttentionProblem("cpu", torch.bfloat16, 4, 16, 16, 4096, 4096, 128, 128, right=0)
    tile = hopper.tiles(problem)[0]
    with assume(TARGET._replace(cores=132)):
        assert hopper.is_persistent(problem, tile)  # 1024 pairs: 7.76 rounds
        assert not hopper.is_persistent(problem._replace(H=9, Hkv=9), tile)  # 4.36 rounds
        assert not hopper.is_persistent(problem._replace(N=1024), tile)  # the last blocks are as long as the middle
        assert not hopper.is_persistent(problem._replace(M=LONG, N=LONG), tile)
        assert hopper.is_persistent(problem._replace(H=9, Hkv=9, right=-1), tile)


def problem_with(B, H, blocks, causal):
    tile = hopper.TILES[0]
    rows = blocks * tile.BLOCK_M
    problem = AttentionProblem("cpu", torch.bfloat16, B, H, H, rows, rows, 128, 128, right=0 if causal else -1)
    return problem, tile


def visits(B, H, blocks, programs, causal, bias=None):
    """[((batch, head), block)] of each program, by the order of the entries and the kernel's own functions."""
    build = SimpleNamespace(CAUSAL=causal, BLOCK_M=1)
    schedule = hopper.order_of(*problem_with(B, H, blocks, causal), True, bias)
    found = []
    for program in range(programs):
        found.append([])
        for share in range(program, schedule.all_shares, programs):
            batch, head, n = find_share(share, schedule)
            for part in range(hopper_schedule.share_size.fn(n, schedule, build)):
                found[-1].append(((batch, head), hopper_schedule.first_row.fn(n, part, schedule, build)))
    return found


def find_share(number, schedule):
    """The kernel's own, whose helper is no function of Python's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_schedule, "batch_and_head", hopper_schedule.batch_and_head.fn)
        return hopper_schedule.find_share.fn(number, schedule)


BIASES = {None: None, "heads": (1, 3), "batches": (2, 1), "both": (2, 3), "neither": (1, 1)}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_shares_hold_every_block_once(causal, name):
    bias = name and torch.empty(*BIASES[name], 1, 1)
    for blocks in range(1, 14):
        for programs in (1, 2, 5, 132):
            found = Counter(at for own in visits(2, 3, blocks, programs, causal, bias) for at in own)
            assert found == Counter(((b, h), n) for b in range(2) for h in range(3) for n in range(blocks))


def test_causal_shares_are_equally_long():
    work = [sum(block + 1 for _, block in own) for own in visits(1, 33, 32, 132, True)]
    assert min(work) == max(work)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name,shared", [("heads", 2), ("batches", 3), ("both", 1), ("neither", 3)])
def test_readers_of_the_same_bias_run_side_by_side(name, shared, persistent):
    """(batch, head) of neighbouring programs differ only along what the bias has one entry for."""
    bias = torch.empty(*BIASES[name], 1, 1)
    schedule = hopper.order_of(*problem_with(2, 3, 7, False), persistent, bias)
    build = SimpleNamespace(CAUSAL=False, BLOCK_M=1)
    places = [find_share(n, schedule) if persistent else locate(n, schedule, build) for n in range(schedule.all_shares)]
    assert len(set(places)) == len(places) == 2 * 3 * 7
    for first in range(0, len(places), shared):
        near = places[first : first + shared]
        own = {(b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, n) for b, h, n in near}
        assert len(own) == 1, near


def locate(number, schedule, build):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_schedule, "batch_and_head", hopper_schedule.batch_and_head.fn)
        patch.setattr(hopper_schedule, "entry_and_block", hopper_schedule.entry_and_block.fn)
        patch.setattr(hopper_schedule.gl, "minimum", min)
        return hopper_schedule.locate.fn(number, schedule, build)
