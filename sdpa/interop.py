"""torch's neighbours of a plain call: autocast, CausalBias and jagged nested tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from sdpa.inputs import Options
from sdpa.mask import Mask


def cast_for_autocast(query: Tensor, key: Tensor, value: Tensor, options: Options, device_type: str):
    """Floating inputs and masks in the autocast dtype; float64 stays, as torch's rule for this function has it."""
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor):
        eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    mask = options.attn_mask
    if isinstance(mask, Mask):
        mask = mask.replace(bias=cast(mask.bias))
    return cast(query), cast(key), cast(value), options._replace(attn_mask=cast(mask), sinks=cast(options.sinks))


def as_mask(attn_mask: object) -> object:
    """torch.nn.attention.bias.CausalBias as a Mask; anything else as it is."""
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return attn_mask
    upper_left = attn_mask.variant == module.CausalVariant.UPPER_LEFT
    return Mask(causal=True, align="top_left" if upper_left else "bottom_right")


def is_nested(query: object, key: object, value: object) -> bool:
    return any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value))


def nested_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, request: str, attend: Callable
) -> Tensor:
    """Jagged (batch, H, length, D) tensors as one packed batch entry whose documents do not see each other."""
    check_jagged(query, key, value, options)
    q, k, v = (t.transpose(1, 2).values().transpose(0, 1).unsqueeze(0) for t in (query, key, value))  # (1, H, T, D)
    offsets = (query.offsets(), key.offsets())
    mask = Mask(cu_seqlens=offsets, causal=options.is_causal)
    options = options._replace(attn_mask=mask, is_causal=False)
    results = attend(q, k, v, options, False, request)
    packed = results.out.squeeze(0).transpose(0, 1)  # (T, H, Dv)
    return torch.nested.nested_tensor_from_jagged(packed, query.offsets()).transpose(1, 2)


def check_jagged(query: Tensor, key: Tensor, value: Tensor, options: Options) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_nested or tensor.layout != torch.jagged:
            layout = tensor.layout if tensor.is_nested else "not nested"
            raise RuntimeError(
                f"Expected query, key and value to be jagged nested tensors together, but {name} is {layout}."
            )
        if tensor.dim() != 4:
            raise RuntimeError(
                f"Expected jagged tensors of 4 dimensions (batch, H, length, D), but {name} has {tensor.dim()}."
            )
    if options.attn_mask is not None:
        raise RuntimeError(
            "Scaled_dot_product_attention: Nested tensors for query / key are not supported when an explicit attn_mask "
            "is set"
        )
    same_offsets = query.offsets() is key.offsets() or torch.equal(query.offsets(), key.offsets())
    if options.is_causal and not same_offsets:
        raise RuntimeError("Expected query and key to have equal offsets with is_causal=True on nested tensors.")
    if key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
        raise RuntimeError("Expected key and value to have equal offsets.")
