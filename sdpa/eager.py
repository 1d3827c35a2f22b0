"""The eager short cut: a plain call whose sizes were seen before skips validation, normalisation and selection.

The plan of a call is found by a key of everything that it depends on, and before that among the last few plans, which
one call into torch compares with the tensors at hand. Calls under torch.compile, functorch, forward mode, autocast,
dispatch or function modes, with subclasses or a mask that learns take the ordinary path.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from types import NoneType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sdpa import repeats
from sdpa.decomposed import is_decomposed, jit_tracing
from sdpa.dispatch import select
from sdpa.dispatch.context import CURRENT, current_text, effective, request_text, torch_toggles
from sdpa.inputs import Options, build_inputs
from sdpa.mask import Mask
from sdpa.ops import is_empty
from sdpa.plans import MaskedPlan, PackedPlan, Plan, select_by_modes
from sdpa.repeats import (
    Recent,
    check_of,
    cudnn_on,
    deterministic,
    efficient_on,
    flash_on,
    math_on,
    precision,
)  # fmt: skip
from sdpa.sequences import Documents, build_packed, served_form

MAX_PLANS = 4096
KERNEL_END = 5  # of a state: its arguments, what follows are switches
NO_MASK: tuple = (None, (), ())
UNKNOWN: tuple = (None, None, ())  # a mask for which the ordinary path must be taken
UNSEEN = object()  # no plan yet; None is one: the ordinary path
PLANS: dict[tuple, Plan | None] = {}
RECENT: Recent = {}
select.CACHES += (PLANS.clear, RECENT.clear)

band_of = attrgetter("causal", "align", "window")
fields_of = attrgetter("lengths", "query_lengths", "segments", "cu_seqlens", "prefix", "alibi", "allowed", "bias")
NO_FIELDS = tuple(map(type, fields_of(Mask())))
is_nested = attrgetter("is_nested")
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
grad_enabled = torch.is_grad_enabled


def attend(query, key, value, mask, is_causal, scale, enable_gqa, kernel) -> Tensor | None:
    """The result of a plain call by its plan, or None where it has to go the ordinary way; nothing is checked yet."""
    if is_dynamo_compiling() or function_modes() > 0 or dispatch_modes() > 0 or forward_ad._current_level >= 0:
        return None
    if jit_tracing() is not None:
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if scale is not None and type(scale) is not float:
        return None
    form, masks, given = parts = NO_MASK if mask is None else parts_of(mask)
    if parts is UNKNOWN:
        return None
    # fmt: off
    state = (form, is_causal, scale, enable_gqa, kernel, CURRENT.get(), flash_on(), efficient_on(), math_on(),
             cudnn_on(), deterministic(), precision(), grad_enabled())
    # fmt: on
    try:
        recent = RECENT.get(state, ())
        if query.is_nested or key.is_nested or value.is_nested:  # has no strides, for which a guard ends the process
            return None
    except (TypeError, AttributeError, ValueError):  # no hash, no tensor, one of torch.fx: the ordinary path answers
        return None
    for is_alike, run in recent:
        if is_alike(query, key, value, *masks):
            return run(query, key, value, *given)
    return look_up(query, key, value, mask, parts, state)


def look_up(query, key, value, mask, parts, state) -> Tensor | None:
    """The result by the plan of the call's key, which is made where there is none; it becomes recent."""
    _, masks, given = parts
    tensors = (query, key, value, *masks)
    if any(type(tensor) is not Tensor or is_wrapped(tensor) for tensor in tensors) or transformed():
        return None
    if grad_enabled() and any(tensor.requires_grad for tensor in masks):
        return None
    _, is_causal, scale, enable_gqa, kernel = asked = state[:KERNEL_END]
    learns = grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    seen = plan_key(query, key, value, masks, asked, learns)
    if seen is None:
        return None
    plan = PLANS.get(seen, UNSEEN)
    if plan is UNSEEN:
        options = Options(mask, 0.0, is_causal, scale, enable_gqa)
        plan = remember(seen, make_plan(query, key, value, options, kernel, learns))
    if plan is None:
        return None
    remember_recent(state, tensors, plan)
    return plan.attend(query, key, value, *given)


def parts_of(mask: object) -> tuple[Hashable, Sequence[Tensor], tuple]:
    """What a mask says beside its tensors, those, and what its plan is given to fit: the mask, if it has any."""
    if mask is None:
        return NO_MASK
    if type(mask) is Tensor:
        return UNKNOWN if mask.is_nested else (Tensor, (mask,), (mask,))
    if type(mask) is not Mask:
        return UNKNOWN
    fields = fields_of(mask)
    kinds = tuple(map(type, fields))
    if kinds == NO_FIELDS:
        return band_of(mask), (), ()
    tensors: list[Tensor] = []
    for kind, field in zip(kinds, fields, strict=True):
        if kind is Tensor:
            tensors.append(field)
        elif kind is tuple:
            tensors += field
        elif kind is not NoneType and kind is not int:
            return UNKNOWN
    if any(map(is_nested, tensors)):
        return UNKNOWN
    return (band_of(mask), kinds), tensors, (mask,)


