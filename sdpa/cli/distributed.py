"""sdpa bench --suite distributed: context parallelism in processes, on one device, and as a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sdpa.bench import record
from sdpa.bench.distributed import DIRECTIONS, Case, Measured, Simulated, cases, measure, simulate
from sdpa.bench.scaling import PUBLISHED, PUBLISHED_AT, RANKS, Machine, modelled
from sdpa.bench.torch_context import torchs
from sdpa.cli.common import console, duration, require_device

SUITE = "distributed"
PROCESSES = 2  # of this machine
LINE = "{:<12} {:<14} {:<10} {:<9} {:>12} {:>12} {:>14} {:>18} {:>12}"
MEASURED = "{:<12} {:<10} {:<10} {:>16} {:>16} {:>12} {:>10}"
MODELLED = "{:<10} {:<16}" + " {:>6}" * len(RANKS)


def run_distributed(device: str | None, only: str, ranks: int | None, json_file: Path | None) -> bool:
    """Simulates `ranks` ranks on one device, or measures processes here; whether there was a figure."""
    if ranks is None and device not in (None, "cpu"):
        raise click.UsageError(f"suite {SUITE} measures processes on the CPU; on {device} it takes --simulate RANKS")
    device = device or "cpu"
    require_device(device)
    chosen = [case for case in cases(device) if only in case.name]
    if not chosen:
        raise click.UsageError(f"no problem of suite {SUITE} contains {only!r}")
    rows = measured_here(chosen) if ranks is None else simulated_on(device, chosen, ranks)
    if json_file is not None:
        json_file.write_text(json.dumps(record.header(device) | {"suite": SUITE, "rows": rows}, indent=1) + "\n")
    return bool(rows)


def measured_here(chosen: list[Case]) -> list[dict[str, Any]]:
    """A line for each mode and order of a case, in processes of this machine."""
    out, rows = console(), list[dict[str, Any]]()
    out.print(f"{PROCESSES} processes on gloo, beside one", style="bold")
    titles = ("problem", "mode", "order", "forward sends", "backward sends", "distance", "time")
    out.print(MEASURED.format(*titles), style="bold", soft_wrap=True)
    for case in chosen:
        for found in measure(case, PROCESSES):
            out.print(line_of(found), soft_wrap=True, highlight=False, markup=False)
            names = {"problem": found.case, "mode": found.mode, "order": found.order, "ranks": found.ranks}
            own = {"distance": found.distance, "seconds": found.seconds}
            rows += [names | {"direction": one, "sent_bytes": found.sent[one]} | own for one in DIRECTIONS]
    out.print("sends: of the rank that sends most; distance: of the output, to that of one process; time: both ways")
    return rows


def simulated_on(device: str, chosen: list[Case], ranks: int) -> list[dict[str, Any]]:
    """Two lines for each, of ranks one after the other on one device; and the model."""
    out, rows = console(), list[dict[str, Any]]()
    out.print(f"{ranks} ranks, one after the other on {device}", style="bold")
    titles = ("problem", "mode", "order", "", "in all", "attention", "slowest, mean", "copies and merging", "sent")
    out.print(LINE.format(*titles), style="bold", soft_wrap=True)
    for case in chosen:
        for simulated in simulate(case, ranks, device):
            for direction in DIRECTIONS:
                rows.append(figures(simulated, direction))
                out.print(told(rows[-1]), soft_wrap=True, highlight=False, markup=False)
        if case.mask == "causal" and device.startswith("cuda"):
            rows += torchs_rows(case, ranks, device)
    out.print(
        "in all, attention: of a rank, the mean; slowest: beside that of attention; copies and merging: beside "
        "attention; sent: by the rank that sends most; no Ulysses where ranks do not divide the heads",
        soft_wrap=True,
    )
    show_model()
    return rows


def line_of(found: Measured) -> str:
    sent = [f"{found.sent[direction]:,} B" for direction in DIRECTIONS]
    return MEASURED.format(found.case, found.mode, found.order, *sent, f"{found.distance:.1e}", duration(found.seconds))


def figures(found: Simulated, direction: str) -> dict[str, Any]:
    """Seconds of attention on the mean rank, the slowest rank beside it, copies and merging beside attention, and the
    bytes of the rank that sends most."""
    shares = found.shares[direction]
    return {
        "problem": found.case.name,
        "mode": found.mode,
        "order": found.order,
        "ranks": found.ranks,
        "direction": direction,
        "seconds": sum(share.seconds for share in shares) / len(shares),
        "attention_s": sum(share.attention for share in shares) / len(shares),
        "slowest": found.slowest(direction),
        "beside": found.beside(direction),
        "sent_bytes": found.sent(direction),
    }


def torchs_rows(case: Case, ranks: int, device: str) -> list[dict[str, Any]]:
    """Two lines for torch's own block by each of its backends, or why it has none."""
    out, rows = console(), list[dict[str, Any]]()
    for peer in torchs(case, ranks, device):
        mode = f"torch, {peer.backend}"
        if peer.refused:
            out.print(f"{case.name}: {mode}: {peer.refused}", soft_wrap=True, highlight=False, markup=False)
        for direction, found in peer.seconds.items():
            mean = sum(found) / len(found)
            names = {"problem": case.name, "mode": mode, "order": "zigzag", "ranks": ranks, "direction": direction}
            rows.append(names | {"seconds": mean, "slowest": max(found) / mean})
            line = LINE.format(case.name, mode, "zigzag", direction, duration(mean), "", "", "", "")
            out.print(line.rstrip(), soft_wrap=True, highlight=False, markup=False)
    return rows


def told(row: dict[str, Any]) -> str:
    beside, sent = f"{row['beside']:.1%}", f"{row['sent_bytes'] / 1e6:.1f} MB"
    names = row["problem"], row["mode"], row["order"], row["direction"]
    return LINE.format(
        *names, duration(row["seconds"]), duration(row["attention_s"]), f"{row['slowest']:.3f}", beside, sent
    )


def show_model() -> None:
    """What arithmetic expects of many GPUs, and what others published."""
    out, machine = console(), Machine()
    out.print(
        f"\nmodelled, TFLOP/s a GPU: causal, 8,192 tokens a GPU, 64 query heads, 8 key heads, D=128; a kernel of "
        f"{machine.forward / 1e12:.0f} and {machine.backward / 1e12:.0f} TFLOP/s, links of {machine.node / 1e9:.0f} "
        f"and {machine.network / 1e9:.0f} GB/s",
        soft_wrap=True,
    )
    out.print(MODELLED.format("", "mode", *map(str, RANKS)), style="bold", soft_wrap=True)
    by_line: dict[tuple[str, str], list[str]] = {}
    for one in modelled(machine):
        by_line.setdefault((one.direction, one.mode), []).append("-" if one.tflops is None else f"{one.tflops:.0f}")
    for (direction, mode), numbers in by_line.items():
        out.print(MODELLED.format(direction, mode, *numbers), soft_wrap=True, highlight=False)
    out.print("published, measured by MagiAttention's authors on H100s", soft_wrap=True)
    for (direction, mode), values in PUBLISHED.items():
        known = dict(zip(PUBLISHED_AT, values, strict=True))
        numbers = [str(known.get(ranks, "")) for ranks in RANKS]
        out.print(MODELLED.format(direction, mode, *numbers), soft_wrap=True, highlight=False)
