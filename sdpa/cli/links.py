"""sdpa tune --distributed: what the links between ranks carry, into each host's table."""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch.distributed as dist

from sdpa.bench.book import add_links, require_writable
from sdpa.bench.links import failed_elsewhere, ranks, speeds
from sdpa.cli.common import console, duration
from sdpa.dispatch.tables import LinkSpeed

STARTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun tells a process
COMMAND = "torchrun --nproc-per-node RANKS -m sdpa.cli tune --distributed"


def tune_links(device: str, path: Path, dry_run: bool) -> None:
    """Measures the links between the ranks that torchrun started, and writes them into the table of each host."""
    if not os.environ.keys() >= STARTED:
        raise click.UsageError(f"--distributed measures what ranks send to one another; start them by {COMMAND}")
    with ranks(device) as world:
        if world.size() == 1:
            raise click.UsageError(f"--distributed expects at least two ranks: {COMMAND}")
        writes = not dry_run and os.environ.get("LOCAL_RANK", "0") == "0"  # one of each host
        if failed_elsewhere(world, lambda: require_writable(path.parent) if writes else None):
            raise SystemExit(1)
        found = speeds(world)
        if failed_elsewhere(world, lambda: add_links(path, device, found) if writes else None):
            raise SystemExit(1)
        if dist.get_rank() == 0:
            show(found, "" if dry_run else f"written: {path}, on each host")


def show(found: list[LinkSpeed], end: str) -> None:
    out = console()
    for one in found:
        hosts = "1 host" if one.hosts == 1 else f"{one.hosts} hosts"
        out.print(
            f"{one.backend}, {one.ranks} ranks on {hosts}: {duration(one.latency)} a collective, "
            f"{one.bandwidth / 1e9:.1f} GB/s sent by a rank",
            soft_wrap=True,
            highlight=False,
        )
    if end:
        out.print(end, soft_wrap=True, highlight=False)
