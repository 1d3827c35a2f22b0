"""Calls of DTensors, and calls inside of torch's context_parallel, where a tensor is one rank's shard of a sequence.

DTensors are those of our operators, which are then told how they are sharded. Inside of the block a call is torch's.
Computed here, a query would see the keys of its own rank alone. torch's function exchanges them between the ranks. It
takes what torch's signature has, without a mask; whatever else a call asks is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sdpa.mask import Mask
from sdpa.problem import AttentionInputs
from sdpa.torch_private import (
    TORCHS,
    constant,
    distributed_tensors,
    handles_attention,
    implicit_replication,
    is_distributed,
    is_sharded,
)
from sdpa.validate import Call

NAME = "scaled_dot_product_attention"
INSIDE: ContextVar[Any] = ContextVar("the sdpa.distributed.context_parallel that this is inside of", default=None)
# How many such blocks are open in any thread, and what then answers: a compiler sees no mode around a call of ours, so
# that its graphs break there. Graphs depend on the number.
open_blocks = 0
not_compiled: Callable[..., Any]
CAUSAL = ["causal"]  # all that a mask may say there


def function_of(tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a call of these tensors in our stead: torch's function as context_parallel has it now, which may
    call ours again with DTensors, and for those torch's own; None where nothing does."""
    if any(map(is_distributed, tensors)):
        register()
        return TORCHS if is_sharded() or handles_attention() else None
    return torch.nn.functional.scaled_dot_product_attention if is_sharded() else None


def all_given(call: Call) -> Iterator[Tensor]:
    """Every tensor of a call."""
    mask, places = call.options.attn_mask, call.places or ()
    of_mask = [getattr(mask, field.name) for field in fields(mask)] if isinstance(mask, Mask) else [mask]
    for value in (*call[:3], *of_mask, call.options.sinks, *places):
        parts = value if isinstance(value, tuple) else (value,)
        yield from (part for part in parts if isinstance(part, Tensor))


def with_whole_documents(call: Call) -> Call:
    """With cumulative lengths whole: where documents begin is arithmetic of which DTensor has no strategy."""
    mask: Any = call.options.attn_mask
    given = mask.cu_seqlens if isinstance(mask, Mask) else None
    pair: Any = given if isinstance(given, tuple) else (given,)
    if not any(map(is_distributed, pair)):
        return call
    whole = tuple(cu.full_tensor() for cu in pair)
    mask = mask.replace(cu_seqlens=whole if isinstance(given, tuple) else whole[0])
    return call._replace(options=call.options._replace(attn_mask=mask))


def has_shards(call: Call, function: str) -> bool:
    """Whether a call is of DTensors. Raises RuntimeError, as torch does, where it has other tensors, too."""
    distributed = [is_distributed(tensor) for tensor in all_given(call)]
    if any(distributed) and not all(distributed):
        raise RuntimeError(
            f"{function} got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before "
            "calling distributed operators!"
        )
    return any(distributed)


def locally(answer: Callable[[Call], Any], call: Call, returns_lse: bool) -> Any:
    """A packed or paged call of DTensors, by `answer` of this rank's."""
    from sdpa.distributed.locally import attend

    return attend(answer, call, returns_lse)


def replicating(call: Call, function: str) -> AbstractContextManager[Any]:
    """A block in which tensors that are made beside a call's DTensors are whole on every rank."""
    if not has_shards(call, function) or torch.compiler.is_dynamo_compiling():
        return nullcontext()
    return implicit_replication()


def on_mesh(inputs: AttentionInputs) -> AttentionInputs:
    """With DTensors for what was made beside those of a call. Dropout's numbers are those of the mesh's first rank."""
    beside = [t for t in inputs if isinstance(t, Tensor) and not is_distributed(t)]
    if not beside or not is_distributed(inputs.q):
        return inputs
    query: Any = inputs.q
    module, mesh = distributed_tensors(), query.device_mesh
    placements = [module.Replicate()] * mesh.ndim
    made = {
        name: module.distribute_tensor(value, mesh, placements)
        if name == "rng"
        else module.DTensor.from_local(value, mesh, placements, run_check=False)
        for name, value in zip(inputs._fields, inputs, strict=True)
        if isinstance(value, Tensor) and not is_distributed(value)
    }
    return inputs._replace(**made)


def is_inside() -> bool:
    """Whether this thread is inside of a block of ours. Graphs depend on the count alone."""
    return open_blocks > 0 and INSIDE.get() is not None


def refuse_inside(what: str) -> None:
    if is_inside():
        raise RuntimeError(f"context_parallel: {what}")


def refuse_together(what: str) -> None:
    """The same of what other ranks may not see, which then are told, too."""
    if is_inside():
        INSIDE.get().refuse(what)


@constant
def register() -> None:
    """The strategies of our operators; a compiler runs it while it traces."""
    import_module("sdpa.distributed.sharding")


def answer(function: Callable[..., Any], name: str, call: Call, returns_lse: bool, kernel: str | None) -> Any:
    """The call of torch's function. Raises RuntimeError for what it does not take."""
    mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks = call.options
    if isinstance(mask, Mask) and [f.name for f in fields(mask) if getattr(mask, f.name) is not f.default] == CAUSAL:
        mask, is_causal = None, True
    asked = {
        "mask": mask is not None,
        "softcap": softcap is not None,
        "sinks": sinks is not None,
        "return_lse": returns_lse,
        "kernel": kernel is not None,
    }
    refused = [what for what, given in asked.items() if given] if name == NAME else [name.partition(",")[0]]
    if refused:
        raise RuntimeError(
            f"Inside of torch's context_parallel torch answers, which has no {' and no '.join(refused)} there. Here a "
            "call would attend to this rank's shard of the sequence alone."
        )
    return function(*call[:3], None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
