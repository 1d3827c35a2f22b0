"""Rows of contests as CSV: written anew after every problem, read back for plots, merged with earlier ones.

Lines that begin with "# " tell of each run its date, device, driver, clocks, versions and command.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from sdpa.bench.contest import Entry, Row
from sdpa.bench.peers import TORCH_PEERS
from sdpa.bench.problems import Problem
from sdpa.bench.suites import SUITES

COMMENT = "# "
COLUMNS = (
    "suite", "problem", "asked", "kernel", "ms", "tflops_or_gbs", "unit", "best_peer", "best_peer_value", "ratio",
    "best_torch", "best_torch_value", "torch_ratio", "our_error", "peer_error", "our_bytes", "peers", "peer_errors",
    "peer_bytes", "refused", "samples", "spread", "date", "note",
)  # fmt: skip
KEY = ("suite", "problem", "asked")  # a row measured again replaces the one with the same
Record = dict[str, str]


def as_record(row: Row, date: str = "") -> Record:
    """One row as text. Columns `peers`, `peer_errors` and `peer_bytes` are name:value pairs joined by ";"."""
    problem, own = row.problem, row.own
    record = {"suite": row.suite, "problem": problem.label, "asked": own.name, "kernel": own.kernel, "date": date}
    record |= {"unit": problem.unit, "ms": milliseconds(own), "tflops_or_gbs": value(problem, own)}
    record |= {"our_error": short(own.error), "our_bytes": whole(own.bytes), "note": own.reason or own.note}
    best, best_torch = row.best(), row.best(TORCH_PEERS)
    if best is not None:
        record |= {"best_peer": best.name, "best_peer_value": value(problem, best), "peer_error": short(best.error)}
    if best_torch is not None:
        record |= {"best_torch": best_torch.name, "best_torch_value": value(problem, best_torch)}
    record |= {"ratio": short(row.ratio()), "torch_ratio": short(row.torch_ratio)}
    timed = [peer for peer in row.peers if peer.seconds is not None]
    record["peers"] = pairs((peer.name, milliseconds(peer)) for peer in timed)
    record["peer_errors"] = pairs((peer.name, short(peer.error)) for peer in timed)
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
    return next((p for p in SUITES.get(record["suite"], ()) if p.label == record["problem"]), None)


def header_lines(header: dict) -> list[str]:
    """record.header in two lines."""
    driver = ", ".join(f"{name} {text}" for name, text in header["driver"].items())
    versions = ", ".join(f"{name} {text}" for name, text in header["versions"].items())
    facts = [header["date"], f"{header['description']} ({header['device']})", driver, versions]
    return [COMMENT + "; ".join(filter(None, facts)), COMMENT + header["command"]]


class Table:
    """A CSV file that grows; with `merge` it keeps what the file holds and replaces what is measured again."""

    def __init__(self, path: Path, header: dict, merge: bool = False) -> None:
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
    """Comment lines and records. Raises ValueError where the columns are not those of a contest."""
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith(COMMENT)]
    reader = csv.DictReader(line for line in lines if not line.startswith(COMMENT))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"expected a CSV of `sdpa bench --csv`, got {str(path)!r} without the column {missing[0]}")
    return comments, list(reader)
