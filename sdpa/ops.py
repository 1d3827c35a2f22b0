"""The operators sdpa::attention_forward, _backward and _weights in full: selection is inside, so a graph sees one node.

Registered by define/impl (a Python custom_op costs three times as much a call). The log-sum-exp is (B, H, M) when asked
for, else an empty tensor; gradients that nobody asked for are empty tensors, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa import inductor
from sdpa.dispatch.context import effective, keep, kept
from sdpa.dispatch.select import backward_setting, select, weights_setting
from sdpa.layout import empty_as, like_layout
from sdpa.problem import AttentionInputs, AttentionProblem, Results, lengths_of

# The fields of AttentionInputs after q, k, v, in their order.
MASK_SCHEMA = (
    "float scale, SymInt left, SymInt right, bool bottom_right, Tensor? bias, Tensor? allowed, Tensor? q_lengths, "
    "Tensor? k_lengths, Tensor? q_segments, Tensor? k_segments, Tensor? prefix, Tensor? alibi, Tensor? sinks, "
    "float softcap, float dropout_p, Tensor? rng, Tensor? cu_q, Tensor? cu_k, Tensor? block_table, SymInt max_q, "
    "SymInt max_k"
)
LIBRARY = torch.library.Library("sdpa", "DEF")
LIBRARY.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}, bool needs_lse, str kernel) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{MASK_SCHEMA}, bool bias_grad, str kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_weights(Tensor lse, Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}, bool average, str kernel) -> Tensor"
)
FIELDS = len(AttentionInputs._fields)
BAND_END = AttentionInputs._fields.index("bottom_right") + 1
FIRST_NUMBER = AttentionInputs._fields.index("softcap")
WITH_LSE = frozenset({"lse"})
AVERAGED = frozenset({"averaged"})
NO_EXTRA: frozenset[str] = frozenset()


def attention_forward(*args) -> tuple[Tensor, Tensor]:
    """Implementation on every device: select a kernel and run it."""
    inputs, (needs_lse, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    if is_empty(inputs):
        return empty_results(inputs, needs_lse)
    problem = AttentionProblem.of(inputs, extra=WITH_LSE if needs_lse else NO_EXTRA)
    setting = effective(kernel)
    out, lse = select(problem, setting).run(inputs)
    lse = lse.contiguous() if needs_lse else no_tensor(inputs.q)
    keep(lse, setting)
    # torch's kernels have layouts of their own, and a graph counts on these.
    return like_layout(out, inputs.q), lse


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args
) -> tuple[Tensor, ...]:
    inputs, (bias_grad, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    if is_empty(inputs):
        return zero_gradients(inputs, bias_grad)
    extra = {"bias_grad": bias_grad, "lse_grad": grad_lse is not None}
    problem = AttentionProblem.of(
        inputs, "backward", frozenset(name for name, on in extra.items() if on), (out, lse, grad_out)
    )
    choice = select(problem, backward_setting(kept(kernel, lse)))
    gradients = choice.run(inputs, Results(out, lse), Results(grad_out, grad_lse))
    q, k, v = (like_layout(grad, source) for grad, source in zip(gradients[:3], inputs[:3], strict=True))
    # A tensor each for what is missing: results may not alias.
    bias, sinks = (no_tensor(q) if grad is None else grad for grad in gradients[3:])
    return q, k, v, bias, sinks


def attention_weights(lse: Tensor, *args) -> Tensor:
    """exp(score - lse) after dropout, in the query's dtype; the mean over heads where `average`."""
    inputs, (average, kernel) = AttentionInputs(*args[:FIELDS]), args[FIELDS:]
    if is_empty(inputs):
        return fake_weights(lse, *args).zero_()
    problem = AttentionProblem.of(inputs, "weights", AVERAGED if average else NO_EXTRA)
    return select(problem, weights_setting(effective(kernel), problem.device_type)).run(inputs, lse)


def is_empty(inputs: AttentionInputs) -> bool:
    """Whether no query meets a key; without a head size scores are 0 and the softmax is still one."""
    (B, M, N), q, k = lengths_of(inputs), inputs.q, inputs.k
    keys = N and k.shape[0] and k.shape[2]
    return not (B and q.shape[1] and M and q.shape[2] and (keys or inputs.sinks is not None))


def empty_results(inputs: AttentionInputs, needs_lse: bool) -> tuple[Tensor, Tensor]:
    """No query or no key: zeros, as torch has it."""
    out, lse = allocate(inputs, needs_lse)
    return out.zero_(), lse.fill_(-torch.inf)


def zero_gradients(inputs: AttentionInputs, bias_grad: bool) -> tuple[Tensor, ...]:
    bias = torch.zeros_like(inputs.bias) if bias_grad else no_tensor(inputs.q)
    sinks = no_tensor(inputs.q) if inputs.sinks is None else torch.zeros_like(inputs.sinks)
    return (*(empty_as(t, t.shape[3]).zero_() for t in inputs[:3]), bias, sinks)


def allocate(inputs: AttentionInputs, needs_lse: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised results in the layout every kernel returns."""
    q = inputs.q
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = q.shape[:3] if needs_lse else (0,)
    return empty_as(q, inputs.v.shape[3]), torch.empty(lse_shape, dtype=lse_dtype, device=q.device)


def no_tensor(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device)


def fake_forward(*args) -> tuple[Tensor, Tensor]:
    return allocate(AttentionInputs(*args[:FIELDS]), args[FIELDS])


def fake_backward(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args) -> tuple[Tensor, ...]:
    inputs, bias_grad = AttentionInputs(*args[:FIELDS]), args[FIELDS]
    bias = (
        torch.empty(inputs.bias.shape, dtype=inputs.bias.dtype, device=lse.device) if bias_grad else no_tensor(inputs.q)
    )
    sinks = no_tensor(inputs.q) if inputs.sinks is None else torch.empty_like(inputs.sinks)
    return (*(empty_as(t, t.shape[3]) for t in inputs[:3]), bias, sinks)


def fake_weights(lse: Tensor, *args) -> Tensor:
    """Uninitialised weights, (B, M, N) or (B, H, M, N)."""
    inputs, average = AttentionInputs(*args[:FIELDS]), args[FIELDS]
    B, H, M, _ = inputs.q.shape
    return inputs.q.new_empty((B, M, inputs.k.shape[2]) if average else (B, H, M, inputs.k.shape[2]))


inductor.register(LIBRARY, "attention_forward.default", attention_forward, fake_forward)
inductor.register(LIBRARY, "attention_backward.default", attention_backward, fake_backward)
inductor.register(LIBRARY, "attention_weights.default", attention_weights, fake_weights)
FORWARD = torch.ops.sdpa.attention_forward.default
BACKWARD = torch.ops.sdpa.attention_backward.default
WEIGHTS = torch.ops.sdpa.attention_weights.default
