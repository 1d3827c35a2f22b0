"""Calls inside of torch's context_parallel, where each tensor is one rank's shard of a sequence: they are torch's.

Computed here, a query would see the keys of its own rank alone. torch's function exchanges them between the ranks. It
takes what torch's signature has, without a mask; whatever else a call asks is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from sdpa.mask import Mask
from sdpa.torch_private import TORCHS, handles_attention, is_distributed, is_sharded
from sdpa.validate import Call

NAME = "scaled_dot_product_attention"


def function_of(tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a call of these tensors in our stead: torch's function as context_parallel has it now, which may
    call ours again with DTensors, and for those torch's own; None where nothing does."""
    if any(map(is_distributed, tensors)):
        return TORCHS if is_sharded() or handles_attention() else None
    return torch.nn.functional.scaled_dot_product_attention if is_sharded() else None


def answer(function: Callable[..., Any], name: str, call: Call, returns_lse: bool, kernel: str | None) -> Any:
    """The call of torch's function. Raises RuntimeError for what it does not take."""
    mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks = call.options
    if isinstance(mask, Mask) and {f.name for f in fields(mask) if getattr(mask, f.name) is not f.default} == {
        "causal"
    }:
        mask, is_causal = None, True
    asked = {
        "mask": mask is not None,
        "softcap": softcap is not None,
        "sinks": sinks is not None,
        "return_lse": returns_lse,
        "kernel": kernel is not None,
    }
    refused = [what for what, given in asked.items() if given] if name == NAME else [name.partition(",")[0]]
    if refused:
        raise RuntimeError(
            f"Inside of torch's context_parallel torch answers, which has no {' and no '.join(refused)} there. Here a "
            "call would attend to this rank's shard of the sequence alone."
        )
    return function(*call[:3], None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
