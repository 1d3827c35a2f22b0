"""The weights as a tensor, in the interpreter: every mask, per head and averaged, against the float64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from sdpa import Mask
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.triton.target import assume
from sdpa.kernels.triton.weights import weights
from sdpa.problem import AttentionProblem, Tile
from sdpa.reference import attention
from sdpa.testing import MASKS, Case, Draw, compare_weights, make_inputs

# Neither is a multiple of a tile; three heads in a group, and head sizes which no descriptor can address.
WIDE = {"B": 2, "H": 3, "Hkv": 1, "M": 37, "N": 53, "D": 24, "Dv": 24}
TALL = {"B": 2, "H": 4, "Hkv": 2, "M": 35, "N": 32, "D": 19, "Dv": 40, "layout": "bmhd", "dtype": torch.float16}


TILE = Tile(16, 32, 4, 1)


def made(inputs, lse, target, tile=TILE):
    """The weights per head, and averaged."""
    problems = [AttentionProblem.of(inputs, "weights", frozenset(extra)) for extra in ((), {"averaged"})]
    with assume(target):
        return [weights(inputs, lse, problem, tile) for problem in problems]


def judged(inputs, target, tile=TILE):
    """Both, within their budget."""
    results = made(inputs, attention(inputs).lse.float(), target, tile)
    found = [compare_weights(got, inputs, average) for got, average in zip(results, (False, True), strict=True)]
    assert all(c.ok for c in found), "; ".join(map(str, found))
    return results


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, targets):
    for target in targets:
        judged(make_inputs(Case(**WIDE, mask=mask)), target)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_half_precision(mask, target):
    judged(make_inputs(Case(**TALL, mask=mask), seed=1), target, Tile(32, 16, 4, 1))


EXTRAS = {
    "softcap": {"softcap": 3.0, "mask": "causal"},
    "sinks": {"sinks": True, "mask": "both_lengths"},
    "softcap_sinks_window": {"softcap": 2.0, "sinks": True, "mask": "window"},
    "dropout": {"dropout_p": 0.3},
    "dropout_bias": {"dropout_p": 0.1, "mask": "bias", "sinks": True},
    "dropout_padding": {"dropout_p": 0.5, "mask": "padding"},
    "scale_negative": {"scale": -0.7, "mask": "window_bottom_right"},
    "scale_zero": {"scale": 0.0, "mask": "lengths"},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_softcap_sinks_dropout_and_scale(name, target):
    judged(make_inputs(Case(**WIDE, **EXTRAS[name]), seed=3), target)


def test_masks_combined(targets):
    case = Case(**WIDE)
    draw = Draw(case, 4)
    q, k, v = (draw.normal(2, heads, size, 24) for heads, size in ((3, 37), (1, 53), (1, 53)))
    slopes, ids = draw.normal(2, 3, dtype=torch.float32).abs() / 4, draw.integers(0, 2, 2, 53).sort(-1).values
    everything = Mask(segments=(ids[:, :37], ids), bias=draw.normal(2, 1, 37, 53), alibi=slopes, window=(30, 3))
    lengths = Mask(lengths=torch.tensor([40, 0]))
    window = Mask(window=(9, 0), align="bottom_right")
    padding = Mask(allowed=draw.coins(1, 3, 1, 53, share=0.3)) & Mask(causal=True, prefix=draw.integers(0, 53, 2))
    for mask, target in itertools.product((everything & lengths, lengths & window, padding), targets):
        judged(build_inputs(q, k, v, Options(mask, enable_gqa=True)), target)


def test_what_lies_behind_the_lengths_does_not_reach_the_weights(targets):
    """Neither NaN nor huge numbers of keys and queries that are not there; their weights are 0."""
    inputs = make_inputs(Case(**WIDE))
    q, k = inputs.q.clone(), inputs.k.clone()
    q[1, :, 20:], k[0, :, 33:], k[1, :, 17:] = torch.nan, torch.nan, torch.finfo(torch.float32).max
    lengths = {"q_lengths": torch.tensor([37, 20]), "k_lengths": torch.tensor([33, 17])}
    inputs = inputs._replace(**{name: t.to(torch.int32) for name, t in lengths.items()})
    for target in targets:
        wanted = judged(inputs, target)
        got = made(inputs._replace(q=q, k=k), attention(inputs).lse.float(), target)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert not got[0][0, ..., 33:].any() and not got[0][1, :, 20:].any()


@pytest.mark.parametrize("sizes", [{"M": 16, "N": 32}, {"M": 1, "N": 1}, {"M": 0, "N": 5}, {"M": 5, "N": 0}], ids=str)
def test_other_sizes(sizes, targets):
    """Whole tiles, one pair, nothing at all."""
    for target in targets:
        inputs = make_inputs(Case(**{**WIDE, **sizes}))
        assert [w.shape[-2:] for w in judged(inputs, target)] == [(sizes["M"], sizes["N"])] * 2
