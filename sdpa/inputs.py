"""From what a user passes to AttentionInputs: four dimensions, masks as fields, nothing copied that strides can say."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sdpa import philox
from sdpa.mask import Mask
from sdpa.problem import UNLIMITED, AttentionInputs, Results, lengths_of
from sdpa.validate import (
    check_flag,
    check_heads,
    check_mask_dtype,
    check_numbers,
    check_same_device,
    check_shape,
    check_sizes,
    check_strided,
    check_tensors,
)


class Options(NamedTuple):
    """Everything beside query, key and value that changes the result."""

    attn_mask: Tensor | Mask | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | Tensor | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


def build_inputs(query: Tensor, key: Tensor, value: Tensor, options: Options) -> AttentionInputs:
    """Check a call and bring it into the form that kernels take."""
    check_tensors(query, key, value)
    check_sizes(query, key, value)
    check_options(options)
    q, k, v = four_dimensions(query, key, value, options.enable_gqa)
    inputs = unmasked(q, k, v, options)
    return with_dropout(with_mask(inputs, mask_of(options, query), leading_shape(query, key, value)), options)


def check_options(options: Options, function: str = "scaled_dot_product_attention") -> None:
    check_numbers(options.dropout_p, options.scale, options.softcap)
    check_flag("is_causal", options.is_causal, function)
    check_flag("enable_gqa", options.enable_gqa, function)


def unmasked(q: Tensor, k: Tensor, v: Tensor, options: Options) -> AttentionInputs:
    """Four-dimensional tensors with scale, softcap and sinks."""
    scale, softcap = scale_of(options.scale, q.shape[3]), float(options.softcap or 0.0)
    sinks = fit_sinks(options.sinks, q)
    # dropout_p is written out: a default float is a symbol to torch.compile(dynamic=True), and the graph of a second
    # call would look for it in that of the first.
    return AttentionInputs(q, k, v, scale, softcap=softcap, sinks=sinks, dropout_p=0.0)


def with_dropout(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    if not 0.0 < options.dropout_p < 1.0:
        return inputs
    return inputs._replace(dropout_p=float(options.dropout_p), rng=philox.draw_seed(inputs.q.device))


def restore_rank(results: Results, query: Tensor, key: Tensor, value: Tensor) -> Results:
    """(B, H, M, Dv) back to the rank that was asked: leading dimensions broadcast as torch does."""
    out, lse = results
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return results
    lead = tuple(leading_shape(query, key, value)) + tuple(out.shape[1:2])
    if rank < 4:
        lead = lead[len(lead) - (rank - 2) :]
    return Results(out.reshape(*lead, *out.shape[2:]), None if lse is None else lse.reshape(*lead, lse.shape[2]))


def mask_of(options: Options, query: Tensor) -> Mask:
    """attn_mask, whatever its kind, and is_causal as one Mask."""
    given = options.attn_mask
    if given is None:
        return Mask(causal=True) if options.is_causal else Mask()
    if options.is_causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True; combine them as "
            "attn_mask=sdpa.Mask(causal=True) & attn_mask."
        )
    if isinstance(given, Mask):
        return given
    if not isinstance(given, Tensor):
        raise TypeError(f"attn_mask must be a Tensor, a sdpa.Mask or None, but got {type(given).__name__}")
    check_strided("attn_mask", given)
    check_mask_dtype(given, query)
    return Mask(allowed=given) if given.dtype == torch.bool else Mask(bias=given)


def scale_of(scale: float | Tensor | None, D: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    return float(scale)


def four_dimensions(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv): batch dimensions broadcast by stride 0 and folded into one."""
    lead = leading_shape(query, key, value)
    q, k, v = (fold(t, lead) for t in (query, key, value))
    return common_heads(q, k, v, enable_gqa)


