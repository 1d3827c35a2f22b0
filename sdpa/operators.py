"""The operators sdpa::attention_forward, _backward and _weights, each one node of a graph, which selects its kernel.

Each has one schema. Arguments with defaults stand last: first those of plain calls, then those of masks, so that a
plain call names few. They are registered by define/impl, because a Python custom_op costs three times as much a call.
The log-sum-exp is (B, H, M) where it is asked for, else an empty tensor. So is a gradient that is not asked for.

Code that Inductor generates calls the functions themselves. Tensors are neither differentiated nor batched nor traced
there, and the dispatcher's way into Python takes longer than the choice of a kernel. A profiler then shows kernels and
not the operators. The hook for this is Inductor's (torch 2.11 and later); without it generated code calls the
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdpa.calls import AVERAGED, CALLS, CU_K, NO_EXTRA, WITH_LSE, Form, Pass, form_of, switches
from sdpa.dispatch.context import effective, keep, kept
from sdpa.dispatch.select import backward_setting, select, weights_setting
from sdpa.layout import empty_as, like_layout
from sdpa.problem import AttentionInputs, AttentionProblem, Results, fields_of, is_empty
from sdpa.torch_private import inductor_hooks

# Fields of AttentionInputs that a plain call has after q, k and v, and the fields that masks add.
BAND_SCHEMA = "float scale, SymInt left=-1, SymInt right=-1, bool bottom_right=False"
MASK_SCHEMA = (
    "Tensor? bias=None, Tensor? allowed=None, Tensor? q_lengths=None, Tensor? k_lengths=None, "
    "Tensor? q_segments=None, Tensor? k_segments=None, Tensor? prefix=None, Tensor? alibi=None, Tensor? sinks=None, "
    "float softcap=0.0, float dropout_p=0.0, Tensor? rng=None, Tensor? cu_q=None, Tensor? cu_k=None, "
    "Tensor? block_table=None, SymInt max_q=0, SymInt max_k=0"
)
SCHEMAS = {
    "attention_forward": (
        f'(Tensor q, Tensor k, Tensor v, {BAND_SCHEMA}, bool needs_lse=False, str setting="", {MASK_SCHEMA}) '
        "-> (Tensor, Tensor)"
    ),
    "attention_backward": (
        f"(Tensor grad_out, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {BAND_SCHEMA}, "
        f'Tensor? grad_lse=None, bool bias_grad=False, str setting="", {MASK_SCHEMA}) '
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "attention_weights": (
        f'(Tensor lse, Tensor q, Tensor k, Tensor v, {BAND_SCHEMA}, bool average=False, str setting="", {MASK_SCHEMA}) '
        "-> Tensor"
    ),
}
LIBRARY = torch.library.Library("sdpa", "DEF")
try:
    for _name, _schema in SCHEMAS.items():
        LIBRARY.define(_name + _schema)
except RuntimeError as error:
    raise ImportError(
        "operators of sdpa are registered already: import sdpa before this process loads libsdpa_operators.so, "
        "which is for programs without Python"
    ) from error

FIELDS = len(AttentionInputs._fields)
BAND_END = AttentionInputs._fields.index("bottom_right") + 1
DEFAULTS = tuple(AttentionInputs._field_defaults.values())  # of the fields from `left` on
BAND_DEFAULTS, MASK_DEFAULTS = DEFAULTS[: BAND_END - FIELDS], DEFAULTS[BAND_END - FIELDS :]
NO_DIMENSIONS = (None,) * (len(DEFAULTS) + 2)  # defaults for `of_forward` where its arguments are mapped dimensions


# -- from arguments to nouns, and back --------------------------------------------------------------------------------


def of_forward(args: Sequence[Any], missing: tuple[Any, ...] | None = None) -> tuple[AttentionInputs, bool, str]:
    """(inputs, needs_lse, setting) of an operator's arguments; `missing` stands in for arguments from the scale on that
    are not given."""
    args = filled(args, 4, (*BAND_DEFAULTS, False, "", *MASK_DEFAULTS) if missing is None else missing)
    return AttentionInputs(*args[:BAND_END], *args[BAND_END + 2 :]), args[BAND_END], args[BAND_END + 1]


def of_backward(args: Sequence[Any]) -> tuple[AttentionInputs, Results, Results, bool, str]:
    """(inputs, results, upstream, bias_grad, setting)."""
    grad_out, out, lse, *rest = filled(args, 7, (*BAND_DEFAULTS, None, False, "", *MASK_DEFAULTS))
    grad_lse, bias_grad, setting = rest[BAND_END : BAND_END + 3]
    inputs = AttentionInputs(*rest[:BAND_END], *rest[BAND_END + 3 :])
    return inputs, Results(out, lse), Results(grad_out, grad_lse), bias_grad, setting


def of_weights(args: Sequence[Any], missing: tuple[Any, ...] | None = None) -> tuple[AttentionInputs, Any, bool, str]:
    """(inputs, lse, average, setting)."""
    inputs, average, setting = of_forward(args[1:], missing)
    return inputs, args[0], average, setting


def filled(args: Sequence[Any], required: int, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments: those given, and the defaults of the last ones."""
    return (*args, *defaults[len(args) - required :])


