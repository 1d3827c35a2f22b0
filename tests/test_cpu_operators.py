"""What the operators of the CPU library take and refuse: nothing that would be read beyond its end, and no leak."""

from __future__ import annotations

import weakref

import pytest
import torch

from sdpa.kernels.cpu import library

if library.load_error() is not None:
    pytest.skip(library.load_error(), allow_module_level=True)

B, H, HKV, M, N, D, DV = 2, 4, 2, 5, 7, 8, 16
SCALE = 0.3
OPERATORS = torch.ops.sdpa_cpu


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, M, D), torch.randn(B, HKV, N, D), torch.randn(B, HKV, N, DV)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("k", torch.zeros(B, HKV, N, D + 1)),
        ("k", torch.zeros(B - 1, HKV, N, D)),
        ("v", torch.zeros(B, HKV, N - 1, DV)),
        ("v", torch.zeros(B, HKV - 1, N, DV)),
    ],
)
def test_keys_and_values_of_other_sizes_are_refused(name, tensor):
    given = dict(zip("qkv", tensors(), strict=True)) | {name: tensor}
    with pytest.raises(RuntimeError, match=f"expected {name} of shape"):
        OPERATORS.flash_forward(**given, scale=SCALE)


REFUSED = {
    "bias": torch.zeros(B, H, M, N - 1),
    "allowed": torch.ones(B, H, M + 1, N, dtype=torch.bool),
    "q_lengths": ints(B + 1),
    "k_lengths": ints(B, dtype=torch.int8),
    "prefix": ints(B, dtype=torch.int64),
    "q_segments": ints(B, M),  # without those of the keys
    "alibi": torch.zeros(B, H - 1),
    "sinks": torch.zeros(1),
    "rng": ints(1, dtype=torch.int64),
    "left": -2,
    "right": -(2**63),
    "block_m": 2**40,
    "block_n": -1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_fit_are_refused(name):
    with pytest.raises(RuntimeError, match="cpu_flash: expected"):
        OPERATORS.flash_forward(*tensors(), SCALE, **{name: REFUSED[name]})


@pytest.mark.parametrize("out", [None, torch.zeros(B, H, M, DV + 1), torch.zeros(B, H, M, DV, dtype=torch.float64)])
def test_a_forward_is_recorded_with_its_output(out):
    with pytest.raises(RuntimeError, match="cpu_flash: expected out"):
        OPERATORS.record_forward(*tensors(), SCALE, out=out)


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
@pytest.mark.parametrize("given", [None, torch.zeros(B, H, M + N, DV), torch.zeros(B, H, M, D, dtype=torch.float64)])
def test_a_backward_is_recorded_with_its_gradients(wrong, given):
    q, k, v = tensors()
    out, lse = OPERATORS.flash_forward(q, k, v, SCALE)
    like = dict(zip(("dq", "dk", "dv"), OPERATORS.flash_backward(out, q, k, v, out, lse, SCALE)[:3], strict=True))
    with pytest.raises(RuntimeError, match=f"cpu_flash: expected {wrong}"):
        OPERATORS.record_backward(out, q, k, v, out, lse, SCALE, **{**like, wrong: given})
    with pytest.raises(RuntimeError, match="with sinks is not recorded"):
        OPERATORS.record_backward(out, q, k, v, out, lse, SCALE, sinks=torch.zeros(H), **like)


@pytest.mark.parametrize("wrong", ["grad_out", "out", "lse", "grad_lse"])
def test_a_backward_refuses_results_of_other_sizes(wrong):
    q, k, v = tensors()
    out, lse = OPERATORS.flash_forward(q, k, v, SCALE)
    given = {"grad_out": out, "out": out, "lse": lse, "grad_lse": lse}
    given[wrong] = given[wrong][:, :, 1:].contiguous()
    with pytest.raises(RuntimeError, match=f"expected {wrong} of shape"):
        OPERATORS.flash_backward(q=q, k=k, v=v, scale=SCALE, **given)


def test_a_refused_call_keeps_no_tensor():
    q, k, v = tensors()
    bias = torch.zeros(B, H, M, N)
    kept = weakref.ref(bias)
    with pytest.raises(RuntimeError, match="heads of q"):
        OPERATORS.flash_forward(q[:, 1:], k, v, SCALE, bias=bias)
    del bias
    assert kept() is None


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("side", [M + N, 2**62, 2**63 - 1])
def test_a_side_wider_than_the_matrix_hides_nothing(side, bottom_right):
    given = tensors()
    wanted = OPERATORS.flash_forward(*given, SCALE)
    got = OPERATORS.flash_forward(*given, SCALE, side, side, bottom_right)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
