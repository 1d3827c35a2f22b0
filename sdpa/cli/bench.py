"""sdpa bench: named suites beside torch, a row per problem as it is measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdpa.bench import record
from sdpa.bench.contest import DEFAULT, OWN
from sdpa.bench.models import models
from sdpa.bench.peers import PEERS
from sdpa.bench.problems import Problem
from sdpa.bench.run import Options, Row, run_suite
from sdpa.bench.suites import GPU_SUITES, SUITES
from sdpa.cli.common import console, duration, progress, require_device, set_threads
from sdpa.cli.contest import draw_records, records_of, run_contests
from sdpa.cli.models import SUITE as MODELS
from sdpa.cli.models import Files, draw_json, run_models
from sdpa.dispatch.context import backend_name

FILE = click.Path(dir_okay=False, path_type=Path)
SLOWER = 0.9  # below this share of the peer's speed a cell is red
CPU_SECONDS = 1.0  # per problem
LINE = "{:<44} {:>9} {:>9} {:>7} {:>10}  {:<17} {}"


@dataclass(frozen=True)
class Request:
    """What the options ask for."""

    suites: tuple[str, ...]
    only: str
    peers: tuple[str, ...]
    kernels: tuple[str, ...]
    repeat: int | None
    time_limit: float | None
    flush: bool
    device: str | None
    jobs: int | None
    json: Path | None
    csv: Path | None
    merge: bool
    plot: Path | None
    from_csv: Path | None
    from_json: Path | None

    def is_contest(self, problem: Problem) -> bool:
        """Whether all peers take part, and not only torch's default choice beside ours."""
        asked = len(self.kernels) > 1 or {DEFAULT, OWN} & set(self.kernels) or self.csv or set(self.peers) - {"torch"}
        return bool(asked) or problem.device.startswith("cuda") or any(suite in GPU_SUITES for suite in self.suites)


@click.command(short_help="Times suites of problems beside torch and others.")
@click.option("--suite", "suites", multiple=True, metavar="NAME", help=f"Repeatable: {', '.join(SUITES)}; or {MODELS}.")
@click.option("--list", "list_suites", is_flag=True, help="Name the suites and their cells.")
@click.option("--only", "--cells", default="", metavar="TEXT", help="Only problems whose line contains TEXT.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Repeatable; all by default.")
@click.option("--kernel", "kernels", multiple=True, help="Repeatable; 'default', or 'triton' for our best.")
@click.option("--repeat", type=click.IntRange(1), help="Rounds per problem, instead of a time limit.")
@click.option(
    "--time-limit", type=click.FloatRange(0.0), help="Seconds: 1 a problem, 0.25 a GPU's contestant, 5 a model."
)
@click.option("--threads", type=click.IntRange(1), help="Of the CPU; torch's own number by default.")
@click.option("--flush", is_flag=True, help="On a CPU, cold caches before every call; on a GPU they always are.")
@click.option("--device", metavar="DEVICE", help="Run suites on another device than they name.")
@click.option("--jobs", type=click.IntRange(0), help="Processes that compile on a GPU; the cores but two by default.")
@click.option("--json", type=FILE, metavar="FILE", help="Write rows and header.")
@click.option("--csv", type=FILE, metavar="FILE", help="Write rows beside all peers, as they are measured.")
@click.option("--merge", is_flag=True, help="Keep what the CSV holds, but for cells that are measured again.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw it; of several suites each adds its name to FILE's.")
@click.option("--from-csv", type=FILE, metavar="FILE", help="Draw what a CSV holds, and measure nothing.")
@click.option("--from-json", type=FILE, metavar="FILE", help=f"The same of what suite {MODELS} wrote by --json.")
def bench(list_suites: bool, threads: int | None, **options) -> None:
    """Times us beside torch, alternating in one run, after checking results.

    On a CPU: our default choice beside torch's, by the least time. ratio = peer / ours, above 1 means ours is faster;
    spread is the interquartile range over the median, ours/peer. On a GPU, and with --csv or several kernels: each of
    our kernels beside every backend of torch, FlexAttention and FlashAttention-4, by the median on cold caches; what
    raises or is wrong is not timed.

    Exit code 1 when a result of ours is wrong or raises.
    """
    if list_suites:
        show_suites(console())
        return
    request = Request(**options)
    require_outputs(request)
    if request.from_csv is not None:
        draw_csv(request)
        return
    if request.from_json is not None:
        draw_json(request.from_json, request.only, request.plot)
        return
    if MODELS in request.suites:
        set_threads(threads)
        click.get_current_context().exit(0 if bench_models(request) else 1)
    problems = chosen_problems(request)
    for kernel in request.kernels:
        check_name(kernel)
    set_threads(threads)
    contests = request.is_contest(next(iter(problems.values()))[0])
    well = run_contests(request, problems) if contests else run_beside_torch(request, problems)
    click.get_current_context().exit(0 if well else 1)


