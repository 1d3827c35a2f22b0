"""Whether this thread is recording a graph, and what settings hold inside of the function that Dynamo traces.

Dynamo follows neither a ContextVar nor, in every release, a threading.local. Functions that it takes for constant are
called while it traces, in the thread that traces; what they remember belongs to one trace and ends with it, also where
Dynamo gives up in the middle of a with-block and begins again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.compiler import is_compiling, is_dynamo_compiling

from sdpa.torch_private import (
    constant,
    cudnn_enabled,
    current_trace,
    dispatch_modes,
    efficient_enabled,
    flash_enabled,
    inside_torchs_block,
    math_enabled,
    mode_traces,
)

# The texts of the open with-blocks of each trace, the innermost last.
TRACES: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def is_recording() -> bool:
    """Whether this thread records a graph while Python runs as usual, as torch.export does where it is not strict.
    torch.compiler.is_compiling alone is true in all threads while one of them compiles."""
    return dispatch_modes() > 0 and is_compiling() and mode_traces()


def is_traced() -> bool:
    """Whether the call is part of a function that this thread compiles or exports: asked of the thread, where
    torch.compiler.is_compiling is not. Dynamo folds it to True."""
    return is_dynamo_compiling() or is_recording()


def open_blocks() -> list[str]:
    return TRACES.setdefault(current_trace().tracing_context, [])


@constant
def enter_traced(text: str) -> bool:
    open_blocks().append(text)
    return True


@constant
def leave_traced() -> bool:
    blocks = open_blocks()
    if blocks:
        blocks.pop()
    return True


@constant
def traced_text() -> str:
    """The text of the innermost with-block of ours inside of the traced function, or ""."""
    blocks = open_blocks()
    return blocks[-1] if blocks else ""


@constant
def traced_toggles() -> int:
    """torch's switches where the traced function is inside of a with-block of torch's sdpa_kernel, else -1. Dynamo sets
    them while it traces the block, and nothing in the graph would tell of them."""
    return torch_toggles() if inside_torchs_block() else -1


def torch_toggles() -> int:
    """torch's process-global switches (torch.nn.attention.sdpa_kernel sets them) as bits of TOGGLED_FAMILIES."""
    return flash_enabled() | efficient_enabled() << 1 | math_enabled() << 2 | cudnn_enabled() << 3
