"""What a graph holds of a call, the operator, and how others derive and map it: a compiler, torch.func, an exported
program that is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from sdpa.autograd import (
    DIFFERENTIABLE,
    Attention,
    Weights,
    below_autograd,
    composite,
    composite_weights,
    is_transformed,
    needs_grad,
)
from sdpa.batching import map_forward
from sdpa.dispatch.context import effective, torch_toggles
from sdpa.dispatch.select import choose
from sdpa.layout import like_layout
from sdpa.ops import BAND_END, FIELDS, FORWARD, LIBRARY, WEIGHTS, WITH_LSE, no_tensor
from sdpa.problem import UNLIMITED, AttentionInputs, AttentionProblem, Results
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


def goes_forward(inputs: AttentionInputs) -> bool:
    """Whether the innermost derivative is of forward mode."""
    innermost = peek_interpreter_stack()
    if innermost is not None:
        return innermost.key() == TransformType.Jvp
    given = (inputs[position] for position in DIFFERENTIABLE if forward_ad._current_level >= 0)
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def nests_forward() -> bool:
    """Whether a derivative of forward mode is taken of another, which a Function's rule for it cannot be asked for."""
    return sum(level.key() == TransformType.Jvp for level in get_interpreter_stack() or ()) > 1


def forward_mode(inputs: AttentionInputs, kernel: str) -> tuple[Tensor, Tensor]:
    """(out, lse) by operations of torch's, M x N numbers, which carry tangents. Who asked for a kernel that cannot run
    the call hears it."""
    setting = effective(kernel)
    if setting:
        asked = AttentionProblem.of(inputs, extra=WITH_LSE)._asdict()
        sizes = {name: int(value) for name, value in asked.items() if isinstance(value, torch.SymInt)}
        choose(AttentionProblem(**(asked | sizes)), setting, torch_toggles())
    out, lse = composite(inputs)
    return like_layout(out, inputs.q), lse


def differentiable_forward(*args) -> tuple[Tensor, Tensor]:
    """The operator's autograd key. Inside of it no Function of functorch's can be called, and none is wanted: functorch
    comes once for each of its levels."""
    inputs, (needs_lse, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    forward = goes_forward(inputs) or nests_forward()
    if forward or needs_grad(inputs):
        out, lse = forward_mode(inputs, kernel) if forward else apply_single(Attention, *inputs, kernel)
        return out, lse if needs_lse else no_tensor(inputs.q)
    with below_autograd():
        if needs_lse or not is_plain(inputs):
            return FORWARD(*args)
        return PLAIN(*inputs[:BAND_END], kernel), no_tensor(inputs.q)


def differentiable_plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = UNLIMITED, right: int = UNLIMITED,
    bottom_right: bool = False, setting: str = "",
) -> Tensor:  # fmt: skip
    """The same of the short form, which a graph made under no_grad holds: tangents pass there, and who exported it so
    may train it."""
    return differentiable_forward(*AttentionInputs(q, k, v, scale, left, right, bottom_right), False, setting)[0]


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
    """The operator's rule for vmap; an empty log-sum-exp would have no batch entries to tell apart."""
    out, lse = map_forward(FORWARD, info, in_dims, (*args[:FIELDS], True, args[-1]))
    needs_lse = args[FIELDS]
    return (out, lse if needs_lse else no_tensor(out)), (0, 0 if needs_lse else None)


def batched_plain(info, in_dims, q, k, v, scale, left=UNLIMITED, right=UNLIMITED, bottom_right=False, setting=""):
    """The same of the short form."""
    inputs = AttentionInputs(q, k, v, scale, left, right, bottom_right)
    dims = (*in_dims[:3], *(None,) * (FIELDS - 1))
    (out, _), (dim, _) = batched_forward(info, dims, *inputs, False, setting)
    return out, dim


def batched_weights(info, in_dims, *args):
    """The same of attention_weights."""
    (weights,) = map_forward(lambda *given: (WEIGHTS(*given),), info, in_dims, args, ("lse", *AttentionInputs._fields))
    return weights, 0


def apply_single(function: type[torch.autograd.Function], *args):
    """`apply` at one level of functorch's."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(args))


LIBRARY.impl("attention_forward", differentiable_forward, "Autograd")
LIBRARY.impl("attention_forward.plain", differentiable_plain, "Autograd")
LIBRARY.impl("attention_weights", differentiable_weights, "Autograd")
torch.library.register_vmap("sdpa::attention_forward", batched_forward, lib=LIBRARY)
torch.library.register_vmap("sdpa::attention_forward.plain", batched_plain, lib=LIBRARY)
torch.library.register_vmap("sdpa::attention_weights", batched_weights, lib=LIBRARY)
