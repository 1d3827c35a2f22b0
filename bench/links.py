"""What the links between ranks carry, for `sdpa tune --distributed`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sdpa.bench.book import origin
from sdpa.dispatch.tables import LinkSpeed
from sdpa.distributed.choosing import measured, place_of
from sdpa.distributed.links import Link, links_of

REPEATS = 20


@contextmanager
def ranks(device: str) -> Iterator[DeviceMesh]:
    """The ranks that torchrun started, in one dimension."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield init_device_mesh(kind, (dist.get_world_size(),))
        dist.barrier()  # who is done first would close connections that others use
    finally:
        dist.destroy_process_group()


def speeds(world: DeviceMesh) -> list[LinkSpeed]:
    """Of all ranks. Where hosts have the same number: of one rank of each host, and of groups inside of hosts, of each
    size that divides that number."""
    (link,) = links_of(world)
    _, hosts, every = place_of(link)
    found = [speed_of(link)]
    own = every // hosts if every % hosts == 0 else 1
    for size in (size for size in range(2, own + 1) if own % size == 0 and size < every):
        across, inside = links_of(init_device_mesh(link.device, (every // size, size)))
        found += [speed_of(one) for one in ((across, inside) if size == own else (inside,))]
    return list({one[:3]: one for one in found}.values())


def failed_elsewhere(world: DeviceMesh, action: Callable[[], None]) -> bool:
    """Whether what every rank does at the same time raised on another one. Raises what it raised here."""
    (link,) = links_of(world)
    failed = torch.ones(1, dtype=torch.long, device=link.device)
    try:
        action()
        failed.zero_()
    finally:
        anywhere = bool(link.ask(failed).any())
    return anywhere


def speed_of(link: Link) -> LinkSpeed:
    """While all other groups of the same mesh send, too."""
    place = place_of(link)
    dist.barrier()
    return LinkSpeed(*place, *measured(link, REPEATS), **origin(link.device))