def trimmed(masks: Sequence[Any]) -> Sequence[Any]:
    """Fields of masks, without the trailing ones that have their default."""
    end = len(masks)
    while end and (masks[end - 1] is None or (not isinstance(masks[end - 1], Tensor) and is_default(masks, end - 1))):
        end -= 1
    return masks[:end]


def is_default(masks: Sequence[Any], place: int) -> bool:
    """Whether a number is the default; a symbolic number is not."""
    value = masks[place]
    return isinstance(value, (int, float)) and value == MASK_DEFAULTS[place]


def forward_arguments(inputs: AttentionInputs, needs_lse: bool, setting: str) -> tuple[Any, ...]:
    return (*inputs[:BAND_END], needs_lse, setting, *trimmed(inputs[BAND_END:]))


def backward_arguments(
    inputs: AttentionInputs, results: Results, upstream: Results, bias_grad: bool, setting: str
) -> tuple[Any, ...]:
    band, masks = inputs[:BAND_END], trimmed(inputs[BAND_END:])
    return (upstream.out, *results, *band, upstream.lse, bias_grad, setting, *masks)


def call_forward(inputs: AttentionInputs, needs_lse: bool, setting: str) -> tuple[Tensor, Tensor]:
    return FORWARD(*forward_arguments(inputs, needs_lse, setting))


def call_backward(
    inputs: AttentionInputs, results: Results, upstream: Results, bias_grad: bool, setting: str
) -> tuple[Tensor, ...]:
    return BACKWARD(*backward_arguments(inputs, results, upstream, bias_grad, setting))


def call_weights(inputs: AttentionInputs, lse: Tensor, average: bool, setting: str) -> Tensor:
    return WEIGHTS(lse, *inputs[:BAND_END], average, setting, *trimmed(inputs[BAND_END:]))


# -- on a device ------------------------------------------------------------------------------------------------------


def attention_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """A kernel's forward: out and lse in the memory layout that the fake promises."""
    tensors, state = state_of("forward", args)
    found = found_or_made(state, tensors, partial(prepare_forward, args))
    if found is None:
        inputs, needs_lse, _ = of_forward(args)
        return empty_results(inputs, needs_lse)
    run, stride, needs_lse, held = found
    out, lse = run(*run.form.distinct(tensors))
    out = out if out.stride() == stride else like_layout(out, tensors[0])
    if not needs_lse:
        return out, no_tensor(out)
    lse = lse.contiguous()
    keep(lse, held)  # a graph's backward may run outside of the with-block that its forward ran in
    return out, lse


def prepare_forward(args: tuple[Any, ...]) -> tuple[Pass, tuple[int, ...], bool, str] | None:
    """The pass of calls like this one, the strides of its output, whether it gives the log-sum-exp, and its setting.
    None where no query meets a key."""
    inputs, needs_lse, setting = of_forward(args)
    check(inputs)
    if is_empty(inputs):
        return None
    problem = AttentionProblem.of(inputs, extra=WITH_LSE if needs_lse else NO_EXTRA)
    held = effective(setting)
    run = Pass(Form(fields_of(inputs)), select(problem, held))
    return run, empty_as(inputs.q, inputs.v.shape[3]).stride(), needs_lse, held


