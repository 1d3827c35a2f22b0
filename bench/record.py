"""What is written of a run: device, versions and command; each suite's last line; rows as JSON and as CSV.

A CSV is written anew after every problem, read back for plots, and merged with earlier runs. Its lines that begin with
"# " tell of each run its date, device, driver, clocks, versions, command and last lines.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sdpa
from sdpa.bench.contest import DEFAULT, Entry, Row
from sdpa.bench.peers import TORCH_PEERS
from sdpa.bench.problems import Problem
from sdpa.bench.suites import SUITES
from sdpa.dispatch.device import device_of

PACKAGES = ("torch", "numpy", "triton", "flash-attn-3", "flash-attn-4", "flashinfer-python", "zentorch", "openvino")
# What the driver reports about a GPU, by the names of nvidia-smi; clocks in MHz, as they are when a run begins.
DRIVER_FACTS = {"driver": "driver_version", "sm_clock_max": "clocks.max.sm", "sm_clock": "clocks.sm"}

COMMENT = "# "
DATE = re.compile(r"\d{4}-\d\d-\d\dT")  # with which the header of a run begins
COLUMNS = (
    "suite", "problem", "asked", "kernel", "ms", "tflops_or_gbs", "unit", "best_peer", "best_peer_value", "ratio",
    "best_torch", "best_torch_value", "torch_ratio", "our_error", "our_rms_error", "peer_error", "our_bytes", "peers",
    "peer_errors", "peer_rms_errors", "peer_bytes", "refused", "samples", "spread", "date", "note",
)  # fmt: skip
LATER = ("our_rms_error", "peer_rms_errors")  # columns that older files lack
KEY = ("suite", "problem", "asked")  # a row measured again replaces the one with the same
Record = dict[str, str]


def versions() -> dict[str, str]:
    """Versions of Python, of this library, and of the packages that decide about speed, which are not imported."""
    found = {"python": platform.python_version(), "sdpa": sdpa.__version__}
    if macos := platform.mac_ver()[0]:  # which has Metal's compiler
        found["macos"] = macos
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_facts(device: str) -> dict[str, str]:
    """Driver and clocks of a GPU; empty where nothing can be asked."""
    if not device.startswith("cuda"):
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(DRIVER_FACTS.values())}", "--format=csv,noheader,nounits"]
    index = device.partition(":")[2] or str(torch.cuda.current_device())
    try:
        told = subprocess.run([*query, f"--id={index}"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    facts = dict(zip(DRIVER_FACTS, (item.strip() for item in told.strip().split(",")), strict=False))
    return facts | {"cudnn": str(torch.backends.cudnn.version())}


def command() -> str:
    """The command line as a user would type it; `python -m sdpa.cli` is the command sdpa."""
    name = Path(sys.argv[0]).name
    return shlex.join(["sdpa" if name == "__main__.py" else name, *sys.argv[1:]])


def header(device: str) -> dict[str, Any]:
    return about(device) | {"driver": driver_facts(device)}


def about(device: str) -> dict[str, Any]:
    """The header without what has to be asked of a driver."""
    facts = device_of(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": facts.names[0],
        "description": facts.description,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "command": command(),
    }


def header_lines(header: dict[str, Any]) -> list[str]:
    """The header as two comments of a CSV."""
    driver = ", ".join(f"{name} {text}" for name, text in header["driver"].items())
    versions = ", ".join(f"{name} {text}" for name, text in header["versions"].items())
    threads = f"threads {header['threads']}"
    facts = [header["date"], f"{header['description']} ({header['device']})", driver or threads, versions]
    return [COMMENT + "; ".join(facts), COMMENT + header["command"]]


class Run(NamedTuple):
    """What the comments of a CSV tell of one run."""

    date: str
    device: str
    conditions: str  # driver and clocks, or threads; empty where an older file has neither
    versions: str
    command: str
    remarks: tuple[str, ...] = ()  # the lines below its command


def runs_of(comments: Iterable[str]) -> list[Run]:
    """The runs that `header_lines` told of, and the remarks below each. What stands before the first run is of none."""
    runs: list[Run] = []
    lines = iter(line.removeprefix(COMMENT) for line in comments)
    for line in lines:
        facts = line.split("; ")
        if DATE.match(line) and len(facts) > 2:
            device, *conditions, versions = facts[1:]
            runs.append(Run(facts[0], device, "; ".join(conditions), versions, next(lines, "")))
        elif runs:
            runs[-1] = runs[-1]._replace(remarks=(*runs[-1].remarks, line))
    return runs


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(suite: str, kernel: str, rows: Sequence[Row]) -> str:
    """The last line of a suite, for one of our kernels. Rows without two times do not count.

    Where more is asked than our default beside torch, the line goes on: which kernel, and against the best of torch's
    backends alone; and where kernels were measured beside the default, its regret.
    """
    mine = [row for row in rows if row.own.name == kernel]
    text = f"suite={suite}" + counted("", [row.ratio() for row in mine])
    alone = all(row.own.name == DEFAULT and {peer.name for peer in row.peers} <= {"torch"} for row in rows)
    if not alone:
        text += f" kernel={kernel}" + counted("torch_", [row.torch_ratio for row in mine])
    lost = regrets(rows) if kernel == DEFAULT else {}
    return f"{text} regret={geomean(list(lost.values())):.3f} worst_regret={max(lost.values()):.3f}" if lost else text


def regrets(rows: Iterable[Row]) -> dict[Problem, float]:
    """The default's time over that of the fastest of our kernels by name, of each problem: 1 where it chose best."""
    times: dict[Problem, dict[str, float]] = {}
    for row in rows:
        if row.own.seconds is not None:
            times.setdefault(row.problem, {})[row.own.name] = row.own.seconds
    return {
        problem: own[DEFAULT] / min(own.values()) for problem, own in times.items() if DEFAULT in own and len(own) > 1
    }


