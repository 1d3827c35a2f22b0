"""The kinds of calls: batches, packed documents, pages. How each is checked, normalised and restored.

`steps` returns the same for a prepared call, where only the numbers in the tensors are unknown: a function that makes
the form's tensors of the call's, and one that makes the call's results of the form's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdpa import packing, philox
from sdpa.autocast import cast, cast_options
from sdpa.inputs import (
    Fit,
    drops,
    fit_dense,
    fits_of,
    four_dimensions,
    mask_of,
    normalise,
    restore_rank,
    with_dropout,
)
from sdpa.layout import unexpanded
from sdpa.mask import Mask
from sdpa.problem import AttentionInputs, Results, lengths_of
from sdpa.sequences import normalise_packed, normalise_paged, served_form
from sdpa.validate import Options, Sizes, check_dense, leading_shape
from sdpa.validate_sequences import check_packed, check_paged

FAR = -64.0  # below this, float32's rounding of a log-sum-exp exceeds 1e-5

# (query, key, value, mask, sinks, places) -> the form's tensors; None where query, key and value are these.
Gather = Callable[..., Sequence[Tensor]] | None
# (results, query, key, value, ...) -> (out, lse) as they are returned; None where they are these.
Restore = Callable[..., Sequence[Tensor | None]] | None


class Kind(NamedTuple):
    """One public function's way from arguments to AttentionInputs and back."""

    name: str
    check: Callable[..., None]  # (query, key, value, options, places)
    normalise: Callable[..., AttentionInputs]  # of the same
    restore: Callable[..., Results]  # (results, query, key, value)
    average: bool | None = None  # whether weights are averaged over heads; None where no weights are returned


class Call(NamedTuple):
    """A call's arguments, as they are normalised."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    places: Any  # Documents, Pages or None


def cast_call(call: Call, dtype: torch.dtype) -> Call:
    """The call in autocast's dtype."""
    q, k, v = (cast(t, dtype) for t in call[:3])
    return Call(q, k, v, cast_options(call.options, dtype), call.places)


def restore_packed(results: Results, *_: Tensor) -> Results:
    out, lse = results
    return Results(out.squeeze(0).transpose(0, 1), None if lse is None else lse.squeeze(0))


def restore_paged(results: Results, *_: Tensor) -> Results:
    return Results(results.out.transpose(1, 2), results.lse)


DENSE = Kind(
    "scaled_dot_product_attention",
    lambda query, key, value, options, _: check_dense(query, key, value, options),
    lambda query, key, value, options, _: normalise(query, key, value, options),
    restore_rank,
)
PACKED = Kind("varlen_attention", check_packed, normalise_packed, restore_packed)
PAGED = Kind("paged_attention", check_paged, normalise_paged, restore_paged)


def normalise_lifted(query: Tensor, key: Tensor, value: Tensor, options: Options, _: None) -> AttentionInputs:
    inputs, given = normalise(query, key, value, options), mask_of(options).bias
    if inputs.bias is None or given is None:
        return inputs
    return inputs._replace(bias=lifted(inputs.bias, given.requires_grad))


def lifted(bias: Tensor, learns: bool) -> Tensor:
    """The bias with its far negative rows (as of padding by -1e9) brought to 0.

    A row's offset changes no weight, but in the log-sum-exp it would drown the logarithm of the sum. This takes one
    more tensor of the size that the bias has in memory. A check first whether there is such a row would wait for the
    device.
    """
    bias = bias if learns else unexpanded(bias)
    top = bias.detach().amax(-1, keepdim=True)
    return bias - top.masked_fill((top > FAR) | ~torch.isfinite(top), 0.0)


# Attention that also returns its weights: of each head, or their mean over heads.
WEIGHTS = {
    average: DENSE._replace(name=f"attention with weights, {average}", normalise=normalise_lifted, average=average)
    for average in (False, True)
}


def dropped(results: Results, dropout_p: float) -> Results:
    """The results with an output of zeros where dropout_p is 1; kernels take probabilities below 1 only."""
    if dropout_p != 1.0:
        return results
    return Results(torch.nn.functional.dropout(results.out, 1.0), results.lse)


def without_weights(results: Sequence[Tensor], dropout_p: float) -> tuple[Tensor, Tensor]:
    """The same for an output and its weights."""
    out, weights = results
    if dropout_p != 1.0:
        return out, weights
    return torch.nn.functional.dropout(out, 1.0), torch.zeros_like(weights)


