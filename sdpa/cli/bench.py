"""sdpa bench: a named suite beside torch, a row per problem as it is measured."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdpa.bench import record
from sdpa.bench.problems import SUITES, Problem
from sdpa.bench.run import PEERS, Options, Row, run_suite
from sdpa.cli.common import console, duration, progress, require_device, set_threads
from sdpa.dispatch.context import backend_name

FILE = click.Path(dir_okay=False, path_type=Path)
SLOWER = 0.9  # below this share of the peer's speed a cell is red
LINE = "{:<44} {:>9} {:>9} {:>7} {:>10}  {:<17} {}"


@click.command(short_help="Times a suite of problems beside torch.")
@click.option("--suite", metavar="NAME", help=f"One of {', '.join(SUITES)}.")
@click.option("--list", "list_suites", is_flag=True, help="Name the suites and their cells.")
@click.option("--only", default="", metavar="TEXT", help="Only problems whose line contains TEXT, e.g. 'bfloat16'.")
@click.option("--peer", type=click.Choice(PEERS), default="torch", show_default=True, help="In its default choice.")
@click.option("--kernel", help="Force ours; problems it cannot do are listed and not counted.")
@click.option("--repeat", type=click.IntRange(1), help="Rounds per problem, instead of a time limit.")
@click.option("--time-limit", type=click.FloatRange(0.0), default=1.0, show_default=True, help="Seconds per problem.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU; torch's own number by default.")
@click.option("--flush", is_flag=True, help="Cold caches before every call.")
@click.option("--device", metavar="DEVICE", help="Run the suite on another device than it names.")
@click.option("--json", "json_path", type=FILE, metavar="FILE", help="Write rows and header.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw GFLOP/s; needs matplotlib.")
def bench(suite, list_suites, only, peer, kernel, repeat, time_limit, threads, flush, device, json_path, plot) -> None:
    """Times our default choice beside torch's default choice, alternating in one run, after checking that both give the
    same result. ratio = peer / ours by the least time of each, above 1 means ours is faster; spread is the
    interquartile range over the median, ours/peer.

    Exit code 1 when a result is wrong or a problem raises.
    """
    if list_suites:
        show_suites(console())
        return
    problems = chosen_problems(suite, only, device)
    if kernel is not None:
        check_name(kernel)
    require_outputs(json_path, plot)
    set_threads(threads)
    out = console()
    out.print(describe_run(suite, problems[0].device), soft_wrap=True)
    titles = LINE.format("problem", "ours", peer, "ratio", "spread", "kernel", "peer's backend")
    out.print(titles, style="bold", soft_wrap=True)
    rows = run_and_show(problems, Options(peer, kernel, repeat, time_limit, flush), out)
    if json_path is not None:
        record.write_json(json_path, suite, problems[0].device, rows)
    if plot is not None:
        draw(plot, suite, rows)
    out.print(record.summary(suite, rows), soft_wrap=True)
    click.get_current_context().exit(1 if not any(row.ratio for row in rows) or any(row.error for row in rows) else 0)


def chosen_problems(suite: str | None, only: str, device: str | None) -> list[Problem]:
    known = ", ".join(SUITES)
    if suite is None:
        raise click.UsageError(f"expected --suite NAME, one of {known}")
    if suite not in SUITES:
        raise click.UsageError(f"unknown suite {suite!r}; known suites: {known}")
    problems = [problem for problem in SUITES[suite] if only in problem.label]
    if not problems:
        raise click.UsageError(f"no problem of suite {suite} contains {only!r}")
    if device is not None:
        require_device(device)
        problems = [replace(problem, device=device) for problem in problems]
    return problems


def check_name(kernel: str) -> None:
    try:
        backend_name(kernel)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def require_outputs(json_path: Path | None, plot: Path | None) -> None:
    """Told before minutes are spent and not after."""
    for path in (json_path, plot):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"expected a file in a folder that exists, got {str(path)!r}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'sdpa-kernels[cli]'")


def run_and_show(problems: list[Problem], options: Options, out: Console) -> list[Row]:
    rows = []
    with progress() as bar:
        task = bar.add_task("measuring", total=len(problems))
        for row in run_suite(problems, options):
            rows.append(row)
            out.print(line(row), soft_wrap=True)
            bar.advance(task)
    return rows


def line(row: Row) -> str:
    label = row.problem.label
    if row.error:
        return f"[red]{escape(f'{label:<44} {row.kernel} {row.error}')}"
    if row.skipped:
        return f"[yellow]{escape(f'{label:<44} cannot: {row.skipped}')}"
    spread = f"{row.ours.spread:.0%}/{row.peer.spread:.0%}"
    times = (duration(row.ours.minimum), duration(row.peer.minimum), f"{row.ratio:.3f}")
    text = escape(LINE.format(label, *times, spread, row.kernel, row.backend))
    return f"[red]{text}" if row.ratio < SLOWER else f"[green]{text}" if row.ratio > 1 / SLOWER else text


def describe_run(suite: str, device: str) -> str:
    facts = record.header(device)
    versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"suite {suite} on {facts['description']}, threads {facts['threads']}, {versions}"


def show_suites(out: Console) -> None:
    table = Table("suite", "cells", "dtypes", "first cell")
    for name, problems in SUITES.items():
        dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
        table.add_row(name, str(len(problems)), dtypes, problems[0].label)
    out.print(table)


def draw(path: Path, suite: str, rows: list[Row]) -> None:
    from sdpa.bench.plots import plot

    try:
        plot(path, suite, rows)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
