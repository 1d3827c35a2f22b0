"""sdpa bench where all peers take part: a line per kernel of ours as it is measured, CSV, JSON and pictures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from sdpa.bench import pool, record, warm
from sdpa.bench.contest import DEFAULT, OWN, DeviceLost, Entry, Options, Row, run_contest
from sdpa.bench.problems import Problem
from sdpa.bench.race import DEVICE_SECONDS
from sdpa.bench.table import Record, Table, as_record, header_lines, read
from sdpa.cli.common import console, duration, progress

if TYPE_CHECKING:
    from sdpa.cli.bench import Request

SLOWER = 0.95  # below this share of the best peer's speed a row is red
LINE = "{:<44} {:<18} {:>9} {:>8} {:<7} {:>7} {:>7}  {}"


def run_contests(request: Request, problems: dict[str, list[Problem]]) -> bool:
    """Measures, prints and writes; whether we had a time in every suite and no result of ours was wrong."""
    out, device = console(), next(iter(problems.values()))[0].device
    limit = DEVICE_SECONDS if request.time_limit is None else request.time_limit
    options = Options(request.kernels or (DEFAULT,), request.peers, request.repeat, limit)
    if device.startswith("cuda") and request.jobs != 0:
        options = replace(options, lost=compile_all(problems, options, request.jobs or pool.default_jobs(), out))
    header = record.contest_header(device)
    table = open_table(request, header)
    for text in header_lines(header):
        out.print(escape(text), soft_wrap=True)
    out.print(LINE.format("problem", "kernel", "time", "figure", "", "ratio", "torch", "peers"), style="bold")
    rows, summaries = [], []
    for suite, cells in problems.items():
        measured = run_and_show(suite, cells, options, table, out)
        rows += measured
        for kernel in options.kernels:
            text = record.contest_summary(suite, kernel, [row for row in measured if row.own.name == kernel])
            summaries.append(text)
            if table is not None:
                table.remark(text)
    records = [as_record(row, header["date"]) for row in rows]
    if request.json is not None:
        record.write_contest(request.json, header, summaries, records)
    if request.plot is not None:
        draw_records(request.plot, tuple(problems), records)
    for text in summaries:
        out.print(text, soft_wrap=True)
    timed = {row.suite for row in rows if row.own.seconds is not None}
    return timed == set(problems) and not any(row.own.failed for row in rows)


def compile_all(
    problems: dict[str, list[Problem]], options: Options, jobs: int, out: Console
) -> dict[tuple[Problem, str], str]:
    """What is about to be timed runs once in processes of their own, which fills the compilers' caches."""
    warm.use_no_helpers()
    chains = warm.entrants_of((problem for cells in problems.values() for problem in cells), options)
    begin = time.monotonic()
    with progress() as bar:
        task = bar.add_task("compiling", total=sum(map(len, chains)))
        lost = warm.warm_entrants(
            chains, jobs, lambda text: out.print(text, soft_wrap=True, markup=False), lambda: bar.advance(task)
        )
    out.print(f"compiled in {time.monotonic() - begin:.0f} s, {len(lost)} lost")
    return lost


def open_table(request: Request, header: dict) -> Table | None:
    if request.csv is None:
        return None
    try:
        return Table(request.csv, header, request.merge)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def run_and_show(
    suite: str, problems: Sequence[Problem], options: Options, table: Table | None, out: Console
) -> list[Row]:
    """A line per row as soon as it is there, in the table too: a run that is stopped leaves what it has."""
    measured: list[Row] = []
    with progress() as bar:
        task = bar.add_task(suite, total=len(problems))
        try:
            for rows in run_contest(suite, problems, options):
                measured += rows
                if table is not None:
                    table.add(rows)
                for row in rows:
                    out.print(line(row), soft_wrap=True)
                bar.advance(task)
        except DeviceLost as error:
            raise click.ClickException(str(error)) from None
    return measured


def line(row: Row) -> str:
    own, label = row.own, row.problem.label
    peers = " ".join(map(told, sorted(row.peers, key=lambda peer: peer.seconds or float("inf"))))
    if own.seconds is None:
        color = "red" if own.failed else "yellow"
        return f"[{color}]{escape(f'{label:<44} {own.name:<18} {own.reason}  {peers}')}"
    name = f"({own.kernel})" if own.name in (DEFAULT, OWN) else own.kernel
    ratio, torch_ratio = row.ratio(), row.torch_ratio
    ratios = ["" if number is None else f"{number:.3f}" for number in (ratio, torch_ratio)]
    figure = f"{row.problem.figure(own.seconds):.1f}"
    text = escape(LINE.format(label, name, duration(own.seconds), figure, row.problem.unit, *ratios, peers))
    if ratio is None:
        return text
    return f"[red]{text}" if ratio < SLOWER else f"[green]{text}" if ratio > 1 else text


def told(peer: Entry) -> str:
    return f"{peer.name}={duration(peer.seconds)}" if peer.seconds is not None else f"{peer.name}=no"


def records_of(path: Path) -> list[Record]:
    try:
        return read(path)[1]
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def draw_records(path: Path, suites: Sequence[str], records: Sequence[Record]) -> None:
    """One picture; of several suites one each, named after it."""
    from sdpa.bench.plots import plot_contest

    for suite in suites:
        file = path if len(suites) == 1 else path.with_stem(f"{path.stem}_{suite}")
        try:
            plot_contest(file, suite, records)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