def attention_backward(grad_out: Tensor, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A kernel's backward, likewise. A missing gradient is an empty tensor of its own, because results may not
    alias."""
    tensors, state = state_of("backward", args, out, lse, grad_out)
    setting = kept(args[BAND_END + 2] if len(args) > BAND_END + 2 else "", lse)
    prepare = partial(prepare_backward, (grad_out, out, lse, *args), setting)
    found = found_or_made((*state, setting), (*tensors, out, lse, grad_out), prepare)
    if found is None:
        inputs, _, _, bias_grad, _ = of_backward((grad_out, out, lse, *args))
        return zero_gradients(inputs, bias_grad)
    run, strides = found
    grad_lse = args[BAND_END] if len(args) > BAND_END else None
    own = tensors if grad_lse is None else (*tensors[:3], *tensors[4:])
    gradients = run(*run.form.distinct(own), out, lse, grad_out, *(() if grad_lse is None else (grad_lse,)))
    dq, dk, dv, *others = gradients
    bias, sinks = others or (None, None)
    return (
        *(
            grad if grad.stride() == stride else like_layout(grad, source)
            for grad, stride, source in zip((dq, dk, dv), strides, tensors, strict=False)
        ),
        no_tensor(out) if bias is None else bias,
        no_tensor(out) if sinks is None else sinks,
    )


def prepare_backward(args: tuple[Any, ...], setting: str) -> tuple[Pass, list[tuple[int, ...]]] | None:
    """The pass, and the strides of the gradients of q, k and v."""
    inputs, results, upstream, bias_grad, _ = of_backward(args)
    check(inputs)
    if is_empty(inputs):
        return None
    asked = {"bias_grad": bias_grad, "lse_grad": upstream.lse is not None}
    extra = frozenset(name for name, on in asked.items() if on)
    problem = AttentionProblem.of(inputs, "backward", extra, (*results, upstream.out))
    run = Pass(Form(fields_of(inputs)), select(problem, backward_setting(setting, problem)))
    return run, [empty_as(t, t.shape[3]).stride() for t in inputs[:3]]


def attention_weights(lse: Tensor, *args: Any) -> Tensor:
    """exp(score - lse) after dropout, in the query's dtype; the mean over heads where `average`."""
    tensors, state = state_of("weights", args, lse)
    run = found_or_made(state, (*tensors, lse), partial(prepare_weights, (lse, *args)))
    return fake_weights(lse, *args).zero_() if run is None else run(*run.form.distinct(tensors), lse)


def prepare_weights(args: tuple[Any, ...]) -> Pass | None:
    inputs, _, average, setting = of_weights(args)
    check(inputs)
    if is_empty(inputs):
        return None
    problem = AttentionProblem.of(inputs, "weights", AVERAGED if average else NO_EXTRA)
    choice = select(problem, weights_setting(effective(setting), problem.device_type))
    return Pass(Form(fields_of(inputs)), choice)


def check(inputs: AttentionInputs) -> None:
    """Refuse what the public functions never give, and a graph that was put together by hand may."""
    for name, t in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True):
        if t.dim() != 4:
            raise ValueError(f"expected {name} as (batch, heads, length, head size), got shape {tuple(t.shape)}")
    rng = inputs.rng
    if inputs.dropout_p and (rng is None or rng.dtype != torch.int64 or rng.shape not in ((2,), (4,))):
        got = "none" if rng is None else f"{rng.dtype} of shape {tuple(rng.shape)}"
        raise ValueError(
            f"dropout_p = {inputs.dropout_p} needs rng, two int64 numbers (seed, offset) or four, got {got}"
        )


def found_or_made(state: tuple[Any, ...], tensors: Sequence[Tensor], prepare: Callable[[], Any]) -> Any:
    """What is cached for a call, or prepared for it; None where no query meets a key. Tensors without memory, for which
    nothing is cached, are the kernel's to refuse."""
    return CALLS.find(state, tensors, prepare) or prepare()