def common_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads checked; one query head expanded to those of the keys, keys and values brought to one number."""
    H, heads_k, heads_v = q.shape[1], k.shape[1], v.shape[1]
    if H == heads_k == heads_v:
        return q, k, v
    check_heads(H, heads_k, heads_v, enable_gqa)
    if H == 1 and not enable_gqa:
        q = q.expand(-1, max(heads_k, heads_v), -1, -1)
    if heads_k != heads_v:
        k, v = common_key_heads(k, v)
    return q, k, v


def leading_shape(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The broadcast of everything before the heads, at least one dimension."""
    leads = [t.shape[:-3] for t in (query, key, value)]
    if leads[0] == leads[1] == leads[2]:
        return leads[0] if len(leads[0]) else torch.Size([1])
    try:
        return torch.broadcast_shapes(*leads, (1,))
    except RuntimeError:
        got = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise RuntimeError(
            f"Expected the batch dimensions of query, key and value to broadcast, but got shapes {got}."
        ) from None


def fold(tensor: Tensor, lead: torch.Size) -> Tensor:
    """A tensor of any rank as four dimensions with batch `lead`; a view wherever strides allow."""
    if tensor.dim() == 4 and tensor.shape[:1] == lead:
        return tensor
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    tensor = tensor.expand(*lead, -1, -1, -1)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def common_key_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with different head counts brought to one; only a single head does so without a copy."""
    heads = math.lcm(k.shape[1], v.shape[1])
    return repeat_heads(k, heads), repeat_heads(v, heads)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.shape[1] == heads:
        return tensor
    if tensor.shape[1] == 1:
        return tensor.expand(-1, heads, -1, -1)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def with_mask(inputs: AttentionInputs, mask: Mask, lead: torch.Size | None = None) -> AttentionInputs:
    """The fields of `mask` written into `inputs`, checked against its sizes."""
    q, H, (B, M, N) = inputs.q, inputs.q.shape[1], lengths_of(inputs)
    device = mask.device()
    if device is not None and device != q.device:
        raise RuntimeError(f"Expected attn_mask to be on the query's device {q.device}, but got {device} instead.")
    # A side wider than the matrix hides nothing; saying so keeps such calls on the unmasked path.
    # torch.jit.trace would keep the answer for other sizes.
    is_traced = torch._C._get_tracing_state() is not None
    left, right = (side if is_traced or side < M + N else UNLIMITED for side in mask.band)
    return inputs._replace(
        left=left,
        right=right,
        bottom_right=mask.align == "bottom_right",
        **fit_tensors(mask, q, lead, (B, H, M, N)),
    )


def fit_tensors(
    mask: Mask, q: Tensor, lead: torch.Size | None, shape: tuple[int, int, int, int]
) -> dict[str, Tensor | None]:
    """The tensors of `mask` as kernels take them, by fields of AttentionInputs."""
    B, H, M, N = shape
    q_segments, k_segments = fit_segments(mask, B, M, N)
    return {
        "q_segments": q_segments,
        "k_segments": k_segments,
        "k_lengths": fit_lengths("lengths", mask.lengths, B, N),
        "q_lengths": fit_lengths("query_lengths", mask.query_lengths, B, M),
        "prefix": fit_prefix(mask, q, B, N),
        "alibi": fit_alibi(mask.alibi, B, H),
        "allowed": fit_dense(mask.allowed, lead, shape),
        "bias": fit_bias(mask.bias, q, lead, shape),
    }


def fit_lengths(name: str, lengths: Tensor | None, B: int, limit: int) -> Tensor | None:
    if lengths is None:
        return None
    check_shape(name, lengths, ((B,), (1,), ()))
    lengths = as_int32(lengths.clamp(0, limit))
    return lengths.contiguous() if lengths.shape == (B,) else lengths.expand(B).contiguous()


def as_int32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32)  # which takes time where it does nothing


def fit_prefix(mask: Mask, q: Tensor, B: int, N: int) -> Tensor | None:
    if mask.prefix is None or not mask.has_band:
        return None
    prefix = mask.prefix
    if not isinstance(prefix, Tensor):
        prefix = torch.full((B,), prefix, dtype=torch.int32, device=q.device)
    return fit_lengths("prefix", prefix, B, N)


def fit_segments(mask: Mask, B: int, M: int, N: int) -> tuple[Tensor | None, Tensor | None]:
    """Ids (B|1, M) and (B|1, N) from ids or cumulative lengths."""
    given = mask.segments if mask.segments is not None else mask.cu_seqlens
    if given is None:
        return None, None
    pair = given if isinstance(given, tuple) else (given, given)
    if mask.cu_seqlens is not None:
        pair = tuple(ids_of(cu, size) for cu, size in zip(pair, (M, N), strict=True))
    for name, ids, size in zip(("query", "key"), pair, (M, N), strict=True):
        check_shape(f"{name} segments", ids, ((B, size), (1, size), (size,)))
    queries, keys = (ids.reshape(-1, size) for ids, size in zip(pair, (M, N), strict=True))
    if torch.int64 not in (queries.dtype, keys.dtype):
        return as_int32(queries), as_int32(keys)
    if pair[0] is pair[1]:
        ranks = rank(queries)
        return ranks, ranks
    return renumbered(queries, keys)


def renumbered(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """64-bit ids (hashes, say) as ranks that fit 32 bits, equal where the ids are, without synchronising."""
    rows = max(queries.shape[0], keys.shape[0])
    ranks = rank(torch.cat([queries.expand(rows, -1), keys.expand(rows, -1)], dim=1).to(torch.int64))
    return ranks[:, : queries.shape[1]], ranks[:, queries.shape[1] :]


def rank(ids: Tensor) -> Tensor:
    """The place of each id among the different ones of its row, int32."""
    ordered, places = ids.sort(dim=1)
    steps = torch.nn.functional.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
    return torch.empty_like(steps).scatter_(1, places, steps).to(torch.int32)


def ids_of(cu_seqlens: Tensor, size: int) -> Tensor:
    """Document ids of `size` positions from cumulative lengths (documents + 1,), without synchronising."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise RuntimeError(
            f"Expected cu_seqlens to have shape (documents + 1,), but got {tuple(cu_seqlens.shape)} instead."
        )
    positions = torch.arange(size, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True, out_int32=True)


