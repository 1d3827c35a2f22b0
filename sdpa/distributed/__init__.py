"""Attention of tensors that several devices share, on torch.distributed."""

from sdpa.distributed.context import context_parallel
from sdpa.distributed.shards import shard, unshard

__all__ = ["context_parallel", "shard", "unshard"]