def counted(name: str, ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    worst = min(known, default=math.nan)
    return f" {name}cells={len(known)} {name}geomean={geomean(known):.3f} {name}worst={worst:.3f}"


def write_json(path: Path, header: dict[str, Any], summaries: Sequence[str], rows: Sequence[Row]) -> None:
    """Rows as in the CSV, with every contestant's least and median time and spread."""
    records = [as_record(row, header["date"]) | {"timings": timings(row)} for row in rows]
    suites = ", ".join(dict.fromkeys(row.suite for row in rows))
    told = {"suite": suites, "summary": summaries[-1], "summaries": list(summaries)}
    path.write_text(json.dumps(header | told | {"rows": records}, indent=1) + "\n")


def timings(row: Row) -> dict[str, dict[str, Any]]:
    return {entry.name: entry.timing.as_dict() for entry in (row.own, *row.peers) if entry.timing is not None}


def as_record(row: Row, date: str = "") -> Record:
    """One row as the CSV has it. What it tells of each peer, as `peers` does, are name:value pairs joined by ";"."""
    problem, own = row.problem, row.own
    record = {"suite": row.suite, "problem": problem.label, "asked": own.name, "kernel": own.kernel, "date": date}
    record |= {"unit": problem.unit, "ms": milliseconds(own), "tflops_or_gbs": value(problem, own)}
    record |= {"our_error": short(own.error), "our_rms_error": short(own.rms_error), "our_bytes": whole(own.bytes)}
    record["note"] = own.reason or own.note
    best, best_torch = row.best(), row.best(TORCH_PEERS)
    if best is not None:
        record |= {"best_peer": best.name, "best_peer_value": value(problem, best), "peer_error": short(best.error)}
    if best_torch is not None:
        record |= {"best_torch": best_torch.name, "best_torch_value": value(problem, best_torch)}
    record |= {"ratio": short(row.ratio()), "torch_ratio": short(row.torch_ratio)}
    timed = [peer for peer in row.peers if peer.seconds is not None]
    record["peers"] = pairs((peer.name, milliseconds(peer)) for peer in timed)
    record["peer_errors"] = pairs((peer.name, short(peer.error)) for peer in timed)
    record["peer_rms_errors"] = pairs((peer.name, short(peer.rms_error)) for peer in timed)
    record["peer_bytes"] = pairs((peer.name, whole(peer.bytes)) for peer in timed)
    record["refused"] = pairs((peer.name, peer.reason) for peer in row.peers if peer.seconds is None)
    if own.timing is not None:
        record |= {"samples": str(len(own.timing.samples)), "spread": short(own.timing.spread)}
    return {name: record.get(name, "") for name in COLUMNS}


def milliseconds(entry: Entry) -> str:
    return "" if entry.seconds is None else f"{entry.seconds * 1e3:.5g}"


def value(problem: Problem, entry: Entry) -> str:
    return "" if entry.seconds is None else f"{problem.figure(entry.seconds):.5g}"


def short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def whole(number: int | None) -> str:
    return "" if number is None else str(number)


def pairs(items: Iterable[tuple[str, str]]) -> str:
    return ";".join(f"{name}:{text.replace(';', ',')}" for name, text in items if text)


def unpaired(text: str) -> dict[str, str]:
    return dict(item.split(":", 1) for item in text.split(";") if item)


def problem_of(record: Record) -> Problem | None:
    """The problem that a record was measured on; None where its suite no longer has it."""
    cells = (replace(p, deterministic=mode) for mode in (False, True) for p in SUITES.get(record["suite"], ()))
    return next((p for p in cells if p.label == record["problem"]), None)


class Table:
    """A CSV file that grows; with `merge` it keeps what the file holds and replaces what is measured again."""

    def __init__(self, path: Path, header: dict[str, Any], merge: bool = False) -> None:
        self.path, self.date = path, header["date"]
        lines, records = read(path) if merge and path.exists() else ([], [])
        self.lines = [*lines, *header_lines(header)]
        self.records = {tuple(record[name] for name in KEY): record for record in records}

    def add(self, rows: Sequence[Row]) -> None:
        """Writes the whole file anew beside the old one, which an interruption leaves as it was."""
        for row in rows:
            record = as_record(row, self.date)
            self.records[tuple(record[name] for name in KEY)] = record
        self.write("".join(line + "\n" for line in self.lines) + as_csv(self.records.values()))

    def remark(self, text: str) -> None:
        """A line of its own below this run's command, as the summary of a suite."""
        self.lines.append(COMMENT + text)
        self.add(())

    def write(self, text: str) -> None:
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).chmod(0o644)  # a temporary file is its owner's alone
        Path(name).replace(self.path)


def as_csv(records: Iterable[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read(path: Path) -> tuple[list[str], list[Record]]:
    """Comment lines and records, whose later columns are empty where an older file lacks them. Raises ValueError where
    it is no such file, and where the columns are not those of a contest."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not what sdpa bench --csv writes") from None
    comments = [line for line in lines if line.startswith(COMMENT)]
    reader = csv.DictReader(line for line in lines if not line.startswith(COMMENT))
    missing = [name for name in COLUMNS if name not in (*(reader.fieldnames or ()), *LATER)]
    if missing:
        raise ValueError(f"expected a CSV of `sdpa bench --csv`, got {str(path)!r} without the column {missing[0]}")
    records = [dict.fromkeys(LATER, "") | record for record in reader]
    for number, record in enumerate(records, 1):
        if None in (*record, *record.values()):
            raise ValueError(f"expected as many cells as columns, got others in row {number} of {str(path)!r}")
    return comments, records
