"""Rows of a run, or of CSVs of one device, as a race: sections, contests of a problem each, standings, what is slower.

Figures are compared inside of one run alone, as its date tells: peers are timed anew in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sdpa.bench.contest import DEFAULT
from sdpa.bench.peers import PEERS
from sdpa.bench.record import Record, Run, read, runs_of, unpaired
from sdpa.bench.suites import SUITES

# What a CSV's label has at its end for a forward that is timed with its backward (Problem.manner).
STEP = "parameter"
NUMBERS = ("ms", "tflops_or_gbs", "ratio", "torch_ratio", "our_error", "best_peer_value")  # columns, empty or a number


@dataclass(frozen=True)
class Source:
    """What one CSV holds, or one run has measured."""

    file: str  # empty where nothing was written
    comments: Sequence[str]
    records: Sequence[Record]


@dataclass(frozen=True)
class Contest:
    """A problem: our kernels beside the same peers, timed in turns. The default choice stands first."""

    rows: tuple[Record, ...]

    @property
    def problem(self) -> str:
        return self.rows[0]["problem"]

    @property
    def times(self) -> dict[str, str]:
        """Milliseconds of each peer that was timed."""
        return unpaired(self.rows[0]["peers"])

    @property
    def errors(self) -> dict[str, str]:
        return unpaired(self.rows[0]["peer_errors"])

    @property
    def refused(self) -> dict[str, str]:
        return unpaired(self.rows[0]["refused"])


@dataclass(frozen=True)
class Part:
    """The contests of one direction of a section."""

    direction: str
    contests: tuple[Contest, ...]

    @property
    def peers(self) -> list[str]:
        """Those that were timed somewhere here, in their usual order."""
        timed = {name for contest in self.contests for name in contest.times}
        return sorted(timed, key=lambda name: (list(PEERS).index(name) if name in PEERS else len(PEERS), name))


@dataclass(frozen=True)
class Standing:
    """How one of our kernels did in one part."""

    section: Section
    part: Part
    asked: str

    @cached_property
    def rows(self) -> list[Record]:
        return [row for contest in self.part.contests for row in contest.rows if row["asked"] == self.asked]

    @cached_property
    def ratios(self) -> list[float]:
        return ratios(self.rows)

    @cached_property
    def torch_ratios(self) -> list[float]:
        return ratios(self.rows, "torch_ratio")


@dataclass(frozen=True)
class Section:
    """One suite of one run."""

    suite: str
    run: Run
    file: str
    records: tuple[Record, ...]

    @cached_property
    def parts(self) -> list[Part]:
        found: dict[str, list[Contest]] = {}
        for contest in contests_of(self.records):
            found.setdefault(direction_of(contest.problem), []).append(contest)
        return [Part(direction, tuple(contests)) for direction, contests in found.items()]

    def standings(self) -> list[Standing]:
        """Of the default choice; of the kernels asked for by name where it was not measured."""
        told = []
        for part in self.parts:
            names = list(dict.fromkeys(row["asked"] for contest in part.contests for row in contest.rows))
            told += [Standing(self, part, name) for name in ([DEFAULT] if DEFAULT in names else names)]
        return told


def ratios(rows: Iterable[Record], column: str = "ratio") -> list[float]:
    """Of the rows that were compared."""
    return [float(row[column]) for row in rows if row[column]]


def direction_of(problem: str) -> str:
    """By the last word of its label, as "backward+bmhd+deterministic"."""
    direction, *manner = problem.rsplit(" ", 1)[-1].split("+")
    named = "training step" if STEP in manner else direction
    return f"{named}, deterministic" if "deterministic" in manner else named


def contests_of(records: Iterable[Record]) -> list[Contest]:
    """Rows of the same problem and the same times of peers are one contest."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["problem"], record["peers"]), []).append(record)
    return [Contest(tuple(sorted(rows, key=lambda row: row["asked"] != DEFAULT))) for rows in found.values()]


def read_source(path: Path) -> Source:
    """Raises ValueError where a CSV has no rows, or rows that no run has written."""
    comments, records = read(path)
    if not records:
        raise ValueError(f"expected a CSV of `sdpa bench --csv`, got {str(path)!r} without rows")
    for number, record in enumerate(records, 1):
        if fault := fault_of(record):
            raise ValueError(f"{fault} in row {number} of {str(path)!r}")
    return Source(path.as_posix(), comments, records)


def fault_of(record: Record) -> str:
    """What is wrong with a row; empty where nothing is."""
    try:
        paired = {column: unpaired(record[column]) for column in ("peers", "peer_errors", "refused")}
    except ValueError:
        return "expected name:value pairs joined by ';' as peers, peer_errors and refused, got others"
    numbers = [(name, record[name]) for name in NUMBERS if record[name]]
    numbers += [(column, text) for column in ("peers", "peer_errors") for text in paired[column].values()]
    for name, text in numbers:
        if not is_number(text, zero="error" in name):
            return f"expected a number, got {text!r} as {name}"
    if record["best_peer"] and record["best_peer"] not in paired["peers"]:
        return f"expected the time of best_peer {record['best_peer']!r}, got none"
    return ""


def is_number(text: str, zero: bool) -> bool:
    """Finite and above 0, of which an error may be."""
    try:
        number = float(text)
    except ValueError:
        return False
    return math.isfinite(number) and (number > 0 or (zero and number == 0))


def sections_of(sources: Iterable[Source]) -> list[Section]:
    """In the order of the suites, the older run first. Raises ValueError where there are two devices, or no rows."""
    found: list[Section] = []
    for source in sources:
        runs = {run.date: run for run in runs_of(source.comments)}
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in source.records:
            groups.setdefault((record["suite"], record["date"]), []).append(record)
        for (suite, date), records in groups.items():
            run = runs.get(date) or Run(date, "a device that the file does not name", "", "", "")
            found.append(Section(suite, run, source.file, tuple(records)))
    if not found:
        raise ValueError("expected rows, got none of these suites and problems")
    devices = list(dict.fromkeys(section.run.device for section in found))
    if len(devices) > 1:
        raise ValueError(f"expected rows of one device, got {devices[0]} and {devices[1]}")
    known = list(SUITES)
    place = {suite: number for number, suite in enumerate(known)}
    return sorted(found, key=lambda section: (place.get(section.suite, len(known)), section.run.date))


def standings_of(sections: Iterable[Section]) -> list[Standing]:
    return [standing for section in sections for standing in section.standings()]


def slower_rows(standings: Iterable[Standing]) -> list[tuple[Section, Record]]:
    """What is slower than the best peer, the slowest first."""
    rows = [(standing.section, row) for standing in standings for row in standing.rows if row["ratio"]]
    return sorted(((s, row) for s, row in rows if float(row["ratio"]) < 1), key=lambda pair: float(pair[1]["ratio"]))


def overall(standings: Iterable[Standing]) -> list[float]:
    """The ratios of all cells that were compared."""
    return [ratio for standing in standings for ratio in standing.ratios]
