"""What surrounds a plain call in torch: nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdpa import nested
from sdpa.mask import Mask
from sdpa.validate import Options


def is_nested(query: object, key: object, value: object) -> bool:
    return any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value))


def nested_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_lse: bool, attend: Callable[..., Any]
) -> Tensor:
    """Jagged (batch, H, length, D) tensors as one packed batch entry. `attend` computes attention of that entry."""
    if nested.are_strided(query, key, value):
        refuse_mask(options)

        def answer(q: Tensor, k: Tensor, v: Tensor, own: Options) -> Tensor:
            return nested_attention(q, k, v, own, return_lse, attend)

        return nested.strided_attention(query, key, value, options, answer)
    query, key, value = nested.as_packed(query, key, value)
    out = attend(*pack_jagged(query, key, value, options, return_lse))
    packed = out.squeeze(0).transpose(0, 1)  # (T, H, Dv)
    return torch.nested.nested_tensor_from_jagged(packed, nested.offsets_of(query)).transpose(1, 2)


def pack_jagged(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_lse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Checked jagged tensors as (1, H, T, D), and options whose mask keeps their documents apart."""
    check_jagged(query, key, value, options)
    if return_lse:
        raise RuntimeError("return_lse=True is not supported with nested tensors: call with padded or packed tensors.")
    q, k, v = (t.transpose(1, 2).values().transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    mask = Mask(cu_seqlens=(nested.offsets_of(query), nested.offsets_of(key)), causal=options.is_causal)
    return q, k, v, options._replace(attn_mask=mask, is_causal=False)


def refuse_mask(options: Options) -> None:
    if options.attn_mask is not None:
        raise RuntimeError(
            "Scaled_dot_product_attention: Nested tensors for query / key are not supported when an explicit attn_mask "
            "is set"
        )


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
    refuse_mask(options)
    queries, keys, values = (nested.offsets_of(t) for t in (query, key, value))
    batches = queries.shape[0] - 1, keys.shape[0] - 1
    if batches[0] != batches[1]:
        raise RuntimeError(
            f"Expected query and key to have the same batch size, but got {batches[0]} and {batches[1]} nested tensors."
        )
    if options.is_causal and queries is not keys and not torch.equal(queries, keys):
        raise RuntimeError("Expected query and key to have equal offsets with is_causal=True on nested tensors.")
    if keys is not values and not torch.equal(keys, values):
        raise RuntimeError("Expected key and value to have equal offsets.")
