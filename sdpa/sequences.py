"""Packed and paged calls, checked, as AttentionInputs, and in the form in which a device's kernels take them.

`steps_packed` and `steps_paged` return what runs before and after the kernel, as `inputs.steps_dense` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa import packing, philox
from sdpa.dispatch.catalog import SERVED
from sdpa.dispatch.rules import PAGED_ROWS
from sdpa.inputs import (
    Gather,
    Restore,
    Steps,
    common_heads,
    drops,
    fit_lengths,
    gather_any,
    mask_of,
    unmasked,
    with_dropout,
    with_mask,
    with_placeholder,
)
from sdpa.mask import Mask
from sdpa.problem import AttentionInputs, Results, describe, is_empty
from sdpa.validate import Call, Options, Sizes
from sdpa.validate_sequences import Documents, Pages, check_packed, check_paged

SHORT_PAGES = 8  # of fewer keys a copy is faster (docs/log/cpu-pages.md)


def build_packed(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: Options) -> AttentionInputs:
    """A call of varlen_attention, checked and then normalised."""
    call = Call(query, key, value, options, documents)
    return with_dropout(normalise_packed(call, check_packed(call)), options)


def build_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Pages, options: Options
) -> AttentionInputs:
    """A call of paged_attention, checked and then normalised."""
    call = Call(query, key_cache, value_cache, options, pages)
    return with_dropout(normalise_paged(call, check_paged(call)), options)


def normalise_packed(call: Call, sizes: Sizes) -> AttentionInputs:
    """(1, H, T, D) views with cumulative lengths."""
    query, key, value, options, documents = call
    q, k, v = query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    inputs = unmasked(*common_heads(q, k, v, options.enable_gqa), options)
    cu_q, cu_k = documents.cu_q.contiguous(), documents.cu_k.contiguous()
    cu_k = cu_q if documents.cu_k is documents.cu_q else cu_k
    inputs = inputs._replace(cu_q=cu_q, cu_k=cu_k, max_q=documents.max_q, max_k=documents.max_k)
    inputs = with_mask(inputs, mask_of(options), sizes)
    if inputs.q_lengths is not None:
        inputs = inputs._replace(q_lengths=packing.shorter(inputs.q_lengths, cu_q, documents.max_q))
    if inputs.k_lengths is not None:
        inputs = inputs._replace(k_lengths=packing.shorter(inputs.k_lengths, cu_k, documents.max_k))
    if cu_q is cu_k and inputs.q_lengths is None and inputs.k_lengths is None:
        inputs = inputs._replace(bottom_right=False)  # both corners are the same
    return inputs


def normalise_paged(call: Call, sizes: Sizes) -> AttentionInputs:
    """(B, H, M, D), or packed (1, H, T, D) with cumulative lengths, and (pages, Hkv, page_size, D) views."""
    query, key_cache, value_cache, options, pages = call
    mask = Mask(causal=True, align="bottom_right") if options.is_causal else mask_of(options)
    q = query.transpose(1, 2) if pages.cu_q is None else query.transpose(0, 1).unsqueeze(0)
    k, v = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    inputs = unmasked(*common_heads(q, k, v, options.enable_gqa), options)
    inputs = inputs._replace(block_table=pages.block_table.contiguous())
    inputs = with_mask(inputs, mask.replace(lengths=pages.lengths), sizes)
    if pages.cu_q is None:
        return inputs
    cu_q = pages.cu_q.contiguous()
    return inputs._replace(cu_q=cu_q, max_q=sizes.M, q_lengths=packing.shorter(inputs.q_lengths, cu_q, sizes.M))


def served_form(inputs: AttentionInputs) -> AttentionInputs:
    """`inputs` in the form that a fused kernel of their device takes.

    They stay as they are where a kernel takes packed or paged inputs. Else self-attention becomes segments of one batch
    entry, where a kernel takes segments; positions then differ by a constant per document, which no mask depends on.
    Else documents and pages are gathered into batch entries. Packed queries over pages always are: no kernel has both.
    """
    device = inputs.q.device.type
    if inputs.block_table is not None:
        apart = packing.queries_apart(inputs) if device in SERVED["paged"] else inputs
        return apart if device in SERVED["paged"] and keeps_pages(apart) else packing.ordinary(inputs)
    if inputs.cu_q is None or device in SERVED["packed"] or is_empty(inputs):
        return inputs
    if device in SERVED["segments"] and is_one_line(inputs):
        return as_segments(inputs)
    return packing.ordinary(inputs)


def keeps_pages(inputs: AttentionInputs) -> bool:
    """Whether a kernel of the device reads these pages. On a CPU it does for few queries, pages that are not short, and
    rows of numbers side by side; else a copy costs less, or is needed."""
    if inputs.q.device.type != "cpu":
        return True
    _, H, M, _ = inputs.q.shape
    few = M * H <= PAGED_ROWS * inputs.k.shape[1]
    long = inputs.k.shape[2] >= SHORT_PAGES
    return few and long and not is_empty(inputs) and inputs.k.stride(3) == 1


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


# -- prepared calls ---------------------------------------------------------------------------------------------------


def steps_packed(call: Call, returns_lse: bool) -> Steps | None:
    """Check a call, and prepare calls like it; None where no query meets a key."""
    sizes = check_packed(call)
    with torch.no_grad():  # as in `steps_dense`
        inputs = normalise_packed(call, sizes)
        form = with_placeholder(served_form(inputs), call.options)
        if has_fields(call.options.attn_mask):  # lengths of documents and of their masks combine
            gather, rows = gather_any(serve_packed, call, sizes, form), False
        else:
            gather, rows = gather_packed(call, sizes, inputs, form)
        restore = restore_rows(call, returns_lse) if rows else restore_sequences(call, inputs, form, returns_lse)
        described = describe(form)
    return None if described is None else Steps(described, gather, restore, rows)


def steps_paged(call: Call, returns_lse: bool) -> Steps | None:
    """As `steps_packed`, for paged calls."""
    sizes = check_paged(call)
    with torch.no_grad():
        inputs = normalise_paged(call, sizes)
        form = with_placeholder(served_form(inputs), call.options)
        if has_fields(call.options.attn_mask) or call.places.cu_q is not None:
            gather = gather_any(serve_paged, call, sizes, form)
        else:
            gather = gather_paged(call, sizes, inputs, form)
        described, restore = describe(form), restore_sequences(call, inputs, form, returns_lse)
    return None if described is None else Steps(described, gather, restore)


def has_fields(mask: Any) -> bool:
    """Whether a Mask says more than a band."""
    return mask is not None and (mask.prefix is not None or mask.device() is not None)


def serve_packed(call: Call, sizes: Sizes) -> AttentionInputs:
    return served_form(normalise_packed(call, sizes))


def serve_paged(call: Call, sizes: Sizes) -> AttentionInputs:
    return served_form(normalise_paged(call, sizes))


def gather_packed(call: Call, sizes: Sizes, inputs: AttentionInputs, form: AttentionInputs) -> tuple[Gather, bool]:
    """As rows where kernels take rows, else as segments of one batch entry or as a batch entry for each document."""
    query, key, value, options, documents = call
    own = all(t.shape[1] == rows.shape[1] for t, rows in zip(inputs[:3], (query, key, value), strict=True))
    if not own or options.sinks is not None:
        return gather_any(serve_packed, call, sizes, form), False
    contiguous = documents.cu_q.is_contiguous() and documents.cu_k.is_contiguous()
    device, dropping, alike = query.device, drops(options), documents.cu_k is documents.cu_q
    T_q, T_k, size_q, size_k = query.shape[0], key.shape[0], *packing.sizes(inputs)
    served = form.cu_q is not None

    def rows(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        seed = (philox.next_seed(device),) if dropping else ()
        return (query, key, value, *seed, places[0]) if alike else (query, key, value, *seed, *places[:2])

    def segments(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        q, k, v = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        ids = packing.segment_ids(places[0], T_q, T_k)
        return (q, k, v, *ids, philox.next_seed(device)) if dropping else (q, k, v, *ids)

    def apart(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        q, k, v = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        found = packing.batch_entries((q, k, v), places[0], places[1], size_q, size_k)
        return (*found, philox.next_seed(device)) if dropping else found

    if served:
        return (rows, True) if contiguous else (gather_any(serve_packed, call, sizes, form), False)
    return (segments if form.q_segments is not None else apart), False


def gather_paged(call: Call, sizes: Sizes, inputs: AttentionInputs, form: AttentionInputs) -> Gather:
    """As the views that kernels with pages take, or with the pages gathered one after the other."""
    query, _, _, options, pages = call
    own = inputs.q.shape[1] == query.shape[2] and inputs.k.shape[1] == inputs.v.shape[1] == call.key.shape[2]
    if not own or options.sinks is not None or call.value.shape[2] != call.key.shape[2]:
        return gather_any(serve_paged, call, sizes, form)
    limit, served = pages.block_table.shape[1] * call.key.shape[1], form.block_table is not None
    device, dropping = query.device, drops(options)

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        table, lengths = places[:2]
        lengths = fit_lengths(lengths, lengths.shape[0], limit)
        seed = (philox.next_seed(device),) if dropping else ()
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if served:
            return (q, k, v, lengths, *seed, table.contiguous())
        k, v = packing.page_rows(k, v, table)
        return (q, k, v, lengths.clamp(max=k.shape[2]), *seed)

    return gather


def restore_sequences(call: Call, inputs: AttentionInputs, form: AttentionInputs, returns_lse: bool) -> Restore:
    """Makes the call's results of those of the form; `restore_rows` does so for rows."""
    options, T, packed = call.options, inputs.q.shape[2], inputs.cu_q is not None
    apart = packed and form.cu_q is None and form.q_segments is None
    unseen = packed and form.q_segments is not None and inputs.sinks is not None and returns_lse
    all_dropped = options.dropout_p == 1.0

    def restore(results: Sequence[Tensor], *given: Any) -> Sequence[Tensor | None]:
        out: Tensor = results[0]
        lse: Any = results[1] if returns_lse else None
        places = given[-1]
        if apart:
            out = packing.together(out, places.cu_q, T)
            lse = packing.together(lse, places.cu_q, T, -torch.inf).contiguous() if returns_lse else None
        elif unseen:
            lse = packing.unseen_outside(lse, places.cu_q)
        if all_dropped:
            out = torch.nn.functional.dropout(out, 1.0)
        if packed:
            return out.squeeze(0).transpose(0, 1), lse.squeeze(0) if returns_lse else None
        return out.transpose(1, 2), lse

    return restore


def restore_rows(call: Call, returns_lse: bool) -> Restore:
    """The same where the output already consists of rows."""
    all_dropped = call.options.dropout_p == 1.0
    if not returns_lse and not all_dropped:
        return None

    def restore(results: Sequence[Tensor], *_: Any) -> Sequence[Tensor | None]:
        out = torch.nn.functional.dropout(results[0], 1.0) if all_dropped else results[0]
        return out, results[1].squeeze(0) if returns_lse else None

    return restore
