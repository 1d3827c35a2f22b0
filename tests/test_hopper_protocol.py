"""Who waits for whom on Hopper: the kernels' own text, of real launches, played on the host in orders drawn at random.

A play (kernel_play.py) fails where a buffer is read before its copy has landed, is overwritten while it is read, where
roles wait for each other, and where bytes or arrivals do not add up. What products read is compared with what attention
needs. No GPU.
"""

from __future__ import annotations

import inspect
import random
from itertools import groupby

import pytest
import torch

from sdpa.problem import AttentionInputs, AttentionProblem, Results

triton = pytest.importorskip("triton", reason="Triton has no package for this platform")

from ahead import H200  # noqa: E402
from kernel_play import play_program  # noqa: E402

from sdpa.kernels.triton import (  # noqa: E402
    hopper,
    hopper_backward,
    hopper_backward_kernel,
    hopper_forward_kernel,
    hopper_primitives,
    hopper_schedule,
)
from sdpa.kernels.triton.hopper_primitives import WG_ROWS  # noqa: E402
from sdpa.kernels.triton.target import assume  # noqa: E402

FORWARD = (hopper_schedule, hopper_primitives, hopper_forward_kernel)
BACKWARD = (hopper_schedule, hopper_primitives, hopper_backward_kernel)
ROWS = WG_ROWS.value
CORES = 4  # few programs, so that a persistent one has several blocks, and filled by the four heads
# D, queries, keys, causal, bias
FORWARDS = {
    "three consumers": (64, 1100, 600, False, False),
    "two consumers in ping-pong": (64, 300, 700, True, False),
    "bias in ping-pong": (64, 300, 500, True, True),
    "three consumers with a bias": (64, 1100, 300, False, True),
    "D128": (128, 400, 900, True, False),
    "D256": (256, 400, 330, False, False),
    "D256 causal": (256, 260, 330, True, False),
    "not persistent": (128, 200, 8200, False, False),
    "more queries than keys": (128, 700, 300, True, False),
}


def tensors(D, M, N, H=4, Hkv=2):
    return [torch.empty(1, heads, rows, D, dtype=torch.bfloat16) for heads, rows in ((H, M), (Hkv, N), (Hkv, N))]


def forward_launches(D, M, N, causal, biased):
    """The launch of each tile that is offered."""
    bias = torch.empty(1, 1, M, N + -N % 8, dtype=torch.bfloat16)[..., :N] if biased else None
    inputs = AttentionInputs(*tensors(D, M, N), 0.1, right=0 if causal else -1, bias=bias)
    problem = AttentionProblem.of(inputs, extra=frozenset({"lse"}))._replace(device="cuda:0")
    with assume(H200._replace(cores=CORES)):
        return [hopper.forward_launch(inputs, problem, tile)[1] for tile in hopper.tiles(problem)]


