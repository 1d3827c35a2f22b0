"""explain(q, k, v, ...): the decision for a call, without running it."""

from __future__ import annotations

from torch import Tensor

from sdpa.dispatch.context import effective, request_text
from sdpa.dispatch.explain import Explanation, explain_problem
from sdpa.inputs import Options, build_inputs
from sdpa.mask import Mask
from sdpa.problem import AttentionProblem


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    direction: str = "forward",
    **options: object,
) -> Explanation:
    """Every kernel with its reasons, or its time and where that figure comes from, for this call.

    Takes the arguments of `scaled_dot_product_attention`; `direction` is "forward" or "backward". str() of the
    result is a table, `.as_dict()` is for machines.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction must be 'forward' or 'backward', got {direction!r}")
    inputs = build_inputs(query, key, value, Options(attn_mask, dropout_p, is_causal, **options))  # type: ignore[arg-type]
    tensors = (query, key, value, inputs.bias, inputs.sinks)
    learns = any(t is not None and t.requires_grad for t in tensors)
    extra = set()
    if direction == "forward" and (learns or return_lse):
        extra.add("lse")
    if direction == "backward" and inputs.bias is not None and inputs.bias.requires_grad:
        extra.add("bias_grad")
    problem = AttentionProblem.of(inputs, direction, frozenset(extra))
    return explain_problem(problem, effective(request_text(kernel)))
