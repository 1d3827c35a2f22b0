"""What kernels share about sinks: one key more for each head, without a value."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.problem import Results


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """P_sink (B, H, M) of each row by its log-sum-exp; 0 of a row that sees no key."""
    return torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0.0)


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks (H,): -sum of P_sink * delta over batch and rows, of lse and delta (B, H, M). A
    row's delta is the sum of grad_out * out, less the gradient of its lse."""
    return -(sink_weights(sinks, lse) * delta).sum((0, 2)).to(sinks.dtype)


def moves_rows(bias: Tensor) -> bool:
    """Whether a bias (B|1, H|1, M|1, N|1) moves all scores of a row alike."""
    return bias.shape[3] == 1


def row_bias_grad(bias: Tensor, sinks: Tensor | None, results: Results, upstream: Results) -> Tensor:
    """The gradient of a bias that `moves_rows`.

    That changes no weight of a key beside another one's, only that of a sink and the log-sum-exp: a row's gradient
    is P_sink * delta + grad_lse. A kernel would add it up of terms that cancel, and leave their rounding.
    """
    (out, lse), (grad_out, grad_lse) = results, upstream
    assert lse is not None
    rows = torch.zeros_like(lse) if grad_lse is None else grad_lse.masked_fill(lse == -torch.inf, 0.0)
    if sinks is not None:
        delta = (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(3) - rows
        rows = rows + sink_weights(sinks, lse) * delta
    return rows.unsqueeze(3).sum_to_size(bias.shape).to(bias.dtype)
