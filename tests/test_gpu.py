"""Every kernel that serves CUDA against the float64 reference there; cases from the catalog. Run by `make gpu-test`."""

from __future__ import annotations

import itertools

import pytest

from sdpa.dispatch.catalog import FLOATS, kernels_for
from sdpa.testing import MASKS, Case, able, check_kernel

pytestmark = pytest.mark.gpu

SIZES = (
    {"M": 67, "N": 67},
    {"M": 64, "N": 128, "D": 64, "Dv": 64},
    {"M": 200, "N": 200, "D": 128, "Dv": 128, "Hkv": 1},
    {"M": 1, "N": 264, "D": 128, "Dv": 128, "Hkv": 2},
)
CASES = [
    Case(**size, mask=mask, dtype=dtype, device="cuda")
    for size, mask, dtype in itertools.product(SIZES, MASKS, sorted(FLOATS, key=str))
]


@pytest.mark.parametrize("kernel", kernels_for("cuda"), ids=lambda kernel: kernel.name)
def test_kernel(kernel):
    """All cases the kernel takes; that there are some is part of the test."""
    taken = [case for case in CASES if not able(kernel.name, case)]
    assert taken
    for case in taken:
        found = check_kernel(kernel.name, case)
        assert all(c.ok for c in found), f"{case}: " + "; ".join(str(c) for c in found if not c.ok)
