"""How code that inductor generates calls the short operator: its function itself.

Tensors are neither differentiated nor batched nor traced there, and the dispatcher's way into Python takes longer than
our choice of a kernel. A profiler then sees our kernels and not the operator. The hook is inductor's, for operators
that want code of their own (torch 2.11 and 2.13 have it); without it generated code calls the operator, as elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

HOOKS = "torch._inductor.codegen.custom_extern_kernel_codegen"
OPERATOR = "torch.ops.sdpa.attention_forward.plain"
# Beside the operators: generated code knows torch alone. It may come from a cache on disk that another version of ours
# wrote: whoever changes the function's arguments gives it another name, and keeps this one.
NAME = "plain_forward_1"


def announce(function: Callable) -> None:
    """What generated code may call for the operator."""
    setattr(torch.ops.sdpa, NAME, function)


def offer() -> None:
    """Have code generated so, where inductor has been imported: which takes a second that others should not spend."""
    module = sys.modules.get(HOOKS)
    hooks = getattr(module, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)
    if hooks is not None:
        hooks.setdefault(OPERATOR, module.CustomCodegen(python=write_call))


def write_call(node, writeline: Callable[[str], None]) -> None:
    """The line that calls the function, in place of inductor's own for an operator."""
    arguments = ", ".join((*node.codegen_args(), *node.codegen_kwargs()))
    writeline(f"{node.get_name()} = torch.ops.sdpa.{NAME}({arguments})")