def fit_alibi(slopes: Tensor | None, B: int, H: int) -> Tensor | None:
    if slopes is None:
        return None
    check_shape("alibi slopes", slopes, ((H,), (1, H), (B, H)))
    if slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "Expected alibi slopes without requires_grad, because they have no gradient; detach them, or pass "
            "-slope * distance as a bias, which has one."
        )
    return slopes.to(torch.float32).reshape(-1, H)


def fit_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a Tensor of shape (H,) or None, but got {type(sinks).__name__}")
    check_same_device("sinks", sinks, q)
    check_shape("sinks", sinks, ((q.shape[1],),))
    if sinks.dtype not in (torch.float32, q.dtype):
        raise RuntimeError(f"Expected sinks to be float32 or of the query's dtype {q.dtype}, but got {sinks.dtype}.")
    return sinks


def with_rank(mask: Tensor) -> Tensor:
    """A dense mask in four dimensions at least."""
    return mask if mask.dim() >= 4 else mask[(None,) * (4 - mask.dim())]


def fit_bias(
    bias: Tensor | None, q: Tensor, lead: torch.Size | None, shape: tuple[int, int, int, int]
) -> Tensor | None:
    if bias is None:
        return None
    check_mask_dtype(bias, q)
    return fit_dense(bias, lead, shape)


def fit_dense(mask: Tensor | None, lead: torch.Size | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A dense mask as a four-dimensional view whose sizes are 1 or those of `shape`, not expanded in memory;
    only batch dimensions beyond the first that broadcast apart from each other are."""
    if mask is None:
        return None
    lead = torch.Size([shape[0]]) if lead is None else lead
    full, given = (*lead, *shape[1:]), tuple(mask.shape)
    mask = with_rank(mask)
    sizes = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if len(sizes) != len(full) or any(s not in (1, f) for s, f in zip(sizes, full, strict=True)):
        raise RuntimeError(
            f"attn_mask of shape {given} does not broadcast to (..., H, M, N) = {full}: "
            "output with shape of the scores doesn't match the broadcast shape"
        )
    if len(lead) == 1:
        return mask
    mask = mask.reshape(sizes)
    if all(s == 1 for s in sizes[:-3]):
        return mask.flatten(0, -4)
    return mask.expand(*lead, -1, -1, -1).flatten(0, -4)
