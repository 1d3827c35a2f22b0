"""Packed sequences and paged keys as ordinary batch entries (B, H, M, D) with lengths, and results back.

This defines what they mean. It is used by the reference, and where no kernel of a device takes them as they are. Rows
are gathered in both directions, because each belongs to at most one document: nothing is summed, and autograd may pass
through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.problem import AttentionInputs, Results
from sdpa.torch_private import dispatch_modes, is_exporting

is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def is_ordinary(inputs: AttentionInputs) -> bool:
    return inputs.cu_q is None and inputs.block_table is None


def ordinary(inputs: AttentionInputs) -> AttentionInputs:
    """The same attention with a batch entry for each document or sequence, as long as the longest may be."""
    if inputs.block_table is not None:
        return gathered(queries_apart(inputs))
    return inputs if inputs.cu_q is None else apart(inputs)


def restored(results: Results, inputs: AttentionInputs) -> Results:
    """Results of `ordinary(inputs)` as those of `inputs`."""
    if inputs.cu_q is None:
        return results
    return Results(*rows_of(results, inputs.cu_q, inputs.q.shape[2]))


def cumulative(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`cu_q` and `cu_k` of packed inputs, which always have both."""
    assert inputs.cu_q is not None and inputs.cu_k is not None
    return inputs.cu_q, inputs.cu_k


def apart(inputs: AttentionInputs) -> AttentionInputs:
    """Packed documents as batch entries."""
    (cu_q, cu_k), (M, N) = cumulative(inputs), sizes(inputs)
    q, k, v, q_lengths, k_lengths = batch_entries(inputs[:3], cu_q, cu_k, M, N)
    if inputs.q_lengths is not None:
        q_lengths = torch.minimum(inputs.q_lengths, q_lengths)
    if inputs.k_lengths is not None:
        k_lengths = torch.minimum(inputs.k_lengths, k_lengths)
    return inputs._replace(
        q=q, k=k, v=v, q_lengths=q_lengths, k_lengths=k_lengths, cu_q=None, cu_k=None, max_q=0, max_k=0
    )


def queries_apart(inputs: AttentionInputs) -> AttentionInputs:
    """Packed queries over pages as batch entries. Rows behind a sequence's queries are any; its length hides them."""
    if inputs.cu_q is None:
        return inputs
    places, _ = document_places(inputs.cu_q, query_size(inputs))
    q = inputs.q[0].transpose(0, 1)[places.clamp(0, inputs.q.shape[2] - 1)].transpose(1, 2)
    return inputs._replace(q=q, cu_q=None, max_q=0)