def check_forward(play, config, M, N, causal):
    """Each consumer multiplied its queries with all blocks of keys that they see, last to first, and then with the same
    blocks of values; returns the queries' first rows by head."""
    found = []
    for reads in play.reads.values():
        products = [(q, k) for q, k in reads if q is not None]
        values = [v for q, v in reads if q is None]
        assert [(v[1:]) for v in values] == [k[1:] for _, k in products]
        assert {k[0] for _, k in products} == {"k_desc"} and {v[0] for v in values} == {"v_desc"}
        for (_, batch, head, row, _), group in groupby(products, key=lambda product: product[0]):
            block_end = row // config.BLOCK_M * config.BLOCK_M + config.BLOCK_M
            end = max(1, min(N, block_end) if causal else N)
            starts = range((end - 1) // config.BLOCK_N * config.BLOCK_N, -1, -config.BLOCK_N)
            assert [k for _, k in group] == [("k_desc", batch, head // 2, start, 0) for start in starts]
            found.append((batch, head, row))
    return found


@pytest.mark.parametrize("name", FORWARDS)
def test_the_forward_neither_locks_nor_overwrites(name):
    D, M, N, causal, biased = FORWARDS[name]
    for launch in forward_launches(D, M, N, causal, biased):
        config = launch.args[-1]
        rounds = range(1 if N > 4096 else 3)
        for seed in rounds:
            found = []
            for program in range(launch.grid[0]):
                play = play_program(FORWARD, launch, program, random.Random(100 * seed + program))
                found += check_forward(play, config, M, N, causal)
            blocks = -(-M // config.BLOCK_M)
            wanted = {(0, head, row) for head in range(4) for row in range(0, blocks * config.BLOCK_M, ROWS)}
            assert len(found) == len(wanted) and set(found) == wanted


def test_the_forwards_played_are_of_every_kind():
    configs = [launch.args[-1] for case in FORWARDS.values() for launch in forward_launches(*case)]
    for name in ("CAUSAL", "BIAS", "PERSISTENT", "EPILOGUE_SMEM", "PINGPONG"):
        assert {getattr(config, name) for config in configs} == {True, False}, name
    assert {config.BLOCK_M // ROWS for config in configs} == {2, 3}
    assert any(config.PERSISTENT and not config.EPILOGUE_SMEM for config in configs)


BACKWARDS = {
    "D64": (64, 300, 400, -1, -1),
    "D64 causal": (64, 300, 300, -1, 0),
    "D128 window": (128, 300, 500, 100, 50),
    "D256": (256, 200, 300, -1, -1),
    "D256 causal": (256, 300, 300, -1, 0),
}


def backward_launches(D, M, N, left, right):
    inputs = AttentionInputs(*tensors(D, M, N), 0.1, left=left, right=right)
    problem = AttentionProblem.of(inputs, "backward")._replace(device="cuda:0")
    results = Results(torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3]))
    launches = []
    with assume(H200):
        for tile in hopper.tiles(problem):
            upstream = Results(torch.empty_like(inputs.q), None)
            launches += hopper_backward.backward_launches(inputs, results, upstream, problem, tile)[1][1:]
    return launches


def visible_blocks(config, row, heads, sizes, band):
    """The blocks (head, start) that stream by the block of rows at `row`, in order."""
    (M, N), (left, right) = sizes, band
    length, near, far = (M, right, left) if config.OVER_KEYS else (N, left, right)
    begin = 0 if near < 0 else max(row - near, 0) // config.BLOCK_INNER
    end = length if far < 0 else min(length, row + config.BLOCK_OUTER + far)
    return [(head, start * config.BLOCK_INNER) for head in heads
            for start in range(begin, max(begin, -(-end // config.BLOCK_INNER)))]  # fmt: skip


def check_backward(play, config, sizes, band):
    """Each consumer multiplied its rows with what streams by and they see; returns the rows' first by head."""
    found = set()
    for reads in play.reads.values():
        scores = [(a, x) for a, x in reads if a is not None and a[0] == "a"]
        others = [(b, y) for b, y in reads if b is not None and b[0] == "b"]
        sums = [operand for a, operand in reads if a is None]
        streamed = [x[1:] for _, x in scores]
        assert [y[1:] for _, y in others] == (streamed if config.GRAD_A else [])
        assert [x[1:] for x in sums if x[0] == "x"] == (streamed if config.GRAD_A else [])
        assert [y[1:] for y in sums if y[0] == "y"] == (streamed if config.GRAD_B else [])
        for (_, batch, head, row, _), group in groupby(scores, key=lambda product: product[0]):
            heads = (2 * head, 2 * head + 1) if config.OVER_KEYS else (head // 2,)
            wanted = visible_blocks(config, row // config.BLOCK_OUTER * config.BLOCK_OUTER, heads, sizes, band)
            assert [x for _, x in group] == [("x", batch, other, start, 0) for other, start in wanted]
            found.add((batch, head, row))
    return found


@pytest.mark.parametrize("name", BACKWARDS)
def test_the_backward_neither_locks_nor_overwrites(name):
    D, M, N, left, right = BACKWARDS[name]
    for launch in backward_launches(D, M, N, left, right):
        config = launch.args[-2]
        rows, heads = (N, 2) if config.OVER_KEYS else (M, 4)
        for seed in range(3):
            found = set()
            for program in range(launch.grid[0]):
                play = play_program(BACKWARD, launch, program, random.Random(100 * seed + program))
                found |= check_backward(play, config, (M, N), (left, right))
            outer = config.BLOCK_OUTER
            wanted = {
                (0, head, row)
                for head in range(heads)
                for row in range(0, -(-rows // outer) * outer, ROWS)
                if visible_blocks(config, row // outer * outer, (0,), (M, N), (left, right))
            }
            assert found == wanted


# A change of the kernel's text that makes it wrong, and what its play then says.
KEYS_RELEASED_EARLY = (
    "    s = warpgroup_mma_wait(1, deps=[s])\n    release_stage(bars.k_empty, i, CONFIG)\n",
    "    release_stage(bars.k_empty, i, CONFIG)\n    s = warpgroup_mma_wait(1, deps=[s])\n",
)
QUERIES_RELEASED_EARLY = (
    "    if CONFIG.EPILOGUE_SMEM:\n        mbarrier.arrive(bars.q_empty",
    "    if True:\n        mbarrier.arrive(bars.q_empty",
)
OTHER_VALUES = (
    "    return warpgroup_mma(p, v.index(stage)",
    "    return warpgroup_mma(p, v.index((i + 1) % CONFIG.STAGES)",
)
NOBODY_BEGINS = ("    if WG == CONFIG.BLOCK_M // WG_ROWS - 1:\n        ping_pong_signal(WG, CONFIG)\n", "")
NO_FENCE = ("descs.out.dtype))\n    fence_async_shared()\n", "descs.out.dtype))\n")
FORWARD_FAULTS = {
    "keys given back before the product has read them": ("D128", KEYS_RELEASED_EARLY, "overwritten"),
    "values of another stage": ("D128", OTHER_VALUES, "read before|overwritten"),
    "queries given back too early": ("D256", QUERIES_RELEASED_EARLY, "overwritten|too many|read before"),
    "no bytes of the bias": ("bias in ping-pong", ("i, beside, CONFIG)", "i, 0, CONFIG)"), "read before|wait"),
    "nobody begins in ping-pong": ("two consumers in ping-pong", NOBODY_BEGINS, "all wait for each other"),
    "no fence before the results are copied": ("D128", NO_FENCE, "no fence"),
    "one arrival for all consumers": ("D128", ("(STAGES, NUM_WGS)", "(STAGES, 1)"), "too many|overwritten|wait"),
}


def plays_of(launches, modules, change, seeds):
    for seed in range(seeds):
        for launch in launches:
            for program in range(launch.grid[0]):
                play_program(modules, launch, program, random.Random(seed), (change,))


@pytest.mark.parametrize("name", FORWARD_FAULTS)
def test_a_play_sees_a_forward_that_is_wrong(name):
    case, change, said = FORWARD_FAULTS[name]
    with pytest.raises(AssertionError, match=said):
        plays_of(forward_launches(*FORWARDS[case])[:1], FORWARD, change, 20)


X_RELEASED_EARLY = (
    "        s = warpgroup_mma_wait(1, deps=[s])\n",
    "        s = warpgroup_mma_wait(1, deps=[s])\n        release_stage(bars.x_empty, i, CONFIG)\n",
)


def test_a_play_sees_a_backward_that_is_wrong():
    """x given back behind S, though dS will be multiplied by it."""
    with pytest.raises(AssertionError, match=r"overwritten|too many|read before"):
        plays_of(backward_launches(*BACKWARDS["D64"])[:1], BACKWARD, X_RELEASED_EARLY, 20)


def test_a_change_is_found_in_the_text():
    """Else the tests above would play the kernel as it is."""

    for modules, changes in (
        (FORWARD, [change for _, change, _ in FORWARD_FAULTS.values()]),
        (BACKWARD, [X_RELEASED_EARLY]),
    ):
        text = "".join(map(inspect.getsource, modules))
        assert all(old in text for old, _ in changes), [old for old, _ in changes if old not in text]
