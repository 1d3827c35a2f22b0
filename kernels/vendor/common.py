"""What the vendor rows share: when a CUDA build of torch is there, and masks in the form its operators take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdpa.layout import unexpanded
from sdpa.problem import AttentionInputs

# One of torch's operators, its options behind q, k and v, and those by name.
Native = tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...], dict[str, Any]]


def no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def is_causal(inputs: AttentionInputs) -> bool:
    """The rows admit no band but torch's causal one."""
    return inputs.right == 0


def scale_option(inputs: AttentionInputs) -> dict[str, float]:
    """The scale by name; nothing where it is torch's own, because each argument costs time to read."""
    return {} if inputs.scale == 1.0 / math.sqrt(inputs.q.shape[-1]) else {"scale": inputs.scale}


def float_mask(inputs: AttentionInputs) -> Tensor | None:
    """Bias and bool mask as one additive mask [B|1, H|1, M|1, N|1]: a bias alone as it is given, else a new tensor, in
    which no dimension is expanded that neither mask has in memory."""
    if inputs.allowed is None:
        return inputs.bias
    allowed = unexpanded(inputs.allowed)
    if inputs.bias is not None:
        return unexpanded(inputs.bias).masked_fill(~allowed, -torch.inf)
    return torch.full_like(allowed, -torch.inf, dtype=inputs.q.dtype).masked_fill_(allowed, 0.0)


def expanded_mask(inputs: AttentionInputs) -> Tensor | None:
    """`float_mask` expanded by stride 0 to (B, H, M, N), which torch's fused operators ask for."""
    mask = float_mask(inputs)
    if mask is None:
        return None
    q, k = inputs.q, inputs.k
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def no_rng(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset for a backward without dropout, which reads neither: not filled, which would be a launch."""
    nothing = q.new_empty((), dtype=torch.int64)
    return nothing, nothing


def settle(inputs: AttentionInputs, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The operator's results, in which rows that see no key by the mask itself get output 0 and log-sum-exp -inf."""
    dead = rows_without_keys(inputs)
    if dead is None:
        return out, lse
    return out.masked_fill_(dead.unsqueeze(-1), 0.0), None if lse is None else lse.masked_fill_(dead, -torch.inf)


def rows_without_keys(inputs: AttentionInputs) -> Tensor | None:
    """Bool [B|1, H|1, M|1]; None without a dense mask."""
    if inputs.bias is None:
        return None if inputs.allowed is None else unexpanded(inputs.allowed).any(-1).logical_not_()
    mask = float_mask(inputs)
    assert mask is not None
    return mask.amax(-1) == -torch.inf


def lse_for_backward(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """+inf for dead rows, which only a dense mask makes here: exp(score - lse) is then 0, and so is every gradient."""
    if inputs.bias is None and inputs.allowed is None:
        return lse
    return torch.where(lse == -torch.inf, torch.inf, lse)
