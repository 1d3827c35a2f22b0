"""What torch's FlopCounterMode counts for our operators: matrix products, whatever a mask hides, as for torch's own.

torch.utils.flop_counter imports Triton where there is one, so it is not imported to register formulas. A counter copies
them when it is made; ours are handed to the counters that are on when a call passes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sdpa.problem import AttentionInputs, lengths_of

FORWARD_ARGUMENTS = 0
PLAIN_FIELDS = AttentionInputs._fields.index("bias")  # of the short forms; the setting is their only other argument
BACKWARD_ARGUMENTS = 4  # grad_out, grad_lse, out and lse stand before q, k and v
WEIGHTS_ARGUMENTS = 1  # lse


def announce() -> None:
    """Give every FlopCounterMode that is on the formulas of the operators."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(torch.ops.sdpa.attention_forward, forward_flops)
            registry.setdefault(torch.ops.sdpa.attention_backward, backward_flops)
            registry.setdefault(torch.ops.sdpa.attention_weights, weights_flops)


def forward_flops(*args: object, **_: object) -> int:
    """Two products: scores and results."""
    pairs, D, Dv = sizes(args, FORWARD_ARGUMENTS)
    return 2 * pairs * (D + Dv)


def backward_flops(*args: object, **_: object) -> int:
    """Five products: the scores again, gradients of the weights, and of q, k and v."""
    short = len(args) <= BACKWARD_ARGUMENTS + PLAIN_FIELDS  # without grad_lse
    pairs, D, Dv = sizes(args, BACKWARD_ARGUMENTS - short)
    return 2 * pairs * (3 * D + 2 * Dv)


def weights_flops(*args: object, **_: object) -> int:
    """One product: the scores."""
    pairs, D, _ = sizes(args, WEIGHTS_ARGUMENTS)
    return 2 * pairs * D


def sizes(args: tuple[object, ...], first: int) -> tuple[int, int, int]:
    """B * H * M * N, D and Dv."""
    fields = len(AttentionInputs._fields)
    inputs = AttentionInputs(*args[first : first + (PLAIN_FIELDS if len(args) < fields else fields)])
    return pairs_of(inputs) * inputs.q.shape[1], inputs.q.shape[3], inputs.v.shape[3]


def pairs_of(inputs: AttentionInputs) -> int:
    """B * M * N; of packed documents the sum of their M * N where it can be read, else as if all were the longest."""
    B, M, N = lengths_of(inputs)
    if type(inputs.cu_q) is Tensor and type(inputs.cu_k) is Tensor and inputs.cu_q.device.type != "meta":
        return int((inputs.cu_q.diff().long() * inputs.cu_k.diff()).sum())
    return B * M * N
