"""Several processes of one test on gloo: `run(world, function, *args)` calls function(rank, *args) in each."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = datetime.timedelta(seconds=60)  # of a collective


def run(world: int, function: Callable[..., None], *args: Any) -> None:
    """Raises what a rank raised first; the others are ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(begin, (world, port, function, args), nprocs=world)


def begin(rank: int, world: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", PATIENCE, world, rank)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
