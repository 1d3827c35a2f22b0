"""What a graph holds of a call, the operator, and how others derive and map it: a compiler, torch.func, an exported
program that is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from sdpa.autograd import Attention, Weights, below_autograd, composite, composite_weights, is_transformed, needs_grad
from sdpa.batching import map_forward
from sdpa.layout import like_layout
from sdpa.ops import BAND_END, FIELDS, FORWARD, LIBRARY, WEIGHTS, no_tensor
from sdpa.problem import UNLIMITED, AttentionInputs, Results
from sdpa.short import PLAIN, is_plain


def in_graph(inputs: AttentionInputs, needs_lse: bool, request: str) -> Results:
    """What the graph holds: who made it may differentiate it, unless told not to."""
    if not torch.is_grad_enabled():
        return plain(inputs, needs_lse, request)
    out, lse = FORWARD(*inputs, needs_lse, request)
    return Results(out, lse if needs_lse else None)


def plain(inputs: AttentionInputs, needs_lse: bool, request: str) -> Results:
    if not needs_lse and is_plain(inputs):
        return Results(PLAIN(*inputs[:BAND_END], request), None)
    out, lse = FORWARD(*inputs, needs_lse, request)
    return Results(out, lse if needs_lse else None)


def goes_forward() -> bool:
    """Whether the innermost transform is of forward mode."""
    innermost = peek_interpreter_stack()
    return forward_ad._current_level >= 0 if innermost is None else innermost.key() == TransformType.Jvp


def differentiable_forward(*args) -> tuple[Tensor, Tensor]:
    """The operator's autograd key. Inside of it no Function of functorch's can be called, and none is wanted: functorch
    comes once for each of its levels. Of forward mode it has no other idea than operations of torch's."""
    inputs, (needs_lse, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    if goes_forward():
        out, lse = composite(inputs)
        return like_layout(out, inputs.q), lse if needs_lse else no_tensor(inputs.q)
    if needs_grad(inputs):
        out, lse = apply_single(Attention, *inputs, kernel)
        return out, lse if needs_lse else no_tensor(inputs.q)
    with below_autograd():
        if needs_lse or not is_plain(inputs):
            return FORWARD(*args)
        return PLAIN(*inputs[:BAND_END], kernel), no_tensor(inputs.q)


def differentiable_weights(lse: Tensor, *args) -> Tensor:
    """The same of attention_weights, for which any transform of functorch's is met by operations of torch's."""
    inputs, (average, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    if is_transformed():
        return composite_weights(inputs, lse, average)
    if torch.is_grad_enabled() and lse.requires_grad:
        return apply_single(Weights, *inputs, kernel, lse, average)
    with below_autograd():
        return WEIGHTS(lse, *args)


def batched_forward(info, in_dims, *args):
    """The operator's rule for vmap."""
    out, lse = map_forward(FORWARD, info, in_dims, (*args[:FIELDS], True, args[-1]))
    needs_lse = args[FIELDS]
    return (out, lse if needs_lse else no_tensor(out)), (0, 0 if needs_lse else None)


def batched_plain(info, in_dims, q, k, v, scale, left=UNLIMITED, right=UNLIMITED, bottom_right=False, setting=""):
    """The same of the short form."""
    inputs = AttentionInputs(q, k, v, scale, left, right, bottom_right)
    dims = (*in_dims[:3], *(None,) * (FIELDS - 1))
    (out, _), (dim, _) = batched_forward(info, dims, *inputs, False, setting)
    return out, dim


def apply_single(function: type[torch.autograd.Function], *args):
    """`apply` at one level of functorch's."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(args))


LIBRARY.impl("attention_forward", differentiable_forward, "Autograd")
LIBRARY.impl("attention_weights", differentiable_weights, "Autograd")
torch.library.register_vmap("sdpa::attention_forward", batched_forward, lib=LIBRARY)
torch.library.register_vmap("sdpa::attention_forward.plain", batched_plain, lib=LIBRARY)
