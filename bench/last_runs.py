"""The last run of each problem of a device, of bench/results: what README.md and docs/guide tell of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

from sdpa.bench.peers import TORCH_PEERS
from sdpa.bench.pictures import PEERS, RESULTS
from sdpa.bench.race import Section, Source, direction_of, read_source, sections_of
from sdpa.bench.race_pages import PAGES
from sdpa.bench.record import Record, Run, header_lines, unpaired

DEVICES = {
    "nvidia_h200": "H200", "nvidia_h100": "H100", "amd_zen5": "Zen 5", "amd_zen4": "Zen 4",
    "intel_sapphire_rapids": "Sapphire Rapids",
}  # fmt: skip


OF_SMALL_CALLS = ("overhead", "gpu-overhead")  # suites in which only the way to the kernel costs


def last_rows(name: str, column: str = "ratio") -> Iterator[tuple[str, Record]]:
    """The device, with its threads, and the row of each problem's last run with so many of them that has a figure in
    `column`: a run beside no backend of torch's has no `torch_ratio`."""
    found: dict[tuple[str, str], tuple[str, Record]] = {}
    for section in sections(name):
        device = device_of(name, section)
        rows = (row for standing in section.standings() for row in standing.rows)
        found |= {(device, row["problem"]): (device, row) for row in rows if row[column]}
    yield from found.values()


def last_of_suite(name: str, suite: str, direction: str, column: str = "ratio", threads: str = "") -> list[Record]:
    """Of these, the problems that the suite had in some run. `threads` is as `threads_of` tells it, empty where the
    device has one number of them."""
    every = (row for section in sections(name) if section.suite == suite for row in section.records)
    problems = {row["problem"] for row in every if direction_of(row["problem"]) == direction}
    return [row for device, row in last_rows(name, column) if row["problem"] in problems and device.endswith(threads)]


@cache
def sections(name: str) -> tuple[Section, ...]:
    """The suites of all runs on a device, the older first."""
    sources = [read_source(RESULTS / f"{table}.csv") for table in PAGES[name]]
    path = RESULTS / f"{name}_overhead.json"
    if path.exists():
        told = json.loads(path.read_text())
        sources.append(Source(path.as_posix(), header_lines(told), told["rows"]))
    return tuple(sorted(sections_of(sources), key=lambda section: section.run.date))


def device_of(name: str, section: Section) -> str:
    return ", ".join([DEVICES[name], *threads_of(section.run)])


def threads_of(run: Run) -> list[str]:
    """As "1 thread": an older run has it in its command alone, and one on a GPU nowhere."""
    told = re.search(r"\bthreads (\d+)", f"{run.conditions} {run.command}")
    return [f"{told[1]} thread{'s' * (told[1] != '1')}"] if told else []


def others_of(rows: list[Record]) -> list[str]:
    """The peers but torch's that were timed in some of the rows."""
    timed = {peer for row in rows for peer in unpaired(row["peers"])}
    return sorted(PEERS.get(peer, peer) for peer in timed - set(TORCH_PEERS))
