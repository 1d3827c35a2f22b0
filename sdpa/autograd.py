"""Derivatives: fused first-order backward, and through math everything else (double backward, forward mode, vmap).

In eager mode the autograd.Function stands outside of the operator, which is cheaper than the operator's autograd key.
In graphs stands the operator alone (`graph`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from sdpa import flops
from sdpa.batching import map_backward, map_forward
from sdpa.kernels.math.composite import backward_terms, forward_terms
from sdpa.kernels.math.weights import composite_weights, weights_gradients
from sdpa.layout import like_layout
from sdpa.ops import BACKWARD, BAND_END, FIELDS, FORWARD, WEIGHTS, no_tensor
from sdpa.problem import AttentionInputs, Results
from sdpa.short import LEARNING_FORWARD, PLAIN_BACKWARD, is_plain

__all__ = [
    "Attention",
    "AttentionBackward",
    "Weights",
    "apply",
    "composite_weights",
    "is_transformed",
    "needs_grad",
]

# Positions of the inputs that have gradients: q, k, v, bias, sinks.
DIFFERENTIABLE = tuple(AttentionInputs._fields.index(name) for name in ("q", "k", "v", "bias", "sinks"))
BIAS = AttentionInputs._fields.index("bias")
below_autograd = torch._C._AutoDispatchBelowAutograd


class Attention(torch.autograd.Function):
    """(out, lse) of AttentionInputs given flat, followed by the kernel setting; with double backward, forward mode and
    a vmap rule."""

    @staticmethod
    def forward(*args):
        if peek_interpreter_stack() is None:
            with below_autograd():
                if is_plain(AttentionInputs(*args[:FIELDS])):
                    return LEARNING_FORWARD(*args[:BAND_END], args[FIELDS])
                return FORWARD(*args[:FIELDS], True, args[FIELDS])
        # In a Function's forward derivatives are off: of its own level of functorch's, not of those around it.
        with below_autograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return FORWARD(*args[:FIELDS], True, args[FIELDS])

    @staticmethod
    def setup_context(ctx, args, results) -> None:
        remember(ctx, args, results)
        ctx.set_materialize_grads(False)
        save_for_forward(ctx, args[:FIELDS])

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return (None,) * (FIELDS + 1)
        inputs, out, lse = recall(ctx)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        bias_grad = bool(ctx.needs_input_grad[BIAS])
        return scatter(ctx, apply(AttentionBackward, grad_out, grad_lse, out, lse, *inputs, bias_grad, ctx.kernel))

    @staticmethod
    def jvp(ctx, *tangents):
        inputs = rebuild(ctx, ctx.saved_tensors)
        out, lse = push_forward(lambda *tensors: composite(with_differentiable(inputs, tensors)), inputs, tangents)
        return like_layout(out, inputs.q), lse

    @staticmethod
    def vmap(info, in_dims, *args):
        results = map_forward(Attention.apply, info, in_dims, args)
        return results, (0,) * len(results)


class AttentionBackward(torch.autograd.Function):
    """The gradients of Attention, themselves differentiable through math."""

    @staticmethod
    def forward(grad_out, grad_lse, out, lse, *rest):
        flops.announce()
        inputs, (bias_grad, kernel) = AttentionInputs(*rest[:FIELDS]), rest[FIELDS:]
        if grad_lse is not None or bias_grad or not is_plain(inputs):
            return BACKWARD(grad_out, grad_lse, out, lse, *rest)
        grads = PLAIN_BACKWARD(grad_out, out, lse, *inputs[:BAND_END], kernel)
        return (*grads, no_tensor(out), no_tensor(out))

    @staticmethod
    def setup_context(ctx, args, results) -> None:
        grad_out, grad_lse, _, _, *rest = args
        ctx.bias_grad = rest[FIELDS]
        tensors = [grad_out, grad_lse, *rest[:FIELDS]]
        ctx.constants = [None if isinstance(t, Tensor) else t for t in tensors]
        ctx.is_tensor = [isinstance(t, Tensor) for t in tensors]
        ctx.save_for_backward(*(t for t in tensors if isinstance(t, Tensor)))
        ctx.save_for_forward(*(t for t in tensors if isinstance(t, Tensor)))
        ctx.set_materialize_grads(True)

    @staticmethod
    def backward(ctx, *grads):
        function, primals, _ = recompute(ctx)
        _, pull_back = torch.func.vjp(function, *primals)
        pulled = iter(pull_back(tuple(grads)))
        present = [next(pulled) if p else None for p in presence(ctx)]
        grad_out, grad_lse, *inputs = present
        return second_order(grad_out, grad_lse, inputs)

    @staticmethod
    def jvp(ctx, *tangents):
        function, primals, inputs = recompute(ctx)
        chosen = [tangents[0], tangents[1], *(tangents[4 + i] for i in DIFFERENTIABLE)]
        chosen = [t for t, present in zip(chosen, presence(ctx), strict=True) if present]
        moved = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, chosen, strict=True))
        *moved, bias, sinks = directional(function, primals, moved)
        # A tangent has to lie in memory as its primal does.
        return (*(like_layout(t, source) for t, source in zip(moved, inputs[:3], strict=True)), bias, sinks)

    @staticmethod
    def vmap(info, in_dims, *args):
        results = map_backward(AttentionBackward.apply, info, in_dims, args)
        return results, (0,) * len(results)


class Weights(torch.autograd.Function):
    """The weights of AttentionInputs given flat, the kernel setting, lse and whether heads are averaged.

    Nothing of their size is saved: where a gradient arrives, which is seldom, it is made of the scores computed again,
    by plain operations that are differentiable again. Where none arrives, lse gets none and not zeros.
    """

    @staticmethod
    def forward(*args):
        request, lse, average = args[FIELDS:]
        with below_autograd():
            return WEIGHTS(lse, *args[:FIELDS], average, request)

    @staticmethod
    def setup_context(ctx, args, weights) -> None:
        _, lse, ctx.average = args[FIELDS:]
        remember(ctx, args, (lse,))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * (FIELDS + 3)
        *tensors, lse = ctx.saved_tensors
        bias_grad = bool(ctx.needs_input_grad[BIAS])
        grads = weights_gradients(rebuild(ctx, tensors), lse, grad, ctx.average, bias_grad)
        return (*scatter(ctx, (grads.q, grads.k, None, grads.bias, None)), grads.lse, None)


def apply(function: type[torch.autograd.Function], *args):
    """`function.apply` without binding the arguments to its signature, which has no defaults to fill in; functorch asks
    for the ordinary way."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return ONE_LEVEL[function].apply(*unwrap_dead_wrappers(args))


