"""What only Hopper's kernels know, on a device: biases in their products, bands in their backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import real, right

from sdpa import Mask
from sdpa.dispatch.catalog import by_name
from sdpa.inputs import Options, build_inputs
from sdpa.problem import Results
from sdpa.testing import Draw, backward_bands, check_inputs, compare, differentiate, problem_of

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def spoiled(bias, kind):
    """A bias that hides keys or whole rows, or whose multiples overflow."""
    if kind == "holes":
        bias[torch.rand(bias.shape, device=bias.device) < 0.3] = -torch.inf
    elif kind == "dead rows":
        bias[:, :, ::3] = -torch.inf
    elif kind == "dead ends":  # keys come last to first
        bias[..., bias.shape[3] // 2 :] = -torch.inf
    elif kind == "lowest":
        bias[:, :, ::3] = torch.finfo(bias.dtype).min
        bias[:, :, 1::3] = -1e4
    elif kind == "large":
        bias *= 100
    return bias


@pytest.mark.parametrize("kind", ["normal", "holes", "dead rows", "dead ends", "lowest", "large"])
@pytest.mark.parametrize("D", [64, 96, 256])
def test_bias_in_the_product(D, kind):
    """triton_hopper with biases of every breadth, sizes that no tile divides, and both dtypes it takes."""
    shapes = {(64, 128): (2, 4), (200, 200): (1, 1), (257, 1000): (2, 1), (1000, 264): (1, 4), (1, 264): (2, 4)}
    masks = (Mask(), Mask(causal=True), Mask(causal=True, align="bottom_right"))
    for ((M, N), lead), mask, dtype in itertools.product(shapes.items(), masks, (BFLOAT16, FLOAT16)):
        draw = Draw(real(dtype=dtype), 10)
        q, k, v = draw.normal(2, 4, M, D), draw.normal(2, 2, N, D), draw.normal(2, 2, N, D)
        bias = spoiled(draw.normal(*lead, M, N), kind)
        inputs = build_inputs(q, k, v, Options(mask & Mask(bias=bias), enable_gqa=True))
        reasons = by_name()["triton_hopper"].why_not(problem_of(inputs, "forward"))
        if any("compute capability" in reason for reason in reasons):
            pytest.skip(reasons[0])
        assert not reasons
        right(check_inputs("triton_hopper", inputs, draw.normal(2, 4, M, D)), (D, kind, M, N, lead, mask, dtype))


BANDS = {
    "causal": Mask(causal=True),
    "bottom_right": Mask(causal=True, align="bottom_right"),
    "window": Mask(window=(200, 0)),
    "both_sides": Mask(window=(100, 50)),
    "everything": Mask(),
}


@pytest.mark.parametrize("D", [40, 64, 128, 256])
@pytest.mark.parametrize("band", BANDS)
def test_hopper_backward_of_any_band(band, D):
    """Every tile, from the results of another forward: this kernel's own knows causal only."""
    module, math = (by_name()[name].load() for name in ("triton_hopper", "math"))
    draw = Draw(real(), 11)
    for M, N, H, Hkv in ((700, 1000, 4, 2), (333, 520, 2, 2), (600, 400, 2, 1), (1000, 1000, 1, 1)):
        q, grad_out = draw.normal(2, H, M, D), draw.normal(2, H, M, D)
        k, v = draw.normal(2, Hkv, N, D), draw.normal(2, Hkv, N, D)
        inputs = build_inputs(q, k, v, Options(BANDS[band], enable_gqa=True))
        problem = problem_of(inputs, "backward")
        assert not by_name()["triton_hopper"].why_not(problem)
        results = math.forward(inputs, problem_of(inputs, "forward"), None)
        wanted, wanted_grads = differentiate(inputs, grad_out, torch.float64)
        _, plain = differentiate(inputs, grad_out, BFLOAT16)
        bands = backward_bands(inputs, grad_out, wanted, wanted_grads)
        for tile in module.tiles(problem):
            grads = module.backward(inputs, results, Results(grad_out, None), problem, tile)
            for name in "qkv":
                got, want, rough = (getattr(g, name) for g in (grads, wanted_grads, plain))
                found = compare(f"grad_{name}", got, want, rough, M * (H // Hkv) + N, bands[name])
                right([found], (band, M, N, tile))
