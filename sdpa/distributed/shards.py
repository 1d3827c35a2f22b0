"""A rank's part of a sequence, and the whole of its parts: of tensors, positions, labels and masks of one dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sdpa.distributed.links import links_of, rank_of
from sdpa.distributed.parts import Parts
from sdpa.scalars import type_name


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int, parts: Parts | None = None) -> Tensor:
    """This rank's part of a tensor that every rank has whole; nothing is sent. A view, but for several intervals.

    Args:
        tensor: the same on all ranks.
        mesh: its ranks share the sequence, in the order of its dimensions.
        dim: of the sequence.
        parts: which positions each rank has; by default `Parts.even`: consecutive, and one position apart at most.

    Raises:
        ValueError: parts of another length, or of another number of ranks.
    """
    links, length = links_of(mesh), length_of("shard", tensor, dim)
    parts = Parts.even(length, mesh.size()) if parts is None else parts
    check_parts("shard", parts, length, mesh)
    own = [tensor.narrow(dim, begin, end - begin) for begin, end in parts.intervals[rank_of(links)]]
    if len(own) == 1:
        return own[0]
    return torch.cat(own, dim) if own else tensor.narrow(dim, 0, 0)


def unshard(tensor: Tensor, mesh: DeviceMesh, dim: int, parts: Parts | None = None) -> Tensor:
    """The whole of the ranks' parts, which may differ in length, on every rank. It has no gradient.

    Args:
        tensor: this rank's part; other sizes and the dtype are the same on all ranks.
        mesh: its ranks share the sequence, in the order of its dimensions.
        dim: of the sequence.
        parts: which positions each rank has, those that `shard` was given; by default consecutive ones.
    """
    length_of("unshard", tensor, dim)
    found = tensor.detach().movedim(dim, 0).contiguous()
    for link in reversed(links_of(mesh)):
        sizes = link.ask(torch.tensor([found.shape[0]], device=found.device)).flatten().tolist()
        padded = found.new_zeros(max(sizes), *found.shape[1:])
        padded[: found.shape[0]] = found
        found = torch.cat([part[:size] for part, size in zip(link.ask(padded), sizes, strict=True)])
    if parts is not None:
        check_parts("unshard", parts, found.shape[0], mesh)
        places = [place for own in parts.intervals for interval in own for place in range(*interval)]
        whole = torch.empty_like(found)
        whole[torch.tensor(places, dtype=torch.long, device=found.device)] = found
        found = whole
    return found.movedim(0, dim)


def length_of(function: str, tensor: object, dim: object) -> int:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: expected a Tensor, got {type_name(tensor)}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{function}: expected dim as a dimension of {tuple(tensor.shape)}, got {dim!r}")
    return tensor.shape[dim]


def check_parts(function: str, parts: object, length: int, mesh: DeviceMesh) -> None:
    if not isinstance(parts, Parts):
        raise TypeError(f"{function}: expected parts as Parts or None, got {type_name(parts)}")
    if parts.length != length or len(parts.intervals) != mesh.size():
        raise ValueError(
            f"{function}: expected parts of {length} positions for {mesh.size()} ranks, got those of {parts.length} "
            f"for {len(parts.intervals)}"
        )
