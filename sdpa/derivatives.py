"""Derivatives of a call, in one place: of eager calls and graphs, under torch.func, in forward mode and under vmap.

A prepared call has a node of ours, `Attention`, in autograd's graph. Every other call is that of an operator
(`operators`), whose autograd key and vmap rule are here. Both compute the first derivative by a fused kernel. Further
derivatives are compositions of torch operations. So is forward mode, whose tangents pass through M x N scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sdpa import flops
from sdpa.batching import Dims, map_backward, map_forward
from sdpa.calls import WITH_LSE, Form
from sdpa.dispatch.context import effective, torch_toggles
from sdpa.dispatch.select import choose
from sdpa.kernels.math.composite import backward_terms, forward_terms
from sdpa.kernels.math.weights import composite_weights, weights_gradients
from sdpa.layout import like_layout
from sdpa.operators import (
    FIELDS,
    LIBRARY,
    NO_DIMENSIONS,
    call_backward,
    call_forward,
    call_weights,
    no_tensor,
    of_forward,
    of_weights,
)
from sdpa.problem import AttentionInputs, AttentionProblem, Results, fields_of
from sdpa.repeated import recognise_backward
from sdpa.sinks import moves_rows, row_bias_grad
from sdpa.torch_private import (
    SingleLevelFunction,
    TransformType,
    autocast_off,
    below_autograd,
    dispatch_modes,
    enable_single_level_autograd_function,
    forward_level,
    get_interpreter_stack,
    peek_interpreter_stack,
    single_level,
    unwrapped,
)

# Positions of the inputs that have gradients: q, k, v, bias, sinks.
DIFFERENTIABLE = tuple(AttentionInputs._fields.index(name) for name in ("q", "k", "v", "bias", "sinks"))
BIAS = AttentionInputs._fields.index("bias")
Pair = tuple[Tensor, Any]  # the output and the log-sum-exp or None, or the gradients that arrive at these


# -- the node --------------------------------------------------------------------------------------------------------


class Attention(SingleLevelFunction):
    """A tuple of the output and, where it is asked for, the log-sum-exp of a form's tensors.

    `call` is a `prepared.Prepared` of an eager call, or the `OperatorCall` of an operator.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> Any:
        out, lse = call.run(*tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        if not call.returns_lse:
            return (out,)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        call = ctx.call
        if grad_out is None and grad_lse is None:
            return (None,) * (1 + len(call.form.places))
        learned = {name: place for name, place in call.form.learned if ctx.needs_input_grad[1 + place]}
        saved = ctx.saved_tensors  # checkpointing lets them be read only once
        bias_grad = "bias" in learned
        # What depends on saved results is no function of the inputs, so further derivatives need the sum over keys.
        of_rows = bias_grad and moves_rows(saved[learned["bias"]]) and not torch.is_grad_enabled()
        if grad_out is not None and not of_rows and "sinks" not in learned:
            found = recognise_backward(call, saved, grad_out, grad_lse, learned.get("bias"))
            if found is not None:
                return found
        *tensors, out, lse = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        gradients = call.differentiable if torch.is_grad_enabled() or dispatch_modes() > 0 else call.gradients
        results, upstream = (out, lse), (grad_out, grad_lse)
        found = list(gradients(tensors, results, upstream, bias_grad and not of_rows))
        if of_rows:
            given = {name: tensors[place] for name, place in call.form.learned}
            found[3] = row_bias_grad(given["bias"], given.get("sinks"), Results(*results), Results(*upstream))
        placed: list[Tensor | None] = [*found[:3], *(None,) * (len(tensors) - 3)]
        for name, place in learned.items():
            placed[place] = found[3 if name == "bias" else 4]
        return (None, *placed)


class OperatorCall:
    """The `call` of `Attention` where an operator is differentiated: it calls the operator again, below autograd."""

    __slots__ = ("form", "setting")
    returns_lse = True

    def __init__(self, inputs: AttentionInputs, setting: str) -> None:
        self.form, self.setting = Form(fields_of(inputs)), setting

    def run(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.form.inputs(tensors)
        if peek_interpreter_stack() is None:
            with below_autograd():
                return call_forward(inputs, True, self.setting)
        # In a Function's forward functorch switches derivatives off. The levels around its own need them on.
        with torch.inference_mode(False), below_autograd():
            return call_forward(inputs, True, self.setting)

    def differentiable(
        self, tensors: Sequence[Tensor], results: Pair, upstream: Pair, bias_grad: bool
    ) -> tuple[Tensor, ...]:
        inputs = self.form.inputs(tensors)
        return differentiable_backward(inputs, Results(*results), Results(*upstream), bias_grad, self.setting)

    gradients = differentiable


def differentiable_backward(
    inputs: AttentionInputs, results: Results, upstream: Results, bias_grad: bool, setting: str
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, bias and sinks by a node that has derivatives of its own."""
    return apply(AttentionBackward, *upstream, *results, *inputs, bias_grad, setting)


class AttentionBackward(torch.autograd.Function):
    """The gradients of Attention, themselves differentiable through math."""

    @staticmethod
    def forward(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        flops.announce()
        inputs, (bias_grad, setting) = AttentionInputs(*rest[:FIELDS]), rest[FIELDS:]
        return call_backward(inputs, Results(out, lse), Results(grad_out, grad_lse), bias_grad, setting)

    @staticmethod
    def setup_context(ctx: Any, args: Sequence[Any], results: object) -> None:
        grad_out, grad_lse, _, _, *rest = args
        ctx.bias_grad = rest[FIELDS]
        tensors = [grad_out, grad_lse, *rest[:FIELDS]]
        ctx.constants = [None if isinstance(t, Tensor) else t for t in tensors]
        ctx.is_tensor = [isinstance(t, Tensor) for t in tensors]
        ctx.save_for_backward(*(t for t in tensors if isinstance(t, Tensor)))
        ctx.save_for_forward(*(t for t in tensors if isinstance(t, Tensor)))
        ctx.set_materialize_grads(True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        function, primals, inputs = recompute(ctx)
        with autocast_off(inputs[0].device.type):
            pull_back = torch.func.vjp(function, *primals)[1]
            pulled = iter(pull_back(tuple(grads)))
        grad_out, grad_lse, *found = (next(pulled) if p else None for p in presence(ctx))
        placed: list[Tensor | None] = [None] * (FIELDS + 2)
        for position, grad in zip(DIFFERENTIABLE, found, strict=True):
            placed[position] = grad
        return (grad_out, grad_lse, None, None, *placed)  # out and lse are functions of the rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        function, primals, inputs = recompute(ctx)
        chosen = [tangents[0], tangents[1], *(tangents[4 + i] for i in DIFFERENTIABLE)]
        chosen = [t for t, present in zip(chosen, presence(ctx), strict=True) if present]
        moved = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, chosen, strict=True))
        with autocast_off(inputs[0].device.type):
            *moved, bias, sinks = directional(function, primals, moved)
        # A tangent has to lie in memory as its primal does.
        return (*(like_layout(t, source) for t, source in zip(moved, inputs[:3], strict=True)), bias, sinks)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        results = map_backward(AttentionBackward.apply, info, in_dims, args)
        return results, (0,) * len(results)


class Weights(torch.autograd.Function):
    """The weights of AttentionInputs given flat, the kernel setting, lse and whether heads are averaged.

    Nothing of their size is saved. Where a gradient arrives, which is rare, the scores are computed again by plain
    operations, which are differentiable again. Where none arrives, the gradient of lse is None and not zeros.
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        setting, lse, average = args[FIELDS:]
        with below_autograd():
            return call_weights(AttentionInputs(*args[:FIELDS]), lse, average, setting)

    @staticmethod
    def setup_context(ctx: Any, args: Sequence[Any], weights: object) -> None:
        inputs, (_, lse, ctx.average) = args[:FIELDS], args[FIELDS:]
        ctx.constants = [None if isinstance(t, Tensor) else t for t in inputs]
        ctx.is_tensor = [isinstance(t, Tensor) for t in inputs]
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)), lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (FIELDS + 3)
        *tensors, lse = ctx.saved_tensors
        present = iter(tensors)
        inputs = [next(present) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)]
        with autocast_off(grad.device.type):
            grads = weights_gradients(
                AttentionInputs(*inputs), lse, grad, ctx.average, bool(ctx.needs_input_grad[BIAS])
            )
        placed: list[Tensor | None] = [None] * FIELDS
        for position, gradient in zip(DIFFERENTIABLE, (grads.q, grads.k, None, grads.bias, None), strict=True):
            if ctx.needs_input_grad[position]:
                placed[position] = gradient
        return (*placed, None, grads.lse, None)


