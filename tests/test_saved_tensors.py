"""Hooks of saved tensors may return them with other strides, or at other addresses, than those that were saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers import MOVES, hooked_gradients
from sdpa import scaled_dot_product_attention as attend

GPU_KERNELS = ("cuda_flash", "triton_hopper", "triton_flash", "triton_efficient")
GPU_KERNELS += ("vendor_flash", "vendor_cudnn", "vendor_efficient")


def right_under_hooks(kernel, move, dtype, device, tolerance):
    generator = torch.Generator().manual_seed(0)
    packed, grad_out = (torch.randn(*n, generator=generator) for n in ((2, 17, 3, 2, 16), (2, 2, 17, 16)))
    packed, grad_out = (t.to(device, dtype) for t in (packed, grad_out))
    leaf = packed.double().requires_grad_()
    F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaf.unbind(2))).backward(grad_out.double())
    for step, found in enumerate(hooked_gradients(partial(attend, kernel=kernel), move, packed, grad_out)):
        distance = (found.double() - leaf.grad).norm() / leaf.grad.norm()
        assert distance <= tolerance, f"step {step}: {distance}"


@pytest.mark.parametrize("kernel", [None, "cpu_flash", "vendor_cpu_flash", "math"])
@pytest.mark.parametrize("move", MOVES)
def test_gradients_of_saved_tensors_that_moved(kernel, move):
    right_under_hooks(kernel, move, torch.float32, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, *GPU_KERNELS])
@pytest.mark.parametrize("move", MOVES)
def test_the_same_on_a_gpu(kernel, move):
    right_under_hooks(kernel, move, torch.float16, "cuda", 5e-3)
