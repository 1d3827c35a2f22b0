"""A rank's part of a sequence, and the whole of its parts: of tensors, positions, labels and masks of one dimension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as a view; nothing is sent.

    Parts are consecutive and differ by one position at most, the longer ones first.

    Args:
        tensor: the same on all ranks.
        mesh: one dimension.
        dim: of the sequence.
    """
    parts: tuple[Tensor, ...] = tensor.tensor_split(mesh.size(), dim)
    return parts[mesh.get_local_rank()]


def unshard(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The whole of the ranks' parts, which may differ in length, on every rank. It has no gradient.

    Args:
        tensor: this rank's part; other sizes and the dtype are the same on all ranks.
        mesh: one dimension.
        dim: of the sequence.
    """
    own = tensor.detach().movedim(dim, 0).contiguous()
    length = torch.tensor([own.shape[0]], device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(mesh.size())]
    dist.all_gather(lengths, length, group=mesh.get_group())
    sizes = torch.cat(lengths).tolist()
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: own.shape[0]] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=mesh.get_group())
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)]).movedim(0, dim)
