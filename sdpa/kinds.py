"""The kinds of calls, one for each public function: how each is checked, normalised, restored and prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdpa.inputs import Steps, gather_any, gather_dense, mask_of, normalise, restore_rank, steps_dense, with_placeholder
from sdpa.layout import unexpanded
from sdpa.problem import AttentionInputs, Results, describe
from sdpa.sequences import normalise_packed, normalise_paged, steps_packed, steps_paged
from sdpa.validate import Call, Sizes, check_dense
from sdpa.validate_sequences import check_packed, check_paged

FAR = -64.0  # below this, float32's rounding of a log-sum-exp exceeds 1e-5


class Kind(NamedTuple):
    """One public function's way from arguments to AttentionInputs and back."""

    name: str
    check: Callable[[Call], Sizes]
    normalise: Callable[[Call, Sizes], AttentionInputs]
    restore: Callable[..., Results]  # (results, query, key, value)
    # (call, whether the log-sum-exp is returned): check it, and prepare calls like it; None without anything to compute
    steps: Callable[[Call, bool], Steps | None]
    average: bool | None = None  # whether weights are averaged over heads; None where no weights are returned


def restore_packed(results: Results, *_: Tensor) -> Results:
    out, lse = results
    return Results(out.squeeze(0).transpose(0, 1), None if lse is None else lse.squeeze(0))


def restore_paged(results: Results, query: Tensor, *_: Tensor) -> Results:
    if query.dim() == 3:  # packed queries
        return restore_packed(results)
    return Results(results.out.transpose(1, 2), results.lse)


DENSE = Kind("scaled_dot_product_attention", check_dense, normalise, restore_rank, steps_dense)
PACKED = Kind("varlen_attention", check_packed, normalise_packed, restore_packed, steps_packed)
PAGED = Kind("paged_attention", check_paged, normalise_paged, restore_paged, steps_paged)


# -- attention that also returns its weights --------------------------------------------------------------------------


def normalise_lifted(call: Call, sizes: Sizes) -> AttentionInputs:
    inputs, given = normalise(call, sizes), mask_of(call.options).bias
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


def without_weights(results: Sequence[Tensor], dropout_p: float) -> tuple[Tensor, Tensor]:
    """An output and its weights, both of zeros where dropout_p is 1."""
    out, weights = results
    if dropout_p != 1.0:
        return out, weights
    return torch.nn.functional.dropout(out, 1.0), torch.zeros_like(weights)


def steps_lifted(call: Call, _: bool) -> Steps | None:
    """`steps_dense` with a lifted bias."""
    sizes = check_dense(call)
    with torch.no_grad():
        inputs = normalise_lifted(call, sizes)
        form = with_placeholder(inputs, call.options)
        if inputs.bias is None:
            gather = gather_dense(call, inputs, sizes)
        else:
            gather = gather_any(normalise_lifted, call, sizes, form)
        described = describe(form)
    restore = (lambda results, *_: without_weights(results, 1.0)) if call.options.dropout_p == 1.0 else None
    return None if described is None else Steps(described, gather, restore)


# Of each head, or their mean over heads.
WEIGHTS = {
    average: Kind(
        f"attention with weights, {average}", check_dense, normalise_lifted, restore_rank, steps_lifted, average
    )
    for average in (False, True)
}
