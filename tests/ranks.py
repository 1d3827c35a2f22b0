"""Several processes of one test, on gloo: `run(world, function, *args)` calls function(rank, *args) in each."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = datetime.timedelta(seconds=60)  # of a collective


def run(world: int, function: Callable[..., None], *args: Any, backend: str = "gloo") -> None:
    """Raises what a rank raised first; the others are ended."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(begin, (world, backend, str(Path(folder) / "store"), function, args), nprocs=world)


def begin(
    rank: int, world: int, backend: str, store: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, world), timeout=PATIENCE, world_size=world, rank=rank)
    try:
        function(rank, *args)
        if function.__name__ != "alone":  # whose other rank is gone
            dist.barrier()  # who is done first would close connections that others use
    finally:
        dist.destroy_process_group()
    # Where a test compiled, torch keeps the group, and its threads may abort a Python that ends.
    os._exit(0)
