"""The cases of `sdpa check`: every mask, dtype and layout at sizes that do not fit tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TypedDict

import torch

from sdpa.testing import LAYOUTS, MASKS, Case


class Sizes(TypedDict):
    """A case's sizes, by the letters of the glossary."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int


class Extra(TypedDict, total=False):
    """What a case asks for beside its sizes and dtype."""

    H: int
    Hkv: int
    mask: str
    softcap: float
    sinks: bool
    dropout_p: float
    scale: float
    requires_bias_grad: bool


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Odd on purpose: primes, one query, one key, one element, just over a tile, value heads wider and narrower than keys'.
SMALL: Sizes = {"B": 2, "H": 4, "Hkv": 2, "M": 37, "N": 53, "D": 24, "Dv": 24}
SIZES: tuple[Sizes, ...] = (
    {"B": 1, "H": 2, "Hkv": 2, "M": 67, "N": 67, "D": 64, "Dv": 64},
    {"B": 2, "H": 8, "Hkv": 2, "M": 1, "N": 131, "D": 64, "Dv": 64},
    {"B": 3, "H": 2, "Hkv": 1, "M": 43, "N": 1, "D": 8, "Dv": 8},
    {"B": 1, "H": 3, "Hkv": 3, "M": 129, "N": 97, "D": 19, "Dv": 19},
    {"B": 1, "H": 2, "Hkv": 2, "M": 65, "N": 130, "D": 40, "Dv": 72},
    {"B": 1, "H": 2, "Hkv": 2, "M": 31, "N": 64, "D": 128, "Dv": 16},
    {"B": 1, "H": 2, "Hkv": 2, "M": 64, "N": 192, "D": 64, "Dv": 64},
    {"B": 1, "H": 1, "Hkv": 1, "M": 1, "N": 1, "D": 1, "Dv": 1},
)
LARGE: tuple[Sizes, ...] = (
    {"B": 1, "H": 2, "Hkv": 2, "M": 257, "N": 509, "D": 64, "Dv": 64},
    {"B": 1, "H": 4, "Hkv": 1, "M": 193, "N": 385, "D": 128, "Dv": 128},
    {"B": 1, "H": 1, "Hkv": 1, "M": 521, "N": 263, "D": 96, "Dv": 96},
)
# What a call can ask for beside its mask.
EXTRAS: tuple[Extra, ...] = (
    {"softcap": 3.0},
    {"sinks": True},
    {"dropout_p": 0.3},
    {"scale": -0.7},
    {"scale": 0.0},
    {"softcap": 2.0, "sinks": True, "mask": "window"},
    {"dropout_p": 0.5, "mask": "causal", "H": 4, "Hkv": 1},
    {"mask": "bias", "requires_bias_grad": True},
    {"mask": "bias_rows", "requires_bias_grad": True},
)
# One per entry of SIZES in the quick grid.
QUICK_MASKS = (
    "none", "causal", "causal_bottom_right", "allowed_heads", "segments_causal", "alibi", "bias_low", "none",
)  # fmt: skip
# Masks that touch every kind of code in a kernel, for grids that cannot afford all.
FEW_MASKS = ("none", "causal", "window_bottom_right", "lengths", "allowed", "bias")


def cases(device: str, quick: bool) -> Iterator[Case]:
    """Quick: each mask, size, layout and extra once per dtype. Else: their products, and larger sizes."""
    for dtype in DTYPES:
        if dtype == torch.float64 and device.startswith("mps"):  # which has none
            continue
        base = Case(**SMALL, dtype=dtype, device=device)
        yield from (replace(base, mask=mask) for mask in MASKS)
        yield from (replace(base, **extra) for extra in EXTRAS)
        yield from (replace(base, layout=layout, mask="causal") for layout in LAYOUTS[1:])
        if quick:
            if dtype == torch.float32:  # several tiles and threads, once
                yield replace(base, **LARGE[0], mask="causal_bottom_right")
            yield from (replace(base, **sizes, mask=mask) for sizes, mask in zip(SIZES, QUICK_MASKS, strict=True))
            continue
        yield from (replace(base, **sizes, mask=mask) for sizes, mask in product(SIZES, MASKS))
        yield from (replace(base, **sizes, mask=mask) for sizes, mask in product(LARGE, FEW_MASKS))
        yield from (replace(base, **extra, layout=layout) for extra, layout in product(EXTRAS, LAYOUTS[1:]))
        for layout, mask in product(LAYOUTS[1:], FEW_MASKS):
            yield replace(base, **SIZES[0], layout=layout, mask=mask)