ONE_LEVEL: dict[type, Any] = {function: single_level(function) for function in (AttentionBackward, Weights)}


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`. Without a functorch transform it skips binding 27 arguments to the signature."""
    if get_interpreter_stack():
        return function.apply(*args)
    return ONE_LEVEL[function].apply(*map(unwrapped, args))


def apply_single(function: Any, *args: Any) -> Any:
    """The same at one level of functorch, where the dispatcher has unwrapped what earlier transforms left."""
    with enable_single_level_autograd_function():
        return ONE_LEVEL.get(function, function).apply(*args)


def without_others(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs whose values and sinks need no gradient: the weights have none of these, and compiled autograd cannot add
    None."""
    return inputs._replace(v=inputs.v.detach(), sinks=None if inputs.sinks is None else inputs.sinks.detach())


def weights(inputs: AttentionInputs, lse: Tensor, average: bool, setting: str) -> Tensor:
    """exp(score - lse) in the query's dtype; a row that sees no key has weights of 0."""
    if torch.is_grad_enabled() and lse.requires_grad:
        return apply(Weights, *without_others(inputs), setting, lse, average)
    with below_autograd():
        return call_weights(inputs, lse, average, setting)


# -- derivatives of the backward -------------------------------------------------------------------------------------


def with_differentiable(inputs: AttentionInputs, tensors: Iterable[Tensor]) -> AttentionInputs:
    """`inputs` with its present differentiable tensors replaced in order."""
    values: list[Any] = list(inputs)
    replacements = iter(tensors)
    for position in DIFFERENTIABLE:
        if values[position] is not None:
            values[position] = next(replacements)
    return AttentionInputs(*values)


def directional(function: Callable[..., Any], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    """Jacobian times tangents by two reverse passes: torch cannot nest forward mode inside a jvp rule."""
    results, pull_back = torch.func.vjp(function, *primals)[:2]
    zeros = tuple(torch.zeros_like(r) for r in results)
    push = torch.func.vjp(lambda *cotangents: pull_back(cotangents), *zeros)[1]
    return push(tuple(tangents))


def presence(ctx: Any) -> list[bool]:
    """Whether grad_out, grad_lse and each differentiable input is given."""
    return [ctx.is_tensor[0], ctx.is_tensor[1], *(ctx.is_tensor[2 + i] for i in DIFFERENTIABLE)]


def recompute(ctx: Any) -> tuple[Callable[..., Any], tuple[Tensor, ...], AttentionInputs]:
    """The closed formula of the backward as a function of the tensors it depends on, and these tensors."""
    tensors = iter(ctx.saved_tensors)
    grad_out, grad_lse, *rest = (next(tensors) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True))
    inputs, bias_grad = AttentionInputs(*rest), ctx.bias_grad

    def function(grad_out: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        upstream, others = (others[0], others[1:]) if grad_lse is not None else (None, others)
        given = with_differentiable(inputs, others)
        grads = backward_terms(given, Results(grad_out, upstream), bias_grad)
        return tuple(no_tensor(given.q) if g is None else g for g in grads)

    present = [grad_out, grad_lse, *(inputs[i] for i in DIFFERENTIABLE)]
    return function, tuple(t for t in present if t is not None), inputs


# -- the operators' autograd keys and rules for vmap ------------------------------------------------------------------


def needs_grad(inputs: AttentionInputs) -> bool:
    if not torch.is_grad_enabled():
        return False
    values: Sequence[Any] = inputs
    return any(values[i] is not None and values[i].requires_grad for i in DIFFERENTIABLE)


def is_transformed() -> bool:
    """Whether functorch (vmap, grad, jvp) or forward-mode differentiation is on."""
    return peek_interpreter_stack() is not None or forward_level() >= 0


def goes_forward(inputs: AttentionInputs) -> bool:
    """Whether the innermost derivative is of forward mode."""
    innermost = peek_interpreter_stack()
    if innermost is not None:
        return innermost.key() == TransformType.Jvp
    given = (inputs[position] for position in DIFFERENTIABLE if forward_level() >= 0)
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def nests_forward() -> bool:
    """Whether forward mode is nested in forward mode, for which a node's rules cannot be used."""
    return sum(level.key() == TransformType.Jvp for level in get_interpreter_stack() or ()) > 1


def forward_mode(inputs: AttentionInputs, setting: str) -> tuple[Tensor, Tensor]:
    """(out, lse) by torch operations on M x N scores, which carry tangents. Raises NoKernelError where a kernel was
    asked for by name that cannot run the call."""
    setting = effective(setting)
    if setting:
        asked = AttentionProblem.of(inputs, extra=WITH_LSE)._asdict()
        sizes = {name: int(value) for name, value in asked.items() if isinstance(value, torch.SymInt)}
        choose(AttentionProblem(**(asked | sizes)), setting, torch_toggles())
    terms = forward_terms(inputs)
    return like_layout(terms.out.to(inputs.q.dtype), inputs.q), terms.lse


def differentiable_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """attention_forward's autograd key. functorch calls it once for each of its levels, so that it must call no
    Function of functorch's."""
    inputs, needs_lse, setting = of_forward(args)
    forward = goes_forward(inputs) or nests_forward()
    if forward or needs_grad(inputs):
        out, lse = forward_mode(inputs, setting) if forward else differentiated(inputs, setting)
        return out, lse if needs_lse else no_tensor(inputs.q)
    with below_autograd():
        return call_forward(inputs, needs_lse, setting)


def differentiated(inputs: AttentionInputs, setting: str) -> tuple[Tensor, Tensor]:
    call = OperatorCall(inputs, setting)
    return apply_single(Attention, call, *call.form.tensors(inputs))


def differentiable_weights(*args: Any) -> Tensor:
    """The same for attention_weights. Under a functorch transform it is a composition of torch operations."""
    inputs, lse, average, setting = of_weights(args)
    if is_transformed():
        return composite_weights(inputs, lse, average)
    if torch.is_grad_enabled() and lse.requires_grad:
        return apply_single(Weights, *without_others(inputs), setting, lse, average)
    with below_autograd():
        return call_weights(inputs, lse, average, setting)


def batched_forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
    """attention_forward's rule for vmap. It always asks for the log-sum-exp: an empty one has no batch dimension to
    unfold."""
    inputs, needs_lse, setting = of_forward(args)
    dims, _, _ = of_forward(in_dims, NO_DIMENSIONS)

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        return call_forward(AttentionInputs(*given), True, setting)

    out, lse = map_forward(forward, info, dims, inputs)
    return (out, lse if needs_lse else no_tensor(out)), (0, 0 if needs_lse else None)


def batched_weights(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """The same for attention_weights."""
    inputs, lse, average, setting = of_weights(args)
    dims, lse_dim, _, _ = of_weights(in_dims, NO_DIMENSIONS)

    def mapped(lse: Tensor, *given: Any) -> tuple[Tensor]:
        return (call_weights(AttentionInputs(*given), lse, average, setting),)

    names = ("lse", *AttentionInputs._fields)
    (found,) = map_forward(mapped, info, (lse_dim, *dims), (lse, *inputs), names)
    return found, 0


LIBRARY.impl("attention_forward", differentiable_forward, "Autograd")
LIBRARY.impl("attention_weights", differentiable_weights, "Autograd")
torch.library.register_vmap("sdpa::attention_forward", batched_forward, lib=LIBRARY)
torch.library.register_vmap("sdpa::attention_weights", batched_weights, lib=LIBRARY)