def steps(
    kind: Kind, call: Call, inputs: AttentionInputs, form: AttentionInputs, returns_lse: bool
) -> tuple[Gather, Restore, bool]:
    """(gather, restore, rows) of a prepared call.

    `inputs` is the normalised call, `form` what the device's kernels take in its place. `rows` says whether the form's
    tensors begin with rows (T, H, D). What is returned outlives the call, and holds none of its tensors.
    """
    if kind.average is not None:
        plain = inputs.bias is None
        gather = gather_dense(call, inputs) if plain else gather_any(kind, call, form)
        all_dropped = call.options.dropout_p == 1.0
        return gather, (lambda results, *_: without_weights(results, 1.0)) if all_dropped else None, False
    if kind is DENSE:
        return gather_dense(call, inputs), restore_dense(call), False
    mask: Any = call.options.attn_mask  # a Mask
    if mask is not None and (mask.prefix is not None or mask.device() is not None):
        gather, rows = gather_any(kind, call, form), False  # lengths of documents and of their masks combine
    elif kind is PAGED:
        gather, rows = gather_paged(call, inputs, form), False
    else:
        gather, rows = gather_packed(call, inputs, form)
    restore = restore_rows(call, returns_lse) if rows else restore_sequences(call, inputs, form, returns_lse)
    return gather, restore, rows


# -- batches ----------------------------------------------------------------------------------------------------------


def gather_dense(call: Call, inputs: AttentionInputs) -> Gather:
    query, key, value, options, _ = call
    enable_gqa, device = options.enable_gqa, query.device
    as_given = inputs.q is query and inputs.k is key and inputs.v is value
    fits = fits_of_call(call, inputs)
    dropping, mask = drops(options), options.attn_mask
    idle = isinstance(mask, Mask) and mask.prefix is not None  # it is given even where it has no effect
    if as_given and not fits and not idle and options.sinks is None and not dropping:
        return None

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        tensors = [query, key, value] if as_given else [*four_dimensions(query, key, value, enable_gqa)]
        for _, of in fits:
            tensors += of(mask)
        if sinks is not None:
            tensors.append(sinks)
        if dropping:
            tensors.append(philox.next_seed(device))
        return tensors

    return gather


def fits_of_call(call: Call, inputs: AttentionInputs) -> tuple[Fit, ...]:
    """How the mask that is given becomes fields, whether it is a Mask or a tensor."""
    mask, q = call.options.attn_mask, inputs.q
    if mask is None:
        return ()
    B, M, N = lengths_of(inputs)
    lead = leading_shape(call.query, call.key, call.value)
    fits = tuple(fits_of(mask_of(call.options), Sizes(B, q.shape[1], M, N, lead), q.device))
    if isinstance(mask, Mask):
        return fits
    field = fits[0].fields[0]
    return (Fit((field,), lambda tensor: (fit_tensor(tensor, lead),)),)


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


# -- packed documents and pages ---------------------------------------------------------------------------------------


def gather_any(kind: Kind, call: Call, form: AttentionInputs) -> Gather:
    """The form's tensors by normalising the call again, without its checks."""
    options = call.options._replace(attn_mask=None, sinks=None)
    places_of = [place for place, value in enumerate(form) if isinstance(value, Tensor)]
    alike = form.cu_q is not None and form.cu_q is form.cu_k

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        given = kind.normalise(query, key, value, options._replace(attn_mask=mask, sinks=sinks), places)
        found: Any = with_dropout(served_form(given), options)
        if alike:
            found = found._replace(cu_k=None)
        return [found[place] for place in places_of if found[place] is not None]

    return gather


def gather_packed(call: Call, inputs: AttentionInputs, form: AttentionInputs) -> tuple[Gather, bool]:
    """As rows where kernels take rows, else as segments of one batch entry or as a batch entry for each document."""
    query, key, value, options, documents = call
    own = all(t.shape[1] == rows.shape[1] for t, rows in zip(inputs[:3], (query, key, value), strict=True))
    if not own or options.sinks is not None:
        return gather_any(PACKED, call, form), False
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
        return (rows, True) if contiguous else (gather_any(PACKED, call, form), False)
    return (segments if form.q_segments is not None else apart), False


def gather_paged(call: Call, inputs: AttentionInputs, form: AttentionInputs) -> Gather:
    """As the views that kernels with pages take, or with the pages gathered one after the other."""
    query, _, _, options, pages = call
    own = inputs.q.shape[1] == query.shape[2] and inputs.k.shape[1] == inputs.v.shape[1] == call.key.shape[2]
    if not own or options.sinks is not None or call.value.shape[2] != call.key.shape[2]:
        return gather_any(PAGED, call, form)
    limit, served = pages.block_table.shape[1] * call.key.shape[1], form.block_table is not None
    device, dropping = query.device, drops(options)

    def gather(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Any = None, places: Any = None
    ) -> Sequence[Tensor]:
        table, lengths = places
        lengths = lengths.clamp(0, limit).to(torch.int32).contiguous()
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
            out = packing.together(out, places[0], T)
            lse = packing.together(lse, places[0], T, -torch.inf).contiguous() if returns_lse else None
        elif unseen:
            lse = packing.unseen_outside(lse, places[0])
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
