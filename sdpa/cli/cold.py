"""sdpa bench --suite cold: first calls of fresh processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sdpa.bench import record
from sdpa.bench.cold import First, run_starts, starts
from sdpa.cli.common import console, duration, require_device, require_kernels

SUITE = "cold"
LINE = "{:<52} {:<18} {:>12} {:>12} {:>10}  {}"


def run_cold(device: str, only: str, kernels: tuple[str, ...], json_file: Path | None) -> bool:
    """Prints a line for each start as it is timed; whether any had a time. A kernel that refuses is no failure."""
    require_device(device)
    chosen = tuple(start for start in starts(device, require_kernels(kernels)) if only in start.label)
    if not chosen:
        raise click.UsageError(f"no problem of suite {SUITE} contains {only!r}")
    rows: list[dict[str, Any]] = []
    out, measured = console(), record.header(device) | {"suite": SUITE, "rows": rows}
    titles = LINE.format("problem", "kernel", "empty cache", "filled cache", "again", "")
    out.print(titles, style="bold", soft_wrap=True)
    for first in run_starts(chosen):
        out.print(line_of(first), soft_wrap=True, highlight=False, markup=False)
        rows.append(as_dict(first))
        if json_file is not None:  # after each, so that an interruption loses one
            json_file.write_text(json.dumps(measured, indent=1) + "\n")
    return any(row["empty_s"] is not None for row in rows)


def line_of(first: First) -> str:
    times = ("" if seconds is None else duration(seconds) for seconds in (first.empty, first.filled, first.again))
    return LINE.format(first.start.label, first.start.who, *times, first.reason)


def as_dict(first: First) -> dict[str, Any]:
    """The three figures in seconds, or why there are none."""
    figures = {"empty_s": first.empty, "filled_s": first.filled, "again_s": first.again, "reason": first.reason}
    problem = first.start.problem
    return {"problem": first.start.label, "kernel": first.start.who, **figures, "sizes": problem and asdict(problem)}
