"""sdpa tune --distributed: what the links between ranks carry, into each host's table."""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
from click.core import ParameterSource

from sdpa.bench.book import add_links, require_changeable
from sdpa.bench.links import failed_elsewhere, ranks, speeds
from sdpa.cli.common import console, duration
from sdpa.dispatch.tables import LinkSpeed

STARTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun tells a process
COMMAND = "torchrun --nproc-per-node RANKS -m sdpa.cli tune --distributed"
MEANT = {"distributed", "device", "out"}  # the options that say something of links


def require_alone(context: click.Context) -> None:
    """Refuses all options that --distributed has no use for."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in MEANT and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--distributed measures links and no kernels: expected only --device and --out beside it, "
            f"got {', '.join(given)}"
        )


def tune_links(device: str, path: Path) -> None:
    """Measures the links between the ranks that torchrun started, and writes them into the table of each host."""
    if not os.environ.keys() >= STARTED:
        raise click.UsageError(f"--distributed measures what ranks send to one another; start them by {COMMAND}")
    for name in sorted(STARTED - {"MASTER_ADDR"}):
        if not os.environ[name].isdigit():
            raise click.UsageError(f"expected {name} to be a number, as torchrun sets it, got {os.environ[name]!r}")
    require_own_gpus(device)
    with ranks(device) as world:
        if world.size() == 1:
            raise click.UsageError(f"--distributed expects at least two ranks: {COMMAND}")
        writes = os.environ.get("LOCAL_RANK", "0") == "0"  # one of each host
        if failed_elsewhere(world, lambda: require_changeable(path) if writes else None):
            raise SystemExit(1)
        found = speeds(world)
        if failed_elsewhere(world, lambda: add_links(path, device, found) if writes else None):
            raise SystemExit(1)
        if dist.get_rank() == 0:
            show(found, f"written: {path}, on each host")


def require_own_gpus(device: str) -> None:
    """Each rank of a host takes a GPU of its own. All ranks of the host refuse, before they wait for one another."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if torch.device(device).type == "cuda" and ranks > torch.cuda.device_count():
        raise click.UsageError(
            f"--distributed takes a GPU for each rank: expected up to {torch.cuda.device_count()} ranks on this host, "
            f"got {ranks}"
        )


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
    out.print(end, soft_wrap=True, highlight=False)
