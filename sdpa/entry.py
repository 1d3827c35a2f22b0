"""From a public function to what answers its call: what a call like it before came to, or the ordinary way.

A plain eager call is prepared, which checks and normalises it, under autocast as the call that is cast. `calls`
remembers it, and it is from now on recognised there. A call under a compiler, functorch, forward mode or a mode, or of
a subclass of Tensor, is that of the operator. There __torch_function__ is asked first, then autocast, then nested
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from sdpa import flops, sharded
from sdpa.autocast import autocast_dtype, cast_call, cast_first
from sdpa.calls import CALLS, PLAIN_TYPES, Facts, form_of
from sdpa.decomposed import is_decomposed
from sdpa.decomposed import results_of as decomposed_results
from sdpa.dispatch.context import CURRENT, current_text, effective, request_text
from sdpa.dispatch.tracing import is_traced
from sdpa.inputs import dropped, with_dropout
from sdpa.interop import is_nested, nested_attention
from sdpa.kernels.math.weights import composite_weights
from sdpa.kinds import DENSE, Kind, without_weights
from sdpa.mask import Mask, as_mask
from sdpa.operators import call_forward, call_weights
from sdpa.philox import GIVEN
from sdpa.prepared import Prepared, PreparedRows, PreparedWeights
from sdpa.problem import AttentionInputs, Results
from sdpa.repeated import configure, recognise
from sdpa.sequences import results_of, served_form
from sdpa.torch_private import (
    TORCHS,
    autocast_is_on,
    autocast_off,
    cudnn_enabled,
    deterministic,
    dispatch_modes,
    efficient_enabled,
    flash_enabled,
    float32_precision,
    forward_ad,
    function_modes,
    is_sharded,
    math_enabled,
    peek_interpreter_stack,
    without_autocast,
)
from sdpa.validate import Call, Options, check_flag
from sdpa.validate_sequences import Documents, Pages

band_of = attrgetter("causal", "align", "window")
mask_fields = attrgetter("bias", "allowed", "query_lengths", "lengths", "segments", "cu_seqlens", "prefix", "alibi")
NO_FIELDS = tuple(map(type, mask_fields(Mask())))
is_nested_tensor = attrgetter("is_nested")  # has no strides, for which a guard ends the process

Function = TypeVar("Function", bound=Callable[..., Any])
Run = Callable[..., Sequence[Any]]  # (query, key, value, mask, sinks, places) -> (out, lse), or the weights for lse

is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Request(NamedTuple):
    """A call as it was made."""

    kind: Kind
    call: Call
    returns_lse: bool
    kernel: str | None


def request_of(
    kind: Kind,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: tuple[Any, ...],
    returns_lse: bool,
    kernel: str | None,
    places: Any,
) -> Request:
    return Request(kind, Call(*tensors, Options(*options), places), returns_lse, kernel)


PUBLIC: dict[str, Callable[..., Any]] = {}  # by the name of a kind its function, which a __torch_function__ is handed


def public(kind: Kind) -> Callable[[Function], Function]:
    """Marks the function that calls of `kind` are made by."""

    def mark(function: Function) -> Function:
        PUBLIC[kind.name] = function
        if kind is DENSE:
            configure(own=function)
        return function

    return mark


def answer(
    kind: Kind,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: tuple[Any, ...],
    returns_lse: bool,
    kernel: str | None,
    places: Any = None,
) -> Any:
    """The result of a call by what a call like it before came to, else by the ordinary way; nothing is checked yet."""
    if sharded.open_blocks > 0:
        return sharded.not_compiled(kind, tensors, options, returns_lse, kernel, places)
    if is_dynamo_compiling():
        return ordinary(request_of(kind, tensors, options, returns_lse, kernel, places))
    found = recognise(kind, tensors, options, returns_lse, kernel, places)
    return unrecognised(kind, tensors, options, returns_lse, kernel, places) if found is NotImplemented else found


def unrecognised(
    kind: Kind, tensors: tuple[Any, ...], options: tuple[Any, ...], returns_lse: bool, kernel: str | None, places: Any
) -> Any:
    """The same for a call that is unlike the latest ones, or is not plain. `recognise.cpp` makes the same state."""
    query, key, value = tensors
    mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks = options
    request = request_of(kind, tensors, options, returns_lse, kernel, places)
    # fmt: off
    if (
        function_modes() > 0 or dispatch_modes() > 0 or forward_ad._current_level >= 0 or is_sharded()
        or type(is_causal) is not bool or type(enable_gqa) is not bool or type(returns_lse) is not bool
        or not all(number is None or is_number(number) for number in (scale, softcap))
        or not (is_number(dropout_p) or type(dropout_p) is bool) or GIVEN.get() is not None
    ):
        # fmt: on
        return ordinary(request)
    parts = parts_of(mask, sinks, places)
    if parts is None:
        return ordinary(request)
    form, others, _ = parts
    state: Hashable = None
    try:
        if are_plain(query, key, value, *others) and not any(map(is_nested_tensor, (query, key, value, *others))):
            # fmt: off
            state = (kind.name, form, dropout_p, is_causal, scale, enable_gqa, softcap, returns_lse, kernel,
                     CURRENT.get() and current_text(), flash_enabled(), efficient_enabled(), math_enabled(),
                     cudnn_enabled(), deterministic(), is_grad_enabled(), is_inference_mode_enabled())
            # fmt: on
            hash(state)
            facts = facts_of((query, key, value, *others))
    except (TypeError, AttributeError, ValueError, RuntimeError):
        state = None  # no hash, no tensor, one of torch.fx, one without memory: the ordinary way says what it thinks
    return ordinary(request) if state is None else look_up(request, parts, state, facts)


def is_number(given: object) -> bool:
    """A number that is equal to another one, and hashed like it, if they mean the same; a bool is none."""
    return isinstance(given, float) or type(given) is int


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    query = tensors[0]
    autocast = autocast_dtype(query) if autocast_is_on() else None
    if not query.is_cuda:
        return Facts(autocast)
    return Facts(autocast, form_of(tensors), float32_precision() if query.dtype == torch.float32 else None)


def look_up(request: Request, parts: tuple[Any, ...], state: Hashable, facts: Facts) -> Any:
    """The same where the latest calls of its state were others; the call is prepared where there was none like it."""
    _, others, given = parts
    tensors = (*request.call[:3], *others)
    if is_transformed():
        return ordinary(request)
    run = CALLS.find(state, tensors, partial(prepare, request), facts)
    if run is None:
        return ordinary(request)
    found = run(*tensors[:3], *given)
    return tuple(found) if request.returns_lse else found[0]


def parts_of(mask: Any, sinks: Any, places: Any) -> tuple[Hashable, Sequence[Tensor], tuple[Any, ...]] | None:
    """What a call's mask, sinks and places say beside their tensors, those tensors, and what a prepared call is given
    to fit; None where one is not of a kind that is remembered."""
    tensors: list[Tensor] = []
    form: Hashable = None
    kind = type(mask)
    if kind is Mask:
        fields = mask_fields(mask)
        kinds = tuple(map(type, fields))
        form = band_of(mask)
        if kinds == NO_FIELDS:
            mask = None  # all that it says is in the form
        else:
            form = form, kinds
            for kind, field in zip(kinds, fields, strict=True):
                if kind in PLAIN_TYPES:
                    tensors.append(field)
                elif kind is tuple:
                    tensors += field
                elif kind is not NoneType and kind is not int:
                    return None
    elif kind in PLAIN_TYPES:
        form = Tensor
        tensors.append(mask)
    elif mask is not None:
        return None
    if sinks is not None:
        form = form, "sinks"
        tensors.append(sinks)
    if mask is None and sinks is None and places is None:
        return form, (), ()
    if places is not None:
        if type(places) is Documents:
            cu_q, cu_k, max_q, max_k = places
            alike = cu_k is cu_q
            form = form, alike, max_q, max_k, type(max_q) is type(max_k) is int
            tensors += (cu_q,) if alike else (cu_q, cu_k)
        else:
            form = form, type(places.cu_q), places.max_q, type(places.max_q)
            tensors += places[:2] if places.cu_q is None else places[:3]
    return form, tensors, (mask, sinks, places)


configure(
    function_modes=function_modes,
    dispatch_modes=dispatch_modes,
    forward_ad=forward_ad,
    autocast_dtype=autocast_dtype,
    current=CURRENT.get,
    current_text=current_text,
    flash_enabled=flash_enabled,
    efficient_enabled=efficient_enabled,
    math_enabled=math_enabled,
    cudnn_enabled=cudnn_enabled,
    deterministic=deterministic,
    float32_precision=float32_precision,
    grad_enabled=is_grad_enabled,
    inference_mode=is_inference_mode_enabled,
    functional=torch.nn.functional,
    torchs=TORCHS,
    own=None,  # until `public` knows it
    is_sharded=is_sharded,
    parts_of=parts_of,
    recent=CALLS.recent,
    tensor_type=Tensor,
    parameter_type=Parameter,
)


def is_transformed() -> bool:
    """Whether a compiler, torch.jit, functorch, forward mode or a mode stands between this call and the kernels."""
    return (
        is_traced()
        or is_decomposed()
        or torch.jit.is_tracing()
        or dispatch_modes() > 0
        or function_modes() > 0
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
    )


def are_plain(*tensors: object) -> bool:
    """Whether all are torch's own tensors or parameters."""
    return all(type(tensor) in PLAIN_TYPES for tensor in tensors)


