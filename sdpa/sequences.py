"""From packed or paged arguments to AttentionInputs, and to the form in which a device's kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdpa import packing
from sdpa.dispatch.catalog import KERNELS
from sdpa.inputs import Options, check_options, common_heads, mask_of, unmasked, with_dropout, with_mask
from sdpa.mask import Mask
from sdpa.ops import is_empty
from sdpa.problem import AttentionInputs, Results
from sdpa.validate import (
    check_count,
    check_dimensions,
    check_int32,
    check_same_device,
    check_shape,
    check_tensor,
    check_tensors,
    is_integer,
    shapes,
)

# Types of devices with a fused kernel that takes the feature; math, which takes all, names no device.
SERVED = {
    feature: frozenset(device for kernel in KERNELS if feature in kernel.features for device in kernel.devices)
    for feature in ("packed", "paged", "segments")
}
PACKED_REFUSES = ("segments", "cu_seqlens", "allowed", "bias")
PAGED_REFUSES = (*PACKED_REFUSES, "lengths")


class Documents(NamedTuple):
    """Where packed documents begin and end, and how long the longest may be."""

    cu_q: Tensor  # (documents + 1,) int32
    cu_k: Tensor
    max_q: int
    max_k: int


class Pages(NamedTuple):
    """Which pages of a cache hold a sequence's keys, and how many keys are valid."""

    block_table: Tensor  # (B, pages per sequence) int32
    lengths: Tensor  # (B,) integers


def build_packed(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: Options) -> AttentionInputs:
    """Check a call of varlen_attention and write it as (1, H, T, D) views with cumulative lengths."""
    check_packed(query, key, value, documents)
    check_options(options, "varlen_attention")
    mask = sequence_mask("varlen_attention", options, query, PACKED_REFUSES)
    views = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    inputs = unmasked(*common_heads(*views, options.enable_gqa), options)
    cu_q, cu_k = documents.cu_q.contiguous(), documents.cu_k.contiguous()
    cu_k = cu_q if documents.cu_k is documents.cu_q else cu_k
    inputs = with_mask(inputs._replace(cu_q=cu_q, cu_k=cu_k, max_q=documents.max_q, max_k=documents.max_k), mask)
    if inputs.q_lengths is not None:
        inputs = inputs._replace(q_lengths=packing.shorter(inputs.q_lengths, cu_q, documents.max_q))
    if inputs.k_lengths is not None:
        inputs = inputs._replace(k_lengths=packing.shorter(inputs.k_lengths, cu_k, documents.max_k))
    if cu_q is cu_k and inputs.q_lengths is None and inputs.k_lengths is None:
        inputs = inputs._replace(bottom_right=False)  # both corners are the same
    return with_dropout(inputs, options)


def build_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Pages, options: Options
) -> AttentionInputs:
    """Check a call of paged_attention and write it as (B, H, M, D) and (pages, Hkv, page_size, D) views."""
    check_paged(query, key_cache, value_cache, pages)
    check_options(options, "paged_attention")
    mask = sequence_mask("paged_attention", options, query, PAGED_REFUSES)
    if options.is_causal:
        mask = Mask(causal=True, align="bottom_right")
    elif mask.align != "bottom_right" and (mask.has_band or mask.alibi is not None):
        raise RuntimeError(
            "Expected a mask aligned to the bottom right, because the queries of paged_attention are the last of their "
            f'sequence, but got Mask(align="{mask.align}").'
        )
    views = (t.transpose(1, 2) for t in (query, key_cache, value_cache))
    inputs = unmasked(*common_heads(*views, options.enable_gqa), options)
    inputs = with_mask(inputs._replace(block_table=pages.block_table.contiguous()), mask.replace(lengths=pages.lengths))
    refuse_gradients(inputs)
    return with_dropout(inputs, options)


def sequence_mask(function: str, options: Options, query: Tensor, refused: tuple[str, ...]) -> Mask:
    """attn_mask and is_causal as a Mask of fields that count inside a document or sequence."""
    given = options.attn_mask
    if given is not None and not isinstance(given, Mask):
        raise TypeError(f"{function}(): attn_mask must be a sdpa.Mask or None, not {type(given).__name__}")
    mask = mask_of(options, query)
    names = [name for name in refused if getattr(mask, name) is not None]
    if names:
        raise RuntimeError(
            f"Expected a Mask of causal, align, window, query_lengths, prefix, alibi{lengths_word(refused)} in "
            f"{function}, but got one with {' and '.join(names)}."
        )
    return mask


def lengths_word(refused: tuple[str, ...]) -> str:
    return " (lengths are an argument)" if "lengths" in refused else " and lengths"


