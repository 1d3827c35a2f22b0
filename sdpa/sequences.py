"""From checked packed or paged arguments to AttentionInputs, and to the form in which a device's kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdpa import packing
from sdpa.dispatch.catalog import SERVED
from sdpa.inputs import Options, common_heads, mask_of, unmasked, with_dropout, with_mask
from sdpa.mask import Mask
from sdpa.problem import AttentionInputs, Results, is_empty
from sdpa.validate_sequences import Documents, Pages, check_packed, check_paged

__all__ = ["Documents", "Pages", "build_packed", "build_paged", "results_of", "served_form"]


def build_packed(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: Options) -> AttentionInputs:
    """A call of varlen_attention, checked and then normalised."""
    check_packed(query, key, value, options, documents)
    return with_dropout(normalise_packed(query, key, value, options, documents), options)


def build_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Pages, options: Options
) -> AttentionInputs:
    """A call of paged_attention, checked and then normalised."""
    check_paged(query, key_cache, value_cache, options, pages)
    return with_dropout(normalise_paged(query, key_cache, value_cache, options, pages), options)


def normalise_packed(
    query: Tensor, key: Tensor, value: Tensor, options: Options, documents: Documents
) -> AttentionInputs:
    """(1, H, T, D) views with cumulative lengths."""
    q, k, v = query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    inputs = unmasked(*common_heads(q, k, v, options.enable_gqa), options)
    cu_q, cu_k = documents.cu_q.contiguous(), documents.cu_k.contiguous()
    cu_k = cu_q if documents.cu_k is documents.cu_q else cu_k
    inputs = inputs._replace(cu_q=cu_q, cu_k=cu_k, max_q=documents.max_q, max_k=documents.max_k)
    inputs = with_mask(inputs, mask_of(options), torch.Size([cu_q.shape[0] - 1]))
    if inputs.q_lengths is not None:
        inputs = inputs._replace(q_lengths=packing.shorter(inputs.q_lengths, cu_q, documents.max_q))
    if inputs.k_lengths is not None:
        inputs = inputs._replace(k_lengths=packing.shorter(inputs.k_lengths, cu_k, documents.max_k))
    if cu_q is cu_k and inputs.q_lengths is None and inputs.k_lengths is None:
        inputs = inputs._replace(bottom_right=False)  # both corners are the same
    return inputs


def normalise_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, options: Options, pages: Pages
) -> AttentionInputs:
    """(B, H, M, D) and (pages, Hkv, page_size, D) views."""
    mask = Mask(causal=True, align="bottom_right") if options.is_causal else mask_of(options)
    q, k, v = query.transpose(1, 2), key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    inputs = unmasked(*common_heads(q, k, v, options.enable_gqa), options)
    inputs = inputs._replace(block_table=pages.block_table.contiguous())
    return with_mask(inputs, mask.replace(lengths=pages.lengths), torch.Size([q.shape[0]]))


def served_form(inputs: AttentionInputs) -> AttentionInputs:
    """`inputs` in the form that a fused kernel of their device takes.

    They stay as they are where a kernel takes packed or paged inputs. Else self-attention becomes segments of one batch
    entry, where a kernel takes segments; positions then differ by a constant per document, which no mask depends on.
    Else documents and pages are gathered into batch entries.
    """
    device = inputs.q.device.type
    if inputs.block_table is not None:
        return inputs if device in SERVED["paged"] else packing.ordinary(inputs)
    if inputs.cu_q is None or device in SERVED["packed"] or is_empty(inputs):
        return inputs
    if device in SERVED["segments"] and is_one_line(inputs):
        return as_segments(inputs)
    return packing.ordinary(inputs)


def is_one_line(inputs: AttentionInputs) -> bool:
    """Whether documents differ only in where they lie: the same for queries and keys, and no field per document."""
    per_document = (inputs.q_lengths, inputs.k_lengths, inputs.prefix)
    shared_slopes = inputs.alibi is None or inputs.alibi.shape[0] == 1
    return inputs.cu_q is inputs.cu_k and shared_slopes and all(field is None for field in per_document)


def as_segments(inputs: AttentionInputs) -> AttentionInputs:
    """One batch entry whose documents do not see each other."""
    cu_q: Any = inputs.cu_q
    queries, keys = packing.segment_ids(cu_q, inputs.q.shape[2], inputs.k.shape[2])
    return inputs._replace(q_segments=queries, k_segments=keys, cu_q=None, cu_k=None, max_q=0, max_k=0)


def results_of(results: Results, form: AttentionInputs, inputs: AttentionInputs) -> Results:
    """The results of `form` as those of `inputs`."""
    if form.cu_q is not None or inputs.cu_q is None:
        return results
    if form.q_segments is None:
        return packing.restored(results, inputs)
    if results.lse is None or inputs.sinks is None:
        return results
    return results._replace(lse=packing.unseen_outside(results.lse, inputs.cu_q))