# -- a call that is prepared ------------------------------------------------------------------------------------------


def prepare(request: Request) -> Run | None:
    """What answers calls like this one, given query, key, value and what `parts_of` says; None for a call without
    anything to compute."""
    kind, call, returns_lse = request.kind, request.call, request.returns_lse
    dtype = autocast_dtype(call.query) if autocast_is_on() else None
    if dtype is not None:
        with without_autocast():
            run = prepare(request._replace(call=cast_call(call, dtype)))
        return None if run is None else cast_first(run, dtype)
    setting = effective(request_text(request.kernel))
    steps = kind.steps(call, returns_lse)
    if steps is None:
        return None
    description, gather, restore, takes_rows = steps
    learns = is_grad_enabled() and not is_inference_mode_enabled() and any(t.requires_grad for t in learned(call))
    attend: Run
    if kind.average is not None:
        attend = PreparedWeights(description, learns, kind.average, setting).attend
    else:
        attend = (PreparedRows if takes_rows else Prepared)(description, learns, returns_lse, setting).attend
    if restore is None:
        if gather is not None:
            return lambda *given: attend(*gather(*given))
        return attend if not returns_lse else lambda *given: attend(*given[:3])
    if gather is None:
        return lambda *given: restore(attend(*given[:3]), *given)
    return lambda *given: restore(attend(*gather(*given)), *given)


