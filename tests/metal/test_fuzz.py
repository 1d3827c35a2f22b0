"""Random sizes, masks and layouts of every kernel of Metal against float64: 2,000 cases.

A source is compiled for its dtype, head sizes, mask and size of tiles. So cases come in groups that share these.
"""

from __future__ import annotations

import random

import pytest
import torch

from sdpa.testing import MASKS, Case, check_kernel

CASES = 100  # of a group
HEADS = {"one": (1, 1), "few": (3, 3), "grouped": (4, 2), "shared": (8, 1)}
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# (dtype, D, Dv, masks, largest M, other options). Keys are split in the groups that give N.
GROUPS = [
    (HALF, 16, 16, ["none"], 8, {}),
    (HALF, 64, 64, ["none"], 80, {}),
    (SINGLE, 32, 32, ["causal"], 80, {}),
    (BRAIN, 24, 40, ["causal_bottom_right"], 40, {"sinks": True}),
    (SINGLE, 7, 9, ["window"], 70, {}),
    (HALF, 48, 48, ["window_bottom_right"], 8, {"softcap": 3.0}),
    (SINGLE, 16, 8, ["lengths"], 60, {"sinks": True}),
    (BRAIN, 64, 64, ["both_lengths"], 60, {}),
    (SINGLE, 16, 16, ["segments"], 90, {}),
    (HALF, 32, 32, ["segments_causal"], 70, {}),
    (SINGLE, 24, 24, ["prefix"], 70, {}),
    (BRAIN, 16, 16, ["alibi"], 50, {}),
    (HALF, 16, 32, ["allowed"], 50, {}),
    (SINGLE, 20, 20, ["allowed_heads"], 50, {"softcap": 2.0}),
    (SINGLE, 16, 16, ["padding"], 70, {}),
    (HALF, 40, 40, ["bias"], 50, {"requires_bias_grad": True}),
    (SINGLE, 8, 8, ["bias_rows"], 50, {"requires_bias_grad": True}),
    (HALF, 16, 16, ["bias_float32"], 50, {"requires_bias_grad": True}),
    (SINGLE, 16, 16, ["bias_causal"], 40, {"dropout_p": 0.25, "requires_bias_grad": True}),
    (SINGLE, 128, 128, ["none"], 40, {"dropout_p": 0.5}),
    (HALF, 16, 16, ["lengths"], 4, {"sinks": True, "N": (300, 1500)}),
    (SINGLE, 8, 8, ["bias_causal"], 3, {"requires_bias_grad": True, "N": (300, 1500)}),
    (HALF, 24, 24, ["bias_low"], 50, {}),
]


def drawn(rng, group):
    dtype, D, Dv, masks, most, options = group
    H, Hkv = rng.choice(list(HEADS.values()))
    layout, options = rng.choice(["bhmd", "bmhd", "expanded"]), dict(options)
    N = rng.randint(*options.pop("N", (1, 130)))
    sizes = {"B": rng.randint(1, 3), "H": H, "Hkv": Hkv, "M": rng.randint(1, most), "N": N}
    return Case(**sizes, D=D, Dv=Dv, dtype=dtype, mask=rng.choice(masks), layout=layout, **options)


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_random_cases(number):
    rng = random.Random(20261125 + number)
    for index in range(CASES):
        case = drawn(rng, GROUPS[number])
        bad = [str(c) for c in check_kernel("metal_flash", case, seed=index) if not c.ok]
        assert not bad, f"{case}, seed {index}: {'; '.join(bad)}"


def test_there_are_two_thousand_of_every_mask():
    assert CASES * len(GROUPS) >= 2000
    assert {mask for group in GROUPS for mask in group[3]} == set(MASKS)
