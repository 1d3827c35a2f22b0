"""The eager short cut: a plain call whose sizes were seen before skips validation, normalisation and selection.

A plan is made by the ordinary path, so it can never say anything else; it only remembers. Calls under torch.compile,
functorch, forward mode, autocast, dispatch or function modes, with subclasses, with a `Mask` or with a mask that learns
take the ordinary path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa.autograd import AttentionBackward
from sdpa.dispatch import select
from sdpa.dispatch.context import current_text, effective, request_text, torch_toggles
from sdpa.inputs import Options, build_inputs
from sdpa.problem import AttentionInputs, AttentionProblem, Results

MAX_PLANS = 4096
FULL_RANK = 4
MIN_RANK = 2
PLANS: dict[tuple, Plan | None] = {}
select.CACHES.append(PLANS.clear)


class Plan:
    """What a call with given sizes, dtype, device and settings comes to."""

    __slots__ = (
        "backward_choice",
        "backward_problem",
        "backward_state",
        "choice",
        "forward",
        "is_bias",
        "numbers",
        "problem",
        "setting",
        "tile",
    )

    def __init__(self, inputs: AttentionInputs, needs_lse: bool, setting: str) -> None:
        self.numbers = inputs[3:7]  # scale, left, right, bottom_right
        self.is_bias = inputs.bias is not None
        self.setting = setting
        self.problem = AttentionProblem.of(inputs, extra=frozenset({"lse"} if needs_lse else ()))
        self.choice = select.select(self.problem, setting)
        self.forward, self.tile = self.choice.forward, self.choice.tile
        self.backward_problem = self.problem._replace(direction="backward", features=self.problem.features - {"lse"})
        self.backward_choice: select.Choice | None = None
        self.backward_state: tuple | None = None

    def inputs(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> AttentionInputs:
        if mask is None:
            return AttentionInputs(query, key, value, *self.numbers)
        if mask.dim() < FULL_RANK:
            mask = mask[(None,) * (FULL_RANK - mask.dim())]
        bias, allowed = (mask, None) if self.is_bias else (None, mask)
        return AttentionInputs(query, key, value, *self.numbers, bias, allowed)

    def run(self, inputs: AttentionInputs) -> Results:
        select.LAST.choice = self.choice
        try:
            return self.forward(inputs, self.problem, self.tile)
        except Exception as error:
            return select.recover(self.choice, error, inputs)

    def run_backward(self, inputs: AttentionInputs, results: Results, upstream: Results):
        state = (torch_toggles(), torch._C._get_deterministic_algorithms())
        if state != self.backward_state:
            problem = self.backward_problem = self.backward_problem._replace(deterministic=state[1])
            self.backward_choice = select.select(problem, select.backward_setting(self.setting))
            self.backward_state = state
        choice = select.LAST.choice = self.backward_choice
        return choice.run(inputs, results, upstream)


class PlannedAttention(torch.autograd.Function):
    """Training through a plan; a second derivative goes the ordinary way."""

    @staticmethod
    def forward(ctx, query, key, value, mask, plan):
        out, lse = plan.run(plan.inputs(query, key, value, mask))
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *given, out, lse = ctx.saved_tensors
        inputs = ctx.plan.inputs(*given)
        if torch.is_grad_enabled() or select_by_modes():
            grads = AttentionBackward.apply(grad_out, None, out, lse, *inputs, False, ctx.plan.setting)
        else:
            grads = ctx.plan.run_backward(inputs, Results(out, lse), Results(grad_out, None))
        return (*grads[:3], None, None)


def plan_key(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *arguments: object) -> tuple | None:
    """Everything a plan depends on, or None where the ordinary path must be taken."""
    try:
        return (
            None if mask is None else (mask.shape, mask.dtype, mask.device, mask.layout),
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
            torch._C._get_deterministic_algorithms(),
            torch._C._get_float32_matmul_precision(),
        )
    except RuntimeError:  # a tensor without strides: the ordinary path says what it thinks of it
        return None


def transformed() -> bool:
    """Whether anything stands between this call and the kernels: compiler, functorch, forward mode, modes, autocast."""
    return (
        torch.compiler.is_compiling()
        or select_by_modes()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._is_any_autocast_enabled()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def select_by_modes() -> bool:
    """A TorchDispatchMode (FLOP counter, selective checkpointing, fake tensors) must see the operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def attend(query, key, value, mask, is_causal, scale, enable_gqa, kernel) -> Tensor | None:
    """The result of a plain call by its plan, or None where it has to go the ordinary way; nothing is checked yet."""
    if not (type(query) is Tensor and type(key) is Tensor and type(value) is Tensor) or transformed():
        return None
    if type(is_causal) is not bool or (scale is not None and type(scale) is not float):
        return None
    if mask is not None and not (type(mask) is Tensor and mask.dim() >= MIN_RANK and not mask.requires_grad):
        return None
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    seen = plan_key(query, key, value, mask, is_causal, scale, enable_gqa, kernel, learns)
    if seen is None:
        return None
    try:
        plan = PLANS[seen]
    except KeyError:
        options = Options(mask, 0.0, is_causal, scale, enable_gqa)
        plan = remember(seen, make_plan(query, key, value, options, kernel, learns))
    except TypeError:  # an argument that does not hash: the ordinary path says what it thinks of it
        return None
    if plan is None:
        return None
    if learns:
        return PlannedAttention.apply(query, key, value, mask, plan)
    return plan.run(plan.inputs(query, key, value, mask)).out


def make_plan(
    query: Tensor, key: Tensor, value: Tensor, options: Options, kernel: str | None, learns: bool
) -> Plan | None:
    """The plan of a checked call; None when its tensors have to be reshaped or there is nothing to compute."""
    inputs = build_inputs(query, key, value, options)
    as_given = inputs.q is query and inputs.k is key and inputs.v is value
    if not as_given or not (query.numel() and key.numel() and value.numel()):
        return None
    return Plan(inputs, learns, effective(request_text(kernel)))


def remember(seen: tuple, plan: Plan | None) -> Plan | None:
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[seen] = plan
    return plan