def learned(call: Call) -> list[Tensor]:
    """The tensors of a call that may have a gradient."""
    mask = call.options.attn_mask
    bias = mask.bias if isinstance(mask, Mask) else mask
    return [t for t in (call.query, call.key, call.value, bias, call.options.sinks) if t is not None]


# -- the ordinary way -------------------------------------------------------------------------------------------------


def ordinary(request: Request) -> Any:
    """A call as its operator."""
    kind, call, returns_lse, kernel = request.kind, request.call, request.returns_lse, request.kernel
    check_flag("return_lse", returns_lse, kind.name)
    tensors = tensors_among(call)
    function = sharded.function_of(tensors)
    if function is not None:
        return sharded.answer(function, kind.name, call, returns_lse, kernel)
    if call.places is not None and sharded.has_shards(call, kind.name):
        again = lambda own: answer(kind, own[:3], tuple(own.options), returns_lse, kernel, own.places)  # noqa: E731
        return sharded.locally(again, call, returns_lse)
    if kind.name not in PUBLIC:
        sharded.refuse_inside(f"{kind.name.partition(',')[0]} is not supported")
    if kind.name in PUBLIC and has_torch_function(tensors):
        mask = as_mask(call.options.attn_mask)
        if mask is call.options.attn_mask:
            return overridden(request, tensors)
        if call.options.is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        sharded.refuse_inside("CausalBias is not supported; take sdpa.Mask(causal=True, align=...)")
        call = call._replace(options=call.options._replace(attn_mask=mask))
    dtype = autocast_dtype(call.query)
    if dtype is not None:
        q, k, v, options, places = cast_call(call, dtype)
        with autocast_off(q.device.type):
            return answer(kind, (q, k, v), options, returns_lse, kernel, places)
    setting = request_text(kernel)
    if kind is DENSE and is_nested(*call[:3]):

        def attend(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
            inside = request._replace(call=Call(query, key, value, options, None), returns_lse=False)
            return operator_results(inside, setting)[0]

        return nested_attention(*call[:4], returns_lse, attend)
    results = operator_results(request._replace(call=call), setting)
    return (results[0], results[1]) if returns_lse else results[0]


def overridden(request: Request, tensors: tuple[Any, ...]) -> Any:
    """The answer of a __torch_function__, which is handed the call."""
    mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks = request.call.options
    beside: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap, "sinks": sinks}
    beside |= {"return_lse": request.returns_lse, "kernel": request.kernel}
    places = request.call.places or ()
    if type(places) is Pages:
        beside |= {} if not places.packs_queries else {"cu_q": places.cu_q, "max_q": places.max_q}
        places = places[:2]
    given = (*request.call[:3], *places, mask, dropout_p, is_causal)
    function = PUBLIC[request.kind.name]
    return handle_torch_function(function, tensors, *given, **beside)


