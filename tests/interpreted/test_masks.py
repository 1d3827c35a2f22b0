"""Every mask, forward and backward, in the interpreter: alone, combined, and with all else a call can ask for."""

from __future__ import annotations

import pytest
import torch

import helpers
from sdpa import Mask
from sdpa.inputs import Options, build_inputs
from sdpa.kernels.triton import arguments
from sdpa.kernels.triton.prepared import PREPARED
from sdpa.problem import Tile
from sdpa.testing import MASKS, Case, Draw, make_inputs

# Two groups of sizes, neither a multiple of a tile: more keys than queries; more queries than keys in another layout,
# with odd head sizes, which no descriptor can address.
WIDE = {"B": 2, "H": 2, "Hkv": 1, "M": 37, "N": 53, "D": 24, "Dv": 24}
TALL = {"B": 2, "H": 4, "Hkv": 2, "M": 35, "N": 32, "D": 19, "Dv": 40, "layout": "bmhd", "dtype": torch.float16}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, judge):
    judge(make_inputs(Case(**WIDE, mask=mask)), tile=Tile(16, 32, 4, 1))


@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_half_precision(mask, judge):
    judge(make_inputs(Case(**TALL, mask=mask), seed=1), tile=Tile(32, 16, 4, 1))


@pytest.fixture
def one_loop(monkeypatch):
    """Short bands and documents in one loop over cut and whole blocks, by small tiles, too."""
    monkeypatch.setattr(arguments, "SMALL_TILE", 0)
    PREPARED.clear()
    yield
    PREPARED.clear()


IN_ONE_LOOP = (
    "causal",
    "causal_bottom_right",
    "window",
    "window_bottom_right",
    "segments",
    "segments_causal",
    "prefix",
    "alibi",
)


@pytest.mark.parametrize("mask", IN_ONE_LOOP)
def test_masks_in_one_loop(mask, judge, one_loop):
    """Forward in half precision, then backward in two passes, of heads with keys of their own."""
    judge(make_inputs(Case(**{**TALL, "Hkv": 4}, mask=mask), seed=1), tile=Tile(32, 16, 4, 1))
    judge(make_inputs(Case(**{**WIDE, "Hkv": 2}, mask=mask, dropout_p=0.3)), tile=Tile(16, 32, 4, 1))


@pytest.mark.parametrize("mask", ["segments", "segments_causal"])
def test_segments_that_queries_and_keys_share(mask, judge):
    judge(make_inputs(Case(**{**WIDE, "Hkv": 2, "M": 61, "N": 61}, mask=mask), seed=2))


# Bounds one before, at and one behind the ends of tiles of 16, where a whole block stops being one.
NEAR = torch.tensor([15, 16, 17])
EDGES = {
    **{f"window_{a}_{b}": (48, Mask(window=(a, b))) for a, b in ((14, 16), (15, 15), (16, 14), (17, 13))},
    **{f"diagonal_{n}": (48 + n, Mask(causal=True, align="bottom_right")) for n in (-17, -16, -15, -1, 1, 15, 16)},
    "lengths": (48, Mask(lengths=NEAR + 16, query_lengths=NEAR)),
    "lengths_causal": (48, Mask(lengths=NEAR, query_lengths=NEAR.flip(0), causal=True, align="bottom_right")),
    "prefix": (48, Mask(causal=True, prefix=NEAR)),
    "prefix_window": (48, Mask(window=(15, 0), prefix=NEAR)),
    "segments": (48, Mask(segments=(torch.arange(48) >= NEAR[:, None]) + (torch.arange(48) >= 32).int())),
    "padding": (48, Mask(allowed=torch.arange(48) < 16 + NEAR.view(3, 1, 1, 1))),
}


@pytest.mark.parametrize("name", EDGES)
def test_bounds_at_the_ends_of_tiles(name, judge):
    judge(at_the_ends(name))


@pytest.mark.parametrize("name", [name for name in EDGES if not name.startswith(("lengths", "padding"))])
def test_bounds_at_the_ends_of_tiles_in_one_loop(name, judge, one_loop):
    judge(at_the_ends(name))


