"""A dense call, checked, as AttentionInputs: four dimensions, masks as fields, and no copy where strides suffice.

`steps_dense` returns what runs before and after the kernel in calls like one, of which all but the numbers in the
tensors is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa import philox
from sdpa.mask import Mask
from sdpa.packing import ends_before
from sdpa.problem import UNLIMITED, AttentionInputs, Description, Results, describe
from sdpa.validate import Call, Options, Sizes, check_dense, leading_shape

__all__ = ["Options", "build_inputs", "normalise", "steps_dense", "with_mask"]

# (query, key, value, mask, sinks, places) -> the form's tensors; None where query, key and value are these.
Gather = Callable[..., Sequence[Tensor]] | None
# (results, query, key, value, ...) -> (out, lse) as they are returned; None where they are these.
Restore = Callable[..., Sequence[Tensor | None]] | None


class Steps(NamedTuple):
    """What a prepared call does before and after its kernel. It outlives the call, and holds none of its tensors."""

    description: Description  # of what the device's kernels take
    gather: Gather
    restore: Restore
    takes_rows: bool = False  # whether what is gathered begins with rows (T, H, D)


def build_inputs(query: Tensor, key: Tensor, value: Tensor, options: Options) -> AttentionInputs:
    """A call, checked and then normalised."""
    call = Call(query, key, value, options, None)
    return with_dropout(normalise(call, check_dense(call)), options)


def steps_dense(call: Call, returns_lse: bool = False) -> Steps | None:
    """Check a call, and prepare calls like it; None where no query meets a key."""
    sizes = check_dense(call)
    with torch.no_grad():  # saved tensors' hooks are to see those of the call itself alone
        inputs = normalise(call, sizes)
        gather, restore = gather_dense(call, inputs, sizes), restore_dense(call)
        described = describe(with_placeholder(inputs, call.options))
    return None if described is None else Steps(described, gather, restore)


def normalise(call: Call, sizes: Sizes) -> AttentionInputs:
    """What kernels take, of a checked call. It has no dropout, whose seed is drawn last."""
    q, k, v = four_dimensions(call[:3], sizes.lead, call.options.enable_gqa)
    return with_mask(unmasked(q, k, v, call.options), mask_of(call.options), sizes)


def unmasked(q: Tensor, k: Tensor, v: Tensor, options: Options) -> AttentionInputs:
    """Four-dimensional tensors with scale, softcap and sinks."""
    scale, softcap = scale_of(options.scale, q.shape[3]), float(options.softcap or 0.0)
    # dropout_p is given: a default float is a symbol to torch.compile(dynamic=True), and the graph of a second call
    # would look for it in that of the first.
    return AttentionInputs(q, k, v, scale, softcap=softcap, sinks=options.sinks, dropout_p=0.0)


def drops(options: Options) -> bool:
    """Whether kernels drop weights. Where dropout_p is 1, the result is made zero after them (`dropped`)."""
    return 0.0 < options.dropout_p < 1.0


def with_dropout(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    if not drops(options):
        return inputs
    given = None if torch.compiler.is_dynamo_compiling() else philox.GIVEN.get()  # a graph reads no context
    rng = philox.draw_seed(inputs.q.device) if given is None else given
    return inputs._replace(dropout_p=float(options.dropout_p), rng=rng)


def with_placeholder(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    """Dropout whose seed is not drawn: that is for the call itself."""
    if not drops(options):
        return inputs
    seed = torch.empty(2, dtype=torch.int64, device=inputs.q.device)
    return inputs._replace(dropout_p=float(options.dropout_p), rng=seed)


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


def mask_of(options: Options) -> Mask:
    """attn_mask, whatever its kind, and is_causal as one Mask."""
    given = options.attn_mask
    if given is None:
        return Mask(causal=True) if options.is_causal else Mask()
    if isinstance(given, Mask):
        return given
    return Mask(allowed=given) if given.dtype == torch.bool else Mask(bias=given)


def dropped(results: Results, dropout_p: float) -> Results:
    """The results with an output of zeros where dropout_p is 1; kernels take probabilities below 1 only."""
    if dropout_p != 1.0:
        return results
    return Results(torch.nn.functional.dropout(results.out, 1.0), results.lse)


def scale_of(scale: float | Tensor | None, D: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    return float(scale)


def four_dimensions(
    tensors: Sequence[Tensor], lead: tuple[int, ...], enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv): batch dimensions broadcast by stride 0 and folded into one."""
    q, k, v = (fold(t, lead) for t in tensors)
    return common_heads(q, k, v, enable_gqa)


