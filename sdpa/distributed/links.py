"""Links: how one rank of a group hands tensors to the others and takes theirs, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sdpa.distributed.parts import Interval, Intervals, places
from sdpa.scalars import type_name

Shape = tuple[int, ...]
Item = TypeVar("Item")
Pieces = list[list[list[Item]]]  # by tensor, by rank, and of a rank by interval of the sequence
# The pieces of a tensor for each rank. They are views: gradients are added to those of the tensor's gradient.
Cut = Callable[[Tensor], list[list[Tensor]]]


class Link:
    """One dimension of a mesh as this rank sees it, and the bytes that it sent to others."""

    def __init__(self, mesh: DeviceMesh, dim: int = 0) -> None:
        self.group, self.ranks, self.rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self.device = mesh.device_type
        self.sent = 0

    def start(self, given: Sequence[tuple[Tensor, Cut]], shapes: Pieces[Shape]) -> Callable[[], Pieces[Tensor]]:
        """Begin to give every rank its pieces of each tensor. What is returned waits for those that this one is given,
        of known shapes. Gradients go back, and are as well begun first and waited for later.

        Tensors of one dtype travel together.
        """
        begun = []
        for dtype in dict.fromkeys(tensor.dtype for tensor, _ in given):
            those = [at for at, (tensor, _) in enumerate(given) if tensor.dtype == dtype]
            flight = Flight(self, [given[at][1] for at in those], [shapes[at] for at in those])
            begun.append((those, flight, Sending.apply(flight, *[given[at][0] for at in those])))

        def taken() -> Pieces[Tensor]:
            found: dict[int, list[list[Tensor]]] = {}
            for those, flight, flat in begun:
                found |= zip(those, flight.by_tensor(Taking.apply(flight, flat)), strict=True)
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

    def pass_on(self, step: int, given: Sequence[Sequence[Tensor]], shapes: Sequence[Shape]) -> Passing:
        """Begin to give tensors of one dtype to the rank `step` places on, each as pieces (B, heads, rows, size) that
        are put side by side, and to take those of the rank as far back. Both know beforehand what is empty, and then
        send nothing."""
        to, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
        if to == self.rank:
            return Passing([], [row_by_row(pieces) for pieces in given], [])
        sent = message_of(given)
        sizes = [math.prod(shape) for shape in shapes]
        received = self.buffer(sent, sum(sizes))
        self.sent += sent.numel() * sent.element_size()
        views = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return Passing(self.post(sent, to, received, source), views, [sent])

    def buffer(self, sent: Tensor, size: int) -> Tensor:
        """Memory for so many numbers of what others send."""
        return sent.new_empty(size)

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
        self.works, self.kept = [], []
        return self.tensors


class Flight:
    """Pieces of tensors of one dtype on their way in one collective, by rank and then by tensor; later gradients back.

    `shapes` are of the pieces that arrive.
    """

    def __init__(self, link: Link, cuts: list[Cut], shapes: Pieces[Shape]) -> None:
        self.link, self.cuts, self.counts = link, cuts, [[len(of) for of in one] for one in shapes]
        self.shapes = by_rank(shapes)
        self.back: list[list[Shape]] = []  # of the pieces that were given
        self.work: Any = None
        self.gradients: Tensor | None = None  # as they come back

    def pieces(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each rank is given of tensors, as views."""
        return by_rank([cut(tensor) for cut, tensor in zip(self.cuts, tensors, strict=True)])

    def send(self, pieces: list[list[Tensor]], shapes: list[list[Shape]]) -> tuple[Tensor, Tensor]:
        """Begin to send, by rank. What was sent and what is arriving, of known shapes."""
        link, sent = self.link, message_of([[piece] for of in pieces for piece in of])
        sizes = [sum(piece.numel() for piece in of) for of in pieces]
        taken = [sum(map(math.prod, of)) for of in shapes]
        arriving = link.buffer(sent, sum(taken))
        self.work = link.exchange(arriving, sent, taken, sizes)
        link.count(sizes, sent.element_size())
        return sent, arriving

    def take(self, flat: Tensor, shapes: list[list[Shape]]) -> tuple[Tensor, ...]:
        """Wait, and the pieces of what arrived."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        every = [shape for of in shapes for shape in of]
        parts = flat.split([math.prod(shape) for shape in every])
        return tuple(part.view(shape) for part, shape in zip(parts, every, strict=True))

    def by_tensor(self, pieces: Sequence[Tensor]) -> Pieces[Tensor]:
        """What arrived by tensor and by rank."""
        rest = iter(pieces)
        ordered = [[list(islice(rest, counts[rank])) for counts in self.counts] for rank in range(self.link.ranks)]
        return [list(of) for of in zip(*ordered, strict=True)]


class Sending(torch.autograd.Function):
    """Begins a flight; its backward waits for the gradients, and adds them up where ranks were given the same."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        pieces = flight.pieces(tensors)
        ctx.flight, flight.back = flight, [[tuple(piece.shape) for piece in of] for of in pieces]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return flight.send(pieces, flight.shapes)[1]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        arrived, flight.gradients = flight.gradients, None
        totals = [arrived.new_zeros(shape) for shape in ctx.shapes]
        places = [place for of in flight.pieces(totals) for place in of]
        for place, piece in zip(places, flight.take(arrived, flight.back), strict=True):
            place.add_(piece)
        return None, *totals


