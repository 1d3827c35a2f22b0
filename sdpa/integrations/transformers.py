"""Hugging Face transformers: `attn_implementation="sdp_kernels"` once this module is imported.

    import sdpa.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdp_kernels")

The attention function is registered together with a mask function: without that transformers gives the attention no
mask at all. Masks are fields (causal, windows, lengths, documents) where they can be, else bool (True = attend).
Grouped heads are not repeated. Softcaps (Gemma 2), sinks (gpt-oss) and position biases (T5) go into the kernel. An
argument that is not known here is refused, and so is a model that computes attention by its own code.

The name has no "sdpa" in it because transformers refuses every name that has for models that its own "sdpa" cannot
serve, Gemma 2 and gpt-oss among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdpa.integrations import told

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    raise told("transformers", error) from None

from sdpa.functional import scaled_dot_product_attention
from sdpa.integrations import transformers_masks
from sdpa.integrations.transformers_masks import NAME, FieldMask, is_flag
from sdpa.integrations.transformers_models import check_models, no_paged_cache
from sdpa.mask import Mask
from sdpa.sharded import refuse_together

# What models hand down to their attention that says nothing of it, or only what the mask says, too.
HARMLESS = frozenset({
    "block_sequence_ids", "cache_position", "deterministic", "encoder_hidden_states", "image_grid_thw", "labels",
    "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "seq_idx",
    "shift_labels", "sliding_window", "token_type_ids", "use_cache", "video_grid_thw",
})  # fmt: skip
HONOURED = ("cache", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k", "indices")  # or refused by name


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
    sinks: Tensor | None = None,
    head_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (B, M, H, Dv), and no weights.

    Args:
        query: (B, H, M, D); key, value: (B, Hkv, N, .), Hkv a divisor of H.
        attention_mask: (B, 1 or H, M, N or more) bool or float, or what our mask function made; None: causal as
            `is_causal` or the module says.
        position_bias: (1 or B, H, M, N), added to the scores; it may learn.
        softcap: as of `sdpa.scaled_dot_product_attention`.
        s_aux, sinks: (H,), as `sinks` there; or (B, H, M, 1), a logit of each query.
        head_mask: H factors of the heads' results.
        others: what further says which keys are seen (`documents_and_indices`), and what is harmless.

    Raises:
        ValueError: a paged cache of continuous batching, weights that were asked for (output_attentions), or anything
            else that would change the result and is not known here.
    """
    refuse_unknown(others)
    N = key.shape[2]
    causal_here = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, causal = mask_and_flag(mask_of(attention_mask, query.device, N), query.shape[2] > 1 and bool(causal_here))
    refuse_own_rows(mask)
    further = documents_and_indices(others, mask, N)
    if position_bias is not None:
        further = Mask(bias=position_bias[..., :N]) if further is None else further & Mask(bias=position_bias[..., :N])
    if further is not None:
        further = further.replace(causal=causal)
        mask, causal = further if mask is None else further & mask, False
    sinks = s_aux if sinks is None else sinks
    by_query = sinks is not None and sinks.ndim > 1
    out: Any = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        causal,
        scale=scaling,
        enable_gqa=bool(query.shape[1] != key.shape[1]),
        softcap=softcap,
        sinks=None if by_query else sinks,
        return_lse=by_query,
    )
    if by_query:  # a sink is a key more whose value is 0: it takes its part of the softmax's sum
        out, lse = out
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    if head_mask is not None:
        out = out * of_heads(head_mask, query.shape[1]).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def refuse_own_rows(mask: Mask | Tensor | None) -> None:
    """Inside of our context_parallel a mask is of the whole sequence, and transformers knows a rank's part alone."""
    if mask is not None:
        refuse_together(
            "transformers makes masks of this rank's own rows, here of padding or of jumps in position_ids; leave "
            "attention_mask away, and take consecutive parts"
        )


def mask_and_flag(mask: Mask | Tensor | None, causal: bool) -> tuple[Mask | Tensor | None, bool]:
    """The mask, and torch's own flag, by which a call is known again: that of a mask which says no more, or `causal`
    where there is no mask."""
    if isinstance(mask, Mask) and is_flag(mask):
        return None, mask.causal
    return mask, mask is None and causal


def of_heads(factors: Tensor, H: int) -> Tensor:
    """(1, H, 1, 1). Factors of single weights could not be applied to results."""
    if factors.numel() != H:
        raise ValueError(f"{NAME} takes a head_mask of a factor for each of {H} heads, got {tuple(factors.shape)}")
    return factors.reshape(1, -1, 1, 1)


def refuse_unknown(others: dict[str, Any]) -> None:
    """Raises ValueError for what would change the result, is given, and is not done here."""
    if others.get("cache") is not None:
        raise ValueError(no_paged_cache(NAME))
    if others.get("output_attentions"):
        raise ValueError(f"{NAME} returns no weights; use attn_implementation='eager' for output_attentions=True")
    for name, value in others.items():
        if name not in HARMLESS and name not in HONOURED and value is not None and value is not False:
            raise ValueError(
                f"{NAME} does not know what {name}= asks of attention and would leave it out; use "
                "attn_implementation='eager' or 'sdpa' for this model, or leave the argument out"
            )


def documents_and_indices(others: dict[str, Any], mask: Mask | Tensor | None, N: int) -> Mask | None:
    """What arguments beside the mask say of which keys are seen, of N keys: `cu_seq_lens_q` and `_k`, documents
    packed in a row, where the mask does not have them; `indices` (B, M, K), the keys that a query may see (GLM-5)."""
    found = None
    indices, cu_seqlens = others.get("indices"), others.get("cu_seq_lens_q")
    if cu_seqlens is not None and not (isinstance(mask, Mask) and mask.segments is not None):
        keys = others.get("cu_seq_lens_k")
        found = Mask(cu_seqlens=(cu_seqlens, cu_seqlens if keys is None else keys))
    if indices is not None:
        seen = torch.zeros(*indices.shape[:-1], N, dtype=torch.bool, device=indices.device)
        chosen = Mask(allowed=seen.scatter(-1, indices.long(), True)[:, None])
        found = chosen if found is None else found & chosen
    return found


def mask_of(given: Tensor | FieldMask | None, device: torch.device, N: int) -> Mask | Tensor | None:
    """For the first N keys; a mask longer than those is aligned with the first."""
    if type(given) is FieldMask and given.sizes[-1] == N:
        return given.mask if given.place == device else given.mask.to(device)
    return given if given is None else given[..., :N]


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, transformers_masks.attention_mask)
check_models(NAME)