def one_level(function: type[torch.autograd.Function]) -> type[_SingleLevelFunction]:
    """The same derivative as a class whose `apply` asks nothing before. What `apply` of a Function asks functorch, it
    asks in C++ from torch 2.15 on, where nobody can leave it out."""
    names = ("forward", "setup_context", "backward", "jvp", "_compiled_autograd_key")
    methods = {name: staticmethod(getattr(function, name)) for name in names}
    return type(function.__name__, (_SingleLevelFunction,), methods)


ONE_LEVEL = {function: one_level(function) for function in (Attention, AttentionBackward, Weights)}


def needs_grad(inputs: AttentionInputs) -> bool:
    if not torch.is_grad_enabled():
        return False
    q, k, v, bias, sinks = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)


def is_transformed() -> bool:
    """Whether functorch (vmap, grad, jvp) or forward-mode differentiation is on."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def remember(ctx, args, results) -> None:
    """Save tensors and constants of a call for `recall`."""
    inputs = args[:FIELDS]
    ctx.kernel = args[FIELDS]
    ctx.constants = [None if isinstance(t, Tensor) else t for t in inputs]
    ctx.is_tensor = [isinstance(t, Tensor) for t in inputs]
    ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)), *results)


def save_for_forward(ctx, inputs) -> None:
    ctx.save_for_forward(*(t for t in inputs if isinstance(t, Tensor)))


def recall(ctx) -> tuple[AttentionInputs, Tensor, Tensor]:
    """The inputs and results of a call; checkpointing lets saved_tensors be read only once."""
    *tensors, out, lse = ctx.saved_tensors
    return rebuild(ctx, tensors), out, lse


def rebuild(ctx, tensors) -> AttentionInputs:
    """AttentionInputs of the saved tensors and constants of a call."""
    present = iter(tensors)
    return AttentionInputs(*(next(present) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)))


def scatter(ctx, grads):
    """The five gradients at the positions of their inputs."""
    placed = [None] * (FIELDS + 1)
    for position, grad in zip(DIFFERENTIABLE, grads, strict=True):
        if ctx.needs_input_grad[position]:
            placed[position] = grad
    return tuple(placed)


def composite(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by operations of torch's."""
    terms = forward_terms(inputs)
    return terms.out.to(inputs.q.dtype), terms.lse


def with_differentiable(inputs: AttentionInputs, tensors) -> AttentionInputs:
    """`inputs` with its present differentiable tensors replaced in order."""
    values, replacements = list(inputs), iter(tensors)
    for position in DIFFERENTIABLE:
        if values[position] is not None:
            values[position] = next(replacements)
    return AttentionInputs(*values)


def push_forward(function, inputs: AttentionInputs, tangents):
    """Forward-mode derivative of `function` of the differentiable inputs."""
    present = [position for position in DIFFERENTIABLE if inputs[position] is not None]
    primals = tuple(inputs[p] for p in present)
    moved = tuple(torch.zeros_like(inputs[p]) if tangents[p] is None else tangents[p] for p in present)
    return directional(function, primals, moved)


def directional(function, primals, tangents):
    """Jacobian times tangents by two reverse passes: torch cannot nest forward mode inside a jvp rule."""
    results, pull_back = torch.func.vjp(function, *primals)
    zeros = tuple(torch.zeros_like(r) for r in results)
    _, push = torch.func.vjp(lambda *cotangents: pull_back(cotangents), *zeros)
    return push(tuple(tangents))


def presence(ctx) -> list[bool]:
    """Which of grad_out, grad_lse and the differentiable inputs there are."""
    return [ctx.is_tensor[0], ctx.is_tensor[1], *(ctx.is_tensor[2 + i] for i in DIFFERENTIABLE)]


def recompute(ctx):
    """The closed formula of the backward as a function of what it depends on, and that."""
    tensors = iter(ctx.saved_tensors)
    grad_out, grad_lse, *rest = (next(tensors) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True))
    inputs, bias_grad = AttentionInputs(*rest), ctx.bias_grad

    def function(grad_out, *others):
        upstream, others = (others[0], others[1:]) if grad_lse is not None else (None, others)
        given = with_differentiable(inputs, others)
        grads = backward_terms(given, Results(grad_out, upstream), bias_grad)
        return tuple(no_tensor(given.q) if g is None else g for g in grads)

    present = [grad_out, grad_lse, *(inputs[i] for i in DIFFERENTIABLE)]
    return function, tuple(t for t in present if t is not None), inputs


def second_order(grad_out, grad_lse, grads):
    """Gradients at the positions of AttentionBackward's arguments; out and lse are functions of the rest."""
    placed = [None] * (FIELDS + 2)
    for position, grad in zip(DIFFERENTIABLE, grads, strict=True):
        placed[position] = grad
    return (grad_out, grad_lse, None, None, *placed)
