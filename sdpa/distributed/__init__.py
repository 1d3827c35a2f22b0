"""Attention of tensors that several devices share, on torch.distributed."""

from importlib import import_module
from typing import TYPE_CHECKING

from sdpa.distributed.context import context_parallel
from sdpa.distributed.parts import Parts
from sdpa.distributed.shards import shard, unshard

if TYPE_CHECKING:
    from sdpa.distributed.plans import tensor_parallel_plan

__all__ = ["Parts", "context_parallel", "shard", "tensor_parallel_plan", "unshard"]


def __getattr__(name: str) -> object:
    if name == "tensor_parallel_plan":  # whose DTensors take half as long to import as torch
        return getattr(import_module("sdpa.distributed.plans"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
