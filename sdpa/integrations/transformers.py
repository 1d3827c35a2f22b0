"""Hugging Face transformers: `attn_implementation="sdp_kernels"` once this module is imported.

    import sdpa.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdp_kernels")

The attention function is registered together with a mask function: without that transformers gives the attention no
mask at all. Masks are fields (causal, windows, lengths, documents) where they can be, else bool (True = attend), or
None where a causal flag says it all; grouped heads are not repeated; softcaps (Gemma 2), sinks (gpt-oss) and position
biases (T5) go into the kernel.

The name has no "sdpa" in it because transformers refuses every name that has for models that its own "sdpa" cannot
serve, Gemma 2 and gpt-oss among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sdpa.functional import scaled_dot_product_attention
from sdpa.integrations import transformers_masks
from sdpa.integrations.transformers_masks import FieldMask, is_causal_flag
from sdpa.mask import Mask

NAME = "sdp_kernels"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | FieldMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: object | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (B, M, H, Dv), and no weights.

    Args:
        query: (B, H, M, D); key, value: (B, Hkv, N, .), Hkv a divisor of H.
        attention_mask: (B, 1 or H, M, N or more) bool or float, or what our mask function made; None: causal as
            `is_causal` or the module says.
        position_bias: (1 or B, H, M, N), added to the scores; it may learn.
        softcap, s_aux: as `softcap` and `sinks` of `sdpa.scaled_dot_product_attention`.

    Raises:
        ValueError: a paged cache of continuous batching, or weights that were asked for (output_attentions).
    """
    if cache is not None:
        raise ValueError(
            f"{NAME} does not serve continuous batching's paged cache; use another attn_implementation there"
        )
    if unused.get("output_attentions"):
        raise ValueError(f"{NAME} returns no weights; use attn_implementation='eager' for output_attentions=True")
    M, N = query.shape[2], key.shape[2]
    mask = mask_of(attention_mask, query.device, N)
    causal = isinstance(mask, Mask) and is_causal_flag(mask)
    if causal:  # torch's own flag, by which a call is known again
        mask = None
    elif mask is None and M > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if position_bias is not None:
        bias = Mask(bias=position_bias[..., :N], causal=bool(causal))
        mask, causal = bias if mask is None else bias & mask, False
    out: Any = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        bool(causal),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def mask_of(given: Tensor | FieldMask | None, device: torch.device, N: int) -> Mask | Tensor | None:
    """For the first N keys; a mask longer than those is aligned with the first."""
    if isinstance(given, FieldMask) and given.shape[-1] == N:
        return given.mask if given.device == device else given.mask.to(device)
    return given if given is None else given[..., :N]


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, transformers_masks.attention_mask)