def bench_models(request: Request) -> bool:
    """The suite of whole models, which has rows of its own; whether all went well."""
    if len(request.suites) > 1 or request.kernels or request.csv:
        raise click.UsageError(
            f"suite {MODELS} runs alone, with --only, --device, --repeat, --time-limit, --json, --plot"
        )
    files = Files(request.json, request.plot)
    return run_models(request.device or "cpu", request.only, request.repeat, request.time_limit, files)


def chosen_problems(request: Request) -> dict[str, list[Problem]]:
    """The problems asked for by suite, without suites of which none is."""
    known = ", ".join((*SUITES, MODELS))
    if not request.suites:
        raise click.UsageError(f"expected --suite NAME, one of {known}")
    chosen = {}
    for suite in request.suites:
        if suite not in SUITES:
            raise click.UsageError(f"unknown suite {suite!r}; known suites: {known}")
        problems = [problem for problem in SUITES[suite] if request.only in problem.label]
        if problems:
            chosen[suite] = [replace(p, device=request.device) if request.device else p for p in problems]
    if not chosen:
        suites = " or ".join(request.suites)
        raise click.UsageError(f"no problem of suite {suites} contains {request.only!r}")
    for device in {problem.device for problems in chosen.values() for problem in problems}:
        require_device(device)
    return chosen


def check_name(kernel: str) -> None:
    try:
        if kernel not in (DEFAULT, OWN):
            backend_name(kernel)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def require_outputs(request: Request) -> None:
    """Told before minutes are spent and not after."""
    for path in (request.json, request.csv, request.plot):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"expected a file in a folder that exists, got {str(path)!r}")
    if request.merge and request.csv is None:
        raise click.UsageError("--merge needs --csv FILE")
    for name, source in (("--from-csv", request.from_csv), ("--from-json", request.from_json)):
        if source is not None and request.plot is None:
            raise click.UsageError(f"{name} needs --plot FILE")
    if request.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'sdpa-kernels[cli]'")


def draw_csv(request: Request) -> None:
    """A picture of each suite asked for, or of all that the CSV holds."""
    records = records_of(request.from_csv)
    suites = request.suites or tuple(dict.fromkeys(record["suite"] for record in records))
    draw_records(request.plot, suites, [record for record in records if request.only in record["problem"]])


def run_beside_torch(request: Request, problems: dict[str, list[Problem]]) -> bool:
    """Whether every suite had a time and no error."""
    out, well = console(), True
    limit = CPU_SECONDS if request.time_limit is None else request.time_limit
    options = Options("torch", next(iter(request.kernels), None), request.repeat, limit, request.flush)
    measured = {}
    for suite, cells in problems.items():
        out.print(describe_run(suite, cells[0].device), soft_wrap=True)
        titles = LINE.format("problem", "ours", "torch", "ratio", "spread", "kernel", "peer's backend")
        out.print(titles, style="bold", soft_wrap=True)
        measured[suite] = run_and_show(cells, options, out)
        if request.plot is not None:
            draw(own_file(request.plot, suite, len(problems)), suite, measured[suite])
        if request.json is not None:
            record.write_json(own_file(request.json, suite, len(problems)), suite, cells[0].device, measured[suite])
        out.print(record.summary(suite, measured[suite]), soft_wrap=True)
        well = well and any(row.ratio for row in measured[suite]) and not any(row.error for row in measured[suite])
    return well


def own_file(path: Path, suite: str, suites: int) -> Path:
    return path if suites == 1 else path.with_stem(f"{path.stem}_{suite}")


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
    table = Table("suite", "cells", "device", "dtypes", "first cell")
    for name, problems in SUITES.items():
        dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
        table.add_row(name, str(len(problems)), problems[0].device, dtypes, problems[0].label)
    whole = models("cpu")
    table.add_row(MODELS, str(len(whole)), "--device", "float32, bfloat16", whole[0].label)
    out.print(table)


def draw(path: Path, suite: str, rows: Sequence[Row]) -> None:
    from sdpa.bench.plots import plot

    try:
        plot(path, suite, rows)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
