"""How code that inductor generates calls the operators: their functions themselves.

Tensors are neither differentiated nor batched nor traced there, and the dispatcher's way into Python takes longer than
our choice of a kernel. A profiler then sees our kernels and not the operators. The hook is inductor's, for operators
that want code of their own (torch 2.11 and 2.13 have it, 2.10 has not); without it generated code calls the operators,
through their autograd keys, as elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

HOOKS = "torch._inductor.codegen.custom_extern_kernel_codegen"
# By operator, what stands beside the operators for generated code, which knows torch alone. That may come from a cache
# on disk that another version of ours wrote: whoever changes a function's arguments gives it another name, and keeps
# this one.
NAMES = {
    "attention_forward.default": "attention_forward_1",
    "attention_backward.default": "attention_backward_1",
    "attention_weights.default": "attention_weights_1",
    "attention_forward.plain": "plain_forward_1",
    "attention_forward.learning": "learning_forward_1",
    "attention_backward.plain": "plain_backward_1",
}


def register(library: torch.library.Library, operator: str, function: Callable, fake: Callable) -> None:
    """An operator's function on every device, its fake, and the function for generated code."""

    def with_offer(*args):
        offer()  # who generates code asks here before
        return fake(*args)

    name = operator.removesuffix(".default")
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdpa::{name}", with_offer, lib=library)
    setattr(torch.ops.sdpa, NAMES[operator], function)


def offer() -> None:
    """Have code generated so, where inductor has been imported: which takes a second that others should not spend."""
    module = sys.modules.get(HOOKS)
    hooks = getattr(module, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)
    if hooks is not None:
        for operator, name in NAMES.items():
            hooks.setdefault(f"torch.ops.sdpa.{operator}", module.CustomCodegen(python=partial(write_call, name)))


def write_call(name: str, node, writeline: Callable[[str], None]) -> None:
    """The line that calls the function, in place of inductor's own for an operator."""
    arguments = ", ".join((*node.codegen_args(), *node.codegen_kwargs()))
    writeline(f"{node.get_name()} = torch.ops.sdpa.{name}({arguments})")