def attend_packed(query, key, value, documents, is_causal, scale, enable_gqa, kernel) -> Tensor | None:
    """The same of a call of `varlen_attention` without a mask, whose cumulative lengths are contiguous."""
    if transformed() or type(is_causal) is not bool:
        return None
    cu_q, cu_k, max_q, max_k = documents
    tensors = (query, key, value, cu_q, cu_k)
    if not all(type(tensor) is Tensor for tensor in tensors) or any(map(is_wrapped, tensors)):
        return None
    if not (type(max_q) is int and type(max_k) is int and (scale is None or type(scale) is float)):
        return None
    if type(enable_gqa) is not bool or cu_q.layout is not torch.strided or cu_k.layout is not torch.strided:
        return None
    learns = grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    alike = cu_k is cu_q
    packed = (cu_q.shape, cu_q.dtype, cu_q.device, max_q, max_k)
    packed += (True,) if alike else (cu_k.shape, cu_k.dtype, cu_k.device)
    seen = plan_key(query, key, value, (), is_causal, scale, enable_gqa, kernel, learns, packed)
    try:
        plan = UNSEEN if seen is None else PLANS.get(seen, UNSEEN)
    except TypeError:
        return None
    if seen is None or not (cu_q.is_contiguous() and cu_k.is_contiguous()):
        return None
    if plan is UNSEEN:
        options = Options(None, 0.0, is_causal, scale, enable_gqa)
        plan = remember(seen, make_packed_plan(query, key, value, documents, options, kernel, learns))
    if plan is None:
        return None
    return plan.attend(query, key, value, cu_q) if alike else plan.attend(query, key, value, cu_q, cu_k)


def plan_key(query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor], *arguments: object) -> tuple | None:
    """Everything a plan depends on, or None where the ordinary path must be taken."""
    try:
        return (
            *[(mask.shape, mask.stride(), mask.dtype, mask.device) for mask in masks],
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            arguments,
            current_text(),
            torch_toggles(),
            deterministic(),
            precision(),
        )
    except RuntimeError:  # a tensor without strides: the ordinary path says what it thinks of it
        return None


def transformed() -> bool:
    """Whether anything stands between this call and the kernels: compiler, functorch, forward mode, modes, autocast."""
    return (
        torch.compiler.is_compiling()
        or is_decomposed()
        or select_by_modes()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_wrapped(tensor: Tensor) -> bool:
    """What functorch leaves behind when a transform ends looks like a tensor and is none; and in memory, a tensor whose
    sign torch has still to change is another."""
    return torch._C._functorch.is_gradtrackingtensor(tensor) or tensor.is_neg()


def make_plan(
    query: Tensor, key: Tensor, value: Tensor, options: Options, kernel: str | None, learns: bool
) -> Plan | None:
    """The plan of a checked call; None when its tensors have to be reshaped or there is nothing to compute."""
    inputs = build_inputs(query, key, value, options)
    as_given = inputs.q is query and inputs.k is key and inputs.v is value
    if not as_given or not (query.numel() and key.numel() and value.numel()):
        return None
    plan = MaskedPlan if parts_of(options.attn_mask)[2] else Plan
    return plan(inputs, learns, effective(request_text(kernel)))


def make_packed_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    options: Options,
    kernel: str | None,
    learns: bool,
) -> PackedPlan | None:
    """The plan of a checked call; None where the device's kernels take packed sequences in another form, or heads have
    to be repeated."""
    inputs = build_packed(query, key, value, documents, options)
    as_given = all(t.shape[1] == rows.shape[1] for t, rows in zip(inputs[:3], (query, key, value), strict=True))
    if not as_given or is_empty(inputs) or served_form(inputs) is not inputs:
        return None
    return PackedPlan(inputs, learns, effective(request_text(kernel)))


def left_to_torch(query: Tensor, key: Tensor, value: Tensor, options: Options, kernel: str | None) -> str | None:
    """The kernel to which a plain call that learns leaves its backward as well, torch's own operator (see Plan.native);
    None where the backward is a choice of its own."""
    if not can_be_left(options):
        return None
    plan = None if transformed() else make_plan(query, key, value, options, kernel, True)
    return None if plan is None or plan.native is None else plan.choice.kernel.name


def can_be_left(options: Options) -> bool:
    """Whether torch's own operators can say all that is asked."""
    parts = parts_of(options.attn_mask)
    asked = parts is UNKNOWN or parts[2] or options.softcap is not None or options.sinks is not None
    return not asked and not options.dropout_p


def remember(seen: tuple, plan: Plan | None) -> Plan | None:
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[seen] = plan
    return plan


def remember_recent(state: tuple, tensors: tuple[Tensor, ...], plan: Plan) -> None:
    """Put the plan first among those of its state."""
    check = plan.is_alike
    if check is None or not check(*tensors):
        check = plan.is_alike = check_of(*tensors)
    if check is not None:
        repeats.remember(RECENT, state, check, plan.attend)
