"""Mask, Results and a decoder's cache as pytrees, which torch.export, torch.func and torch.compile flatten.

Leaves are the given fields that may be tensors. Flags, the alignment and the window are in the context. A node is built
again without the checks of its constructor, because torch also builds it of objects that are no tensors.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from sdpa.mask import Mask
from sdpa.problem import Results
from sdpa.torch_private import register_pytree

# In this order in `Mask`; a graph that was saved names them.
TENSOR_FIELDS = ("lengths", "query_lengths", "segments", "cu_seqlens", "prefix", "alibi", "allowed", "bias")
NAMES = tuple(field.name for field in fields(Mask))


def flatten_mask(mask: Mask) -> tuple[list[Any], tuple[Any, ...]]:
    """The tensors that a mask has; and their names, with the fields that are no tensors."""
    present = tuple(name for name in TENSOR_FIELDS if getattr(mask, name) is not None)
    constants = tuple(None if name in present else getattr(mask, name) for name in NAMES)
    return [getattr(mask, name) for name in present], (present, constants)


def flatten_mask_with_keys(mask: Mask) -> tuple[list[Any], tuple[Any, ...]]:
    values, context = flatten_mask(mask)
    return list(zip(context[0], values, strict=True)), context


def build_mask(values: Any, context: tuple[Any, ...]) -> Mask:
    present, constants = context
    given = dict(zip(NAMES, constants, strict=True))
    given.update(zip(present, values, strict=True))
    mask = object.__new__(Mask)
    for name in NAMES:
        object.__setattr__(mask, name, given[name])
    return mask


def dump_mask(context: tuple[Any, ...]) -> list[Any]:
    """The context as JSON has it."""
    present, constants = context
    return [list(present), [list(value) if isinstance(value, tuple) else value for value in constants]]


def load_mask(dumped: list[Any]) -> tuple[Any, ...]:
    present, constants = dumped
    return tuple(present), tuple(tuple(value) if isinstance(value, list) else value for value in constants)


register_pytree(
    Mask,
    flatten_mask,
    build_mask,
    serialized_type_name="sdpa.Mask",
    to_dumpable_context=dump_mask,
    from_dumpable_context=load_mask,
    flatten_with_keys_fn=flatten_mask_with_keys,
)
# A NamedTuple is a pytree by itself; a saved program needs its name.
register_pytree(
    Results,
    lambda results: (list(results), None),
    lambda values, _: Results._make(values),
    serialized_type_name="sdpa.Results",
)
# Saved programs keep their example inputs, which torch.export.load reads with weights_only=True.
torch.serialization.add_safe_globals([Mask, Results])
