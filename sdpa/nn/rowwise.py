"""Whether layers may run on packed rows: nothing in them, and no hook on them, expects a padded batch.

Hooks of all modules at once (`torch.nn.modules.module.register_module_forward_hook`) are not asked: they see rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa.nn.attention import MultiheadAttention
from sdpa.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer

BLOCKS = frozenset({"forward", "_run", "_sa_block", "_mha_block", "_ff_block"})  # what a subclass overrides
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm)
EACH_ROW_ALONE = (
    torch.nn.Linear,
    torch.nn.Dropout,
    torch.nn.Identity,
    torch.nn.ReLU,
    torch.nn.GELU,
    torch.nn.SiLU,
)
ELEMENTWISE: tuple[Any, ...] = (
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.selu,
    F.gelu,
    F.silu,
    F.mish,
    F.hardswish,
    F.sigmoid,
    F.tanh,
    torch.relu,
    torch.selu,
    torch.sigmoid,
    torch.tanh,
)
NUMBERS = (bool, int, float, str)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def takes_rows(layer: torch.nn.Module) -> bool:
    """Whether a layer is one of ours without changes, and so are its modules."""
    for kind in (TransformerEncoderLayer, TransformerDecoderLayer):
        if isinstance(layer, kind):
            own = is_unchanged(layer, kind) and not is_watched(layer) and is_elementwise(layer.activation)
            return own and all(map(is_rowwise, layer.children()))
    return False


def is_elementwise(activation: object) -> bool:
    """Whether an activation is a module that treats rows alone, or a function known to treat every number alone, with
    options that are no tensors. Of other functions, lambdas among them, nothing is known."""
    if isinstance(activation, torch.nn.Module):
        return is_rowwise(activation)
    if type(activation) is partial and not activation.args:
        options = activation.keywords.values()
        return all(isinstance(option, NUMBERS) for option in options) and is_elementwise(activation.func)
    return any(activation is known for known in ELEMENTWISE)


def is_rowwise(module: torch.nn.Module) -> bool:
    """Whether a module treats every row (last dimension) alone, or is our attention, which takes packed rows."""
    if is_watched(module):
        return False
    if has_forward_of(module, EACH_ROW_ALONE):
        return True
    if isinstance(module, MultiheadAttention):
        return is_unchanged(module, MultiheadAttention) and module.can_pack()
    shape: Any = getattr(module, "normalized_shape", ())
    return has_forward_of(module, NORMS) and len(shape) == 1


def has_forward_of(module: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...]) -> bool:
    """Whether a module is of one of these kinds and runs its code. Classes of fully_shard and parametrize do; others
    that bring a forward of their own, as quantised and adapted ones, may do anything."""
    own = type(module)
    if "forward" in vars(module):
        return False
    return own in kinds or any(
        issubclass(own, kind) and own.forward is kind.forward and own.__call__ is kind.__call__ for kind in kinds
    )


def is_unchanged(module: torch.nn.Module, kind: type) -> bool:
    """Whether neither a module's class nor its instance overrides our code. fully_shard and parametrize do not."""
    own = type(module)
    inherits = own is kind or all(getattr(own, name, None) is getattr(kind, name, None) for name in BLOCKS)
    return inherits and not any(name in vars(module) for name in BLOCKS)  # as torch 2.10 compiles it


def is_watched(module: torch.nn.Module) -> bool:
    """Whether hooks receive the module's inputs or outputs. Hooks of torch.distributed handle the parameters, and do
    not count."""
    held = vars(module)
    before, after, before_backward, after_backward = HOOKS
    if not (held[before] or held[after] or held[before_backward] or held[after_backward]):
        return False
    found = [hook for name in HOOKS for hook in held[name].values()]
    return any(not str(getattr(hook, "__module__", None)).startswith("torch.distributed.") for hook in found)


def has_values(mask: Tensor) -> bool:
    """Whether a mask can be read on the host: no meta, fake or distributed tensor."""
    return type(mask) is Tensor and not mask.is_meta
