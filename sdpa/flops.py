"""What torch's FlopCounterMode counts for our operators: matrix products, whatever a mask hides, as for torch's own.

torch.utils.flop_counter imports Triton where there is one, so it is not imported to register formulas. A counter copies
them when it is made; ours are handed to the counters that are on when a call passes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FORWARD_ARGUMENTS = 0
BACKWARD_ARGUMENTS = 4  # grad_out, grad_lse, out and lse stand before q, k and v


def announce() -> None:
    """Give every FlopCounterMode that is on the formulas of both operators."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(torch.ops.sdpa.attention_forward, forward_flops)
            registry.setdefault(torch.ops.sdpa.attention_backward, backward_flops)


def forward_flops(*args: object, **_: object) -> int:
    """Two products: scores and results."""
    pairs, D, Dv = sizes(args, FORWARD_ARGUMENTS)
    return 2 * pairs * (D + Dv)


def backward_flops(*args: object, **_: object) -> int:
    """Five products: the scores again, gradients of the weights, and of q, k and v."""
    pairs, D, Dv = sizes(args, BACKWARD_ARGUMENTS)
    return 2 * pairs * (3 * D + 2 * Dv)


def sizes(args: tuple[object, ...], first: int) -> tuple[int, int, int]:
    """B * H * M * N, D and Dv."""
    q, k, v = args[first : first + 3]
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    B, H, M, D = q.shape
    return B * H * M * k.shape[2], D, v.shape[3]
