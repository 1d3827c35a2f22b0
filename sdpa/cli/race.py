"""sdpa bench --race: the page of a run, or of CSVs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sdpa.bench import record
from sdpa.bench.contest import Row
from sdpa.bench.race import Source, read_source
from sdpa.bench.race_page import page


def write_page_of_run(path: Path, header: dict[str, Any], summaries: Sequence[str], rows: Sequence[Row]) -> None:
    comments = [*record.header_lines(header), *(record.COMMENT + text for text in summaries)]
    write(path, [Source("", comments, [record.as_record(row, header["date"]) for row in rows])])


def write_page_of_csvs(path: Path, files: Sequence[Path], suites: Sequence[str], only: str) -> None:
    """Of all rows, or of those of the suites and problems asked for. A file that is named twice counts once."""
    try:
        sources = [read_source(file) for file in dict.fromkeys(files)]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    held = list(dict.fromkeys(row["suite"] for source in sources for row in source.records))
    for suite in suites:
        if suite not in held:
            raise click.ClickException(f"expected a suite of the CSV, one of {', '.join(held)}, got {suite!r}")
    chosen = suites or held
    kept = [[row for row in s.records if row["suite"] in chosen and only in row["problem"]] for s in sources]
    if not any(kept):
        raise click.ClickException(f"no problem of suite {' or '.join(chosen)} contains {only!r}")
    write(path, [replace(source, records=rows) for source, rows in zip(sources, kept, strict=True)])


def write(path: Path, sources: Sequence[Source]) -> None:
    try:
        path.write_text(page(sources, record.command()), encoding="utf-8")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