def operator_results(request: Request, setting: str) -> Sequence[Any]:
    """The output, the log-sum-exp where it is asked for, and the weights where those are."""
    kind, call = request.kind, request.call
    with sharded.replicating(call, kind.name):
        call = sharded.with_whole_documents(call)
        inputs = sharded.on_mesh(with_dropout(kind.normalise(call, kind.check(call)), call.options))
        form = sharded.on_mesh(served_form(inputs))
    if not is_traced():
        flops.announce()
    if is_decomposed():
        return decomposed_operators(kind, call, form, inputs, request.returns_lse)
    if kind.average is not None:
        out, lse = call_forward(form, True, setting)
        return without_weights((out, call_weights(form, lse, kind.average, setting)), call.options.dropout_p)
    out, lse = call_forward(form, request.returns_lse, setting)
    results = results_of(Results(out, lse if request.returns_lse else None), form, inputs)
    return dropped(kind.restore(results, *call[:3]), call.options.dropout_p)


def decomposed_operators(
    kind: Kind, call: Call, form: AttentionInputs, inputs: AttentionInputs, returns_lse: bool
) -> Sequence[Any]:
    """The same by operations of torch's."""
    if kind.average is not None:
        results = decomposed_results(form, True)
        assert results.lse is not None
        weights = composite_weights(form, results.lse, kind.average)
        return without_weights((results.out, weights), call.options.dropout_p)
    found = results_of(decomposed_results(form, returns_lse), form, inputs)
    return dropped(kind.restore(found, *call[:3]), call.options.dropout_p)


def tensors_among(call: Call) -> tuple[Any, ...]:
    """The arguments that may have a __torch_function__; a Mask's is for `&` alone."""
    mask, places = call.options.attn_mask, call.places or ()
    return (*call[:3], None if isinstance(mask, Mask) else mask, call.options.sinks, *places)
