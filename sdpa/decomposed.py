"""decomposed(): attention as torch's own operations, for tools that know no operators of others; and a table of it.

Where a call is traced (torch.export, torch.onnx, torch.jit.trace) and asks for nothing that torch's function lacks,
that function stands for it. Everything else is the composition of kernels/math, differentiable any number of times.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa.dispatch.context import DECOMPOSED, Block, PerCall, is_inside_decomposed
from sdpa.kernels.math.composite import backward_terms, forward_terms
from sdpa.kernels.math.weights import composite_weights
from sdpa.problem import UNLIMITED, AttentionInputs, Gradients, Results
from sdpa.torch_private import (
    TransformType,
    dispatch_modes,
    get_interpreter_stack,
    peek_interpreter_stack,
)

TORCHS: Callable[..., Any] = F.scaled_dot_product_attention
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
# torch.jit.trace warns of every decision about a size. Ours are of numbers of dimensions and of heads.
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"sdpa\.")


class decomposed(Block, PerCall):
    """Answer attention by torch's own operations, in this thread, until the with-block ends.

    For tools that know only these: torch.onnx.export, runtimes that read exported programs, torch.jit.trace of calls
    with a `Mask`. The results are the same numbers, with M x N of them in memory; `kernel=` asks for nothing here.
    In a function under torch.compile only the blocks inside of it count: its graph outlives those around it. Nests,
    also with `sdpa_kernel`, and decorates functions:

        with sdpa.decomposed():
            program = torch.export.export(model, (x,))
    """

    def __init__(self) -> None:
        super().__init__(DECOMPOSED)


def is_decomposed() -> bool:
    """Whether operations of torch's have to answer: in a block, for tracers that would lose gradients or know no
    operator of ours, and for torch.func.functionalize, which has no rule for an autograd.Function."""
    return is_inside_decomposed() or is_traced_by_torch() or is_functionalized()


def is_functionalized() -> bool:
    if is_dynamo_compiling() or peek_interpreter_stack() is None:
        return False
    return any(level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ())


def is_traced_by_torch() -> bool:
    return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def is_traced() -> bool:
    """Whether somebody records operations in this thread, who may know torch's function."""
    return is_dynamo_compiling() or dispatch_modes() > 0 or is_traced_by_torch()


def results_of(inputs: AttentionInputs, needs_lse: bool) -> Results:
    """(out, lse) of normalised inputs by operations of torch's."""
    if not needs_lse and is_torchs(inputs) and is_traced():
        return Results(by_torch(inputs), None)
    terms = forward_terms(inputs)
    return Results(terms.out.to(inputs.q.dtype), terms.lse if needs_lse else None)


def is_torchs(inputs: AttentionInputs) -> bool:
    """Whether torch's function can be asked for all of it."""
    asked = {name for name, value in inputs._asdict().items() if value is not None}
    fields = {"q_lengths", "k_lengths", "q_segments", "prefix", "alibi", "sinks", "cu_q", "block_table"}
    if asked & fields or inputs.softcap or inputs.left != UNLIMITED or inputs.right not in (UNLIMITED, 0):
        return False
    if not inputs.scale > 0:  # of which exporters take the square root
        return False
    masks = ("bias" in asked) + ("allowed" in asked) + (inputs.right == 0)
    return masks <= 1 and not (inputs.bottom_right and inputs.right == 0)


def by_torch(inputs: AttentionInputs) -> Tensor:
    mask = inputs.allowed if inputs.bias is None else inputs.bias
    grouped = bool(inputs.q.shape[1] != inputs.k.shape[1])
    scale: float | None = inputs.scale
    if torch.jit.is_tracing() and scale == 1.0 / math.sqrt(int(inputs.q.shape[3])):
        scale = None  # a number would hold for this head size alone
    return TORCHS(*inputs[:3], mask, inputs.dropout_p, inputs.right == 0, scale=scale, enable_gqa=grouped)


def decomposition_table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """What each operator of a graph is in operations of torch's, for `program.run_decompositions(table)`."""
    packets = {
        torch.ops.sdpa.attention_forward: forward_of,
        torch.ops.sdpa.attention_backward: backward_of,
        torch.ops.sdpa.attention_weights: weights_of,
    }
    return {
        getattr(packet, name): decomposition(getattr(packet, name), answer)
        for packet, answer in packets.items()
        for name in packet.overloads()
    }


def decomposition(operator: torch._ops.OpOverload, answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer` as a function of an operator's arguments, which are told apart by their names in its schema."""
    arguments = operator._schema.arguments
    results = len(operator._schema.returns)

    def decomposed_operator(*args: Any, **options: Any) -> Any:
        defaults = (argument for argument in arguments if argument.has_default_value())
        given: dict[str, Any] = {argument.name: argument.default_value for argument in defaults}
        given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | options
        inputs = AttentionInputs(**{name: given[name] for name in AttentionInputs._fields if name in given})
        found = answer(inputs, given)
        return found[0] if results == 1 else found[:results]

    return decomposed_operator


def forward_of(inputs: AttentionInputs, given: dict[str, Any]) -> tuple[Tensor, ...]:
    terms = forward_terms(inputs)
    needs_lse = given.get("needs_lse", True)
    return terms.out.to(inputs.q.dtype), terms.lse if needs_lse else terms.lse.new_empty(0)


def backward_of(inputs: AttentionInputs, given: dict[str, Any]) -> tuple[Tensor, ...]:
    upstream = Results(given["grad_out"], given.get("grad_lse"))
    grads: Gradients = backward_terms(inputs, upstream, bool(given.get("bias_grad")))
    return tuple(inputs.q.new_empty(0) if grad is None else grad for grad in grads)


def weights_of(inputs: AttentionInputs, given: dict[str, Any]) -> tuple[Tensor]:
    return (composite_weights(inputs, given["lse"], given["average"]),)
