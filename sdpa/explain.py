"""explain(q, k, v, ...): the decision for a call, without running it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sdpa.autocast import autocast_dtype, cast, cast_options
from sdpa.dispatch.context import effective, request_text
from sdpa.dispatch.explain import Explanation, explain_problem
from sdpa.dispatch.select import backward_setting, weights_setting
from sdpa.inputs import Options, build_inputs
from sdpa.interop import is_nested, pack_jagged
from sdpa.mask import Mask, as_mask
from sdpa.problem import AttentionProblem
from sdpa.scalars import type_name
from sdpa.sharded import INSIDE, is_inside
from sdpa.sinks import moves_rows
from sdpa.validate import NAMES, Call, check_flag


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
    direction: str = "forward",
) -> Explanation:
    """Every kernel with its reasons, or its time and where that figure comes from, for this call.

    Takes the arguments of `scaled_dot_product_attention`; `direction` is "forward", "backward" or "weights" (per
    head, as sdpa.nn's attention returns them). str() of the result is a table, `.as_dict()` is for machines.

    Inside of `sdpa.distributed.context_parallel` every rank has to ask. The answer is about the call that this rank's
    kernel gets, and its reason begins with the mode and with those that were weighed.
    """
    if direction not in ("forward", "backward", "weights"):
        raise ValueError(f"direction must be 'forward', 'backward' or 'weights', got {direction!r}")
    check_flag("return_lse", return_lse, "explain")
    check_are_tensors(query, key, value)
    options, shared = Options(attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks), ""
    if is_inside():
        part, shared = INSIDE.get().local(Call(query, key, value, options, None), return_lse, kernel)
        query, key, value, mask = part[:4]
        options = options._replace(attn_mask=mask, is_causal=False, sinks=part.sinks)
        return_lse = part.returns_lse
    inputs = build_inputs(*prepare(query, key, value, options, return_lse))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    extra = set()
    if direction == "forward" and (learns or return_lse):
        extra.add("lse")
    if (
        direction == "backward"
        and inputs.bias is not None
        and inputs.bias.requires_grad
        and not moves_rows(inputs.bias)
    ):
        extra.add("bias_grad")
    problem = AttentionProblem.of(inputs, direction, frozenset(extra))
    request = effective(request_text(kernel))
    if direction == "weights":
        request = weights_setting(request, problem.device_type)
    if direction == "backward":
        request = backward_setting(request, problem)
    found = explain_problem(problem, request)
    return replace(found, reason=f"mode: {shared}; kernel: {found.reason}") if shared else found


def check_are_tensors(*inputs: object) -> None:
    for name, given in zip(NAMES, inputs, strict=True):
        if not isinstance(given, Tensor):
            raise TypeError(
                f"explain(): argument '{name}' must be Tensor, not {type_name(given)}; explain takes the tensors of a "
                "call, and the command `sdpa explain --shape B,H,M,N,D` takes sizes"
            )


def prepare(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_lse: bool
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """What the public functions do to a call before it is checked: CausalBias, jagged tensors and autocast."""
    mask = as_mask(options.attn_mask)
    if mask is not options.attn_mask:
        if options.is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        options = options._replace(attn_mask=mask)
    if is_nested(query, key, value):
        query, key, value, options = pack_jagged(query, key, value, options, return_lse)
    dtype = autocast_dtype(query)
    if dtype is None:
        return query, key, value, options
    query, key, value = (cast(t, dtype) for t in (query, key, value))
    return query, key, value, cast_options(options, dtype)
