"""What ranks do in the tests of `sdpa tune --distributed`."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from sdpa.bench import book
from sdpa.bench.links import speeds
from sdpa.cli import links
from sdpa.distributed import choosing
from sdpa.distributed.links import links_of


def figures_of_tables(rank: int, folder: str) -> None:
    """All ranks take the slowest of their tables' figures; where one has none, links are measured."""
    (link,) = links_of(init_device_mesh("cpu", (2,)))
    os.environ["SDPA_TUNING_DIR"] = f"{folder}/{rank}"
    assert choosing.rates_of(link) == choosing.Rates(2**-12, 1e9)
    choosing.KNOWN.clear()
    choosing.measured = lambda link: choosing.Rates(1.0, 1.0)
    if rank:
        os.environ["SDPA_TUNING_DIR"] = f"{folder}/none"
    assert choosing.rates_of(link) == choosing.Rates(1.0, 1.0)


def speeds_of_two_hosts(rank: int) -> None:
    """All four ranks, the two of a host, and one of each host."""
    choosing.socket.gethostname = lambda: f"host{rank // 2}"
    found = speeds(init_device_mesh("cpu", (4,)))
    assert sorted(one[:3] for one in found) == [("gloo", 1, 2), ("gloo", 2, 2), ("gloo", 2, 4)]


def broken_table(rank: int, folder: str, name: str) -> None:
    """Where warnings are errors on one rank and its table is broken, it raises, and no other waits for it."""
    (link,) = links_of(init_device_mesh("cpu", (2,)))
    os.environ["SDPA_TUNING_DIR"] = f"{folder}/{rank}"
    path = Path(folder) / "1" / f"{name}.yaml"
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank else "ignore")
        told = f"table {path} is ignored" if rank else "rank 1 of 2 cannot read its tuning tables"
        for _ in range(2):
            with pytest.raises(UserWarning if rank else RuntimeError, match=told):
                choosing.rates_of(link)
    assert link.ask(torch.tensor(rank)).tolist() == [0, 1]  # each has taken part in as many collectives
    if rank:
        path.unlink()
    choosing.measured = lambda link: choosing.Rates(1.0, 1.0)
    assert choosing.rates_of(link) == choosing.Rates(1.0, 1.0)


def refused_before(rank: int, complaints: dict[Path, str]) -> None:
    """What would be written to cannot be: all ranks end before anything is measured, and one says why."""

    @contextmanager
    def started(device: str):
        yield init_device_mesh(device, (2,))

    os.environ |= dict.fromkeys(links.STARTED, "0") | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    links.ranks, links.speeds = started, lambda world: pytest.fail("links were measured")
    for path, told in complaints.items():
        with pytest.raises(SystemExit if rank else book.BookError, match="1" if rank else told):
            links.tune_links("cpu", path)
