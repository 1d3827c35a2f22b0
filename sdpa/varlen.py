"""varlen_attention and paged_attention: their signatures and their meaning. `entry` computes them."""

from __future__ import annotations

from torch import Tensor

from sdpa.entry import answer, public
from sdpa.kinds import PACKED, PAGED
from sdpa.mask import Mask
from sdpa.validate_sequences import Documents, Pages, documents_of


@public(PACKED)
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each of many documents that lie one after the other, without padding.

    Document b owns query rows cu_q[b] .. cu_q[b + 1] and key rows cu_k[b] .. cu_k[b + 1]. Positions count inside it, so
    every document gets what `scaled_dot_product_attention` would give it alone. T is the number of packed rows, of
    queries or of keys; the other names are those of `scaled_dot_product_attention`.

    Args:
        query: (T, H, D) float32, float64, bfloat16 or float16.
        key: (T, Hkv, D).
        value: (T, Hkv, Dv).
        cu_q: (documents + 1,) int32, cumulative query lengths from 0, on the query's device and never read on the host.
        cu_k: the same of keys; the same tensor for self-attention, which is then known to be one.
        max_q: the most queries of a document; the result of a longer document is not specified.
        max_k: the same of keys.
        attn_mask: a `Mask` of causal, align, window, lengths and query_lengths (the valid ones of each document),
            prefix and alibi.
        dropout_p: as in `scaled_dot_product_attention`.
        scale: as in `scaled_dot_product_attention`.
        enable_gqa: as in `scaled_dot_product_attention`.
        softcap: as in `scaled_dot_product_attention`.
        sinks: as in `scaled_dot_product_attention`.
        kernel: as in `scaled_dot_product_attention`.
        is_causal: query i of a document sees its keys 0..i; `Mask(causal=True, align="bottom_right")` aligns the ends.
        return_lse: also return the log-sum-exp of each row, (H, T), natural log; it is differentiable.

    Returns:
        (T, H, Dv); with `return_lse` a pair. A row that sees no key or is in no document (as behind cu_q[-1]) is 0
        with gradient 0, and a row in no document has log-sum-exp -inf.

    Raises:
        RuntimeError, TypeError, ValueError: as `scaled_dot_product_attention`, and for cumulative lengths of the wrong
            shape, dtype or device; their values are not looked at.
    """
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks)
    make = Documents if type(max_q) is type(max_k) is int else documents_of
    return answer(PACKED, (query, key, value), options, return_lse, kernel, make(cu_q, cu_k, max_q, max_k))


@public(PAGED)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    cu_q: Tensor | None = None,
    max_q: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to keys that lie in the pages of a cache: decoding (M = 1) and chunked prefill (M > 1).

    The queries are the last positions of their sequence: the last one stands at key lengths[b] - 1. There is no
    gradient. On a CPU all pages that the table names are copied into one piece first.

    With `cu_q` and `max_q` each sequence has queries of its own number: sequence b owns rows cu_q[b] .. cu_q[b + 1].
    They are copied into (B, max_q, H, D), and their results back. Where one sequence has many more queries than the
    others, two calls take less memory.

    Args:
        query: (B, M, H, D) float32, float64, bfloat16 or float16, whose heads do not broadcast, even if there is one;
            with `cu_q` (T, H, D).
        key_cache: (pages, page_size, Hkv, D).
        value_cache: (pages, page_size, Hkv, Dv).
        block_table: (B, pages per sequence) int32: block_table[b, p] is the page of keys p * page_size and following.
            Entries beyond a sequence's length may be anything, -1 as well; their pages are not looked at.
        lengths: (B,) integers, the valid keys of each sequence, those of the queries among them.
        attn_mask: a `Mask` of causal, window, query_lengths, prefix and alibi; causal, window and alibi need
            align="bottom_right", because the queries are the last positions.
        is_causal: every query sees the keys up to its own, aligned to the bottom right; without it all valid keys.
        dropout_p: as in `scaled_dot_product_attention`; it drops the same weights as that would with the keys in order.
        scale: as in `scaled_dot_product_attention`.
        enable_gqa: as in `scaled_dot_product_attention`.
        softcap: as in `scaled_dot_product_attention`.
        sinks: as in `scaled_dot_product_attention`.
        kernel: as in `scaled_dot_product_attention`.
        return_lse: also return the log-sum-exp of each row, (B, H, M), natural log; with `cu_q` (H, T).
        cu_q: (B + 1,) int32, cumulative query lengths from 0, on the query's device and never read on the host.
        max_q: the most queries of a sequence; the result of one with more is not specified.

    Returns:
        (B, M, H, Dv), with `cu_q` (T, H, Dv); with `return_lse` a pair. A row that sees no key, or is in no sequence,
        is 0, with log-sum-exp -inf.

    Raises:
        RuntimeError, TypeError, ValueError: as `scaled_dot_product_attention`; a cache or table of another shape or
            dtype; an input that requires a gradient while gradients are recorded.

    Method: pages and block tables (Kwon et al., PagedAttention, 2023).
    """
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks)
    pages = Pages(block_table, lengths, cu_q, max_q)
    return answer(PAGED, (query, key_cache, value_cache), options, return_lse, kernel, pages)
