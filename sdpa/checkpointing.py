"""save_attention: a policy by which selective checkpointing keeps the results of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch's own operators, for models that call them: names in torch.ops.aten, some of which a release may lack.
TORCHS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def save_attention(otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A policy of torch.utils.checkpoint that saves the results of attention and computes the rest again.

        contexts = functools.partial(create_selective_checkpoint_contexts, sdpa.save_attention())
        out = checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Args:
        otherwise: a policy for all other operators, such as one that also saves matrix products.

    Returns:
        A policy for create_selective_checkpoint_contexts. It covers our operators and torch's own.

    Raises:
        TypeError: `otherwise` that cannot be called.
    """
    if otherwise is not None and not callable(otherwise):
        raise TypeError(f"save_attention takes a policy, which is called, or None, got {type(otherwise).__name__}")
    from torch.utils.checkpoint import CheckpointPolicy

    saved = {torch.ops.sdpa.attention_forward}
    saved |= {getattr(torch.ops.aten, name) for name in TORCHS if hasattr(torch.ops.aten, name)}

    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if getattr(operator, "overloadpacket", operator) in saved:
            return CheckpointPolicy.MUST_SAVE
        if otherwise is not None:
            return otherwise(context, operator, *args, **options)
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
