"""What ranks do in the tests of `sdpa tune --distributed`."""

from __future__ import annotations

import os

from torch.distributed.device_mesh import init_device_mesh

from sdpa.distributed import choosing
from sdpa.distributed.links import links_of


def figures_of_tables(rank: int, folder: str) -> None:
    """All ranks take the slowest of their tables' figures; where one has none, links are measured."""
    (link,) = links_of(init_device_mesh("cpu", (2,)))
    os.environ["SDPA_TUNING_DIR"] = f"{folder}/{rank}"
    assert choosing.rates_of(link) == choosing.Rates(2e-4, 1e9)
    choosing.KNOWN.clear()
    choosing.measured = lambda link: choosing.Rates(1.0, 1.0)
    if rank:
        os.environ["SDPA_TUNING_DIR"] = f"{folder}/none"
    assert choosing.rates_of(link) == choosing.Rates(1.0, 1.0)