def at_the_ends(name):
    N, mask = EDGES[name]
    draw = Draw(Case(), 9)
    q, k, v = draw.normal(3, 1, 48, 16), draw.normal(3, 1, N, 16), draw.normal(3, 1, N, 16)
    return build_inputs(q, k, v, Options(mask))


EXTRAS = {
    "softcap": {"softcap": 3.0},
    "softcap_causal": {"softcap": 0.8, "mask": "causal"},
    "sinks": {"sinks": True},
    "sinks_lengths": {"sinks": True, "mask": "both_lengths"},
    "softcap_sinks_window": {"softcap": 2.0, "sinks": True, "mask": "window"},
    "dropout": {"dropout_p": 0.3},
    "dropout_causal": {"dropout_p": 0.5, "mask": "causal"},
    "dropout_of_a_part": {"dropout_p": 0.4, "mask": "causal"},
    "dropout_bias_sinks": {"dropout_p": 0.1, "mask": "bias", "sinks": True},
    "scale_negative": {"scale": -0.7},
    "scale_negative_window": {"scale": -0.7, "mask": "window_bottom_right"},
    "scale_zero": {"scale": 0.0},
    "scale_zero_lengths": {"scale": 0.0, "mask": "lengths"},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_softcap_sinks_dropout_and_scale(name, judge, target):
    inputs = make_inputs(Case(**WIDE, **EXTRAS[name]), seed=3)
    judge(helpers.of_part(inputs) if name == "dropout_of_a_part" else inputs, target=target)


def options_of(name, draw):
    """Combinations that a call can ask for with `&`."""
    c = draw.case
    places = torch.arange(c.N).view(1, 1, 1, -1)
    ids = draw.integers(0, 3, c.B, c.N).sort(-1).values
    shared = (ids[:1, : c.M], ids[:1])
    lengths = Mask(lengths=draw.integers(1, c.N, c.B))
    slopes = draw.normal(c.B, c.H, dtype=torch.float32).abs() / 4
    bias = draw.normal(c.B, 1, c.M, c.N)

    def segments(low_q, high_q, low_k, high_k):
        return Mask(segments=(draw.integers(low_q, high_q, c.B, c.M), draw.integers(low_k, high_k, c.B, c.N)))

    return {
        "lengths_window": lambda: lengths & Mask(window=(6, 2)),
        "lengths_window_bottom_right": lambda: lengths & Mask(window=(9, 0), align="bottom_right"),
        "prefix_bias": lambda: Mask(causal=True, prefix=draw.integers(0, c.N, c.B)) & Mask(bias=bias),
        "prefix_window": lambda: Mask(window=(4, 4), prefix=draw.integers(0, 9, c.B)),
        "prefix_window_lengths": lambda: Mask(window=(4, 0), prefix=20) & lengths,
        "alibi_window": lambda: Mask(alibi=slopes, window=(11, 5)),
        "alibi_both_ways": lambda: Mask(alibi=slopes[0]),
        "alibi_lengths_bottom_right": lambda: Mask(alibi=slopes, causal=True, align="bottom_right") & lengths,
        "padding_causal": lambda: Mask(allowed=draw.coins(c.B, 1, 1, c.N)) & Mask(causal=True),
        "padding_at_the_end": lambda: Mask(allowed=places < torch.tensor([21, c.N]).view(2, 1, 1, 1)),
        "padding_of_heads": lambda: Mask(allowed=draw.coins(1, c.H, 1, c.N, share=0.2)),
        "allowed_rows": lambda: Mask(allowed=draw.coins(c.B, c.H, c.M, 1)),
        "allowed_bias": lambda: Mask(allowed=draw.coins(c.M, c.N)) & Mask(bias=bias),
        "allowed_segments": lambda: Mask(allowed=draw.coins(c.B, 1, 1, c.N)) & Mask(segments=shared),
        "segments_of_one_row": lambda: Mask(segments=shared) & Mask(window=(20, 20)),
        "segments_without_order": lambda: segments(0, 2, 0, 2),
        "segments_that_seldom_meet": lambda: segments(0, 5, 5, 9),
        "segments_lengths": lambda: Mask(segments=shared) & lengths,
        "everything": lambda: Mask(segments=shared, bias=bias, alibi=slopes, window=(30, 3)) & lengths,
    }[name]()  # fmt: skip


COMBINED = (
    "lengths_window", "lengths_window_bottom_right", "prefix_bias", "prefix_window", "prefix_window_lengths",
    "alibi_window", "alibi_both_ways", "alibi_lengths_bottom_right", "padding_causal", "padding_at_the_end",
    "padding_of_heads", "allowed_rows", "allowed_bias", "allowed_segments", "segments_of_one_row",
    "segments_without_order", "segments_that_seldom_meet", "segments_lengths", "everything",
)  # fmt: skip


def combined_inputs(name, case, seed=4):
    draw = Draw(case, seed)
    q = draw.normal(case.B, case.H, case.M, case.D)
    k, v = draw.normal(case.B, case.Hkv, case.N, case.D), draw.normal(case.B, case.Hkv, case.N, case.Dv)
    return build_inputs(q, k, v, Options(options_of(name, draw), enable_gqa=True))


@pytest.mark.parametrize("name", COMBINED)
def test_combined_masks(name, judge):
    judge(combined_inputs(name, Case(**WIDE)))


LOWEST = torch.finfo(torch.float32).min
# Float masks as people write them: what they hide, of [M, N], and the number that hides it.
HIDING = {
    "first_keys": (lambda i, j: j < 33, -torch.inf),
    "above_the_diagonal": (lambda i, j: j > i, -torch.inf),
    "below_the_diagonal": (lambda i, j: j < i + 16, -torch.inf),
    "rows": (lambda i, j: (i % 3 == 0) & (j >= 0), -torch.inf),
    "last_keys_lowest": (lambda i, j: j >= 20, LOWEST),
    "rows_lowest": (lambda i, j: (i % 3 == 0) & (j >= 0), LOWEST),
}


@pytest.mark.parametrize("name", HIDING)
def test_float_masks_that_hide(name, judge, target):
    """-inf hides a key; of the lowest number in a whole row, the mean of all values is left."""
    hides, number = HIDING[name]
    case = Case(**{**WIDE, "B": 1})
    hidden = hides(torch.arange(case.M).view(-1, 1), torch.arange(case.N))
    bias = torch.zeros(1, 1, case.M, case.N).masked_fill(hidden, number)
    judge(make_inputs(case, seed=8)._replace(bias=bias), target=target)


BIASES = {
    "one": lambda c: (1, 1, 1, 1),
    "matrix": lambda c: (c.M, c.N),
    "keys": lambda c: (c.B, 1, 1, c.N),
    "rows_of_heads": lambda c: (1, c.H, c.M, 1),
    "heads": lambda c: (1, c.H, 1, 1),
    "batch": lambda c: (c.B, 1, c.M, c.N),
    "all": lambda c: (c.B, c.H, c.M, c.N),
}
# What else the call asks for while the bias learns.
BESIDE = {
    "alone": ({}, Mask()),
    "causal_dropout": ({"dropout_p": 0.3}, Mask(causal=True)),
    "window_sinks_softcap": ({"sinks": True, "softcap": 2.0}, Mask(window=(9, 9), align="bottom_right")),
}
LEARNED = [("one", "window_sinks_softcap"), ("keys", "causal_dropout"), ("rows_of_heads", "window_sinks_softcap"),
           ("matrix", "causal_dropout"), *((shape, "alone") for shape in BIASES)]  # fmt: skip


@pytest.mark.parametrize("shape,beside", LEARNED)
def test_gradient_of_the_bias(shape, beside, judge, target):
    extra, mask = BESIDE[beside]
    case = Case(**WIDE, **extra)
    inputs, draw = make_inputs(case, seed=5), Draw(case, 6)
    bias = draw.normal(*BIASES[shape](case))
    options = Options(mask & Mask(bias=bias), case.dropout_p, softcap=case.softcap, sinks=inputs.sinks, enable_gqa=True)
    judge(build_inputs(inputs.q, inputs.k, inputs.v, options), target=target, bias_grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bias_through_strides(dtype, judge):
    """A transposed bias, in the dtype of q and in float32, read and differentiated where it lies."""
    case = Case(**WIDE, dtype=torch.float16)
    inputs = make_inputs(case, seed=6)
    bias = Draw(case, 7).normal(1, case.H, case.N, case.M, dtype=dtype).mT
    judge(inputs._replace(bias=bias), bias_grad=True)
