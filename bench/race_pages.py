"""python -m sdpa.bench.race_pages: the pages of docs/race/ and their index, out of the CSVs of bench/results/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sdpa.bench.contest import DEFAULT
from sdpa.bench.race import Source, Standing, overall, read_source, sections_of, standings_of
from sdpa.bench.race_page import page
from sdpa.bench.record import geomean

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FOLDER = "bench/results", "docs/race"
# A page, and the CSVs of its device.
PAGES = {
    "nvidia_h200": ("nvidia_h200", "nvidia_h200_fa4", "nvidia_h200_dropout", "nvidia_h200_small_training"),
    "nvidia_h100": ("nvidia_h100_fa4",),
    "amd_zen5": ("amd_zen5", "amd_zen5_overhead"),
    "amd_zen4": ("amd_zen4",),
    "intel_sapphire_rapids": ("intel_sapphire_rapids", "intel_sapphire_rapids_peers"),
}
INDEX = "README.md"
HEAD = """# Races
Each page compares our kernels with their peers on one device, problem by problem: standings, what is slower than the
best peer, charts, times, errors, reasons, versions, and the commands that measure it again. A page is one file of HTML
without scripts. GitHub shows its source: open it in a browser.

The geomean is our speed over the best peer's; *slower* counts the cells below 1. The first three figures are of the
default choice, the last three of kernels that were asked for by name where the default choice was not measured. A
problem that several runs measured counts once for each.

| device | suites | cells | geomean | slower | by name: cells | geomean | slower |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
`make pages` writes all of this anew, out of `bench/results/`. `sdpa bench --suite NAME --race PAGE.html` writes the
page of a run of yours, and `--from-csv FILE` instead of a suite that of a CSV.
"""


def made() -> dict[str, str]:
    """Every file of the folder by its name."""
    files, rows = {}, []
    for name, tables in PAGES.items():
        paths = [f"{RESULTS}/{table}.csv" for table in tables]
        sources = [replace(read_source(ROOT / path), file=path) for path in paths]
        command = " ".join(["sdpa bench --race", f"{FOLDER}/{name}.html", *(f"--from-csv {path}" for path in paths)])
        files[f"{name}.html"] = page(sources, command)
        rows.append(index_row(name, sources))
    return files | {INDEX: HEAD + "".join(rows) + TAIL}


def index_row(name: str, sources: Sequence[Source]) -> str:
    sections = sections_of(sources)
    standings = standings_of(sections)
    suites = ", ".join(dict.fromkeys(section.suite for section in sections))
    default = figures(standing for standing in standings if standing.asked == DEFAULT)
    by_name = figures(standing for standing in standings if standing.asked != DEFAULT)
    return f"| [{sections[0].run.device}]({name}.html) | {suites} | {default} | {by_name} |\n"


def figures(standings: Iterable[Standing]) -> str:
    known = overall(standings)
    if not known:
        return " |  | "
    return f"{len(known)} | {geomean(known):.3f} | {sum(ratio < 1 for ratio in known)}"


def main() -> None:
    folder = ROOT / FOLDER
    folder.mkdir(exist_ok=True)
    for name, text in made().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{FOLDER}/{name}: {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
