"""Whether layers may run on packed rows: nothing in them, and no hook on them, expects a padded batch.

Hooks of all modules at once (`torch.nn.modules.module.register_module_forward_hook`) are not asked: they see rows.
"""

from __future__ import annotations

import torch
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
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def takes_rows(layer: torch.nn.Module) -> bool:
    """Whether a layer is one of ours without changes, and so are its modules."""
    for kind in (TransformerEncoderLayer, TransformerDecoderLayer):
        if isinstance(layer, kind):
            return is_unchanged(layer, kind) and not is_watched(layer) and all(map(is_rowwise, layer.children()))
    return False


def is_rowwise(module: torch.nn.Module) -> bool:
    """Whether a module treats every row (last dimension) alone, or is our attention, which takes packed rows."""
    if is_watched(module):
        return False
    if isinstance(module, EACH_ROW_ALONE):
        return True
    if isinstance(module, MultiheadAttention):
        return is_unchanged(module, MultiheadAttention) and module.can_pack()
    return isinstance(module, NORMS) and len(module.normalized_shape) == 1


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
