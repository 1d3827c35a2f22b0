"""What torch's FlopCounterMode counts for our operators: matrix products, whatever a mask hides, as for torch's own.

torch.utils.flop_counter imports Triton where there is one, so it is not imported to register formulas. A counter copies
them when it is made; ours are handed to the counters that are on when a call passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdpa.operators import of_backward, of_forward, of_weights
from sdpa.problem import AttentionInputs, lengths_of
from sdpa.torch_private import dispatch_mode_stack


def announce() -> None:
    """Give every FlopCounterMode that is on the formulas of the operators."""
    for mode in dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(torch.ops.sdpa.attention_forward, forward_flops)
            registry.setdefault(torch.ops.sdpa.attention_backward, backward_flops)
            registry.setdefault(torch.ops.sdpa.attention_weights, weights_flops)


def forward_flops(*args: Any, **options: Any) -> int:
    """Two products: scores and results."""
    inputs, _, _ = of_forward(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * (inputs.q.shape[3] + inputs.v.shape[3])


def backward_flops(*args: Any, **options: Any) -> int:
    """Five products: the scores again, gradients of the weights, and of q, k and v."""
    inputs, *_ = of_backward(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * (3 * inputs.q.shape[3] + 2 * inputs.v.shape[3])


def weights_flops(*args: Any, **options: Any) -> int:
    """One product: the scores."""
    inputs, *_ = of_weights(args)
    return 2 * pairs_of(inputs) * inputs.q.shape[1] * inputs.q.shape[3]


def pairs_of(inputs: AttentionInputs) -> int:
    """B * M * N; of packed documents the sum of their M * N where it can be read, else as if all were the longest."""
    B, M, N = lengths_of(inputs)
    if type(inputs.cu_q) is Tensor and type(inputs.cu_k) is Tensor and inputs.cu_q.device.type != "meta":
        return int((inputs.cu_q.diff().long() * inputs.cu_k.diff()).sum())
    return B * M * N