def batch_entries(
    packed: tuple[Tensor, Tensor, Tensor], cu_q: Tensor, cu_k: Tensor, M: int, N: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v (B, H, M or N, .) of packed ones (1, H, T, .), and how many rows of each document there are."""
    q, k, v = packed
    places, behind = document_places(cu_q, M)
    keys = places, behind
    if cu_k is not cu_q or M != N:
        keys = document_places(cu_k, N)
    lengths = cu_q.diff().clamp(0, M), cu_k.diff().clamp(0, N)
    return taken(q, places, behind), taken(k, *keys), taken(v, *keys), *lengths


def document_places(cu: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(B, size) packed rows of each document, and which of them lie behind its end."""
    places = cu[:-1, None] + torch.arange(size, device=cu.device)
    return places, places >= cu[1:, None]


def taken(values: Tensor, places: Tensor, behind: Tensor) -> Tensor:
    """(B, H, size, ...) of packed `values` (1, H, T, ...), 0 behind the end of each document."""
    rows = values[0].transpose(0, 1)[places.clamp(0, values.shape[2] - 1)]  # [B, size, H, ...]
    return rows.masked_fill(behind.view(*behind.shape, *(1,) * (rows.dim() - 2)), 0.0).transpose(1, 2)


def sizes(inputs: AttentionInputs) -> tuple[int, int]:
    """M and N of the documents as batch entries: those of the longest, at most all packed rows."""
    return query_size(inputs), min(inputs.max_k, inputs.k.shape[2])


def apart_upstream(upstream: Results, inputs: AttentionInputs) -> Results:
    """Gradients that arrive at packed results as those that arrive at the documents'."""
    (cu_q, _), M = cumulative(inputs), query_size(inputs)
    lse = None if upstream.lse is None else document_rows(upstream.lse, cu_q, M)
    return Results(document_rows(upstream.out, cu_q, M), lse)


def query_size(inputs: AttentionInputs) -> int:
    """M of the documents as batch entries: that of the longest, at most all packed rows."""
    return min(inputs.max_q, inputs.q.shape[2])


def document_rows(values: Tensor, cu: Tensor, size: int) -> Tensor:
    """(B, H, size, ...) of packed `values` (1, H, T, ...), 0 behind the end of each document."""
    return taken(values, *document_places(cu, size))


def together(values: Tensor, cu: Tensor, T: int, outside: float = 0.0) -> Tensor:
    """Packed (1, H, T, ...) of the documents' `values` (B, H, size, ...), `outside` in rows that belong to none."""
    B, H, size = values.shape[:3]
    if B == 0 or size == 0:
        return values.new_full((1, H, T, *values.shape[3:]), outside)
    document = (ends_before(cu, T) - 1).long()  # as torch indexes, and ONNX only so
    places = torch.arange(T, device=cu.device) - cu[document.clamp(min=0)]
    beyond = (document < 0) | (document >= B) | (places >= size)
    rows = values.transpose(1, 2)[document.clamp(0, B - 1), places.clamp(0, size - 1)]  # [T, H, ...]
    rows = rows.masked_fill(beyond.view(-1, *(1,) * (rows.dim() - 1)), outside)
    return rows.transpose(0, 1).unsqueeze(0)


def rows_of(results: tuple[Tensor, Tensor | None], cu: Tensor, T: int) -> tuple[Tensor, Tensor | None]:
    """Results (B, H, size, ...) of documents as packed ones; a row in none of them sees no key."""
    out, lse = results
    return together(out, cu, T), None if lse is None else together(lse, cu, T, -torch.inf).contiguous()


def documents_of(cu: Tensor, T: int) -> Tensor:
    """(T,) int32: the document of each packed row, -1 before the first and B behind the last."""
    return ends_before(cu, T) - 1


def ends_before(ends: Tensor, size: int) -> Tensor:
    """(size,) int32: how many of the ascending `ends` are at or before each position, without synchronising.

    A graph that is exported gets a sum of marks, because torch.onnx.export has no searchsorted."""
    if ends.dtype.itemsize < torch.int32.itemsize:  # which may not count all positions
        ends = ends.to(torch.int32)
    plain = not is_dynamo_compiling() and dispatch_modes() == 0 and not torch.jit.is_tracing()
    if plain or not is_exporting():
        positions = torch.arange(size, device=ends.device, dtype=ends.dtype)
        return torch.searchsorted(ends.contiguous(), positions, right=True, out_int32=True)
    places = ends.clamp(0, size).long()
    marks = torch.zeros(size + 1, dtype=torch.int64, device=ends.device)
    return marks.scatter_add(0, places, torch.ones_like(places)).cumsum(0)[:size].int()


def segment_ids(cu: Tensor, T_q: int, T_k: int) -> tuple[Tensor, Tensor]:
    """(1, T_q) and (1, T_k) ids by which documents do not see each other; rows outside of all see nothing, and nothing
    sees them."""
    queries = documents_of(cu, T_q)
    keys = queries if T_k == T_q else documents_of(cu, T_k)
    behind = keys >= cu.shape[0] - 1
    keys = torch.where(keys < 0, keys - 1, keys + behind)  # ids that no query has, in ascending order
    return queries.unsqueeze(0), keys.unsqueeze(0)


def unseen_outside(lse: Tensor, cu: Tensor) -> Tensor:
    """lse (1, H, T) with -inf in rows outside of all documents, which else have the sink's score."""
    document = documents_of(cu, lse.shape[2])
    return lse.masked_fill((document < 0) | (document >= cu.shape[0] - 1), -torch.inf)


def shorter(lengths: Tensor | None, cu: Tensor, size: int) -> Tensor:
    """The lengths of documents, or how many rows of each are valid."""
    whole = cu.diff().clamp(0, size)
    return whole if lengths is None else torch.minimum(lengths, whole)


def unseen_lse(inputs: AttentionInputs) -> Tensor:
    """(B, H, rows) of rows that see no key: a sink's score where there is one, but -inf in rows of no sequence."""
    B, H, rows = inputs.q.shape[:3]
    lse = torch.full((B, H, rows), -torch.inf, dtype=torch.float32, device=inputs.q.device)
    if inputs.sinks is None:
        return lse
    lse.copy_(inputs.sinks[None, :, None].expand_as(lse))
    if inputs.cu_q is not None:
        lse.masked_fill_(torch.arange(rows, device=lse.device) >= inputs.cu_q[-1], -torch.inf)
    return lse


def gathered(inputs: AttentionInputs) -> AttentionInputs:
    """Each sequence's pages one after the other. Pages of the table beyond the lengths are read too, and hidden by the
    lengths."""
    table, lengths = inputs.block_table, inputs.k_lengths
    assert table is not None and lengths is not None  # paged keys have both
    k, v = page_rows(inputs.k, inputs.v, table)
    return inputs._replace(k=k, v=v, k_lengths=lengths.clamp(max=k.shape[2]), block_table=None)


def page_rows(k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Hkv, N, .) of caches (pages, Hkv, page_size, .). The table is clamped once for both: of one tensor clamped
    twice alike onnxscript 0.7 makes an invalid model."""
    table = block_table.clamp(0, max(k_cache.shape[0] - 1, 0)).long()
    return rows_in(k_cache, table), rows_in(v_cache, table)


def rows_in(cache: Tensor, table: Tensor) -> Tensor:
    """(B, Hkv, N, .) of one cache (pages, Hkv, page_size, .), by a table of pages that there are."""
    pages, Hkv, page_size, size = cache.shape
    B, per_sequence = table.shape
    if pages == 0:
        return cache.new_zeros(B, Hkv, 0, size)
    rows = cache.transpose(1, 2)[table]  # [B, per_sequence, page_size, Hkv, .]
    return rows.reshape(B, per_sequence * page_size, Hkv, size).transpose(1, 2)