def common_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One query head is expanded to the number of key heads; keys and values get the same number of heads."""
    H, heads_k, heads_v = q.shape[1], k.shape[1], v.shape[1]
    if H == heads_k == heads_v:
        return q, k, v
    if H == 1 and not enable_gqa:
        q = q.expand(-1, max(heads_k, heads_v), -1, -1)
    if heads_k != heads_v:
        k, v = common_key_heads(k, v)
    return q, k, v


def fold(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
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


class Fit(NamedTuple):
    """How tensors of a mask become fields of AttentionInputs, which `fields` names in their order."""

    fields: tuple[str, ...]
    of: Callable[[Any], tuple[Tensor, ...]]  # (mask) -> the tensors


def with_mask(inputs: AttentionInputs, mask: Mask, sizes: Sizes) -> AttentionInputs:
    """The fields of `mask` written into `inputs`."""
    M, N = sizes.M, sizes.N
    # A side wider than the matrix hides nothing. UNLIMITED keeps such calls on the unmasked path.
    # torch.jit.trace would keep the answer for other sizes.
    traced = torch.jit.is_tracing()
    left, right = (side if traced or side < M + N else UNLIMITED for side in mask.band)
    tensors: dict[str, Any] = {
        name: tensor
        for fit in fits_of(mask, sizes, inputs.q)
        for name, tensor in zip(fit.fields, fit.of(mask), strict=True)
    }
    return inputs._replace(left=left, right=right, bottom_right=mask.align == "bottom_right", **tensors)


def fits_of(mask: Mask, sizes: Sizes, query: Tensor) -> Iterator[Fit]:
    """How the fields of a mask like this one are fitted, in the order of AttentionInputs."""
    B, H, M, N, lead = sizes
    device, slopes = query.device, torch.promote_types(query.dtype, torch.float32)
    if mask.bias is not None:
        yield Fit(("bias",), lambda mask: (fit_dense(mask.bias, lead),))
    if mask.allowed is not None:
        yield Fit(("allowed",), lambda mask: (fit_dense(mask.allowed, lead),))
    if mask.query_lengths is not None:
        yield Fit(("q_lengths",), lambda mask: (fit_lengths(mask.query_lengths, B, M),))
    if mask.lengths is not None:
        yield Fit(("k_lengths",), lambda mask: (fit_lengths(mask.lengths, B, N),))
    if mask.segments is not None or mask.cu_seqlens is not None:
        yield Fit(("q_segments", "k_segments"), lambda mask: fit_segments(mask, M, N))
    if mask.prefix is not None and mask.has_band:
        yield Fit(("prefix",), lambda mask: (fit_prefix(mask.prefix, B, N, device),))
    if mask.alibi is not None:
        yield Fit(("alibi",), lambda mask: (in_rows(mask.alibi.to(slopes), H),))


def fit_lengths(lengths: Tensor, B: int, limit: int) -> Tensor:
    if lengths.dtype.itemsize < torch.int32.itemsize:  # of which the limit may be none
        lengths = lengths.to(torch.int32)
    lengths = as_int32(lengths.clamp(0, limit))
    return lengths.contiguous() if lengths.shape == (B,) else lengths.expand(B).contiguous()


def as_int32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32)  # `to` takes time in any case


def fit_prefix(prefix: int | Tensor, B: int, N: int, device: torch.device) -> Tensor:
    if not isinstance(prefix, Tensor):
        prefix = torch.full((B,), min(prefix, torch.iinfo(torch.int32).max), dtype=torch.int32, device=device)
    return fit_lengths(prefix, B, N)


def in_rows(tensor: Tensor, size: int) -> Tensor:
    """(size,) or (B, size) as (1 or B, size), where there is nothing in a row, too."""
    return tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, size)


def fit_segments(mask: Mask, M: int, N: int) -> tuple[Tensor, Tensor]:
    """Ids (B|1, M) and (B|1, N) from ids or cumulative lengths."""
    given: Any = mask.segments if mask.segments is not None else mask.cu_seqlens
    pair: tuple[Tensor, ...] = given if isinstance(given, tuple) else (given, given)
    if pair[0] is pair[1] and M == N:  # fields that hold one tensor: recorded launches tell tensors by their addresses
        (ids,) = ids_of(mask, pair[:1], (M,))
        ids = rank(ids) if ids.dtype == torch.int64 else as_int32(ids)
        return ids, ids
    queries, keys = ids_of(mask, pair, (M, N))
    if torch.int64 in (queries.dtype, keys.dtype):
        return renumbered(queries, keys)
    return as_int32(queries), as_int32(keys)


def ids_of(mask: Mask, given: tuple[Tensor, ...], sizes: tuple[int, ...]) -> list[Tensor]:
    """Ids (B|1, size) of the sides given, in their own dtype."""
    if mask.cu_seqlens is not None:
        given = tuple(ends_before(cu[1:], size) for cu, size in zip(given, sizes, strict=True))
    return [in_rows(ids, size) for ids, size in zip(given, sizes, strict=True)]


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


def fit_dense(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """A dense mask as a four-dimensional view whose sizes are 1 or those of the scores. Nothing is expanded in memory
    but batch dimensions beyond the first of which some broadcast and some do not."""
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if len(lead) == 1:
        return mask
    rank = len(lead) + 3
    mask = mask.reshape((1,) * (rank - mask.dim()) + tuple(mask.shape))
    if all(s == 1 for s in mask.shape[:-3]):
        return mask.flatten(0, -4)
    return mask.expand(*lead, -1, -1, -1).flatten(0, -4)


# -- a prepared call --------------------------------------------------------------------------------------------------


def gather_any(
    normalise: Callable[[Call, Sizes], AttentionInputs], call: Call, sizes: Sizes, form: AttentionInputs
) -> Gather:
    """The form's tensors by normalising the call again, without its checks."""
    options = call.options._replace(attn_mask=None, sinks=None)
    places_of = [place for place, value in enumerate(form) if isinstance(value, Tensor)]
    alike = form.cu_q is not None and form.cu_q is form.cu_k

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        again = Call(query, key, value, options._replace(attn_mask=mask, sinks=sinks), places)
        found: Any = with_dropout(normalise(again, sizes), options)
        if alike:
            found = found._replace(cu_k=None)
        return [found[place] for place in places_of if found[place] is not None]

    return gather