def state_of(direction: str, args: tuple[Any, ...], *beside: Tensor) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The tensors among an operator's arguments, and the rest by which `calls` recognises a call, the alignment of all
    tensors among it."""
    if len(args) <= BAND_END + 2 and direction != "backward":  # a plain call
        tensors, numbers = args[:3], args[3:]
    else:
        tensors = tuple([value for value in args if isinstance(value, Tensor)])
        numbers = tuple([Tensor if isinstance(value, Tensor) else value for value in args[3:]])
        place = CU_K + (3 if direction == "backward" else 2)
        numbers = (*numbers, len(args) > place and args[place] is args[place - 1])
    return tensors, (direction, numbers, switches(), form_of((*tensors, *beside)))


def empty_results(inputs: AttentionInputs, needs_lse: bool) -> tuple[Tensor, Tensor]:
    """The results without queries or without keys: zeros as in torch, and -inf."""
    out, lse = allocate(inputs, needs_lse)
    return out.zero_(), lse.fill_(-torch.inf)


def zero_gradients(inputs: AttentionInputs, bias_grad: bool) -> tuple[Tensor, ...]:
    bias = torch.zeros_like(inputs.bias) if bias_grad and inputs.bias is not None else no_tensor(inputs.q)
    sinks = no_tensor(inputs.q) if inputs.sinks is None else torch.zeros_like(inputs.sinks)
    return (*(empty_as(t, t.shape[3]).zero_() for t in inputs[:3]), bias, sinks)


def allocate(inputs: AttentionInputs, needs_lse: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised results in the layout that operators return."""
    q = inputs.q
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = q.shape[:3] if needs_lse else (0,)
    return empty_as(q, inputs.v.shape[3]), torch.empty(lse_shape, dtype=lse_dtype, device=q.device)


def no_tensor(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device)


# -- under a compiler -------------------------------------------------------------------------------------------------


def fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, needs_lse, _ = of_forward(args)
    return allocate(inputs, needs_lse)


def fake_backward(*args: Any) -> tuple[Tensor, ...]:
    inputs, results, _, bias_grad, _ = of_backward(args)
    bias, sinks = no_tensor(inputs.q), no_tensor(inputs.q)
    if bias_grad and inputs.bias is not None:
        bias = torch.empty(inputs.bias.shape, dtype=inputs.bias.dtype, device=results.out.device)
    if inputs.sinks is not None:
        sinks = torch.empty_like(inputs.sinks)
    return (*(empty_as(t, t.shape[3]) for t in inputs[:3]), bias, sinks)


def fake_weights(*args: Any) -> Tensor:
    """Uninitialised weights, (B, M, N) or (B, H, M, N)."""
    inputs, _, average, _ = of_weights(args)
    B, H, M, _ = inputs.q.shape
    return inputs.q.new_empty((B, M, inputs.k.shape[2]) if average else (B, H, M, inputs.k.shape[2]))


# By operator, the function that generated code calls. It lies in torch.ops, because such code imports torch only. Code
# may come from a cache on disk that another version of ours wrote. So a function whose arguments change must get a new
# name.
GENERATED = {
    "attention_forward": "attention_forward_2",
    "attention_backward": "attention_backward_2",
    "attention_weights": "attention_weights_2",
}


def register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's function on every device, its fake, and the function for generated code."""

    def with_offer(*args: Any) -> Any:
        offer()  # before code is generated, Inductor calls the fake
        return fake(*args)

    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdpa::{name}", with_offer, lib=LIBRARY)
    setattr(torch.ops.sdpa, GENERATED[name], function)
    return getattr(torch.ops.sdpa, name).default


def offer() -> None:
    """Register the hook, where Inductor has been imported; importing it takes a second."""
    module = inductor_hooks()
    hooks = getattr(module, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)
    if hooks is not None:
        for name, function in GENERATED.items():
            hooks.setdefault(f"torch.ops.sdpa.{name}.default", module.CustomCodegen(python=partial(write, function)))


def write(name: str, node: Any, writeline: Callable[[str], None]) -> None:
    """The generated line that calls the function in place of the operator, without the trailing defaults that Inductor
    fills in by name."""
    given = [*node.codegen_args(), *(text.partition("=")[2] for text in node.codegen_kwargs())]
    defaults = [repr(argument.default_value) for argument in node.op_overload._schema.arguments]
    while given and given[-1] == defaults[len(given) - 1]:
        given.pop()
    writeline(f"{node.get_name()} = torch.ops.sdpa.{name}({', '.join(given)})")


FORWARD = register("attention_forward", attention_forward, fake_forward)
BACKWARD = register("attention_backward", attention_backward, fake_backward)
WEIGHTS = register("attention_weights", attention_weights, fake_weights)