def check_packed(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> None:
    check_tensors(query, key, value, "varlen_attention")
    for name, tensor, last in (("query", query, "D"), ("key", key, "D"), ("value", value, "Dv")):
        check_dimensions(name, tensor, f"T, {'H' if name == 'query' else 'Hkv'}, {last}")
    if query.shape[2] != key.shape[2]:
        raise RuntimeError(
            "Expected query and key to have the same head size (last dimension), but got "
            f"{shapes(query=query, key=key)} instead."
        )
    if key.shape[0] != value.shape[0]:
        raise RuntimeError(
            "Expected key and value to have the same number of rows (first dimension), but got "
            f"{shapes(key=key, value=value)} instead."
        )
    check_documents(documents, query)


def check_documents(documents: Documents, query: Tensor) -> None:
    for name in ("cu_q", "cu_k"):
        cu = getattr(documents, name)
        check_tensor(name, cu, "varlen_attention")
        if cu.dim() != 1 or cu.shape[0] == 0:
            raise RuntimeError(f"Expected {name} to have shape (documents + 1,), but got {tuple(cu.shape)} instead.")
        check_int32(name, cu, query)
    if documents.cu_q.shape != documents.cu_k.shape:
        raise RuntimeError(
            "Expected cu_q and cu_k to tell of equally many documents, but got "
            f"{shapes(cu_q=documents.cu_q, cu_k=documents.cu_k)} instead."
        )
    check_count("max_q", documents.max_q, "varlen_attention")
    check_count("max_k", documents.max_k, "varlen_attention")


def check_paged(query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Pages) -> None:
    check_tensor("key_cache", key_cache, "paged_attention")
    check_tensor("value_cache", value_cache, "paged_attention")
    check_tensors(query, key_cache, value_cache, "paged_attention")
    check_dimensions("query", query, "B, M, H, D")
    check_dimensions("key_cache", key_cache, "pages, page_size, Hkv, D")
    check_dimensions("value_cache", value_cache, "pages, page_size, Hkv, Dv")
    if query.shape[2] == 1 != key_cache.shape[2]:  # (B, H, 1, D) as it seems, so that here one head does not broadcast
        raise RuntimeError(
            "Expected query of shape (B, M, H, D) to have as many heads as the caches of shape (pages, page_size, Hkv, "
            f"D), or a multiple, but got {shapes(query=query, key_cache=key_cache)} instead."
        )
    if query.shape[3] != key_cache.shape[3]:
        raise RuntimeError(
            "Expected query and key_cache to have the same head size (last dimension), but got "
            f"{shapes(query=query, key_cache=key_cache)} instead."
        )
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise RuntimeError(
            "Expected key_cache and value_cache to have the same pages, page size and heads, but got "
            f"{shapes(key_cache=key_cache, value_cache=value_cache)} instead."
        )
    check_pages(pages, query)


def check_pages(pages: Pages, query: Tensor) -> None:
    table, lengths, B = pages.block_table, pages.lengths, query.shape[0]
    check_tensor("block_table", table, "paged_attention")
    if table.dim() != 2 or table.shape[0] != B:
        raise RuntimeError(
            f"Expected block_table to have shape (B, pages per sequence) with B = {B}, but got {tuple(table.shape)} "
            "instead."
        )
    check_int32("block_table", table, query)
    check_tensor("lengths", lengths, "paged_attention")
    check_shape("lengths", lengths, ((B,),))
    if not is_integer(lengths):
        raise RuntimeError(f"Expected lengths to be integers, but got {lengths.dtype} instead.")
    check_same_device("lengths", lengths, query)


def refuse_gradients(inputs: AttentionInputs) -> None:
    learned = {"query": inputs.q, "key_cache": inputs.k, "value_cache": inputs.v, "sinks": inputs.sinks}
    asked = [name for name, tensor in learned.items() if tensor is not None and tensor.requires_grad]
    if asked and torch.is_grad_enabled():
        raise RuntimeError(
            f"Expected no input of paged_attention to require a gradient, because it has none, but got "
            f"{' and '.join(asked)} with requires_grad=True; call it under torch.no_grad()."
        )


def served_form(inputs: AttentionInputs) -> AttentionInputs:
    """`inputs` as a fused kernel of their device takes them.

    As they are where one does; else self-attention as segments of one batch entry where one takes those (positions
    then differ by a constant per document, which no mask sees); else gathered into batch entries.
    """
    device = inputs.q.device.type
    if inputs.block_table is not None:
        return inputs if device in SERVED["paged"] else packing.ordinary(inputs)
    if device in SERVED["packed"] or is_empty(inputs):
        return inputs
    if device in SERVED["segments"] and is_one_line(inputs):
        return as_segments(inputs)
    return packing.ordinary(inputs)


def is_one_line(inputs: AttentionInputs) -> bool:
    """Whether documents differ in nothing but where they lie: queries and keys alike, no field for each of them."""
    per_document = (inputs.q_lengths, inputs.k_lengths, inputs.prefix)
    shared_slopes = inputs.alibi is None or inputs.alibi.shape[0] == 1
    return inputs.cu_q is inputs.cu_k and shared_slopes and all(field is None for field in per_document)


def as_segments(inputs: AttentionInputs) -> AttentionInputs:
    """One batch entry whose documents do not see each other; rows outside of all see nothing, and nothing sees them."""
    T_q, T_k = inputs.q.shape[2], inputs.k.shape[2]
    queries = packing.documents_of(inputs.cu_q, T_q)
    keys = queries if T_k == T_q else packing.documents_of(inputs.cu_q, T_k)
    behind = keys >= inputs.cu_q.shape[0] - 1
    keys = torch.where(keys < 0, keys - 1, keys + behind)  # ids that no query has, in ascending order
    ids = (queries.unsqueeze(0), keys.unsqueeze(0))
    return inputs._replace(q_segments=ids[0], k_segments=ids[1], cu_q=None, cu_k=None, max_q=0, max_k=0)


def results_of(results: Results, form: AttentionInputs, inputs: AttentionInputs) -> Results:
    """The results of `form` as those of `inputs`."""
    if form.cu_q is not None or inputs.cu_q is None:
        return results
    if form.q_segments is None:
        return packing.restored(results, inputs)
    if results.lse is None or inputs.sinks is None:
        return results
    outside = (form.q_segments < 0) | (form.q_segments >= inputs.cu_q.shape[0] - 1)  # [1, T]
    return results._replace(lse=results.lse.masked_fill(outside.unsqueeze(1), -torch.inf))  # where a sink would be