def gather_dense(call: Call, inputs: AttentionInputs, sizes: Sizes) -> Gather:
    query, key, value, options, _ = call
    lead, enable_gqa, device = sizes.lead, options.enable_gqa, query.device
    as_given = inputs.q is query and inputs.k is key and inputs.v is value
    fits = fits_of_call(options, sizes, query)
    dropping, mask = drops(options), options.attn_mask
    idle = isinstance(mask, Mask) and mask.prefix is not None  # it is given even where it has no effect
    if as_given and not fits and not idle and options.sinks is None and not dropping:
        return None

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        tensors = [query, key, value] if as_given else [*four_dimensions((query, key, value), lead, enable_gqa)]
        for _, of in fits:
            tensors += of(mask)
        if sinks is not None:
            tensors.append(sinks)
        if dropping:
            tensors.append(philox.next_seed(device))
        return tensors

    return gather


def fits_of_call(options: Options, sizes: Sizes, query: Tensor) -> tuple[Fit, ...]:
    """How the mask that is given becomes fields, whether it is a Mask or a tensor."""
    mask = options.attn_mask
    if mask is None:
        return ()
    fits = tuple(fits_of(mask_of(options), sizes, query))
    if isinstance(mask, Mask):
        return fits
    field = fits[0].fields[0]
    return (Fit((field,), lambda tensor: (fit_tensor(tensor, sizes.lead),)),)


def fit_tensor(mask: Tensor, lead: Sequence[int]) -> Tensor:
    return mask if mask.dim() == 4 and len(lead) == 1 else fit_dense(mask, lead)


def restore_dense(call: Call) -> Restore:
    query, key, value, options, _ = call
    dropout_p = options.dropout_p
    if query.dim() == key.dim() == value.dim() == 4 and dropout_p != 1.0:
        return None

    def restore(results: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Results:
        return dropped(restore_rank(as_results(results), query, key, value), dropout_p)

    return restore


def as_results(results: Sequence[Any]) -> Results:
    return Results(results[0], results[1] if len(results) > 1 else None)
