"""float32 products of float16 parts: within float32's budget, and made again where float16 cannot hold what is met."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from sdpa.inputs import Options
from sdpa.kernels.triton import forward
from sdpa.kernels.triton.launch import run
from sdpa.kernels.triton.target import assume
from sdpa.problem import Tile
from sdpa.reference import attention as reference
from sdpa.sequences import Documents, build_packed
from sdpa.testing import Case, Draw, compare, forward_band, make_inputs, problem_of

TILE = Tile(32, 16, 4, 1)
SIZES = {"B": 1, "H": 2, "Hkv": 1, "M": 64, "N": 48, "D": 16, "Dv": 24, "dtype": torch.float32}
BLOCKS = 2 * 64 // 32


def launched(inputs, target, once=False):
    """(results, recompute flags [entries, blocks]) of the two launches of a forward, or of the first alone."""
    with assume(target):
        problem = problem_of(inputs, "forward")
        results, launches = forward.forward_launches(inputs, problem, TILE)
        run(launches[:-1] if once else launches, problem)
    return results, launches[-1].args[forward.RECOMPUTE]


def judge_out(inputs, got):
    wanted, plain = reference(inputs), reference(inputs, inputs.q.dtype)
    band = forward_band(inputs, wanted)
    found = [
        compare("out", got.out, wanted.out, plain.out, inputs.k.shape[2], band),
        compare("lse", got.lse, wanted.lse, plain.lse, inputs.k.shape[2]),
    ]
    assert all(c.ok for c in found), "; ".join(str(c) for c in found if not c.ok)


def times(name, factor):
    return lambda inputs: inputs._replace(**{name: getattr(inputs, name) * factor})


def one(name, value, row=40):
    def change(inputs):
        getattr(inputs, name)[:, :, row, 5] = value
        return inputs

    return change


# What float16 parts hold, and what they do not: a change of ordinary inputs, and the blocks that are computed again.
HELD = {
    "plain": lambda inputs: inputs,
    "large_values": times("v", 1e4),
    "small_keys": times("k", 1e-6),
    "tiny_queries": times("q", 1e-30),
    "no_queries": times("q", 0.0),
}
NOT_HELD = {
    "huge_values": (times("v", 1e9), BLOCKS),
    "small_values": (times("v", 1e-6), BLOCKS),
    "no_values": (times("v", 0.0), BLOCKS),
    "huge_keys_for_small_queries": (lambda inputs: times("q", 1e-7)(times("k", 1e7)(inputs)), BLOCKS),
    "large_queries_for_small_keys": (lambda inputs: times("q", 1e5)(times("k", 1e-5)(inputs)), BLOCKS),
    "one_huge_key": (one("k", 1e5), BLOCKS // 2),  # of those that causal blocks of queries meet
    "one_huge_value": (one("v", -3e38), BLOCKS // 2),
}


@pytest.mark.parametrize("name", HELD)
def test_parts_hold(name, target):
    inputs = HELD[name](make_inputs(Case(**SIZES), seed=2))
    got, flags = launched(inputs, target, once=True)
    assert not flags.any()
    judge_out(inputs, got)


@pytest.mark.parametrize("name", NOT_HELD)
def test_blocks_made_again(name, target):
    change, blocks = NOT_HELD[name]
    inputs = change(make_inputs(Case(**SIZES, mask="causal"), seed=2))
    got, flags = launched(inputs, target)
    assert int(flags.sum()) == blocks
    judge_out(inputs, got)


def test_queries_far_smaller_than_others_of_their_block(targets):
    """The power of two is that of the largest: what is 2^15 times smaller would lose digits, and keys make it count."""
    inputs = make_inputs(Case(**SIZES), seed=2)
    q, k = inputs.q * 100, inputs.k * 1.4e4
    q[:, :, ::2] *= 2.0**-22
    q[:, :, 1::2], k[..., 0] = 0.0, 0.0
    q[:, :, 1::2, 0] = 360.0  # whose scores are all alike
    inputs = inputs._replace(q=q, k=k)
    got, flags = launched(inputs, targets[0])
    assert flags.all()
    judge_out(inputs, got)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value, target):
    """As the products of float32 themselves have it."""
    inputs = one("v", value)(make_inputs(Case(**SIZES), seed=2))
    got, flags = launched(inputs, target)
    assert flags.all()
    plain = reference(inputs, torch.float32).out
    assert torch.equal(got.out.isnan(), plain.isnan())
    assert torch.equal(got.out.isposinf(), plain.isposinf())
    assert torch.equal(got.out.isneginf(), plain.isneginf())


def test_rows_without_keys_are_not_computed_again(targets):
    inputs = make_inputs(Case(**SIZES, mask="lengths"), seed=2)
    inputs = inputs._replace(k_lengths=torch.zeros_like(inputs.k_lengths))
    got, flags = launched(inputs, targets[0])
    assert not flags.any() and not got.out.any() and torch.isneginf(got.lse).all()


def test_packed_sequences(targets):
    """Blocks behind a sequence write no word, and the second kernel asks for none."""
    draw, cu = Draw(Case(**SIZES), 0), torch.tensor([0, 7, 60], dtype=torch.int32)
    q, k, v = (draw.normal(60, heads, 16) for heads in (2, 1, 1))
    for factor in (1.0, 1e-6):
        inputs = build_packed(q, k, v * factor, Documents(cu, cu, 53, 53), Options(is_causal=True, enable_gqa=True))
        got, _ = launched(inputs, targets[0])
        judge_out(inputs, got)


def test_one_part_is_as_exact_as_tf32(targets):
    """Half the budget of TF32: 11 bits, rounded instead of cut off."""
    torch.set_float32_matmul_precision("high")
    try:
        inputs = make_inputs(Case(**SIZES, mask="causal"), seed=2)
        got, flags = launched(inputs, targets[0], once=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    wanted = reference(inputs).out
    rounded = inputs._replace(**{n: tf32(getattr(inputs, n)) for n in ("q", "k", "v")})
    assert not flags.any()
    assert (got.out - wanted).abs().max() < (reference(rounded).out - wanted).abs().max()


def tf32(x):
    """Its first 10 bits behind the point, as the matrix units read them."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_half_precision_takes_one_launch(targets):
    inputs = make_inputs(Case(**{**SIZES, "dtype": torch.float16}), seed=2)
    with assume(targets[0]), patch.object(forward, "recompute_flags", side_effect=AssertionError):
        assert len(forward.forward_launches(inputs, problem_of(inputs, "forward"), TILE)[1]) == 1
