"""Links: how one rank of a group hands tensors to the others and takes theirs, with gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sdpa.distributed.parts import Interval, Intervals, places

Shape = tuple[int, ...]
Pieces = Sequence[Sequence[Tensor]]  # by tensor, by rank


class Link:
    """One dimension of a mesh as this rank sees it, and the bytes that it sent to others."""

    def __init__(self, mesh: DeviceMesh, dim: int = 0) -> None:
        self.group, self.ranks, self.rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self.device = mesh.device_type
        self.sent = 0

    def swap(self, given: Pieces, shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
        """Of each tensor the piece that every rank gives this one, of known shapes. Gradients go back.

        Tensors of one dtype travel together.
        """
        found: dict[int, list[Tensor]] = {}
        for dtype in dict.fromkeys(pieces[0].dtype for pieces in given):
            those = [at for at, pieces in enumerate(given) if pieces[0].dtype == dtype]
            pieces = [piece for at in those for piece in given[at]]
            received = Swap.apply(self, [shape for at in those for shape in shapes[at]], *pieces)
            found |= {at: list(received[i * self.ranks :][: self.ranks]) for i, at in enumerate(those)}
        return [found[at] for at in range(len(given))]

    def count(self, sizes: Sequence[int], element: int) -> None:
        """Add what goes to others, of a number of elements for each rank. A compiled graph counts nothing."""
        if not torch.compiler.is_compiling():
            self.sent += (sum(sizes) - sizes[self.rank]) * element

    def ask(self, here: Tensor) -> Tensor:
        """(ranks, ...) of a tensor of one shape."""
        found = [torch.empty_like(here) for _ in range(self.ranks)]
        dist.all_gather(found, here, group=self.group)
        return torch.stack(found)

    def pass_on(self, step: int, given: Sequence[Tensor], shapes: Sequence[Shape]) -> Passing:
        """Begin to give tensors of one dtype to the rank `step` places on, and to take those of the rank as far back.
        Both know beforehand what is empty, and then send nothing."""
        to, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
        if to == self.rank:
            return Passing([], list(given), [])
        sent = torch.cat([tensor.reshape(-1) for tensor in given])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        self.sent += sent.numel() * sent.element_size()
        views = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return Passing(self.post(sent, to, received, source), views, [sent])

    def post(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[Any]:
        """Begin to send one tensor and to receive another; what is to be waited for."""
        asked = [(dist.isend, sent, to), (dist.irecv, received, source)]
        operations = [
            dist.P2POp(function, tensor, dist.get_global_rank(self.group, peer), self.group)
            for function, tensor, peer in asked
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        """Numbers of elements for each rank, and from each."""
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)


def links_of(mesh: DeviceMesh) -> list[Link]:
    return [Link(mesh, dim) for dim in range(mesh.ndim)]


def rank_of(links: list[Link]) -> int:
    """This rank's place among all, in the order of the mesh's dimensions."""
    rank = 0
    for link in links:
        rank = rank * link.ranks + link.rank
    return rank


class Passing:
    """Tensors on their way; `kept` is what may not go before they were sent."""

    def __init__(self, works: list[Any], tensors: list[Tensor], kept: list[Tensor]) -> None:
        self.works, self.tensors, self.kept = works, tensors, kept

    def wait(self) -> list[Tensor]:
        """What was received."""
        for work in self.works:
            work.wait()
        self.kept = []
        return self.tensors


class Swap(torch.autograd.Function):
    """Every rank's piece of each tensor for every other one, in one collective; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, link: Link, shapes: list[Shape], *pieces: Tensor) -> tuple[Tensor, ...]:
        """`pieces` and `shapes` are by tensor and then by rank."""
        ctx.link, ctx.back = link, [tuple(piece.shape) for piece in pieces]
        given = [list(of_rank(pieces, rank, link.ranks)) for rank in range(link.ranks)]
        taken = [list(of_rank(shapes, rank, link.ranks)) for rank in range(link.ranks)]
        sent = torch.cat([piece.reshape(-1) for parts in given for piece in parts])
        sent_sizes = [sum(piece.numel() for piece in parts) for parts in given]
        sizes = [math.prod(shape) for parts in taken for shape in parts]
        received = sent.new_empty(sum(sizes))
        tensors = len(shapes) // link.ranks
        received_sizes = [sum(sizes[rank * tensors :][:tensors]) for rank in range(link.ranks)]
        link.exchange(received, sent, received_sizes, sent_sizes)
        link.count(sent_sizes, sent.element_size())
        flat = [shape for parts in taken for shape in parts]
        views = [part.view(shape) for part, shape in zip(received.split(sizes), flat, strict=True)]
        return tuple(views[rank * tensors + tensor] for tensor in range(tensors) for rank in range(link.ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *Swap.apply(ctx.link, ctx.back, *gradients))


def of_rank(items: Sequence[Any], rank: int, ranks: int) -> Iterator[Any]:
    """What of items by tensor and then by rank is one rank's."""
    return (items[at] for at in range(rank, len(items), ranks))


class Tied(torch.autograd.Function):
    """A tensor, of which others get gradients of 0: so their collective has its backward on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return (gradient, *(gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes))


def rows_of(tensor: Tensor, inside: Intervals, of: Intervals) -> Tensor:
    """(B, heads, rows, size) of the positions `inside`, of a tensor that holds those of `of`."""
    found = [tensor[:, :, begin:end] for begin, end in places(inside, of)]
    if len(found) == 1:
        return found[0]
    return torch.cat(found, 2) if found else tensor[:, :, :0]


def joined(pieces: Sequence[Tensor], of: Sequence[Intervals]) -> Tensor:
    """Pieces (B, heads, rows, size), each of which holds the positions `of` its rank, in the order of positions."""
    found: list[tuple[Interval, Tensor]] = []
    for piece, held in zip(pieces, of, strict=True):
        sizes = [end - begin for begin, end in held]
        found += zip(held, piece.split(sizes, 2) if sizes else (), strict=True)
    found.sort(key=lambda one: one[0])
    if len(found) == 1:
        return found[0][1]
    return torch.cat([piece for _, piece in found], 2) if found else pieces[0]
