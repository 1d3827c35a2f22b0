"""Links: how one rank of a group hands tensors to the others and takes theirs, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sdpa.distributed.parts import Interval, Intervals, places
from sdpa.scalars import type_name

Shape = tuple[int, ...]
Pieces = Sequence[Sequence[Tensor]]  # by tensor, by rank
Item = TypeVar("Item")


class Link:
    """One dimension of a mesh as this rank sees it, and the bytes that it sent to others."""

    def __init__(self, mesh: DeviceMesh, dim: int = 0) -> None:
        self.group, self.ranks, self.rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self.device = mesh.device_type
        self.sent = 0

    def start(self, given: Pieces, shapes: Sequence[Sequence[Shape]]) -> Callable[[], list[list[Tensor]]]:
        """Begin to give every rank its piece of each tensor. What is returned waits for those that this one is given,
        of known shapes. Gradients go back, and are as well begun first and waited for later.

        Tensors of one dtype travel together.
        """
        begun = []
        for dtype in dict.fromkeys(pieces[0].dtype for pieces in given):
            those = [at for at, pieces in enumerate(given) if pieces[0].dtype == dtype]
            flight = Flight(self, [shape for at in those for shape in shapes[at]])
            begun.append((those, flight, Sending.apply(flight, *[piece for at in those for piece in given[at]])))

        def taken() -> list[list[Tensor]]:
            found: dict[int, list[Tensor]] = {}
            for those, flight, flat in begun:
                pieces = Taking.apply(flight, flat)
                found |= {at: list(pieces[i * self.ranks :][: self.ranks]) for i, at in enumerate(those)}
            return [found[at] for at in range(len(given))]

        return taken

    def count(self, sizes: Sequence[int], element: int) -> None:
        """Add what goes to others, of a number of elements for each rank."""
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
        sent = in_a_row(given)
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

    def exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> Any:
        """Begin to exchange numbers of elements for each rank and from each; what is to be waited for."""
        return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group, async_op=True)


def links_of(mesh: DeviceMesh) -> list[Link]:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh as a DeviceMesh, got {type_name(mesh)}; init_device_mesh makes one")
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


class Flight:
    """Pieces of tensors of one dtype, by tensor and then by rank, on their way in one collective; later gradients back.

    `shapes` are of what arrives.
    """

    def __init__(self, link: Link, shapes: list[Shape]) -> None:
        self.link, self.shapes = link, shapes
        self.back: list[Shape] = []  # shapes of what was given
        self.work: Any = None
        self.gradients: Tensor | None = None  # as they come back

    def send(self, pieces: Sequence[Tensor], shapes: list[Shape]) -> tuple[Tensor, Tensor]:
        """Begin to send. What was sent and what is arriving, by rank and then by tensor."""
        link = self.link
        sent = in_a_row(by_rank(pieces, link.ranks))
        sizes, taken = (
            [sum(part) for part in split([math.prod(shape) for shape in by_rank(of, link.ranks)], link.ranks)]
            for of in ([piece.shape for piece in pieces], shapes)
        )
        arriving = sent.new_empty(sum(taken))
        self.work = link.exchange(arriving, sent, taken, sizes)
        link.count(sizes, sent.element_size())
        return sent, arriving

    def take(self, flat: Tensor, shapes: list[Shape]) -> tuple[Tensor, ...]:
        """Wait, and the pieces of what arrived."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        ordered = by_rank(shapes, self.link.ranks)
        parts = flat.split([math.prod(shape) for shape in ordered])
        views = [part.view(shape) for part, shape in zip(parts, ordered, strict=True)]
        return tuple(by_rank(views, len(shapes) // self.link.ranks))


class Sending(torch.autograd.Function):
    """Begins a flight; its backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *pieces: Tensor) -> Tensor:
        ctx.flight, flight.back = flight, [tuple(piece.shape) for piece in pieces]
        return flight.send(pieces, flight.shapes)[1]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        arrived, flight.gradients = flight.gradients, None
        return (None, *flight.take(arrived, flight.back))


class Taking(torch.autograd.Function):
    """Waits for a flight; its backward begins that of the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, flat: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return flight.take(flat, flight.shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        sent, ctx.flight.gradients = ctx.flight.send(gradients, ctx.flight.back)
        return None, sent


def in_a_row(pieces: Sequence[Tensor]) -> Tensor:
    """The numbers of tensors of one dtype, one tensor behind the other. Each is copied once, however it lies."""
    found = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(found.split([piece.numel() for piece in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return found


def by_rank(items: Sequence[Item], ranks: int) -> list[Item]:
    """What was by tensor and then by rank, by rank and then by tensor."""
    return [item for rank in range(ranks) for item in items[rank::ranks]]


def split(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    each = len(items) // parts
    return [items[part * each :][:each] for part in range(parts)]


def refuse_second_derivatives() -> None:
    """A backward of which a graph is made would lose what further ranks do."""
    if torch.is_grad_enabled():
        raise RuntimeError("context_parallel: gradients of gradients (create_graph=True) are not supported")


class Tied(torch.autograd.Function):
    """A tensor, of which others get gradients of 0: so their collective has its backward on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        refuse_second_derivatives()
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
