"""What kernels share about sinks: one key more for each head, without a value."""

from __future__ import annotations

import torch
from torch import Tensor


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks (H,): -sum of P_sink * delta over batch and rows, of lse and delta (B, H, M). A
    row's delta is the sum of grad_out * out, less the gradient of its lse."""
    weight = torch.exp(sinks.float().view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
