"""Every check of packed and paged calls, in the manner of validate.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa.mask import Mask, is_integer
from sdpa.scalars import as_int, type_name
from sdpa.validate import (
    NAMES,
    Call,
    Options,
    Sizes,
    check_count,
    check_dimensions,
    check_head_sizes,
    check_heads,
    check_int32,
    check_mask,
    check_mask_argument,
    check_options,
    check_same_device,
    check_shape,
    check_sinks,
    check_tensor,
    check_tensors,
    shapes,
)

PAGED_NAMES = ("query", "key_cache", "value_cache")
PACKED_REFUSES = ("segments", "cu_seqlens", "allowed", "bias")
PAGED_REFUSES = (*PACKED_REFUSES, "lengths")


class Documents(NamedTuple):
    """Where packed documents begin and end, and how long the longest may be."""

    cu_q: Tensor  # (documents + 1,) int32
    cu_k: Tensor
    max_q: int
    max_k: int


class Pages(NamedTuple):
    """Which pages of a cache hold a sequence's keys, and how many keys are valid; and where the queries of sequences
    lie one after the other, where those begin and end, and how many a sequence has at most."""

    block_table: Tensor  # (B, pages per sequence) int32
    lengths: Tensor  # (B,) integers
    cu_q: Tensor | None = None  # (B + 1,) int32
    max_q: int | None = None

    @property
    def packs_queries(self) -> bool:
        return self.cu_q is not None or self.max_q is not None


def documents_of(cu_q: Tensor, cu_k: Tensor, max_q: Any, max_k: Any) -> Documents:
    """Documents with Python's integers, whatever integers are given; what is none is left to `check_documents`."""
    max_q, max_k = (count if (own := as_int(count)) is None else own for count in (max_q, max_k))
    return Documents(cu_q, cu_k, max_q, max_k)


def check_packed(call: Call) -> Sizes:
    """Check a call of varlen_attention."""
    query, key, value, options, documents = call
    check_rows(query, key, value, documents)
    check_options(options, "varlen_attention")
    mask = check_fields("varlen_attention", options, query, PACKED_REFUSES)
    H = check_sequence_heads(query, key, value, options)
    B = documents.cu_q.shape[0] - 1
    sizes = Sizes(B, H, documents.max_q, documents.max_k, (B,))
    if mask is not None:
        check_mask(mask, query, sizes)
    return sizes


def check_paged(call: Call) -> Sizes:
    """Check a call of paged_attention."""
    query, key_cache, value_cache, options, pages = call
    check_caches(query, key_cache, value_cache, pages)
    check_options(options, "paged_attention")
    mask = check_fields("paged_attention", options, query, PAGED_REFUSES)
    if mask is not None and mask.align != "bottom_right" and (mask.has_band or mask.alibi is not None):
        raise RuntimeError(
            "Expected a mask aligned to the bottom right, because the queries of paged_attention are the last of their "
            f'sequence, but got Mask(align="{mask.align}").'
        )
    H = check_sequence_heads(query, key_cache, value_cache, options, PAGED_NAMES)
    B, N = pages.block_table.shape[0], pages.block_table.shape[1] * key_cache.shape[1]
    M = query.shape[1] if pages.max_q is None else min(as_int(pages.max_q), query.shape[0])
    sizes = Sizes(B, H, M, N, (B,))
    if mask is not None:
        check_mask(mask, query, sizes)
    refuse_gradients(query, key_cache, value_cache, options.sinks)
    return sizes


def check_sequence_heads(
    query: Tensor, key: Tensor, value: Tensor, options: Options, names: tuple[str, str, str] = NAMES
) -> int:
    """The number of heads of the result, of (..., heads, D) tensors that fit."""
    H, heads_k, heads_v = (t.shape[-2] for t in (query, key, value))
    check_heads(H, heads_k, heads_v, options.enable_gqa, names)
    H = max(heads_k, heads_v) if H == 1 and not options.enable_gqa else H
    check_sinks(options.sinks, query, H)
    return H