class Taking(torch.autograd.Function):
    """Waits for a flight; its backward begins that of the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, flat: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return flight.take(flat, flight.shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        flight = ctx.flight
        rest = iter(gradients)
        pieces = [list(islice(rest, len(of))) for of in flight.shapes]
        sent, flight.gradients = flight.send(pieces, flight.back)
        return None, sent


def message_of(given: Sequence[Sequence[Tensor]]) -> Tensor:
    """The numbers of tensors of one dtype, one tensor behind the other. Each is given as pieces (B, heads, rows, size),
    which are put side by side, and copied once however they lie."""
    sizes = [sum(piece.numel() for piece in pieces) for pieces in given]
    found = given[0][0].new_empty(sum(sizes))
    for place, pieces in zip(found.split(sizes), given, strict=True):
        B, heads, _, size = pieces[0].shape
        lengths = [piece.shape[2] for piece in pieces]
        for cell, piece in zip(
            cells_of(place.view(B, heads, sum(lengths), size), [heads], lengths), pieces, strict=True
        ):
            cell.copy_(piece)
    return found


def by_rank(items: Pieces[Item]) -> list[list[Item]]:
    """What was by tensor and by rank, by rank alone."""
    return [[item for of in by_tensor for item in of] for by_tensor in zip(*items, strict=True)]


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


def pieces_of(tensor: Tensor, inside: Intervals, of: Intervals) -> list[Tensor]:
    """Views (B, heads, rows, size) of the positions of each interval of `inside`, of a tensor that holds those of `of`;
    where there is none, one of no rows."""
    return [tensor[:, :, begin:end] for begin, end in places(inside, of)] or [tensor[:, :, :0]]


def shapes_of(tensor: Tensor, of: Intervals, heads: int) -> list[Shape]:
    """The shapes of such pieces of tensors with other rows and heads."""
    batch, size = tensor.shape[0], tensor.shape[3]
    return [(batch, heads, end - begin, size) for begin, end in of] or [(batch, heads, 0, size)]


def rows_of(tensor: Tensor, inside: Intervals, of: Intervals) -> Tensor:
    """The same pieces as one tensor."""
    return row_by_row(pieces_of(tensor, inside, of))


def row_by_row(pieces: Sequence[Tensor]) -> Tensor:
    return side_by_side([pieces])


def side_by_side(pieces: Sequence[Sequence[Tensor]]) -> Tensor:
    """One tensor (B, heads, rows, size) of pieces by heads, and of the same heads by rows."""
    every = [piece for of in pieces for piece in of]
    return every[0] if len(every) == 1 else Laid.apply([len(of) for of in pieces], *every)


class Laid(torch.autograd.Function):
    """Pieces of one dtype side by side, each copied once by itself. On an H200 torch's `cat` of such pieces reaches
    0.85 TB/s (docs/log/context-parallel.md)."""

    @staticmethod
    def forward(ctx: Any, counts: list[int], *pieces: Tensor) -> Tensor:
        first = [pieces[at] for at in accumulate(counts[:-1], initial=0)]  # of each of the heads
        ctx.sizes = [piece.shape[1] for piece in first], [piece.shape[2] for piece in pieces[: counts[0]]]
        B, _, _, size = pieces[0].shape
        found = pieces[0].new_empty(B, *map(sum, ctx.sizes), size)
        for place, piece in zip(cells_of(found, *ctx.sizes), pieces, strict=True):
            place.copy_(piece)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *cells_of(gradient, *ctx.sizes)


def cells_of(tensor: Tensor, heads: list[int], rows: list[int]) -> list[Tensor]:
    """Views of the pieces of a tensor (B, heads, rows, size) that lie side by side."""
    return [cell for of in tensor.split(heads, 1) for cell in of.split(rows, 2)]


def joined(pieces: Sequence[Sequence[Tensor]], of: Sequence[Intervals]) -> Tensor:
    """The pieces by rank, which hold the positions `of` that rank, in the order of positions."""
    found: list[tuple[Interval, Tensor]] = []
    for some, held in zip(pieces, of, strict=True):
        found += zip(held, some, strict=False)  # of no interval there is one piece, too
    found.sort(key=lambda one: one[0])
    return row_by_row([piece for _, piece in found] or pieces[0])