def check_fields(function: str, options: Options, query: Tensor, refused: tuple[str, ...]) -> Mask | None:
    """Check that attn_mask is a Mask, whose fields count positions inside a document or sequence."""
    given = options.attn_mask
    if given is not None and not isinstance(given, Mask):
        raise TypeError(f"{function}(): attn_mask must be a sdpa.Mask or None, not {type_name(given)}")
    check_mask_argument(options, query)
    names = [name for name in refused if given is not None and getattr(given, name) is not None]
    if names:
        raise RuntimeError(
            f"Expected a Mask of causal, align, window, query_lengths, prefix, alibi{lengths_word(refused)} in "
            f"{function}, but got one with {' and '.join(names)}."
        )
    return given


def lengths_word(refused: tuple[str, ...]) -> str:
    return " (lengths are an argument)" if "lengths" in refused else " and lengths"


def check_rows(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> None:
    check_tensors(query, key, value, "varlen_attention")
    for name, tensor, last in (("query", query, "D"), ("key", key, "D"), ("value", value, "Dv")):
        check_dimensions(name, tensor, f"T, {'H' if name == 'query' else 'Hkv'}, {last}")
    check_head_sizes(query, "key", key)
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


def check_caches(query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Pages) -> None:
    check_tensors(query, key_cache, value_cache, "paged_attention", PAGED_NAMES)
    dimensions = "T, H, D" if pages.packs_queries else "B, M, H, D"
    check_dimensions("query", query, dimensions)
    check_dimensions("key_cache", key_cache, "pages, page_size, Hkv, D")
    check_dimensions("value_cache", value_cache, "pages, page_size, Hkv, Dv")
    if query.shape[-2] == 1 != key_cache.shape[2]:  # it looks like (B, H, 1, D), so one head does not broadcast here
        raise RuntimeError(
            f"Expected query of shape ({dimensions}) to have as many heads as the caches of shape (pages, page_size, "
            f"Hkv, D), or a multiple, but got {shapes(query=query, key_cache=key_cache)} instead."
        )
    check_head_sizes(query, "key_cache", key_cache)
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise RuntimeError(
            "Expected key_cache and value_cache to have the same pages, page size and heads, but got "
            f"{shapes(key_cache=key_cache, value_cache=value_cache)} instead."
        )
    check_pages(pages, query)
    if pages.packs_queries:
        check_packed_queries(query, pages)


def check_pages(pages: Pages, query: Tensor) -> None:
    table, lengths = pages.block_table, pages.lengths
    check_tensor("block_table", table, "paged_attention")
    if pages.packs_queries:
        check_dimensions("block_table", table, "B, pages per sequence")
    B = table.shape[0] if pages.packs_queries else query.shape[0]
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


def check_packed_queries(query: Tensor, pages: Pages) -> None:
    """Check what paged_attention is told of queries that lie one after the other."""
    if pages.cu_q is None or pages.max_q is None:
        alone = "max_q" if pages.cu_q is None else "cu_q"
        raise RuntimeError(f"Expected cu_q and max_q together, but got {alone} alone.")
    check_tensor("cu_q", pages.cu_q, "paged_attention")
    check_shape("cu_q", pages.cu_q, ((pages.block_table.shape[0] + 1,),))
    check_int32("cu_q", pages.cu_q, query)
    check_count("max_q", pages.max_q, "paged_attention")


def refuse_gradients(query: Tensor, key_cache: Tensor, value_cache: Tensor, sinks: Tensor | None) -> None:
    learned = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "sinks": sinks}
    asked = [name for name, tensor in learned.items() if tensor is not None and tensor.requires_grad]
    if asked and torch.is_grad_enabled():
        raise RuntimeError(
            f"Expected no input of paged_attention to require a gradient, because it has none, but got "
            f"{' and '.join(asked)} with requires_grad=True; call it under torch.no_grad()."
        )
